"""The house: what may import what, how large the rooms are, and what importing the package costs.

``HOUSE`` is the one list. It says what DESIGN.md's table says, in the order in which imports run: a
module imports only from places above its own in the list, or within its own folder.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import zerosim

SOURCE = Path(zerosim.__file__).parent

# Folders end in a slash. A file of a folder that is needed earlier than the rest has a place of its own.
HOUSE = [
    *[
        "__init__",
        "bands",
        "pool",
        "util/",
        "kernels/",
        "counts",
        "ledger",
        "ranks",
    ],  # the names; what is held and sent
    *["optimizer", "options", "layers", "util/batches", "model"],  # what is trained, and what may be chosen
    *[
        "stages",
        "util/rows",
        "buckets",
        "comm",
        "gradients",
        "parameters",
        "updates",
        "scaling",
        "worlds/local",
        "worlds/local_comm",
        "schemes",
    ],
    *["theory/", "records/", "worlds/", "checks/", "checkpoints/", "lab/", "real_ranks/", "frameworks/"],
    *["torch_models/", "planner/", "conformance/", "report/", "api/", "cli/", "__main__"],
]
CORE = [place for place in HOUSE if "/" not in place and place != "__main__"]
RUN = {
    "counts",
    "ledger",
    "ranks",
    "comm",
    "model",
    "layers",
    "buckets",
    "gradients",
    "parameters",
    "updates",
    "scaling",
    "schemes",
    "worlds/local",
    "worlds/local_comm",
}

CORE_LINES = 3_670  # of all flat files together; it is to come down
LINES, LONG_LINES = 300, 380  # of one module, and of those that are longer than they should be
LONG = {
    "checks/reference",
    "checks/sanitizer",
    "comm",
    "conformance/judge",
    "kernels/loops",
    "planner/conventions",
    "planner/estimators",
    "planner/step_time",
    "records/consistency",
    "records/plan",
    "records/results",
    "real_ranks/rendezvous",
    "report/page_tables",
    "schemes",
    "theory/forms",
}

KNOW_TORCH = ["worlds/torch_ring", "frameworks/", "torch_models/", "planner/", "conformance/", "checkpoints/dcp"]
HEAVY = {"jaxtyping", "torch", "transformers", "numba", "matplotlib", "sklearn", "scipy", "click", "rich", "jax"}


# -- reading the imports


def files(source: Path) -> dict[str, Path]:
    """The modules of a package by their path in it, without the ending; a folder's ``__init__`` is the folder."""
    found = {path.relative_to(source).with_suffix("").as_posix(): path for path in source.rglob("*.py")}
    return {name.removesuffix("/__init__") + "/" * name.endswith("/__init__"): path for name, path in found.items()}


def imports(source: Path) -> dict[str, set[str]]:
    """For each module of a package, those of the package that it imports, wherever in the file it does.

    What is only for the checker of types (``if TYPE_CHECKING``) is not imported; nor is a folder, by whoever
    imports a file of it.
    """
    modules = files(source)

    def named(dotted: str) -> str | None:
        way = dotted.replace(".", "/")
        return next((each for each in (way, f"{way}/") if each in modules), None)

    graph = {}
    for name, path in modules.items():
        origins = _imported(ast.parse(path.read_text()), source.name, name)
        graph[name] = {found for origin, full in origins if (found := named(full) or named(origin))} - {name}
    return graph


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only the checker of types sees."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _statements(other)
        else:
            yield from _statements(child)


def _imported(tree: ast.AST, package: str, name: str) -> Iterator[tuple[str, str]]:
    """What follows the package's name in import statements, absolute or relative: from where, and with what."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = name.split("/")[: -node.level]
                origin = ".".join(filter(None, [package, *above, node.module]))
            pairs = [(origin, f"{origin}.{alias.name}") for alias in node.names]
        else:
            continue
        for origin, full in pairs:
            if full.split(".")[0] == package:
                yield origin.partition(".")[2] or "__init__", full.partition(".")[2] or "__init__"


def reach(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Everything that a module imports, directly or not."""
    seen: set[str] = set()
    todo = list(graph[module])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def place(module: str, house: list[str] = HOUSE) -> str:
    """Where in the house a module is: the narrowest place that has its name."""
    places = [each for each in house if each == module or (each.endswith("/") and module.startswith(each))]
    return max(places, key=len, default="nowhere")


def climbing(graph: Mapping[str, set[str]], house: list[str] = HOUSE) -> list[str]:
    """The arrows that do not run down the list, and modules that are nowhere in it."""
    order = {each: index for index, each in enumerate(house)}
    found = [f"{module} is nowhere in the house" for module in graph if place(module, house) == "nowhere"]
    for module, others in graph.items():
        here = place(module, house)
        found += [
            f"{module} imports {other}"
            for other in sorted(others)
            if here in order and order.get(place(other, house), -1) > order[here]
        ]
    return found


GRAPH = imports(SOURCE)


# -- the house


def test_imports_run_one_way() -> None:
    """No module imports from a place that is built on its own."""
    assert climbing(GRAPH) == []


def test_every_place_is_there() -> None:
    """The list has no place that nobody lives in."""
    assert {place(module) for module in GRAPH} == set(HOUSE)


def test_imports_have_no_circles() -> None:
    """No module imports itself, however many others are in between; a folder's files do not either."""
    TopologicalSorter(GRAPH).prepare()


