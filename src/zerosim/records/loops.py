"""A long list written as loops: what comes again right after itself is written once, with how often.

Owns that form. A step does for each layer what it did for the one before, so that its log becomes as long as
a layer's, however many there are. Must not know what the numbers of a list mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

LONGEST = 160  # of what comes again; what a unit does in a step is shorter

Loops = list[Any]
"""Numbers, and loops ``[how often, [what]]`` in which the same may stand."""


def folded(numbers: Sequence[int]) -> Loops:
    """The list as loops.

    >>> folded([7, 1, 2, 1, 2, 1, 2, 9])
    [7, [3, [1, 2]], 9]
    """
    return _folded(list(numbers))


def _folded(items: Loops) -> Loops:
    while (shorter := _once(items)) != items:
        items = shorter  # loops may themselves come again, as those of each micro-batch do
    return items


def unfolded(loops: Loops) -> list[int]:
    """The list that ``folded`` was given.

    >>> unfolded([7, [3, [1, [2, [2]]]], 9])
    [7, 1, 2, 2, 1, 2, 2, 1, 2, 2, 9]
    """
    return list(_each(loops))


def _each(loops: Loops) -> Iterator[int]:
    for item in loops:
        if isinstance(item, int):
            yield item
        else:
            times, inner = item
            for _ in range(times):
                yield from _each(inner)


def _once(items: Loops) -> Loops:
    """From left to right, the longest stretch that is one thing again and again as a loop."""
    found: Loops = []
    place = 0
    while place < len(items):
        best, length, times = 0, 1, 1
        for period in range(1, min(LONGEST, (len(items) - place) // 2) + 1):
            count = _times(items, place, period)
            if (spared := (count - 1) * period - 1) > best:
                best, length, times = spared, period, count
        body = items[place : place + length]
        found.append([times, _folded(body)] if times > 1 else body[0])
        place += times * length
    return found


def _times(items: Sequence[Any], place: int, period: int) -> int:
    """How often what begins at a place comes, without a gap."""
    if items[place] != items[place + period]:
        return 1
    body, count = items[place : place + period], 1
    while items[place + count * period : place + (count + 1) * period] == body:
        count += 1
    return count
