"""The lab's own checks find what is planted, and say which scheme, which quantity and which band.

What must find a fault of ``faults.toml`` is ``lab.suite.run``, the same that ``zerosim lab`` runs and reports; no
other test has a say. ``planting.py`` says what a fault is.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import lab_settings
from planting import Fault, as_parameters, assert_blamed, assert_plantable, edits_of, lab_alone, plant, sweep_of_one
from zerosim.lab import suite
from zerosim.schemes import SCHEMES

FAULTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())["fault"]


@pytest.fixture(autouse=True)
def nothing_else_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with lab_alone(monkeypatch):
        yield


@pytest.mark.parametrize("fault", as_parameters(FAULTS))
def test_a_planted_fault_is_found_and_named(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Every scheme that has the fault is blamed, for the right quantity and band, and no other."""
    plant(monkeypatch, edits_of(fault))
    if "spares" not in fault:
        sweep_of_one(monkeypatch)
    failures = suite.run(lab_settings(**fault.get("with", {}))).failures
    assert_blamed(failures, fault, fault.get("blames", [stage.name for stage in SCHEMES]))
    assert not {failure.ranks for failure in failures} & set(fault.get("spares", []))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(pairs) for pairs in {tuple(f.get("with", {}).items()) for f in FAULTS}])
def test_without_a_fault_nothing_is_found(changes: dict[str, Any]) -> None:
    """Under all settings that the faults are planted under, the lab has nothing to say."""
    assert suite.run(lab_settings(**changes)).failures == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_can_be_planted(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """It is planted at night, but by day it is known that it can be."""
    assert_plantable(monkeypatch, fault)
