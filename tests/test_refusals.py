"""Bad input is refused before anything changes, in words that help.

A message names the call, the rule, the value received and what to do; every case lists the
fragments that say so.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from helpers import draw, each_stage
from zerosim.bands import FP32, PRECISIONS, WIRES, Array, Band
from zerosim.model import MLP
from zerosim.optimizer import SGD, Adam
from zerosim.options import Options
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO2
from zerosim.worlds.local import LocalRing, footprint

RANKS, ROWS, WIDTHS = 3, 2, (5, 7, 4)

Pairs = list[tuple[Any, Any]]


pytestmark = pytest.mark.usefixtures("as_users_call_it")


def good() -> Pairs:
    return list(draw(RANKS, ROWS, WIDTHS))


# -- options

OPTIONS: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"ranks": 0}, ValueError, ["(ranks)", "an integer of 1 or more", "got 0."]),
    ({"ranks": -1}, ValueError, ["(ranks)", "an integer of 1 or more", "got -1."]),
    ({"ranks": 2.0}, TypeError, ["(ranks)", "an integer of 1 or more", "got 2.0."]),
    ({"ranks": True}, TypeError, ["(ranks)", "an integer of 1 or more", "got True."]),
    ({"ranks": "4"}, TypeError, ["(ranks)", "an integer of 1 or more", "got '4'."]),
    ({"ranks": None}, TypeError, ["(ranks)", "an integer of 1 or more", "got None."]),
    ({"optimizer": "sgd"}, TypeError, ["(optimizer)", "of type", "Adam", "got 'sgd'."]),
    ({"precision": ["mixed"]}, ValueError, ["(precision)", "is one of", "got ['mixed']."]),
    ({"precision": "fp8"}, ValueError, ["(precision)", "is one of", "mixed, bf16, fp32", "got 'fp8'"]),
    ({"precision": None}, ValueError, ["(precision)", "is one of", "mixed, bf16, fp32", "got None"]),
    ({"wire": "int8"}, ValueError, ["(wire)", "is one of", "fp32, fp16, bf16", "got 'int8'"]),
    ({"gather": "all"}, ValueError, ["(gather)", "is one of", "layer, model", "got 'all'"]),
    ({"bucket": 0}, ValueError, ["(bucket)", "an integer of 1 or more", "got 0"]),
    ({"bucket": "all"}, ValueError, ["(bucket)", "is one of", "layer, model", "got 'all'"]),
    ({"capacity": 0}, ValueError, ["(capacity)", "an integer of 1 or more", "got 0."]),
    ({"capacity": -(2**30)}, ValueError, ["(capacity)", "an integer of 1 or more", "got -1073741824."]),
    ({"capacity": 1e9}, TypeError, ["(capacity)", "an integer of 1 or more", "got 1000000000.0."]),
    ({"capacity": "16GB"}, TypeError, ["(capacity)", "an integer of 1 or more", "got '16GB'."]),
]


@pytest.mark.parametrize(("options", "error", "words"), OPTIONS, ids=lambda value: str(value)[:40])
@each_stage
def test_bad_options_are_refused(stage: Any, options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    """An option out of range is refused by every scheme, with the right type and in words that help."""
    with pytest.raises(error) as caught:
        stage(MLP(WIDTHS), **({"ranks": RANKS} | options))
    assert all(word in str(caught.value) for word in ["Scheme", *words]), str(caught.value)


@each_stage
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", "MLP"), ("optimizer", "Adam"), ("padding", "3N"), ("sync", "never"), ("precision", "fp8"),
        ("accumulate", 0), ("prefetch", -1), ("bucket", "row"), ("gather", "all"), ("wire_params", "fp8"),
        ("all_reduce", 1), ("checkpoint", 1), ("capacity", 0), ("ranks", 0), ("loss_scale", "dynamic"),
        ("loss_scale", True), ("loss_scale", 0), ("clip", "0.5"), ("clip", 0),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_refused_by_name(stage: Stage, option: str, value: Any) -> None:
    """Where nothing checks types, the error begins with the call and the option, whichever it is."""
    arguments: dict[str, Any] = {"model": MLP([2, 3]), "ranks": 2} | {option: value}
    with pytest.raises((TypeError, ValueError), match=rf"^Scheme\({option}\): "):
        stage(**arguments)


def test_what_is_no_model_is_told_how_to_become_one() -> None:
    """A module of torch's, say: the refusal names what makes it a model, which is there, and who takes it as it is."""
    with pytest.raises(TypeError, match=r"^Scheme\(model\): .*; got \[5, 7\]\. Pass zs.MLP\(sizes\)") as caught:
        ZeRO2([5, 7], RANKS)
    assert "zerosim.torch_models.model.from_torch(module, batch, loss)" in str(caught.value)
    assert "zs.compare and zs.dry take the module itself" in str(caught.value)


