"""The chart of a plan: the peaks of its rows on each number of GPUs, stacked by band, and the card's line.

Owns how a plan is drawn. Takes records; computes nothing but units. Must not know the simulator.
"""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zerosim.bands import Band
from zerosim.records.plan import Cell, Plan
from zerosim.report import colors as palette
from zerosim.report.figure_style import FAINT, INK, headline, legend, settle, styled
from zerosim.util import sizes

VISIBLE = 1 / 500  # of the scale: what is thinner needs no key
OVER = "#B3261E"  # beyond the card
UNITS = {False: ("B", "kB", "MB", "GB", "TB", "PB"), True: ("B", "KiB", "MiB", "GiB", "TiB", "PiB")}


def drawn(plan: Plan, form: str) -> bytes:
    """The chart as ``"png"`` or ``"svg"``."""
    content = io.BytesIO()
    figure = peaks(plan)
    with styled():
        figure.savefig(content, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return content.getvalue()


@styled()
def peaks(plan: Plan) -> Figure:
    """A panel for each N, a bar for each row, on one scale."""
    numbers = plan.question.gpus
    per_panel = len(plan.question.rows)
    width = min(16.0, max(8.4, 2.2 + len(numbers) * (0.35 + 0.5 * per_panel)))
    figure = Figure(figsize=(width, 5), layout="constrained")
    panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    unit, factor = _unit(plan)
    for axes, ranks in zip(panels, numbers, strict=True):
        _panel(axes, plan, ranks, factor, last=ranks == numbers[-1])
    panels[0].set_ylabel(f"{unit} that a GPU holds at the peak of a step")
    panels[0].set_ylim(0, 1.12 * _top(plan) / factor)
    headline(figure, _finding(plan))
    bands = [band for band in Band if any(cell.peak.by_band.get(band, 0) > VISIBLE * _top(plan) for cell in plan.cells)]
    legend(figure, *(Patch(color=palette.BANDS[band], label=str(band)) for band in bands))
    settle(figure)
    return figure


def _panel(axes: Axes, plan: Plan, ranks: int, factor: int, *, last: bool) -> None:
    cells = plan.at(ranks)
    for place, cell in enumerate(cells):
        below = 0.0
        for band in Band:
            if nbytes := cell.peak.by_band.get(band, 0):
                axes.bar(place, nbytes / factor, 0.72, below, color=palette.BANDS[band])
                below += nbytes / factor
        axes.annotate(
            f"{below:.3g}", (place, below), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=7.5,
            color=OVER if cell.fits is False else INK, fontweight="bold" if cell.fits is False else "normal", zorder=5,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip
    memory = plan.question.memory
    if memory is not None and memory <= _top(plan):
        axes.axhline(memory / factor, color=OVER, linewidth=1.2, linestyle="--", zorder=3)
        if last:
            axes.annotate(
                "card", (1, memory / factor), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                color=OVER, fontsize=8, ha="right", zorder=5,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
    axes.set_xticks(range(len(cells)), [_initials(cell.name) for cell in cells])
    axes.set_xlabel(f"N = {ranks:,}", fontweight="bold" if ranks in plan.question.asked else "normal")
    axes.grid(False, axis="x")
    axes.tick_params(axis="x", length=0)
    axes.spines["bottom"].set_color(FAINT)


def _initials(name: str) -> str:
    """What fits below a bar: DP, Z1; a name of one short word as it is."""
    words = name.replace("-", " ").split()
    if len(words) < 2 and len(name) < 7:
        return name
    return "".join(word if word.isdigit() else word[0].upper() for word in words)


def _top(plan: Plan) -> int:
    """The highest bar, or the card's line, unless that is far above all bars; bytes."""
    highest = max(cell.peak.total for cell in plan.cells)
    memory = plan.question.memory
    return highest if memory is None or memory > 2 * highest else max(highest, memory)


def _unit(plan: Plan) -> tuple[str, int]:
    """The unit of the scale: the largest that the highest bar reaches."""
    top = max([cell.peak.total for cell in plan.cells])
    names = UNITS[plan.question.binary]
    name = next((each for each in reversed(names) if top >= sizes.UNITS[each]), names[0])
    return name, sizes.UNITS[name]


def _finding(plan: Plan) -> str:
    """What there is to see, for the number of GPUs that was asked for."""
    ranks = plan.question.asked[-1]
    text = _short(plan.model.name)
    if plan.question.memory is None:
        cells = plan.at(ranks)
        low, high = min(cells, key=_total), max(cells, key=_total)
        return (
            f"{text} on {ranks:,}: from {_size(plan, high.peak.total)} under {high.name} "
            f"to {_size(plan, low.peak.total)} under {low.name}"
        )
    first = plan.first_fit(ranks)
    where = (
        f"{ranks:,} cards of {_size(plan, plan.question.memory)}"
        if ranks > 1
        else f"a card of {_size(plan, plan.question.memory)}"
    )
    if first is None:
        return f"{text} on {where}: no scheme fits"
    return f"{text} on {where}: {first.name} is enough, at {_size(plan, first.peak.total)}"


def _short(name: str) -> str:
    name = name.partition(" (")[0]
    return name if len(name) < 36 else f"{name[:16]}…{name[-16:]}"


def _total(cell: Cell) -> int:
    return cell.peak.total


def _size(plan: Plan, nbytes: int) -> str:
    return sizes.text(nbytes, binary=plan.question.binary)
