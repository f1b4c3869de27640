"""What it was: from the elements that are wrong to the fault that explains them, and to a sentence.

Owns the choice among the hypotheses. One is taken if it explains nearly all wrong elements and could have failed to;
among several, the one that also explains the elements that happen to be right. Must not know how a step is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerosim.bands import BF16, FP16, FP32, Array
from zerosim.conformance.culprits import Culprit, Wrong, everyone
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.hypotheses import misplaced, of_gradient, of_update
from zerosim.conformance.intervals import Interval, rounded, unit
from zerosim.conformance.layout import ranges
from zerosim.records.conformance import EVERY, Cause, Finding

MOST = 20_000  # elements that a hypothesis is tried on
EXPLAINED, POWER = 0.97, 0.25


class Named(NamedTuple):
    """A cause and its sentence."""

    cause: Cause
    text: str


UNKNOWN = Named(Cause.UNKNOWN, "No usual fault explains the values.")


class Trial(NamedTuple):
    """What would have come of a fault: of elements [n], computed by ranks [n], the interval they would lie in."""

    named: Named
    of: Callable[[Array, Array], Interval]


def of_gradients(e: Evidence, wrong: Wrong, who: Culprit) -> tuple[Named, Culprit]:
    """The fault of averaged gradients that are seen themselves."""

    def tried() -> Iterator[Trial]:
        for fault in of_gradient(e):

            def of(index: Array, computed: Array, values: Callable[..., Array] = fault.values) -> Interval:
                found = values(index, computed)
                radius = 2 * e.radius[index] + 4 * unit(FP32) * np.abs(found) + wrong.expected.width[index] / 2
                return Interval(found, found).wider(radius * _factor(e, index, found))

            yield Trial(Named(fault.cause, fault.text), of)

    seen = wrong.values[who.shown_by][wrong.mask[who.shown_by]]
    found = _best(e, wrong, who, list(tried()))
    return (found[0].named, found[1]) if found else (_oddities(seen) or UNKNOWN, who)


def of_parameters(e: Evidence, wrong: Wrong, who: Culprit, *, gradients_right: bool) -> tuple[Named, Culprit]:
    """The fault of an update, from what the parameters have become."""
    mask = wrong.mask[who.shown_by]
    seen = wrong.values[who.shown_by][mask].astype(np.float64)
    before = e.theta[who.shown_by][mask].astype(np.float64)
    if (odd := _oddities(seen)) is not None:
        return odd, who
    narrow = e.theta[0].dtype.itemsize < 4
    if narrow and (lost := _best(e, wrong, who, [_rounded_away(e)])) is not None:
        return lost[0].named, lost[1]
    if bool((seen == before).mean() >= EXPLAINED) and bool(np.abs(wrong.expected.middle[mask] - before).max() > 0):
        return _not_updated(e, wrong, who), who
    trials = [] if gradients_right else list(_by_gradient(e))
    trials += [
        Trial(Named(fault.cause, fault.text), lambda i, by, f=fault: _kept(e, f.result(i, by)))  # type: ignore[misc]
        for fault in of_update(e)
    ]
    trials += [*_misplaced(e, wrong), *_narrowed(e, wrong)]
    found = _best(e, wrong, who, trials)
    if found is None:
        return UNKNOWN, who
    if found[0].named.cause is Cause.GATHER and who.alike:
        return found[0].named, who._replace(rank=EVERY, text="Every rank has the same wrong values.")
    return found[0].named, found[1]


def _by_gradient(e: Evidence) -> Iterator[Trial]:
    """The updates that wrong gradients would have made."""
    for fault in of_gradient(e):

        def of(index: Array, computed: Array, fault: object = fault) -> Interval:
            values = fault.values(index, computed)  # type: ignore[attr-defined]
            known = np.isfinite(values)
            values = np.where(known, values, 0)
            grad = Interval(values, values).wider(e.radius[index] * _factor(e, index, values))
            if e.recipe.clip is not None and fault.cause is not Cause.CLIPPING:  # type: ignore[attr-defined]
                grad = grad.times(e.clip.low, e.clip.high)
            found = _kept(e, e.advance(index, grad)[0])
            return Interval(np.where(known, found.lo, np.nan), np.where(known, found.hi, np.nan))

        if "sign" not in fault.text:  # of an update it says the same
            yield Trial(Named(fault.cause, "Its gradient is wrong. " + fault.text), of)


def _factor(e: Evidence, index: Array, values: Array) -> Array:
    """How many times as large as the average a faulty gradient is, and its errors with it."""
    with np.errstate(invalid="ignore"):
        found: Array = np.clip(
            np.nan_to_num(np.abs(values)) / np.maximum(np.abs(e.average.middle[index]), 1e-300), 1, 1e9
        )
    return found


def _kept(e: Evidence, result: Interval) -> Interval:
    dtype = e.theta[0].dtype
    return rounded(result, dtype) if dtype.itemsize < 4 else result


def _oddities(seen: Array) -> Named | None:
    if np.isnan(seen).any():
        return Named(Cause.UNKNOWN, f"{np.isnan(seen).sum():,} of them are no numbers: memory that nobody has written?")
    if (seen == 0).all() and len(seen) > 1:
        return Named(Cause.GATHER, "They are zeros: nothing was written there, or padding was.")
    return None


def _rounded_away(e: Evidence) -> Trial:
    """Without master weights each update is added to the 16-bit parameter, and rounded."""

    def of(index: Array, _: Array) -> Interval:
        exact = e.theta[0][index].astype(np.float64)
        return _kept(e, e.advance(index, e.clipped[index], theta=Interval(exact, exact))[0])

    name = e.theta[0].dtype.name
    text = f"The update was added to the {name} parameters themselves, and rounded: keep master weights in fp32."
    return Trial(Named(Cause.PRECISION, text), of)


def _not_updated(e: Evidence, wrong: Wrong, who: Culprit) -> Named:
    """The values are still those from before the update."""
    old = "They are those from before the step"
    mask, trained = wrong.mask, e.mask & wrong.known.any(0)
    bad = mask.any(1)
    changed = np.abs(wrong.expected.middle - e.theta[0].astype(np.float64)) > 0
    anywhere = mask.any(0)
    if who.alike:
        rest = trained & changed & ~anywhere
        if rest.sum() < 0.02 * max(1, (trained & changed).sum()):
            return Named(Cause.STEP, f"{old}: nothing was updated.")
        owners = np.unique(e.owner[anywhere])
        chunk = e.owner == owners[0]
        if len(owners) == 1 and owners[0] >= 0 and (anywhere & chunk).sum() >= 0.9 * (chunk & changed & trained).sum():
            return Named(
                Cause.STEP, f"{old}: rank {owners[0]} has not updated its chunk, or gave the others its old one."
            )
        return Named(Cause.BOUNDS, f"{old}: no rank updates them. The shards leave them out.")
    if bad.sum() > 1:
        return Named(
            Cause.GATHER, f"{old}: what other ranks have updated did not arrive. Gather the parameters after the "
            f"update, and wait for it.",
        )  # fmt: skip
    return Named(
        Cause.GATHER, f"{old}: what the others have updated did not arrive on rank {who.rank}, or it reads its buffer "
        f"before the gather is done.",
    )  # fmt: skip


def _misplaced(e: Evidence, wrong: Wrong) -> Iterator[Trial]:
    """The right values of other elements."""
    for text, places in misplaced(e):

        def of(index: Array, _: Array, places: Callable[[Array], Array] = places) -> Interval:
            at = places(index)
            some = wrong.expected[np.maximum(at, 0)]
            return Interval(np.where(at < 0, np.nan, some.lo), np.where(at < 0, np.nan, some.hi))

        yield Trial(Named(Cause.GATHER, text), of)
    size = e.layout.size
    for shift in (1, -1):

        def by_one(index: Array, _: Array, shift: int = shift) -> Interval:
            some = wrong.expected[np.clip(index + shift, 0, size - 1)]
            inside = (index + shift >= 0) & (index + shift < size)
            return Interval(np.where(inside, some.lo, np.nan), np.where(inside, some.hi, np.nan))

        text = f"They are the right values of their neighbours {'after' if shift > 0 else 'before'} them: the shard's "
        yield Trial(Named(Cause.BOUNDS, text + "bounds are off by one."), by_one)


def _narrowed(e: Evidence, wrong: Wrong) -> Iterator[Trial]:
    """The right values, rounded to 16 bits."""
    if e.theta[0].dtype.itemsize == 4:
        for dtype, name in ((BF16, "bfloat16"), (FP16, "float16")):
            text = f"They are the right values rounded to {name}: parameters must travel, and be kept, in fp32."
            yield Trial(
                Named(Cause.PRECISION, text),
                lambda i, _, d=dtype: rounded(wrong.expected[i], d),  # type: ignore[misc]
            )


def _best(e: Evidence, wrong: Wrong, who: Culprit, trials: Sequence[Trial]) -> tuple[Trial, Culprit] | None:
    """The trial that explains the values best, and whose fault it is in its light."""
    shown = who.shown_by
    seen = wrong.values[shown].astype(np.float64)
    own = wrong.mask[shown] & _of(e, who)
    touched = np.zeros(e.layout.size, bool)
    for _, span in e.layout.spans():
        touched[span] = own[span].any()
    index = _some(np.flatnonzero(own if own.any() else wrong.mask[shown]))
    around = _some(np.flatnonzero(touched & wrong.known[shown] & _of(e, who) & e.mask))
    best: tuple[float, float, Trial] | None = None
    for trial in trials:
        found, right = trial.of(index, _computed(e, who, index)), wrong.expected[index]
        with np.errstate(invalid="ignore"):
            inside = ~found.outside(seen[index])
            could_fail = (found.width <= 1.5 * right.width) | found.outside(right.middle)
        missed = int((~inside).sum())
        if missed > max((1 - EXPLAINED) * len(index), int(len(index) >= 8)) or (inside & could_fail).mean() < POWER:
            continue
        found = trial.of(around, _computed(e, who, around))
        share = float((~found.outside(seen[around])).mean()) if len(around) else 1.0
        off = _distance(found, seen[around]) if len(around) else 0.0
        if best is None or share > best[0] + 0.01 or (share > best[0] - 0.01 and off < 0.8 * best[1]):
            best = share, off, trial
    if best is None:
        return None
    return best[2], _in_its_light(e, wrong, who, best[2])


def _in_its_light(e: Evidence, wrong: Wrong, who: Culprit, trial: Trial) -> Culprit:
    """Whether a fault that shows in some ranks' chunks is in the others' too, where it happens not to show."""
    if not who.alike or who.rank == EVERY or not (e.owner >= 0).any():
        return who
    owned = (e.owner >= 0) & e.mask & wrong.known[who.shown_by]
    others = _some(np.flatnonzero(owned & ~np.isin(e.owner, who.guilty)))
    if not len(others):
        return who
    seen = wrong.values[who.shown_by][others].astype(np.float64)
    found = trial.of(others, _computed(e, who, others))
    with np.errstate(invalid="ignore"):
        explained = not found.outside(seen).any()
        nearer = _distance(found, seen) < _distance(wrong.expected[others], seen)
    return everyone(who) if explained and (nearer or len(who.guilty) > 1) else who


def _distance(interval: Interval, seen: Array) -> float:
    """The mean square of how far values are from the middle, in halves of the width."""
    with np.errstate(invalid="ignore", divide="ignore"):
        off = (seen - interval.middle) / np.maximum(interval.width / 2, 1e-300)
    return float(np.mean(np.square(np.clip(np.nan_to_num(off, nan=1e3), -1e3, 1e3))))


def _of(e: Evidence, who: Culprit) -> Array:
    """The elements that the culprit has computed, everything where that is not known."""
    if who.rank == EVERY or not who.alike or not (e.owner == who.rank).any():
        return np.ones(e.layout.size, bool)
    mine: Array = e.owner == who.rank
    return mine


def _computed(e: Evidence, who: Culprit, index: Array) -> Array:
    """Which rank has computed each element."""
    if not e.row.optimizer:
        return np.full(len(index), who.shown_by)
    owners = e.owner[index]
    return np.where(owners < 0, who.rank, owners) if who.rank != EVERY else owners


def _some(index: Array) -> Array:
    if len(index) <= MOST:
        return index
    return index[np.linspace(0, len(index) - 1, MOST).astype(np.int64)]


# -- where


def finding(e: Evidence, band: str, wrong: Wrong, who: Culprit, named: Named, more: str) -> Finding:
    """Put together what is said."""
    shown = who.shown_by
    mask, known = wrong.mask[shown], wrong.known[shown]
    start, _ = ranges(mask)[0]
    name, within = e.layout.at(start)
    span = e.layout.span(name)
    here = mask[span]
    last = int(np.flatnonzero(here)[-1]) + 1
    with np.errstate(invalid="ignore"):
        off = np.abs(wrong.values[shown].astype(np.float64) - wrong.expected.middle)[mask]
    largest = float(np.nanmax(off)) if np.isfinite(off).any() else float("nan")
    touched = [each.name for each, part in e.layout.spans() if mask[part].any()]
    total = int(known[span].sum())
    what = f"{band} of {name}" if band != "params" else name
    whose = "its " if who.rank != EVERY else ""
    shard = "shard of " if e.row.optimizer and who.rank != EVERY and int(here.sum()) < total else ""
    parts = [
        f"{whose}{shard}{what} is wrong{' after the update' if band == 'params' else ''}: {int(here.sum()):,} of "
        f"{total:,} elements ({within:,} to {last - 1:,}), up to {largest:.1e} off"
        + (f"; {len(touched) - 1} more parameter{'s' * (len(touched) > 2)} too." if len(touched) > 1 else ".")
    ]
    parts += [part for part in (who.text, named.text, more) if part]
    return Finding(
        step=e.step, rank=who.rank, band=band, cause=named.cause, text=" ".join(parts), parameter=name, start=within,
        stop=last, wrong=int(mask.sum()), total=int(known.sum()), largest=largest,
    )  # fmt: skip
