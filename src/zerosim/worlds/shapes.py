"""A model known by its shapes alone: what each unit's forward keeps, gives and costs, and its backward.

Owns the record of such a model (``ModelShapes``, plain data: measured from a module, or written
by hand) and ``ShapeModel``, which the schedule runs in the dry world. Must not know torch, nor
how the numbers came about: it holds what the record says, when a real unit would.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from zerosim.bands import Array, DType
from zerosim.layers import Checkpointed, Group, Layer, Pass, Role
from zerosim.ranks import Workspace
from zerosim.worlds.dry import DryArray


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

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def params(self) -> int:
        """How many parameters, or numbers of buffers, it has."""
        return self.size if self.stands_for is None else self.stands_for

    @property
    def nbytes(self) -> int:
        """Bytes of a group of buffers; parameters have whichever dtype the precision gives them."""
        return self.size * np.dtype(self.dtype).itemsize


class UnitShapes(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a unit, in the order of the forward pass.

    ``groups`` are indices into the model's. ``outputs`` are what the call returns, ``grads`` the
    gradients of those that have one, ``feeds`` the earlier units to whose outputs its backward
    sends gradients: in a plain chain, the one before. ``saved`` is kept from forward to backward
    besides inputs, outputs and parameters; ``recomputed`` only comes back in the backward, for
    ``recompute_flops``. Temporaries are bytes beyond all that, at the highest instant.
    ``checkpointed`` units keep their input alone and run forward again.
    """

    name: str
    groups: tuple[int, ...] = ()
    saved: tuple[Tensor, ...] = ()
    recomputed: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    grads: tuple[Tensor, ...] = ()
    feeds: tuple[int, ...] = ()
    forward_flops: int = 0
    backward_flops: int = 0
    recompute_flops: int = 0
    forward_temporaries: int = 0
    backward_temporaries: int = 0
    checkpointed: bool = False

    @property
    def activation_bytes(self) -> int:
        """What a rank holds for this unit from its forward to its backward."""
        return sum(each.nbytes for each in (*self.outputs, *(() if self.checkpointed else self.saved)))


class ModelShapes(msgspec.Struct, frozen=True, kw_only=True):
    """A model: its groups, its units in order, its loss (what that saves, and whom it feeds), and a rank's batch.

    ``inputs`` are the tensors that the module is called with, the first being the batch's x;
    their first axis is the rows of one micro-batch.
    """

    groups: tuple[GroupShapes, ...]
    units: tuple[UnitShapes, ...]
    loss: UnitShapes
    inputs: tuple[Tensor, ...]
    target: Tensor

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


class Pending(DryArray):
    """The gradients that are under way, by the unit to whose outputs they belong: what units hand on in the backward.

    To the schedule, which does not look inside, it is an array without elements.
    """

    __slots__ = ("grads",)

    def __init__(self, grads: dict[int, list[Array]]) -> None:
        super().__init__((1, 0), np.float32)
        self.grads = grads


class ShapeUnit:
    """A layer of which only shapes are known: holds and frees what a real one would, and books its FLOPs.

    What it hands on in the backward is all the gradients that are under way, for a unit need
    not be fed by the one before it alone.
    """

    def __init__(
        self, index: int, model: ModelShapes, groups: Sequence[Group], *, temporaries: bool, takes: Tensor | None
    ) -> None:
        self.shapes = model.units[index]
        self.name, self.groups = self.shapes.name, tuple(groups)
        self._index, self._temporaries, self._takes = index, temporaries, takes
        self._feeds = {feed: model.units[feed].grads for feed in self.shapes.feeds}
        self._more = model.inputs[1:] if index == 0 else ()  # the batch beyond x

    def forward(self, x: Any, given: Pass) -> tuple[Any, Any]:
        if self._takes is not None and (x.shape[1:], x.dtype) != (self._takes.shape, np.dtype(self._takes.dtype)):
            raise ValueError(
                f"ShapeModel: was measured for micro-batches of {self._takes.dtype}{list(self._takes.shape)}; got "
                f"{x.dtype}{list(x.shape[1:])}. Pass batch() of as many micro-batches, or measure it for this size."
            )
        own, work = self.shapes, given.work
        held = [_hold(each, work) for each in (*self._more, *own.saved)]
        outputs = [_hold(each, work) for each in own.outputs] or [work.hold(0)]
        self._scratch(own.forward_temporaries, work)
        work.flops(own.forward_flops)
        return outputs[0], (held, outputs)

    def backward(self, saved: Any, dy: Any, given: Pass) -> Any:
        own, pending, work = self.shapes, dy.grads, given.work
        held, outputs = saved
        held = held + [_hold(each, work) for each in own.recomputed]
        for feed, shapes in self._feeds.items():
            if feed not in pending:
                pending[feed] = [_hold(each, work) for each in shapes]
        self._scratch(own.backward_temporaries, work)
        work.flops(own.recompute_flops + own.backward_flops)
        for array in (*held, *outputs, *pending.pop(self._index, ())):
            work.free(array)
        return dy if given.need_dx else None

    def _scratch(self, nbytes: int, work: Workspace) -> None:
        if self._temporaries and nbytes:
            work.free(work.hold(nbytes, dtype=np.dtype(np.uint8)))


