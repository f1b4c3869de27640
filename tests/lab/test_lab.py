"""The lab: what it runs, what it records, and that its checks can fail."""

import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import psutil
import pytest

from helpers import Case, by_night, lab_settings, some_by_night
from zerosim import theory
from zerosim.bands import Band
from zerosim.checks import compare as checks
from zerosim.cli.lab import lab as command
from zerosim.counts import Traffic
from zerosim.lab import ablations
from zerosim.lab import suite as lab
from zerosim.lab.experiment import Run, model_of
from zerosim.lab.record import load
from zerosim.model import MLP
from zerosim.options import LossScale
from zerosim.records.results import Results, Settings, encode, save
from zerosim.schemes import DP, SCHEMES, Scheme, Stage
from zerosim.stages import ROWS

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

NAMES = [stage.name for stage in SCHEMES]
WIDTHS = [5, 11, 3]


def settings(**changes: Any) -> Settings:
    return lab_settings(**{"steps": 3, "widths": WIDTHS} | changes)


@pytest.fixture(scope="module")
def found() -> Results:
    """One run of it."""
    return lab.run(settings())


# -- every choice


def choices(option: str) -> list[Any]:
    """What the command lets one choose."""
    [kind] = [each.type for each in command.params if each.name == option]
    assert isinstance(kind, click.Choice)
    return [*kind.choices]


def sound(changes: dict[str, Any]) -> bool:
    """Whether the choices go together."""
    try:
        settings(**changes).options()
    except ValueError:
        return False
    return True


RECIPES = [
    {"precision": precision, "wire": wire, "wire_params": wire_params}
    for precision, wire, wire_params in product(choices("precision"), choices("wire"), [None, *choices("wire_params")])
]
FIRST_OF_EACH = [
    next(each for each in RECIPES if each[option] == value and sound(each))
    for option in ("precision", "wire", "wire_params")
    for value in choices(option)
]
SCALED = {"loss_scale": LossScale(2.0**40, growth=4.0, backoff=2.0**-12, interval=2)}  # two overflows, then none
STEP: list[dict[str, Any]] = [
    {"clip": 0.5},
    {"loss_scale": LossScale(1024.0, dynamic=False)},
    {**SCALED, "steps": 6},
    {"uneven": True, "ranks": 5, "batch": 3},
    {"uneven": True, "batch": 3, "average": "ranks"},
    {"clip": 0.5, "norm_type": float("inf")},
    {"clip": 2.0**-20, "clip_eps": 0.0, "precision": "fp32"},
    {"find_unused": True},
    *(
        {"accumulate": count, "sync": sync, "batch": 6, "uneven": uneven, "steps": 2, "wire": wire}
        for count, sync, uneven, wire in [
            (2, None, False, "fp32"),
            (3, "end", False, "fp16"),
            (2, "each", True, "fp16"),
            (3, "end", True, "fp32"),
        ]
    ),
    {"weight_decay": 0.1, "warmup": 2, "steps": 3},
]
AS_RUN = {"clip": 0.5, **SCALED, "uneven": True, "weight_decay": 0.1, "warmup": 2, "wire_params": "int8"}
MORE = {"accumulate": 2, "norm_type": float("inf"), "find_unused": True, "batch": 4}
CHOSEN: list[Any] = [
    *some_by_night(filter(sound, RECIPES), FIRST_OF_EACH.__contains__),
    *some_by_night(({"gather": gather} for gather in choices("gather")), lambda each: each["gather"] == "model"),
    *some_by_night(
        ({"data": data, "widths": [64, 3, 64]} for data in choices("data")), lambda each: each["data"] == "digits"
    ),
    *({"ranks": ranks} for ranks in (1, 2)),
    {"ranks": 4, "node": 2, "host_capacity": 10**6},
    *STEP,
    {"resume_at": 1, "steps": 2, "capacity": 2000},
    {"ranks": 4, "node": 2, "steps": 3, "resume_at": 1, "resume_ranks": 6} | AS_RUN,
    *by_night(
        *({"ranks": 4, "node": 2, "steps": 3, "resume_at": 1, "resume_ranks": ranks} | AS_RUN for ranks in (2, 4))
    ),
    {"steps": 2, "sync": "end"} | AS_RUN | MORE,
    {"steps": 2, "uneven": True, "batch": 4, "average": "ranks", "accumulate": 2, "sync": "each", "clip": 2.0**-20,
     "clip_eps": 0.0, "precision": "fp32"},
    *by_night(
        *({"ranks": 4, "node": 2, "steps": 3, "resume_at": 1, "sync": sync} | AS_RUN | MORE for sync in ("each", "end"))
    ),
    *by_night({"capacity": 2000}),
]  # fmt: skip


