"""The ring of one process: all N ranks live here, and a hop moves no bytes.

Owns ``LocalRing``, and the strided views and copies that make it fast. Must not know ledgers or
the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Shaped

from zerosim.bands import Array, DType
from zerosim.comm import Pieces, Ring
from zerosim.util.casts import convert

_REGISTER = 65_536  # elements, of all ranks together, that are cast before they are added


class LocalRing(Ring):
    """All N ranks in one process: R = N, and a hop moves no bytes but says whose they are now.

    Row c of a block in flight is chunk c, wherever it is. After t hops it is at rank c-t, so
    what it meets there lies on a diagonal of [rank, chunk]: two strided views, no copy.
    """

    def __init__(self, size: int) -> None:
        self.size = n = size
        self.here = type(self).shift is LocalRing.shift  # where a hop does more, every one has to be made by it
        self.ids: Sequence[int] = range(n)
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

    def table(self, buffer: Shaped[Array, "R L"]) -> Shaped[Array, "1 n n C"]:
        return buffer.reshape(1, self.size, self.size, -1)

    def lanes(self, block: Shaped[Array, "R C"]) -> Shaped[Array, "1 n C"]:
        return block[np.newaxis]

    def chunks(self, buffer: Shaped[Array, "R L"], hop: int) -> Pieces:
        table = buffer.reshape(self.size**2, -1)  # a view, as buffers are contiguous
        return [(rows, table[diagonal]) for rows, diagonal in self._diagonals[hop % self.size]]

    def summands(self, buffer: Shaped[Array, "R L"], wire: DType) -> Iterator[Pieces]:
        """As in ``Ring``. Several hops' chunks are copied, and cast if need be, to a register of bounded size.

        A cast has a fixed cost, and chunks are small where ranks are many. Short chunks of several ranks
        lie far apart: a copy and then a sum are faster than a sum in strides.
        """
        n, same = self.size, wire == buffer.dtype
        shape = n, buffer.shape[1] // n
        ahead = min(n, _REGISTER // (shape[0] * shape[1]))
        if same and (n == 1 or ahead == 0):
            yield from (self.chunks(buffer, hop) for hop in range(1, n + 1))
            return
        if ahead <= 1:  # so long that each is cast from where it lies
            cast = np.empty_like(buffer, wire, shape=shape)
            for hop in range(1, n + 1):
                for some, chunk in self.chunks(buffer, hop):
                    convert(chunk, cast[some])
                yield [(slice(None), cast)]
            return
        stored = np.empty_like(buffer, shape=(ahead, *shape))
        cast = stored if same else np.empty_like(stored, wire)
        for first in range(1, n + 1, ahead):
            last = min(first + ahead, n + 1)
            some = slice(last - first)
            # In one call; without mode="clip" take would make a copy of its own first, lest a row be out of bounds.
            buffer.reshape(-1, shape[1]).take(self._met[first:last], axis=0, out=stored[some], mode="clip")
            if not same:
                convert(stored[some], cast[some])
            yield from ([(slice(None), mine)] for mine in cast[some])

    @cached_property
    def _met(self) -> Shaped[Array, "n R"]:
        """For hops 0 to N and each row of a block: the chunk that it meets, of all ranks' chunks counted in a row."""
        n = self.size
        numbers, met = np.arange(n * n).reshape(n, n), np.empty((n + 1, n), np.intp)
        for hop in range(n + 1):
            for some, chunk in self.chunks(numbers, hop):
                met[hop, some] = chunk[:, 0]
        return met
