"""The flat layout: which layers and parameters go together, and where in the buffers they start."""

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from zerosim.bands import Band
from zerosim.buckets import PADDINGS, distinct, shared, split
from zerosim.layers import Group, Role
from zerosim.model import MLP
from zerosim.stages import ROWS, Stage

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

ANY_WIDTHS = st.lists(st.integers(1, 7), min_size=2, max_size=6).map(tuple)


@dataclass
class Listing:
    """A layer that lists groups and computes nothing."""

    groups: tuple[Group, ...]


@settings(max_examples=30)
@given(st.sampled_from(ROWS), ANY_WIDTHS, st.sampled_from(["layer", "model", 30]))
def test_a_scheme_starts_with_the_models_parameters_one_after_the_other(
    row: Stage, widths: tuple[int, ...], bucket: Any
) -> None:
    """However many layers, whoever owns what: put together again, the parameters are those that the model has."""
    node = 2 if row.two_axes or row.reshard_after_forward == "group" else None
    scheme = row(MLP(widths), 4, node=node, precision="fp32", bucket=bucket)
    assert scheme.flat(Band.PARAMS).tobytes() == MLP(widths).initial().tobytes()


@given(ANY_WIDTHS, st.integers(1, 120))
def test_layers_are_joined_in_order_while_they_fit(widths: tuple[int, ...], most: int) -> None:
    """Up to a size: none is left out, moved or too large, but a layer alone, and none would have taken the next."""
    joined = split(MLP(widths), most)
    members = [[part for group in layer.groups for part in group.parts or (group,)] for layer in joined]
    sizes = [[part.size for part in some] for some in members]
    assert [part.name for some in members for part in some] == [layer.name for layer in MLP(widths).layers]
    assert all(sum(some) <= most or len(some) == 1 for some in sizes)
    assert all(sum(some) + following[0] > most for some, following in pairwise(sizes))
    for layer, some in zip(joined, members, strict=True):
        name = some[0].name if len(some) == 1 else f"{some[0].name} to {some[-1].name}"
        assert (layer.name, [group.name for group in layer.groups]) == (name, [name])


@given(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4), st.integers(1, 6))
def test_a_group_takes_up_what_its_rule_says(shapes: list[tuple[int, ...]], ranks: int) -> None:
    """All of it to a multiple of N or 2 N, each parameter to one of N, or each one's rows, of which a scalar is one."""

    def up(size: int, multiple: int) -> int:
        return next(whole for whole in range(size, size + multiple) if whole % multiple == 0)

    group = Group("some", tuple(shapes))
    assert {name: rule(group, ranks) for name, rule in PADDINGS.items()} == {
        "N": up(sum(map(prod, shapes)), ranks),
        "2N": up(sum(map(prod, shapes)), 2 * ranks),
        "each": sum(up(prod(shape), ranks) for shape in shapes),
        "rows": sum(up((*shape, 1)[0], ranks) * prod(shape[1:]) for shape in shapes),
    }


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6))
def test_what_is_listed_twice_is_one_group_and_shared(listed: list[list[int]]) -> None:
    """Each group is there once, where it came first; shared are those that layers list more than once."""
    groups = [Group(str(number), ((number,),), Role.TRAINABLE) for number in range(6)]
    layers: Any = [Listing(tuple(groups[number] for number in some)) for some in listed]
    flat = [number for some in listed for number in some]
    once = sorted(set(flat), key=flat.index)
    assert distinct(layers) == [groups[number] for number in once]
    assert shared(layers) == [groups[number] for number in once if flat.count(number) > 1]
