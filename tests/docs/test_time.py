"""docs/time.md: written from what is recorded, and what is recorded is worth what the page says."""

from __future__ import annotations

from statistics import median

import pytest

import step_times
import time_page
from measured_runs import runs
from zerosim.planner.time_model import fitted

RUNS, FOUND = runs(), time_page.recorded()
ROWS = list(zip(RUNS, FOUND.predicted, strict=True))


def test_the_page_is_what_is_recorded() -> None:
    """Written again, the page is the same; make it so with scripts/step_times.py --page."""
    assert time_page.PAGE.read_text(encoding="utf-8") == time_page.page(RUNS, FOUND)


def test_the_package_has_the_shares_that_were_recorded() -> None:
    """What plans use is what the page shows, fitted on all runs of all publishers."""
    assert fitted() == FOUND.model
    assert FOUND.model.runs == len(RUNS)
    assert set(FOUND.model.sources) == {run.publisher for run in RUNS} == set(FOUND.others)


@pytest.mark.parametrize("place", range(len(RUNS)), ids=lambda place: f"{place + 2}-{RUNS[place].model}")
def test_no_run_is_faster_than_the_bound_or_out_of_its_band(place: int) -> None:
    """The bound lies below; the estimate lies within two fifths of what was measured, above the bound."""
    run, each = ROWS[place]
    assert each.bound < run.seconds
    assert each.bound < each.estimate
    assert time_page.off(each.estimate, run) < 0.4
    assert time_page.off(each.left_out, run) < 0.5


def test_what_the_estimate_is_worth() -> None:
    """Left out of the fit, half of all runs are within 15 %, of each publisher too, and nine of ten in the band."""
    out = [time_page.off(each.left_out, run) for run, each in ROWS]
    assert median(out) == pytest.approx(FOUND.model.median, abs=6e-4)
    assert median(out) < 0.15
    for publisher in FOUND.others:
        assert median(time_page.off(each.left_out, run) for run, each in ROWS if run.publisher == publisher) < 0.15
    in_band = [abs(run.seconds / each.left_out - 1) <= FOUND.model.band + 1e-3 for run, each in ROWS]
    assert 0.89 < sum(in_band) / len(in_band) < 0.92


def test_each_size_card_and_number_of_gpus_is_within_15_percent() -> None:
    """The estimate's median, with the run's publisher in the fit, by model, card and N."""
    for way in (time_page.size, lambda run: run.card, lambda run: str(run.gpus)):
        for key in {way(run) for run in RUNS}:
            found = [time_page.off(each.estimate, run) for run, each in ROWS if way(run) == key]
            assert median(found) < 0.15, key


@pytest.mark.slow
def test_the_shares_are_the_fits() -> None:
    """Fitted again on made-up runs, the shares that made them come out."""
    pytest.importorskip("transformers")
    places = [place for place, run in enumerate(RUNS) if run.model in ("MPT-125m", "TinyLlama-1.1B")][::8]
    planned = step_times.Planned([RUNS[place] for place in places], [RUNS[place].work for place in places])
    made = step_times.shares((0.6, 80.0, 0.7, 0.4))
    planned.measured = planned.expected(made)
    found = planned.fit()
    assert (found.products, found.memory) == pytest.approx((made.products, made.memory), rel=0.05)
    assert found.attention == pytest.approx(made.attention, rel=0.1)
