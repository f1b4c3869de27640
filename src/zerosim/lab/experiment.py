"""One scheme in the lab: built from settings, trained, audited, and turned into records.

Owns the way from ``Settings`` to a run and from a run to its record. Must not know which
runs there are, nor the order in which they are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from zerosim import theory
from zerosim.checks import compare, sanitizer
from zerosim.checks.reference import Reference
from zerosim.counts import Peak, Report
from zerosim.lab.data import Pair, batches
from zerosim.model import MLP
from zerosim.ranks import OutOfMemory
from zerosim.records.results import (
    EventRecord,
    Failure,
    OutOfMemoryRecord,
    PeakRecord,
    Prediction,
    SchemeRecord,
    Settings,
    StepRecord,
    SweepRow,
    TrafficRecord,
)
from zerosim.schemes import Scheme, Stage

STRICT_STEPS = 2  # what the first leaves behind, the second meets


def model_of(settings: Settings) -> MLP:
    """The model that the settings ask for."""
    return MLP(settings.widths, seed=settings.model_seed)


def job_of(settings: Settings, model: MLP, row: Stage, ranks: int) -> theory.Job:
    """The run of a row on so many ranks, as the closed forms see it."""
    return theory.Job(
        row=row,
        buckets=tuple((pair,) for pair in pairwise(model.widths)),
        ranks=ranks,
        rows=settings.batch,
        precision=settings.precision,
        wire=settings.wire,
        gather=settings.gather,
        node=settings.node,
        wire_params=settings.wire_params,
    )


def batches_of(settings: Settings, ranks: int, steps: int) -> Iterator[list[Pair]]:
    """The batches that so many ranks train on, step by step."""
    widths = settings.widths[0], settings.widths[-1]
    return batches(settings.data, ranks, steps, settings.batch, widths, settings.seed)


def plain_training(row: Stage, settings: Settings, ranks: int) -> Reference:
    """What all rows that sum in this one's order, on so many ranks, are held against."""
    return Reference(
        row, settings.widths, settings.model_seed, ranks, settings.precision, settings.wire, node=settings.node,
        wire_params=settings.wire_params,
    )  # fmt: skip


