"""Holds what ranks have after a step to what they must have: gradients, the optimizer's state, parameters.

Owns these comparisons, each of which finds the first thing that is wrong or nothing. Must not know how the
evidence came about, nor what is carried on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zerosim.bands import Array
from zerosim.conformance import diagnose
from zerosim.conformance.culprits import Culprit, Wrong, culprit
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.intervals import Interval, State, U, rounded, unit
from zerosim.conformance.reading import Rows, union
from zerosim.records.conformance import Cause, Finding

RIGHT = "Gradients were right."


def gradients(e: Evidence, band: str, rows: Rows) -> Finding | None:
    """Averaged gradients that were seen or handed over, before or after clipping."""
    values, known = rows
    within = _allowed(e, e.clipped, values)
    if e.recipe.clip is not None and band == "handed grads":
        whole = _allowed(e, e.average, values)
        if (whole.outside(values) & known).sum() < (within.outside(values) & known).sum():
            within = whole
    mask = known & e.mask & np.stack([within.outside(row) for row in values])
    if not mask.any():
        return None
    wrong = Wrong(mask, values, known, within)
    who = _rank_of(e, wrong)
    named, who = diagnose.of_gradients(e, wrong, who)
    return diagnose.finding(e, "gradient", wrong, who, named, "")


def _allowed(e: Evidence, grad: Interval, values: Array) -> Interval:
    if e.exact is not None and e.recipe.clip is None:
        return rounded(grad, values.dtype)
    size = np.maximum(np.abs(grad.lo), np.abs(grad.hi))
    return grad.wider(unit(values.dtype) * size)


def _rank_of(e: Evidence, wrong: Wrong) -> Culprit:
    """Whose it is where each rank has its own: no gather spreads it."""
    values, known = wrong.values, wrong.known
    if known.all(1).any():
        return culprit(e, wrong, gathered=False)
    return culprit(e, _merged(wrong, values, known), gathered=True, spread=False)


def _merged(wrong: Wrong, values: Array, known: Array) -> Wrong:
    """Every rank with what any rank has: for bands of which nobody has all."""
    one, any_known = union(values, known)
    mask, _ = union(wrong.mask, known)
    n = len(values)
    return Wrong(np.tile(mask & any_known, (n, 1)), np.tile(one, (n, 1)), np.tile(any_known, (n, 1)), wrong.expected)


def states(e: Evidence, expected: State, seen: Mapping[str, Rows], *, gradients_right: bool) -> Finding | None:
    """The optimizer's state that was seen."""
    for band, within in expected.items():
        values, known = seen[band]
        mask = known & e.mask & np.stack([within.outside(row) for row in values])
        if not mask.any():
            continue
        wrong = Wrong(mask, values, known, within)
        who = _rank_of(e, wrong)
        named = _of_state(e, band, within, seen) if not gradients_right else None
        if named is not None:
            found, who = named
        else:
            found = diagnose.Named(
                Cause.STATE, "It is not what the last step's state and this step's gradient make of it."
            )
        if not known.all(1).any():
            wrong = _merged(wrong, values, known)
        return diagnose.finding(e, band, wrong, who, found, RIGHT if gradients_right else "")
    return None


def _of_state(
    e: Evidence, band: str, within: Interval, seen: Mapping[str, Rows]
) -> tuple[diagnose.Named, Culprit] | None:
    """The fault of the gradient that a first moment was made with."""
    if band not in ("exp_avg", "momentum"):
        return None
    rules = {each.rule for each in e.layout.parameters if each.trainable}
    if len(rules) != 1:
        return None
    rule = next(iter(rules))
    keep, weight = (rule.betas[0], 1 - rule.betas[0]) if band == "exp_avg" else (rule.momentum, 1.0)
    before = e.state.get(band)
    old = before.middle if before is not None else np.zeros(e.layout.size)
    slack = before.width / 2 if before is not None else np.zeros(e.layout.size)
    values, known = seen[band]
    implied = (values.astype(np.float64) - keep * old) / weight
    radius = (keep * slack + 8 * U * (np.abs(old) + np.abs(values).max(0))) / weight
    allowed = e.clipped.wider(radius)
    mask = known & e.mask & np.stack([allowed.outside(row) for row in implied])
    if not mask.any():
        return None
    wrong = Wrong(mask, implied, known, allowed)
    who = _rank_of(e, wrong)
    if not known.all(1).any():
        wrong = _merged(wrong, implied, known)
    named, who = diagnose.of_gradients(e, wrong, who)
    if named.cause is Cause.UNKNOWN:
        return None
    text = named.text if named.cause is Cause.UNKNOWN else "The gradient that it was made with is wrong. " + named.text
    return diagnose.Named(named.cause, text), who


def parameters(e: Evidence, master: Interval, rows: Rows, *, gradients_right: bool) -> Finding | None:
    """The parameters after the update."""
    values, known = rows
    dtype = e.theta[0].dtype
    theta = e.theta[0].astype(np.float64)
    kept = Interval(np.where(e.mask, master.lo, theta), np.where(e.mask, master.hi, theta))
    if dtype.itemsize < 4:
        kept = rounded(kept, dtype)
    mask = known & np.stack([kept.outside(row) for row in values])
    if mask.any():
        wrong = Wrong(mask, values, known, kept)
        spread = bool(known.all(1).any())
        if not spread:
            wrong = _merged(wrong, values, known)
        who = culprit(e, wrong, gathered=e.row.optimizer, spread=spread)
        named, who = diagnose.of_parameters(e, wrong, who, gradients_right=gradients_right)
        return diagnose.finding(e, "params", wrong, who, named, RIGHT if gradients_right else "")
    return _replicas(e, values, known)


def _replicas(e: Evidence, values: Array, known: Array) -> Finding | None:
    """Ranks that hold the same elements in other bits, each within its bounds."""
    for rank in range(1, e.ranks):
        both = known[0] & known[rank]
        differs = both & (values[rank] != values[0])
        if differs.any():
            name, start = e.layout.at(int(np.flatnonzero(differs)[0]))
            span = e.layout.span(name)
            return Finding(
                e.step, rank, "params", Cause.REPLICAS,
                f"rank {rank} and rank 0 end the step with other bits of {name}: {int(differs.sum()):,} of "
                f"{int(both.sum()):,} elements, within rounding. Replicas must stay identical, or they drift apart: "
                f"let each element be summed and updated once, or in the same order everywhere.", name, start,
                int(np.flatnonzero(differs[span])[-1]) + 1, int(differs.sum()), int(both.sum()),
                float(np.abs(values[rank].astype(np.float64) - values[0])[differs].max()),
            )  # fmt: skip
    return None
