"""The figures: records in, matplotlib figures out.

Owns how results look. Computes nothing beyond units: what is measured and what is predicted
both come from the records, but for the reference curves of the traffic figure, which say that
they are predictions. Must not know the simulator.

No pyplot: figures are plain objects, so they need no display and no particular thread.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy

from zerosim import palette
from zerosim.bands import MODEL_STATES, WIRES, Band
from zerosim.results import Results, SchemeRecord, SweepRow, write_whole

_INK, _FAINT = "#333333", "#808080"
_STYLE = {
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.edgecolor": _FAINT,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "figure.constrained_layout.h_pad": 0.06,  # inches
    "figure.constrained_layout.w_pad": 0.08,
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "text.color": _INK,
}
for _axis in ("xtick", "ytick"):
    _STYLE |= {f"{_axis}.color": _FAINT, f"{_axis}.labelcolor": _INK, f"{_axis}.labelsize": 8.5}
_LOCK = threading.Lock()  # matplotlib's settings belong to the process

# Of four marks in one place each must show: the first is the largest, and no two have one shape.
_WIDTHS = {"data parallel": 10.0, "ZeRO-1": 7.0, "ZeRO-2": 4.4, "ZeRO-3": 1.8}
_SHAPES = {"data parallel": "o", "ZeRO-1": "s", "ZeRO-2": "^", "ZeRO-3": "D"}
_SIZES = {"data parallel": 15.0, "ZeRO-1": 9.5, "ZeRO-2": 4.5, "ZeRO-3": 6.0}

_TRANSIENT = tuple(band for band in Band if band not in MODEL_STATES)
_PHASES = {"forward": "#F6F6F6", "backward": "#ECECEC", "optimizer": "#F6F6F6"}  # and their tints
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


@contextmanager
def _styled() -> Iterator[None]:
    """Our settings over matplotlib's own, whatever the user's are, for one thread at a time."""
    with _LOCK, style.context(["default", _STYLE]):
        yield


def figures(results: Results) -> dict[str, Figure]:
    """The figures of a lab run: "memory", "loss", "traffic" and "timeline"."""
    return {draw.__name__: draw(results) for draw in (memory, loss, traffic, timeline)}


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each figure to ``folder`` as NAME.png, whole or not at all. OSError if that cannot be."""
    paths = []
    for name, figure in figures.items():
        content = io.BytesIO()
        with _styled():
            figure.savefig(content, format="png", dpi=150)
        paths.append(folder / f"{name}.png")
        write_whole(paths[-1], content.getvalue())
    return paths


# -- over the number of ranks


@_styled()
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
            axes.plot(ranks, predicted, "x", color=_INK, markersize=4, zorder=5, label=f"{label}, predicted")
            ends.append(_end(axes, ranks[-1], y[-1], f"{label}: {y[-1]:.5g}", palette.SCHEMES[name]))
    axes.set_title(_as_predicted(rows, "resident", "peak_without_activations"))
    found = _finding(rows, "resident", results.n_params, ".5g", ("data parallel", "ZeRO-3"))
    _headline(figure, f"Bytes per parameter at rest{found}")
    _legend(
        figure,
        Line2D([], [], color=_INK, marker="o", markersize=6, label="at rest, between steps"),
        Line2D([], [], color=_INK, linestyle="--", label="peak within a step, without activations"),
        Line2D([], [], color=_INK, linestyle="", marker="x", markersize=4, label="predicted"),
    )
    _settle(figure)
    _spread(ends, "y")
    return figure


