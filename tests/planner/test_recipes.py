"""Recipes that people run: their bytes per parameter, what loss and attention keep, and what published runs show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.bands import FP32, PRECISIONS, Band
from zerosim.optimizer import SGD
from zerosim.options import Options
from zerosim.planner import models, recipes
from zerosim.planner.recipes import RECIPES, Planned
from zerosim.planner.runner import Runner
from zerosim.records.question import Question
from zerosim.schemes import DP, SCHEMES, ZeRO2, ZeRO3

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

CONFIGS = Path(__file__).parent / "configs"
WIDTHS = "512,1024,256"
PARAMS = 512 * 1024 + 1024 + 1024 * 256 + 256


def run(model: str = WIDTHS, row: Any = DP, ranks: int = 1, **options: Any) -> Any:
    """A step of one row, and its runner."""
    question = Question(model=model, asked=[ranks], gpus=[ranks], rows=[row], **options)
    runner = Runner(models.read(model), question)
    return runner.run(row, ranks), runner


@pytest.mark.parametrize(
    ("precision", "optimizer", "each"),
    [
        ("pure-bf16", "adam", 8),
        ("pure-bf16", "adamw", 8),
        ("pure-bf16", "sgd", 4),
        ("pure-bf16", "momentum", 6),
        ("bf16-moments", "adamw", 12),
        ("bf16-master", "adam", 10),
        ("autocast", "adam", 16),
        ("mixed", "adamw", 16),
    ],
)
def test_bytes_per_parameter(precision: str, optimizer: str, each: int) -> None:
    """At rest one card holds the recipe's bytes for each parameter, and eight hold them between them."""
    found, _ = run(precision=precision, optimizer=optimizer)
    assert sum(found.resident.values()) == each * PARAMS == recipes.bytes_per_parameter(precision, optimizer) * PARAMS
    if precision != "autocast":
        shared, _ = run(row=ZeRO3, ranks=8, precision=precision, optimizer=optimizer)
        assert 8 * sum(shared.resident.values()) == each * PARAMS  # 8 divides every layer


def test_eight_bit_adam_keeps_a_byte_for_each_moment_and_a_scale_for_256_of_them() -> None:
    """Of one card and of two: the scales are of the moments that a rank has."""
    for row, ranks in ((DP, 1), (ZeRO2, 2)):
        found, _ = run(row=row, ranks=ranks, precision="pure-bf16", optimizer="adam8bit")
        own = PARAMS // ranks
        assert found.resident["exp_avg"] == found.resident["exp_avg_sq"] == own
        assert found.resident["optimizer scales"] == 4 * 2 * -(-own // 256)


def test_every_recipe_runs_under_every_row_and_optimizer() -> None:
    """None is refused by the schedule, and none of the simulator's own changes by being planned."""
    for name, recipe in RECIPES.items():
        rows = [(row, "adam8bit") for row in SCHEMES if recipe.everywhere]
        for row, optimizer in [*rows, *((ZeRO3, each) for each in recipes.OPTIMIZERS)]:
            found, _ = run("7,5", row=row, ranks=4, precision=name, optimizer=optimizer)
            assert found.report.complete
    for name in PRECISIONS:
        assert type(recipes.options(Options(), name, "adam")) is Options


def test_planned_options_say_what_they_are() -> None:
    """A recipe of the plan's own stands in for a precision that the options know, and has its own states."""
    chosen = recipes.options(Options(), "pure-bf16", "adam8bit")
    assert chosen.states == (Band.PARAMS, Band.GRADS, Band.EXP_AVG, Band.EXP_AVG_SQ)
    assert {str(band): chosen.recipe.dtypes(FP32)[band].name for band in chosen.states} == {
        "params": "bfloat16", "grads": "bfloat16", "exp_avg": "uint8", "exp_avg_sq": "uint8",
    }  # fmt: skip
    assert isinstance(recipes.options(Options(), "pure-bf16", "momentum").optimizer, SGD)
    assert Planned(eight_bit=True).states == Planned().states


# -- language models, measured from the module


SEQUENCE, VOCABULARY, LAYERS = 64, 49_152, 30
LOGITS = SEQUENCE * VOCABULARY


@pytest.fixture(scope="module")
def llama(shapes_unchecked: None) -> str:
    """A small Llama with grouped keys and values."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return str(CONFIGS / "mlc--smollm2_135m.json")


@pytest.fixture(scope="module")
def by_loss(llama: str) -> dict[str, int]:
    """Activations at the peak by what computes the cross entropy."""
    return {kind: activations(llama, loss=kind) for kind in ("fp32", "bf16", "chunked", "fused", "fp32-kept")}


def activations(model: str, **options: Any) -> int:
    found, _ = run(model, precision="bf16", sequence=SEQUENCE, **options)
    return int(found.peak.by_band["activations"])


def test_what_the_cross_entropy_keeps(by_loss: dict[str, int]) -> None:
    """At the peak, the loss: in fp32 14 bytes a logit (16-bit logits and their gradient, two fp32 copies, and what is
    kept of the softmax); in bf16 8; in one kernel the logits, their gradient and nothing else."""
    fp32, bf16, chunked, fused, kept = by_loss.values()
    assert fp32 - fused == pytest.approx(10 * LOGITS, rel=0.01)
    assert bf16 - fused == pytest.approx(4 * LOGITS, rel=0.01)
    assert fused < chunked < fp32
    assert kept - fp32 == pytest.approx(4 * LOGITS, rel=0.01)  # the fp32 copy, which is otherwise freed before


def test_expanded_keys_and_values_are_kept_once_for_each_head(llama: str, by_loss: dict[str, int]) -> None:
    """2 (heads / kv heads - 1) times their width more for each token and layer, in 16 bits."""
    values = json.loads(Path(llama).read_text())
    heads, shared = values["num_attention_heads"], values["num_key_value_heads"]
    width = shared * values["hidden_size"] // heads
    grouped, expanded = by_loss["fused"], activations(llama, kv="expanded", loss="fused")
    # Once they are expanded, the grouped ones of keys, which rotary embedding makes, are kept by nobody.
    kept = (expanded - grouped) / (2 * LAYERS * SEQUENCE * width)
    assert 2 * (heads // shared - 1) - 1 <= kept <= 2 * (heads // shared)


def test_autocast_keeps_a_16_bit_copy_of_what_each_unit_reads(llama: str) -> None:
    """Beside fp32 states, at the peak of the loss: 2 bytes for each parameter, and for the tied embedding twice."""
    plain, _ = run(llama, precision="bf16", sequence=SEQUENCE)
    copied, runner = run(llama, precision="autocast", sequence=SEQUENCE)
    read = sum(
        group.size for layer in runner.prepare(DP).model.layers for group in layer.groups if group.role != "buffer"
    )
    assert copied.peak.by_band["activations"] - plain.peak.by_band["activations"] == 2 * read
    assert sum(copied.resident.values()) - copied.resident.get("buffers", 0) == 16 * runner.prepare(DP).model.n_params


def test_torchtunes_full_finetuning_on_one_card(shapes_unchecked: None) -> None:
    """Llama-2-7B in pure bf16 takes 54 GB with AdamW and about 40.5 with 8-bit Adam, as torchtune's recipes say."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = str(CONFIGS / "llama-2-7b.json")
    for optimizer, published in (("adamw", 54.0), ("adam8bit", 40.5)):
        found, _ = run(model, precision="pure-bf16", optimizer=optimizer, sequence=16)
        assert sum(found.resident.values()) / 1e9 == pytest.approx(published, rel=0.01)
