"""Who has done it, where, and what it was: from the elements that are wrong to a sentence.

Owns the choice among the hypotheses, and the naming of the culprit: after an all-gather every rank
is wrong, and it is the chunk that says who computed it. Must not know how a step is judged
right or wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from zerosim.bands import BF16, FP16, FP32, Array
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.hypotheses import OfUpdate, chunk_lengths, of_gradient, of_update
from zerosim.conformance.intervals import Interval, rounded, unit
from zerosim.conformance.layout import ranges
from zerosim.records.conformance import EVERY, Cause, Finding

MOST = 20_000  # elements that a hypothesis is tried on
EXPLAINED, POWER = 0.97, 0.25


class Wrong(NamedTuple):
    """What a band has that it must not: by rank, which elements are wrong [N, P] and what they are [N, P]."""

    mask: Array
    values: Array
    known: Array
    expected: Interval


class Named(NamedTuple):
    """A cause and its sentence."""

    cause: Cause
    text: str


UNKNOWN = Named(Cause.UNKNOWN, "No usual fault explains the values.")


# -- who


class Culprit(NamedTuple):
    """The rank to blame or ``EVERY``, the one whose values show it, and where it was computed and spread."""

    rank: int
    shown_by: int
    text: str
    stale: bool = False


def culprit(e: Evidence, wrong: Wrong, *, gathered: bool) -> Culprit:
    """Whose fault it is. ``gathered`` says that ranks get the values from those that own them."""
    bad = np.flatnonzero(wrong.mask.any(1))
    first = int(bad[0])
    anywhere = wrong.mask.any(0)
    holders = wrong.known[:, anywhere].any(1)
    alike = all(_alike(wrong, first, int(rank), anywhere) for rank in np.flatnonzero(holders))
    if not gathered or not alike:
        if len(bad) == 1 and e.ranks > 1:
            others = "The other ranks have it right." if gathered or holders.sum() > 1 else ""
            return Culprit(first, first, others)
        rank = EVERY if len(bad) == e.ranks else first
        return Culprit(rank, first, "" if rank == EVERY else f"So are ranks {_listed(bad[1:])}." if len(bad) > 1 else "")
    owners = e.owner[anywhere]
    known = owners[owners >= 0]
    if not len(known):
        if e.row.optimizer and (guessed := _even_chunk(e, anywhere)) is not None:
            return Culprit(
                guessed, first, f"Every rank has the wrong values, all in chunk {guessed} of an even cut: rank {guessed} "
                f"computed them, and every rank got them from it."
            )  # fmt: skip
        return Culprit(EVERY, first, "Every rank has the same wrong values.")
    guilty, counts = np.unique(known, return_counts=True)
    main = int(guilty[counts.argmax()])
    if holders.sum() <= 1 and len(guilty) == 1:
        return Culprit(main, first, "")
    if len(guilty) == e.ranks:
        return Culprit(EVERY, first, "Every rank's chunk is wrong, and all ranks have the same wrong values.")
    if len(guilty) > 1:
        return Culprit(
            main, first, f"Every rank has the wrong values, in the chunks of ranks {_listed(guilty)}, which computed "
            f"them."
        )  # fmt: skip
    return Culprit(
        main, first, f"Every rank has the wrong values, in rank {main}'s chunk: rank {main} computed them, the gather "
        f"spread them."
    )  # fmt: skip


def _alike(wrong: Wrong, one: int, other: int, where: Array) -> bool:
    both = where & wrong.known[one] & wrong.known[other]
    a, b = wrong.values[one][both], wrong.values[other][both]
    return bool(np.array_equal(a, b, equal_nan=True)) and bool((wrong.mask[one] == wrong.mask[other])[both].all())


def _even_chunk(e: Evidence, anywhere: Array) -> int | None:
    """The chunk of an even cut that all wrong elements lie in."""
    size = -(-e.layout.size // e.ranks)
    chunks = np.unique(np.flatnonzero(anywhere) // size)
    return int(chunks[0]) if len(chunks) == 1 else None


def _listed(ranks: Iterable[int]) -> str:
    names = [str(int(rank)) for rank in ranks]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- what


def of_gradients(e: Evidence, wrong: Wrong, who: Culprit) -> Named:
    """The fault of averaged gradients that are seen themselves."""
    index, computed, seen = _sample(e, wrong, who)
    radius = 2 * e.radius[index] + 4 * unit(FP32) * np.abs(seen)
    tried = []
    for fault in of_gradient(e):
        values = fault.values(index, computed)
        tried.append((Named(fault.cause, fault.text), Interval(values - radius, values + radius)))
    found = _best(tried, seen, wrong.expected.middle[index])
    return found or _oddities(seen) or UNKNOWN


def of_parameters(e: Evidence, wrong: Wrong, who: Culprit, *, gradients_right: bool) -> Named:
    """The fault of an update, from what the parameters have become."""
    index, computed, seen = _sample(e, wrong, who)
    before = e.theta[max(who.shown_by, 0)][index].astype(np.float64)
    dtype = e.theta[0].dtype
    middle = wrong.expected.middle[index]
    if (odd := _oddities(seen)) is not None:
        return odd
    if bool((seen == before).mean() >= EXPLAINED) and bool(np.abs(middle - before).max() > 0):
        return _not_updated(e, wrong, who)
    tried: list[tuple[Named, Interval]] = []
    updates: list[OfUpdate] = list(of_update(e))
    if not gradients_right:
        for fault in of_gradient(e):
            values = fault.values(index, computed)
            known = np.isfinite(values)
            factor = np.abs(np.nan_to_num(values)) / np.maximum(np.abs(e.average.middle[index]), 1e-300)
            radius = e.radius[index] * np.clip(factor, 1, 1e3)
            grad = Interval(np.where(known, values - radius, 0), np.where(known, values + radius, 0))
            if e.recipe.clip is not None and fault.cause is not Cause.CLIPPING:
                grad = grad.times(e.clip.low, e.clip.high)
            result = e.advance(index, grad)[0]
            result = Interval(np.where(known, result.lo, np.nan), np.where(known, result.hi, np.nan))
            tried.append((Named(fault.cause, "Its gradient is wrong. " + fault.text), _kept(result, dtype)))
    tried += [(Named(fault.cause, fault.text), _kept(fault.result(index, computed), dtype)) for fault in updates]
    tried += _misplaced(e, wrong, index)
    tried += _narrow(e, wrong, index)
    return _best(tried, seen, middle) or UNKNOWN


def _kept(result: Interval, dtype: object) -> Interval:
    return result if dtype == FP32 or dtype == np.float64 else rounded(result, dtype)  # type: ignore[arg-type]


def _sample(e: Evidence, wrong: Wrong, who: Culprit) -> tuple[Array, Array, Array]:
    """Some of the wrong elements of the rank that shows it: where, who computed each, and what they are."""
    index = np.flatnonzero(wrong.mask[who.shown_by])
    if len(index) > MOST:
        index = index[np.linspace(0, len(index) - 1, MOST).astype(np.int64)]
    computed = e.owner[index] if e.row.optimizer else np.full(len(index), who.shown_by)
    if e.row.optimizer and who.rank != EVERY:
        computed = np.where(computed < 0, who.rank, computed)
    return index, computed, wrong.values[who.shown_by][index].astype(np.float64)


def _oddities(seen: Array) -> Named | None:
    if np.isnan(seen).any():
        return Named(Cause.UNKNOWN, f"{np.isnan(seen).sum():,} of them are not numbers: memory that nobody has written?")
    if (seen == 0).all() and len(seen) > 1:
        return Named(Cause.GATHER, "They are zeros: nothing was written there, or padding was.")
    return None


def _not_updated(e: Evidence, wrong: Wrong, who: Culprit) -> Named:
    """The values are still those from before the update."""
    mask = wrong.mask
    trained = e.mask & wrong.known.any(0)
    bad = mask.any(1)
    changed = np.abs(wrong.expected.middle - e.theta[0].astype(np.float64)) > 0
    if bad.all() and all((mask[rank] == mask[0]).all() for rank in range(e.ranks)):
        rest = trained & changed & ~mask[0]
        if rest.sum() < 0.02 * max(1, (trained & changed).sum()):
            return Named(Cause.STEP, "They are those from before the step: nothing was updated.")
        owners = np.unique(e.owner[mask[0]])
        chunk = e.owner == (owners[0] if len(owners) else -1)
        covered = (mask[0] & chunk).sum() >= 0.9 * (chunk & changed & trained).sum()
        if len(owners) == 1 and owners[0] >= 0 and covered:
            return Named(
                Cause.STEP, f"They are those from before the step: rank {owners[0]} has not updated its chunk, or gave "
                f"the others its old one."
            )  # fmt: skip
        return Named(
            Cause.BOUNDS, "They are those from before the step: no rank updates them. The shards leave them out."
        )
    if bad.sum() > 1:
        return Named(
            Cause.GATHER, "They are those from before the step: what other ranks have updated did not arrive. Gather "
            "the parameters after the update, and wait for it."
        )  # fmt: skip
    return Named(
        Cause.GATHER, f"They are those from before the step: what the others have updated did not arrive on rank "
        f"{who.rank}, or it reads its buffer before the gather is done."
    )  # fmt: skip


def _misplaced(e: Evidence, wrong: Wrong, index: Array) -> list[tuple[Named, Interval]]:
    """The right values of other elements."""
    size, n = e.layout.size, e.ranks
    found = []
    chunk = -(-size // n)
    multiples = {length * times for length in chunk_lengths(e) | {chunk} for times in range(1, n)}
    for shift in sorted(multiples | {1, 2} - {0}):
        for signed in (shift, -shift):
            at = index + signed
            inside = (at >= 0) & (at < size)
            at = np.clip(at, 0, size - 1)
            lo = np.where(inside, wrong.expected.lo[at], np.nan)
            hi = np.where(inside, wrong.expected.hi[at], np.nan)
            text = (
                f"They are the right values of the elements {shift:,} {'after' if signed > 0 else 'before'} them: the "
                f"gather puts them in the wrong place."
            )
            cause = Cause.GATHER if shift > 2 else Cause.BOUNDS
            found.append((Named(cause, text), Interval(lo, hi)))
    return found


def _narrow(e: Evidence, wrong: Wrong, index: Array) -> list[tuple[Named, Interval]]:
    """The right values, rounded to 16 bits."""
    found = []
    if e.theta[0].dtype.itemsize == 4:
        for dtype, name in ((BF16, "bfloat16"), (FP16, "float16")):
            some = rounded(wrong.expected[index], dtype)
            text = f"They are the right values rounded to {name}: parameters must travel, and be kept, in fp32."
            found.append((Named(Cause.PRECISION, text), some.wider(unit(FP32) * np.abs(some.middle))))
    return found


def _best(tried: Sequence[tuple[Named, Interval]], seen: Array, right: Array) -> Named | None:
    """The first among those that explain most, if one explains nearly all and could have failed to."""
    best, most = None, (EXPLAINED, 0.0)
    for named, interval in tried:
        with np.errstate(invalid="ignore"):
            inside = ~interval.outside(seen)
            narrow = interval.width < np.maximum(0.5 * np.abs(seen - right), 1e-300)
        explained = float(inside.mean())
        power = float((inside & narrow).mean())
        if explained >= most[0] and power >= POWER and (best is None or explained > most[0] + 0.005):
            best, most = named, (explained, power)
    return best


# -- where


def finding(e: Evidence, band: str, wrong: Wrong, who: Culprit, named: Named, more: str) -> Finding:
    """Put together what is said."""
    mask = wrong.mask[who.shown_by]
    known = wrong.known[who.shown_by]
    start, stop = ranges(mask)[0]
    name, within = e.layout.at(start)
    span = e.layout.span(name)
    here = mask[span]
    last = int(np.flatnonzero(here)[-1]) + 1
    with np.errstate(invalid="ignore"):
        off = np.abs(wrong.values[who.shown_by].astype(np.float64) - wrong.expected.middle)[mask]
    largest = float(np.nanmax(off)) if np.isfinite(off).any() else float("nan")
    touched = [each.name for each, part in e.layout.spans() if mask[part].any()]
    total = int(known[span].sum())
    what = f"{band} of {name}" if band != "params" else name
    whose = "its " if who.rank != EVERY else ""
    shard = "shard of " if e.row.optimizer and who.rank != EVERY and total and last - within < total else ""
    parts = [
        f"{whose}{shard}{what} is wrong{' after the update' if band == 'params' else ''}: {int(here.sum()):,} of "
        f"{total:,} elements ({within:,} to {last - 1:,}), up to {largest:.1e} off"
        + (f"; {len(touched) - 1} more parameter{'s' * (len(touched) > 2)} too." if len(touched) > 1 else ".")
    ]
    parts += [part for part in (who.text, named.text, more) if part]
    del stop
    return Finding(
        step=e.step, rank=who.rank, band=band, cause=named.cause, text=" ".join(parts), parameter=name, start=within,
        stop=last, wrong=int(mask.sum()), total=int(known.sum()), largest=largest,
    )  # fmt: skip
