"""A Hugging Face configuration as a module on the meta device, and what it is called with.

Owns which class a configuration describes. That is asked of transformers' own classes: only
those that come with it are made; code that comes with a model is never run, and nothing is fetched.
Must not know schemes, N or cards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zerosim.planner import config_file
from zerosim.planner.config_file import CALL
from zerosim.torch_models.units import Wrap

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing below has reason to ask for a file

import transformers
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

ATTENTION = "zerosim_fused"
ATTENTIONS = (ATTENTION, "sdpa", "eager")  # in the order in which they are tried

# What a file without "architectures" is taken for: the first of these tasks that its type has a class for.
TASKS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM",
    "IMAGE_CLASSIFICATION", "PRETRAINING", "CTC", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
)  # fmt: skip


_expanded = False
_calls = 0  # of the fused kernel
_ONE_EACH = torch.nn.Identity()  # a module without groups of heads


def _fused(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **options: Any) -> Any:
    """Attention in one kernel. Its dropout is drawn again in its backward and its soft cap computed again, so that
    nothing is kept of them."""
    global _calls
    _calls += 1
    options.pop("softcap", None)
    if _expanded and (times := getattr(module, "num_key_value_groups", 1)) > 1:
        key, value = repeat_kv(key, times), repeat_kv(value, times)
        module = _ONE_EACH
    return sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, **options)


logging.set_verbosity_error()  # what it would rather have is no business of a plan's reader

# Under a name of our own transformers builds no mask, for which it would read values.
AttentionInterface.register(ATTENTION, _fused)


def fused_calls() -> int:
    """How often attention has run in the one kernel by now."""
    return _calls


def attends(made: torch.nn.Module) -> bool:
    """Whether there is attention in the model at all."""
    return any("attention" in type(each).__name__.lower() for each in made.modules())


@contextmanager
def keys_and_values(kind: str) -> Iterator[None]:
    """Within the block heads that share keys and values have them once (``"grouped"``) or each a copy."""
    global _expanded
    before, _expanded = _expanded, kind == "expanded"
    try:
        yield
    finally:
        _expanded = before


@contextmanager
def unpacked() -> Iterator[None]:
    """Within the block rows are sequences of their own, unpadded: transformers does not look, for it has no values."""
    looks = (masking_utils, "find_packed_sequence_indices"), (
        transformers.PreTrainedModel, "warn_if_padding_and_no_attention_mask",
    )  # fmt: skip
    before = [getattr(place, name) for place, name in looks]
    try:
        for place, name in looks:
            setattr(place, name, lambda *_: None)
        yield
    finally:
        for (place, name), own in zip(looks, before, strict=True):
            setattr(place, name, own)


class TextPart(torch.nn.Module):  # type: ignore[misc]
    """A model of several kinds of input, called as the language model in it."""

    def __init__(self, whole: Any, path: str) -> None:
        super().__init__()
        self.whole, self.config = whole, whole.get_submodule(path).config
        self._path = path

    def forward(self, input_ids: Any) -> Any:
        """Tokens [rows, sequence] to what the language model returns."""
        return self.whole.get_submodule(self._path)(input_ids=input_ids)


def text_part(made: Any) -> TextPart | None:
    """The model called as the first language model in it, if it is not one itself and has one."""
    for path, part in made.named_modules():
        if path and isinstance(part, transformers.PreTrainedModel) and part.get_output_embeddings() is not None:
            return TextPart(made, path)
    return None


@dataclass(frozen=True)
class Architecture:
    """The class that a configuration describes, the configuration's own class, and what is to be said about it."""

    name: str
    config_class: Any
    notes: tuple[str, ...] = ()


