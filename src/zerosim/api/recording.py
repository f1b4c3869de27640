"""A run of one's own as records, so that it has the figures, the page and the file that the lab's have.

Owns how a ``Scheme`` that was stepped by hand is described: its settings, as far as there are
words for them. Must not know what is made of the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from zerosim.counts import Report
from zerosim.lab.as_records import event_records, step_record
from zerosim.lab.suite import versions
from zerosim.model import MLP
from zerosim.options import Options
from zerosim.records.ablations import Ablations
from zerosim.records.results import (
    OWN,
    SCHEMA,
    Difference,
    Failure,
    OutOfMemoryRecord,
    Results,
    SchemeRecord,
    Settings,
)
from zerosim.stages import Stage

NOTHING = Ablations(whole_model_gather=None, narrow_wire=None, whole_model_bucket={})


def settings_of(model: Any, ranks: int, options: Options, *, steps: int, rows: int = 0) -> Settings:
    """What was asked for. ``rows`` is those of each rank's batch, or 0 where they are not always the same."""
    said = {name: getattr(options, name) for name in shared_options()}
    default = Options()
    others = {
        each.name: str(getattr(options, each.name))
        for each in fields(Options)
        if each.name not in said and getattr(options, each.name) != getattr(default, each.name)
    }
    perceptron = isinstance(model, MLP)
    return Settings(
        ranks=ranks, steps=steps, batch=rows, seed=0, model_seed=model.seed if perceptron else 0, data=OWN,
        widths=list(model.widths) if perceptron else [], model="" if perceptron else type(model).__name__,
        others=others, **said,
    )  # fmt: skip


def shared_options() -> list[str]:
    """The options that settings have fields for."""
    return [each.name for each in fields(Options) if each.name in Settings.__struct_fields__]


def scheme_record(
    row: Stage, reports: Sequence[Report], log: Report | None, ended: OutOfMemoryRecord | None = None, *,
    uneven: bool = False,
) -> SchemeRecord:  # fmt: skip
    """A run without a prediction: the steps that completed, and the log of one report."""
    return SchemeRecord(
        row=row,
        prediction=None,
        steps=[step_record(report, uneven=uneven) for report in reports if report.complete],
        events=event_records(log) if log else [],
        out_of_memory=ended,
    )


def results(
    settings: Settings, params: int, schemes: Sequence[SchemeRecord], differences: Sequence[Difference] = (),
    between: Sequence[Difference] = (), failures: Sequence[Failure] = (),
) -> Results:  # fmt: skip
    """The records as one, without a sweep over N."""
    return Results(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        settings=settings,
        n_params=params,
        schemes=list(schemes),
        differences=list(differences),
        between_orders=list(between),
        sweep=[],
        ablations=NOTHING,
        failures=list(failures),
    )
