"""One step of one stage on N ranks, run on shapes, and what its ledger says.

Owns the way from a question to a run: the options that a stage is started with, and the
records that are made of its ledger. No number here is worked out: each was held, sent or
computed by the schedule. Must not know how questions are searched or shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerosim.bands import PRECISIONS, Band, DType
from zerosim.ledger import EventKind, Report
from zerosim.optimizer import SGD, Adam
from zerosim.planner.conventions import Convention, convention
from zerosim.planner.sources import Load, Ready, Source
from zerosim.ranks import OutOfMemory
from zerosim.records.plan import Instant, Moved, Question, Shortage
from zerosim.schemes import DP, SCHEMES, Scheme
from zerosim.worlds.dry import DryRing

UNITS_NAMED = 5  # with an instant
OPTIMIZERS = {"adam": Adam(), "sgd": SGD(momentum=0.0), "momentum": SGD(momentum=0.9)}


@dataclass(frozen=True)
class Ran:
    """A step that a card had room for, or that no card limited."""

    resident: dict[str, int]
    peak: Instant
    traffic: list[Moved]
    flops: dict[str, int]
    report: Report
    groups: dict[str, list[str]]
    """The groups of parameters that each unit reads."""


class Runner:
    """Runs a question's stages; what a source has been made ready for is kept and used again."""

    def __init__(self, source: Source, question: Question) -> None:
        self.source, self.question = source, question
        self.convention: Convention = convention(question.convention)
        self._ready: dict[tuple[Load, int], Ready] = {}

    def options(self, stage: int) -> dict[str, Any]:
        """What a scheme of this stage is started with: the convention's options, and over them what was asked for."""
        question = self.question
        options = self.convention.options(stage, question.precision)
        for name in ("wire", "wire_params", "padding", "all_reduce", "sync", "prefetch"):
            if (value := getattr(question, name)) is not None:
                options[name] = value
        if question.wire is not None and question.wire_params is None:
            options.pop("wire_params", None)  # one dtype was asked for, for all that travels
        if question.bucket is not None and not self._beside(stage):
            options["bucket"] = question.bucket
        options["accumulate"] = question.accumulate
        options["optimizer"] = OPTIMIZERS[question.optimizer]
        return options

    def _beside(self, stage: int) -> dict[Band, int]:
        """What the convention holds beside the states, elements by band; a bucket's size is its own there."""
        bucket = self.question.bucket
        return self.convention.extra(stage, bucket if isinstance(bucket, int) else None)

    def working(self, stage: int) -> DType:
        """The dtype that forward and backward read parameters in."""
        return PRECISIONS[self.options(stage).get("precision", "mixed")].working

    def ready(self, stage: int, micro_batch: int | None = None) -> Ready:
        """The model and a batch of the question's rows, or of micro-batches of another size."""
        rows = micro_batch or self.question.micro_batch
        load = Load(rows, self.question.sequence, self.question.checkpoint, self.working(stage))
        key = load, self.question.accumulate
        if key not in self._ready:
            self._ready[key] = self.source.ready(load, rows * self.question.accumulate)
        return self._ready[key]

    def start(self, stage: int, ranks: int, capacity: int | None = None, micro_batch: int | None = None) -> Scheme:
        """A scheme with its model states held, and what the convention holds beside them. OutOfMemory if too much."""
        ready = self.ready(stage, micro_batch)
        options = self.options(stage) | ready.options
        scheme: Scheme = SCHEMES[stage](ready.model, ranks, ring=DryRing(ranks), capacity=capacity, **options)
        if scheme.shard is not DP:  # with one rank nothing is reduced, and no bucket is there
            for band, elements in self._beside(stage).items():
                scheme.ranks.hold(band, (elements,), "bucket")
        return scheme

    def run(
        self, stage: int, ranks: int, capacity: int | None = None, micro_batch: int | None = None
    ) -> Ran | Shortage:
        """A step, or, where a card of ``capacity`` bytes has no room for it, the hold that was too much."""
        try:
            scheme = self.start(stage, ranks, capacity, micro_batch)
            scheme.step(self.ready(stage, micro_batch).batch)
        except OutOfMemory as error:
            return Shortage(band=str(error.band), unit=error.unit, asked=error.asked, held=_plain(error.held))
        report = scheme.reports[-1]
        return Ran(
            resident=_plain(report.resident),
            peak=_instant(report),
            traffic=[
                Moved(
                    collective=collective,
                    band=str(band),
                    sent=int(traffic.sent.max(initial=0)),
                    messages=traffic.messages,
                )
                for (collective, band), traffic in report.traffic.items()
                if traffic.messages
            ],
            flops={str(phase): count for phase, count in report.flops.items() if count},
            report=report,
            groups={layer.name: [group.name for group in layer.groups] for layer in scheme.layers},
        )

    def holds_states(self, stage: int, ranks: int, capacity: int) -> bool:
        """Whether a card has room for the model states, with nothing trained."""
        try:
            self.start(stage, ranks, capacity)
        except OutOfMemory:
            return False
        return True

    def fits(self, stage: int, ranks: int, capacity: int, micro_batch: int | None = None) -> bool:
        """Whether a card has room for a step."""
        return isinstance(self.run(stage, ranks, capacity, micro_batch), Ran)


def _instant(report: Report) -> Instant:
    """The peak, and the units that held the most of what comes and goes then, from the log of holds and frees."""
    held: dict[str, int] = {}
    at_peak: dict[str, int] = {}
    for event in report.events:
        if event.kind in (EventKind.HOLD, EventKind.FREE):
            change = event.nbytes if event.kind is EventKind.HOLD else -event.nbytes
            held[event.unit] = held.get(event.unit, 0) + change
            if event.held == report.peak.total:
                at_peak = {unit: nbytes for unit, nbytes in held.items() if nbytes > 0}
                break
    most = sorted(at_peak, key=at_peak.__getitem__, reverse=True)[:UNITS_NAMED]
    return Instant(
        total=report.peak.total,
        by_band=_plain(report.peak.by_band),
        unit=report.peak.unit,
        phase=str(report.peak.phase),
        by_unit={unit: at_peak[unit] for unit in most},
    )


def _plain(bands: dict[str, int]) -> dict[str, int]:
    """By the names of the bands, in the order in which they are listed everywhere."""
    return {str(band): int(bands[band]) for band in Band if bands.get(band)}
