"""A row of one's own works wherever a built-in one does, under its own name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers import MINE, Case, bits, contents, draw, lab_settings, nonzero
from zerosim import theory
from zerosim.bands import Band
from zerosim.checks import sanitizer
from zerosim.checks.reference import Reference
from zerosim.counts import Report
from zerosim.lab import suite as lab
from zerosim.lab.data import Pair
from zerosim.lab.record import load
from zerosim.model import MLP
from zerosim.records.results import save
from zerosim.schemes import DP, Scheme, Stage, ZeRO2
from zerosim.stages import ROWS

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDTHS, RANKS, NODE = (5, 7, 3), 4, 2

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def counted(report: Report) -> dict[str, Any]:
    """All of a report but the time."""
    events = [event._replace(seconds=0) for event in report.events]
    traffic = {key: (t.sent.tolist(), t.padding.tolist(), t.messages) for key, t in report.traffic.items()}
    return vars(report) | {"seconds": {}, "events": events, "traffic": traffic}


@each_row
def test_a_row_of_ones_own_is_what_it_shards(row: Stage) -> None:
    """A built-in row under another name trains to the same bits, and holds, sends and is predicted the same bytes."""
    mine = replace(row, name="mine")
    one, other = (each(MLP(WIDTHS), RANKS, node=NODE) for each in (row, mine))
    for step in (1, 2):
        batch = draw(RANKS, widths=WIDTHS, seed=step)
        assert one.step(batch) == other.step(batch)
    assert (one.name, other.name) == (row.name, "mine")
    assert contents(one) == contents(other)
    assert [counted(report) for report in one.reports] == [counted(report) for report in other.reports]
    jobs = [theory.Job(each, (((5, 7),), ((7, 3),)), RANKS, 2, node=NODE) for each in (row, mine)]
    for formula in (theory.resident, theory.host_resident, theory.peak, theory.traffic, theory.padding, theory.flops):
        first, second = (formula(job) for job in jobs)
        assert first == second
    assert nonzero(theory.resident(jobs[1])) == other.reports[-1].resident


@each_row
def test_a_row_of_ones_own_has_a_reference_and_a_stricter_world(row: Stage) -> None:
    """Training that was written a second time, and the sanitizer, take the row itself, and find nothing wrong."""
    mine, settings = replace(row, name="mine"), lab_settings(ranks=RANKS, node=NODE, widths=list(WIDTHS))
    steps: list[Sequence[Pair]] = [draw(RANKS, widths=WIDTHS, seed=step) for step in (1, 2)]
    plain = [Reference(each, settings, RANKS) for each in (row, mine)]
    for number, batch in enumerate(steps, start=1):
        for reference in plain:
            reference.reach(number, batch)
    for band, arrays in plain[0].states.items():
        for one, other in zip(arrays, plain[1].states[band], strict=True):
            assert np.array_equal(bits(one), bits(other))
    assert sanitizer.run(mine, settings, RANKS, steps) == []


@pytest.fixture(scope="module")
def found() -> Any:
    """A lab of rows of one's own beside built-in ones, with nodes."""
    return lab.run(lab_settings(ranks=RANKS, node=NODE), rows=[DP, MINE, ZeRO2, Stage("in groups", "group", "group")])


def test_the_lab_takes_rows_of_ones_own(found: Any, tmp_path: Path) -> None:
    """Every check holds, and the row's record is that of the row which shards the same, but for its name and times."""
    assert [str(failure) for failure in found.failures] == []
    assert [record.name for record in found.schemes] == ["data parallel", "mine", "ZeRO-2", "in groups"]
    assert found.scheme("mine").row == MINE
    mine, built_in = (plain(found.scheme(name)) for name in ("mine", "ZeRO-2"))
    assert mine.pop("row")["name"] == "mine"
    del built_in["row"]
    assert mine == built_in
    rows = [{name: getattr(row, name) for name in ("resident", "peak", "sent")} for row in found.sweep]
    names = [row.scheme for row in found.sweep]
    assert [row for row, name in zip(rows, names, strict=True) if name == "mine"] == [
        row for row, name in zip(rows, names, strict=True) if name == "ZeRO-2"
    ]
    save(found, tmp_path / "results.json")
    assert load(tmp_path / "results.json") == found


def plain(record: Any) -> dict[str, Any]:
    """A record without its times."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(each) for key, each in value.items() if key != "seconds"}
        return [timeless(each) for each in value] if isinstance(value, list) else value

    built: dict[str, Any] = timeless(msgspec.to_builtins(record))
    built["events"] = [[field for index, field in enumerate(event) if index != 5] for event in built["events"]]
    return built


@pytest.mark.parametrize(
    ("check", "quantity"),
    [("same training", "master of layer 2, element 1"), ("as predicted", "bytes of master at rest")],
)
def test_a_row_of_ones_own_is_blamed_by_its_name(monkeypatch: pytest.MonkeyPatch, check: str, quantity: str) -> None:
    """A fault that only the row has is found, and no other scheme is named."""
    step = Scheme.step

    def faulty(self: Scheme, batch: Any) -> float:
        loss = step(self, batch)
        if self.name == "mine" and self.ring.size == RANKS and self.updates == 2:
            if check == "same training":
                self.buckets[1].states[Band.MASTER].view(np.uint32)[2, 1] ^= 1
            else:
                self.ranks.hold(Band.MASTER, (7,), "nobody")
                self.reports[-1].resident = nonzero(self.ledger.held)
        return loss

    monkeypatch.setattr(Scheme, "step", faulty)
    monkeypatch.setattr(sanitizer, "run", lambda *_: [])  # for time's sake
    failures = lab.run(lab_settings(ranks=RANKS), rows=[DP, MINE, ZeRO2]).failures
    assert {failure.scheme for failure in failures} == {"mine"}
    assert any(failure.check == check and quantity in failure.quantity for failure in failures)


def test_a_row_needs_a_name_of_its_own() -> None:
    """Two rows of one name cannot be told apart in what is found: refused, with the names."""
    with pytest.raises(ValueError, match=r"^lab\(rows\): .* each of another name; got \['ZeRO-2', 'ZeRO-2'\]"):
        lab.run(lab_settings(), rows=[ZeRO2, replace(DP, name="ZeRO-2")])


def test_a_card_of_ones_own_peak_suffices() -> None:
    """The memory that a row needs is predicted for it as for any other: to the byte."""
    case = Case(MINE, 5)
    peak = sum(theory.peak(case.job).values())
    case.scheme(capacity=peak).step(case.batch())
    with pytest.raises(MemoryError, match="Out of memory"):
        case.scheme(capacity=peak - 1).step(case.batch())
