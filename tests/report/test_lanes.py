"""Which messages a computation could have run beside, from the log alone."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.api.dry import dry
from zerosim.lab.as_records import event_records
from zerosim.model import MLP
from zerosim.report.lanes import Piece, lanes
from zerosim.stages import DP, HSDP, Stage, ZeRO1, ZeRO3

UNITS = ["layer 1", "layer 2", "layer 3"]


def messages(row: Stage, **options: Any) -> list[Piece]:
    report = dry(MLP((7, 11, 5, 3)), row, ranks=4, **options)
    return [piece for piece in lanes(event_records(report)) if piece.lane == "communication"]


def beside(row: Stage, **options: Any) -> list[tuple[str, str, list[str]]]:
    return [(each.name, each.unit, each.beside) for each in messages(row, **options)]


def test_gradients_can_be_reduced_under_the_backwards_that_follow() -> None:
    """And updated parameters be gathered under the updates that follow; the last of each must be waited for."""
    one, two, three = UNITS
    assert beside(ZeRO1) == [
        ("reduce-scatter", three, [f"backward of {two}", f"backward of {one}"]),
        ("reduce-scatter", two, [f"backward of {one}"]),
        ("reduce-scatter", one, []),
        ("all-gather", one, [f"optimizer of {two}", f"optimizer of {three}"]),
        ("all-gather", two, [f"optimizer of {three}"]),
        ("all-gather", three, []),
    ]
    halves = [each for each in beside(DP) if each[1] == two]
    assert halves == 2 * [("all-reduce", two, [f"backward of {one}"])]


def test_parameters_can_be_gathered_beside_the_computation_before() -> None:
    """No further ahead; the first layer's have none before them, and the last one's backward follows its forward."""
    one, two, three = UNITS
    gathers = [(unit, others) for name, unit, others in beside(ZeRO3) if name == "all-gather"]
    assert gathers == [
        (one, []), (two, [f"forward of {one}"]), (three, [f"forward of {two}"]),
        (three, []), (two, [f"backward of {three}"]), (one, [f"backward of {two}"]),
    ]  # fmt: skip


def test_the_replicas_wait_as_the_group_does() -> None:
    """The second ring's messages can run beside what the first one's can."""
    reduces = [(name, unit, others) for name, unit, others in beside(HSDP, node=2) if name != "all-gather"]
    for unit in UNITS:
        mine = [others for _, each, others in reduces if each == unit]
        assert len(mine) == 3  # a reduce-scatter, and an all-reduce in two halves
        assert mine == [mine[0]] * 3


def test_a_norm_is_waited_for() -> None:
    """What every rank needs at once, before it updates, runs beside nothing."""
    [norm] = [each for each in messages(ZeRO1, clip=1.0) if each.unit not in UNITS]
    assert (norm.beside, norm.since, norm.until) == ([], norm.begin, norm.end)


@pytest.mark.parametrize("row", [DP, ZeRO1, ZeRO3])
def test_every_piece_ends_with_its_event_and_lies_in_its_window(row: Stage) -> None:
    """In order of time, none before the one before it has ended."""
    events = event_records(dry(MLP((7, 11, 5, 3)), row, ranks=4))
    pieces = lanes(events)
    assert [piece.event for piece in pieces] == [
        index for index, event in enumerate(events, 1) if event.kind in ("compute", "send")
    ]
    for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
        assert piece.end == events[piece.event - 1].seconds
        assert piece.since <= piece.begin <= piece.end <= piece.until
        assert after is None or piece.end <= after.begin
