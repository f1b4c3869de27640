"""Whether layer by layer a module computes what it computes as a whole: outputs and gradients, bit for bit.

Owns this comparison, made once on an example before anything is trained, and what a module must
not do for it to mean something: remember its calls, or keep memory that nobody sees. Must not
know stages or sharding.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from zerosim.bands import FP32, Array, Band
from zerosim.layers import Group, Pass, Role
from zerosim.ledger import Ledger
from zerosim.ranks import Ranks, Workspace
from zerosim.torch_models.batch import Example
from zerosim.torch_models.calls import Run, answered
from zerosim.torch_models.draws import seed_of, seeded
from zerosim.torch_models.layering import Layering
from zerosim.torch_models.op_counters import Watch
from zerosim.torch_models.recorder import shown
from zerosim.torch_models.slots import check_hooks, slots_of
from zerosim.torch_models.tensors import Gradients, array_of, packed, view
from zerosim.torch_models.torch_unit import TorchUnit
from zerosim.torch_models.trees import map_tensors, tensors
from zerosim.torch_models.units import numpy_dtype


def as_a_whole(
    module: torch.nn.Module, layering: Layering, example: Example, seed: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """What the module itself returns for the example, and the gradients of its parameters, by name.

    Those of every output times numbers that are always the same. ValueError if it remembers its calls.
    """
    slots = slots_of(module)
    buffers = {name: own.clone() for name, own in module.named_buffers()}
    first, remembered = _forward(module, layering, example, seed), _attributes(module)
    check_hooks(module)
    for name, own in module.named_buffers():
        own.data.copy_(buffers[name])
    second = _forward(module, layering, example, seed)
    changed = [
        ".".join(filter(None, key)) for key, value in _attributes(module).items() if remembered.get(key) != value
    ]
    if changed or any(not _alike(one, other) for one, other in zip(first, second, strict=True)):
        does = f"changes {changed[0]}" if changed else "returns something else"
        raise ValueError(
            f"TorchModel(module): {type(module).__name__} {does} when it is called again on the same input: it "
            f"remembers its calls, or draws random numbers otherwise than with torch, and no rank or stage could do "
            f"the same again. Keep what it remembers in a buffer, and draw with torch."
        )
    ends = [each for each in second if each.requires_grad]
    if not ends:
        raise ValueError("TorchModel(module): nothing that it returns depends on a trainable parameter.")
    own = [each for each in module.parameters() if each.requires_grad]
    grads = torch.autograd.grad(ends, own, list(map(_slope, ends)), allow_unused=True)
    if any(grad is not None and grad.layout is not torch.strided for grad in grads):
        raise ValueError(
            "TorchModel(module): a gradient is sparse, which no flat buffer can hold. Make the embedding with "
            "sparse=False."
        )
    return second, {slots[id(each)].name: grad for each, grad in zip(own, grads, strict=True)}


def _forward(module: torch.nn.Module, layering: Layering, example: Example, seed: int) -> list[torch.Tensor]:
    """The outputs, with random numbers as if it had been run layer by layer."""
    starts = {layer.calls.start: number for number, layer in enumerate(layering.layers)}
    paths = dict.fromkeys(unit.path for layer in layering.layers for unit in layer.units)
    calls, inside = -1, False

    def call(path: str, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal calls, inside
        if inside:
            return run(*args, **kwargs)
        calls += 1
        if calls and calls in starts:
            torch.default_generator.manual_seed(seed_of(seed, 0, 0, 0, starts[calls]))
        inside = True
        try:
            return run(*args, **kwargs)
        finally:
            inside = False

    args, kwargs = map_tensors(lambda given: given.clone(), (example.args, example.kwargs))
    modules = [(path, module.get_submodule(path)) for path in paths]
    with seeded(seed_of(seed, 0, 0, 0, 0)), torch.enable_grad(), answered(modules, call):
        return list(tensors(shown(module(*args, **kwargs))))


def _slope(output: torch.Tensor) -> torch.Tensor:
    """A gradient for an output, of no simple numbers."""
    steps = torch.arange(output.numel(), dtype=torch.float32).view(output.shape)
    return torch.sin(steps + 1).to(output.dtype)


class Mismatch(Exception):
    """Layer by layer something else is computed; the reason is what a person should read."""


@dataclass
class LayerByLayer:
    """What the layers of a module come to on one rank: outputs, gradients by parameter, and how often each is read."""

    outputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    reads: Counter[tuple[str, int]]


def layer_by_layer(
    layers: Sequence[TorchUnit],
    layering: Layering,
    example: Example,
    values: Mapping[Group, torch.Tensor],
    compute: Any,
) -> LayerByLayer:
    """Run the layers on the example, forward and backward. Mismatch if one keeps what is not in the ledger."""
    kind = numpy_dtype(compute)
    ledger = Ledger(1, apart=[Band.ACTIVATIONS])
    work = Workspace(Ranks([0], {Band.ACTIVATIONS: FP32}, ledger, np.empty), Band.ACTIVATIONS)
    flats = {
        group: array_of(flat if group.role is Role.BUFFER else flat.to(compute))[None].copy()
        for group, flat in values.items()
    }
    arrays = [array_of(each)[None] for each in example.tensors]
    x: Any = arrays[0] if len(arrays) == 1 else packed({str(number): each for number, each in enumerate(arrays)})
    saved, reads = [], Counter[tuple[str, int]]()
    for layer in layers:
        with Watch(layer.constants(layering)) as watch:
            x, kept = layer.forward(x, Pass([flats[group] for group in layer.groups], work))
        if watch.now and gc.collect() >= 0 and watch.now:
            raise Mismatch(
                f"{layer.name} keeps {watch.now:,} B from the forward to the backward elsewhere than in "
                f"ctx.save_for_backward or what autograd saves, where no rank would count it. Save it there, and make "
                f"no tensor in the forward that has requires_grad itself"
            )
        saved.append(kept)
        reads.update({(name, layer.number): count for name, count in layer.reads(kept).items()})
    program = layering.program
    memory = x.memory(program.returns, 0)
    outputs, dy = [], Gradients(1)
    for index in program.returned_leaves:
        known = program.tensors[index]
        outputs.append(known.on(memory[known.store]).clone())
        if known.requires_grad:
            slope = _slope(outputs[-1])
            dy.put(0, {index: dy.of(index, 0) + slope if index in dy else slope}, work, first=True)
    sums: dict[Group, Array] = {}
    for layer in reversed(layers):
        trainable = [group for group in layer.groups if group.role is Role.TRAINABLE]
        rooms = [np.empty((1, group.size), kind) for group in trainable]
        layer.backward(saved.pop(), dy, Pass([flats[group] for group in layer.groups], work, rooms))
        for group, room in zip(trainable, rooms, strict=True):
            sums[group] = np.add(sums[group], room, dtype=kind) if group in sums else room
    if ledger.total:
        raise Mismatch(
            f"a gradient of {ledger.total:,} B is of what no layer has made, as of an input after requires_grad_(), "
            f"and nobody would take it. Let no tensor of the forward require gradients by itself"
        )
    grads: dict[str, torch.Tensor] = {}
    for part in (part for layer in layers for part in layer.parts if part.group in sums):
        sizes = [prod(slot.shape) for slot in part.slots]
        pieces = view(sums[part.group][0]).split(sizes)
        grads.update({slot.name: piece.view(slot.shape) for slot, piece in zip(part.slots, pieces, strict=True)})
    return LayerByLayer(outputs, grads, reads)


def read_again(found: LayerByLayer, layering: Layering) -> list[tuple[int, int, str]]:
    """Calls to join: where layers share a parameter that one but the last reads more than once.

    Their gradients would be added in another order than torch adds them.
    """
    joined = []
    for name in dict.fromkeys(name for name, _ in found.reads):
        users = sorted(number for other, number in found.reads if other == name)
        if len(users) > 1 and any(found.reads[name, number] > 1 for number in users[:-1]):
            first, last = layering.layers[users[0]], layering.layers[users[-1]]
            why = f"{first.name} to {last.name} are one unit: they share {name}, and read it more than once each"
            joined.append((first.calls.start, last.calls.stop - 1, why))
    return joined


def compare(whole: tuple[list[torch.Tensor], dict[str, torch.Tensor | None]], found: LayerByLayer) -> None:
    """Mismatch, naming what differs, unless every bit is the same. No gradient is one of zeros."""
    outputs, grads = whole
    for number, (one, other) in enumerate(zip(outputs, found.outputs, strict=True)):
        if not _alike(one, other):
            raise Mismatch(f"its output{f' {number}' * (len(outputs) > 1)} is another than that of the whole")
    for name, grad in grads.items():
        other = found.grads[name]
        if not _alike(torch.zeros_like(other) if grad is None else grad, other):
            raise Mismatch(f"the gradient of {name} is another than that of the whole")


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same numbers, or none in the same places."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _attributes(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """What the modules have as attributes, tensors left out, and of collections what is in them."""
    return {
        (path, name): _seen(value)
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if not name.startswith("_") or name not in vars(torch.nn.Module())
    }


def _seen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, Mapping):
        return {key: id(each) for key, each in value.items()}
    if isinstance(value, Iterable) and isinstance(value, Sized):
        return [id(each) for each in value]
    return value
