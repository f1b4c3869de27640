"""Running a torch module with its units in other hands: what each is called with, and by whom it is fed.

Owns the interception of the units' forward. Must not know what is measured of a unit, nor the worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zerosim.torch_models.units import Unit

Forward = Callable[..., Any]
Intercept = Callable[[Unit, Forward, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def intercepted(module: torch.nn.Module, units: Sequence[Unit], call: Intercept) -> Iterator[None]:
    """Within the block, ``call(unit, forward, args, kwargs)`` answers wherever ``module`` calls one of its units."""
    patched = []
    try:
        for unit in units:
            if unit.container:
                continue
            target = module.get_submodule(unit.path)
            before = vars(target).get("forward")
            patched.append((target, before))
            target.forward = _answering(call, unit, target.forward)
        yield
    finally:
        for target, before in patched:
            if before is None:
                del target.forward
            else:
                target.forward = before


def _answering(call: Intercept, unit: Unit, forward: Forward) -> Forward:
    return lambda *args, **kwargs: call(unit, forward, args, kwargs)


def origins(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaf tensors that ``tensor`` was computed from and to which its gradient goes; itself, if it is one."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found, seen, todo = [], set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [following for following, _ in node.next_functions if following is not None]
    return found
