"""A corroboration as tables in a terminal. Takes the record; computes nothing but sums, ratios and units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zerosim.bands import WIRES, Band
from zerosim.records.real_ranks import Corroboration, Flow, RankRecord, Run
from zerosim.report.tables import number_table
from zerosim.util import sizes

SHOWN_FAILURES = 20
METERS = {"process": "/proc/self/io", "sockets": "the TCP sockets"}
SHORT = {"process": "by /proc", "sockets": "by sockets"}


def show(found: Corroboration, out: Path, console: Console | None = None) -> None:
    """Print everything that was found, the verdicts last."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=120)
    settings = found.settings
    console.print(
        f"\n[bold]{found.n_params:,} parameters on {settings.ranks} real ranks[/], {settings.steps} steps of "
        f"{settings.batch} rows per rank; torch {found.versions.get('torch', '?')}, {settings.backend}, over "
        f"{', '.join(found.addresses) or 'no TCP socket'}"
    )
    runs = [run for run in found.runs if run.ranks]  # of which a step was completed
    for table in (_bits(found, runs), _sent(found, runs), _received(found, runs), *_memory(found, runs), _times(runs)):
        if table.row_count:
            console.print()
            console.print(table)
    _verdicts(found, runs, out, console)


def _marked(text: str, wrong: bool) -> str:
    return f"[red]{text}[/]" if wrong else text


def _bits(found: Corroboration, runs: Sequence[Run]) -> Table:
    precisions = found.settings.precisions
    table = number_table(
        "Elements whose bits differ from the simulator's, and the last loss",
        "scheme", "collectives", "compared", *precisions, *(f"loss, {precision}" for precision in precisions),
        caption="Compared are params, master, exp_avg and exp_avg_sq, padding too, on every rank after every step.",
        left=2, tight=True,
    )  # fmt: skip
    by_precision = {(run.scheme, run.collectives, run.precision): run for run in runs}
    for scheme, collectives in dict.fromkeys((run.scheme, run.collectives) for run in runs):
        here = [by_precision.get((scheme, collectives, precision)) for precision in precisions]
        compared = sum(sum(run.compared.values()) for run in here if run)
        cells = *(_differing(run) for run in here), *(_loss(run) for run in here)
        table.add_row(scheme, collectives, f"{compared:,}", *cells)
    return table


def _differing(run: Run | None) -> str:
    if run is None or not any(run.compared.values()):
        return "–"
    differing = sum(run.differing.values())
    return _marked(f"{differing:,}", differing > 0)


def _loss(run: Run | None) -> str:
    return "–" if run is None else _marked(f"{run.losses[-1]:.6f}", run.losses != run.losses_simulated)


def _sent(found: Corroboration, runs: Sequence[Run]) -> Table:
    return _traffic(
        found, runs, "Bytes that the busiest rank sends in a step", lambda rank: rank.sent, ("process", "sockets"),
        "P: all parameters once, times (N-1)/N. Handed: to torch, what is for others of it. Moved: what the backend "
        "makes of it. Rest: what the kernel counted and nothing explains, over all ranks and steps.",
    )  # fmt: skip


def _received(found: Corroboration, runs: Sequence[Run]) -> Table:
    return _traffic(
        found, runs, "Bytes that the busiest rank receives in a step", lambda rank: rank.received, ("sockets",),
        "/proc/self/io does not see what arrives: gloo takes it from its sockets with recv.",
    )  # fmt: skip


def _traffic(
    found: Corroboration, runs: Sequence[Run], title: str, flow: Callable[[RankRecord], Flow], meters: Sequence[str],
    caption: str,
) -> Table:  # fmt: skip
    """One way of the traffic; precisions whose numbers are the same share a row."""
    table = number_table(
        title,
        "scheme", "collectives", "precision", "simulated", "handed", "in P", "moved", "in P", "framing", "kernel",
        *(f"rest,\n{SHORT[meter]}" for meter in meters),
        caption=caption, left=3, tight=True,
    )  # fmt: skip
    rows: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        flows = [flow(rank) for rank in run.ranks]
        busiest = max(flows, key=lambda each: each.moved[-1] + each.framing[-1])
        handed, moved = busiest.handed[-1], busiest.moved[-1]
        counted = next((busiest.kernel[meter][-1] for meter in meters if meter in busiest.kernel), None)
        row = (
            run.scheme, run.collectives, f"{busiest.simulated[-1]:,}",
            _marked(f"{handed:,}", not busiest.simulated == busiest.booked == busiest.handed),
            f"{handed / _unit(found, run):.2f}", f"{moved:,}", f"{moved / _unit(found, run):.2f}",
            f"{busiest.framing[-1]:,}", "not measured" if counted is None else f"{counted:,}",
            *(_unexplained(flows, meter) for meter in meters),
        )  # fmt: skip
        rows.setdefault(row, []).append(run.precision)
    for (scheme, collectives, *numbers), precisions in rows.items():
        every = len(precisions) > 1 and precisions == found.settings.precisions
        table.add_row(scheme, collectives, "all" if every else ", ".join(precisions), *numbers)
    return table


