"""The notebooks: they run, what they show is what they put out, and the exercises can be done and failed."""

import ast
import copy
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import notebook_links
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


@pytest.mark.parametrize(("path", "pictures"), [(run_notebook.NOTEBOOK, 8), (run_notebook.EXERCISES, 0)])
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
    """After the set-up every cell that computes asserts something; the others only define, or show a figure."""
    _, _, *cells = code(run_notebook.read())
    silent = [ast.parse(cell.source).body for cell in cells if "assert" not in cell.source]
    for body in silent:
        assert all(
            isinstance(each, ast.FunctionDef | ast.Assign) or ast.unparse(each).startswith("figures[") for each in body
        ), ast.unparse(body[-1])


def functions() -> dict[str, ast.FunctionDef]:
    """What the notebook defines, as it is first defined."""
    found: dict[str, ast.FunctionDef] = {}
    for cell in code(run_notebook.read())[2:]:
        for each in ast.parse(cell.source).body:
            if isinstance(each, ast.FunctionDef):
                found.setdefault(each.name, each)
    return found


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "data_parallel", "zero_1", "zero_2", "zero_3"])
def test_a_mechanism_is_short_and_plain_numpy(name: str) -> None:
    """It has at most sixteen lines, its docstring among them, and neither it nor what it calls is the package's."""
    imports = ast.parse(code(run_notebook.read())[1].source.partition("\n")[2]).body
    package = {
        alias.name for each in imports if isinstance(each, ast.ImportFrom) and "zerosim" in str(each.module)
        for alias in each.names
    }  # fmt: skip
    defined, called, coming = functions(), set[str](), [name]
    while coming:
        function = defined[coming.pop()]
        called.add(function.name)
        names = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
        assert not names & package
        coming += (names & defined.keys()) - called
    assert (defined[name].end_lineno or 0) - defined[name].lineno < 16
    assert "shift" in called


# -- exercises

EXERCISES = ("upward", "ranks_needed", "sent_by_zero_2", "zero_3_kept")


def test_every_exercise_is_open_and_has_a_solution_that_is_folded() -> None:
    """Where it is set the grader says that there is nothing yet; at the end is a folded answer that passes."""
    graded = [cell for cell in code(run_notebook.read()) if re.search(r"^(assert )?grade\(", cell.source, re.MULTILINE)]
    assert len(graded) == 2 * len(EXERCISES)
    for name, unsolved, solved in zip(EXERCISES, graded[: len(EXERCISES)], graded[len(EXERCISES) :], strict=True):
        assert re.match(rf"✗ {name}: \w+ nothing yet\n", text(unsolved))
        assert text(solved) == f"✓ {name}\n"
        assert is_folded(solved)
        assert not is_folded(unsolved)


def is_folded(cell: Any) -> bool:
    """Whether JupyterLab and Colab show what the cell puts out, and its source when they are asked."""
    return bool(
        cell.metadata.get("jupyter", {}).get("source_hidden")
        and cell.metadata.get("cellView") == "form"
        and cell.source.startswith("# @title ")
    )


@pytest.fixture(scope="module")
def lesson(shapes_unchecked: None) -> dict[str, Any]:
    """What the notebook's cells define, up to its last exercise."""
    space: dict[str, Any] = {}
    for cell in code(run_notebook.read())[1:]:
        exec(re.sub(r"(?m)^%.*$|\.timeline\(\)$", "", cell.source), space)
        if "zero_3_kept" in cell.source:
            return space
    raise AssertionError("the last exercise is not there")


def up_but_not_to_the_end(space: dict[str, Any]) -> Callable[[Any], Any]:
    """Blocks go up, and stop with the rank below the owner."""

    def answer(x: Any) -> Any:
        n, ranks = space["N"], space["RANKS"]
        chunks = x.reshape(n, n, -1)
        block = chunks[ranks, ranks]
        for hop in range(1, n):
            block = space["shift"](block, by=1) + chunks[ranks, (ranks - hop) % n]
        return block

    return answer


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "a sum of another chunk": ("grade_upward", up_but_not_to_the_end, "rank 0 has not the sum of chunk 0"),
    "down": ("grade_upward", lambda space: space["reduce_scatter"], "not added in the order of going up"),
    "all of it": (
        "grade_upward",
        lambda space: lambda x: space["all_gather"](space["reduce_scatter"](x)),
        r"chunk r alone, \[32, 3\]",
    ),
    "too few ranks": ("grade_fits", lambda space: lambda: 7, r"on 7 ranks each holds 5\.7"),
    "too many ranks": ("grade_fits", lambda space: lambda: 9, "8 are enough"),
    "for free": (
        "grade_accumulation",
        lambda space: lambda k: 2 * (space["N"] - 1) * 4 * space["P"] // space["N"],
        r"with k = 2 a rank sends 384,648 bytes, 2\.9062 P; got 256,432",
    ),
    "not kept": ("grade_kept", lambda space: space["zero_3"], "the same bytes sent"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_grader_says_what_is_wrong(lesson: dict[str, Any], wrong: str) -> None:
    """Each of these answers is refused, for its own reason."""
    grader, answer, reason = WRONG[wrong]
    with pytest.raises(AssertionError, match=reason):
        lesson[grader](answer(lesson))


def test_the_exercises_in_torch_can_be_filled_in() -> None:
    """Of each there is a class to fill in, not graded yet, then tries, and the solution is folded."""
    cells = code(run_notebook.read(run_notebook.EXERCISES))
    open_ = [number for number, cell in enumerate(cells) if cell.source.startswith("class Your")]
    folded = [number for number, cell in enumerate(cells) if is_folded(cell)]
    assert len(open_) == len(folded) == 4
    for one, other in zip(open_, folded, strict=True):
        assert one < other
        assert "your turn" in cells[one].source
        assert text(cells[one]) == ""
        scheme = re.findall(r"grade\(\w+, (zs\.\w+)\)", cells[one].source)
        assert scheme == re.findall(r"assert grade\(\w+, (zs\.\w+)\)", cells[other].source)


# -- where they open


@pytest.mark.parametrize("path", [run_notebook.NOTEBOOK, run_notebook.EXERCISES], ids=lambda it: it.stem)
def test_a_notebook_opens_where_its_repository_is(path: Path) -> None:
    """As committed it says what pyproject.toml knows; with an address it has links and installs from there."""
    name = path.relative_to(run_notebook.ROOT).as_posix()
    committed = run_notebook.read(path)
    assert notebook_links.tell(copy.deepcopy(committed), name, notebook_links.address()) == committed
    told = notebook_links.tell(copy.deepcopy(committed), name, "https://github.com/owner/name")
    last = told.cells[0].source.split("\n\n")[-1]
    assert re.findall(r"\[(\w+)\]\((https://[^)]+)\)", last) == list(
        notebook_links.links(name, "https://github.com/owner/name").items()
    )
    assert 'REPOSITORY = "https://github.com/owner/name"' in told.cells[1].source
    assert notebook_links.tell(told, name, notebook_links.address()) == committed


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
