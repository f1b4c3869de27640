"""The page: records in, one self-contained HTML file out, which opens offline.

Owns the words of ``report.html`` and how its parts are put together; ``page_tables.py`` has
the tables, ``assets/`` the template, the style and the script that draws the charts and the step
player. Computes nothing but units. Must not know the simulator.

What comes from outside enters as the text of an element, which is escaped when the tree is
written, or as JSON without any character that an HTML parser acts on. A policy in the page
lets the browser run these scripts alone, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from xml.etree import ElementTree as Tree

import msgspec
from msgspec.structs import replace

from zerosim.bands import MODEL_STATES, WIRES
from zerosim.records.files import write_whole
from zerosim.records.results import OWN, Check, Results
from zerosim.report import colors as palette
from zerosim.report import trace
from zerosim.report.looks import looks
from zerosim.report.page_tables import element, summary, tables, written

SHOWN_FAILURES = 200
_CLAIMS = {
    Check.SAME_TRAINING: "All schemes hold the same bits on all ranks, after every step.",
    Check.AS_PREDICTED: "Every byte and every FLOP is as predicted, on every rank and in every step.",
}


def page(results: Results) -> str:
    """The whole page. Raises ModuleNotFoundError where plotly, whose script it carries, is not installed."""
    from plotly.offline import get_plotlyjs

    room = files("zerosim.report") / "assets"
    style, script, template = (
        (room / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "template.html")
    )
    # The parser reads line ends as line feeds, and it is the parser's text that the browser hashes.
    scripts = [part.replace("\r\n", "\n").replace("\r", "\n") for part in (get_plotlyjs(), script)]
    settings = results.settings
    return Template(template).substitute(
        policy=" ".join(map(_allowed, scripts)),
        title=written(
            element("title", f"zerosim: {results.n_params:,} parameters on {_some(settings.ranks, 'virtual GPU')}")
        ),
        style=style,
        head=written(*_head(results)),
        tables=written(*tables(results)),
        foot=written(_foot(results)),
        data=_inert(_data(results)),
        plotly=scripts[0],
        script=scripts[1],
    )


def save_page(results: Results, path: Path) -> None:
    """Write ``report.html``, whole or not at all. OSError if that cannot be, ModuleNotFoundError without plotly."""
    write_whole(path, page(results).encode())


# -- for the script


def _allowed(script: str) -> str:
    """The policy's source expression for this very script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _inert(value: object) -> str:
    """JSON in which an HTML parser finds no end of a script, no comment and no entity."""
    text = msgspec.json.encode(value).decode()
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def _data(results: Results) -> dict[str, Any]:
    """What is drawn: records as they are, and the colours."""
    return {
        "settings": results.settings,
        "parameters": results.n_params,
        "itemsize": WIRES[results.settings.wire].itemsize,
        "losses": {record.name: [step.loss for step in record.steps] for record in results.schemes},
        "differences": results.differences,
        "sweep": [replace(row, events=[]) for row in results.sweep],  # these are among the runs
        "ablations": results.ablations,
        "runs": list(_runs(results)),
        "colours": palette.BANDS,
        "looks": {name: look._asdict() for name, look in looks(record.name for record in results.schemes).items()},
        "states": MODEL_STATES,
    }


def _runs(results: Results) -> Iterator[dict[str, Any]]:
    """What the player can replay: the events of a step, what they start from, and the peak that was recorded."""
    ranks = results.settings.ranks_in(results.settings.steps)
    for record in results.schemes:
        last = record.steps[-1] if record.steps and not record.out_of_memory else None
        yield {
            "ranks": ranks,
            "scheme": record.name,
            "start": trace.start(record.steps[-1].resident if record.steps else {}, record.out_of_memory),
            "events": trace.until_out_of_memory(record.events, record.out_of_memory),
            "peak": last.peak.total if last else None,
            "shortage": record.out_of_memory,
        }
    for row in results.sweep:
        if row.ranks != results.settings.ranks and row.events:
            yield {
                "ranks": row.ranks,
                "scheme": row.scheme,
                "start": row.resident_by_band,
                "events": row.events,
                "peak": row.peak,
                "shortage": None,
            }


# -- the words above and below


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _head(results: Results) -> Iterator[Tree.Element]:
    settings = results.settings
    rows = f" of {_some(settings.batch, 'row')} per rank" if settings.batch else ""
    runs = f"{_some(settings.ranks, 'virtual GPU')}: {_some(settings.steps, 'step')}{rows}"
    named = {"data": settings.data, "precision": settings.precision, "wire": settings.wire} | settings.others
    options = ", ".join(f"{name} {value}" for name, value in named.items() if value)
    card = f", cards of {settings.capacity:,} B" if settings.capacity is not None else ""
    if settings.host_capacity is not None:
        card += f", hosts of {settings.host_capacity:,} B for each rank"
    more = f", parameters are sent in {settings.wire_params}" if settings.wire_params else ""
    more += f", nodes of {settings.node}" if settings.node else ""
    more += f"; {said}" if (said := settings.said()) else ""
    yield element(
        "p",
        f"{results.n_params:,} parameters on {runs}; {options}, gathered by {settings.gather}{more}{card}.",
        class_="lead",
    )
    yield element("ul", *(_verdict(results, check) for check in _CLAIMS), class_="verdicts")
    failed = results.failures
    if failed:
        shown = [element("li", str(failure)) for failure in failed[:SHOWN_FAILURES]]
        if len(failed) > SHOWN_FAILURES:
            shown.append(element("li", f"and {len(failed) - SHOWN_FAILURES:,} more, in results.json"))
        yield element("ol", *shown, id="failures", class_="failures", tabindex="0", aria_label="Failures")
    yield from summary(results)


def _verdict(results: Results, check: str) -> Tree.Element:
    """Whether a check holds, in words, with what it claims."""
    claim, compared = _CLAIMS[Check(check)], len(results.differences)
    if check == Check.SAME_TRAINING and results.parting():
        claim = claim.replace("All schemes", "All schemes of one order")
    if count := sum(failure.check == check for failure in results.failures):
        return element("li", element("b", f"✗ {check}: fails, {_some(count, 'time')}"), f" {claim}", class_="fails")
    word, look = f"✓ {check}: holds", "holds"
    if check == Check.SAME_TRAINING:
        claim = f"{claim} {_some(compared, 'comparison')}."
    if nothing := results.nothing_compared(check):  # what holds of nothing is no finding
        word, look, claim = f"– {check}: nothing to compare", "nothing", f"{nothing[0].upper()}{nothing[1:]}."
    return element("li", element("b", word), f" {claim}", class_=look)


def _foot(results: Results) -> Tree.Element:
    settings = results.settings
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    model = "→".join(str(width) for width in settings.widths) or settings.model
    drawn = "" if settings.data == OWN else f"; data seed {settings.seed}, model seed {settings.model_seed}"
    return element("p", f"Model {model}{drawn}. Run on {results.created}. {versions}.", id="provenance")
