"""Rows in lockstep on the same batches, and how they compare after every step.

Owns the order in which they are stepped and compared, for the lab and for whoever compares models of their own.
Must not know what is written or drawn of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from zerosim.checks import compare
from zerosim.checks.reference import Reference
from zerosim.counts import Report
from zerosim.lab.experiment import Run
from zerosim.model import MLP
from zerosim.records.results import Difference, Failure, OutOfMemoryRecord, SchemeRecord, Settings
from zerosim.schemes import Scheme
from zerosim.stages import Over, Stage


@runtime_checkable
class Training(Protocol):
    """A row in training, whether predictions exist for it or not."""

    row: Stage
    order: tuple[object, ...]
    out_of_memory: OutOfMemoryRecord | None

    @property
    def running(self) -> bool: ...

    @property
    def blamed(self) -> bool:
        """Whether it is known to be at fault itself, however it compares with others."""
        ...

    @property
    def scheme(self) -> Scheme: ...

    @property
    def reports(self) -> list[Report]: ...

    def step(self, batch: Any) -> None: ...

    def finish(self, *, sanitized: bool) -> list[Failure]: ...

    def record(self) -> SchemeRecord: ...


def predicted(settings: Settings, rows: Sequence[Stage], model: MLP, ranks: int, *, resumes: bool = False) -> list[Run]:
    """A run of each row under all of the lab's checks; those of one order are held to one plain training.

    ``resumes`` says that they are saved and loaded where the settings say so.
    """
    plain: dict[tuple[object, ...], Reference] = {}
    runs = []
    for row in rows:
        order = settings.order(row, ranks)
        if order not in plain:
            plain[order] = Reference(row, settings, ranks)
        runs.append(Run(row, settings, model, ranks, plain[order], resumes=resumes))
    return runs


def together(
    runs: Sequence[Training], batches: Iterable[Any], ranks: int,
    advance: Callable[[int, Stage], None] = lambda step, row: None,
) -> tuple[list[Difference], list[Difference], list[Failure]]:  # fmt: skip
    """Step by step: bits and losses are compared among the runs of one order of summation.

    The second list says how far the first of each further order is from the first of all. ``advance`` is called
    before each step of each row.
    """
    differences: list[Difference] = []
    between: list[Difference] = []
    failures: list[Failure] = []
    for step, batch in enumerate(batches, start=1):
        for each in runs:
            advance(step, each.row)
            each.step(batch)
        orders: dict[tuple[object, ...], list[Training]] = {}
        for each in runs:
            if each.running:
                orders.setdefault(each.order, []).append(each)
        for running in orders.values():
            if running[0] is not (first := next(iter(orders.values()))[0]):
                between.append(compare.compare(running[0].scheme, compare.whole_states(first.scheme), step)[0])
            reference = compare.whole_states(running[0].scheme)
            unlike: list[Failure] = []
            for each in running:
                if each is running[0] and each.scheme.shard.optimizer is Over.ALL:
                    continue  # no copies to compare: its shards against themselves would prove nothing
                difference, found = compare.compare(each.scheme, reference, step)
                differences.append(difference)
                unlike += found
            losses = {each.row.name: each.reports[-1].loss for each in running}
            unlike += compare.same_losses(losses, ranks, step)
            if unlike and not any(each.blamed for each in running):  # or those who are have been named
                failures += _culprits(running, step) or unlike
    for each in runs:
        failures += each.finish(sanitized=False)  # the lab's sweep goes up to this N, and is sanitized
    return differences, between, failures


def _culprits(running: Sequence[Training], step: int) -> list[Failure]:
    """What to say instead where it is the first that differs from all others, and these are alike; else nothing."""
    first, *others = running
    if len(others) < 2:
        return []
    reference = compare.whole_states(others[0].scheme)
    losses = {each.row.name: each.reports[-1].loss for each in others}
    if any(compare.compare(each.scheme, reference, step)[1] for each in others):
        return []
    if compare.same_losses(losses, first.scheme.ring.size, step):
        return []
    mine = {others[0].row.name: others[0].reports[-1].loss, first.row.name: first.reports[-1].loss}
    return compare.compare(first.scheme, reference, step)[1] + compare.same_losses(mine, first.scheme.ring.size, step)
