"""The timeline of one's own run: the numbers are the ledger's, and every kind of file is written or refused."""

import json
from pathlib import Path

import pytest
from matplotlib.patches import StepPatch

import zerosim as zs

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


@pytest.fixture(scope="module")
def run() -> zs.Scheme:
    made = zs.ZeRO3(zs.MLP((5, 7, 3)), ranks=3)
    for batch in zs.batches(3, 2, rows=2, widths=(5, 3)):
        made.step(batch)
    return made


def test_what_was_held_is_what_the_log_says(run: zs.Scheme) -> None:
    """Before the first event a rank holds what it does at rest, after each what the log has, at most the peak."""
    for step, report in enumerate(run.reports, start=1):
        timeline = run.timeline(step)
        held = timeline.held()
        assert (timeline.step, timeline.peak) == (step, report.peak)
        assert held[0] == held[-1] == report.resident
        assert [sum(level.values()) for level in held[1:]] == [event.held for event in report.events]
        assert max(held, key=lambda level: sum(level.values())) == report.peak.by_band
    assert run.timeline().step == run.timeline(-1).step == 2


def test_a_timeline_stays_what_it_was(run: zs.Scheme) -> None:
    """What was asked for before another step is still the same after it."""
    other = zs.ZeRO1(zs.MLP((5, 7, 3)), ranks=3)
    first, second = zs.batches(3, 2, rows=2, widths=(5, 3))
    other.step(first)
    before = other.timeline()
    shown = repr(before)
    other.step(second)
    assert repr(before) == shown
    assert "step 1" in shown


def test_the_figure_is_of_that_step(run: zs.Scheme) -> None:
    """The figure has the scheme's panels and as many instants as the step has events."""
    above, below = run.timeline(1).plot().axes
    assert above.get_title("left") == "ZeRO-3"
    for axes in (above, below):
        for patch in (each for each in axes.patches if isinstance(each, StepPatch)):
            assert len(patch.get_data()[0]) == len(run.reports[0].events) + 1


@pytest.mark.parametrize(
    ("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("a.PNG", b"\x89PNG")]
)
def test_figures_are_written(run: zs.Scheme, tmp_path: Path, name: str, begins: bytes) -> None:
    """The kind of file follows from its name; the same timeline gives the same picture."""
    run.timeline().save(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(begins)
    if begins != b"%PDF":  # which has its date
        run.timeline().save(str(tmp_path / name))
        assert (tmp_path / name).read_bytes() == content


def test_a_trace_is_written(run: zs.Scheme, tmp_path: Path) -> None:
    """A .json is the trace of every rank."""
    run.timeline().save(tmp_path / "step.json")
    names = {
        each["args"]["name"]
        for each in json.loads((tmp_path / "step.json").read_text())["traceEvents"]
        if each["name"] == "process_name"
    }
    assert names == {f"ZeRO-3, rank {rank}" for rank in range(3)}


def test_what_there_is_no_timeline_of_is_refused(run: zs.Scheme, tmp_path: Path) -> None:
    """A run without steps, a step that was not made, and a file of another kind end in words."""
    with pytest.raises(IndexError, match=r"Call step\(batch\) first"):
        zs.DP(zs.MLP(), ranks=2).timeline()
    for step in (0, 3, -3):
        with pytest.raises(IndexError, match=f"steps are 1 to 2, or -1 for the last; got {step}"):
            run.timeline(step)
    with pytest.raises(ValueError, match=r"a trace, \.json; got 'a\.gif'"):
        run.timeline().save(tmp_path / "a.gif")
    assert list(tmp_path.iterdir()) == []


def test_steps_go_by_their_number_where_only_the_last_reports_are_kept() -> None:
    """A step is the one of that number, whatever is kept; one whose report is gone is refused, with those there are."""
    run = zs.ZeRO1(zs.MLP((5, 7, 3)), ranks=2, keep_reports=3, keep_events=2)
    for batch in zs.batches(2, 5, rows=2, widths=(5, 3)):
        run.step(batch)
    assert [run.timeline(step).step for step in (5, 4, -1, -2)] == [5, 4, 5, 4]
    assert run.timeline(5).peak == run.reports[-1].peak
    with pytest.raises(ValueError, match="the log of step 3 is not kept"):
        run.timeline(3)
    for step in (2, 6, 0, -4):
        with pytest.raises(IndexError, match=f"steps are 3 to 5, or -1 for the last; got {step}"):
            run.timeline(step)


def test_a_step_that_ran_out_of_memory_has_a_timeline() -> None:
    """Up to where it ended the log is there, and what was held before it."""
    run = zs.ZeRO3(zs.MLP((5, 7, 3)), ranks=3, capacity=500)
    with pytest.raises(zs.OutOfMemory):
        run.step(*zs.batches(3, rows=2, widths=(5, 3)))
    held = run.timeline().held()
    assert [sum(level.values()) for level in held[1:]] == [event.held for event in run.reports[0].events]
    assert sum(held[0].values()) == run.ledger.total
