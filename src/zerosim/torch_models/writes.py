"""Whose memory each operation of a forward writes to, seen below autograd, where nothing is hidden.

Owns the mode that watches. Must not know what the operations are for.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerosim.torch_models.program import Write
from zerosim.torch_models.trees import tensors


class Writes(TorchDispatchMode):  # type: ignore[misc]
    """Which operations write to memory that they have not made themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, int] = {}  # stores that were there before, by the storage
        self.now = self.call = -1  # the operation, and how many units have been called
        self.seen: list[Write] = []
        self.trace: list[Any] = []  # of the operation: what was done, and the shapes and dtypes that came of it
        self._made: dict[int, tuple[int, int, Any]] = {}  # by the storage: when, as above, and a reference to it
        self._writing: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to exclude it from being compiled would load the compiler: seconds."""
        return False

    def wrote(self, op: int) -> bool:
        """Whether the operation wrote to anything that it had not made."""
        return op in self._writing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in tensors(given):
                    self._write(tensor)
        out = func(*args, **kwargs)
        made = tensors(out)
        self.trace.append((func, *((tensor.shape, tensor.dtype) for tensor in made)))
        for tensor in made:
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = key in self._made or key in self.given
            if not known and not any(storage is given.untyped_storage() for given in tensors((args, kwargs))):
                self._made[key] = self.now, self.call, weakref.ref(storage, partial(self._gone, key))
        return out

    def _gone(self, key: int, _: Any) -> None:
        self._made.pop(key, None)

    def _write(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        made, call, _ = self._made.get(key, (None, -1, None))
        if made == self.now:
            return
        self._writing.add(self.now)
        if made is None or call != self.call:
            self.seen.append(Write(self.now, self.given.get(key), made, tuple(tensor.shape)))
