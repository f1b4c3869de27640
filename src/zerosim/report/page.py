"""The page: records in, one self-contained HTML file out, which opens offline.

Owns the words of ``report.html``; ``page_tables.py`` has the tables, ``assets/`` the body, the styles and the
scripts that draw, ``offline.py`` puts them together. Computes nothing but units and ratios. Must not know the
simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Tree

from msgspec.structs import replace

from zerosim.bands import MODEL_STATES, WIRES
from zerosim.records.files import write_whole
from zerosim.records.results import OWN, Check, EventRecord, Results
from zerosim.report import band_colors, trace
from zerosim.report import colors as palette
from zerosim.report.lanes import lanes
from zerosim.report.looks import looks
from zerosim.report.offline import element, offline, written
from zerosim.report.ownership import bands_of, declared
from zerosim.report.page_tables import summary, tables
from zerosim.stages import Stage
from zerosim.util import sizes
from zerosim.util.words import counted

STYLES = ("page.css",)
SCRIPTS = (
    "chart.js",
    "replay.js",
    "lockstep.js",
    "words.js",
    "grid.js",
    "lanes.js",
    "depth.js",
    "player.js",
    "charts.js",
    "page.js",
)
SHOWN_FAILURES = 200
_CLAIMS = {
    Check.SAME_TRAINING: "All schemes hold the same bits on all ranks, after every step.",
    Check.AS_PREDICTED: "Every byte and every FLOP is as predicted, on every rank and in every step.",
}


def page(results: Results) -> str:
    """The whole page."""
    ranks = counted(results.settings.ranks, "virtual GPU")
    parts = {
        "opening": written(_opening(results)),
        "verdicts": written(*_verdicts(results)),
        "summary": written(_asked(results), *summary(results)),
        "tables": written(*tables(results)),
        "foot": written(_foot(results)),
    }
    title = element("title", f"zerosim: {results.n_params:,} parameters on {ranks}")
    return offline(title, "lab.html", parts, _data(results), STYLES, SCRIPTS)


def save_page(results: Results, path: Path) -> None:
    """Write ``report.html``, whole or not at all. OSError if that cannot be."""
    write_whole(path, page(results).encode())


# -- for the script


def _data(results: Results) -> dict[str, Any]:
    """What is drawn: records as they are, who owns what, and how bands and schemes look."""
    names = [record.name for record in results.schemes]
    return {
        "settings": results.settings,
        "parameters": results.n_params,
        "itemsize": WIRES[results.settings.wire].itemsize,
        "losses": {record.name: [step.loss for step in record.steps] for record in results.schemes},
        "differences": results.differences,
        "sweep": [replace(row, events=[]) for row in results.sweep],  # these are among the runs
        "ablations": results.ablations,
        "held": list(_held(results)),
        "runs": list(_runs(results)),
        "bands": [{"name": band, "color": f"var({band_colors.variable(band)})"} for band in _bands(results)],
        "looks": {name: {"mark": look.symbol, "dash": look.dash or None} for name, look in looks(names).items()},
        "kinds": bands_of(),
        "states": MODEL_STATES,
    }


def _bands(results: Results) -> list[str]:
    """All bands that can be drawn, in the order of a stack: the palette's, and whatever else a file has."""
    logs = [record.events for record in results.schemes] + [row.events for row in results.sweep]
    moved = (event.name for log in logs for event in log if event.kind in ("hold", "free"))
    held = (band for each in _held(results) for side in ("rest", "peak") for band in each[side])
    return list(dict.fromkeys([*map(str, palette.BANDS), *held, *moved]))


def _held(results: Results) -> Iterator[dict[str, Any]]:
    """What each scheme holds at rest and at its peak; where memory ran out, what it held then and asked for."""
    for record in results.schemes:
        shortage = record.out_of_memory
        last = record.steps[-1] if record.steps and not shortage else None
        yield {
            "scheme": record.name,
            "rest": last.resident if last else {},
            "peak": last.peak.by_band if last else shortage.on_card if shortage else {},
            "shortage": shortage,
        }


def _runs(results: Results) -> Iterator[dict[str, Any]]:
    """What the player can replay: the events of a step, what they start from, and the peak that was recorded."""
    settings = results.settings
    ranks = settings.ranks_in(settings.steps)
    for record in results.schemes:
        last = record.steps[-1] if record.steps and not record.out_of_memory else None
        events = trace.until_out_of_memory(record.events, record.out_of_memory)
        yield {
            "start": trace.start(record.steps[-1].resident if record.steps else {}, record.out_of_memory),
            "peak": last.peak.total if last else None,
            "shortage": record.out_of_memory,
        } | _run(record.row, ranks, settings.node, events)
    rows = {record.name: record.row for record in results.schemes}
    for row in results.sweep:
        if row.ranks != settings.ranks and row.events and row.scheme in rows:
            start = {"start": row.resident_by_band, "peak": row.peak, "shortage": None}
            yield start | _run(rows[row.scheme], row.ranks, settings.node, row.events)


