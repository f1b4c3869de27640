"""The lab's checks find what is planted where groups, kept copies, the host and int8 messages go, and say under whom.

A fault is a piece of one function's source that becomes another (``faults_axes.toml``). What must find it is
``lab.suite.run`` with those rows, the same that ``zerosim lab --scheme ... --node`` runs; no other test has a say.
One fault of each mechanism is planted by day, the rest at night.
"""

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import jaxtyping
import numpy as np
import pytest

from helpers import lab_settings
from zerosim.lab import suite
from zerosim.records.results import Ablations, Settings
from zerosim.stages import ROWS, Stage

FAULTS = tomllib.loads(Path(__file__).with_name("faults_axes.toml").read_text())["fault"]
MINE = Stage("optimizer over all, gradients in groups", "all", "group")  # a row of one's own
BY_NAME = {row.name: row for row in (*ROWS, MINE)}


def settings(**changes: Any) -> Settings:
    """A lab on three nodes of two, or as the fault has it."""
    return lab_settings(**{"ranks": 6, "node": 2, **changes})


@pytest.fixture(autouse=True)
def nothing_else_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a fault does must be found by the checks, not by the guards of the tests; and what checks nothing is out."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    nothing = Ablations(whole_model_gather=None, narrow_wire=None, whole_model_bucket={})
    monkeypatch.setattr(suite, "_ablations", lambda *_: nothing)
    monkeypatch.setattr(suite, "sweep_ranks", lambda ranks, node=None: [ranks])
    with np.errstate(all="ignore"):
        yield


def function(where: str) -> Callable[..., Any]:
    """The function at ``module:name`` or ``module:class.name``, without its decorators."""
    module, _, qualified = where.partition(":")
    found: Any = __import__(f"zerosim.{module}", fromlist=["*"])
    for name in qualified.split("."):
        found = inspect.getattr_static(found, name)
    unwrapped = inspect.unwrap(found)
    assert inspect.isfunction(unwrapped)
    return unwrapped


def plant(monkeypatch: pytest.MonkeyPatch, edits: list[tuple[str, str, str]]) -> None:
    """Give each function the code that its source has after the edits; what is replaced must be there once."""
    for where in dict.fromkeys(where for where, _, _ in edits):
        original = function(where)
        source = inspect.getsource(original)
        for _, old, new in (edit for edit in edits if edit[0] == where):
            assert source.count(old) == 1, f"{where} has {source.count(old)} of {old!r}: bring the row up to date"
            source = source.replace(old, new)
        tree = ast.parse(f"from __future__ import annotations\n{textwrap.dedent(source)}")
        [code] = [
            code
            for code in compile(tree, inspect.getfile(original), "exec").co_consts
            if isinstance(code, CodeType) and code.co_name == original.__name__
        ]
        module = __import__(f"zerosim.{where.partition(':')[0]}", fromlist=["*"])
        monkeypatch.setattr(module, "LEFT", None, raising=False)  # where a fault may leave something
        monkeypatch.setattr(original, "__code__", code)


def each(faults: list[dict[str, Any]]) -> list[Any]:
    """The faults as parameters; those that are not daily are slow."""
    return [
        pytest.param(fault, id=fault["name"], marks=[] if fault.get("daily") else pytest.mark.slow) for fault in faults
    ]


@pytest.mark.parametrize("fault", each(FAULTS))
def test_a_planted_fault_is_found_and_named(monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]) -> None:
    """Every scheme that has the fault is blamed, for the right quantity, and no other."""
    plant(monkeypatch, [(fault["where"], fault["old"], fault["new"]), *map(tuple, fault.get("also", []))])
    found = suite.run(settings(**fault.get("with", {})), rows=[BY_NAME[name] for name in fault["rows"]])
    said: dict[str, list[str]] = {name: [] for name in fault["rows"]}
    for failure in found.failures:
        # Against the first of its order a scheme may differ because that one is at fault.
        if not re.search(r"element \d+$|^loss$", failure.quantity):
            said[failure.scheme].append(str(failure))
    assert {name for name, texts in said.items() if texts} == set(fault["blames"]), said
    for name in fault["blames"]:
        for pattern in fault["says"]:
            assert any(re.search(pattern, text) for text in said[name]), (name, pattern, said[name][:20])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "names"),
    {str(fault.get("with", {})): (fault.get("with", {}), fault["rows"]) for fault in FAULTS}.values(),
    ids=str,
)
def test_without_a_fault_nothing_is_found(changes: dict[str, Any], names: list[str]) -> None:
    """Under all settings that faults are planted under, the lab has nothing to say."""
    assert suite.run(settings(**changes), rows=[BY_NAME[name] for name in names]).failures == []
