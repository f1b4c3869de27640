"""Nested arguments and outputs, and the tensors in them.

Owns how a caller's inputs become arguments. Must not know modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and named arguments that ``inputs`` stands for: a tuple, a mapping, or one alone."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or outputs, in order."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def operands(given: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that an operation is given, or gives: nested in lists and tuples at most, so this is quick."""
    found: list[torch.Tensor] = []
    for each in given:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += operands(each)
    return found


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with ``function`` of each tensor in its place."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def sliced(tree: Any, rows: slice) -> Any:
    """The same tree with some rows of each tensor in its place."""
    return map_tensors(lambda tensor: tensor[rows], tree)
