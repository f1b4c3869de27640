"""Who it was: after an all-gather every rank is wrong, and it is the chunk that says who computed it.

Owns the naming of the rank, of the parameter and of the elements. Must not know what the fault was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from zerosim.bands import Array
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.intervals import Interval
from zerosim.conformance.layout import ranges
from zerosim.records.conformance import EVERY, Cause, Finding


class Wrong(NamedTuple):
    """What a band has that it must not: by rank, which elements are wrong [N, P], what they are and which are known.

    ``expected`` is what they must lie in [P].
    """

    mask: Array
    values: Array
    known: Array
    expected: Interval


class Culprit(NamedTuple):
    """The rank to blame, or ``EVERY``; the one whose values show it; and how the others come to have them.

    ``alike`` says that all who have the wrong elements have the same values; ``guilty`` are the owners of some.
    """

    rank: int
    shown_by: int
    text: str
    alike: bool
    guilty: tuple[int, ...] = ()


def culprit(e: Evidence, wrong: Wrong, *, gathered: bool, spread: bool = True) -> Culprit:
    """Whose fault it is. ``gathered`` says that the values are their owners', ``spread`` that all ranks have them."""
    bad = np.flatnonzero(wrong.mask.any(1))
    first = int(bad[0])
    anywhere = np.asarray(wrong.mask.any(0))
    holders = np.flatnonzero(wrong.known[:, anywhere].any(1))
    alike = all(_alike(wrong, first, int(rank), anywhere) for rank in holders)
    if not gathered or not alike:
        if len(bad) == e.ranks > 1:
            return Culprit(EVERY, first, "", False)
        text = f"So are ranks {listed(bad[1:])}." if len(bad) > 1 else "The other ranks have it right."
        return Culprit(first, first, text if len(holders) > 1 or len(bad) > 1 else "", False)
    guilty, counts = np.unique(e.owner[anywhere & (e.owner >= 0)], return_counts=True)
    if not len(guilty):
        return _unknown_owner(e, first, anywhere)
    main = int(guilty[counts.argmax()])
    shown = first if wrong.mask[first][e.owner == main].any() else main
    everywhere = len(holders) > 1 and spread
    if len(guilty) == e.ranks:
        text = "All ranks have the same wrong values." if everywhere else "So it is in every rank's shard."
        return Culprit(EVERY, first, text, True, tuple(map(int, guilty)))
    if len(guilty) > 1:
        text = f"The chunks of ranks {listed(guilty)} are wrong{', on every rank' * everywhere}."
    else:
        text = (
            f"Every rank has the wrong values, in rank {main}'s chunk: rank {main} computed them, the gather spread "
            f"them."
            if everywhere
            else ""
        )
    return Culprit(main, shown, text, True, tuple(map(int, guilty)))


def everyone(who: Culprit) -> Culprit:
    """The same fault in every rank's chunk, though it does not show in each."""
    return who._replace(rank=EVERY, text="It shows in some chunks only, and is in the others too.")


def _unknown_owner(e: Evidence, first: int, anywhere: Array) -> Culprit:
    """Who it was if the parameters are cut evenly, as far as that says anything."""
    size = -(-e.layout.size // e.ranks)
    chunks = np.unique(np.flatnonzero(anywhere) // size)
    if e.row.optimizer and len(chunks) == 1 and e.ranks > 1:
        rank = int(chunks[0])
        return Culprit(
            rank, first, f"Every rank has the wrong values, all in chunk {rank} of an even cut: it seems that rank "
            f"{rank} computed them.", True,
        )  # fmt: skip
    return Culprit(EVERY, first, "Every rank has the same wrong values." if e.ranks > 1 else "", True)


def _alike(wrong: Wrong, one: int, other: int, where: Array) -> bool:
    both = where & wrong.known[one] & wrong.known[other]
    a, b = wrong.values[one][both], wrong.values[other][both]
    return bool(np.array_equal(a, b, equal_nan=True)) and bool((wrong.mask[one] == wrong.mask[other])[both].all())


def listed(ranks: Iterable[Any]) -> str:
    """Ranks as text: ``"0, 1 and 3"``."""
    names = [str(int(rank)) for rank in ranks]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def finding(e: Evidence, band: str, wrong: Wrong, who: Culprit, cause: Cause, *said: str) -> Finding:
    """Put together what is said: which elements of what are wrong, whose fault it is, and ``said``."""
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
    parts += [part for part in (who.text, *said) if part]
    return Finding(
        step=e.step, rank=who.rank, band=band, cause=cause, text=" ".join(parts), parameter=name, start=within,
        stop=last, wrong=int(mask.sum()), total=int(known.sum()), largest=largest,
    )  # fmt: skip
