"""Adam: the published rule, its fp32 bits, and that a slice does not know its neighbours."""

import tracemalloc
from itertools import pairwise
from math import cos, inf, pi
from typing import Any, cast

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from helpers import bits
from zerosim import optimizer as optimizer_module
from zerosim.bands import FP32, Array
from zerosim.optimizer import SGD, Adam, AdamW, ParamGroup, Schedule

STEPS = 12
BLOCK = optimizer_module._BLOCK
ULP = 2.0**-23  # the spacing of fp32 between 1 and 2; a rounding errs by half of it, relative


def ignore(count: int) -> None:
    """A counter of FLOPs that nobody reads."""


class State:
    """Parameters, moments and the gradients to come, of R rows and n columns."""

    def __init__(self, rows: int, length: int, dtype: Any = np.float32) -> None:
        rng = np.random.default_rng(3)
        self.params = rng.standard_normal((rows, length)).astype(np.float32)
        self.exp_avg, self.exp_avg_sq = np.zeros_like(self.params), np.zeros_like(self.params)
        self.grads = rng.standard_normal((STEPS, rows, length)).astype(dtype)

    def train(self, adam: Adam, part: Any = ..., steps: int = STEPS) -> None:
        for step in range(steps):
            p, g = self.params[part], self.grads[step][part]
            adam.update(p, g, self.exp_avg[part], self.exp_avg_sq[part], step + 1, ignore)

    def bits(self, part: Any = ...) -> list[Array]:
        return [bits(array[part]) for array in (self.params, self.exp_avg, self.exp_avg_sq)]


