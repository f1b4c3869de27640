"""The lab's checks find what is planted where groups, kept copies, the host and int8 messages go, and say under whom.

What must find a fault of ``faults_axes.toml`` is ``lab.suite.run`` with its rows, the same that
``zerosim lab --scheme ... --node`` runs; no other test has a say. ``planting.py`` says what a fault is.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import lab_settings
from planting import Fault, as_parameters, assert_blamed, assert_plantable, edits_of, lab_alone, plant, sweep_of_one
from zerosim.lab import suite
from zerosim.records.results import Settings
from zerosim.stages import ROWS, Stage

FAULTS = tomllib.loads(Path(__file__).with_name("faults_axes.toml").read_text())["fault"]
MINE = Stage("optimizer over all, gradients in groups", "all", "group")  # a row of one's own
BY_NAME = {row.name: row for row in (*ROWS, MINE)}


def settings(**changes: Any) -> Settings:
    """A lab on three nodes of two, or as the fault has it."""
    return lab_settings(**{"ranks": 6, "node": 2, **changes})


@pytest.fixture(autouse=True)
def nothing_else_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sweep_of_one(monkeypatch)
    with lab_alone(monkeypatch):
        yield


@pytest.mark.parametrize("fault", as_parameters(FAULTS))
def test_a_planted_fault_is_found_and_named(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Every scheme that has the fault is blamed, for the right quantity, and no other."""
    plant(monkeypatch, edits_of(fault))
    found = suite.run(settings(**fault.get("with", {})), rows=[BY_NAME[name] for name in fault["rows"]])
    assert_blamed(found.failures, fault, fault["blames"])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_can_be_planted(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """It is planted at night, but by day it is known that it can be."""
    assert_plantable(monkeypatch, fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "names"),
    {str(fault.get("with", {})): (fault.get("with", {}), fault["rows"]) for fault in FAULTS}.values(),
    ids=str,
)
def test_without_a_fault_nothing_is_found(changes: dict[str, Any], names: list[str]) -> None:
    """Under all settings that faults are planted under, the lab has nothing to say."""
    assert suite.run(settings(**changes), rows=[BY_NAME[name] for name in names]).failures == []
