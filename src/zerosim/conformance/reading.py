"""What ranks were seen to have, as rows of arrays: pieces brought into place.

Owns the assembly, and the parameters of each rank when a step begins. Must not know what they must be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerosim.bands import FP32, Array, DType
from zerosim.conformance.layout import Layout, Piece, assemble
from zerosim.conformance.seen import Seen
from zerosim.records.conformance import Cause, Finding

Rows = tuple[Array, Array]
"""Values [N, P], and which are known [N, P]; of one rank [P]."""


class Reader:
    """Assembles pieces of ``layout``; parameters are of ``dtype``."""

    def __init__(self, layout: Layout, dtype: DType) -> None:
        self.layout, self.dtype = layout, dtype

    def one(self, pieces: Sequence[Piece], dtype: DType | None = None) -> Rows:
        """One rank's pieces as values [P] and which are known [P]."""
        dtype = dtype or (pieces[0].values.dtype if pieces else FP32)
        values, known = np.zeros(self.layout.size, dtype), np.zeros(self.layout.size, bool)
        assemble(pieces, values, known)
        return values, known

    def params(self, seen: Sequence[Seen]) -> list[Rows]:
        """Each rank's parameters after the step."""
        return [self.one(each.params, self.dtype) for each in seen]

    def band(self, seen: Sequence[Seen], band: str) -> Rows:
        """What the ranks have of a band."""
        return stacked([self.one(one.bands.get(band, [])) for one in seen])


def stacked(rows: Sequence[Rows]) -> Rows:
    """Ranks' values and what is known of them, as rows."""
    return np.stack([values for values, _ in rows]), np.stack([known for _, known in rows])


def union(values: Array, known: Array) -> Rows:
    """Of each element the first rank's value that is known [P], and whether any is [P]."""
    return values[known.argmax(0), np.arange(values.shape[1])], np.asarray(known.any(0))


def share(seen: Sequence[Seen], layout: Layout) -> None:
    """Give every rank the parameters that are rank 0's bit for bit, which it has left out."""
    for each in seen[1:]:
        if each.alike:
            spans = [layout.span(name) for name in each.alike]
            each.params = each.params + [
                piece for piece in seen[0].params if any(s.start <= piece.start < s.stop for s in spans)
            ]
            each.alike = []


class Beginnings:
    """The parameters with which each rank begins a step."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.layout = reader, reader.layout
        self.after: list[Rows] = []
        """Each rank's after the last step."""

    def own(self, seen: Sequence[Seen]) -> list[Rows]:
        """What each rank has itself, in its own dtype."""
        found = []
        for each in seen:
            values, known = self.reader.one(each.before or [], self.reader.dtype)
            if self.after:
                last, was = self.after[each.rank]
                rest = was & ~known
                values[rest], known = last[rest], known | was
            found.append((values, known))
        return found

    def whole(self, seen: Sequence[Seen], own: Sequence[Rows]) -> tuple[list[Array], Array]:
        """What each rank's forward must read [P]: its own, what other ranks have, or what it was seen to read.

        And which of it is known on every rank [P].
        """
        together, known = union(*stacked(own))
        result, everywhere = [], np.ones(self.layout.size, bool)
        for each, (values, mine) in zip(seen, own, strict=True):
            read, was_read = self.reader.one(each.read, values.dtype)
            whole = np.where(mine, values, np.where(known, together, read))
            result.append(whole.astype(values.dtype))
            everywhere &= mine | known | was_read
        return result, everywhere

    def other_start(self, seen: Sequence[Seen], own: Sequence[Rows], owner: Array) -> Finding | None:
        """A rank that begins with other weights than the others, or with a shard of others."""
        first, known = own[0]
        for rank, (values, mine) in enumerate(own[1:], start=1):
            differs = known & mine & (values != first)
            if differs.any():
                odd, whose = rank, "rank 0"
                if len(own) > 2 and all(np.array_equal(own[rank][0], own[r][0]) for r in range(1, len(own))):
                    odd, whose = 0, "the others"
                return self._starts(seen[0].step, odd, whose, differs, np.abs(values.astype(np.float64) - first))
        created, was = self.reader.one(seen[0].created, self.reader.dtype)
        shards, there = union(*stacked([*own, *(self.reader.one(each.read, self.reader.dtype) for each in seen)]))
        differs = was & there & (shards != created)
        others = np.unique(owner[differs])
        if len(others) and others[0] > 0 and len(own) > 1:  # not rank 0's, or it was loaded from elsewhere since
            return self._starts(
                seen[0].step, int(others[0]), "rank 0", differs, np.abs(shards.astype(np.float64) - created)
            )
        return None

    def _starts(self, step: int, rank: int, whose: str, differs: Array, off: Array) -> Finding:
        name, start = self.layout.at(int(np.flatnonzero(differs)[0]))
        span = self.layout.span(name)
        stop = int(np.flatnonzero(differs[span])[-1]) + 1
        return Finding(
            step, rank, "params", Cause.INITIAL,
            f"rank {rank} starts with other weights than {whose}: {int(differs.sum()):,} elements, first in {name}. "
            f"Give all ranks the same seed, or broadcast from rank 0 before the first step.",
            name, start, stop, int(differs.sum()), self.layout.size, float(off[differs].max()),
        )  # fmt: skip

    def stale(self, seen: Sequence[Seen], own: Sequence[Rows], owner: Array, last: Array | None) -> Finding | None:
        """What a forward read that is not what the ranks hold; ``last`` are the parameters before the last update."""
        together, known = union(*stacked(own))
        wrong: dict[int, tuple[Array, Array]] = {}
        for each in seen:
            read, was_read = self.reader.one(each.read)
            differs = was_read & known & (read != together.astype(read.dtype))
            if differs.any():
                wrong[each.rank] = differs, read
        if not wrong:
            return None
        rank, (differs, read) = next(iter(wrong.items()))
        owners = np.unique(owner[differs])
        alike = len(wrong) == len(seen) and all((mask == differs).all() for mask, _ in wrong.values())
        spread = alike and len(owners) == 1 and owners[0] >= 0
        name, start = self.layout.at(int(np.flatnonzero(differs)[0]))
        span = self.layout.span(name)
        here = differs[span]
        if last is not None and bool((read == last.astype(read.dtype))[differs].all()):
            why = "They are those from before the last update: a stale gather. Gather again after each update."
        else:
            why = "A misplaced gather, or one that was not waited for: each chunk must be in its place."
        whose = f"its forward reads values of {name} that are not those that the ranks hold:"
        if spread:
            whose = f"rank {owners[0]} gives stale or misplaced values of {name}: every rank's forward reads"
        return Finding(
            seen[0].step, int(owners[0]) if spread else rank if len(wrong) < len(seen) else -1, "gathered params",
            Cause.FORWARD, f"{whose} {int(here.sum()):,} of {here.size:,} elements wrong. {why}", name, start,
            int(np.flatnonzero(here)[-1]) + 1, int(differs.sum()), int(known.sum()),
            float(np.abs(read.astype(np.float64) - together)[differs].max()),
        )  # fmt: skip
