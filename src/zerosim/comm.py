"""Ring collectives over one primitive, ``shift``, and the ring of a single process.

Owns the ring all-reduce, reduce-scatter and all-gather (Patarasuk and Yuan 2009) and the
byte counter inside the hop. Must not know models or memory bands: its blocks come from a
workspace, and whose bytes they are is a label that the caller gives.

A buffer [R, n*C] is n chunks for each of the R ranks of this process, n being the size of the ring:
all N ranks, those of a group, or those with one place in their groups. Chunk c is owned by the ring's
member c. Data flows to lower members, n-1 hops of one chunk:

* **reduce-scatter**: member r first hands over chunk r+1. What arrives at hop t is the sum so
  far of chunk r+t+1, to which r adds its own. So the sum of chunk c starts with x[c-1], adds
  x[c-2], ..., and x[c] last, each partial sum rounded to the wire dtype. It is the order of
  torch's gloo all-reduce, which makes the two comparable bit for bit.
* **all-gather**: member r first hands over the chunk it owns and then whatever arrived.
* **all-reduce**: the one and then the other. Each sends (n-1)/n of the buffer per rank, which
  is why it costs 2(n-1)/n and why ZeRO-1 and -2 get their gradients for half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from zerosim.bands import FP32, INT8, Array, DType
from zerosim.counts import Counts, Traffic
from zerosim.ledger import Ledger
from zerosim.ranks import Workspace
from zerosim.util import int8
from zerosim.util.casts import convert
from zerosim.util.shapes import Shaped

Pieces = list[tuple[Any, Array]]  # where in the grid of a block in flight, and what belongs there
_COUNTED = 65_536  # messages at a time whose padding is worked out


@runtime_checkable
class Ring(Protocol):
    """Ranks in a ring: n of them, or several rings of n side by side, one for each group of ranks.

    ``size`` is n, ``ids`` are the ranks that live in this process and ``members`` their places in their
    rings. ``leaves`` is 1 for each of them whose messages leave its node, ``leaving`` how many of a node's do.

    A block in flight is [R, C]. Which rank a row of it is at is the ring's own affair; ``grid`` lays
    blocks out, and ``chunks`` gives the ranks' data in the same order, so that row meets row.
    """

    here: bool = False  # whether all ranks are, and a hop moves nothing

    size: int
    ids: Sequence[int]
    members: Sequence[int]
    leaves: Sequence[int]
    leaving: int

    def split(self, node: int) -> tuple[Ring, Ring, Ring]:
        """This ring of all ranks, in nodes of so many; those within the nodes; those of the ranks with one place.

        Rank r = d S + s is member s of node d: in the second ring it is with the ranks of d, in the third with
        those of s.
        """

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array of this world, contents undefined."""

    def shift(self, block: Shaped[Array, "R C"], spare: Shaped[Array, "R C"]) -> Shaped[Array, "R C"]:
        """Hand ``block`` to the member below and return the one that the member above handed over.

        It arrives in ``spare``, or, where the rows have only changed their ranks, as a
        read-only view of ``block``, whose row r is then the chunk that rank r owns.
        """

    def grid(self, block: Shaped[Array, "R C"]) -> Shaped[Array, "... C"]:
        """A view of a block, of which each of the ``chunks`` says which part it meets."""
        return block

    def chunks(self, buffer: Shaped[Array, "R L"], hop: int) -> Pieces:
        """For each member m its chunk (m + hop) mod n of ``buffer`` [R, n*C], as views, each with where in the
        ``grid`` of a block in flight the chunks are that it belongs to."""

    def spread(self, block: Shaped[Array, "R C"], buffer: Shaped[Array, "R L"]) -> None:
        """Where hops move nothing: write each row of ``block`` to its chunk on every rank of its ring."""
        np.copyto(buffer.reshape(len(buffer), self.size, -1), block)

    def summands(self, buffer: Shaped[Array, "R L"], wire: DType) -> Iterator[Pieces]:
        """Each member's chunks m+1, ..., m+n of ``buffer``, in the wire's dtype: the order in which they are added."""
        for hop in range(1, self.size + 1):
            pieces = self.chunks(buffer, hop)
            yield pieces if wire == buffer.dtype else [(rows, _cast(chunk, wire)) for rows, chunk in pieces]


