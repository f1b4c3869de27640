"""Jobs' own configurations as options of a plan, and what is refused with what is planned instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from zerosim.cli import plan as cli
from zerosim.planner import job_config

MODEL = "13,17,11"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.plan, [MODEL, *arguments])


def asked(*arguments: str) -> Any:
    """The question that a plan answers."""
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["question"]


@pytest.fixture
def ds_config(tmp_path: Path) -> Any:
    """Writes a ds_config.json and gives its path."""

    def write(**values: Any) -> str:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write


def test_a_ds_config_says_stage_precision_batch_and_bucket(ds_config: Any) -> None:
    """What it says is asked; what it leaves to its trainer is noted; what is typed counts over it."""
    path = ds_config(
        zero_optimization={"stage": 2, "reduce_bucket_size": 5000, "overlap_comm": True},
        bf16={"enabled": True},
        train_micro_batch_size_per_gpu=3,
        gradient_accumulation_steps="auto",
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
    )
    found = asked("--gpus", "4", "--config", path)
    assert [row["name"] for row in found["rows"]] == ["ZeRO-2"]
    chosen = [found[name] for name in ("convention", "precision", "micro_batch", "bucket", "optimizer")]
    assert chosen == ["deepspeed", "bf16", 3, 5000, "adamw"]
    assert "gradient_accumulation_steps, optimizer.params.lr" in found["notes"][0]
    over = asked("--gpus", "4", "--config", path, "--micro-batch", "5", "--scheme", "zero3")
    assert (over["micro_batch"], over["rows"][0]["name"]) == (5, "ZeRO-3")


def test_keys_that_are_not_read_are_named(ds_config: Any) -> None:
    """In one line, those that are nearly the name of one that is with that name; of a file that is read whole none."""
    path = ds_config(bf16={"enabled": True}, zero_optimisation={"stage": 3}, steps_per_print=10)
    note = asked("--gpus", "4", "--config", path)["notes"][-1]
    assert "does not read: zero_optimisation (is zero_optimization meant?), steps_per_print" in note
    path = ds_config(bf16={"enabled": True}, zero_optimization={"stage": 3, "stage3_max_live_parameter": 5})
    note = asked("--gpus", "4", "--config", path)["notes"][-1]
    assert "zero_optimization.stage3_max_live_parameter (is stage3_max_live_parameters meant?)" in note
    whole = ds_config(bf16={"enabled": True}, zero_optimization={"stage": 3}, train_micro_batch_size_per_gpu=2)
    assert not asked("--gpus", "4", "--config", whole)["notes"]


def test_a_ds_config_s_sizes_are_settings_of_the_plan(ds_config: Any) -> None:
    """As they are written, 5e7 too; what follows from the width is noted apart from what is left to defaults."""
    path = ds_config(
        bf16={"enabled": "auto", "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        zero_optimization={
            "stage": 3, "reduce_bucket_size": 5e7, "stage3_param_persistence_threshold": 0, "sub_group_size": 1e9,
            "stage3_max_live_parameters": 3e8,
        },
    )  # fmt: skip
    found = asked("--gpus", "4", "--config", path)
    assert (found["bucket"], found["precision"]) == (50_000_000, "bf16-master")
    sizes = {name: found["zero"][name] for name in ("param_persistence_threshold", "max_live_parameters")}
    assert sizes == {"param_persistence_threshold": 0, "max_live_parameters": 300_000_000}
    only = ds_config(bf16={"enabled": True, "bf16_optimizer_states": True})
    assert asked("--gpus", "4", "--config", only)["precision"] == "bf16-moments"
    auto = job_config.read(
        Path(ds_config(zero_optimization={"stage": 3, "reduce_bucket_size": "auto"}, train_batch_size="auto"))
    )
    assert auto.options["zero"].reduce_bucket_size == "auto"
    assert ["reduce_bucket_size: what transformers" in note for note in auto.notes] == [True, False]
    wrong = run("--gpus", "4", "--config", ds_config(zero_optimization={"stage": 3, "sub_group_size": "many"}))
    assert wrong.exit_code == 2
    assert "zero_optimization.sub_group_size is a number of elements" in " ".join(wrong.output.split())


def test_accelerate_s_yaml_says_how_many_gpus_and_which_system(tmp_path: Path) -> None:
    """FSDP with checkpointing is fsdp2's ZeRO-3; MULTI_GPU is data parallel, under autocast in bf16."""
    pytest.importorskip("yaml")
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_activation_checkpointing: true\n"
    )
    found = asked("--config", str(path))
    assert (found["asked"], found["convention"], found["checkpoint"]) == ([4], "fsdp2", "full")
    path.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n")
    found = asked("--config", str(path))
    assert ([row["name"] for row in found["rows"]], found["precision"]) == (["data parallel"], "autocast")


