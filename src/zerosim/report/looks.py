"""How a scheme looks: its colour, its mark and its line follow from its place among the schemes that are drawn.

Owns that rule, for figures and for the page. Must not know schemes: a row of one's own looks like
nobody else, whatever its name.

Colours repeat after eight places and marks after eleven, so no two of 88 schemes share both; a
line whose colour has been used is dashed. On a page, which has no colours for schemes, dashes repeat after
seven places, so that no two of 77 share dash and symbol.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerosim.report.colors import PLACES

# Each mark by the name that matplotlib has for it, and the one that a page has.
_MARKS = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": "x",
    "*": "star", "p": "pentagon", "h": "hexagon", "<": "triangle-left",
}  # fmt: skip
_LINES = ("-", "--", ":", "-.")
_DASHES = ("", "9 4", "2 4", "10 4 2 4", "16 4", "10 3 2 3 2 3", "5 3")


class Look(NamedTuple):
    """A scheme's colour, mark and line in figures; on a page, where colour is left to bands, its symbol and dash.

    ``dash`` is SVG's stroke-dasharray: lengths of dashes and gaps in pixels, nothing for a solid line.
    """

    color: str
    marker: str
    symbol: str
    line: str
    dash: str


def look(place: int) -> Look:
    """The look of the scheme that is drawn in this place, counted from 0.

    >>> look(0).marker, look(8).marker, look(0).color == look(8).color
    ('o', 'p', True)
    """
    marker, symbol = list(_MARKS.items())[place % len(_MARKS)]
    line, dash = _LINES[place // len(PLACES) % len(_LINES)], _DASHES[place % len(_DASHES)]
    return Look(PLACES[place % len(PLACES)], marker, symbol, line, dash)


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each of the schemes that are drawn, in their order; a name that comes again keeps its place."""
    return {name: look(place) for place, name in enumerate(dict.fromkeys(names))}


def nested(place: int, count: int, least: float, step: float, most: float) -> float:
    """The size of one of ``count`` things that may lie upon each other: each is smaller than those before it.

    The last is of size ``least``, each before it larger by ``step``, or by less where the first would pass ``most``.

    >>> [nested(place, 4, least=2, step=3, most=20) for place in range(4)]
    [11, 8, 5, 2]
    """
    after = count - 1 - place
    return least + after * min(step, (most - least) / max(count - 1, 1))
