"""The files that a plan can be written to: which form a name's ending asks for, and what is needed to make it.

Owns that choice, for Python and for the command alike. Must not know how any of them is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zerosim.planner import grid, planned_step
from zerosim.planner.model_source import ModelSource
from zerosim.records import plan as records
from zerosim.records.plan import Plan
from zerosim.records.plan_step import PlannedStep
from zerosim.util import sizes
from zerosim.util.arguments import installed

Advance = Callable[[str, int | None], None]
"""Called with what is done next, and of how many such things in all, once that is known."""

FORMS = {
    ".html": "a page with sliders",
    ".png": "a chart",
    ".svg": "a chart",
    ".trace.json": "a trace for Perfetto",
    ".pickle": "a snapshot for torch's memory_viz",
    ".json": "the plan itself",
}


def form(path: Path, call: str) -> str:
    """The ending that says what is asked for. ValueError, with all that there are, for another."""
    name = path.name.lower().removesuffix(".gz")
    found = next((ending for ending in FORMS if name.endswith(ending)), None)
    if found is None or (path.name.lower().endswith(".gz") and found != ".trace.json"):
        known = ", ".join(f"{ending} ({what})" for ending, what in FORMS.items())
        raise ValueError(f"{call}: the file's name ends in {known}; got {path.name!r}.")
    return found


def content(
    path: Path, ending: str, source: ModelSource, plan: Plan, advance: Advance, row: str | None = None,
    ranks: int | None = None,
) -> tuple[bytes, str]:  # fmt: skip
    """What the file holds, and in words what that is. ``row`` and ``ranks`` say whose step, where it is one's.

    ValueError for a step that was not planned; ModuleNotFoundError where what draws is not installed.
    """
    if ending == ".html":
        return _page(source, plan, advance)
    if ending in (".png", ".svg"):
        installed("plan(out)", "matplotlib", extra="plots", otherwise="write a page, .html")
        from zerosim.report import plan_chart

        return plan_chart.drawn(plan, ending[1:]), FORMS[ending]
    if ending == ".json":
        return records.encode(plan), FORMS[ending]
    cell = planned_step.chosen(plan, row, ranks)
    advance(f"a step of {cell.name} on {cell.ranks:,}", None)
    step = planned_step.made(source, plan, cell)
    said = f"{FORMS[ending]}, a step of {cell.name} on {cell.ranks:,}"
    return _encoded(step, ending, zipped=path.name.lower().endswith(".gz")), said


def _page(source: ModelSource, plan: Plan, advance: Advance) -> tuple[bytes, str]:
    from zerosim.report import plan_page

    axes = grid.axes(source, plan, lambda doing: advance(doing, None))
    found = grid.make(source, plan, axes, lambda doing: advance(doing, axes.points))
    made = plan_page.page(found).encode()
    return made, f"{FORMS['.html']}, {len(found.cells):,} steps that were run, {sizes.text(len(made))}"


def _encoded(step: PlannedStep, ending: str, *, zipped: bool) -> bytes:
    if ending == ".pickle":
        from zerosim.report import memory_viz

        return memory_viz.dumped(step)
    from zerosim.report import plan_trace

    if zipped:
        import gzip

        return gzip.compress(plan_trace.encoded(step), mtime=0)
    return plan_trace.encoded(step)
