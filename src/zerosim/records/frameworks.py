"""The recorded results of the frameworks' runs: their schema, and how they are written.

Owns the file format; computes nothing. Bytes are integers.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from zerosim.records.files import Record, encoded
from zerosim.records.real_ranks import Settings
from zerosim.records.results import Failure

SCHEMA = "zerosim.frameworks/2"
PARAMS, GRADS, MASTER, STATE = "params", "grads", "master", "optimizer state"
ELSEWHERE = "elsewhere"  # allocated, but not found in a tensor of a band
BEFORE = "from before the step"

GRADIENTS, BYTES, RANKS, NORMS, DECISIONS = "gradients", "bytes", "ranks", "norms", "decisions"
ULPS = 16  # by which a norm may differ that is added in another order
CHECKS = {
    GRADIENTS: "DDP's, FSDP2's are the ring's over the local ones, bit for bit",
    BYTES: "the kernel counted the collectives asked for, and nothing else",
    RANKS: "all of a framework's end with the same parameters, bit for bit",
    NORMS: f"clip_grad_norm_'s are ours; of type 2, within {ULPS} ulp",
    DECISIONS: "torch's scalers skip the steps that ours skips, on all ranks",
}


class Family(StrEnum):
    """Who does the sharding."""

    DDP = "DDP"
    ZERO_REDUNDANCY = "ZeroRedundancyOptimizer"
    FSDP = "FSDP2"
    DEEPSPEED = "DeepSpeed"


COMPARE_GRADIENTS = (Family.DDP, Family.FSDP)  # of which local gradients are kept, and what becomes of them


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


class Norm(Record):
    """A norm of all of a step's gradients as clip_grad_norm_ has it and as the simulator does, of the same gradients.

    ``ulps``: how many fp32 numbers are between them.
    """

    step: int
    kind: str
    theirs: float
    ours: float
    ulps: int


class Decision(Record):
    """What a scaler made of a step, by rank, and what the simulator's does, with the scale after it."""

    scaler: str
    step: int
    skipped: list[bool]
    scale: float
    ours_skipped: bool
    ours_scale: float


class Framework(Record):
    """One framework's run, or in ``skipped`` why there is none.

    ``collectives`` counts those of a settled step by name. ``differing`` parameters and their
    ``largest`` difference are against the simulator's after the last step. ``scheme`` is the
    one that shards the same bands, empty if none does; ``departs`` says where it leaves it.
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
    scheme: str = ""
    departs: list[str] = msgspec.field(default_factory=list)
    norms: list[Norm] = msgspec.field(default_factory=list)
    decisions: list[Decision] = msgspec.field(default_factory=list)


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
