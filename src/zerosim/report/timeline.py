"""The figure of one step: what a rank holds at each event, band upon band, for every scheme.

Owns that figure. Takes records; must not know the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from zerosim.bands import MODEL_STATES, Band
from zerosim.records.results import OutOfMemoryRecord, Results, SchemeRecord
from zerosim.report import colors as palette
from zerosim.report.figure_style import (
    INK,
    each_value,
    headline,
    legend,
    listed,
    ranks_text,
    spread,
    styled,
)
from zerosim.report.looks import Look, looks
from zerosim.util import sizes

_TRANSIENT = tuple(band for band in Band if band not in MODEL_STATES)
_PHASES = {"forward": "#F6F6F6", "backward": "#ECECEC", "optimizer": "#F6F6F6"}  # and their tints
_ABREAST = 4  # schemes beside each other, at most


@styled()
def timeline(results: Results) -> Figure:
    """What a rank holds in each band, event by event through the last step."""
    figure, pairs = _panels(len(results.schemes))
    levels = [_levels(record) for record in results.schemes]
    look_of = looks(record.name for record in results.schemes)
    labels: list[list[Text]] = []
    for (above, below), record, held in zip(pairs, results.schemes, levels, strict=True):
        labels += _column(figure, above, below, record, held, look_of[record.name])
    short = [record for record in results.schemes if record.out_of_memory]
    needed = [_asked_on_card(each) for record in short if (each := record.out_of_memory)]
    for above, below in pairs[:: _columns(len(pairs))]:
        _shared_scale(above, "bytes held by each rank", [*(max(_totals(held, Band)) for held in levels), *needed])
        _shared_scale(below, "of which transient", [max(_totals(held, _TRANSIENT)) for held in levels])
    drawn = [band for band in Band if any(any(held[band]) for held in levels)]
    keys: list[Line2D | Patch] = [Patch(color=palette.BANDS[band], label=band) for band in drawn]
    if short:
        names = listed([record.name for record in short])
        finding = f"out of memory under {names}"
        on_cards = {record.out_of_memory.place for record in short if record.out_of_memory} == {"card"}
        if on_cards and (capacity := results.settings.capacity) is not None:
            lines = [above.axhline(capacity, color=INK, linestyle="--", label="the card") for above, _ in pairs]
            keys.append(lines[0])
            finding = f"a card of {sizes.text(capacity)} is not enough for {names}"
    else:
        peaks = {record.name: record.steps[-1].peak.total for record in results.schemes}
        peaks = {name: total for name, total in peaks.items() if total in (max(peaks.values()), min(peaks.values()))}
        finding = f"at its peak a rank holds {each_value(peaks, sizes.text)}"
    headline(figure, f"One step on {ranks_text(results.settings.ranks)}: {finding}")
    legend(figure, *keys)
    FigureCanvasAgg(figure)  # which measures the labels
    for texts in labels:
        spread(texts, "x")
    return figure


def _columns(count: int) -> int:
    """How many of so many schemes stand beside each other, in lines of about the same length."""
    return -(-count // -(-count // _ABREAST))


def _panels(count: int) -> tuple[Figure, list[tuple[Axes, Axes]]]:
    """A figure with two panels, one above the other, for each of ``count`` schemes."""
    across = _columns(count)
    lines = -(-count // across)
    figure = Figure(figsize=(12, 6.4 * lines - 0.5 * (lines - 1)))
    inch = 1 / figure.get_figheight()
    outer = figure.add_gridspec(
        lines, across, left=0.055, right=0.992, bottom=0.8 * inch, top=1 - 0.87 * inch, wspace=0.08, hspace=0.19
    )
    pairs: list[tuple[Axes, Axes]] = []
    for place in range(count):
        first = pairs[place - place % across] if place % across else (None, None)
        inner = outer[place // across, place % across].subgridspec(2, 1, height_ratios=[3, 2], hspace=0.06)
        above = figure.add_subplot(inner[0], sharey=first[0])
        below = figure.add_subplot(inner[1], sharex=above, sharey=first[1])
        above.tick_params(labelbottom=False)
        for axes in (above, below):
            axes.tick_params(labelleft=not place % across)
        pairs.append((above, below))
    return figure, pairs


def _column(
    figure: Figure, above: Axes, below: Axes, record: SchemeRecord, levels: Mapping[str, Sequence[int]], look: Look
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
    above.set_title(record.name, color=look.color, weight="bold", pad=20)
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
    elif record.out_of_memory:  # whatever else it held, the step that failed brought, and its events say so
        held = {band: record.out_of_memory.on_card.get(band, 0) for band in MODEL_STATES}
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
    """The instant of the peak and its total; or that at which memory ran out, and what was asked for."""
    height = max(totals)
    at, text = totals.index(height), sizes.text(height)
    if record.out_of_memory:
        held = sum(record.out_of_memory.on_card.values())
        at = max((event for event, total in enumerate(totals) if total == held), default=at)
        height = _asked_on_card(record.out_of_memory)
        text = f"+{sizes.text(record.out_of_memory.asked)} {record.out_of_memory.band}"
        text += " (host)" if record.out_of_memory.place == "host" else ""
    below.axvline(at + 0.5, color=INK, linewidth=0.8, linestyle=":")
    above.vlines(at + 0.5, 0, height, color=INK, linewidth=0.8, linestyle=":")
    above.plot(at + 0.5, height, marker="X" if record.out_of_memory else "o", color=INK, markersize=4, clip_on=False)
    over = offset_copy(above.transData, figure, y=3, units="points")
    return above.text(at + 0.5, height, text, transform=over, ha="center")


def _asked_on_card(shortage: OutOfMemoryRecord) -> int:
    """What the card would have had to hold."""
    return sum(shortage.on_card.values()) + (shortage.asked if shortage.place == "card" else 0)


def _fate(record: SchemeRecord) -> str:
    if record.out_of_memory is None:
        return f"at rest {sizes.text(sum(record.steps[-1].resident.values()))}"
    return f"ends in step {record.out_of_memory.step}" if record.out_of_memory.step else "ends before step 1"


def _shared_scale(axes: Axes, what: str, heights: Sequence[int]) -> None:
    """The y axis of a row of panels, in bytes, labelled in a unit that fits."""
    most = max(heights)
    size, unit = sizes.unit(most)
    axes.set_ylim(0, 1.15 * most or 1)
    axes.yaxis.set_major_locator(MaxNLocator("auto" if most else 1, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
    axes.set_ylabel(f"{what}, {unit}")