@pytest.mark.parametrize("changes", CHOSEN, ids=lambda changes: ", ".join(map(str, changes.values()))[:60])
@pytest.mark.usefixtures("unsanitized")
def test_every_choice_holds_and_is_read_back(changes: dict[str, Any], tmp_path: Path) -> None:
    """Whatever is chosen, every check holds, and the file of what was found is read as it was written."""
    rows: Sequence[Stage] = ROWS if "node" in changes else SCHEMES
    results = lab.run(settings(**{"ranks": 3, "steps": 1, "widths": [5, 3, 2]} | changes), rows=rows)
    assert [str(failure) for failure in results.failures] == []
    assert {count for each in results.differences for count in each.differing.values()} == {0}
    save(results, tmp_path / "results.json")
    assert encode(load(tmp_path / "results.json")) == encode(results)  # as text: a skipped step has no norm


def test_every_precision_and_wire_is_chosen() -> None:
    """Among what is tried above by day is every precision and wire that the command knows."""
    for option in ("precision", "wire", "wire_params"):
        assert {each[option] for each in FIRST_OF_EACH} - {None} == set(choices(option))


# -- what is recorded


def test_everything_asked_for_is_recorded(found: Results) -> None:
    """Every step of every scheme, every N of the sweep, and every band that the check compares."""
    assert [record.name for record in found.schemes] == NAMES
    assert [[step.step for step in record.steps] for record in found.schemes] == [[1, 2, 3]] * 4
    assert [(row.ranks, row.scheme) for row in found.sweep] == [(n, name) for n in (1, 2, 4, 5) for name in NAMES]
    compared = ["params", "master", "exp_avg", "exp_avg_sq"]
    assert [(each.step, each.scheme, list(each.differing)) for each in found.differences] == [
        (step, name, compared) for step in (1, 2, 3) for name in NAMES
    ]
    for record in found.schemes:
        assert {event.kind for event in record.events} == {"hold", "free", "send", "compute"}
        assert set(record.steps[0].seconds) >= {"forward", "backward", "communication", "optimizer"}


@pytest.mark.usefixtures("unsanitized")
def test_progress_counts_to_the_end() -> None:
    """The lab tells of exactly as many pieces of work as it announced."""
    told: list[str] = []
    lab.run(settings(steps=2), told.append)
    assert len(told) == lab.work(settings(steps=2))


def test_the_sweep_is_the_powers_of_two_and_n() -> None:
    """The default sweeps 1 to 32; an N in between is swept too."""
    assert lab.sweep_ranks(32) == [1, 2, 4, 8, 16, 32]
    assert lab.sweep_ranks(33) == [1, 2, 4, 8, 16, 32, 33]
    assert lab.sweep_ranks(1) == [1]


def test_data_parallel_repeats_the_optimizers_work(found: Results) -> None:
    """Data parallel does N times the optimizer's operations of a sharded stage, and the rest alike."""
    flops = {record.name: record.steps[-1].flops for record in found.schemes}
    assert flops["data parallel"]["optimizer"] == 5 * flops["ZeRO-1"]["optimizer"]
    assert len({each["forward"] for each in flops.values()}) == 1
    assert len({each["backward"] for each in flops.values()}) == 1


