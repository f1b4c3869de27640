"""The record of mutation testing: what is changed, what a run must not end with, and the page made from it."""

from pathlib import Path
from typing import Any

import pytest

import mutants_page

SOURCE = """
from contextlib import contextmanager
TABLE = {"a": 2}
class Some:
    @contextmanager
    def doubled(self, x: int = 1):
        \"\"\"Words.\"\"\"
        if x < 0:
            raise ValueError("words", x)
        def inner():
            return True
        yield (x) + x
"""


def module(survived: list[str], tried: int = 40) -> dict[str, Any]:
    return {
        "commit": "c0ffee", "python": "3", "mutmut": "3", "changes": 50, "tried": tried, "seconds": 7.0,
        "never ended": 0, "survived": survived,
    }  # fmt: skip


def test_functions_are_changed_and_nothing_else(tmp_path: Path) -> None:
    """Decorated ones too, and what is within them; not tables, defaults, annotations, docstrings or messages."""
    made = pytest.importorskip("mutants_made", exc_type=ImportError)
    path = tmp_path / "some.py"
    path.write_text(SOURCE)
    mutants, there = made.mutants("some", path)
    changes = [each.change for each in mutants]
    assert len(set(changes)) == len(changes) == len({each.key for each in mutants}) <= there
    assert {each.code.co_qualname for each in mutants} == {each.function for each in mutants} == {"Some.doubled"}
    assert {
        "Some.doubled: if x [[< -> <=]] 0:", "Some.doubled: if x < [[0 -> 1]]:",
        "Some.doubled: yield (x) [[+ -> -]] x", "Some.doubled: return [[True -> False]]",
    } <= set(changes)  # fmt: skip
    assert not any("XX" in each or "= 1" in each or "contextmanager" in each for each in changes)
    assert {each.lines for each in mutants if "yield" in each.change} == {range(12, 13)}
    assert [each.change for each in made.mutants("some", path, 3)[0]] == changes[:3]


def test_survivors_need_a_reason_and_reasons_a_survivor() -> None:
    """A run ends badly with too few mutants noticed, a survivor without a reason, or a reason without a survivor."""
    because = {"why": "because", "comm": ["[[a ->"]}
    assert mutants_page.wrong({"comm": module(["f: [[a -> b]]"])}, [because]) == []
    assert mutants_page.wrong({"comm": module(["f: [[a -> b]]"])}, []) == ["no reason is given for comm: f: [[a -> b]]"]
    [said] = mutants_page.wrong({"comm": module(["f: [[c -> b]]"])}, [because | {"comm": ["[[c", "[[a ->"]}])
    assert said == "a reason is given for what has not survived, comm: [[a ->"
    said, other = mutants_page.wrong({"comm": module([]), "ranks": module(["f: [[a -> b]]"])}, [because])
    assert (said, other) == (
        "no reason is given for ranks: f: [[a -> b]]",
        "a reason is given for what has not survived, comm: [[a ->",
    )
    [said] = mutants_page.wrong({"comm": module(["[[a -> b]]"], tried=19)}, [because])
    assert said == "only 94.7% of the mutants that tell were noticed; 95% are asked for"
    assert mutants_page.wrong({"comm": module(["[[a -> b]]"], tried=19)}, [because | {"why": "The same: zero."}]) == []


def test_the_page_and_the_reasons_are_those_of_the_record() -> None:
    """docs/MUTANTS.md is made from what was recorded, with which nothing is wrong, and of modules that there are."""
    modules, reasons = mutants_page.kept()
    assert mutants_page.wrong(modules, reasons) == []
    assert mutants_page.PAGE.read_text() == mutants_page.page(modules, reasons)
    for name in modules:
        assert (mutants_page.ROOT / "src/zerosim" / f"{name.replace('.', '/')}.py").exists(), name
