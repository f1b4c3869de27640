"""Running a torch module with the calls of some of its modules in other hands, their hooks included.

Owns who answers a call. Must not know what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Run = Callable[..., Any]
T = TypeVar("T")


@contextmanager
def answered(
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
