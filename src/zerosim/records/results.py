"""The recorded results of a lab run: their schema, and how they are written and read.

Owns the schema. Computes nothing.

Bytes and FLOPs are integers, per rank; a list over ranks has one entry per rank, in order.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from zerosim.records.ablations import Ablations, Count
from zerosim.records.files import Record, encoded, read, write_whole
from zerosim.records.settings import OWN as OWN
from zerosim.records.settings import Positive
from zerosim.records.settings import Settings as Settings
from zerosim.stages import Stage

SCHEMA = "zerosim.lab/2"


class Check(StrEnum):
    """What is checked of a lab run."""

    SAME_TRAINING = "same training"  # every scheme holds the bits that data parallel, and plain training, hold
    AS_PREDICTED = "as predicted"  # every count is the closed form's


class PeakRecord(Record):
    """The peak: total bytes, the bands at that instant, and whose hold in which phase reached it."""

    total: Count
    by_band: dict[str, Count]
    unit: str
    phase: str


class TrafficRecord(Record):
    """What one collective moved for one band in a step; ``outside`` is what left the rank's node, or all of a node."""

    collective: str
    band: str
    sent: list[Count]
    received: list[Count]
    padding: list[Count]
    messages: Count
    outside: list[Count]
    node_outside: Count


class StepRecord(Record):
    """One step of one scheme, measured. ``copies`` over the host link are by the place that they go to, and band.

    ``mean_of_means`` is what averaging the ranks' own losses would have given, which is another number where they
    have different rows. ``prediction`` is what the closed forms say of this step, where it is not what they say of
    the last.
    """

    step: Count
    loss: float
    resident: dict[str, Count]
    padding: list[Count]
    peak: PeakRecord
    peak_without_activations: PeakRecord
    traffic: list[TrafficRecord]
    flops: dict[str, Count]
    seconds: dict[str, float]
    host: dict[str, Count]
    host_peak: PeakRecord
    copies: dict[str, dict[str, Count]]
    mean_of_means: float | None = None
    norm: float | None = None
    scale: float = 1.0
    skipped: bool = False
    prediction: Prediction | None = None

    def sent(self) -> int:
        """Bytes sent by the busiest rank, all collectives together."""
        return max((sum(column) for column in zip(*(moved.sent for moved in self.traffic), strict=True)), default=0)

    def node_outside(self) -> int:
        """Bytes that left each node, all collectives together."""
        return sum(moved.node_outside for moved in self.traffic)

    def copied(self) -> int:
        """Bytes that each rank copied over its host link, both ways together."""
        return sum(sum(bands.values()) for bands in self.copies.values())


class Prediction(Record):
    """What the closed forms say of one step of one scheme."""

    resident: dict[str, Count]
    peak: dict[str, Count]
    peak_without_activations: dict[str, Count]
    traffic: dict[str, dict[str, Count]]
    padding: list[Count]
    padding_sent: list[Count]
    flops: dict[str, Count]
    node_outside: dict[str, dict[str, Count]]
    host: dict[str, Count]
    host_peak: dict[str, Count]
    copies: dict[str, dict[str, Count]]


class EventRecord(Record, array_like=True):
    """One entry of a step's log, as an array: kind, name, unit, bytes, bytes held after it, seconds, phase, outside.

    ``outside`` is what left each node by all of its ranks, and with the bytes of one rank says which ring it was:
    nothing leaves in the group's, one rank's share in that of all, every rank's in that of the replicas.
    """

    kind: str
    name: str
    unit: str
    nbytes: Count
    held: Count
    seconds: float
    phase: str
    outside: Count = 0


class OutOfMemoryRecord(Record):
    """Where a run ended for want of memory. ``step`` is 0 if the model states alone were too much.

    ``place`` says whose memory it was, ``"card"`` or ``"host"``, ``held`` what was there, and ``on_card`` what
    was on the card, whichever it was.
    """

    step: Count
    rank: Count
    band: str
    unit: str
    asked: Count
    held: dict[str, Count]
    place: str
    on_card: dict[str, Count]


class SchemeRecord(Record):
    """One scheme's run: its row, every step measured, the events of the last, and the prediction, if there is one.

    That is of the last step; steps of which something else is predicted have it with them.
    """

    row: Stage
    prediction: Prediction | None
    steps: list[StepRecord]
    events: list[EventRecord]
    out_of_memory: OutOfMemoryRecord | None

    @property
    def name(self) -> str:
        """The row's."""
        return self.row.name


class Difference(Record):
    """The same training, for a scheme after a step: elements whose bits differ over all ranks, and by how much.

    By band, against the first scheme that is still running; that one, where its ranks hold whole
    states, against its own first rank.
    """

    scheme: str
    step: Count
    differing: dict[str, Count]
    largest: dict[str, float]


