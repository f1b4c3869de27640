"""What stands behind a lab's verdicts, as tables: bands, collectives, work, the sweep, and rules broken on purpose.

Owns these tables. Takes records; computes nothing but ratios and units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from zerosim.counts import Phase
from zerosim.records.results import Results
from zerosim.report.tables import number_table

MOST_STEPS = 12  # that a table has lines for, if nothing happened in the others
MOST_ACROSS = 6  # schemes side by side; more of them stand below each other


def details(results: Results) -> Iterator[Table]:
    """Every table that has something to say."""
    for table in (
        _alike(results),
        _between_orders(results),
        _stepwise(results),
        *_bands(results, "at rest"),
        *_bands(results, "at the peak"),
        _traffic(results),
        _links(results),
        _work(results),
        _sweep(results),
        _ablations(results),
    ):
        if table.row_count:
            yield table


def _compared(measured: int, predicted: int) -> str:
    """A measured count, marked where it is not what was predicted."""
    return f"{measured:,}" if measured == predicted else f"[red]{measured:,} (predicted {predicted:,})[/]"


def _told(steps: Iterable[int], notable: Iterable[int] = ()) -> tuple[list[int], str]:
    """The steps that a table shows, of so many that it would be no screen, and what it says of the others.

    Those are the first and the last, and between them the first of the ``notable``.
    """
    every = list(dict.fromkeys(steps))
    if len(every) <= MOST_STEPS:
        return every, ""
    few = MOST_STEPS // 3
    middle = [step for step in dict.fromkeys(notable) if step in set(every[few:-few])]
    told = every[:few] + middle[: MOST_STEPS - 2 * few] + every[-few:]
    return told, f"Of {len(every):,} steps {len(told)} are shown; results.json has all."


def _alike(results: Results) -> Table:
    bands = list(results.differences[0].differing) if results.differences else []
    unlike = [difference.step for difference in results.differences if any(difference.differing.values())]
    steps, caption = _told((difference.step for difference in results.differences), unlike)
    table = number_table(
        "Same training: the largest difference between the schemes over all ranks (and elements whose bits differ)"
        if not results.between_orders
        else "Same training: the largest difference between the schemes of one order (and elements whose bits differ)",
        "step", *bands, "loss", caption=caption,
    )  # fmt: skip
    for step in steps:
        here = [difference for difference in results.differences if difference.step == step]
        cells = []
        for band in bands:
            differing = sum(difference.differing[band] for difference in here)
            largest = max(difference.largest[band] for difference in here)
            cells.append(f"[red]{largest:.2g} ({differing:,})[/]" if differing else "0 (0)")
        losses = {f"{record.steps[step - 1].loss:.6f}" for record, _ in results.completed()}
        table.add_row(str(step), *cells, " or ".join(sorted(losses)))
    return table


def _between_orders(results: Results) -> Table:
    """How far rows of other orders are from the first: no failure, but measured."""
    bands = list(results.between_orders[0].differing) if results.between_orders else []
    steps, said = _told(each.step for each in results.between_orders)
    table = number_table(
        "Between orders: the largest difference from the first scheme (and elements whose bits differ)",
        "step", "scheme", *bands, left=2, caption=f"No failure: {results.parting()}. {said}".rstrip(),
    )  # fmt: skip
    for each in (each for each in results.between_orders if each.step in steps):
        table.add_row(
            str(each.step), each.scheme, *(f"{each.largest[band]:.2g} ({each.differing[band]:,})" for band in bands)
        )
    return table


def _stepwise(results: Results) -> Table:
    """Step by step the loss, and what was agreed on before the update."""
    every = list(results.stepwise())
    steps, said = _told((step.step for _, step in every), (step.step for _, step in every if step.skipped))
    table = number_table(
        "Step by step: the loss, what all gradients' norm was, and what the loss was scaled by",
        "step", "scheme", "loss", "mean of the ranks' means", "norm", "scale", "", left=2,
        caption=f"A skipped step changes no state. Every scheme's numbers were checked. {said}".rstrip(),
    )  # fmt: skip
    for record, step in (pair for pair in every if pair[1].step in steps):
        means = "–" if step.mean_of_means is None else f"{step.mean_of_means:.6f}"
        norm = "–" if step.norm is None else f"{step.norm:.6f}"
        table.add_row(
            str(step.step), record.name, f"{step.loss:.6f}", means, norm, f"{step.scale:g}", "skipped" * step.skipped
        )
    return table


def _bands(results: Results, when: str) -> Iterator[Table]:
    """Bands down, schemes across, some at a time: measured, and marked where the prediction is another."""
    columns = []
    for record, step in results.completed():
        assert record.prediction is not None, "the lab runs nothing that the closed forms do not know"
        if when == "at rest":
            columns.append((record.name, step.resident, record.prediction.resident))
        else:
            columns.append((record.name, step.peak.by_band, record.prediction.peak))
    for start in range(0, len(columns), MOST_ACROSS):
        some = columns[start : start + MOST_ACROSS]
        table = number_table(f"As predicted: bytes per rank {when}", "band", *(name for name, _, _ in some))
        for band in dict.fromkeys(band for _, *sides in some for side in sides for band in side):
            table.add_row(band, *(_compared(got.get(band, 0), expected.get(band, 0)) for _, got, expected in some))
        table.add_section()
        table.add_row("measured", *(f"{sum(got.values()):,}" for _, got, _ in some))
        table.add_row("predicted", *(f"{sum(expected.values()):,}" for _, _, expected in some))
        yield table


def _traffic(results: Results) -> Table:
    table = number_table(
        "As predicted: bytes that one rank sends per step",
        "scheme", "collective", "of", "messages", "sent", "predicted", "of which padding",
        caption="The busiest rank's; every rank's was checked.",
    )  # fmt: skip
    for record, step in results.completed():
        assert record.prediction is not None
        for moved in step.traffic:
            table.add_row(
                record.name, moved.collective, moved.band, f"{moved.messages:,}", f"{max(moved.sent):,}",
                f"{record.prediction.traffic.get(moved.collective, {}).get(moved.band, 0):,}",
                f"{max(moved.padding):,}",
            )  # fmt: skip
    return table


def _links(results: Results) -> Table:
    """What stays within a node, leaves it, and goes over the host link; and what the host holds."""
    table = number_table(
        "As predicted: bytes per step by link, and the host's memory",
        "scheme", "sent by a rank", "out of a node, per node", "host link, per rank", "host at rest", "host peak",
        caption="Every rank's, by collective and band, was checked.",
    )  # fmt: skip
    if not (results.settings.node or any(record.row.offload for record in results.schemes)):
        return table
    for record, step in results.completed():
        assert record.prediction is not None
        expected = record.prediction
        outside, copied = (
            sum(sum(bands.values()) for bands in links.values()) for links in (expected.node_outside, expected.copies)
        )
        table.add_row(
            record.name,
            f"{step.sent():,}",
            _compared(step.node_outside(), outside),
            _compared(step.copied(), copied),
            _compared(sum(step.host.values()), sum(expected.host.values())),
            _compared(step.host_peak.total, sum(expected.host_peak.values())),
        )
    return table


def _work(results: Results) -> Table:
    phases = [(Phase.FORWARD,), (Phase.BACKWARD,), (Phase.OPTIMIZER, Phase.HOST_OPTIMIZER), (Phase.COMMUNICATION,)]
    names = [str(some[0]) for some in phases]
    table = number_table(
        "FLOPs per rank and step, and median milliseconds per step",
        "scheme", *(f"FLOPs, {name}" for name in names[:3]), *(f"ms, {name}" for name in names), "ms per rank",
        caption="One process takes all ranks' turns: the milliseconds are the sum over ranks, not parallel time."
        + " Offloaded, the optimizer's are the host's." * any(record.row.offload for record in results.schemes),
    )  # fmt: skip
    for record, step in results.completed():
        assert record.prediction is not None
        times = [
            sorted(sum(each.seconds.get(phase, 0.0) for phase in some) for each in record.steps) for some in phases
        ]
        medians = [1e3 * each[len(each) // 2] for each in times]
        flops = [
            [sum(counts.get(phase, 0) for phase in some) for counts in (step.flops, record.prediction.flops)]
            for some in phases[:3]
        ]
        table.add_row(
            record.name,
            *(_compared(measured, predicted) for measured, predicted in flops),
            *(f"{median:.2f}" for median in medians),
            f"{sum(medians) / results.settings.ranks:.3f}",
        )
    return table


def _sweep(results: Results) -> Table:
    names, counts = (list(dict.fromkeys(getattr(row, field) for row in results.sweep)) for field in ("scheme", "ranks"))
    cells = {}
    for row in results.sweep:
        resident, peak = row.resident / results.n_params, row.peak_without_activations / results.n_params
        cells[row.ranks, row.scheme] = f"{resident:.4f} / {peak:.4f}" if row.fits else "out of memory"
    title = "The sweep: bytes per parameter at rest / at the peak, activations left out"
    caption = "Each of these numbers, and what was sent, was compared with its prediction as an integer."
    if len(names) > MOST_ACROSS:
        table = number_table(title, "scheme", *(f"N = {ranks}" for ranks in counts), caption=caption, tight=True)
        for name in names:
            table.add_row(name, *(cells[ranks, name] for ranks in counts))
        return table
    table = number_table(title, "N", *names, caption=caption)
    for ranks in counts:
        table.add_row(str(ranks), *(cells[ranks, name] for name in names))
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
    if rounded := found.int8_params:
        table.add_row(
            "ZeRO-3 sends parameters as int8 blocks with scales",
            f"{rounded.sent:,} B instead of {rounded.sent_exact:,}; after {len(rounded.losses)} steps the loss is "
            f"{rounded.losses[-1]:.6f} beside {rounded.losses_exact[-1]:.6f}",
        )
    for precision, drift in found.whole_model_bucket.items():
        table.add_row(
            f"one scheme's bucket is the whole model ({precision})",
            f"{drift.differing[0]:,} parameters differ after one step, by up to {drift.largest[0]:.1e}; "
            f"{drift.differing[-1]:,} after {len(drift.differing)}, by up to {drift.largest[-1]:.1e}",
        )
    return table
