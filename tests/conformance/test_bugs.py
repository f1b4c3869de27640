"""Every bug that is planted in a training by hand is found, in the step and on the rank that it is in, and named.

A bug is a piece of ``own_zero.py`` that becomes another (``bugs/bugs.toml``). What must find it is the check as a user
calls it; nothing is handed over but ZeRO-3's shards, and gradients where a row says so.
"""

import gc
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from conformance import trial
from zerosim.conformance import run_ranks

BUGS = tomllib.loads((Path(__file__).parent / "bugs" / "bugs.toml").read_text())["bug"]
LIMIT = 900.0
pytestmark = pytest.mark.usefixtures("shapes_unchecked")
Case = tuple[dict[str, Any], int]


def cases(key: str, *, hangs: bool) -> list[Case]:
    """Each bug in each stage that its row lists under ``key``."""
    return [(bug, int(stage)) for bug in BUGS if bug.get("hangs", False) is hangs for stage in bug.get(key, "")]


def findings(some: Sequence[Case], timeout: float = LIMIT) -> list[list[dict[str, Any]]]:
    """What is found of each case, all of them in one start of four ranks."""

    def ranks(rank: int) -> None:
        for bug, stage in some:
            gc.collect()
            found = trial.train(rank, stage, bug)
            verdict = found.verdict()
            found.close()
            if rank == 0:
                print(json.dumps([{name: getattr(f, name) for name in f.__struct_fields__} for f in verdict.findings]))

    ran = run_ranks(ranks, trial.RANKS, timeout=timeout, show=False)
    assert ran.holds, "\n".join(ran.errors)
    return [json.loads(line) for line in ran.output.splitlines()]


def differences(bug: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """In what the first finding is not what the bug's row says."""
    wanted = {"cause": bug["cause"], "step": bug.get("step", 1), "rank": bug.get("rank", -1)}
    if "parameter" in bug:
        wanted["parameter"] = bug["parameter"]
    wrong = [f"{name} {found[name]!r} for {value!r}" for name, value in wanted.items() if found[name] != value]
    return wrong + [f"{found['text']!r} for {bug['says']!r}"] * (re.search(bug["says"], found["text"]) is None)


def check_all(some: Sequence[Case]) -> None:
    """The first thing that is found of each case is what its row says."""
    wrong = {}
    for (bug, stage), found in zip(some, findings(some), strict=True):
        said = differences(bug, found[0]) if found else ["nothing was found"]
        if said:
            wrong[f"{bug['name']}, stage {stage}"] = said
    assert not wrong


def test_a_bug_of_each_kind_is_found_and_named() -> None:
    """One of every mechanism, each in one stage."""
    check_all(cases("daily", hangs=False))


@pytest.mark.slow
def test_every_bug_is_found_and_named_in_every_stage() -> None:
    """The whole table."""
    check_all(cases("stages", hangs=False))


def test_the_table_is_as_large_as_it_is_said_to_be() -> None:
    """At least 30 bugs in each of ZeRO-1, -2 and -3, no two of one name, and each piece of source is there once."""
    assert len({bug["name"] for bug in BUGS}) == len(BUGS)
    for stage in "123":
        assert sum(stage in bug["stages"] for bug in BUGS) >= 30
    for bug in BUGS:
        trial.edited([(bug["old"], bug["new"]), *bug.get("also", [])])


@pytest.mark.parametrize(
    ("bug", "stage"),
    [
        pytest.param(bug, stage, id=f"{bug['name']}, {stage}", marks=[] if str(stage) in bug.get("daily", "") else slow)
        for slow in [[pytest.mark.slow]]
        for bug, stage in cases("stages", hangs=True)
    ],
)
def test_what_would_hang_is_named_and_ends(bug: dict[str, Any], stage: int) -> None:
    """The rank is named by whoever sees it first, and every rank ends with an exit code, well before the group's."""
    ran = run_ranks(lambda rank: trial.train(rank, stage, {**bug, "timeout": 4}).report(), trial.RANKS, show=False)
    assert all(ran.codes), ran
    text = re.sub(r"\s+", " ", ran.output)
    assert text.count("✗ ZeRO") + text.count("✗ data parallel") == 1, text
    assert f"wrong in step {bug.get('step', 1)}, rank {bug['rank']} ({bug['cause']})" in text
    assert re.search(bug["says"], text), text