class SweepRow(Record):
    """A scheme on N ranks: bytes per rank, measured and predicted, and the events of the last step.

    Zero and empty where the run ran out of memory.
    """

    ranks: Count
    scheme: str
    resident: Count
    resident_predicted: Count
    peak: Count
    peak_predicted: Count
    peak_without_activations: Count
    peak_without_activations_predicted: Count
    sent: Count
    sent_predicted: Count
    host_peak: Count
    host_peak_predicted: Count
    fits: bool
    fits_predicted: bool
    resident_by_band: dict[str, Count]
    events: list[EventRecord]


class Failure(Record):
    """A check that does not hold: where, and both values. ``rank`` is -1 where it concerns them all."""

    check: str
    scheme: str
    ranks: Count
    step: Count
    rank: int
    quantity: str
    measured: str
    expected: str

    @property
    def found(self) -> str:
        """Where it was found, what of, and both values."""
        where = f"{self.scheme}, N = {self.ranks}, step {self.step}, "
        where += "every rank" if self.rank < 0 else f"rank {self.rank}"
        return f"{where}: {self.quantity}: measured {self.measured}, expected {self.expected}"

    def __str__(self) -> str:
        return f"{self.check}: {self.found}"


class Results(Record):
    """Everything that a lab run found."""

    schema: str
    created: str
    versions: dict[str, str]
    settings: Settings
    n_params: Positive
    schemes: list[SchemeRecord]
    differences: list[Difference]
    between_orders: list[Difference]  # of rows that sum in different orders: no failure
    sweep: list[SweepRow]
    ablations: Ablations
    failures: list[Failure]

    def parting(self) -> str:
        """Why rows of different orders do not agree in every bit; nothing where all are of one order."""
        orders = {self.settings.order(record.row) for record in self.schemes}
        if len(orders) < 2:
            return ""
        if self.settings.wire_params == "int8":
            return "parameters are rounded to int8 where they are sent, and these rows send other pieces of them"
        return "one adds the gradients of all ranks in a ring, the other those of each group and then of the groups"

    def stepwise(self) -> list[tuple[SchemeRecord, StepRecord]]:
        """Where steps have more to tell than a loss: those of the first completed scheme of each order."""
        settings = self.settings
        if not (settings.clip or settings.loss_scale or settings.uneven):
            return []
        first: dict[tuple[object, ...], SchemeRecord] = {}
        for record, _ in self.completed():
            first.setdefault(settings.order(record.row), record)
        return [(record, step) for record in first.values() for step in record.steps]

    def naive(self) -> str:
        """What the mean of the ranks' own means would have been, in words; nothing where it is what was taken."""
        for _, step in self.completed():
            if step.mean_of_means is not None and self.settings.average == "rows":
                return (
                    f"Uneven batches: over all rows the loss of step {step.step} is {step.loss:.6f}; the naive mean of "
                    f"the ranks' means, 0 where there are no rows, would have been {step.mean_of_means:.6f}."
                )
        return ""

    def completed(self) -> list[tuple[SchemeRecord, StepRecord]]:
        """Each scheme that completed all steps, with the last of them."""
        return [(record, record.steps[-1]) for record in self.schemes if record.out_of_memory is None]

    def base(self) -> SchemeRecord | None:
        """The scheme that the others are measured against: the first that shards nothing and has completed."""
        return next((record for record, _ in self.completed() if not record.row.optimizer), None)

    def nothing_compared(self, check: str) -> str:
        """Why a check that does not fail has found nothing either, or nothing if it has compared something."""
        if check == Check.SAME_TRAINING:
            alone = "there is one scheme" if len(self.schemes) == 1 else "no two schemes completed a step"
            return "" if self.differences else alone
        if all(record.prediction is None for record in self.schemes):
            if self.settings.model:
                return "nothing was predicted: there are closed forms for zs.MLP alone"
            return "nothing was predicted: the lab and zs.compare do, for an MLP under the lab's options"
        completed = any(record.steps for record in self.schemes) or any(row.fits for row in self.sweep)
        return "" if completed else "no step was completed; that none would be is as predicted"

    def scheme(self, name: str) -> SchemeRecord:
        """The record of the scheme of that name."""
        return next(record for record in self.schemes if record.name == name)


def encode(results: Results) -> bytes:
    """The results as indented JSON."""
    return encoded(results)


def save(results: Results, path: Path) -> None:
    """Write the results to ``path``, whole or not at all."""
    write_whole(path, encode(results))


def load(path: Path) -> Results:
    """Read what ``save`` wrote. ResultsError, with the reason, for anything else.

    Whether its parts agree with each other is another question: ``lab.record.load`` asks both.
    """
    return read(path, SCHEMA, Results)