def _unit(found: Corroboration, run: Run) -> float:
    """P in bytes, less a rank's own share: all parameters once, in the dtype in which they travel, times (N-1)/N."""
    size = found.settings.ranks
    dtype = WIRES[found.settings.options(run.precision).wire]
    return found.n_params * dtype.itemsize * (size - 1) / size


def _unexplained(flows: Iterable[Flow], meter: str) -> str:
    """Bytes that a meter counted and nothing explains, or failed to count, over all ranks and steps."""
    total = 0
    for flow in flows:
        if meter not in flow.kernel:
            return "not measured"
        each = zip(flow.kernel[meter], flow.moved, flow.framing, strict=True)
        total += sum(abs(counted - moved - framing) for counted, moved, framing in each)
    return _marked(f"{total:,}", total > 0)


def _memory(found: Corroboration, runs: Sequence[Run]) -> list[Table]:
    tables = []
    for precision in found.settings.precisions:
        here = [run for run in runs if run.precision == precision]
        table = number_table(
            f"Bytes that a rank holds, {precision}",
            "at the peak", *(f"{run.scheme.replace(' ', chr(10))}\n{run.collectives}" for run in here),
            caption="As the ranks counted them; red if one's are not the simulator's. Process: largest resident set, "
            "Python and torch included.",
            tight=True,
        )  # fmt: skip
        for band in (str(band) for band in Band if any(str(band) in run.peak for run in here)):
            table.add_row(band, *(_held([rank.peak for rank in run.ranks], run.peak, band) for run in here))
        table.add_row("all", *(f"{sum(run.ranks[0].peak.values()):,}" for run in here), end_section=True)
        table.add_row("at rest", *(_at_rest(run) for run in here))
        table.add_row("process", *(sizes.text(max(rank.rss for rank in run.ranks)) for run in here))
        if here:
            tables.append(table)
    return tables


def _held(held: Sequence[dict[str, int]], simulated: dict[str, int], band: str) -> str:
    found = {each.get(band, 0) for each in held}
    return _marked(f"{max(found):,}", found != {simulated.get(band, 0)})


def _at_rest(run: Run) -> str:
    return _marked(f"{sum(run.ranks[0].resident.values()):,}", any(rank.resident != run.resident for rank in run.ranks))


def _times(runs: Sequence[Run]) -> Table:
    table = number_table(
        "Milliseconds of a step on the rank that took longest",
        "scheme", "collectives", "precision", "min", "median", "max", "compute", "communication", "steps",
        caption="Over the steps of a run; compute and communication are medians. Waiting for a slower rank is\n"
        "communication, and where ranks outnumber processors, so is waiting for a processor.",
        left=3, tight=True,
    )  # fmt: skip
    for run in runs:
        totals = sorted(each.total for each in run.times)
        middle = len(totals) // 2
        table.add_row(
            run.scheme, run.collectives, run.precision,
            *(f"{1e3 * each:.2f}" for each in (totals[0], totals[middle], totals[-1])),
            f"{1e3 * sorted(each.compute for each in run.times)[middle]:.2f}",
            f"{1e3 * sorted(each.communication for each in run.times)[middle]:.2f}",
            str(len(totals)),
        )  # fmt: skip
    return table


def _verdicts(found: Corroboration, runs: Sequence[Run], out: Path, console: Console) -> None:
    """Each check's verdict, what was not measured, the failures by name, and where it is written."""
    console.print()
    failed = {failure.check for failure in found.failures}
    compared = sum(sum(run.compared.values()) for run in runs)
    counters = ["the simulator", "the ranks' ledgers", "the calls to torch"]
    counters += [where for meter, where in METERS.items() if meter not in found.unmeasured]
    for check, claim in (
        ("bits", f"every rank holds what the simulator says, after every step: {compared:,} elements, as raw bits"),
        ("losses", "the mean over ranks is the simulator's, to the last bit"),
        ("bytes", f"the same according to {', '.join(counters[:-1])} and {counters[-1]}, none unexplained"),
        ("memory", "every rank holds what the simulator says, band by band, at rest and at the peak"),
    ):
        verdict = "[bold red]FAILS[/]" if check in failed else "[bold green]holds[/]"
        verdict += "" if found.complete else ", as far as it went"
        console.print(f"{check} {verdict if runs else '[bold]not measured[/]'}: {claim}")
    for name, why in found.unmeasured.items():
        what = f"bytes by {METERS[name]}" if name in METERS else f"{name} on native collectives"
        console.print(f"{what} [bold]not measured[/]: {why}")
    if any(rank.sent.moved != rank.sent.handed for run in runs for rank in run.ranks):
        console.print(
            "gloo's own reduce-scatter is an all-reduce of which each rank keeps a slice: it moves twice what the "
            "textbook says, so that ZeRO-1, -2 and -3 send 3, 3 and 4 P instead of 2, 2 and 3."
        )
    for failure in found.failures[:SHOWN_FAILURES]:
        console.print(f"  {failure}", style="red", markup=False)
    if len(found.failures) > SHOWN_FAILURES:
        console.print(f"  and {len(found.failures) - SHOWN_FAILURES:,} more, in corroborate.json")
    if not found.complete:
        console.print("[bold red]incomplete[/]: ", end="")
        console.print(f"{found.ended} What was found before is kept.", markup=False)
    console.print(f"written to {out}/: corroborate.json", markup=False)