def architecture(values: Mapping[str, Any], where: str) -> Architecture:
    """The class that transformers makes of these values. ValueError, with what would work, if it has none.

    The one that the file names, if transformers has it; or the first that the model_type has, by ``TASKS``; or the
    base model. A model_type that transformers lacks is read as the type of the architecture that the file names.
    """
    kind, asked = values.get("model_type"), values.get("architectures") or []
    if not isinstance(asked, list) or not all(isinstance(name, str) for name in asked):
        raise ValueError(
            f'{CALL}: architectures is a list of names, as in ["LlamaForCausalLM"]; {where} has {asked!r}. Correct it, '
            f"or leave it out."
        )
    named = [name for name in asked if isinstance(getattr(transformers, name, None), type)]
    own = next(
        (getattr(transformers, name) for name in named if hasattr(getattr(transformers, name), "config_class")), None
    )
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[kind]
        if own is not None and own.config_class is not None and issubclass(config_class, own.config_class):
            return Architecture(own.__name__, config_class)
        if own is not None and _in(own.__name__, kind):
            return Architecture(own.__name__, config_class)
        name = _usual(kind, bool(values.get("is_encoder_decoder", getattr(config_class, "is_encoder_decoder", False))))
        if name is None:
            raise ValueError(f"{CALL}: {where} is of model_type {kind!r}, of which transformers has no model.")
        if asked:
            return Architecture(name, config_class, (f"{asked[0]} is not in transformers: planned as {name}",))
        return Architecture(name, config_class)
    if own is not None and own.config_class is not None:
        read = f"read as {own.config_class.model_type}, whose {own.__name__} it names"
        note = f"model_type {kind} is not in transformers: {read}"
        return Architecture(own.__name__, own.config_class, (note,))
    raise config_file.unknown_type(kind, list(CONFIG_MAPPING), where, asked)


def _in(name: str, kind: str) -> bool:
    """Whether some task has that class for that type."""
    return any(
        name in _names(mapping, kind)
        for task, mapping in vars(modeling_auto).items()
        if task.endswith("_MAPPING_NAMES")
    )


def _names(mapping: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    names = mapping.get(kind, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _usual(kind: str, encodes: bool = False) -> str | None:
    """The class of a type where the file names none, or none that there is."""
    tasks = sorted(TASKS, key=lambda task: "SEQ" not in task) if encodes else TASKS
    for mapping in (*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in tasks), "MODEL_MAPPING_NAMES"):
        for name in _names(getattr(modeling_auto, mapping), kind):
            if hasattr(transformers, name):
                return name
    return None


def configuration(values: Mapping[str, Any], found: Architecture, where: str) -> Any:
    """The configuration as transformers reads it, with keys that its class does not declare. ValueError if it can't."""
    try:
        return found.config_class.from_dict({key: value for key, value in values.items() if key != "auto_map"})
    except Exception as error:
        raise config_file.refused(values, where, found.name, error) from error


def module(values: Mapping[str, Any], found: Architecture, where: str, attention: str) -> torch.nn.Module:
    """The module on the meta device, in training, all of its parameters trainable, with that attention."""
    config, kind = configuration(values, found, where), getattr(transformers, found.name)
    if kind.config_class is not None and kind.config_class is getattr(config, "sub_configs", {}).get("text_config"):
        config = config.get_text_config()  # the language model of a type of several kinds of input
    try:
        config.use_cache = False
        for part in {id(each): each for each in _configs(config)}.values():
            part.use_cache = False
        config._attn_implementation = attention
        with torch.device("meta"):
            made = kind._from_config(config, dtype=torch.float32)
    except Exception as error:
        raise config_file.refused(values, where, found.name, error) from error
    return made.train()


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            yield from _configs(part)


def wrap(made: torch.nn.Module) -> Wrap:
    """The rule for the blocks: what the model's makers say must not be split, or None where they say nothing."""
    names = set(getattr(made, "_no_split_modules", None) or ())
    kinds = {type(each) for each in made.modules() if type(each).__name__ in names}
    return tuple(sorted(kinds, key=lambda kind: kind.__name__)) or None


def blocks(made: torch.nn.Module) -> tuple[type[torch.nn.Module], ...]:
    """The rule where none is given: the classes of what stands in a ModuleList, or else of the module's own parts."""
    listed = [child for each in made.modules() if isinstance(each, torch.nn.ModuleList) for child in each]
    parts = [each for each in listed or made.children() if next(each.parameters(), None) is not None]
    return tuple(dict.fromkeys(type(each) for each in parts)) or (type(made),)


def positions(made: torch.nn.Module, config: Any) -> tuple[int | None, bool]:
    """How many tokens a row was meant to have at most, and whether a table of positions ends there.

    Models with rotary or relative positions have no table: they take longer rows, with a warning.
    """
    tables = [
        each.num_embeddings
        for name, each in made.named_modules()
        if isinstance(each, torch.nn.Embedding) and re.search("(?<!relative_)position|wpe$", name)
    ]
    for part in (config, config.get_text_config()):
        for key in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length"):
            most = getattr(part, key, None)
            if isinstance(most, int) and most > 0:
                return most, any(most <= rows <= most + 8 for rows in tables)  # some tables have a few rows of padding
    return None, False
