"""What stands behind a plan's answer, as tables: when the peak is, bands, collectives, and how long a step takes.

Takes records; computes nothing but ratios and units.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from zerosim.bands import Band
from zerosim.records.plan import Plan
from zerosim.report import plan_time
from zerosim.report import plan_verdict as verdict
from zerosim.report.tables import number_table
from zerosim.util import sizes

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")


def details(plan: Plan) -> Iterator[Table]:
    """The tables, of all N and then of each that was asked for; none that is empty."""
    tables = [_instants(plan)]
    for ranks in plan.question.asked:
        tables += [_bands(plan, ranks), _traffic(plan, ranks), plan_time.table(plan, ranks)]
    yield from (table for table in tables if table.row_count)


def _instants(plan: Plan) -> Table:
    question = plan.question
    table = number_table("When the peak is, and what most of it is", "N", "scheme", "peak", "in", "mostly", left=0)
    for column in (1, 3, 4):
        table.columns[column].justify = "left"
    for ranks in question.gpus:
        for index, cell in enumerate(plan.at(ranks)):
            largest = cell.peak.largest
            share = cell.peak.by_band.get(largest, 0) / max(1, cell.peak.total)
            table.add_row(
                f"{ranks:,}" if not index else "", escape(cell.name), verdict.size(question, cell.peak.total),
                escape(verdict.instant(cell.peak)), f"{largest} {share:.0%}",
            )  # fmt: skip
        table.add_section()
    return table


def _bands(plan: Plan, ranks: int) -> Table:
    cells = plan.at(ranks)
    table = number_table(
        f"At the peak by band (at rest in brackets, if not as much), N = {ranks:,}",
        "band",
        *(cell.name for cell in cells),
    )
    question = plan.question
    for band in Band:
        if any(band in cell.peak.by_band or band in cell.resident for cell in cells):
            row = []
            for cell in cells:
                peak, rest = cell.peak.by_band.get(band, 0), cell.resident.get(band, 0)
                text = verdict.size(question, peak) if peak else "–"
                row.append(f"{text} ({verdict.size(question, rest)})" if rest not in (0, peak) else text)
            table.add_row(str(band), *row)
    table.add_section()
    table.add_row("in all", *(sizes.text(cell.peak.total, digits=4) for cell in cells))
    table.add_row("", *(sizes.text(cell.peak.total, binary=True, digits=4) for cell in cells))
    return table


def _traffic(plan: Plan, ranks: int) -> Table:
    cells = plan.at(ranks)
    table = number_table(f"Sent by each GPU in a step, N = {ranks:,}", "collective", *(cell.name for cell in cells))
    keys = dict.fromkeys((moved.collective, moved.band) for cell in cells for moved in cell.traffic)
    for collective, band in sorted(keys, key=lambda key: (COLLECTIVES.index(key[0]), key[1])):
        sent = [
            sum(moved.sent for moved in cell.traffic if (moved.collective, moved.band) == (collective, band))
            for cell in cells
        ]
        table.add_row(f"{collective} of {band}", *(verdict.size(plan.question, each) if each else "–" for each in sent))
    if len(keys) > 1:
        table.add_section()
        table.add_row("in all", *(verdict.size(plan.question, cell.sent) for cell in cells))
    if any(cell.between for cell in cells):
        table.add_row("leaves each node", *(verdict.size(plan.question, cell.between) for cell in cells))
    return table
