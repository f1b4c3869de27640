"""The lab's own checks find what is planted, and say which scheme, which quantity and which band.

A fault is a piece of one function's source that becomes another (``faults.toml``). What must find it
is ``lab.run``, the same that ``zerosim lab`` runs and reports; no other test has a say.
"""

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import jaxtyping
import numpy as np
import pytest

from zerosim.lab import suite as lab
from zerosim.records.results import Ablations, Failure, Settings
from zerosim.schemes import SCHEMES

FAULTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())["fault"]
RANKS = 5


def settings(**changes: Any) -> Settings:
    """A lab in which nothing divides by anything, and chunks are long enough for every wrong place to be seen."""
    options: dict[str, Any] = {
        "ranks": RANKS, "steps": 2, "batch": 2, "seed": 7, "model_seed": 0, "precision": "mixed", "wire": "fp32",
        "gather": "layer", "data": "noise", "capacity": None, "widths": [7, 11, 3],
    }  # fmt: skip
    return Settings(**options | changes)


@pytest.fixture(autouse=True)
def nothing_else_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a fault does to shapes or to numbers must be found by the checks, not by the guards of the tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    # They show what a rule is worth and check nothing; without them a row takes half the time.
    nothing = Ablations(whole_model_gather=None, narrow_wire=None, whole_model_bucket={})
    monkeypatch.setattr(lab, "_ablations", lambda *_: nothing)
    with np.errstate(all="ignore"):
        yield


def function(where: str) -> Callable[..., Any]:
    """The function that the package's source has at ``module:name`` or ``module:class.name``, undecorated."""
    module, _, qualified = where.partition(":")
    found: Any = __import__(f"zerosim.{module}", fromlist=["*"])
    for name in qualified.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    unwrapped = inspect.unwrap(found)
    assert inspect.isfunction(unwrapped)
    return unwrapped


def edited(where: str, edits: Sequence[tuple[str, str]]) -> CodeType:
    """The function's code after each ``old`` in its source, which must be there once, has become ``new``."""
    original = function(where)
    source = inspect.getsource(original)
    for old, new in edits:
        assert source.count(old) == 1, f"{where} has {source.count(old)} of {old!r}: bring the row up to date"
        source = source.replace(old, new.removeprefix("\n") if not old.startswith("\n") else new)
    tree = ast.parse(f"from __future__ import annotations\n{textwrap.dedent(source)}")
    return next(
        code
        for code in compile(tree, inspect.getfile(original), "exec").co_consts
        if isinstance(code, CodeType) and code.co_name == original.__name__
    )


def plant(monkeypatch: pytest.MonkeyPatch, edits: Sequence[tuple[str, str, str]]) -> None:
    """Give the functions other code, so that everything that refers to them, however it came by them, runs it."""
    for where in dict.fromkeys(where for where, _, _ in edits):
        module = __import__(f"zerosim.{where.partition(':')[0]}", fromlist=["*"])
        monkeypatch.setattr(module, "LEFT", None, raising=False)  # where a fault may leave something
        code = edited(where, [(old, new) for place, old, new in edits if place == where])
        monkeypatch.setattr(function(where), "__code__", code)


def blamed(failures: Sequence[Failure]) -> dict[str, list[str]]:
    """By stage, what the checks say of it.

    The comparison with data parallel, of which the records keep the differences, is left out: where
    data parallel itself is at fault, it is the others that differ from it.
    """
    said: dict[str, list[str]] = {}
    for failure in failures:
        if not re.search(r"element \d+$|^loss$", failure.quantity):
            stage = next(str(index) for index, stage in enumerate(SCHEMES) if stage.name == failure.scheme)
            said.setdefault(stage, []).append(str(failure))
    return said


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_planted_fault_is_found_and_named(monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]) -> None:
    """Every scheme that has the fault is blamed, for the right quantity and band, and no other."""
    plant(monkeypatch, [(fault["where"], fault["old"], fault["new"]), *map(tuple, fault.get("also", []))])
    if "spares" not in fault:
        monkeypatch.setattr(lab, "sweep_ranks", lambda ranks: [ranks])  # for time's sake
    failures = lab.run(settings(**fault.get("with", {}))).failures
    said = blamed(failures)
    assert set(said) == set(fault["schemes"]), said
    for texts in said.values():
        for pattern in fault["says"]:
            assert any(re.search(pattern, text) for text in texts), (pattern, texts[:20])
    assert not {failure.ranks for failure in failures} & set(fault.get("spares", []))


@pytest.mark.parametrize("changes", [dict(pairs) for pairs in {tuple(f.get("with", {}).items()) for f in FAULTS}])
def test_without_a_fault_nothing_is_found(changes: dict[str, Any]) -> None:
    """Under all settings that the faults are planted under, the lab has nothing to say."""
    assert lab.run(settings(**changes)).failures == []
