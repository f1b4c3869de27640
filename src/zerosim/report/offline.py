"""An offline page: one HTML file of a template, styles, scripts and data, that asks nobody for anything.

Owns how these parts are put together and the policy that lets a browser run these scripts alone. Must not know
what a page shows.

What comes from outside enters as the text of an element, which is escaped when the tree is written, or as JSON
without any character that an HTML parser acts on.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template

import msgspec

from zerosim.report import band_colors

STYLES, SCRIPTS = ("base.css",), ("draw.js", "chart.js")  # that every page begins with


def offline(
    template: str, parts: Mapping[str, str], data: object, styles: Sequence[str], scripts: Sequence[str]
) -> str:
    """The page: assets by name, ``parts`` as HTML for the template's other places, ``data`` for the scripts.

    The template has places for ``$policy``, ``$style``, ``$data``, which goes into a script element of type
    application/json, and ``$scripts``.
    """
    # The parser reads line ends as line feeds, and it is the parser's text that the browser hashes.
    sources = [_asset(name).replace("\r\n", "\n").replace("\r", "\n") for name in (*SCRIPTS, *scripts)]
    return Template(_asset(template)).substitute(
        parts,
        policy=" ".join(map(_allowed, sources)),
        style="\n".join([band_colors.variables(), *(_asset(name) for name in (*STYLES, *styles))]),
        data=_inert(data),
        scripts="\n".join(f"<script>{source}</script>" for source in sources),
    )


def _asset(name: str) -> str:
    return (files("zerosim.report") / "assets" / name).read_text(encoding="utf-8")


def _allowed(script: str) -> str:
    """The policy's source expression for this very script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _inert(value: object) -> str:
    """JSON in which an HTML parser finds no end of a script, no comment and no entity."""
    text = msgspec.json.encode(value).decode()
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
