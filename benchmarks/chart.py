"""Owns the chart of benchmarks/README.md: one bar for each side and scheme, from the records, on a log axis."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cases import STAGES
from zerosim.records.files import write_whole
from zerosim.report.colors import PLACES
from zerosim.report.figure_style import INK, headline, legend, styled

SCHEMES = dict(zip(STAGES, PLACES, strict=False))
CASES = {"mission": "32 ranks of 33,088 parameters", "large": "32 ranks of 6.3 million parameters"}


def draw(records: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Write the chart of the recorded precisions, as PNG."""
    drawn, content = figure(records), io.BytesIO()
    with styled():
        drawn.savefig(content, format="png", dpi=150)
    write_whole(path, content.getvalue())


@styled()
def figure(records: Mapping[str, dict[str, Any]]) -> Figure:
    """A panel for each case and precision: groups of bars are sides, the bars in a group the schemes."""
    precisions = [name for name in ("fp32", "mixed") if name in records]
    panels = {(case, name): _rows(records[name], case) for case in CASES for name in precisions}
    cases = [case for case in CASES if any(panels[case, name] for name in precisions)]
    chart = Figure(figsize=(11, 1 + 3 * max(1, len(cases))), layout="constrained")
    grid = chart.subplots(len(cases) or 1, len(precisions) or 1, squeeze=False, sharey="row")
    for line, case in zip(grid, cases, strict=False):
        sides = dict.fromkeys(side for name in precisions for row in panels[case, name] for side in row["sides"])
        for axes, name in zip(line, precisions, strict=True):
            _panel(axes, panels[case, name], list(sides))
            axes.set_title(f"{CASES[case]}, {name}")
        line[0].set_ylabel("ms per step (log scale)")
    headline(chart, "One training step on one core")
    legend(chart, *(Patch(color=colour, label=scheme) for scheme, colour in SCHEMES.items()))
    return chart


def _rows(record: dict[str, Any], case: str) -> list[dict[str, Any]]:
    return [row for row in record["steps"] if row["case"] == case]


def _panel(axes: Axes, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="x", visible=False)
    for index, row in enumerate(rows):
        width, sides = 0.8 / len(rows), row["sides"]
        places = [names.index(side) + (index - (len(rows) - 1) / 2) * width for side in sides]
        heights = [side["ms"] for side in sides.values()]
        bars = axes.bar(places, heights, width * 0.94, color=SCHEMES[row["scheme"]])
        texts = [f"{height:.3g}" if height < 1000 else f"{height:,.0f}" for height in heights]
        axes.bar_label(bars, texts, rotation=90, fontsize=6.5, padding=2, color=INK)
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.tick_params(axis="x", length=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 3)  # room for the numbers
