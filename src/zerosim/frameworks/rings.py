"""Marks in the profiler's log that say which ranks a collective runs over, where that is not all of them.

The log has the tensors that torch's dispatcher was given, and not the process group. So the group's own methods,
through which Python asks for every collective, are made to leave a mark. What is asked for otherwise has none: DDP's
buckets, which travel over all ranks. Were a mark missing, the kernel's counts would not be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch.autograd.profiler as autograd
import torch.distributed

from zerosim.frameworks.profiler_log import RING

_METHODS = ("allreduce", "broadcast", "all_gather_single", "reduce_scatter_single")
dist: Any = torch.distributed


@contextmanager
def marked() -> Iterator[None]:
    """While the block lasts, mark every collective of some of the ranks."""
    with ExitStack() as stack:
        for name in _METHODS:
            method = getattr(dist.ProcessGroup, name)
            stack.enter_context(patch.object(dist.ProcessGroup, name, partialmethod(_asked_of, method)))
        yield


def _asked_of(group: Any, method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    if group.size() == dist.get_world_size():
        return method(group, *args, **keywords)
    with autograd.record_function(RING + " ".join(map(str, dist.get_process_group_ranks(group)))):
        return method(group, *args, **keywords)
