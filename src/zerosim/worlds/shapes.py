"""A model known by its shapes alone, for the dry world: it holds what a real one would, and when.

Owns ``ShapeModel``, which the schedule runs. What is held is said by the record, ``ModelShapes``. Must not
know torch, nor how the record came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerosim.bands import Array, DType
from zerosim.layers import Checkpointed, Group, Layer, Pass, Role
from zerosim.ranks import Workspace
from zerosim.worlds.dry import DryArray
from zerosim.worlds.model_shapes import Feed, GroupShapes, ModelShapes, Tensor, UnitShapes

__all__ = ["Feed", "GroupShapes", "ModelShapes", "ShapeModel", "ShapeUnit", "Tensor", "UnitShapes"]


class _Outputs(DryArray):
    """What a unit hands on, to the schedule its ``arrays``; ``alive`` are those of all units so far, by unit."""

    __slots__ = ("alive", "arrays")

    def __init__(self, arrays: Sequence[Array]) -> None:
        super().__init__((1, 0), np.float32)
        self.arrays = list(arrays)
        self.alive: dict[int, tuple[_Outputs, tuple[Array, ...]]] = {}

    def follow(self, index: int, before: Any) -> None:
        """Be unit ``index``'s, after what the unit before it handed on."""
        self.alive = before.alive if isinstance(before, _Outputs) else {}
        self.alive[index] = self, tuple(self.arrays)

    def free(self, which: Sequence[tuple[int, int]], work: Workspace) -> None:
        """Free these outputs, each a unit's number and which of its; those that have gone before are left alone."""
        for unit, number in which:
            owner, arrays = self.alive[unit]
            if any(array is arrays[number] for array in owner.arrays):
                owner.arrays = [array for array in owner.arrays if array is not arrays[number]]
                work.free(arrays[number])


class _Pending(DryArray):
    """The gradients that are under way, by unit and output: what units hand on in the backward.

    To the schedule, which does not look inside, it is an array without elements.
    """

    __slots__ = ("grads",)

    def __init__(self) -> None:
        super().__init__((1, 0), np.float32)
        self.grads: dict[tuple[int, int], Array] = {}

    def put(self, sent: Sequence[Feed], work: Workspace) -> None:
        """Hold the gradients that a backward sends; a sum goes where the summand was, if it fits there."""
        for feed in sent:
            key = feed.unit, feed.output
            before = self.grads.get(key)
            if before is None or before.nbytes != feed.grad.nbytes:
                self.grads[key] = _hold(feed.grad, work)
                if before is not None:
                    work.free(before)


def _sent(own: UnitShapes, model: ModelShapes) -> list[Feed]:
    """The gradients that a unit's backward sends, one by one."""
    found = []
    for feed in own.feeds:
        if isinstance(feed, Feed):
            found.append(feed)
        else:
            found += [Feed(feed, number, grad) for number, grad in enumerate(model.units[feed].grads)]
    return found


class ShapeUnit:
    """A layer of which only shapes are known: holds and frees what a real one would, and books its FLOPs.

    What it hands on in the backward is all the gradients that are under way, for a unit need
    not be fed by the one before it alone.
    """

    def __init__(
        self, index: int, model: ModelShapes, groups: Sequence[Group], *, temporaries: bool, takes: _Batch | None,
        frees: bool = False,
    ) -> None:  # fmt: skip
        self.shapes = model.units[index]
        self.name, self.groups = self.shapes.name, tuple(groups)
        self._index, self._temporaries, self._takes, self._frees = index, temporaries, takes, frees
        self._sent = _sent(self.shapes, model)

    def forward(self, x: Any, given: Pass) -> tuple[Any, Any]:
        if self._takes is not None:
            self._takes.check(x)
        own, work = self.shapes, given.work
        more = () if self._takes is None else self._takes.beside
        held = [_hold(each, work) for each in (*more, *own.saved)]
        outputs = _Outputs([_hold(each, work) for each in own.outputs])
        outputs.follow(self._index, x)
        self._scratch(own.forward_temporaries, work)
        work.flops(own.forward_flops)
        if self._frees:
            outputs.free(own.frees, work)
        return outputs, (held, outputs)

    def backward(self, saved: Any, dy: Any, given: Pass) -> Any:
        own, work = self.shapes, given.work
        held, outputs = saved
        held = held + [_hold(each, work) for each in own.recomputed]
        dy.put(self._sent, work)
        self._scratch(own.backward_temporaries, work)
        work.flops(own.recompute_flops + own.backward_flops)
        mine = [key for key in dy.grads if key[0] == self._index]
        for array in (*held, *outputs.arrays, *(dy.grads.pop(key) for key in mine)):
            work.free(array)
        return dy

    def _scratch(self, nbytes: int, work: Workspace) -> None:
        if self._temporaries and nbytes:
            work.free(work.hold(nbytes, dtype=np.dtype(np.uint8)))


