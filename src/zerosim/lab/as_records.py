"""A run's reports, and what the closed forms say of a step, turned into records.

Owns how they are written down. Must not know how a run is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim import theory
from zerosim.counts import Peak, Report
from zerosim.ranks import OutOfMemory
from zerosim.records.results import EventRecord, OutOfMemoryRecord, PeakRecord, Prediction, StepRecord, TrafficRecord


def prediction(job: theory.Job) -> Prediction:
    """What the closed forms say of a step, as a record."""
    return Prediction(
        resident=plain(theory.resident(job)),
        peak=plain(theory.peak(job)),
        peak_without_activations=plain(theory.peak_without_activations(job)),
        traffic={name: plain(bands) for name, bands in theory.traffic(job).items()},
        padding=theory.padding(job),
        padding_sent=theory.padding_sent(job),
        flops=plain(theory.flops(job)),
        node_outside={
            name: plain({band: sum(ranks[: job.group]) for band, ranks in bands.items()})
            for name, bands in theory.outside(job).items()
        },
        host=plain(theory.host_resident(job)),
        host_peak=plain(theory.host_peak(job)),
        copies=_by_place(theory.copies(job)),
    )


def plain(counts: Mapping[Any, int]) -> dict[str, int]:
    """Counts under plain names, those of nothing left out."""
    return {str(name): count for name, count in counts.items() if count}


def _by_place(copies: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Copies over the host link, by the place that they go to and band."""
    places: dict[str, dict[str, int]] = {}
    for (place, band), nbytes in copies.items():
        places.setdefault(str(place), {})[str(band)] = nbytes
    return places


def _peak_record(peak: Peak) -> PeakRecord:
    return PeakRecord(total=peak.total, by_band=plain(peak.by_band), unit=peak.unit, phase=peak.phase)


def shortage(error: OutOfMemory, step: int) -> OutOfMemoryRecord:
    """Where memory ran out, and what was asked for."""
    return OutOfMemoryRecord(
        step=step, rank=error.rank, band=error.band, unit=error.unit, asked=error.asked, held=error.held,
        place=error.place, on_card=plain(error.on_card),
    )  # fmt: skip


def event_records(report: Report) -> list[EventRecord]:
    """The log of a step."""
    return [
        EventRecord(**{field: getattr(event, field) for field in EventRecord.__struct_fields__})
        for event in report.events
    ]


def step_record(report: Report, step: int | None = None, *, uneven: bool = False) -> StepRecord:
    """A step, without its log: the one of that number, or of the report's."""
    return StepRecord(
        step=step or report.step,
        mean_of_means=report.mean_of_means if uneven else None,
        norm=report.norm,
        scale=report.scale,
        skipped=report.skipped,
        loss=report.loss,
        resident=plain(report.resident),
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
        flops=plain(report.flops),
        seconds={str(phase): seconds for phase, seconds in report.seconds.items()},
        host=plain(report.host),
        host_peak=_peak_record(report.host_peak),
        copies=_by_place(report.copies),
    )