def _run(row: Stage, ranks: int, node: int | None, events: Sequence[EventRecord]) -> dict[str, Any]:
    return {
        "scheme": row.name,
        "ranks": ranks,
        "row": declared(row, ranks, node),
        "events": events,
        "lanes": lanes(events),
    }


# -- the words above and below


def _opening(results: Results) -> Tree.Element:
    """What ZeRO is, for somebody who has never heard of it, and what came of it here."""
    text = (
        f"To train one model on {counted(results.settings.ranks, 'GPU')}, plain data parallelism keeps all of it on "
        "every GPU: the parameters, their gradients and what the optimizer remembers of each. ZeRO lets a GPU keep "
        "only its own share of these and fetch the rest when it is needed"
    )
    whole = results.base()
    rest = {record.name: sum(step.resident.values()) for record, step in results.completed()}
    if whole and len(rest) > 1 and (least := min(rest, key=lambda name: rest[name])) != whole.name:
        text += (
            f": here {least} holds {sizes.text(rest[least])} between steps where {whole.name} holds "
            f"{sizes.text(rest[whole.name])}"
        )
        if not results.failures and not results.nothing_compared(Check.SAME_TRAINING) and not results.parting():
            text += ", and after every step both have learned the same, bit for bit"
    return element("p", f"{text}.", class_="lead")


def _asked(results: Results) -> Tree.Element:
    """What was run, in one sentence."""
    settings = results.settings
    rows = f" of {counted(settings.batch, 'row')} per rank" if settings.batch else ""
    runs = f"{counted(settings.ranks, 'virtual GPU')}: {counted(settings.steps, 'step')}{rows}"
    named = {"data": settings.data, "precision": settings.precision, "wire": settings.wire} | settings.others
    options = ", ".join(f"{name} {value}" for name, value in named.items() if value)
    card = f", cards of {settings.capacity:,} B" if settings.capacity is not None else ""
    if settings.host_capacity is not None:
        card += f", hosts of {settings.host_capacity:,} B for each rank"
    more = f", parameters are sent in {settings.wire_params}" if settings.wire_params else ""
    more += f", nodes of {settings.node}" if settings.node else ""
    more += f"; {said}" if (said := settings.said()) else ""
    return element(
        "p",
        f"{results.n_params:,} parameters on {runs}; {options}, gathered by {settings.gather}{more}{card}.",
        class_="asked",
    )


def _verdicts(results: Results) -> Iterator[Tree.Element]:
    """Whether each check holds, and what failed."""
    yield element("ul", *(_verdict(results, check) for check in _CLAIMS), class_="cards")
    failed = results.failures
    if failed:
        shown = [element("li", str(failure)) for failure in failed[:SHOWN_FAILURES]]
        if len(failed) > SHOWN_FAILURES:
            shown.append(element("li", f"and {len(failed) - SHOWN_FAILURES:,} more, in results.json"))
        yield element("ol", *shown, id="failures", class_="failures", tabindex="0", aria_label="Failures")


def _verdict(results: Results, check: str) -> Tree.Element:
    """Whether a check holds, in words, with what it claims."""
    claim, compared = _CLAIMS[Check(check)], len(results.differences)
    if check == Check.SAME_TRAINING and results.parting():
        claim = claim.replace("All schemes", "All schemes of one order")
    if any(record.out_of_memory for record in results.schemes):
        claim = claim.replace("All schemes", "All schemes that the cards have room for").replace("step", "step made")
    if count := sum(failure.check == check for failure in results.failures):
        return element("li", element("b", f"✗ {check}: fails, {counted(count, 'time')}"), f" {claim}", class_="fails")
    word, look = f"✓ {check}: holds", "holds"
    if check == Check.SAME_TRAINING:
        claim = f"{claim} {counted(compared, 'comparison')}."
    if nothing := results.nothing_compared(check):  # what holds of nothing is no finding
        word, look, claim = f"– {check}: nothing to compare", "nothing", f"{nothing[0].upper()}{nothing[1:]}."
    return element("li", element("b", word), f" {claim}", class_=look)


def _foot(results: Results) -> Tree.Element:
    settings = results.settings
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    model = "→".join(str(width) for width in settings.widths) or settings.model
    drawn = "" if settings.data == OWN else f"; data seed {settings.seed}, model seed {settings.model_seed}"
    return element("p", f"Model {model}{drawn}. Run on {results.created}. {versions}.", id="provenance")
