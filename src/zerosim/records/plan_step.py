"""A planned step, event by event: what a trace and a snapshot are made of.

Owns the schema. Must not know how a step is run, nor what is made of it.
"""

from __future__ import annotations

from zerosim.records.files import Record
from zerosim.records.plan import Cell, Plan
from zerosim.records.results import EventRecord


class Holding(Record, array_like=True):
    """Something that is held as the step begins."""

    band: str
    unit: str
    nbytes: int


class PlannedStep(Record):
    """A cell's step: what is held before it, in the order of allocation, and its log on the card.

    ``seconds`` of an event is when it is done, by the plan's estimate, and ``begins`` when what is
    computed and sent begins. A hold or a free takes no time; between two computations the log does not say when they
    are, so they are spread evenly.
    """

    plan: Plan
    cell: Cell
    start: list[Holding]
    events: list[EventRecord]
    begins: list[float]

    def held_at_start(self) -> dict[str, int]:
        """Bytes by band before the first event."""
        held: dict[str, int] = {}
        for each in self.start:
            held[each.band] = held.get(each.band, 0) + each.nbytes
        return held
