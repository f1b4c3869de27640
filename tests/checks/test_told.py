"""What ranks tell each other, written a second time: the two accounts of a loss scale, and the norm's coefficient."""

from math import inf

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from zerosim.checks.told import ScaleAccount, coefficient, measure, totals
from zerosim.options import LossScale
from zerosim.scaling import Scaler

RULES = st.builds(
    LossScale, init=st.integers(-9, 127).map(lambda power: 2.0**power), growth=st.sampled_from([2.0, 3.0]),
    backoff=st.sampled_from([0.5, 0.25]), interval=st.integers(1, 4), hysteresis=st.integers(1, 3),
    least=st.sampled_from([0.0, 1.0, 64.0]), dynamic=st.sampled_from([True, True, True, False]),
)  # fmt: skip


@given(RULES, st.lists(st.booleans(), max_size=30))
def test_both_accounts_of_a_loss_scale_agree(rule: LossScale, finite: list[bool]) -> None:
    """Whatever the rule and whichever steps overflow, after each step the run's scale is the reference's."""
    run, account = Scaler(rule), ScaleAccount(rule)
    assert run.scale == account.scale == rule.init
    for each in finite:
        run.update(finite=each)
        account.step(finite=each)
        assert run.scale == account.scale


@pytest.mark.parametrize("account", [False, True])
def test_a_loss_scale_follows_torch_and_deepspeed(account: bool) -> None:
    """It grows after an interval without an overflow, begun anew with each, and backs off when none is tolerated."""
    rule = LossScale(init=64.0, interval=3, hysteresis=2, least=20.0)
    follower = ScaleAccount(rule) if account else Scaler(rule)
    step = follower.step if isinstance(follower, ScaleAccount) else follower.update
    seen = []
    for finite in (True, True, True, True, False, False, False, False, True, True, True, False, False):
        step(finite=finite)
        seen.append(follower.scale)
    grown = [64.0, 64.0, 128.0]
    assert seen == [*grown, 128.0, 128.0, 64.0, 32.0, 20.0, 20.0, 20.0, 40.0, 40.0, 20.0]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_each_rank_hears_of_the_others_after_as_many_hops(weights: list[int]) -> None:
    """Rank m's number reaches rank r with hop m - r; with nothing lost all hear the sum."""
    n = len(weights)
    assert totals(weights, 1.0) == [sum(weights)] * n
    assert totals(weights, 0.5) == [sum(weights[(r + hop) % n] / 2**hop for hop in range(n)) for r in range(n)]


def test_gradients_are_scaled_to_the_largest_norm_and_never_up() -> None:
    """To what is asked for over what there is, with eps added to that; what is small stays."""
    assert coefficient(np.float32(7), 2.0, 1.0) == np.float32(2) / np.float32(8)
    assert coefficient(np.float32(0.5), 2.0, 1.0) == 1
    assert [measure(np.array([3, -4, 0], np.float32), kind) for kind in (2, inf)] == [25, 4]
