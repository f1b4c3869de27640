"""The planner's page: a grid of steps that were run in, one HTML file with sliders out, which opens offline.

Owns the words of the page and what its script is told: for each cell the numbers of its record, and its log as the
grid has it. Computes nothing but units. Must not know the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as Tree

from zerosim.bands import Band
from zerosim.records.plan import Cell, Plan
from zerosim.records.plan_grid import Axes, Grid, GridCell
from zerosim.report import plan_verdict as verdict
from zerosim.report.band_colors import variable
from zerosim.report.offline import element, offline, written
from zerosim.report.plan_console import RESERVED
from zerosim.util import sizes

# What a cell is told as, in this order; cells.js has the same names.
FIELDS = (
    "row", "ranks", "rows", "sequence", "checkpoint", "verdict", "peak", "unit", "phase", "rest", "room", "sent",
    "between", "about", "least", "tokens", "host", "resident", "moves", "sizes",
)  # fmt: skip


def page(grid: Grid) -> str:
    """The whole page."""
    plan = grid.plan
    return offline(
        element("title", f"{plan.model.name}: what training takes"),
        "plan.html",
        {
            "head": written(element("h1", plan.model.name)),
            "lead": written(*_lead(grid)),
            "asked": written(_asked(plan)),
            "rules": written(*_rules(grid)),
            "foot": written(_foot(plan)),
        },
        told(grid),
        ["plan.css"],
        ["cells.js", "plan.js"],
    )


def told(grid: Grid) -> dict[str, Any]:
    """What the script is told: the axes, the card, the names that logs count by, and every cell."""
    plan, axes = grid.plan, grid.axes
    question = plan.question
    places = {str(band): place for place, band in enumerate(Band)}
    held = {*grid.bands, *(band for each in grid.cells for band in each.cell.resident)}
    return {
        "axes": {
            "row": [row.name for row in axes.rows],
            "ranks": axes.ranks,
            "rows": axes.micro_batches,
            "sequence": axes.sequences,
            "checkpoint": axes.checkpoints,
        },
        "asked": _start(plan, axes),
        "card": question.card or "",
        "memory": question.memory,
        "reserve": question.reserve,
        "bands": [
            {"name": str(band), "color": f"var({variable(band)})"} for band in sorted(held, key=places.__getitem__)
        ],
        "counted": grid.bands,
        "phases": grid.phases,
        "units": grid.units,
        "moves": grid.moves,
        "logs": grid.logs,
        "fields": FIELDS,
        "cells": [[_cell(grid, each)[field] for field in FIELDS] for each in grid.cells],
        "remedies": {str(band): remedy for band, remedy in verdict.REMEDIES.items()},
    }


def _start(plan: Plan, axes: Axes) -> dict[str, int]:
    """Where the sliders stand at first: what was asked, with the row that the plan's verdict is about."""
    ranks = min(plan.question.asked)
    first = plan.first_fit(ranks) or min(plan.at(ranks), key=lambda cell: cell.peak.total)
    return {
        "row": axes.rows.index(first.row),
        "ranks": axes.ranks.index(ranks),
        "rows": axes.micro_batches.index(plan.question.micro_batch),
        "sequence": axes.sequences.index(plan.model.sequence),
        "checkpoint": axes.checkpoints.index(plan.question.checkpoint),
    }


def _cell(grid: Grid, each: GridCell) -> dict[str, Any]:
    axes, cell = grid.axes, each.cell
    time = cell.time
    return {
        "row": axes.rows.index(cell.row),
        "ranks": axes.ranks.index(cell.ranks),
        "rows": axes.micro_batches.index(each.micro_batch),
        "sequence": axes.sequences.index(each.sequence),
        "checkpoint": axes.checkpoints.index(each.checkpoint),
        "verdict": said(cell),
        "peak": cell.peak.total,
        "unit": cell.peak.unit,
        "phase": cell.peak.phase,
        "rest": cell.at_rest,
        "room": cell.room,
        "sent": cell.sent,
        "between": cell.between,
        "about": None if time is None or time.estimate is None else time.estimate.seconds,
        "least": None if time is None else time.overlapped,
        "tokens": _tokens(grid.plan, each),
        "host": None if cell.host is None else [cell.host.peak, cell.host.room],
        "resident": cell.resident,
        "moves": each.moves,
        "sizes": each.sizes,
    }


def said(cell: Cell) -> str:
    """What a cell's verdict is called: fits, tight, host, none, or nothing where it is not known."""
    if cell.fits:
        return "fits"
    if cell.tight:
        return "tight"
    if cell.room is None:
        return ""
    return "host" if cell.room >= 0 else "none"


def _tokens(plan: Plan, each: GridCell) -> int | None:
    """Of a step on all GPUs; None where rows have no length."""
    if each.sequence is None:
        return None
    times = plan.question.micro_batches(each.cell.ranks, each.micro_batch)
    return times * each.cell.ranks * each.micro_batch * each.sequence


# -- the words around


def _lead(grid: Grid) -> Iterator[Tree.Element]:
    plan, axes = grid.plan, grid.axes
    question, model = plan.question, plan.model
    trained = f", of which {model.trainable:,} are trained" if model.frozen else ""
    card = "no card was named, so that nothing is said of what fits"
    if question.memory:
        reserved = f", of which {sizes.text(question.reserve)} are reserved" if question.reserve else ""
        card = f"{question.card or 'a card'} of {sizes.both(question.memory)}{reserved}"
    loss = f", loss in {question.loss}" if model.sequence else ""
    yield element(
        "p",
        f"{model.params:,} parameters{trained}; {question.convention}’s rules, {plan.precision}, {plan.kept} bytes a "
        f"parameter at rest, {question.optimizer}{loss}; {card}.",
        class_="lead",
    )
    choices = [
        f"{len(axes.rows)} schemes",
        f"{len(axes.ranks)} numbers of GPUs",
        f"{len(axes.micro_batches)} micro-batches",
    ]
    choices += [f"{len(axes.sequences)} lengths"] * (axes.sequences != [None])
    yield element(
        "p",
        f"Behind the sliders are {len(grid.cells):,} training steps that were run on shapes, one for each choice that "
        f"makes sense: {', '.join(choices)}, {len(axes.checkpoints)} ways of checkpointing. Each number is the sum of "
        f"what such a step held or sent; none comes from a formula.",
        class_="note",
    )


def _asked(plan: Plan) -> Tree.Element:
    """The cells of what was asked, for those without scripts."""
    head = element("tr", *(element("th", name) for name in ("scheme", "GPUs", "at rest, B", "peak, B", "sent, B", "")))
    body = [
        element(
            "tr",
            element("th", cell.name),
            *(element("td", f"{count:,}") for count in (cell.ranks, cell.at_rest, cell.peak.total, cell.sent)),
            element("td", said(cell)),
        )
        for ranks in plan.question.asked
        for cell in (*plan.at(ranks), *plan.beside(ranks))
    ]
    return element("table", element("thead", head), element("tbody", *body))


def _rules(grid: Grid) -> Iterator[Tree.Element]:
    plan = grid.plan
    yield element("p", f"{RESERVED[0].upper()}{RESERVED[1:]}.")
    for title, rules in (
        (f"The rules of {plan.question.convention}", plan.why),
        ("What of it is not counted", plan.left_out),
        ("Of the model", plan.model.notes),
        ("What was not run, and why", grid.left_out),
    ):
        if rules:
            listed = element("ul", *(element("li", rule) for rule in rules))
            yield element("details", element("summary", title), listed)


def _foot(plan: Plan) -> Tree.Element:
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return element("p", f"Planned on {plan.created}. {versions}.", id="provenance")
