"""A corroboration as tables in a terminal. Takes the record; computes nothing but sums, ratios and units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import median

from rich.console import Console
from rich.table import Table

from zerosim.bands import WIRES, Band
from zerosim.records.real_ranks import BYTES, CHECKS, NAMESPACE, Corroboration, Flow, RankRecord, Run
from zerosim.report.tables import number_table, screen, verdict
from zerosim.util import sizes
from zerosim.util.words import counted

METERS = {"process": "/proc/self/io", "sockets": "the TCP sockets"}
SHORT = {"process": "by\n/proc", "sockets": "by\nsocket"}
WIDTH, UNKNOWN = 80, "?"


def show(found: Corroboration, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the verdicts, what fails first, and a table of the schemes; ``verbose`` for what is behind them.

    Of failures the first is named, which may have caused the others; ``verbose`` names all.
    """
    console = screen(console, width=WIDTH)
    settings = found.settings
    console.print(
        f"\n[bold]{found.n_params:,} parameters on {settings.ranks} real ranks[/], "
        f"{counted(settings.steps, 'step')} of {settings.batch} samples per rank; "
        f"torch {found.versions.get('torch', '?')}, {settings.backend}, over "
        f"{', '.join(found.addresses) or 'no TCP socket'}\n"
    )
    runs = [run for run in found.runs if run.ranks]  # of which a step was completed
    _verdicts(found, runs, console, verbose)
    if not verbose and runs:
        console.print(_summary(found, runs))
    tables = [_bits(found, runs), _sent(found, runs), _received(found, runs), *_memory(found, runs), _times(runs)]
    for table in tables if verbose else ():
        if table.row_count:
            console.print()
            console.print(table)
    _notes(found, runs, console)
    if not verbose:
        console.print("[dim]-v: losses, both ways of the traffic, memory by band, and times[/]")


def _summary(found: Corroboration, runs: Sequence[Run]) -> Table:
    """A line for each scheme and way of sending, all precisions together."""
    table = number_table(
        "", "scheme", "over", "compared", "differ", "sent, P", "moved, P", "unexplained",
        caption="Over: our ring, or the backend's native collectives. Compared: elements of all model states, by their "
        "bits. P: all parameters once, times (N-1)/N. Moved: what the backend makes of what it is to send. "
        "Unexplained: bytes that the kernel counted beside that and its framing.",
        left=2, tight=True,
    )  # fmt: skip
    for scheme, collectives in dict.fromkeys((run.scheme, run.collectives) for run in runs):
        here = [run for run in runs if (run.scheme, run.collectives) == (scheme, collectives)]
        compared, differing = (
            sum(sum(getattr(run, which).values()) for run in here) for which in ("compared", "differing")
        )
        flows = [flow for run in here for rank in run.ranks for flow in (rank.sent, rank.received)]
        table.add_row(
            scheme, collectives, f"{compared:,}", _marked(f"{differing:,}", differing > 0) if compared else "–",
            *(" or ".join(dict.fromkeys(_in_p(found, run)[which] for run in here)) for which in (0, 1)),
            _unexplained(flows, tuple(METERS)),
        )  # fmt: skip
    return table


def _in_p(found: Corroboration, run: Run) -> tuple[str, str]:
    """What the busiest rank's last step handed to torch, and what the backend moved of it, in P."""
    busiest, unit = _busiest([rank.sent for rank in run.ranks]), _unit(found, run)
    wrong = not busiest.simulated == busiest.booked == busiest.handed
    return _marked(f"{busiest.handed[-1] / unit:.2f}", wrong), f"{busiest.moved[-1] / unit:.2f}"


def _busiest(flows: Sequence[Flow]) -> Flow:
    return max(flows, key=lambda each: each.moved[-1] + each.framing[-1])


def _marked(text: str, wrong: bool) -> str:
    return f"[red]{text}[/]" if wrong else text


