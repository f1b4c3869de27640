"""Units one after another: the order in which a module calls them, and whether they chain.

Owns these rules, and that a module answers alike when it is called again. Must not know how a
unit's arithmetic is done, nor what it keeps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerosim.torch_models.intercept import intercepted, tensors
from zerosim.torch_models.units import Unit


@dataclass(frozen=True)
class Link:
    """One call of a unit: its module, its arguments (a tensor where x goes), and whether x has a gradient."""

    unit: Unit
    name: str
    module: torch.nn.Module
    args: Any
    kwargs: Any
    x_grad: bool


def chain(module: torch.nn.Module, units: Sequence[Unit], x: torch.Tensor) -> list[Link]:
    """The units in the order in which ``module`` calls them on ``x``, run once, on a copy.

    ValueError, saying which unit and what to do, if one takes or returns anything but one tensor,
    takes something else than the one before it returned, or is never called; or if the module
    holds parameters or buffers that belong to no unit.
    """
    for unit in units:
        if unit.container:
            raise ValueError(
                f"TorchModel(wrap): {unit.name} holds {_listed(unit)} itself and contains units, so it cannot be one "
                f"of a chain. Move them into a module of their own, or match {unit.name} as a whole."
            )
        for part in unit.parts:
            if wrong := [tensor.device for tensor in part.tensors if tensor.device.type != "cpu"]:
                raise ValueError(
                    f"TorchModel(module): computes on the CPU, with values; {unit.name} is on {wrong[0]}. Use "
                    f"module.to('cpu'), or measure() for a module without values."
                )
    links: list[Link] = []
    x = x.clone()  # the caller's own is not for the module to write to
    last: list[torch.Tensor] = [x]

    def call(unit: Unit, forward: Any, args: Any, kwargs: Any) -> Any:
        taken = tensors((args, kwargs))
        if len(taken) != 1 or taken[0] is not last[0]:
            raise ValueError(
                f"TorchModel(wrap): every unit takes what the one before it returned, and no other tensor; {unit.name} "
                f"is given {len(taken)} tensor{'s' * (len(taken) != 1)}"
                f"{'' if len(taken) != 1 else ', computed by something in between'}. Put what happens between "
                f"{links[-1].name if links else 'the input'} and {unit.name} into a module, or match one around both."
            )
        again = sum(link.unit is unit for link in links)
        name = f"{unit.name} (call {again + 1})" if again else unit.name
        links.append(Link(unit, name, module.get_submodule(unit.path), args, kwargs, taken[0].requires_grad))
        y = forward(*args, **kwargs)
        if not isinstance(y, torch.Tensor):
            raise ValueError(
                f"TorchModel(wrap): every unit returns one tensor; {unit.name} returned {type(y).__name__}. Match a "
                f"module around it that does."
            )
        last[0] = y
        return y

    run = copy.deepcopy(module)
    with torch.enable_grad(), intercepted(run, units, call):
        output = run(x)
    if output is not last[0]:
        raise ValueError(
            f"TorchModel(wrap): the module must return what its last unit, {links[-1].name if links else 'none'}, "
            f"returned; got {type(output).__name__} computed by something after it. Put that into a module."
        )
    called = {link.unit for link in links}
    for unit in units:
        if unit.parts and unit not in called:
            raise ValueError(
                f"TorchModel(wrap): the forward pass never calls {unit.name}, though it has {_listed(unit)}. Match a "
                f"module around it that is called, or leave it out of the model."
            )
    if not output.requires_grad:
        raise ValueError("TorchModel(module): nothing that it returns depends on a trainable parameter.")
    return links


def check_repeatable(module: torch.nn.Module, x: torch.Tensor) -> None:
    """Refuse, with ValueError, a module that returns something else when it is called again on the same input.

    It is run twice, on a copy, with the same parameters and buffers: what it keeps in buffers each rank has for itself.
    """
    run = copy.deepcopy(module)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    outputs = []
    for _ in range(2):
        own = {name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in state.items()}
        with torch.enable_grad():
            outputs.append(torch.func.functional_call(run, own, (x.clone(),)).detach())
    if not torch.allclose(*outputs, rtol=0, atol=0, equal_nan=True):
        raise ValueError(
            f"TorchModel(module): {type(module).__name__} returns something else when it is called again on the same "
            f"input: it remembers its calls, and all ranks and stages would share what it remembers. Keep it in a "
            f"buffer, written in place."
        )


def _listed(unit: Unit) -> str:
    return ", ".join(name for part in unit.parts for name in part.names)
