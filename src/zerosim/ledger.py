"""The ledger: what is held, what was sent, what was computed and how long it took.

Owns the counters, and writes the records of ``counts.py``. It is told of each
hold, free and hop by the one place where that happens, and never works a number out. Must
not know models or schemes.

A band is one array whose rows are the ranks of this process, so what one rank holds every
rank here holds: memory is one integer. Traffic is counted per rank, because a padded last
chunk makes the ranks' padding differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from zerosim.bands import Place
from zerosim.counts import Counts, Event, EventKind, Peak, Phase, Report, Traffic


def _some(held: dict[str, int]) -> dict[str, int]:
    """What there is something of."""
    return {band: nbytes for band, nbytes in held.items() if nbytes}


def _peak(held: dict[str, int], unit: str, phase: Phase) -> Peak:
    """An instant at which so much was held."""
    bands = _some(held)
    return Peak(sum(bands.values()), bands, unit, phase)


_Instant = tuple[dict[str, int], str, Phase]
_NEW = tuple.__new__
# By name: Python 3.11 takes as long to look up a member of an enumeration as to append an event.
_HOLD, _FREE, _HOST, _COMMUNICATION = EventKind.HOLD, EventKind.FREE, Place.HOST, Phase.COMMUNICATION


class Ledger:
    """Counts for the ranks of one process.

    ``rows`` is how many ranks live here; ``apart`` names the bands that
    ``peak_without_activations`` leaves out. Totals are of all steps; the last ``keep_reports`` of the reports
    are kept, and of them the last ``keep_events`` with their logs.
    """

    def __init__(
        self,
        rows: int,
        apart: Iterable[str] = (),
        clock: Callable[[], float] = time.perf_counter,
        keep_reports: int = 100,
        keep_events: int = 2,
    ) -> None:
        self.rows, self.keep_reports, self.keep_events = rows, keep_reports, keep_events
        self.steps = 0  # begun so far
        self.apart = frozenset(apart)
        self.held: dict[str, int] = {}  # on the card
        self.total = 0
        self.host: dict[str, int] = {}
        self.reports: list[Report] = []
        self.phase = Phase.OTHER
        self.listeners: list[Callable[[Event], object]] = []  # each is called with every event that follows
        self._clock = clock
        self._uncredited = 0  # FLOPs that no entry of the log has yet
        self._without = 0  # the total less the bands that are apart
        self._open = Report(step=0)  # what happens before the first step is booked here
        self._closed_sent: Counts = np.zeros(rows, np.int64)
        self._closed_peak = self._closed_peak_without = self._closed_host_peak = Peak()
        self._highest = self._highest_without = 0  # of the open report, and what was held there, until it is read
        self._instant: _Instant | None = None
        self._instant_without: _Instant | None = None
        self._started = self._since = clock()

    # -- memory, called by hold and free alone

    def hold(self, band: str, nbytes: int, unit: str, place: Place = Place.CARD) -> None:
        """Every rank here holds ``nbytes`` more of ``band``, for ``unit``."""
        if place is _HOST:
            self._move_host(EventKind.HOST_HOLD, band, nbytes, unit)
            return
        held = self.held
        held[band] = held.get(band, 0) + nbytes
        self.total = total = self.total + nbytes
        # Highest so far, but seldom in the end: only what was held is noted, and most of the notes are dropped.
        if total > self._highest:
            self._highest, self._instant = total, (held.copy(), unit, self.phase)
        if band not in self.apart:
            self._without = without = self._without + nbytes
            if without > self._highest_without:
                self._highest_without, self._instant_without = without, (held.copy(), unit, self.phase)
        self._log(_HOLD, band, unit, nbytes)

    def free(self, band: str, nbytes: int, unit: str, place: Place = Place.CARD) -> None:
        """Every rank here holds ``nbytes`` less of ``band``."""
        if place is _HOST:
            self._move_host(EventKind.HOST_FREE, band, -nbytes, unit)
            return
        self.held[band] -= nbytes
        self.total -= nbytes
        if band not in self.apart:
            self._without -= nbytes
        self._log(_FREE, band, unit, nbytes)

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

    def _settle(self) -> Report:
        """The open report, with its peaks as they are by now."""
        report = self._open
        if self._instant is not None:
            report.peak, self._instant = _peak(*self._instant), None
        if self._instant_without is not None:
            held, unit, phase = self._instant_without
            held = {band: nbytes for band, nbytes in held.items() if band not in self.apart}
            report.peak_without_activations, self._instant_without = _peak(held, unit, phase), None
        return report

    def agrees(self, found: Mapping[str, int]) -> bool:
        """Whether so many bytes of each band were found, and the sums are theirs."""
        booked = {band: self.held.get(band, 0) + self.host.get(band, 0) for band in [*self.held, *self.host]}
        without = sum(nbytes for band, nbytes in self.held.items() if band not in self.apart)
        return _some(booked) == found and (self.total, self._without) == (sum(self.held.values()), without)

    # -- traffic, counted inside the ring's hop

    def sending(
        self, collective: str, band: str, unit: str, leaves: Sequence[int] | Counts = (0,), leaving: int = 0
    ) -> _Sending:
        """The counter of one collective; its hops count into it, and the log gets one entry for all of them.

        ``leaves`` is 1 for each rank here whose messages leave its node, and ``leaving`` how many of a node's do.
        """
        key = (collective, band)
        traffic = self._open.traffic.get(key)
        if traffic is None:
            traffic = self._open.traffic[key] = Traffic(self.rows)
        return _Sending(self, traffic, collective, unit, leaves, leaving)

    def _sent(self, sending: _Sending) -> None:
        traffic, sent = sending.traffic, sending.traffic.sent_each - sending.sent
        outside = sent * sending.leaving
        if sending.leaving:
            traffic.outside += sent * np.asarray(sending.leaves, np.int64)
            traffic.node_outside += outside
        messages = traffic.messages - sending.messages
        self._log(EventKind.SEND, sending.collective, sending.unit, sent, messages, outside)

    # -- work and time

    def flops(self, count: int) -> None:
        """Floating-point operations that each rank has just done, booked under the phase."""
        self._open.flops[self.phase] = self._open.flops.get(self.phase, 0) + count
        self._uncredited += count

    def during(self, phase: Phase) -> _During:
        """Book time and FLOPs under ``phase``; what an inner phase takes is not booked twice."""
        return _During(self, phase)

    def _switch(self, phase: Phase) -> Phase:
        now, previous = self._clock(), self.phase
        self._open.seconds[previous] = self._open.seconds.get(previous, 0.0) + now - self._since
        self._since, self.phase = now, phase
        return previous

    def computed(self, unit: str) -> None:
        """Log that the phase's arithmetic for ``unit`` is done, with the FLOPs since the last such entry."""
        self._log(EventKind.COMPUTE, self.phase, unit, 0, self._uncredited)
        self._uncredited = 0

    def _log(self, kind: EventKind, name: str, unit: str, nbytes: int, amount: int = 0, outside: int = 0) -> None:
        seconds = self._clock() - self._started
        entry = kind, name, unit, nbytes, self.total, seconds, self.phase, amount, outside
        event = _NEW(Event, entry)  # in half of Event's own time
        self._open.events.append(event)
        for listener in self.listeners:
            listener(event)

    # -- steps

    @contextmanager
    def step(self) -> Iterator[Report]:
        """One training step: a fresh report, kept in ``reports`` whether the step completes or not."""
        self._close()
        self.steps += 1
        self._open = report = Report(step=self.steps)
        self._uncredited = 0
        self._highest, self._instant = self.total, (self.held.copy(), "", self.phase)
        self._highest_without, self._instant_without = self._without, (self.held.copy(), "", self.phase)
        report.host_peak = Peak(sum(self.host.values()), _some(self.host))
        self._started = self._since = self._clock()
        self.reports.append(report)
        del self.reports[: -self.keep_reports]
        for old in self.reports[-1 - self.keep_events : -self.keep_events]:
            old.events = []
        try:
            yield report
            report.complete = True
        finally:
            self._switch(Phase.OTHER)
            self._settle()
            report.resident, report.host = _some(self.held), _some(self.host)

    def _close(self) -> None:
        """Fold the open report into the totals since the beginning."""
        self._closed_sent += self._open_sent()
        self._closed_peak, self._closed_host_peak = self.peak(), self.host_peak()
        self._closed_peak_without = self.peak_without_activations()
        self._open = Report(step=0)
        self._highest = self._highest_without = 0

    def _open_sent(self) -> Counts:
        return sum((traffic.sent for traffic in self._open.traffic.values()), np.zeros(self.rows, np.int64))

    # -- since the beginning

    def sent(self) -> list[int]:
        """Bytes that each rank of this process has sent so far."""
        return [int(nbytes) for nbytes in self._closed_sent + self._open_sent()]

    def peak(self) -> Peak:
        """The peak so far, everything counted."""
        return max(self._closed_peak, self._settle().peak, key=lambda peak: peak.total)

    def host_peak(self) -> Peak:
        """The peak so far of the host's memory."""
        return max(self._closed_host_peak, self._open.host_peak, key=lambda peak: peak.total)

    def peak_without_activations(self) -> Peak:
        """The peak so far of what scales with the parameters."""
        return max(self._closed_peak_without, self._settle().peak_without_activations, key=lambda peak: peak.total)


class _During:
    """A phase, for as long as a ``with`` block lasts. A class, as a generator takes three times as long."""

    __slots__ = ("_ledger", "_outer", "_phase")

    def __init__(self, ledger: Ledger, phase: Phase) -> None:
        self._ledger, self._phase = ledger, phase

    def __enter__(self) -> None:
        self._outer = self._ledger._switch(self._phase)

    def __exit__(self, *_: object) -> None:
        self._ledger._switch(self._outer)


class _Sending:
    """A collective, for as long as a ``with`` block lasts, and what had been counted before it."""

    __slots__ = ("_ledger", "_outer", "collective", "leaves", "leaving", "messages", "sent", "traffic", "unit")

    def __init__(
        self, ledger: Ledger, traffic: Traffic, collective: str, unit: str, leaves: Sequence[int] | Counts, leaving: int
    ) -> None:
        self._ledger, self.traffic, self.collective, self.unit = ledger, traffic, collective, unit
        self.leaves, self.leaving = leaves, leaving
        self.sent, self.messages = traffic.sent_each, traffic.messages

    def __enter__(self) -> Traffic:
        self._outer = self._ledger._switch(_COMMUNICATION)
        return self.traffic

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._ledger._sent(self)
        self._ledger._switch(self._outer)