def test_the_ablations_are_there_to_see() -> None:
    """At N = 32 gathering the whole model takes ZeRO-3 above ZeRO-2; a narrow wire halves bytes and changes bits;
    and another bucket size in one scheme changes fp32 bits."""
    asked = settings(ranks=32, steps=2, widths=[64, 128, 128, 64])
    model = model_of(asked)
    gather, narrow = ablations.whole_model_gather(asked, model), ablations.narrow_wire(asked, model)
    assert gather.states * 2 == model.n_params
    assert gather.gathered == 2 * model.n_params
    assert gather.zero2_resident * 16 == model.n_params * (2 * 16 + 7)
    assert gather.states + gather.gathered > gather.zero2_resident
    assert narrow.sent * 2 == narrow.sent_fp32
    assert narrow.gradient_differing > 0
    assert 0 < narrow.gradient_largest_relative < 32 * 2**-11, "at most half an ulp of fp16 for each of N - 1 hops"
    drift = ablations.whole_model_bucket(asked, model)["fp32"]
    assert all(count > 0 for count in drift.differing)
    assert max(drift.largest) < 1e-5


# -- the checks can fail: what is broken is named


def _one_bit_of_master(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Scheme.step

    def flip(self: Scheme, batch: Any) -> float:
        loss = step(self, batch)
        if (self.name, self.ring.size, self.updates, len(self.buckets)) == ("ZeRO-2", 5, 2, 2):
            self.buckets[1].states[Band.MASTER].view(np.uint32)[3, 1] ^= 1
        return loss

    monkeypatch.setattr(Scheme, "step", flip)


def _one_message_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    hop = Traffic.hop

    def miscount(self: Traffic, *counts: Any) -> None:
        hop(self, *counts)
        self.messages += 1

    monkeypatch.setattr(Traffic, "hop", miscount)


@pytest.mark.parametrize(
    ("plant", "check", "scheme", "named"),
    [
        (_one_bit_of_master, "same training", "ZeRO-2", "step 2, rank 3: master of layer 2, element 1"),
        (_one_message_too_many, "as predicted", "ZeRO-1", "every rank: messages of reduce-scatter"),
    ],
)
def test_a_planted_fault_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], check: str, scheme: str, named: str
) -> None:
    """The checks that the lab runs find the fault, and say in which scheme, where, and both values."""
    plant(monkeypatch)
    told = [str(failure) for failure in lab.run(settings()).failures]
    mine = [text for text in told if text.startswith(check) and f"{scheme}, N = 5" in text and named in text]
    assert mine
    assert all("measured" in text and "expected" in text for text in mine)


# -- a card has a size


def _peaks(ranks: int) -> dict[str, int]:
    cases = {stage.name: Case(stage, ranks, tuple(WIDTHS)) for stage in SCHEMES}
    return {name: sum(theory.peak(case.job).values()) for name, case in cases.items()}


@pytest.mark.usefixtures("unsanitized")
@pytest.mark.parametrize("spare", [0, -1])
@pytest.mark.parametrize("name", ["data parallel", *by_night("ZeRO-3")])
def test_a_scheme_fits_on_a_card_of_its_peak_and_not_on_one_byte_less(name: str, spare: int) -> None:
    """With the predicted peak as capacity a scheme fits, with a byte less it does not, for every N of the sweep."""
    capacity = _peaks(5)[name] + spare
    results = lab.run(settings(capacity=capacity))
    assert results.failures == []
    assert (results.scheme(name).out_of_memory is None) == (spare == 0)
    for row in results.sweep:
        assert row.fits == (_peaks(row.ranks)[row.scheme] <= capacity)


@pytest.mark.usefixtures("unsanitized")
def test_running_out_of_memory_is_recorded_with_what_was_held() -> None:
    """On a card too small for the states of all but ZeRO-3, the others run out of memory at once and it trains on."""
    results = lab.run(settings(capacity=_peaks(5)["ZeRO-3"]))
    for record in results.schemes[:3]:
        assert record.out_of_memory is not None
        assert sum(record.out_of_memory.held.values()) + record.out_of_memory.asked > _peaks(5)["ZeRO-3"]
    assert [len(record.steps) for record in results.schemes] == [0, 0, 0, 3]
    assert results.differences == [], "there is nothing to compare it with"
    assert "no two schemes" in results.nothing_compared("same training")
    assert results.nothing_compared("as predicted") == ""


