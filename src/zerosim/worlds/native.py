"""Collectives handed over whole, to a library that has its own, behind the face of ``Comm``.

Owns the layout that makes another library's chunk boundaries ours, and a simulation of such a
library in one process, so that a simulated run holds and counts what a real one does. Must not
know torch, models or memory bands.

gloo's all-reduce sums a chunk in the ring's order, but cuts chunks where its segments end. They
end where ours do once each chunk is padded to a multiple of the segments per chunk. The padded
copy is a temporary of N chunks and its result one more, where the ring needs two blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from zerosim.bands import FP32, Array, DType
from zerosim.comm import Comm, Ring
from zerosim.counts import Traffic
from zerosim.ledger import Ledger
from zerosim.ranks import Workspace
from zerosim.util.casts import convert
from zerosim.util.shapes import Shaped
from zerosim.worlds.gloo import segments
from zerosim.worlds.local import LocalRing


@runtime_checkable
class CollectiveRing(Ring, Protocol):
    """A world with collectives of its own. ``whole`` is [R, n*C] and ``own`` [R, C], contiguous, of one dtype."""

    def all_reduce(self, whole: Shaped[Array, "R L"]) -> None:
        """Replace ``whole`` on every rank by the sum over its ring."""
        ...

    def reduce_scatter(self, whole: Shaped[Array, "R L"], own: Shaped[Array, "R C"]) -> None:
        """Write to ``own`` the sum over the ring of the chunk that each rank owns."""
        ...

    def all_gather(self, own: Shaped[Array, "R C"], whole: Shaped[Array, "R L"]) -> None:
        """Fill ``whole`` on every rank with what the members of its ring have in ``own``."""
        ...


class LocalCollectives(LocalRing):
    """All N ranks in one process, with the results that gloo's collectives have: each sum in the ring's order."""

    def all_reduce(self, whole: Shaped[Array, "R L"]) -> None:
        table = self.table(whole)
        for chunk in range(self.size):
            table[:, :, chunk] = self._sum(table, chunk)[:, np.newaxis]

    def reduce_scatter(self, whole: Shaped[Array, "R L"], own: Shaped[Array, "R C"]) -> None:
        table, lanes = self.table(whole), self.lanes(own)
        for chunk in range(self.size):
            lanes[:, chunk] = self._sum(table, chunk)

    def all_gather(self, own: Shaped[Array, "R C"], whole: Shaped[Array, "R L"]) -> None:
        self.table(whole)[...] = self.lanes(own)[:, np.newaxis]

    def _sum(self, table: Shaped[Array, "rings n n C"], chunk: int) -> Shaped[Array, "rings C"]:
        """The member below the owner first, the owner last, rounded to the dtype at every addition."""
        result: Array = table[:, chunk - 1, chunk].copy()
        for distance in range(2, self.size + 1):
            np.add(result, table[:, (chunk - distance) % self.size, chunk], out=result)
        return result


def aligned(chunk: int, size: int, itemsize: int) -> int:
    """The elements that a chunk of ``chunk`` is padded to, so that gloo's boundaries are the ranks'."""
    length = chunk
    while length % (cut := segments(size * length, itemsize, size)[0] // size):
        length = -(-length // cut) * cut
    return length


class Native(Comm):
    """``Comm`` with the ring's own collectives in place of hops; a ring without any is a TypeError.

    Counted is what a rank hands over for others: all chunks but its own of what is to be reduced,
    and its own chunk once for each of the others of what is to be gathered. An all-reduce is both.
    What the library then makes of it is the library's affair.
    """

    def __init__(self, ring: Ring, wire: DType, blocks: Workspace, ledger: Ledger) -> None:
        super().__init__(ring, wire, blocks, ledger)
        if not isinstance(ring, CollectiveRing):
            raise TypeError(
                f"Native(ring): the ring must have collectives of its own; got {type(ring).__name__}. "
                f"Use LocalCollectives or TorchRing, or collectives=Comm."
            )
        self._library: CollectiveRing = ring

    def all_reduce(
        self, buffer: Shaped[Array, "R L"], size: int, *, scale: float, band: str, unit: str, start: Any = 0
    ) -> None:
        """As in ``Comm``, but the sum is sent unscaled, and every rank scales it.

        The bits are the same if the wire carries the buffer's dtype exactly, as a ``Scheme``'s does.
        """
        with self._laid_out(buffer, "all-reduce", band, unit) as (whole, own, traffic):
            self._library.all_reduce(whole)
            mine, others = self._pads(buffer, size, own, start)
            self._count(traffic, whole, own, others)
            self._count(traffic, whole, own, mine)
            _scale(self._by_chunk(whole, buffer), scale, self._by_chunk(buffer, buffer))

    def reduce_scatter(
        self, buffer: Shaped[Array, "R L"], out: Shaped[Array, "R C"], size: int, *, scale: float, band: str, unit: str,
        name: str = "reduce-scatter", start: Any = 0,
    ) -> None:  # fmt: skip
        """As in ``Comm``."""
        with self._laid_out(buffer, name, band, unit) as (whole, own, traffic):
            self._library.reduce_scatter(whole, own)
            _, others = self._pads(buffer, size, own, start)
            self._count(traffic, whole, own, others)
            _scale(own[:, : out.shape[-1]].reshape(out.shape), scale, out)

    def all_gather(
        self, buffer: Shaped[Array, "R L"], size: int, own: Shaped[Array, "R C"] | None = None, *, band: str, unit: str,
        name: str = "all-gather", start: Any = 0,
    ) -> None:  # fmt: skip
        """As in ``Comm``: an owner keeps its bits, and the others get those that were sent."""
        place = self.own(buffer)
        kept: Array = (place if own is None else own).reshape(place.shape).copy()  # a register: all chunks come back
        with self._held(self._length(kept.shape[-1]), name, band, unit) as (whole, block, traffic):
            kept = self._leave(kept, block)
            self._library.all_gather(block, whole)
            mine, _ = self._pads(buffer, size, block, start)
            self._count(traffic, whole, block, mine)
            self._land(whole.reshape(len(whole), self.ring.size, -1), self._by_chunk(buffer, buffer))
        place[...] = kept

    @contextmanager
    def _laid_out(self, buffer: Array, name: str, band: str, unit: str) -> Iterator[tuple[Array, Array, Traffic]]:
        """``buffer`` as the library will cut it, and room for one of its chunks."""
        length = aligned(buffer.shape[1] // self.ring.size, self.ring.size, self.wire.itemsize)
        with self._held(length, name, band, unit) as (whole, own, traffic):
            whole[...] = 0
            convert(self._by_chunk(buffer, buffer), self._by_chunk(whole, buffer))
            yield whole, own, traffic

    @contextmanager
    def _held(self, length: int, name: str, band: str, unit: str) -> Iterator[tuple[Array, Array, Traffic]]:
        """n chunks of ``length`` and one, held while a collective runs, and its counter."""
        self.blocks.unit = unit
        with self.ledger.sending(name, band, unit, self._leaves, self.ring.leaving) as traffic:
            whole = self.blocks.hold(self.ring.size * length)
            own = self.blocks.hold(length)
            try:
                yield whole, own, traffic
            finally:
                self.blocks.free(own)
                self.blocks.free(whole)

    def _by_chunk(self, whole: Array, buffer: Array) -> Array:
        """The chunks of ``whole``, as long as those of ``buffer``, as a view [R, n, C]."""
        n = self.ring.size
        return np.reshape(whole, (len(whole), n, -1), copy=False)[..., : buffer.shape[1] // n]

    def _count(self, traffic: Traffic, whole: Array, own: Array, padding: npt.NDArray[np.int64]) -> None:
        """Count n-1 chunks that go and n-1 that come."""
        nbytes = (whole.nbytes - own.nbytes) // len(self.ring.ids)
        traffic.hop(nbytes, nbytes, padding)

    def _pads(
        self, buffer: Array, size: int, own: Array, start: Any
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Bytes of padding per rank [R]: in its own chunk, n-1 times, and in all the others."""
        n = self.ring.size
        chunk = buffer.shape[1] // n
        starts: npt.NDArray[np.int64] = np.broadcast_to(np.reshape(start, (-1, 1)), (len(buffer), 1))
        ends = starts + np.arange(1, n + 1) * chunk
        lengths = self._length(chunk - np.clip(ends - size, 0, chunk))  # without padding
        pads = own.shape[1] - lengths
        mine = pads[np.arange(len(buffer)), np.asarray(self.ring.members)]
        return (n - 1) * mine * own.itemsize, (pads.sum(axis=1) - mine) * own.itemsize


def _scale(total: Array, scale: float, out: Array) -> None:
    """``total`` times ``scale``, in fp32 and rounded once, into ``out``."""
    scaled = total.astype(FP32)
    np.multiply(scaled, np.float32(scale), out=scaled)
    convert(scaled, out)
