"""A Hugging Face ``config.json``: read, and refused where it cannot be true.

Owns the reading of the file and the rules for what is in it that hold for any architecture.
Must not know torch: what an architecture is, ``torch_sources`` knows. No code is run and
nothing is fetched for what a file says.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

# No model's is near these. What is made of as many layers and experts is made one by one.
LARGEST, LAYERS, EXPERTS = 2**31, 1024, 16_384

# Counts and widths, by the names that architectures give them. Each is a positive integer, or absent, or null.
SIZES = frozenset((
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions",
    "n_inner", "d_model", "d_ff", "d_kv", "num_layers", "num_heads", "num_decoder_layers", "encoder_layers",
    "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim",
    "ffn_dim", "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "embedding_size",
    "n_routed_experts", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "word_embed_proj_dim",
))  # fmt: skip
# What else is found in files and changes nothing about a model's sizes: where it comes from, how it is saved or used.
HARMLESS = frozenset((
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "name_or_path", "auto_map",
    "task_specific_params", "n_ctx", "use_return_dict", "pruned_heads", "tie_encoder_decoder",
    "cross_attention_hidden_size", "add_cross_attention", "finetuning_task", "tokenizer_class", "prefix",
    "is_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss", "gradient_checkpointing", "output_past",
    "attn_implementation", "experts_implementation", "per_layer_config", "num_labels", "output_attentions",
    "rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base", "partial_rotary_factor", "classifier_dropout",
    "position_embedding_type", "static_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "decoder_start_token_id", "unk_token_id", "cls_token_id", "mask_token_id",
    "quantization_config", "unsloth_version", "unsloth_fixed", "transformers.js_config", "summary_type",
    "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "return_dict",
    "use_cache", "tie_word_embeddings",
))  # fmt: skip
_HEADS = (  # a width, and the heads that share it out
    ("hidden_size", "num_attention_heads"),
    ("n_embd", "n_head"),
    ("d_model", "encoder_attention_heads"),
    ("d_model", "decoder_attention_heads"),
)
_FROM_FILE = "plan(MODEL)"


def read(path: Path) -> dict[str, Any]:
    """What is in the file, once the rules that need no architecture hold. ValueError if they do not."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{_FROM_FILE}: {path} cannot be read: {error.strerror or error}.") from error
    try:
        values = json.loads(content, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_FROM_FILE}: {path} is not JSON: {error}. A Hugging Face config.json is needed.") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        got = f"keys {', '.join(list(values)[:6]) or 'none'}" if isinstance(values, dict) else type(values).__name__
        raise ValueError(
            f'{_FROM_FILE}: {path} does not say its model_type, as in {{"model_type": "llama", ...}}; got {got}. '
            f"A Hugging Face config.json is needed."
        )
    sound(values, str(path))
    return values


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} is given twice")
    return dict(pairs)


def sound(values: Mapping[str, Any], where: str, *, heads: bool = False) -> None:
    """Refuse sizes that no model has: no positive integers, or that do not fit together.

    ``heads`` says that heads share out the width, as they do unless an architecture gives them one of their own.
    """
    for key, value in _sizes(values):
        most = LAYERS if "layer" in key else EXPERTS if "experts" in key else LARGEST
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool) or not isinstance(each, int) or not 1 <= each <= most:
                raise ValueError(
                    f"{_FROM_FILE}: {key} is a positive integer, at most {most:,}; {where} has {each!r}. Correct it."
                )
    for width, number in _HEADS if heads else ():
        wide, many = values.get(width), values.get(number)
        if isinstance(wide, int) and isinstance(many, int) and wide % many and values.get("head_dim") is None:
            raise ValueError(
                f"{_FROM_FILE}: {width} is shared out to {number}; {where} has {wide:,} for {many:,} heads, which "
                f"leaves {wide % many:,}. Correct one of them."
            )
    many, fewer = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(many, int) and isinstance(fewer, int) and many % fewer:
        raise ValueError(
            f"{_FROM_FILE}: num_attention_heads is a multiple of num_key_value_heads, as each of these serves equally "
            f"many of those; {where} has {many:,} and {fewer:,}. Correct one of them."
        )
    some, chosen = values.get("num_local_experts") or values.get("num_experts"), values.get("num_experts_per_tok")
    if isinstance(some, int) and isinstance(chosen, int) and chosen > some:
        raise ValueError(
            f"{_FROM_FILE}: num_experts_per_tok is at most the number of experts; {where} has {chosen:,} of {some:,}. "
            f"Correct one of them."
        )


def _sizes(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _sizes(value, f"{within}{key}.")
        elif key in SIZES and value is not None:
            yield f"{within}{key}", value


def known_keys(values: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse a key that neither the architecture nor the format knows: it would have no effect, meant as it was."""
    for key in values:
        if key in known or key in HARMLESS or key.startswith("_"):
            continue
        near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7)
        raise ValueError(
            f"{_FROM_FILE}: {where} has the key {key!r}, which model_type {values['model_type']!r} does not know, so "
            f"it would change nothing. {f'Is {near[0]!r} meant? ' if near else ''}Correct it, or remove it."
        )


def unknown_type(kind: str, known: Collection[str], where: str) -> ValueError:
    """The error for an architecture that is not known."""
    near = difflib.get_close_matches(kind, sorted(known), n=3, cutoff=0.6)
    meant = f"Is {' or '.join(map(repr, near))} meant? " if near else ""
    return ValueError(
        f"{_FROM_FILE}: {where} is of model_type {kind!r}, which transformers does not know, and code that comes with "
        f"a model is not run. {meant}Use a known architecture, or pass a Python path, package.module:factory."
    )
