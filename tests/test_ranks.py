"""What ranks hold: allocation, its limits, and the reading views."""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zerosim.bands import FP16, FP32, PRECISIONS, WIRES, Band
from zerosim.counts import Phase
from zerosim.ledger import Ledger
from zerosim.ranks import OutOfMemory, Rank, Ranks, Workspace


def make(
    ids: Sequence[int] = range(3), precision: str = "mixed", wire: str = "fp32", capacity: int | None = None
) -> Ranks:
    dtypes = PRECISIONS[precision].dtypes(WIRES[wire])
    return Ranks(ids, dtypes, Ledger(len(ids), apart=[Band.ACTIVATIONS]), np.empty, capacity)


# -- hold and free

BYTES = {
    "mixed": {"params": 2, "grads": 2, "gathered params": 2, "second params": 2, "unreduced grads": 2},
    "bf16": {"params": 2, "grads": 2, "gathered params": 2, "second params": 2, "unreduced grads": 2},
    "fp32": {"params": 4, "grads": 4, "gathered params": 4, "second params": 4, "unreduced grads": 4},
}
ALWAYS = {
    "main grads": 4,
    "master": 4,
    "exp_avg": 4,
    "exp_avg_sq": 4,
    "momentum": 4,
    "activations": 4,
    "buffers": 4,
    "scalars": 4,
    "optimizer scales": 4,
    "checkpoint": 1,
}


@pytest.mark.parametrize("band", list(Band))
@pytest.mark.parametrize(
    ("precision", "wire", "block"),
    [("mixed", "fp32", 4), ("mixed", "fp16", 2), ("bf16", "bf16", 2), ("fp32", "fp32", 4)],
)
def test_hold_gives_the_bands_dtype(band: Band, precision: str, wire: str, block: int) -> None:
    """An array of a band has that band's width whatever the caller is used to, and the ledger is told its bytes."""
    ranks = make(precision=precision, wire=wire)
    array = ranks.hold(band, (7, 5))
    sent = {"ring blocks": block, "partial grads": block}
    itemsize = (BYTES[precision] | ALWAYS | sent | {"gradient bucket": BYTES[precision]["grads"]})[band]
    assert (array.shape, array.dtype.itemsize) == ((3, 7, 5), itemsize)
    assert ranks.ledger.held == {band: 7 * 5 * itemsize}


@pytest.mark.parametrize(
    ("precision", "working"), [("mixed", np.float16), ("bf16", ml_dtypes.bfloat16), ("fp32", np.float32)]
)
def test_the_working_copy_is_what_the_precision_says(precision: str, working: Any) -> None:
    """Parameters and gradients, gathered and unreduced ones too, are all in the recipe's working dtype."""
    ranks = make(precision=precision)
    bands = (Band.PARAMS, Band.GRADS, Band.GATHERED, Band.UNREDUCED)
    assert {ranks.hold(band, (2,)).dtype for band in bands} == {np.dtype(working)}


def test_a_band_counts_one_ranks_bytes() -> None:
    """However many ranks live here, the ledger counts the bytes of one; none is shared with another."""
    ranks = make(range(5))
    array = ranks.hold(Band.MASTER, (11,), "a layer")
    assert ranks.ledger.total == array.nbytes // 5 == 4 * 11
    array[...] = 0
    array[1] = 7
    assert array.sum(axis=1).tolist() == [0, 7 * 11, 0, 0, 0]


