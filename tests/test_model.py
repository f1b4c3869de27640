"""The layers: exact gradients, the flat layout, who frees what, and copies that cannot see each other.

Where a test compares with an oracle, its numbers are small integers and short binary fractions, so
that every sum of products is exact in fp32 and the oracle must be met to the last bit.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers import Recorder, bits
from zerosim import model as model_module
from zerosim.bands import Array
from zerosim.layers import Chain, Pass
from zerosim.model import MLP, Linear

COPIES, ROWS = 3, 11
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]

Shape = tuple[int, int, bool]  # fan-in, fan-out, relu
FIRST, SECOND, LAST = (5, 7, True), (7, 3, True), (3, 2, False)
CASES: dict[str, tuple[Shape, ...]] = {
    "linear": ((5, 3, False),),
    "relu": ((5, 3, True),),
    "chain": (FIRST, SECOND, LAST),
    "nested chain": (FIRST, SECOND, LAST),
}


def build(case: str) -> Linear | Chain:
    layers = [Linear(fan_in, fan_out, relu=relu, name=f"{fan_in}-{fan_out}") for fan_in, fan_out, relu in CASES[case]]
    if len(layers) == 1:
        return layers[0]
    if case == "nested chain":
        return Chain([layers[0], Chain(layers[1:], name="inner")], name="outer")
    return Chain(layers, name=case)


# -- the oracle: one copy, float64, einsum


def split(shapes: tuple[Shape, ...], theta: Array) -> list[tuple[Array, Array]]:
    """W and b of each layer, from a flat layout of W row by row, then b."""
    parts, start = [], 0
    for fan_in, fan_out, _ in shapes:
        middle, stop = start + fan_in * fan_out, start + (fan_in + 1) * fan_out
        parts.append((theta[start:middle].reshape(fan_in, fan_out), theta[middle:stop]))
        start = stop
    return parts


def oracle_forward(shapes: tuple[Shape, ...], theta: Array, x: Array) -> list[Array]:
    """The input and every layer's output."""
    activations = [x]
    for (_, _, relu), (weight, bias) in zip(shapes, split(shapes, theta), strict=True):
        y = np.einsum("bi,io->bo", activations[-1], weight) + bias
        activations.append(np.where(y > 0, y, 0) if relu else y)
    return activations


def oracle_backward(shapes: tuple[Shape, ...], theta: Array, x: Array, dy: Array) -> tuple[Array, Array]:
    """The gradients of the parameters, flat, and of the input."""
    activations, grads = oracle_forward(shapes, theta, x), []
    for index in reversed(range(len(shapes))):
        weight, _ = split(shapes, theta)[index]
        dy = np.where(activations[index + 1] > 0, dy, 0) if shapes[index][2] else dy
        grads += [dy.sum(axis=0), np.einsum("bi,bo->io", activations[index], dy).reshape(-1)]
        dy = np.einsum("bo,io->bi", dy, weight)
    return np.concatenate(grads[::-1]), dy


def whole_numbers(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-2, 3, shape).astype(np.float64)


def inputs(shapes: tuple[Shape, ...], seed: int) -> tuple[Array, Array, Array]:
    """Parameters [R, P], x and dy, all float64; a layer's biases keep its pre-activations 2^-depth away from 0."""
    rng = np.random.default_rng(seed)
    parts = []
    for depth, (fan_in, fan_out, _) in enumerate(shapes, start=1):
        parts += [whole_numbers(rng, COPIES, fan_in * fan_out), whole_numbers(rng, COPIES, fan_out) + 0.5**depth]
    x, dy = whole_numbers(rng, COPIES, ROWS, shapes[0][0]), whole_numbers(rng, COPIES, ROWS, shapes[-1][1])
    return np.concatenate(parts, axis=1), x, dy


def central_differences(function: Callable[[Array], float], at: Array) -> Array:
    """The gradient, coordinate by coordinate; exact in float64 where the function is linear within a step."""
    step = 2.0**-16
    slopes = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        moved = np.zeros_like(at)
        moved[index] = step
        slopes[index] = (function(at + moved) - function(at - moved)) / (2 * step)
    return slopes


