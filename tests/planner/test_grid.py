"""The grid is made of plans: each cell is the one that a plan of its own would have, and its log leads to its peak."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from zerosim.planner import conventions, grid, question
from zerosim.planner import plan as plans
from zerosim.planner.model_source import Perceptron
from zerosim.planner.runner import Runner
from zerosim.records.plan import Plan
from zerosim.records.plan_grid import Axes, Grid, Logs
from zerosim.records.question import Question
from zerosim.stages import DP, ZeRO3

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDTHS = [67, 131, 127, 61]
SOURCE = Perceptron(WIDTHS)


def quietly(*_: object) -> None:
    """Nobody watches."""


def planned(gpus: int = 3, **asked: Any) -> Plan:
    rules = conventions.convention("fsdp2")
    given: dict[str, Any] = {"rows": rules.rows(), "others": rules.others, "memory": 400_000, "reserve": 40_000}
    return plans.make(
        SOURCE,
        question.check(Question(model="mlp", asked=[gpus], gpus=[gpus], convention="fsdp2", **(given | asked))),
        quietly,
    )


def gridded(plan: Plan) -> Grid:
    return grid.make(SOURCE, plan, grid.axes(SOURCE, plan, quietly), quietly)


@functools.cache
def whole() -> Grid:
    return gridded(planned())


def test_the_axes_are_around_what_was_asked() -> None:
    """A power of two below N and two above, four micro-batches, and only the checkpointing that the model has."""
    axes = grid.axes(SOURCE, planned(), quietly)
    assert (axes.ranks, axes.micro_batches) == ([2, 3, 4, 8], [1, 2, 4, 8])
    assert (axes.sequences, axes.checkpoints) == ([None], ["none", "full"])
    assert [row.name for row in axes.rows] == ["ZeRO-3", "data parallel", "ZeRO-3, kept", "HSDP", "hpZ"]
    assert [row.name for row in whole().axes.rows] == ["ZeRO-3", "data parallel", "ZeRO-3, kept"]
    assert "HSDP on 4 GPUs: in nodes of 8 it is another of these schemes, or cannot be" in whole().left_out
    odd = grid.axes(SOURCE, planned(gpus=1, micro_batch=3, checkpoint="full"), quietly)
    assert (odd.ranks, odd.micro_batches) == ([1, 2, 4], [1, 2, 3, 4, 8])


def test_sequences_are_those_that_the_model_takes() -> None:
    """Half and twice the length that was asked for, unless that is more than the model was made for."""
    assert grid._sequences(512, None) == [256, 512, 1024]
    assert grid._sequences(512, 1024) == [256, 512, 1024]
    assert grid._sequences(512, 1023) == [256, 512]
    assert grid._sequences(1, None) == [1, 2]


@pytest.mark.parametrize(("ranks", "rows", "checkpoint"), [(3, 1, "none"), (8, 4, "full"), (2, 8, "none")])
def test_a_cell_is_the_one_of_its_own_plan(ranks: int, rows: int, checkpoint: str) -> None:
    """Asked by itself, the same number of GPUs, micro-batch and checkpointing gives every number of the cells."""
    alone = planned(gpus=ranks, micro_batch=rows, checkpoint=checkpoint)
    cells = [
        each.cell
        for each in whole().cells
        if (each.cell.ranks, each.micro_batch, each.checkpoint) == (ranks, rows, checkpoint)
    ]
    expected = [replace(cell, shortage=None) for cell in (*alone.cells, *alone.others)]  # nobody is blamed in a grid
    assert cells == expected
    assert len(cells) == 3  # among few ranks HSDP and hpZ are no rows of their own


def test_a_log_leads_to_the_peak_and_ends_at_rest() -> None:
    """What a cell held and freed adds up, to the byte, to the peak of its record, by band, and to what is at rest."""
    found = whole()
    for each in found.cells:
        log = list(found.log(each))
        held = dict(each.cell.resident)
        for change in log:
            held[change.band] = held.get(change.band, 0) - change.change
        top = sum(held.values())
        by_band = dict(held)
        for change in log:
            held[change.band] += change.change
            assert sum(held.values()) == change.held
            if change.held > top:
                top, by_band = change.held, dict(held)
        assert top == each.cell.peak.total
        assert {band: nbytes for band, nbytes in by_band.items() if nbytes} == each.cell.peak.by_band
        assert {band: nbytes for band, nbytes in held.items() if nbytes} == each.cell.resident


def test_a_step_may_begin_with_less_than_it_ends_with() -> None:
    """What is held before the first move is what is at rest in the end, less what the moves add up to."""
    logs = Logs()
    moves, sizes = logs.add(
        [(7, "grads", "backward", "b"), (5, "blocks", "backward", "a"), (-5, "blocks", "other", "b")]
    )
    first = whole().cells[0]
    each = replace(first, cell=replace(first.cell, resident={"params": 11, "grads": 7}), moves=moves, sizes=sizes)
    found = replace(
        whole(), bands=list(logs.bands), phases=list(logs.phases), units=list(logs.units), moves=logs.moves(),
        logs=logs.logs,
    )  # fmt: skip
    assert [change.held for change in found.log(each)] == [11 + 7, 11 + 7 + 5, 11 + 7]
    assert [change.unit for change in found.log(each)] == ["b", "a", "b"]


def test_logs_are_shared() -> None:
    """Cells of one row share their moves, whatever their sizes are."""
    found = whole()
    assert len(found.logs) < len(found.cells) / 4
    assert len(msgspec.json.encode(found.logs)) < 20 * len(msgspec.json.encode(found.cells[0]))


def test_a_global_batch_is_never_rounded() -> None:
    """Of a global batch those points have no cell at which it can't be divided, and it is said of each why."""
    found = gridded(planned(gpus=2, global_batch=8, rows=[ZeRO3], others=()))
    points = {(each.cell.ranks, each.micro_batch) for each in found.cells}
    assert points == {(ranks, rows) for ranks in (1, 2, 4, 8) for rows in (1, 2, 4, 8) if ranks * rows <= 8}
    assert "8 rows cannot be divided among 8 GPUs in micro-batches of 2" in found.left_out


