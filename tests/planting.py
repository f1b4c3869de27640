"""Planting a fault: a piece of a function's source that becomes another, for the lab's own checks to find.

A fault is a table of a TOML file: ``where`` is a function of the package, ``old`` a piece of its source that
becomes ``new``; ``also`` has further such edits, of the same fault. ``rows`` are the schemes that the lab runs
(the four unless told otherwise), ``blames`` those of them that must be blamed, and no others; ``says`` are
patterns that a failure of each of them must match. ``with`` are settings of the lab that make the fault visible.
Of each mechanism one fault is ``daily``; the others are planted at night.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import jaxtyping
import numpy as np
import pytest

from zerosim.api.recording import NOTHING
from zerosim.kernels.choice import SWITCH
from zerosim.lab import suite
from zerosim.records.results import Failure

Fault = dict[str, Any]
Edit = tuple[str, str, str]  # where, old, new


def as_parameters(faults: Iterable[Fault]) -> list[Any]:
    """The faults as parameters of a test; those that are not daily are slow."""
    return [
        pytest.param(fault, id=fault["name"], marks=[] if fault.get("daily") else pytest.mark.slow) for fault in faults
    ]


@contextmanager
def lab_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a fault does to shapes or to numbers must be found by the lab's checks, not by the guards of the tests.

    The faults are in the formulas in NumPy, so those are what is run; what the lab does not check is left out.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setenv(SWITCH, "numpy")
    monkeypatch.setattr(suite, "_ablations", lambda *_: NOTHING)
    with np.errstate(all="ignore"):
        yield


def edits_of(fault: Fault) -> list[Edit]:
    """All that the fault changes."""
    return [(fault["where"], fault["old"], fault["new"]), *map(tuple, fault.get("also", []))]


def plant(monkeypatch: pytest.MonkeyPatch, edits: Sequence[Edit]) -> None:
    """Give the functions other code, so that everything that refers to them, however it came by them, runs it."""
    for where in dict.fromkeys(where for where, _, _ in edits):
        module = __import__(f"zerosim.{where.partition(':')[0]}", fromlist=["*"])
        monkeypatch.setattr(module, "LEFT", None, raising=False)  # where a fault may leave something
        code = edited(where, [(old, new) for place, old, new in edits if place == where])
        monkeypatch.setattr(function(where), "__code__", code)


def sweep_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For time's sake the lab's sweep has the N that was asked for and no other."""
    monkeypatch.setattr(suite, "sweep_ranks", lambda ranks, node=None: [ranks])


def assert_plantable(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """What a fault replaces is in the source, once, and each function that it names has other code then."""
    before = {where: function(where).__code__ for where, _, _ in edits_of(fault)}
    plant(monkeypatch, edits_of(fault))
    assert not any(function(where).__code__ is code for where, code in before.items())


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
        source = source.replace(old, new)
    tree = ast.parse(f"from __future__ import annotations\n{textwrap.dedent(source)}")
    return next(
        code
        for code in compile(tree, inspect.getfile(original), "exec").co_consts
        if isinstance(code, CodeType) and code.co_name == original.__name__
    )


def said(failures: Iterable[Failure]) -> dict[str, list[str]]:
    """By scheme, what the checks say of it.

    The comparison with the first scheme of an order, of which the records keep the differences, is left
    out: where that one is at fault, it is the others that differ from it.
    """
    found: dict[str, list[str]] = {}
    for failure in failures:
        if not re.search(r"element \d+$|^loss$", failure.quantity):
            found.setdefault(failure.scheme, []).append(str(failure))
    return found


def assert_blamed(failures: Sequence[Failure], fault: Fault, blames: Iterable[str]) -> None:
    """Every scheme that has the fault is blamed, for all that the fault says, and no other."""
    texts = said(failures)
    assert set(texts) == set(blames), texts
    for name in blames:
        for pattern in fault["says"]:
            assert any(re.search(pattern, text) for text in texts[name]), (name, pattern, texts[name][:20])
