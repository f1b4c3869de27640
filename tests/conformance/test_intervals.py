"""What an update makes of a gradient's bounds holds what torch makes of any gradient within them, and not much more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from zerosim.bands import BF16, FP16, FP32  # noqa: E402
from zerosim.conformance.intervals import Interval, Variant, before_rounding, point, rounded, unit, update  # noqa: E402
from zerosim.records.conformance import Rule  # noqa: E402

N = 997
RULES: dict[str, tuple[Rule, Callable[[Any], Any]]] = {
    "Adam": (Rule(kind="adam", lr=1e-2), lambda p: torch.optim.Adam(p, lr=1e-2)),
    "AdamW": (
        Rule(kind="adam", lr=1e-3, weight_decay=0.1, decoupled=True),
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    ),
    "Adam with decay": (
        Rule(kind="adam", lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    ),
    "other betas": (
        Rule(kind="adam", lr=1e-2, betas=(0.5, 0.9), eps=1e-4),
        lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.5, 0.9), eps=1e-4),
    ),
    "SGD": (Rule(kind="sgd", lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        Rule(kind="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_torchs_update_lies_within(name: str, foreach: bool) -> None:
    """Five updates of torch's from gradients within bounds, sized 1e-9 to 10, stay within what comes of them."""
    rule, make = RULES[name]
    rng = np.random.default_rng(3)
    param = torch.nn.Parameter(torch.from_numpy(rng.standard_normal(N).astype(np.float32)))
    optimizer = make([param])
    optimizer.param_groups[0]["foreach"] = foreach
    theta, state = point(param.detach().numpy().copy()), dict[str, Interval]()
    for step in range(1, 6):
        grad = (rng.standard_normal(N) * 10.0 ** rng.uniform(-9, 1, N)).astype(np.float32)
        radius = np.abs(grad).astype(np.float64) * 10.0 ** rng.uniform(-7, 0.5, N)
        middle = grad + radius * rng.uniform(-0.99, 0.99, N)
        param.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        theta, state = update(rule, theta, state, Interval(middle - radius, middle + radius), step)
        assert not theta.outside(param.detach().numpy()).any()
        for band, key in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("momentum", "momentum_buffer")):
            if band in state:
                assert not state[band].outside(optimizer.state[param][key].numpy()).any()
        theta = point(param.detach().numpy().copy())


@pytest.mark.parametrize("name", RULES)
def test_an_exact_gradient_leaves_only_rounding(name: str) -> None:
    """From exact values the bounds are a few units in the last place apart: of the parameter, and of the update."""
    rule, _ = RULES[name]
    rng = np.random.default_rng(4)
    theta, grad = (point(rng.standard_normal(N).astype(np.float32)) for _ in range(2))
    after, _ = update(rule, theta, {}, grad, 1)
    moved = np.abs(after.middle - theta.middle) + rule.lr
    assert (after.width <= 5 * 2.0**-24 * np.maximum(np.abs(theta.lo), np.abs(after.hi)) + 64 * 2.0**-24 * moved).all()


def test_what_adam_divides_by_is_kept_together() -> None:
    """In the first step a gradient known to one part in 1,000 moves its parameter to one part in 1e8, not in 1,000."""
    grad = np.full(1, 1e-2)
    after, _ = update(Rule(kind="adam", lr=1.0), point(np.zeros(1)), {}, Interval(grad * 0.999, grad * 1.001), 1)
    assert after.width < 64 * 2.0**-24


def test_a_gradient_of_either_sign_may_move_either_way() -> None:
    """Where bounds include zero, Adam's first step may be the whole rate, up or down, and no more."""
    after, _ = update(
        Rule(kind="adam", lr=1.0), point(np.zeros(1)), {}, Interval(np.full(1, -1e-3), np.full(1, 1e-3)), 1
    )
    np.testing.assert_allclose([after.lo[0], after.hi[0]], [-1, 1], rtol=1e-4)


def test_extremes_between_the_ends_are_found() -> None:
    """Where the update is not monotone in the gradient, what lies between is within the bounds, sampled densely."""
    rule, rng = Rule(kind="adam", lr=1.0, betas=(0.9, 0.5)), np.random.default_rng(5)
    m, v = rng.standard_normal(N), rng.uniform(0, 1, N)
    low = rng.uniform(-3, 2, N)
    grad = Interval(low, low + rng.uniform(0, 3, N))
    after, _ = update(rule, point(np.zeros(N)), {"exp_avg": point(m), "exp_avg_sq": point(v)}, grad, 3)
    least, most = np.full(N, np.inf), np.full(N, -np.inf)
    for part in np.linspace(0, 1, 201):
        g = grad.lo + part * grad.width
        up = (0.9 * m + 0.1 * g) / (1 - 0.9**3) / (np.sqrt((0.5 * v + 0.5 * g * g) / (1 - 0.5**3)) + 1e-8)
        least, most = np.minimum(least, -up), np.maximum(most, -up)
    assert (after.lo <= least).all()
    assert (after.hi >= most).all()
    assert (after.lo >= least - 0.01 * (most - least) - 1e-5).all()
    assert (after.hi <= most + 0.01 * (most - least) + 1e-5).all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_rounding_and_what_was_rounded(dtype: np.dtype) -> None:
    """A value lies within what may have been rounded to its rounding, of normal and subnormal sizes."""
    rng = np.random.default_rng(6)
    values = rng.standard_normal(N) * 10.0 ** rng.uniform(-8, 3, N)
    kept = values.astype(dtype)
    assert not before_rounding(kept).outside(values).any()
    assert not rounded(point(values), dtype).outside(kept).any()
    assert unit(dtype) > unit(np.dtype(FP32))


@pytest.mark.parametrize(
    "variant",
    [Variant(lr=4.0), Variant(corrected=False), Variant(eps_inside=True), Variant(ascent=True), Variant(decay="none")],
)
def test_each_variant_is_another_update(variant: Variant) -> None:
    """What is tried when a step has gone wrong lies outside of what the rule makes."""
    rule = Rule(kind="adam", lr=1e-2, weight_decay=0.1, decoupled=True, eps=1e-3)
    rng = np.random.default_rng(7)
    theta, grad = (point(rng.standard_normal(N).astype(np.float32)) for _ in range(2))
    right, _ = update(rule, theta, {}, grad, 1)
    other, _ = update(rule, theta, {}, grad, 1, variant=variant)
    assert right.outside(other.middle).mean() > 0.9