def backward(case: str, theta: Array, x: Array, dy: Array, dtype: Any = np.float32) -> tuple[Array, Array, Array]:
    """Output, gradients and dx of the layer under test."""
    layer, work = build(case), Recorder(len(theta))
    params, grads = theta.astype(dtype), np.full_like(theta, np.nan, dtype)
    y, saved = layer.forward(work.take(x), Pass(params, work))
    output = y.copy()
    dx = layer.backward(saved, work.take(dy), Pass(params, work, grads, need_dx=True))
    assert dx is not None
    return output, grads, dx


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_layers_meet_the_oracle_exactly(case: str, dtype: Any) -> None:
    """Output and dx of every copy are the oracle's, and so are the gradients, rounded once to the band's dtype."""
    theta, x, dy = inputs(CASES[case], seed=1)
    y, grads, dx = backward(case, theta, x, dy, dtype)
    outputs = [oracle_forward(CASES[case], *one)[-1] for one in zip(theta, x, strict=True)]
    slopes = [oracle_backward(CASES[case], *one) for one in zip(theta, x, dy, strict=True)]
    assert np.array_equal(y, np.stack(outputs))
    assert np.array_equal(dx, np.stack([inward for _, inward in slopes]))
    assert grads.dtype == dtype
    assert np.array_equal(grads, np.stack([gradients for gradients, _ in slopes]).astype(dtype))


