"""MODEL, as it is typed: a list of layer sizes, a configuration file, a name, or a Python path.

Owns which of them it is. What needs torch is loaded only where something has to be measured.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import msgspec

from zerosim.planner import config_file, known_models
from zerosim.planner.config_source import PLAIN, ConfigSource
from zerosim.planner.model_source import ModelSource, Perceptron
from zerosim.records.question import Finetuning
from zerosim.util import arguments

MOST_LAYERS = 10_000
FORMS = (
    "MODEL is a list of layer sizes as in 4096,16384,4096; a Hugging Face config.json, or the folder that has one; a "
    "model's name as in meta-llama/Llama-3.1-8B; or a Python path as in package.module:factory"
)
_NUMBERS = re.compile(r"[\s\d,.+xX_-]+")
_PYTHON = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def read(text: str, finetuning: Finetuning | None = None) -> ModelSource:
    """The source that MODEL names; of a configuration, with that of it trained.

    ValueError, with what would work, if it is none or cannot be read; ModuleNotFoundError without the
    extra that it needs.
    """
    path = Path(text)
    if _NUMBERS.fullmatch(text) and not path.exists():
        _plain(finetuning, "a list of layer sizes")
        return Perceptron(_widths(text))
    if _PYTHON.fullmatch(text) and not path.exists():
        finetuning = finetuning or Finetuning()
        _plain(msgspec.structs.replace(finetuning, frozen_dtype=None), "a Python path")
        arguments.installed("plan(MODEL)", "torch", extra="torch", otherwise=PLAIN)
        from zerosim.planner import python_path

        return python_path.from_python(text, finetuning.frozen_dtype)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        return _named(text, path, finetuning)
    return ConfigSource(config_file.read(path), str(path), _label(path), finetuning)


def _named(text: str, path: Path, finetuning: Finetuning | None) -> ModelSource:
    """The model of that name: one that is known here, or one of the hub's."""
    if (known := known_models.find(text)) is not None:
        return ConfigSource(known.config, known.name, known.name, finetuning, notes=(f"its figures: {known.source}",))
    if _HUB.fullmatch(text) and path.suffix != ".json" and (found := known_models.from_hub(text)) is not None:
        return ConfigSource(config_file.read(found), text, text, finetuning)
    names = known_models.names()
    near = difflib.get_close_matches(text.lower(), [name.lower() for name in names], n=2, cutoff=0.6)
    meant = " Is " + " or ".join(name for name in names if name.lower() in near) + " meant?" if near else ""
    raise ValueError(
        f"plan(MODEL): there is no {path}, and no model of that name is known here, in the hub's cache, or online."
        f"{meant} {FORMS}."
    )


def _label(path: Path) -> str:
    """The name of the file, or of the folder that it is in where it has the name that they all have."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _plain(finetuning: Finetuning | None, what: str) -> None:
    """Refuse what only a configuration can be given."""
    if finetuning is not None and finetuning.frozen_dtype is not None:
        raise ValueError(f"plan(frozen_dtype): nothing of {what} is frozen. Leave --frozen-dtype out.")
    if finetuning is not None and finetuning != Finetuning():
        raise ValueError(
            f"plan(lora): --lora and --other-parts are for a config.json or a model's name; {what} says itself what is "
            f"trained (requires_grad). Leave them out."
        )


def _widths(text: str) -> list[int]:
    sides = [side.strip() for side in re.split(r"[,xX-]" if "," not in text else ",", text)]
    rule = "plan(MODEL): layer sizes are two or more positive integers, as in 64,128,128,64"
    if len(sides) < 2 or not all(side.isascii() and side.isdecimal() and len(side) < 19 for side in sides):
        raise ValueError(f"{rule}; got {text!r}.")
    widths = [int(side) for side in sides]
    if 0 in widths:
        raise ValueError(f"{rule}; got {text!r}, in which a layer has size 0.")
    if len(widths) > MOST_LAYERS:
        raise ValueError(f"{rule}; got {len(widths):,} of them, and more than {MOST_LAYERS:,} are not planned.")
    return widths
