"""A rank's part: train each case, and tell after every step what it holds, sent and received.

Owns the order of a rank's doings, and the fences around a step between which nothing but the
step itself can send. Knows nothing of what is expected of it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from zerosim.bands import Array
from zerosim.checks import compare as checks
from zerosim.layers import Model
from zerosim.real_ranks.agreement import code_version, versions
from zerosim.real_ranks.cases import COLLECTIVES, Case, States, booked, cases, probe, states
from zerosim.real_ranks.connection import (
    Arrived,
    Began,
    Bye,
    Connection,
    Go,
    Handed,
    Hello,
    Message,
    Ready,
    Stepped,
    Trouble,
)
from zerosim.real_ranks.fault_injection import FaultyRing
from zerosim.real_ranks.meter import Counters, Kernel, addresses, highest_memory, tcp_sockets
from zerosim.real_ranks.processes import Heartbeat
from zerosim.real_ranks.simulation import one_thread, threads
from zerosim.records.real_ranks import Settings
from zerosim.schemes import Scheme
from zerosim.worlds import torch_ring
from zerosim.worlds.gloo import Op
from zerosim.worlds.native import LocalCollectives


class Dismissed(Exception):
    """This rank was sent home before its part was done."""


class Task(NamedTuple):
    """What a rank is to do: take part as ``rank`` of ``world``, the ``place``-th on its machine.

    ``data`` has for each step the batch of every rank. An operation that waits for longer than ``timeout``
    seconds raises.
    """

    rank: int
    world: int
    place: int
    settings: Settings
    model: Model
    data: list[list[tuple[Array, Array]]]
    timeout: float
    interface: str | None


def take_part(connection: Connection, task: Task, store: Any, heartbeat: Heartbeat) -> Bye:
    """Do a rank's part, and return how it was dismissed.

    Raises Dismissed if it was sent home early. Whatever else goes wrong is first told over the connection.
    """
    settings = task.settings
    try:
        with one_thread():
            ring = FaultyRing(task.rank, task.world, heartbeat, "cpu", settings.fault)
            ring.threads()
            connection.send(
                Hello(
                    rank=task.rank, world=task.world, settings=settings,
                    code=code_version(), versions=versions(), threads=threads(),
                    unfit=torch_ring.unfit(settings.backend, task.place),
                )
            )  # fmt: skip
            _expect(connection, Go)
            known = tcp_sockets()
            with torch_ring.process_group(
                settings.backend, store, task.rank, task.world, task.timeout, task.place, task.interface
            ) as device:
                ring.device = device
                part = _Part(connection, task, ring, heartbeat)
                with contextlib.closing(part.prepare(known)) as part.kernel:
                    for case in cases(settings):
                        part.run(case)
                    return _expect(connection, Bye)
    except Dismissed:
        raise
    except Exception as error:
        tell(connection, error, heartbeat)
        raise


def tell(connection: Connection, error: Exception, heartbeat: Heartbeat) -> None:
    """Say what went wrong: in one line, and without the frames of libraries that speak of themselves."""
    traceback.print_exc()
    words = str(error).partition("\nException raised from")[0].strip().splitlines() or [""]
    text = " ".join(words[:1] if isinstance(error, RuntimeError) else words)
    with contextlib.suppress(OSError):
        connection.send(Trouble(text=f"{type(error).__name__}: {text}", waiting=heartbeat.waiting))


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

    def __init__(self, connection: Connection, task: Task, ring: FaultyRing, heartbeat: Heartbeat) -> None:
        self._connection, self._task, self._ring, self._heartbeat = connection, task, ring, heartbeat
        self._batches = ring.data([[batch[task.rank]] for batch in task.data])

    def prepare(self, known: set[int]) -> Kernel:
        """Make the first steps, in which libraries read files and threads start; find the sockets and the order."""
        settings = self._task.settings
        for collectives in settings.collectives:
            for row in settings.rows:
                self._scheme(Case(collectives, settings.precisions[0], row)).step(self._batches[0])
        order = self._order()
        kernel = Kernel(known)
        self._connection.send(
            Ready(
                order=order,
                unmeasured=kernel.unmeasured,
                addresses=addresses(tcp_sockets() - known),
                memory=highest_memory(),
            )
        )
        return kernel

    def _scheme(self, case: Case) -> Scheme:
        options = self._task.settings.options(case.precision)
        collectives = COLLECTIVES[case.collectives]
        return case.row(self._task.model, self._task.world, options, ring=self._ring, collectives=collectives)

    def _order(self) -> str:
        """Whether the library's all-reduce sums in the ring's order."""
        drawn = probe(self._task.world)
        mine = drawn[self._task.rank : self._task.rank + 1].copy()
        self._ring.all_reduce(mine)
        LocalCollectives(self._task.world).all_reduce(drawn)
        return "ring" if np.array_equal(checks.bits(mine[0]), checks.bits(drawn[0])) else "other"

    def run(self, case: Case) -> None:
        """One scheme, step by step.

        A step begins when all have read their counters, and they are read again when all have
        ended it: what a rank's neighbours still owe it would be missing before, and what they
        send ahead for the next step would be counted after.
        """
        _expect(self._connection, Go)
        scheme = self._scheme(case)
        self._ring.start(scheme)
        self._connection.send(Began(states=_raw(states(scheme))))
        for step, batch in enumerate(self._batches, start=1):
            _expect(self._connection, Go)
            self._ring.step(step)
            self._ring.handed.clear()
            before = self.kernel.read()
            self._fence()
            self._heartbeat.begin()
            scheme.step(batch)
            self._ring.done(scheme, step)
            self._fence()
            self._connection.send(self._stepped(scheme, step, self.kernel.read().since(before)))

    def _fence(self) -> None:
        self._connection.send(Arrived())
        _expect(self._connection, Go)

    def _stepped(self, scheme: Scheme, step: int, counted: Counters) -> Stepped:
        report = scheme.reports[-1]
        return Stepped(
            loss=self._ring.loss(report.loss, step),
            states=_raw(states(scheme)),
            traffic=booked(report, 0),
            handed=_handed(self._ring.handed),
            **counted._asdict(),
            resident=dict(report.resident),
            peak=dict(report.peak.by_band),
            memory=highest_memory(),
            seconds={str(phase): seconds for phase, seconds in report.seconds.items()},
        )


def _raw(held: States) -> dict[str, dict[str, bytes]]:
    return {str(band): {unit: state.tobytes() for unit, state in each.items()} for band, each in held.items()}


def _handed(calls: Counter[tuple[Op, int, int]]) -> list[Handed]:
    return [Handed(str(op), nbytes, size, times) for (op, nbytes, size), times in calls.items()]