def test_free_gives_the_bytes_back() -> None:
    """What is freed leaves the ledger and the ranks; what is not stays."""
    ranks = make()
    keep, drop = ranks.hold(Band.GRADS, (7,)), ranks.hold(Band.GRADS, (11,))
    ranks.free(drop)
    assert ranks.ledger.held == {Band.GRADS: 2 * 7}
    assert [array is keep for _, _, array in ranks.live()] == [True]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda array: array[:], id="a view of it all"),
        pytest.param(lambda array: array[0], id="a row"),
        pytest.param(lambda array: array.copy(), id="a copy"),
        pytest.param(lambda array: np.zeros((3, 7), np.float32), id="a stranger"),
    ],
)
def test_free_takes_only_what_hold_returned(other: Any) -> None:
    """A view, a copy or a foreign array is refused with its shape, and nothing changes."""
    ranks = make()
    array = ranks.hold(Band.MASTER, (7,))
    wrong = other(array)
    with pytest.raises(ValueError, match=r"Ranks\.free takes an array that hold returned") as refusal:
        ranks.free(wrong)
    assert str(wrong.shape) in str(refusal.value)
    assert ranks.ledger.held == {Band.MASTER: 4 * 7}


def test_free_takes_an_array_once() -> None:
    """A second free of the same array is refused, and the ledger does not go below what is held."""
    ranks = make()
    array = ranks.hold(Band.MASTER, (7,))
    ranks.free(array)
    with pytest.raises(ValueError, match="only once"):
        ranks.free(array)
    assert ranks.ledger.total == 0


def test_another_worlds_array_is_foreign() -> None:
    """An array that other ranks hold is not these ranks' to free."""
    here, there = make(), make()
    array = there.hold(Band.MASTER, (7,))
    with pytest.raises(ValueError, match="still held"):
        here.free(array)
    assert (here.ledger.total, there.ledger.total) == (0, 4 * 7)


def test_live_lists_what_is_held_in_order() -> None:
    """``live`` yields band, unit and array in order of allocation, and can be asked for one band."""
    ranks = make()
    first = ranks.hold(Band.PARAMS, (2,), "layer 1")
    second = ranks.hold(Band.GRADS, (2,), "layer 1")
    third = ranks.hold(Band.PARAMS, (3,), "layer 2")
    every = [(Band.PARAMS, "layer 1", first), (Band.GRADS, "layer 1", second), (Band.PARAMS, "layer 2", third)]
    assert [(band, unit, id(array)) for band, unit, array in ranks.live()] == [(b, u, id(a)) for b, u, a in every]
    assert [unit for _, unit, _ in ranks.live(Band.PARAMS)] == ["layer 1", "layer 2"]


def test_live_can_be_freed_while_it_is_read() -> None:
    """Freeing everything that ``live`` yields, as it yields it, leaves nothing."""
    ranks = make()
    for length in (2, 3, 5):
        ranks.hold(Band.GATHERED, (length,))
    for _, _, array in ranks.live():
        ranks.free(array)
    assert (list(ranks.live()), ranks.ledger.total) == ([], 0)


def test_what_is_held_is_held_once() -> None:
    """However memory is given back and asked for again, no two arrays held at a time share any."""
    ranks = make()
    for array in [ranks.hold(Band.EXP_AVG, (7,)) for _ in range(3)]:
        ranks.free(array)
    held = [ranks.hold(Band.EXP_AVG_SQ, (7,)) for _ in range(4)]
    for number, array in enumerate(held):
        array[...] = number
    assert [np.unique(array).tolist() for array in held] == [[0], [1], [2], [3]]
    assert ranks.ledger.held == {Band.EXP_AVG: 0, Band.EXP_AVG_SQ: 4 * 4 * 7}


@pytest.mark.parametrize(
    ("band", "shape"), [(Band.GRADS, (6,)), (Band.MASTER, (6,)), (Band.MASTER, (2, 3)), (Band.PARAMS, (6, 1))]
)
def test_memory_held_again_has_the_shape_and_dtype_asked(band: Band, shape: tuple[int, ...]) -> None:
    """After an fp16 array of six is given back, the next is what is asked for, whatever its length or bytes."""
    ranks = make()
    ranks.free(ranks.hold(Band.PARAMS, (6,)))
    array = ranks.hold(band, shape)
    assert (array.shape, array.dtype) == ((3, *shape), ranks.dtypes[band])


# -- the card's limit


