"""What was asked for and held, beside what the simulator's schedule asks for and holds.

Owns these two comparisons and their sentences. More sent than the scheme needs is wrong; more held is said, and is the
user's own affair. Must not know values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        elements: dict[str, Fraction] = {}
        nbytes: dict[str, Fraction] = {}
        for each in asked:
            kind = str(each.kind)
            elements[kind] = elements.get(kind, Fraction(0)) + sent(each) / self.ranks
            nbytes[kind] = nbytes.get(kind, Fraction(0)) + sent(each) * ITEM[each.dtype] / self.ranks
        total, should = sum(elements.values(), Fraction(0)), sum(self.expected.elements.values())
        listed = ", ".join(f"{kind} {_bytes(count)}" for kind, count in nbytes.items() if count)
        kernel = max((one.kernel for one in seen if one.kernel is not None), default=None)
        beside = "" if kernel is None else f"; the kernel counted {kernel:,} B on the busiest rank"
        item = next((ITEM[each.dtype] for each in asked), 4)
        text = f"{_bytes(sum(nbytes.values(), Fraction(0)))} B per rank where {self.name} sends {should * item:,}"
        if hint := self._too_much(elements, nbytes):
            return Finding(
                seen[0].step, EVERY, "volume", Cause.VOLUME, f"asks to send {text}: {listed} ({hint}){beside}.",
                wrong=int(total - should), total=should,
            )  # fmt: skip
        calls = len([each for each in seen[0].asked if _counts(each) and each.kind is not Kind.RECEIVE])
        usual = sum(self.expected.collectives.values())
        said = f"asked: {text}: {listed or 'nothing'}, in {calls} calls (the schedule's: {usual}){beside}"
        if total < sum(self.expected.logical.values()):
            said += "; less, which is right where it keeps what was gathered, or reduces once"
        elif total > should:
            said += "; more, which is right where each parameter is padded by itself"
        self.held = [said, *self.held_lines(seen)]
        return None

    def _too_much(self, elements: dict[str, Fraction], nbytes: dict[str, Fraction]) -> str:
        """In which direction more is sent than the scheme needs, however it is padded; nothing if in none."""
        numbers = {name: Fraction(count) for name, count in self.expected.elements.items()}
        logical = {name: Fraction(count) for name, count in self.expected.logical.items()}
        for name, other in (("reduce", "reduce-scatter"), ("gather", "all-gather")):
            asked, most = (_directions(each)[name] for each in (elements, numbers))
            most = max(most, _directions(logical)[name] * self._padded)
            if asked <= most:
                continue
            reduced = nbytes.get("all-reduce", Fraction(0))
            if reduced and name == "gather" and "reduce-scatter" in numbers and "reduce-scatter" not in elements:
                return f"of the all-reduce a reduce-scatter would be {_bytes(reduced / 2)}"
            usual = _directions(numbers)[name]
            if usual and asked >= Fraction(19, 10) * usual:
                which = next((kind for kind in elements if kind in (other, "all-reduce")), other)
                return f"the {which} {float(asked / usual):.3g} times"
            return f"more is {'reduced' if name == 'reduce' else 'gathered'} than is needed"
        if sum(elements.values()) > max(sum(numbers.values()), sum(logical.values()) * self._padded):
            return "more than the scheme needs"
        return ""

    def held_lines(self, seen: Sequence[Seen]) -> list[str]:
        """What is held at rest and at the peak."""
        found = [one.held for one in seen if one.held is not None]
        if not found:
            return []
        fullest = max(found, key=lambda held: sum(held.rest.values()))
        rest, should = sum(fullest.rest.values()), sum(self.expected.resident.values())
        bands = ", ".join(f"{band} {nbytes:,}" for band, nbytes in fullest.rest.items() if nbytes)
        each = round((rest - should) / self.layout.size, 2)
        text = f"held: {rest:,} B at rest on the fullest rank ({bands}); {self.name} holds {should:,}, {self._each} B "
        text += "of each parameter"
        if each > 0:
            text += f"; {each:.2f} B per parameter more that are your own"
            text += f" (outside of the states: {'; '.join(fullest.largest)})" if fullest.rest.get("elsewhere") else ""
        elif each < 0:
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


def _directions(elements: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """What is sent to be summed, and what to be copied; an all-reduce is half of each. Other messages are neither."""
    nothing = Fraction(0)
    both = elements.get("all-reduce", nothing) / 2
    return {
        "reduce": both + elements.get("reduce-scatter", nothing) + elements.get("reduce", nothing),
        "gather": both + elements.get("all-gather", nothing) + elements.get("broadcast", nothing),
    }


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
