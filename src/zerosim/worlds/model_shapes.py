"""The record of a model that is known by its shapes alone: what each unit's forward keeps, gives and costs.

Owns the record, plain data: measured from a module, or written by hand. Must not know torch, nor how the
numbers came about, nor what runs on it.
"""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np

from zerosim.layers import Group, Role


class Tensor(msgspec.Struct, frozen=True):
    """The shape, without the axis of the ranks, and the dtype's name, as NumPy and ml_dtypes have it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class GroupShapes(msgspec.Struct, frozen=True):
    """A group of parameters or buffers that share one flat buffer; ``dtype`` and ``stands_for`` as ``Group`` has it."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    role: Role = Role.TRAINABLE
    dtype: str | None = None
    stands_for: int | None = None

    def group(self) -> Group:
        """What a layer lists."""
        dtype = None if self.dtype is None else np.dtype(self.dtype)
        return Group(self.name, self.shapes, self.role, dtype, self.stands_for)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.group().size

    @property
    def params(self) -> int:
        """How many parameters, or numbers of buffers, it has."""
        return self.group().params

    @property
    def nbytes(self) -> int:
        """Bytes of a group of buffers; parameters have whichever dtype the precision gives them."""
        return self.size * np.dtype(self.dtype).itemsize


class Feed(msgspec.Struct, frozen=True):
    """A gradient that a backward sends to an earlier unit: which unit, which of what it hands on, and how it is held.

    Where a later unit has sent one there already this is the sum.
    """

    unit: int
    output: int
    grad: Tensor


class UnitShapes(msgspec.Struct, frozen=True, kw_only=True):
    """One unit, in the order of the forward pass.

    ``groups`` are indices into the model's. ``outputs`` are what the unit hands on, ``grads`` the gradients of
    those that have one, ``feeds`` the earlier units to which its backward sends gradients: in a plain chain, the
    one before. A number stands for a unit and all of its ``grads``; where a unit hands on several things, a
    ``Feed`` says of which. ``saved`` is kept from forward to backward besides inputs, outputs and parameters;
    ``recomputed`` only comes back in the backward, for ``recompute_flops``. Temporaries are bytes beyond all
    that, at the peak. ``checkpointed`` units keep their input alone and run forward again. ``wrapped``: the wrap
    rule chose it; what is left of a model is not. ``frees`` are outputs, as (unit, which of its outputs), that
    nothing keeps for the backward and that this unit is the last to read.
    """

    name: str
    groups: tuple[int, ...] = ()
    saved: tuple[Tensor, ...] = ()
    recomputed: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    grads: tuple[Tensor, ...] = ()
    feeds: tuple[int | Feed, ...] = ()
    forward_flops: int = 0
    backward_flops: int = 0
    recompute_flops: int = 0
    forward_temporaries: int = 0
    backward_temporaries: int = 0
    checkpointed: bool = False
    wrapped: bool = True
    frees: tuple[tuple[int, int], ...] = ()

    @property
    def activation_bytes(self) -> int:
        """What a rank holds for this unit from its forward to its backward."""
        return sum(each.nbytes for each in (*self.outputs, *(() if self.checkpointed else self.saved)))


class ModelShapes(msgspec.Struct, frozen=True, kw_only=True):
    """A model: its groups, its units in order, its loss (what that saves, and whom it feeds), and a rank's batch.

    ``inputs`` are the tensors that the module is called with, ``target`` and ``more_targets`` those that the loss
    is given; their first axis is the rows of one micro-batch. ``given`` are inputs as the caller has them, of which
    the module reads a copy in another dtype. ``notes`` say in words why some units are more than the modules that
    were asked for.
    """

    groups: tuple[GroupShapes, ...]
    units: tuple[UnitShapes, ...]
    loss: UnitShapes
    inputs: tuple[Tensor, ...]
    target: Tensor
    more_targets: tuple[Tensor, ...] = ()
    given: tuple[Tensor, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def n_params(self) -> int:
        """The logical number of parameters: tied ones once, frozen ones too, buffers left out."""
        return sum(group.params for group in self.groups if group.role is not Role.BUFFER)

    @property
    def n_trainable(self) -> int:
        """The parameters that are trained."""
        return sum(group.size for group in self.groups if group.role is Role.TRAINABLE)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers, which every rank holds whole."""
        return sum(group.nbytes for group in self.groups if group.role is Role.BUFFER)

    @property
    def activation_bytes(self) -> int:
        """What all units keep from forward to backward, for one micro-batch of one rank."""
        return sum(unit.activation_bytes for unit in self.units)

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward and backward of one rank, recomputation included."""
        return sum(
            unit.forward_flops * (2 if unit.checkpointed else 1) + unit.recompute_flops + unit.backward_flops
            for unit in (*self.units, self.loss)
        )