def test_a_card_can_be_filled_to_the_last_byte() -> None:
    """A hold of exactly what is free passes."""
    ranks = make(capacity=4 * 7 + 2 * 11)
    ranks.hold(Band.MASTER, (7,))
    ranks.hold(Band.GRADS, (11,))
    assert ranks.ledger.total == 4 * 7 + 2 * 11


@pytest.mark.parametrize("shape", [(11,), (1, 11), (11, 1)])
def test_one_byte_too_few_is_out_of_memory(shape: tuple[int, ...]) -> None:
    """With one byte less the same hold fails, nothing is allocated, and the ledger stands as it was."""
    ranks = make(capacity=4 * 7 + 2 * 11 - 1)
    master = ranks.hold(Band.MASTER, (7,))
    before = ranks.ledger.peak()
    with pytest.raises(OutOfMemory):
        ranks.hold(Band.GRADS, shape)
    assert [array is master for _, _, array in ranks.live()] == [True]
    assert (ranks.ledger.held, ranks.ledger.total) == ({Band.MASTER: 4 * 7}, 4 * 7)
    assert ranks.ledger.peak() == before


def test_out_of_memory_comes_before_the_allocation() -> None:
    """The limit is checked before an array is made, so that what does not fit is never asked of this machine."""
    made: list[tuple[int, ...]] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(shape)
        return np.empty(shape, dtype)

    ranks = Ranks(range(2), {Band.MASTER: FP32}, Ledger(2), empty, 4 * 7)
    with pytest.raises(OutOfMemory):
        ranks.hold(Band.MASTER, (10**15,))
    ranks.hold(Band.MASTER, (7,))
    assert made == [(2, 7)]


def test_freed_memory_can_be_held_again() -> None:
    """The limit is on what is held, not on what has been."""
    ranks = make(capacity=4 * 7)
    for _ in range(3):
        ranks.free(ranks.hold(Band.MASTER, (7,)))
    assert ranks.hold(Band.MASTER, (7,)).shape == (3, 7)


def test_out_of_memory_says_what_happened() -> None:
    """The error carries rank, band, layer, bytes asked, held by band, capacity and ledger, and its text says them."""
    ranks = make(ids=[5, 6], capacity=9_000)
    ranks.hold(Band.MASTER, (1_009,))
    ranks.hold(Band.PARAMS, (503,))
    ranks.free(ranks.hold(Band.EXP_AVG, (2,)))
    with pytest.raises(OutOfMemory) as failure:
        ranks.hold(Band.GATHERED, (2_003,), "layer 2")
    error = failure.value
    assert (error.rank, error.band, error.unit) == (5, Band.GATHERED, "layer 2")
    assert (error.asked, error.capacity) == (2 * 2_003, 9_000)
    assert error.held == {Band.MASTER: 4 * 1_009, Band.PARAMS: 2 * 503}
    assert error.ledger is ranks.ledger
    assert str(error) == (
        "Out of memory on rank 5 (every rank here holds the same): tried to hold 4,006 B of gathered params for "
        "layer 2; the card has 9,000 B, of which 5,042 B are held (master 4,036, params 1,006) and 3,958 B free. "
        "Use more ranks, a higher stage or a larger card."
    )


def test_out_of_memory_is_a_memory_error_on_an_empty_card() -> None:
    """It can be caught as Python's own MemoryError; without a layer or anything held its text still reads."""
    with pytest.raises(MemoryError, match=r"28 B of master; the card has 27 B, of which 0 B are held \(nothing\)"):
        make(capacity=27).hold(Band.MASTER, (7,))


# -- reading


def filled() -> Ranks:
    """Three ranks; parameter arrays of two units and one activation, each row full of its rank's number."""
    ranks = make()
    for band, length, unit in (
        (Band.PARAMS, 5, "layer 1"), (Band.ACTIVATIONS, 3, "layer 1"), (Band.PARAMS, 7, "layer 2")
    ):  # fmt: skip
        ranks.hold(band, (length,), unit)[...] = np.arange(3)[:, None]
    return ranks


