"""The lab's checks find what is planted in a training step as people run it, and say under whom and in what.

What must find a fault of ``faults_step.toml`` is ``lab.suite.run``, the same that ``zerosim lab --clip ...
--loss-scale ... --uneven --resume-at ...`` runs; no other test has a say. ``planting.py`` says what a fault is.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import lab_settings
from planting import Fault, as_parameters, assert_blamed, assert_plantable, edits_of, lab_alone, plant, sweep_of_one
from zerosim.checkpoints import save
from zerosim.lab import suite
from zerosim.options import LossScale
from zerosim.records.results import Settings
from zerosim.stages import ROWS, SCHEMES

FAULTS = tomllib.loads(Path(__file__).with_name("faults_step.toml").read_text())["fault"]
BY_NAME = {row.name: row for row in ROWS}
FOUR = [row.name for row in SCHEMES]


def settings(fault: Fault) -> Settings:
    """A lab of four clipped steps, or as the fault has it."""
    scale = {"loss_scale": LossScale(**fault["scale"])} if "scale" in fault else {}
    changes: dict[str, Any] = {"steps": 4, "clip": 0.5, **scale, **fault.get("with", {})}
    return lab_settings(**changes)


@pytest.fixture(autouse=True)
def nothing_else_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sweep_of_one(monkeypatch)
    monkeypatch.setattr(save, "np", np, raising=False)  # for a fault that rounds
    with lab_alone(monkeypatch):
        yield


@pytest.mark.parametrize("fault", as_parameters(FAULTS))
def test_a_planted_fault_is_found_and_named(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Every scheme that has the fault is blamed, for the right quantity, and no other."""
    plant(monkeypatch, edits_of(fault))
    rows: list[str] = fault.get("rows", FOUR)
    found = suite.run(settings(fault), rows=[BY_NAME[name] for name in rows])
    assert_blamed(found.failures, fault, fault.get("blames") or rows)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_can_be_planted(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """It is planted at night, but by day it is known that it can be."""
    assert_plantable(monkeypatch, fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "names"),
    {str(settings(fault)): (settings(fault), fault.get("rows", FOUR)) for fault in FAULTS}.values(),
    ids=lambda value: "",
)
def test_without_a_fault_nothing_is_found(asked: Settings, names: list[str]) -> None:
    """Under all settings that faults are planted under, the lab has nothing to say."""
    assert suite.run(asked, rows=[BY_NAME[name] for name in names]).failures == []
