"""What a plan says: its schema, and how it is written and read.

Owns the schema. Computes nothing but sums of what is in a record. Bytes and FLOPs are
integers, per rank. Knows of the simulator only what a row is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from zerosim.records.files import Record, encoded, read, write_whole
from zerosim.records.question import Natural, Positive, Question
from zerosim.stages import Stage

SCHEMA = "zerosim.plan/4"


class Unit(Record):
    """Something that is gathered and reduced as a whole, and how many there are of its size in a row."""

    name: str
    params: int
    count: Positive = 1


class ModelRecord(Record):
    """What was found out about the model. ``sequence`` is None where there is none."""

    name: str
    kind: str
    params: Positive
    trainable: int
    frozen: int
    buffers: int
    units: list[Unit]
    sequence: int | None
    notes: list[str]


class Peak(Record):
    """The peak of a step: total bytes, the bands at that point, and whose allocation in which phase reached it.

    ``by_unit``: what comes and goes within a step, by the units that held the most of it, largest first.
    """

    total: int
    by_band: dict[str, int]
    unit: str
    phase: str
    by_unit: dict[str, int]

    @property
    def largest(self) -> str:
        """The band that holds the most."""
        return max(self.by_band, key=lambda band: self.by_band[band], default="")


class Traffic(Record):
    """What a rank sends in a step by one collective for one band; ``between`` are bytes that leave a node, of all its
    ranks."""

    collective: str
    band: str
    sent: int
    messages: int
    between: int = 0


class Host(Record):
    """What a rank has of the host's memory, and ``copied`` bytes over its link to the host in a step.

    ``room`` is what a node's memory has left at the peak of all its ranks, negative if it's short; None if it was
    not said.
    """

    resident: dict[str, int]
    peak: Natural
    copied: Natural
    room: int | None

    @property
    def short(self) -> bool:
        """Whether a node's memory is known, and too small."""
        return self.room is not None and self.room < 0


class Shortage(Record):
    """The allocation that a card, or its host, has no room for: of which band, for which unit, and what is held by
    then."""

    band: str
    unit: str
    asked: int
    held: dict[str, int]


class StepEstimate(Record):
    """The seconds that a step is expected to take, computing and sending that nothing hides; what binds it.

    ``error``: nine of ten published runs took up to this part more or less. None where that is not known, as there was
    no run like it, and of an efficiency that the reader states.
    """

    seconds: float
    computing: float
    exposed: float
    binding: str
    error: float | None


class Time(Record):
    """The least seconds of a step, at the card's peak: without overlap and with it, and what binds it; and beside it
    how long the step is expected to take."""

    compute: float
    bandwidth: float
    latency: float
    serial: float
    overlapped: float
    binding: str
    estimate: StepEstimate | None = None


class Cluster(Record):
    """What the time is for: the card, FLOP/s by dtype, bytes/s, seconds a hop. ``efficiency`` is the part of the peak
    that was stated for the estimate, if one was."""

    card: str
    assumed: bool
    dtype: str
    peak: float
    efficiency: float | None
    within: float
    between: float
    node: int
    hop_within: float
    hop_between: float
    source: str


class Saved(Record):
    """Bytes of a checkpoint of the model states, gradients left out and replicas once, file headers left out.

    ``total`` of all files, ``rank`` of the largest, the first rank's. ``whole`` is one file with all parameters in
    fp32; to put it together takes ``by_layer`` at the peak a layer at a time, and ``whole`` where everything is
    gathered on one rank first.
    """

    total: Natural
    rank: Natural
    whole: Natural
    by_layer: Natural


class Cell(Record):
    """A step of one row on N GPUs. ``room`` is what a card has left at the peak, negative if it's short, and
    ``reserve`` what of that is for what no ledger sees."""

    row: Stage
    ranks: Positive
    resident: dict[str, int]
    peak: Peak
    traffic: list[Traffic]
    flops: dict[str, int]
    room: int | None
    reserve: Natural
    shortage: Shortage | None
    time: Time | None
    saved: Saved
    host: Host | None = None

    @property
    def name(self) -> str:
        """The row's."""
        return self.row.name

    @property
    def at_rest(self) -> int:
        """Bytes held between steps."""
        return sum(self.resident.values())

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(moved.sent for moved in self.traffic)

    @property
    def fits(self) -> bool | None:
        """Whether a card holds it and the reserve, or None where no card was named."""
        return None if self.room is None else self.room >= self.reserve and not self._host_short

    @property
    def tight(self) -> bool:
        """Whether a card holds it, but not the reserve."""
        return self.room is not None and 0 <= self.room < self.reserve and not self._host_short

    @property
    def _host_short(self) -> bool:
        return self.host is not None and self.host.short

    @property
    def between(self) -> int:
        """Bytes that leave a node in a step, of all its ranks."""
        return sum(moved.between for moved in self.traffic)


