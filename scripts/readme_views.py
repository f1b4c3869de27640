"""The recordings as the README's template reads them: sums and picks, under names that read well.

Owns neither words nor layout. Bytes are integers, per rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from zerosim import theory
from zerosim.bands import WIRES, Band
from zerosim.counts import EventKind
from zerosim.records.plan import Cell, Plan
from zerosim.records.real_ranks import Corroboration, Run
from zerosim.records.results import OutOfMemoryRecord, Prediction, Results, SchemeRecord, StepRecord, SweepRow
from zerosim.worlds.gloo import HEADER

FRAME = 3 * HEADER  # bytes that gloo adds to a message


class Scheme:
    """One scheme of a recorded lab run, after its last step.

    Of one that ran out of memory there is only ``out_of_memory``.
    """

    def __init__(self, lab: Lab, recorded: SchemeRecord) -> None:
        self._lab, self._record = lab, recorded
        self.name, self.row = recorded.name, recorded.row
        states = theory.STATES[lab.results.settings.precision]
        self.whole = sum(states.values())
        """Bytes per parameter of all model states."""
        self.unshared = sum(each for band, each in states.items() if not self.row.over(Band(band)))
        """Those that stay on every rank, according to the closed forms."""
        self.shared = self.whole - self.unshared

    @property
    def _predicted(self) -> Prediction:
        assert self._record.prediction is not None
        return self._record.prediction

    @property
    def formula(self) -> str:
        """Bytes per parameter at rest on N ranks."""
        return " + ".join([str(self.unshared)] * (self.unshared > 0) + [f"{self.shared}/N"] * (self.shared > 0))

    @property
    def out_of_memory(self) -> OutOfMemoryRecord:
        """Where memory ran out, and what was asked for."""
        assert self._record.out_of_memory is not None
        return self._record.out_of_memory

    @property
    def last(self) -> StepRecord:
        """The last step's record."""
        return self._record.steps[-1]

    @property
    def losses(self) -> list[float]:
        """Of every step, before its update."""
        return [step.loss for step in self._record.steps]

    # -- memory

    @property
    def rest(self) -> int:
        """Bytes held between steps."""
        return sum(self.last.resident.values())

    @property
    def rest_predicted(self) -> int:
        """The same, predicted."""
        return sum(self._predicted.resident.values())

    @property
    def peak(self) -> int:
        """Bytes at the highest instant, activations left out."""
        return self.last.peak_without_activations.total

    @property
    def peak_predicted(self) -> int:
        """The same, predicted."""
        return sum(self._predicted.peak_without_activations.values())

    @property
    def full_peak(self) -> int:
        """Bytes at the highest instant, everything counted."""
        return self.last.peak.total

    @property
    def activations(self) -> int:
        """Bytes of activations where they are most."""
        held, most = 0, 0
        for event in self._record.events:
            if event.name == Band.ACTIVATIONS:
                held += event.nbytes if event.kind == EventKind.HOLD else -event.nbytes
                most = max(most, held)
        return most

    def gathers(self) -> list[str]:
        """The layers whose parameters were gathered in the last step, in order."""
        return [
            event.unit for event in self._record.events if (event.kind, event.name) == (EventKind.HOLD, Band.GATHERED)
        ]

    # -- traffic

    @property
    def sent(self) -> int:
        """Bytes that the busiest rank sends in a step."""
        return self.last.sent()

    @property
    def sent_predicted(self) -> int:
        """The same, predicted."""
        return sum(sum(bands.values()) for bands in self._predicted.traffic.values())

    @property
    def multiple(self) -> int:
        """How many times (N-1)/N P that is."""
        return round(self.sent_predicted / self._lab.unit * self._lab.n / (self._lab.n - 1))

    def sent_by(self, collective: str) -> int:
        """Bytes that the busiest rank sends by a collective in a step; 0 if it is not used."""
        return max((max(moved.sent) for moved in self.last.traffic if moved.collective == collective), default=0)

    @property
    def messages(self) -> int:
        """Messages that a rank sends in a step."""
        return sum(moved.messages for moved in self.last.traffic)


