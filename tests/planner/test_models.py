"""Models that torch describes: configurations and Python paths, measured and planned without a network."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner

from zerosim.bands import BF16, FP16
from zerosim.cli import plan as cli
from zerosim.planner import config_file, models, plan, question
from zerosim.planner.model_source import Workload
from zerosim.planner.runner import Runner
from zerosim.records.question import Finetuning, Question
from zerosim.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

CONFIGS = Path(__file__).parent / "configs"
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="configurations need the extra 'plan'"
)


@pytest.fixture(autouse=True)
def _shorter_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_RANKS", 32)
    monkeypatch.setattr(plan, "MOST_ROWS", 64)


def load(rows: int = 1, sequence: int | None = 32, checkpoint: str = "none", working: Any = FP16) -> Workload:
    """What is asked of a model in a step."""
    return Workload(rows, sequence, checkpoint, working)


# -- configurations


def values(name: str, changed: dict[str, object]) -> dict[str, Any]:
    """A configuration of the folder, with some keys changed, or left out where they are ``...``."""
    found = json.loads((CONFIGS / f"{name}.json").read_text()) | changed
    return {key: value for key, value in found.items() if value is not ...}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """Writes a configuration to a folder of its own and gives the folder's path."""

    def write(name: str, **changed: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values(name, changed)))
        return str(tmp_path)

    return write


@needs_transformers
def test_a_vocabulary_padded_to_64s_counts(written: Callable[..., str]) -> None:
    """GPT-2 small with 50,304 tokens, as it is often trained, has 124,475,904 parameters."""
    assert models.read(written("gpt2", vocab_size=50_304)).prepare(load(), 1).model.n_params == 124_475_904


@needs_transformers
def test_the_smallest_n_for_the_model_states_of_llama_3_1_8b() -> None:
    """On cards of 80 GB stage 1 takes 3 GPUs, stages 2 and 3 take 2; data parallel fits on none."""
    asked = Question(model="", asked=[8], gpus=[8], rows=list(SCHEMES), memory=80 * 10**9, sequence=32)
    runner = Runner(models.read(str(CONFIGS / "llama-3.1-8b.json")), question.check(asked))
    found = [[n for n in range(1, 5) if runner.holds_states(row, n, 80 * 10**9)] for row in SCHEMES]
    assert found == [[], [3, 4], [2, 3, 4], [2, 3, 4]]


@needs_transformers
def test_units_are_the_blocks_that_its_makers_say_must_not_be_split() -> None:
    """GPT-2's units are its twelve blocks and what is left: embeddings, the last norm, and the head, which is tied."""
    model = models.read(str(CONFIGS / "gpt2.json")).prepare(load(), 1).model
    names = [layer.name for layer in model.layers]
    assert [name for name in names if ".h." in name] == [f"transformer.h.{index}" for index in range(12)]
    head = next(layer for layer in model.layers if layer.name == "lm_head")
    embedding = next(layer for layer in model.layers if layer.name == "transformer.wte")
    assert head.groups == embedding.groups


@needs_transformers
def test_more_rows_and_longer_rows_are_measured_anew() -> None:
    """Activations are those of the rows and the length that were asked for, in the dtype that is computed with."""
    source = models.read(str(CONFIGS / "gpt2.json"))
    shapes = [source.prepare(each, each.rows).model.shapes for each in (load(), load(rows=2), load(sequence=64))]  # type: ignore[attr-defined]
    assert [each.inputs[0].shape for each in shapes] == [(1, 32), (2, 32), (1, 64)]
    bf16 = source.prepare(load(working=BF16), 1).model.shapes  # type: ignore[attr-defined]
    outputs = {tensor.dtype for unit in bf16.units for tensor in unit.outputs if len(tensor.shape) == 3}
    assert outputs == {"bfloat16"}
    blocks = [[unit.activation_bytes for unit in each.units if ".h." in unit.name] for each in shapes]
    # No scores, which would grow fourfold: attention is fused, though the file asks for dropout.
    assert blocks[2] == [2 * nbytes for nbytes in blocks[0]]


@needs_transformers
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "lama", "architectures": ...}, "Is 'llama'"),
        ({"hidden_size": 4097}, "4,097 for 32 heads, which leaves 1"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is a positive integer"),
        ({"num_hidden_layers": 10**6}, "at most 1,024"),
        ({"vocab_size": 0}, "vocab_size is a positive integer"),
        ({"num_key_value_heads": 7}, "a multiple of num_key_value_heads"),
        ({"hidden_size": "4096"}, "'4096'"),
        ({"hidden_size": 4096.0}, "4096.0"),
        ({"hidden_size": True}, "True"),
        ({"hidden_size": 10**30}, "at most 2,147,483,648"),
        ({"hidden_act": "nope"}, "nope"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"architectures": "LlamaForCausalLM"}, "LlamaForCausalLM"),
        ({"model_type": ..., "architectures": ...}, "does not say its model_type"),
    ],
)
def test_a_configuration_that_cannot_be_true_is_refused(
    changed: dict[str, object], words: str, written: Callable[..., str]
) -> None:
    """Unknown architectures and keys, and sizes that lie: an error that says what would work."""
    with pytest.raises(ValueError, match=r"plan\(MODEL\)") as caught:
        models.read(written("llama-3.1-8b", **({"num_hidden_layers": 2} | changed))).notes_for(None)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"model_type": "gpt2", "n_embd": NaN}', "n_embd is a positive integer"),
        (b'{"model_type": "llama", "model_type": "gpt2"}', "given twice"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "does not say its model_type"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    """Whatever is in the file, the error says why it is no configuration."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        config_file.read(tmp_path / "config.json")
    assert words in str(caught.value)


@needs_transformers
def test_a_configuration_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers is not there, the extra is named, and what can be planned without."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"zerosim\[plan\]"):
        models.read(str(CONFIGS / "gpt2.json"), Finetuning(lora=3)).notes_for(None)


@needs_transformers
def test_the_thirty_second_llama_of_the_family_is_llama_3_1_8b() -> None:
    """The families are shaped as the published models are: k = 32 has Llama-3.1-8B's parameters."""
    from zerosim.planner import largest_model

    _, source = largest_model.FAMILIES["llama"].member(32)
    assert source.prepare(load(), 1).model.n_params == 8_030_261_248
    _, source = largest_model.FAMILIES["gpt"].member(2)
    block = 12 * 256**2 + 13 * 256
    assert source.prepare(load(), 1).model.n_params == 2 * block + 2 * 256 + (2048 + 50_257) * 256


# -- Python paths

FACTORIES = """
import os

import torch
from torch import nn
from zerosim.model import MLP

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(13, 13)

    def forward(self, x):
        return x + self.inner(x).relu()

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(101, 13)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(13, 101, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0].inner.bias.requires_grad_(False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Undecided(Language):
    def forward(self, x):
        y = self.embedding(x)
        return self.head(y + 1 if y.sum() > 0 else y)

def perceptron():
    return MLP([7, 5, 3])

def regression():
    return {
        "module": nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 5)),
        "inputs": lambda rows, sequence: torch.empty(rows, 7),
        "target": lambda rows, sequence: torch.empty(rows, 5),
        "loss": lambda y, target: ((y - target) ** 2).mean(),
    }

def noisy():
    print("made")
    os.write(1, b"written" + bytes([10]))
    return Language()

def leaving():
    raise SystemExit(7)

class Mistaken(Language):
    def forward(self, x):
        return x.nope

def without_inputs():
    return {"module": Language(), "inputs": lambda rows, sequence: {}[rows]}

def without_a_call():
    return {"module": Language(), "inputs": 3}

def without_length():
    return {"module": Language(), "sequence": -3}

def failing():
    raise KeyError("x")

def number():
    return 5

def empty():
    return nn.ReLU()

def misspelt():
    return {"module": nn.Linear(3, 3), "wrapp": nn.Linear}

def hugging_face():
    from transformers import AutoModelForCausalLM, LlamaConfig
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=101)
    return AutoModelForCausalLM.from_config(LlamaConfig(use_cache=False, **sizes))

def adapted():
    from zerosim.planner import lora
    model = hugging_face()
    lora.add(model, 3, ["q_proj", "v_proj"])
    return model

def by_peft():
    import peft
    return peft.get_peft_model(hugging_face(), peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))

def convolutional():
    return {
        "module": nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 7)),
        "inputs": lambda rows, sequence: torch.empty(rows, 3, 11, 11),
    }

def unfit():
    return nn.Sequential(nn.Linear(7, 5))
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with factories, in the folder that one is in."""
    (tmp_path / "planned_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    yield "planned_factories"
    sys.modules.pop("planned_factories", None)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.plan, arguments)


def test_a_python_path_is_planned(factories: str, tmp_path: Path) -> None:
    """A module with tied and frozen parameters: tied ones once, frozen ones without gradients or optimizer state."""
    result = run(
        f"{factories}:Language",
        "--gpus",
        "1",
        "--scheme",
        "ddp",
        "--seq",
        "8",
        "--json",
        "-",
        "--memory",
        "1MB",
        "--convention",
        "zero",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    params, frozen = 101 * 13 + 3 * (13 * 13 + 13), 13
    assert (found["model"]["params"], found["model"]["frozen"]) == (params, frozen)
    [cell] = found["cells"]
    assert cell["resident"]["params"] == 2 * params
    assert cell["resident"]["grads"] == 2 * (params - frozen)


@pytest.mark.parametrize("name", ["regression", "perceptron"])
def test_a_factory_may_say_what_its_module_takes(factories: str, name: str) -> None:
    """A mapping says inputs, loss and target; a perceptron of ours is planned as a list of sizes is."""
    result = run(f"{factories}:{name}", "--gpus", "2", "--micro-batch", "3")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("failing", "KeyError: 'x'"),
        ("leaving", "SystemExit: 7"),
        ("Mistaken", "failed: AttributeError: 'Tensor' object has no attribute 'nope'"),
        ("without_inputs", "for 1 rows and a sequence of None, failed: KeyError: 1"),
        ("without_a_call", "the inputs of planned_factories:without_a_call() must be a function of rows"),
        ("without_length", "the length of a row, or None where rows have none, 1 or more; got -3"),
        ("number", "must return a torch.nn.Module"),
        ("empty", "has no parameters"),
        ("misspelt", "unknown key 'wrapp'"),
        ("absent", "is no Python path here"),
        ("Undecided", "on the meta device, where tensors have shapes and no values (Tensor.item()"),
        ("unfit", "return a mapping with inputs"),
    ],
)
def test_a_factory_that_cannot_be_planned_is_refused(factories: str, name: str, words: str) -> None:
    """Exit code 2 and a sentence, whatever goes wrong in the caller's own code."""
    result = run(f"{factories}:{name}", "--gpus", "2")
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


