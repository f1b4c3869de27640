"""One forward of a torch module without values, unit by unit, and what is seen of each.

Owns how a unit is measured where the module calls it, whom its gradients go to, and to whom
what happens between units is booked. Must not know the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from zerosim.torch_models.alike import Alike
from zerosim.torch_models.costs import Cost, cost_of, elements, shape_of
from zerosim.torch_models.intercept import intercepted, origins
from zerosim.torch_models.losses import Loss
from zerosim.torch_models.meta_answers import Answers
from zerosim.torch_models.op_counters import Flops, Fused, Watch
from zerosim.torch_models.saved_tensors import SavedTensors, is_dense
from zerosim.torch_models.trees import map_tensors, tensors
from zerosim.torch_models.units import Unit
from zerosim.worlds.model_shapes import UnitShapes


@dataclass
class _Call:
    """One call of a unit, and the outputs that the module was given in place of its own.

    ``around`` is what the containers did between this call and the next.
    """

    unit: Unit
    name: str
    cost: Cost = field(default_factory=Cost)
    outputs: list[torch.Tensor] = field(default_factory=list)
    feeds: set[int] = field(default_factory=set)
    around: Cost = field(default_factory=Cost)
    kept_before: int = 0  # how many storages the containers had kept by then


class Run:
    """One forward of a module without values, unit by unit."""

    def __init__(
        self, module: torch.nn.Module, units: Sequence[Unit], given: Sequence[torch.Tensor], checkpoint: str,
        idle: bool = False, writable: bool = False,
    ) -> None:  # fmt: skip
        self._module, self._units, self._checkpoint = module, units, checkpoint
        self._idle, self._writable = idle, writable
        self.idle: list[Unit] = []  # units that the forward pass does not reach
        self.groups = list(dict.fromkeys(group for unit in units for group in unit.groups))
        # What containers hold themselves is there from the beginning.
        self.calls = [_Call(unit, unit.name) for unit in units if unit.container]
        self._around = self.calls[-1].around if self.calls else Cost()
        self._known: dict[Any, tuple[Cost, set[str]]] = {}
        self._alike, self._seen = Alike(), dict[Any, tuple[Cost, set[str], Any, set[str | int]]]()
        self._producers: dict[int, int] = {}  # the call that gave an output, by the output's id
        self._answers, self._flops, self._outside = Answers(), Flops(), 0
        self._flops.read = self._read
        self._outputs: dict[int, tuple[int, int]] = {}  # whose output a storage is: the call, and which of its
        self._last_read: dict[tuple[int, int], int] = {}  # the last call that reads it; the loss comes after all
        self._walked: set[Any] = set()
        self._saved = SavedTensors({f"input {index}": tensor for index, tensor in enumerate(given)}, hold=True)
        for unit in units:
            for part in unit.parts:
                for name, tensor in zip(part.names, part.tensors, strict=True):
                    self._saved.know(f"{unit.name}.{name}" if not unit.container else "", tensor)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns for these inputs."""
        with ExitStack() as stack:
            for context in (*_settings(), self._answers, self._flops):
                stack.enter_context(context)
            stack.enter_context(intercepted(self._module, self._units, self._call))
            with self._saved.recording():
                output = self._module(*args, **kwargs)
            self._left_containers(_found(output))
        called = {call.unit for call in self.calls}
        for unit in self._units:
            if not unit.parts or unit in called or self._shared(unit, called):
                continue
            self.idle.append(unit)
            if not self._idle:
                raise ValueError(
                    f"measure(wrap): the forward pass never calls {unit.name}, though it has parameters or buffers. "
                    f"Match a module around it that is called, or leave it out of the model."
                )
        return output

    def _shared(self, unit: Unit, called: set[Unit]) -> bool:
        """Whether all that a unit has is used by others, which are called: a tied embedding that is not itself."""
        used = {id(tensor) for other in called for part in other.parts for tensor in part.tensors}
        return all(id(tensor) in used for part in unit.parts for tensor in part.tensors)

    def loss(self, loss: Loss, output: Any, target: torch.Tensor) -> UnitShapes:
        """What the loss keeps and costs, and which calls its gradient goes to."""
        found = [tensor for tensor in _found(output) if tensor.requires_grad]
        there = {f"y{index}": tensor for index, tensor in enumerate([*found, target])}
        for tensor in found:
            self._read(tensor)
        with ExitStack() as stack:
            for context in (*_settings(), self._answers):
                stack.enter_context(context)
            watch = stack.enter_context(Watch([*there.values(), *self._owned()]))
            record = SavedTensors(there, hold=True)
            with record.recording():
                value = loss(output, target)
            if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError(
                    f"measure(loss): must return one number that depends on a trainable parameter; got {value!r}."
                )
            cost, grads = _cost(record, {}, [value], found, watch)
        self._take(record.touched, {name: tensor for name, tensor in there.items() if tensor is not target})
        used = [tensor for tensor, grad in zip(found, grads, strict=True) if grad is not None]
        return UnitShapes(name="loss", feeds=self._feeds(used), frees=self._freed_by(len(self.calls)), **vars(cost))

    def units(self) -> list[UnitShapes]:
        """What was seen, call by call."""
        kept = [elements(kept.storage.nbytes(), kept.dtype) for kept in self._saved.finish({})]
        names = [name for name in self._saved.touched if isinstance(name, str) and name]
        if wrong := sorted(name for name in names if not name.startswith("input ")):
            raise ValueError(
                f"measure(wrap): {', '.join(map(str, wrong))} is read outside the forward pass of its unit, where it "
                f"may not have been gathered. Use it in a module of its own that shares it, or match a module "
                f"around both."
            )
        limits = [*(call.kept_before for call in self.calls), len(kept)]
        limits[0] = 0
        shapes = []
        for index, call in enumerate(self.calls):
            cost, around = call.cost, call.around
            shapes.append(
                UnitShapes(
                    name=call.name,
                    groups=tuple(self.groups.index(group) for group in call.unit.groups),
                    saved=(*cost.saved, *kept[limits[index] : limits[index + 1]]),
                    recomputed=cost.recomputed,
                    outputs=tuple(shape_of(tensor) for tensor in call.outputs),
                    grads=tuple(shape_of(tensor) for tensor in call.outputs if tensor.requires_grad),
                    feeds=tuple(sorted(call.feeds)),
                    forward_flops=cost.forward_flops + around.forward_flops,
                    backward_flops=cost.backward_flops + around.backward_flops,
                    recompute_flops=cost.recompute_flops,
                    forward_temporaries=cost.forward_temporaries,
                    backward_temporaries=cost.backward_temporaries,
                    checkpointed=self._checkpoint == "full" and call.unit.matched,
                    wrapped=call.unit.matched,
                    frees=self._freed_by(index),
                )
            )
        return shapes

    # -- within the forward

    def _call(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taken = tensors((args, kwargs))
        self._left_containers(taken)
        leaves = {id(tensor): tensor.detach().requires_grad_(tensor.requires_grad) for tensor in taken}
        args, kwargs = map_tensors(lambda tensor: leaves[id(tensor)], (args, kwargs))
        again = sum(call.unit is unit for call in self.calls)
        call = _Call(unit, f"{unit.name} (call {again + 1})" if again else unit.name)
        if not self.calls:
            call.around = self._around
        there = {f"x{index}": tensor for index, tensor in enumerate(leaves.values())}
        key = self._alike.key(self._module.get_submodule(unit.path), args, kwargs)
        if key not in self._seen:  # of calls that are alike one is run
            cost, fed, output, record = self._measured(unit, forward, args, kwargs, there)
            self._seen[key] = cost, fed, map_tensors(_anew, output), record.touched
        for tensor in taken:
            self._read(tensor)
        call.cost, fed, output, touched = self._seen[key]
        distinct = {f"x{index}": tensor for index, tensor in enumerate({id(each): each for each in taken}.values())}
        self._take(touched, distinct, everything=self._checkpoint != "none" and unit.matched)
        call.feeds = set(self._feeds([distinct[name] for name in fed]))
        call.kept_before = self._saved.count
        fresh = map_tensors(_anew, output)
        call.outputs = tensors(fresh)
        for number, tensor in enumerate(call.outputs):
            self._producers[id(tensor)] = len(self.calls)
            self._saved.know((len(self.calls), number), tensor)
            self._outputs.setdefault(tensor.untyped_storage()._cdata, (len(self.calls), number))
            if f"y{number}" in touched:
                self._saved.keep(tensor)
        self.calls.append(call)
        self._around = call.around
        if self._writable:  # what the containers write to in place is no leaf: it stands for the output
            fresh = map_tensors(self._copied, fresh)
        self._outside = self._flops.total
        return fresh

    def _copied(self, output: torch.Tensor) -> torch.Tensor:
        if not output.requires_grad:
            return output
        copied = output.clone()
        self._saved.know("", copied)
        return copied

    def _measured(
        self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any, there: Mapping[str, torch.Tensor]
    ) -> tuple[Cost, set[str], Any, SavedTensors]:
        """The cost of one call, the names of ``there`` that it gives gradients, its output, and what it saved.

        Of calls whose forward is the same, operation by operation, one has a backward.
        """
        own = [tensor for part in unit.parts for tensor in part.tensors]
        names = [name for name, tensor in there.items() if tensor.requires_grad]
        needing = [*(there[name] for name in names), *(tensor for tensor in own if tensor.requires_grad)]
        selective = self._checkpoint == "selective" and unit.matched
        with Watch([*there.values(), *own], selective=selective) as watch:
            record = SavedTensors({**there, **{f"p{index}": tensor for index, tensor in enumerate(own)}}, hold=True)
            with record.recording():
                output = forward(*args, **kwargs)
            outputs = {f"y{index}": tensor for index, tensor in enumerate(tensors(output))}
            record.touched |= {name for name, tensor in outputs.items() if record.keeps(tensor)}
            signature = (
                selective,
                tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in (*there.values(), *own)),
                tuple(watch.operations),
            )
            if signature not in self._known:
                ends = [tensor for tensor in outputs.values() if tensor.requires_grad]
                cost, grads = _cost(record, outputs, ends, needing, watch)
                given = zip(names, grads, strict=False)  # first those of ``there``, then the parameters'
                self._known[signature] = cost, {name for name, grad in given if grad is not None}
        return *self._known[signature], output, record

    def _take(self, touched: set[str | int], given: Mapping[str, torch.Tensor], everything: bool = False) -> None:
        """What was passed on by containers, and is no unit's output, is kept if the one that took it keeps it."""
        for name, tensor in given.items():
            if everything or name in touched:
                self._saved.keep(tensor)

    def _read(self, tensor: torch.Tensor) -> None:
        """Note who was the last to read an output: the call that comes next, if a container reads it."""
        if (output := self._outputs.get(tensor.untyped_storage()._cdata)) is not None:
            self._last_read[output] = len(self.calls)

    def _freed_by(self, index: int) -> tuple[tuple[int, int], ...]:
        """The outputs that nothing keeps, and that this call, or the loss, was the last to read."""
        kept = self._saved.touched
        return tuple(sorted(output for output, last in self._last_read.items() if last == index and output not in kept))

    def _left_containers(self, taken: Sequence[torch.Tensor]) -> None:
        """The containers' own FLOPs since the last call: what they did, and the backward of what they pass on."""
        around = self._around
        around.forward_flops += self._flops.total - self._outside
        for tensor in taken:
            if tensor.grad_fn is not None and tensor.grad_fn not in self._walked:
                self._walked.add(tensor.grad_fn)
                before = self._flops.total
                gradient = torch.empty_like(tensor)
                torch.autograd.grad(tensor, origins(tensor), gradient, retain_graph=True, allow_unused=True)
                around.backward_flops += self._flops.total - before

    def _feeds(self, taken: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The calls to whose outputs the gradients of these tensors go."""
        leaves = [id(leaf) for tensor in taken for leaf in origins(tensor)]
        return tuple(sorted({self._producers[leaf] for leaf in leaves if leaf in self._producers}))

    def _owned(self) -> list[torch.Tensor]:
        return [tensor for unit in self._units for part in unit.parts for tensor in part.tensors]


def _cost(
    record: SavedTensors,
    outputs: Mapping[str, torch.Tensor],
    ends: Sequence[torch.Tensor],
    needing: Sequence[torch.Tensor],
    watch: Watch,
) -> tuple[Cost, Sequence[torch.Tensor | None]]:
    """What a run that has just been recorded came to, and its backward from ``ends`` to the leaves ``needing`` it."""
    as_such = {name: tensor for name, tensor in outputs.items() if is_dense(tensor)}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in outputs.values())
    return cost_of(record, as_such, nbytes, ends, [torch.empty_like(tensor) for tensor in ends], needing, watch)


def _settings() -> tuple[Any, ...]:
    return torch.device("meta"), torch.enable_grad(), Fused()


def _found(output: Any) -> list[torch.Tensor]:
    """The tensors of a module's output, or the logits of an output of another kind."""
    return tensors(output) or tensors(getattr(output, "logits", None))


def _anew(output: torch.Tensor) -> torch.Tensor:
    """In place of an output: a tensor of its own, row by row, as outputs are held."""
    return torch.empty(output.shape, dtype=output.dtype, device="meta", requires_grad=output.requires_grad)
