"""Which modules of a torch model are units, and which parameters and buffers the model has.

Owns the wrap rule, the refusal of modules that cannot be trained here whatever their units are,
and ``Slot``, one parameter or buffer. Must not know how a unit is run, nor what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zerosim.bands import DType
from zerosim.layers import Role

Wrap = Any
"""A module class, several of them, or a predicate on modules."""


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter or buffer of a model, however many names it has; ``name`` is the first of them."""

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is gathered and reduced as a whole, at ``path`` within the model.

    ``matched`` says that the wrap rule chose it, or that it contains such modules.
    """

    name: str
    path: str
    matched: bool


def partition(module: torch.nn.Module, wrap: Wrap, whole: Collection[str] = ()) -> list[Unit]:
    """The units of ``module``, in the order in which it lists them.

    The outermost modules that ``wrap`` matches or whose paths are in ``whole``, and of what
    remains the highest modules that contain none of these. What a module that does contain some
    holds itself is no unit: it goes to those that use it. ValueError if nothing matches,
    TypeError for something else than a rule.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    >>> [unit.name for unit in partition(net, torch.nn.Linear)]
    ['0', '1', '2']
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
    return [Unit(path or type(module).__name__, path, matched) for path, matched in _walk(module, "", chosen, set())]


def blocks(module: torch.nn.Module) -> tuple[type[torch.nn.Module], ...]:
    """The rule where none is given: the classes of what stands in a ModuleList, or else of the module's own parts."""
    listed = [child for each in module.modules() if isinstance(each, torch.nn.ModuleList) for child in each]
    parts = [each for each in listed or module.children() if next(each.parameters(), None) is not None]
    return tuple(dict.fromkeys(type(each) for each in parts)) or (type(module),)


def slots_of(module: torch.nn.Module) -> dict[int, Slot]:
    """Every parameter and buffer, by the id of its tensor. ValueError for one that cannot be trained here."""
    slots: dict[int, Slot] = {}
    for name, parameter in module.named_parameters():
        _check(name, parameter)
        role = Role.TRAINABLE if parameter.requires_grad else Role.FROZEN
        slots[id(parameter)] = Slot(name, role, tuple(parameter.shape), parameter.dtype)
    for name, buffer in module.named_buffers():
        slots.setdefault(id(buffer), Slot(name, Role.BUFFER, tuple(buffer.shape), buffer.dtype))
    return slots


def local_names(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """All parameters and buffers under all their names: the name, the module that has it, as what, and the tensor."""
    for path, each in module.named_modules(remove_duplicate=False):
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, each, name, tensor


def numpy_dtype(dtype: Any) -> DType:
    """The NumPy dtype of the same name as a torch dtype."""
    return np.dtype(str(dtype).removeprefix("torch."))


def _check(name: str, parameter: torch.Tensor) -> None:
    if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError(
            f"partition(module): {name} has no shape yet, as its module is lazy. Call the module once on an example, "
            f"module(x), before you pass it."
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"partition(module): parameters are floating-point numbers; {name} is {parameter.dtype}. Make it a "
            f"buffer, or measure the model before it is quantised."
        )


def check_hooks(module: torch.nn.Module) -> None:
    """Refuse hooks on parameters, which would see the gradients of copies, each of a part, and change nothing."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"TorchModel(module): {name} has a hook on its gradient (register_hook), which would be dropped: "
                f"gradients are those of every rank's own copies, layer by layer. Remove the hook; one on a tensor "
                f"that the forward computes takes effect."
            )


def check_dtypes(slots: Iterable[Slot], compute: Any) -> None:
    """Refuse parameters that are neither fp32 nor in the dtype of the arithmetic."""
    for slot in slots:
        if slot.role is not Role.BUFFER and slot.dtype not in (torch.float32, compute):
            short = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(slot.dtype)
            other = f", or compute={short!r}" if short else ""
            raise ValueError(
                f"TorchModel(module): {slot.name} is {slot.dtype}, and is computed with in {compute}, which would "
                f"train another model. Pass module.float(){other}."
            )


def _rule(wrap: Wrap) -> Callable[[torch.nn.Module], bool]:
    kinds: Sequence[Any] = tuple(wrap) if isinstance(wrap, Iterable) and not isinstance(wrap, (type, str)) else (wrap,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, torch.nn.Module) for kind in kinds):
        return lambda each: isinstance(each, tuple(kinds))
    if callable(wrap) and not isinstance(wrap, type):
        return lambda each: bool(wrap(each))
    raise TypeError(
        f"partition(wrap): a class of modules, several of them, or a function that is given a module and says "
        f"whether it is a unit; got {wrap!r}."
    )


def _walk(module: torch.nn.Module, path: str, chosen: set[int], seen: set[int]) -> Iterator[tuple[str, bool]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if id(module) in chosen:
        yield path, True
        return
    can_run = type(module).forward is not torch.nn.Module.forward  # a ModuleList, say, is never called
    if can_run and not any(id(each) in chosen for each in module.modules()):
        yield path, False
        return
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name, chosen, seen)
