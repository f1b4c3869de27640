"""The grid of a plan: a step run for every choice around what was asked, so that a page can answer without a formula.

Owns which choices there are, and which are given up where there would be too many. Every cell is the one that a plan
of its own would have. Must not know how a grid is shown.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from msgspec.structs import replace

from zerosim.counts import EventKind
from zerosim.planner import cluster as hardware
from zerosim.planner.model_source import ModelSource
from zerosim.planner.plan import cell, possible
from zerosim.planner.question import MOST_RANKS, node_size
from zerosim.planner.runner import Runner
from zerosim.planner.step_run import StepRun
from zerosim.records.plan import Plan
from zerosim.records.plan_grid import Axes, Grid, GridCell, Logs
from zerosim.records.question import Question

MICRO_BATCHES = (1, 2, 4, 8)
CHECKPOINTS = ("none", "selective", "full")
MOST_EVENTS = 700_000  # of all steps together: they take about half a minute
MOST_SECONDS = 120  # of computing, after which no more is measured, which takes long where it goes token by token
LATE = "some choices: measuring the model takes long. What was measured is kept, so that another run gets further"
_GIVEN_UP = ("ranks", "micro_batches", "sequences", "checkpoints")  # of axes that are equally long, the first

Advance = Callable[[str], None]


def axes(source: ModelSource, plan: Plan, advance: Advance) -> Axes:
    """The choices around what was asked: powers of two beside a single N, half and twice the sequence, four
    micro-batches, and each way of checkpointing that the model has; fewer where the steps would have too many events.
    """
    question, sequence = plan.question, plan.model.sequence
    asked = {
        "ranks": question.asked[0],
        "micro_batches": question.micro_batch,
        "sequences": sequence,
        "checkpoints": question.checkpoint,
    }
    found = Axes(
        rows=[*question.rows, *question.others],
        ranks=_ranks(question, plan.model.params),
        micro_batches=sorted({*MICRO_BATCHES, question.micro_batch}),
        sequences=[None] if sequence is None else _sequences(sequence, source.longest),
        checkpoints=list(_checkpoints(source, question, advance)),
    )
    runner = Runner(source, question)
    events = max(len(runner.run(row, question.asked[0]).report.events) for row in question.rows)
    while found.points * events > MOST_EVENTS and (longest := _longest(found)):
        values = getattr(found, longest)
        at = values.index(asked[longest])
        found = replace(found, **{longest: values[1:] if 2 * at >= len(values) else values[:-1]})
    return found


def _ranks(question: Question, params: int) -> list[int]:
    """The numbers that were asked for; beside a single one the power of two below it and two above."""
    if len(question.asked) > 1:
        return question.asked
    asked = question.asked[0]
    powers = [1 << power for power in range(MOST_RANKS.bit_length())]
    below, above = [each for each in powers if each < asked], [each for each in powers if each > asked]
    return [*below[-1:], asked, *(each for each in above[:2] if each <= params)]


def _sequences(asked: int, longest: int | None) -> list[int | None]:
    """Half and twice the length that was asked for, the latter if the model takes so many."""
    double = [2 * asked] if longest is None or 2 * asked <= longest else []
    return [*([asked // 2] if asked > 1 else []), asked, *double]


def _checkpoints(source: ModelSource, question: Question, advance: Advance) -> Iterator[str]:
    """Those that the model has; to know, it is measured with each."""
    for name in CHECKPOINTS:
        advance(f"measuring with checkpointing {name}")
        try:
            Runner(source, replace(question, checkpoint=name)).prepare(question.rows[0])
        except ValueError:
            continue
        yield name


def _longest(found: Axes) -> str | None:
    """The axis with the most choices, or None where each has but one."""
    name = max(_GIVEN_UP, key=lambda each: len(getattr(found, each)))
    return name if len(getattr(found, name)) > 1 else None


def make(source: ModelSource, plan: Plan, chosen: Axes, advance: Advance) -> Grid:
    """Run a step for every point of the axes, what was asked first. What cannot be run, or would take too long, has no
    cell, and the reasons are kept, each once."""
    logs = Logs()
    cells: list[GridCell] = []
    left_out: dict[str, None] = {}
    asked_for = plan.model.sequence, plan.question.checkpoint, plan.question.micro_batch
    points = product(chosen.sequences, chosen.checkpoints, chosen.micro_batches)
    began = time.process_time()
    for point in sorted(points, key=lambda point: sum(map(operator.ne, point, asked_for))):
        sequence, checkpoint, rows = point
        if point != asked_for and time.process_time() - began > MOST_SECONDS:
            left_out.setdefault(LATE)
            break
        asked: Any = {"checkpoint": checkpoint, "micro_batch": rows}
        if sequence != plan.model.sequence:
            asked["sequence"] = sequence
        question = replace(plan.question, **asked)
        runner = Runner(source, question)
        card, cluster = hardware.cluster(question, runner.working(question.rows[0]))
        for ranks, row in product(chosen.ranks, chosen.rows):
            advance(f"{row.name} on {ranks:,}, {rows:,} × {sequence or 'row'}, {checkpoint}")
            if (odd := _odd(question, ranks)) is not None:
                left_out.setdefault(odd)
                continue
            try:
                if row not in question.rows and not possible(runner, row, ranks):
                    nodes = f"{row.name} on {ranks:,} GPUs: in nodes of {node_size(question)}"
                    left_out.setdefault(f"{nodes} it is another of these schemes, or cannot be")
                    continue
                found = cell(runner, row, ranks, card, cluster, blame=False)
            except ValueError as error:  # of what is shown beside what was asked for, not all can be run
                left_out.setdefault(str(error))
                continue
            moves, sizes = logs.add(_changes(runner.run(row, ranks)))
            cells.append(GridCell(rows, sequence, checkpoint, found, moves, sizes))
    ran = {each.cell.row for each in cells}
    chosen = replace(chosen, rows=[row for row in chosen.rows if row in ran])
    return Grid(
        plan=plan, axes=chosen, bands=list(logs.bands), phases=list(logs.phases), units=list(logs.units),
        moves=logs.moves(), logs=logs.logs, cells=cells, left_out=list(left_out),
    )  # fmt: skip


def _odd(question: Question, ranks: int) -> str | None:
    """Why a global batch can't be divided so, if it can't."""
    batch, rows = question.global_batch, question.micro_batch
    if batch is None or batch % (ranks * rows) == 0:
        return None
    return f"{batch:,} rows cannot be divided among {ranks:,} GPUs in micro-batches of {rows:,}"


def _changes(ran: StepRun) -> Iterator[tuple[int, str, str, str]]:
    """What a step held and freed on the card."""
    for event in ran.report.events:
        if event.nbytes and event.kind in (EventKind.HOLD, EventKind.FREE):
            sign = 1 if event.kind is EventKind.HOLD else -1
            yield sign * event.nbytes, event.name, str(event.phase), event.unit