@pytest.mark.parametrize(
    ("given", "row", "offload"),
    [
        ({"fsdp_reshard_after_forward": "false"}, "ZeRO-3, kept", []),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "ZeRO-3, kept", []),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "HSDP", []),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, "HSDP, kept", []),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "data parallel", []),
        ({"fsdp_offload_params": "true"}, "ZeRO-3, all on the host", ["optimizer", "grads", "params"]),
    ],
)
def test_accelerate_s_ways_of_sharding_are_rows(
    given: dict[str, str], row: str, offload: list[str], tmp_path: Path
) -> None:
    """What FSDP calls them, in accelerate's words, by the rules of fsdp2."""
    pytest.importorskip("yaml")
    path = tmp_path / "accelerate.yaml"
    lines = "".join(f"  {name}: {value}\n" for name, value in given.items())
    path.write_text(f"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n{lines}")
    found = asked("--config", str(path), "--node", "4")
    assert [(each["name"], each["offload"]) for each in found["rows"]] == [(row, offload)]
    assert found["convention"] == "fsdp2"


def test_a_ds_config_s_offloading_is_planned(ds_config: Any) -> None:
    """The optimizer's state goes to the host with the gradients that it reads, or parameters too."""
    for part, stage, offload in (
        ("offload_optimizer", 2, ["optimizer", "grads"]), ("offload_param", 3, ["optimizer", "grads", "params"]),
    ):  # fmt: skip
        path = ds_config(bf16={"enabled": True}, zero_optimization={"stage": stage, part: {"device": "cpu"}})
        [row] = asked("--gpus", "4", "--config", path)["rows"]
        assert row["offload"] == offload


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offloading to NVMe"),
        ({"bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": 4}}, "tensor parallelism"),
        ({"bf16": {"enabled": True}, "pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"bf16": {"enabled": True}, "moe": {"ep_size": 8}}, "expert parallelism"),
        ({"bf16": {"enabled": True}, "sequence_parallel_size": 8}, "context parallelism"),
    ],
)
def test_a_job_that_is_not_planned_is_refused_with_what_is(values: Any, words: str, ds_config: Any) -> None:
    """One line with what was asked, where, and what is planned instead; without the key it is planned."""
    result = run("--gpus", "4", "--config", ds_config(**values))
    assert result.exit_code == 2
    assert words in result.output
    assert "What is planned are data parallel, ZeRO-1 to -3 and FSDP, over all N GPUs or within nodes" in " ".join(
        result.output.split()
    )
    assert run("--gpus", "4", "--config", ds_config(bf16={"enabled": True})).exit_code == 0


@pytest.mark.parametrize("option", ["--tp", "--pipeline-parallel", "--cp", "--ep"])
def test_options_of_other_parallelisms_are_refused_with_what_is_planned(option: str) -> None:
    """Of 2 or more; 1 asks for nothing."""
    result = run("--gpus", "4", option, "2")
    assert (result.exit_code, "parallelism is not planned. What is planned are" in result.output) == (2, True)
    assert run("--gpus", "4", option, "1").exit_code == 0


def test_a_file_that_is_no_job_is_refused(tmp_path: Path) -> None:
    """Not there, not JSON, no keys, or keys of something else."""
    with pytest.raises(ValueError, match=r"plan\(config\): .*cannot be read: No such file"):
        job_config.read(tmp_path / "absent.json")
    for text, words in (("{", "is not JSON"), ("[1]", "holds no keys"), ('{"a": 1}', "neither DeepSpeed's nor")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            job_config.read(tmp_path / "x.json")


# -- a global batch


def test_a_global_batch_says_how_many_micro_batches_a_step_has() -> None:
    """96 rows on 4 GPUs in micro-batches of 3 are 8 of them; as many tokens are sent for as with --accumulate 8."""
    result = run("--gpus", "4", "--global-batch", "96", "--micro-batch", "3", "--json", "-", "--scheme", "zero3")
    other = run("--gpus", "4", "--accumulate", "8", "--micro-batch", "3", "--json", "-", "--scheme", "zero3")
    [cell], [same] = (json.loads(each.stdout)["cells"] for each in (result, other))
    assert (cell["peak"], cell["traffic"], cell["flops"]) == (same["peak"], same["traffic"], same["flops"])
    told = run("--gpus", "4", "--global-batch", "96", "--micro-batch", "3", "--scheme", "zero3")
    assert "8 of them a step" in told.output


def test_numbers_of_gpus_that_cannot_divide_a_global_batch_are_named_and_the_advice_works() -> None:
    """Of 4, 8 and 16 GPUs two cannot divide 12 rows; each that the error names can."""
    result = run("--gpus", "4,8,16", "--global-batch", "12")
    words = " ".join(result.output.split())
    assert "cannot be divided among 8, 16 GPUs. Use one of" in words
    advised = words.partition("Use one of ")[2].partition(" GPUs")[0].split(", ")
    assert len(advised) > 1
    assert run("--gpus", ",".join(advised), "--global-batch", "12", "--scheme", "zero3").exit_code == 0
    assert "Pass one of them" in run("--gpus", "4", "--global-batch", "12", "--accumulate", "3").output