class Lab:
    """A recorded lab run."""

    def __init__(self, results: Results) -> None:
        self.results, self.ablations = results, results.ablations
        self.n, self.steps, self.capacity = results.settings.ranks, results.settings.steps, results.settings.capacity
        self.p = results.n_params
        self.wire = WIRES[results.settings.wire].itemsize
        self.unit = self.p * self.wire
        """P in bytes, as it travels."""
        self.schemes = [Scheme(self, recorded) for recorded in results.schemes]

    @property
    def comparisons(self) -> int:
        """How often the bits of a scheme were compared with data parallel's."""
        return len(self.results.differences)

    @property
    def differing(self) -> int:
        """How many elements differed, over all ranks and steps."""
        return sum(sum(each.differing.values()) for each in self.results.differences)

    @property
    def alike(self) -> bool:
        """Whether all schemes had the same loss in every step, to the last bit."""
        return all(each.losses == self.schemes[0].losses for each in self.schemes)

    @property
    def ranks(self) -> list[int]:
        """Each N of the sweep."""
        return sorted({row.ranks for row in self.results.sweep})

    def sweep(self, name: str) -> list[SweepRow]:
        """One scheme's rows of the sweep, by N."""
        return sorted((row for row in self.results.sweep if row.scheme == name), key=lambda row: row.ranks)

    def fits_from(self, name: str) -> int:
        """The N of the sweep from which on a scheme fits on its card. ValueError if there is none."""
        fitting = [row.ranks for row in self.sweep(name) if row.fits]
        if not fitting or fitting != [n for n in self.ranks if n >= fitting[0]]:
            raise ValueError(f"there is no N from which on {name} fits")
        return fitting[0]

    @property
    def fitting(self) -> int:
        """Runs of the sweep that fit on their card."""
        return sum(row.fits for row in self.results.sweep)


class Times:
    """What some steps took, in seconds."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.least, self.median, self.most = min(seconds), statistics.median(seconds), max(seconds)


class RealRun:
    """One scheme on real ranks: the busiest rank's last step, and the times of all steps of ``timed``."""

    def __init__(self, recorded: Run, timed: Sequence[Run]) -> None:
        self.name = recorded.scheme
        self.rest, self.peak = sum(recorded.resident.values()), sum(recorded.peak.values())
        flows = [rank.sent for rank in recorded.ranks]
        busiest = max(flows, key=lambda flow: flow.moved[-1] + flow.framing[-1])
        self.handed, self.moved, self.framing = busiest.handed[-1], busiest.moved[-1], busiest.framing[-1]
        self.messages = self.framing // FRAME
        self.counted = {name: readings[-1] for name, readings in busiest.kernel.items()}
        times = [time for run in timed for time in run.times]
        self.total = Times([time.total for time in times])
        self.compute = Times([time.compute for time in times])
        self.communication = Times([time.communication for time in times])


class Real:
    """A recorded corroboration."""

    def __init__(self, found: Corroboration) -> None:
        self.found, self.n, self.steps = found, found.settings.ranks, found.settings.steps
        self.precisions = found.settings.precisions

    def runs(self, collectives: str) -> list[RealRun]:
        """The four schemes on one kind of collectives: bytes in mixed precision, times in all precisions.

        What is sent, and in how many messages, is the same in all of them.
        """
        runs = [run for run in self.found.runs if run.collectives == collectives]
        return [
            RealRun(run, [each for each in runs if each.scheme == run.scheme])
            for run in runs
            if run.precision == "mixed"
        ]

    def in_p(self, nbytes: int) -> str:
        """Traffic in units of P times (N-1)/N."""
        return (
            f"{nbytes / (self.found.n_params * WIRES[self.found.settings.wire].itemsize) * self.n / (self.n - 1):.4f}"
        )

    @property
    def compared(self) -> int:
        """Elements compared with the simulator's as raw bits, over all ranks, steps and runs."""
        return sum(sum(run.compared.values()) for run in self.found.runs)

    @property
    def differing(self) -> int:
        """How many of them differed."""
        return sum(sum(run.differing.values()) for run in self.found.runs)

    @property
    def meters(self) -> list[str]:
        """The kernel's counters that were read for every rank."""
        return sorted(set.intersection(*(set(rank.sent.kernel) for run in self.found.runs for rank in run.ranks)))

    @property
    def unexplained(self) -> int:
        """Bytes that the kernel counted beyond payload and framing, or short of them, in and out."""
        flows = [flow for run in self.found.runs for rank in run.ranks for flow in (rank.sent, rank.received)]
        return sum(
            abs(counted - moved - framing)
            for flow in flows
            for readings in flow.kernel.values()
            for counted, moved, framing in zip(readings, flow.moved, flow.framing, strict=True)
        )


class Planned:
    """A recorded plan, for the number of GPUs that was asked for."""

    def __init__(self, found: Plan) -> None:
        self.found, self.cells = found, found.at(found.question.asked[0])

    @property
    def last(self) -> Cell:
        """The highest stage."""
        return self.cells[-1]
