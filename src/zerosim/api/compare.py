"""Rows side by side on the same batches, compared after every step, and what can be done with the outcome.

Owns ``compare`` and ``Comparison``. A perceptron under options that the closed forms know gets all
that the lab checks of a step: bits against the other rows and against plain training, counts against
the closed forms. Any other model gets the comparison of bits. Must not know how anything is drawn.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zerosim.api import recording
from zerosim.api.models import Batch, batches_for, model_for, rows_of
from zerosim.counts import Report
from zerosim.lab.as_records import shortage
from zerosim.lab.side_by_side import Training, predicted, together
from zerosim.model import MLP
from zerosim.options import Options, chosen, with_options
from zerosim.ranks import OutOfMemory
from zerosim.records import results as records
from zerosim.records.results import Failure, OutOfMemoryRecord, Results, SchemeRecord
from zerosim.schemes import Scheme
from zerosim.stages import SCHEMES, Stage
from zerosim.util import arguments
from zerosim.util.rows import Said, several


class Comparison:
    """What became of rows that were trained side by side: made by ``compare``, or by ``run.results()`` of one run.

    * ``holds``: whether all rows have learnt the same bits and, where a prediction exists, every count is as
      predicted; ``failures`` say where not.
    * ``results``: everything, as records: see ``zerosim.records.results``.

    >>> import zerosim as zs
    >>> found = zs.compare(zs.MLP(), zs.batches(ranks=4, steps=2), ranks=4)
    >>> found.holds, found.results.scheme("ZeRO-3").steps[-1].peak.total
    (True, 212736)
    """

    def __init__(self, results: Results) -> None:
        self.results = results

    @classmethod
    def of(cls, run: Scheme) -> Comparison:
        """One run that was stepped by hand. ValueError before its first step is complete."""
        done = [report for report in run.reports if report.complete]
        if not done:
            raise ValueError("results: no step of this run is complete. Call step(batch) first.")
        settings = recording.settings_of(run.model, run.ring.size, run.options, steps=len(done))
        record = recording.scheme_record(run.stage, done, done[-1], uneven=run.options.uneven)
        return cls(recording.results(settings, run.model.n_params, [record]))

    @property
    def holds(self) -> bool:
        """Whether nothing that was checked has failed."""
        return not self.results.failures

    @property
    def failures(self) -> list[Failure]:
        """What does not hold: scheme, step, rank, quantity, and both values."""
        return self.results.failures

    def table(self) -> Table:
        """A row for each scheme, and the verdicts; shown as text, or as HTML in a notebook."""
        return Table(self.results)

    def timeline(self) -> Any:
        """A matplotlib figure of the last step under every row. ModuleNotFoundError without the extra ``plots``."""
        arguments.installed("Comparison.timeline", "matplotlib", extra="plots")
        from zerosim.report.timeline import timeline

        return timeline(self.results)

    def report(self, path: str | Path) -> Path:
        """Write a page (.html) that opens offline: verdicts, tables, charts and a player of the last step.

        ValueError for another kind of file, OSError if it cannot be written.
        """
        path = Path(path)
        arguments.ending("Comparison.report", "path", path, "a page", ".html")
        from zerosim.report.page import save_page

        save_page(self.results, path)
        return path

    def save(self, path: str | Path) -> Path:
        """Write the results file (.json), of which ``zerosim report`` makes the page again.

        ValueError for another kind of file, OSError if it cannot be written.
        """
        path = Path(path)
        arguments.ending("Comparison.save", "path", path, "a results file", ".json")
        records.save(self.results, path)
        return path

    def __repr__(self) -> str:
        settings, count = self.results.settings, len(self.results.schemes)
        what = self.results.schemes[0].name if count == 1 else f"{count} schemes"
        short = [record.name for record in self.results.schemes if record.out_of_memory]
        said = [f"{check}: {_verdict(self.results, check)}" for check in records.Check] if count > 1 else []
        said += [f"out of memory: {', '.join(short)}"] if short else []
        steps = f"{settings.steps} step{'s' * (settings.steps != 1)}"
        return f"Comparison({'; '.join([f'{what} on {settings.ranks} ranks, {steps}', *said])})"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _verdict(results: Results, check: records.Check) -> str:
    if any(failure.check == check for failure in results.failures):
        return "fails"
    return "nothing to compare" if results.nothing_compared(check) else "holds"


class Table:
    """A table that is text where text is wanted, and HTML in a notebook."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def __str__(self) -> str:
        from zerosim.report.lab_console import shown

        return shown(self._results)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<pre style="line-height: 1.2">{html.escape(str(self))}</pre>'


