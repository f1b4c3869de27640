"""A step that was run, in numbers: what its ledger says, in the records of a plan.

Owns these records. No number here is worked out: each was held, sent or computed by the schedule. Must not know which
steps are run, nor why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.bands import FP32, NOT_SAVED, Band
from zerosim.counts import EventKind, Report
from zerosim.layers import Layer
from zerosim.records.files import CHUNK
from zerosim.records.plan import Host, Peak, Saved, Traffic
from zerosim.schemes import Scheme

UNITS_NAMED = 5  # of a peak


@dataclass(frozen=True)
class StepRun:
    """A step that a card had room for, or that no card limited."""

    resident: dict[str, int]
    peak: Peak
    traffic: list[Traffic]
    flops: dict[str, int]
    report: Report
    host: Host | None
    groups: dict[str, list[str]]
    """The groups of parameters that each unit reads."""
    layers: Sequence[Layer]
    saved: Saved

    @property
    def host_short(self) -> bool:
        """Whether the host of a node has no room for it."""
        return self.host is not None and self.host.short


def _host(report: Report, memory: int | None, node: int) -> Host | None:
    """What a rank has of the host, if anything."""
    if not report.host_peak.total:
        return None
    room = None if memory is None else memory - node * report.host_peak.total
    return Host(resident=plain(report.host), peak=report.host_peak.total, copied=sum(report.copies.values()), room=room)


def step_run(scheme: Scheme, host_memory: int | None, node: int) -> StepRun:
    """What the last step of a scheme says, on nodes of ``node`` ranks with so much host memory."""
    report = scheme.reports[-1]
    return StepRun(
        resident=plain(report.resident),
        peak=_peak(report),
        traffic=[
            Traffic(
                collective=collective,
                band=str(band),
                sent=int(traffic.sent.max(initial=0)),
                messages=traffic.messages,
                between=traffic.node_outside,
            )
            for (collective, band), traffic in report.traffic.items()
            if traffic.messages
        ],
        flops={str(phase): count for phase, count in report.flops.items() if count},
        report=report,
        host=_host(report, host_memory, node),
        groups={layer.name: [group.name for group in layer.groups] for layer in scheme.layers},
        layers=scheme.layers,
        saved=saved(scheme),
    )


def saved(scheme: Scheme) -> Saved:
    """What a checkpoint of the states that are held takes: each piece once, of the lowest rank that has it."""
    total = rank = by_layer = 0
    for bucket in scheme.buckets:
        for band, state in bucket.states.items():
            own = state.nbytes // len(state)
            if band not in NOT_SAVED:
                rank += own
                total += own * (scheme.ring.size if band is Band.BUFFERS else bucket.padded // state.shape[1])
        if (kept := bucket.states.get(Band.MASTER, bucket.states.get(Band.PARAMS))) is not None:
            by_layer = max(by_layer, FP32.itemsize * bucket.padded + min(CHUNK, kept.nbytes // len(kept)))
    if scales := scheme.ledger.held.get(Band.SCALES, 0):  # of moments, and sharded as they are
        rank += scales
        total += scales * scheme.shard.piece(Band.EXP_AVG, 0, scheme.ring.size, scheme.options.node)[1]
    return Saved(total=total, rank=rank, whole=FP32.itemsize * scheme.model.n_params, by_layer=by_layer)


def _peak(report: Report) -> Peak:
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
    return Peak(
        total=report.peak.total,
        by_band=plain(report.peak.by_band),
        unit=report.peak.unit,
        phase=str(report.peak.phase),
        by_unit={unit: at_peak[unit] for unit in most},
    )


def plain(bands: dict[str, int]) -> dict[str, int]:
    """By the names of the bands, in the order in which they are listed everywhere."""
    return {str(band): int(bands[band]) for band in Band if bands.get(band)}
