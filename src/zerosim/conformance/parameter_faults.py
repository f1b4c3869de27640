"""What may have become of parameters in an update, as numbers: by a wrong gradient, step, gather or rounding.

Owns these faults in terms of the parameters after the step, whatever phase they are of. Must not know how it
is decided which one it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from zerosim.bands import BF16, FP16, Array, DType
from zerosim.conformance.culprits import Culprit, Wrong
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.gradient_faults import OfGradient, away, of_gradient, others
from zerosim.conformance.intervals import Interval, narrow, point, rounded
from zerosim.conformance.update_faults import OfUpdate, of_update
from zerosim.records.conformance import Cause

OLD = "They are those from before the step"


class Named(NamedTuple):
    """A cause and its sentence."""

    cause: Cause
    text: str


class Trial(NamedTuple):
    """What would have come of a fault: of elements [n], computed by ranks [n], the interval they would lie in."""

    named: Named
    of: Callable[[Array, Array], Interval]


def trials(e: Evidence, wrong: Wrong, *, gradients_right: bool) -> Iterator[Trial]:
    """All that may have become of the parameters."""
    if not gradients_right:
        for fault in of_gradient(e):
            if "sign" not in fault.text:  # of an update it says the same
                yield Trial(Named(fault.cause, "Its gradient is wrong. " + fault.text), _by_gradient(e, fault))
    for step in of_update(e):
        yield Trial(Named(step.cause, step.text), _by_update(e, step))
    yield from _misplaced(e, wrong)
    if not narrow(e.theta[0].dtype):
        yield _narrowed(wrong, BF16, "bfloat16")
        yield _narrowed(wrong, FP16, "float16")


def spread(e: Evidence, index: Array, values: Array) -> Array:
    """How many times as large as the average a faulty gradient is, and its errors with it."""
    usual = np.maximum(np.abs(e.average.middle[index]), 1e-300)
    found: Array = np.clip(np.nan_to_num(np.abs(values)) / usual, 1, 1e9)
    return found


def _by_gradient(e: Evidence, fault: OfGradient) -> Callable[[Array, Array], Interval]:
    def of(index: Array, computed: Array) -> Interval:
        values = fault.values(index, computed)
        known = np.isfinite(values)
        values = np.where(known, values, 0)
        grad = point(values).wider(e.radius[index] * spread(e, index, values))
        if e.recipe.clip is not None and fault.cause is not Cause.CLIPPING:
            grad = grad.times(e.clip.low, e.clip.high)
        return _kept(e, e.advance(index, grad)[0]).where(known)

    return of


def _by_update(e: Evidence, fault: OfUpdate) -> Callable[[Array, Array], Interval]:
    return lambda index, computed: _kept(e, fault.result(index, computed))


def _kept(e: Evidence, result: Interval) -> Interval:
    """What is kept of fp32 parameters."""
    dtype = e.theta[0].dtype
    return rounded(result, dtype) if narrow(dtype) else result


def _misplaced(e: Evidence, wrong: Wrong) -> Iterator[Trial]:
    """The right values of other elements."""

    def of_chunk(chunks: int) -> Callable[[Array, Array], Interval]:
        def of(index: Array, _: Array) -> Interval:
            at = e.other_chunk(index, chunks)
            return wrong.expected[np.maximum(at, 0)].where(at >= 0)

        return of

    def of_neighbour(shift: int) -> Callable[[Array, Array], Interval]:
        def of(index: Array, _: Array) -> Interval:
            at = index + shift
            return wrong.expected[np.clip(at, 0, e.layout.size - 1)].where((at >= 0) & (at < e.layout.size))

        return of

    for chunks in others(e):
        text = f"They are the right values of the chunk {away(chunks)}: the gather puts chunks in the wrong place."
        yield Trial(Named(Cause.GATHER, text), of_chunk(chunks))
    for shift, where in ((1, "after"), (-1, "before")):
        text = f"They are the right values of their neighbours {where} them: the shard's bounds are off by one."
        yield Trial(Named(Cause.BOUNDS, text), of_neighbour(shift))


def _narrowed(wrong: Wrong, dtype: DType, name: str) -> Trial:
    """The right values, rounded to 16 bits."""
    text = f"They are the right values rounded to {name}: parameters must travel, and be kept, in fp32."
    return Trial(Named(Cause.PRECISION, text), lambda index, _: rounded(wrong.expected[index], dtype))


def rounded_away(e: Evidence) -> Trial:
    """Without master weights each update is added to the 16-bit parameter, and rounded."""
    name = e.theta[0].dtype.name
    text = f"The update was added to the {name} parameters themselves, and rounded: keep master weights in fp32."
    return Trial(
        Named(Cause.PRECISION, text),
        lambda index, _: _kept(e, e.advance(index, e.clipped[index], theta=point(e.theta[0][index]))[0]),
    )


def oddities(seen: Array) -> Named | None:
    """Values that say by themselves what they are."""
    if (strange := int(np.isnan(seen).sum())) > 0:
        return Named(Cause.UNKNOWN, f"{strange:,} of them are no numbers: memory that nobody has written?")
    if (seen == 0).all() and len(seen) > 1:
        return Named(Cause.GATHER, "They are zeros: nothing was written there, or padding was.")
    return None


def not_updated(e: Evidence, wrong: Wrong, who: Culprit) -> Named:
    """The values are still those from before the update."""
    anywhere, bad = wrong.mask.any(0), wrong.mask.any(1)
    changed = e.mask & wrong.known.any(0) & (np.abs(wrong.expected.middle - e.theta[0].astype(np.float64)) > 0)
    same = all((mask == wrong.mask[0]).all() for mask in wrong.mask)
    if who.alike or same:
        if (changed & ~anywhere).sum() < 0.02 * max(1, changed.sum()):
            return Named(Cause.STEP, f"{OLD}: nothing was updated.")
        owners = np.unique(e.owner[anywhere])
        chunk = changed & (e.owner == owners[0])
        if len(owners) == 1 and owners[0] >= 0 and (anywhere & chunk).sum() >= 0.9 * chunk.sum():
            text = f"{OLD}: rank {owners[0]} has not updated its chunk, or gave the others its old one."
            return Named(Cause.STEP, text)
        if not e.row.optimizer:
            return Named(Cause.STEP, f"{OLD}: no rank updates them. The optimizer leaves them out.")
        return Named(Cause.BOUNDS, f"{OLD}: no rank updates them. The shards leave them out.")
    if bad.sum() > 1:
        text = "what other ranks have updated did not arrive. Gather the parameters after the update, and wait for it."
    else:
        text = f"what the others have updated did not arrive on rank {who.rank}, or it reads before the gather is done."
    return Named(Cause.GATHER, f"{OLD}: {text}")
