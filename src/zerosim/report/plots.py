"""The figures: records in, matplotlib figures out.

Owns how results look. Computes nothing beyond units: what is measured and what is predicted
both come from the records, but for the reference curves of the traffic figure, which say that
they are predictions. Must not know the simulator.

No pyplot: figures are plain objects, so they need no display and no particular thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from zerosim.bands import WIRES, Band
from zerosim.records.files import write_whole
from zerosim.records.results import Results, SweepRow
from zerosim.report.figure_style import (
    FAINT,
    INK,
    each_value,
    encoded,
    headline,
    label_end,
    legend,
    ranks_text,
    settle,
    spread,
    styled,
)
from zerosim.report.looks import looks, nested
from zerosim.report.timeline import timeline

__all__ = ["figures", "loss", "memory", "save_figures", "timeline", "traffic"]

_LABEL = 0.165  # inches of height that the label of a line needs


def figures(results: Results) -> dict[str, Figure]:
    """The figures of a lab run: "memory", "loss", "traffic" and "timeline"."""
    return {draw.__name__: draw(results) for draw in (memory, loss, traffic, timeline)}


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each figure to ``folder`` as NAME.png, whole or not at all. OSError if that cannot be."""
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        write_whole(paths[-1], encoded(figure, "png"))
    return paths


# -- over the number of ranks