@_styled()
def traffic(results: Results) -> Figure:
    """Bytes that a rank sends in a step over N, on the curves that are predicted."""
    figure, axes, rows = _over_ranks(results)
    itemsize = WIRES[results.settings.wire].itemsize
    unit = results.n_params * itemsize
    axes.set_ylabel(f"bytes sent by each rank in a step,\nin units of P × {itemsize} bytes (P parameters)")
    most = max((row.ranks for row in results.sweep), default=1)
    curve = [most ** (i / 200) for i in range(201)]
    for factor in (2, 3):
        axes.plot(curve, [factor * (n - 1) / n for n in curve], color=_FAINT, zorder=1, label=f"{factor}(N−1)/N")
        axes.axhline(factor, color=_FAINT, linewidth=0.9, linestyle=":", zorder=1)
        axes.annotate(f"{factor}", (0, factor), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points")
    axes.set_ylim(-0.15, 3.3)
    ends = []
    for name, ranks, mine in _by_scheme(rows):
        y = [row.sent / unit for row in mine]
        axes.plot(
            ranks, y, _SHAPES[name], color=palette.SCHEMES[name], markersize=_SIZES[name], markeredgewidth=2,
            fillstyle="none" if name in ("data parallel", "ZeRO-1") else "full", label=name, clip_on=False,
        )  # fmt: skip
        ends.append(_end(axes, ranks[-1], y[-1], f"{name}: {y[-1]:.4g}", palette.SCHEMES[name]))
    axes.set_title(_as_predicted(rows, "sent"))
    _headline(figure, f"Traffic{_finding(rows, 'sent', unit, '.4g', palette.SCHEMES)}")
    _legend(
        figure,
        Line2D([], [], color=_FAINT, label="predicted, padding left out: 2(N−1)/N and 3(N−1)/N"),
        Line2D([], [], color=_FAINT, linewidth=0.9, linestyle=":", label="predicted for large N: 2 and 3"),
    )
    _settle(figure)
    _spread(ends, "y")
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
    return f" on {_ranks(most)}: {_each(last, lambda count: format(count / unit, form))}"


def _as_predicted(rows: Sequence[SweepRow], *quantities: str) -> str:
    hits = sum(all(getattr(row, each) == getattr(row, f"{each}_predicted") for each in quantities) for row in rows)
    return f"{hits} of {len(rows)} runs are as predicted, to the byte"


# -- over the steps


@_styled()
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
    _headline(figure, f"Training on {_ranks(results.settings.ranks)}: {finding}")
    _legend(figure, *above.get_lines())
    _settle(figure)
    return figure


# -- within a step


@_styled()
def timeline(results: Results) -> Figure:
    """What a rank holds in each band, event by event through the last step."""
    figure = Figure(figsize=(12, 6.4))
    margins = {"left": 0.055, "right": 0.992, "bottom": 0.125, "top": 0.865, "wspace": 0.08, "hspace": 0.06}
    panels = figure.subplots(
        2, len(results.schemes), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 2], gridspec_kw=margins
    )
    levels = [_levels(record) for record in results.schemes]
    labels: list[list[Text]] = []
    for (above, below), record, held in zip(panels.T, results.schemes, levels, strict=True):
        labels += _column(figure, above, below, record, held)
    needed = [sum(record.death.held.values()) + record.death.asked for record in results.schemes if record.death]
    _shared_scale(panels[0][0], "bytes held by each rank", [*(max(_totals(held, Band)) for held in levels), *needed])
    _shared_scale(panels[1][0], "of which transient", [max(_totals(held, _TRANSIENT)) for held in levels])
    drawn = [band for band in Band if any(any(held[band]) for held in levels)]
    keys: list[Line2D | Patch] = [Patch(color=palette.BANDS[band], label=band) for band in drawn]
    dead = [record.name for record in results.schemes if record.death]
    if dead:
        finding = f"out of memory under {_listed(dead)}"
        if (capacity := results.settings.capacity) is not None:
            lines = [axes.axhline(capacity, color=_INK, linestyle="--", label="the card") for axes in panels[0]]
            keys.append(lines[0])
            finding = f"a card of {_bytes(capacity)} is not enough for {_listed(dead)}"
    else:
        peaks = {record.name: record.steps[-1].peak.total for record in (results.schemes[0], results.schemes[-1])}
        finding = f"at its peak a rank holds {_each(peaks, _bytes)}"
    _headline(figure, f"One step on {_ranks(results.settings.ranks)}: {finding}")
    _legend(figure, *keys)
    FigureCanvasAgg(figure)  # which measures the labels
    for texts in labels:
        _spread(texts, "x")
    return figure


