"""The page of the benchmarks, and that the floor trains."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from zerosim.model import MLP
from zerosim.schemes import SCHEMES, Stage

FOLDER = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    """A file of the benchmarks' folder, as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_was_recorded() -> None:
    """benchmarks/README.md is what the recordings beside it render to."""
    tables = script("write_tables")
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == tables.page(tables.recordings())


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_recorded_ratios_are_of_what_was_timed(precision: str) -> None:
    """A recording is of the precision in its name and has every scheme in every case."""
    recording: dict[str, Any] = json.loads((FOLDER / f"recorded_{precision}.json").read_text())
    assert recording["precision"] == precision
    cases = {row["case"] for row in recording["steps"]}
    names = [stage.name for stage in SCHEMES]
    assert [(row["case"], row["scheme"]) for row in recording["steps"]] == [
        (case, name) for case in ("mission", "N=256", "N=1024", "large") if case in cases for name in names
    ]
    assert cases >= {"mission", "N=256", "N=1024", "large"}


@pytest.mark.parametrize("stage", SCHEMES, ids=lambda stage: stage.name)
def test_the_floor_trains(stage: Stage) -> None:
    """The floor that steps are timed against has the package's losses in fp32, to rounding."""
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal((5, 3, width)).astype(np.float32) for width in (7, 4))
    floor = script("floor").Floor(stage.name, (7, 11, 4), 5, 3)
    scheme = stage(MLP((7, 11, 4)), 5, precision="fp32")
    batch = list(zip(x, y, strict=True))
    ours, theirs = ([step() for _ in range(6)] for step in (lambda: scheme.step(batch), lambda: floor.step(x, y)))
    # Another order of summation: the losses are of order one, and fp32 rounds at 6e-8.
    assert np.allclose(ours, theirs, rtol=0, atol=1e-5)
    assert len(set(ours)) == 6, "it does train"
