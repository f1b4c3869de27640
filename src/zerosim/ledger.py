"""The ledger: what is held, what was sent, what was computed and how long it took.

Owns the counters, the peaks, the per-step reports and the event log. It is told of each
hold, free and hop by the one place where that happens, and never works a number out. Must
not know models or schemes.

A band is one array whose rows are the ranks of this process, so what one rank holds every
rank here holds: memory is one integer. Traffic is counted per rank, because a padded last
chunk makes the ranks' padding differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zerosim.bands import Place

Counts = npt.NDArray[np.int64]  # [R], one for each rank of this process


class Phase(StrEnum):
    """What a step is busy with. Time and FLOPs are booked under the innermost phase."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    HOST_OPTIMIZER = "optimizer on the host"
    OTHER = "other"


class EventKind(StrEnum):
    """What an entry of the log is about."""

    HOLD = "hold"
    FREE = "free"
    SEND = "send"
    COMPUTE = "compute"
    COPY = "copy"  # over the host link, named for the place that it goes to
    HOST_HOLD = "host hold"
    HOST_FREE = "host free"


class Event(NamedTuple):
    """One entry of the log that the timeline is drawn from; bytes are per rank."""

    kind: EventKind
    name: str  # the band held or freed, the collective sent, the phase computed, or the place copied to
    unit: str  # whose it is: a layer's name
    nbytes: int
    held: int  # bytes that a rank holds on its card after it
    seconds: float  # since the step began
    phase: Phase  # what the step was busy with
    amount: int = 0  # messages of a SEND, FLOPs of a COMPUTE; per rank


@dataclass(frozen=True)
class Peak:
    """The highest instant: its total, every band at that instant, and whose hold reached it. Bytes."""

    total: int = 0
    by_band: dict[str, int] = field(default_factory=dict)
    unit: str = ""
    phase: Phase = Phase.OTHER


class Traffic:
    """What one collective moved for one band: bytes per rank, and messages per rank.

    A block in flight has a row for every rank here, all equally large, so what one rank
    hands on each of them does. What differs is how much of it is padding, and who hands it
    to a rank of another node.
    """

    def __init__(self, rows: int) -> None:
        self._rows, self._sent, self._received = rows, 0, 0
        self.padding: Counts = np.zeros(rows, np.int64)  # the part of sent that is padding
        self.outside: Counts = np.zeros(rows, np.int64)  # the part of sent that left the rank's node
        self.node_outside = 0  # bytes that left each node, by all of its ranks
        self.messages = 0

    @property
    def sent(self) -> Counts:
        """Bytes sent, [R]."""
        return np.full(self._rows, self._sent, np.int64)

    @property
    def received(self) -> Counts:
        """Bytes received, [R]."""
        return np.full(self._rows, self._received, np.int64)

    @property
    def sent_each(self) -> int:
        """Bytes that each rank sent."""
        return self._sent

    def hop(self, sent: int, received: int, padding: Counts | None) -> None:
        """One hop: every rank handed over a block of ``sent`` bytes and took one of ``received``."""
        self._sent += sent
        self._received += received
        self.messages += 1
        if padding is not None:
            self.padding += padding

    def hops(self, messages: int, sent: int, received: int, padding: Counts) -> None:
        """Hops that were counted as they were made: so many for every rank, and the bytes of all of them."""
        self.messages += messages
        self._sent += sent
        self._received += received
        self.padding += padding


