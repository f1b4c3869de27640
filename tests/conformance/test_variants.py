"""Sound trainings pass, however they are written; and what is counted of them is what they do."""

import gc
import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from conformance import variants
from zerosim.conformance import run_ranks

RANKS = 4
pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def verdicts(some: Sequence[variants.Variant], ranks: int = RANKS) -> dict[str, dict[str, Any]]:
    """What is said of each, all of them in one start of the ranks."""

    def train(rank: int) -> None:
        for variant in some:
            gc.collect()
            watched = variants.train(variant)
            verdict = watched.verdict()
            watched.close()
            if rank == 0:
                print(json.dumps([variant.name, [str(f.text) for f in verdict.findings], verdict.held, verdict.notes]))

    ran = run_ranks(train, ranks, timeout=600, show=False)
    assert ran.holds, "\n".join(ran.errors)
    lines = [json.loads(line) for line in ran.output.splitlines() if line.startswith('["')]  # DeepSpeed prints too
    return {name: {"findings": findings, "held": held, "notes": notes} for name, findings, held, notes in lines}


def test_the_usual_ways_pass() -> None:
    """Nothing is found wrong with hooks, rings by hand, own chunks, FSDP2 and the rest; and values were compared."""
    for name, said in verdicts([each for each in variants.VARIANTS if each.name in variants.DAILY]).items():
        assert said["findings"] == [], name
        assert any("of parameters" in line for line in said["held"]), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_sound_way_passes(ranks: int) -> None:
    """The whole table, on two ranks, on three, and on four; at least ten that nobody but its author has written."""
    assert len([each for each in variants.VARIANTS if "FSDP2" not in each.name and "DDP" not in each.name]) >= 10
    for name, said in verdicts(variants.VARIANTS, ranks).items():
        assert said["findings"] == [], name


@pytest.mark.slow
def test_deepspeed_passes() -> None:
    """All three stages, where it is installed: a framework is held to the schedule like anybody's own training."""
    pytest.importorskip("deepspeed")
    for name, said in verdicts(variants.DEEPSPEED).items():
        assert said["findings"] == [], name
        assert any("of parameters" in line for line in said["held"]), name
