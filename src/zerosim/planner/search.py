"""The smallest and the largest number that holds, by asking of each one tried whether it does.

Owns the order in which numbers are tried. Must not know what is asked about them.
"""

from __future__ import annotations

from collections.abc import Callable

EVERY = 16  # up to here each number is tried: among few ranks memory need not fall with every rank more


def smallest(holds: Callable[[int], bool], most: int, *, every: int = EVERY) -> int | None:
    """The smallest number from 1 to ``most`` that holds, or None.

    Numbers up to ``every`` are tried one by one; beyond, it is taken for granted that what holds
    for a number holds for larger ones: what is returned holds, and the number below it does not.
    """
    for number in range(1, min(every, most) + 1):
        if holds(number):
            return number
    low = min(every, most)
    if low == most:
        return None
    high = low
    while True:
        high = min(2 * high, most)
        if holds(high):
            break
        if high == most:
            return None
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def largest(holds: Callable[[int], bool], most: int, *, first: int = 1) -> int:
    """The largest number from 1 to ``most`` that holds, or 0 if 1 does not; what holds holds for smaller ones.

    ``first`` is where to begin, if something is known of the answer.
    """
    high = max(1, min(first, most))
    if holds(high):
        low = high
        while low < most:
            high = min(2 * low, most)
            if not holds(high):
                break
            low = high
        else:
            return low
    else:
        low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
