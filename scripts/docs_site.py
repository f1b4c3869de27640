"""What the documentation site has that is not in docs/: pages of the project, and those made from the package itself.

Owns where a page of the project is on the site, and how links between pages follow; where notebooks open is
``notebook_links.py``'s. A hook of mkdocs, and an
extension of griffe's, which reads docstrings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

import notebook_links
import zerosim
from zerosim.planner.conventions import CONVENTIONS

ROOT = Path(__file__).parents[1]
PAGES = {  # by where they are on the site
    "design.md": "DESIGN.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "benchmarks.md": "benchmarks/README.md",
    "steps.png": "benchmarks/steps.png",
    "notebook.ipynb": "notebook.ipynb",
    "measured_memory.csv": "recorded/measured_memory.csv",
}
CHAPTERS = {  # of the API's page, by what is in them; the rows have a page of their own, rows.md
    "Training": ("Scheme", "Stage", "MLP", "batches", "Options", "LossScale", "OutOfMemory"),
    "Optimizers": ("Adam", "AdamW", "SGD", "ParamGroup", "Schedule"),
    "What was counted": ("Report", "Event", "Rank", "Band", "Timeline"),
    "Side by side, on shapes, ahead": ("compare", "Comparison", "dry", "plan", "Planned"),
    "One's own training": ("check",),
    "Checkpoints": ("save", "load"),
}


def on_files(files: Any, *, config: Any) -> Any:
    """Add what is not in docs/."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A page with its links led to where things are on the site."""
    name = page.file.src_uri
    if name == "conventions.md":
        markdown += conventions()
    path = PAGES.get(name, f"docs/{name}")
    return relinked(notebook_links.linked(markdown, path, notebook_links.address()), path)


def relinked(markdown: str, path: str) -> str:
    """The text of a file of the project with its relative links as the site has them.

    >>> relinked("[a](../DESIGN.md#why) [b](rows.md) [c](https://x.example)", "docs/page.md")
    '[a](design.md#why) [b](rows.md) [c](https://x.example)'
    """
    places = {path: name for name, path in PAGES.items()}

    def linked(match: re.Match[str]) -> str:
        target, hash, anchor = match[1].partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        return f"]({places.get(there, posixpath.relpath(there, 'docs'))}{hash}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", linked, markdown)


def api() -> str:
    """The API's page: every public name that is no row, by chapter, from its docstring."""
    shown = {name for names in CHAPTERS.values() for name in names}
    rows = {name for name in zerosim.__all__ if zerosim._HOME.get(name) == "stages"} - {"Stage"}
    if shown != set(zerosim.__all__) - rows - {"__version__"}:
        raise ValueError(f"docs_site: CHAPTERS has every public name that is no row; got {sorted(shown)}.")
    lines = ["# API", "", "Everything is a name of `zerosim` itself: `import zerosim as zs`. The rows, `zs.DP` to"]
    lines += ["`zs.Infinity`, are in [Rows](rows.md).", ""]
    for chapter, names in CHAPTERS.items():
        lines += [f"## {chapter}", ""]
        for name in names:
            lines += [f"::: zerosim.{zerosim._HOME[name]}.{name}", ""]
    return "\n".join(lines)


def conventions() -> str:
    """Whose rules a plan may follow, as the planner has them."""
    lines = ["", "## Whose rules a plan follows", ""]
    for convention in CONVENTIONS.values():
        lines += [f"### {convention.name}: {convention.system}", ""]
        lines += [f"* {rule}" for rule in convention.why]
        lines += [f"* Not counted: {rule}" for rule in convention.left_out] + [""]
    return "\n".join(lines)


def fenced(text: str) -> str:
    """A docstring whose doctests are code, which Markdown would take for quotations.

    >>> fenced("Words.\\n\\n>>> 1 + 1\\n2")
    'Words.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    return re.sub(r"(?ms)^>>> .*?(?=\n\n|\Z)", lambda match: f"```pycon\n{match[0]}\n```", text)


class Fenced(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Each docstring, fenced."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
