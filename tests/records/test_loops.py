"""A list as loops: nothing is lost, and what repeats is written once."""

import hypothesis.strategies as st
from hypothesis import given

from zerosim.records.loops import folded, unfolded

few = st.lists(st.integers(0, 3), max_size=60)


@given(few)
def test_what_is_folded_unfolds(numbers: list[int]) -> None:
    """Whatever the list, it comes back as it was."""
    assert unfolded(folded(numbers)) == numbers


@given(few, st.integers(2, 9))
def test_more_layers_take_no_more_room(layer: list[int], times: int) -> None:
    """A stretch that comes again and again, as layers do within micro-batches, unfolds to as many."""
    step = [9, *layer * times, 8, *layer[::-1] * times, 7]
    assert unfolded(folded(step * 3)) == step * 3


def test_a_loop_is_as_long_as_its_body() -> None:
    """A hundred layers take the room of two, and micro-batches of them no more either."""

    def step(layers: int) -> list[int]:
        return [9, *[1, 2, 3, 2] * layers, 8, *[4, 5, 4, 6] * layers, 7]

    assert folded(step(100)) == [9, [100, [1, 2, 3, 2]], 8, [100, [4, 5, 4, 6]], 7]
    assert folded(step(100) * 3) == [[3, folded(step(100))]]
