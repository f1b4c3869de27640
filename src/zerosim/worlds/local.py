"""The ring of one process: all N ranks live here, and a hop moves no bytes.

Owns ``LocalRing`` and the strided views that make it fast. Must not know collectives or ledgers.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Shaped

from zerosim.bands import Array, DType

Pieces = list[tuple[slice, Array]]  # rows of a block in flight, and what belongs to them


class LocalRing:
    """All N ranks in one process: R = N, and a hop moves no bytes but says whose they are now.

    Row c of a block in flight is chunk c, wherever it is. After t hops it is at rank c-t, so
    what it meets there lies on a diagonal of [rank, chunk]: two strided views, no copy.
    """

    def __init__(self, size: int) -> None:
        self.size = n = size
        self.ids = range(n)
        # Rows rank*N + chunk of the table for each hop t: ranks 0 .. N-t-1 meet chunks t .. N-1,
        # and ranks N-t .. N-1 chunks 0 .. t-1; each beside the rows of the block that they are.
        self._diagonals = [
            [
                (slice(t, n), slice(t, t + (n - t - 1) * (n + 1) + 1, n + 1)),
                *([(slice(0, t), slice((n - t) * n, None, n + 1))] if t else []),
            ]
            for t in range(n)
        ]

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return np.empty(shape, dtype)

    def shift(self, block: Shaped[Array, "R C"], spare: Shaped[Array, "R C"]) -> Shaped[Array, "R C"]:
        arrived = block.view()
        arrived.setflags(write=False)  # in half the time of arrived.flags.writeable
        return arrived

    def chunks(self, buffer: Shaped[Array, "R L"], hop: int) -> Pieces:
        table = buffer.reshape(self.size**2, -1)  # a view, as buffers are contiguous
        return [(rows, table[diagonal]) for rows, diagonal in self._diagonals[hop % self.size]]
