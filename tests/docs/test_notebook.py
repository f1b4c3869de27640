"""notebook.ipynb: it runs, and what it shows is what it puts out."""

import re
from pathlib import Path
from typing import Any

import pytest

import run_notebook

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


@pytest.fixture(scope="module")
def fresh() -> Any:
    """The notebook, run anew."""
    return run_notebook.run()


def test_the_notebook_runs_and_puts_out_the_integers_that_are_committed(fresh: Any) -> None:
    """Run from top to bottom, every assertion holds, and every cell prints the committed bytes and counts."""
    for cell, committed in zip(code(fresh), code(run_notebook.read()), strict=True):
        assert INTEGER.findall(text(cell)) == INTEGER.findall(text(committed)), cell.source
        assert re.sub(r"[\d.,e+-]+", "", text(cell)) == re.sub(r"[\d.,e+-]+", "", text(committed)), cell.source
        assert figures(cell) == figures(committed), cell.source


def test_the_notebook_is_committed_as_one_run_left_it() -> None:
    """Every code cell was run once, in order, none of them complained, and its pictures are of modest size."""
    cells = code(run_notebook.read())
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.output_type for cell in cells for output in cell.outputs} == {"stream", "execute_result"}
    assert {output.name for cell in cells for output in cell.outputs if output.output_type == "stream"} == {"stdout"}
    assert sum(map(figures, cells)) == 4
    assert Path(run_notebook.NOTEBOOK).stat().st_size < 1_500_000


def test_each_step_of_the_notebook_ends_in_an_assertion() -> None:
    """After the set-up every cell that computes asserts something; the others only show a figure or define."""
    _, _, *cells = code(run_notebook.read())
    silent = [cell.source for cell in cells if "assert" not in cell.source]
    assert all(source.startswith(("class CountingRing", "figures[")) for source in silent)


def test_the_integers_of_a_text_are_found() -> None:
    """Counts with and without commas are integers; parts of fractions, exponents and names are not."""
    assert INTEGER.findall("ZeRO-2: 7,776 B of 40, 1.9375 P, 8.2e-07; layer 2, 1e3") == ["7,776", "40", "2"]
