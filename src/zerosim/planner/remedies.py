"""What takes less where nothing fits: the same question with one option changed, each tried.

Owns which changes are tried, and in which order they are told. Must not know how a step is run or shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from zerosim.planner.model_source import ModelSource
from zerosim.planner.question import offloaded
from zerosim.planner.runner import Runner
from zerosim.records.plan import NoFit, Remedy
from zerosim.records.question import Question
from zerosim.schemes import Stage, ZeRO3


def tried(source: ModelSource, question: Question, least: NoFit, usable: int) -> list[Remedy]:
    """Those that take less than the least of what was asked: first what a card has room for, then the lowest peak."""
    found = []
    for option, changed, row, ranks in _changes(source, question, least):
        try:
            peak = Runner(source, changed).run(row, ranks).peak.total
        except ValueError:  # as of a model that has no such choice
            continue
        if peak < least.peak.total:
            found.append(Remedy(option=option, ranks=ranks, peak=peak, fits=peak <= usable))
    return sorted(found, key=lambda each: (not each.fits, each.peak))


def _changes(source: ModelSource, question: Question, least: NoFit) -> Iterator[tuple[str, Question, Stage, int]]:
    """An option as it is typed, the question with it, and the row and the N that are run with it."""
    row, ranks = least.row, least.ranks
    if not any(each.params for each in question.rows):
        yield "--scheme zero3", question, ZeRO3, max(*question.asked, ranks)
    if question.checkpoint != "full":
        yield "--checkpoint full", replace(question, checkpoint="full"), row, ranks
    if (rows := question.micro_batch // 2) and question.global_batch is None:
        yield f"--micro-batch {rows}", replace(question, micro_batch=rows), row, ranks
    if question.loss == "fp32" and (question.sequence or source.sequence):
        yield "--loss chunked", replace(question, loss="chunked"), row, ranks
    if (tokens := (question.sequence or source.sequence or 0) // 2) and tokens * question.micro_batch > 1:
        yield f"--seq {tokens}", replace(question, sequence=tokens), row, ranks
    if not row.offload and row.params:
        yield "--offload params", question, offloaded([row], "params")[0], ranks
