"""What the ledger writes: a step's report, its peaks, its traffic and the entries of its log.

Owns these records and how they add up. They are filled in by ``ledger.py``, and read by everyone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]  # [R], one for each rank of this process


class Phase(StrEnum):
    """What a step is busy with. Time and FLOPs are booked under the innermost phase."""

    __hash__ = str.__hash__  # Enum's is Python's, and these are looked up all the time

    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    HOST_OPTIMIZER = "optimizer on the host"
    OTHER = "other"


class EventKind(StrEnum):
    """What an entry of the log is about."""

    __hash__ = str.__hash__  # Enum's is Python's, and these are looked up all the time

    HOLD = "hold"
    FREE = "free"
    SEND = "send"
    COMPUTE = "compute"
    COPY = "copy"  # over the host link, named for the place that it goes to
    HOST_HOLD = "host hold"
    HOST_FREE = "host free"


class Event(NamedTuple):
    """One entry of the log that the timeline is drawn from; bytes are per rank.

    >>> import zerosim as zs
    >>> event = zs.dry(zs.MLP(), zs.ZeRO1, ranks=8).events[0]
    >>> f"{event.kind} {event.nbytes:,} B of {event.name} for the {event.unit}: {event.held:,} B are held now"
    'hold 2,048 B of activations for the batch: 184,032 B are held now'
    """

    kind: EventKind
    name: str  # the band held or freed, the collective sent, the phase computed, or the place copied to
    unit: str  # whose it is: a layer's name
    nbytes: int
    held: int  # bytes that a rank holds on its card after it
    seconds: float  # since the step began
    phase: Phase  # what the step was busy with
    amount: int = 0  # messages of a SEND, FLOPs of a COMPUTE; per rank
    outside: int = 0  # bytes of a SEND that left each node, by all of its ranks


@dataclass(frozen=True)
class Peak:
    """A peak: its total, every band at that instant, and whose hold reached it. Bytes."""

    total: int = 0
    by_band: dict[str, int] = field(default_factory=dict)
    unit: str = ""
    phase: Phase = Phase.OTHER


class Traffic:
    """What one collective moved for one band: bytes per rank, and messages per rank.

    A block in flight has a row for every rank here, all equally large, so what one rank
    hands on each of them does. What differs is how much of it is padding, and who hands it
    to a rank of another node.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.sent_each = self.received_each = 0  # bytes of each rank
        self.padding: Counts = np.zeros(rows, np.int64)  # the part of sent that is padding
        self.outside: Counts = np.zeros(rows, np.int64)  # the part of sent that left the rank's node
        self.node_outside = 0  # bytes that left each node, by all of its ranks
        self.messages = 0

    @property
    def sent(self) -> Counts:
        """Bytes sent, [R]."""
        return np.full(self._rows, self.sent_each, np.int64)

    @property
    def received(self) -> Counts:
        """Bytes received, [R]."""
        return np.full(self._rows, self.received_each, np.int64)

    def hop(self, sent: int, received: int, padding: Counts | None = None, messages: int = 1) -> None:
        """One hop, or several as one: every rank handed over ``sent`` bytes in all and took ``received``."""
        self.sent_each += sent
        self.received_each += received
        self.messages += messages
        if padding is not None:
            self.padding += padding


@dataclass(repr=False)
class Report:
    """What one step held, sent, computed and took. Bytes and FLOPs are integers, per rank.

    ``peak`` counts everything; ``peak_without_activations`` leaves out what does not scale
    with the parameters. ``traffic`` is keyed by (collective, band), ``copies`` over the host link by
    (place that they went to, band). ``host`` and ``host_peak`` are the host's memory.
    ``losses`` are those of each rank here, over its micro-batches. ``complete`` is False
    for a step that ended early, by an out-of-memory error say; its numbers stand up to there.

    >>> import zerosim as zs
    >>> zs.dry(zs.MLP(), zs.ZeRO1, ranks=8).sent_by_collective()
    {'reduce-scatter': [115808], 'all-gather': [115808]}
    """

    step: int
    loss: float = float("nan")
    losses: list[float] = field(default_factory=list)
    mean_of_means: float = float("nan")  # of the ranks' losses, which is another number where they are uneven
    norm: float | None = None
    scale: float = 1.0
    skipped: bool = False
    complete: bool = False
    resident: dict[str, int] = field(default_factory=dict)
    padding: list[int] = field(default_factory=list)
    peak: Peak = field(default_factory=Peak)
    peak_without_activations: Peak = field(default_factory=Peak)
    host: dict[str, int] = field(default_factory=dict)  # at rest
    host_peak: Peak = field(default_factory=Peak)
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    copies: dict[tuple[str, str], int] = field(default_factory=dict)
    flops: dict[Phase, int] = field(default_factory=dict)
    seconds: dict[Phase, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __repr__(self) -> str:
        peak = f"{self.peak.phase} of {self.peak.unit}" if self.peak.unit else str(self.peak.phase)
        loss = "" if self.loss != self.loss else f"loss {self.loss:.6f}; "
        return (
            f"Report(step {self.step}{'' if self.complete else ', incomplete'}: {loss}a rank holds "
            f"{sum(self.resident.values()):,} B at rest and {self.peak.total:,} B at the peak, in the {peak}; it sends "
            f"{max(self.sent(), default=0):,} B)"
        )

    def sent(self) -> list[int]:
        """Bytes that each rank of this process sent in the step, all collectives together."""
        return added(traffic.sent for traffic in self.traffic.values())

    def sent_by_collective(self) -> dict[str, list[int]]:
        """Bytes that each rank sent, by collective."""
        names = dict.fromkeys(collective for collective, _ in self.traffic)
        return {
            name: added(traffic.sent for (collective, _), traffic in self.traffic.items() if collective == name)
            for name in names
        }


def added(parts: Iterable[Counts]) -> list[int]:
    """Counts by rank, added up."""
    return [int(sum(column)) for column in zip(*(part.tolist() for part in parts), strict=True)]
