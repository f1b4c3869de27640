"""How long a step takes, as a sentence and a table: about so long, and at least so long. Takes records."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.markup import escape
from rich.table import Table

from zerosim.records.plan import Cluster, Plan, StepEstimate, Time
from zerosim.records.question import Network
from zerosim.report.tables import number_table


def sentence(plan: Plan, ranks: int) -> Iterator[str]:
    """How long a step takes under the row that shards least of those that fit, or where no card is named, of all."""
    cells = [cell for cell in plan.at(ranks) if cell.fits is not False and cell.time and cell.time.estimate]
    if plan.cluster is None or plan.question.memory is None or not cells:
        return
    cell = cells[0]
    assert cell.time is not None
    assumed = " (assumed)" if plan.cluster.assumed else ""
    more = ", without the optimizer's pass on the host" if "optimizer" in cell.row.offload else ""
    yield f"→ a step takes {_both(cell.time)} with {escape(cell.name)} on {ranks:,} {plan.cluster.card}{assumed}{more}"


def table(plan: Plan, ranks: int) -> Table:
    """By row: what is expected, what is least, and what both are made of."""
    cluster = plan.cluster
    estimate = next((cell.time.estimate for cell in plan.at(ranks) if cell.time), None)
    error = "" if estimate is None or estimate.error is None else f" ±{100 * estimate.error:.0f} %"
    table = number_table(
        f"How long a step takes over rings, N = {ranks:,}",
        "scheme", f"about{error}", "at least", "computing", "sending", "bound by",
        caption=_cluster(cluster, plan.question.network, estimate, _host(plan, ranks)) if cluster else "",
    )  # fmt: skip
    table.columns[5].justify = "left"
    for cell in plan.at(ranks):
        if (time := cell.time) is not None:
            table.add_row(
                cell.name,
                _about(time.estimate),
                _seconds(time.overlapped),
                _seconds(time.compute),
                _seconds(time.bandwidth + time.latency),
                time.binding,
            )
    return table


def _both(time: Time) -> str:
    assert time.estimate is not None
    error = time.estimate.error
    band = "error unknown" if error is None else f"±{100 * error:.0f} %"
    return f"about {_seconds(time.estimate.seconds)} ({band}), at least {_seconds(time.overlapped)},"


def _about(estimate: StepEstimate | None) -> str:
    return "–" if estimate is None else _seconds(estimate.seconds)


def _host(plan: Plan, ranks: int) -> str:
    """What of the host is in the time, and what is not."""
    if not any(cell.host is not None for cell in plan.at(ranks)):
        return ""
    return (
        " What is copied over a card's link to the host is taken to go while the rest does. Left out is the "
        "optimizer's pass, which the host's processors make."
    )


def _cluster(cluster: Cluster, network: Network, estimate: StepEstimate | None, host: str) -> str:
    given = any(value is not None for name, value in msgspec.structs.asdict(network).items() if name != "efficiency")
    rest = "what was not given is " if given else ""
    return (
        f"At least: {cluster.peak / 1e12:,.4g} TFLOP/s ({cluster.dtype}), "
        f"{cluster.within / 1e9:,.4g} GB/s within a node of {cluster.node}, "
        f"{cluster.between / 1e9:,.4g} GB/s between nodes; {cluster.hop_within * 1e6:,.4g} and "
        f"{cluster.hop_between * 1e6:,.4g} µs a hop; {rest}as of the {cluster.card}"
        f"{', for want of a --card' if cluster.assumed else ''}. Computing and sending are those of the bound; overlap "
        f"hides no more than the schedule lets it: ZeRO-3 gathers as far ahead as --prefetch says.{host} "
        f"{_rests(cluster, estimate)}"
    ).rstrip()


def _rests(cluster: Cluster, estimate: StepEstimate | None) -> str:
    """What the estimate rests on."""
    if estimate is None:
        return ""
    if cluster.efficiency is not None:
        return f"About: {cluster.efficiency:g} of the peak, as stated, and the links as published runs have them."
    if estimate.error is None:
        return (
            "About: at the speeds that published runs of language models reached, dense ones of 0.1 to 70 billion "
            "parameters, all trained in bf16 on 8 to 1,024 A100 or H100; of anything else the error is unknown."
        )
    return (
        "About: at the speeds that published runs of language models of 0.1 to 70 billion parameters reached, nine of "
        f"ten of which took up to {100 * estimate.error:.0f} % more or less; docs/time.md has them all."
    )


def _seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError("the last unit takes everything")
