"""A job's own configuration as options of a plan: DeepSpeed's ds_config.json, Accelerate's YAML.

Owns what is read from each, and what is refused. Must not know how a plan is made.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from zerosim.records.question import ZeroConfig
from zerosim.util import arguments

INSTEAD = "What is planned are data parallel, ZeRO-1 to -3 and FSDP, over all N GPUs or within nodes"
PARALLEL = {
    "tensor": ("tensor_parallel", "autotp_size", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pipeline": ("pipeline", "pp_size", "pipeline_parallel_size", "pp_degree", "pipeline_model_parallel_size"),
    "context": ("cp_size", "sp_size", "sequence_parallel_size", "context_parallel_size"),
    "expert": ("ep_size", "expert_parallel_size", "moe_expert_parallel_size"),
}


AUTO = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")  # by the model's width


@dataclass(frozen=True)
class JobConfig:
    """Options by the names that they have in a plan, and what is to be said about the file."""

    options: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> JobConfig:
    """The options that the file asks for. ValueError, with what would work, for what isn't planned."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"plan(config): {path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    if path.suffix.lower() in (".yaml", ".yml"):
        values = _yaml(path, text)
    else:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"plan(config): {path} is not JSON: {error}. Pass a ds_config.json or a YAML.") from error
    if not isinstance(values, dict):
        raise ValueError(f"plan(config): {path} holds no keys; got {type(values).__name__}.")
    _refuse_parallel(values, path)
    reader: Callable[[Mapping[str, Any], Path], JobConfig] | None = None
    if "distributed_type" in values or "compute_environment" in values:
        reader = _accelerate
    elif {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16"} & values.keys():
        reader = _deepspeed
    if reader is None:
        raise ValueError(
            f"plan(config): {path} is neither DeepSpeed's nor Accelerate's; its keys are {', '.join(list(values)[:6])}."
            f" Pass a ds_config.json, or what accelerate config writes."
        )
    found = reader(values, path)
    notes = [*found.notes, *_unread(values, path, _READ[reader])]
    return JobConfig({name: value for name, value in found.options.items() if value is not None}, notes)


def _unread(values: Mapping[str, Any], path: Path, read: Mapping[str, Collection[str]]) -> Iterator[str]:
    """A note on the keys that a plan does not go by, and on those that may be misspelt."""
    keys: list[str] = []
    for within, known in read.items():
        part = values.get(within) if within else values
        if not isinstance(part, Mapping):
            continue
        for key in part:
            if key not in known:
                near = difflib.get_close_matches(key, sorted(set(known) - set(part)), n=1, cutoff=0.85)
                name = f"{within}.{key}" if within else key
                keys.append(f"{name} (is {near[0]} meant?)" if near else name)
    if keys:
        yield f"{path.name} has keys that a plan does not read: {', '.join(keys)}"


def _yaml(path: Path, text: str) -> Any:
    arguments.installed("plan(config)", "yaml", extra="plan", otherwise="pass a file of JSON")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"plan(config): {path} is not YAML: {' '.join(str(error).split())}.") from error


def refuse(what: str, who: str) -> ValueError:
    """The error for a kind of job that isn't planned."""
    return ValueError(f"plan({who}): {what} is not planned. {INSTEAD}; leave it out to plan these.")


def _refuse_parallel(values: Mapping[str, Any], path: Path, within: str = "") -> None:
    for key, value in values.items():
        for kind, names in PARALLEL.items():
            name = next((name for name in names if key == name or key.endswith(f"_{name}")), None)
            size = value.get("tp_size", value.get("autotp_size", 2)) if isinstance(value, Mapping) else value
            if name and isinstance(size, int) and size > 1:
                raise refuse(f"{kind} parallelism ({within}{key} in {path.name})", "config")
        if key == "device" and value == "nvme":
            raise refuse(f"offloading to NVMe ({within}{key} in {path.name})", "config")
        if isinstance(value, Mapping):
            _refuse_parallel(value, path, f"{within}{key}.")


