"""A lab's record held to what it is a record of: the run that was made, and the settings that it names.

Owns both questions. The lab asks the first before it writes, and the second of the file that it has written;
``zerosim report`` asks the second of any file. Must not know what the page makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerosim import theory
from zerosim.lab.as_records import prediction
from zerosim.lab.experiment import batches_of, job_of, model_of, rows_of
from zerosim.records import consistency, results
from zerosim.records.files import ResultsError
from zerosim.records.results import OWN, Check, Failure, Prediction, Results, SchemeRecord
from zerosim.schemes import Scheme


def unlike(record: SchemeRecord, scheme: Scheme, losses: Sequence[float], *, resumed: bool) -> list[Failure]:
    """What the record of a run says otherwise than the run: the losses that it returned, and its totals by now.

    ``resumed`` says that its ledger has not all steps.
    """
    sent = [sum(rank) for rank in zip(*(moved.sent for step in record.steps for moved in step.traffic), strict=False)]
    ledger, last = scheme.ledger, record.steps[-1]
    pairs: dict[str, tuple[Any, Any]] = {
        "losses": ([repr(step.loss) for step in record.steps], [repr(loss) for loss in losses]),
        "bytes by band at rest": (
            {band: last.resident.get(band, 0) + last.host.get(band, 0) for band in {**last.resident, **last.host}},
            scheme.ranks[0].held(),
        ),
    }
    if not resumed:
        pairs["bytes sent so far by each rank"] = (sent or [0] * len(scheme.ring.ids), ledger.sent())
        pairs["the peak so far"] = (max(step.peak.total for step in record.steps), ledger.peak().total)
    return [
        Failure(
            check=Check.AS_PREDICTED, scheme=scheme.name, ranks=scheme.ring.size, step=last.step, rank=-1,
            quantity=f"{what}, as recorded", measured=_first(*pair), expected=_first(*pair[::-1]),
        )
        for what, pair in pairs.items()
        if pair[0] != pair[1]
    ]  # fmt: skip


def _first(one: Any, other: Any) -> str:
    """A value, or of a list the first that is not the other's."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next(str(mine) for mine, its in zip(one, other, strict=True) if mine != its)
    return str(one)


def contradictions(found: Results) -> Iterator[str]:
    """Everything in the results that cannot be: by themselves, and by the closed forms of their settings."""
    yield from consistency.contradictions(found)
    settings = found.settings
    if settings.data == OWN or not settings.widths:
        return
    model = model_of(settings)
    resumes = settings.resume_at is not None
    batches = list(batches_of(settings, settings.ranks, settings.steps, resumed=True)) if settings.uneven else []
    known: dict[theory.Job, Prediction] = {}
    for record in found.schemes:
        if record.prediction is None or record.out_of_memory is not None:
            continue
        for step in record.steps:
            ranks = settings.ranks_in(step.step) if resumes else settings.ranks
            job = replace(job_of(settings, model, record.row, ranks), skipped=step.skipped)
            if settings.uneven:
                rows = rows_of(batches[step.step - 1])
                job = replace(job, rows=sum(rows), accumulate=len(rows), parts=rows)
            if job not in known:
                known[job] = prediction(job)
            if known[job] != (step.prediction or record.prediction):
                yield f"{record.name}: what is predicted of step {step.step} is not of these settings"
                break


def load(path: Path) -> Results:
    """The results in a file. ResultsError, with the reason, if it is damaged or foreign, or cannot have been found."""
    found = results.load(path)
    for reason in contradictions(found):
        raise ResultsError(f"{path}: its parts do not fit together: {reason}. Run the lab again.")
    return found


def check_written(path: Path, found: Results) -> None:
    """Refuse a file that the run was written to and that does not say what was found. ResultsError, with the reason."""
    if results.encode(load(path)) != results.encode(found):
        raise ResultsError(f"{path.name}: what was written is not what was found")
