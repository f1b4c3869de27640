"""Collectives handed over whole: the same bits, another layout, other temporaries."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.bands import INT8, Band
from zerosim.comm import Comm
from zerosim.ledger import Ledger
from zerosim.model import MLP
from zerosim.ranks import Ranks, Workspace
from zerosim.schemes import SCHEMES, Stage
from zerosim.util import int8
from zerosim.worlds.gloo import MAX_SEGMENT, segments
from zerosim.worlds.local import LocalRing
from zerosim.worlds.native import LocalCollectives, Native, aligned

FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    (FP32, FP32),
    (FP16, FP32),
    (FP16, FP16),
    (BF16, FP32),
    (BF16, BF16),
]  # of the buffer, of the wire
worlds = pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
dtypes = pytest.mark.parametrize(("band", "wire"), DTYPES, ids=lambda dtype: dtype.name)
CHUNK = 5


def bits(array: Any) -> Any:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def draw(n: int, band: Any) -> Any:
    """A buffer for each rank, of mixed magnitudes, so that the order of a sum shows."""
    rng = np.random.default_rng(n)
    shape = n, n * CHUNK
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(band)


def comm(kind: type[Comm], n: int, band: Any, wire: Any) -> tuple[Comm, Ledger]:
    """Collectives of N ranks in this process, and their ledger."""
    ring = LocalCollectives(n) if kind is Native else LocalRing(n)
    ledger = Ledger(n)
    ranks = Ranks(ring.ids, {Band.BLOCKS: wire}, ledger, ring.empty)
    return kind(ring, wire, Workspace(ranks, Band.BLOCKS), ledger), ledger


def all_reduce(on: Comm, buffer: Any) -> Any:
    on.all_reduce(buffer, buffer.shape[1], scale=1 / on.ring.size, band="grads", unit="")
    return buffer


def reduce_scatter(on: Comm, buffer: Any) -> Any:
    out = np.zeros((len(buffer), CHUNK), buffer.dtype)
    on.reduce_scatter(buffer, out, buffer.shape[1], scale=1 / on.ring.size, band="grads", unit="")
    return np.concatenate([buffer, out], axis=1)


def reduce_scatter_in_place(on: Comm, buffer: Any) -> Any:
    on.reduce_scatter(buffer, on.own(buffer), buffer.shape[1], scale=1 / on.ring.size, band="grads", unit="")
    return buffer


def all_gather(on: Comm, buffer: Any) -> Any:
    own = buffer[:, 1 : 1 + CHUNK].copy()
    on.all_gather(buffer, buffer.shape[1], own, band="params", unit="")
    return buffer


def all_gather_in_place(on: Comm, buffer: Any) -> Any:
    on.all_gather(buffer, buffer.shape[1], band="params", unit="")
    return buffer


@worlds
@dtypes
@pytest.mark.parametrize(
    "collective", [all_reduce, reduce_scatter, reduce_scatter_in_place, all_gather, all_gather_in_place]
)
def test_a_library_gives_the_rings_bits(n: int, band: Any, wire: Any, collective: Callable[[Comm, Any], Any]) -> None:
    """Handed over whole or hop by hop, a collective changes the same elements to the same bits on every rank."""
    whole, hop_by_hop = (collective(comm(kind, n, band, wire)[0], draw(n, band)) for kind in (Native, Comm))
    np.testing.assert_array_equal(bits(whole), bits(hop_by_hop))


@worlds
@pytest.mark.parametrize("collective", [all_gather, all_gather_in_place])
def test_an_owner_keeps_its_bits(n: int, collective: Callable[[Comm, Any], Any]) -> None:
    """When the wire is narrower than the buffer the others get rounded bits, and the owner keeps its own."""
    whole, hop_by_hop = (collective(comm(kind, n, FP32, FP16)[0], draw(n, FP32)) for kind in (Native, Comm))
    np.testing.assert_array_equal(bits(whole), bits(hop_by_hop))
    assert (whole != whole[0]).any()


@worlds
@pytest.mark.parametrize("band", [FP32, FP16, BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("collective", [all_gather, all_gather_in_place])
def test_int8_is_the_same_to_everybody(n: int, band: Any, collective: Callable[[Comm, Any], Any]) -> None:
    """Handed over whole or hop by hop, every rank has what the packed chunk comes to, its owner too."""
    whole, hop_by_hop = (collective(comm(kind, n, band, INT8)[0], draw(n, band)) for kind in (Native, Comm))
    np.testing.assert_array_equal(bits(whole), bits(hop_by_hop))
    np.testing.assert_array_equal(bits(whole), np.broadcast_to(bits(whole[0]), whole.shape))


@worlds
@pytest.mark.parametrize("chunk", [7, 256, 257, 600])
def test_int8_counts_scales_and_padding(n: int, chunk: int) -> None:
    """N-1 messages' worth, scales included; of padding the bytes and the scales that its numbers alone need."""
    size = n * chunk - chunk // 2 - 1  # the last chunk is more than half padding
    counted = []
    for kind in (Native, Comm):
        on, ledger = comm(kind, n, FP32, INT8)
        with ledger.step() as report:
            on.all_gather(np.ones((n, n * chunk), FP32), size, band="params", unit="")
        [traffic] = report.traffic.values()
        assert traffic.sent.tolist() == traffic.received.tolist() == [(n - 1) * int8.length(chunk)] * n
        counted.append(int(traffic.padding.sum()))
    kept = chunk - chunk // 2 - 1
    assert counted == [(n - 1) * (int8.length(chunk) - int8.length(kept))] * 2


