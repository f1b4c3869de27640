"""Words of messages: the name that a caller may have meant, and how many there are. Must not know of what."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(name: str, known: Iterable[str]) -> str:
    """The known name that is most like ``name``, whatever its case; nothing if none is.

    >>> near("Zero3", ["ZeRO1", "ZeRO3"]), near("seven", ["ZeRO1", "ZeRO3"])
    ('ZeRO3', '')
    """
    folded = {each.casefold(): each for each in known}
    return next((folded[each] for each in difflib.get_close_matches(name.casefold(), folded, n=1)), "")


def counted(count: int, what: str) -> str:
    """How many there are.

    >>> counted(1, "step"), counted(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"
