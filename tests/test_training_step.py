"""Norm, loss scale and uneven rows by hand, and what is refused of them."""

from typing import Any

import numpy as np
import pytest

import zerosim as zs
from helpers import draw
from zerosim.bands import Band
from zerosim.options import LossScale, Options
from zerosim.scaling import Scaler
from zerosim.stages import SCHEMES, ZeRO1

WIDTHS = (2, 4)  # 12 parameters, 6 for each of two ranks
each_scheme = pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.name)


@each_scheme
def test_two_shards_have_one_norm(row: Any) -> None:
    """Squares that sum to 20 and to 100 have the norm of 120 on every rank, which says what all are multiplied by."""
    run = row(zs.MLP(WIDTHS), 2, precision="fp32", clip=1.0)
    [bucket] = run.buckets
    whole = np.array([2, 4, 0, 0, 0, 0, 6, 8, 0, 0, 0, 0], np.float32)
    grads = bucket.states[Band.GRADS]
    grads[...] = whole if grads.shape[1] == len(whole) else whole.reshape(2, -1)
    with run.ledger.step():
        agreed = run.agreement.reach(1.0)
    np.testing.assert_allclose(agreed.norm, [120**0.5] * 2, rtol=1e-7)
    np.testing.assert_allclose(agreed.factor, [[1 / (120**0.5 + 1e-6)]] * 2, rtol=1e-6)


def test_six_overflows_in_a_row() -> None:
    """With a hysteresis of 2 the first is tolerated, and each that follows halves the scale."""
    scaler, seen = Scaler(LossScale(hysteresis=2)), []
    for _ in range(6):
        scaler.update(finite=False)
        seen.append(scaler.scale)
    assert seen == [65536.0, 32768.0, 16384.0, 8192.0, 4096.0, 2048.0]


@pytest.mark.parametrize("clip", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_largest_norm_that_is_none_is_refused(clip: float) -> None:
    """The error names the option, the rule and the value."""
    with pytest.raises(ValueError, match=rf"Scheme\(clip\): .* positive, finite number; got {clip}"):
        Options(clip=clip)


@pytest.mark.parametrize("norm_type", [1.0, 0.0, float("nan")])
def test_a_norm_of_another_type_is_refused(norm_type: float) -> None:
    """There are two."""
    with pytest.raises(ValueError, match=rf"Scheme\(norm_type\): 2 or inf; got {norm_type}"):
        Options(norm_type=norm_type)


@pytest.mark.parametrize(
    "rule",
    [
        {"init": 0.0}, {"init": -1.0}, {"init": float("nan")}, {"init": float("inf")}, {"growth": 1.0},
        {"backoff": 1.0}, {"backoff": 0.0}, {"least": -1.0}, {"interval": 0}, {"hysteresis": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_loss_scale_that_cannot_be_is_refused(rule: dict[str, Any]) -> None:
    """Whatever number of it cannot be, in words."""
    with pytest.raises(ValueError, match="LossScale"):
        LossScale(**rule)


def test_a_scale_that_is_no_power_of_two_is_noted() -> None:
    """It is taken, with a warning; powers of two, below 1 too, have none."""
    with pytest.warns(UserWarning, match=r"1000.0 is no power of two, so that scaling rounds gradients"):
        Options(loss_scale=1000.0)
    with pytest.warns(UserWarning, match=r"3.0 is no power of two"):
        Options(loss_scale=LossScale(growth=3.0))
    assert Options(loss_scale=0.25).loss_scale == LossScale(0.25, dynamic=False)


@each_scheme
@pytest.mark.parametrize("nothing", ["rows", "weights"])
def test_nothing_to_average_is_refused_and_changes_nothing(row: Any, nothing: str) -> None:
    """Weights that sum to zero, or no rows at all, are refused in words, and every state stays as it was."""
    run = row(zs.MLP(WIDTHS), 2, uneven=True)
    batch = draw(2, 3, WIDTHS)
    run.step(batch)
    before = [state.tobytes() for bucket in run.buckets for state in bucket.states.values()]
    empty, weights = ([(x[:0], y[:0]) for x, y in batch], None) if nothing == "rows" else (batch, [0, 0])
    with pytest.raises(ValueError, match="the rows or weights of all ranks sum to zero"):
        run.step(empty, weights=weights)
    assert [state.tobytes() for bucket in run.buckets for state in bucket.states.values()] == before
    assert (run.steps, run.updates) == (1, 1)


@pytest.mark.parametrize("weights", [[-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_a_weight_that_is_none_is_refused(weights: list[float]) -> None:
    """Weights are finite and not negative."""
    with pytest.raises(ValueError, match=r"step\(weights\): weights are finite and not negative"):
        ZeRO1(zs.MLP(WIDTHS), 2, uneven=True).step(draw(2, 3, WIDTHS), weights=weights)


def test_ranks_are_weighed_only_where_they_may_differ() -> None:
    """Weights for an even batch say what to pass."""
    with pytest.raises(ValueError, match="Pass uneven=True"):
        ZeRO1(zs.MLP(WIDTHS), 2).step(draw(2, 3, WIDTHS), weights=[1, 1])


@each_scheme
def test_one_and_three_rows_are_four(row: Any) -> None:
    """The loss is the average over all rows, and the naive mean of two means is said beside it."""
    run = row(zs.MLP(WIDTHS), 2, uneven=True)
    [(x, y), other] = draw(2, 3, WIDTHS)
    loss = run.step([(x[:1], y[:1]), other])
    first, second = run.reports[-1].losses
    assert loss == pytest.approx((first + 3 * second) / 4, rel=1e-15)
    assert run.reports[-1].mean_of_means == pytest.approx((first + second) / 2, rel=1e-15)
