"""Names that a caller may have meant. Must not know what they are of."""

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