class Comm:
    """The collectives of one process's ranks.

    ``wire`` is the dtype that blocks are sent in: they are cast from the buffer's dtype as
    they leave and back as they land. With int8 a block is packed, its scales within, and everybody has
    what that comes to, its owner too; it is for gathering alone. ``blocks`` provides the two blocks that a
    rank needs in flight, one going and one coming; ``ledger`` is told of every hop.
    """

    def __init__(self, ring: Ring, wire: DType, blocks: Workspace, ledger: Ledger) -> None:
        self.ring, self.wire, self.blocks, self.ledger = ring, wire, blocks, ledger
        self._convert = blocks.kernels.convert
        self._leaves = np.asarray(ring.leaves, np.int64)

    def own(self, buffer: Shaped[Array, "R L"]) -> Shaped[Array, "... C"]:
        """The chunk of ``buffer`` [R, n*C] that each rank owns, as a view, laid out as the ring's grid is."""
        [(_, view)] = self.ring.chunks(buffer, 0)
        return view

    def all_reduce(
        self, buffer: Shaped[Array, "R L"], size: int, *, scale: float, band: str, unit: str, start: Any = 0
    ) -> None:
        """Replace ``buffer`` [R, n*C] on every rank by the sum over its ring times ``scale``.

        ``size`` is the logical length of what it belongs to, the rest being padding, and ``start`` where in
        that it begins, for each rank or for all. The scaling is done in fp32 and rounded once, by the
        chunk's owner, before the result is sent on.
        """
        label = {"band": band, "unit": unit, "name": "all-reduce", "start": start}
        self.reduce_scatter(buffer, self.own(buffer), size, scale=scale, **label)
        self.all_gather(buffer, size, **label)

    def reduce_scatter(
        self,
        buffer: Shaped[Array, "R L"],
        out: Shaped[Array, "... C"],
        size: int,
        *,
        scale: float,
        band: str,
        unit: str,
        name: str = "reduce-scatter",
        start: Any = 0,
    ) -> None:
        """Write to ``out`` the sum over the ring, times ``scale``, of the chunk that each rank owns.

        ``out`` is [R, C], or that chunk of ``buffer`` [R, n*C] itself. Nothing else of ``buffer`` changes.
        """
        with self._flight(buffer, size, start, name, band, unit) as flight:
            block = self._sum(buffer, flight)
            total = block if self.wire == FP32 else block.astype(FP32)
            factor = np.float32(scale)
            if out.dtype == FP32:
                np.multiply(total.reshape(out.shape), factor, out=out)
            else:
                np.multiply(total, factor, out=total)
                self._convert(total.reshape(out.shape), out)

    def all_gather(
        self,
        buffer: Shaped[Array, "R L"],
        size: int,
        own: Shaped[Array, "... C"] | None = None,
        *,
        band: str,
        unit: str,
        name: str = "all-gather",
        start: Any = 0,
    ) -> None:
        """Fill ``buffer`` [R, n*C] on every rank with the chunks that the members of its ring own.

        ``own`` [R, C] is where they lie; without it each is in its place in ``buffer`` already.
        """
        place = self.own(buffer)
        if own is None and self.wire == buffer.dtype:
            own = place  # what is sent are an owner's own bits
        elif own is None:
            own = np.empty_like(place)  # a register: an owner keeps its own bits, not those that were sent
            np.copyto(own, place)
        else:
            own = own.reshape(place.shape)
        with self._flight(buffer, size, start, name, band, unit) as flight:
            own = self._leave(own, flight.block)
            self._copy(buffer, flight)
        if own is not place:
            self._convert(own, place)

    def _sum(self, buffer: Shaped[Array, "R L"], flight: Flight) -> Shaped[Array, "R C"]:
        """All hops of a reduce-scatter; the sums, in one of the two blocks."""
        block, spare = flight.block, flight.spare
        grid, summands = self.ring.grid, self.ring.summands(buffer, self.wire)
        for rows, mine in next(summands):
            grid(block)[rows] = mine
        for sent, pieces in enumerate(summands, start=1):
            arrived, total = grid(flight.hop(block, spare, sent)), grid(spare)
            for rows, mine in pieces:
                np.add(arrived[rows], mine, out=total[rows])
            block, spare = spare, block
        return block

    def _copy(self, buffer: Shaped[Array, "R L"], flight: Flight) -> None:
        """All hops of an all-gather, from the block in which is what each rank owns."""
        block, spare, n = flight.block, flight.spare, self.ring.size
        for sent in range(n - 1):
            arrived = flight.hop(block, spare, sent)
            if arrived is spare:  # and has to be written before the next one arrives
                for rows, chunk in self.ring.chunks(buffer, sent + 1):
                    self._land(self.ring.grid(arrived)[rows], chunk)
                block, spare = spare, block
            elif sent == n - 2:  # nothing was moved, but by now each row has been at every rank of its ring
                self.ring.spread(self._landed(arrived, buffer), buffer)

    def _landed(self, block: Shaped[Array, "R n"], buffer: Shaped[Array, "R L"]) -> Shaped[Array, "R C"]:
        """A block in the dtype of the buffer that it is written to: itself, or a register."""
        if block.dtype == buffer.dtype:
            return block
        landed = np.empty_like(buffer, shape=(len(block), buffer.shape[1] // self.ring.size))
        self._land(block, landed)
        return landed

    # -- in flight

    def _leave(self, own: Shaped[Array, "... C"], block: Shaped[Array, "R n"]) -> Shaped[Array, "... C"]:
        """Write what each rank owns to a block, as it is sent; what it is to everybody, the owner included."""
        if self.wire != INT8:
            self._convert(own, block.reshape(own.shape))
        elif self.ring.size > 1:  # to nobody, nothing is rounded
            int8.pack(own, block)
            own = np.empty_like(own)
            int8.unpack(block, own)
        return own

    def _land(self, block: Shaped[Array, "... n"], out: Shaped[Array, "... C"]) -> None:
        """Write a block that has arrived, in the dtype of ``out``."""
        if self.wire == INT8:
            int8.unpack(block, out)
        else:
            self._convert(block, out)

    def _length(self, count: Any) -> Any:
        """Of a block with so many elements, one number or several."""
        return int8.length(count) if self.wire == INT8 else count

    def _flight(self, buffer: Array, size: int, start: Any, collective: str, band: str, unit: str) -> Flight:
        if not buffer.flags.c_contiguous:
            raise ValueError(
                f"Comm: {collective} works in place, so its buffer must be contiguous, or a copy would be written; "
                f"got strides {buffer.strides} for shape {buffer.shape}. Pass what hold returned, not a view of it."
            )
        sending = self.ledger.sending(collective, band, unit, self._leaves, self.ring.leaving)
        self.blocks.unit = unit
        return Flight(self, sending, buffer.shape[1], size, start)

    def _padding(self, padded: int, size: int, start: Any, offsets: Sequence[int]) -> Counts:
        """What of the chunks m + offset that each member m here has sent was padding, in bytes on the wire [R]."""
        beyond: Counts = np.zeros(len(self.ring.ids), np.int64)
        chunk, some = padded // self.ring.size, max(1, _COUNTED // len(beyond))
        for first in range(0, len(offsets), some):
            ends = (np.add.outer(self.ring.members, offsets[first : first + some]) % self.ring.size + 1) * chunk
            pads = np.clip(ends + np.reshape(start, (-1, 1)) - size, 0, chunk)
            beyond += (self._length(chunk) - self._length(chunk - pads)).sum(axis=1)
        return beyond * self.wire.itemsize


class Flight:
    """A collective under way: its two blocks, held for as long as a ``with`` lasts, and how they are handed on.

    ``size`` and ``start`` are the collective's, ``traffic`` is where its hops are counted.
    """

    __slots__ = ("_comm", "_offsets", "_padded", "_sending", "block", "size", "spare", "start", "traffic")

    def __init__(self, comm: Comm, sending: Any, padded: int, size: int, start: Any) -> None:
        self._comm, self._sending = comm, sending
        self._padded, self.size, self.start = padded, size, start
        self._offsets: list[int] = []

    def __enter__(self) -> Flight:
        blocks, block = self._comm.blocks, None
        chunk = self._comm._length(self._padded // self._comm.ring.size)
        self.traffic: Traffic = self._sending.__enter__()
        try:
            self.block = block = blocks.hold(chunk)
            self.spare = blocks.hold(chunk)
        except BaseException as error:
            if block is not None:
                blocks.free(block)
            self._sending.__exit__(type(error))
            raise
        return self

    def hop(self, block: Shaped[Array, "R C"], spare: Shaped[Array, "R C"], offset: int) -> Shaped[Array, "R C"]:
        """Each rank r hands on a block, which is of chunk r + offset, and gets the one above's. Counted here."""
        arrived, ranks = self._comm.ring.shift(block, spare), len(block)
        self.traffic.hop(block.nbytes // ranks, arrived.nbytes // ranks)
        self._offsets.append(offset)  # what of the block is padding is worked out once, when all have been made
        return arrived

    def __exit__(self, kind: Any, *_: object) -> None:
        self._comm.blocks.free(self.spare)
        if self._offsets and not within(self._padded, self.size, self.start):
            self.traffic.padding += self._comm._padding(self._padded, self.size, self.start, self._offsets)
        self._comm.blocks.free(self.block)
        self._sending.__exit__(kind)


def within(padded: int, size: int, start: Any) -> bool:
    """Whether a buffer that begins at ``start``, for each rank or for all, lies within ``size``."""
    return (int(start.max()) if isinstance(start, np.ndarray) else start) + padded <= size


def _cast(chunk: Shaped[Array, "R C"], dtype: DType) -> Shaped[Array, "R C"]:
    register = np.empty_like(chunk, dtype)
    convert(chunk, register)
    return register