def same(one: list[Array], other: list[Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# -- the rule


@pytest.mark.parametrize("options", [{}, {"lr": 0.3, "betas": (0.5, 0.75), "eps": 0.125}], ids=["default", "other"])
def test_adam_follows_the_paper(options: dict[str, Any]) -> None:
    """Twelve steps agree with the published rule, written out in float64, up to the roundings of fp32."""
    state, adam = State(3, 17), Adam(**options)
    p, m, v = state.params.astype(np.float64), 0.0, 0.0
    beta1, beta2 = adam.betas
    for step in range(1, STEPS + 1):
        g = state.grads[step - 1].astype(np.float64)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        p = p - adam.lr * (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + adam.eps)
    state.train(adam)
    # A step rounds p once, and makes its update, at most about lr, of 12 roundings.
    tolerance = STEPS * ULP / 2 * (np.abs(p).max() + 12 * adam.lr)
    np.testing.assert_allclose(state.params, p, rtol=0, atol=tolerance)
    np.testing.assert_allclose(state.exp_avg, m, rtol=0, atol=STEPS * 3 * ULP / 2 * np.abs(state.grads).max())
    np.testing.assert_allclose(state.exp_avg_sq, v, rtol=STEPS * 4 * ULP / 2, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_adam_has_the_bits_of_the_plain_formulas(dtype: Any) -> None:
    """Parameters and moments have the bits of the rule written as fp32 expressions, for gradients of any dtype."""
    state, adam = State(3, 17, dtype), Adam()
    p, m, v = state.params.copy(), state.exp_avg.copy(), state.exp_avg_sq.copy()
    for step in range(1, STEPS + 1):
        g = state.grads[step - 1].astype(np.float32)
        m = m + (g - m) * np.float32(1 - 0.9)
        v = v * np.float32(0.999) + g * np.float32(1 - 0.999) * g
        denominator = np.sqrt(v) / np.float32((1 - 0.999**step) ** 0.5) + np.float32(1e-8)
        p = p + m * np.float32(-1e-2 / (1 - 0.9**step)) / denominator
    state.train(adam)
    assert same(state.bits(), [bits(array) for array in (p, m, v)])


def test_the_first_step_moves_by_the_learning_rate() -> None:
    """With the bias corrected, step 1 moves every parameter by lr against its gradient's sign, whatever its size."""
    g = np.array([(-1) ** power * 10.0**power for power in range(-5, 6)], np.float32)
    p, m, v = np.zeros((3, 1, 11), np.float32)
    Adam(lr=0.25, eps=1e-14).update(p, g[None], m, v, 1, ignore)
    # eps / |g| is at most 1e-9; what remains is 12 roundings.
    np.testing.assert_allclose(p[0], -0.25 * np.sign(g), rtol=12 * ULP / 2, atol=0)


def test_eps_is_added_after_the_corrected_root() -> None:
    """At step 1 the move is lr |g| / (|g| + eps): half of lr when |g| is eps."""
    p, m, v = np.zeros((3, 1, 1), np.float32)
    Adam(lr=0.25, eps=0.5).update(p, np.full_like(p, 0.5), m, v, 1, ignore)
    assert p[0, 0] == pytest.approx(-0.25 / 2, rel=12 * ULP / 2, abs=0)


def test_the_step_count_corrects_the_bias() -> None:
    """The same state at step 2 takes the corrections of step 2: the ratio of the moves is theirs."""
    moves = []
    for step in (1, 2):
        p, m, v = np.zeros((3, 1, 1), np.float32)
        Adam(eps=1e-14).update(p, np.ones_like(p), m, v, step, ignore)
        moves.append(float(p[0, 0]))
    correction = [(1 - 0.999**step) ** 0.5 / (1 - 0.9**step) for step in (1, 2)]
    assert moves[1] / moves[0] == pytest.approx(correction[1] / correction[0], rel=24 * ULP / 2, abs=0)


def test_gradients_are_not_changed() -> None:
    """The update reads the gradients and leaves every bit of them."""
    state = State(3, 17)
    before = bits(state.grads).copy()
    state.train(Adam())
    assert np.array_equal(bits(state.grads), before)


# -- slices


@pytest.mark.parametrize(
    "part",
    [
        (slice(None), slice(5, 11)),
        (slice(None), slice(16, 17)),
        (slice(1, 2), slice(None)),
        (slice(None), slice(None, None, 3)),
        (slice(None, None, -1), slice(None, None, -2)),
        (slice(0, 3, 2), slice(1, 17, 5)),
    ],
    ids=str,
)
def test_a_slice_is_updated_as_in_the_whole(part: tuple[slice, slice]) -> None:
    """Any slice or strided view gets the bits that it gets within the whole, and nothing beside it moves."""
    whole, alone, untouched = State(3, 17), State(3, 17), State(3, 17)
    whole.train(Adam())
    alone.train(Adam(), part)
    assert same(alone.bits(part), whole.bits(part))
    for array, before in zip(alone.bits(), untouched.bits(), strict=True):
        beside = np.ones(array.shape, bool)
        beside[part] = False
        assert np.array_equal(array[beside], before[beside])


def test_a_diagonal_of_shards_is_updated_as_in_the_whole() -> None:
    """Each rank's shard, on the diagonal of [rank, shard], gets the bits that it gets within the whole."""
    whole, alone = State(5, 5 * 7), State(5, 5 * 7)
    whole.train(Adam())

    def own(array: Array) -> Array:
        return array.reshape(5 * 5, 7)[:: 5 + 1]

    for step in range(STEPS):
        moments = own(alone.exp_avg), own(alone.exp_avg_sq)
        Adam().update(own(alone.params), own(alone.grads[step]), *moments, step + 1, ignore)
    assert np.array_equal(bits(own(alone.params)), bits(own(whole.params)))


@pytest.mark.parametrize("start", [BLOCK - 5, 2 * BLOCK - 1, 0, BLOCK])
def test_a_slice_that_straddles_blocks_is_updated_as_in_the_whole(start: int) -> None:
    """Where a block ends makes no difference: not for a slice that begins in one and ends in the next."""
    part = (slice(None), slice(start, start + 11))
    whole, alone = State(2, 2 * BLOCK + 7), State(2, 2 * BLOCK + 7)
    whole.train(Adam(), steps=2)
    alone.train(Adam(), part, steps=2)
    assert same(alone.bits(part), whole.bits(part))


@pytest.mark.parametrize("block", [1, 13, 17, 2 * 17, 5 * 17 - 1])
def test_the_block_size_does_not_change_the_bits(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cut rows, and blocks of several rows with a ragged end, give the bits of a single block."""
    expected, found = State(7, 17), State(7, 17)
    expected.train(Adam())
    monkeypatch.setattr(optimizer_module, "_BLOCK", block)
    found.train(Adam())
    assert same(found.bits(), expected.bits())


# -- what it costs


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 17), (2, BLOCK + 3)])
def test_flops_are_thirteen_per_element(rows: int, length: int) -> None:
    """An update is booked as 13 operations for each element of a row, whatever the rows and blocks."""
    state, counts = State(rows, length), list[int]()
    Adam().update(state.params, state.grads[0], state.exp_avg, state.exp_avg_sq, 1, counts.append)
    assert sum(counts) == 13 * length
    assert {type(count) for count in counts} == {int}


@pytest.mark.parametrize(("momentum", "operations"), [(0.0, 2), (0.9, 4)])
def test_the_operations_of_sgd(momentum: float, operations: int) -> None:
    """A multiplication and a subtraction for each element of a row, and as many again for the momentum."""
    done: list[int] = []
    states: dict[str, Any] = {str(band): np.zeros((3, 5), FP32) for band in SGD(momentum=momentum).states}
    SGD(momentum=momentum).update(np.ones((3, 5), FP32), np.ones((3, 5), FP32), **states, step=1, flops=done.append)
    assert done == [5 * operations]


def test_temporaries_are_two_blocks_and_do_not_stay() -> None:
    """However long the slice, an update allocates two registers of one block and keeps neither."""
    state, adam = State(2, 3 * BLOCK), Adam()
    state.train(adam, steps=1)  # whatever is made once and for all
    tracemalloc.start()
    try:
        state.train(adam, steps=1)
        kept, highest = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    registers = 2 * BLOCK * 4
    assert registers <= highest < registers + BLOCK  # a quarter of a register for Python's own objects
    assert kept < BLOCK


# -- what is refused


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 0.0),
        ("lr", -1e-2),
        ("lr", float("nan")),
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.999)),
        ("betas", (0.9, float("nan"))),
        ("eps", 0.0),
        ("eps", -1e-8),
        ("eps", float("nan")),
        ("weight_decay", -0.1),
        ("weight_decay", float("nan")),
    ],
    ids=str,
)
def test_bad_options_are_refused(option: str, value: Any) -> None:
    """A learning rate or eps that is not positive, or a beta outside [0, 1), is a ValueError that shows the value."""
    with pytest.raises(ValueError, match=rf"Adam\({option}\)") as caught:
        Adam(**{option: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (Adam, {"groups": ParamGroup("layer")}, r"Adam\(groups\): a tuple of ParamGroup is needed"),
        (Adam, {"groups": ("layer",)}, r"Adam\(groups\): a tuple of ParamGroup is needed"),
        (Adam, {"weight_decay": "0.1"}, r"Adam\(weight_decay\): a finite number of 0 or more is needed"),
        (Adam, {"schedule": "cosine"}, r"Adam\(schedule\): schedule must be of type"),
        (ParamGroup, {"match": "layer ["}, r"ParamGroup\(match\): a regular expression is needed"),
        (ParamGroup, {"match": "layer", "lr": -1.0}, r"ParamGroup\(lr\): a finite number of 0 or more is needed"),
    ],
)
@pytest.mark.usefixtures("as_users_call_it")
def test_what_would_end_an_update_in_its_middle_is_refused_before(kind: Any, given: dict[str, Any], says: str) -> None:
    """Groups, decay and schedule are looked at when the optimizer is made, not when a step has begun to need them."""
    with pytest.raises((TypeError, ValueError), match=says):
        kind(**given)


@pytest.mark.usefixtures("as_users_call_it")
def test_what_adam_takes() -> None:
    """Rates are finite, betas a pair in [0, 1), the ends as said; a plain descent has a rate of 0.01 unless told."""
    assert Adam(betas=(0.0, 0.0)).betas == (0.0, 0.0)
    assert SGD().lr == 0.01
    for options in ({"lr": inf}, {"eps": inf}, {"betas": [0.9]}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}):
        [name] = options
        with pytest.raises(ValueError, match=rf"^Adam\({name}\): "):
            Adam(**cast("dict[str, Any]", options))


# -- rates


def test_what_has_one_dimension_does_not_decay_and_the_first_group_that_matches_counts() -> None:
    """Each parameter has the rate and the decay of its group, or the usual of what the group leaves open."""
    groups = (ParamGroup("layer 1$", lr=0.5), ParamGroup("layer", weight_decay=0.0), ParamGroup("head", 0.25, 0.125))
    adam = AdamW(lr=0.0625, weight_decay=0.75, groups=groups)
    shapes = [(7, 5), (5,), (2, 3, 5)]
    assert {name: adam.rates(name, shapes) for name in ("layer 1", "layer 10", "head", "tail")} == {
        "layer 1": [(0.5, 0.75), (0.5, 0.0), (0.5, 0.75)],
        "layer 10": [(0.0625, 0.0)] * 3,
        "head": [(0.25, 0.125), (0.25, 0.0), (0.25, 0.125)],
        "tail": [(0.0625, 0.75), (0.0625, 0.0), (0.0625, 0.75)],
    }
    assert SGD(lr=0.5).rates("layer 1", shapes) == [(0.5, 0.0)] * 3


# -- schedules


@given(
    st.sampled_from(["linear", "cosine"]), st.integers(0, 9), st.integers(1, 9).map(lambda half: 2 * half),
    st.floats(0, 0.9),
)  # fmt: skip
def test_a_schedule_rises_to_the_rate_and_falls_to_its_floor(kind: str, warmup: int, span: int, floor: float) -> None:
    """From 0 to 1 in equal steps, then down: halfway after half of the steps, and at the floor from the end on."""
    factor = Schedule(warmup, warmup + span, kind, floor).factor
    assert [factor(done) for done in range(warmup)] == [done / warmup for done in range(warmup)]
    falling = [factor(warmup + done) for done in range(span + 1)]
    assert falling[0] == 1
    assert falling[span // 2] == pytest.approx((1 + floor) / 2)
    assert [falling[-1], factor(warmup + span + 5)] == pytest.approx([floor, floor], abs=1e-15)
    assert all(later < before for before, later in pairwise(falling))
    shares = [done / span if kind == "linear" else (1 - cos(pi * done / span)) / 2 for done in range(span + 1)]
    assert falling == pytest.approx([1 - share * (1 - floor) for share in shares])


def test_a_constant_schedule_stays_at_the_rate() -> None:
    """After its warm-up the rate is what was asked for, whatever the number of steps."""
    assert [Schedule(2).factor(done) for done in range(4)] == [0, 0.5, 1, 1]
    assert [Schedule(2, total=3).factor(done) for done in range(5)] == [0, 0.5, 1, 1, 1]
    assert Schedule().factor(0) == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"kind": "linear"}, r"Schedule\(total\): a linear schedule ends after its warm-up; got None"),
        ({"kind": "cosine", "warmup": 3, "total": 3}, r"Schedule\(total\): a cosine schedule .*; got 3"),
        ({"kind": "step"}, r"Schedule\(kind\): kind is one of constant, linear, cosine"),
        ({"counts": "epochs"}, r"Schedule\(counts\): counts is one of updates, steps"),
        ({"warmup": -1}, r"Schedule\(warmup\): warmup must be an integer of 0 or more; got -1"),
        ({"floor": -0.1}, r"Schedule\(floor\): a finite number of 0 or more is needed; got -0.1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(asked: dict[str, Any], says: str) -> None:
    """What falls has to end after its warm-up, and there is no kind but those that are listed."""
    with pytest.raises(ValueError, match=says):
        Schedule(**asked)
    Schedule(3, 4, "cosine")
