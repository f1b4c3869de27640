"""What the interpreter has allocated, with what is explained taken off: memory has nowhere to hide from it.

Owns the account of one more run of a scheme: between any two operations each block that a line of this package has
made must be an array that the ranks were given, or of the batch; what is more, and comes to 4 KiB or more, is a failure
(64 KiB of the smallest blocks, such as numbers and the objects that hold arrays). It is the allocators' own account
(``tracemalloc``; NumPy's memory is in it), so it does not matter what a block is, nor who refers to it: a module's
global, a cache, a suspended generator, a thread. Freed arrays are explained, but a step that is like the one before it
finds all that it needs among them.
"""

from __future__ import annotations

import os
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.bands import Array
from zerosim.checks.perceptron import Given
from zerosim.checks.sanitizer import AT_REST, OUTSIDE, SanitizerComm, SanitizerMLP, SanitizerRing
from zerosim.records.results import Check, Failure, Settings
from zerosim.schemes import Stage

LEAST = 4096  # bytes that are worth a word
SMALL, MANY = 512, 65_536  # bytes of a block that is bookkeeping, and from how many of it on it is something else
FRAMES = 8  # of a block's traceback: how deep below this package's line NumPy may have made it
INDEX, OBJECT = 16, 64  # at most, of a number that is kept for each rank, in an array or a list, and of what has them
PILED = "bytes made though the step before freed as many"
WIDEST = 4  # bytes of an element
_ROOT = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Rooms whose memory is no rank's: the checks, the log and the reports, the lab, what is compiled once, the batch as it
# is laid out, and the ring's tables of indices.
_APART = tuple(
    _ROOT + name
    for name in ("checks/", "ledger.py", "counts.py", "lab/", "kernels/", "util/batches.py", "worlds/local.py")
)


def run(row: Stage, settings: Settings, ranks: int, batches: Sequence[Sequence[Given]]) -> list[Failure]:
    """Train ``row`` and report memory that nothing explains, by the line that made it, where it was seen first.

    It is looked at after every step, and within the last.
    """
    ring, model = SanitizerRing(ranks), SanitizerMLP(settings.widths, settings.model_seed)
    world, found = ring.world, dict[tuple[str, str], Failure]()
    step, small = 0, max(SMALL, INDEX * ranks + OBJECT)
    if ranks * max(fan_in * fan_out for fan_in, fan_out in pairwise(settings.widths)) * WIDEST < LEAST:
        return []  # nothing that the ranks have is so large

    def look(when: str) -> None:
        given = [] if world.told is None else [world.told]
        for line, nbytes in unexplained([*world.handed, *model.given, *given], small).items():
            found.setdefault((line, ""), _failure(row, ranks, step, f"{OUTSIDE}, made at {line}, {when}", nbytes))

    with _traced(), np.errstate(all="ignore"):
        options = replace(settings.options(), capacity=None, host_capacity=None)
        scheme = row(model, ranks, options, ring=ring, collectives=SanitizerComm)
        made = 0
        for step, batch in enumerate(batches, start=1):
            if step == len(batches):
                world.pause = model.pause = look
            scheme.step(batch)
            look(AT_REST)
            now = sum(array.nbytes for array in world.handed)
            if step > 1 and not settings.uneven and now > made:
                found.setdefault((PILED, ""), _failure(row, ranks, step, PILED, now - made))
            made = now
    return list(found.values())


def _failure(row: Stage, ranks: int, step: int, quantity: str, nbytes: int) -> Failure:
    return Failure(
        check=Check.AS_PREDICTED, scheme=row.name, ranks=ranks, step=step, rank=-1, quantity=quantity,
        measured=f"{nbytes:,}", expected="0",
    )  # fmt: skip


@contextmanager
def _traced() -> Iterator[None]:
    """Keep account for as long as the block lasts; of what is there before nothing is known."""
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start(FRAMES)
    try:
        yield
    finally:
        if mine:
            tracemalloc.stop()


def unexplained(known: Iterable[Array], least: int = SMALL) -> dict[str, int]:
    """Bytes by the line that made them, of which ``known`` arrays, each with memory of its own, are no part.

    Blocks of less than ``least`` bytes are bookkeeping.
    """
    explained = dict(Counter(array.nbytes for array in known))
    found, small = Counter[str](), Counter[str]()
    lines: dict[Any, str] = {}
    # The traces as they are kept, (domain, bytes, frames, ...), and read without a tuple or a list being made of any:
    # each object that is made is traced too, which takes 10 µs.
    traces = getattr(tracemalloc.take_snapshot().traces, "_traces")  # noqa: B009 - of no type
    for trace in traces:
        if (line := lines.get(trace[2])) is None:
            line = lines[trace[2]] = _line(trace[2])
        if not line:  # most of what is known was made there
            explained[trace[1]] = explained.get(trace[1], 0) - 1
    for trace in traces:
        if line := lines[trace[2]]:
            if explained.get(size := trace[1], 0) > 0:
                explained[size] -= 1
            else:
                (found if size >= least else small)[line] += size
    found.update({line: nbytes for line, nbytes in small.items() if nbytes >= MANY})
    return {line: nbytes for line, nbytes in found.items() if nbytes >= LEAST}


@lru_cache(maxsize=4096)
def _line(frames: Sequence[tuple[str, int]]) -> str:
    """The line of this package that made a block, in a room that is looked at; nothing if there is none."""
    for name, number in frames:  # the innermost first
        if name.startswith(_ROOT):
            return "" if name.startswith(_APART) else f"{name.removeprefix(_ROOT)}:{number}"
    return ""