@pytest.mark.usefixtures("unsanitized")
def test_what_compared_nothing_does_not_claim_to_hold() -> None:
    """On a card on which no scheme starts there is nothing to compare, and the results say so of both checks."""
    results = lab.run(settings(capacity=1))
    assert results.failures == []
    assert all(results.nothing_compared(check) for check in ("same training", "as predicted"))


def test_a_loss_that_is_no_number_is_compared_by_its_bits() -> None:
    """Two runs that diverged alike are alike; one that did not is not, and a NaN among differences stays one."""
    nan = float("nan")
    assert checks.same_losses({"a": nan, "b": nan}, 2, 1) == []
    assert len(checks.same_losses({"a": nan, "b": 1.0}, 2, 1)) == 1
    one, other = (DP(MLP((3, 2)), 2) for _ in range(2))
    one.buckets[0].states[Band.MASTER][0, 0] = nan
    difference, _ = checks.compare(one, checks.whole_states(other), 1)
    assert np.isnan(difference.largest["master"])


@pytest.mark.usefixtures("unsanitized")
def test_a_wrong_prediction_of_what_fits_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the closed form said that a scheme fits and it does not, the check fails and says so."""
    monkeypatch.setattr(Run, "fits_predicted", lambda self: True)
    told = [str(failure) for failure in lab.run(settings(capacity=_peaks(5)["ZeRO-3"])).failures]
    assert any("data parallel, N = 5" in text and "fits on the card" in text for text in told)


# -- what cannot be run is refused before anything is run


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ranks": 0}, ValueError, r"ranks must be an integer of 1 or more; got 0"),
        ({"steps": 0}, ValueError, r"steps must be an integer of 1 or more; got 0"),
        ({"batch": -2}, ValueError, r"batch must be an integer of 1 or more; got -2"),
        ({"seed": -1}, ValueError, r"seed.*got -1"),
        ({"precision": "fp8"}, ValueError, r"one of mixed, bf16, fp32, .*; got 'fp8'"),
        ({"wire": "bf16"}, ValueError, r"carry the working copy exactly"),
        ({"gather": "all"}, ValueError, r"one of layer, model; got 'all'"),
        ({"accumulate": 3, "batch": 8}, ValueError, r"lab\(batch\).*accumulate.*3.*8|lab\(batch\).*8.*3"),
        ({"sync": "end"}, ValueError, r"lab\(sync\): of one micro-batch it says nothing; got 'end'"),
        ({"norm_type": float("inf")}, ValueError, r"norm_type\): without clip it does nothing; got inf"),
        ({"data": "mnist"}, ValueError, r"one of noise, digits; got 'mnist'"),
        ({"data": "digits"}, ValueError, r"64 inputs and outputs"),
        ({"ranks": 2**40, "widths": [64, 128, 128, 64]}, MemoryError, r"B\), and|would take .* ranks="),
    ],
    ids=str,
)
def test_settings_that_cannot_be_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The error names the option, the rule and the value, and no scheme has been started."""
    monkeypatch.setattr(Scheme, "__init__", lambda *_, **__: pytest.fail("a scheme was started"))
    with pytest.raises(error, match=message):
        lab.run(settings(**changes))


@pytest.mark.parametrize("changes", [{"batch": 3 * 10**12, "accumulate": 3}, {"ranks": 2**40, "batch": 3}], ids=str)
def test_what_is_said_to_fit_fits(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Where rows are the reason fewer rows are advised, where ranks are fewer ranks; and what is advised is taken."""
    free = 2 * 10**9
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    with pytest.raises(MemoryError, match="These would fit: ") as caught:
        lab.validate(settings(**changes))
    advised = re.findall(r"(\w+)=(\d+) \(", str(caught.value).partition("would fit: ")[2])
    assert {name for name, _ in advised} == {"batch" if "accumulate" in changes else "ranks"}
    for name, value in advised:
        lab.validate(settings(**changes | {name: int(value)}))
