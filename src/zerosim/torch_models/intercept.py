"""Running a torch module with its units in other hands: what each is called with, and by whom it is fed.

Owns the interception of the units' forward and the copy of a module on the meta device. Must
not know what is measured of a unit, nor the worlds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

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


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and named arguments that ``inputs`` stands for: a tuple, a mapping, or one alone."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or outputs, in order."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with ``function`` of each tensor in its place."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def to_meta(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    """A tensor like this one on the meta device, in ``dtype`` if it is of floating point."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device="meta")


def on_meta(module: torch.nn.Module, dtype: Any) -> torch.nn.Module:
    """A copy of the module without values: parameters in ``dtype``, all else in its own. Nothing is allocated."""
    memo: dict[int, Any] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            memo[id(parameter)] = torch.nn.Parameter(to_meta(parameter, dtype), requires_grad=parameter.requires_grad)
        for other in (*each.buffers(recurse=False), *vars(each).values()):
            if isinstance(other, torch.Tensor):
                memo[id(other)] = to_meta(other, other.dtype)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ValueError(
            f"measure(module): {type(module).__name__} cannot be copied to the meta device ({error}). Build it anew "
            f"within torch.device('meta') and pass that, without what copy.deepcopy cannot copy."
        ) from error


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