@pytest.mark.parametrize("option", ["precison", "wires", "bucket_size", "seed"])
def test_unknown_options_are_refused(option: str) -> None:
    """An option that does not exist is a TypeError that names it and those that there are, not ignored."""
    given: dict[str, Any] = {option: "layer"}
    known = "precision, wire, wire_params, gather, .*, optimizer, capacity"
    with pytest.raises(TypeError, match=f"^Scheme: there is no option '{option}'. Use one of {known}"):
        ZeRO2(MLP(WIDTHS), RANKS, **given)


def test_options_go_by_keyword() -> None:
    """What follows the number of ranks by position is one record of options; none of them can be passed alone."""
    call: Any = ZeRO2
    with pytest.raises(TypeError, match=r"^Scheme\(options\): options must be of type Options; got 'fp32'"):
        call(MLP(WIDTHS), RANKS, "fp32")
    with pytest.raises(TypeError, match="positional argument"):
        call(MLP(WIDTHS), RANKS, None, "fp32")


@pytest.mark.parametrize(
    ("precision", "wire", "advice"),
    [
        ("mixed", "bf16", "wire='fp32', or the dtype of the working copy"),
        ("bf16", "fp16", "wire='fp32', or the dtype of the working copy"),
        ("fp32", "fp16", "Use wire='fp32'."),
        ("fp32", "bf16", "Use wire='fp32'."),
    ],
)
def test_a_wire_must_carry_the_working_copy(precision: str, wire: str, advice: str) -> None:
    """A wire that would round the parameters as they are gathered is refused, with the pair and what would do."""
    with pytest.raises(ValueError, match=r"^Scheme\(wire\): the wire must carry the working copy exactly") as caught:
        ZeRO2(MLP(WIDTHS), RANKS, precision=precision, wire=wire)
    assert all(word in str(caught.value) for word in (f"{wire} does not carry precision='{precision}'", advice))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_wire_that_carries_the_working_copy_is_accepted(precision: str, wire: str) -> None:
    """A wire is accepted exactly if every value of the working copy, and of backward's gradients, survives it."""
    survives = True
    for carried in (PRECISIONS[precision].working, PRECISIONS[precision].dtypes(WIRES[wire])[Band.UNREDUCED]):
        every = (
            np.arange(2**16, dtype=np.uint16).view(carried) if carried.itemsize == 2 else np.array([1 + 2**-23], FP32)
        )
        with np.errstate(all="ignore"):
            numbers = every[~np.isnan(every)]
            survives &= np.array_equal(numbers.astype(WIRES[wire]).astype(carried), numbers)
    try:
        Options(precision=precision, wire=wire)
    except ValueError:
        accepted = False
    else:
        accepted = True
    assert accepted == survives


def test_numpy_integers_are_integers() -> None:
    """A number of ranks or bytes that NumPy has computed is accepted."""
    options: Any = {"ranks": np.int64(RANKS), "capacity": np.int64(10**6)}
    scheme = ZeRO2(MLP(WIDTHS), **options)
    assert scheme.ring.size == RANKS


@pytest.mark.parametrize("widths", [(5, 2.0), ("5", 3), (5, None, 3)], ids=str)
def test_widths_are_integers(widths: Any) -> None:
    """A width that is not an integer is refused, and shown."""
    with pytest.raises(ValueError, match=r"MLP\(widths\).*positive integers") as caught:
        MLP(widths)
    assert repr(widths) in str(caught.value)


# -- batches