@pytest.mark.parametrize("wanted", ["parameters", "input"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_central_differences(case: str, wanted: str) -> None:
    """The gradients of sum(y dy) with respect to W, b and x are its slopes, taken of the oracle's forward alone."""
    theta, x, dy = inputs(CASES[case], seed=2)
    _, grads, dx = backward(case, theta, x, dy)

    def slopes(copy: int) -> Array:
        def value(at: Array) -> float:
            arguments = (at, x[copy]) if wanted == "parameters" else (theta[copy], at)
            return float((oracle_forward(CASES[case], *arguments)[-1] * dy[copy]).sum())

        return central_differences(value, (theta if wanted == "parameters" else x)[copy])

    assert np.array_equal(grads if wanted == "parameters" else dx, np.stack([slopes(copy) for copy in range(COPIES)]))


def test_gradients_are_rounded_once() -> None:
    """A gradient just above the middle of two bfloat16 goes up: by way of fp16 it would be the middle, and go down."""
    layer, work, gradient = Linear(1, 1, relu=False, name="layer"), Recorder(1), 1 + 2**-8 + 2**-12
    params = np.zeros((1, 2), ml_dtypes.bfloat16)
    grads = np.zeros_like(params)
    _, saved = layer.forward(work.take(np.ones((1, 1, 1))), Pass(params, work))
    layer.backward(saved, work.take(np.full((1, 1, 1), gradient)), Pass(params, work, grads, need_dx=False))
    assert grads.astype(np.float64).tolist() == [[1 + 2**-7] * 2]


def test_relu_passes_nothing_at_zero() -> None:
    """Where the pre-activation is exactly 0 the gradient is 0, as it is below."""
    layer, work = Linear(2, 3, relu=True, name="relu"), Recorder(1)
    params, grads = np.zeros((1, layer.size), np.float32), np.full((1, layer.size), np.nan, np.float32)
    _, saved = layer.forward(work.take(np.ones((1, 5, 2))), Pass(params, work))
    dx = layer.backward(saved, work.take(np.ones((1, 5, 3))), Pass(params, work, grads, need_dx=True))
    assert dx is not None
    assert not dx.any()
    assert not grads.any()


@pytest.mark.parametrize("case", CASES)
def test_gradients_do_not_depend_on_whether_dx_is_needed(case: str) -> None:
    """Without need_dx nothing is returned, and the gradients have the same bits."""
    theta, x, dy = inputs(CASES[case], seed=3)
    _, expected, _ = backward(case, theta, x, dy)
    layer, work = build(case), Recorder(COPIES)
    params, grads = theta.astype(np.float32), np.full(theta.shape, np.nan, np.float32)
    _, saved = layer.forward(work.take(x), Pass(params, work))
    assert layer.backward(saved, work.take(dy), Pass(params, work, grads, need_dx=False)) is None
    assert np.array_equal(bits(grads), bits(expected))


# -- the layout


def test_the_flat_layout_is_w_row_by_row_then_b() -> None:
    """Fed with unit vectors, a layer returns the rows of W, which lie one after another, each plus b, which follows."""
    layer = Linear(3, 2, relu=False, name="layer")
    params = np.array([[1, 2, 3, 4, 5, 6, 10, 20]], np.float32)
    y, _ = layer.forward(np.eye(3, dtype=np.float32)[None], Pass(params, Recorder(1)))
    assert np.array_equal(y[0], [[1 + 10, 2 + 20], [3 + 10, 4 + 20], [5 + 10, 6 + 20]])


@pytest.mark.parametrize(("widths", "seed"), [((64, 128, 128, 64), 0), ((5, 7, 3), 2)])
def test_initial_values_are_drawn_layer_by_layer(widths: tuple[int, ...], seed: int) -> None:
    """Weights are He-scaled draws of default_rng(seed), layer by layer; biases are zero; a call gives a new copy."""
    rng, parts = np.random.default_rng(seed), []
    for fan_in, fan_out in pairwise(widths):
        weight = rng.standard_normal((fan_in, fan_out)) * np.sqrt(2 / fan_in)
        parts += [weight.astype(np.float32).reshape(-1), np.zeros(fan_out, np.float32)]
    model = MLP(widths, seed=seed)
    first, second = model.initial(), model.initial()
    first[0] = 0
    assert np.array_equal(bits(second), bits(np.concatenate(parts)))


def test_the_default_model() -> None:
    """MLP() is 64-128-128-64 from seed 0, ReLU between layers and none at the end: 33,088 parameters."""
    model = MLP()
    assert (model.widths, model.seed) == ((64, 128, 128, 64), 0)
    assert model.n_params == (64 * 128 + 128) + (128 * 128 + 128) + (128 * 64 + 64) == 33_088
    linear = [layer for layer in model.layers if isinstance(layer, Linear)]
    assert [layer.relu for layer in linear] == [True, True, False]
    assert len({layer.name for layer in linear}) == 3


@pytest.mark.parametrize("widths", [(), (5,), (5, 0), (5, -3, 2)])
def test_bad_widths_are_refused(widths: tuple[int, ...]) -> None:
    """Fewer than two widths, or one below 1, is a ValueError that shows them."""
    with pytest.raises(ValueError, match=r"MLP\(widths\).*two or more positive integers") as caught:
        MLP(widths)
    assert repr(widths) in str(caught.value)


# -- copies


def train(model: MLP, params: Array, x: Array, target: Array, padding: int = 0) -> list[Array]:
    """Outputs, losses, their gradient and the parameters' of one pass, as raw bits."""
    work = Recorder(len(params))
    padded = np.pad(params, ((0, 0), (0, padding)))
    grads = np.zeros_like(padded)
    y, saved = model.forward(work.take(x), Pass(padded, work))
    losses, dy = model.loss(y, work.take(target), work)
    seen = [bits(y.copy()), bits(losses), bits(dy.copy())]
    model.backward(saved, dy, Pass(padded, work, grads, need_dx=False))
    return [*seen, bits(grads[:, : params.shape[1]])]


def gaussian(model: MLP, copies: int, rows: int, dtype: Any) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(11)
    noise = 0.1 * rng.standard_normal((copies, model.n_params))
    x, target = (rng.standard_normal((copies, rows, model.widths[end])) for end in (0, -1))
    return (model.initial() + noise).astype(dtype), x.astype(np.float32), target.astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("widths", [(64, 128, 128, 64), (7, 11, 5, 3)])
def test_a_copy_does_not_know_how_many_others_there_are(widths: tuple[int, ...], rows: int, dtype: Any) -> None:
    """A copy computed alone, with other padding, has the bits that it has among five."""
    model = MLP(widths)
    params, x, target = gaussian(model, 5, rows, dtype)
    together = train(model, params, x, target)
    rows_of = [slice(copy, copy + 1) for copy in range(5)]
    alone = [train(model, params[one], x[one], target[one], padding=3) for one in rows_of]
    for index, whole in enumerate(together):
        assert np.array_equal(whole, np.concatenate([one[index] for one in alone]))


def test_copies_do_not_influence_each_other() -> None:
    """NaN in everything that one copy is given leaves every bit of the other copies as it was."""
    model = MLP((7, 11, 5))
    given = gaussian(model, 5, 3, np.float16)
    clean = train(model, *given)
    others = [0, 1, 3, 4]
    for array in given:
        array[2] = np.nan
    for before, after in zip(clean, train(model, *given), strict=True):
        assert np.array_equal(before[others], after[others])
        assert not np.array_equal(before[2], after[2])


@pytest.mark.parametrize("at_a_time", [0.5, 1, 2, 4])
def test_register_size_does_not_change_the_bits(at_a_time: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going through five copies one, two or four at a time gives the bits of all at once, ragged ends included."""
    model = MLP((7, 11))
    given = gaussian(model, 5, 3, np.float16)
    expected = train(model, *given)
    sizes: list[tuple[int, ...]] = []
    empty_like: Any = np.empty_like

    def spy(*args: Any, shape: tuple[int, ...]) -> Any:
        sizes.append(shape)
        return empty_like(*args, shape=shape)

    monkeypatch.setattr(np, "empty_like", spy)
    monkeypatch.setattr(model_module, "_REGISTER_BYTES", int(at_a_time * 4 * model.n_params))
    found = train(model, *given)
    assert sizes == [(max(1, int(at_a_time)), model.n_params)] * 2  # forward's register and backward's
    for before, after in zip(expected, found, strict=True):
        assert np.array_equal(before, after)


# -- what is held


def test_a_layer_frees_its_output_and_the_gradient_it_is_handed() -> None:
    """Backward gives back the layer's output, then holds dx, then gives back dy; the input is not the layer's."""
    layer, work = Linear(3, 2, relu=True, name="layer"), Recorder(COPIES)
    params = np.ones((COPIES, layer.size), np.float32)
    x = work.take(np.ones((COPIES, 5, 3)))
    y, saved = layer.forward(x, Pass(params, work))
    assert [id(array) for array in work.live] == [id(x), id(y)]
    dy = work.take(np.ones((COPIES, 5, 2)))
    del work.log[:]
    dx = layer.backward(saved, dy, Pass(params, work, np.empty_like(params), need_dx=True))
    assert [(each.what, each.shape) for each in work.log] == [("free", (5, 2)), ("hold", (5, 3)), ("free", (5, 2))]
    assert [id(array) for array in work.live] == [id(x), id(dx)]


def test_the_loss_frees_the_target_after_its_gradient_is_held() -> None:
    """The loss holds its gradient beside the target, which it frees; the prediction remains its layer's."""
    model, work = MLP((2, 3)), Recorder(COPIES)
    y, target = work.take(np.ones((COPIES, 5, 3))), work.take(np.zeros((COPIES, 5, 3)))
    del work.log[:]
    _, dy = model.loss(y, target, work)
    assert [(each.what, each.shape) for each in work.log] == [("hold", (5, 3)), ("free", (5, 3))]
    assert [id(array) for array in work.live] == [id(y), id(dy)]


@pytest.mark.parametrize("need_dx", [False, True])
def test_a_pass_leaves_nothing_behind(need_dx: bool) -> None:
    """After forward, loss and backward, the input and, if it was asked for, its gradient are all that is held."""
    model, work = MLP((3, 5, 7, 2)), Recorder(COPIES)
    params = np.tile(model.initial(), (COPIES, 1))
    x = work.take(np.ones((COPIES, 11, 3)))
    y, saved = model.forward(x, Pass(params, work))
    assert [array.shape[2] for array in work.live] == [3, 5, 7, 2]
    _, dy = model.loss(y, work.take(np.zeros((COPIES, 11, 2))), work)
    dx = model.backward(saved, dy, Pass(params, work, np.empty_like(params), need_dx=need_dx))
    assert (dx is not None) == need_dx
    assert [id(array) for array in work.live] == [id(x)] + [id(dx)] * need_dx


@pytest.mark.parametrize("need_dx", [False, True])
def test_flops_are_two_per_multiplication(need_dx: bool) -> None:
    """A product of matrices counts 2 B I O: one forward, two backward, but one in a first layer that needs no dx."""
    model, work = MLP((3, 5, 7)), Recorder(COPIES)
    params = np.tile(model.initial(), (COPIES, 1))
    y, saved = model.forward(work.take(np.ones((COPIES, 11, 3))), Pass(params, work))
    assert work.operations == 2 * 11 * 3 * 5 + 2 * 11 * 5 * 7
    model.backward(saved, work.take(y), Pass(params, work, np.empty_like(params), need_dx=need_dx))
    forward, again = 2 * 11 * (3 * 5 + 5 * 7), 2 * 11 * 3 * 5
    assert work.operations == forward + 2 * forward - (0 if need_dx else again)


# -- the loss


def test_the_loss_is_each_copys_mean_square() -> None:
    """Losses are the float64 means over a copy's own rows and columns; their gradient is 2 (y - target) / (B O)."""
    rng, work = np.random.default_rng(5), Recorder(COPIES)
    y, target = whole_numbers(rng, COPIES, ROWS, 7), whole_numbers(rng, COPIES, ROWS, 7)
    losses, dy = MLP((2, 7)).loss(work.take(y), work.take(target), work)
    assert np.array_equal(losses, [((y[copy] - target[copy]) ** 2).sum() / (ROWS * 7) for copy in range(COPIES)])
    # The factor 2 / (B O) is rounded to fp32 once, the product once more: 2^-24 each, relative.
    np.testing.assert_allclose(dy, 2 * (y - target) / (ROWS * 7), rtol=2.01 * 2**-24, atol=0)


# -- what is read


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("index", "column"), [(2 * 3 + 1, 1), (5 * 3 + 2, 2)], ids=["weight", "bias"])
def test_forward_reads_the_working_copy(index: int, column: int, dtype: Any) -> None:
    """One flipped bit of a parameter in its own dtype changes the outputs that it takes part in, and no others."""
    layer = Linear(5, 3, relu=False, name="layer")
    theta, x, _ = inputs(((5, 3, False),), seed=4)
    params, x = (theta + 3).astype(dtype), (x + 3).astype(np.float32)  # none is 0, whose last bit would be lost
    before, _ = layer.forward(x, Pass(params, Recorder(COPIES)))
    params.view(f"u{params.itemsize}")[:, index] ^= 1
    after, _ = layer.forward(x, Pass(params, Recorder(COPIES)))
    changed = bits(before) != bits(after)
    assert changed[:, :, column].all()
    assert not np.delete(changed, column, axis=2).any()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_backward_reads_the_working_copy(dtype: Any) -> None:
    """One flipped bit of a weight changes the gradient of the input that it multiplies, and no other."""
    theta, x, dy = inputs(CASES["linear"], seed=6)
    params = (theta + 3).astype(dtype)
    _, _, before = backward("linear", params, x, dy + 3, dtype)
    params.view(f"u{params.itemsize}")[:, 2 * 3 + 1] ^= 1
    _, _, after = backward("linear", params, x, dy + 3, dtype)
    changed = bits(before) != bits(after)
    assert changed[:, :, 2].all()
    assert not np.delete(changed, 2, axis=2).any()


def test_a_linear_layer_does_not_write_its_parameters() -> None:
    """Backward leaves fp32 parameters alone where the gradients are narrower, and has no other place to round them."""
    [layer] = MLP((3, 2)).linears
    work = Recorder(2)
    params = np.linspace(-1, 1, 2 * layer.size, dtype=np.float32).reshape(2, -1)
    before = params.copy()
    _, saved = layer.forward(work.take(np.full((2, 5, 3), 0.3)), Pass(params, work))
    layer.backward(saved, work.take(np.full((2, 5, 2), 0.7)), Pass(params, work, np.empty((2, layer.size), np.float16)))
    assert np.array_equal(params, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_padding_is_neither_read_nor_written(case: str, dtype: Any) -> None:
    """NaN after the last parameter changes no bit, and what lies after the last gradient stays there."""
    theta, x, dy = inputs(CASES[case], seed=7)
    layer, work = build(case), Recorder(COPIES)
    padded = np.pad(theta.astype(np.float32), ((0, 0), (0, 13)), constant_values=np.nan).astype(dtype)
    grads = np.full(padded.shape, 77, dtype)
    y, saved = layer.forward(work.take(x), Pass(padded, work))
    output = y.copy()
    dx = layer.backward(saved, work.take(dy), Pass(padded, work, grads, need_dx=True))
    assert dx is not None
    expected = backward(case, theta, x, dy, dtype)
    for found, alone in zip((output, grads[:, : layer.size], dx), expected, strict=True):
        assert np.array_equal(bits(found), bits(alone))
    assert (grads[:, layer.size :] == 77).all()


@pytest.mark.parametrize("seed", [None, -1, True, 1.5, "1"], ids=repr)
@pytest.mark.usefixtures("as_users_call_it")
def test_a_seed_that_does_not_fix_the_weights_is_refused(seed: Any) -> None:
    """A seed is an integer of 0 or more: with anything else two schemes could start from different weights."""
    with pytest.raises((TypeError, ValueError), match=r"MLP\(seed\): seed must be an integer of 0 or more"):
        MLP((3, 2), seed=seed)
