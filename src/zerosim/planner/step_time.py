"""How long a step takes at given speeds: two queues, one that computes and one that sends.

Owns the operations of a step, what each takes at given ``Speeds``, and how they overlap. Reads a step's
log, with the FLOPs and bytes that were booked where they happened; must not know how the schedule came
about, nor whether the speeds are what a card can reach at most (``bound``) or what runs reach (``time_model``).

* Computing takes the FLOPs of matrix products with parameters, those of attention, and the bytes that come
  and go between them, each over its own speed. FLOPs of a unit beyond two for each parameter and token are
  attention's. Each byte of an activation is written in forward, and read in backward, where its gradient is
  written; what backward holds it writes. The optimizer moves 28 bytes for its 13 FLOPs a parameter (Adam: seven
  numbers of fp32); on the host it is made by processors of which nothing is known here, and takes the card no time.
* Sending takes bytes over bandwidth and hops times latency (ring costs: Patarasuk and Yuan 2009), on two tiers:
  what each card sends to its node, and what a node sends to others over all its network cards together, as
  collective libraries lay a ring through each. The slower tier counts. In a ring of all ranks, in the order of
  their nodes, one rank of each node sends outward; in rings across nodes all of them do; in a ring within a node
  none does. Of the N-1 hops that a block makes round all ranks, one fewer than there are nodes crosses.
* Without overlap all of that adds up. With overlap there are two queues, each in order and one thing at a time: a
  gather starts up to ``prefetch`` layers ahead of the layer that needs it and ends before that one computes, a
  reduction starts when its gradients are there, and the optimizer waits for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from zerosim.bands import Band
from zerosim.counts import EventKind, Phase, Report
from zerosim.planner.cards import Card

ADAM_BYTES = 28 / 13  # of memory for each FLOP of the optimizer: p, g, m and v are read, p, m and v written, 4 B each
CAUSAL = 2  # a kernel that skips what a causal mask hides computes half of the FLOPs of attention that are counted


class Limit(StrEnum):
    """What a step can be bound by."""

    COMPUTE = "compute"
    WITHIN = "bandwidth within the node"
    BETWEEN = "bandwidth between nodes"
    LATENCY = "latency of the hops"
    HOST = "bandwidth to the host"


class Ring(StrEnum):
    """Which ranks a collective goes round."""

    ALL = "all ranks"
    WITHIN = "the ranks of a node"
    ACROSS = "one rank of each node"


@dataclass(frozen=True)
class Computed:
    """Arithmetic of one unit in one phase, per rank: FLOPs, those of them that are attention's, bytes of memory."""

    unit: str
    phase: Phase
    flops: int
    attention: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Sent:
    """One collective, per rank: bytes and messages. ``needed_by`` is the position, among the step's
    ``Computed``, of the one that waits for it; None for what waits for what was computed before it."""

    unit: str
    nbytes: int
    messages: int
    needed_by: int | None = None
    ring: Ring = Ring.ALL
    name: str = field(default="", compare=False)  # the collective's


Operation = Computed | Sent


def operations(
    report: Report, groups: Mapping[str, Collection[str]] | None = None, products: Mapping[str, int] | None = None
) -> list[Operation]:
    """A step's log as operations in order.

    ``groups`` names, for each unit that computes, the groups of parameters that it reads, where
    they are not named as the unit is. An all-gather is needed by the next unit that reads what
    was gathered; if none does, as after the optimizer, it waits for what was computed before.
    ``products``: the FLOPs of a unit's forward, in one micro-batch, that can be products with its
    parameters; the rest is attention. Without it all are products.
    """
    log = [event for event in report.events if event.kind in (EventKind.SEND, EventKind.COMPUTE)]
    computed = iter(_computed(report, products or {}))
    position = sum(event.kind is EventKind.COMPUTE for event in log)
    needed: list[int | None] = []
    waiting: dict[str, int] = {}  # read from the end: which computation is the next to read each group
    for event in reversed(log):
        if event.kind is EventKind.COMPUTE:
            position -= 1
            waiting.update(dict.fromkeys((groups or {}).get(event.unit, (event.unit,)), position))
        else:
            needed.append(waiting.get(event.unit) if event.name == "all-gather" else None)
    return [
        next(computed)
        if event.kind is EventKind.COMPUTE
        else Sent(event.unit, event.nbytes, event.amount, needed.pop(), name=event.name)
        for event in log
    ]