def put(rank: int, what: int, change: Callable[[Array], Any]) -> Callable[[Pairs], Any]:
    """A good batch but for x (0) or y (1) of one rank."""

    def spoil(batch: Pairs) -> Any:
        pair = list(batch[rank])
        pair[what] = change(pair[what])
        return [*batch[:rank], tuple(pair), *batch[rank + 1 :]]

    return spoil


def replaced(value: float) -> Callable[[Array], Array]:
    """An array with its last element replaced."""

    def replace(array: Array) -> Array:
        spoilt = array.copy()
        spoilt[-1, -1] = value
        return spoilt

    return replace


def longer(array: Array) -> Array:
    return np.concatenate([array, array[:1]])


ONE_PAIR = ["one (x, y) pair per rank", "3 in all"]
A_PAIR = ["needs a pair (x, y)", "got "]
SAME_ROWS = ["x of rank 0 has 2. Every rank needs the same number, or the average over ranks"]
FINITE = ["contains NaN or infinity", "remove or replace them"]
FLOAT32 = ["must be a float32 array", "Convert it with .astype(np.float32)"]

BATCHES: dict[str, tuple[Callable[[Pairs], Any], type[Exception], list[str]]] = {
    "too short": (lambda batch: batch[:-1], ValueError, [*ONE_PAIR, "got 2."]),
    "too long": (lambda batch: batch + batch[:1], ValueError, [*ONE_PAIR, "got 4."]),
    "empty": (lambda batch: [], ValueError, [*ONE_PAIR, "got 0."]),
    "an iterator": (lambda batch: iter(batch), ValueError, [*ONE_PAIR, "got list_iterator."]),
    "a dictionary": (lambda batch: dict(enumerate(batch)), ValueError, [*ONE_PAIR, "got dict."]),
    "an array": (lambda batch: batch[0][0], ValueError, [*ONE_PAIR, "got ndarray."]),
    "None": (lambda batch: None, ValueError, [*ONE_PAIR, "got NoneType."]),
    "x without y": (lambda batch: [batch[0], (batch[1][0],), batch[2]], ValueError, [*A_PAIR, "rank 1", "tuple"]),
    "triples": (lambda batch: [(*pair, 0) for pair in batch], ValueError, [*A_PAIR, "rank 0", "tuple"]),
    "x alone": (lambda batch: [pair[0] for pair in batch], ValueError, [*A_PAIR, "rank 0", "ndarray"]),
    "more rows in one rank": (
        lambda batch: [*batch[:2], tuple(map(longer, batch[2]))],
        ValueError,
        [*SAME_ROWS, "x of rank 2 has 3 rows", "Pass as many, or uneven=True."],
    ),
    "more rows in one x": (put(1, 0, longer), ValueError, [*SAME_ROWS, "x of rank 1 has 3 rows"]),
    "more rows in one y": (put(0, 1, longer), ValueError, [*SAME_ROWS, "y of rank 0 has 3 rows"]),
    "no rows": (
        lambda batch: [(x[:0], y[:0]) for x, y in batch],
        ValueError,
        ["x of rank 0 has no rows", "Every rank needs the same number of rows, at least 1"],
    ),
    "x too narrow": (put(1, 0, lambda x: x[:, 1:]), ValueError, ["x of rank 1", "shape (rows, 5)", "got (2, 4)"]),
    "y too wide": (put(2, 1, lambda y: np.tile(y, 2)), ValueError, ["y of rank 2", "shape (rows, 4)", "got (2, 8)"]),
    "x and y exchanged": (
        lambda batch: [(y, x) for x, y in batch],
        ValueError,
        ["x of rank 0", "shape (rows, 5)", "got (2, 4)"],
    ),
    "one axis": (put(2, 1, lambda y: y[0]), ValueError, ["y of rank 2", "shape (rows, 4)", "got (4,)"]),
    "three axes": (put(1, 0, lambda x: x[None]), ValueError, ["x of rank 1", "shape (rows, 5)", "got (1, 2, 5)"]),
    "no axes": (put(0, 0, lambda x: x[0, 0, ...]), ValueError, ["x of rank 0", "shape (rows, 5)", "got ()"]),
    "float64": (put(2, 0, lambda x: x.astype(np.float64)), TypeError, ["x of rank 2", *FLOAT32, "got float64"]),
    "float16": (put(0, 1, lambda y: y.astype(np.float16)), TypeError, ["y of rank 0", *FLOAT32, "got float16"]),
    "integers": (put(1, 1, lambda y: y.astype(np.int64)), TypeError, ["y of rank 1", *FLOAT32, "got int64"]),
    "lists": (put(0, 0, lambda x: x.tolist()), TypeError, ["x of rank 0", *FLOAT32, "got list"]),
    "a memoryview": (put(1, 1, lambda y: y.data), TypeError, ["y of rank 1", *FLOAT32, "got memoryview"]),
    "other byte order": (put(1, 0, lambda x: x.astype(">f4")), TypeError, ["x of rank 1", *FLOAT32, "got >f4"]),
    "NaN in x": (put(2, 0, replaced(np.nan)), ValueError, ["x of rank 2", *FINITE]),
    "infinity in x": (put(0, 0, replaced(np.inf)), ValueError, ["x of rank 0", *FINITE]),
    "NaN in y": (put(1, 1, replaced(np.nan)), ValueError, ["y of rank 1", *FINITE]),
    "infinity in y": (put(2, 1, replaced(-np.inf)), ValueError, ["y of rank 2", *FINITE]),
}  # fmt: skip