class _Batch:
    """One side of a rank's batch: one array, or a record with a field for each of several that have the same rows.

    What has others, a mask for all rows say, is ``beside`` it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        first = tensors[0].shape[:1]
        apart = [each for each in tensors if each.shape[:1] != first]
        rows = [each for each in tensors if each.shape[:1] == first]
        self.beside = tuple(apart)
        self.rows, self._rest = (first or (1,))[0], rows[0].shape[1:]
        self.dtype = np.dtype(rows[0].dtype)
        if len(rows) > 1:
            fields = [(str(number), np.dtype(each.dtype), each.shape[1:]) for number, each in enumerate(rows)]
            self._rest, self.dtype = (), np.dtype(fields)

    def of(self, times: int) -> DryArray:
        """So many micro-batches of one rank."""
        return DryArray((self.rows * times, *self._rest), self.dtype)

    def fits(self, given: Any) -> bool:
        """Whether something is like this but for its rows."""
        return bool(given.shape[1:] == self._rest and given.dtype == self.dtype)

    def check(self, x: Any) -> None:
        """Refuse a micro-batch [1, rows, ...] of another size than was measured."""
        if x.shape[1] != self.rows:
            raise ValueError(
                f"ShapeModel: was measured for micro-batches of {self}; got {x.shape[1]} rows. Pass batch() of as many "
                f"micro-batches, or measure it for this size."
            )

    def __str__(self) -> str:
        return f"{self.dtype} of shape {[self.rows, *self._rest]}"


class ShapeModel:
    """The model that ``shapes`` describes, for a ``Scheme`` in the dry world (``ring=DryRing(N)``).

    ``temporaries`` says whether a unit's scratch memory is held at its peak, which
    an eager framework needs and the simulator, whose temporaries are registers, does not. ``frees``: an output goes
    as soon as nothing needs it any more, as in an eager framework; here a unit's own backward frees it.
    """

    def __init__(self, shapes: ModelShapes, *, temporaries: bool = False, frees: bool = False) -> None:
        self.shapes, self._temporaries, self._frees = shapes, temporaries, frees
        _check(shapes)
        groups = [each.group() for each in shapes.groups]
        self._elements = sum(group.size for group in groups if group.role is not Role.BUFFER)
        self._x, self._target = _Batch(shapes.inputs), _Batch([shapes.target, *shapes.more_targets])
        self.layers: list[Layer] = []
        for index, unit in enumerate(shapes.units):
            own = [groups[number] for number in unit.groups]
            takes = self._x if index == 0 else None
            layer = ShapeUnit(index, shapes, own, temporaries=temporaries, takes=takes, frees=frees)
            self.layers.append(Checkpointed(layer) if unit.checkpointed else layer)

    @property
    def n_params(self) -> int:
        """The logical number of parameters: tied ones once, frozen ones too, buffers left out."""
        return self.shapes.n_params

    def initial(self) -> Any:
        """The initial parameters, as many as all groups have elements, fp32, without values."""
        return DryArray((self._elements,), np.float32)

    def buffer(self, group: Group) -> Any:
        """A group of buffers [its size], without values."""
        return DryArray((group.size,), _known(group.dtype))

    def batch(self, accumulate: int = 1) -> list[tuple[Any, Any]]:
        """A batch for the one rank that stands for all, of so many micro-batches."""
        return [(self._x.of(accumulate), self._target.of(accumulate))]

    def check(self, batch: Sequence[tuple[Any, Any]], ranks: int) -> tuple[Any, Any]:
        """The batch of the one rank as x [1, rows, ...] and target [1, rows, ...]; ValueError if it isn't like that."""
        if ranks != 1 or len(batch) != 1 or len(batch[0]) != 2:
            raise ValueError(
                f"step(batch): a model of shapes runs where one rank stands for all, on one pair (x, target); got "
                f"{len(batch)} for {ranks} ranks. Pass ring=DryRing(N) to the Scheme and the model's batch() to step."
            )
        for what, given, wanted in zip(("x", "target"), batch[0], (self._x, self._target), strict=True):
            if not wanted.fits(given):
                raise ValueError(
                    f"step(batch): {what} must be {wanted}, or more such rows; got "
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
        if self._frees:
            y.free(own.frees, work)
        if work.on_loss is not None:
            work.on_loss()
        pending = _Pending()
        pending.put(_sent(own, self.shapes), work)
        if self._temporaries and own.backward_temporaries:
            work.free(work.hold(own.backward_temporaries, dtype=np.dtype(np.uint8)))
        work.flops(own.forward_flops + own.backward_flops)
        for array in (*held, target):
            work.free(array)
        return np.full(1, np.nan, np.float32), pending


def _check(shapes: ModelShapes) -> None:
    """Refuse a record whose indices do not fit together."""
    ends = (*shapes.units, shapes.loss)
    for index, unit in enumerate(ends):
        fed = [feed.unit if isinstance(feed, Feed) else feed for feed in unit.feeds]
        if not all(0 <= number < index for number in fed):
            raise ValueError(
                f"ShapeModel: a unit's gradients go to units before it; {unit.name}, unit {index}, feeds {fed}. List "
                f"the units in the order of the forward pass."
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


def _known(dtype: DType | None) -> DType:
    assert dtype is not None, "a group of buffers has a dtype"
    return dtype