class Run:
    """One scheme on N ranks, audited after each step, until a hold would pass its card's capacity.

    ``plain`` is the training that it is held against; runs in lockstep may share one.
    """

    def __init__(self, row: Stage, settings: Settings, model: MLP, ranks: int, plain: Reference | None = None) -> None:
        self.row = row
        self._settings = settings
        self.order = settings.order(row, ranks)
        self._plain = plain or plain_training(row, settings, ranks)
        self.job = job_of(settings, model, row, ranks)
        self.capacity = settings.capacity
        self.out_of_memory: OutOfMemoryRecord | None = None
        self.failures: list[Failure] = []
        self._scheme: Scheme | None = None
        try:
            self._scheme = row(model, ranks, settings.options())
        except OutOfMemory as error:
            self._end(error, 0)

    @property
    def running(self) -> bool:
        """Whether it has not run out of memory."""
        return self.out_of_memory is None

    @property
    def scheme(self) -> Scheme:
        assert self._scheme is not None
        return self._scheme

    @property
    def reports(self) -> list[Report]:
        """The reports of the steps that completed."""
        return [report for report in self._all_reports() if report.complete]

    def _all_reports(self) -> list[Report]:
        return self._scheme.reports if self._scheme else []

    def step(self, batch: list[Pair]) -> None:
        if not self.running:
            return
        try:
            self.scheme.step(batch)
        except OutOfMemory as error:
            self._end(error, self._all_reports()[-1].step)
        else:
            step = self.scheme.steps  # of which not all reports need be kept
            self._plain.reach(step, batch)
            self.failures += compare.against_plain(self.scheme, self._plain, step)
            self.failures += compare.audit(self.scheme, self.reports[-1], self.job)

    def _end(self, error: OutOfMemory, step: int) -> None:
        self.out_of_memory = OutOfMemoryRecord(
            step=step, rank=error.rank, band=error.band, unit=error.unit, asked=error.asked, held=error.held,
            place=error.place, on_card=_plain(error.on_card),
        )  # fmt: skip

    def fits_predicted(self) -> bool:
        card, host = self.capacity, self._settings.host_capacity
        on_card, on_host = sum(theory.peak(self.job).values()), sum(theory.host_peak(self.job).values())
        return (card is None or on_card <= card) and (host is None or on_host <= host)

    def finish(self, *, sanitized: bool = True) -> list[Failure]:
        """All that did not hold, what the card was to hold included, and what the sanitizer finds in one more run."""
        failures = self.failures + compare.fits_on_card(
            self.row.name, self.job.ranks, self.out_of_memory, self.fits_predicted()
        )
        if sanitized and self.running:
            batches = list(batches_of(self._settings, self.job.ranks, STRICT_STEPS))
            failures += sanitizer.run(self.row, self._settings, self.job.ranks, batches)
        return failures

    def record(self) -> SchemeRecord:
        reports = self._all_reports()
        return SchemeRecord(
            row=self.row,
            prediction=Prediction(
                resident=_plain(theory.resident(self.job)),
                peak=_plain(theory.peak(self.job)),
                peak_without_activations=_plain(theory.peak_without_activations(self.job)),
                traffic={name: _plain(bands) for name, bands in theory.traffic(self.job).items()},
                padding=theory.padding(self.job),
                padding_sent=theory.padding_sent(self.job),
                flops=theory.flops(self.job),
                node_outside={
                    name: _plain({band: sum(ranks[: self.job.group]) for band, ranks in bands.items()})
                    for name, bands in theory.outside(self.job).items()
                },
                host=_plain(theory.host_resident(self.job)),
                host_peak=_plain(theory.host_peak(self.job)),
                copies=_by_place(theory.copies(self.job)),
            ),
            steps=[step_record(report) for report in self.reports],
            events=event_records(reports[-1]) if reports else [],
            out_of_memory=self.out_of_memory,
        )

    def sweep_row(self) -> SweepRow:
        report = self.reports[-1] if self.running else Report(step=0)
        return SweepRow(
            ranks=self.job.ranks,
            scheme=self.row.name,
            resident=sum(report.resident.values()),
            resident_predicted=sum(theory.resident(self.job).values()),
            peak=report.peak.total,
            peak_predicted=sum(theory.peak(self.job).values()),
            peak_without_activations=report.peak_without_activations.total,
            peak_without_activations_predicted=sum(theory.peak_without_activations(self.job).values()),
            sent=max(report.sent(), default=0),
            sent_predicted=sum(sum(bands.values()) for bands in theory.traffic(self.job).values()),
            host_peak=report.host_peak.total,
            host_peak_predicted=sum(theory.host_peak(self.job).values()),
            fits=self.running,
            fits_predicted=self.fits_predicted(),
            resident_by_band=_plain(report.resident),
            events=event_records(report),
        )


def _plain(counts: Mapping[Any, int]) -> dict[str, int]:
    """Counts under plain names, those of nothing left out."""
    return {str(name): count for name, count in counts.items() if count}


def _by_place(copies: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Copies over the host link, by the place that they go to and band."""
    places: dict[str, dict[str, int]] = {}
    for (place, band), nbytes in copies.items():
        places.setdefault(str(place), {})[str(band)] = nbytes
    return places


def _peak_record(peak: Peak) -> PeakRecord:
    return PeakRecord(total=peak.total, by_band=_plain(peak.by_band), unit=peak.unit, phase=peak.phase)


def event_records(report: Report) -> list[EventRecord]:
    """The log of a step."""
    return [
        EventRecord(**{field: getattr(event, field) for field in EventRecord.__struct_fields__})
        for event in report.events
    ]


def step_record(report: Report) -> StepRecord:
    """A step, without its log."""
    return StepRecord(
        step=report.step,
        loss=report.loss,
        resident=_plain(report.resident),
        padding=report.padding,
        peak=_peak_record(report.peak),
        peak_without_activations=_peak_record(report.peak_without_activations),
        traffic=[
            TrafficRecord(
                collective=collective,
                band=str(band),
                sent=traffic.sent.tolist(),
                received=traffic.received.tolist(),
                padding=traffic.padding.tolist(),
                messages=traffic.messages,
                outside=traffic.outside.tolist(),
                node_outside=traffic.node_outside,
            )
            for (collective, band), traffic in report.traffic.items()
        ],
        flops=_plain(report.flops),
        seconds={str(phase): seconds for phase, seconds in report.seconds.items()},
        host=_plain(report.host),
        host_peak=_peak_record(report.host_peak),
        copies=_by_place(report.copies),
    )
