"""Running one layer of a recorded forward on given memory: the same on values and without any.

Owns how a layer's tensors are laid on memory, and which of them autograd starts from. Must not
know ranks, ledgers, or where the memory comes from.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from zerosim.torch_models.copies import bound
from zerosim.torch_models.layering import LayerPlan
from zerosim.torch_models.program import Program, run
from zerosim.torch_models.slots import local_names, slots_of
from zerosim.torch_models.units import Unit


class Executor:
    """Runs layers of a program; ``module`` is what its units are called on, whatever its parameters hold."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._attributes = {
            (path, name): value
            for path, each in module.named_modules()
            for name, value in vars(each).items()
            if isinstance(value, torch.Tensor)
        }
        self._names = slots_of(module)
        self._places: dict[str, list[tuple[str, str]]] = {}  # by a unit's path: each name there, and the slot's

    def run(
        self, program: Program, layer: LayerPlan, memory: Mapping[int, torch.Tensor], own: dict[str, torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        """What comes in, as leaves; what goes out, as computed from them; and the buffers that were assigned anew.

        ``memory`` has a tensor for the memory of everything that comes in, ``own`` the layer's
        parameters and buffers by name. RuntimeError if something is written to that was not when
        the forward was recorded.
        """
        leaves: dict[int, torch.Tensor] = {}
        for index in (*layer.inputs, *layer.ins):
            known = program.tensors[index]
            leaves[index] = known.on(memory[known.store]).requires_grad_(known.requires_grad)
        read_outside = {program.slot(index).name: index for index in layer.slots}
        values = leaves | {index: own[name] for name, index in read_outside.items()}
        for index in layer.constants:
            known = program.tensors[index]
            values[index] = known.on(program.stores[known.store].constant)
        assigned: dict[str, torch.Tensor] = {}

        def call(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            module = self._module.get_submodule(unit.path)
            places = self._placed(unit.path, module)
            with bound(module, {name: own[slot] for name, slot in places}) as anew:
                answer = module(*args, **kwargs)
            for name, slot in places:
                if name in anew:
                    own[slot] = assigned[slot] = anew[name].detach()
                    if slot in read_outside:
                        values[read_outside[slot]] = own[slot]
            return answer

        versions: list[tuple[Any, torch.Tensor, int]] = [
            (name, tensor, tensor._version) for name, tensor in (*leaves.items(), *own.items())
        ]
        with torch.enable_grad():
            run(layer.ops, values, call)
        for name, tensor, version in versions:
            if tensor._version != version and (isinstance(name, int) or tensor.requires_grad):
                raise overwritten(layer.name, "" if isinstance(name, int) else name)
        for name, index in layer.assigns.items():
            assigned[name] = values[index]
        return leaves, {index: values[index] for index in layer.outs}, assigned

    def constants(self, program: Program, layer: LayerPlan) -> dict[Hashable, torch.Tensor]:
        """Tensors that are there whatever happens, and are never kept: a module's own that are no buffers, say."""
        found: dict[Hashable, torch.Tensor] = {("attribute", *key): each for key, each in self._attributes.items()}
        for index in layer.constants:
            number = program.tensors[index].store
            found["memory", number] = program.stores[number].constant
        return found

    def _placed(self, path: str, module: torch.nn.Module) -> list[tuple[str, str]]:
        if path not in self._places:
            self._places[path] = [(name, self._names[id(own)].name) for name, *_, own in local_names(module)]
        return self._places[path]


def overwritten(layer: str, parameter: str) -> RuntimeError:
    """The error that says that a layer has written to a parameter, or, if there is none, to what it was given."""
    if parameter:
        return RuntimeError(
            f"TorchModel: {layer} overwrites its parameter {parameter}, which would be lost: it computes with a copy, "
            f"and only the optimizer writes to the original. Change parameters out of place, as in "
            f"torch.nn.utils.parametrizations."
        )
    return RuntimeError(
        f"TorchModel: {layer} overwrites what it is given, as it did not when the model was made: that belongs to the "
        f"layer before it. Use the out-of-place form of the operation."
    )
