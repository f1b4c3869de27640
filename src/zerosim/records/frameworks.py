"""What is asked of a framework's ranks, what each of them saw, and the record of what was found.

Owns these shapes and the file format; computes nothing. Bytes are integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from zerosim.bands import Array
from zerosim.real_ranks.meter import Counters
from zerosim.records.files import Record, encoded
from zerosim.records.real_ranks import Settings
from zerosim.records.results import Failure

SCHEMA = "zerosim.frameworks/1"
JOB, SEEN = "job", "seen-{}"  # files beside the ranks' store: what they shall do, what each saw
SETTLED = 2  # steps after which DDP has built its buckets anew and every optimizer has its state
PARAMS, GRADS, MASTER, STATE = "params", "grads", "master", "optimizer state"
ELSEWHERE = "elsewhere"  # allocated, but not found in a tensor of a band
BEFORE = "from before the step"
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
BROADCAST = "broadcast"

GRADIENTS, BYTES, RANKS = "gradients", "bytes", "ranks"
CHECKS = {
    GRADIENTS: "DDP's and FSDP2's gradients are the simulator's ring over the local ones, bit for bit",
    BYTES: "the kernel counted payload and framing of the collectives asked for, and nothing else",
    RANKS: "all ranks of a framework end with the same parameters, bit for bit",
}

# -- asked


class Family(StrEnum):
    """Who does the sharding."""

    DDP = "DDP"
    ZERO_REDUNDANCY = "ZeroRedundancyOptimizer"
    FSDP = "FSDP2"
    DEEPSPEED = "DeepSpeed"


HAVE_EVIDENCE = (Family.DDP, Family.FSDP)  # of which local gradients are kept, and what becomes of them


class Row(NamedTuple):
    """A framework to run: with which options of its own, and ``wire``, the dtype of the gradients that travel."""

    name: str
    family: Family
    precision: str = "fp32"
    wire: str = "fp32"
    options: Mapping[str, Any] = {}

    @property
    def states(self) -> str:
        """The precision whose model states it keeps: FSDP2's shards are fp32, whatever it computes in."""
        return "fp32" if self.family is Family.FSDP else self.precision


class Task(NamedTuple):
    """A row, and on what model and data."""

    row: Row
    ranks: int
    steps: int
    batch: int
    seed: int
    model_seed: int
    widths: Sequence[int]


# -- seen by a rank


class Collective(NamedTuple):
    """One collective as it was asked for: which, the whole buffer's elements, bytes of one, a broadcast's root."""

    name: str
    elements: int
    itemsize: int
    root: int = 0

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


class Instant(NamedTuple):
    """What was allocated at one instant of a step, by when it had come: before, or in which phase. Bytes.

    Not ``exact`` if some of it may have gone already.
    """

    phase: str
    parts: dict[str, int]
    exact: bool


class Evidence(NamedTuple):
    """One step's gradients on one rank: its local ones, and what the framework made of them, whole or its shard.

    ``groups`` are the parameters that travelled together, each in its order.
    """

    local: list[Array]
    averaged: list[Array]
    groups: list[list[int]]


class Seen(NamedTuple):
    """What one rank saw of a run. Bytes; a list over steps has an entry for each.

    ``held`` is by band as the update begins, ``rest`` after the step. ``strays`` are counted in
    what is elsewhere, by origin. ``asked`` are the collectives of a step, ``params`` whole, fp32,
    after the last.
    """

    held: dict[str, int]
    rest: dict[str, int]
    peak: Instant
    strays: Counter[object]
    counted: list[Counters]
    unmeasured: dict[str, str]
    asked: list[Collective]
    params: list[Array]
    evidence: list[Evidence]


# -- the record


class Gradients(Record):
    """One step's gradients against the ring over the local ones, over all ranks: elements, and those that differ."""

    step: int
    compared: int
    differing: int


class RankSeen(Record):
    """One rank. Bytes held by band as the update begins and after the step, and at the peak by where it came from.

    ``exact`` is False where the peak may count blocks that had been freed. ``asked``: what the ring
    must send for the collectives; ``moved``, ``framing``: what gloo sends for them, None if
    unknown; ``kernel``: what each meter counted in each step.
    """

    held: dict[str, int]
    rest: dict[str, int]
    peak: dict[str, int]
    peak_phase: str
    exact: bool
    asked: int
    moved: int | None
    framing: int | None
    kernel: dict[str, list[int]]


class Framework(Record):
    """One framework's run, or in ``skipped`` why there is none.

    ``collectives`` counts those of a settled step by name. ``differing`` parameters and their
    ``largest`` difference are against the simulator's after the last step. ``stage`` is the
    scheme that shards the same bands, empty if none does; ``departs`` says where it leaves it.
    """

    name: str
    family: str
    precision: str
    wire: str
    skipped: str = ""
    ranks: list[RankSeen] = msgspec.field(default_factory=list)
    collectives: dict[str, int] = msgspec.field(default_factory=dict)
    differing: int = 0
    largest: float = 0.0
    gradients: list[Gradients] = msgspec.field(default_factory=list)
    unmeasured: dict[str, str] = msgspec.field(default_factory=dict)
    stage: str = ""
    departs: list[str] = msgspec.field(default_factory=list)


class Frameworks(Record):
    """Everything that was found. ``ended`` says why if a run ended early; what is missing is then skipped."""

    schema: str
    versions: dict[str, str]
    settings: Settings
    steps: int
    n_params: int
    ended: str
    rows: list[Framework]
    failures: list[Failure]


def encode(found: Frameworks) -> bytes:
    """The record as indented JSON."""
    return encoded(found)
