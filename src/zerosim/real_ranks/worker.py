"""A rank's part: train each scheme, and tell after every step what it holds, sent and received.

Owns the order of a rank's doings, and the fences around a step between which nothing but the
step itself can send. Knows nothing of what is expected of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from zerosim.checks import compare as checks
from zerosim.real_ranks import setup as agreed
from zerosim.real_ranks.fault_injection import Saboteur
from zerosim.real_ranks.messages import (
    Arrived,
    Board,
    Bye,
    Go,
    Handed,
    Hello,
    Job,
    Line,
    Message,
    Pulse,
    Ready,
    Stepped,
    Trouble,
)
from zerosim.real_ranks.meter import Counters, Kernel, Op, addresses, tcp_sockets
from zerosim.schemes import SCHEMES, Scheme
from zerosim.worlds import torch_ring
from zerosim.worlds.native import LocalCollectives
from zerosim.worlds.torch_ring import TorchRing


class Dismissed(Exception):
    """This rank was sent home before its part was done."""


def serve(line: Line, board: Board, rank: int) -> None:
    """Take part in one job after another, until the line is closed."""
    while True:
        try:
            job = line.receive()
        except EOFError:
            return
        assert isinstance(job, Job)
        store = torch_ring.file_store(Path(job.store), job.world)
        with contextlib.suppress(Dismissed):
            take_part(line, job, store, rank, board.slot(rank))


def take_part(line: Line, job: Job, store: Any, place: int, pulse: Pulse) -> Bye:
    """Do a rank's part in ``job``, and return how it was dismissed; ``place`` counts the ranks of this machine.

    Raises Dismissed if it was sent home early. Whatever else goes wrong is first told over the line.
    """
    settings = job.settings
    try:
        line.send(
            Hello(
                rank=job.rank, world=job.world, settings=settings,
                code=agreed.code_version(), versions=agreed.versions(),
                unfit=torch_ring.unfit(settings.backend, place),
            )
        )  # fmt: skip
        _expect(line, Go)
        known = tcp_sockets()
        group = torch_ring.process_group(settings.backend, store, job.rank, job.world, job.timeout, place)
        with group as device:
            saboteur = Saboteur(pulse, settings.fault, job.rank, job.world)
            part = _Part(line, job, TorchRing(job.rank, job.world, saboteur, device), saboteur)
            with contextlib.closing(part.prepare(known)) as part.kernel:
                for plan in agreed.plans(settings):
                    part.run(plan)
                return _expect(line, Bye)
    except Dismissed:
        raise
    except Exception as error:
        with contextlib.suppress(OSError):
            line.send(Trouble(text=f"{type(error).__name__}: {error}"))
        raise


M = TypeVar("M", bound=Message)


def _expect(line: Line, kind: type[M]) -> M:
    """The next message, which must be of that kind."""
    message = line.receive()
    if isinstance(message, Bye) and kind is not Bye:
        raise Dismissed(message.text)
    assert isinstance(message, kind), message
    return message


class _Part:
    """What a rank carries from run to run."""

    kernel: Kernel

    def __init__(self, line: Line, job: Job, ring: TorchRing, saboteur: Saboteur) -> None:
        self._line, self._job, self._ring, self._saboteur = line, job, ring, saboteur
        self._model = agreed.model(job.settings)
        self._batches = [[batch[job.rank]] for batch in agreed.data(job.settings)]
        self._process = psutil.Process()

    def prepare(self, known: set[int]) -> Kernel:
        """Make the first steps, in which libraries read files and threads start; find the sockets and the order."""
        settings = self._job.settings
        for collectives in settings.collectives:
            for stage in SCHEMES:
                plan = agreed.Plan(collectives, settings.precisions[0], stage)
                self._scheme(plan).step(self._batches[0])
        order = self._order()
        fds = tcp_sockets() - known
        kernel = Kernel(fds)
        self._line.send(Ready(order=order, unmeasured=kernel.unmeasured, addresses=addresses(fds)))
        return kernel

    def _scheme(self, plan: agreed.Plan) -> Scheme:
        options = agreed.options(self._job.settings, plan)
        scheme: Scheme = plan.stage(self._model, self._job.world, ring=self._ring, **options)
        return scheme

    def _order(self) -> str:
        """Whether the library's all-reduce sums in the ring's order."""
        drawn = agreed.probe(self._job.world)
        mine = drawn[self._job.rank : self._job.rank + 1].copy()
        self._ring.all_reduce(mine)
        LocalCollectives(self._job.world).all_reduce(drawn)
        return "ring" if np.array_equal(checks.bits(mine[0]), checks.bits(drawn[0])) else "other"

    def run(self, plan: agreed.Plan) -> None:
        """One scheme, step by step.

        A step begins when all have read their counters, and they are read again when all have
        ended it: what a rank's neighbours still owe it would be missing before, and what they
        send ahead for the next step would be counted after.
        """
        scheme = self._scheme(plan)
        for step, batch in enumerate(self._batches, start=1):
            _expect(self._line, Go)
            self._saboteur.step(step)
            self._ring.handed.clear()
            before = self.kernel.read()
            self._fence()
            scheme.step(batch)
            self._saboteur.flip(scheme, step)
            self._fence()
            self._line.send(self._told(scheme, self.kernel.read().since(before)))

    def _fence(self) -> None:
        self._line.send(Arrived())
        _expect(self._line, Go)

    def _told(self, scheme: Scheme, counted: Counters) -> Stepped:
        report = scheme.reports[-1]
        return Stepped(
            loss=report.loss,
            states={
                str(band): [bucket.states[band].tobytes() for bucket in scheme.buckets]
                for band in scheme.states
                if band in checks.COMPARED
            },
            traffic=agreed.booked(report, 0),
            handed=_handed(self._ring.handed),
            written=counted.written,
            tcp_sent=counted.tcp_sent,
            tcp_received=counted.tcp_received,
            resident=dict(report.resident),
            peak=dict(report.peak.by_band),
            rss=self._process.memory_info().rss,
            seconds={str(phase): seconds for phase, seconds in report.seconds.items()},
        )


def _handed(calls: Counter[tuple[Op, int]]) -> list[Handed]:
    return [Handed(str(op), nbytes, times) for (op, nbytes), times in calls.items()]
