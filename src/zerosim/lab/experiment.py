"""One scheme in the lab: built from settings, trained, audited, and turned into records.

Owns the way from ``Settings`` to a run and from a run to its record. Must not know which
runs there are, nor the order in which they are made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from zerosim import theory
from zerosim.checks import allocations, compare, sanitizer
from zerosim.checks.perceptron import Given
from zerosim.checks.reference import Reference
from zerosim.counts import Report
from zerosim.lab.as_records import event_records, plain, prediction, shortage, step_record
from zerosim.lab.data import batches
from zerosim.model import MLP
from zerosim.ranks import OutOfMemory
from zerosim.records.results import (
    Check,
    Failure,
    OutOfMemoryRecord,
    Prediction,
    SchemeRecord,
    Settings,
    StepRecord,
    SweepRow,
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
        clip=settings.clip is not None,
        loss_scale=settings.loss_scale is not None,
        uneven=settings.uneven and settings.average == "rows",
        weight_decay=settings.weight_decay > 0,
        accumulate=settings.accumulate,
        sync=settings.reduced(),
        find_unused=settings.find_unused,
    )


def batches_of(settings: Settings, ranks: int, steps: int, *, resumed: bool = False) -> Iterator[list[Given]]:
    """The batches that so many ranks train on, step by step; uneven ones have fewer rows, some none, never all.

    Uneven micro-batches are lists, of which the first of several steps has one fewer. ``resumed`` says that after a
    run is resumed the batches are those of as many ranks as it has then.
    """
    widths = settings.widths[0], settings.widths[-1]
    widest = max(ranks, settings.resume_ranks or 0) if resumed else ranks
    rng = np.random.default_rng([settings.seed, ranks])
    drawn = batches(settings.data, widest, steps, settings.batch, widths, settings.seed)
    for step, whole in enumerate(drawn, start=1):
        batch: list[Given] = [*whole[: settings.ranks_in(step) if resumed else ranks]]
        if settings.uneven:
            parts = settings.accumulate - (step == 1 < min(steps, settings.accumulate))
            rows = rng.integers(0, most := settings.batch // settings.accumulate, (len(batch), parts), endpoint=True)
            rows.flat[rng.integers(rows.size)] = most
            for rank, ((x, y), counts) in enumerate(zip(whole, rows.tolist(), strict=False)):
                ends = [*accumulate(counts)]
                cut = [(x[end - count : end], y[end - count : end]) for count, end in zip(counts, ends, strict=True)]
                batch[rank] = cut if settings.accumulate > 1 else cut[0]
        yield batch


def rows_of(batch: Sequence[Given]) -> tuple[int, ...]:
    """The most rows that any rank has in each micro-batch, or in all where they are not cut yet."""
    windows = [each if isinstance(each, list) else [each] for each in batch]
    return tuple(max(len(x) for x, _ in part) for part in zip(*windows, strict=True))


class Run:
    """One scheme on N ranks, audited after each step, until a hold would pass its card's capacity.

    ``plain`` is the training that it is held against; runs in lockstep may share one.
    """

    def __init__(
        self, row: Stage, settings: Settings, model: MLP, ranks: int, plain: Reference | None = None, *,
        resumes: bool = False,
    ) -> None:  # fmt: skip
        self.row, self._model = row, model
        self._settings, self._resumes = settings, resumes
        self.order = settings.order(row, ranks)
        self._plain = plain or Reference(row, settings, ranks)
        self.job = job_of(settings, model, row, ranks)  # of the last step that was begun
        self._begun: list[theory.Job] = []
        self._records: list[tuple[StepRecord, theory.Job]] = []
        self.capacity = settings.capacity
        self.out_of_memory: OutOfMemoryRecord | None = None
        self.failures: list[Failure] = []
        self.losses: list[float] = []  # as the steps returned them
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
    def blamed(self) -> bool:
        """Whether it is not as training written a second time."""
        return any(failure.check == Check.SAME_TRAINING for failure in self.failures)

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

    def step(self, batch: Sequence[Given]) -> None:
        if not self.running:
            return
        step = len(self._begun) + 1
        try:
            if self._resumes and len(self._begun) == self._settings.resume_at:
                self._resume(step - 1)
            self._plain.reach(step, batch)
            self.job = replace(self.job, rows=sum(rows := rows_of(batch)), skipped=self._plain.skipped)
            if self._settings.uneven:
                self.job = replace(self.job, accumulate=len(rows), parts=rows)
            self._begun.append(self.job)
            self.losses.append(self.scheme.step(batch))
        except OutOfMemory as error:
            self._end(error, step)
        else:
            self.failures += compare.against_plain(self.scheme, self._plain, step)
            self.failures += compare.audit(self.scheme, self.reports[-1], self.job, step)
            self._records.append((step_record(self.reports[-1], step, uneven=self._settings.uneven), self.job))

    def _resume(self, step: int) -> None:
        """Save the run and go on with what is loaded, which must be what was saved."""
        from zerosim.checkpoints.load import load
        from zerosim.checkpoints.save import save

        settings, ranks = self._settings, self._settings.ranks_in(step + 1)
        self._plain.resume(step, ranks)
        self.job = replace(self.job, ranks=ranks, skipped=False)
        with tempfile.TemporaryDirectory() as folder:
            save(self.scheme, folder)
            self._begun.append(self.job)  # in case it does not fit
            self._scheme = load(
                folder, self.row, ranks, capacity=settings.capacity, host_capacity=settings.host_capacity,
                node=settings.node,
            )  # fmt: skip
            self._begun.pop()
        self.failures += compare.as_loaded(self.scheme, self._plain, step)

    def _end(self, error: OutOfMemory, step: int) -> None:
        self.out_of_memory = shortage(error, step)

    def fits_predicted(self) -> bool:
        """Whether all steps that were begun fit, of which the first is begun by allocating."""
        card, host = self.capacity, self._settings.host_capacity
        jobs = set(self._begun or [self.job])
        on_card, on_host = (max(sum(f(job).values()) for job in jobs) for f in (theory.peak, theory.host_peak))
        return (card is None or on_card <= card) and (host is None or on_host <= host)

    def finish(self, *, sanitized: bool = True) -> list[Failure]:
        """All that did not hold, what the card was to hold included, and what the sanitizer finds in one more run.

        Before that run this one's memory is given back: what is to be read of it is read first.
        """
        failures = self.failures + compare.fits_on_card(
            self.row.name, self.job.ranks, self.out_of_memory, self.fits_predicted()
        )
        if sanitized and self.running:
            self._scheme = None  # the sanitizer makes another, and there may be no room for both
            batches = list(batches_of(self._settings, self.job.ranks, STRICT_STEPS))
            failures += sanitizer.run(self.row, self._settings, self.job.ranks, batches)
            if self.job.ranks == self._settings.ranks:  # one N is enough: what is kept there is kept anywhere
                failures += allocations.run(self.row, self._settings, self.job.ranks, batches)
        return failures

    def record(self) -> SchemeRecord:
        reports = self._all_reports()
        predicted: dict[theory.Job, Prediction | None] = {}
        for _, job in self._records:
            if job != self.job and job not in predicted:
                predicted[job] = prediction(job)
        return SchemeRecord(
            row=self.row,
            prediction=prediction(self.job),
            steps=[msgspec.structs.replace(step, prediction=predicted.get(job)) for step, job in self._records],
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
            resident_by_band=plain(report.resident),
            events=event_records(report),
        )
