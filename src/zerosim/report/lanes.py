"""Computing and sending as two lanes in time, and which messages a computation could have run beside.

Owns when a logged piece of work began, and which neighbours it waits for. Takes events, computes nothing but times
and their order. Must not know the simulator.

The log has one process's clock, in which ranks take turns: order and proportions mean something, the sum does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from zerosim.counts import EventKind, Phase
from zerosim.records.results import EventRecord

Lane = Literal["compute", "communication"]
UPDATES = (Phase.OPTIMIZER, Phase.HOST_OPTIMIZER)
REDUCES, GATHER = ("reduce-scatter", "all-reduce"), "all-gather"


class Span(NamedTuple):
    """A piece of work: its lane, the second at which it began and the event that ended it."""

    lane: Lane
    begin: float
    end: EventRecord


class Piece(NamedTuple):
    """A piece of work as it is drawn; the number of the event that ended it; for a message, what it could run beside.

    ``since`` and ``until`` are when it could have begun at the earliest and had to be done at the latest.
    """

    lane: Lane
    name: str
    unit: str
    begin: float
    end: float
    event: int
    since: float
    until: float
    beside: list[str]


def spans(events: Sequence[EventRecord]) -> Iterator[Span]:
    """What was computed and sent, in order.

    The log says when a piece of work was done. It began with the first event of its phase
    since the piece before; if it is itself the first, then with the event before it.
    """
    phase, begin, before = "", 0.0, 0.0
    for event in events:
        if event.phase != phase:
            phase = event.phase
            begin = event.seconds if event.kind in (EventKind.HOLD, EventKind.FREE) else before
        if event.kind in (EventKind.COMPUTE, EventKind.SEND):
            yield Span("compute" if event.kind == EventKind.COMPUTE else "communication", begin, event)
            begin = event.seconds
        before = event.seconds


def lanes(events: Sequence[EventRecord]) -> list[Piece]:
    """The two lanes of a step's log.

    Gradients can be reduced once their layer's backward is done, and must be before that writes again or the first
    update begins. Parameters are gathered for the next computation of their layer, no further ahead than beside the
    one before it, or every layer would be held at once; after an update, before the step ends. All else, as a norm's
    numbers, is waited for at once.
    """
    work = list(spans(events))
    number = {id(event): index for index, event in enumerate(events, start=1)}
    end = events[-1].seconds if events else 0.0
    pieces = []
    for at, span in enumerate(work):
        since, until, beside = span.begin, span.end.seconds, []
        if span.lane == "communication":
            since, until = _window(work, at, end)
            beside = [
                f"{other.end.name} of {other.end.unit}"
                for other in work
                if other.lane == "compute" and other.begin >= since and other.end.seconds <= until
            ]
        event = span.end
        pieces.append(
            Piece(span.lane, event.name, event.unit, span.begin, event.seconds, number[id(event)], since, until, beside)
        )
    return pieces


def _window(work: Sequence[Span], at: int, end: float) -> tuple[float, float]:
    """From when until when the message at that place could run."""
    message = work[at].end
    before, after = (
        [span for span in side if span.lane == "compute"] for side in (reversed(work[:at]), work[at + 1 :])
    )
    own = next((span for span in before if span.end.unit == message.unit), None)
    written = own.end.seconds if own else 0.0
    if message.name in REDUCES and own:
        # Until the first update, not its own, as a norm to clip by needs the gradients of all.
        needs = (span for span in after if span.end.name in UPDATES or (span.end.name, span.end.unit) == _job(own))
        return written, next((span.begin for span in needs), end)
    if message.name == GATHER and own and own.end.name in UPDATES:
        return written, end
    use = next((span for span in after if span.end.unit == message.unit), None)
    if message.name == GATHER and use:
        ahead = before[0] if before else None
        since = 0.0 if ahead is None else work[at].begin if ahead is own else ahead.begin
        return since, use.begin
    return work[at].begin, message.seconds


def _job(span: Span) -> tuple[str, str]:
    return span.end.name, span.end.unit
