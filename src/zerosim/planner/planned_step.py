"""One cell's step, run once more and written down event by event, with the times of the plan's estimate.

Owns which cell that is, and when its holds and frees happen. Must not know what is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerosim.bands import Place
from zerosim.counts import Event, EventKind
from zerosim.planner import cluster as hardware
from zerosim.planner.model_source import ModelSource
from zerosim.planner.runner import Runner
from zerosim.records.plan import Cell, Plan
from zerosim.records.plan_step import Holding, PlannedStep
from zerosim.records.results import EventRecord

_WORK = (EventKind.COMPUTE, EventKind.SEND)
_MEMORY = (EventKind.HOLD, EventKind.FREE)


def chosen(plan: Plan, row: str | None = None, ranks: int | None = None) -> Cell:
    """The cell of that row and N; by default of the fewest GPUs that were asked for, the first row that fits, or else
    the one with the lowest peak. ValueError, with what there is, for one that was not planned."""
    ranks = min(plan.question.asked) if ranks is None else ranks
    cells = [*plan.at(ranks), *plan.beside(ranks)]
    if row is not None:
        cells = [cell for cell in cells if cell.name == row]
    if not cells:
        known = ", ".join(dict.fromkeys(cell.name for cell in (*plan.cells, *plan.others)))
        numbers = ", ".join(map(str, plan.question.gpus))
        raise ValueError(
            f"Planned.save(row): planned were {known}, on {numbers} GPUs; got {row or 'no row'} on {ranks}. Name one "
            f"of these."
        )
    first = None if row else plan.first_fit(ranks)
    return first or min(cells, key=lambda cell: cell.peak.total)


def made(source: ModelSource, plan: Plan, cell: Cell) -> PlannedStep:
    """Run the cell's step again; it holds and sends what the plan says."""
    question, row, ranks = plan.question, cell.row, cell.ranks
    runner = Runner(source, question)
    scheme = runner.start(row, ranks)
    start = [
        Holding(str(band), unit, array.nbytes // len(scheme.ranks))
        for band, unit, array in scheme.ranks.live(place=Place.CARD)
    ]
    scheme.step(runner.prepare(row, ranks=ranks).batch)
    ran = runner.ran(scheme)
    assert ran.peak.total == cell.peak.total, "the same step holds the same"
    card, cluster = hardware.cluster(question, runner.working(question.rows[0]))
    spans = hardware.spans(
        ran, ranks, card, cluster, runner.options(row, ranks), runner.tokens, row, question.placement
    )
    log = [event for event in ran.report.events if event.kind in _WORK + _MEMORY]
    times = list(_times(log, spans))
    return PlannedStep(
        plan=plan,
        cell=cell,
        start=start,
        events=[
            EventRecord(str(event.kind), str(event.name), event.unit, event.nbytes, event.held, end, str(event.phase))
            for event, (_, end) in zip(log, times, strict=True)
        ],
        begins=[begin for begin, _ in times],
    )


def _times(log: Sequence[Event], spans: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """When each event begins and ends: what is computed and sent as the two queues have it, and what is held and freed
    between two computations evenly spread from the end of the one to the end of the other."""
    last = max((end for _, end in spans), default=0.0)
    work = iter(spans)
    planned = [next(work) if event.kind in _WORK else None for event in log]
    computed = [span for event, span in zip(log, planned, strict=True) if event.kind is EventKind.COMPUTE and span]
    bounds = [0.0, *(end for _, end in computed), last]
    stretches: list[int] = [0] * (len(computed) + 1)  # holds and frees before each computation, and after the last
    done = 0
    for event in log:
        done += event.kind is EventKind.COMPUTE
        stretches[done] += event.kind in _MEMORY
    done = passed = 0
    for event, span in zip(log, planned, strict=True):
        if span is not None:
            yield span
            if event.kind is EventKind.COMPUTE:
                done, passed = done + 1, 0
            continue
        passed += 1
        at = bounds[done] + (bounds[done + 1] - bounds[done]) * passed / (stretches[done] + 1)
        yield at, at
