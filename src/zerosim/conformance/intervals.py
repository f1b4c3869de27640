"""Between which two numbers each element must lie, taken through the optimizer.

Owns intervals [lo, hi] of fp64 and what an update makes of them: the gradient's bound goes in,
the parameter's comes out. A fixed tolerance would not do: Adam divides by the gradient's size,
so that near zero the smallest error of a gradient decides the sign of an update. Must not know
ranks, nor what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.bands import BF16, FP16, FP32, Array, DType
from zerosim.records.conformance import Rule

U = 2.0**-24  # half a unit in the last place of fp32, relative
ROUNDINGS = 16  # of fp32, allowed for what the optimizer computes before it is added to the parameter
_UNITS = {FP32: U, FP16: 2.0**-11, BF16: 2.0**-8, np.dtype(np.float64): 2.0**-53}
_TINY = {FP32: 2.0**-150, FP16: 2.0**-25, BF16: 2.0**-134, np.dtype(np.float64): 0.0}


def unit(dtype: DType) -> float:
    """The largest relative error of rounding to a dtype."""
    return _UNITS[dtype]


def narrow(dtype: DType) -> bool:
    """Whether a dtype has 16 bits, so that an optimizer needs master weights beside it."""
    return dtype.itemsize < 4


def tiny(dtype: DType) -> float:
    """The largest absolute error of rounding to a dtype near zero."""
    return _TINY[dtype]


@dataclass(frozen=True)
class Interval:
    """Lower and upper bounds [n], fp64."""

    lo: Array
    hi: Array

    def __getitem__(self, index: Any) -> Interval:
        return Interval(self.lo[index], self.hi[index])

    @property
    def middle(self) -> Array:
        """Halfway between the bounds [n]."""
        middle: Array = (self.lo + self.hi) / 2
        return middle

    @property
    def width(self) -> Array:
        """From bound to bound [n]."""
        width: Array = self.hi - self.lo
        return width

    @property
    def size(self) -> Array:
        """The largest magnitude in it [n]."""
        size: Array = np.maximum(np.abs(self.lo), np.abs(self.hi))
        return size

    def times(self, low: float, high: float | None = None) -> Interval:
        """Multiplied by a number of 0 or more, or by any between two such."""
        high = low if high is None else high
        return Interval(np.minimum(self.lo * low, self.lo * high), np.maximum(self.hi * low, self.hi * high))

    def plus(self, other: Interval) -> Interval:
        """The sums of what is in it and in another."""
        return Interval(self.lo + other.lo, self.hi + other.hi)

    def wider(self, by: Array | float) -> Interval:
        """With so much more room on both sides."""
        return Interval(self.lo - by, self.hi + by)

    def outside(self, values: Array) -> Array:
        """Which values are not within [n]; what is no number is not."""
        values = values.astype(np.float64)
        outside: Array = ~((values >= self.lo) & (values <= self.hi))
        return outside

    def where(self, mask: Array, other: float = np.nan) -> Interval:
        """The same where ``mask`` [n] is true, and ``other`` elsewhere: by default nothing is within that."""
        return Interval(np.where(mask, self.lo, other), np.where(mask, self.hi, other))


def point(values: Array) -> Interval:
    """Exactly these."""
    exact = values.astype(np.float64)
    return Interval(exact, exact)


def rounded(interval: Interval, dtype: DType) -> Interval:
    """Rounded to a dtype: to the nearest, which keeps their order."""
    with np.errstate(over="ignore"):
        return Interval(*(bound.astype(dtype).astype(np.float64) for bound in (interval.lo, interval.hi)))


def before_rounding(values: Array) -> Interval:
    """What may have been rounded to these."""
    exact = values.astype(np.float64)
    radius = np.abs(exact) * unit(values.dtype) * 1.01 + tiny(values.dtype)
    return Interval(exact - radius, exact + radius)


State = dict[str, Interval]


@dataclass(frozen=True)
class Variant:
    """How an update may differ from the rule: what is tried when one has gone wrong. The default is the rule itself."""

    lr: float = 1.0
    corrected: bool = True
    eps_inside: bool = False
    decay: str = ""  # "none", "coupled", "decoupled", "twice", or "all" by this amount
    amount: float = 0.0
    forget: bool = False  # the state is new in every step
    swapped: bool = False  # the betas
    ascent: bool = False


def update(
    rule: Rule, theta: Interval, state: State, grad: Interval, step: int, *, lr: float | None = None,
    variant: Variant | None = None,
) -> tuple[Interval, State]:  # fmt: skip
    """The parameters [n] after an update in step ``step`` (from 1), in fp32, and the state after it.

    ``theta`` and ``state`` are those before it, ``grad`` the averaged gradient; ``lr`` is this step's, if not the
    rule's. Rounding in fp32 within the optimizer is allowed for.
    """
    variant = variant or Variant()
    rate = (rule.lr if lr is None else lr) * variant.lr * (-1 if variant.ascent else 1)
    decoupled = {"coupled": False, "decoupled": True}.get(variant.decay, rule.decoupled)
    decay = {"none": 0.0, "twice": 2 * rule.weight_decay, "all": variant.amount}.get(variant.decay, rule.weight_decay)
    size = theta.size
    if decay and not decoupled:
        shift = theta.times(decay)
        grad = grad.plus(shift).wider(2 * U * (decay * size + grad.size))
    if rule.kind == "adam":
        change, after = _adam(rule, state, grad, step, variant)
    else:
        change, after = _sgd(rule, state, grad)
    kept = theta.times(1 - rate * decay) if decay and decoupled else theta
    moved = change.times(abs(rate))
    result = Interval(kept.lo - moved.hi, kept.hi - moved.lo) if rate >= 0 else kept.plus(moved)
    most = result.size
    roundings = 1.001 + bool(decay)  # of the parameter itself: the last addition, and weight decay
    slack = ROUNDINGS * U * abs(rate) * change.size + roundings * U * np.maximum(most, size) + tiny(FP32)
    return result.wider(slack), after


def _sgd(rule: Rule, state: State, grad: Interval) -> tuple[Interval, State]:
    if not rule.momentum:
        return grad, {}
    before = state.get("momentum", point(np.zeros_like(grad.lo)))
    after = before.times(rule.momentum).plus(grad)
    after = after.wider(4 * U * (before.size + grad.size))
    return after, {"momentum": after}


def _adam(rule: Rule, state: State, grad: Interval, step: int, variant: Variant) -> tuple[Interval, State]:
    beta1, beta2 = rule.betas[::-1] if variant.swapped else rule.betas
    zero = point(np.zeros_like(grad.lo))
    m, v = (zero, zero) if variant.forget else (state.get("exp_avg", zero), state.get("exp_avg_sq", zero))
    weight1, weight2 = 1 - beta1, 1 - beta2
    first = 1 - beta1**step if variant.corrected else 1.0
    root = (1 - beta2**step) ** 0.5 if variant.corrected else 1.0
    eps = rule.eps
    c = v.times(beta2)
    if variant.eps_inside:
        c = Interval(c.lo + eps * root**2, c.hi + eps * root**2)
    lowest, highest = _extremes(m.times(beta1), c, grad, weight1, weight2, 0.0 if variant.eps_inside else eps * root)
    change = Interval(lowest, highest).times(root / first)
    squares = Interval(
        np.where((grad.lo <= 0) & (grad.hi >= 0), 0.0, np.minimum(grad.lo**2, grad.hi**2)),
        np.maximum(grad.lo**2, grad.hi**2),
    )
    exp_avg = m.times(beta1).plus(grad.times(weight1)).wider(4 * U * (m.size + weight1 * grad.size))
    exp_avg_sq = v.times(beta2).plus(squares.times(weight2))
    slack = 4 * U * exp_avg_sq.hi + 2.0**-149
    return change, {
        "exp_avg": exp_avg,
        "exp_avg_sq": Interval(np.maximum(exp_avg_sq.lo - slack, 0), exp_avg_sq.hi + slack),
    }


def _extremes(a: Interval, c: Interval, g: Interval, b: float, d: float, eps: float) -> tuple[Array, Array]:
    """The least and the most of (a + b g) / (sqrt(c + d g²) + eps) over a, c and g in their intervals.

    It grows with a and, in size, falls with c, so these two are at their ends; in g it has two turning
    points at most, where (a d g - b c)² = b² eps² (c + d g²).
    """
    found = []
    for ends, pick in ((a.lo, np.minimum), (a.hi, np.maximum)):
        best = None
        for squares in (c.lo, c.hi):
            squares = np.maximum(squares, 0)
            for at in (g.lo, g.hi, *_turning(ends, squares, b, d, eps)):
                at = np.clip(at, g.lo, g.hi)
                below = np.sqrt(squares + d * at * at) + eps
                value = np.where(below > 0, (ends + b * at) / np.where(below > 0, below, 1), 0.0)
                best = value if best is None else pick(best, value)
        found.append(best)
    least, most = found
    assert least is not None
    assert most is not None
    return least, most


def _turning(a: Array, c: Array, b: float, d: float, eps: float) -> tuple[Array, Array]:
    """Where the derivative in g may be zero; anything where it nowhere is."""
    with np.errstate(all="ignore"):
        quadratic = a * a * d * d - b * b * eps * eps * d
        linear = -2 * a * b * c * d
        constant = b * b * c * c - b * b * eps * eps * c
        inner = np.sqrt(np.maximum(linear * linear - 4 * quadratic * constant, 0))
        one, other = (-linear + inner) / (2 * quadratic), (-linear - inner) / (2 * quadratic)
    return np.nan_to_num(one, posinf=0, neginf=0), np.nan_to_num(other, posinf=0, neginf=0)
