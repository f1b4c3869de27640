"""The look of every figure: its style, its words and units, and labels that keep out of each other's way.

Must not know what a figure shows.
"""

from __future__ import annotations

import io
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

INK, FAINT = "#333333", "#808080"

_STYLE = {
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.labelcolor": INK,
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
    "svg.hashsalt": "zerosim",  # or the same figure would be another file each time
    "text.color": INK,
}
for _axis in ("xtick", "ytick"):
    _STYLE |= {f"{_axis}.color": FAINT, f"{_axis}.labelcolor": INK, f"{_axis}.labelsize": 8.5}
_LOCK = threading.Lock()  # matplotlib's settings belong to the process
_COLUMNS_PER_INCH = 10.5  # of a headline


@contextmanager
def styled() -> Iterator[None]:
    """Our settings over matplotlib's own, whatever the user's are, for one thread at a time."""
    with _LOCK, style.context(["default", _STYLE]):
        yield


def encoded(figure: Figure, kind: str) -> bytes:
    """The figure as the content of a file: ``"png"``, ``"svg"`` or ``"pdf"``, the same for the same figure."""
    content = io.BytesIO()
    with styled():
        figure.savefig(content, format=kind, dpi=150, metadata={"png": None, "svg": {"Date": None}}.get(kind))
    return content.getvalue()


def ranks_text(count: int) -> str:
    """How many ranks, in words."""
    return f"{count} ranks" if count > 1 else "one rank"


def listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def each_value(values: Mapping[str, int], show: Callable[[int], str]) -> str:
    """Every value with the schemes that have exactly it."""
    shared: dict[int, list[str]] = {}
    for name, value in values.items():
        shared.setdefault(value, []).append(name)
    return ", ".join(f"{show(value)} under {listed(names)}" for value, names in shared.items())


def headline(figure: Figure, text: str) -> None:
    """What the figure found, above it, in as many lines as its width asks for."""
    columns = int(_COLUMNS_PER_INCH * figure.get_figwidth())
    place = {} if figure.get_layout_engine() else {"y": 1 - 0.13 / figure.get_figheight()}  # inches
    figure.suptitle(textwrap.fill(text, columns, break_long_words=False), x=0.012, ha="left", **place)


def legend(figure: Figure, *handles: Line2D | Patch) -> None:
    """The keys below the figure, in one line if they fit."""
    columns = -(-len(handles) // -(-len(handles) // int(1.1 * figure.get_figwidth())))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=1.8, columnspacing=1.5)


def label_end(axes: Axes, x: float, y: float, text: str, colour: str) -> Text:
    """A label to the right of the panel, tied to where its line ends."""
    return axes.annotate(
        text, (x, y), (1.05, y), xycoords="data", textcoords=("axes fraction", "data"), va="center",
        arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.2, "shrinkB": 5, "relpos": (0, 0.5)},
    )  # fmt: skip


def settle(figure: Figure) -> None:
    """Lay the figure out once and for all, so that labels can be placed by what they measure."""
    FigureCanvasAgg(figure)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")


def spread(texts: Sequence[Text], direction: str) -> None:
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