class ShapeModel:
    """The model that ``shapes`` describes, for a ``Scheme`` in the dry world (``ring=DryRing(N)``).

    ``temporaries`` says whether a unit's scratch memory is held at its highest instant, which
    an eager framework needs and the simulator, whose temporaries are registers, does not.
    """

    def __init__(self, shapes: ModelShapes, *, temporaries: bool = False) -> None:
        self.shapes, self._temporaries = shapes, temporaries
        _check(shapes)
        groups = [
            Group(each.name, each.shapes, each.role, _dtype(each.dtype), each.stands_for) for each in shapes.groups
        ]
        self.layers: list[Layer] = []
        for index, unit in enumerate(shapes.units):
            own = [groups[number] for number in unit.groups]
            takes = shapes.inputs[0] if index == 0 else None
            layer = ShapeUnit(index, shapes, own, temporaries=temporaries, takes=takes)
            self.layers.append(Checkpointed(layer) if unit.checkpointed else layer)

    @property
    def n_params(self) -> int:
        """The logical number of parameters: tied ones once, frozen ones too, buffers left out."""
        return self.shapes.n_params

    def initial(self) -> Any:
        """The initial parameters, as many as all groups have elements, fp32, without values."""
        return DryArray((sum(group.size for group in self.shapes.groups if group.role is not Role.BUFFER),), np.float32)

    def buffer(self, group: Group) -> Any:
        """A group of buffers [its size], without values."""
        return DryArray((group.size,), _known(group.dtype))

    def batch(self, accumulate: int = 1) -> list[tuple[Any, Any]]:
        """A batch for the one rank that stands for all, of so many micro-batches."""
        x, target = self.shapes.inputs[0], self.shapes.target
        return [(_rows(x, accumulate), _rows(target, accumulate))]

    def check(self, batch: Sequence[tuple[Any, Any]], ranks: int) -> tuple[Any, Any]:
        """The batch of the one rank as x [1, rows, ...] and target [1, rows, ...]; ValueError if it isn't like that."""
        if ranks != 1 or len(batch) != 1 or len(batch[0]) != 2:
            raise ValueError(
                f"step(batch): a model of shapes runs where one rank stands for all, on one pair (x, target); got "
                f"{len(batch)} for {ranks} ranks. Pass ring=DryRing(N) to the Scheme and the model's batch() to step."
            )
        for what, given, wanted in zip(
            ("x", "target"), batch[0], (self.shapes.inputs[0], self.shapes.target), strict=True
        ):
            if given.shape[1:] != wanted.shape[1:] or given.dtype != np.dtype(wanted.dtype):
                raise ValueError(
                    f"step(batch): {what} must be {wanted.dtype} of shape {list(wanted.shape)}, or more such rows; got "
                    f"{given.dtype} {list(given.shape)}. Pass the model's batch()."
                )
        x, target = (DryArray((1, *each.shape), each.dtype) for each in batch[0])
        return x, target

    def loss(self, y: Any, target: Any, work: Workspace) -> tuple[Any, Any]:
        """An unknown loss [1], and the gradients with which the backward begins. Frees ``target``."""
        own = self.shapes.loss
        held = [_hold(each, work) for each in own.saved]
        if self._temporaries and own.forward_temporaries:
            work.free(work.hold(own.forward_temporaries, dtype=np.dtype(np.uint8)))
        pending = {feed: [_hold(each, work) for each in self.shapes.units[feed].grads] for feed in own.feeds}
        if self._temporaries and own.backward_temporaries:
            work.free(work.hold(own.backward_temporaries, dtype=np.dtype(np.uint8)))
        work.flops(own.forward_flops + own.backward_flops)
        for array in (*held, target):
            work.free(array)
        return np.full(1, np.nan, np.float32), Pending(pending)


def _check(shapes: ModelShapes) -> None:
    """Refuse a record whose indices do not fit together."""
    ends = (*shapes.units, shapes.loss)
    for index, unit in enumerate(ends):
        if not all(0 <= feed < index for feed in unit.feeds):
            raise ValueError(
                f"ShapeModel: a unit's gradients go to units before it; {unit.name}, unit {index}, feeds "
                f"{list(unit.feeds)}. List the units in the order of the forward pass."
            )
        if not all(0 <= group < len(shapes.groups) for group in unit.groups):
            raise ValueError(
                f"ShapeModel: groups are indices into the model's {len(shapes.groups)}; {unit.name} has "
                f"{list(unit.groups)}."
            )
    if not shapes.units or not shapes.inputs or not shapes.loss.feeds:
        raise ValueError(
            f"ShapeModel: needs units, inputs and a loss that feeds at least one unit; got {len(shapes.units)}, "
            f"{len(shapes.inputs)} and {list(shapes.loss.feeds)}."
        )


def _hold(tensor: Tensor, work: Workspace) -> Array:
    return work.hold(*tensor.shape, dtype=np.dtype(tensor.dtype))


def _rows(tensor: Tensor, times: int) -> DryArray:
    return DryArray((tensor.shape[0] * times, *tensor.shape[1:]), tensor.dtype)


def _dtype(name: str | None) -> DType | None:
    return None if name is None else np.dtype(name)


def _known(dtype: DType | None) -> DType:
    assert dtype is not None, "a group of buffers has a dtype"
    return dtype
