"""Rows of held arrays as torch tensors, and what autograd would keep as held arrays.

Owns the crossing between the two libraries. Must not know units or modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerosim.bands import Array
from zerosim.ranks import Workspace
from zerosim.torch_models.saved_tensors import Kept
from zerosim.torch_models.units import numpy_dtype

_ALIGNED = 64  # bytes; a kernel may sum in another order where its operands start elsewhere
OUTPUT = " output"  # no name of a parameter


def view(array: Array) -> torch.Tensor:
    """An array as a tensor on the same memory, in the dtype of the same name."""
    dtype = getattr(torch, array.dtype.name)
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).view(array.shape)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it that starts at an even address."""
    return tensor if tensor.data_ptr() % _ALIGNED == 0 else tensor.clone()


def row(array: Array, rank: int) -> torch.Tensor:
    """One rank's row, for reading: where kernels would start at an odd address, a copy, in a register."""
    return aligned(view(array[rank]))


def drop(leaf: torch.Tensor) -> None:
    """Let go of a register, which the graph would otherwise keep alive as its leaf; never of an array that is held."""
    if leaf.untyped_storage().resizable():
        leaf.untyped_storage().resize_(0)


def store(value: torch.Tensor | None, target: torch.Tensor) -> None:
    """Copy a gradient to where it belongs, in the dtype there; where there is none it is zero."""
    if value is None:
        target.zero_()
    else:
        target.copy_(value.reshape(target.shape))


class Held:
    """The arrays [R, n] that stand for what autograd would keep, and the output [R, ...]."""

    def __init__(self, work: Workspace) -> None:
        self._work = work
        self.y: Any = None
        self._kept: list[Array] | None = None

    def take(self, rank: int, y: torch.Tensor, kept: Sequence[Kept]) -> None:
        """Copy one rank's output and what its run keeps; what torch has of them may go."""
        if self.y is None:
            self.y = self._work.hold(*y.shape, dtype=numpy_dtype(y.dtype))
        self._same(rank, (tuple(y.shape), numpy_dtype(y.dtype)), (self.y.shape[1:], self.y.dtype))
        view(self.y[rank]).copy_(y.detach())
        self.keep(rank, kept)

    def keep(self, rank: int, kept: Sequence[Kept]) -> None:
        """Copy what one rank's run keeps."""
        if self._kept is None:
            dtypes = [numpy_dtype(each.dtype) for each in kept]
            self._kept = [
                self._work.hold(each.storage.nbytes() // dtype.itemsize, dtype=dtype)
                for each, dtype in zip(kept, dtypes, strict=True)
            ]
        self._same(rank, [each.storage.nbytes() for each in kept], [array[rank].nbytes for array in self._kept])
        for array, each in zip(self._kept, kept, strict=True):
            view(array[rank]).view(torch.uint8).copy_(torch.empty(0, dtype=torch.uint8).set_(each.storage))

    def sources(self, rank: int, x: Array, others: Mapping[str, torch.Tensor]) -> dict[str | int, torch.Tensor]:
        """Where one rank's backward finds what was saved: x by no name, the output by ``OUTPUT``."""
        found: dict[str | int, torch.Tensor] = {"": row(x, rank)}
        found.update(others)
        found.update(enumerate(row(array, rank) for array in self._kept or ()))
        if self.y is not None:
            found[OUTPUT] = row(self.y, rank)
        return found

    def free(self) -> None:
        """Give all of it back."""
        for array in (*(self._kept or ()), *([] if self.y is None else [self.y])):
            self._work.free(array)

    @staticmethod
    def _same(rank: int, got: object, first: object) -> None:
        if got != first:
            raise ValueError(
                f"TorchModel: what a unit computes must have the same shapes on every rank; on rank {rank} they "
                f"are {got}, on the first {first}. Shapes that depend on values cannot be rows of one array."
            )