def _number(value: Any) -> int | None:
    """A positive integer, also as 5e8, or None for "auto" and what else says nothing."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def zero_settings(zero: Mapping[str, Any], where: str = "zero_optimization") -> ZeroConfig:
    """The sizes of a ``zero_optimization``; ValueError for one that is none."""
    values: dict[str, Any] = {}
    for name in ZeroConfig.__struct_fields__:
        key = name if name in zero else f"stage3_{name}"
        value = zero.get(key)
        if isinstance(value, str) and value != "auto" and value.replace(".", "").replace("e+", "e").isalnum():
            with contextlib.suppress(ValueError):
                value = float(value)  # YAML's 5e8 is text
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (value == "auto" and name not in AUTO):
            continue
        values[name] = value
        try:
            msgspec.convert(values, ZeroConfig)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"plan(config): zero_optimization.{key} is a number of elements{' or auto' * (name in AUTO)}, or true "
                f"or false where it is a switch; {where} has {value!r}. Correct it, or leave it out."
            ) from error
    return msgspec.convert(values, ZeroConfig)


def _deepspeed(values: Mapping[str, Any], path: Path) -> JobConfig:
    zero = values.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"plan(config): zero_optimization.stage is 0, 1, 2 or 3; {path} has {stage!r}.")
    there = {part: (zero.get(f"offload_{part}") or {}).get("device") == "cpu" for part in ("optimizer", "param")}
    half = [name for name in ("bf16", "fp16") if (values.get(name) or {}).get("enabled") in (True, "auto")]
    optimizer = ((values.get("optimizer") or {}).get("type") or "adam").lower()
    known = {"adam": "adam", "adamw": "adamw", "fusedadam": "adamw", "onebitadam": "adam", "sgd": "sgd"}
    return JobConfig(
        {
            "convention": "deepspeed",
            "schemes": (str(stage),),
            "offload": "params" if there["param"] else "optimizer" if there["optimizer"] else None,
            "precision": _precision(values, half[0]) if half else "fp32",
            "micro_batch": _number(values.get("train_micro_batch_size_per_gpu")),
            "accumulate": _number(values.get("gradient_accumulation_steps")),
            "global_batch": _number(values.get("train_batch_size")),
            "bucket_elements": _number(zero.get("reduce_bucket_size")),
            "zero": zero_settings(zero, path.name),
            "optimizer": known.get(optimizer),
        },
        _autos(values, path),
    )


def _precision(values: Mapping[str, Any], half: str) -> str:
    """The recipe: of bf16 also with master weights and gradients, and moments, in bf16 (DeepSpeed 0.18.3 and on)."""
    if half == "fp16":
        return "mixed"
    low = [bool(values[half].get(name)) for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")]
    return {(True, True): "bf16-master", (False, True): "bf16-moments"}.get((low[0], low[1]), "bf16")


def _autos(values: Mapping[str, Any], path: Path) -> list[str]:
    """Notes on what the file leaves to its trainer."""
    names = [key for key, value in _flat(values) if value == "auto"]
    by_width = [name for name in names if name.split(".")[-1].removeprefix("stage3_") in AUTO]
    rest = [name for name in names if name not in by_width]
    notes = []
    if by_width:
        notes.append(f"{path.name} has 'auto' for {', '.join(by_width)}: what transformers' trainer makes of it")
    if rest:
        notes.append(f"{path.name} leaves to its trainer, and the plan to its defaults: {', '.join(rest)}")
    return notes


def _flat(values: Mapping[str, Any], within: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{within}{key}.") if isinstance(value, Mapping) else [(f"{within}{key}", value)]
    return found


def _accelerate(values: Mapping[str, Any], path: Path) -> JobConfig:
    kind = str(values.get("distributed_type", "NO")).upper()
    options: dict[str, Any] = {
        "gpus": (str(values["num_processes"]),) if _number(values.get("num_processes")) else None,
    }
    half = str(values.get("mixed_precision", "no")).lower()
    notes: list[str] = []
    if kind == "FSDP":
        fsdp = values.get("fsdp_config") or {}
        strategy = str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
        keeps = str(fsdp.get("fsdp_reshard_after_forward", strategy)).upper() in ("FALSE", "SHARD_GRAD_OP", "2")
        hybrid = strategy in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5")
        keeps = keeps or strategy in ("HYBRID_SHARD_ZERO2", "5")
        sharded = f"{'hsdp' if hybrid else 'zero3'}{'-kept' if keeps else ''}"
        options |= {"convention": "fsdp2", "schemes": ("ddp" if strategy in ("NO_SHARD", "3") else sharded,)}
        if str(fsdp.get("fsdp_offload_params", False)).lower() == "true":
            options["offload"] = "params"
        if str(fsdp.get("fsdp_activation_checkpointing", False)).lower() == "true":
            options["checkpoint"] = "full"
        options["precision"] = {"no": "fp32", "bf16": None, "fp16": "mixed"}.get(half)
    elif kind == "DEEPSPEED":
        inner = values.get("deepspeed_config") or {}
        if (named := inner.get("deepspeed_config_file")) is not None:
            found = read((path.parent / named) if not Path(named).is_absolute() else Path(named))
            return JobConfig({**options, **found.options}, found.notes)
        zero = {"stage": inner.get("zero_stage", 2)}
        zero |= {
            f"offload_{part}": {"device": inner.get(f"offload_{part}_device", "none")}
            for part in ("optimizer", "param")
        }
        _refuse_parallel(zero, path)
        steps = inner.get("gradient_accumulation_steps")
        found = _deepspeed(
            {"zero_optimization": zero, "gradient_accumulation_steps": steps, half: {"enabled": True}}, path
        )
        options |= found.options
    elif kind in ("MULTI_GPU", "MULTI_CPU", "NO"):
        options |= {"schemes": ("ddp",), "precision": "autocast" if half == "bf16" else "fp32"}
    else:
        raise refuse(f"distributed_type {kind} ({path.name})", "config")
    return JobConfig(options, notes)


# What is read of each kind of file, the whole and its parts.
_READ: Mapping[Callable[[Mapping[str, Any], Path], JobConfig], Mapping[str, Collection[str]]] = {
    _deepspeed: {
        "": (
            "zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size",
            "bf16", "fp16", "optimizer",
        ),
        "zero_optimization": (
            "stage", "offload_optimizer", "offload_param", *ZeroConfig.__struct_fields__,
            *(f"stage3_{name}" for name in ZeroConfig.__struct_fields__),
        ),
    },
    _accelerate: {
        "": (
            "distributed_type", "compute_environment", "num_processes", "mixed_precision", "fsdp_config",
            "deepspeed_config",
        ),
        "fsdp_config": (
            "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params",
            "fsdp_activation_checkpointing",
        ),
        "deepspeed_config": (
            "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
            "gradient_accumulation_steps",
        ),
    },
}  # fmt: skip