class SmallestRanks(Record):
    """The smallest N on which a row fits, in whole and by its model states alone; None if none up to ``limit``."""

    row: Stage
    ranks: int | None
    states_alone: int | None
    limit: Positive


class LargestBatch(Record):
    """The largest micro-batch of a row on N GPUs; 0 if one is too many, ``at_least`` if the search ended there."""

    row: Stage
    ranks: Positive
    micro_batch: Natural
    at_least: bool


class Remedy(Record):
    """An option with which a step takes less, as it was tried: on how many GPUs, its peak, and whether a card holds it
    beside the reserve."""

    option: str
    ranks: Positive
    peak: Natural
    fits: bool


class NoFit(Record):
    """A card too small for any N: the row and the N that need least, what they need, what is to blame, and what was
    tried and takes less."""

    row: Stage
    ranks: Positive
    peak: Peak
    shortage: Shortage
    remedies: tuple[Remedy, ...] = ()


class Surprise(Record):
    """A row that needs more than the one before it, or more GPUs more than fewer; and the band that grew most."""

    lower: str
    higher: str
    quantity: Literal["at rest", "peak"]
    more: Positive
    band: str
    band_more: int


class Estimate(Record):
    """What a well-known formula says of the same question, and why ours differs.

    ``beside``: what the formula has more of than the ledger, or below zero less, by band; equal bands are out.
    """

    name: str
    row: Stage
    ranks: Positive
    formula: str
    nbytes: int
    ours: int
    quantity: str
    beside: dict[str, int]
    why: str
    source: str


class LargestModel(Record):
    """The largest model of a family that one row fits on N cards; ``size`` 0 if not even the smallest does."""

    row: Stage
    ranks: Positive
    size: Natural
    shape: str
    params: int
    peak: Peak | None
    at_least: bool


class LargestModels(Record):
    """A family of models, from small to large, and the largest that fits under each row."""

    family: str
    about: str
    found: list[LargestModel]


class Plan(Record):
    """Everything that a plan says.

    ``kept``: bytes of a trained parameter between steps by the recipe, sharded or not. ``others`` are cells of the
    rows beside those asked for. ``why`` and ``left_out``: the convention's rules, and what of it is not counted.
    """

    schema: str
    created: str
    versions: dict[str, str]
    question: Question
    precision: str
    kept: Natural
    model: ModelRecord
    cluster: Cluster | None
    cells: list[Cell]
    others: list[Cell]
    smallest: list[SmallestRanks]
    largest: list[LargestBatch]
    no_fit: NoFit | None
    surprises: list[Surprise]
    estimates: list[Estimate]
    largest_models: LargestModels | None
    why: list[str]
    left_out: list[str]

    def at(self, ranks: int) -> list[Cell]:
        """The cells of one N, in the order of their rows."""
        return [cell for cell in self.cells if cell.ranks == ranks]

    def beside(self, ranks: int) -> list[Cell]:
        """The cells of the other rows on N GPUs."""
        return [cell for cell in self.others if cell.ranks == ranks]

    @property
    def fits(self) -> bool | None:
        """Whether a row fits on every number of GPUs that was asked for; None where no card was named."""
        if self.question.memory is None:
            return None
        return all(self.first_fit(ranks) is not None for ranks in self.question.asked)

    def first_fit(self, ranks: int) -> Cell | None:
        """The first row, the one that shards least, that fits on N GPUs."""
        return next((cell for cell in self.at(ranks) if cell.fits), None)


def encode(plan: Plan) -> bytes:
    """The plan as indented JSON."""
    return encoded(plan)


def save(plan: Plan, path: Path) -> None:
    """Write the plan to ``path``, whole or not at all."""
    write_whole(path, encode(plan))


def load(path: Path) -> Plan:
    """Read what ``save`` wrote. ResultsError, with the reason, for anything else."""
    return read(path, SCHEMA, Plan)