@styled()
def memory(results: Results) -> Figure:
    """Bytes per parameter that a rank holds, at rest and at the peak, over N."""
    figure, axes, rows = _over_ranks(results, labels=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("bytes per parameter, on each rank (log scale)")
    ends = []
    names = [record.name for record in results.schemes]
    curves = {name: (ranks, mine) for name, ranks, mine in _by_scheme(results, rows)}
    look_of = looks(names)
    for what, dashes, fill, quantity in (
        ("at rest", "-", "full", "resident"),
        ("peak", "--", "none", "peak_without_activations"),
    ):
        heights = {
            name: [getattr(row, quantity) / results.n_params for row in mine] for name, (_, mine) in curves.items()
        }
        for place, (name, (ranks, mine)) in enumerate(curves.items()):
            look, label, y = look_of[name], f"{name}, {what}", heights[name]
            predicted = [getattr(row, f"{quantity}_predicted") / results.n_params for row in mine]
            # Of curves that are one, each is drawn over a broader one.
            under = sum(other == y for other in list(heights.values())[place + 1 :])
            broad = nested(0, under + 1, least=0, step=2.5, most=12)
            axes.plot(
                ranks, y, dashes, color=look.color, linewidth=1.5 + broad, marker=look.marker, fillstyle=fill,
                markersize=5 + 1.6 * broad, label=label,
            )  # fmt: skip
            axes.plot(ranks, predicted, "x", color=INK, markersize=4, zorder=5, label=f"{label}, predicted")
            ends.append(label_end(axes, ranks[-1], y[-1], f"{label}: {y[-1]:.5g}", look.color))
    axes.set_title(_as_predicted(rows, "resident", "peak_without_activations"))
    found = _finding(rows, "resident", results.n_params, ".5g", extremes=True)
    headline(figure, f"Bytes per parameter at rest{found}")
    legend(
        figure,
        Line2D([], [], color=INK, marker="o", markersize=5, label="at rest, between steps"),
        Line2D(
            [],
            [],
            color=INK,
            linestyle="--",
            marker="o",
            markersize=5,
            fillstyle="none",
            label="peak within a step, without activations",
        ),
        Line2D([], [], color=INK, linestyle="", marker="x", markersize=4, label="predicted"),
    )
    settle(figure)
    spread(ends, "y")
    return figure


@styled()
def traffic(results: Results) -> Figure:
    """Bytes that a rank sends in a step over N, on the curves that are predicted."""
    figure, axes, rows = _over_ranks(results, labels=1)
    itemsize = WIRES[results.settings.wire].itemsize
    unit = results.n_params * itemsize
    axes.set_ylabel(f"bytes sent by each rank in a step,\nin units of P × {itemsize} bytes (P parameters)")
    most = max((row.ranks for row in results.sweep), default=1)
    curve = [most ** (i / 200) for i in range(201)]
    for factor in (2, 3):
        axes.plot(curve, [factor * (n - 1) / n for n in curve], color=FAINT, zorder=1, label=f"{factor}(N−1)/N")
        axes.axhline(factor, color=FAINT, linewidth=0.9, linestyle=":", zorder=1)
        axes.annotate(f"{factor}", (0, factor), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points")
    top = max([3.3, *(1.1 * row.sent / unit for row in rows)])  # more where each micro-batch is reduced by itself
    axes.set_ylim(-0.15 * (top / 3.3), top)
    ends = []
    names = [record.name for record in results.schemes]
    look_of = looks(names)
    for name, ranks, mine in _by_scheme(results, rows):
        place, look, y = names.index(name), look_of[name], [row.sent / unit for row in mine]
        axes.plot(
            ranks, y, look.marker, color=look.color, markersize=nested(place, len(names), least=4.5, step=4.5, most=25),
            markeredgewidth=2 if len(names) < 6 else 1.2, fillstyle="none" if place < len(names) - 1 else "full",
            label=name, clip_on=False,
        )  # fmt: skip
        ends.append(label_end(axes, ranks[-1], y[-1], f"{name}: {y[-1]:.4g}", look.color))
    axes.set_title(_as_predicted(rows, "sent"))
    headline(figure, f"Traffic{_finding(rows, 'sent', unit, '.4g')}")
    said = "predicted" if results.settings.accumulate == 1 else "a single micro-batch"
    legend(
        figure,
        Line2D([], [], color=FAINT, label=f"{said}, padding left out: 2(N−1)/N and 3(N−1)/N"),
        Line2D([], [], color=FAINT, linewidth=0.9, linestyle=":", label=f"{said} for large N: 2 and 3"),
    )
    settle(figure)
    spread(ends, "y")
    return figure


def _over_ranks(results: Results, labels: int) -> tuple[Figure, Axes, list[SweepRow]]:
    """A figure with one panel over N and room for so many labels of each scheme, and the rows to draw."""
    figure = Figure(figsize=(8.4, max(5.0, 1.5 + _LABEL * labels * len(results.schemes))), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    every = sorted({row.ranks for row in results.sweep}) or [1]
    # Of two labels that would touch, the larger number stays.
    axes.set_xticks([n for n, above in zip(every, [*every[1:], 2 * every[-1]], strict=True) if above > 1.3 * n])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlim(every[0] / 1.15, every[-1] * 1.15)
    axes.set_xlabel("N, number of ranks")
    return figure, axes, [row for row in results.sweep if row.fits]


def _by_scheme(results: Results, rows: Iterable[SweepRow]) -> Iterator[tuple[str, list[int], list[SweepRow]]]:
    """Each scheme that has rows, with their N and the rows, in order of N."""
    for record in results.schemes:
        mine = sorted((row for row in rows if row.scheme == record.name), key=lambda row: row.ranks)
        if mine:
            yield record.name, [row.ranks for row in mine], mine


def _finding(rows: Sequence[SweepRow], quantity: str, unit: int, form: str, *, extremes: bool = False) -> str:
    """A quantity at the largest N under each of the schemes, or where it is most and least."""
    top = max((row.ranks for row in rows), default=0)
    last = {row.scheme: getattr(row, quantity) for row in rows if row.ranks == top}
    if not last:
        return ": every run was out of memory"
    if extremes:
        last = {name: value for name, value in last.items() if value in (max(last.values()), min(last.values()))}
    return f" on {ranks_text(top)}: {each_value(last, lambda count: format(count / unit, form))}"


def _as_predicted(rows: Sequence[SweepRow], *quantities: str) -> str:
    hits = sum(all(getattr(row, each) == getattr(row, f"{each}_predicted") for each in quantities) for row in rows)
    return f"{hits} of {len(rows)} runs are as predicted, to the byte"


# -- over the steps


@styled()
def loss(results: Results) -> Figure:
    """The losses of all schemes, step by step, and how far their weights are apart."""
    figure = Figure(figsize=(8.4, 5), layout="constrained")
    band = Band.MASTER if any(Band.MASTER in each.largest for each in results.differences) else Band.PARAMS
    nonzero = [each.largest[band] for each in results.differences if 0 < each.largest.get(band, 0) < math.inf]
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 2 if nonzero else 1])
    lines: dict[str, dict[str, Any]] = {}  # a line of one step is a dot
    for place, (name, look) in enumerate(looks(record.name for record in results.schemes).items()):
        width = nested(place, len(results.schemes), least=1.8, step=2.7, most=16)
        lines[name] = {
            "color": look.color, "label": name, "linewidth": width, "linestyle": look.line, "clip_on": False,
            "solid_capstyle": "round",
            "marker": "o" if results.settings.steps == 1 else "", "markersize": 2 * width,
        }  # fmt: skip
    for record in results.schemes:
        above.plot([each.step for each in record.steps], [each.loss for each in record.steps], **lines[record.name])
    above.set_ylabel("training loss,\nmean over the ranks")
    for name, look_of_line in lines.items():
        mine = [each for each in results.differences if each.scheme == name]
        below.plot([each.step for each in mine], [each.largest.get(band, 0) for each in mine], **look_of_line)
    below.set_ylabel(f"largest difference\nof {'master weights' if band == Band.MASTER else 'weights'}")
    below.set_xlabel("step")
    below.set_xlim(0.5, results.settings.steps + 0.5)
    below.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if nonzero:
        below.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(nonzero))))
        below.set_ylim(bottom=0)
    else:
        below.set_ylim(-1, 1)
        below.set_yticks([0])
    differing = sum(sum(each.differing.values()) for each in results.differences)
    if results.differences:
        count = f"{differing:,} values differ, over all ranks and steps"
        if not differing:
            count = "0 differing bits over all ranks, in every step"
        first = "the first of each order" if results.between_orders else results.differences[0].scheme
        below.set_title(f"Against {first}: {count}")
    trained = [record for record in results.schemes if record.steps]
    curves = {(results.settings.order(record.row), tuple(each.loss for each in record.steps)) for record in trained}
    orders = {order for order, _ in curves}
    if len(trained) < 2:
        finding = f"{trained[0].name} alone has memory enough" if trained else "every scheme is out of memory"
    elif len(curves) > len(orders) or differing:
        finding = "the schemes do not learn the same"
    elif len(orders) > 1:
        finding = f"{len(trained)} schemes of {len(orders)} orders, in each of which all weights are the same bits"
    else:
        finding = f"{len(trained)} schemes, one curve, the same weights bit for bit"
    headline(figure, f"Training on {ranks_text(results.settings.ranks)}: {finding}")
    legend(figure, *(_key(line) for line in above.get_lines()))
    settle(figure)
    return figure


def _key(line: Line2D) -> Line2D:
    """What stands for a line in a legend, where it need not be so broad."""
    return Line2D(
        [], [], color=line.get_color(), label=line.get_label(), linestyle=line.get_linestyle(),
        linewidth=min(line.get_linewidth(), 8), solid_capstyle="round",
    )  # fmt: skip