def _computed(report: Report, products: Mapping[str, int]) -> list[Computed]:
    """What was computed, in order, with what is attention of it and the bytes that came and went."""
    found: list[Computed] = []
    forward: dict[str, tuple[float, list[int]]] = {}  # a unit's part that is attention, and what its forwards held
    held = rest = 0
    for event in report.events:
        if event.kind is EventKind.HOLD and event.name == Band.ACTIVATIONS:
            if event.phase is Phase.OTHER:  # the loss, whose forward and backward are one
                rest += 3 * event.nbytes
            else:
                held += event.nbytes
        if event.kind is not EventKind.COMPUTE:
            continue
        phase, flops = Phase(event.name), event.amount
        if phase is Phase.FORWARD:
            beyond = max(0, flops - products.get(event.unit, flops))
            part, kept = forward.setdefault(event.unit, (beyond / max(1, flops), []))
            kept.append(held)
            nbytes = held
        elif phase is Phase.BACKWARD:
            part, kept = forward.get(event.unit, (0.0, []))
            nbytes = held + 2 * (kept.pop() if kept else 0)
        elif phase is Phase.HOST_OPTIMIZER:  # no work of the card's
            part, nbytes, flops = 0.0, 0, 0
        else:
            part, nbytes = 0.0, round(flops * ADAM_BYTES)
        found.append(Computed(event.unit, phase, flops, round(part * flops), nbytes + rest))
        held = rest = 0
    return found


