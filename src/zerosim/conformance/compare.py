"""Holds what ranks have after a step to what they must have: gradients, the optimizer's state, parameters.

Owns these comparisons, each of which finds the first thing that is wrong or nothing. Must not know how the
evidence came about, nor what is carried on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zerosim.bands import Array
from zerosim.conformance import diagnose
from zerosim.conformance.culprits import Culprit, Wrong, culprit, finding
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.intervals import Interval, State, U, narrow, point, rounded, unit
from zerosim.conformance.parameter_faults import Named
from zerosim.conformance.reading import Rows, union
from zerosim.records.conformance import EVERY, Cause, Finding

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
    wrong, who = _whose(e, Wrong(mask, values, known, within))
    named, who = diagnose.of_gradients(e, wrong, who)
    return finding(e, "gradient", wrong, who, named.cause, named.text)


def _allowed(e: Evidence, grad: Interval, values: Array) -> Interval:
    if e.exact is not None and e.recipe.clip is None:
        return rounded(grad, values.dtype)
    return grad.wider(unit(values.dtype) * grad.size)


def _whose(e: Evidence, wrong: Wrong, *, gathered: bool = False) -> tuple[Wrong, Culprit]:
    """Whose it is; and, of what nobody has all of, every rank with what any rank has."""
    if wrong.known.all(1).any():
        return wrong, culprit(e, wrong, gathered=gathered)
    values, known = union(wrong.values, wrong.known)
    mask, _ = union(wrong.mask, wrong.known)
    mask, values, known = (np.tile(each, (e.ranks, 1)) for each in (mask & known, values, known))
    together = Wrong(mask, values, known, wrong.expected)
    return together, culprit(e, together, gathered=True, spread=False)


def states(e: Evidence, expected: State, seen: Mapping[str, Rows], *, gradients_right: bool) -> Finding | None:
    """The optimizer's state that was seen."""
    for band, within in expected.items():
        values, known = seen[band]
        mask = known & e.mask & np.stack([within.outside(row) for row in values])
        if not mask.any():
            continue
        wrong, who = _whose(e, Wrong(mask, values, known, within))
        named = Named(Cause.STATE, "It is not what the last step's state and this step's gradient make of it.")
        if not gradients_right and (found := _of_state(e, band, seen)) is not None:
            named, who = found
        return finding(e, band, wrong, who, named.cause, named.text, RIGHT * gradients_right)
    return None


def _of_state(e: Evidence, band: str, seen: Mapping[str, Rows]) -> tuple[Named, Culprit] | None:
    """The fault of the gradient that a first moment was made with."""
    if band not in ("exp_avg", "momentum"):
        return None
    keep, weight = np.zeros(e.layout.size), np.ones(e.layout.size)
    for each, span in e.layout.spans():
        keep[span] = each.rule.betas[0] if band == "exp_avg" else each.rule.momentum
        weight[span] = 1 - each.rule.betas[0] if band == "exp_avg" else 1.0
    before = e.state.get(band, point(np.zeros(e.layout.size)))
    values, known = seen[band]
    implied = (values.astype(np.float64) - keep * before.middle) / weight
    radius = (keep * before.width / 2 + 8 * U * (before.size + np.abs(values).max(0))) / weight
    allowed = e.clipped.wider(radius)
    mask = known & e.mask & np.stack([allowed.outside(row) for row in implied])
    if not mask.any():
        return None
    wrong, who = _whose(e, Wrong(mask, implied, known, allowed))
    named, who = diagnose.of_gradients(e, wrong, who)
    if named.cause is Cause.UNKNOWN:
        return None
    return Named(named.cause, "The gradient that it was made with is wrong. " + named.text), who


def parameters(e: Evidence, master: Interval, rows: Rows, *, gradients_right: bool) -> Finding | None:
    """The parameters after the update."""
    values, known = rows
    dtype, theta = e.theta[0].dtype, e.theta[0].astype(np.float64)
    kept = Interval(np.where(e.mask, master.lo, theta), np.where(e.mask, master.hi, theta))
    if narrow(dtype):
        kept = rounded(kept, dtype)
    mask = known & np.stack([kept.outside(row) for row in values])
    if mask.any():
        wrong, who = _whose(e, Wrong(mask, values, known, kept), gathered=bool(e.row.optimizer))
        named, who = diagnose.of_parameters(e, wrong, who, gradients_right=gradients_right)
        return finding(e, "params", wrong, who, named.cause, named.text, RIGHT * gradients_right)
    return _replicas(e, values, known)


def not_skipped(e: Evidence, ends: Sequence[Rows]) -> Finding | None:
    """Who has updated parameters in a step that had to be skipped."""
    odd = [
        rank
        for rank, ((values, known), theta) in enumerate(zip(ends, e.theta, strict=True))
        if not np.array_equal(values[known], theta[known])
    ]
    if not odd:
        return None
    culprits = [rank for rank, local in enumerate(e.local) if not local.finite]
    whose = f"rank {culprits[0]}'s gradient" if culprits else "the sum"
    rank = odd[0] if len(odd) < e.ranks else EVERY
    who = f"rank {rank} updates its parameters" if rank != EVERY else "the parameters are updated"
    return Finding(
        e.step, rank, "params", Cause.SCALING,
        f"{who} though {whose} is not finite at a loss scale of {e.scale:g}: all ranks must skip this step. Tell every "
        f"rank of it (all-reduce the flag with MAX) before the optimizer's step.",
    )  # fmt: skip


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
