"""The trace says what the records say, in the form that Perfetto reads."""

from __future__ import annotations

import functools
import itertools
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from helpers import plain_lab
from zerosim.bands import MODEL_STATES
from zerosim.records.results import Results, SchemeRecord, Settings
from zerosim.report import trace

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SETTINGS = Settings(
    ranks=5, steps=2, batch=2, seed=0, model_seed=0, precision="mixed", wire="fp32", gather="layer", data="noise",
    capacity=None, widths=[7, 13, 11, 7],
)  # fmt: skip
Entry = dict[str, Any]


@functools.cache
def run(capacity: int | None = None) -> Results:
    return plain_lab(replace(SETTINGS, capacity=capacity))


def small_card() -> Results:
    """A card that is one byte too small for ZeRO-2: it runs out within a step, and data parallel before the first."""
    peak = run().scheme("ZeRO-2").steps[-1].peak.total
    return run(peak - 1)


@pytest.fixture(params=[run, small_card], ids=["all fit", "some do not"])
def results(request: pytest.FixtureRequest) -> Results:
    return request.param()  # type: ignore[no-any-return]


def entries(results: Results) -> list[Entry]:
    found: list[Entry] = msgspec.json.decode(msgspec.json.encode(trace.trace(results)))["traceEvents"]
    return found


def named(found: list[Entry], what: str) -> dict[tuple[int, int], str]:
    """Names of processes or threads by (pid, tid)."""
    return {(each["pid"], each["tid"]): each["args"]["name"] for each in found if each["name"] == what}


def of_rank(results: Results, scheme: str, rank: int) -> list[Entry]:
    """The entries of one rank that have a time."""
    found = entries(results)
    [(process, _)] = [key for key, name in named(found, "process_name").items() if name == f"{scheme}, rank {rank}"]
    return [each for each in found if each["pid"] == process and each["ph"] != "M"]


def until_the_end(record: SchemeRecord) -> list[Any]:
    """The events until memory ran out, after which everything is given back."""
    if record.out_of_memory is None:
        return record.events
    held = sum(record.out_of_memory.held.values())
    last = [number for number, event in enumerate(record.events, start=1) if event.held == held]
    return record.events[: last[-1] if last else 0]


def test_ranks_are_processes_and_have_two_tracks(results: Results) -> None:
    """Each rank of each scheme is a process of its own name with a compute and a communication thread."""
    found = entries(results)
    processes = named(found, "process_name")
    assert list(processes.values()) == [f"{each.name}, rank {rank}" for each in results.schemes for rank in range(5)]
    assert len({process for process, _ in processes}) == 4 * 5
    assert 0 not in {process for process, _ in processes}
    threads = named(found, "thread_name")
    assert sorted(threads.values()) == ["communication"] * 20 + ["compute"] * 20
    assert len({thread for _, thread in threads}) == 2 * 20
    assert {(each["pid"], each["tid"]) for each in found if each["ph"] != "M"} <= set(threads)


def test_time_runs_forward(results: Results) -> None:
    """Within a process no entry is earlier than the one before it, and none is before the step began."""
    times: dict[int, list[float]] = defaultdict(list)
    for each in entries(results):
        if each["ph"] != "M":
            times[each["pid"]].append(each["ts"])
    for stamps in times.values():
        assert stamps == sorted(stamps)
        assert stamps[0] == 0


def test_what_begins_ends(results: Results) -> None:
    """On each track every span that begins ends, under the same name and before the next begins."""
    tracks: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for each in entries(results):
        if each["ph"] in "BE":
            tracks[each["pid"], each["tid"]].append(each)
    assert tracks
    for spans in tracks.values():
        for begin, end in zip(spans[::2], spans[1::2], strict=True):
            assert (begin["ph"], end["ph"], begin["name"]) == ("B", "E", end["name"])
            assert begin["ts"] <= end["ts"]


