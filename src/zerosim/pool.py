"""Memory that was freed and waits to be handed out again.

Owns which freed block an array is made in. Must not know what is held, by whom or why: that is ``ranks.py``.

A layer's parameters are gathered and freed, then the next one's. If each came back to memory of its own, the
process would keep as many times what its ranks ever hold at once as there are sizes, and all of it would pass
through the cache. So where a world's arrays are NumPy's an array may lie in a block that was larger. It is the
smallest that will do, and at most ``SLACK`` times as large as is needed. If all are too small, the largest of those
that are not much too small is given up for a new one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from zerosim.bands import Array, DType

SLACK = 4
PAGE = 4096  # bytes: how large blocks are is rounded up to so many, so that like sizes share them


class Pool:
    """Arrays made by ``empty`` in memory that may have been used before; contents undefined.

    Where ``exact`` a block has the shape and dtype of its array, and is used for no other.
    """

    def __init__(self, empty: Callable[[tuple[int, ...], DType], Array], *, exact: bool) -> None:
        self._empty, self._exact = empty, exact
        self._alike: dict[tuple[tuple[int, ...], DType], list[Array]] = {}
        self._sizes: list[int] = []  # of the blocks that are free, in order
        self._free: dict[int, list[Array]] = {}  # these, by size
        self._blocks: dict[int, Array] = {}  # where each array lies that is in use

    def take(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array; each call's is one of its own, also where its memory was used before."""
        if self._exact:
            alike = self._alike.get((shape, dtype))
            return alike.pop().view() if alike else self._empty(shape, dtype)
        need = dtype.itemsize
        for side in shape:
            need *= side
        block = self._block(need)
        array: Array = np.ndarray(shape, dtype, block)
        self._blocks[id(array)] = block
        return array

    def give(self, array: Array) -> None:
        """Take back what ``take`` gave."""
        if self._exact:
            self._alike.setdefault((array.shape, array.dtype), []).append(array)
            return
        block = self._blocks.pop(id(array))
        size = len(block)
        alike = self._free.setdefault(size, [])
        alike.append(block)
        if len(alike) == 1:  # last: cut short before it, a block is forgotten, and no size is without one
            insort(self._sizes, size)

    def _block(self, need: int) -> Array:
        size = -(-need // PAGE) * PAGE if need > PAGE else need
        at = bisect_left(self._sizes, size)
        if at < len(self._sizes) and self._sizes[at] <= SLACK * size:
            return self._out(at)
        if at and SLACK * self._sizes[at - 1] >= size:
            self._out(at - 1)
        return self._empty((size,), np.dtype(np.uint8))

    def _out(self, at: int) -> Array:
        """A block of the size at this place, no longer free: the one that was used last."""
        alike = self._free[self._sizes[at]]
        if len(alike) == 1:
            del self._sizes[at]
        return alike.pop()
