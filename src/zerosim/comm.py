"""Ring collectives over one primitive, ``shift``, and the ring of a single process.

Owns the ring all-reduce, reduce-scatter and all-gather (Patarasuk and Yuan 2009) and the
byte counter inside the hop. Must not know models or memory bands: its blocks come from a
workspace, and whose bytes they are is a label that the caller gives.

A buffer [R, N*C] is N chunks for each of the R ranks of this process; chunk c is owned by
rank c. Data flows to lower ranks, N-1 hops of one chunk:

* **reduce-scatter**: rank r first hands over chunk r+1. What arrives at hop t is the sum so
  far of chunk r+t+1, to which r adds its own. So the sum of chunk c starts with x[c-1], adds
  x[c-2], ..., and x[c] last, each partial sum rounded to the wire dtype. It is the order of
  torch's gloo all-reduce, which makes the two comparable bit for bit.
* **all-gather**: rank r first hands over the chunk it owns and then whatever arrived.
* **all-reduce**: the one and then the other. Each sends (N-1)/N of the buffer per rank, which
  is why it costs 2(N-1)/N and why ZeRO-1 and -2 get their gradients for half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from zerosim.bands import FP32, Array, DType
from zerosim.kernels import Handed
from zerosim.ledger import Counts, Ledger, Traffic
from zerosim.ranks import Workspace
from zerosim.util.casts import convert

Pieces = list[tuple[slice, Array]]  # rows of a block in flight, and what belongs to them
Hop = Callable[[Array, Array, int], Array]


@runtime_checkable
class Ring(Protocol):
    """A world of ranks: N of them in all, R of them in this process.

    ``size`` is N and ``ids`` are the ranks that live here, consecutive. A block in flight is [R, C].
    Which rank a row of it is at is the ring's own affair; ``chunks`` gives the ranks' data in the
    same order, so that row meets row.
    """

    size: int
    ids: Sequence[int]
    here: bool = False  # whether all ranks are, and a hop moves nothing: then a kernel may make all hops in one call

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array of this world, contents undefined."""
        ...

    def shift(self, block: Shaped[Array, "R C"], spare: Shaped[Array, "R C"]) -> Shaped[Array, "R C"]:
        """Hand ``block`` to rank r-1 and return the one that rank r+1 handed over.

        It arrives in ``spare``, or, where the rows have only changed their ranks, as a
        read-only view of ``block``, whose row c is then chunk c.
        """
        ...

    def chunks(self, buffer: Shaped[Array, "R L"], hop: int) -> Pieces:
        """For each rank r its chunk (r + hop) mod N of ``buffer`` [R, N*C], as views [rows, C]
        with the rows of a block in flight that they belong to."""
        ...

    def table(self, buffer: Shaped[Array, "R L"]) -> Shaped[Array, "rings n n C"]:
        """``buffer`` as [ring, rank, chunk, C], a view, where all ranks are ``here``."""
        raise NotImplementedError

    def lanes(self, block: Shaped[Array, "R C"]) -> Shaped[Array, "rings n C"]:
        """A block in flight as [ring, chunk, C], a view, where all ranks are ``here``."""
        raise NotImplementedError

    def summands(self, buffer: Shaped[Array, "R L"], wire: DType) -> Iterator[Pieces]:
        """Each rank's chunks r+1, ..., r+N of ``buffer``, in the wire's dtype: the order in which they are added."""
        for hop in range(1, self.size + 1):
            pieces = self.chunks(buffer, hop)
            yield pieces if wire == buffer.dtype else [(rows, _cast(chunk, wire)) for rows, chunk in pieces]


