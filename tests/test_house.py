"""What importing the package costs, and that its imports run one way."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import zerosim

HEAVY = {"torch", "matplotlib", "sklearn", "scipy", "pandas", "click", "rich", "jax", "tensorflow"}
SOURCE = Path(zerosim.__file__).parent


# -- what is loaded


def loaded(module: str, path: Path = SOURCE.parent) -> set[str]:
    """The top-level packages that a fresh interpreter has after it has imported ``module``."""
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["zerosim", "zerosim.schemes", "zerosim.theory"])
def test_import_loads_nothing_heavy(module: str) -> None:
    """In a fresh interpreter, importing the simulator loads no framework, no plotting and no command line."""
    packages = loaded(module)
    assert "zerosim" in packages
    assert packages & HEAVY == set()


def test_the_simulator_loads_numpy() -> None:
    """What the simulator does load is visible to the test above: NumPy is there."""
    assert "numpy" in loaded("zerosim.schemes")


@pytest.mark.parametrize("heavy", ["matplotlib", "torch"])
def test_a_heavy_import_is_detected(heavy: str, tmp_path: Path) -> None:
    """A module that imports another, which imports a heavy package, is caught."""
    (tmp_path / f"{heavy}.py").touch()
    (tmp_path / "inner.py").write_text(f"import {heavy}")
    (tmp_path / "outer.py").write_text("from inner import __name__")
    assert loaded("outer", tmp_path) & HEAVY == {heavy}


# -- who imports whom


def imports(source: Path) -> dict[str, set[str]]:
    """For each module of a package, the modules of the package that it imports, wherever in the file it does."""
    files = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    return {
        module: {name for name in _imported(ast.parse(path.read_text()), source.name) if name in files}
        for module, path in files.items()
    }


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Names that follow the package's in import statements, absolute or relative."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            dotted = [origin] * ("." in origin) + [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in dotted:
            first, _, rest = name.partition(".")
            if first == package:
                yield rest or "__init__"


def reach(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Everything that a module imports, directly or not; itself only if it lies on a circle."""
    seen: set[str] = set()
    todo = list(graph[module])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


GRAPH = imports(SOURCE)


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_have_no_circles(module: str) -> None:
    """No module imports itself, however many others are in between."""
    assert module not in reach(module, GRAPH)


@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("__init__", set()),
        ("bands", set()),
        ("measure", set()),
        ("tables", set()),
        ("casts", {"bands"}),
        ("theory", {"bands"}),
        ("reference", {"bands"}),  # written a second time: it shares nothing with what it is held against
        ("preflight", {"bands"}),
        ("ranks", {"bands", "measure"}),
        ("layers", {"bands"}),
        ("model", {"bands", "casts", "layers", "preflight"}),
        ("optimizer", {"bands", "casts"}),
        ("comm", {"bands", "casts", "measure"}),
        ("buckets", {"bands", "casts", "layers", "measure", "ranks"}),
        ("parameters", {"bands", "buckets", "casts", "layers", "measure", "ranks"}),
        ("gradients", {"bands", "buckets", "casts", "comm", "layers", "measure", "ranks"}),
        # Not theory: what is measured never touches a formula.
        (
            "schemes",
            {
                "bands",
                "buckets",
                "casts",
                "comm",
                "gradients",
                "layers",
                "measure",
                "optimizer",
                "parameters",
                "preflight",
                "ranks",
            },
        ),
    ],
)
def test_rooms_do_not_know_what_they_must_not(module: str, known: set[str]) -> None:
    """A room imports, directly or not, only from the rooms before it on the path of the data."""
    assert reach(module, GRAPH) <= known


@pytest.mark.parametrize("module", ["results", "plots"])
def test_records_and_figures_do_not_know_the_simulator(module: str) -> None:
    """What describes or draws a run takes records: it cannot reach what made them."""
    assert not reach(module, GRAPH) & {"schemes", "ranks", "comm", "model", "optimizer"}


@pytest.mark.parametrize(
    "line",
    [
        "import pack.target",
        "import pack.target as other",
        "from pack import target",
        "from pack.target import name",
        "from . import target",
        "from .target import name",
        "def late():\n    from pack.target import name",
    ],
)
def test_every_form_of_import_is_seen(line: str, tmp_path: Path) -> None:
    """The graph has an edge for each way to write an import, within functions too, and none for other packages."""
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "target.py").write_text("import sys\nfrom os import path")
    (package / "source.py").write_text(line)
    assert imports(package) == {"__init__": set(), "target": set(), "source": {"target"}}


def test_a_circle_is_seen() -> None:
    """A circle of three is found from each of its modules, and not from one that only leads into it."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "outside": {"a"}}
    assert [name for name in graph if name in reach(name, graph)] == ["a", "b", "c"]


def test_torch_is_known_to_few() -> None:
    """Only the world over torch.distributed, what adapts modules, and what runs other frameworks import torch."""
    knowing = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "torch" for name in names):
                knowing.add(path.relative_to(SOURCE).as_posix())
    adapting = {f"modules/{name}.py" for name in ("batch", "chain", "demo", "measure", "model", "rows", "run")}
    adapting |= {f"modules/{name}.py" for name in ("tape", "trace", "units", "watch")}
    planning = {"planner/torch_configs.py", "planner/torch_sources.py"}
    assert knowing == {"torch_ring.py", "frameworks/rank.py", "frameworks/training.py"} | adapting | planning
