"""A recorded step as the moving picture plays it: instant by instant, all schemes in lockstep.

Owns how a log of events becomes instants: which layer is gathered, which chunk each rank has in its hands at
each hop, what is held. Takes records alone; must not know how anything is drawn, nor any scheme by its name.

A log says that a collective was done and what a rank sent in it. The hops in between follow: a rank sends one
block at each, so there are as many as blocks in what it sent. Which chunk goes where is the ring's rule
(``comm.py``): rank r begins a reduce-scatter with chunk r + 1 and an all-gather with its own, and at every hop
takes what the rank above it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from zerosim.bands import MODEL_STATES, Band
from zerosim.records.results import EventRecord, Results, SchemeRecord
from zerosim.stages import Stage

TRANSIENT = (Band.GATHERED, Band.UNREDUCED)  # of a layer, beside the states that a rank keeps


@dataclass(frozen=True)
class Hop:
    """A collective after some of its hops. ``sums``: it adds on the way, so what it leaves is each rank's own chunk."""

    collective: str
    unit: str
    band: str
    sums: bool
    done: int
    hops: int

    def chunk(self, rank: int, ranks: int) -> int:
        """Which chunk of the layer this rank has just been handed."""
        return (rank + self.done + self.sums) % ranks

    def arrived(self, rank: int, ranks: int) -> set[int]:
        """The chunks that this rank has of a buffer that is being gathered: its own, and each that has come."""
        return {(rank + hop) % ranks for hop in range(self.done + 1)}


@dataclass(frozen=True)
class Instant:
    """What a scheme is at: bytes held by band, which layers are whole for now, and what is computed, released
    or handed on.

    Where more was held for a moment, between this instant and the one before, that is what ``held`` has, so that no
    peak falls between two of them.
    """

    held: Mapping[str, int]
    whole: frozenset[tuple[str, str]] = frozenset()  # (transient band, unit)
    phase: str = ""
    computed: str = ""
    released: str = ""
    hop: Hop | None = None

    @property
    def total(self) -> int:
        """All bands together."""
        return sum(self.held.values())


@dataclass(frozen=True)
class Story:
    """A scheme's step as instants, one for each slot of the picture, and who owns what at rest."""

    name: str
    row: Stage
    instants: Sequence[Instant]
    states: Sequence[Band]
    at_rest: int
    peak: int


def stories(results: Results) -> list[Story]:
    """The last step of every scheme, in lockstep. ValueError if a scheme ran out of memory, or computes otherwise.

    Every scheme computes the same in the same order. So each waits, before it computes what comes next, until the
    slowest is there.
    """
    told = []
    for record in results.schemes:
        if record.out_of_memory or not record.events:
            raise ValueError(f"moving_steps: every scheme must have a whole step; {record.name} has not.")
        told.append(list(_instants(record)))
    parts = [_cut(instants) for instants in told]
    computed = [[(each[-1].phase, each[-1].computed) for each in mine[:-1]] for mine in parts]
    if any(each != computed[0] for each in computed):
        raise ValueError("moving_steps: the schemes do not compute the same in the same order.")
    for together in zip(*parts, strict=True):
        slots = max(map(len, together))
        for part in together:
            _wait(part, slots)
    return [
        _story(record, list(chain.from_iterable(mine))) for record, mine in zip(results.schemes, parts, strict=True)
    ]


def _story(record: SchemeRecord, instants: list[Instant]) -> Story:
    resident, peak = record.steps[-1].resident, record.steps[-1].peak.total
    states = [band for band in MODEL_STATES if band in resident]
    return Story(record.name, record.row, instants, states, sum(resident.values()), peak)


def _cut(instants: Sequence[Instant]) -> list[list[Instant]]:
    """In parts that end where something has been computed; the last is what comes after."""
    parts: list[list[Instant]] = [[]]
    for each in instants:
        parts[-1].append(each)
        if each.computed:
            parts.append([])
    return parts


def _wait(part: list[Instant], slots: int) -> None:
    """Fill up to so many slots: before the computation that ends a part, or where there is none, after all."""
    at = len(part) - bool(part and part[-1].computed)
    idle = replace(part[max(at - 1, 0)], hop=None, computed="", released="")
    part[at:at] = [idle] * (slots - len(part))


def _instants(record: SchemeRecord) -> Iterator[Instant]:
    """The start, every hop, everything computed, and wherever something of a layer is released; and the end."""
    held = dict(record.steps[-1].resident)
    bands = {moved.collective: moved.band for moved in record.steps[-1].traffic}
    now, between, halves = Instant(dict(held)), [dict(held)], 0
    yield now
    for number, event in enumerate(record.events):
        sign = {"hold": 1, "free": -1}.get(event.kind, 0)
        if sign:
            held[event.name] = held.get(event.name, 0) + sign * event.nbytes
            between.append({band: nbytes for band, nbytes in held.items() if nbytes})
        phase = now.phase if event.phase == "communication" else event.phase
        now = replace(now, phase=phase, computed="", released="")
        hops: Iterable[Hop | None] = [None]
        if event.name in TRANSIENT:
            change = {(event.name, event.unit)}
            now = replace(now, whole=now.whole | change if sign > 0 else now.whole - change)
            if sign > 0:  # it is filled by what follows
                continue
            now = replace(now, released=event.unit)
        elif event.kind == "compute":
            now = replace(now, computed=event.unit)
        elif sign > 0 and event.name == Band.BLOCKS and record.events[number + 1].kind == "free":  # both are there
            sent = next(each for each in record.events[number:] if each.kind == "send")
            halves += sent.name == "all-reduce"  # a reduce-scatter, and then an all-gather of the sums
            sums = halves % 2 == 1 if sent.name == "all-reduce" else sent.name == "reduce-scatter"
            hops = _hops(sent, event.nbytes, bands[sent.name], sums=sums)
        else:
            continue
        yield from (replace(now, held=_shown(between), hop=hop) for hop in hops)
        between = between[-1:]
    yield replace(now, held=between[-1], phase="", computed="", released="")


def _shown(between: Sequence[dict[str, int]]) -> dict[str, int]:
    """The last state, unless a state on the way to it was fuller than it and than where they began."""
    most = max(between, key=lambda held: sum(held.values()))
    return between[-1] if most is between[0] else most


def _hops(sent: EventRecord, block: int, band: str, *, sums: bool) -> Iterator[Hop]:
    hops, rest = divmod(sent.nbytes, block)
    if rest:
        raise ValueError(f"moving_steps: {sent.name} of {sent.unit} sent {sent.nbytes} B in blocks of {block} B.")
    for done in range(1, hops + 1):
        yield Hop(sent.name, sent.unit, band, sums, done, hops)
