"""MODEL, as it is typed: a list of layer sizes, a configuration file, or a Python path.

Owns which of them it is. What needs torch is loaded only for a model that does.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from zerosim.planner import config_file
from zerosim.planner.model_source import ModelSource, Perceptron

MOST_LAYERS = 10_000
FORMS = (
    "MODEL is a list of layer sizes as in 4096,16384,4096; a Hugging Face config.json, or the folder that has one; or "
    "a Python path as in package.module:factory"
)
_NUMBERS = re.compile(r"[\s\d,.+xX_-]+")
_PYTHON = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def read(text: str) -> ModelSource:
    """The source that MODEL names.

    ValueError, with what would work, if it is none or cannot be read; ModuleNotFoundError without the
    extra that it needs.
    """
    path = Path(text)
    if _NUMBERS.fullmatch(text) and not path.exists():
        return Perceptron(_widths(text))
    if _PYTHON.fullmatch(text) and not path.exists():
        _require("torch", extra="torch")
        from zerosim.planner import python_path

        return python_path.from_python(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"plan(MODEL): there is no {path}. {FORMS}. Nothing is fetched from a network: for a model's name on a "
            f"hub, fetch its config.json first."
        )
    values = config_file.read(path)
    _require("torch", "transformers", extra="plan")
    from zerosim.planner import hf_models

    return hf_models.from_values(values, str(path))


def _require(*packages: str, extra: str) -> None:
    absent = [package for package in packages if find_spec(package) is None]
    if absent:
        raise ModuleNotFoundError(
            f"plan(MODEL): this model takes {' and '.join(absent)}. Install zerosim[{extra}], or pass a list of layer "
            f"sizes."
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
