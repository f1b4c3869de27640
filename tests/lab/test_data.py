"""What the ranks train on."""

import importlib.util

import numpy as np
import pytest

from helpers import lab_settings
from zerosim.lab.data import DATA, batches
from zerosim.lab.experiment import batches_of, rows_of

WIDTHS = {"noise": (5, 3), "digits": (64, 64)}


@pytest.mark.parametrize("data", DATA)
def test_the_seed_fixes_every_batch(data: str) -> None:
    """The same seed draws the same bits, another seed does not."""
    one, same, other = (list(batches(data, 3, 2, 7, WIDTHS[data], seed)) for seed in (11, 11, 13))
    bits = [[[array.tobytes() for pair in step for array in pair] for step in run] for run in (one, same, other)]
    assert bits[0] == bits[1]
    assert bits[0] != bits[2]


@pytest.mark.parametrize("data", DATA)
def test_each_step_has_one_float32_pair_per_rank(data: str) -> None:
    """A batch is one (x, y) of the asked rows and widths per rank, float32, and no two ranks share memory."""
    steps = list(batches(data, 3, 2, 7, WIDTHS[data], 11))
    assert [len(step) for step in steps] == [3, 3]
    arrays = [array for step in steps for pair in step for array in pair]
    for index, array in enumerate(arrays):
        assert array.shape == (7, WIDTHS[data][index % 2])
        assert array.dtype == np.float32
        assert not any(np.shares_memory(array, other) for other in arrays[:index])


def test_noise_is_what_the_mission_draws() -> None:
    """Noise is standard normal, x and then y, rank by rank and step by step from one generator."""
    rng = np.random.default_rng(7)
    for step in batches("noise", 3, 2, 5, (64, 64), 7):
        for x, y in step:
            assert x.tobytes() == rng.standard_normal((5, 64)).astype(np.float32).tobytes()
            assert y.tobytes() == rng.standard_normal((5, 64)).astype(np.float32).tobytes()


def test_uneven_micro_batches_differ_by_rank_and_from_each_other() -> None:
    """Each has up to its share of the rows, some none, never all, and no row twice; the first window is short."""
    asked = lab_settings(uneven=True, accumulate=3, batch=6, steps=5)
    steps = list(batches_of(asked, 7, 5))
    counts = [[[len(x) for x, _ in pairs] for pairs in batch] for batch in steps]
    assert [{len(each) for each in step} for step in counts] == [{2}] + [{3}] * 4
    assert {count for step in counts for each in step for count in each} == {0, 1, 2}
    assert all(max(max(each) for each in step) == 2 for step in counts)
    assert any(len(set(each)) > 1 for step in counts for each in step)
    assert any(len({each[0] for each in step}) > 1 for step in counts)
    assert [rows_of(batch) for batch in steps] == [tuple(map(max, zip(*step, strict=True))) for step in counts]
    alone = lab_settings(uneven=True, accumulate=2, batch=2)
    assert {max(rows_of(batch)) for batch in batches_of(alone, 1, 41)} == {1}
    rows = np.concatenate([x for batch in steps for pairs in batch for x, _ in pairs])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_digits_are_to_be_reproduced() -> None:
    """A digit's target is itself, in 0..1, with pixels at both ends."""
    [[(x, y)]] = batches("digits", 1, 1, 97, (64, 64), 3)
    assert x.tobytes() == y.tobytes()
    assert (x.min(), x.max()) == (0, 1)


def test_digits_need_a_model_of_their_width() -> None:
    """Widths that digits do not have are refused, with the width that they do have."""
    with pytest.raises(ValueError, match=r"64 inputs and outputs.*\(5, 3\)"):
        next(batches("digits", 1, 1, 7, (5, 3), 3))


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn the error names the extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"zerosim\[digits\]"):
        next(batches("digits", 1, 1, 7, (64, 64), 3))
