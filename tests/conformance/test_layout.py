"""Where parameters lie, and how what a user has is brought there."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from zerosim.bands import BF16  # noqa: E402
from zerosim.conformance.handed import names_of, pieces_of  # noqa: E402
from zerosim.conformance.layout import Layout, Matcher, Memory, Piece, array_of, assemble, ranges, tensor_of  # noqa: E402
from zerosim.conformance.search import State  # noqa: E402
from zerosim.records.conformance import Parameter, Rule  # noqa: E402

ADAM = Rule(kind="adam", lr=1e-3)


def layout(**shapes: tuple[int, ...]) -> Layout:
    return Layout(
        [Parameter(name=name, shape=shape, trainable=True, unit="", rule=ADAM) for name, shape in shapes.items()]
    )


ABC = layout(a=(2, 3), b=(5,), c=(4,))  # 6, 5 and 4 elements


def test_positions() -> None:
    """Spans follow each other, and every position belongs to one parameter."""
    assert [ABC.span(name) for name in "abc"] == [slice(0, 6), slice(6, 11), slice(11, 15)]
    assert [ABC.at(position) for position in (0, 5, 6, 10, 11, 14)] == [
        ("a", 0), ("a", 5), ("b", 0), ("b", 4), ("c", 0), ("c", 3),
    ]  # fmt: skip
    assert ABC.size == 15


@pytest.mark.parametrize(
    ("offset", "length", "starts"),
    [(0, 15, [(0, 6), (6, 5), (11, 4)]), (4, 4, [(4, 2), (6, 2)]), (13, 4, [(13, 2)]), (16, 4, [])],
)
def test_a_flat_shard_is_cut_at_the_parameters(offset: int, length: int, starts: list[tuple[int, int]]) -> None:
    """A shard that crosses parameters becomes a piece of each, and padding beyond the end is left out."""
    shard = torch.arange(offset, offset + length, dtype=torch.float32)
    pieces = ABC.flat(shard, offset, ABC.names)
    assert [(start, len(values)) for start, values in pieces] == starts
    for start, values in pieces:
        np.testing.assert_array_equal(values, np.arange(start, start + len(values)))


def test_what_is_handed_over_in_each_form() -> None:
    """Whole tensors by name or in order, shards with their offsets, one flat shard of some of the parameters."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    names = [name for name, _ in net.named_parameters()]
    own = Layout(
        [Parameter(name=n, shape=tuple(p.shape), trainable=True, unit="", rule=ADAM) for n, p in net.named_parameters()]
    )
    whole = pieces_of(own, dict(net.named_parameters()), 0, names)()
    assert [piece.start for piece in whole] == [0, 6, 9, 12]
    assert [piece.start for piece in pieces_of(own, list(net.parameters()), 0, names)()] == [0, 6, 9, 12]
    second = names_of(own, net, net[1])
    assert second == ["1.weight", "1.bias"]
    assert [(p.start, len(p.values)) for p in pieces_of(own, torch.zeros(3), 2, second)()] == [(11, 1), (12, 1)]
    shards = pieces_of(own, {"0.weight": torch.zeros(2)}, {"0.weight": 4}, names)()
    assert [(p.start, len(p.values)) for p in shards] == [(4, 2)]


@pytest.mark.parametrize(
    ("tensors", "offset", "says"),
    [
        ({"x": 1}, 0, "no parameter 'x'"),
        ({"a": (3, 2)}, 0, "has shape \\[2, 3\\]; got \\[3, 2\\]"),
        ((2, 3), 0, "a flat shard; got shape \\[2, 3\\]"),
        ([(2, 3)], 0, "one tensor for each of the 3 parameters"),
        ({"a": 2}, {}, "first element of each shard"),
    ],
)
def test_what_fits_nothing_is_refused(tensors: object, offset: object, says: str) -> None:
    """Unknown names, other shapes, several dimensions, lists of another length, offsets that are missing."""

    def made(shape: object) -> object:
        if isinstance(shape, dict):
            return {name: made(each) for name, each in shape.items()}
        if isinstance(shape, list):
            return [made(each) for each in shape]
        return torch.zeros(shape)

    with pytest.raises(ValueError, match=says):
        pieces_of(ABC, made(tensors), offset, ABC.names)