@with_options
def compare(
    model: Any,
    batches: Iterable[Any],
    *,
    ranks: int = 8,
    rows: Iterable[Said] | Said = SCHEMES,
    wrap: Any = None,
    loss: Any = None,
    options: Options | None = None,
    **keywords: Any,
) -> Comparison:
    """Train ``model`` under each of ``rows`` on the same batches, and compare after every step.

    * ``model``: an ``MLP``, or a ``torch.nn.Module``, whose ``wrap`` (the class of its blocks; by default its own
      parts) and ``loss`` (of output and target; by default cross entropy) may be said.
    * ``batches``: for each step one (x, y) per rank, arrays or tensors, or for a module several in a tuple or by
      name; see ``batches``.
    * ``rows``: rows, or their names as the command line takes them, as in ``["dp", "zero-3"]``; one alone will do.
    * Options come as keywords, as one record, or as both. With ``accumulate`` all rows reduce after each
      micro-batch unless ``sync`` says otherwise: rows that reduce at other times sum in another order.

    A row that runs out of a card's memory (``capacity=``) is recorded as such. ValueError or TypeError for
    what cannot be trained.

    >>> import zerosim as zs
    >>> zs.compare(zs.MLP(), zs.batches(ranks=8, steps=3), ranks=8)
    Comparison(4 schemes on 8 ranks, 3 steps; same training: holds; as predicted: holds)
    """
    ranks = arguments.integer("compare", "ranks", ranks)
    chosen_rows = several("compare", "rows", rows)
    if not chosen_rows or len({row.name for row in chosen_rows}) < len(chosen_rows):
        names = [row.name for row in chosen_rows]
        raise ValueError(f"compare(rows): one or more rows, each of another name; got {names}.")
    given = batches_for("compare", batches, ranks)
    built = model_for("compare", model, given[0][0][0], wrap=wrap, loss=loss)
    asked = chosen(options, keywords)
    if asked.accumulate > 1 and asked.sync is None:
        asked = chosen(asked, {"sync": "each"})
    settings = recording.settings_of(built, ranks, asked, steps=len(given), rows=rows_of(given))
    runs: Sequence[Training]
    if type(built) is MLP and settings.batch and not settings.others and asked.recipe.everywhere:
        runs = predicted(settings, chosen_rows, built, ranks)
    else:
        runs = [_Plain(row, built, ranks, asked) for row in chosen_rows]
    differences, between, failures = together(runs, given, ranks)
    params = built.n_params
    return Comparison(
        recording.results(settings, params, [each.record() for each in runs], differences, between, failures)
    )


# -- the runs


class _Plain:
    """A row in training that nothing predicts."""

    def __init__(self, row: Stage, model: Any, ranks: int, options: Options) -> None:
        self.row, self._options = row, options
        self.order = row.on(ranks, options.node).order(options.wire_params)
        self.out_of_memory: OutOfMemoryRecord | None = None
        self._scheme: Scheme | None = None
        try:
            self._scheme = row(model, ranks, options)
        except OutOfMemory as error:
            self.out_of_memory = shortage(error, 0)

    @property
    def running(self) -> bool:
        return self.out_of_memory is None

    @property
    def blamed(self) -> bool:
        return False  # there is nothing but the others to compare it with

    @property
    def scheme(self) -> Scheme:
        assert self._scheme is not None
        return self._scheme

    @property
    def reports(self) -> list[Report]:
        return [report for report in self._scheme.reports if report.complete] if self._scheme else []

    def step(self, batch: Batch) -> None:
        if self.running:
            try:
                self.scheme.step(batch)
            except OutOfMemory as error:
                self.out_of_memory = shortage(error, len(self.scheme.reports))

    def finish(self, *, sanitized: bool) -> list[Failure]:
        return []

    def record(self) -> SchemeRecord:
        log = self._scheme.reports[-1] if self._scheme and self._scheme.reports else None
        uneven = self._options.uneven
        return recording.scheme_record(self.row, self.reports, log, self.out_of_memory, uneven=uneven)


__all__ = ["Comparison", "compare"]
