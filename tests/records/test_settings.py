"""What a lab was asked for: its words, and what follows from it."""

from typing import Any

import pytest

from helpers import lab_settings
from zerosim.optimizer import Adam, AdamW, Schedule
from zerosim.options import LossScale, Options
from zerosim.stages import DP, HPZ, HSDP, ZeRO3

ASKED: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"clip": 0.5}, "clipped to 0.5"),
    ({"clip": 2.0, "norm_type": float("inf")}, "clipped to 2 (inf norm)"),
    ({"clip": 2.0, "clip_eps": 0.25}, "clipped to 2 (eps 0.25)"),
    ({"clip": 2.0, "norm_type": float("inf"), "clip_eps": 0.25}, "clipped to 2 (inf norm, eps 0.25)"),
    ({"loss_scale": LossScale(init=64.0)}, "loss scale dynamic, from 64"),
    ({"loss_scale": LossScale(init=64.0, dynamic=False)}, "loss scale 64"),
    ({"accumulate": 2}, "2 micro-batches, reduced after each"),
    ({"accumulate": 3, "sync": "end"}, "3 micro-batches, reduced at the end"),
    ({"uneven": True}, "uneven batches"),
    ({"uneven": True, "average": "ranks"}, "uneven batches, averaged over ranks"),
    ({"find_unused": True}, "told which parameters have gradients"),
    ({"weight_decay": 0.125}, "AdamW with weight decay 0.125"),
    ({"warmup": 4}, "warm-up over 4 updates"),
    ({"resume_at": 2}, "resumed after step 2 on 5 ranks"),
    ({"resume_at": 2, "resume_ranks": 3}, "resumed after step 2 on 3 ranks"),
    ({"clip": 0.5, "uneven": True, "warmup": 4}, "clipped to 0.5, uneven batches, warm-up over 4 updates"),
]


@pytest.mark.parametrize(("asked", "words"), ASKED, ids=lambda each: str(each)[:40])
def test_what_was_asked_for_is_said_in_words(asked: dict[str, Any], words: str) -> None:
    """Each option that is not as usual has its words, and nothing else is said."""
    assert lab_settings(**asked).said() == words


def test_options_are_those_that_were_asked_for() -> None:
    """Every field that is an option is that option; decay makes it AdamW, warm-up gives it a schedule."""
    asked: dict[str, Any] = {
        "precision": "bf16", "wire": "bf16", "wire_params": "int8", "gather": "model", "node": 5, "capacity": 7,
        "host_capacity": 11, "clip": 0.5, "norm_type": float("inf"), "clip_eps": 0.25, "uneven": True,
        "loss_scale": LossScale(init=64.0), "average": "ranks", "accumulate": 2, "sync": "end", "find_unused": True,
    }  # fmt: skip
    options = lab_settings(**asked, weight_decay=0.125, warmup=4, steps=9).options()
    assert {name: getattr(options, name) for name in asked} == asked
    assert options.optimizer == AdamW(weight_decay=0.125, schedule=Schedule(warmup=4))
    assert options.keep_reports == 9
    assert lab_settings(warmup=4).options().optimizer == Adam(schedule=Schedule(warmup=4))
    assert lab_settings().options() == Options(keep_reports=2)


def test_gradients_are_reduced_under_all_rows_at_one_time() -> None:
    """After each micro-batch unless told otherwise; with one there is no choice."""
    assert [lab_settings(accumulate=count).reduced() for count in (1, 2, 3)] == [None, "each", "each"]
    assert [lab_settings(accumulate=count, sync="end").reduced() for count in (1, 2)] == ["end", "end"]
    assert lab_settings(accumulate=2).options().sync == "each"


def test_a_run_that_is_resumed_has_other_ranks_from_then_on() -> None:
    """Up to the step after which it was saved those that began it, then those that went on, if they are others."""
    resumed = lab_settings(resume_at=2, resume_ranks=3)
    assert [resumed.ranks_in(step) for step in (1, 2, 3, 4)] == [5, 5, 3, 3]
    assert [lab_settings(resume_at=2).ranks_in(step) for step in (2, 3)] == [5, 5]
    assert [lab_settings(resume_ranks=3).ranks_in(step) for step in (1, 9)] == [5, 5]


def test_the_order_of_a_run_is_that_of_its_parts() -> None:
    """A row's bits depend on the rings before a run is resumed and those after; with int8, on who gathers from whom."""
    plain, groups = (row.on(4, 2).order() for row in (DP, HSDP))
    settings = lab_settings(ranks=4, node=2)
    assert [settings.order(row) for row in (DP, ZeRO3, HSDP)] == [plain, plain, groups]
    assert settings.order(HSDP, 2) == plain  # two ranks in groups of two are one group
    resumed = lab_settings(ranks=4, node=2, resume_at=1, resume_ranks=2)
    assert [resumed.order(row) for row in (DP, HSDP)] == [(*plain, *plain), (*groups, *plain)]
    packed = lab_settings(ranks=4, node=2, wire_params="int8")
    assert len({packed.order(row) for row in (DP, ZeRO3, HPZ, HSDP)}) == 4
    assert packed.order(ZeRO3) == ZeRO3.on(4, 2).order("int8")
