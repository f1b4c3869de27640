"""The smallest and the largest number that holds, by asking of each one tried whether it does.

Owns the order in which numbers are tried. Must not know what is asked about them.
"""

from __future__ import annotations

from collections.abc import Callable

EVERY = 16  # up to here each number is tried: among few ranks memory need not fall with every rank more


def smallest(holds: Callable[[int], bool], most: int, *, least: int = 1, every: int = EVERY) -> int | None:
    """The smallest number from ``least`` to ``most`` that holds, or None.

    Numbers up to ``every`` are tried one by one; beyond, it is taken for granted that what holds
    for a number holds for larger ones: what is returned holds, and the number below it does not.
    """
    for number in range(least, min(every, most) + 1):
        if holds(number):
            return number
    low = max(least - 1, min(every, most))
    step = max(1, low)
    high = low
    while high < most:
        high = min(high + step, most)
        if holds(high):
            break
        low, step = high, 2 * step
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def largest(holds: Callable[[int], bool], most: int, *, first: int = 1) -> int:
    """The largest number from 1 to ``most`` that holds, or 0 if 1 does not; what holds holds for smaller ones.

    ``first`` is where to begin, if something is known of the answer: from there in steps of 1, 2, 4, ...
    """
    start = max(1, min(first, most))
    step = 1
    if holds(start):
        low, high = start, most + 1
        while low < most:
            tried = min(low + step, most)
            if not holds(tried):
                high = tried
                break
            low, step = tried, 2 * step
    else:
        low, high = 0, start
        while high > 1:
            tried = max(1, high - step)
            if holds(tried):
                low = tried
                break
            high, step = tried, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