def test_tracks_do_not_overlap(results: Results) -> None:
    """A rank computes or communicates, one after the other, as it did."""
    for record in results.schemes:
        spans = [each for each in of_rank(results, record.name, 3) if each["ph"] in "BE"]
        assert [each["ph"] for each in spans] == ["B", "E"] * (len(spans) // 2)


def test_spans_are_the_work_that_was_logged(results: Results) -> None:
    """Each computation and collective is one span on its track, ends when the log says, and has the bytes sent."""
    for record in results.schemes:
        spans = [each for each in of_rank(results, record.name, 4) if each["ph"] in "BE"]
        work = [event for event in until_the_end(record) if event.kind in ("compute", "send")]
        assert len(spans) == 2 * len(work)
        for begin, end, event in zip(spans[::2], spans[1::2], work, strict=True):
            assert begin["name"] == f"{event.name} {event.unit}"
            assert begin["cat"] == {"compute": "compute", "send": "communication"}[event.kind]
            assert end["ts"] == round(1e6 * event.seconds, 3)
            assert begin["args"].get("bytes sent") == (event.nbytes if event.kind == "send" else None)
            assert begin["args"]["phase"] == event.phase
        if record.out_of_memory is None:
            sent = sum(each["args"].get("bytes sent", 0) for each in spans[::2])
            assert sent == sum(moved.sent[4] for moved in record.steps[-1].traffic)


def test_work_begins_where_its_phase_does() -> None:
    """A collective begins with its first block, not with the computation before it."""
    record = run().scheme("ZeRO-3")
    spans = [each for each in of_rank(run(), "ZeRO-3", 0) if each["ph"] == "B"]
    first = next(event for event in record.events if event.name == "ring blocks")
    assert next(each["ts"] for each in spans if each["cat"] == "communication") == round(1e6 * first.seconds, 3)


def test_counters_are_the_ledger(results: Results) -> None:
    """After every hold and free the total is the recorded one, the bands add up to it, and each is as replayed."""
    for record in results.schemes:
        counters = [each for each in of_rank(results, record.name, 1) if each["ph"] == "C"]
        moves = [event for event in until_the_end(record) if event.kind in ("hold", "free")]
        assert len(counters) == 2 * (1 + len(moves))
        held: dict[str, int] = dict(record.steps[-1].resident) if record.steps else {}
        if record.out_of_memory and not record.steps:
            held = {band: record.out_of_memory.held[band] for band in MODEL_STATES if band in record.out_of_memory.held}
        for total, bands, event in zip(counters[::2], counters[1::2], [None, *moves], strict=True):
            if event is not None:
                held[event.name] = held.get(event.name, 0) + event.nbytes * (1 if event.kind == "hold" else -1)
                assert total["ts"] == bands["ts"] == round(1e6 * event.seconds, 3)
                assert total["args"] == {"total": event.held}
            assert sum(bands["args"].values()) == total["args"]["total"]
            assert {band: count for band, count in bands["args"].items() if count} == {
                band: count for band, count in held.items() if count
            }


def test_running_out_of_memory_is_marked_and_ends_the_trace() -> None:
    """Where memory ran out it says what was asked for, at what was held then; what was given back does not show."""
    results = small_card()
    shortages = {record.name: record.out_of_memory for record in results.schemes if record.out_of_memory}
    assert {name: shortage.step for name, shortage in shortages.items()} == {
        "data parallel": 0,
        "ZeRO-1": 1,
        "ZeRO-2": 1,
    }
    for name, shortage in shortages.items():
        mine = of_rank(results, name, 2)
        [mark] = [each for each in mine if each["ph"] == "i"]
        assert mark["name"] == f"out of memory: {shortage.asked} B of {shortage.band} asked for {shortage.unit}"
        assert mark["ts"] == mine[-1]["ts"]
        assert [each for each in mine if each["ph"] == "C"][-2]["args"] == {"total": sum(shortage.held.values())}


@pytest.mark.parametrize("ranks", [trace.SHOWN_RANKS, 1021])
def test_many_ranks_are_capped_and_it_is_said(ranks: int) -> None:
    """No scheme shows more ranks than a viewer can take, and the file says how many there were."""
    found = trace.trace(replace(run(), settings=replace(SETTINGS, ranks=ranks)))
    assert len(named(found["traceEvents"], "process_name")) == 4 * trace.SHOWN_RANKS
    assert (found["otherData"]["ranks"], found["otherData"]["ranks shown"]) == (ranks, trace.SHOWN_RANKS)
    assert found["otherData"]["ranks left out"].startswith(f"{ranks - trace.SHOWN_RANKS} of each scheme")


def test_all_ranks_do_the_same() -> None:
    """But for its numbers a rank's entries are any other's, so that those left out are not missed."""
    plain = [
        [
            {key: value for key, value in each.items() if key not in ("pid", "tid")}
            for each in of_rank(run(), "ZeRO-1", r)
        ]
        for r in range(5)
    ]
    assert all(one == other for one, other in itertools.pairwise(plain))


def test_the_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds the trace and what its clock means; where the last move fails nothing is left behind."""
    path = tmp_path / "trace.json"
    trace.save_trace(run(), path)
    content = msgspec.json.decode(path.read_bytes())
    assert content == msgspec.json.decode(msgspec.json.encode(trace.trace(run())))
    assert "not parallel time" in content["otherData"]["clock"]
    path.unlink()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        trace.save_trace(run(), path)
    assert list(tmp_path.iterdir()) == []
