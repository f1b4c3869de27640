"""A model by its outline: what of it a checkpoint says, which is enough to cut its states anew.

Owns the stand-in for a model that cannot be made again from the folder alone. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from zerosim.bands import FP32, Array
from zerosim.checkpoints.files import BucketRecord, Index
from zerosim.layers import Group, Role


class Outline:
    """The model of a checkpoint, for a ``Scheme`` that is loaded and saved, and takes no step."""

    def __init__(self, index: Index) -> None:
        self.record, self.n_params = index.model, index.n_params
        self.layers: Sequence[Any] = [_Part(bucket) for bucket in index.buckets]
        self._names = {part.groups[0]: bucket.names for part, bucket in zip(self.layers, index.buckets, strict=True)}
        self._generator = index.generator

    def names(self, group: Group) -> list[str]:
        """What the checkpoint calls the tensors of a group."""
        return self._names[group]

    def initial(self) -> Array:
        """Zeros, which loading replaces."""
        return np.zeros(self.n_params, FP32)

    def buffer(self, group: Group) -> Array:
        """Zeros, which loading replaces."""
        return np.zeros(group.size, group.dtype)

    def generator_state(self) -> dict[str, Any]:
        """What was saved."""
        return self._generator

    def check(self, batch: Any, ranks: int) -> Any:
        """TypeError: this is no model that could be trained."""
        raise TypeError("step(batch): this run was loaded without its model, to be saved again. Load it with model=.")

    def loss(self, y: Any, target: Any, work: Any) -> Any:
        """Not reached: ``check`` refuses every batch."""
        raise AssertionError(f"An outline of {self.n_params} parameters computes nothing.")


class _Part:
    """One flat buffer's worth of parameters, which computes nothing."""

    forward: ClassVar[Any] = None
    backward: ClassVar[Any] = None

    def __init__(self, bucket: BucketRecord) -> None:
        self.name, dtype = bucket.name, None if bucket.dtype is None else np.dtype(bucket.dtype)
        shapes = tuple(tuple(shape) for shape in bucket.shapes)
        self.groups = (Group(bucket.name, shapes, Role(bucket.role), dtype),)
        self.size = sum(map(prod, shapes))
