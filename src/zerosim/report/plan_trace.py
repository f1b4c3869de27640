"""A planned step in the Chrome trace format, which Perfetto and chrome://tracing open.

Owns what of a planned step is in it: computing and sending as two lanes, memory by band as counters, and a mark at the
peak. Takes records, computes nothing but units. Must not know the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from zerosim.records.plan_step import PlannedStep
from zerosim.report import plan_verdict as verdict
from zerosim.report.trace import TRACKS, Entry, counters, process_names
from zerosim.util import sizes

PROCESS = 1  # 0 is the idle one
THREADS = {track: PROCESS + index for index, track in enumerate(TRACKS, 1)}
_LANES = {"compute": "compute", "send": "communication"}


def encoded(step: PlannedStep) -> bytes:
    """The trace as JSON."""
    return msgspec.json.encode(trace(step)) + b"\n"


def trace(step: PlannedStep) -> dict[str, Any]:
    """The object that the file holds."""
    plan, cell = step.plan, step.cell
    start = step.held_at_start()
    title = f"{cell.name}, one of {cell.ranks:,} GPUs"
    memory = ((seconds, {**entry, "tid": THREADS["compute"]}) for seconds, entry in counters(start, step.events))
    timed: list[tuple[float, Entry]] = [*memory, *_spans(step), _peak(step, start)]
    return {
        "traceEvents": [
            *process_names(PROCESS, THREADS, title),
            *({"ts": _micro(at), **entry, "pid": PROCESS} for at, entry in sorted(timed, key=lambda each: each[0])),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "what": f"one step of {plan.model.name}, planned: {title}; bytes are per rank",
            "clock": "seconds as the plan estimates them, computing and sending as two queues that overlap; what is "
            "held and freed between two computations is spread evenly between their ends",
            "card": plan.cluster.card if plan.cluster else "",
            "peak, B": cell.peak.total,
            "created": plan.created,
            "versions": plan.versions,
        },
    }


def _spans(step: PlannedStep) -> Iterator[tuple[float, Entry]]:
    """What is computed and sent, each on its lane."""
    for event, begin in zip(step.events, step.begins, strict=True):
        if (lane := _LANES.get(event.kind)) is None:
            continue
        arguments: Entry = {"unit": event.unit, "phase": event.phase}
        if lane == "communication":
            arguments |= {"bytes sent": event.nbytes}
        yield begin, {
            "ph": "X", "dur": _micro(event.seconds - begin), "tid": THREADS[lane], "cat": lane,
            "name": f"{event.name} {event.unit}".strip(), "args": arguments,
        }  # fmt: skip


def _peak(step: PlannedStep, start: Mapping[str, int]) -> tuple[float, Entry]:
    """The mark of the peak; it may be what is held before the first event."""
    peak = step.cell.peak
    reached = (event.seconds for event in step.events if event.kind == "hold" and event.held == peak.total)
    at = 0.0 if sum(start.values()) == peak.total else next(reached)
    name = f"peak: {sizes.both(peak.total)}, {verdict.instant(peak)}"
    return at, {"ph": "i", "s": "p", "tid": THREADS["compute"], "name": name, "cat": "memory"}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