def _bits(found: Corroboration, runs: Sequence[Run]) -> Table:
    precisions = found.settings.precisions
    table = number_table(
        "Elements whose bits differ from the simulator's, and the last loss",
        "scheme", "over", "compared", "differ", *(f"loss,\n{precision}" for precision in precisions),
        caption="Compared are all model states, padding too, on every rank, at the start and after every step. "
        "Over: our ring, or the backend's native collectives.",
        left=2, tight=True,
    )  # fmt: skip
    by_precision = {(run.scheme, run.collectives, run.precision): run for run in runs}
    for scheme, collectives in dict.fromkeys((run.scheme, run.collectives) for run in runs):
        here = [by_precision.get((scheme, collectives, precision)) for precision in precisions]
        compared, differing = (
            sum(sum(getattr(run, which).values()) for run in here if run) for which in ("compared", "differing")
        )
        differ = _marked(f"{differing:,}", differing > 0) if compared else "–"
        table.add_row(scheme, collectives, f"{compared:,}", differ, *map(_loss, here))
    return table


def _loss(run: Run | None) -> str:
    return "–" if run is None else _marked(f"{run.losses[-1]:.6f}", run.losses != run.losses_simulated)


def _sent(found: Corroboration, runs: Sequence[Run]) -> Table:
    return _traffic(
        found, runs, "Bytes that the busiest rank sends in a step", lambda rank: rank.sent, ("process", "sockets"),
        "P: all parameters once, times (N-1)/N. Handed: to torch, what is for others of it; red if that is not the "
        "simulator's count and the rank's. Moved: what the backend makes of it. Kernel: that with its framing. Rest: "
        "what the kernel counted and nothing explains, over all ranks and steps: of what a rank writes (by /proc) and "
        "of what its open TCP connections carry (by socket). ?: not measured.",
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
        "scheme", "over", "handed,\nin P", "moved,\nin P", "moved", "kernel",
        *(f"rest,\n{SHORT[meter]}" for meter in meters),
        caption=caption, left=2, tight=True,
    )  # fmt: skip
    rows: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        flows = [flow(rank) for rank in run.ranks]
        busiest = _busiest(flows)
        handed, moved, unit = busiest.handed[-1], busiest.moved[-1], _unit(found, run)
        counted = next((busiest.kernel[meter][-1] for meter in meters if meter in busiest.kernel), None)
        row = (
            run.scheme, run.collectives,
            _marked(f"{handed / unit:.2f}", not busiest.simulated == busiest.booked == busiest.handed),
            f"{moved / unit:.2f}", f"{moved:,}",
            UNKNOWN if counted is None else f"{counted:,}",
            *(_unexplained(flows, (meter,)) for meter in meters),
        )  # fmt: skip
        rows.setdefault(row, []).append(run.precision)
    for (scheme, collectives, *numbers), precisions in rows.items():
        every = precisions == found.settings.precisions
        table.add_row(scheme if every else f"{scheme}, {', '.join(precisions)}", collectives, *numbers)
    return table


def _unit(found: Corroboration, run: Run) -> float:
    """P in bytes, less a rank's own share: all parameters once, in the dtype in which they travel, times (N-1)/N."""
    size = found.settings.ranks
    dtype = WIRES[found.settings.options(run.precision).wire]
    return found.n_params * dtype.itemsize * (size - 1) / size


def _unexplained(flows: Iterable[Flow], meters: Sequence[str]) -> str:
    """Bytes that meters counted and nothing explains, or failed to count, over all ranks and steps."""
    rests = [
        abs(counted - moved - framing)
        for flow in flows
        for meter in meters
        if meter in flow.kernel
        for counted, moved, framing in zip(flow.kernel[meter], flow.moved, flow.framing, strict=True)
    ]
    return _marked(f"{sum(rests):,}", any(rests)) if rests else UNKNOWN


