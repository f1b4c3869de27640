"""What failed, put in the order in which a reader wants it, and said once.

Owns that order and what counts as the same thing again: the earliest step first, in it what others follow from,
and one line for what repeats over ranks, layers, steps and N. Must not know how anything was found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zerosim.records.results import Failure

# A step's numbers in the order in which they are made: what is wrong in one is wrong in those after it.
_MADE = (
    "rows", "loss", "main grads", "grads", "norm of all gradients", "loss scale", "whether the step is skipped",
    "applied updates", "exp_avg", "master", "params",
)  # fmt: skip
_PLACE = re.compile(r" of [^,]+, element \d+|, (?:before|after|in) .*$")


def _kind(failure: Failure) -> str:
    """What went wrong, wherever it did."""
    return _PLACE.sub("", failure.quantity)


def _made(failure: Failure) -> int:
    """How early in a step the quantity is made; whatever is counted comes last, as it changes no number."""
    name = max((name for name in _MADE if failure.quantity.startswith(name)), key=len, default=None)
    return _MADE.index(name) if name else len(_MADE)


def ordered(failures: Iterable[Failure]) -> list[Failure]:
    """The earliest step first, and in it what is made first; the order is otherwise that in which they were found."""
    return sorted(failures, key=lambda each: (each.step, _made(each)))


@dataclass
class Folded:
    """A failure, and what is like it: of the same check, scheme and kind."""

    first: Failure
    others: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.others:
            return self.first.found
        every = [self.first, *self.others]
        where = []
        if len(ranks := {each.rank for each in every}) > 1:
            where.append(f"{len(ranks)} ranks")
        if (last := max(each.step for each in every)) > self.first.step:
            where.append(f"up to step {last}")
        if len(sizes := sorted({each.ranks for each in every})) > 1:
            where.append(f"N = {', '.join(map(str, sizes))}")
        return f"{self.first.found}; and {len(self.others):,} like it" + f" ({', '.join(where)})" * bool(where)


def folded(failures: Sequence[Failure]) -> list[Folded]:
    """In order, each kind of failure of each scheme once."""
    found: dict[tuple[str, str, str], Folded] = {}
    for each in ordered(failures):
        key = each.check, each.scheme, _kind(each)
        if key in found:
            found[key].others.append(each)
        else:
            found[key] = Folded(each)
    return list(found.values())
