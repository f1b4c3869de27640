"""A lab's results in a terminal, the answer first. Takes records; computes nothing but ratios and units."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zerosim.bands import WIRES
from zerosim.records.failures import folded
from zerosim.records.results import Check, OutOfMemoryRecord, Results
from zerosim.report.lab_details import details
from zerosim.report.tables import number_table, screen, verdict
from zerosim.util.words import counted

WIDTH = 80  # where there is no terminal to ask
SHOWN, SHOWN_VERBOSE = 5, 20  # kinds of failure of a check


def show(
    results: Results, out: Path | None, console: Console | None = None, *, verbose: bool = False, drawn: bool = True
) -> None:
    """Print what was run, the verdicts, a table of the schemes and where it was written, if it was.

    ``verbose`` is for all tables; ``drawn`` says whether figures were.
    """
    console = screen(console, width=WIDTH)
    settings = results.settings
    console.print(
        f"\n[bold]{results.n_params:,} parameters on {settings.ranks} virtual GPUs[/], "
        f"{counted(settings.steps, 'step')} of {settings.batch} rows per rank; "
        f"data {settings.data}, precision {settings.precision}, wire {settings.wire}"
        + (f", parameters sent in {settings.wire_params}" if settings.wire_params else "")
        + (f"; nodes of {settings.node}" if settings.node else "")
        + (f"; {said}" if (said := settings.said()) else "")
    )
    console.print()
    _answer(results, console, verbose=verbose)
    for table in details(results) if verbose else ():
        console.print()
        console.print(table)
    if out is not None:
        figures = "and the figures" if drawn else "(figures take matplotlib: pip install 'zerosim[plots]')"
        console.print(f"written to {out}/: report.html, results.json, trace.json {figures}", markup=False)
    if not verbose:
        console.print("[dim]-v: each step, band and collective, the work, the sweep over N, broken rules[/]")


def shown(results: Results) -> str:
    """The verdicts and the table of the schemes, as text."""
    console = Console(file=io.StringIO(), highlight=False, width=WIDTH)
    _answer(results, console)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _answer(results: Results, console: Console, *, verbose: bool = False) -> None:
    for line in verdicts(results, SHOWN_VERBOSE if verbose else SHOWN):
        console.print(line, soft_wrap=not console.is_terminal)  # in a file a failure is one line
    if parting := results.parting():
        console.print(f"- orders differ: {parting}")
    console.print(summary(results, whole=verbose))
    if said := results.naive():
        console.print(said)
    for record in results.schemes:
        if record.out_of_memory:
            console.print(f"{escape(record.name)} runs out of memory {_shortage(record.out_of_memory)}")


def _shortage(found: OutOfMemoryRecord) -> str:
    """When, and with what; of the host it says so."""
    when = f"in step {found.step}, {found.unit}" if found.step else f"before the first step, {found.unit}"
    where = " on the host" * (found.place == "host")
    return escape(f"{when}: {found.band} of {found.asked:,} B, with {sum(found.held.values()):,} held{where}")


def summary(results: Results, *, whole: bool = False) -> Table:
    """A row for each scheme: what it holds and sends, and the last loss; ``whole`` for more columns."""
    base = results.base()
    states = sum(base.steps[-1].resident.values()) if base else None
    unit = results.n_params * WIRES[results.settings.wire].itemsize
    rows = {}
    for record in results.schemes:
        if record.out_of_memory:
            rows[record.name] = dict.fromkeys(["at rest", "peak", "sent, B", "in P", "final loss"], "–")
            continue
        step = record.steps[-1]
        resident = sum(step.resident.values())
        rows[record.name] = {
            "at rest": f"{resident / results.n_params:.4f}",
            "peak": f"{step.peak_without_activations.total / results.n_params:.4f}",
            "sent, B": f"{step.sent():,}",
            "in P": f"{step.sent() / unit:.4f}",
            "final loss": f"{step.loss:.6f}",
            "with activations": f"{step.peak.total / results.n_params:.4f}",
            f"× {base.name if base else ''}": f"{resident / states:.4f}" if states else "–",
        }
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))[: None if whole else 5]
    settings = results.settings
    last = settings.ranks_in(settings.steps)
    caption = "B per parameter at rest and at the peak, without activations. Sent by one rank in a step: P is all "
    caption += "parameters once, as they travel."
    if last != settings.ranks:
        caption += f" All of the last step, on the {last} ranks on which the run was resumed."
    table = number_table("", "scheme", *map(escape, columns), caption=caption)
    for name, row in rows.items():
        table.add_row(escape(name), *(row.get(column, "–") for column in columns))
    return table


def verdicts(results: Results, most: int) -> Iterator[Text]:
    """The verdict of each check, what fails first, and below it what failed first, each kind of failure once."""
    each = "rank, step and N" if results.sweep else "rank and step"
    alike = "all schemes of one order" if results.parting() else "all schemes"
    claims = {
        Check.SAME_TRAINING: f"{alike} alike, bit for bit: {len(results.differences)} comparisons",
        Check.AS_PREDICTED: f"every byte and FLOP, for every {each}",
    }
    failures = {check: [each for each in results.failures if each.check == check] for check in claims}
    for check, claim in sorted(claims.items(), key=lambda item: not failures[item[0]]):
        if count := len(failures[check]):
            yield verdict(check, False, f"{count:,} values differ" if count > 1 else "one value differs")
        elif nothing := results.nothing_compared(check):
            yield verdict(check, None, nothing)
        else:
            yield verdict(check, True, claim)
        kinds = folded(failures[check])
        for kind in kinds[:most]:
            yield Text(f"  {kind}", style="red")
        if len(kinds) > most:
            yield Text(f"  and {len(kinds) - most:,} other kinds, in results.json")
