"""A planned step, event by event: it holds what the plan says, at the times of the plan's estimate."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import msgspec
import pytest

from zerosim.planner import conventions, planned_step, question
from zerosim.planner import plan as plans
from zerosim.planner.model_source import Perceptron
from zerosim.records.plan import Plan
from zerosim.records.plan_step import PlannedStep
from zerosim.records.question import Question
from zerosim.report import plan_trace

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SOURCE = Perceptron([67, 131, 127, 61])
ROWS = ["data parallel", "ZeRO-3", "ZeRO-3, kept"]


def planned(**asked: Any) -> Plan:
    rules = conventions.convention("fsdp2")
    given: dict[str, Any] = {"rows": rules.rows(), "others": rules.others, "asked": [3], "gpus": [3]}
    wanted = Question(model="mlp", convention="fsdp2", **(given | asked))
    return plans.make(SOURCE, question.check(wanted), lambda doing: None)


@functools.cache
def step(row: str) -> PlannedStep:
    plan = planned(accumulate=2)
    return planned_step.made(SOURCE, plan, planned_step.chosen(plan, row))


def test_a_step_is_chosen() -> None:
    """By default the first row that fits on the fewest GPUs, or the lowest peak where none does."""
    plan = planned(asked=[3, 5], gpus=[3, 5])
    least = min(plan.at(3) + plan.beside(3), key=lambda cell: cell.peak.total)
    assert planned_step.chosen(plan) == least
    most = max(cell.peak.total for cell in plan.at(3))
    fits = planned(asked=[3, 5], gpus=[3, 5], memory=most)
    assert planned_step.chosen(fits) == fits.first_fit(3)
    assert planned_step.chosen(fits, "data parallel", 5) == next(
        cell for cell in fits.beside(5) if cell.name == "data parallel"
    )
    with pytest.raises(ValueError, match="on 3, 5 GPUs; got nope on 3"):
        planned_step.chosen(plan, "nope")


@pytest.mark.parametrize("row", ROWS)
def test_it_holds_what_the_plan_says(row: str) -> None:
    """From what is held before it the log comes to the peak and to what is at rest, to the byte."""
    found = step(row)
    held = found.held_at_start()
    levels = [sum(held.values())]
    for event in found.events:
        if event.kind in ("hold", "free"):
            held[event.name] = held.get(event.name, 0) + (event.nbytes if event.kind == "hold" else -event.nbytes)
            levels.append(sum(held.values()))
            assert levels[-1] == event.held
    assert max(levels) == found.cell.peak.total
    assert {band: nbytes for band, nbytes in held.items() if nbytes} == found.cell.resident
    assert sum(event.nbytes for event in found.events if event.kind == "send") == found.cell.sent


@pytest.mark.parametrize("row", ROWS)
def test_its_times_are_the_estimate_s(row: str) -> None:
    """Each lane does one thing at a time, memory changes in order, and the last is done when the step is."""
    found = step(row)
    assert found.cell.time is not None
    estimate = found.cell.time.estimate
    assert estimate is not None
    timed = list(zip(found.events, found.begins, strict=True))
    spans = {
        kind: [(begin, event.seconds) for event, begin in timed if event.kind == kind] for kind in ("compute", "send")
    }
    for lane in spans.values():
        assert all(begin <= end for begin, end in lane)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(lane)))
    assert spans["compute"] == sorted(spans["compute"])
    moments = [event.seconds for event in found.events if event.kind in ("hold", "free")]
    assert moments == sorted(moments)
    assert max(event.seconds for event in found.events) == max(end for lane in spans.values() for _, end in lane)
    assert max(event.seconds for event in found.events) == pytest.approx(estimate.seconds, rel=1e-12)
    assert sum(end - begin for begin, end in spans["compute"]) == pytest.approx(estimate.computing, rel=1e-9)


def test_what_is_held_is_spread_between_computations() -> None:
    """Of what is held and freed between the ends of two computations each has its own instant, evenly apart."""
    found = step("ZeRO-3")
    marks = [0.0]
    between: list[float] = []
    for event in found.events:
        if event.kind == "compute":
            gaps = [later - earlier for earlier, later in itertools.pairwise([marks[-1], *between, event.seconds])]
            assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=1e-6)
            marks.append(event.seconds)
            between = []
        elif event.kind in ("hold", "free"):
            between.append(event.seconds)
    assert len(marks) > 10


@pytest.mark.parametrize("row", ROWS)
def test_the_trace_has_lanes_counters_and_the_peak(row: str) -> None:
    """Perfetto's counters rise to the plan's peak, band by band; what is computed and sent are lanes of spans."""
    found = step(row)
    trace = msgspec.json.decode(plan_trace.encoded(found))
    entries = [each for each in trace["traceEvents"] if each["ph"] != "M"]
    totals = [each["args"]["total"] for each in entries if each["name"] == "held, B"]
    bands = [each["args"] for each in entries if each["name"] == "held by band, B"]
    assert max(totals) == found.cell.peak.total
    assert [sum(levels.values()) for levels in bands] == totals
    highest = bands[totals.index(max(totals))]
    assert {band: nbytes for band, nbytes in highest.items() if nbytes} == found.cell.peak.by_band
    stamps = [each["ts"] for each in entries]
    assert stamps == sorted(stamps)
    spans = [each for each in entries if each["ph"] == "X"]
    names = {each["tid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"}
    lanes = {names[each["tid"]] for each in spans}
    assert lanes == {"compute", "communication"}
    sent = [each["args"]["bytes sent"] for each in spans if names[each["tid"]] == "communication"]
    assert sum(sent) == found.cell.sent
    [mark] = [each for each in entries if each["ph"] == "i"]
    there = [each["args"]["total"] for each in entries if each["name"] == "held, B" and each["ts"] == mark["ts"]]
    assert found.cell.peak.total in there
    assert mark["name"].startswith("peak: ")