@pytest.mark.parametrize("row", range(3))
def test_a_rank_reads_its_row(row: int) -> None:
    """A band of a rank is its row of every unit's array, in order, under the band or its name."""
    rank = filled()[row]
    assert [view.tolist() for view in rank[Band.PARAMS]] == [[row] * 5, [row] * 7]
    assert [view.tolist() for view in rank["activations"]] == [[row] * 3]


def test_a_rank_reads_live_memory() -> None:
    """A rank's arrays are views, not copies: they follow what happens to the band."""
    ranks = make()
    array = ranks.hold(Band.MASTER, (7,))
    [view] = ranks[1][Band.MASTER]
    array[1] = 11
    assert view.tolist() == [11] * 7
    assert np.shares_memory(view, array)


def test_a_rank_cannot_be_written() -> None:
    """A rank's arrays refuse writes; the ranks' own stay writable."""
    ranks = filled()
    with pytest.raises(ValueError, match="read-only"):
        ranks[0][Band.PARAMS][0][...] = 1
    assert [array.flags.writeable for _, _, array in ranks.live()] == [True] * 3


def test_a_rank_is_a_mapping() -> None:
    """Its keys are the names of the bands that it holds, in order of allocation, its values what it has of each."""
    rank = filled()[1]
    assert isinstance(rank, Mapping)
    assert (list(rank), len(rank)) == (["params", "activations"], 2)
    assert ("params" in rank, Band.PARAMS in rank, "master" in rank, "gradients" in rank) == (True, True, False, False)
    assert {band: [view.tolist() for view in views] for band, views in rank.items()} == {
        "params": [[1] * 5, [1] * 7],
        "activations": [[1] * 3],
    }
    assert rank.get("master", []) == []


@pytest.mark.parametrize("band", ["master", "gradients"])
def test_a_band_that_is_not_held_is_refused(band: str) -> None:
    """A band of which nothing is held, and a name that is none, is a KeyError that says what there is."""
    with pytest.raises(KeyError, match=rf"rank 2 holds params, activations; it has no {band!r}"):
        filled()[2][band]
    with pytest.raises(KeyError, match="rank 0 holds nothing"):
        make()[0]["params"]


@pytest.mark.parametrize("row", range(3))
def test_a_rank_recounts_what_it_holds(row: int) -> None:
    """A rank's count from the arrays that exist equals the ledger's, band by band, after holds and frees."""
    ranks = filled()
    ranks.free(ranks.hold(Band.BLOCKS, (13,)))
    assert ranks[row].held() == {"params": 2 * 5 + 2 * 7, "activations": 4 * 3}
    assert ranks[row].held() == {band: nbytes for band, nbytes in ranks.ledger.held.items() if nbytes}


def test_the_recount_does_not_read_the_ledger() -> None:
    """With the ledger led astray, a rank still counts its arrays."""
    ranks = filled()
    ranks.ledger.hold(Band.MASTER, 10**6, "nothing")
    assert ranks[0].held() == {"params": 2 * 5 + 2 * 7, "activations": 4 * 3}


def test_ranks_are_a_sequence() -> None:
    """They have a length, can be indexed from either end, sliced and iterated over, and end where they end."""
    ranks = make(ids=[4, 6, 9])
    assert len(ranks) == 3
    assert [rank.id for rank in ranks] == [4, 6, 9]
    assert [ranks[0].id, ranks[-1].id] == [4, 9]
    assert [rank.id for rank in ranks[1:]] == [6, 9]
    assert isinstance(ranks[0], Rank)
    with pytest.raises(IndexError):
        ranks[3]


def test_a_rank_shows_its_number_and_bytes() -> None:
    """A rank's repr has its number in the world and what it holds by band."""
    ranks = make(ids=[4])
    ranks.hold(Band.MASTER, (503,))
    ranks.hold(Band.PARAMS, (7,))
    assert repr(ranks[0]) == "Rank(4: master 2,012 B, params 14 B)"


