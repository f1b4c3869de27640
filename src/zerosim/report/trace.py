"""The trace: a lab run's events in the Chrome trace format, which Perfetto and chrome://tracing open.

Owns that format, and what a log of events starts from and ends with. Takes records, computes
nothing but units. Must not know the simulator.

Ranks are processes, compute and communication their two threads, memory their counters: one
of the total and one with a series for each band.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from zerosim.bands import MODEL_STATES
from zerosim.records.files import write_whole
from zerosim.records.results import EventRecord, OutOfMemoryRecord, Results, SchemeRecord
from zerosim.report.lanes import spans

SHOWN_RANKS = 64  # of each scheme: all ranks do the same at the same time, and a viewer has its limits
TRACKS = ("compute", "communication")
Entry = dict[str, Any]


def trace(results: Results) -> dict[str, Any]:
    """The last step of every scheme: the object that ``trace.json`` holds."""
    ranks = results.settings.ranks
    shown = min(ranks, SHOWN_RANKS)
    entries: list[Entry] = []
    for position, record in enumerate(results.schemes):
        events = list(_timed(record))
        for rank in range(shown):
            # No process may be 0, which is the idle one, and no two processes share a thread.
            process = position * shown + rank + 1
            threads = {track: 2 * process + index for index, track in enumerate(TRACKS)}
            entries += process_names(process, threads, f"{record.name}, rank {rank}")
            entries += ({**entry, "pid": process, "tid": threads[track]} for track, entry in events)
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {
            "what": "the last step of each scheme, from its first event on; bytes are per rank",
            "clock": "wall time of one process that takes the turns of all ranks: not parallel time",
            "ranks": ranks,
            "ranks shown": shown,
            "ranks left out": f"{ranks - shown} of each scheme: every rank does the same at the same time",
            "created": results.created,
            "versions": results.versions,
        },
    }


def save_trace(results: Results, path: Path) -> None:
    """Write ``trace.json``, whole or not at all. OSError if that cannot be."""
    write_whole(path, msgspec.json.encode(trace(results)) + b"\n")


# -- the log, from where it starts to where it ends


def start(resident: Mapping[str, int], shortage: OutOfMemoryRecord | None) -> dict[str, int]:
    """Bytes by band that a rank held before the first event of its log.

    A step starts from where the one before ended, at rest. Where there was none, the model
    states are all there was: what else was held when memory ran out, the events brought.
    """
    if resident or shortage is None:
        return dict(resident)
    return {band: shortage.on_card[band] for band in MODEL_STATES if band in shortage.on_card}


def until_out_of_memory(events: Sequence[EventRecord], shortage: OutOfMemoryRecord | None) -> list[EventRecord]:
    """A log without what was given back after the run had ended for want of memory."""
    if shortage is None:
        return list(events)
    held = sum(shortage.on_card.values())
    return list(events[: max((number for number, event in enumerate(events, 1) if event.held == held), default=0)])


# -- entries


def _timed(record: SchemeRecord) -> Iterator[tuple[str, Entry]]:
    """Every entry that has a time, with its track, in order of time; the same for every rank."""
    resident = record.steps[-1].resident if record.steps else {}
    events = until_out_of_memory(record.events, record.out_of_memory)
    pieces: list[tuple[float, str, Entry]] = [
        (seconds, "compute", entry) for seconds, entry in counters(start(resident, record.out_of_memory), events)
    ]
    for span in spans(events):
        category = {"name": f"{span.end.name} {span.end.unit}".strip(), "cat": span.lane}
        arguments: Entry = {"unit": span.end.unit, "phase": span.end.phase}
        if span.lane == "communication":
            arguments |= {"bytes sent": span.end.nbytes}
        pieces.append((span.begin, span.lane, {"ph": "B", **category, "args": arguments}))
        pieces.append((span.end.seconds, span.lane, {"ph": "E", **category}))
    if record.out_of_memory:
        shortage = record.out_of_memory
        label = f"out of memory: {shortage.asked} B of {shortage.band} asked"
        label += f" for {shortage.unit}" if shortage.unit else ""
        label += " on the host" if shortage.place == "host" else ""
        last = events[-1].seconds if events else 0.0
        pieces.append((last, "compute", {"ph": "i", "s": "p", "name": label, "cat": "memory"}))
    # The sort is stable, so that of two entries of one instant the one that ends comes before the one that begins.
    for seconds, track, entry in sorted(pieces, key=lambda piece: piece[0]):
        yield track, {"ts": round(seconds * 1e6, 3), **entry}


def counters(held: dict[str, int], events: Sequence[EventRecord]) -> Iterator[tuple[float, Entry]]:
    """The counters before the first event, and after each that changes them: by band, and the total as recorded."""
    bands = dict.fromkeys([*held, *(event.name for event in events if event.kind in ("hold", "free"))])
    levels = {band: held.get(band, 0) for band in bands}

    def now(seconds: float, total: int) -> Iterator[tuple[float, Entry]]:
        yield seconds, {"ph": "C", "name": "held, B", "cat": "memory", "args": {"total": total}}
        yield seconds, {"ph": "C", "name": "held by band, B", "cat": "memory", "args": dict(levels)}

    yield from now(0.0, sum(levels.values()))
    for event in events:
        if event.kind in ("hold", "free"):
            levels[event.name] += event.nbytes if event.kind == "hold" else -event.nbytes
            yield from now(event.seconds, event.held)


def process_names(process: int, threads: Mapping[str, int], name: str) -> Iterator[Entry]:
    """Metadata: what the process and its threads are called, and where they stand."""

    def named(what: str, thread: int, **arguments: object) -> Entry:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}

    yield named("process_name", threads["compute"], name=name)
    yield named("process_sort_index", threads["compute"], sort_index=process)
    for index, (track, thread) in enumerate(threads.items()):
        yield named("thread_name", thread, name=track)
        yield named("thread_sort_index", thread, sort_index=index)
