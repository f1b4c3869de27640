"""Predicted against measured: a plan or a reason for every number, a current page, and a word when a plan moves."""

from __future__ import annotations

from typing import Any

import pytest

import measured
from measured_cases import CASES, HELD

DAILY = ("mg-unfused", "mg-flash", "mg-full")


def test_every_number_has_a_plan_or_a_reason_and_every_plan_a_number() -> None:
    """And what remains is said of each."""
    assert HELD.keys() == measured.measured().keys()
    assert {held.case for held in HELD.values()} - {None} == CASES.keys() == measured.recorded().keys()
    assert all(held.cause for held in HELD.values())
    assert [name for name, held in HELD.items() if held.case is None] == ["tune-baseline"]


def test_the_page_is_what_the_recordings_make() -> None:
    """So every number of it is within its band."""
    assert measured.PAGE.read_text() == measured.page()


@pytest.mark.parametrize(
    ("case", "quantity", "times", "told"),
    [
        ("titan", "peak", 1.06, "titan-fsdp2-active: 1.0536"),
        ("ds-bf16", "peak", 0.95, "ds-bf16-peak: 0.9469"),
        ("ds-bf16", "rest", 1.03, "ds-bf16-rest: 1.0260"),
        ("mg-unfused", "rest", 1.1, "mg-unfused-a100-rest: 22.1 MiB more than planned"),
        ("mg-unfused", "peak", 0.97, "mg-unfused-a100-peak: grows by 0.9655"),
        ("bs-n16", "partition", 1.0000001, "bs-n16-partition: 1.0000"),
        ("lit-7b", "peak", 1.3, "lit-fsdp2-compile: 1.5340"),
        ("titan", "peak", 0.9, "titan-fsdp1-reserved: 0.6326"),
    ],
)
def test_a_plan_that_moves_is_told_with_its_band(case: str, quantity: str, times: float, told: str) -> None:
    """Of each kind of number one that is moved out of it."""
    plans: dict[str, Any] = {name: dict(plan) for name, plan in measured.recorded().items()}
    assert measured.out_of_band(plans) == []
    plans[case][quantity] = int(plans[case][quantity] * times) + 1
    assert any(each.startswith(told) for each in measured.out_of_band(plans))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else pytest.mark.slow) for name in CASES]
)
def test_plans_say_what_was_recorded_of_them(name: str) -> None:
    """A plan made now is within the band of every number that is held to it, and what the page shows."""
    pytest.importorskip("transformers")
    plans = measured.recorded()
    now = measured.predict(CASES[name])
    assert measured.out_of_band(plans | {name: now}) == []
    assert now == pytest.approx(plans[name], rel=1e-3)
