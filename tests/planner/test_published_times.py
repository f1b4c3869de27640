"""Published runs, planned again: the bound lies below each, the estimate is what was recorded, two tiers bend right."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import time_page
from helpers import by_night
from measured_runs import ALL, WITHIN, Run, internevo, runs
from zerosim.counts import Phase
from zerosim.layers import Group, Role
from zerosim.planner import cluster, config_file, step_time, time_model
from zerosim.planner.cards import CARDS
from zerosim.planner.dense_decoder import dense_decoder
from zerosim.planner.model_source import Perceptron
from zerosim.planner.runner import Runner
from zerosim.planner.step_time import Computed, Operation, Ring, Sent, at_most, bound, duration
from zerosim.planner.time_model import LARGE_HOP, fitted
from zerosim.records.question import Network, Question
from zerosim.schemes import ZeRO1

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

pytest.importorskip("transformers")

from zerosim.planner import hf_models  # noqa: E402

RUNS = runs()


def chosen(**asked: object) -> list[int]:
    """The places of the runs of which all of this holds."""
    return [place for place, run in enumerate(RUNS) if all(getattr(run, name) == each for name, each in asked.items())]


# What makes runs differ: small and large, short and long rows, accumulation, checkpointing, groups, what is kept.
SAMPLE = [
    *chosen(model="MPT-125m", card="A100-40GB", sequence=512),
    *chosen(model="MPT-1b", gpus=128, card="H100"),  # parameters kept until backward
    *chosen(model="MPT-13b", card="A100-80GB", sequence=1024),  # the run that the bound is closest to
    *chosen(model="Llama-2-7B", gpus=96, compiled=False),  # HSDP
    *chosen(model="Llama-3.1-8B", gpus=8, precision="fp8"),
    *chosen(model="TinyLlama-1.1B"),
]


def planned_as_recorded(places: Sequence[int]) -> None:
    """Assert it of these runs: the bound below what was measured, and both numbers as they are recorded."""
    model, predicted = fitted(), time_page.recorded().predicted
    assert places
    for place in places:
        run = RUNS[place]
        least = bound(run.work, run.machine, run.gpus, dtype="bf16").overlapped
        expected = duration(run.work, model.speeds(run.machine, "bf16"), run.gpus).overlapped
        what = f"{run.model} on {run.gpus} {run.card}, {run.sequence} tokens"
        assert least < run.seconds, what
        assert least == pytest.approx(predicted[place].bound, rel=0.02, abs=1e-3), what
        assert expected == pytest.approx(predicted[place].estimate, rel=0.03, abs=1e-3), what


def test_a_sample_of_published_runs() -> None:
    """Six kinds of runs, planned again, come out as recorded, and took longer than the bound."""
    assert len({RUNS[place].model for place in SAMPLE}) == len(SAMPLE) == 6
    planned_as_recorded(SAMPLE)


@pytest.mark.slow
def test_every_published_run() -> None:
    """All of them."""
    planned_as_recorded(range(len(RUNS)))


# -- two tiers of network: InternEvo's pair


def speeds_of(scheme: str) -> dict[int, tuple[float, float]]:
    """Tokens per second and GPU by the number of GPUs, measured and estimated from the traffic."""
    found = {}
    for place in chosen(table="throughput", scheme=scheme):
        run = RUNS[place]
        expected = duration(run.work, fitted().speeds(run.machine, "bf16"), run.gpus).overlapped
        found[run.gpus] = run.tokens_per_second, run.tokens_per_second * run.seconds / expected
    return found


def test_internevos_pair_comes_out_in_the_right_order_and_bends_where_it_did() -> None:
    """From 8 to 1,024 GPUs: within a node is faster from two nodes on, more so with each doubling, bends two later."""
    over, within = speeds_of(ALL), speeds_of(WITHIN)
    assert list(over) == list(within) == [8 * 2**doubling for doubling in range(8)]
    for which in (0, 1):  # measured, estimated
        ratio = [over[gpus][which] / within[gpus][which] for gpus in over]
        assert ratio[0] == pytest.approx(1, abs=0.01)  # one node is all
        assert all(each < 0.98 for each in ratio[1:])
        assert all(more < 1.005 * fewer for fewer, more in pairwise(ratio[1:]))
        bends = [time_page.bend({gpus: tokens[which] for gpus, tokens in way.items()}) for way in (over, within)]
        assert bends == [256, 1024]
    for way in (over, within):
        for measured, estimated in way.values():
            assert abs(measured / estimated - 1) < fitted().band


def test_internevos_traffic() -> None:
    """Gradients are all-reduced in place of being reduced; each owner broadcasts its part, to all or to its node."""
    run = next(RUNS[place] for place in chosen(table="throughput", scheme=ALL, gpus=16))
    work: list[Operation] = [
        Computed("a", Phase.BACKWARD, 10),
        Sent("a", 30, 15),
        Computed("a", Phase.OPTIMIZER, 10),
        Sent("a", 30, 15),
    ]
    backward, reduced, optimizer, *broadcasts = internevo(work, 64, 16, within=False)
    assert (backward, optimizer) == (work[0], work[2])
    assert reduced == Sent("a", 60, 30)
    assert broadcasts == [Sent("parameters", 2 * 64 // 16, 15)] * 16  # two bytes for each, owned by 16
    assert internevo(work, 64, 16, within=True)[3:] == [Sent("parameters", 16, 7, ring=Ring.WITHIN)] * 8
    sent = [each for each in run.work if isinstance(each, Sent)]
    params = 7_321_423_872 // 16 * 16
    assert sum(each.nbytes for each in sent if each.unit == "parameters") == pytest.approx(2 * params, rel=1e-6)
    reduced_bytes = sum(each.nbytes for each in sent if each.unit != "parameters")
    assert reduced_bytes == pytest.approx(2 * 15 / 16 * 2 * params, rel=1e-4)
    assert ZeRO1.optimizer == "all"


# -- the speeds


def test_speeds_are_shares_of_the_card() -> None:
    """Each speed by its rule; no speed passes what the card can do, and a hop is as long as for large messages."""
    model, card = fitted(), CARDS["A100-80GB"]
    found, most = model.speeds(card, "bf16"), at_most(card, "bf16")
    assert found.products == pytest.approx(model.products * 271.2e12)
    assert found.attention == pytest.approx(model.attention * 2039e9)
    assert found.memory == pytest.approx(model.memory * 2039e9)
    assert (found.within, found.between) == (model.network * 300e9, model.network * 200e9)
    assert (found.hop_within, found.hop_between) == (LARGE_HOP * 0.6e-6, LARGE_HOP * 2.7e-6)
    for speed in ("products", "attention", "memory", "within", "between"):
        assert getattr(found, speed) < getattr(most, speed)


def test_a_stated_efficiency_takes_the_place_of_the_shares() -> None:
    """All computing then reaches that part of the peak, and memory is not waited for beside it."""
    card = CARDS["H100"]
    stated, model = fitted().stated(card, "bf16", 0.25), fitted().speeds(card, "bf16")
    work = [Computed("a", Phase.FORWARD, 9894, 5000, 10**9)]
    assert duration(work, stated, 1).compute == pytest.approx(9894 / (989.4e12 / 4))
    assert (stated.within, stated.hop_between) == (model.within, model.hop_between)


NO_RUN: list[tuple[str, dict[str, Any]]] = [
    ("no dense decoder of text", {"dense_decoder": False}),
    ("of less than a hundred million parameters", {"width": 9973}),
    ("with adapters", {"frozen": True}),
    ("in fp16", {"precision": "mixed"}),
    ("on another card", {"card": "B200"}),
    ("on fewer GPUs", {"ranks": 7}),
    ("on more GPUs", {"ranks": 1025}),
    ("with states on the host", {"offload": ("optimizer",)}),
    ("at an efficiency that is stated", {"network": Network(efficiency=0.5)}),
    ("at a peak that is stated", {"network": Network(peak=5e14)}),
]


@pytest.mark.parametrize("given", [{}, *(given for _, given in NO_RUN)], ids=["like", *(what for what, _ in NO_RUN)])
def test_an_error_is_claimed_of_steps_like_those_that_were_fitted_alone(given: dict[str, Any]) -> None:
    """One that is like no published run, in any one respect, has an estimate and no error."""
    asked: dict[str, Any] = {"width": 10_007, "precision": "bf16", "card": "H100", "ranks": 8, "dense_decoder": True}
    asked |= given
    n, width = asked["ranks"], asked["width"]
    row = replace(ZeRO1, offload=asked.get("offload", ()))
    question = Question(
        model="", asked=[n], gpus=[n], rows=[row], precision=asked["precision"], card=asked["card"],
        network=asked.get("network", Network()),
    )  # fmt: skip
    runner = Runner(Perceptron([width, width]), question)
    card, record = cluster.cluster(question, runner.working(row))
    ran = runner.run(row, n)
    if "frozen" in asked:
        held = Group("base", ((3,),), Role.FROZEN)
        ran = replace(ran, layers=[*ran.layers, SimpleNamespace(name="base", groups=[held])])
    error = cluster.error(question, ran, n, row, record, dense_decoder=asked["dense_decoder"])
    assert error == (None if given else fitted().band)
    found = cluster.time(ran, n, card, record, runner.options(row, n), 11, row, "nodes", error)
    assert found.estimate is not None
    assert found.estimate.error == error
    assert found.estimate.seconds >= found.overlapped


def test_what_was_fitted_is_on_record() -> None:
    """Cards, numbers of GPUs and precisions of the model are those of the runs."""
    model = fitted()
    assert set(model.cards) == {run.card for run in RUNS}
    assert set(model.precisions) == {run.precision for run in RUNS}
    assert model.gpus == (min(run.gpus for run in RUNS), max(run.gpus for run in RUNS))


DENSE = ["gpt2", "llama-3.1-8b", "falcon-7b", "gemma-2-9b"]
OTHERS = [
    "whisper-large-v3", "t5-small", "mamba-130m", "openai--gpt-oss-20b", "nvidia--Nemotron-H-56B-Base-8K",
    "qwen2.5-vl-3b", "vit-base", "bert-base-uncased", "mistralai--Mixtral-8x7B-v0.1", "Qwen--Qwen3.5-27B",
]  # fmt: skip


@pytest.mark.parametrize("name", [*DENSE[:2], *OTHERS[:6], *by_night(*DENSE[2:], *OTHERS[6:])])
def test_a_dense_decoder_of_text_is_told_by_its_module(name: str) -> None:
    """Not one are an encoder, a recurrence, even beside attention, experts, and what takes images or speech."""
    path = Path(__file__).parent / "configs" / f"{name}.json"
    values = config_file.read(path)
    values |= {key: 4 for key in ("num_hidden_layers", "n_layer") if key in values and "hybrid" not in str(values)}
    values.pop("layer_types", None)
    module = hf_models.module(values, hf_models.architecture(values, name), name, "eager")
    assert dense_decoder(module, hf_models.wrap(module) or hf_models.blocks(module)) == (name in DENSE)


@pytest.mark.parametrize("module", [step_time, time_model, time_page], ids=lambda module: module.__name__)
def test_the_examples_run(module: ModuleType) -> None:
    """Those in the docstrings."""
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_what_was_measured_is_the_tokens_a_second_alone() -> None:
    """A run's seconds are its tokens over its tokens a second: 3 × 40 × 1,024 tokens at 2,330 a second took 52.74 s."""
    run: Run = RUNS[chosen(model="MPT-13b", card="A100-80GB", sequence=1024)[0]]
    assert run.seconds == pytest.approx(3 * 40 * 1024 / 2330)
    assert round(run.seconds, 2) == 52.74
