"""What torch's profiler saw of a training run: every block of memory that came and went, and every collective.

Owns the reading of that log, and turns it into what was held and what the peak was. Takes the
profiler's events as they are; must not know torch, nor frameworks. Times are nanoseconds.

The profiler is told of each allocation by torch's CPU allocator, with address and size, and of
each release by a thread that it follows. What is alive at an instant is therefore all there is,
and the highest sum over a step is the peak, not a sample of it. One thing escapes: a tensor that
a thread of gloo's is the last to let go of. Such a block is **missed**, and noticed: its address
is given out again, or blocks of its origin have gone in other steps and it is in no tensor that
can be found. Since all steps do the same, it is taken to have gone where its like in another
step was seen to go. Where none was seen, it counts to the end of its phase, and the peak is an
upper bound. (What only the first
steps do cannot be mended. DDP, on building its buckets anew, can leave up to 200 bytes.)
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from zerosim.frameworks.observation import Instant
from zerosim.records.frameworks import BEFORE, ELSEWHERE
from zerosim.worlds.gloo import Call, Op

MARK = "zerosim: "  # begins the names of our own marks in the log
STEP, UPDATE = "step", "update"
RING = MARK + "ring of "  # and behind it the ranks that a collective within runs over, where those are not all
PHASES = ("forward", "backward", UPDATE)
Storages = dict[int, int]
"""Bytes by address."""

_C10D = "c10d::"
_Key = tuple[object, int]
_Place = tuple[int, int]


class _Block:
    """A piece of memory that the allocator gave out, and for how long.

    ``origin`` is its size, the phase of the step, and the operation that it was allocated for.
    """

    def __init__(self, address: int, nbytes: int, within: tuple[str, ...], born: int) -> None:
        self.address, self.nbytes, self.born = address, nbytes, born
        self.origin = (nbytes, within[:2], within[-1:])
        self.died: float = math.inf
        self.seen = self.sure = True


class Log:
    """The log of a run whose steps and phases were marked; ``kept`` are the addresses in use at its end.

    ``marks`` gives begin and end of each mark.
    """

    def __init__(self, tree: Sequence[Any], kept: Set[int]) -> None:
        self.marks: dict[str, list[tuple[int, int]]] = {}
        self._kept = kept
        self._blocks: list[_Block] = []
        self._asked: list[tuple[int, Call]] = []
        at: dict[int, _Block] = {}
        for event, within in sorted(_flat(tree, ()), key=lambda found: found[0].start_time_ns):
            time, name = event.start_time_ns, event.name
            if event.tag.name == "Allocation":
                address, change = event.typed[1].ptr, event.typed[1].alloc_size
                if old := at.pop(address, None):
                    old.died, old.seen = time, change < 0
                if change > 0:
                    at[address] = _Block(address, change, within, time)
                    self._blocks.append(at[address])
            elif name.startswith(MARK):
                self.marks.setdefault(name.removeprefix(MARK), []).append((time, event.end_time_ns))
            elif name.startswith(_C10D):
                ring = next((name.removeprefix(RING) for name in within if name.startswith(RING)), "")
                asked = _collective(name.removeprefix(_C10D), event.typed[1].inputs)
                self._asked.append((time, asked._replace(ring=tuple(map(int, ring.split())))))
        gone = {block.origin for block in self._blocks if block.died < math.inf}
        for block in at.values():
            block.seen = block.address in kept or block.origin not in gone
        self._mend()

    def _mend(self) -> None:
        """Let each missed block go where its like in another step was seen to go.

        Its like: the first, second, ... block of the same origin in its step. Where: so many steps
        later, after so many of the events of that step, which are its phases' beginnings and allocations.
        """
        begins = [begin for begin, _ in self.marks[STEP]]
        events = [[self.marks[phase][step][0] for phase in PHASES] for step in range(len(begins))]
        known: dict[_Block, tuple[int, _Key]] = {}
        nth: Counter[tuple[int, object]] = Counter()
        for block in self._blocks:
            step = bisect_right(begins, block.born) - 1
            if step >= 0 and block.born <= self.marks[STEP][step][1]:
                known[block] = step, (block.origin, nth[step, block.origin])
                nth[step, block.origin] += 1
                events[step].append(block.born)
        for each in events:
            each.sort()
        usual: dict[_Key, _Place] = {}
        for block, (step, key) in known.items():
            if block.seen and block.died < math.inf:
                last = bisect_right(begins, block.died) - 1
                place = last - step, bisect_left(events[last], block.died)
                usual[key] = min(usual.get(key, place), place)
        for block in self._blocks:
            if block.seen:
                continue
            step, key = known.get(block, (-1, (None, 0)))
            if step < 0:
                block.died = block.born  # made with the model, where nothing has its like; it is of no use in a step
            elif key in usual:
                last, after = step + usual[key][0], usual[key][1]
                if last < len(begins):
                    block.died = (events[last][after - 1] if after else begins[last]) + 1
            else:
                phases = (end for phase in PHASES for begin, end in self.marks[phase] if begin <= block.born <= end)
                block.died, block.sure = next(phases, self.marks[STEP][step][1]), False

    def held(self, time: int, walked: dict[str, Storages]) -> dict[str, int]:
        """Bytes by band at that instant, and what was allocated besides."""
        alive = {block.address: block.nbytes for block in self._blocks if block.born <= time < block.died}
        held = {}
        for band, storages in walked.items():
            held[band] = sum(storages.values())
            for address in storages:
                alive.pop(address, None)
        return held | {ELSEWHERE: sum(alive.values())}

    def peak(self, begin: int, end: int) -> Instant:
        """The peak between two, and when what was allocated then had come: before, or in which phase."""
        changes = [(block.born, block.nbytes) for block in self._blocks]
        changes += [(int(block.died), -block.nbytes) for block in self._blocks if block.died < math.inf]
        now, highest, instant = 0, -1, begin
        for time, change in sorted(changes):
            now += change
            if now > highest and begin <= time <= end:
                highest, instant = now, time
        parts: Counter[str] = Counter()
        alive = [block for block in self._blocks if block.born <= instant < block.died]
        for block in alive:
            parts[BEFORE if block.born < begin else self._phase(block.born)] += block.nbytes
        return Instant(self._phase(instant), dict(parts), all(block.sure for block in alive))

    def strays(self, begin: int) -> Counter[object]:
        """Bytes, by origin, of what came before that instant, is in no tensor at the end, and was not seen to go."""
        found: Counter[object] = Counter()
        for block in self._blocks:
            if block.born < begin and block.died == math.inf and block.address not in self._kept:
                found[block.origin] += block.nbytes
        return found

    def _phase(self, time: int) -> str:
        inside = (phase for phase in PHASES for begin, end in self.marks[phase] if begin <= time <= end)
        return next(inside, "between the phases")

    def asked(self, begin: int, end: int) -> list[Call]:
        """The collectives between two instants, in order."""
        return [collective for time, collective in self._asked if begin <= time <= end]


def _flat(events: Iterable[Any], within: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Every event of the tree, and the names of those within which it happened."""
    for event in events:
        yield event, within
        yield from _flat(event.children, (*within, event.name))


def _collective(name: str, inputs: Sequence[Any]) -> Call:
    """What was asked for, from the arguments that torch's dispatcher was given; of what is unknown only the name."""
    kind, place = {
        "allreduce_": (Op.ALL_REDUCE, 0),
        "_reduce_scatter_base_": (Op.REDUCE_SCATTER, 1),
        "_allgather_base_": (Op.ALL_GATHER, 0),
        "broadcast_": (Op.BROADCAST, 0),
    }.get(name, (name, -1))
    if place < 0:
        return Call(name, 0, 0)
    whole = inputs[place]
    if isinstance(whole, list):
        if len(whole) > 1:
            return Call(name, 0, 0)
        [whole] = whole
    return Call(kind, math.prod(whole.sizes), whole.dtype.itemsize, inputs[2] if kind == Op.BROADCAST else 0)
