"""A lab's results as tables in a terminal. Takes records; computes nothing but ratios and units."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from zerosim.bands import WIRES
from zerosim.ledger import Phase
from zerosim.records.results import Check, Results
from zerosim.report.tables import number_table, screen

SHOWN_FAILURES = 20


def show(results: Results, out: Path, console: Console | None = None) -> None:
    """Print everything that was found, the verdicts last."""
    console = screen(console, width=110)
    settings = results.settings
    console.print(
        f"\n[bold]{results.n_params:,} parameters on {settings.ranks} virtual GPUs[/], {settings.steps} steps of "
        f"{settings.batch} rows per rank; data {settings.data}, precision {settings.precision}, wire {settings.wire}"
    )
    for table in (
        _summary(results),
        _alike(results),
        _bands(results, "at rest"),
        _bands(results, "at the peak"),
        _traffic(results),
        _work(results),
        _sweep(results),
        _ablations(results),
    ):
        if table.row_count:
            console.print()
            console.print(table)
    _verdicts(results, out, console)


def _compared(measured: int, predicted: int) -> str:
    """A measured count, marked where it is not what was predicted."""
    return f"{measured:,}" if measured == predicted else f"[red]{measured:,} (predicted {predicted:,})[/]"


def _summary(results: Results) -> Table:
    base = results.base()
    whole = sum(base.steps[-1].resident.values()) if base else None
    table = number_table(
        "Bytes per parameter, and what one rank sends per step",
        "scheme", "at rest", f"× {base.name}" if base else "×", "peak", "with activations", "sent, B", "in P",
        "final loss", "out of memory at",
        caption="P: all parameters once, in the wire's dtype. Peaks are the highest instant, not the end of the step.",
    )  # fmt: skip
    unit = results.n_params * WIRES[results.settings.wire].itemsize
    for record in results.schemes:
        if record.out_of_memory:
            shortage = record.out_of_memory
            table.add_row(record.name, *["–"] * 7, f"{shortage.band}, {shortage.unit}: {shortage.asked:,} B asked")
            continue
        step = record.steps[-1]
        resident = sum(step.resident.values())
        table.add_row(
            record.name,
            f"{resident / results.n_params:.4f}",
            f"{resident / whole:.4f}" if whole else "–",
            f"{step.peak_without_activations.total / results.n_params:.4f}",
            f"{step.peak.total / results.n_params:.4f}",
            f"{step.sent():,}",
            f"{step.sent() / unit:.4f}",
            f"{step.loss:.6f}",
            "",
        )
    if not any(record.out_of_memory for record in results.schemes):
        table.columns.pop()
    return table


def _alike(results: Results) -> Table:
    bands = list(results.differences[0].differing) if results.differences else []
    table = number_table(
        "Same training: the largest difference between the schemes over all ranks (and elements whose bits differ)",
        "step", *bands, "loss",
    )  # fmt: skip
    for step in dict.fromkeys(difference.step for difference in results.differences):
        here = [difference for difference in results.differences if difference.step == step]
        cells = []
        for band in bands:
            differing = sum(difference.differing[band] for difference in here)
            largest = max(difference.largest[band] for difference in here)
            cells.append(f"[red]{largest:.2g} ({differing:,})[/]" if differing else "0 (0)")
        losses = {f"{record.steps[step - 1].loss:.6f}" for record, _ in results.completed()}
        table.add_row(str(step), *cells, " or ".join(sorted(losses)))
    return table


def _bands(results: Results, when: str) -> Table:
    """Bands down, schemes across: measured, and marked where the prediction is another."""
    columns = []
    for record, step in results.completed():
        if when == "at rest":
            columns.append((record.name, step.resident, record.prediction.resident))
        else:
            columns.append((record.name, step.peak.by_band, record.prediction.peak))
    table = number_table(f"As predicted: bytes per rank {when}", "band", *(name for name, _, _ in columns))
    for band in dict.fromkeys(band for _, *sides in columns for side in sides for band in side):
        table.add_row(band, *(_compared(got.get(band, 0), expected.get(band, 0)) for _, got, expected in columns))
    if columns:
        table.add_section()
        table.add_row("measured", *(f"{sum(got.values()):,}" for _, got, _ in columns))
        table.add_row("predicted", *(f"{sum(expected.values()):,}" for _, _, expected in columns))
    return table


def _traffic(results: Results) -> Table:
    table = number_table(
        "As predicted: bytes that one rank sends per step",
        "scheme", "collective", "of", "messages", "sent", "predicted", "of which padding",
        caption="The busiest rank's; every rank's was checked.",
    )  # fmt: skip
    for record, step in results.completed():
        for moved in step.traffic:
            table.add_row(
                record.name, moved.collective, moved.band, f"{moved.messages:,}", f"{max(moved.sent):,}",
                f"{record.prediction.traffic.get(moved.collective, {}).get(moved.band, 0):,}",
                f"{max(moved.padding):,}",
            )  # fmt: skip
    return table


def _work(results: Results) -> Table:
    phases = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMUNICATION]
    table = number_table(
        "FLOPs per rank and step, and median milliseconds per step",
        "scheme", *(f"FLOPs, {phase}" for phase in phases[:3]), *(f"ms, {phase}" for phase in phases), "ms per rank",
        caption="One process takes all ranks' turns: the milliseconds are the sum over ranks, not parallel time.",
    )  # fmt: skip
    for record, step in results.completed():
        times = [sorted(each.seconds.get(phase, 0.0) for each in record.steps) for phase in phases]
        medians = [1e3 * each[len(each) // 2] for each in times]
        table.add_row(
            record.name,
            *(_compared(step.flops.get(phase, 0), record.prediction.flops.get(phase, 0)) for phase in phases[:3]),
            *(f"{median:.2f}" for median in medians),
            f"{sum(medians) / results.settings.ranks:.3f}",
        )
    return table


def _sweep(results: Results) -> Table:
    names = list(dict.fromkeys(row.scheme for row in results.sweep))
    table = number_table(
        "The sweep: bytes per parameter at rest / at the peak, activations left out",
        "N", *names,
        caption="Each of these numbers, and what was sent, was compared with its prediction as an integer.",
    )  # fmt: skip
    for ranks in dict.fromkeys(row.ranks for row in results.sweep):
        cells = []
        for row in (row for row in results.sweep if row.ranks == ranks):
            resident, peak = row.resident / results.n_params, row.peak_without_activations / results.n_params
            cells.append(f"{resident:.4f} / {peak:.4f}" if row.fits else "out of memory")
        table.add_row(str(ranks), *cells)
    return table


def _ablations(results: Results) -> Table:
    table = number_table("What changes when a rule is broken on purpose", "rule", "found")
    table.columns[1].justify = "left"
    found = results.ablations
    if gather := found.whole_model_gather:
        states, gathered, other = (
            nbytes / results.n_params for nbytes in (gather.states, gather.gathered, gather.zero2_resident)
        )
        table.add_row(
            "ZeRO-3 gathers the whole model at once",
            f"{states:.4f} + {gathered:.4f} = {states + gathered:.4f} B per parameter; ZeRO-2 rests at {other:.4f}",
        )
    if narrow := found.narrow_wire:
        table.add_row(
            f"blocks travel in {narrow.wire}, rounded at every hop",
            f"{narrow.sent:,} B instead of {narrow.sent_fp32:,}; {narrow.gradient_differing:,} averaged gradients "
            f"differ, by up to {narrow.gradient_largest_relative:.2e} of the largest",
        )
    for precision, drift in found.whole_model_bucket.items():
        table.add_row(
            f"one scheme's bucket is the whole model ({precision})",
            f"{drift.differing[0]:,} parameters differ after one step, by up to {drift.largest[0]:.1e}; "
            f"{drift.differing[-1]:,} after {len(drift.differing)}, by up to {drift.largest[-1]:.1e}",
        )
    return table


def _verdicts(results: Results, out: Path, console: Console) -> None:
    """The verdict of each check, the failures by name, and where everything was written."""
    console.print()
    compared = len(results.differences)
    failed = {failure.check for failure in results.failures}
    for check, claim in (
        (Check.SAME_TRAINING, f"all schemes alike, bit for bit, on all ranks: {compared} comparisons"),
        (Check.AS_PREDICTED, "every byte and FLOP as predicted, on every rank, in every step and for every N"),
    ):
        verdict = "[bold red]FAILS[/]" if check in failed else "[bold green]holds[/]"
        if check not in failed and (nothing := results.nothing_compared(check)):
            verdict, claim = "nothing to compare", nothing
        console.print(f"{check}: {verdict}: {claim}")
    for failure in results.failures[:SHOWN_FAILURES]:
        console.print(f"  {failure}", style="red", markup=False)
    if len(results.failures) > SHOWN_FAILURES:
        console.print(f"  and {len(results.failures) - SHOWN_FAILURES:,} more, in results.json")
    console.print(
        f"written to {out}/: report.html to look at, results.json, trace.json for Perfetto, and the figures",
        markup=False,
    )
