"""What was asked for and held, beside what the simulator's schedule asks for and holds.

Owns these two comparisons and their sentences. More sent than the scheme needs is wrong; more held is said, and is the
user's own affair. Must not know values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import prod

from zerosim.bands import PRECISIONS, WIRES, Band
from zerosim.conformance.collectives import sent
from zerosim.conformance.layout import Layout
from zerosim.conformance.seen import Seen
from zerosim.records.conformance import EVERY, Asked, Cause, Expected, Finding, Kind, Recipe, Rule
from zerosim.stages import Stage

SMALL = 8  # elements of a message that carries a flag, a norm or a loss, and is not counted
ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


class Volume:
    """Compares, step by step, against one step of the schedule."""

    def __init__(self, expected: Expected, layout: Layout, row: Stage, recipe: Recipe, ranks: int) -> None:
        self.expected, self.layout, self.name, self.ranks = expected, layout, row.name, ranks
        self._each = per_parameter(row, recipe, {each.rule for each in layout.parameters}, ranks)
        self.held: list[str] = []
        self.notes: list[str] = []
        self._last: tuple[str, ...] = ()
        if expected.unknown:
            self.notes.append(f"bytes not compared: {expected.unknown}")
        self._padded = _most(layout, ranks)

    def step(self, seen: Sequence[Seen]) -> Finding | None:
        """What is asked for in a step; a finding if it is more than the scheme needs."""
        if self.expected.unknown:
            return None
        asked = [each for one in seen for each in one.asked if _counts(each)]
        by_kind: dict[Kind, Fraction] = {}
        nbytes: dict[Kind, Fraction] = {}
        for each in asked:
            by_kind[each.kind] = by_kind.get(each.kind, Fraction(0)) + sent(each) / self.ranks
            nbytes[each.kind] = nbytes.get(each.kind, Fraction(0)) + sent(each) * ITEM[each.dtype] / self.ranks
        total = sum(by_kind.values(), Fraction(0))
        logical = Fraction(sum(self.expected.logical.values()))
        most = max(Fraction(sum(self.expected.elements.values())), logical * self._padded)
        item = next((ITEM[each.dtype] for each in asked), 4)
        should = sum(self.expected.elements.values()) * item
        listed = ", ".join(f"{kind} {_bytes(count)}" for kind, count in nbytes.items() if count)
        kernel = max((one.kernel for one in seen if one.kernel is not None), default=None)
        beside = "" if kernel is None else f"; the kernel counted {kernel:,} B on the busiest rank"
        text = f"{_bytes(sum(nbytes.values(), Fraction(0)))} B per rank where {self.name} sends {should:,}"
        if total > most:
            hint = self._hint(by_kind, nbytes)
            return Finding(
                seen[0].step, EVERY, "volume", Cause.VOLUME,
                f"asks to send {text}: {listed}{hint}{beside}.",
                wrong=int(total - most), total=int(most),
            )  # fmt: skip
        calls = len([each for each in seen[0].asked if _counts(each) and each.kind is not Kind.RECEIVE])
        usual = sum(self.expected.collectives.values())
        said = f"asked: {text}: {listed or 'nothing'}, in {calls} calls (the schedule's: {usual}){beside}"
        if total < logical:
            said += "; less, which is right where it keeps what was gathered, or reduces once"
        self.held = [said, *self.held_lines(seen)]
        return None

    def _hint(self, by_kind: dict[Kind, Fraction], nbytes: dict[Kind, Fraction]) -> str:
        reduced = by_kind.get(Kind.ALL_REDUCE, Fraction(0))
        if reduced and "reduce-scatter" in self.expected.elements and Kind.REDUCE_SCATTER not in by_kind:
            return f" (of the all-reduce a reduce-scatter would be {_bytes(nbytes[Kind.ALL_REDUCE] / 2)})"
        for kind, count in by_kind.items():
            wanted = self.expected.elements.get(str(kind), 0)
            if wanted and count >= 2 * wanted * Fraction(95, 100):
                return f" (the {kind} {float(count / wanted):.3g} times)"
        return ""

    def held_lines(self, seen: Sequence[Seen]) -> list[str]:
        """What is held at rest and at the peak."""
        found = [one.held for one in seen if one.held is not None]
        if not found:
            return []
        fullest = max(found, key=lambda held: sum(held.rest.values()))
        rest, should = sum(fullest.rest.values()), sum(self.expected.resident.values())
        bands = ", ".join(f"{band} {nbytes:,}" for band, nbytes in fullest.rest.items() if nbytes)
        each = (rest - should) / self.layout.size
        text = f"held: {rest:,} B at rest on the fullest rank ({bands}); {self.name} holds {should:,}, {self._each} B "
        text += "of each parameter"
        if rest > should:
            text += f"; {each:.2f} B per parameter more that are your own"
            text += f" (outside of the states: {'; '.join(fullest.largest)})" if fullest.rest.get("elsewhere") else ""
        elif rest < should:
            text += f"; {-each:.2f} B per parameter less"
        lines = [text]
        peak = max(held.peak for held in found)
        if peak:
            lines.append(f"held at the peak: {peak:,} B; the schedule's peak is {sum(self.expected.peak.values()):,}")
        return lines


def per_parameter(row: Stage, recipe: Recipe, rules: Iterable[Rule], ranks: int) -> str:
    """What a row holds of each parameter in bytes, as ``"8 + 8/N"``: N ranks, or S of a group."""
    dtypes = PRECISIONS[recipe.precision].dtypes(WIRES["fp32"])
    states = {Band(name) for rule in rules for name in rule.states}
    each: dict[str, int] = {"": 0, "/S": 0, "/N": 0}
    for band in (*PRECISIONS[recipe.precision].states, *sorted(states)):
        pieces = row.piece(band, 0, ranks, recipe.node)[1]
        each["" if pieces == 1 else "/N" if pieces == ranks else "/S"] += dtypes[band].itemsize
    return " + ".join(f"{nbytes}{over}" for over, nbytes in each.items() if nbytes)


def _counts(asked: Asked) -> bool:
    return asked.dtype in ITEM and (asked.elements > SMALL or bool(asked.label))


def _most(layout: Layout, ranks: int) -> Fraction:
    """How many times its elements a parameter may take up when it is padded, by rows or to a multiple of 2N."""
    padded = 0
    for each in layout.parameters:
        size = prod(each.shape)
        rows = each.shape[0] if each.shape else 1
        by_rows = -(-rows // ranks) * ranks * (size // max(rows, 1))
        padded += max(by_rows, -(-size // (2 * ranks)) * 2 * ranks)
    return Fraction(padded, max(layout.size, 1))


def _bytes(count: Fraction) -> str:
    return f"{int(count):,}" if count.denominator == 1 else f"{float(count):,.1f}"
