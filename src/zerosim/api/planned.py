"""The answer of a plan as an object: what it says, shows, draws and writes.

Owns ``Planned``. Computes nothing; must not know how a question is asked.
"""

from __future__ import annotations

import html
import io
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from zerosim.api import plan_files
from zerosim.api.plan_arguments import in_python
from zerosim.planner.model_source import ModelSource
from zerosim.records import plan as records
from zerosim.records.files import write_whole
from zerosim.records.plan import Cell
from zerosim.stages import Stage
from zerosim.util import sizes
from zerosim.util.arguments import installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Planned:
    """What training takes: made by ``plan``. In a notebook it shows itself.

    * ``fits``: whether any row fits on the GPUs that were asked for; None where no card was named.
    * ``best``: the first row that fits, the one that shards least, with what it holds and sends; None if none does.
    * ``best.time``: seconds of a step: ``overlapped`` at least, and ``estimate``, with the ``error`` of nine of ten
      published runs, None where it is not known (see ``zerosim.records.plan.StepEstimate`` and docs/time.md).
    * ``record``: everything: see ``zerosim.records.plan``.

    >>> import zerosim as zs
    >>> found = zs.plan([64, 128, 64], gpus=2, memory="250kB")
    >>> found.best.time.overlapped < found.best.time.estimate.seconds, found.best.time.estimate.error
    (True, None)
    >>> found.fits, found.best.name, found.best.fits, sorted(found.to_dict())[:3]
    (True, 'ZeRO-3', True, ['cells', 'cluster', 'created'])
    """

    def __init__(self, record: records.Plan, source: ModelSource) -> None:
        self.record, self._source = record, source

    @property
    def fits(self) -> bool | None:
        """Whether any row fits on every number of GPUs that was asked for."""
        return self.record.fits

    @property
    def best(self) -> Cell | None:
        """The first row that fits on the fewest GPUs that were asked for."""
        return self.record.first_fit(min(self.record.question.asked))

    def table(self) -> Shown:
        """Everything that the command prints with ``-v``, as text, or as HTML in a notebook."""
        from rich.console import Console

        from zerosim.report import plan_console

        console = Console(file=io.StringIO(), highlight=False, width=plan_console.WIDTH)
        plan_console.show(self.record, console, verbose=True, estimates=True)
        assert isinstance(console.file, io.StringIO)
        lines = (line.rstrip() for line in console.file.getvalue().strip("\n").splitlines())
        return Shown(in_python("\n".join(lines)))

    def chart(self) -> Figure:
        """The peaks by band under every row, with the card's line: a matplotlib figure."""
        installed("Planned.chart", "matplotlib", extra="plots", otherwise="save a page, .html")
        from zerosim.report.plan_chart import peaks

        return peaks(self.record)

    def save(
        self, path: str | Path, *, row: Stage | None = None, gpus: int | None = None,
        advance: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """Write it to a file, whole or not at all, in the form that its name ends in.

        * ``.html``: a page with sliders, which opens offline. Every number on it is of a step that is run for it, for
          each choice around what was asked, which takes up to a minute; ``advance`` is called with each.
        * ``.png``, ``.svg``: ``chart()``.
        * ``.trace.json``, or zipped ``.trace.json.gz``: one step for Perfetto, memory by band above computing and
          sending at the estimate's speeds.
        * ``.pickle``: one step as a snapshot of torch's allocator, for https://pytorch.org/memory_viz.
        * ``.json``: the plan, as ``to_dict()``.

        The step is that of ``row`` on ``gpus``, by default ``best``, or the row with the lowest peak if none fits.
        ValueError for another kind of file or a step that was not planned, OSError if it cannot be written,
        ModuleNotFoundError where a chart's library is not installed.

        >>> import pickle
        >>> import zerosim as zs
        >>> found = zs.plan([64, 128, 64], gpus=2, memory="250kB")
        >>> found.save("step.pickle")
        >>> with open("step.pickle", "rb") as file:
        ...     [entries] = pickle.load(file)["device_traces"]
        >>> held = peak = 0
        >>> for entry in entries:
        ...     held += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        ...     peak = max(peak, held)
        >>> peak == found.best.peak.total
        True
        """
        path = Path(path)
        ending = plan_files.form(path, "Planned.save(path)")

        def told(doing: str, total: int | None) -> None:
            if advance is not None:
                advance(doing)

        made, _ = plan_files.content(
            path, ending, self._source, self.record, told, None if row is None else row.name, gpus
        )
        write_whole(path, made)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists, as in the JSON that the command writes."""
        found: dict[str, Any] = msgspec.to_builtins(self.record)
        return found

    def __repr__(self) -> str:
        asked, model = self.record.question, self.record.model
        numbers = ", ".join(f"{ranks:,}" for ranks in asked.asked)
        card = f" × {asked.card or sizes.text(asked.memory)}" if asked.memory else " GPUs"
        verdict = "no card named"
        if asked.memory is not None:
            best = self.best
            verdict = "does not fit"
            if best is not None and best.room is not None:
                verdict = (
                    f"fits with {best.name}: {sizes.text(best.peak.total, binary=asked.binary)} at the peak, "
                    f"{sizes.text(best.room, binary=asked.binary)} to spare"
                )
        said = f"Planned({model.name}, {model.params:,} parameters, on {numbers}{card}: {verdict})"
        return textwrap.fill(said, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.table()._repr_html_()}"


class Shown(str):
    """Text that shows itself as it is: at a prompt, printed, or in a notebook."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<pre style="line-height: 1.2">{html.escape(str(self))}</pre>'
