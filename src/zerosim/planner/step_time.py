"""How long a step takes at least: a bound from what a run computed and sent, never a forecast.

Owns the two rooflines and how they overlap. Reads a step's log, its operations in order, with the
FLOPs and bytes that were booked where they happened; must not know how the schedule came about.

* Computing takes FLOPs over the card's peak in that dtype times a stated efficiency. With an
  efficiency of 1 it is the roofline itself; what memory's bandwidth adds is left out.
* Sending takes bytes over bandwidth and hops times latency (ring costs: Patarasuk and Yuan 2009).
  A ring over several nodes is as fast as its slowest link: between two nodes, all network cards
  of a node together, as collective libraries lay a ring through each. Of the N-1 hops that a
  block makes, one fewer than there are nodes lead from one node to the next.
* Without overlap all of that adds up. With overlap there are two queues, one that computes and
  one that sends, each in order and one thing at a time: a gather starts up to ``prefetch``
  layers ahead of the layer that needs it and ends before that one computes, a reduction starts
  when its gradients are there, and the optimizer waits for all of them.

The busier of the two queues alone is the floor below which no order of things leads. Neither the
host nor memory, imbalance or contention is in any of it: on these numbers a real step is slower.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zerosim.counts import EventKind, Phase, Report
from zerosim.planner.cards import Card


class Limit(StrEnum):
    """What a step can be bound by."""

    COMPUTE = "compute"
    WITHIN = "bandwidth within the node"
    BETWEEN = "bandwidth between nodes"
    LATENCY = "latency of the hops"


@dataclass(frozen=True)
class Computed:
    """Arithmetic of one unit in one phase, per rank."""

    unit: str
    phase: Phase
    flops: int


@dataclass(frozen=True)
class Sent:
    """One collective, per rank: bytes and messages. ``needed_by`` is the position, among the step's
    ``Computed``, of the one that waits for it; None for what waits for what was computed before it."""

    unit: str
    nbytes: int
    messages: int
    needed_by: int | None = None


Operation = Computed | Sent


def operations(report: Report, groups: Mapping[str, Collection[str]] | None = None) -> list[Operation]:
    """A step's log as operations in order.

    ``groups`` names, for each unit that computes, the groups of parameters that it reads, where
    they are not named as the unit is. An all-gather is needed by the next unit that reads what
    was gathered; if none does, as after the optimizer, it waits for what was computed before.
    """
    log = [event for event in report.events if event.kind in (EventKind.SEND, EventKind.COMPUTE)]
    found: list[Operation] = []
    waiting: dict[str, int] = {}  # read from the end: which computation is the next to read each group
    position = sum(event.kind is EventKind.COMPUTE for event in log)
    for event in reversed(log):
        if event.kind is EventKind.COMPUTE:
            position -= 1
            for group in (groups or {}).get(event.unit, (event.unit,)):
                waiting[group] = position
            found.append(Computed(event.unit, Phase(event.name), event.amount))
        else:
            needed_by = waiting.get(event.unit) if event.name == "all-gather" else None
            found.append(Sent(event.unit, event.nbytes, event.amount, needed_by))
    return found[::-1]


@dataclass(frozen=True)
class Bound:
    """Seconds that a step takes at least, and what to blame.

    ``compute``, ``bandwidth`` and ``latency`` are the sums of each; ``link`` is the slowest link;
    ``serial`` is the step without overlap, ``overlapped`` with; ``efficiency`` is the stated one.
    """

    compute: float
    bandwidth: float
    latency: float
    link: Limit
    serial: float
    overlapped: float
    efficiency: float

    @property
    def communication(self) -> float:
        """Seconds of sending, hidden or not."""
        return self.bandwidth + self.latency

    @property
    def floor(self) -> float:
        """Seconds that the busier queue takes, however well the other one hides behind it."""
        return max(self.compute, self.communication)

    @property
    def exposed(self) -> float:
        """Seconds of the overlapped step in which nothing is computed."""
        return self.overlapped - self.compute

    @property
    def binding(self) -> Limit:
        """What the step is bound by: the busier of the two queues, and of sending the larger part."""
        if self.compute >= self.communication:
            return Limit.COMPUTE
        return self.link if self.bandwidth >= self.latency else Limit.LATENCY


def bound(
    work: Iterable[Operation],
    card: Card,
    ranks: int,
    *,
    dtype: str,
    efficiency: float = 1.0,
    prefetch: int = 1,
) -> Bound:
    """The least time of a step on ``ranks`` such cards, computing in ``dtype``; seconds.

    Raises ValueError for an efficiency outside (0, 1], a dtype that the card has no peak for,
    fewer than one rank, or a negative prefetch.
    """
    if not 0 < efficiency <= 1:
        raise ValueError(f"bound(efficiency): a fraction of the peak, above 0 and up to 1; got {efficiency!r}.")
    if ranks < 1:
        raise ValueError(f"bound(ranks): needs at least one; got {ranks!r}.")
    if prefetch < 0:
        raise ValueError(f"bound(prefetch): layers gathered ahead, 0 or more; got {prefetch!r}.")
    peak = card.flops(dtype) * efficiency
    nodes = -(-ranks // card.node)
    bandwidth, link = float(card.within), Limit.WITHIN
    if nodes > 1 and card.between <= card.within:
        bandwidth, link = float(card.between), Limit.BETWEEN

    def waiting(messages: int) -> float:
        crossing = messages * (nodes - 1) / max(1, ranks - 1)
        return crossing * card.hop_between + (messages - crossing) * card.hop_within

    work = list(work)
    sent = [each for each in work if isinstance(each, Sent)]
    computed = [each for each in work if isinstance(each, Computed)]
    compute = sum(each.flops for each in computed) / peak
    moving = sum(each.nbytes for each in sent) / bandwidth
    latency = sum(waiting(each.messages) for each in sent)
    overlapped = _two_queues(
        work,
        [each.flops / peak for each in computed],
        [each.nbytes / bandwidth + waiting(each.messages) for each in sent],
        prefetch,
    )
    return Bound(compute, moving, latency, link, compute + moving + latency, overlapped, efficiency)


def _two_queues(work: Sequence[Operation], computing: list[float], sending: list[float], prefetch: int) -> float:
    """When the later of the two queues is done."""
    phases = [each.phase for each in work if isinstance(each, Computed)]
    ahead: dict[int, list[tuple[int, float]]] = {}  # gathers, by the computation that they are started before
    after: dict[int, list[float]] = {}  # the rest, by how many computations they follow
    done, durations = 0, iter(sending)
    for each in work:
        if isinstance(each, Computed):
            done += 1
        elif each.needed_by is None:
            after.setdefault(done, []).append(next(durations))
        else:
            before = max(0, each.needed_by - prefetch)
            ahead.setdefault(before, []).append((each.needed_by, next(durations)))

    computes = sends = 0.0  # when each queue is free
    ready: dict[int, float] = {}
    for index in range(len(computing) + 1):
        # What follows a computation, and what is started before the next: neither begins before the former ended.
        # Gathers go first, as those who wait for them compute; a reduction is waited for by the optimizer alone.
        for consumer, duration in ahead.get(index, []):
            sends = max(sends, computes) + duration
            ready[consumer] = sends
        for duration in after.get(index, []):
            sends = max(sends, computes) + duration
        if index < len(computing):
            start = max(computes, ready.get(index, 0.0))
            if phases[index] is Phase.OPTIMIZER and phases[max(0, index - 1)] is not Phase.OPTIMIZER:
                start = max(start, sends)
            computes = start + computing[index]
    return max(computes, sends)
