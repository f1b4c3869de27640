"""What an operation gives without values, asked of torch once for the same shapes and then known.

Owns the memory of these answers. On the meta device an operation's result is worked out in Python, which takes a
hundred times as long as making it; a loop over tokens asks the same thing at every token. Only what makes new
memory of its own is remembered: never a view, and nothing that is written in place. Must not know units, nor what
is measured.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerosim.torch_models.trees import operands

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a tensor that has its memory to itself."""


class _NotKnown(Exception):
    """An argument by which no two calls can be told to be alike."""


class Answers(TorchDispatchMode):  # type: ignore[misc]
    """Within the block, an operation on the same shapes as one before gives what that gave. One object for one run."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Hashable, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to exclude it from being compiled would load the compiler: seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _makes_new(func):
            return func(*args, **kwargs)
        try:
            key = func, *map(_described, args), *((name, _described(value)) for name, value in kwargs.items())
        except _NotKnown:
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is None:
            out = func(*args, **kwargs)
            self._known[key] = _layouts(out, (*args, *kwargs.values()))
            return out
        if known is False:  # nothing that can be made again
            return func(*args, **kwargs)
        if type(known) is _One:
            return _made(known.layout)
        return tuple(None if layout is None else _made(layout) for layout in known)


class _One:
    """The answer of an operation that gives one tensor, and no tuple of one."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        self.layout = layout


@cache
def _makes_new(func: Any) -> bool:
    """Whether by its schema an operation writes to nothing, and gives tensors that share no memory with others."""
    schema = func._schema
    plain = all(str(each.type) in ("Tensor", "Optional[Tensor]") for each in schema.returns)
    parts = (*schema.arguments, *schema.returns)
    return bool(schema.returns) and plain and all(each.alias_info is None for each in parts)


def _described(value: Any) -> Hashable:
    """All of an argument that a result's layout may depend on, told apart by type too, as 1 and 1.0 are."""
    kind = type(value)
    if kind in _TENSORS:
        if value.device.type != "meta" or value.dtype.is_complex or value.layout is not torch.strided:
            raise _NotKnown
        return value.shape, value.stride(), value.dtype
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return kind, *map(_described, value)
    raise _NotKnown


def _layouts(out: Any, given: tuple[Any, ...]) -> Any:
    """How the results lie, False if one of them cannot be made again by that alone."""
    several = type(out) is tuple
    layouts: list[Layout | None] = []
    storages = {each.untyped_storage()._cdata for each in operands(given)}
    for each in out if several else (out,):
        if each is None:
            layouts.append(None)
            continue
        if type(each) is not torch.Tensor or each.device.type != "meta" or each.dtype.is_complex:
            return False
        layout = tuple(each.shape), each.stride(), each.dtype
        storage = each.untyped_storage()
        own = storage._cdata not in storages and each.storage_offset() == 0
        if not own or storage.nbytes() != _made(layout).untyped_storage().nbytes():
            return False
        storages.add(storage._cdata)
        layouts.append(layout)
    return tuple(layouts) if several else _One(layouts[0]) if layouts[0] is not None else False


def _made(layout: Layout) -> torch.Tensor:
    """A tensor that lies so, in memory of its own."""
    size, strides, dtype = layout
    return torch.empty_strided(size, strides, dtype=dtype, device="meta")