def _memory(found: Corroboration, runs: Sequence[Run]) -> Sequence[Table]:
    tables = []
    for precision, collectives in product(found.settings.precisions, found.settings.collectives):
        here = [run for run in runs if (run.precision, run.collectives) == (precision, collectives)]
        table = number_table(
            f"Bytes that a rank holds, {precision}, {collectives}",
            "at the peak", *(run.scheme.replace(" ", "\n") for run in here),
            caption="As the ranks counted them; red if one's are not the simulator's. Process: largest resident set, "
            "Python and torch included.",
            tight=True,
        )  # fmt: skip
        for band in (str(band) for band in Band if any(str(band) in run.peak for run in here)):
            table.add_row(band, *(_held([rank.peak for rank in run.ranks], run.peak, band) for run in here))
        table.add_row("all", *(f"{sum(run.ranks[0].peak.values()):,}" for run in here), end_section=True)
        table.add_row("at rest", *(_at_rest(run) for run in here))
        table.add_row("process", *(sizes.text(max(rank.memory for rank in run.ranks)) for run in here))
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
        "scheme", "over", "precision", "min", "median", "max", "compute", "sending",
        caption="Over the steps of a run; compute and sending are medians. Waiting for a slower rank is sending, and "
        "where ranks outnumber processors, so is waiting for a processor.",
        left=3, tight=True,
    )  # fmt: skip
    for run in runs:
        totals = [each.total for each in run.times]
        seconds = (
            min(totals), median(totals), max(totals), median(each.compute for each in run.times),
            median(each.communication for each in run.times),
        )  # fmt: skip
        table.add_row(run.scheme, run.collectives, run.precision, *(f"{1e3 * each:.2f}" for each in seconds))
    return table


def _verdicts(found: Corroboration, runs: Sequence[Run], console: Console, verbose: bool) -> None:
    """Each check's verdict, what fails first with its cause, and what the other ranks said of it."""
    failed = {failure.check for failure in found.failures}
    if not found.complete:
        console.print("[bold red]✗ incomplete[/]: ", end="")
        console.print(f"{found.ended} What was found before is kept.", markup=False)
    for check in (each for each in CHECKS if each in failed):
        console.print(verdict(check, False, CHECKS[check]))
    _failures(found, console, verbose)
    for check in (each for each in CHECKS if each not in failed):
        partly = check == BYTES and not found.unmeasured.keys().isdisjoint(METERS)
        console.print(verdict(check, True if runs else None, CHECKS[check], partly=partly and bool(runs)))
    if found.errors and not verbose:
        console.print(f"What {len(found.errors)} other ranks said of it: --verbose, or corroborate.json.")
    for rank, text in found.errors.items() if verbose else ():
        console.print(f"  rank {rank} said: {text}", markup=False)


def _failures(found: Corroboration, console: Console, verbose: bool) -> None:
    """The failure that comes first, in the order in which one can cause another, and how many there are besides."""
    order = list(CHECKS)
    first = [failure for failure in found.failures if failure.scheme == found.failures[0].scheme]
    failures = sorted(first, key=lambda failure: (failure.step, order.index(failure.check)))
    failures += found.failures[len(first) :]
    for failure in failures[: len(failures) if verbose else 1]:
        console.print(f"  {failure}", style="red", markup=False, soft_wrap=not console.is_terminal)
    if len(failures) > 1 and not verbose:
        console.print(f"  and {len(failures) - 1:,} more, which may follow from it: --verbose, or corroborate.json")


def _notes(found: Corroboration, runs: Sequence[Run], console: Console) -> None:
    """By what it was counted, what was not measured, and what is not as the textbook has it."""
    counters = ["the simulator", "the ranks' ledgers", "the calls to torch"]
    counters += [where for meter, where in METERS.items() if meter not in found.unmeasured]
    if runs:
        console.print(f"Bytes were counted by {', '.join(counters[:-1])} and {counters[-1]}.")
    for name, why in found.unmeasured.items():
        what = f"bytes by {METERS[name]}" if name in METERS else f"{name} on native collectives"
        what = "connections opened and datagrams sent" if name == NAMESPACE else what
        console.print(f"{what} [bold]not measured[/]: {why}")
    if any(found.elsewhere.values()):
        console.print(
            f"During the steps this network namespace opened {found.elsewhere['opened']:,} connections and sent "
            f"{found.elsewhere['datagrams']:,} datagrams, of any program: no rank's count has what they carried."
        )
    if any(rank.sent.moved != rank.sent.handed for run in runs for rank in run.ranks):
        console.print(
            "gloo's own reduce-scatter is an all-reduce of which each rank keeps a slice: it moves twice what the "
            "textbook says, so that ZeRO-1, -2 and -3 send 3, 3 and 4 P instead of 2, 2 and 3."
        )
