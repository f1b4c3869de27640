"""The figures: records in, matplotlib figures out.

Owns how results look. Computes nothing beyond units: what is measured and what is predicted
both come from the records, but for the reference curves of the traffic figure, which say that
they are predictions. Must not know the simulator.

No pyplot: figures are plain objects, so they need no display and no particular thread.
"""

from __future__ import annotations

import io
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
from zerosim.report import colors as palette
from zerosim.report.figure_style import (
    FAINT,
    INK,
    each_value,
    headline,
    label_end,
    legend,
    ranks_text,
    settle,
    spread,
    styled,
)
from zerosim.report.timeline import timeline

__all__ = ["figures", "loss", "memory", "save_figures", "timeline", "traffic"]

# Of four marks in one place each must show: the first is the largest, and no two have one shape.
_WIDTHS = {"data parallel": 10.0, "ZeRO-1": 7.0, "ZeRO-2": 4.4, "ZeRO-3": 1.8}
_SHAPES = {"data parallel": "o", "ZeRO-1": "s", "ZeRO-2": "^", "ZeRO-3": "D"}
_SIZES = {"data parallel": 15.0, "ZeRO-1": 9.5, "ZeRO-2": 4.5, "ZeRO-3": 6.0}


def figures(results: Results) -> dict[str, Figure]:
    """The figures of a lab run: "memory", "loss", "traffic" and "timeline"."""
    return {draw.__name__: draw(results) for draw in (memory, loss, traffic, timeline)}


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each figure to ``folder`` as NAME.png, whole or not at all. OSError if that cannot be."""
    paths = []
    for name, figure in figures.items():
        content = io.BytesIO()
        with styled():
            figure.savefig(content, format="png", dpi=150)
        paths.append(folder / f"{name}.png")
        write_whole(paths[-1], content.getvalue())
    return paths


# -- over the number of ranks


@styled()
def memory(results: Results) -> Figure:
    """Bytes per parameter that a rank holds, at rest and at the peak, over N."""
    figure, axes, rows = _over_ranks(results)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("bytes per parameter, on each rank (log scale)")
    ends = []
    for name, ranks, mine in _by_scheme(rows):
        for what, dashes, shape, quantity in (
            ("at rest", "-", _SHAPES[name], "resident"),
            ("peak", "--", ".", "peak_without_activations"),
        ):
            label = f"{name}, {what}"
            y, predicted = (
                [getattr(row, each) / results.n_params for row in mine] for each in (quantity, f"{quantity}_predicted")
            )
            axes.plot(ranks, y, dashes, color=palette.SCHEMES[name], marker=shape, markersize=6, label=label)
            axes.plot(ranks, predicted, "x", color=INK, markersize=4, zorder=5, label=f"{label}, predicted")
            ends.append(label_end(axes, ranks[-1], y[-1], f"{label}: {y[-1]:.5g}", palette.SCHEMES[name]))
    axes.set_title(_as_predicted(rows, "resident", "peak_without_activations"))
    found = _finding(rows, "resident", results.n_params, ".5g", ("data parallel", "ZeRO-3"))
    headline(figure, f"Bytes per parameter at rest{found}")
    legend(
        figure,
        Line2D([], [], color=INK, marker="o", markersize=6, label="at rest, between steps"),
        Line2D([], [], color=INK, linestyle="--", label="peak within a step, without activations"),
        Line2D([], [], color=INK, linestyle="", marker="x", markersize=4, label="predicted"),
    )
    settle(figure)
    spread(ends, "y")
    return figure


@styled()
def traffic(results: Results) -> Figure:
    """Bytes that a rank sends in a step over N, on the curves that are predicted."""
    figure, axes, rows = _over_ranks(results)
    itemsize = WIRES[results.settings.wire].itemsize
    unit = results.n_params * itemsize
    axes.set_ylabel(f"bytes sent by each rank in a step,\nin units of P × {itemsize} bytes (P parameters)")
    most = max((row.ranks for row in results.sweep), default=1)
    curve = [most ** (i / 200) for i in range(201)]
    for factor in (2, 3):
        axes.plot(curve, [factor * (n - 1) / n for n in curve], color=FAINT, zorder=1, label=f"{factor}(N−1)/N")
        axes.axhline(factor, color=FAINT, linewidth=0.9, linestyle=":", zorder=1)
        axes.annotate(f"{factor}", (0, factor), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points")
    axes.set_ylim(-0.15, 3.3)
    ends = []
    for name, ranks, mine in _by_scheme(rows):
        y = [row.sent / unit for row in mine]
        axes.plot(
            ranks, y, _SHAPES[name], color=palette.SCHEMES[name], markersize=_SIZES[name], markeredgewidth=2,
            fillstyle="none" if name in ("data parallel", "ZeRO-1") else "full", label=name, clip_on=False,
        )  # fmt: skip
        ends.append(label_end(axes, ranks[-1], y[-1], f"{name}: {y[-1]:.4g}", palette.SCHEMES[name]))
    axes.set_title(_as_predicted(rows, "sent"))
    headline(figure, f"Traffic{_finding(rows, 'sent', unit, '.4g', palette.SCHEMES)}")
    legend(
        figure,
        Line2D([], [], color=FAINT, label="predicted, padding left out: 2(N−1)/N and 3(N−1)/N"),
        Line2D([], [], color=FAINT, linewidth=0.9, linestyle=":", label="predicted for large N: 2 and 3"),
    )
    settle(figure)
    spread(ends, "y")
    return figure


def _over_ranks(results: Results) -> tuple[Figure, Axes, list[SweepRow]]:
    """A figure with one panel over N, and the rows to draw."""
    figure = Figure(figsize=(8.4, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    every = sorted({row.ranks for row in results.sweep}) or [1]
    # Of two labels that would touch, the larger number stays.
    axes.set_xticks([n for n, above in zip(every, [*every[1:], 2 * every[-1]], strict=True) if above > 1.3 * n])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlim(every[0] / 1.15, every[-1] * 1.15)
    axes.set_xlabel("N, number of ranks")
    return figure, axes, [row for row in results.sweep if row.survives]


def _by_scheme(rows: Iterable[SweepRow]) -> Iterator[tuple[str, list[int], list[SweepRow]]]:
    """Each scheme that has rows, with their N and the rows, in order of N."""
    for name in palette.SCHEMES:
        mine = sorted((row for row in rows if row.scheme == name), key=lambda row: row.ranks)
        if mine:
            yield name, [row.ranks for row in mine], mine


def _finding(rows: Sequence[SweepRow], quantity: str, unit: int, form: str, names: Iterable[str]) -> str:
    """A quantity at the largest N under each of the schemes."""
    most = max((row.ranks for row in rows), default=0)
    last = {row.scheme: getattr(row, quantity) for row in rows if row.ranks == most and row.scheme in names}
    if not last:
        return ": no run survived"
    return f" on {ranks_text(most)}: {each_value(last, lambda count: format(count / unit, form))}"


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
    # A line of one step is a dot.
    looks: dict[str, dict[str, Any]] = {
        name: {
            "color": colour, "label": name, "linewidth": _WIDTHS[name], "solid_capstyle": "round", "clip_on": False,
            "marker": "o" if results.settings.steps == 1 else "", "markersize": 2 * _WIDTHS[name],
        }
        for name, colour in palette.SCHEMES.items()
    }  # fmt: skip
    for record in results.schemes:
        above.plot([each.step for each in record.steps], [each.loss for each in record.steps], **looks[record.name])
    above.set_ylabel("training loss,\nmean over the ranks")
    for name, look in looks.items():
        mine = [each for each in results.differences if each.scheme == name]
        below.plot([each.step for each in mine], [each.largest.get(band, 0) for each in mine], **look)
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
        below.set_title(f"Against {results.differences[0].scheme}: {count}")
    alive = [record for record in results.schemes if record.steps]
    curves = {tuple(each.loss for each in record.steps) for record in alive}
    if len(alive) < 2:
        finding = f"{alive[0].name} alone survived" if alive else "no scheme survived"
    elif len(curves) > 1 or differing:
        finding = "the schemes do not learn the same"
    else:
        finding = f"{len(alive)} schemes, one curve, the same weights bit for bit"
    headline(figure, f"Training on {ranks_text(results.settings.ranks)}: {finding}")
    legend(figure, *above.get_lines())
    settle(figure)
    return figure
