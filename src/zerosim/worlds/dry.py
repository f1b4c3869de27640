"""The dry world: shapes and dtypes in place of arrays, and one rank that stands for all.

Owns ``DryRing``, N ranks of which one lives here, and ``Shapes``, a model whose parameters and
batches are ``DryArray``s. The schedule, the collectives and the ledger that run on them are the
same as everywhere, so what is counted is counted where it happens; only nothing is allocated.
Must not know the schedule, bands or the ledger, and none of those knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import cast

from zerosim.bands import FP32, Array, DType
from zerosim.comm import Pieces, Ring
from zerosim.layers import Group, Layer
from zerosim.model import MLP
from zerosim.ranks import Workspace
from zerosim.util.arguments import check_layout, instance_of, integer
from zerosim.util.shapes import Float, Shaped
from zerosim.worlds.dry_array import DryArray

__all__ = ["DryArray", "DryRing", "Shapes"]


class DryRing(Ring):
    """Rings of ``size`` ranks, of which rank 0 lives in this process: every rank does what it does.

    Rank 0 is at its node's edge, so what leaves a node leaves it; ``leaving`` says how many ranks of a node
    do the same. The others, inside, send as much and nothing outward. ``scattered``: rank r is on node r mod the
    number of nodes, and not on node r // their size.
    """

    def __init__(self, size: int, *, leaving: int = 0, scattered: bool = False) -> None:
        self.size, self.leaving, self._scattered = integer("DryRing", "size", size), leaving, scattered
        self.ids: Sequence[int] = range(1)
        self.members: Sequence[int] = range(1)
        self.leaves: Sequence[int] = [int(leaving > 0)]
        self._buffer: Array | None = None
        self._pieces: list[tuple[slice, Array]] = []

    def split(self, node: int) -> tuple[Ring, Ring, Ring]:
        n, several = self.size, self.size > node
        if self._scattered:  # neighbours are on different nodes, and those ``node`` apart if that is no whole round
            apart = several and node % (n // node) > 0
            inner = DryRing(node, leaving=node * several)
            return DryRing(n, leaving=node * several), inner, DryRing(n // node, leaving=node * apart)
        return DryRing(n, leaving=int(several)), DryRing(node), DryRing(n // node, leaving=node * several)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return cast("Array", DryArray(shape, dtype))

    def shift(self, block: Shaped[Array, "1 C"], spare: Shaped[Array, "1 C"]) -> Shaped[Array, "1 C"]:
        """What a neighbour hands over is like what one hands on oneself."""
        arrived: Array = block.frozen()  # type: ignore[attr-defined]
        return arrived

    def chunks(self, buffer: Shaped[Array, "1 L"], hop: int) -> list[tuple[slice, Array]]:
        if buffer is not self._buffer:  # all its chunks are alike
            self._buffer, self._pieces = buffer, [(slice(None), buffer.reshape(self.size, -1)[:1])]
        return self._pieces

    def summands(self, buffer: Shaped[Array, "1 L"], wire: DType) -> Iterator[Pieces]:
        """As in ``Ring``; all chunks are alike, and so is what they are cast to."""
        return repeat(next(super().summands(buffer, wire)), self.size)


class Shapes:
    """``model`` without values: the same layers, loss and sizes; parameters and batches are shapes."""

    def __init__(self, model: MLP) -> None:
        instance_of("Shapes", "model", model, MLP)
        self.model = model

    @property
    def layers(self) -> Sequence[Layer]:
        return self.model.layers

    @property
    def n_params(self) -> int:
        return self.model.n_params

    def initial(self) -> Float[Array, "P"]:
        return cast("Array", DryArray((self.n_params,), FP32))

    def buffer(self, group: Group) -> Array:
        return self.model.buffer(group)

    def batch(self, rows: int) -> list[tuple[DryArray, DryArray]]:
        """What ``Scheme.step`` takes: (x [rows, I], y [rows, O]) for the one rank of this process."""
        rows = integer("Shapes.batch", "rows", rows)
        return [(DryArray((rows, self.model.widths[0]), FP32), DryArray((rows, self.model.widths[-1]), FP32))]

    def check(
        self, batch: Sequence[tuple[Array, Array]], ranks: int
    ) -> tuple[Float[Array, "R B I"], Float[Array, "R B O"]]:
        """One (x [B, I], y [B, O]) of float32 per rank, B the same everywhere; with values or without."""
        check_layout(batch, ranks, self.model.widths[0], self.model.widths[-1])
        x, y = (cast("Array", DryArray((ranks, *array.shape), array.dtype)) for array in batch[0])
        return x, y

    def loss(
        self, y: Float[Array, "R B O"], target: Float[Array, "R B O"], work: Workspace
    ) -> tuple[Float[Array, "R"], Float[Array, "R B O"]]:
        return self.model.loss(y, target, work)