def test_too_many_events_cost_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the steps would have more events than there is time for, what is farthest from what was asked goes."""
    plan = planned(gpus=4, micro_batch=2)
    full = grid.axes(SOURCE, plan, quietly)
    monkeypatch.setattr(grid, "MOST_EVENTS", 0)
    assert grid.axes(SOURCE, plan, quietly) == replace(full, ranks=[4], micro_batches=[2], checkpoints=["none"])
    events = len(Runner(SOURCE, plan.question).run(plan.question.rows[-1], 4).report.events)
    monkeypatch.setattr(grid, "MOST_EVENTS", (full.points - 1) * events)
    fewer = grid.axes(SOURCE, plan, quietly)
    assert (full.ranks, fewer.ranks, fewer.micro_batches) == ([2, 4, 8, 16], [2, 4, 8], full.micro_batches)


def test_what_takes_too_long_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is over nothing more is measured; what was asked is always there."""
    monkeypatch.setattr(grid, "MOST_SECONDS", -1)
    found = gridded(planned(rows=[DP], others=()))
    assert {(each.micro_batch, each.checkpoint) for each in found.cells} == {(1, "none")}
    assert found.left_out == [grid.LATE]


def test_every_step_is_told_of() -> None:
    """What is being done is said once for each point of the axes, as many times as they say."""
    said: list[str] = []
    plan = planned(rows=[DP], others=())
    axes = Axes(rows=[DP], ranks=[2, 3], micro_batches=[1, 2], sequences=[None], checkpoints=["none"])
    grid.make(SOURCE, plan, axes, said.append)
    assert len(said) == axes.points == 4
    assert said[0] == "data parallel on 2, 1 × row, none"