@dataclass(frozen=True)
class Speeds:
    """How fast everything goes: FLOP/s of products and of attention, bytes/s of memory, within a node and between
    nodes, seconds of a hop within and between, and the cards in a node. ValueError if one is not above zero."""

    products: float
    attention: float
    memory: float
    within: float
    between: float
    hop_within: float
    hop_between: float
    node: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Speeds({name}): must be above zero; got {value!r}.")

    def computing(self, work: Computed) -> float:
        """Seconds of a computation."""
        products = (work.flops - work.attention) / self.products
        return products + work.attention / self.attention + work.nbytes / self.memory

    def moving(self, work: Sent, ranks: int) -> tuple[float, Limit]:
        """Seconds that the bytes of a collective take on the slower tier, and which that is."""
        within, between = work.nbytes / self.within, 0.0
        if ranks > self.node and work.ring is not Ring.WITHIN:
            senders = self.node if work.ring is Ring.ACROSS else 1
            between = senders * work.nbytes / self.between
        return max((between, Limit.BETWEEN), (within, Limit.WITHIN), key=lambda each: each[0])

    def waiting(self, work: Sent, ranks: int) -> float:
        """Seconds of the hops of a collective."""
        crossing = float(work.messages)
        if work.ring is not Ring.ACROSS:
            nodes = -(-ranks // self.node) if work.ring is Ring.ALL else 1
            crossing *= (nodes - 1) / max(1, ranks - 1)
        return crossing * self.hop_between + (work.messages - crossing) * self.hop_within


def at_most(card: Card, dtype: str) -> Speeds:
    """What no step on such cards can pass: the peak of the data sheet, kernels that skip what a causal mask hides,
    and memory that is never waited for. ValueError for a dtype that the card has no peak for.

    >>> from zerosim.planner.cards import card
    >>> at_most(card("H100"), "bf16").products
    989400000000000.0
    """
    peak = float(card.flops(dtype))
    return Speeds(
        peak, CAUSAL * peak, inf, float(card.within), float(card.between), card.hop_within, card.hop_between, card.node
    )


@dataclass(frozen=True)
class Duration:
    """Seconds that a step takes at some speeds, and what to blame.

    ``compute``, ``bandwidth`` and ``latency`` are the sums of each; ``link`` is the tier that the most time is spent
    on; ``serial`` is the step without overlap, ``overlapped`` with.
    """

    compute: float
    bandwidth: float
    latency: float
    link: Limit
    serial: float
    overlapped: float

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


def bound(work: Iterable[Operation], card: Card, ranks: int, *, dtype: str, prefetch: int = 1) -> Duration:
    """The least time of a step on ``ranks`` such cards, computing in ``dtype``; seconds.

    Raises ValueError for a dtype that the card has no peak for, fewer than one rank, or a negative prefetch.
    """
    return duration(work, at_most(card, dtype), ranks, prefetch=prefetch)


def duration(work: Iterable[Operation], speeds: Speeds, ranks: int, *, prefetch: int = 1) -> Duration:
    """The time of a step on ``ranks`` cards at these speeds; seconds.

    Raises ValueError for fewer than one rank, or a negative prefetch.
    """
    if ranks < 1:
        raise ValueError(f"duration(ranks): needs at least one; got {ranks!r}.")
    work = list(work)
    sent = [each for each in work if isinstance(each, Sent)]
    compute = sum(speeds.computing(each) for each in work if isinstance(each, Computed))
    by_link = {Limit.WITHIN: 0.0, Limit.BETWEEN: 0.0}
    for each in sent:
        seconds, link = speeds.moving(each, ranks)
        by_link[link] += seconds
    bandwidth, latency = sum(by_link.values()), sum(speeds.waiting(each, ranks) for each in sent)
    return Duration(
        compute,
        bandwidth,
        latency,
        max(by_link, key=lambda link: by_link[link]),
        compute + bandwidth + latency,
        max((end for _, end in queues(work, speeds, ranks, prefetch=prefetch)), default=0.0),
    )


def queues(
    work: Sequence[Operation], speeds: Speeds, ranks: int, *, prefetch: int = 1
) -> list[tuple[float, float]]:  # fmt: skip
    """When each operation begins and ends, with overlap; seconds. ValueError for a negative prefetch."""
    if prefetch < 0:
        raise ValueError(f"duration(prefetch): layers gathered ahead, 0 or more; got {prefetch!r}.")
    computing = [place for place, each in enumerate(work) if isinstance(each, Computed)]
    ahead: dict[int, list[int]] = {}  # gathers, by the computation that they are started before
    after: dict[int, list[int]] = {}  # the rest, by how many computations they follow
    done = 0
    for place, each in enumerate(work):
        if isinstance(each, Computed):
            done += 1
        elif each.needed_by is None:
            after.setdefault(done, []).append(place)
        else:
            ahead.setdefault(max(0, each.needed_by - prefetch), []).append(place)

    spans = [(0.0, 0.0)] * len(work)
    computes = sends = 0.0  # when each queue is free
    ready: dict[int | None, float] = {}
    phase = None
    for index in range(len(computing) + 1):
        # What follows a computation, and what is started before the next: neither begins before the former ended.
        # Gathers go first, as those who wait for them compute; a reduction is waited for by the optimizer alone.
        for place in (*ahead.get(index, ()), *after.get(index, ())):
            sent = work[place]
            assert isinstance(sent, Sent)
            begin = max(sends, computes)
            sends = begin + (speeds.moving(sent, ranks)[0] + speeds.waiting(sent, ranks))
            spans[place] = begin, sends
            ready[sent.needed_by] = sends
        if index < len(computing):
            computed = work[computing[index]]
            assert isinstance(computed, Computed)
            begin = max(computes, ready.get(index, 0.0))
            if computed.phase is Phase.OPTIMIZER and phase not in (None, Phase.OPTIMIZER):
                begin = max(begin, sends)
            computes, phase = begin + speeds.computing(computed), computed.phase
            spans[computing[index]] = begin, computes
    return spans