def test_the_core_is_read_in_one_sitting() -> None:
    """The flat files are the core, and are not more than can be read."""
    flat = {name for name in files(SOURCE) if "/" not in name} - {"__main__"}
    assert flat == set(CORE)
    assert sum(len(files(SOURCE)[name].read_text().splitlines()) for name in flat) < CORE_LINES


def test_rooms_are_small() -> None:
    """A module is short enough to be read alone, and those that are longer are known, and not longer still."""
    lines = {name: len(path.read_text().splitlines()) for name, path in files(SOURCE).items()}
    assert {name for name, count in lines.items() if count > LINES} <= LONG
    assert max(lines.values()) <= LONG_LINES


# -- who must not know whom


def test_what_is_held_against_a_run_never_sees_one() -> None:
    """The closed forms, and training that is written again, share the bands' names and the rows, and see no run."""
    again = {"checks/", "checks/reference", "checks/perceptron", "checks/told"}
    accounts = {each for each in GRAPH if place(each) == "theory/"} | again
    assert {"checks/reference", "theory/"} <= accounts
    for account in accounts:
        assert GRAPH[account] <= accounts | {"bands", "stages"}, account
        assert not reach(account, GRAPH) & RUN, account


def test_what_is_measured_never_touches_a_formula() -> None:
    """Nothing that runs can reach the closed forms, nor what compares with them."""
    measured = {*CORE, "kernels/", "util/", "util/batches", "worlds/", "worlds/local", "torch_models/", "checkpoints/"}
    formulas = {each for each in GRAPH if place(each) in ("theory/", "checks/")}
    assert {"theory/", "checks/compare", "checks/reference"} <= formulas
    for module in GRAPH:
        if place(module) in measured:
            assert not reach(module, GRAPH) & formulas, module


def test_records_and_pages_do_not_know_the_simulator() -> None:
    """What describes or draws a run takes records: it cannot reach what made them."""
    for module in GRAPH:
        if place(module) in ("records/", "report/"):
            assert not reach(module, GRAPH) & (RUN - {"counts"} | {"theory/"}), module


def test_torch_is_known_to_few() -> None:
    """Only the worlds over torch.distributed, what adapts modules, and what runs other frameworks import torch."""
    knowing = set()
    for name, path in files(SOURCE).items():
        for node in _statements(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(each.split(".")[0] == "torch" for each in names):
                knowing.add(place(name, KNOW_TORCH) if place(name, KNOW_TORCH) != "nowhere" else name)
    assert knowing == set(KNOW_TORCH)


# -- what is loaded


def loaded(statement: str, path: Path = SOURCE.parent) -> set[str]:
    """The top-level packages that a fresh interpreter has after a statement."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_numpy_and_nothing_heavy() -> None:
    """In a fresh interpreter the core, closed forms included, loads no framework, no plotting and no command line."""
    packages = loaded(f"import zerosim, {', '.join(f'zerosim.{name}' for name in CORE if name != '__init__')}")
    assert {"zerosim", "numpy"} <= packages
    assert packages & HEAVY == set()


# -- that all this can fail


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("import pack.target", "target"),
        ("import pack.target as other", "target"),
        ("from pack import target", "target"),
        ("from pack.target import name", "target"),
        ("from . import target", "target"),
        ("from .target import name", "target"),
        ("from .room import inner", "room/inner"),
        ("from .room import name", "room/"),
        ("from pack.room.inner import name", "room/inner"),
        ("def late():\n    from pack.target import name", "target"),
        ("if SOMETHING:\n    import pack.target", "target"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os\nelse:\n    import pack.target", "target"),
        ("import typing\nif typing.TYPE_CHECKING:\n    import pack.target", None),
    ],
)
def test_every_form_of_import_is_seen(line: str, target: str | None, tmp_path: Path) -> None:
    """The graph has an arrow for each way to write an import, within functions too, and none for other packages."""
    package = tmp_path / "pack"
    (package / "room").mkdir(parents=True)
    for name in ("__init__", "room/__init__"):
        (package / f"{name}.py").touch()
    (package / "target.py").write_text("import sys\nfrom os import path")
    (package / "room/inner.py").write_text("from ..target import name")
    (package / "source.py").write_text(line)
    graph = imports(package)
    assert graph["source"] == ({target} if target else set())
    assert (graph["target"], graph["room/inner"]) == (set(), {"target"})


def test_an_arrow_that_climbs_is_seen() -> None:
    """A module that imports from what is built on it is named, and so is one that has no place."""
    graph = {"low": {"room/file"}, "room/file": {"room/other"}, "room/other": set(), "high": {"low"}, "new": {"low"}}
    assert climbing(graph, ["low", "room/", "high"]) == ["new is nowhere in the house", "low imports room/file"]
    assert climbing(graph, ["room/", "low", "high", "new"]) == []
    assert climbing(graph, ["room/other", "low", "room/", "high", "new"]) == ["low imports room/file"]


def test_a_circle_is_seen() -> None:
    """A circle of three modules is an error."""
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}, "outside": {"a"}}).prepare()


def test_a_heavy_import_is_detected(tmp_path: Path) -> None:
    """A module that imports another, which imports a heavy package, is caught."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "inner.py").write_text("import torch")
    (tmp_path / "outer.py").write_text("from inner import __name__")
    assert loaded("import outer", tmp_path) & HEAVY == {"torch"}
