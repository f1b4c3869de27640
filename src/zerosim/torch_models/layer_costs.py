"""The layers of a torch module as the simulator runs them, without values: what each keeps, gives and costs.

Owns how a layer is measured, with a CPU's kernels, and to which earlier ones its backward sends gradients.
Layers that do the same are measured once. What a card would hold of a module is ``profile.measure``'s affair,
which takes what is no list of operations as it comes. Must not know the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from zerosim.layers import Group, Role
from zerosim.torch_models.batch import Example
from zerosim.torch_models.copies import on_meta
from zerosim.torch_models.costs import Cost, cost_of, elements, shape_of
from zerosim.torch_models.execution import Executor
from zerosim.torch_models.groups import Part, grouped
from zerosim.torch_models.layering import Layering, LayerPlan
from zerosim.torch_models.losses import Loss, check_value, cross_entropy
from zerosim.torch_models.op_counters import Fused, Watch
from zerosim.torch_models.planning import Decisions, planned
from zerosim.torch_models.program import Kind, Known, Ref
from zerosim.torch_models.saved_tensors import SavedTensors
from zerosim.torch_models.tensors import extent
from zerosim.torch_models.trees import map_tensors, tensors
from zerosim.torch_models.units import numpy_dtype
from zerosim.worlds.model_shapes import Feed, GroupShapes, ModelShapes, Tensor, UnitShapes

Layout = tuple[tuple[int, ...], tuple[int, ...], Any]
"""How a gradient lies in memory: size, strides and dtype."""


@dataclass
class _Measured:
    """A cost, and the gradients of what came in, in the order in which that came in."""

    cost: Cost = field(default_factory=Cost)
    grads: list[Layout | None] = field(default_factory=list)


def _settings() -> tuple[Any, ...]:
    return torch.device("meta"), torch.enable_grad(), Fused("cpu")


class LayerCosts:
    """All layers of a module without values, and its loss; ``module`` is the copy that was recorded."""

    def __init__(
        self,
        module: torch.nn.Module,
        layering: Layering,
        parts: Sequence[Sequence[Part]],
        *,
        compute: Any,
        checkpoint: str,
    ) -> None:
        self._program, self._layers, self._parts = layering.program, layering.layers, parts
        self._compute, self._checkpoint = compute, checkpoint
        self._executor = Executor(module)
        self.groups: list[Group] = list(dict.fromkeys(part.group for own in parts for part in own))
        self._layer_of = {index: number for number, layer in enumerate(self._layers) for index in layer.outs}
        self._pending: dict[int, Layout] = {}  # the gradients that are under way
        self._known: dict[Any, _Measured] = {}

    def loss(self, loss: Loss, target: Any) -> UnitShapes:
        """What the loss keeps and costs, and whose gradients it begins with."""
        memory = self._memory(self._program.returns)
        leaves = self._leaves(memory)
        there = {("memory", number): each for number, each in memory.items()}
        there |= {("target", number): each for number, each in enumerate(tensors(target))}
        with ExitStack() as stack:
            for context in _settings():
                stack.enter_context(context)
            watch = stack.enter_context(Watch(there.values()))
            saved = SavedTensors(there, hold=True)
            with saved.recording():
                value = loss(self._program.returned(leaves), target)
            check_value("shapes", value, leaves.values())
            needing = {index: leaf for index, leaf in leaves.items() if leaf.requires_grad}
            cost, grads = _layouts(saved, {}, [value], [torch.empty_like(value)], list(needing.values()), watch)
        feeds = self._feed(list(needing), grads)
        return UnitShapes(name="loss", feeds=feeds, **vars(cost))

    def target(self, loss: Loss, target: Any) -> Any:
        """The target without values; for cross entropy it is known. ValueError if it is not."""
        if target is not None:
            return map_tensors(lambda each: each.to("meta"), target)
        output = self._program.returned(self._leaves(self._memory(self._program.returns)))
        logits = getattr(output, "logits", output)
        if loss is not cross_entropy or not isinstance(logits, torch.Tensor):
            raise ValueError(
                "TorchModel(target): pass an example of what the loss is given as target. Only for cross_entropy of "
                "logits is it known: one integer for each position."
            )
        return torch.empty(logits.shape[:-1], dtype=torch.int64, device="meta")

    def units(self) -> list[UnitShapes]:
        """What was seen of each layer, once the loss has been."""
        found = []
        for layer, parts in zip(reversed(self._layers), reversed(self._parts), strict=True):
            found.append(self._unit(layer, parts))
            for index in layer.outs:
                self._pending.pop(index, None)
        return found[::-1]

    def _unit(self, layer: LayerPlan, parts: Sequence[Part]) -> UnitShapes:
        key = self._signature(layer, parts)
        if key not in self._known:
            self._known[key] = self._measure(layer, parts)
        measured = self._known[key]
        return UnitShapes(
            name=layer.name,
            groups=tuple(self.groups.index(part.group) for part in parts),
            outputs=tuple(self._shape(number, layer.outs) for number in layer.holds),
            feeds=self._feed(layer.ins, measured.grads),
            checkpointed=self._checkpoint == "full" and layer.matched,
            **vars(measured.cost),
        )

    def _measure(self, layer: LayerPlan, parts: Sequence[Part]) -> _Measured:
        program = self._program
        memory = self._memory((*layer.inputs, *layer.ins))
        own = {
            slot.name: torch.empty(
                slot.shape, dtype=slot.dtype if slot.role is Role.BUFFER else self._compute, device="meta"
            ).requires_grad_(slot.role is Role.TRAINABLE)
            for part in parts
            for slot in part.slots
        }  # fmt: skip
        there: dict[Any, torch.Tensor] = {("memory", number): each for number, each in memory.items()}
        there |= {name: each for name, each in own.items() if name not in program.assigned}
        there |= self._executor.constants(program, layer)
        with ExitStack() as stack:
            for context in _settings():
                stack.enter_context(context)
            watch = stack.enter_context(Watch([*there.values(), *own.values()]))
            saved = SavedTensors(there, hold=True)
            params = [each for each in own.values() if each.requires_grad]
            with saved.recording():
                leaves, outs, _ = self._executor.run(program, layer, memory, own)
            handed = {program.tensors[index].store: each for index, each in outs.items()}
            kept = {("memory", number): handed[number] for number in layer.holds}
            roots = {index: outs[index] for index in layer.outs if index in self._pending}
            came = [index for index in layer.ins if leaves[index].requires_grad]
            if roots:
                roots |= {index: leaves[index] for index in came if index in self._pending}
            dys = [self._gradient(index) for index in roots]
            needing = [leaves[index] for index in came]
            del outs, handed
            cost, grads = _layouts(saved, kept, list(roots.values()), dys, [*needing, *params], watch)
        by_index = dict(zip(came, grads, strict=False))
        return _Measured(cost, [by_index.get(index) for index in layer.ins])

    def _feed(self, indices: Sequence[int], grads: Sequence[Layout | None]) -> tuple[Feed, ...]:
        """Note which gradients are under way from now on, and say whose they are."""
        feeds = []
        for index, grad in zip(indices, grads, strict=True):
            if grad is not None:
                self._pending[index] = grad
                number = self._layer_of[index]
                feeds.append(Feed(number, self._layers[number].outs.index(index), _gradient_shape(grad)))
        return tuple(feeds)

    # -- what goes in

    def _memory(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        program = self._program
        found = {}
        for number in dict.fromkeys(program.tensors[index].store for index in indices):
            store = program.stores[number]
            elements = store.nbytes // store.dtype.itemsize
            made = torch.empty(elements, dtype=store.dtype, device="meta")
            found[number] = store.constant if store.kind is Kind.CONSTANT else made
        return found

    def _leaves(self, memory: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        leaves = {}
        for index in self._program.returns:
            known = self._program.tensors[index]
            leaves[index] = known.on(memory[known.store]).requires_grad_(known.requires_grad)
        return leaves

    def _gradient(self, index: int) -> torch.Tensor:
        size, stride, dtype = self._pending[index]
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    # -- what is written down

    def _shape(self, number: int, outs: Sequence[int]) -> Tensor:
        """Memory that a layer hands on: in the shape of a tensor that takes up all of it, if there is one."""
        store = self._program.stores[number]
        for known in (self._program.tensors[index] for index in outs):
            if known.store == number and _is_dense(known) and prod(known.size) * known.dtype.itemsize == store.nbytes:
                return Tensor(known.size, numpy_dtype(known.dtype).name)
        return elements(store.nbytes, store.dtype)

    def _signature(self, layer: LayerPlan, parts: Sequence[Part]) -> Any:
        """All that a layer's cost goes by: the same for two that do the same."""
        program, numbers = self._program, dict[int, int]()
        described: list[Any] = []

        def number(index: int) -> int:
            if index not in numbers:
                numbers[index] = len(numbers)
                known = program.tensors[index]
                same = next((numbers[other] for other in numbers if program.tensors[other].store == known.store), None)
                described.append(
                    (known.kind, known.dtype, known.offset, known.size, known.stride, known.requires_grad, same,
                     program.stores[known.store].nbytes, self._pending.get(index))
                )  # fmt: skip
            return numbers[index]

        ops = tuple(
            (
                op.trace if op.function is None else op.function,
                tuple(number(leaf.index) if isinstance(leaf, Ref) else repr(leaf) for leaf in op.leaves),
                repr(op.spec), tuple(None if index is None else number(index) for index in op.results), op.grad,
            )
            for op, _ in layer.ops
        )  # fmt: skip
        own = tuple((part.group.role, part.group.shapes, part.group.dtype) for part in parts)
        assigned = tuple(slot.name in program.assigned for part in parts for slot in part.slots)
        return ops, tuple(number(index) for index in layer.outs), own, assigned, tuple(described)


