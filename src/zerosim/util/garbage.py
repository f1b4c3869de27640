"""Python's search for garbage, put off where it would find next to none.

Owns that one switch of the interpreter's. Whatever nothing refers to any more goes at once all the same; the search is
for what refers to itself in a circle. Each one looks at every object that there is, and torch and transformers have
about a million, which stay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Within the block no garbage is looked for; after it, as it was before."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
