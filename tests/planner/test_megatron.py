"""Megatron's rules: what its layer keeps comes out of autograd, and its runs' recorded bytes come out of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import by_night
from zerosim.planner import models
from zerosim.planner.megatron import TYPES
from zerosim.planner.runner import Runner
from zerosim.planner.step_run import StepRun
from zerosim.records.question import Finetuning, Question
from zerosim.schemes import DP, ZeRO1
from zerosim.worlds.shapes import ModelShapes, ShapeModel

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("shapes_unchecked")

CONFIGS = Path(__file__).parent / "configs"

# s tokens, b rows, h width, a heads, v words: 12 a head, and no two of them alike.
S, B, H, A, V, LAYERS = 16, 3, 24, 2, 211, 3
GPT = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": H, "n_head": A, "n_layer": LAYERS,
    "n_positions": S, "vocab_size": V, "activation_function": "gelu_new",
}  # fmt: skip
SBH = S * B * H
STATISTICS = 2 * 2 * 4 * S * B  # mean and deviation of two norms, fp32
LSE = 4 * A * S * B  # the fused kernel's log of the sum, fp32


def run(path: Path, row: Any = DP, ranks: int = 1, **options: Any) -> tuple[StepRun, Runner]:
    """A step under Megatron's convention."""
    question = Question(model=str(path), asked=[ranks], gpus=[ranks], rows=[row], convention="megatron", **options)
    runner = Runner(models.read(str(path), question.finetuning), question)
    return runner.run(row, ranks), runner


def shapes_of(runner: Runner) -> ModelShapes:
    """What was measured of the model."""
    model = runner.prepare(DP).model
    assert isinstance(model, ShapeModel)
    return model.shapes


def written(folder: Path, **values: Any) -> Path:
    """The small GPT's configuration as a file, with other values."""
    path = folder / "gpt.json"
    path.write_text(json.dumps(GPT | values))
    return path


@pytest.mark.parametrize(
    ("attention", "kept"),
    [
        ("unfused", 34 * SBH + 5 * A * S * S * B),  # Korthikanti et al., arXiv 2205.05198, equation 2
        ("fused", 34 * SBH + LSE),
        ("flash", 36 * SBH + LSE),  # its result is copied to where the next product reads it
    ],
)
def test_what_a_layer_keeps(tmp_path: Path, attention: str, kept: int) -> None:
    """sbh(34 + 5as/h) with scores, 34 sbh without, and the norms' statistics: measured, the source has no such sum."""
    path = written(tmp_path)
    _, runner = run(path, attention=attention, sequence=S, micro_batch=B)
    shapes = shapes_of(runner)
    layers = [unit for unit in shapes.units if unit.name.startswith("layers")]
    assert {unit.activation_bytes for unit in layers} == {kept + STATISTICS}
    assert len(layers) == LAYERS


def test_recomputed_layers_keep_their_input(tmp_path: Path) -> None:
    """2 sbh a layer."""
    _, runner = run(written(tmp_path), checkpoint="full", sequence=S, micro_batch=B)
    layers = [unit for unit in shapes_of(runner).units if unit.name.startswith("layers")]
    assert {unit.activation_bytes for unit in layers} == {2 * SBH}


def test_the_loss_takes_six_bytes_a_logit(tmp_path: Path) -> None:
    """At the peak the 16-bit logits and an fp32 copy; without dropout nor layers there is little else."""
    path = written(tmp_path, vocab_size=V * 97, n_layer=1)
    found, runner = run(path, sequence=S, micro_batch=B, checkpoint="full")
    logits = S * B * V * 97
    growth = found.peak.total - sum(found.resident.values())
    assert found.peak.unit == "loss"
    assert 0 <= growth - 6 * logits < 60 * SBH
    assert shapes_of(runner).loss.saved[0].nbytes >= 4 * logits


def test_without_dropout_no_masks(tmp_path: Path) -> None:
    """A byte for each element of two masks less, and of the scores' 5 bytes one for the mask and two for a copy."""
    path = written(tmp_path, attn_pdrop=0.0, resid_pdrop=0.0)
    _, runner = run(path, attention="unfused", sequence=S, micro_batch=B)
    layer = shapes_of(runner).units[1]
    assert layer.activation_bytes == 32 * SBH + 2 * A * S * S * B + STATISTICS


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "gpt2", *by_night("llama-2-7b")])
def test_its_layer_has_the_parameters_of_the_configuration(name: str) -> None:
    """SwiGLU, groups of keys and values, biases of queries, keys and values; tied or not."""
    found, runner = run(CONFIGS / f"{name}.json", row=ZeRO1, ranks=8, sequence=64)
    params = {"llama-2-7b": 6_738_415_616, "qwen2.5-0.5b": 494_032_768, "gpt2": 124_439_808}[name]
    assert runner.prepare(ZeRO1).model.n_params == params
    assert sum(found.resident.values()) == pytest.approx(6 * params + 12 * params / 8, rel=1e-5)
    assert any("Megatron's own layer" in note for note in runner.source.notes_for(64))


def test_shared_keys_and_values_are_kept_once_unless_scores_are(tmp_path: Path) -> None:
    """Without a fused kernel each head gets a copy, which then is what is kept."""
    values = json.loads((CONFIGS / "qwen2.5-0.5b.json").read_text()) | {"num_hidden_layers": 2}
    path = tmp_path / "qwen.json"
    path.write_text(json.dumps(values))
    kept = {
        (attention, kv): shapes_of(run(path, attention=attention, kv=kv, sequence=64)[1]).units[1]
        for attention in ("flash", "unfused")
        for kv in ("grouped", "expanded")
    }
    sizes = {key: unit.activation_bytes for key, unit in kept.items()}
    assert sizes["flash", "grouped"] < sizes["flash", "expanded"]
    assert len({*sizes.values()}) == 3
    assert sizes["unfused", "grouped"] == sizes["unfused", "expanded"]


@pytest.mark.parametrize(
    ("changed", "finetuning", "said"),
    [
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}, Finetuning(), "gpt2, llama, mistral"),
        ({"activation_function": "relu"}, Finetuning(), "no activation_function relu"),
        ({}, Finetuning(lora=2, targets=("all-linear",)), "all of it trained"),
    ],
)
def test_what_it_cannot_be_is_planned_as_it_is(
    tmp_path: Path, changed: dict[str, Any], finetuning: Finetuning, said: str
) -> None:
    """And the plan says so."""
    path = written(tmp_path, hidden_size=H, num_attention_heads=A, num_hidden_layers=1, intermediate_size=H, **changed)
    _, runner = run(path, sequence=S, finetuning=finetuning)
    assert any(said in note and "Hugging Face module" in note for note in runner.source.notes_for(S))


def test_refusals(tmp_path: Path) -> None:
    """Selective recomputation is what the kernels do; and a kernel is chosen for Megatron's layer alone."""
    with pytest.raises(ValueError, match=r"core attention again.*--attention fused"):
        run(written(tmp_path), checkpoint="selective", sequence=S)
    question = Question(model="4,8", asked=[1], gpus=[1], rows=[DP], attention="unfused")
    with pytest.raises(ValueError, match=r"plan\(attention\).*--convention megatron"):
        Runner(models.read("4,8"), question)
    assert "gpt2" in TYPES
