"""The ring collectives: order, rounding, counts, and the seam between one process and many."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from helpers import Recorder, apart, bits
from zerosim.comm import Comm
from zerosim.counts import EventKind, Phase, Traffic
from zerosim.ledger import Ledger
from zerosim.worlds.local import LocalRing

FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WORLDS = (1, 2, 3, 4, 7, 33)
DTYPES = [(FP32, FP32), (FP16, FP32), (FP16, FP16), (BF16, FP32), (BF16, BF16)]  # of the buffer, of the wire
CHUNK = 5

worlds = pytest.mark.parametrize("n", WORLDS)
dtypes = pytest.mark.parametrize(("band", "wire"), DTYPES, ids=lambda dtype: dtype.name)


class Witness(LocalRing):
    """A local ring that looks on at every hop."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.scratch: Recorder | None = None
        self.held: list[int] = []  # blocks held at each hop
        self.blocks: list[Any] = []  # what was handed over
        self.arrived: list[Any] = []

    def shift(self, block: Any, spare: Any) -> Any:
        assert self.scratch is not None
        self.held.append(len(self.scratch.live))
        assert any(block is live for live in self.scratch.live)
        assert any(spare is live for live in self.scratch.live)
        assert not np.shares_memory(block, spare)
        arrived = super().shift(block, spare)
        self.blocks.append(block)
        self.arrived.append(arrived)
        return arrived


class Local(NamedTuple):
    """A Comm over the ring of one process, and what it reports to."""

    comm: Comm
    ledger: Ledger
    scratch: Recorder
    ring: Witness


def local(n: int, wire: Any = FP32) -> Local:
    ring, ledger = Witness(n), Ledger(n)
    ring.scratch = scratch = Recorder(n, wire)
    return Local(Comm(ring, wire, scratch, ledger), ledger, scratch, ring)


def counter(ledger: Ledger, collective: str, band: str = "grads") -> Traffic:
    """The counter of a collective that ran before any step, found through a second, empty one."""
    with ledger.sending(collective, band, "") as traffic:
        return traffic


def mixed(n: int, band: Any, chunk: int = CHUNK) -> Any:
    """A buffer for each rank, of mixed magnitudes, so that the order of a sum shows; column 0 is minus zero."""
    rng = np.random.default_rng(n)
    data = rng.standard_normal((n, n * chunk)) * 2.0 ** rng.integers(-3, 4, (n, n * chunk))
    data[:, 0] = -0.0
    return data.astype(band)


def assert_same_bits(got: Any, expected: Any) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(bits(got), bits(expected))


def descending(chunk: int, n: int) -> list[int]:
    """The order of the ring: the rank below the owner first, the owner last."""
    return [(chunk - distance) % n for distance in range(1, n + 1)]


def ascending(chunk: int, n: int) -> list[int]:
    return [(chunk + distance) % n for distance in range(1, n + 1)]


def by_rank(chunk: int, n: int) -> list[int]:
    return list(range(n))


def reduced(data: Any, wire: Any, scale: float, order: Any = descending) -> Any:
    """The sum over ranks times ``scale``, [N*C], scalar by scalar."""
    return _reduced(data.tobytes(), data.shape, data.dtype, wire, scale, order).copy()


