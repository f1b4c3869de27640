"""Which calls of units are alike, so that one is measured and stands for the others.

Owns the comparison: two modules are alike if they are of the same classes with parameters, buffers
and attributes that are the same but for values that no shape depends on; two calls are if
their modules are and what they are called with is. Must not know what is measured.

What is left out: a layer's own number, which forwards use to find their place in a cache, and the values of
floating-point attributes other than zero (rates of dropout, scales).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_NUMBER = re.compile(r"_?(layer|block)?_?(idx|index|id|number|num)")  # an attribute of a layer's
_GIVEN_NUMBER = re.compile(r"(layer|block)_?(idx|index|id|number|num)")  # what it is called with
_OWN = frozenset(vars(torch.nn.Module())) | {
    "forward"
}  # torch's own, and what stands in a unit's place while it is run
_PLAIN = (str, bytes, bool, type(None), torch.dtype, torch.device, type)


class Alike:
    """Keys of calls: two calls are alike if their keys are equal. One object for one run."""

    def __init__(self) -> None:
        # By id, and the object itself too, so that no other takes its id.
        self._modules: dict[int, tuple[torch.nn.Module, Hashable]] = {}
        self._objects: dict[int, tuple[Any, Hashable]] = {}

    def key(self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Hashable:
        """What a call of ``module`` is alike to: calls with equal keys."""
        named = [*zip_longest(_parameters(type(module).forward)[: len(args)], args, fillvalue=""), *kwargs.items()]
        leaves, tree = tree_flatten(
            [(name, None if _is_number(_GIVEN_NUMBER, name, value) else value) for name, value in named]
        )
        order: dict[int, int] = {}
        parts = tuple(
            (order.setdefault(id(leaf), len(order)), *_tensor(leaf))
            if isinstance(leaf, torch.Tensor)
            else self._value(leaf)
            for leaf in leaves
        )
        return self._module(module), repr(tree), parts

    def _module(self, module: torch.nn.Module) -> Hashable:
        if id(module) not in self._modules:
            key = (
                type(module),
                tuple((name, *_tensor(each)) for name, each in module._parameters.items() if each is not None),
                tuple((name, *_tensor(each)) for name, each in module._buffers.items() if each is not None),
                tuple(
                    (name, self._value(value))
                    for name, value in vars(module).items()
                    if name not in _OWN and not _is_number(_NUMBER, name, value)
                ),
                tuple((name, self._module(each)) for name, each in module._modules.items() if each is not None),
            )
            self._modules[id(module)] = module, key
        return self._modules[id(module)][1]

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, int):
            return "int", value
        if isinstance(value, float):
            return "float", value == 0
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(self._value, value))
        if isinstance(value, dict):
            return "dict", tuple((self._value(name), self._value(each)) for name, each in value.items())
        if id(value) not in self._objects:
            self._objects[id(value)] = value, self._object(value)
        return self._objects[id(value)][1]

    def _object(self, value: Any) -> Hashable:
        """A configuration is what it says, whichever copy it is, and a function with arguments filled in is what it
        calls and with what; anything else is itself and no other."""
        if type(value) is partial:
            return partial, self._value(value.func), self._value(value.args), self._value(value.keywords)
        described = getattr(value, "to_dict", None)
        return (type(value), repr(described())) if callable(described) else id(value)


def _is_number(names: re.Pattern[str], name: str, value: Any) -> bool:
    """Whether this is which of the layers one is."""
    return isinstance(value, int) and names.fullmatch(name) is not None


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """What the positional arguments of a class's forward are called."""
    return tuple(signature(forward).parameters)[1:]


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad
