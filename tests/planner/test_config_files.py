"""Real configurations as their makers publish them: each is planned, counted to the unit, and held by its recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from helpers import by_night
from zerosim.bands import FP16, FP32, PRECISIONS, Band
from zerosim.layers import Role
from zerosim.planner import config_file, models
from zerosim.planner.model_source import Workload
from zerosim.planner.runner import Runner
from zerosim.records.question import Finetuning, Question
from zerosim.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

CONFIGS = Path(__file__).parent / "configs"

# Parameters of the whole file, tied ones once, as transformers 5.24 makes it; Kimi-K2's as a deepseek_v3, whose it is.
PARAMS = {
    "Qwen--Qwen3-0.6B": 596049920, "Qwen--Qwen3-30B-A3B": 30532122624, "Qwen--Qwen3-VL-2B-Instruct": 2127532032,
    "Qwen--Qwen3.5-27B": 27356728560, "deepseek-ai--DeepSeek-V3": 671026404352,
    "deepseek-ai--DeepSeek-V3.2": 671877929216, "falcon-7b": 6921720704, "gemma-2-9b": 9241705984,
    "gemma-3-4b": 4300079472, "bloom-560m": 559214592, "t5-small": 60506624, "t5-large": 737668096,
    "bart-large": 406291456, "bert-base-uncased": 109514298, "bert-base-seqcls": 109483778, "vit-base": 85800194,
    "whisper-large-v3": 1543490560, "gpt-neox-20b": 20554567680, "llama-2-7b": 6738415616, "opt-6.7b": 6658473984,
    "phi-2": 2779683840, "mamba-130m": 129135360, "qwen2.5-0.5b": 494032768, "qwen2.5-72b": 72706203648,
    "qwen2.5-vl-3b": 3754622976, "mlc--phi-3_5": 3821079552, "mlc--gpt2_medium": 354823168,
    "mlc--smollm2_135m": 134515008, "mlc--starcoder2": 7173923840, "mlc--olmo2_7b": 7298617344,
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": 108225039360, "meta-llama--Meta-Llama-3.1-405B": 405853388800,
    "mistralai--Mixtral-8x7B-v0.1": 46702792704, "openai--gpt-oss-20b": 20914757184,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31577937344, "nvidia--Nemotron-H-56B-Base-8K": 56324350464,
    "moonshotai--Kimi-K2-Instruct": 1026408209408, "zai-org--GLM-5": 743911199232,
    "google--gemma-4-26B-A4B": 25805933872, "llama-3.1-8b": 8030261248, "gpt2": 124439808,
    "mixtral-8x7b": 46702792704,
}  # fmt: skip

# One of each kind that once could not be read: an encoder-decoder with a tied embedding, attention that is not in
# transformers' interface, a task head, images. Soft caps and several kinds of input are tried in small below.
KINDS = ["t5-small", "falcon-7b", "bert-base-seqcls", "vit-base"]
DAILY = [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in PARAMS]

N = 7


def planned(name: str, finetuning: Finetuning | None = None) -> Runner:
    """The file, to be run on seven ranks with rows of eight tokens."""
    source = models.read(str(CONFIGS / f"{name}.json"), finetuning)
    sequence = 8 if source.sequence else None
    return Runner(source, Question(model=name, asked=[N], gpus=[N], rows=list(SCHEMES), sequence=sequence))


def test_every_file_of_the_folder_is_in_the_table() -> None:
    """No file is left out of the tests below."""
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PARAMS)


@pytest.mark.parametrize("name", DAILY)
def test_a_file_is_planned_counted_and_held_by_its_recipe(name: str) -> None:
    """Its parameters are transformers' to the unit, its forward is run, and what each of seven ranks holds at rest is
    the recipe's bytes on parameters padded to sevenths."""
    runner = planned(name)
    prepared = runner.prepare(SCHEMES[0])
    assert not prepared.states_alone
    assert prepared.model.n_params == PARAMS[name]
    groups = dict.fromkeys(group for layer in prepared.model.layers for group in layer.groups)
    padded = {
        role: sum(-(-group.size // N) * N for group in groups if group.role is role)
        for role in (Role.TRAINABLE, Role.FROZEN)
    }
    recipe = PRECISIONS["mixed"].dtypes(FP32)
    for row in SCHEMES:
        held = {band: nbytes for band, nbytes in runner.run(row, N).resident.items() if band != Band.BUFFERS}
        expected = {
            str(band): recipe[band].itemsize * padded[Role.TRAINABLE] // row.piece(band, 0, N)[1]
            for band in (Band.PARAMS, Band.GRADS, Band.MASTER, Band.EXP_AVG, Band.EXP_AVG_SQ)
        }
        expected["params"] += 2 * padded[Role.FROZEN] // row.piece(Band.PARAMS, 0, N)[1]
        assert held == expected, row.name


@pytest.mark.slow
def test_what_text_does_not_reach_is_frozen_left_out_or_trained() -> None:
    """A tower for images is held frozen unless told otherwise; the three ways differ by its parameters."""
    vision = 668_684_288
    whole = PARAMS["qwen2.5-vl-3b"]
    found: dict[str, tuple[int, int]] = {}
    parts: Any
    for parts in ("frozen", "left out", "trained"):
        runner = planned("qwen2.5-vl-3b", Finetuning(other_parts=parts))
        groups = {group for layer in runner.prepare(SCHEMES[0]).model.layers for group in layer.groups}
        sizes = {role: sum(group.size for group in groups if group.role is role) for role in Role}
        found[parts] = sizes[Role.TRAINABLE], sizes[Role.FROZEN]
    assert found == {"frozen": (whole - vision, vision), "left out": (whole - vision, 0), "trained": (whole, 0)}


@pytest.mark.parametrize("parts", ["frozen", "left out", *by_night("trained")])
def test_what_a_tower_holds_itself_is_as_idle_as_its_layers(parts: Any, tmp_path: Path) -> None:
    """Llama-4's tower for images has a table of positions and a class of its own, beside its layers."""
    text = {
        "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "vocab_size": 101,
        "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
    }  # fmt: skip
    path = tmp_path / "config.json"
    named = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
    path.write_text(json.dumps(named | {"text_config": text, "vision_config": vision}))
    source = models.read(str(path), Finetuning(other_parts=parts))
    model = source.prepare(Workload(1, 8, "none", FP16), 1).model
    groups = {group for layer in model.layers for group in layer.groups if group.role is not Role.BUFFER}
    kept = {group.name: group.role for group in groups if "vision" in group.name or "projector" in group.name}
    if parts == "left out":
        assert not kept
    else:
        assert "whole.vision_model" in {name.removesuffix(" frozen") for name in kept}
        assert set(kept.values()) == {Role.FROZEN if parts == "frozen" else Role.TRAINABLE}


# -- what else is in files


def written(tmp_path: Path, name: str, **changed: object) -> str:
    """A file of the folder with some keys changed, or left out where they are ``...``."""
    values = json.loads((CONFIGS / f"{name}.json").read_text()) | changed
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return str(path)


def notes(path: str, sequence: int | None = None) -> str:
    return " ".join(models.read(path).notes_for(sequence))


def test_a_type_that_transformers_lacks_is_read_as_the_architecture_that_it_names(tmp_path: Path) -> None:
    """As Kimi-K2's, whose architecture is deepseek_v3's; a note says so. Without an architecture that is known, the
    error says that no code is run."""
    path = written(tmp_path, "qwen2.5-0.5b", model_type="my_qwen", auto_map={"AutoConfig": "evil.Evil"})
    assert "model_type my_qwen is not in transformers: read as qwen2, whose Qwen2ForCausalLM it names" in notes(path)
    path = written(tmp_path, "qwen2.5-0.5b", model_type="my_qwen", architectures=["MyQwen"])
    with pytest.raises(ValueError, match=r"model_type 'my_qwen' \(MyQwen\).*code that comes with a model is not run"):
        notes(path)


def test_an_architecture_that_is_not_there_is_planned_as_its_type_s_own(tmp_path: Path) -> None:
    """What the type's language model is planned as is said."""
    path = written(tmp_path, "qwen2.5-0.5b", architectures=["QwenOfMyOwn"], num_hidden_layers=2, layer_types=...)
    assert "QwenOfMyOwn is not in transformers: planned as Qwen2ForCausalLM" in notes(path)


def test_a_key_that_no_class_declares_is_kept_and_noted_only_if_it_looks_misspelt(tmp_path: Path) -> None:
    """transformers keeps what it doesn't know. A near miss of a key that is missing is noted, anything else is not."""
    path = written(tmp_path, "llama-2-7b", num_hidden_layers=..., num_hidden_layer=3, foo="bar")
    assert "has the key 'num_hidden_layer'; if 'num_hidden_layers' is meant, correct it" in notes(path)
    assert "foo" not in notes(path)


def test_an_undeclared_key_that_changes_the_model_counts(tmp_path: Path) -> None:
    """head_dim of a qwen3 with half of the usual width makes a smaller model, as transformers has it."""
    path = written(tmp_path, "Qwen--Qwen3-0.6B", head_dim=64)
    halved = 28 * (64 * (16 + 2 * 8) * 1024 + 64 * 16 * 1024) + 28 * 2 * 64  # q, k, v and o, and their two norms
    prepared = models.read(path).prepare(Workload(1, 8, "none", FP16), 1)
    assert prepared.model.n_params == PARAMS["Qwen--Qwen3-0.6B"] - halved


def test_infinity_and_nan_are_numbers_of_a_file_as_transformers_writes_them(tmp_path: Path) -> None:
    """ "time_step_limit": [0.0, Infinity] is in published files; what transformers 5 saves has a word for it."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity], "initializer_range": NaN}')
    assert config_file.read(path)["time_step_limit"] == [0.0, float("inf")]
    saved = Mamba2Config(
        hidden_size=64, num_hidden_layers=2, head_dim=16, num_heads=8, n_groups=1, state_size=8, vocab_size=101,
        time_step_limit=(0.0, float("inf")), architectures=["Mamba2ForCausalLM"],
    )  # fmt: skip
    saved.to_json_file(path, use_diff=False)
    assert "__float__" in path.read_text()
    assert config_file.read(path)["time_step_limit"] == [0.0, float("inf")]
    found = models.read(str(path)).prepare(Workload(1, 8, "none", FP16), 1).model.n_params
    assert found == sum(parameter.numel() for parameter in Mamba2ForCausalLM(saved).parameters())


def test_rows_beyond_what_a_rotary_model_was_trained_on_are_a_note_and_beyond_a_table_an_error(tmp_path: Path) -> None:
    """Llama-2 takes 4,097 tokens; GPT-2 has a table of 1,024 positions, and --seq 1024, as the error advises, works."""
    llama = str(CONFIGS / "llama-2-7b.json")
    assert "rows of 4,097 tokens are longer than the 4,096 that it was trained on" in notes(llama, 4097)
    assert "longer" not in notes(llama, 4096)
    models.read(llama).prepare(Workload(1, 4097, "none", FP16), 1)
    gpt2 = models.read(str(CONFIGS / "gpt2.json"))
    with pytest.raises(ValueError, match=r"plan\(seq\).*at most 1,024 tokens a row; got 1,025. Use --seq 1024"):
        gpt2.prepare(Workload(1, 1025, "none", FP16), 1)
    gpt2.prepare(Workload(1, 1024, "none", FP16), 1)


@pytest.mark.parametrize("kind", ["falcon", *by_night("t5", "doge", "llama4")])
def test_a_file_of_its_type_alone_is_the_default_model_of_the_type(kind: str, tmp_path: Path) -> None:
    """{"model_type": ...} is what transformers makes of it."""
    import torch
    import transformers

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind}))
    source = models.read(str(path))
    prepared = source.prepare(Workload(1, 8, "none", FP16), 1)
    config = transformers.AutoConfig.for_model(kind)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        own = auto.from_config(config)
    assert prepared.model.n_params == sum(parameter.numel() for parameter in own.parameters())
    assert not prepared.states_alone


def test_how_attention_runs_is_said_where_there_is_any(tmp_path: Path) -> None:
    """A convolutional network has none; GPT-Neo's goes by no interface of transformers' and keeps its scores; that with
    soft caps is fused."""
    kinds: dict[str, dict[str, Any]] = {
        "resnet": {"embedding_size": 5, "hidden_sizes": [7], "depths": [1]},
        "gpt_neo": {
            "hidden_size": 12, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]], "vocab_size": 101,
        },
        "gemma2": {
            "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 6, "intermediate_size": 7, "vocab_size": 101, "attn_logit_softcapping": 50.0,
        },
    }  # fmt: skip
    found = {}
    for kind, values in kinds.items():
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps({"model_type": kind} | values))
        found[kind] = [note for note in models.read(str(path)).notes_for(None) if "attention" in note]
    fused = ["attention runs in one fused kernel"]
    assert found == {"resnet": [], "gpt_neo": ["attention runs as transformers' own eager"], "gemma2": fused}


def test_what_cannot_be_run_on_shapes_is_planned_by_its_states_and_never_said_to_fit(tmp_path: Path) -> None:
    """Where a forward depends on values the plan has the right bytes at rest, says what is left out, and if it fits
    is unknown unless the states alone are too much."""
    from zerosim.planner import plan

    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 101}
    path.write_text(json.dumps({"model_type": "big_bird", **sizes}))
    source = models.read(str(path))
    small, large = 16 * 10**4, 10**9
    rooms = {}
    for memory in (small, large):
        asked = Question(model="", asked=[2], gpus=[2], rows=list(SCHEMES), memory=memory)
        made = plan.make(source, asked, lambda doing: None)
        assert "cannot be run on shapes" in " ".join(made.model.notes)
        assert made.cells[0].at_rest >= 16 * made.model.params
        assert (made.smallest, made.largest, made.no_fit) == ([], [], None)
        rooms[memory] = [cell.fits for cell in made.cells]
    assert rooms[large] == [None] * 4
    assert rooms[small][0] is False


# -- names


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("llama-2-13b-hf", 13_015_864_320),
        ("GPT2-XL", 1_557_611_200),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
    ],
)
def test_common_models_are_known_by_name_offline(name: str, params: int) -> None:
    """With or without the maker's name and in any case; their parameters are the published ones, and who says so is
    noted."""
    import torch

    from zerosim.planner import hf_models, known_models

    known = known_models.find(name)
    assert known is not None
    made = hf_models.module(known.config, hf_models.architecture(known.config, name), name, "sdpa")
    assert isinstance(made, torch.nn.Module)
    assert sum(parameter.numel() for parameter in made.parameters()) == params
    assert len(known.source) > 20


def test_there_are_two_dozen_names_and_an_unknown_one_is_told_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is nowhere is refused with what is near; the hub is asked for nothing but its config.json."""
    from zerosim.planner import known_models

    assert len(known_models.names()) >= 24
    asked = []
    monkeypatch.setattr(known_models, "from_hub", lambda name: asked.append(name))
    with pytest.raises(ValueError, match=r"Is .*meta-llama/Llama-3\.1-8B.* meant\?"):
        models.read("meta-llama/Llama-3.1-8")
    assert asked == ["meta-llama/Llama-3.1-8"]


def test_a_hub_s_name_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What huggingface_hub has in its cache is planned without a network."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: written(tmp_path, "qwen2.5-0.5b"))
    assert models.read("somebody/of-their-own").name.startswith("somebody/of-their-own (Qwen2ForCausalLM)")
