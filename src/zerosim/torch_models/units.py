"""Which modules of a torch model are units, and which parameters and buffers each has.

Owns the wrap rule and the grouping of parameters: tied, frozen, and buffers. Must not know
how a unit is run, nor what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zerosim.bands import DType
from zerosim.layers import Group, Role

Wrap = Any
"""A module class, several of them, or a predicate on modules."""


@dataclass(frozen=True, eq=False)
class Part:
    """One group of a unit: ``names`` say where in the unit's module its tensors are, in the order of its shapes."""

    group: Group
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is gathered and reduced as a whole, at ``path`` within the model.

    ``matched`` says that the wrap rule chose it; ``container`` that it isn't called as a whole:
    it stands for what a module that contains units holds itself.
    """

    name: str
    path: str
    matched: bool
    container: bool
    parts: tuple[Part, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(part.group for part in self.parts)


def partition(module: torch.nn.Module, wrap: Wrap, whole: Collection[str] = ()) -> list[Unit]:
    """The units of ``module``, in the order in which it lists them.

    The outermost modules that ``wrap`` matches or whose paths are in ``whole``, and of what
    remains the highest modules that contain none of these. What a module that does contain some holds itself
    becomes a unit named after it. ValueError if nothing matches, TypeError for something else than a rule.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"partition(module): a torch.nn.Module is needed; got {module!r}.")
    rule = _rule(wrap)
    chosen = {id(each) for each in module.modules() if rule(each)}
    if not chosen:
        kinds = dict.fromkeys(type(each).__name__ for each in module.modules())
        raise ValueError(
            f"partition(wrap): {wrap!r} matches no module of {type(module).__name__}, so there would be no units. "
            f"Pass the class of its repeated blocks; its modules are {', '.join(kinds)}."
        )
    chosen |= {id(module.get_submodule(path)) for path in whole}
    found = list(_walk(module, "", chosen, set()))
    owned = [(path, each, kind, list(_tensors(each, recurse=kind != "container"))) for path, each, kind in found]
    names = [path or type(module).__name__ for path, *_ in owned]
    parts = _parts(names, [tensors for *_, tensors in owned])
    return [
        Unit(name, path, kind == "matched", kind == "container", parts[index])
        for index, (name, (path, _, kind, _)) in enumerate(zip(names, owned, strict=True))
    ]


def blocks(module: torch.nn.Module) -> tuple[type[torch.nn.Module], ...]:
    """The rule where none is given, as classes: what its makers say must not be split; or what stands in a
    ModuleList; or the module's own parts."""
    names = {name for each in module.modules() for name in getattr(each, "_no_split_modules", None) or ()}
    kinds = {type(each) for each in module.modules() if type(each).__name__ in names}
    if kinds:
        return tuple(sorted(kinds, key=lambda kind: kind.__name__))
    listed = [child for each in module.modules() if isinstance(each, torch.nn.ModuleList) for child in each]
    parts = [each for each in listed or module.children() if next(each.parameters(), None) is not None]
    return tuple(dict.fromkeys(type(each) for each in parts)) or (type(module),)


def numpy_dtype(dtype: Any) -> DType:
    """The NumPy dtype of the same name as a torch dtype."""
    return np.dtype(str(dtype).removeprefix("torch."))


def _rule(wrap: Wrap) -> Callable[[torch.nn.Module], bool]:
    kinds = tuple(wrap) if isinstance(wrap, Iterable) and not isinstance(wrap, (type, str)) else (wrap,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, torch.nn.Module) for kind in kinds):
        return lambda each: isinstance(each, kinds)
    if callable(wrap) and not isinstance(wrap, type):
        return lambda each: bool(wrap(each))
    raise TypeError(
        f"partition(wrap): a class of modules, several of them, or a function that is given a module and says "
        f"whether it is a unit; got {wrap!r}."
    )


def _walk(
    module: torch.nn.Module, path: str, chosen: set[int], seen: set[int]
) -> Iterator[tuple[str, torch.nn.Module, str]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if id(module) in chosen:
        yield path, module, "matched"
        return
    can_run = type(module).forward is not torch.nn.Module.forward  # a ModuleList, say, is never called
    if can_run and not any(id(each) in chosen for each in module.modules()):
        yield path, module, "rest"
        return
    if next(_tensors(module, recurse=False), None) is not None:
        yield path, module, "container"
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name, chosen, seen)


def _tensors(module: torch.nn.Module, recurse: bool) -> Iterator[tuple[str, torch.Tensor, Role]]:
    for name, parameter in module.named_parameters(recurse=recurse):
        if not parameter.is_floating_point():
            raise ValueError(
                f"partition(module): parameters are floating-point numbers; {name} of {type(module).__name__} is "
                f"{parameter.dtype}. Make it a buffer, or measure the model before it is quantised."
            )
        yield name, parameter, Role.TRAINABLE if parameter.requires_grad else Role.FROZEN
    for name, buffer in module.named_buffers(recurse=recurse):
        yield name, buffer, Role.BUFFER


def _parts(names: list[str], owned: list[list[tuple[str, torch.Tensor, Role]]]) -> list[tuple[Part, ...]]:
    """Parameters share a group that have the same owners and role; buffers need the same dtype, too."""
    owners: dict[int, list[int]] = {}
    for index, tensors in enumerate(owned):
        for _, tensor, _ in tensors:
            owners.setdefault(id(tensor), []).append(index)
    made: dict[Any, Group] = {}
    parts: list[tuple[Part, ...]] = []
    order = list(Role)
    for index, tensors in enumerate(owned):
        apart: dict[Any, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor, role in tensors:
            among = tuple(owners[id(tensor)])
            # Own ones before tied ones: the unit's name is that of its own trainable parameters.
            key = (order.index(role), len(among), among, str(tensor.dtype) if role is Role.BUFFER else "")
            apart.setdefault(key, []).append((name, tensor))
        unit_parts = []
        for key in sorted(apart):
            role, among, dtype = order[key[0]], key[2], key[3]
            first = among[0] == index
            # Tied tensors have other names elsewhere, but one order: that of the first owner.
            ranking = {id(tensor): place for place, (_, tensor, _) in enumerate(owned[among[0]])}
            members = sorted(apart[key], key=lambda member: ranking[id(member[1])])
            if first:
                made[key] = Group(
                    " + ".join(names[owner] for owner in among)
                    + {Role.TRAINABLE: "", Role.FROZEN: " frozen", Role.BUFFER: f" buffers {dtype[6:]}"}[role],
                    tuple(tuple(tensor.shape) for _, tensor in members),
                    role,
                    numpy_dtype(dtype) if dtype else None,
                )
            unit_parts.append(
                Part(made[key], tuple(name for name, _ in members), tuple(tensor for _, tensor in members))
            )
        parts.append(tuple(unit_parts))
    return parts
