"""What is recorded of a user's own implementation, and what was found of it.

Owns these shapes and the two file formats: the manifest of a recorded run, and the verdict.
Computes nothing. Bytes and elements are integers; positions are in the flat vector of all
parameters, in the order of ``named_parameters``.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from zerosim.optimizer import Schedule
from zerosim.options import LossScale
from zerosim.records.files import Record, encoded, read, write_whole
from zerosim.stages import Stage

RUN_SCHEMA, VERDICT_SCHEMA = "zerosim.conformance.run/1", "zerosim.conformance/1"
MANIFEST, MODEL = "manifest.json", "model.pt2"
EVERY = -1  # in place of a rank: all of them, or none in particular


class Kind(StrEnum):
    """A collective operation, or a message between two ranks."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all-to-all"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECEIVE = "receive"
    BARRIER = "barrier"


class Cause(StrEnum):
    """Which phase of a scheme went wrong."""

    ORDER = "collectives"  # out of order, missing or one too many on a rank
    FAILED = "failed"  # a rank has raised, died or stopped
    INITIAL = "initial weights"
    DATA = "data"  # a rank trains on other rows than it says
    FORWARD = "forward"  # what forward read is not what the last update left: a stale gather
    AVERAGE = "average"  # divided by the wrong number, or not at all
    REDUCTION = "reduction"  # missing, doubled, over some of the ranks, or not a sum
    ACCUMULATION = "accumulation"  # some micro-batches left out, or old gradients left in
    BOUNDS = "shard bounds"
    GATHER = "gather"  # of updated parameters: stale, missing, or put in the wrong place
    OPTIMIZER = "optimizer"  # another rule, or other numbers in it
    STEP = "optimizer step"  # counted twice, or not at all; taken twice
    STATE = "optimizer state"  # lost, or of another shard
    CLIPPING = "clipping"
    SCALING = "loss scaling"
    PRECISION = "precision"  # rounded where it must not be
    REPLICAS = "replicas"  # ranks that must hold the same do not
    VOLUME = "volume"  # more is sent than the scheme needs
    UNKNOWN = "unexplained"


class Rule(Record):
    """An optimizer's rule and its numbers, as torch has them. ``kind`` is ``"adam"`` or ``"sgd"``."""

    kind: str
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """The bands that it keeps."""
        if self.kind == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum",) if self.momentum else ()


class Parameter(Record):
    """One parameter: its name, its shape, whether it is trained, and the unit that it is gathered with."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    unit: str
    rule: Rule


class Recipe(Record):
    """How the model is trained, as the user has said it.

    ``precision`` is one of ``bands.PRECISIONS``. ``average`` says whether uneven ranks are averaged over
    ``"rows"`` or over ``"ranks"``. ``loss_scale`` is None for none; ``schedule`` is the optimizer's, and
    ``node`` how many ranks are a group. ``exact`` says that the layout is the simulator's, so that gradients are
    compared in bits.
    """

    precision: str
    accumulate: int = 1
    clip: float | None = None
    loss_scale: LossScale | None = None
    schedule: Schedule | None = None
    node: int | None = None
    average: str = "rows"
    all_reduce: bool = False
    exact: bool = False


class Expected(Record):
    """What the simulator's schedule asks for and holds on one rank of this row, counted on shapes.

    ``elements`` by collective in a step, sent by a rank, padding included; ``logical`` the same without
    padding. ``messages`` counts collectives. ``unknown`` says why there are no numbers, if there are none.
    """

    elements: dict[str, int] = msgspec.field(default_factory=dict)
    logical: dict[str, int] = msgspec.field(default_factory=dict)
    collectives: dict[str, int] = msgspec.field(default_factory=dict)
    resident: dict[str, int] = msgspec.field(default_factory=dict)
    peak: dict[str, int] = msgspec.field(default_factory=dict)
    unknown: str = ""


class Manifest(Record):
    """What a recorded run was: everything but the values, which lie in one file per rank and step."""

    schema: str
    created: str
    versions: dict[str, str]
    row: Stage
    ranks: int
    recipe: Recipe
    parameters: list[Parameter]
    expected: Expected
    dtype: str
    cast: bool
    unexported: str
    """Empty if ``model.pt2`` has the model and its loss; why it has not, otherwise."""


class Asked(Record, array_like=True):
    """One collective that was asked for in a step.

    ``elements`` is the whole buffer's; ``size`` and ``group`` the ranks among which; ``rank_within`` is
    the asking rank's place among them; ``label`` says which parameters' memory was handed over, if it was any's.
    """

    kind: Kind
    elements: int
    dtype: str
    size: int
    group: str = ""
    root: int = 0
    reduction: str = ""
    label: str = ""

    def key(self) -> str:
        """What must be the same on all ranks of the group."""
        parts = [str(self.kind), self.reduction, f"of {self.elements:,} {self.dtype}"]
        parts += [f"from rank {self.root}"] * (self.kind in (Kind.BROADCAST, Kind.SCATTER))
        parts += [f"to rank {self.root}"] * (self.kind in (Kind.REDUCE, Kind.GATHER))
        return " ".join(part for part in parts if part)

    def __str__(self) -> str:
        return self.key() + (f" ({self.label})" if self.label else "")


class Held(Record):
    """Bytes that a rank's tensors hold, by band, at rest after the step, and the most within it.

    ``largest`` are the biggest of what is in no band, as text. ``peak`` is 0 where it was not measured.
    """

    rest: dict[str, int] = msgspec.field(default_factory=dict)
    peak: int = 0
    largest: list[str] = msgspec.field(default_factory=list)


class Finding(Record):
    """Something that is wrong: where it was first seen, and what it is.

    ``rank`` is the one that caused it, or -1. ``parameter`` and the elements ``start`` to ``stop`` within
    it, flat, are the first that are wrong; ``wrong`` of ``total`` elements are, by ``largest`` at most.
    """

    step: int
    rank: int
    band: str
    cause: Cause
    text: str
    parameter: str = ""
    start: int = 0
    stop: int = 0
    wrong: int = 0
    total: int = 0
    largest: float = 0.0


class Verdict(Record):
    """Everything that was found of a run. ``held`` are sentences on what is as it should be, ``notes`` the rest."""

    schema: str
    row: str
    ranks: int
    steps: int
    findings: list[Finding]
    held: list[str]
    notes: list[str]


def save_manifest(found: Manifest, folder: Path) -> None:
    """Write it into the run's folder, whole or not at all."""
    write_whole(folder / MANIFEST, encoded(found))


def load_manifest(folder: Path) -> Manifest:
    """Read what ``save_manifest`` wrote. ResultsError, with the reason, for anything else."""
    return read(folder / MANIFEST, RUN_SCHEMA, Manifest)


def encode(found: Verdict) -> bytes:
    """A verdict as indented JSON."""
    return encoded(found)