@needs_transformers
@pytest.mark.parametrize("name", ["hugging_face", "adapted", "by_peft"])
def test_a_factory_may_return_a_hugging_face_model_with_adapters_or_without(factories: str, name: str) -> None:
    """Built with use_cache=False or with its default, given adapters by hand or by peft: what is trained is what
    requires_grad, and the blocks are its makers'."""
    if name == "by_peft":
        pytest.importorskip("peft")
    result = run(f"{factories}:{name}", "--gpus", "2", "--scheme", "3", "--seq", "8", "--json", "-")
    assert result.exit_code == 0, result.output
    model = json.loads(result.stdout)["model"]
    base = 2 * 101 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    adapters = 2 * 2 * 3 * (64 + 64)
    assert model["trainable"] == (base if name == "hugging_face" else adapters)
    assert model["params"] == base + (0 if name == "hugging_face" else adapters)
    assert sum(unit["count"] for unit in model["units"] if ".layers." in unit["name"]) == 2


def test_a_convolutional_net_is_planned(factories: str) -> None:
    """Images in, classes out: the usual loss is the cross entropy of its logits."""
    result = run(f"{factories}:convolutional", "--gpus", "2", "--micro-batch", "3", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"]["params"] == 3 * 5 * 9 + 5 + 5 * 7 + 7


def test_what_a_model_prints_is_not_in_the_plan(factories: str) -> None:
    """With --json - standard output is the plan alone, however talkative the caller's code is, in C too."""
    command = [sys.executable, "-m", "zerosim", "plan", f"{factories}:noisy", "--gpus", "2", "--json", "-"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["model"]["kind"] == "Python path"
    assert {"made", "written"} <= set(found.stderr.splitlines())


def test_no_code_is_run_for_a_path_to_a_file(factories: str) -> None:
    """A file of Python is no Python path: it is read as a configuration, and refused."""
    result = run(f"{factories}.py", "--gpus", "2")
    assert result.exit_code == 2
    assert "is not JSON" in result.output
    assert factories not in sys.modules
