"""Running a torch module with the calls of some of its modules in other hands.

Owns the interception, hooks included, and how arguments are given. Must not know what is done with the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

Run = Callable[..., Any]
T = TypeVar("T")


@contextmanager
def intercepted(
    modules: Sequence[tuple[T, torch.nn.Module]], call: Callable[[T, Run, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Within the block ``call(which, run, args, kwargs)`` answers wherever one of the modules is called.

    ``run`` is what would have been called, with the module's hooks.
    """
    patched = []
    try:
        for which, module in modules:
            patched.append((module, module._compiled_call_impl))
            module._compiled_call_impl = _answering(call, which, module._call_impl)
        yield
    finally:
        for module, before in patched:
            module._compiled_call_impl = before


def _answering(call: Callable[..., Any], which: T, run: Run) -> Run:
    return lambda *args, **kwargs: call(which, run, args, kwargs)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and named arguments that ``inputs`` stands for: a tuple, a mapping, or one alone."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with ``function`` of each tensor in its place."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
