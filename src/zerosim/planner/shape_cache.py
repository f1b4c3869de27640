"""Measured shapes, kept in the user's cache folder, so that a second question about a model loads no torch.

Owns the keys and the files. A key is what was measured (the configuration and how it was run) and
with what: the versions of torch and transformers and the text of the modules that measure. Whatever
is wrong with a file or with the folder, there is just nothing in it. Must not know what a shape is.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from zerosim.records.files import write_whole

FOLDER = "ZEROSIM_CACHE"  # the environment variable that names another folder; empty, nothing is kept
MOST_FILES = 1000
_MEASURING = ("torch_models", "planner")  # the folders whose text decides what is measured
_SHAPES = ("worlds/model_shapes.py", "worlds/shapes.py", "layers.py")

Kind = TypeVar("Kind")


def folder() -> Path | None:
    """Where shapes are kept, or None if nothing is."""
    if (named := os.environ.get(FOLDER)) is not None:
        return Path(named) if named else None
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:
        return None
    return Path(user_cache_path("zerosim")) / "shapes"


@cache
def versions() -> str:
    """What measures, as a digest: versions of the libraries, and the text of our own modules that measure."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in ("torch", "transformers"):
        try:
            digest.update(f"{package} {version(package)} ".encode())
        except PackageNotFoundError:
            digest.update(f"{package} none ".encode())
    files = [path for name in _MEASURING for path in sorted((root / name).glob("*.py"))]
    for path in [*files, *(root / name for name in _SHAPES)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key(*parts: Any) -> str:
    """The name of what these parts, plain values, are measured as."""
    text = json.dumps([versions(), *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def load(name: str, kind: type[Kind]) -> Kind | None:
    """What is kept under that name, if there is something sound."""
    place = folder()
    if place is None:
        return None
    try:
        return msgspec.msgpack.decode((place / f"{name}.msgpack").read_bytes(), type=kind)
    except (OSError, ValueError):
        return None


def save(name: str, value: Any) -> None:
    """Keep it, whole or not at all; the oldest files go where there are too many."""
    place = folder()
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / f"{name}.msgpack", msgspec.msgpack.encode(value))
        files = sorted(place.glob("*.msgpack"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MOST_FILES]:
            path.unlink(missing_ok=True)
    except OSError:
        return
