"""The rings of one process: all N ranks live here, and a hop moves no bytes.

Owns ``LocalRing``, the strided views and copies that make it fast, and whether the machine has room for
all ranks. Must not know ledgers or the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property

import numpy as np

from zerosim.bands import FP32, WIRES, Array, DType
from zerosim.comm import Pieces, Ring
from zerosim.options import Options
from zerosim.stages import SCHEMES, Stage
from zerosim.util import arguments
from zerosim.util.casts import convert
from zerosim.util.shapes import Shaped

# Batches, activations and registers: processes on 32 to 4,096 ranks with 4 rows each took 1.02 to 1.23 times the rest.
REST = 1.12
_REGISTER = 65_536  # elements, of all ranks together, that are cast before they are added


def footprint(row: Stage, sizes: Sequence[int], ranks: int, options: Options) -> int:
    """Bytes that a process takes for all of ``ranks`` ranks with buckets of these sizes.

    For deciding whether to start at all: the model states; what exists only for a while of the largest bucket, or
    of all where these stay; the two blocks of its ring; and ``REST`` for what depends on the batch.
    """
    recipe, node, wire = options.recipe, options.node or ranks, WIRES[options.wire].itemsize
    dtypes, padded = recipe.dtypes(wire=FP32), [-(-size // ranks) * ranks for size in sizes]
    largest, every, working = max(padded), sum(padded), recipe.working.itemsize
    held = sum(
        dtypes[band].itemsize * size // row.piece(band, 0, ranks, options.node)[1]
        for size in padded
        for band in (*recipe.states, *options.optimizer.states)
    )
    if row.params:
        held += working * (every if options.gather == "model" or not row.reshard_after_forward else largest)
    if row.reshard_after_forward == "group":
        held += working * every // node
    if row.grads:
        held += working * (every if options.accumulate > 1 and options.sync == "end" else largest)
    if row.two_axes:
        held += wire * (every if options.accumulate > 1 else largest) // node
    return int(REST * ranks * (held + 2 * wire * largest // ranks))


def check_room(stage: Stage, sizes: Sequence[int], ranks: int, options: Options) -> None:
    """Refuse N ranks in this process that the machine has no memory for, and say what would fit."""
    fewer = [n for power in reversed(range((ranks - 1).bit_length())) if not (n := 1 << power) % (options.node or 1)]
    others = [(row, ranks) for row in SCHEMES] + [(stage, n) for n in fewer]
    arguments.check_memory(
        f"{stage.name} on {ranks} ranks", footprint(stage, sizes, ranks, options),
        ((f"{row.name} on {n}", footprint(row, sizes, n, options)) for row, n in others),
    )  # fmt: skip


class LocalRing(Ring):
    """All N ranks in one process: R = N, in one ring, or in rings of ``size`` side by side.

    A hop moves no bytes but says whose they are now: row r of a block in flight is the chunk that rank r
    owns, wherever it is. After t hops chunk c is at member c-t, so what it meets there lies on a diagonal
    of [member, chunk]: two strided views for each of the rings, no copy.

    ``ranks`` is N, ``size`` unless told otherwise. The members of a ring are ``step`` ranks apart: 1, for
    consecutive ranks, or as many as there are rings. ``node`` ranks are on one machine.
    """

    def __init__(self, size: int, ranks: int | None = None, *, step: int = 1, node: int | None = None) -> None:
        self.here = type(self).shift is LocalRing.shift  # where a hop does more, every one has to be made by it
        self._lie(size, ranks, step, node)

    def _lie(self, size: int, ranks: int | None, step: int, node: int | None) -> None:
        """Where in its ring each rank is, and which of its rows meet which of a block."""
        self.size, self.step = size, step
        self.__dict__.pop("_met", None)
        self.ids: Sequence[int] = range(ranks or size)
        every = np.arange(len(self.ids))
        self.members: Sequence[int] = (every // step % size).tolist()
        below = every + (np.asarray(self.members) - 1) % size * step - np.asarray(self.members) * step
        self.leaves: Sequence[int] = (
            (every // (node or len(every)) != below // (node or len(every))).astype(int).tolist()
        )
        self.leaving = sum(self.leaves[: node or len(every)])
        self._rings = len(every) // size
        self._shape: tuple[int, ...] = (size,) if self._rings == 1 else (self._rings, size)
        if step > 1:
            self._shape = size, self._rings
        # Rows member*n + chunk of the table for each hop t: members 0 .. n-t-1 meet chunks t .. n-1,
        # and members n-t .. n-1 chunks 0 .. t-1; each beside the rows of the block that they are.
        n = size
        self._diagonals = [
            [
                (slice(t, n), slice(t, t + (n - t - 1) * (n + 1) + 1, n + 1)),
                *([(slice(0, t), slice((n - t) * n, None, n + 1))] if t else []),
            ]
            for t in range(n)
        ]

    def split(self, node: int) -> tuple[Ring, Ring, Ring]:
        n, make = len(self.ids), self._beside
        whole = self if node == n else make(n, node=node)
        return whole, make(node, n, node=node), make(n // node, n, step=node, node=node)

    def _beside(self, size: int, ranks: int | None = None, *, step: int = 1, node: int) -> LocalRing:
        """Another ring of the same world: what a caller's own ring does at a hop, it does too."""
        ring = copy(self)
        ring._lie(size, ranks, step, node)
        return ring

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return np.empty(shape, dtype)

    def shift(self, block: Shaped[Array, "R C"], spare: Shaped[Array, "R C"]) -> Shaped[Array, "R C"]:
        arrived = block.view()
        arrived.setflags(write=False)  # in half the time of arrived.flags.writeable
        return arrived

    def grid(self, block: Shaped[Array, "R C"]) -> Shaped[Array, "... C"]:
        """[n, C], or [ring, member, C], or, where the members of a ring are apart, [member, ring, C]."""
        return block if self._rings == 1 else block.reshape(*self._shape, -1)

    def table(self, buffer: Shaped[Array, "R L"]) -> Shaped[Array, "rings n n C"]:
        """``buffer`` as [ring, member, chunk, C], a view."""
        if self.step == 1:
            return buffer.reshape(self._rings, self.size, self.size, -1)
        return buffer.reshape(self.size, self._rings, self.size, -1).swapaxes(0, 1)

    def lanes(self, rows: Shaped[Array, "R ..."]) -> Shaped[Array, "rings n ..."]:
        """What each rank has one of as [ring, member, ...], a view."""
        if self.step == 1:
            return rows.reshape(self._rings, self.size, *rows.shape[1:])
        return rows.reshape(self.size, self._rings, *rows.shape[1:]).swapaxes(0, 1)

    def chunks(self, buffer: Shaped[Array, "R L"], hop: int) -> Pieces:
        n, diagonals = self.size, self._diagonals[hop % self.size]
        if self._rings == 1:
            table = buffer.reshape(n**2, -1)  # a view, as buffers are contiguous
            return [(rows, table[diagonal]) for rows, diagonal in diagonals]
        if self.step == 1:
            rings = buffer.reshape(self._rings, n**2, -1)
            return [((slice(None), rows), rings[:, diagonal]) for rows, diagonal in diagonals]
        # Of [member, ring, chunk, C]: a view by strides, which as_strided takes five times as long to make.
        length = buffer.shape[1] // n
        along, raw = length * buffer.itemsize, buffer.view(np.uint8)
        aside = n * along
        below, strides = self._rings * aside, (self._rings * aside + along, aside, buffer.itemsize)
        pieces: Pieces = []
        for rows, _ in diagonals:
            shape, first = (rows.stop - rows.start, self._rings, length), (rows.start - hop) % n
            pieces.append((rows, np.ndarray(shape, buffer.dtype, raw, first * below + rows.start * along, strides)))
        return pieces

    def spread(self, block: Shaped[Array, "R C"], buffer: Shaped[Array, "R L"]) -> None:
        if self.step > 1:
            chunks = self.grid(block).swapaxes(0, 1)  # [ring, chunk, C]
            np.copyto(buffer.reshape(self.size, self._rings, self.size, -1), chunks)
        else:
            np.copyto(
                buffer.reshape(self._rings, self.size, self.size, -1), block.reshape(self._rings, 1, self.size, -1)
            )

    def summands(self, buffer: Shaped[Array, "R L"], wire: DType) -> Iterator[Pieces]:
        """As in ``Ring``. Several hops' chunks are copied, and cast if need be, to a register of bounded size.

        A cast has a fixed cost, and chunks are small where ranks are many. Short chunks of several ranks
        lie far apart: a copy and then a sum are faster than a sum in strides.
        """
        n, same = self.size, wire == buffer.dtype
        shape = len(self.ids), buffer.shape[1] // n
        ahead = min(n, _REGISTER // (shape[0] * shape[1]))
        if same and (n == 1 or ahead == 0):
            yield from (self.chunks(buffer, hop) for hop in range(1, n + 1))
            return
        if ahead == 0 and shape[0] * shape[1] <= 2 * _REGISTER:
            ahead = 1  # a copy and one cast still take less than several casts in strides
        if ahead == 0:  # so long that each is cast from where it lies
            cast = np.empty_like(buffer, wire, shape=shape)
            for hop in range(1, n + 1):
                for some, chunk in self.chunks(buffer, hop):
                    convert(chunk, self.grid(cast)[some])
                yield [(..., self.grid(cast))]
            return
        stored = np.empty_like(buffer, shape=(ahead, *shape))
        cast = stored if same else np.empty_like(stored, wire)
        for first in range(1, n + 1, ahead):
            last = min(first + ahead, n + 1)
            hops = slice(last - first)
            # In one call; without mode="clip" take would make a copy of its own first, lest a row be out of bounds.
            buffer.reshape(-1, shape[1]).take(self._met[first:last], axis=0, out=stored[hops], mode="clip")
            if not same:
                convert(stored[hops], cast[hops])
            yield from ([(..., self.grid(mine))] for mine in cast[hops])

    @cached_property
    def _met(self) -> Shaped[Array, "n R"]:
        """For hops 0 to n and each row of a block: the chunk that it meets, of all ranks' chunks counted in a row."""
        ranks, n = len(self.ids), self.size
        numbers, met = np.arange(ranks * n).reshape(ranks, n), np.empty((n + 1, ranks, 1), np.intp)
        for hop in range(n + 1):
            for some, chunk in self.chunks(numbers, hop):
                self.grid(met[hop])[some] = chunk
        return met[..., 0]
