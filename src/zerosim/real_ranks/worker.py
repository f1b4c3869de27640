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
from zerosim.real_ranks.agreement import code_version, versions
from zerosim.real_ranks.cases import COLLECTIVES, Case, booked, cases, data, model, probe
from zerosim.real_ranks.connection import (
    Arrived,
    Bye,
    Connection,
    Go,
    Handed,
    Heartbeat,
    Heartbeats,
    Hello,
    Job,
    Message,
    Ready,
    Stepped,
    Trouble,
)
from zerosim.real_ranks.fault_injection import FaultInjector
from zerosim.real_ranks.meter import Counters, Kernel, addresses, tcp_sockets
from zerosim.schemes import Scheme
from zerosim.worlds import torch_ring
from zerosim.worlds.gloo import Op
from zerosim.worlds.native import LocalCollectives
from zerosim.worlds.torch_ring import TorchRing


class Dismissed(Exception):
    """This rank was sent home before its part was done."""


def serve(connection: Connection, heartbeats: Heartbeats, rank: int) -> None:
    """Take part in one job after another, until the connection is closed."""
    while True:
        try:
            job = connection.receive()
        except EOFError:
            return
        assert isinstance(job, Job)
        store = torch_ring.file_store(Path(job.store), job.world)
        with contextlib.suppress(Dismissed):
            take_part(connection, job, store, rank, heartbeats.slot(rank))


def take_part(connection: Connection, job: Job, store: Any, place: int, heartbeat: Heartbeat) -> Bye:
    """Do a rank's part in ``job``, and return how it was dismissed; ``place`` counts the ranks of this machine.

    Raises Dismissed if it was sent home early. Whatever else goes wrong is first told over the connection.
    """
    settings = job.settings
    try:
        connection.send(
            Hello(
                rank=job.rank, world=job.world, settings=settings,
                code=code_version(), versions=versions(),
                unfit=torch_ring.unfit(settings.backend, place),
            )
        )  # fmt: skip
        _expect(connection, Go)
        known = tcp_sockets()
        group = torch_ring.process_group(settings.backend, store, job.rank, job.world, job.timeout, place)
        with group as device:
            injector = FaultInjector(heartbeat, settings.fault, job.rank, job.world)
            part = _Part(connection, job, TorchRing(job.rank, job.world, injector, device), injector)
            with contextlib.closing(part.prepare(known)) as part.kernel:
                for case in cases(settings):
                    part.run(case)
                return _expect(connection, Bye)
    except Dismissed:
        raise
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(Trouble(text=f"{type(error).__name__}: {error}"))
        raise


M = TypeVar("M", bound=Message)


def _expect(connection: Connection, kind: type[M]) -> M:
    """The next message, which must be of that kind."""
    message = connection.receive()
    if isinstance(message, Bye) and kind is not Bye:
        raise Dismissed(message.text)
    assert isinstance(message, kind), message
    return message


class _Part:
    """What a rank carries from run to run."""

    kernel: Kernel

    def __init__(self, connection: Connection, job: Job, ring: TorchRing, injector: FaultInjector) -> None:
        self._connection, self._job, self._ring, self._injector = connection, job, ring, injector
        self._model = model(job.settings)
        self._batches = [[batch[job.rank]] for batch in data(job.settings)]
        self._process = psutil.Process()

    def prepare(self, known: set[int]) -> Kernel:
        """Make the first steps, in which libraries read files and threads start; find the sockets and the order."""
        settings = self._job.settings
        for collectives in settings.collectives:
            for row in settings.rows:
                case = Case(collectives, settings.precisions[0], row)
                self._scheme(case).step(self._batches[0])
        order = self._order()
        fds = tcp_sockets() - known
        kernel = Kernel(fds)
        self._connection.send(Ready(order=order, unmeasured=kernel.unmeasured, addresses=addresses(fds)))
        return kernel

    def _scheme(self, case: Case) -> Scheme:
        options = self._job.settings.options(case.precision)
        collectives = COLLECTIVES[case.collectives]
        return case.row(self._model, self._job.world, options, ring=self._ring, collectives=collectives)

    def _order(self) -> str:
        """Whether the library's all-reduce sums in the ring's order."""
        drawn = probe(self._job.world)
        mine = drawn[self._job.rank : self._job.rank + 1].copy()
        self._ring.all_reduce(mine)
        LocalCollectives(self._job.world).all_reduce(drawn)
        return "ring" if np.array_equal(checks.bits(mine[0]), checks.bits(drawn[0])) else "other"

    def run(self, case: Case) -> None:
        """One scheme, step by step.

        A step begins when all have read their counters, and they are read again when all have
        ended it: what a rank's neighbours still owe it would be missing before, and what they
        send ahead for the next step would be counted after.
        """
        scheme = self._scheme(case)
        for step, batch in enumerate(self._batches, start=1):
            _expect(self._connection, Go)
            self._injector.step(step)
            self._ring.handed.clear()
            before = self.kernel.read()
            self._fence()
            scheme.step(batch)
            self._injector.flip(scheme, step)
            self._fence()
            self._connection.send(self._told(scheme, self.kernel.read().since(before)))

    def _fence(self) -> None:
        self._connection.send(Arrived())
        _expect(self._connection, Go)

    def _told(self, scheme: Scheme, counted: Counters) -> Stepped:
        report = scheme.reports[-1]
        return Stepped(
            loss=report.loss,
            states={
                str(band): [bucket.states[band].tobytes() for bucket in scheme.buckets]
                for band in scheme.states
                if band in checks.COMPARED
            },
            traffic=booked(report, 0),
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
