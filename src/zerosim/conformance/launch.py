"""Ranks to try one's own implementation on: N processes of this machine, in a gloo group, forked from this one.

Owns their group and their output, in a notebook as in a script; ``real_ranks.processes`` starts and ends them. Must
not know what they run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed

from zerosim.real_ranks.processes import Child, children

dist: Any = torch.distributed
LIMIT = 300.0  # seconds


class Ran(NamedTuple):
    """How the ranks ended: their exit codes, and what they printed, rank by rank; ``errors`` are their tracebacks."""

    codes: list[int]
    output: str
    errors: list[str]

    @property
    def holds(self) -> bool:
        """Whether all ended well."""
        return not any(self.codes)


def run_ranks(
    function: Callable[[int], Any], ranks: int = 4, *, timeout: float = LIMIT, show: bool = True
) -> Ran:  # fmt: skip
    """Call ``function(rank)`` on so many ranks, each a process of its own with a gloo group, and print what they print.

    A rank that raises, or exits with a code, ends with that; all are ended after ``timeout`` seconds. What the
    function needs may lie in a notebook: the processes are forked, which Windows cannot.

    >>> run_ranks(lambda rank: print("rank", rank), ranks=2, show=False).output
    'rank 0\\nrank 1\\n'
    """
    if not hasattr(os, "fork"):
        raise OSError("run_ranks: needs processes that can be forked, as on Linux and macOS. Use torchrun instead.")
    sys.stdout.flush()
    sys.stderr.flush()
    importlib.import_module("torch._dynamo")  # an optimizer does it at its first call, and here it is once for all
    gc.freeze()  # so that nobody who looks at all objects copies this process's
    try:
        with tempfile.TemporaryDirectory(prefix="zerosim-ranks-") as name:
            folder = Path(name)
            with children(ranks, lambda _, __, rank: _rank(function, rank, ranks, folder, timeout)) as born:
                codes = _wait(born, timeout)
            output = "".join((folder / f"out-{rank}").read_text(errors="replace") for rank in range(ranks))
            errors = [(folder / f"err-{rank}").read_text(errors="replace") for rank in range(ranks)]
    finally:
        gc.unfreeze()
    if show:
        print(output, end="")
        if any(codes) and not output and (first := next((text for text in errors if text), "")):
            print(first, end="")
    return Ran(codes, output, errors)


def _rank(function: Callable[[int], Any], rank: int, ranks: int, folder: Path, timeout: float) -> NoReturn:
    """What a rank does, and how it ends: with a code of its own, tidying up nothing of the parent's."""
    code = 1
    try:
        for stream, name in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, stream)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w", buffering=1, encoding="utf-8") for fd in (1, 2))
        code = _serve(function, rank, ranks, folder, timeout)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _serve(function: Callable[[int], Any], rank: int, ranks: int, folder: Path, timeout: float) -> int:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
        # A rank that ended while others still connect to each other would break their group.
        store.set(f"joined-{rank}", "")
        store.wait([f"joined-{each}" for each in range(ranks)])
        function(rank)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is, it is this rank's, and the others must hear of its end
        traceback.print_exc()
        return 1
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return 0


def _wait(born: list[Child], timeout: float) -> list[int]:
    """Their exit codes, negative for a signal; those that have not ended by then are killed."""
    until = time.monotonic() + timeout
    while any(child.status().alive for child in born):
        if time.monotonic() > until:
            for child in born:
                child.kill()
        time.sleep(0.01)
    return [child.code for child in born]