@cache  # the same is asked of several collectives, and it is slow
def _reduced(content: bytes, shape: tuple[int, int], dtype: Any, wire: Any, scale: float, order: Any) -> Any:
    data = np.frombuffer(content, dtype).reshape(shape)
    n, length = data.shape
    chunk, result = length // n, np.empty(length, data.dtype)
    for column in range(length):
        first, *rest = order(column // chunk, n)
        total = wire.type(data[first, column])
        for rank in rest:
            total = wire.type(float(total) + float(wire.type(data[rank, column])))  # exact, then rounded once
        result[column] = data.dtype.type(np.float32(total) * np.float32(scale))
    return result


def own_chunks(row: Any, n: int) -> Any:
    """[N*C] as one chunk for each rank, [N, C]."""
    return row.reshape(n, -1)


# -- what the collectives compute


@worlds
@pytest.mark.parametrize(("band", "wire"), [*DTYPES, (FP32, FP16)], ids=lambda dtype: dtype.name)
def test_reduce_scatter_sums_in_the_rings_order(n: int, band: Any, wire: Any) -> None:
    """Chunk c is ((x[c-1] + x[c-2]) + ...) + x[c], rounded to the wire at each hop, then scaled in fp32."""
    data = mixed(n, band)
    out = np.full((n, CHUNK), np.nan, band)
    local(n, wire).comm.reduce_scatter(data.copy(), out, data.shape[1], scale=1 / n, band="grads", unit="")
    assert_same_bits(out, own_chunks(reduced(data, wire, 1 / n), n))


@pytest.mark.parametrize("band", [FP16, FP32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("n", "chunk"), [(5, 6_553), (3, 22_013)])
def test_large_chunks_are_summed_in_the_rings_order(n: int, chunk: int, band: Any) -> None:
    """The bits are the ring's as well where only some of a rank's chunks, or one, fit into a register at a time."""
    data = mixed(n, band, chunk)
    out = np.full((n, chunk), np.nan, band)
    local(n).comm.reduce_scatter(data.copy(), out, data.shape[1], scale=1 / n, band="grads", unit="")
    some = data.reshape(n, n, chunk)[:, :, ::97].reshape(n, -1)  # the scalar loop is slow
    assert_same_bits(out[:, ::97], own_chunks(reduced(some, FP32, 1 / n), n))


@worlds
@dtypes
def test_all_reduce_leaves_every_rank_with_the_rings_sum(n: int, band: Any, wire: Any) -> None:
    """After an all-reduce all ranks hold, bit for bit, what the scalar loop says."""
    data = mixed(n, band)
    buffer = data.copy()
    local(n, wire).comm.all_reduce(buffer, data.shape[1], scale=1 / n, band="grads", unit="")
    assert_same_bits(buffer, np.tile(reduced(data, wire, 1 / n), (n, 1)))


@worlds
@dtypes
def test_all_reduce_is_reduce_scatter_then_all_gather(n: int, band: Any, wire: Any) -> None:
    """The two halves, run by hand on a copy, give the bits of the whole."""
    whole, halves, comm = mixed(n, band), mixed(n, band), local(n, wire).comm
    size = whole.shape[1]
    comm.all_reduce(whole, size, scale=1 / n, band="grads", unit="")
    comm.reduce_scatter(halves, comm.own(halves), size, scale=1 / n, band="grads", unit="")
    comm.all_gather(halves, size, band="grads", unit="")
    assert_same_bits(whole, halves)


@worlds
def test_scaling_is_done_in_fp32_and_rounded_once(n: int) -> None:
    """Fp16 sums past fp16's largest number come back in range when the wire is fp32 and the scale is 1/N."""
    large = float(np.finfo(np.float16).max)
    out = np.zeros((n, CHUNK), FP16)
    local(n).comm.reduce_scatter(
        np.full((n, n * CHUNK), large, FP16), out, n * CHUNK, scale=1 / n, band="grads", unit=""
    )
    np.testing.assert_array_equal(out, large)


def test_an_average_is_scaled_in_fp32_and_then_rounded() -> None:
    """Three of six ranks hold fp16's least number; in fp32 the average is a tie, which rounds to even, that is to 0.

    In more than fp32 it is a little over a tie, as 1/6 is rounded up, and would round to the least number.
    """
    buffer = np.zeros((6, 6), FP16)
    buffer[:3] = 2.0**-24
    local(6, FP16).comm.all_reduce(buffer, 6, scale=1 / 6, band="grads", unit="")
    assert float(np.float32(3 * 2.0**-24) * np.float32(1 / 6)) == 2.0**-25
    assert not buffer.any()


@worlds
@dtypes
def test_reduce_scatter_leaves_the_buffer_alone(n: int, band: Any, wire: Any) -> None:
    """With the result going elsewhere, no bit of the buffer changes."""
    data = mixed(n, band)
    buffer = data.copy()
    local(n, wire).comm.reduce_scatter(
        buffer, np.empty((n, CHUNK), band), n * CHUNK, scale=1 / n, band="grads", unit=""
    )
    assert_same_bits(buffer, data)


@worlds
@dtypes
def test_reduce_scatter_in_place_changes_the_owned_chunks_only(n: int, band: Any, wire: Any) -> None:
    """With the owned chunk of the buffer as its result, rank r's row changes in chunk r and nowhere else."""
    data = mixed(n, band)
    buffer, comm = data.copy(), local(n, wire).comm
    comm.reduce_scatter(buffer, comm.own(buffer), n * CHUNK, scale=1 / n, band="grads", unit="")
    expected = data.reshape(n, n, CHUNK)
    expected[np.arange(n), np.arange(n)] = own_chunks(reduced(data, wire, 1 / n), n)
    assert_same_bits(buffer, expected.reshape(n, -1))


@worlds
@dtypes
def test_all_gather_places_every_chunk(n: int, band: Any, wire: Any) -> None:
    """Every rank ends with chunk c as rank c had it, whatever was in the buffer before."""
    whole = mixed(n, band)[-1]
    buffer = np.full((n, n * CHUNK), np.nan, band)
    local(n, wire).comm.all_gather(buffer, n * CHUNK, own_chunks(whole, n), band="params", unit="")
    assert_same_bits(buffer, np.tile(whole, (n, 1)))


@worlds
@dtypes
def test_all_gather_in_place_reads_the_owned_chunks(n: int, band: Any, wire: Any) -> None:
    """Without shards of its own an all-gather spreads the chunk that each rank owns in the buffer."""
    data = mixed(n, band)
    buffer = data.copy()
    local(n, wire).comm.all_gather(buffer, n * CHUNK, band="params", unit="")
    diagonal = data.reshape(n, n, CHUNK)[np.arange(n), np.arange(n)]
    assert_same_bits(buffer, np.tile(diagonal.reshape(-1), (n, 1)))


@worlds
def test_gathered_bits_are_those_that_travelled(n: int) -> None:
    """When the wire is narrower than the buffer, the owner keeps its bits and the others get the rounded ones."""
    whole = mixed(n, FP32)[0]
    buffer = np.zeros((n, n * CHUNK), FP32)
    local(n, FP16).comm.all_gather(buffer, n * CHUNK, own_chunks(whole, n), band="params", unit="")
    expected = np.tile(whole.astype(FP16).astype(FP32), (n, 1)).reshape(n, n, CHUNK)
    expected[np.arange(n), np.arange(n)] = own_chunks(whole, n)
    assert_same_bits(buffer, expected.reshape(n, -1))


@pytest.mark.parametrize(
    ("n", "order", "shows"),
    [
        (2, by_rank, False),
        (2, ascending, False),
        (3, by_rank, True),
        (3, ascending, False),
        (4, by_rank, True),
        (4, ascending, True),
        (33, by_rank, True),
        (33, ascending, True),
    ],
)
def test_another_order_of_summation_shows(n: int, order: Any, shows: bool) -> None:
    """From N = 4 on, a sum in rank order or in ascending order differs in some bits; with fewer it need not."""
    chunk = 53
    data = mixed(n, FP32, chunk)
    out = np.empty((n, chunk), FP32)
    local(n).comm.reduce_scatter(data, out, n * chunk, scale=1.0, band="grads", unit="")
    differing = np.count_nonzero(bits(out).ravel() != bits(reduced(data, FP32, 1.0, order)))
    assert bool(differing) is shows


@pytest.mark.parametrize("n", [4, 7])
@pytest.mark.parametrize("wire", [FP16, BF16], ids=lambda dtype: dtype.name)
def test_rounding_at_every_hop_shows(n: int, wire: Any) -> None:
    """A sum that rounds to a narrow wire only at the end has other bits than the ring's."""
    chunk = 53
    data = mixed(n, wire, chunk)
    out = np.empty((n, chunk), wire)
    local(n, wire).comm.reduce_scatter(data, out, n * chunk, scale=1.0, band="grads", unit="")
    assert (bits(out).ravel() != bits(reduced(data, FP32, 1.0))).any()


# -- what the collectives count


@pytest.mark.parametrize("n", [1, 2, 3, 7, 33])
@dtypes
@pytest.mark.parametrize(("collective", "hops"), [("all-reduce", 2), ("reduce-scatter", 1), ("all-gather", 1)], ids=str)
def test_a_hop_counts_its_block(n: int, band: Any, wire: Any, collective: str, hops: int) -> None:
    """Each rank sends and receives N-1 blocks of a chunk in the wire's dtype, twice for an all-reduce."""
    comm, ledger, _, ring = local(n, wire)
    run(comm, collective, mixed(n, band), n * CHUNK)
    traffic = counter(ledger, collective)
    assert traffic.messages == len(ring.blocks) == hops * (n - 1)
    assert traffic.sent.tolist() == [hops * (n - 1) * CHUNK * wire.itemsize] * n
    assert traffic.received.tolist() == traffic.sent.tolist()
    assert traffic.padding.tolist() == [0] * n


def run(comm: Comm, collective: str, buffer: Any, size: int, band: str = "grads", unit: str = "") -> None:
    """Run one collective in place, on the buffer of every rank of the process."""
    if collective == "all-reduce":
        comm.all_reduce(buffer, size, scale=1 / comm.ring.size, band=band, unit=unit)
    elif collective == "reduce-scatter":
        comm.reduce_scatter(buffer, comm.own(buffer), size, scale=1 / comm.ring.size, band=band, unit=unit)
    else:
        comm.all_gather(buffer, size, band=band, unit=unit)


@pytest.mark.parametrize("collective", ["all-reduce", "reduce-scatter", "all-gather"])
def test_traffic_is_booked_by_collective_and_band(collective: str) -> None:
    """Two bands through the same collective have a counter each, and no other counter exists."""
    n, small, large = 3, 2, 11
    comm, ledger, *_ = local(n)
    times = 2 if collective == "all-reduce" else 1
    with ledger.step() as report:
        run(comm, collective, mixed(n, FP16, small), n * small, "grads")
        run(comm, collective, mixed(n, FP16, large), n * large, "params")
    assert {key: traffic.sent.tolist() for key, traffic in report.traffic.items()} == {
        (collective, "grads"): [times * (n - 1) * small * 4] * n,
        (collective, "params"): [times * (n - 1) * large * 4] * n,
    }


@pytest.mark.parametrize("collective", ["reduce-scatter", "all-gather"])
def test_a_collective_is_one_entry_of_the_log(collective: str) -> None:
    """The log has one entry for a collective, with its unit and the bytes of all its hops, as communication."""
    n = 5
    comm, ledger, *_ = local(n)
    with ledger.step() as report, ledger.during(Phase.BACKWARD):
        run(comm, collective, mixed(n, FP32), n * CHUNK, unit="a layer")
    [event] = report.events
    assert event[:4] == (EventKind.SEND, collective, "a layer", (n - 1) * CHUNK * 4)
    assert event.phase is Phase.COMMUNICATION


# -- the blocks


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@dtypes
@pytest.mark.parametrize("collective", ["reduce-scatter", "all-gather"])
def test_two_blocks_are_held_while_a_collective_runs(n: int, band: Any, wire: Any, collective: str) -> None:
    """A collective holds one block going and one coming, under its unit, at every hop, and gives both back."""
    comm, _, scratch, ring = local(n, wire)
    run(comm, collective, mixed(n, band), n * CHUNK, unit="a layer")
    assert [(each.what, each.held, each.unit) for each in scratch.log] == [(*each, "a layer") for each in BRACKET]
    assert ring.held == [2] * (n - 1)
    assert {(block.shape, block.dtype) for block in ring.blocks} <= {((n, CHUNK), wire)}


BRACKET = [("hold", 1), ("hold", 2), ("free", 1), ("free", 0)]


def test_an_all_reduce_holds_two_blocks_at_a_time() -> None:
    """The two halves of an all-reduce take their blocks in turn, so it never holds more than two."""
    comm, _, scratch, ring = local(4)
    run(comm, "all-reduce", mixed(4, FP32), 4 * CHUNK)
    assert [(each.what, each.held) for each in scratch.log] == BRACKET * 2
    assert ring.held == [2] * (2 * (4 - 1))


@pytest.mark.parametrize("collective", ["all-reduce", "reduce-scatter", "all-gather"])
def test_blocks_are_given_back_when_a_hop_fails(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that breaks in mid-flight leaves no block held, and its error reaches the caller."""
    comm, _, scratch, ring = local(4)

    def broken(block: Any, spare: Any) -> Any:
        raise ConnectionError("rank 3 is gone")

    monkeypatch.setattr(ring, "shift", broken)
    with pytest.raises(ConnectionError, match="rank 3 is gone"):
        run(comm, collective, mixed(4, FP32), 4 * CHUNK)
    assert scratch.live == []
    assert [(each.what, each.held) for each in scratch.log] == BRACKET


@pytest.mark.parametrize("n", [2, 3, 7])
def test_an_arriving_block_cannot_be_written(n: int) -> None:
    """In one process a block arrives as a read-only view of what was sent; writing to it is refused."""
    comm, _, _, ring = local(n)
    run(comm, "all-reduce", mixed(n, FP32), n * CHUNK)
    assert len(ring.arrived) == 2 * (n - 1)
    assert [block.flags.writeable for block in ring.arrived] == [False] * (2 * (n - 1))
    assert all(np.shares_memory(came, went) for came, went in zip(ring.arrived, ring.blocks, strict=True))
    with pytest.raises(ValueError, match="read-only"):
        ring.arrived[0][...] = 0


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("collective", ["all-reduce", "all-gather"])
def test_ranks_do_not_share_memory(n: int, collective: str) -> None:
    """What one rank writes into its result reaches no other rank, nor the blocks that brought it."""
    comm, _, _, ring = local(n)
    buffer = ring.empty((n, n * CHUNK), FP32)
    buffer[...] = mixed(n, FP32)
    run(comm, collective, buffer, n * CHUNK)
    expected = buffer.copy()
    expected[0] = 13
    buffer[0] = 13
    assert_same_bits(buffer, expected)
    assert not any(np.shares_memory(buffer, block) for block in ring.blocks)


@worlds
def test_the_owned_chunk_is_a_view(n: int) -> None:
    """``own`` gives chunk r of rank r's row, and writing to it writes to the buffer."""
    buffer = np.arange(n * n * CHUNK, dtype=np.float32).reshape(n, n * CHUNK)
    own = local(n).comm.own(buffer)
    expected = [[rank * n * CHUNK + rank * CHUNK + column for column in range(CHUNK)] for rank in range(n)]
    assert own.tolist() == expected
    assert np.shares_memory(own, buffer)


@worlds
def test_chunks_meet_the_rows_that_stand_for_them(n: int) -> None:
    """At hop t the local ring pairs rank r's chunk (r + t) mod N with row (r + t) mod N of a block in flight."""
    table = np.arange(n * n)  # one element per chunk; rank r's chunk c has the value r*n + c
    met = [
        {int(chunk[0]): int(row) for rows, part in LocalRing(n).chunks(table.reshape(n, n), hop)
         for row, chunk in zip(np.arange(n)[rows], part, strict=True)}
        for hop in range(n + 1)
    ]  # fmt: skip
    assert met == [{rank * n + (rank + hop) % n: (rank + hop) % n for rank in range(n)} for hop in range(n + 1)]


@pytest.mark.parametrize("collective", ["all-reduce", "reduce-scatter", "all-gather"])
def test_a_buffer_is_never_copied_in_silence(collective: str) -> None:
    """A buffer whose rows do not lie end to end is refused: the local ring would write into a copy."""
    n = 3
    with pytest.raises(ValueError, match="copy"):
        run(local(n).comm, collective, np.zeros((n, n * CHUNK + 1), FP32)[:, :-1], n * CHUNK)


# -- the same collectives with one process per rank


class Outcome(NamedTuple):
    """What one world made of a collective: every rank's buffer, and its counts."""

    buffer: Any
    sent: list[int]
    received: list[int]
    padding: list[int]
    messages: list[int]
    handed: list[list[Any]]  # by rank, where each rank has a ring of its own


def in_one_process(collective: str, data: Any, wire: Any, size: int) -> Outcome:
    comm, ledger, *_ = local(len(data), wire)
    buffer = data.copy()
    run(comm, collective, buffer, size)
    count = counter(ledger, collective)
    return Outcome(
        buffer, count.sent.tolist(), count.received.tolist(), count.padding.tolist(), [count.messages] * len(data), []
    )


def in_processes_of_their_own(collective: str, data: Any, wire: Any, size: int) -> Outcome:
    """One thread per rank, each with a ring, a ledger, blocks and a Comm of its own."""
    n = len(data)
    rings = apart(n)

    def rank(index: int) -> tuple[Any, Traffic, list[Any]]:
        ring, ledger, scratch = rings[index], Ledger(1), Recorder(1, wire)
        buffer = data[index : index + 1].copy()
        run(Comm(ring, wire, scratch, ledger), collective, buffer, size)
        assert scratch.live == []
        return buffer, counter(ledger, collective), ring.handed

    with ThreadPoolExecutor(n) as pool:
        results = list(pool.map(rank, range(n)))
    counts = [count for _, count, _ in results]
    return Outcome(
        np.concatenate([buffer for buffer, _, _ in results]),
        [int(count.sent[0]) for count in counts],
        [int(count.received[0]) for count in counts],
        [int(count.padding[0]) for count in counts],
        [count.messages for count in counts],
        [handed for _, _, handed in results],
    )


@pytest.mark.parametrize("n", [1, 2, 3, 7, 12])
@pytest.mark.parametrize(("band", "wire"), [DTYPES[0], DTYPES[1], DTYPES[4]], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("collective", ["all-reduce", "reduce-scatter", "all-gather"])
def test_one_rank_per_process_gives_the_same_bits_and_counts(n: int, band: Any, wire: Any, collective: str) -> None:
    """The same Comm over rings of one rank each, in lockstep, ends with the bits and counts of the local ring."""
    size = n * CHUNK - min(n, 7) + 1
    data = mixed(n, band)
    data[:, size:] = 0
    together = in_one_process(collective, data, wire, size)
    apart = in_processes_of_their_own(collective, data, wire, size)
    assert_same_bits(apart.buffer, together.buffer)
    assert apart[1:5] == together[1:5]


# World sizes and logical lengths: no padding, some, whole chunks of it, and fewer parameters than ranks.
PADDED = [(1, 5), (2, 9), (3, 7), (5, 25), (7, 8), (7, 3), (12, 2)]


@pytest.mark.parametrize(("n", "size"), PADDED)
@pytest.mark.parametrize("wire", [FP32, FP16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("collective", ["all-reduce", "reduce-scatter", "all-gather"])
def test_padding_sent_is_counted_where_it_is_padding(n: int, size: int, wire: Any, collective: str) -> None:
    """With ones for padding and zeros for the rest, the ones that a rank hands over are the padding counted."""
    chunk = -(-size // n)
    data = np.zeros((n, n * chunk), FP32)
    data[:, size:] = 1
    apart = in_processes_of_their_own(collective, data, wire, size)
    nonzero = [sum(np.count_nonzero(block) for block in blocks) for blocks in apart.handed]
    assert apart.padding == [count * wire.itemsize for count in nonzero]
    assert apart.sent == [sum(block.nbytes for block in blocks) for blocks in apart.handed]
    assert in_one_process(collective, data, wire, size).padding == apart.padding
