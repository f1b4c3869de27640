"""Write README.md and docs/argument.md, and the figures that they show, from the recordings.

``docs/*.md.j2`` have the prose; every number in them is an expression over ``recorded/``, and
a claim in words stands only while the recordings bear it out: one that they contradict stops
the writing. Measures nothing.

    python scripts/write_readme.py
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
import tomllib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure

import moving_picture
import notebook_links
import readme_tables
import record
from readme_views import FRAME, Lab, Planned, Real
from zerosim.bands import FP16
from zerosim.records.files import write_whole
from zerosim.records.plan import Plan
from zerosim.records.real_ranks import Corroboration
from zerosim.records.results import OutOfMemoryRecord, Results
from zerosim.report import plots
from zerosim.util import sizes

ROOT = Path(__file__).parents[1]
PAGES = {  # by what is written
    ROOT / "README.md": ROOT / "docs" / "README.md.j2",
    ROOT / "docs" / "argument.md": ROOT / "docs" / "argument.md.j2",
}
README, ARGUMENT = PAGES
TORCHTITAN = Fraction("82.4") * 2**30  # bytes that the allocator of a published run had reserved at most
CARD = 80 * 10**9  # bytes: a large card, for the one example that is arithmetic and not measured

WIDTH = 120  # columns


class Contradiction(ValueError):
    """The prose says what the recordings do not."""


def claim(holds: bool, words: str) -> str:
    """``words``, if what they say holds. Contradiction otherwise."""
    if not holds:
        raise Contradiction(f"A page claims {words!r}; the recordings say otherwise. Rewrite the sentence.")
    return words


def shortage(of: OutOfMemoryRecord) -> str:
    """What a rank asked for when memory ran out."""
    return f"{of.asked:,} B of {of.band} for {of.unit}, with {sum(of.held.values()):,} B held"


def recordings() -> dict[str, Lab | Real | Planned | None]:
    """All recordings by name, None for one that has not been made. Contradiction if a check in one does not hold."""
    views: dict[str, Lab | Real | Planned | None] = {}
    for name in record.RECORDINGS:
        found = record.load(name)
        if isinstance(found, Plan):
            views[name] = Planned(found)
            continue
        if found is not None and found.failures:
            raise Contradiction(f"recorded/{name}.json: {found.failures[0]}")
        if isinstance(found, Corroboration):
            views[name] = Real(found)
        else:
            views[name] = None if found is None else Lab(found)
    return views


def environment(mark: Callable[[Any], Any] = lambda value: value) -> jinja2.Environment:
    """What templates are rendered in; ``mark`` is put around everything that an expression yields."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        autoescape=False, finalize=mark,
    )  # fmt: skip
    environment.filters |= {
        "n": lambda count: f"{count:,}",
        "B": lambda count: f"{count:,} B",
        "size": lambda nbytes: sizes.text(nbytes),
        "gib": lambda nbytes: sizes.text(nbytes, binary=True, digits=4),
        "billions": lambda count: f"{count / 10**9:g} billion",
        "loss": lambda loss: f"{loss:.6f}",
        "tiny": lambda value: f"{value:.1e}",
        "ms": lambda seconds: f"{1e3 * seconds:.1f} ms",
        "percent": lambda share: f"{100 * share:.0f} %",
        "shortage": shortage,
    }
    return environment


def names() -> dict[str, Any]:
    """What an expression of the template can use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return recordings() | {
        "tables": readme_tables,
        "claim": claim,
        "ratio": lambda one, other: f"{one / other:.2f}",
        "per_param": readme_tables.per_param,
        "in_p": readme_tables.in_p,
        "on_top": readme_tables.on_top,
        "command": lambda name: f"zerosim {record.RECORDINGS[name].arguments}",
        "python": project["requires-python"].removeprefix(">="),
        "fp16_digits": np.finfo(FP16).nmant + 1,
        "card_bytes": CARD,
        "frame": FRAME,
        "planted": sum(map(planted, ("faults", "faults_axes", "faults_step"))),
        "mutants": mutants(),
        "torchtitan": TORCHTITAN,
        "reserved": f"{float(TORCHTITAN / 2**30)} GiB",
    }


def planted(name: str) -> int:
    """How many faults a table of them has."""
    return len(tomllib.loads((ROOT / "tests" / "checks" / f"{name}.toml").read_text())["fault"])


def mutants() -> dict[str, Any] | None:
    """What came of changing the source in one place at a time, if that has been recorded."""
    path = ROOT / "recorded" / "mutants.json"
    if not path.exists():
        return None
    modules = json.loads(path.read_text()).values()
    tried, survived = sum(each["tried"] for each in modules), sum(len(each["survived"]) for each in modules)
    return {"tried": tried, "killed": tried - survived}


def render(page: Path = README, mark: Callable[[Any], Any] = lambda value: value) -> str:
    """A page's template as the recordings fill it."""
    return environment(mark).from_string(PAGES[page].read_text()).render(names())


def written(page: Path) -> str:
    """A page as it is committed: filled, with where its notebooks open, in lines of even length."""
    return reflow(notebook_links.linked(render(page), page.relative_to(ROOT).as_posix(), notebook_links.address()))


def reflow(markdown: str) -> str:
    """With paragraphs and list items in lines of even length; code, tables, headings and the like as they are."""
    blocks = re.split(r"\n{2,}|(```.*?```)", markdown.strip(), flags=re.DOTALL)
    return "\n\n".join(_reflow(block.strip("\n")) for block in blocks if block and block.strip()) + "\n"


def _reflow(block: str) -> str:
    if re.match(r"```|[|#!<]", block):
        return block
    return "\n".join(_fill(" ".join(item.split())) for item in re.split(r"\n(?=\* )", block))


def _fill(text: str) -> str:
    """One paragraph or list item: no line begins with a unit, or with what Markdown takes for a list or a heading."""
    glued = re.sub(r" (?=([-+*#>=]+|\d+[.)]) )|(?<=\d) (?=(B|P|ms|%)(?!\w))", "\0", text)
    lines = textwrap.fill(
        glued, WIDTH, subsequent_indent="  " * text.startswith("* "), break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


# The figures that the pages show: the stem of the file, the recording, and which of its figures.
FIGURES = {
    "timeline": ("lab", "timeline"),
    "memory": ("lab", "memory"),
    "traffic": ("lab", "traffic"),
    "loss": ("lab", "loss"),
    "card": ("card", "timeline"),
}


def figure(name: str) -> Figure:
    """One of ``FIGURES``, drawn."""
    recording, which = FIGURES[name]
    return _drawn(recording)[which]


@functools.cache
def _drawn(recording: str) -> dict[str, Figure]:
    found = record.load(recording)
    assert isinstance(found, Results)
    return plots.figures(found)


def main() -> None:
    """Write it all."""
    for page in PAGES:
        write_whole(page, written(page).encode())
    plots.save_figures({name: figure(name) for name in FIGURES}, ROOT / "docs")
    moving_picture.main()


if __name__ == "__main__":
    main()
