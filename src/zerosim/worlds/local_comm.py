"""Collectives of one process whose hops are all made in one call, by a kernel that counts each as it makes it.

Owns what such a kernel is handed, and how what it has counted is booked. Bits and counts are those of ``Comm``,
which makes the hops one by one, also here where no kernel can. Must not know bands, nor how a kernel works.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from zerosim.bands import INT8, Array
from zerosim.comm import Comm, Flight
from zerosim.counts import Counts
from zerosim.kernels.operations import Handed
from zerosim.util.shapes import Shaped
from zerosim.worlds.local import LocalRing


class LocalComm(Comm):
    """``Comm`` over a ``LocalRing`` whose hops move nothing."""

    ring: LocalRing

    def _sum(self, buffer: Shaped[Array, "R L"], flight: Flight) -> Shaped[Array, "R C"]:
        kernels, ring = self.blocks.kernels, self.ring
        if kernels.ring_sum is not None and kernels.rings(buffer.size):
            table, lanes = ring.table(buffer), (ring.lanes(flight.block), ring.lanes(flight.spare))
            handed = Handed(table.shape[0], ring.size)
            total = kernels.ring_sum(table, lanes, self._padding_by_chunk(table, flight), handed)
            if total is not None:
                self._book(handed, flight)
                return flight.block if total is lanes[0] else flight.spare
        return super()._sum(buffer, flight)

    def _copy(self, buffer: Shaped[Array, "R L"], flight: Flight) -> None:
        kernels, ring = self.blocks.kernels, self.ring
        if kernels.ring_copies is not None and self.wire != INT8 and kernels.rings(buffer.size):
            table, lanes = ring.table(buffer), np.ascontiguousarray(ring.lanes(self._landed(flight.block, buffer)))
            handed, padding = Handed(table.shape[0], ring.size), self._padding_by_chunk(table, flight)
            if kernels.ring_copies(lanes, table, self.wire.itemsize, padding, handed):
                self._book(handed, flight)
                return
        super()._copy(buffer, flight)

    def _padding_by_chunk(self, table: Shaped[Array, "rings n n C"], flight: Flight) -> Counts:
        """Bytes on the wire of padding in each chunk [ring, chunk] of a buffer."""
        rings, n, _, chunk = table.shape
        if isinstance(flight.start, int):
            return _beyond(rings, n, chunk, flight.size - flight.start, self.wire.itemsize)
        starts = self.ring.lanes(np.asarray(flight.start))[:, 0].tolist()  # alike for the members of a ring
        return np.concatenate([_beyond(1, n, chunk, flight.size - start, self.wire.itemsize) for start in starts])

    def _book(self, handed: Handed, flight: Flight) -> None:
        """Book what a kernel has counted: all ranks hand on as much, of which not as much is padding."""
        messages, sent, received, _ = handed.counts[0, 0].tolist()
        by_rank, padding = None, handed.counts[..., 3]
        if np.count_nonzero(padding):
            by_rank = np.empty(len(self.ring.ids), np.int64)
            self.ring.lanes(by_rank)[...] = padding
        flight.traffic.hop(sent, received, by_rank, messages)


@lru_cache(maxsize=4096)
def _beyond(rings: int, n: int, chunk: int, size: int, itemsize: int) -> Counts:
    """Bytes that lie beyond ``size`` elements of each of n chunks in a row, alike in every ring [ring, chunk]."""
    beyond = np.clip(np.arange(1, n + 1) * chunk - size, 0, chunk) * itemsize
    found = np.tile(beyond, (rings, 1))
    found.flags.writeable = False  # every caller is given this one
    return found