class Comm:
    """The collectives of one process's ranks.

    ``wire`` is the dtype that blocks travel in: they are cast from the buffer's dtype as
    they leave and back as they land. ``blocks`` provides the two blocks that a rank needs
    in flight, one going and one coming; ``ledger`` is told of every hop.

    Where all ranks are in this process and their kernels can, all hops of a collective are made in one
    call, which counts them as it makes them.
    """

    def __init__(self, ring: Ring, wire: DType, blocks: Workspace, ledger: Ledger) -> None:
        self.ring, self.wire, self.blocks, self.ledger = ring, wire, blocks, ledger
        self._convert = blocks.kernels.convert

    def own(self, buffer: Shaped[Array, "R L"]) -> Shaped[Array, "R C"]:
        """The chunk of ``buffer`` [R, N*C] that each rank owns, as a view [R, C]."""
        [(_, view)] = self.ring.chunks(buffer, 0)
        return view

    def all_reduce(self, buffer: Shaped[Array, "R L"], size: int, *, scale: float, band: str, unit: str) -> None:
        """Replace ``buffer`` [R, N*C] on every rank by the ranks' sum times ``scale``.

        ``size`` is its logical length, the rest being padding. The scaling is done in fp32
        and rounded once, by the chunk's owner, before the result travels.
        """
        self.reduce_scatter(buffer, self.own(buffer), size, scale=scale, band=band, unit=unit, name="all-reduce")
        self.all_gather(buffer, size, band=band, unit=unit, name="all-reduce")

    def reduce_scatter(
        self,
        buffer: Shaped[Array, "R L"],
        out: Shaped[Array, "R C"],
        size: int,
        *,
        scale: float,
        band: str,
        unit: str,
        name: str = "reduce-scatter",
    ) -> None:
        """Write to ``out`` [R, C] the sum over ranks, times ``scale``, of the chunk that each rank owns.

        ``out`` may be that chunk of ``buffer`` [R, N*C] itself. Nothing else of ``buffer`` changes.
        """
        with self._flight(buffer, size, name, band, unit) as (block, spare, hop, traffic):
            if (summed := self._sum_at_once(buffer, size, block, spare, traffic)) is not None:
                block = summed
            else:
                summands = self.ring.summands(buffer, self.wire)
                for rows, mine in next(summands):
                    block[rows] = mine
                for sent, pieces in enumerate(summands, start=1):
                    arrived = hop(block, spare, sent)
                    for rows, mine in pieces:
                        np.add(arrived[rows], mine, out=spare[rows])
                    block, spare = spare, block
            total = block if self.wire == FP32 else block.astype(FP32)
            np.multiply(total, np.float32(scale), out=total)
            self._convert(total, out)

    def all_gather(
        self,
        buffer: Shaped[Array, "R L"],
        size: int,
        own: Shaped[Array, "R C"] | None = None,
        *,
        band: str,
        unit: str,
        name: str = "all-gather",
    ) -> None:
        """Fill ``buffer`` [R, N*C] on every rank with the chunks that the ranks own.

        ``own`` [R, C] is where they lie; without it each is in its place in ``buffer`` already.
        """
        n, place = self.ring.size, self.own(buffer)
        if own is None:
            own = np.empty_like(place)  # a register: an owner keeps its own bits, not those that travelled
            np.copyto(own, place)
        with self._flight(buffer, size, name, band, unit) as (block, spare, hop, traffic):
            self._convert(own, block)
            for sent in range(0 if self._copy_at_once(buffer, size, block, traffic) else n - 1):
                arrived = hop(block, spare, sent)
                if arrived is spare:  # and has to be written before the next one arrives
                    for rows, chunk in self.ring.chunks(buffer, sent + 1):
                        self._convert(arrived[rows], chunk)
                    block, spare = spare, block
                elif sent == n - 2:  # nothing was moved, but by now each row has been at every rank
                    np.copyto(buffer.reshape(len(buffer), n, -1), self._landed(arrived, buffer.dtype))
        self._convert(own, place)

    def _landed(self, block: Shaped[Array, "R C"], dtype: DType) -> Shaped[Array, "R C"]:
        """A block in the dtype that it is written in: itself, or a register."""
        if block.dtype == dtype:
            return block
        landed = np.empty_like(block, dtype)
        self._convert(block, landed)
        return landed

    def _sum_at_once(
        self, buffer: Shaped[Array, "R L"], size: int, block: Array, spare: Array, traffic: Traffic
    ) -> Array | None:
        """The sums of a reduce-scatter, in one of the two blocks, if a kernel makes all the hops."""
        kernel, ring = self.blocks.kernels.ring_sum, self.ring
        if kernel is None or not ring.here:
            return None
        table, lanes = ring.table(buffer), (ring.lanes(block), ring.lanes(spare))
        handed = Handed(*table.shape[:2])
        total = kernel(table, lanes, _padding(*table.shape[1:], size, self.wire.itemsize), handed)
        if total is None:
            return None
        _book(handed, traffic)
        return block if total is lanes[0] else spare

    def _copy_at_once(self, buffer: Shaped[Array, "R L"], size: int, block: Array, traffic: Traffic) -> bool:
        """Whether a kernel has made all the hops of an all-gather."""
        kernel, ring = self.blocks.kernels.ring_copies, self.ring
        if kernel is None or not ring.here:
            return False
        table, lanes = ring.table(buffer), ring.lanes(self._landed(block, buffer.dtype))
        handed = Handed(*table.shape[:2])
        padding = _padding(*table.shape[1:], size, self.wire.itemsize)
        if done := kernel(lanes, table, self.wire.itemsize, padding, handed):
            _book(handed, traffic)
        return done

    @contextmanager
    def _flight(
        self, buffer: Array, size: int, collective: str, band: str, unit: str
    ) -> Iterator[tuple[Array, Array, Hop, Traffic]]:
        """The two blocks of a collective, held while it runs, its hop, and where that is counted."""
        if not buffer.flags.c_contiguous:
            raise ValueError(
                f"Comm: {collective} works in place, so its buffer must be contiguous, or a copy would be written; "
                f"got strides {buffer.strides} for shape {buffer.shape}. Pass what hold returned, not a view of it."
            )
        chunk = buffer.shape[1] // self.ring.size
        offsets: list[int] = []
        self.blocks.unit = unit
        with self.ledger.sending(collective, band, unit) as traffic:
            block = self.blocks.hold(chunk)
            try:
                spare = self.blocks.hold(chunk)
                try:
                    yield block, spare, self._hop(traffic, offsets), traffic
                finally:
                    self.blocks.free(spare)
                    traffic.padding += self._padding(buffer.shape[1], size, offsets)
            finally:
                self.blocks.free(block)

    def _hop(self, traffic: Traffic, offsets: list[int]) -> Hop:
        """How each rank r hands on a block, which is of chunk r + offset, and gets the one above's. Counted here."""
        shift, rows = self.ring.shift, len(self.ring.ids)

        def hop(block: Array, spare: Array, offset: int) -> Array:
            arrived = shift(block, spare)
            traffic.hop(block.nbytes // rows, arrived.nbytes // rows, None)
            offsets.append(offset)  # what of the block is padding is worked out once, in _flight
            return arrived

        return hop

    def _padding(self, padded: int, size: int, offsets: Sequence[int]) -> Counts:
        """What of the chunks r + offset that each rank r here has sent was padding, in bytes on the wire [R]."""
        if size == padded or not offsets:
            return np.zeros(len(self.ring.ids), np.int64)
        chunk = padded // self.ring.size
        ends = (np.add.outer(self.ring.ids, offsets) % self.ring.size + 1) * chunk
        beyond: Counts = np.clip(ends - size, 0, chunk).sum(axis=1)
        return beyond * self.wire.itemsize


def _cast(chunk: Shaped[Array, "R C"], dtype: DType) -> Shaped[Array, "R C"]:
    register = np.empty_like(chunk, dtype)
    convert(chunk, register)
    return register


@lru_cache
def _padding(n: int, _: int, chunk: int, size: int, itemsize: int) -> Counts:
    """Bytes of padding in each of n chunks, as [1, n]."""
    return np.clip(np.arange(1, n + 1) * chunk - size, 0, chunk)[np.newaxis] * itemsize


def _book(handed: Handed, traffic: Traffic) -> None:
    """Book what a kernel has counted. All ranks hand on as much."""
    messages, sent, received, _ = handed.counts[0, 0].tolist()
    traffic.hops(messages, sent, received, handed.padding.reshape(-1))
