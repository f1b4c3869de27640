"""What all ranks must agree on before anything runs, and whom to name if they do not.

Owns the facts that are compared: the settings, the code, and the versions of whatever could make two ranks
compute different bits. Must not know how ranks are talked to.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1]  # the package's


class Disagreement(ValueError):
    """The ranks do not agree about what to do, or with which code; the message says which differs in what."""


def code_version() -> str:
    """A hash of the package's sources."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(SOURCES).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of whatever could make two ranks compute different bits."""
    return {name: importlib.metadata.version(name) for name in ("numpy", "ml_dtypes", "torch")} | {
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def differences(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """For each whose facts differ from most of the others', in what and how.

    >>> differences({"rank 0": {"steps": 2}, "rank 1": {"steps": 3}, "rank 2": {"steps": 2}})
    ['rank 1 has steps 3 where most have 2']
    """
    found = []
    for name in dict.fromkeys(name for each in facts.values() for name in each):
        values = {who: each[name] for who, each in facts.items() if name in each}
        [(usual, _)] = Counter(map(repr, values.values())).most_common(1)
        found += [
            f"{who} has {name} {value!r} where most have {usual}"
            for who, value in values.items()
            if repr(value) != usual
        ]
    return found
