"""Rows of held arrays as torch tensors, and what passes between layers as held arrays.

Owns the crossing between the two libraries: what a layer hands on (``Carried``), the gradients
under way (``Gradients``), and what autograd would keep (``Held``). Must not know modules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerosim.bands import FP32, Array
from zerosim.ranks import Workspace
from zerosim.torch_models.layering import Layering
from zerosim.torch_models.program import Kind
from zerosim.torch_models.saved_tensors import Kept
from zerosim.torch_models.units import numpy_dtype

_ALIGNED = 64  # bytes; a kernel may sum in another order where its operands start elsewhere


def view(array: Array) -> torch.Tensor:
    """An array as a tensor on the same memory, in the dtype of the same name."""
    dtype = getattr(torch, array.dtype.name)
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).view(array.shape)


def array_of(tensor: torch.Tensor) -> Array:
    """A tensor's values as an array, in the dtype of the same name; on the same memory, if they lie row by row."""
    flat: Array = tensor.detach().reshape(-1).view(torch.uint8).numpy().view(numpy_dtype(tensor.dtype))
    return flat.reshape(tuple(tensor.shape))


def row(array: Array, rank: int) -> torch.Tensor:
    """One rank's row, for reading: where kernels would start at an odd address, a copy, in a register."""
    tensor = view(array[rank])
    return tensor if tensor.data_ptr() % _ALIGNED == 0 else tensor.clone()


def drop(leaf: torch.Tensor) -> None:
    """Let go of a register's memory, which the graph would otherwise keep alive with its leaf."""
    leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)


def store(value: torch.Tensor | None, target: torch.Tensor) -> None:
    """Copy a gradient to where it belongs, in the dtype there; where there is none it is zero."""
    if value is None:
        target.zero_()
    else:
        target.copy_(value.reshape(target.shape))


# -- a batch


def packed(arrays: Mapping[str, Array]) -> Array:
    """Arrays [R, B, ...] as one [R, B], a record with a field for each."""
    first = next(iter(arrays.values()))
    kind = np.dtype([(name, each.dtype, each.shape[2:]) for name, each in arrays.items()])
    whole = np.empty(first.shape[:2], kind)
    for name, each in arrays.items():
        whole[name] = each
    return whole


def unpacked(array: Array, rank: int, rows: int) -> dict[str, torch.Tensor]:
    """One rank's tensors of a batch: of a record's fields copies, in registers, each at an address of its own."""
    if array.dtype.names is None:
        return {"": row(array[:, :rows], rank)}
    return {name: view(np.ascontiguousarray(array[rank, :rows][name])) for name in array.dtype.names}


# -- what passes from layer to layer


class _NoArray:
    """To the schedule, which does not look inside, an array without elements."""

    dtype, ndim = FP32, 2

    def __init__(self, ranks: int) -> None:
        self.shape = (ranks, 0)


class Batch:
    """A micro-batch as layers see it: its rows, rank by rank, and how the forward of so many rows is cut.

    ``turns`` are the ranks that have rows, those that have most first, for what they need has room for the others.
    """

    def __init__(self, array: Array, rows: Sequence[int], layerings: Callable[[int], Layering]) -> None:
        self.array, self.rows, self._layerings = array, rows, layerings
        self.turns = sorted((rank for rank, count in enumerate(rows) if count), key=lambda rank: -rows[rank])

    def layering(self, rank: int) -> Layering:
        """How a rank's forward is cut."""
        return self._layerings(self.rows[rank])


class Carried(_NoArray):
    """What a layer hands on: the memory, [R, elements], of all that later ones may need.

    ``arrays`` are what the layer itself has brought into being, and frees in its backward.
    """

    def __init__(self, batch: Batch, stores: Mapping[int, Array], arrays: Mapping[int, Array]) -> None:
        super().__init__(len(batch.rows))
        self.batch = batch
        self._stores = {**stores, **arrays}
        self.arrays = tuple(arrays.values())

    def and_then(self, arrays: Mapping[int, Array]) -> Carried:
        """This, and what another layer adds."""
        return Carried(self.batch, self._stores, arrays)

    def memory(self, indices: Iterable[int], rank: int) -> dict[int, torch.Tensor]:
        """One rank's memory of some of the program's tensors, by its place among the stores."""
        program = self.batch.layering(rank).program
        found: dict[int, torch.Tensor] = {}
        inputs: list[torch.Tensor] = []  # once they are needed
        for number in dict.fromkeys(program.tensors[index].store for index in indices):
            known = program.stores[number]
            if known.kind is Kind.INPUT:
                inputs = inputs or list(unpacked(self.batch.array, rank, self.batch.rows[rank]).values())
                found[number] = inputs[known.input]
            elif known.kind is Kind.CONSTANT:
                found[number] = known.constant
            else:
                found[number] = row(self._stores[number], rank)
        return found


