"""What it was: from the elements that are wrong to the fault that explains them.

Owns the choice among the faults. One is taken if it explains nearly all wrong elements and could have failed to;
among several, the one that also explains the elements that happen to be right. Must not know how a step is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from zerosim.bands import FP32, Array
from zerosim.conformance.culprits import Culprit, Wrong, everyone
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.gradient_faults import OfGradient, of_gradient
from zerosim.conformance.intervals import Interval, narrow, point, unit
from zerosim.conformance.parameter_faults import Named, Trial, not_updated, oddities, rounded_away, spread, trials
from zerosim.records.conformance import EVERY, Cause

MOST = 20_000  # elements that a fault is tried on
EXPLAINED, POWER = 0.97, 0.25
UNKNOWN = Named(Cause.UNKNOWN, "No usual fault explains the values.")


def of_gradients(e: Evidence, wrong: Wrong, who: Culprit) -> tuple[Named, Culprit]:
    """The fault of averaged gradients that are seen themselves."""

    def trial(fault: OfGradient) -> Trial:
        def of(index: Array, computed: Array) -> Interval:
            found = fault.values(index, computed)
            radius = 2 * e.radius[index] + 4 * unit(FP32) * np.abs(found) + wrong.expected.width[index] / 2
            return point(found).wider(radius * spread(e, index, found))

        return Trial(Named(fault.cause, fault.text), of)

    seen = wrong.values[who.shown_by][wrong.mask[who.shown_by]].astype(np.float64)
    found = _best(e, wrong, who, map(trial, of_gradient(e)))
    found = found or _best(e, wrong, who, map(trial, _by_one_factor(e, seen, wrong.mask[who.shown_by])))
    return found or (oddities(seen) or UNKNOWN, who)


def _by_one_factor(e: Evidence, seen: Array, mask: Array) -> Iterator[OfGradient]:
    """Everything is the same number of times too large or too small."""
    right = e.clipped.middle[mask]
    large = np.abs(right) >= np.median(np.abs(right))
    ratios = seen[large] / right[large]
    factor = float(np.median(ratios)) if len(ratios) else 0.0
    if not np.isfinite(factor) or factor == 0:
        return
    cause, text = Cause.AVERAGE, f"It is {factor:.4g} times what it must be."
    if e.recipe.clip is not None and 0 < factor * e.clip.middle <= 1:
        norm = e.recipe.clip / (factor * e.clip.middle)
        text = f"It is clipped by a norm of {norm:.4g}; it is {e.clip.norm:.4g}. Does padding count, or a part twice?"
        cause = Cause.CLIPPING
    values = e.clipped.middle * factor
    yield OfGradient(cause, text, lambda index, _: values[index])


def of_parameters(e: Evidence, wrong: Wrong, who: Culprit, *, gradients_right: bool) -> tuple[Named, Culprit]:
    """The fault of an update, from what the parameters have become."""
    mask = wrong.mask[who.shown_by]
    seen = wrong.values[who.shown_by][mask].astype(np.float64)
    before = e.theta[who.shown_by][mask].astype(np.float64)
    if (odd := oddities(seen)) is not None:
        return odd, who
    if narrow(e.theta[0].dtype) and (lost := _best(e, wrong, who, [rounded_away(e)])) is not None:
        return lost
    if (seen == before).mean() >= EXPLAINED and np.abs(wrong.expected.middle[mask] - before).max() > 0:
        return not_updated(e, wrong, who), who
    found = _best(e, wrong, who, trials(e, wrong, gradients_right=gradients_right))
    if found is None:
        return UNKNOWN, who
    if found[0].cause is Cause.GATHER and who.alike:
        return found[0], who._replace(rank=EVERY, text="Every rank has the same wrong values.")
    return found


def _best(e: Evidence, wrong: Wrong, who: Culprit, tried: Iterable[Trial]) -> tuple[Named, Culprit] | None:
    """The fault that explains the values best, and whose it is in its light."""
    seen = wrong.values[who.shown_by].astype(np.float64)
    around = _around(e, wrong, who)
    best: tuple[float, float, Trial] | None = None
    for trial in _explaining(e, wrong, who, tried):
        found = trial.of(around, _computed(e, who, around))
        share = float((~found.outside(seen[around])).mean()) if len(around) else 1.0
        off = _distance(found, seen[around]) if len(around) else 0.0
        if best is None or share > best[0] + 0.01 or (share > best[0] - 0.01 and off < 0.8 * best[1]):
            best = share, off, trial
    return None if best is None else (best[2].named, _in_its_light(e, wrong, who, best[2]))


def _explaining(e: Evidence, wrong: Wrong, who: Culprit, tried: Iterable[Trial]) -> Iterator[Trial]:
    """Those that explain nearly all wrong elements, and would not have explained the right values as well."""
    shown = who.shown_by
    own = wrong.mask[shown] & _of(e, who)
    index = _some(own if own.any() else wrong.mask[shown])
    seen, right = wrong.values[shown][index].astype(np.float64), wrong.expected[index]
    for trial in tried:
        found = trial.of(index, _computed(e, who, index))
        inside = ~found.outside(seen)
        could_fail = (found.width <= 1.5 * right.width) | found.outside(right.middle)
        missed = int((~inside).sum())
        if missed <= max((1 - EXPLAINED) * len(index), int(len(index) >= 8)) and (inside & could_fail).mean() >= POWER:
            yield trial


def _around(e: Evidence, wrong: Wrong, who: Culprit) -> Array:
    """All that the culprit has computed of the parameters of which some elements are wrong."""
    own = wrong.mask[who.shown_by] & _of(e, who)
    touched = np.zeros(e.layout.size, bool)
    for _, span in e.layout.spans():
        touched[span] = own[span].any()
    return _some(touched & wrong.known[who.shown_by] & _of(e, who) & e.mask)


def _in_its_light(e: Evidence, wrong: Wrong, who: Culprit, trial: Trial) -> Culprit:
    """Whether a fault that shows in some ranks' chunks is in the others' too, where it happens not to show."""
    if not who.alike or who.rank == EVERY:
        return who
    others = _some((e.owner >= 0) & e.mask & wrong.known[who.shown_by] & ~np.isin(e.owner, who.guilty))
    if not len(others):
        return who
    seen = wrong.values[who.shown_by][others].astype(np.float64)
    found = trial.of(others, _computed(e, who, others))
    explained = not found.outside(seen).any()
    nearer = _distance(found, seen) < _distance(wrong.expected[others], seen)
    return everyone(who) if explained and (nearer or len(who.guilty) > 1) else who


def _distance(interval: Interval, seen: Array) -> float:
    """The mean square of how far values are from the middle, in halves of the width."""
    off = (seen - interval.middle) / np.maximum(interval.width / 2, 1e-300)
    return float(np.mean(np.square(np.clip(np.nan_to_num(off, nan=1e3), -1e3, 1e3))))


def _of(e: Evidence, who: Culprit) -> Array:
    """The elements that the culprit has computed, everything where that is not known."""
    mine: Array = e.owner == who.rank
    if who.rank == EVERY or not who.alike or not mine.any():
        return np.ones(e.layout.size, bool)
    return mine


def _computed(e: Evidence, who: Culprit, index: Array) -> Array:
    """Which rank has computed each element."""
    if not e.row.optimizer:
        return np.full(len(index), who.shown_by)
    owners = e.owner[index]
    return np.where(owners < 0, who.rank, owners) if who.rank != EVERY else owners


def _some(mask: Array) -> Array:
    """The places where a mask is true, or some of them, evenly, where they are many."""
    index = np.flatnonzero(mask)
    return index if len(index) <= MOST else index[np.linspace(0, len(index) - 1, MOST).astype(np.int64)]
