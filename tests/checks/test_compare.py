"""What is said where two trainings differ: how many elements, how far, and where first."""

import math

import numpy as np
import pytest

from helpers import draw
from zerosim.bands import Band
from zerosim.checks import compare
from zerosim.model import MLP
from zerosim.schemes import DP, Scheme, Stage, ZeRO3


def trained(row: Stage = DP) -> Scheme:
    scheme = row(MLP((5, 3, 2)), 2, precision="fp32")
    scheme.step(draw(2, widths=(5, 3, 2)))
    return scheme


def test_what_is_alike_has_no_failure() -> None:
    """ZeRO-3's shards are data parallel's in every bit, and what has been compared is said."""
    difference, failures = compare.compare(trained(ZeRO3), compare.whole_states(trained()), 1)
    assert failures == []
    assert (difference.scheme, difference.step) == ("ZeRO-3", 1)
    bands = [Band.PARAMS, Band.EXP_AVG, Band.EXP_AVG_SQ]
    assert difference.differing == dict.fromkeys(bands, 0)
    assert difference.largest == dict.fromkeys(bands, 0.0)


def test_what_differs_is_counted_and_the_first_of_it_named() -> None:
    """Elements of all ranks, the largest distance, and for each rank and bucket the first, with both values."""
    scheme, reference = trained(), compare.whole_states(trained())
    first, second = (bucket.states[Band.EXP_AVG] for bucket in scheme.buckets)
    places = [(first, 0, 2, "layer 1"), (first, 1, 7, "layer 1"), (second, 1, 3, "layer 2")]
    before = [float(state[rank, at]) for state, rank, at, _ in places]
    first[1, 7:9] += np.float32(0.5)
    first[0, 2] -= np.float32(2)
    second[1, 3] += np.float32(1)
    difference, failures = compare.compare(scheme, reference, 3)
    assert difference.differing == {**dict.fromkeys(reference, 0), Band.EXP_AVG: 4}
    assert difference.largest[Band.EXP_AVG] == pytest.approx(2)
    assert [str(each) for each in failures] == [
        f"same training: data parallel, N = 2, step 3, rank {rank}: exp_avg of {layer}, element {at}: "
        f"measured {float(state[rank, at])!r}, expected {value!r}"
        for (state, rank, at, layer), value in zip(places, before, strict=True)
    ]
    first[0, 2] = np.nan
    assert math.isnan(compare.compare(scheme, reference, 3)[0].largest[Band.EXP_AVG])


def test_losses_are_compared_with_the_first_to_the_last_bit() -> None:
    """Another sign of zero is another loss; what is said names the scheme, the step and both."""
    losses = {"one": 0.0, "two": 0.0, "three": -0.0, "four": 1.5}
    assert [str(each) for each in compare.same_losses(losses, 4, 2, ", here")] == [
        "same training: three, N = 4, step 2, every rank: loss, here: measured -0.0, expected 0.0",
        "same training: four, N = 4, step 2, every rank: loss, here: measured 1.5, expected 0.0",
    ]
    assert compare.same_losses({}, 4, 2) == []