class _Gradient:
    """A gradient of all ranks, [R, elements], and how a tensor of it lies on each one's row."""

    def __init__(self, array: Array) -> None:
        self.array = array
        array[...] = 0  # ranks with fewer rows have less
        self.layouts: dict[int, tuple[Any, ...]] = {}

    def on(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        size, stride = self.layouts[rank]
        return torch.as_strided(tensor, size, stride)


class Gradients(_NoArray):
    """What layers hand on in the backward: the gradients that are under way, by the tensor that each is of.

    They lie in memory as torch has them, so that what reads them adds in the same order.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._found: dict[int, _Gradient] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def __imul__(self, factor: Any) -> Gradients:
        """Scale them, by one number or by one for each rank [R, 1]."""
        for gradient in self._found.values():
            np.multiply(gradient.array, factor, out=gradient.array, casting="same_kind")
        return self

    @property
    def indices(self) -> frozenset[int]:
        """Which there are."""
        return frozenset(self._found)

    def of(self, index: int, rank: int) -> torch.Tensor:
        """One rank's gradient of a tensor."""
        return self._found[index].on(rank, row(self._found[index].array, rank))

    def put(self, rank: int, found: Mapping[int, torch.Tensor], work: Workspace, *, first: bool) -> None:
        """Copy what one rank has found; at the ``first`` rank, which has most rows, make room for it."""
        for index, gradient in found.items():
            size, stride, count = extent(gradient)
            if first:
                self._make_room(index, count, gradient.dtype, work)
            held = self._found[index]
            same_on_every_rank(rank, count <= held.array.shape[1], True)
            held.layouts[rank] = size, stride
            flat = torch.as_strided(gradient, (count,), (1,), gradient.storage_offset())
            view(held.array[rank])[:count].copy_(flat)

    def _make_room(self, index: int, count: int, dtype: Any, work: Workspace) -> None:
        """Hold an array of ``count`` elements, unless there is one; what other ranks have there is kept."""
        before = self._found.get(index)
        if before is not None and before.array.shape[1] == count:
            return
        self._found[index] = after = _Gradient(work.hold(count, dtype=numpy_dtype(dtype)))
        if before is not None:
            for rank, layout in before.layouts.items():
                given = before.on(rank, view(before.array[rank])).contiguous()
                after.layouts[rank] = layout[0], given.stride()
                view(after.array[rank])[: given.numel()].copy_(given.view(-1))
            work.free(before.array)

    def free(self, indices: Iterable[int], work: Workspace) -> None:
        """Give back those of these tensors."""
        for index in indices:
            if index in self:
                work.free(self._found.pop(index).array)


def extent(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A tensor's size and strides, and how many elements lie from its first to its last."""
    size, stride = tuple(tensor.shape), tensor.stride()
    if 0 in size:
        return size, stride, 0
    return size, stride, 1 + sum((side - 1) * step for side, step in zip(size, stride, strict=True))


# -- what is kept for the backward


class Held:
    """The arrays [R, n] that stand for what a layer hands on and for what autograd would keep.

    They are as large as the first rank that brings something needs them, which has most rows.
    """

    def __init__(self, work: Workspace) -> None:
        self._work = work
        self.arrays: dict[int, Array] = {}
        """What is handed on, by its place among the stores."""
        self._kept: list[Array] | None = None

    def take(self, rank: int, outs: Mapping[int, torch.Tensor]) -> None:
        """Copy the memory of what one rank hands on; what torch has of it may go."""
        for number, tensor in outs.items():
            storage = tensor.untyped_storage()
            if number not in self.arrays:
                self.arrays[number] = self._elements(storage.nbytes(), tensor.dtype)
            _copy(rank, storage, self.arrays[number])

    def keep(self, rank: int, kept: Sequence[Kept]) -> None:
        """Copy what one rank's run keeps."""
        if self._kept is None:
            self._kept = [self._elements(each.storage.nbytes(), each.dtype) for each in kept]
        same_on_every_rank(rank, len(kept), len(self._kept))
        for array, each in zip(self._kept, kept, strict=True):
            _copy(rank, each.storage, array)

    def sources(self, rank: int) -> dict[Hashable, torch.Tensor]:
        """Where one rank's backward finds what was kept, by number."""
        return dict(enumerate(row(array, rank) for array in self._kept or ()))

    def free(self) -> None:
        """Give all of it back."""
        for array in (*(self._kept or ()), *self.arrays.values()):
            self._work.free(array)

    def _elements(self, nbytes: int, dtype: Any) -> Array:
        kind = numpy_dtype(dtype)
        whole = nbytes % kind.itemsize == 0
        return self._work.hold(
            nbytes // kind.itemsize if whole else nbytes, dtype=kind if whole else np.dtype(np.uint8)
        )


def _copy(rank: int, storage: Any, array: Array) -> None:
    same_on_every_rank(rank, storage.nbytes() <= array[rank].nbytes, True)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    view(array[rank]).view(torch.uint8)[: len(flat)].copy_(flat)


def same_on_every_rank(rank: int, got: object, first: object) -> None:
    """Refuse what has other shapes on one rank than on the first."""
    if got != first:
        raise ValueError(
            f"TorchModel: what a unit computes must have the same shapes on every rank, but for its rows; on rank "
            f"{rank} they are others. Shapes that depend on values cannot be rows of one array."
        )
