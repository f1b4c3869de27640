"""The record of mutation testing: what is changed, what a run must not end with, and the page made from it."""

import json
from typing import Any

import pytest

import mutants_page

SOURCE = '''
from contextlib import contextmanager
TABLE = {"a": 2}
Alias = list[int]
@contextmanager
def doubled(x: int = 1):
    """Words."""
    if x < 0:
        raise ValueError("words", x)
    yield x + x
'''


def record(survived: dict[str, list[str]], killed: int = 19) -> dict[str, Any]:
    modules = {name: {"killed": killed, "timeout": 0, "survived": len(each)} for name, each in survived.items()}
    return {"date": "2001-02-03", "python": "3.11", "mutmut": "3", "modules": modules, "survivors": survived}


def test_everything_that_runs_is_changed_and_nothing_else() -> None:
    """Tables, defaults and decorated functions are changed; annotations, docstrings and messages are not."""
    made = pytest.importorskip("mutants_made", exc_type=ImportError)
    changes = [f"{each.before} -> {each.after}" for each in made.mutants("module", SOURCE)]
    assert len(set(changes)) == len(changes)
    assert {
        'TABLE = {"a": 2} -> TABLE = {"a": 3}', "if x < 0: -> if x <= 0:", "if x < 0: -> if x < 1:",
        "yield x + x -> yield x - x", "def doubled(x: int = 1): -> def doubled(x: int = 2):",
    } <= set(changes)  # fmt: skip
    assert not any("ords" in each.split(" -> ")[1] and "XX" in each for each in changes)
    assert not any("Alias" in each or "contextmanager" in each for each in changes)


def test_survivors_need_a_reason_and_reasons_a_survivor() -> None:
    """A run ends badly with too few mutants noticed, a survivor without a reason, or a reason without a survivor."""
    assert mutants_page.wrong(record({"comm": ["f: a  ->  b"]}), {("comm", "f: a  ->  b"): "because"}) == []
    assert mutants_page.wrong(record({"comm": ["f: a  ->  b"]}), {}) == ["no reason is given for comm: f: a  ->  b"]
    [said] = mutants_page.wrong(record({"comm": []}), {("comm", "x"): "because"})
    assert said == "a reason is given for what has not survived, comm: x"
    assert mutants_page.wrong(record({"comm": []}), {("ranks", "x"): "of a module that was not tried"}) == []
    [said] = mutants_page.wrong(record({"comm": ["x"]}, killed=8), {("comm", "x"): "because"})
    assert said == "only 88.9% of the mutants were noticed; 90% are asked for"


@pytest.mark.skipif(not mutants_page.RECORD.exists(), reason="nothing has been recorded")
def test_the_page_and_the_reasons_are_those_of_the_record() -> None:
    """docs/MUTANTS.md is made from what was recorded, with which nothing is wrong."""
    found, known = json.loads(mutants_page.RECORD.read_text()), mutants_page.reasons()
    assert mutants_page.wrong(found, known) == []
    assert mutants_page.PAGE.read_text() == mutants_page.page(found, known)
