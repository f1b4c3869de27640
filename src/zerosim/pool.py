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
from itertools import takewhile

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
        self._sizes: list[int] = []  # of the blocks that were ever free, in order
        self._free: dict[int, list[Array]] = {}  # those that are, by size

    def take(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array; each call's is one of its own, also where its memory was used before."""
        if self._exact:
            alike = self._alike.get((shape, dtype))
            return alike.pop().view() if alike else self._empty(shape, dtype)
        need = dtype.itemsize
        for side in shape:
            need *= side
        size = need if need <= PAGE else -(-need // PAGE) * PAGE
        alike = self._free.get(size)
        return np.ndarray(shape, dtype, alike.pop() if alike else self._block(size))

    def give(self, array: Array) -> None:
        """Take back what ``take`` gave."""
        if self._exact:
            self._alike.setdefault((array.shape, array.dtype), []).append(array)
            return
        block = array.base
        assert block is not None, "every array lies in a block"
        if (alike := self._free.get(size := len(block))) is None:
            alike = self._free[size] = []
            insort(self._sizes, size)
        alike.append(block)

    def _block(self, size: int) -> Array:
        at = bisect_left(self._sizes, size)
        for larger in takewhile(lambda each: each <= SLACK * size, self._sizes[at:]):
            if alike := self._free[larger]:
                return alike.pop()
        for smaller in takewhile(lambda each: SLACK * each >= size, reversed(self._sizes[:at])):
            if alike := self._free[smaller]:
                alike.pop()
                break
        return self._empty((size,), np.dtype(np.uint8))
