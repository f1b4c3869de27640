"""The package's own public list, for the few rooms below that offer what is made above them.

A run can be plotted and written to a page, but must not know figures and pages: it asks for them by
the name that the package's public list has, and they are loaded when somebody wants them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def public(name: str) -> Any:
    """What ``zerosim.NAME`` is."""
    return getattr(import_module("zerosim"), name)
