"""The simulator against real ranks: every number, on both kinds of collectives; and checks that can fail."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from zerosim.bands import Band
from zerosim.real_ranks import corroborate
from zerosim.real_ranks.cases import cases
from zerosim.real_ranks.launch import ForkServer, Group
from zerosim.records import real_ranks as corroborate_records
from zerosim.records.files import ResultsError
from zerosim.records.real_ranks import COLLECTIVES, EXTRA_HOP, Corroboration, Fault, Flow, RankRecord, Run, Settings
from zerosim.stages import SCHEMES, Stage
from zerosim.worlds.gloo import HEADER

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="real ranks need torch: pip install 'zerosim[torch]'"
)
counted = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this platform has no /proc/self/io")

FOUR, FIVE = 4, 5  # with 4 every layer divides, with 5 none does
TIMEOUT = 60.0
MINE = Stage("mine", optimizer=True, grads=True)
WIDTHS = [64, 128, 128, 64]
N_PARAMS = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 64 + 64


def settings(
    ranks: int, precisions: list[str], fault: Fault | None = None, rows: Sequence[Stage] = SCHEMES
) -> Settings:
    return Settings(
        ranks=ranks, steps=2, batch=3, seed=7, model_seed=0, widths=WIDTHS, collectives=list(COLLECTIVES),
        precisions=precisions, wire="fp32", backend="gloo", fault=fault, rows=list(rows),
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def run(server: ForkServer, asked: Settings) -> Corroboration:
    with Group(server, asked.ranks) as group:
        return corroborate.on(group, corroborate.jobs(group, asked, TIMEOUT), lambda doing: None, TIMEOUT)


@pytest.fixture(scope="module")
def four(server: ForkServer) -> Corroboration:
    return run(server, settings(FOUR, list(corroborate_records.RECIPES)))


@pytest.fixture(scope="module")
def five(server: ForkServer) -> Corroboration:
    return run(server, settings(FIVE, ["mixed"], rows=[*SCHEMES, MINE]))


@pytest.fixture(params=["four", "five"])
def found(request: pytest.FixtureRequest) -> Corroboration:
    """Once on 4 ranks in every precision, and once on 5 in mixed precision, with a row that is not built in."""
    record = request.getfixturevalue(request.param)
    assert isinstance(record, Corroboration)
    return record


def flows(record: Corroboration) -> Iterator[tuple[Run, RankRecord, str, Flow]]:
    for each in record.runs:
        for rank in each.ranks:
            yield each, rank, "sent", rank.sent
            yield each, rank, "received", rank.received


# -- what was found


def test_everything_is_equal(found: Corroboration) -> None:
    """All schemes run to the end on both kinds of collectives in each precision, on every rank, and nothing fails."""
    assert [str(failure) for failure in found.failures] == []
    assert found.complete, found.ended
    asked = found.settings
    expected = [(case.row, case.collectives, case.precision) for case in cases(asked)]
    assert len(expected) == len(asked.rows) * 2 * len(asked.precisions)
    assert [(each.row, each.collectives, each.precision) for each in found.runs] == expected
    for each in found.runs:
        assert each.complete
        assert [rank.rank for rank in each.ranks] == list(range(asked.ranks))
        assert len(each.times) == len(each.losses) == asked.steps


def test_every_bit_of_every_rank_is_compared(found: Corroboration) -> None:
    """0 elements differ, of all that the ranks hold of the four states, padding included, in each of two steps."""
    n = found.settings.ranks
    chunk = sum(-(-(a * b + b) // n) for a, b in pairwise(WIDTHS))
    for each in found.runs:
        bands = [Band.PARAMS, *([Band.MASTER] if each.precision != "fp32" else []), Band.EXP_AVG, Band.EXP_AVG_SQ]
        assert each.compared == {band: 2 * n * chunk * (1 if each.row.shards(band) else n) for band in bands}
        assert set(each.differing.values()) == {0}
        assert each.losses == each.losses_simulated


@counted
def test_no_byte_is_unexplained(found: Corroboration) -> None:
    """On every rank and in every step both meters of the kernel read payload plus framing, sent and received."""
    assert found.unmeasured == {}
    for each, rank, way, flow in flows(found):
        explained = [moved + framing for moved, framing in zip(flow.moved, flow.framing, strict=True)]
        meters = {"process", "sockets"} if way == "sent" else {"sockets"}
        assert flow.kernel == dict.fromkeys(meters, explained), (each.scheme, each.collectives, rank.rank, way)
        assert all(explained)


def test_simulator_ledger_and_calls_to_torch_agree(found: Corroboration) -> None:
    """The simulator's count, the rank's ledger and the log beside the calls to torch are the same, step by step."""
    for _, _, _, flow in flows(found):
        assert flow.simulated == flow.booked == flow.handed
        assert all(flow.handed)


def test_gloos_reduce_scatter_costs_an_all_reduce(four: Corroboration) -> None:
    """In units of P (N-1)/N the schemes are to send 2, 2, 2 and 3, and with torch's collectives send 2, 3, 3 and 4."""
    unit = 4 * N_PARAMS * (FOUR - 1) // FOUR
    handed = {"data parallel": 2, "ZeRO-1": 2, "ZeRO-2": 2, "ZeRO-3": 3}
    moved = {"ring": handed, "native": {"data parallel": 2, "ZeRO-1": 3, "ZeRO-2": 3, "ZeRO-3": 4}}
    for each, _, _, flow in flows(four):
        assert flow.handed == [handed[each.scheme] * unit] * 2
        assert flow.moved == [moved[each.collectives][each.scheme] * unit] * 2


