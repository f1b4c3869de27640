"""What a caller of ``zerosim.plan`` passes, as the planner has it, and the planner's words in the caller's.

Owns these translations. Must not know how a plan is made or shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from zerosim.api.models import is_module
from zerosim.model import MLP
from zerosim.planner import cards
from zerosim.planner import models as sources
from zerosim.planner.model_source import ModelSource, Perceptron
from zerosim.records.question import Finetuning
from zerosim.util import arguments, sizes

Gpus = int | str | Sequence[int]
_VALUES = "full|none|selective|bf16|fp32|optimizer|params|deepspeed|fsdp2|megatron|zero"
_OPTION = re.compile(rf"--([a-z][a-z-]*)(?: (\d[\w.]*(?:/s)?|[A-Z]\w*|{_VALUES})\b)?")
_ALIASES = {"scheme": "rows", "stage": "rows"}


def typed_gpus(gpus: Gpus) -> list[str]:
    """Numbers of GPUs as they are typed. TypeError for what can't be."""
    if isinstance(gpus, bool) or not isinstance(gpus, (int, str, Sequence)):
        raise TypeError(f"plan(gpus): a number of GPUs, several, or a range as in '2-64'; got {gpus!r}.")
    return [gpus] if isinstance(gpus, str) else [str(each) for each in ([gpus] if isinstance(gpus, int) else gpus)]


def card_named(name: str | None) -> cards.Card | None:
    """The preset of that name. ValueError for one that there is not."""
    if name is None:
        return None
    known = {each.name.lower(): each for each in cards.CARDS.values()}
    if str(name).lower() not in known:
        raise ValueError(
            f"plan(card): one of {', '.join(each.name for each in known.values())}; got {name!r}. For another card "
            f'say what it has, as in memory="80GB".'
        )
    return known[name.lower()]


def nbytes_of(memory: int | str | None, preset: int | None, option: str = "memory") -> tuple[int | None, bool]:
    """Bytes of a card, and whether they were given in powers of two."""
    if memory is None:
        return preset, False
    if not isinstance(memory, str):
        return arguments.integer("plan", option, memory), False
    try:
        return sizes.parse(memory), "i" in memory.lower()
    except ValueError as error:
        raise ValueError(f"plan({option}): {error}") from error


def rate_of(name: str, rate: float | str | None) -> float | None:
    """Bytes per second. ValueError for a text that is no rate."""
    if not isinstance(rate, str):
        return rate
    try:
        return float(sizes.parse(rate.strip().removesuffix("/s")))
    except ValueError as error:
        raise ValueError(f"plan({name}): {error}") from error


def name_of(model: Any) -> str:
    """What the question calls the model."""
    return os.fspath(model) if isinstance(model, (str, Path)) else type(model).__name__


def source_of(model: Any, finetuning: Finetuning, **parts: Any) -> ModelSource:
    """What the planner takes a model from."""
    described = isinstance(model, (str, Path, dict))
    if finetuning.frozen_dtype is not None and not described and not is_module(model):
        raise ValueError(
            f"plan(frozen_dtype): nothing of a {type(model).__name__} is frozen. Leave --frozen-dtype out."
        )
    if not described and msgspec.structs.replace(finetuning, frozen_dtype=None) != Finetuning():
        raise ValueError(
            f"plan({'lora' if finetuning.lora else 'other_parts'}): this is for a config.json or a model's name; a "
            f"{type(model).__name__} says itself what is trained. Leave it out."
        )
    if is_module(model):
        return _module(model, finetuning.frozen_dtype, **parts)
    if unused := [name for name, value in parts.items() if value is not None]:
        raise ValueError(f"plan({unused[0]}): this is for a torch.nn.Module; got {type(model).__name__}. Leave it out.")
    if isinstance(model, MLP):
        return Perceptron(model.widths)
    if isinstance(model, (str, Path)):
        return sources.read(os.fspath(model), finetuning)
    if isinstance(model, dict):
        from zerosim.planner.config_source import ConfigSource

        name = str(model.get("_name_or_path") or model.get("model_type") or "config")
        return ConfigSource(model, name, name, finetuning)
    if isinstance(model, Sequence):
        return sources.read(",".join(map(str, model)))
    raise TypeError(
        f"plan(model): a config.json, a torch.nn.Module, an MLP, a list of layer sizes, or 'package.module:factory'; "
        f"got {type(model).__name__}."
    )


def _module(module: Any, frozen_dtype: str | None, *, inputs: Any, wrap: Any, loss: Any, target: Any) -> ModelSource:
    from zerosim.planner import python_path as paths

    given = {"inputs": inputs, "wrap": wrap, "loss": loss, "target": target}
    made = {"module": module} | {name: value for name, value in given.items() if value is not None}
    if next(module.parameters(), None) is None:
        raise ValueError(f"plan(model): a {type(module).__name__} has no parameters, so there is nothing to train.")
    return paths.source(made, "torch.nn.Module", frozen_dtype)


# -- the caller's words


def in_python(text: str) -> str:
    """What is said of a command line's options, said of keywords.

    >>> in_python("takes a card: --memory 80GB, or --card. Leave --seq out and use --micro-batch.")
    'takes a card: memory="80GB", or card=. Leave seq= out and use micro_batch=.'
    """

    def keyword(found: re.Match[str]) -> str:
        name, value = found.groups()
        name = _ALIASES.get(name, name).replace("-", "_")
        if value is not None and not value.isdigit():
            value = f'"{value}"'
        return f"{name}={value or ''}"

    return _OPTION.sub(keyword, text).replace("plan(MODEL)", "plan(model)").replace("MODEL is", "model is")


@contextmanager
def in_callers_words() -> Iterator[None]:
    """Errors of the planner, in Python's words."""
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        said = in_python(str(error))
        if said == str(error):
            raise
        raise type(error)(said) from error
