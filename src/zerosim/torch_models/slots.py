"""The parameters and buffers of a module, each once however many names it has, and which of them can be trained here.

Owns ``Slot`` and the refusals. Must not know units or layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerosim.layers import Role


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter or buffer of a model, however many names it has; ``name`` is the first of them."""

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: Any


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
            other = f", or to TorchModel compute={short!r}" if short else ""
            raise ValueError(
                f"TorchModel(module): {slot.name} is {slot.dtype}, and is computed with in {compute}, which would "
                f"train another model. Pass module.float(){other}."
            )