def _layouts(
    saved: SavedTensors,
    outputs: Mapping[Any, torch.Tensor],
    ends: Sequence[torch.Tensor],
    dys: Sequence[torch.Tensor],
    needing: Sequence[torch.Tensor],
    watch: Watch,
) -> tuple[Cost, list[Layout | None]]:
    """What a run came to, and how the gradients lie."""
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in outputs.values())
    cost, grads = cost_of(saved, outputs, nbytes, ends, dys, needing, watch)
    return cost, [None if grad is None else (tuple(grad.shape), grad.stride(), grad.dtype) for grad in grads]


def _is_dense(known: Known) -> bool:
    plain = tuple(prod(known.size[axis + 1 :]) for axis in range(len(known.size)))
    return known.offset == 0 and all(
        side == 1 or one == other for side, one, other in zip(known.size, known.stride, plain, strict=True)
    )


def _gradient_shape(layout: Layout) -> Tensor:
    """A gradient as it is held: in its shape, if it lies row by row, or from its first element to its last."""
    size, stride, dtype = layout
    like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return shape_of(like) if like.is_contiguous() else Tensor((extent(like)[2],), numpy_dtype(dtype).name)


def layer_shapes(
    module: torch.nn.Module, example: Example, decisions: Decisions, *, compute: Any, checkpoint: str, loss: Loss,
    target: Any,
) -> ModelShapes:  # fmt: skip
    """The layers of a module as the simulator runs them, on an example without values; see ``TorchModel.shapes``."""
    with ExitStack() as stack:
        for context in _settings():
            stack.enter_context(context)
        recorded, layering, decisions = planned("shapes", lambda: on_meta(module, compute), example, decisions)
    costs = LayerCosts(recorded, layering, grouped(layering, recorded), compute=compute, checkpoint=checkpoint)
    wanted = costs.target(loss, target)
    ending = costs.loss(loss, wanted)
    first, *more = (shape_of(each) for each in tensors(wanted))
    return ModelShapes(
        groups=tuple(
            GroupShapes(group.name, group.shapes, group.role, None if group.dtype is None else group.dtype.name)
            for group in costs.groups
        ),
        units=tuple(costs.units()),
        loss=ending,
        inputs=tuple(shape_of(tensor) for tensor in example.tensors),
        target=first,
        more_targets=tuple(more),
        notes=decisions.notes(layering),
    )
