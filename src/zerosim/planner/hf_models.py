"""A Hugging Face configuration as a model on the meta device.

Owns which class an architecture is, and what it is called with. Only classes that come with
transformers are made; code that comes with a model is never run, and nothing is fetched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerosim.planner.config_file import known_keys, sound, unknown_type
from zerosim.planner.model_source import ModelSource
from zerosim.planner.python_path import SEQUENCE, TorchModelSource, blocks, tokens

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing below has reason to ask for a file

from transformers import AttentionInterface, GenerationConfig, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

ATTENTION = "zerosim_fused"
OWN_HEADS = {"kv_lora_rank", "qk_rope_head_dim", "attention_head_size"}  # in whose presence heads share out no width
TASKS: Mapping[str, Mapping[str, Any]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


def _fused(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **options: Any) -> Any:
    """Attention in one kernel. Its dropout is drawn again in its backward, so nothing is kept of it."""
    return sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, **options)


logging.set_verbosity_error()  # what it would rather have is no business of a plan's reader

# Under a name of our own transformers builds no mask, for which it would read values.
AttentionInterface.register(ATTENTION, _fused)


def from_values(values: Mapping[str, Any], where: str) -> ModelSource:
    """The model that a configuration describes. ValueError, with what would work, if it's none or lies about itself."""
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise unknown_type(kind, list(CONFIG_MAPPING), where)
    config_class = CONFIG_MAPPING[kind]
    keys, own_heads = _keys(config_class)
    known_keys(values, keys, where)
    sound(values, where, heads=not own_heads)
    task, name = _architecture(values, kind, where)
    try:
        config = config_class.from_dict({key: value for key, value in values.items() if key != "auto_map"})
        config.use_cache = False
        config._attn_implementation = ATTENTION
        import transformers

        with torch.device("meta"):
            module = getattr(transformers, name)._from_config(config)
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ValueError(
            f"plan(MODEL): {where} describes no {name} that can be made: {type(error).__name__}: {reason}. "
            f"Correct that in it."
        ) from error
    module.train()
    most = next(
        (each for key in ("max_position_embeddings", "n_positions") if (each := getattr(config, key, None))), None
    )
    text = config.get_text_config()
    most = most or getattr(text, "max_position_embeddings", None)
    return TorchModelSource(
        "config.json",
        f"{_label(where)} ({name})",
        module,
        (lambda rows, sequence: {"input_ids": tokens(rows, sequence), "decoder_input_ids": tokens(rows, sequence)})
        if task == "sequence to sequence"
        else (lambda rows, sequence: {"input_ids": tokens(rows, sequence)}),
        _wrap(module),
        sequence=min(SEQUENCE, most) if most else SEQUENCE,
        most=most,
        hint="If that is this architecture's own way, pass a Python path, package.module:factory, of a model without.",
        notes=["attention runs in one fused kernel, and the loss is the cross entropy of every token, in fp32"],
    )


def _label(where: str) -> str:
    """The name of the file, or of the folder that it is in where it has the name that they all have."""
    path = Path(where)
    return path.resolve().parent.name if path.name == "config.json" else path.stem if path.suffix else where


def _wrap(module: Any) -> Any:
    """What the model's makers say must not be split, which are its blocks; or what stands in a list."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    kinds = {type(each) for each in module.modules() if type(each).__name__ in names}
    return tuple(sorted(kinds, key=lambda kind: kind.__name__)) or blocks(module)


def _architecture(values: Mapping[str, Any], kind: str, where: str) -> tuple[str, str]:
    """The task and the class: the one that the file names, or the first that the kind of model has."""
    by_task: dict[str, tuple[str, ...]] = {}
    for task, mapping in TASKS.items():
        names = mapping.get(kind, ())
        by_task[task] = (names,) if isinstance(names, str) else tuple(names)
    known = {name: task for task, names in by_task.items() for name in names}
    if not known:
        raise ValueError(
            f"plan(MODEL): {where} is of model_type {kind!r}, which has no language model (causal, masked, or sequence "
            f"to sequence) in transformers. Pass a Python path, package.module:factory, that returns the module."
        )
    asked = values.get("architectures")
    if asked is None:
        first = "sequence to sequence" if values.get("is_encoder_decoder") or not by_task["causal"] else "causal"
        name = next(iter(by_task[first] or known))
        return known[name], name
    if not isinstance(asked, list) or not asked or asked[0] not in known:
        raise ValueError(
            f"plan(MODEL): {where} names the architecture {asked!r}; of model_type {kind!r} what can be planned is "
            f"{', '.join(known)}. Name one of these, or pass a Python path, package.module:factory."
        )
    return known[asked[0]], asked[0]


def _keys(config_class: type[Any]) -> tuple[frozenset[str], bool]:
    """Every key that a configuration of this class reads or writes, and whether its heads have a width of their own."""
    fields = getattr(config_class, "__dataclass_fields__", {})
    known = set(fields) | set(config_class.attribute_map) | set(vars(PreTrainedConfig()))
    with contextlib.suppress(Exception):  # what a configuration without sizes may not be is no matter here
        known |= set(vars(config_class()))
    width = getattr(fields.get("head_dim"), "default", None)
    own = isinstance(width, int) or not OWN_HEADS.isdisjoint(fields)
    return frozenset(known | set(GenerationConfig._get_default_generation_params())), own