@worlds
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_scheme_trains_alike_on_either(n: int, scheme: Stage) -> None:
    """After two steps all states have the same bits; what rests is the same, and what all sent, padding left out."""
    model = MLP((7, 11, 5))
    rng = np.random.default_rng(3)
    batch = [(rng.standard_normal((2, 7)).astype(FP32), rng.standard_normal((2, 5)).astype(FP32)) for _ in range(n)]
    one, other = scheme(model, n), scheme(model, n, ring=LocalCollectives(n), collectives=Native)
    for _ in range(2):
        assert one.step(batch) == other.step(batch)
    for mine, theirs in zip(one.buckets, other.buckets, strict=True):
        for band, state in mine.states.items():
            np.testing.assert_array_equal(bits(state), bits(theirs.states[band]))
    assert one.reports[-1].resident == other.reports[-1].resident
    for key, traffic in one.reports[-1].traffic.items():
        handed = other.reports[-1].traffic[key]
        assert (handed.sent - handed.padding).sum() == (traffic.sent - traffic.padding).sum()


# -- the layout


@given(chunk=st.integers(1, 4 * MAX_SEGMENT), size=st.integers(2, 9), itemsize=st.sampled_from([2, 4]))
def test_the_librarys_chunks_end_where_the_ranks_do(chunk: int, size: int, itemsize: int) -> None:
    """A padded buffer of N chunks is a whole number of equal segments, the same number for each rank."""
    length = aligned(chunk, size, itemsize)
    cut = segments(size * length, itemsize, size)[0] // size
    # As gloo computes them: how many segments, how long, and how many to a chunk.
    total = size * length * itemsize
    number = -(-max(-(-total // MAX_SEGMENT), 2 * size) // size) * size
    longest = -(-total // number)
    segment = -(-longest // itemsize) * itemsize
    assert number == cut * size
    assert segment * number == total
    assert number // size * segment == length * itemsize
    assert chunk <= length < chunk + cut


def test_a_chunk_that_is_a_whole_number_of_segments_is_not_padded() -> None:
    """Two segments to a chunk: an even chunk stays as it is, and an odd one gets one element more."""
    assert [aligned(chunk, 4, 4) for chunk in (1, 2, 7, 8)] == [2, 2, 8, 8]


# -- what it counts and holds


@worlds
@dtypes
@pytest.mark.parametrize(("collective", "times"), [(all_reduce, 2), (reduce_scatter, 1), (all_gather, 1)])
def test_what_is_for_others_is_counted(
    n: int, band: Any, wire: Any, collective: Callable[[Comm, Any], Any], times: int
) -> None:
    """N-1 chunks as they are handed over, each way, twice for an all-reduce; the layout's padding is told apart."""
    on, ledger = comm(Native, n, band, wire)
    with ledger.step() as report:
        collective(on, draw(n, band))
    [traffic] = report.traffic.values()
    length = CHUNK if collective is all_gather else CHUNK + 1
    assert traffic.sent.tolist() == traffic.received.tolist() == [times * (n - 1) * length * wire.itemsize] * n
    assert traffic.padding.tolist() == [times * (n - 1) * (length - CHUNK) * wire.itemsize] * n
    assert traffic.messages == times


@worlds
@dtypes
def test_the_temporary_is_held(n: int, band: Any, wire: Any) -> None:
    """While a collective runs a rank holds the padded buffer and one chunk in the wire's dtype, and then nothing."""
    for collective, length in ((all_reduce, CHUNK + 1), (reduce_scatter, CHUNK + 1), (all_gather, CHUNK)):
        on, ledger = comm(Native, n, band, wire)
        with ledger.step() as report:
            collective(on, draw(n, band))
        assert report.peak.by_band == {Band.BLOCKS: (n + 1) * length * wire.itemsize}
        assert ledger.total == 0


def test_a_ring_without_collectives_is_refused() -> None:
    """The error names the ring and says what to use."""
    with pytest.raises(TypeError, match=r"Native\(ring\).*got LocalRing. Use LocalCollectives"):
        Native(LocalRing(3), FP32, Workspace(Ranks(range(3), {}, Ledger(3), np.empty), Band.BLOCKS), Ledger(3))
