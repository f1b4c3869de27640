"""What stands behind a plan's answer, as tables: when the peak is, bands, collectives, and the least time of a step.

Takes records; computes nothing but ratios and units.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.markup import escape
from rich.table import Table

from zerosim.bands import Band
from zerosim.records.plan import Cluster, Network, Plan
from zerosim.report import plan_verdict as verdict
from zerosim.report.tables import number_table
from zerosim.util import sizes

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")


def details(plan: Plan) -> Iterator[Table]:
    """The tables, of all N and then of each that was asked for; none that is empty."""
    tables = [_instants(plan)]
    for ranks in plan.question.asked:
        tables += [_bands(plan, ranks), _traffic(plan, ranks), _times(plan, ranks)]
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
    return table


def _times(plan: Plan, ranks: int) -> Table:
    cluster = plan.cluster
    table = number_table(
        f"The least time of a step over rings, a bound and no forecast, N = {ranks:,}",
        "scheme", "computing", "sending", "without overlap", "with overlap", "bound by",
        caption=_cluster(cluster, plan.question.network) if cluster else "",
    )  # fmt: skip
    table.columns[5].justify = "left"
    for cell in plan.at(ranks):
        if (time := cell.time) is not None:
            table.add_row(
                cell.name,
                _seconds(time.compute),
                _seconds(time.bandwidth + time.latency),
                _seconds(time.serial),
                _seconds(time.overlapped),
                time.binding,
            )
    return table


def _cluster(cluster: Cluster, network: Network) -> str:
    given = any(value is not None for name, value in msgspec.structs.asdict(network).items() if name != "efficiency")
    rest = "what was not given is " if given else ""
    return (
        f"{cluster.peak / 1e12:,.4g} TFLOP/s ({cluster.dtype}) × {cluster.efficiency:g}; "
        f"{cluster.within / 1e9:,.4g} GB/s within a node of {cluster.node}, "
        f"{cluster.between / 1e9:,.4g} GB/s between nodes; {cluster.hop_within * 1e6:,.4g} and "
        f"{cluster.hop_between * 1e6:,.4g} µs a hop; {rest}as of the {cluster.card}"
        f"{', for want of a --card' if cluster.assumed else ''}. Overlap hides no more than the schedule lets it: "
        "ZeRO-3 gathers as far ahead as --prefetch says."
    )


def _seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError("the last unit takes everything")
