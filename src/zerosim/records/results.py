"""The recorded results of a lab run: their schema, and how they are written and read.

Owns the schema. Computes nothing.

Bytes and FLOPs are integers, per rank; a list over ranks has one entry per rank, in order.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import msgspec

from zerosim.options import Gather, Options
from zerosim.records.files import Record, encoded, read, write_whole
from zerosim.stages import Stage

SCHEMA = "zerosim.lab/2"
OWN = "your own"  # data that the lab has not drawn

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # bytes, operations, elements: what a reader can count


class Settings(Record):
    """What was asked for.

    ``batch`` is rows per rank; ``seed`` draws the data and ``model_seed`` the initial weights;
    ``capacity`` is the bytes of a card, ``host_capacity`` those of the host for each rank, or None for no
    limit. ``node`` ranks are a group, and ``wire_params`` is what parameters are sent in, if it is not ``wire``.
    ``data`` is ``OWN`` where the caller brought the batches: then the seeds say nothing, and ``batch`` is 0 if it
    was not always the same. ``model`` names a model that ``widths`` do not describe, and ``others`` are the options
    that no field has, in words.
    """

    ranks: Positive
    steps: Count
    batch: Count
    seed: int
    model_seed: int
    precision: str
    wire: str
    gather: str
    data: str
    capacity: Positive | None
    widths: list[Positive]
    node: Positive | None = None
    host_capacity: Positive | None = None
    wire_params: str | None = None
    model: str = ""
    others: dict[str, str] = msgspec.field(default_factory=dict)

    def options(self) -> Options:
        """The options of the training runs. ValueError for what does not go together."""
        return Options(
            precision=self.precision,
            wire=self.wire,
            gather=cast("Gather", self.gather),
            capacity=self.capacity,
            host_capacity=self.host_capacity,
            node=self.node,
            wire_params=self.wire_params,
            keep_reports=self.steps,
        )

    def order(self, row: Stage, ranks: int | None = None) -> tuple[object, ...]:
        """What decides the bits of a row's training under these settings: see ``Stage.order``."""
        return row.on(ranks or self.ranks, self.node).order(self.wire_params)


class Check(StrEnum):
    """What is checked of a lab run."""

    SAME_TRAINING = "same training"  # every scheme holds the bits that data parallel, and plain training, hold
    AS_PREDICTED = "as predicted"  # every count is the closed form's


class PeakRecord(Record):
    """The highest instant: total bytes, the bands at that instant, and whose hold in which phase reached it."""

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
    """One step of one scheme, measured. ``copies`` over the host link are by the place that they go to, and band."""

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
    """One entry of a step's log, as an array: kind, name, unit, bytes, bytes held after it, seconds, phase."""

    kind: str
    name: str
    unit: str
    nbytes: Count
    held: Count
    seconds: float
    phase: str


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
    """One scheme's run: its row, every step measured, the events of the last, and the prediction, if there is one."""

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


class Drift(Record):
    """How far the master weights of one run are from another's after each step."""

    differing: list[Count]
    largest: list[float]


class WholeModelGather(Record):
    """ZeRO-3 that gathers everything at once, beside ZeRO-2 at rest. Bytes per rank."""

    states: Count
    gathered: Count
    zero2_resident: Count
    peak: Count
    peak_by_layer: Count


class NarrowWire(Record):
    """The same run with blocks in the working copy's 16 bits: half the bytes, other bits.

    ``gradient`` compares the averaged gradients of the first step, where nothing else
    differs yet, so that it is the rounding of the hops alone; relative to the largest gradient.
    """

    wire: str
    sent: Count
    sent_fp32: Count
    gradient_differing: Count
    gradient_largest_relative: float
    drift: Drift


class Int8Params(Record):
    """ZeRO-3 that sends parameters in int8, with their scales, beside itself: bytes of one step, the losses of all."""

    sent: Count
    sent_exact: Count
    losses: list[float]
    losses_exact: list[float]


class Ablations(Record):
    """What changes when a rule of the simulator is broken on purpose. None or empty where it does not apply.

    ``whole_model_bucket``, by precision: ZeRO-2 with one bucket for the whole model, so that its
    sums start at other ranks, against data parallel with a bucket per layer. In fp32 each sum is
    rounded otherwise; 16-bit gradients are so short that their sums in fp32 come out exact, or
    nearly always round to the same 16 bits.
    """

    whole_model_gather: WholeModelGather | None
    narrow_wire: NarrowWire | None
    whole_model_bucket: dict[str, Drift]
    int8_params: Int8Params | None = None


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

    def __str__(self) -> str:
        where = f"{self.scheme}, N = {self.ranks}, step {self.step}, "
        where += "every rank" if self.rank < 0 else f"rank {self.rank}"
        return f"{self.check}: {where}: {self.quantity}: measured {self.measured}, expected {self.expected}"


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
            return "nothing was predicted; the closed forms know perceptrons, and the lab's options"
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

    Whether its parts agree with each other is another question: ``soundness.load`` asks both.
    """
    return read(path, SCHEMA, Results)
