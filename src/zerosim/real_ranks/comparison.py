"""One run of real ranks, held to the simulator: every number of the one against the same of the other.

Owns the comparisons of bits, losses, bytes and memory, and turns a run into a record. Must not
know how ranks are started or talked to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zerosim.bands import Array, Band
from zerosim.checks import compare as checks
from zerosim.counts import Phase
from zerosim.real_ranks.cases import Case, States
from zerosim.real_ranks.connection import Began, Stepped
from zerosim.real_ranks.simulation import Expected
from zerosim.records.real_ranks import (
    BITS,
    BYTES,
    LOSSES,
    MEMORY,
    PROCESS,
    SOCKETS,
    START,
    Flow,
    RankRecord,
    Run,
    Settings,
    StepTime,
)
from zerosim.records.results import Failure
from zerosim.worlds import gloo

_UNNOTICED = 64 << 20  # bytes by which a process may grow in a step though no band did: libraries' own


class RunComparison:
    """Compares a run step by step.

    ``metered`` tells whether the backend's framing is known; without it the
    kernel's counts prove nothing, and are left out. ``comparable`` tells whether sums are made in the ring's
    order; if not, bits and losses are left out. ``elsewhere`` counts what the kernel saw that no rank's meter
    covers.
    """

    def __init__(self, settings: Settings, case: Case, *, metered: bool, comparable: bool) -> None:
        self._settings, self._case, self._metered, self._comparable = settings, case, metered, comparable
        self._told: list[list[Stepped]] = []
        self._expected: list[Expected] = []
        self._compared: dict[str, int] = {}
        self._differing: dict[str, int] = {}
        self._memory: list[int] = []
        self.failures: list[Failure] = []
        self.elsewhere: dict[str, int] = {}

    def begin(self, expected: States, told: Sequence[Began], memory: Sequence[int]) -> None:
        """Compare what each rank begins with; ``memory`` is that of its process by then."""
        self._memory = list(memory)
        for rank, each in enumerate(told):
            self._compare_bits(START, rank, each.states, expected)

    def step(self, expected: Expected, told: list[Stepped]) -> None:
        """Compare a step: what each rank told about it with what the simulator did."""
        self._told.append(told)
        self._expected.append(expected)
        for rank, each in enumerate(told):
            if self._comparable:
                self._expect(LOSSES, rank, "its loss", each.loss, expected.losses[rank])
                self._compare_bits(BITS, rank, each.states, expected.states)
            self._compare_bytes(rank, each, expected)
            self._compare_memory(rank, each, expected)
        for name in ("opened", "datagrams"):
            seen = [getattr(each, name) for each in told]
            if None not in seen:  # of one namespace all ranks tell the same, or nearly so
                self.elsewhere[name] = self.elsewhere.get(name, 0) + max(seen)

    def _expect(self, check: str, rank: int, quantity: str, measured: object, expected: object) -> None:
        if measured != expected:
            self._fail(check, rank, quantity, _words(measured), _words(expected))

    def _fail(self, check: str, rank: int, quantity: str, measured: str, expected: str) -> None:
        self.failures.append(
            Failure(
                check=check, scheme=str(self._case), ranks=self._settings.ranks, step=len(self._told), rank=rank,
                quantity=quantity, measured=measured, expected=expected,
            )
        )  # fmt: skip

    def _compare_bits(self, check: str, rank: int, told: Mapping[str, Mapping[str, bytes]], expected: States) -> None:
        for band, wholes in expected.items():
            for unit, whole in wholes.items():
                self._compared[band] = self._compared.get(band, 0) + whole.shape[1]
                differing = self._compare(
                    check, rank, band, unit, np.frombuffer(told[band][unit], whole.dtype), whole[rank]
                )
                self._differing[band] = self._differing.get(band, 0) + differing

    def _compare(self, check: str, rank: int, band: Band, unit: str, real: Array, expected: Array) -> int:
        """How many elements differ in their bits."""
        if real.shape != expected.shape:
            self._expect(check, rank, f"elements of {band} of {unit}", real.size, expected.size)
            return expected.size
        unequal = checks.bits(real) != checks.bits(expected)
        if unequal.any():
            at = int(np.argmax(unequal))
            self._expect(
                check, rank, f"{band} of {unit}, {np.count_nonzero(unequal):,} elements, the first of them {at}",
                f"{float(real[at])!r}, bits {checks.bits(real)[at]:#x}",
                f"{float(expected[at])!r}, bits {checks.bits(expected)[at]:#x}",
            )  # fmt: skip
        return int(np.count_nonzero(unequal))

    def _compare_bytes(self, rank: int, told: Stepped, expected: Expected) -> None:
        simulated = {(each.collective, each.band): each for each in expected.traffic[rank]}
        real = {(each.collective, each.band): each for each in told.traffic}
        for collective, band in dict.fromkeys([*simulated, *real]):
            one, other = real.get((collective, band)), simulated.get((collective, band))
            for field in ("sent", "received", "padding", "messages"):
                what = f"{field} by {collective} for {band}, the rank's own ledger against the simulator's"
                self._expect(BYTES, rank, what, getattr(one, field, 0), getattr(other, field, 0))
        handed, moved = self._handed(told), self._moved(told)
        for what, of_torch, of_ledger in (
            ("sent", handed.sent, sum(each.sent for each in told.traffic)),
            ("received", handed.received, sum(each.received for each in told.traffic)),
        ):
            self._expect(BYTES, rank, f"{what}, the payload handed to torch against the ledger", of_torch, of_ledger)
        if not self._metered:
            return
        framing_sent, framing_received = moved.framing()
        for what, counted, explained in (
            ("written according to /proc/self/io", told.written, moved.sent + framing_sent),
            ("sent according to the TCP sockets", told.tcp_sent, moved.sent + framing_sent),
            ("received according to the TCP sockets", told.tcp_received, moved.received + framing_received),
        ):
            if counted is not None:
                self._expect(BYTES, rank, f"bytes {what}, against payload and framing", counted, explained)

    def _handed(self, told: Stepped) -> gloo.Moved:
        """What the calls to torch ask to be sent, by the textbook."""
        return self._over_calls(told, gloo.textbook)

    def _moved(self, told: Stepped) -> gloo.Moved:
        """What gloo is known to make of them."""
        return self._over_calls(told, gloo.moved)

    def _over_calls(self, told: Stepped, cost: Callable[[gloo.Call, int, int], gloo.Moved | None]) -> gloo.Moved:
        each = ((cost(gloo.Call(call.op, call.nbytes), 0, call.size), call.times) for call in told.handed)
        return gloo.total(moved for moved, times in each if moved is not None for _ in range(times))

    def _compare_memory(self, rank: int, told: Stepped, expected: Expected) -> None:
        before, self._memory[rank] = self._memory[rank], max(told.memory, self._memory[rank])
        allowed = _UNNOTICED + 4 * sum(expected.peak.values())
        if told.memory - before > allowed:
            self._fail(
                MEMORY, rank, "bytes by which its process grew in the step",
                f"{told.memory - before:,}", f"{allowed:,} at most, by what is held",
            )  # fmt: skip
        for what, real, wanted in (
            ("at rest", told.resident, expected.resident),
            ("at the peak", told.peak, expected.peak),
        ):
            for band in dict.fromkeys([*real, *wanted]):
                self._expect(MEMORY, rank, f"bytes of {band} {what}", real.get(band, 0), wanted.get(band, 0))

    # -- the record

    def record(self) -> Run:
        """What was found up to now."""
        last = self._expected[-1] if self._expected else None
        return Run(
            row=self._case.row,
            collectives=self._case.collectives,
            precision=self._case.precision,
            complete=len(self._told) == self._settings.steps,
            compared=self._compared,
            differing=self._differing,
            losses=[_mean_loss(told) for told in self._told],
            losses_simulated=[float(np.mean(each.losses)) for each in self._expected],
            resident=last.resident if last else {},
            peak=last.peak if last else {},
            ranks=[self._rank(rank) for rank in range(self._settings.ranks)] if self._told else [],
            times=[_slowest(told) for told in self._told],
        )

    def _rank(self, rank: int) -> RankRecord:
        mine = [told[rank] for told in self._told]
        return RankRecord(
            rank=rank,
            sent=self._flow(rank, mine, "sent", {PROCESS: "written", SOCKETS: "tcp_sent"}),
            received=self._flow(rank, mine, "received", {SOCKETS: "tcp_received"}),
            resident=mine[-1].resident,
            peak=mine[-1].peak,
            memory=mine[-1].memory,
        )

    def _flow(self, rank: int, told: Sequence[Stepped], way: str, meters: Mapping[str, str]) -> Flow:
        moved = [self._moved(each) for each in told]
        readings = {name: [getattr(each, field) for each in told] for name, field in meters.items()}
        return Flow(
            simulated=[sum(getattr(each, way) for each in step.traffic[rank]) for step in self._expected],
            booked=[sum(getattr(each, way) for each in step.traffic) for step in told],
            handed=[getattr(self._handed(each), way) for each in told],
            moved=[getattr(each, way) for each in moved],
            framing=[each.framing()[way == "received"] for each in moved],
            kernel={name: each for name, each in readings.items() if self._metered and None not in each},
        )


def _mean_loss(told: Sequence[Stepped]) -> float:
    return float(np.mean([each.loss for each in told]))


def _slowest(told: Sequence[Stepped]) -> StepTime:
    seconds = max((each.seconds for each in told), key=lambda phases: sum(phases.values()))
    whole, communication = sum(seconds.values()), seconds.get(Phase.COMMUNICATION, 0.0)
    return StepTime(total=whole, compute=whole - communication, communication=communication)


def _words(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