def test_ranks_hold_what_the_simulator_says(found: Corroboration) -> None:
    """Band by band, at rest and at the peak; and the process has more than that."""
    for each in found.runs:
        for rank in each.ranks:
            assert (rank.resident, rank.peak) == (each.resident, each.peak)
            assert rank.rss > sum(rank.peak.values())


def test_native_collectives_hold_a_copy_of_the_buffer(four: Corroboration) -> None:
    """At the peak of data parallel the ring holds two chunks of the largest layer, and native collectives N + 1."""
    chunk = 4 * (128 * 128 + 128) // FOUR
    for each in four.runs:
        if each.scheme == "data parallel":
            assert each.peak[Band.BLOCKS] == (2 if each.collectives == "ring" else FOUR + 1) * chunk


def test_times_are_told_apart(found: Corroboration) -> None:
    """Compute and communication are positive and add up to the step."""
    for each in found.runs:
        for time in each.times:
            assert min(time.compute, time.communication) > 0
            assert time.compute + time.communication == pytest.approx(time.total)


def test_only_loopback_is_used(found: Corroboration) -> None:
    """The ranks' TCP connections have one address, 127.0.0.1; and gloo sums in the ring's order."""
    assert found.addresses == ["127.0.0.1"]
    assert found.order == "ring"


def test_the_record_is_written_and_read(four: Corroboration, tmp_path: Path) -> None:
    """What is read is what was written; another schema, half a file and no file are refused with the reason."""
    path = tmp_path / "corroborate.json"
    corroborate_records.save(four, path)
    assert corroborate_records.load(path) == four
    path.write_bytes(path.read_bytes().replace(b"zerosim.corroborate/2", b"zerosim.corroborate/0"))
    with pytest.raises(ResultsError, match=r"its schema is 'zerosim\.corroborate/0'"):
        corroborate_records.load(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ResultsError, match="not a whole record"):
        corroborate_records.load(path)
    with pytest.raises(ResultsError, match="cannot be read"):
        corroborate_records.load(tmp_path / "absent.json")


# -- the checks can fail


def test_one_flipped_bit_is_found(server: ForkServer) -> None:
    """A parameter that is off by its lowest bit on one rank fails the check of bits, there and nowhere else."""
    record = run(server, settings(FOUR, ["mixed"], Fault(kind="bit", rank=2, step=2)))
    assert record.complete
    assert len(record.failures) == len(record.runs)
    for each, failure in zip(record.runs, record.failures, strict=True):
        assert (failure.check, failure.step, failure.rank) == ("bits", 2, 2)
        assert failure.quantity == "params of layer 1, 1 elements, the first of them 0"
        assert each.differing == {"params": 1, "master": 0, "exp_avg": 0, "exp_avg_sq": 0}


@counted
def test_one_hop_sent_twice_is_found(server: ForkServer) -> None:
    """Bytes that nobody booked fail the check of bytes by both meters, on the two ranks that they concern, no other."""
    record = run(server, settings(FOUR, ["mixed"], Fault(kind="hop", rank=2, step=2)))
    assert record.complete
    payload, source, destination = EXTRA_HOP, 2 * HEADER, HEADER
    for each in record.runs:
        for rank in each.ranks:
            sent = {2: payload + source, 1: destination}.get(rank.rank, 0)
            received = {1: payload + source, 2: destination}.get(rank.rank, 0)
            for flow, extra in ((rank.sent, sent), (rank.received, received)):
                for counts in flow.kernel.values():
                    assert [c - m - f for c, m, f in zip(counts, flow.moved, flow.framing, strict=True)] == [0, extra]
    assert {failure.check for failure in record.failures} == {"bytes"}
    assert {(failure.step, failure.rank) for failure in record.failures} == {(2, 1), (2, 2)}
    assert len(record.failures) == len(record.runs) * 2 * 3
