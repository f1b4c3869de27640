"""The recorded results of a corroboration: their schema, and how they are written and read.

Owns the file format, and computes nothing. Bytes are integers. A list over steps has one entry
per step that was completed. What a platform cannot measure is absent, never zero.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from zerosim.bands import PRECISIONS, WIRES
from zerosim.options import Options
from zerosim.records.files import Record, encoded, read, write_whole
from zerosim.records.results import Failure
from zerosim.stages import Stage

SCHEMA = "zerosim.corroborate/2"
COLLECTIVES = RING, NATIVE = "ring", "native"
RECIPES = ("mixed", "bf16", "fp32")  # the precisions that are run
BACKENDS = ("gloo", "nccl", "mpi")
FAULTS = {
    "bit": "flip a bit of a parameter",
    "gradient": "flip a bit of a gradient",
    "weights": "begin with another weight",
    "data": "train on other data",
    "loss": "tell another loss",
    "threads": "compute on two threads",
    "hop": "send a block that nobody booked",
    "skip": "leave an operation out",
    "connection": "send over a connection of its own",
    "datagram": "send a datagram",
    "memory": "allocate 300 MB outside of the ledger",
    "error": "raise an error",
    "kill": "kill the rank",
    "stop": "stop it",
}
PROCESS, SOCKETS, NAMESPACE = "process", "sockets", "namespace"  # meters
START, LOSSES, BITS, BYTES, MEMORY = "start", "losses", "bits", "bytes", "memory"
CHECKS = {
    START: "every rank begins with the simulator's bits",
    LOSSES: "every rank's loss is the simulator's",
    BITS: "every rank holds the simulator's bits after every step",
    BYTES: "what is sent is the same by every count, none unexplained",
    MEMORY: "every rank holds the simulator's bytes, at rest and at the peak",
}
"""What is checked, in the order in which a failure of one can cause failures of the next."""
WORKING = "working"
EXTRA_BYTES = 1000  # that the faults send
EXTRA_MEMORY = 300_000_000  # bytes that the fault "memory" allocates


class Fault(Record):
    """What is broken on purpose: one of ``FAULTS``, on ``rank`` in ``step`` of every run."""

    kind: str
    rank: int
    step: int


class Settings(Record):
    """What was asked for, and what all ranks must agree on.

    ``batch`` is samples per rank. ``wire`` is fp32, or ``working`` for the dtype of each precision's
    working copy. A run is one of ``rows``, one of ``collectives`` and one of ``precisions``.
    ``model`` is the python path of what was trained instead of the MLP of these ``widths``, and
    ``schedule`` has further options of the training runs, by keyword.
    """

    ranks: int
    steps: int
    batch: int
    seed: int
    model_seed: int
    widths: list[int]
    collectives: list[str]
    precisions: list[str]
    wire: str
    backend: str
    fault: Fault | None
    rows: list[Stage]
    model: str = ""
    schedule: dict[str, int | float | str | bool | None] = msgspec.field(default_factory=dict)

    def options(self, precision: str) -> Options:
        """The options of the runs in that precision."""
        working = PRECISIONS[precision].working
        wire = self.wire if self.wire != WORKING else next(name for name, dtype in WIRES.items() if dtype == working)
        # Each rank is a process, and its memory is weighed: numba would be 120 MB of it, and a third of a second.
        return Options(**{"precision": precision, "wire": wire, "kernels": "numpy", **self.schedule})  # type: ignore[arg-type]


class Flow(Record):
    """What a rank sent, or received, in each step: every count of it.

    ``simulated`` by the simulator, ``booked`` by the rank's own ledger, ``handed`` to torch
    according to the log beside the call. ``moved`` is the payload that the backend is known to
    move for that and ``framing`` its headers; together they must be what each meter of
    ``kernel`` read. ``process`` is /proc/self/io, ``sockets`` the TCP sockets' own counters.
    """

    simulated: list[int]
    booked: list[int]
    handed: list[int]
    moved: list[int]
    framing: list[int]
    kernel: dict[str, list[int]]


class RankRecord(Record):
    """One rank of one run: its traffic, its bytes by band at rest and at the peak, and its process's memory."""

    rank: int
    sent: Flow
    received: Flow
    resident: dict[str, int]
    peak: dict[str, int]
    memory: int


class StepTime(Record):
    """Seconds of a step on the rank that took longest, compute and communication apart.

    Waiting for a slower rank is communication.
    """

    total: float
    compute: float
    communication: float


class Run(Record):
    """One row on one kind of collectives in one precision, simulated and real.

    ``compared`` and ``differing`` count elements by band over all ranks, at the start and after every step;
    ``losses`` are the means over ranks. ``resident`` and ``peak`` are the simulator's.
    """

    row: Stage
    collectives: str
    precision: str
    complete: bool
    compared: dict[str, int]
    differing: dict[str, int]
    losses: list[float]
    losses_simulated: list[float]
    resident: dict[str, int]
    peak: dict[str, int]
    ranks: list[RankRecord]
    times: list[StepTime]

    @property
    def scheme(self) -> str:
        """The row's name."""
        return self.row.name


class Corroboration(Record):
    """Everything that was found.

    ``ended`` says why if it is not ``complete``, and ``errors`` what other ranks than those to blame said,
    by rank. ``elsewhere`` counts what the network namespace did during the steps that no rank's meter covers:
    connections opened and datagrams sent, by whomever. ``order`` is the order in which the backend's
    own all-reduce was seen to sum: ``ring`` is the simulator's. ``unmeasured`` says why a meter
    has no readings; ``addresses`` are those of the sockets that the ranks used.
    """

    schema: str
    created: str
    versions: dict[str, str]
    settings: Settings
    n_params: int
    complete: bool
    ended: str
    errors: dict[str, str]
    order: str
    unmeasured: dict[str, str]
    elsewhere: dict[str, int]
    addresses: list[str]
    runs: list[Run]
    failures: list[Failure]


def encode(found: Corroboration) -> bytes:
    """The record as indented JSON."""
    return encoded(found)


def save(found: Corroboration, path: Path) -> None:
    """Write it to ``path``, whole or not at all."""
    write_whole(path, encode(found))


def load(path: Path) -> Corroboration:
    """Read what ``save`` wrote. ResultsError, with the reason, for anything else."""
    return read(path, SCHEMA, Corroboration)