def _column(
    figure: Figure, above: Axes, below: Axes, record: SchemeRecord, levels: Mapping[str, Sequence[int]]
) -> list[list[Text]]:
    """One scheme: all bands, and under them those that come and go; returns the labels to be moved apart."""
    phases = _phases(record)
    for axes, bands in ((above, tuple(Band)), (below, _TRANSIENT)):
        _stack(axes, levels, bands)
        for phase, (first, last) in phases.items():
            axes.axvspan(first, last, color=_PHASES[phase], zorder=0, linewidth=0)
        axes.grid(visible=False, axis="x")
        axes.set_xlim(0, len(record.events) + 1)
    below.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    below.set_xlabel("event number in the schedule")
    above.set_title(record.name, color=palette.SCHEMES[record.name], weight="bold", pad=20)
    above.set_title(_fate(record), loc="right", pad=20)
    top = above.get_xaxis_transform()
    names = [above.text(sum(span) / 2, 1.02, phase, transform=top, ha="center") for phase, span in phases.items()]
    mark = _mark(figure, above, below, record, _totals(levels, Band))
    for text in (*names, mark):
        text.set_in_layout(False)  # where they are now is not where they will be
    return [names, [mark]]


def _levels(record: SchemeRecord) -> dict[str, list[int]]:
    """Bytes that a rank holds in each band before the step's first event and after each of its events."""
    held: dict[str, int] = {}
    if record.steps:
        held = record.steps[-1].resident
    elif record.death:  # whatever else it held, the step that failed brought, and its events say so
        held = {band: record.death.held.get(band, 0) for band in MODEL_STATES}
    levels = {str(band): [held.get(band, 0)] for band in Band}
    for event in record.events:
        sign = {"hold": 1, "free": -1}.get(event.kind, 0)
        for band, heights in levels.items():
            heights.append(heights[-1] + sign * event.nbytes * (event.name == band))
    return levels


def _totals(levels: Mapping[str, Sequence[int]], bands: Iterable[str]) -> list[int]:
    return [sum(instant) for instant in zip(*(levels[band] for band in bands), strict=True)]


def _phases(record: SchemeRecord) -> dict[str, tuple[int, int]]:
    """Where each phase begins and ends; a collective belongs to the phase that it interrupts."""
    spans: dict[str, tuple[int, int]] = {}
    phase = ""
    for number, event in enumerate(record.events, start=1):
        phase = phase if event.phase == "communication" else event.phase
        if phase in _PHASES:
            spans[phase] = spans.get(phase, (number, 0))[0], number + 1
    return spans


def _stack(axes: Axes, levels: Mapping[str, Sequence[int]], bands: Sequence[str]) -> None:
    """What is held after event k from k to k + 1; from 0 to 1 what was before the first."""
    base = [0] * len(levels[bands[0]])
    for band in bands:
        if any(levels[band]):
            top = [low + height for low, height in zip(base, levels[band], strict=True)]
            axes.stairs(top, range(len(top) + 1), baseline=base, fill=True, color=palette.BANDS[band], label=band)
            base = top


def _mark(figure: Figure, above: Axes, below: Axes, record: SchemeRecord, totals: Sequence[int]) -> Text:
    """The instant of the peak and its total; or of death and what would have been needed."""
    height = max(totals)
    at, text = totals.index(height), _bytes(height)
    if record.death:
        held = sum(record.death.held.values())
        at = max((event for event, total in enumerate(totals) if total == held), default=at)
        height = held + record.death.asked
        text = f"+{_bytes(record.death.asked)} {record.death.band}"
    below.axvline(at + 0.5, color=_INK, linewidth=0.8, linestyle=":")
    above.vlines(at + 0.5, 0, height, color=_INK, linewidth=0.8, linestyle=":")
    above.plot(at + 0.5, height, marker="X" if record.death else "o", color=_INK, markersize=4, clip_on=False)
    over = offset_copy(above.transData, figure, y=3, units="points")
    return above.text(at + 0.5, height, text, transform=over, ha="center")