def everything(scheme: Scheme) -> tuple[Any, ...]:
    """All that a step could have changed."""
    held, ledger = [array.tobytes() for _, _, array in scheme.ranks.live()], scheme.ledger
    return held, dict(ledger.held), ledger.sent(), ledger.peak(), len(scheme.reports), scheme.updates


@pytest.mark.parametrize("case", BATCHES)
def test_bad_batches_are_refused_before_anything_changes(case: str) -> None:
    """A batch that does not fit raises the right error, in words that help, and leaves the run as it was."""
    spoil, error, words = BATCHES[case]
    scheme, twin = ZeRO2(MLP(WIDTHS), RANKS), ZeRO2(MLP(WIDTHS), RANKS)
    scheme.step(good())
    before = everything(scheme)
    with pytest.raises(error) as caught:
        scheme.step(spoil(good()))
    assert all(word in str(caught.value) for word in ["step(batch)", *words]), str(caught.value)
    assert everything(scheme) == before
    scheme.step(good())
    assert [twin.step(good()) for _ in range(2)] == [report.loss for report in scheme.reports]


def test_uneven_is_offered_where_it_would_be_taken() -> None:
    """To a rank that has more rows than others, and not to one whose own x and y have different numbers of them."""
    ranks = put(1, 0, longer)(put(1, 1, longer)(good()))
    for batch, offered in ((ranks, True), (put(1, 0, longer)(good()), False)):
        with pytest.raises(ValueError, match=r"x of rank 1 has 3 rows") as caught:
            ZeRO2(MLP(WIDTHS), RANKS).step(batch)
        assert ("uneven=True" in str(caught.value)) is offered
    assert ZeRO2(MLP(WIDTHS), RANKS, uneven=True).step(ranks) > 0


@pytest.mark.parametrize("container", [list, tuple])
def test_pairs_may_be_lists(container: Callable[..., Any]) -> None:
    """A batch and its pairs may be tuples or lists."""
    scheme, twin = ZeRO2(MLP(WIDTHS), RANKS), ZeRO2(MLP(WIDTHS), RANKS)
    assert scheme.step(container(container(pair) for pair in good())) == twin.step(good())


def test_a_batch_is_not_kept_or_changed() -> None:
    """A step reads the caller's arrays, read-only or strided ones too, and neither writes to them nor keeps them."""
    batch = [(np.asfortranarray(x), np.asfortranarray(y)) for x, y in good()]
    given = [array for pair in batch for array in pair]
    for array in given:
        array.flags.writeable = False
    scheme, twin = ZeRO2(MLP(WIDTHS), RANKS), ZeRO2(MLP(WIDTHS), RANKS)
    assert scheme.step(batch) == twin.step(good())
    assert not any(np.shares_memory(array, kept) for array in given for _, _, kept in scheme.ranks.live())


