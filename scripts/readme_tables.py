"""The README's tables, as Markdown. Takes views; computes nothing but ratios and units."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console

from readme_views import Lab, Planned, Real, Scheme
from zerosim.records.results import SweepRow
from zerosim.report import plan_console
from zerosim.schemes import SCHEMES
from zerosim.util import sizes

NAMES = [stage.name for stage in SCHEMES]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def per_param(lab: Lab, nbytes: int) -> str:
    """Bytes per parameter."""
    return f"{nbytes / lab.p:.4f}"


def in_p(lab: Lab, nbytes: int) -> str:
    """Traffic in units of P."""
    return f"{nbytes / lab.unit:.4f}"


def summary(lab: Lab) -> str:
    """The four schemes, measured and predicted."""
    base = lab.schemes[0].rest
    return table(
        [
            "", "at rest, B per parameter", "predicted", "of data parallel",
            "peak, B per parameter", "predicted", "sent by a rank in a step, P", "predicted",
        ],
        [
            [
                each.name,
                per_param(lab, each.rest),
                _equation(each.formula, per_param(lab, each.rest_predicted)),
                f"{each.rest / base:.4f}",
                per_param(lab, each.peak),
                per_param(lab, each.peak_predicted),
                in_p(lab, each.sent),
                f"{each.multiple}(N−1)/N = {in_p(lab, each.sent_predicted)}",
            ]
            for each in lab.schemes
        ],
    )  # fmt: skip


def _equation(formula: str, value: str) -> str:
    return f"{formula} = {value}" if "N" in formula else value


def bands(lab: Lab) -> str:
    """Bytes per parameter at rest, band by band, in the order in which the stages shard them."""
    held = [each.last.resident for each in lab.schemes]
    return table(
        ["at rest, B per parameter", *NAMES],
        [
            *([band, *(per_param(lab, each[band]) for each in held)] for band in held[0]),
            ["together", *(per_param(lab, each.rest) for each in lab.schemes)],
        ],
    )


def collectives(lab: Lab) -> str:
    """What a rank sends, by collective."""
    names = ["all-reduce", "reduce-scatter", "all-gather"]
    return table(
        ["sent by a rank in a step, B", *names, "together", "messages"],
        [
            [each.name, *(f"{each.sent_by(name):,}" for name in names), f"{each.sent:,}", f"{each.messages:,}"]
            for each in lab.schemes
        ],
    )


def fits_on_card(lab: Lab) -> str:
    """Which schemes fit on a card, over N: the peak, everything counted, of those that do."""
    columns = [lab.sweep(name) for name in NAMES]
    return table(
        ["N", *NAMES],
        [
            [str(rows[0].ranks), *(f"peak {row.peak:,} B" if row.fits else "out of memory" for row in rows)]
            for rows in zip(*columns, strict=True)
        ],
    )


def traffic_over_ranks(lab: Lab) -> str:
    """What a rank sends in units of P, over N, and how much is missing to the multiple."""
    columns = [lab.sweep(name) for name in NAMES]
    return table(
        ["sent by a rank in a step, P", *(f"N = {n}" for n in lab.ranks)],
        [[name, *(in_p(lab, row.sent) for row in rows)] for name, rows in zip(NAMES, columns, strict=True)],
    )


def peaks(lab: Lab) -> str:
    """At rest and at the peak."""
    return table(
        ["B per parameter", "at rest", "peak", "peak / at rest", "peak with activations", "reached by"],
        [
            [
                each.name,
                per_param(lab, each.rest),
                per_param(lab, each.peak),
                f"{each.peak / each.rest:.2f}",
                per_param(lab, each.full_peak),
                _peak(each),
            ]
            for each in lab.schemes
        ],
    )


def _peak(scheme: Scheme) -> str:
    peak = scheme.last.peak_without_activations
    return f"{peak.phase}, {peak.unit}"


def layer_on_top(lab: Lab, name: str = NAMES[-1]) -> str:
    """A scheme's peak over what it holds at rest, over N."""
    rows = [row for row in lab.sweep(name) if row.ranks > 1]
    return table(
        ["N", "at rest, B", "peak, B", "on top, B"],
        [
            [str(row.ranks), f"{row.resident:,}", f"{row.peak_without_activations:,}", f"{on_top(row):,}"]
            for row in rows
        ],
    )


def on_top(row: SweepRow) -> int:
    """Bytes of the peak, activations left out, beyond what is held at rest."""
    return row.peak_without_activations - row.resident


def losses(*labs: tuple[str, Lab]) -> str:
    """The loss of data parallel, step by step, in several labs."""
    steps = range(labs[0][1].steps)
    return table(
        ["loss at step", *(str(step + 1) for step in steps)],
        [[title, *(f"{lab.schemes[0].losses[step]:.6f}" for step in steps)] for title, lab in labs],
    )


def step_times(real: Real) -> str:
    """What binds: memory, traffic and time on real ranks."""
    return table(
        [
            "", "at rest, B", "peak, B", "sent, B", "messages",
            "step, ms: fastest", "median", "slowest", "computing, ms: median", "communicating, ms: median",
        ],
        [
            [
                f"{run.name}, {title}",
                f"{run.rest:,}",
                f"{run.peak:,}",
                f"{run.moved:,}",
                f"{run.messages:,}",
                *(_ms(each) for each in (run.total.least, run.total.median, run.total.most)),
                _ms(run.compute.median),
                _ms(run.communication.median),
            ]
            for title, wire in (("our ring", "ring"), ("gloo’s collectives", "native"))
            for run in real.runs(wire)
        ],
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def reduce_scatter(real: Real) -> str:
    """What gloo makes of the schemes' collectives, beside our ring."""
    return table(
        [
            "", "our ring: sent, (N−1)/N P", "the kernel counted, B", "gloo’s collectives: asked for, (N−1)/N P",
            "sent, (N−1)/N P", "the kernel counted, B",
        ],
        [
            [
                ring.name,
                real.in_p(ring.moved),
                _counted(ring.counted),
                real.in_p(native.handed),
                real.in_p(native.moved),
                _counted(native.counted),
            ]
            for ring, native in zip(real.runs("ring"), real.runs("native"), strict=True)
        ],
    )  # fmt: skip


def _counted(readings: dict[str, int]) -> str:
    return " or ".join(f"{count:,}" for count in sorted(set(readings.values()))) or "not measured"


def plan_screen(planned: Planned) -> str:
    """What the command prints of it."""
    out = io.StringIO()
    plan_console.show(planned.found, Console(file=out, width=plan_console.WIDTH, highlight=False))
    lines = [line.rstrip() for line in out.getvalue().strip("\n").splitlines()]
    return "\n".join(lines)


def estimates(planned: Planned) -> str:
    """What well-known formulas say of the model states of the highest stage, beside the ledger."""
    cell = planned.last
    rows = [[each.name, each.formula, sizes.text(each.nbytes)] for each in planned.found.estimates]
    ours = [
        ["the ledger, at rest", "", sizes.text(cell.at_rest)],
        ["the ledger, at the peak", "", sizes.text(cell.peak.total)],
    ]
    return table(["", "formula", "bytes"], [*rows, *ours])
