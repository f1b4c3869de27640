"""An offline page: one HTML file of a body, styles, scripts and data, that asks nobody for anything.

Owns how these parts are put together, how elements are written, and the policy that lets a browser run these
scripts alone. Must not know what a page shows.

What comes from outside enters as the text of an element, which is escaped when the tree is written, or as JSON
without any character that an HTML parser acts on.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from xml.etree import ElementTree as Tree

import msgspec

from zerosim.report import band_colors

Cell = str | Tree.Element
STYLES, SCRIPTS = ("base.css",), ("draw.js",)  # that every page begins with


def offline(
    title: Tree.Element,
    body: str,
    parts: Mapping[str, str],
    data: object,
    styles: Sequence[str],
    scripts: Sequence[str],
) -> str:
    """The page: assets by name, ``parts`` as HTML for the places of its ``body``, ``data`` for the scripts, which find
    it in a script element of type application/json."""
    # The parser reads line ends as line feeds, and it is the parser's text that the browser hashes.
    sources = [_asset(name).replace("\r\n", "\n").replace("\r", "\n") for name in (*SCRIPTS, *scripts)]
    return Template(_asset("page.html")).substitute(
        title=written(title),
        body=Template(_asset(body)).substitute(parts),
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


# -- elements


def element(tag: str, *children: Cell, **attributes: str) -> Tree.Element:
    """An element with its text and children; ``class_`` is the attribute class, ``aria_label`` aria-label."""
    element = Tree.Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Tree.Element):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child
    return element


def written(*elements: Tree.Element) -> str:
    """The elements as HTML."""
    return "\n".join(Tree.tostring(element, encoding="unicode", method="html") for element in elements)