def test_an_optimizer_without_moments_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for plain descent, to the byte, is enough for it and not for Adam; a byte less is not enough."""
    sizes, n = [5 * 7 + 7, 7 * 3 + 3], 9
    need = footprint(DP, sizes, n, Options(optimizer=SGD()))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need))
    assert DP(MLP((5, 7, 3)), n, optimizer=SGD()).ring.size == n
    with pytest.raises(MemoryError):
        DP(MLP((5, 7, 3)), n)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need - 1))
    with pytest.raises(MemoryError):
        DP(MLP((5, 7, 3)), n, optimizer=SGD())


@pytest.mark.parametrize("optimizer", [Adam(), SGD()], ids=["adam", "sgd"])
def test_what_there_is_no_memory_for_is_refused_with_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, optimizer: Adam | SGD
) -> None:
    """With memory for half of the ranks, the refusal names the scheme and N, and first the other stages that fit, then
    the powers of two below; a ring of one's own is not asked.
    """
    model, n = MLP((5, 7, 3)), 9
    sizes = [5 * 7 + 7, 7 * 3 + 3]

    def needed(stage: Stage, ranks: int) -> int:
        return footprint(stage, sizes, ranks, Options(optimizer=optimizer))

    free = needed(DP, 8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    with pytest.raises(MemoryError, match=r"^data parallel on 9 ranks would take ") as caught:
        DP(model, n, optimizer=optimizer)
    named = str(caught.value).partition("would fit: ")[2]
    others = [f"{stage.name} on {n}" for stage in SCHEMES if needed(stage, n) <= free]
    fewer = [f"data parallel on {ranks}" for ranks in (8, 4, 2, 1)]
    assert [each.split(" (")[0] for each in named.split(", ")][:4] == [*others, *fewer][:4]
    assert DP(model, n, optimizer=optimizer, ring=LocalRing(n)).ring.size == n


NOTHING: Any = None
FIVE: Any = 5
WORDS: Any = [0.9, "x"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MLP(NOTHING), r"^MLP\(widths\): needs two or more positive integers, input width first; got None"),
        (lambda: MLP(FIVE), r"^MLP\(widths\): .* got 5"),
        (lambda: DP(MLP((5, 3)), 4, ring=4), r"^Scheme\(ring\): ring must be of type Ring; got 4"),
        (lambda: DP(MLP((5, 3)), 4, collectives=FIVE), r"^Scheme\(collectives\): Comm, or a class .* got 5"),
        (lambda: DP(MLP((5, 3)), 4).on_event(FIVE), r"^Scheme.on_event\(listener\): .* got 5"),
        (lambda: Adam(lr=10**400), r"^Adam\(lr\): a positive, finite number is needed; got 1000"),
        (lambda: SGD(lr=10**400), r"^SGD\(lr\): a positive, finite number is needed; got 1000"),
        (lambda: Adam(betas=WORDS), r"^Adam\(betas\): a pair of numbers"),
    ],
    ids=["no widths", "one width", "ring", "collectives", "listener", "Adam", "SGD", "betas"],
)
@pytest.mark.usefixtures("as_users_call_it")
def test_what_no_room_can_use_is_refused_at_the_door(make: Any, says: str) -> None:
    """In words, before anything is made, and not in the middle of a step."""
    with pytest.raises((ValueError, TypeError), match=says):
        make()


def test_a_rank_that_is_not_there_is_refused() -> None:
    """By the number that was asked for, with those that there are."""
    ranks = DP(MLP((5, 3)), 4).ranks
    for index, error in ((4, IndexError), (-5, IndexError), (WORDS, TypeError)):
        with pytest.raises(error, match=rf"^ranks\[{re.escape(repr(index))}\]: 4 ranks are here. Use 0 to 3"):
            ranks[index]
    assert ranks[3].id == ranks[-1].id == 3


@pytest.mark.usefixtures("as_users_call_it")
def test_numpy_s_numbers_and_lists_are_numbers_and_pairs() -> None:
    """What NumPy calls a number is one, and a list of two is a pair."""
    assert Adam(lr=np.float32(0.5), betas=[0.5, np.float64(0.75)]) == Adam(lr=0.5, betas=(0.5, 0.75))  # type: ignore[arg-type]
