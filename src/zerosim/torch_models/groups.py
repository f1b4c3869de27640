"""Which parameters and buffers share a flat buffer: those that the same layers use.

Owns the groups and their names. Must not know how layers are cut or run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerosim.layers import Group, Role
from zerosim.torch_models.layering import Layering, LayerPlan
from zerosim.torch_models.slots import Slot, local_names, slots_of
from zerosim.torch_models.units import numpy_dtype

_ROLES = list(Role)
_SUFFIX = {Role.TRAINABLE: "", Role.FROZEN: " frozen", Role.BUFFER: " buffers"}


@dataclass(frozen=True, eq=False)
class Part:
    """A group, and the parameters or buffers that it consists of, in the order of its shapes."""

    group: Group
    slots: tuple[Slot, ...]


@dataclass
class _Use:
    """By which layers something is used, each known by its units, and under whose names."""

    layers: set[tuple[str, ...]] = field(default_factory=set)
    names: dict[str, None] = field(default_factory=dict)


def grouped(layering: Layering, module: torch.nn.Module) -> list[list[Part]]:
    """The parts of each layer of ``module``, whose forward was recorded.

    A parameter that the forward never uses is refused with ValueError; a buffer goes to the first layer.
    """
    slots = slots_of(module)
    names = {
        path: [slots[id(own)].name for *_, own in local_names(module.get_submodule(path))] for path in _paths(layering)
    }
    uses = {slot.name: _Use() for slot in slots.values()}
    for layer in layering.layers:
        for name, owner in _used(layer, layering, names, type(module).__name__).items():
            uses[name].layers.add(_key(layer))
            uses[name].names.setdefault(owner)
    for slot in slots.values():
        if not uses[slot.name].layers:
            if slot.role is not Role.BUFFER:
                raise ValueError(
                    f"TorchModel(wrap): the forward pass never uses {slot.name}. Leave it out of the model, or match a "
                    f"module around it that is called."
                )
            uses[slot.name] = _Use({_key(layering.layers[0])}, {_home(slot.name, type(module).__name__): None})
    made: dict[Any, Part] = {}
    return [_parts(_key(layer), list(slots.values()), uses, made) for layer in layering.layers]


def _paths(layering: Layering) -> set[str]:
    return {unit.path for layer in layering.layers for unit in layer.units}


def _key(layer: LayerPlan) -> tuple[str, ...]:
    return tuple(unit.path for unit in layer.units)


def _home(name: str, root: str) -> str:
    return name.rpartition(".")[0] or root


def _used(layer: LayerPlan, layering: Layering, names: Mapping[str, Sequence[str]], root: str) -> dict[str, str]:
    """What a layer uses, by name, and who has it: the unit, or the module around the units."""
    used = {name: unit.name for unit in layer.units for name in names[unit.path]}
    for index in layer.slots:
        name = layering.program.slot(index).name
        used.setdefault(name, _home(name, root))
    for name in layer.assigns:
        used.setdefault(name, _home(name, root))
    return used


def _parts(key: tuple[str, ...], slots: Sequence[Slot], uses: Mapping[str, _Use], made: dict[Any, Part]) -> list[Part]:
    """The parts of a layer: of those that others have, too, the same as theirs."""
    apart: dict[Any, list[Slot]] = {}
    for slot in slots:
        if key in uses[slot.name].layers:
            among = tuple(sorted(uses[slot.name].layers))
            kind = str(slot.dtype) if slot.role is Role.BUFFER else ""
            # Own ones before tied ones: the layer's name is that of its own trainable parameters.
            apart.setdefault((_ROLES.index(slot.role), len(among), among, kind), []).append(slot)
    for which in sorted(apart):
        if which not in made:
            role, dtype = _ROLES[which[0]], numpy_dtype(which[3]) if which[3] else None
            title = " + ".join(dict.fromkeys(owner for slot in apart[which] for owner in uses[slot.name].names))
            title += _SUFFIX[role] + (f" {dtype}" if dtype else "")
            made[which] = Part(
                Group(title, tuple(slot.shape for slot in apart[which]), role, dtype), tuple(apart[which])
            )
    return [made[which] for which in sorted(apart)]