# -- the workspace


def test_a_workspace_is_one_band() -> None:
    """A workspace holds and frees in its band, under the unit it is set to, without naming either."""
    ranks = make()
    work = Workspace(ranks, Band.ACTIVATIONS)
    work.unit = "layer 3"
    array = work.hold(2, 5)
    assert [(band, unit) for band, unit, _ in ranks.live()] == [(Band.ACTIVATIONS, "layer 3")]
    assert (array.shape, ranks.ledger.held) == ((3, 2, 5), {Band.ACTIVATIONS: 4 * 2 * 5})
    work.free(array)
    assert ranks.ledger.total == 0


def test_a_workspace_books_work() -> None:
    """FLOPs told to a workspace are the ledger's, under its phase."""
    ranks = make()
    with ranks.ledger.step() as report, ranks.ledger.during(Phase.FORWARD):
        Workspace(ranks, Band.ACTIVATIONS).flops(7)
    assert report.flops == {Phase.FORWARD: 7}


def test_what_is_given_back_is_handed_out_again() -> None:
    """A freed array of the same shape and dtype is the next one's memory; of another shape or dtype it is not."""
    ranks = make()
    first = ranks.hold(Band.MASTER, (5,))
    ranks.free(first)
    others = ranks.hold(Band.PARAMS, (5,)), ranks.hold(Band.MASTER, (7,))
    again = ranks.hold(Band.EXP_AVG, (5,))
    assert [np.shares_memory(first, each) for each in (*others, again)] == [False, False, True]
    assert not np.shares_memory(again, ranks.hold(Band.EXP_AVG, (5,)))


def test_what_is_given_back_is_logged_for_its_owner() -> None:
    """The log's entry of a free names the unit of the hold."""
    ranks = make()
    ranks.free(ranks.hold(Band.MASTER, (5,), "layer 7"))
    with ranks.ledger.step() as report:
        ranks.free(ranks.hold(Band.MASTER, (5,), "layer 9"))
    assert [event.unit for event in report.events] == ["layer 9", "layer 9"]


def test_a_band_of_one_dtype_takes_no_other() -> None:
    """Another dtype for a band that has one is refused in words; its own is not, nor any for a band of several."""
    ranks = make()
    with pytest.raises(
        ValueError,
        match=r"^Ranks.hold\(dtype\): master is held in float32 here; got float16. Leave dtype",
    ):
        ranks.hold(Band.MASTER, (5,), dtype=FP16)
    assert ranks.ledger.total == 0
    assert ranks.hold(Band.MASTER, (5,), dtype=FP32).dtype == FP32
    assert ranks.hold(Band.ACTIVATIONS, (5,), dtype=FP16).dtype == FP16


def test_scratch_belongs_to_nobody_at_first() -> None:
    """What a workspace holds before it is told for whom has no unit."""
    ranks = make()
    with ranks.ledger.step() as report:
        Workspace(ranks, Band.ACTIVATIONS).hold(3)
    assert [event.unit for event in report.events] == [""]


def test_a_workspace_frees_what_was_held_since_a_moment() -> None:
    """All of its band that was allocated since and is still held, but what is to be kept; nothing else's."""
    ranks = make()
    work = Workspace(ranks, Band.ACTIVATIONS)
    before = work.hold(2)
    work.free(work.hold(3))
    mark = work.mark()
    master = ranks.hold(Band.MASTER, (5,))
    _, kept, freed = work.hold(7), work.hold(11), work.hold(13)
    work.free(freed)
    work.free_since(mark, keep=[kept])
    assert [id(array) for _, _, array in ranks.live()] == [id(array) for array in (before, master, kept)]
    work.free_since(work.mark(), keep=[])
    assert [array is kept for array in ranks.since(mark, Band.ACTIVATIONS)] == [True]
