"""Models by name: two dozen common ones that are known offline, and the hub's.

Owns the names and where their figures come from (``known_models.json``). Must not know what is done
with a configuration. Only a config.json is ever fetched from a hub, and no code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("known_models.json")


@dataclass(frozen=True)
class KnownModel:
    """A model's hub name, its configuration as far as sizes depend on it, and who says so."""

    name: str
    config: dict[str, Any]
    source: str


@cache
def _known() -> dict[str, KnownModel]:
    models = [KnownModel(**each) for each in json.loads(FILE.read_text())]
    by_name = {model.name.lower(): model for model in models}
    short = {name.rpartition("/")[2]: model for name, model in by_name.items()}
    return by_name | {name.removesuffix("-hf"): model for name, model in short.items()} | short


def names() -> list[str]:
    """The hub names that are known offline."""
    return list(dict.fromkeys(model.name for model in _known().values()))


def find(name: str) -> KnownModel | None:
    """The model of that name, whatever its case and with or without its maker's name before it, or -hf behind it."""
    return _known().get(name.strip().lower())


def from_hub(name: str) -> Path | None:
    """The config.json of one of the hub's models, from its cache or fetched; None where there is none to be had."""
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        return None
    cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json", etag_timeout=3))
    except Exception:  # noqa: BLE001 - offline, no such model, or one behind a gate: of many kinds, by its version
        return None
