"""Copies of a torch module, with values or without, and running one with other tensors in the place of its own.

Owns what a copy takes over, and that a run leaves a module as it was. Must not know units, ranks or ledgers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from zerosim.torch_models.slots import local_names

Convert = Callable[[torch.Tensor], torch.Tensor]


def with_values(module: torch.nn.Module, dtype: Any) -> torch.nn.Module:
    """A copy with the same values, parameters in ``dtype``."""
    return _copied(module, lambda tensor: tensor.detach().to(dtype, copy=True), _clone, _clone)


def without_states(module: torch.nn.Module, dtype: Any) -> torch.nn.Module:
    """A copy whose parameters and buffers have no values, so that whatever reads one that it was not given fails."""
    return _copied(module, lambda tensor: to_meta(tensor, dtype), lambda tensor: tensor.to("meta"), _clone)


def on_meta(module: torch.nn.Module, dtype: Any) -> torch.nn.Module:
    """A copy on the meta device, parameters in ``dtype``, all else in its own. Nothing is allocated."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return to_meta(tensor, tensor.dtype)

    return _copied(module, lambda tensor: to_meta(tensor, dtype), other, other)


def to_meta(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    """A tensor like this one on the meta device, in ``dtype`` if it is of floating point."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device="meta")


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _copied(module: torch.nn.Module, parameter: Convert, buffer: Convert, other: Convert) -> torch.nn.Module:
    memo: dict[int, Any] = {}
    for each in module.modules():
        for own in each.parameters(recurse=False):
            memo[id(own)] = torch.nn.Parameter(parameter(own), requires_grad=own.requires_grad)
        for own in each.buffers(recurse=False):
            memo.setdefault(id(own), buffer(own))
    for each in module.modules():
        for own in vars(each).values():
            if isinstance(own, torch.Tensor):
                memo.setdefault(id(own), other(own))
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ValueError(
            f"TorchModel(module): {type(module).__name__} cannot be copied ({type(error).__name__}: {error}). Build it "
            f"anew without what copy.deepcopy cannot copy, within torch.device('meta') if only measure() is wanted."
        ) from error


@contextmanager
def bound(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Within the block ``module`` computes with these parameters and buffers, by all the names it has for them.

    Gives a mapping, filled when the block ends, of the buffers that were assigned anew. Whatever
    else the module sets as attributes is taken back, so that no tensor stays with it.
    """
    places = [(name, owner, own) for name, owner, own, _ in local_names(module)]
    before = [(each, dict(vars(each)), dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    assigned: dict[str, torch.Tensor] = {}
    for name, owner, own in places:
        (owner._parameters if own in owner._parameters else owner._buffers)[own] = tensors[name]
    for each in module.modules():
        _flatten_weights(each)
    try:
        yield assigned
        for name, owner, own in places:
            now = owner._parameters.get(own, owner._buffers.get(own))
            if now is not tensors[name]:
                if now is None or own in owner._parameters or now.shape != tensors[name].shape:
                    raise RuntimeError(
                        f"TorchModel: the forward pass replaces {name} with something else, which would be lost. "
                        f"Compute with a tensor beside it, or write to a buffer of the same shape."
                    )
                assigned[name] = now
    finally:
        for each, attributes, parameters, buffers in before:
            vars(each).clear()
            vars(each).update(attributes)
            each._parameters.clear()
            each._parameters.update(parameters)
            each._buffers.clear()
            each._buffers.update(buffers)
            _flatten_weights(each)


def _flatten_weights(module: torch.nn.Module) -> None:
    """Recurrent layers keep a second list of their parameters."""
    if isinstance(module, torch.nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
