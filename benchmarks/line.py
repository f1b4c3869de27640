"""Owns the line between the benchmark and a side of it, which lives in a process of its own.

A side is asked, a line at a time, on its standard input, and answers on its standard output:

    train JOB        ->  ready LIBRARY VERSION ...
    step K           ->  time SECONDS CPU LOSS ... LOSS   (of K steps: wall time, time of this process, each one's loss)

It ends when its input ends. It must not know what is trained.
"""

import contextlib
import gc
import importlib.metadata
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cases import Job

HERE = Path(__file__).parent
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
CLOCKS = ("wall", "cpu")
PATIENCE = 300.0  # seconds for one answer: a minute is the longest that any takes

Trainer = Callable[[int], Sequence[Any]]
"""Trains so many steps, to the end, and returns each one's loss: a number, or an array of the ranks' own."""


class SideFailed(RuntimeError):
    """A side ended, hung or spoke out of turn."""


def serve(build: Callable[[Job], contextlib.AbstractContextManager[Trainer]], *libraries: str) -> None:
    """Be a side: train whatever job is asked for, until no more is."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what a library prints is no answer
        versions = [word for library in libraries for word in (library, importlib.metadata.version(library))]
        with contextlib.ExitStack() as job:
            train: Trainer | None = None
            for request in sys.stdin:
                what, _, rest = request.strip().partition(" ")
                if what == "train":
                    train = None
                    job.close()  # and what it held, before the next is built
                    gc.collect()
                    train = job.enter_context(build(Job.decoded(rest)))
                    print("ready", *versions, file=answers)
                elif what == "step" and train is not None:
                    start, begun = time.perf_counter(), time.process_time()
                    losses = train(int(rest))
                    seconds, cpu = time.perf_counter() - start, time.process_time() - begun
                    print("time", seconds, cpu, *(float(np.mean(loss)) for loss in losses), file=answers)
                else:
                    raise ValueError(f"line: expected train JOB, and then step K; got {request!r}.")


class Side:
    """The benchmark's end: a process that trains, on one CPU if one is given, and with one thread per library."""

    def __init__(
        self, name: str, module: str, *, cpu: int | None = None, path: Sequence[Path] = (HERE,),
        variables: Mapping[str, str] | None = None, clock: str = "wall",
    ) -> None:  # fmt: skip
        self.name, self.clock = name, CLOCKS.index(clock)
        self.libraries: dict[str, str] = {}
        """Its libraries and which versions, once it is ready."""
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        with on_cpu(cpu):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints,
                text=True, bufsize=1, env=environment(path) | dict(variables or {}), start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train(self, job: Job) -> None:
        """Give up what it trained and build this, on the initial weights."""
        words = self._ask(f"train {job.encoded()}", "ready").split()
        self.libraries = dict(zip(words[::2], words[1::2], strict=True))

    def step(self, steps: int) -> tuple[float, list[float]]:
        """Train so many steps; the seconds of one, by the side's clock, and the loss of each."""
        wall, cpu, *losses = map(float, self._ask(f"step {steps}", "time").split())
        if len(losses) != steps:
            raise SideFailed(f"{self.name}: asked for {steps} steps, it answered with {len(losses)} losses.")
        return (wall, cpu)[self.clock] / steps, losses

    def close(self) -> None:
        """End the process, and whatever it has started."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._complaints.close()

    def _ask(self, request: str, expected: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(request, file=self._process.stdin, flush=True)
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(PATIENCE):
                    raise SideFailed(f"{self.name}: no answer to {request!r} in {PATIENCE:g} s.")
            answer = self._process.stdout.readline()
        what, _, rest = answer.strip().partition(" ")
        if what != expected:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)  # it complains after it has let go of the line
            self._complaints.seek(0)
            complaint = self._complaints.read().strip()[-2000:]
            raise SideFailed(f"{self.name}: to {request!r} it answered {answer!r}. It complained:\n{complaint}")
        return rest


def environment(path: Sequence[Path]) -> dict[str, str]:
    """For a process that has one thread per library and finds modules in these folders."""
    paths = [str(folder) for folder in path] + [os.environ.get("PYTHONPATH", "")]
    return os.environ | dict.fromkeys(THREADS, "1") | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextlib.contextmanager
def on_cpu(cpu: int | None) -> Iterator[None]:
    """Start processes that stay on one CPU, where the platform can pin (Linux)."""
    if cpu is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
