"""Advice is tried before it is given: what a message of the planner says to do instead is typed, and works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner

from zerosim.cli import plan as cli
from zerosim.planner import known_models, plan

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

ROOT = Path(cli.__file__).parent.parent
MLP = "7,5,3"
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 12, "n_head": 2, "n_positions": 16, "vocab_size": 101}
VIT = {
    "model_type": "vit", "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
DEEPSPEED = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
FACTORIES = """
import torch

def linear():
    return {"module": torch.nn.Linear(7, 5), "inputs": lambda rows, sequence: torch.empty(rows, 7)}

def without_inputs():
    return torch.nn.Linear(7, 5)
"""
FILES = {
    "gpt2.json": json.dumps(GPT2),
    "gpt3.json": json.dumps(GPT2 | {"model_type": "gpt3"}),
    "heads.json": json.dumps(GPT2 | {"n_head": 5}),
    "no_heads.json": json.dumps(GPT2 | {"n_head": 0}),
    "nope.json": json.dumps(GPT2 | {"activation_function": "nope"}),
    "twice.json": '{"model_type": "gpt2", "model_type": "gpt2"}',
    "none.json": "{}",
    "vit.json": json.dumps(VIT),
    "ds.json": json.dumps(DEEPSPEED),
    "ds_tp.json": json.dumps(DEEPSPEED | {"tensor_parallel": {"tp_size": 2}}),
    "ds_nvme.json": json.dumps(DEEPSPEED | {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}),
    "ds_four.json": json.dumps(DEEPSPEED | {"zero_optimization": {"stage": 4}}),
    "other.json": '{"lr": 1}',
    "advised_factories.py": FACTORIES,
}
# What is typed beside a number of GPUs; what the message says, with the advice; and what is typed as it advises.
ADVICE = [
    (f"{MLP} --seq 8", r"plan\(seq\): .*Leave --seq out and use --micro-batch", f"{MLP} --micro-batch 8"),
    ("vit.json --seq 8", r"plan\(seq\): .*Leave --seq out and use --micro-batch", "vit.json --micro-batch 2"),
    ("gpt2.json --seq 17", r"plan\(seq\): .*Use --seq 16", "gpt2.json --seq 16"),
    ("advised_factories:linear --seq 3", r"plan\(seq\): .*use --micro-batch", "advised_factories:linear"),
    (f"{MLP} --loss bf16", r"plan\(loss\): .*Leave them out", MLP),
    (f"{MLP} --kv expanded", r"plan\(loss\): .*Leave them out", MLP),
    ("advised_factories:linear --kv expanded", r"plan\(loss\): .*Leave them out", "advised_factories:linear"),
    (f"{MLP} --checkpoint selective", r"plan\(checkpoint\): .*Use 'full' or 'none'", f"{MLP} --checkpoint full"),
    (f"{MLP} --checkpoint selective", r"plan\(checkpoint\): .*Use 'full' or 'none'", f"{MLP} --checkpoint none"),
    (f"{MLP} --lora r=2", r"plan\(lora\): .*Leave them out", MLP),
    ("gpt2.json --lora 8", r"plan\(lora\): .*as in r=8,targets=q_proj", "gpt2.json --lora r=8,targets=all-linear"),
    ("gpt2.json --lora r=2,targets=q", r"plan\(lora\): .*there are c_attn", "gpt2.json --lora r=2,targets=c_attn"),
    (f"{MLP} --frozen-dtype nf4", r"plan\(frozen_dtype\): .*Leave --frozen-dtype out", MLP),
    ("gpt2.json --frozen-dtype nf4", r"plan\(frozen_dtype\): .*Train adapters alone, as with --lora r=8,targets=all-",
     "gpt2.json --frozen-dtype nf4 --lora r=8,targets=all-linear"),
    ("advised_factories:linear --frozen-dtype bf16", r"plan\(frozen_dtype\): .*or leave --frozen-dtype out",
     "advised_factories:linear"),
    ("advised_factories:without_inputs", r"others, return a mapping with inputs", "advised_factories:linear"),
    ("advised_factories:nope", r"plan\(MODEL\): .*a function in it that returns a model", "advised_factories:linear"),
    ("gpt3.json", r"plan\(MODEL\): .*Is .*'gpt2'.* meant", "gpt2.json"),
    ("heads.json", r"plan\(MODEL\): .*Correct", "gpt2.json"),
    ("no_heads.json", r"plan\(MODEL\): n_head is a positive integer; no_heads\.json has 0\. Correct", "gpt2.json"),
    ("nope.json", r"plan\(MODEL\): activation_function is the name .* nope\.json has 'nope'.* Correct", "gpt2.json"),
    (f"{MLP} --card V100-32GB", r"plan\(card\): a V100-32GB computes in fp16, fp32; bf16 .*Use --precision mixed",
     f"{MLP} --card V100-32GB --precision mixed"),
    (f"{MLP} --card V100-32GB", r"plan\(card\): .*as in --peak 30", f"{MLP} --card V100-32GB --peak 30"),
    (f"{MLP} --convention megatron --precision fsdp", r"plan\(precision\): .*or --convention fsdp2",
     f"{MLP} --convention fsdp2 --precision fsdp"),
    (f"{MLP} --convention megatron --precision fsdp", r"plan\(precision\): .*Use another --precision",
     f"{MLP} --convention megatron --precision bf16"),
    ("twice.json", r"plan\(MODEL\): .*A Hugging Face config\.json is needed", "gpt2.json"),
    ("none.json", r"plan\(MODEL\): .*\"model_type\": \"llama\"", "gpt2.json"),
    ("7", r"plan\(MODEL\): .*as in 64,128,128,64", "64,128,128,64"),
    ("0,5", r"plan\(MODEL\): .*as in 64,128,128,64", "64,128,128,64"),
    (f"{MLP} --gpus 8-2", r"plan\(gpus\): .*as in 2-64", "67,5 --gpus 2-64"),
    (f"{MLP} --gpus x", r"plan\(gpus\): .*several with commas", f"{MLP} --gpus 2,3"),
    (f"{MLP} --gpus 600", r"plan\(gpus\): .*Use at most 58", f"{MLP} --gpus 58"),
    (f"{MLP} --bucket x", r"plan\(bucket\): 'layer', 'model', or a size", f"{MLP} --bucket layer"),
    (f"{MLP} --bucket x", r"plan\(bucket\): 'layer', 'model', or a size", f"{MLP} --bucket 1kB"),
    (f"{MLP} --scheme 5", r"plan\(scheme\): one of .*or 0 to 3", f"{MLP} --scheme 3"),
    (f"{MLP} --scheme 5", r"plan\(scheme\): .*hsdp-kept", f"{MLP} --scheme hsdp-kept"),
    (f"{MLP} --scheme 1", r"plan\(convention\): .*it has data parallel, ZeRO-3", f"{MLP} --scheme ddp"),
    (f"{MLP} --scheme 1", r"plan\(convention\): .*or --convention zero, which has it",
     f"{MLP} --scheme 1 --convention zero"),
    (f"{MLP} --convention zero --fused", r"plan\(fused\): .*or use --convention fsdp2", f"{MLP} --fused"),
    ("gpt2.json --attention unfused", r"plan\(attention\): .*Use --convention megatron",
     "gpt2.json --attention unfused --convention megatron"),
    (f"{MLP} --offload optimizer", r"plan\(offload\): .*Use --offload params", f"{MLP} --offload params"),
    (f"{MLP} --offload optimizer", r"plan\(offload\): .*or --convention deepspeed",
     f"{MLP} --offload optimizer --convention deepspeed"),
    (f"{MLP} --convention zero --offload params", r"plan\(offload\): .*Use --offload optimizer",
     f"{MLP} --convention zero --offload optimizer"),
    (f"{MLP} --convention zero --offload params", r"plan\(offload\): .*or --scheme zero3",
     f"{MLP} --convention zero --offload params --scheme zero3"),
    (f"{MLP} --check", r"plan\(check\): .*Use --card H100", f"{MLP} --check --card H100"),
    (f"{MLP} --check", r"plan\(check\): .*or --memory 80GB", f"{MLP} --check --memory 80GB"),
    (f"{MLP} --memory 1MB --reserve x", r"plan\(reserve\): .*as in 10%", f"{MLP} --memory 1MB --reserve 10%"),
    (f"{MLP} --memory 1MB --reserve 1MB", r"plan\(reserve\): .*Pass less", f"{MLP} --memory 1MB --reserve 100kB"),
    (f"{MLP} --convention x", r"choose from zero, deepspeed, fsdp2, megatron", f"{MLP} --convention megatron"),
    (f"{MLP} --accumulate 99999", r"plan\(accumulate\): at most 65,536; .*Pass fewer", f"{MLP} --accumulate 9"),
    (f"{MLP} --global-batch 9", r"plan\(global_batch\): .*Use one of 1, 3, 9 GPUs",
     f"{MLP} --global-batch 9 --gpus 3"),
    (f"{MLP} --global-batch 8 --accumulate 2", r"plan\(global_batch\): .*Pass one of them", f"{MLP} --global-batch 8"),
    (f"{MLP} --optimizer-in-backward --accumulate 2", r"Leave --accumulate out and use --micro-batch",
     f"{MLP} --optimizer-in-backward --micro-batch 2"),
    (f"{MLP} --optimizer-in-backward --global-batch 4", r"Leave --global-batch out and use --micro-batch",
     f"{MLP} --optimizer-in-backward --micro-batch 2"),
    (f"{MLP} --memory 80", r"plan\(memory\): .*no unit.*as in 80GB", f"{MLP} --memory 80GB"),
    (f"{MLP} --largest-model mlp", r"plan\(largest_model\): .*as in --memory 80GB", f"{MLP} --memory 1MB"),
    (f"{MLP} --card H900", r"the presets are .*H100", f"{MLP} --card H100"),
    (f"{MLP} --card A100", r"Is A100-40GB or A100-80GB meant\? .*as in --memory 80GB", f"{MLP} --memory 80GB"),
    (f"{MLP} --convention zero --precision fsdp --scheme 1", r"Use ZeRO-3, or precision='bf16'|--precision bf16",
     f"{MLP} --convention zero --precision bf16 --scheme 1"),
    (f"{MLP} --out x.pdf", r"plan\(out\): .*\.html \(a page.*\.png.*\.svg.*\.pickle", f"{MLP} --out x.svg"),
    (f"{MLP} --json .", r"plan\(FILE\): .*Name another file", f"{MLP} --json x.json"),
    (f"{MLP} --json /dev/null", r"plan\(FILE\): .*or print the plan with --json -", f"{MLP} --json -"),
    (f"{MLP} --tp 2", r"plan\(tp\): tensor parallelism is not planned.*leave it out", MLP),
    (f"{MLP} --nvme x", r"plan\(nvme\): offloading to NVMe is not planned.*leave it out", MLP),
    (f"{MLP} --config ds_tp.json", r"plan\(config\): tensor parallelism .*leave it out", f"{MLP} --config ds.json"),
    (f"{MLP} --config ds_nvme.json", r"plan\(config\): offloading to NVMe .*leave it out", f"{MLP} --config ds.json"),
    (f"{MLP} --config ds_four.json", r"plan\(config\): .*stage is 0, 1, 2 or 3", f"{MLP} --config ds.json"),
    (f"{MLP} --config other.json", r"plan\(config\): .*Pass a ds_config\.json", f"{MLP} --config ds.json"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "MOST_RANKS", 8)
    monkeypatch.setattr(plan, "MOST_ROWS", 8)
    monkeypatch.setattr(known_models, "from_hub", lambda name: None)


def run(typed: str) -> tuple[int, str]:
    words = typed.split()
    gpus = [] if "--gpus" in words else ["--gpus", "2"]
    result = CliRunner().invoke(cli.plan, [*words, *gpus])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(("typed", "said", "advised"), ADVICE, ids=[typed for typed, *_ in ADVICE])
def test_advice_works(typed: str, said: str, advised: str) -> None:
    """What was typed is refused in words; what the words advise is planned."""
    code, output = run(typed)
    assert code == 2, output
    assert re.search(said, output), output
    code, output = run(advised)
    assert code == 0, output


def test_every_kind_of_refusal_of_the_command_has_advice_that_was_tried() -> None:
    """Each ``plan(what)`` that the planner's messages begin with is in the table above."""
    texts = [path.read_text() for path in [*(ROOT / "planner").glob("*.py"), Path(cli.__file__)]]
    labels = {label for text in texts for label in re.findall(r"plan\((\w+)\): ", text)}
    typed = " ".join(said for _, said, _ in ADVICE)
    elsewhere = {"rows", "efficiency"}  # of Python alone, where click refuses the option before
    tried = {label for label in labels if f"plan\\({label}\\)" in typed or f"--{label.replace('_', '-')}" in typed}
    assert labels - elsewhere - tried - {"optimizer_in_backward"} == set()
