"""A planned step as a snapshot of torch's allocator, which https://pytorch.org/memory_viz opens.

Owns that format (``torch.cuda.memory._dump_snapshot``). Takes records; computes nothing but addresses. Must not know
the simulator, nor load torch.

The model states are allocated first, then the step is made. A frame names the band, the unit and the phase, from the
inside out, as a stack is listed. Each allocation is a segment of its own, as long as it lasts: a ledger knows no
fragmentation, so what is reserved is what is allocated, and the peak of either is the plan's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from zerosim.records.plan_step import PlannedStep

FIRST = 0x7F00_0000_0000  # where addresses begin; they are aligned as large segments are
ALIGNED = 2 << 20
SMALL = 1 << 20  # bytes up to which torch calls a segment small
BEFORE = "before the step"
PROTOCOL = 4  # the viewer reads 2 to 4

Entry = dict[str, Any]


def dumped(step: PlannedStep) -> bytes:
    """The snapshot as the file that torch would write."""
    return pickle.dumps(snapshot(step), protocol=PROTOCOL)


def snapshot(step: PlannedStep) -> dict[str, Any]:
    """Segments that are there when the step is over, and everything that was allocated and freed until then."""
    entries: list[Entry] = []
    live: dict[int, Entry] = {}  # allocations by address, in order
    same: dict[tuple[str, str, int], list[int]] = {}  # addresses of what is alike, of which a free takes the last
    free = FIRST
    for sign, band, unit, phase, nbytes, seconds in _changes(step):
        where = {"stream": 0, "time_us": round(seconds * 1e6), "frames": _frames(step, band, unit, phase)}
        alike = same.setdefault((band, unit, nbytes), [])
        if sign > 0:
            address, free = free, free + -(-nbytes // ALIGNED) * ALIGNED
            alike.append(address)
            live[address] = where
            actions = ["segment_alloc", "alloc"]
        else:
            address = alike.pop()
            del live[address]
            actions = ["free_requested", "free_completed", "segment_free"]
        about = {"addr": address, "size": nbytes, **where, "category": band, "pool_id": (0, 0)}
        entries += ({"action": action, **about} for action in actions)
    sizes = {address: nbytes for (_, _, nbytes), alike in same.items() for address in alike}
    # Torch ends a trace so. A viewer that colours by category also wants one for what it knows none of.
    end: Entry = {"stream": 0, "time_us": entries[-1]["time_us"] if entries else 0, "frames": [], "category": "unknown"}
    entries.append({"action": "snapshot", "addr": 0, "size": sum(sizes.values()), **end})
    return {
        "segments": [_segment(address, sizes[address], about["frames"]) for address, about in live.items()],
        "device_traces": [entries],
    }


def _changes(step: PlannedStep) -> Iterator[tuple[int, str, str, str, int, float]]:
    """What is allocated and freed: whether, band, unit, phase, bytes, second."""
    for each in step.start:
        if each.nbytes:
            yield 1, each.band, each.unit, BEFORE, each.nbytes, 0.0
    for event in step.events:
        if event.nbytes and event.kind in ("hold", "free"):
            sign = 1 if event.kind == "hold" else -1
            yield sign, event.name, event.unit, event.phase, event.nbytes, event.seconds


def _frames(step: PlannedStep, band: str, unit: str, phase: str) -> list[dict[str, Any]]:
    named = {"band": band, "unit": unit, "phase": phase, "scheme": f"{step.cell.name}, N = {step.cell.ranks:,}"}
    return [{"filename": what, "line": 0, "name": name} for what, name in named.items() if name]


def _segment(address: int, nbytes: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """An allocation that is there in the end, in a segment that it fills."""
    block = {"address": address, "size": nbytes, "requested_size": nbytes, "state": "active_allocated"}
    return {
        "device": 0, "address": address, "total_size": nbytes, "allocated_size": nbytes, "active_size": nbytes,
        "requested_size": nbytes, "stream": 0, "segment_type": "small" if nbytes <= SMALL else "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": frames, "blocks": [{**block, "frames": frames}],
    }  # fmt: skip
