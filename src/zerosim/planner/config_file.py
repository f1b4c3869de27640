"""A Hugging Face ``config.json``: read, and refused where it cannot be true.

Owns the reading of the file and the rules for what is in it that hold for any architecture.
Must not know torch: what an architecture is, ``torch_sources`` knows. No code is run and
nothing is fetched for what a file says.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
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
_HEADS = (  # a width, and the heads that share it out
    ("hidden_size", "num_attention_heads"),
    ("n_embd", "n_head"),
    ("d_model", "encoder_attention_heads"),
    ("d_model", "decoder_attention_heads"),
)
CALL = "plan(MODEL)"


# A model without any of these is none. Others may be 0, as the experts of a dense model are in some files.
NEEDED = frozenset(("vocab_size", "hidden_size", "num_hidden_layers", "n_embd", "n_layer", "d_model"))


def read(path: Path) -> dict[str, Any]:
    """What is in the file, once the rules that need no architecture hold. ValueError if they do not."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{CALL}: {path} cannot be read: {error.strerror or error}.") from error
    try:
        values = json.loads(content, object_pairs_hook=_value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CALL}: {path} is not JSON: {error}. A Hugging Face config.json is needed.") from error
    named = isinstance(values, dict) and (isinstance(values.get("model_type"), str) or values.get("architectures"))
    if not named:
        got = f"keys {', '.join(list(values)[:6]) or 'none'}" if isinstance(values, dict) else type(values).__name__
        raise ValueError(
            f'{CALL}: {path} does not say its model_type, as in {{"model_type": "llama", ...}}; got {got}. '
            f"A Hugging Face config.json is needed."
        )
    found: dict[str, Any] = values
    bounded(found, str(path))
    return found


def _value(pairs: list[tuple[str, Any]]) -> Any:
    """An object, or a float that is not finite: older files have it as it is, newer ones as {"__float__": "NaN"}."""
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} is given twice")
    if names == ["__float__"] and pairs[0][1] in ("Infinity", "-Infinity", "NaN"):
        return float(pairs[0][1])
    return dict(pairs)


def bounded(values: Mapping[str, Any], where: str) -> None:
    """Refuse sizes that no model has, before anything is made of them: negative, far too large, or no numbers."""
    for key, value in _sizes(values):
        name = key.rpartition(".")[2]
        most = LAYERS if "layer" in name else EXPERTS if "experts" in name else LARGEST
        least = 1 if name in NEEDED else 0
        for each in value if isinstance(value, list) else [value]:
            if each is None or isinstance(each, dict) or (isinstance(each, float) and least <= each <= most):
                continue  # of floats transformers says what it takes
            if isinstance(each, (bool, str)) or not isinstance(each, int) or not least <= each <= most:
                raise ValueError(
                    f"{CALL}: {key} is a positive integer, at most {most:,}; {where} has {each!r}. Correct it."
                )


def _sizes(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _sizes(value, f"{within}{key}.")
        elif key in SIZES and value is not None:
            yield f"{within}{key}", value


def refused(values: Mapping[str, Any], where: str, name: str, error: Exception) -> ValueError:
    """The error for values that transformers makes no ``name`` of: the rule that they break, if it is a known one."""
    if (rule := broken_rule(values, where)) is not None:
        return ValueError(rule)
    if isinstance(error, KeyError) and (keys := [key for key, value in values.items() if value in error.args]):
        return ValueError(
            f"{CALL}: {keys[0]} is the name of something that transformers has; {where} has {values[keys[0]]!r}, which "
            f"{name} knows nothing of. Correct it."
        )
    reason = " ".join(str(error).split())[:300].rstrip(".")
    return ValueError(
        f"{CALL}: {where} describes no {name} that can be made: {type(error).__name__}: {reason}. Correct that in it."
    )


def broken_rule(values: Mapping[str, Any], where: str) -> str | None:
    """Which of the rules that hold for nearly all architectures these values break, if one: why it may have failed."""
    found = next((found for rule in (_heads, _groups, _experts) if (found := rule(values, where))), None)
    return None if found is None else f"{CALL}: {found}"


def _heads(values: Mapping[str, Any], where: str) -> str | None:
    for width, number in _HEADS:
        wide, many = values.get(width), values.get(number)
        if many == 0:
            return f"{number} is a positive integer; {where} has 0. Correct it."
        if isinstance(wide, int) and isinstance(many, int) and many and wide % many and values.get("head_dim") is None:
            return (
                f"{width} is divided among {number}; {where} has {wide:,} for {many:,} heads, which leaves "
                f"{wide % many:,}. Correct one of them."
            )
    return None


def _groups(values: Mapping[str, Any], where: str) -> str | None:
    many, fewer = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(many, int) and isinstance(fewer, int) and fewer and many % fewer:
        return (
            f"num_attention_heads is a multiple of num_key_value_heads, as each of these serves equally many of those; "
            f"{where} has {many:,} and {fewer:,}. Correct one of them."
        )
    return None


def _experts(values: Mapping[str, Any], where: str) -> str | None:
    some, chosen = values.get("num_local_experts") or values.get("num_experts"), values.get("num_experts_per_tok")
    if isinstance(some, int) and isinstance(chosen, int) and chosen > some:
        return (
            f"num_experts_per_tok is at most the number of experts; {where} has {chosen:,} of {some:,}. Correct one of "
            f"them."
        )
    return None


def misspelt(values: Mapping[str, Any], known: Collection[str], where: str) -> list[str]:
    """A note for each key that the type does not declare and that is nearly the name of one that it does."""
    notes = []
    for key in values:
        if key in known or key.startswith("_"):
            continue
        near = difflib.get_close_matches(key, sorted(set(known) - set(values)), n=1, cutoff=0.9)
        if near:
            notes.append(f"{where} has the key {key!r}; if {near[0]!r} is meant, correct it")
    return notes


def unknown_type(kind: object, known: Collection[str], where: str, asked: Sequence[str]) -> ValueError:
    """The error for an architecture that is not known."""
    near = difflib.get_close_matches(str(kind), sorted(known), n=3, cutoff=0.6)
    meant = f"Is {' or '.join(map(repr, near))} meant? " if near else ""
    named = f" ({', '.join(asked)})" if asked else ""
    return ValueError(
        f"{CALL}: {where} is of model_type {kind!r}{named}, which transformers does not know, and code that comes with "
        f"a model is not run. {meant}Use a known architecture, or pass a Python path, package.module:factory."
    )