def test_the_first_piece_counts() -> None:
    """Pieces fill what is not known yet, and say what is."""
    values, known = np.zeros(6), np.zeros(6, bool)
    assemble([Piece(1, np.ones(2)), Piece(0, np.full(4, 2.0))], values, known)
    assert values.tolist() == [2, 1, 1, 2, 0, 0]
    assert known.tolist() == [True] * 4 + [False] * 2
    assert ranges(known) == [(0, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_and_arrays_have_the_same_bits(dtype: object) -> None:
    """There and back, bfloat16 too."""
    tensor = torch.randn(7).to(dtype)
    array = array_of(tensor)
    assert torch.equal(tensor_of(array), tensor)
    assert (array.dtype == BF16) == (dtype == torch.bfloat16)


def test_copies_are_found_by_their_bits() -> None:
    """A copy of several parts is found part by part; what occurs twice counts only beside what does not."""
    rng = np.random.default_rng(1)
    flat = rng.standard_normal(50).astype(np.float32)
    flat[20:25] = 0
    matcher = Matcher(flat, np.ones(50, bool))
    given = np.concatenate([flat[18:28], flat[3:9], np.full(3, 7, np.float32)])
    assert matcher.find(given) == [(18, 0, 10), (3, 10, 6)]
    assert matcher.find(np.zeros(5, np.float32)) == []


def test_values_that_look_alike_end_no_copy() -> None:
    """Of an array of parts, the ones and zeros between two parts are of neither; an array that is one part has them."""
    flat = np.concatenate([np.arange(2, 12), np.ones(6), np.zeros(6), np.arange(20, 30)]).astype(np.float32)
    matcher = Matcher(flat, np.ones(len(flat), bool))
    assert matcher.find(np.concatenate([flat[8:12], flat[22:26]])) == [(8, 0, 2), (22, 4, 4)]  # 10, 11, 1, 1, 20, ...
    assert matcher.find(np.concatenate([flat[5:13], flat[16:18], flat[22:24]])) == [(5, 0, 5), (22, 10, 2)]
    assert matcher.find(flat[5:20]) == [(5, 0, 15)]
    assert matcher.find(np.concatenate([flat[18:], np.zeros(3, np.float32)])) == [(18, 0, 14)]


def test_memory_in_common_is_found() -> None:
    """A slice of the buffer that parameters are views of belongs to those that it overlaps."""
    flat = torch.arange(16, dtype=torch.float32)
    net = {"a": flat[:6].view(2, 3), "b": flat[6:11], "c": flat[11:15]}
    memory = Memory(ABC, net)
    shard = flat[4:8]
    assert memory.names(shard, grads=False) == ["a", "b"]
    assert [(p.start, p.values.tolist()) for p in memory.pieces(shard * 2, shard)] == [(4, [8, 10]), (6, [12, 14])]
    assert memory.names(torch.zeros(4), grads=False) == []


@pytest.mark.parametrize("factor", [1.0, 4.0, 0.25])
def test_an_optimizers_state_is_found_by_what_it_looks_like(factor: float) -> None:
    """Two tensors that are the gradient and its square times what belongs together, padded, whatever the factor."""
    rng = np.random.default_rng(2)
    grad = rng.standard_normal(15)
    mine = (factor * grad[8:15]).astype(np.float32)
    first = torch.from_numpy(np.concatenate([mine * 0.1, [0]]).astype(np.float32))
    second = torch.from_numpy(np.concatenate([mine**2 * 0.001, [0]]).astype(np.float32))
    others = [torch.from_numpy(mine), torch.from_numpy(mine**2), torch.randn(8)]
    found = State(ABC).look([*others, second, first], grad, ADAM)
    assert [(p.start, len(p.values)) for p in found["exp_avg"]] == [(8, 7)]
    np.testing.assert_array_equal(found["exp_avg"][0].values, first[:7].numpy())
    np.testing.assert_array_equal(found["exp_avg_sq"][0].values, second[:7].numpy())


def test_what_does_not_belong_together_is_no_state() -> None:
    """A first moment without its second, and factors that no Adam has, are not taken for one."""
    grad = np.random.default_rng(2).standard_normal(15)
    first, second = (torch.from_numpy(values.astype(np.float32)) for values in (grad * 0.1, grad**2 * 0.01))
    assert State(ABC).look([first], grad, ADAM) == {}
    assert State(ABC).look([first, second], grad, ADAM) == {}
