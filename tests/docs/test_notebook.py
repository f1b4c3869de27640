"""The notebooks: they run, and what they show is what they put out."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import record
import run_notebook
from zerosim.records import results

# Not the digits of what has a point or an exponent, which may differ in the last of them on another machine.
INTEGER = re.compile(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?![\w.])|(?<![\w.,-])\d+(?![\w.,]*\d|e|\.\d)")


def code(notebook: Any) -> list[Any]:
    """The cells of a notebook that are run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cell: Any) -> str:
    """What a cell prints."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def figures(cell: Any) -> int:
    """How many pictures a cell shows."""
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def said(cell: Any) -> str:
    """What a cell prints, but for the peak of real ranks: when memory is let go there is the interpreter's affair."""
    return re.sub(r"✓ held at the peak: [\d,]+ B", "✓ held at the peak", text(cell))


@pytest.mark.parametrize(
    "path",
    [run_notebook.NOTEBOOK, pytest.param(run_notebook.EXERCISES, marks=pytest.mark.slow)],
    ids=lambda it: it.stem,
)
def test_a_notebook_runs_and_puts_out_the_integers_that_are_committed(path: Path) -> None:
    """Run where there is no checkout every assertion holds, and every cell prints the committed bytes and counts."""
    if path == run_notebook.EXERCISES:
        pytest.importorskip("torch")
    fresh = code(run_notebook.run(path))
    for cell, committed in zip(fresh, code(run_notebook.read(path)), strict=True):
        if find_spec("torch") is None and "there is no torch here" in cell.source:
            assert text(cell).startswith("there is no torch here")
            continue
        assert INTEGER.findall(said(cell)) == INTEGER.findall(said(committed)), cell.source
        assert re.sub(r"[\d.,e+-]+", "", said(cell)) == re.sub(r"[\d.,e+-]+", "", said(committed)), cell.source
        assert figures(cell) == figures(committed), cell.source


@pytest.mark.parametrize(("path", "pictures"), [(run_notebook.NOTEBOOK, 4), (run_notebook.EXERCISES, 0)])
def test_a_notebook_is_committed_as_one_run_left_it(path: Path, pictures: int) -> None:
    """Every code cell was run once, in order, none of them complained, and its pictures are of modest size."""
    cells = code(run_notebook.read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.output_type for cell in cells for output in cell.outputs} <= {"stream", "execute_result"}
    assert {output.name for cell in cells for output in cell.outputs if output.output_type == "stream"} == {"stdout"}
    assert sum(map(figures, cells)) == pictures
    assert path.stat().st_size < 1_500_000


def test_the_exercises_end_in_classes_that_pass() -> None:
    """Each scheme's first tries are found wrong, and its last is found right, by the grader's own words."""
    graded = [cell for cell in code(run_notebook.read(run_notebook.EXERCISES)) if "assert" in cell.source]
    for cell in graded:
        assert text(cell).startswith("✗" if "assert not grade(" in cell.source else "✓"), cell.source
    last = {cell.source.split("zs.")[-1].rstrip(")\n"): "assert not" not in cell.source for cell in graded}
    assert last == dict.fromkeys(("DP", "ZeRO1", "ZeRO2", "ZeRO3", "ZeRO3Kept"), True)


def test_each_step_of_the_notebook_ends_in_an_assertion() -> None:
    """After the set-up every cell that computes asserts something; the others only show a figure or define."""
    _, _, *cells = code(run_notebook.read())
    silent = [cell.source for cell in cells if "assert" not in cell.source]
    assert all(source.startswith(("class CountingRing", "figures[")) for source in silent)


def test_the_notebook_runs_the_lab_that_the_pages_argue_from() -> None:
    """What it asks of the lab is what was asked for the recording."""
    [cell] = [cell for cell in code(run_notebook.read()) if "settings = " in cell.source]
    space: dict[str, Any] = {"results": results}
    exec(cell.source.partition("found = ")[0], space)
    found = record.load("lab")
    assert isinstance(found, results.Results)
    assert space["settings"] == found.settings


def test_the_integers_of_a_text_are_found() -> None:
    """Counts with and without commas are integers; parts of fractions, exponents and names are not."""
    assert INTEGER.findall("ZeRO-2: 7,776 B of 40, 1.9375 P, 8.2e-07; layer 2, 1e3") == ["7,776", "40", "2"]
