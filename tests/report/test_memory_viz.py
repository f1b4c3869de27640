"""A planned step as torch's own snapshot: torch's own viewer opens it, and finds the plan's peak in it."""

from __future__ import annotations

import base64
import copy
import functools
import json
import pickle
import re
from typing import Any

import pytest

from zerosim.planner import conventions, planned_step, question
from zerosim.planner import plan as plans
from zerosim.planner.model_source import Perceptron
from zerosim.records.plan_step import PlannedStep
from zerosim.records.question import Question
from zerosim.report import memory_viz

viewer = pytest.importorskip("torch.cuda._memory_viz")
pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SOURCE = Perceptron([67, 131, 127, 61])
ROWS = ["data parallel", "ZeRO-3", "ZeRO-3, kept"]
Entry = dict[str, Any]


@functools.cache
def step(row: str) -> PlannedStep:
    rules = conventions.convention("fsdp2")
    asked = Question(
        model="mlp",
        asked=[3],
        gpus=[3],
        rows=list(rules.rows()),
        others=rules.others,
        convention="fsdp2",
        micro_batch=5,
    )
    plan = plans.make(SOURCE, question.check(asked), lambda doing: None)
    return planned_step.made(SOURCE, plan, planned_step.chosen(plan, row, 3))


def opened(row: str) -> dict[str, Any]:
    """The file, as torch reads it."""
    found: dict[str, Any] = pickle.loads(memory_viz.dumped(step(row)))
    return found


def by_stack(snapshot: dict[str, Any]) -> dict[str, int]:
    """What torch's viewer says is held in the end, in bytes by stack, before it draws that as flames."""
    lines = viewer.memory(snapshot, format_flamegraph=lambda text: text).splitlines()
    found: dict[str, int] = {}
    for line in lines:
        stack, _, nbytes = line.rpartition(" ")
        found[stack] = found.get(stack, 0) + int(nbytes)
    return found


@pytest.mark.parametrize("row", ROWS)
def test_the_peak_that_torch_finds_is_the_plan_s(row: str) -> None:
    """Torch's viewer drops what was freed from a trace; what it leaves of each beginning is what is held then.

    The most of these is the peak of the plan, and the last what it has at rest, as integers.
    """
    snapshot = opened(row)
    [entries] = snapshot["device_traces"]
    held = []
    for count in range(1, len(entries) + 1):
        if entries[count - 1]["action"] not in ("alloc", "free_completed"):
            continue
        beginning = {"device_traces": [copy.copy(entries[:count])]}
        left = viewer.filter_alloc_free_pairs(beginning)["device_traces"][0]
        held.append(sum(entry["size"] for entry in left if entry["action"] == "alloc"))
    peak = step(row).cell.peak
    assert max(held) == peak.total
    assert held[-1] == step(row).cell.at_rest


@pytest.mark.parametrize("row", ROWS)
def test_torch_finds_what_is_at_rest_band_by_band(row: str) -> None:
    """The flames of torch's viewer end with the band, and each is as large as the band at rest, with nothing lost."""
    held = by_stack(opened(row))
    found: dict[str, int] = {}
    for stack, nbytes in held.items():
        assert "gaps" not in stack
        assert stack.startswith(f"stream_0;active_allocated;scheme:0:{row}, N = 3;phase:0:")
        band = stack.rpartition(";band:0:")[2]
        found[band] = found.get(band, 0) + nbytes
    assert found == step(row).cell.resident


def test_torch_s_summary_has_no_fragments() -> None:
    """The viewer's own check of the sums holds, and what is reserved is what is allocated."""
    snapshot = opened("ZeRO-3")
    text = viewer.segsum(snapshot)
    rest = step("ZeRO-3").cell.at_rest
    assert f"total_reserved: {viewer.Bytes(rest)}" in text
    assert f"total_allocated: {viewer.Bytes(rest)}" in text
    assert "total_free: 0.0B" in text
    assert sum(map(viewer.calc_active, snapshot["segments"])) == rest


def test_torch_prints_the_trace() -> None:
    """Each entry has what the viewer reads of it; each allocation lies at the beginning of a segment of its own."""
    snapshot = opened("ZeRO-3")
    text = viewer.trace(snapshot)
    entries = snapshot["device_traces"][0]
    assert text.startswith(f"Device 0 ----------------\n{len(entries)} entries\n")
    actions = [entry["action"] for entry in entries]
    assert text.count(" = cudaMalloc(") == actions.count("segment_alloc") == actions.count("alloc") > 20
    assert len(re.findall(r"^\w+ = \w+\[0:", text, re.MULTILINE)) == actions.count("alloc")
    assert text.count("\n# free completed for") + text.count("cudaFree(") == 2 * actions.count("free_requested")


def test_torch_s_plot_carries_the_file() -> None:
    """The page that torch makes of it has the whole snapshot in it, as it was read."""
    snapshot = opened("ZeRO-3")
    page = viewer.trace_plot(snapshot)
    [local] = json.loads(page.partition("const local_files = ")[2].partition("\n")[0])
    assert pickle.loads(base64.b64decode(local["base64"])) == snapshot == memory_viz.snapshot(step("ZeRO-3"))
    assert "Active Memory Timeline" in page


def test_addresses_never_meet() -> None:
    """What is allocated at a time lies apart, and the browser's viewer can count addresses exactly."""
    [entries] = opened("data parallel")["device_traces"]
    live: dict[int, int] = {}
    for entry in entries:
        if entry["action"] == "alloc":
            assert all(entry["addr"] >= at + size or at >= entry["addr"] + entry["size"] for at, size in live.items())
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
    assert max(entry["addr"] + entry["size"] for entry in entries) < 2**53


def test_categories_are_bands() -> None:
    """Each entry is coloured by its band, and what the browser's viewer falls back to is among the categories."""
    [entries] = opened("ZeRO-3")["device_traces"]
    bands = {*step("ZeRO-3").cell.resident, *(event.name for event in step("ZeRO-3").events if event.kind == "hold")}
    assert {entry["category"] for entry in entries} == {*bands, "unknown"}
    assert [entry["category"] for entry in entries].count("unknown") == 1


def test_only_what_the_browser_s_viewer_can_read_is_in_the_file() -> None:
    """Its reader knows few kinds of values, of protocols 2 to 4: plain ones, and integers of eight bytes."""
    import pickletools

    known = {
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "EMPTY_DICT", "EMPTY_LIST", "APPEND",
        "APPENDS", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1",
        "TUPLE2", "NEWTRUE", "NEWFALSE", "NONE",
    }  # fmt: skip
    content = memory_viz.dumped(step("ZeRO-3"))
    assert content[:2] == b"\x80\x04"
    assert {operation.name for operation, _, _ in pickletools.genops(content)} <= known