@dataclass
class Report:
    """What one step held, sent, computed and took. Bytes and FLOPs are integers, per rank.

    ``peak`` counts everything; ``peak_without_activations`` leaves out what does not scale
    with the parameters. ``traffic`` is keyed by (collective, band), ``copies`` over the host link by
    (place that they went to, band). ``host`` and ``host_peak`` are the host's memory. ``complete`` is False
    for a step that ended early, by an out-of-memory error say; its numbers stand up to there.
    """

    step: int
    loss: float = float("nan")
    mean_of_means: float = float("nan")  # of the ranks' losses, which is another number where they are uneven
    norm: float | None = None
    scale: float = 1.0
    skipped: bool = False
    complete: bool = False
    resident: dict[str, int] = field(default_factory=dict)
    padding: list[int] = field(default_factory=list)
    peak: Peak = field(default_factory=Peak)
    peak_without_activations: Peak = field(default_factory=Peak)
    host: dict[str, int] = field(default_factory=dict)  # at rest
    host_peak: Peak = field(default_factory=Peak)
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    copies: dict[tuple[str, str], int] = field(default_factory=dict)
    flops: dict[Phase, int] = field(default_factory=dict)
    seconds: dict[Phase, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def sent(self) -> list[int]:
        """Bytes that each rank of this process sent in the step, all collectives together."""
        return _total(traffic.sent for traffic in self.traffic.values())

    def sent_by_collective(self) -> dict[str, list[int]]:
        """Bytes that each rank sent, by collective."""
        names = dict.fromkeys(collective for collective, _ in self.traffic)
        return {
            name: _total(traffic.sent for (collective, _), traffic in self.traffic.items() if collective == name)
            for name in names
        }


def _total(parts: Iterable[Counts]) -> list[int]:
    return [int(sum(column)) for column in zip(*(part.tolist() for part in parts), strict=True)]


def _some(held: dict[str, int]) -> dict[str, int]:
    """What there is something of."""
    return {band: nbytes for band, nbytes in held.items() if nbytes}


class Ledger:
    """Counts for the ranks of one process.

    ``rows`` is how many ranks live here; ``apart`` names the bands that
    ``peak_without_activations`` leaves out.
    """

    def __init__(self, rows: int, apart: Iterable[str] = (), clock: Callable[[], float] = time.perf_counter) -> None:
        self.rows = rows
        self.apart = frozenset(apart)
        self.held: dict[str, int] = {}  # on the card
        self.total = 0
        self.host: dict[str, int] = {}
        self.reports: list[Report] = []
        self.phase = Phase.OTHER
        self._clock = clock
        self._uncredited = 0  # FLOPs that no entry of the log has yet
        self._without = 0  # the total less the bands that are apart
        self._open = Report(step=0)  # what happens before the first step is booked here
        self._closed_sent: Counts = np.zeros(rows, np.int64)
        self._closed_peak = self._closed_peak_without = Peak()
        self._started = self._since = clock()

    # -- memory, called by hold and free alone

    def hold(self, band: str, nbytes: int, unit: str, place: Place = Place.CARD) -> None:
        """Every rank here holds ``nbytes`` more of ``band``, for ``unit``."""
        if place is Place.HOST:
            self._move_host(EventKind.HOST_HOLD, band, nbytes, unit)
            return
        self._move(EventKind.HOLD, band, nbytes, unit)
        report = self._open
        if self.total > report.peak.total:
            report.peak = self._instant(unit)
        if self._without > report.peak_without_activations.total:
            report.peak_without_activations = self._instant(unit, self.apart)

    def free(self, band: str, nbytes: int, unit: str, place: Place = Place.CARD) -> None:
        """Every rank here holds ``nbytes`` less of ``band``."""
        if place is Place.HOST:
            self._move_host(EventKind.HOST_FREE, band, -nbytes, unit)
        else:
            self._move(EventKind.FREE, band, -nbytes, unit)

    def copy(self, to: Place, band: str, nbytes: int, unit: str) -> None:
        """Each rank has just copied ``nbytes`` of ``band`` over its host link."""
        self._open.copies[to, band] = self._open.copies.get((to, band), 0) + nbytes
        self._log(EventKind.COPY, to, unit, nbytes)

    def _move_host(self, kind: EventKind, band: str, change: int, unit: str) -> None:
        self.host[band] = self.host.get(band, 0) + change
        self._log(kind, band, unit, abs(change))
        bands = _some(self.host)
        if (total := sum(bands.values())) > self._open.host_peak.total:
            self._open.host_peak = Peak(total, bands, unit, self.phase)

    def _move(self, kind: EventKind, band: str, change: int, unit: str) -> None:
        self.held[band] = self.held.get(band, 0) + change
        self.total += change
        if band not in self.apart:
            self._without += change
        self._log(kind, band, unit, abs(change))

    def _instant(self, unit: str, leave_out: frozenset[str] = frozenset()) -> Peak:
        bands = {band: nbytes for band, nbytes in _some(self.held).items() if band not in leave_out}
        return Peak(sum(bands.values()), bands, unit, self.phase)

    # -- traffic, counted inside the ring's hop

    @contextmanager
    def sending(
        self, collective: str, band: str, unit: str, leaves: Sequence[int] | Counts = (0,), leaving: int = 0
    ) -> Iterator[Traffic]:
        """The counter of one collective; its hops count into it, and the log gets one entry for all of them.

        ``leaves`` is 1 for each rank here whose messages leave its node, and ``leaving`` how many of a node's do.
        """
        key = (collective, band)
        traffic = self._open.traffic.get(key)
        if traffic is None:
            traffic = self._open.traffic[key] = Traffic(self.rows)
        sent, messages = traffic.sent_each, traffic.messages
        with self.during(Phase.COMMUNICATION):
            yield traffic
            sent = traffic.sent_each - sent
            traffic.outside += sent * np.asarray(leaves, np.int64)
            traffic.node_outside += sent * leaving
            self._log(EventKind.SEND, collective, unit, sent, traffic.messages - messages)

    # -- work and time

    def flops(self, count: int) -> None:
        """Floating-point operations that each rank has just done, booked under the phase."""
        self._open.flops[self.phase] = self._open.flops.get(self.phase, 0) + count
        self._uncredited += count

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Book time and FLOPs under ``phase``; what an inner phase takes is not booked twice."""
        outer = self._switch(phase)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, phase: Phase) -> Phase:
        now, previous = self._clock(), self.phase
        self._open.seconds[previous] = self._open.seconds.get(previous, 0.0) + now - self._since
        self._since, self.phase = now, phase
        return previous

    def computed(self, unit: str) -> None:
        """Log that the phase's arithmetic for ``unit`` is done, with the FLOPs since the last such entry."""
        self._log(EventKind.COMPUTE, self.phase, unit, 0, self._uncredited)
        self._uncredited = 0

    def _log(self, kind: EventKind, name: str, unit: str, nbytes: int, amount: int = 0) -> None:
        self._open.events.append(
            Event(kind, name, unit, nbytes, self.total, self._clock() - self._started, self.phase, amount)
        )

    # -- steps

    @contextmanager
    def step(self) -> Iterator[Report]:
        """One training step: a fresh report, kept in ``reports`` whether the step completes or not."""
        self._close()
        self._open = report = Report(step=len(self.reports) + 1)
        report.peak, report.peak_without_activations = self._instant(""), self._instant("", self.apart)
        report.host_peak = Peak(sum(self.host.values()), _some(self.host))
        self._started = self._since = self._clock()
        self.reports.append(report)
        try:
            yield report
            report.complete = True
        finally:
            self._switch(Phase.OTHER)
            report.resident, report.host = _some(self.held), _some(self.host)

    def _close(self) -> None:
        """Fold the open report into the totals since the beginning."""
        self._closed_sent += self._open_sent()
        self._closed_peak = self.peak()
        self._closed_peak_without = self.peak_without_activations()
        self._open = Report(step=0)

    def _open_sent(self) -> Counts:
        return sum((traffic.sent for traffic in self._open.traffic.values()), np.zeros(self.rows, np.int64))

    # -- since the beginning

    def sent(self) -> list[int]:
        """Bytes that each rank of this process has sent so far."""
        return [int(nbytes) for nbytes in self._closed_sent + self._open_sent()]

    def peak(self) -> Peak:
        """The highest instant so far, everything counted."""
        return max(self._closed_peak, self._open.peak, key=lambda peak: peak.total)

    def peak_without_activations(self) -> Peak:
        """The highest instant so far of what scales with the parameters."""
        return max(self._closed_peak_without, self._open.peak_without_activations, key=lambda peak: peak.total)