def _fate(record: SchemeRecord) -> str:
    if record.death is None:
        return f"at rest {_bytes(sum(record.steps[-1].resident.values()))}"
    return f"died in step {record.death.step}" if record.death.step else "died before step 1"


def _shared_scale(axes: Axes, what: str, heights: Sequence[int]) -> None:
    """The y axis of a row of panels, in bytes, labelled in a unit that fits."""
    most = max(heights)
    size, unit = _unit(most)
    axes.set_ylim(0, 1.15 * most or 1)
    axes.yaxis.set_major_locator(MaxNLocator("auto" if most else 1, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
    axes.set_ylabel(f"{what}, {unit}")


# -- words, labels and layout


def _unit(most: int) -> tuple[int, str]:
    return next(((size, unit) for size, unit in _UNITS if most >= size), (1, "B"))


def _bytes(count: int) -> str:
    size, unit = _unit(count)
    return f"{count / size:.3g} {unit}"


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "one rank"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _each(values: Mapping[str, int], show: Callable[[int], str]) -> str:
    """Every value with the schemes that have exactly it."""
    shared: dict[int, list[str]] = {}
    for name, value in values.items():
        shared.setdefault(value, []).append(name)
    return ", ".join(f"{show(value)} under {_listed(names)}" for value, names in shared.items())


def _headline(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.012, ha="left")


def _legend(figure: Figure, *handles: Line2D | Patch) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=10, handlelength=1.8, columnspacing=1.5)


def _end(axes: Axes, x: float, y: float, text: str, colour: str) -> Text:
    """A label to the right of the panel, tied to where its line ends."""
    return axes.annotate(
        text, (x, y), (1.05, y), xycoords="data", textcoords=("axes fraction", "data"), va="center",
        arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.2, "shrinkB": 5, "relpos": (0, 0.5)},
    )  # fmt: skip


def _settle(figure: Figure) -> None:
    """Lay the figure out once and for all, so that labels can be placed by what they measure."""
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _spread(texts: Sequence[Text], direction: str) -> None:
    """Move labels along x or y, as little as can be, until they neither touch nor leave their panel."""
    if not texts or (axes := texts[0].axes) is None:
        return
    which = "xy".index(direction)
    texts = sorted(texts, key=lambda text: text.get_position()[which], reverse=True)[::-1]  # of equals the first on top
    boxes = [Text.get_window_extent(text) for text in texts]  # without the leader
    centres = _apart(
        [(box.p0[which] + box.p1[which]) / 2 for box in boxes],
        [box.size[which] + (6, 2)[which] for box in boxes],
        axes.bbox.p0[which],
        axes.bbox.p1[which],
    )
    for text, centre in zip(texts, centres, strict=True):
        place = list(text.get_position())
        place[which] = axes.transData.inverted().transform((centre, centre))[which]
        text.set_position((place[0], place[1]))


def _apart(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres nearest to the sorted ``wanted`` at which things of ``sizes`` do not overlap, within low..high.

    Less the room that is taken before it, no centre may be below the one before; those that
    would be share their mean (isotonic regression).
    """
    taken = [0.0]
    for size, after in pairwise(sizes):
        taken.append(taken[-1] + (size + after) / 2)
    groups: list[tuple[float, int]] = []
    for want, room in zip(wanted, taken, strict=True):
        mean, count = want - room, 1
        while groups and groups[-1][0] > mean:
            before, members = groups.pop()
            mean, count = (mean * count + before * members) / (count + members), count + members
        groups.append((mean, count))
    least, most = low + sizes[0] / 2, high - sizes[-1] / 2 - taken[-1]
    means = [mean for mean, count in groups for _ in range(count)]
    return [max(least, min(most, mean)) + room for mean, room in zip(means, taken, strict=True)]
