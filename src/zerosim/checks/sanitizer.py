"""A world that forgives less, for one more run of each scheme.

Owns what the two checks can only see where the world helps them: a ring on which messages
change on the way, memory that is spoilt when it is freed, and a search for arrays that the
ledger does not know. All of it comes in by the scheme's own arguments (its ring, collectives
and model); nothing of what is checked is replaced.

* **Messages matter.** A message loses an eighth of its value at each hop. What every rank must
  then hold is known (``Reference`` with ``kept``), so a rank that read another's memory, sent
  one thing and used another, or left a message out, differs from it. The ring counts the bytes
  of the blocks that pass through it, and the ledger must have booked as many.
* **Memory is what the ledger says.** Between any two operations, every array that can be
  reached from the scheme, or from a variable of the step in progress, is held, or was freed and
  waits to be handed out again. The rows of what is held are the ranks' own, and no two held
  arrays overlap. What is freed is filled with NaN, so that its use shows.

What it does not see: memory that is gone before an operation is over (a temporary within a
layer, a collective or Adam: registers, by the rules of the ledger), bookkeeping (one number per
rank or less, such as losses, tables of indices, and the few numbers that ranks tell each other),
memory that is no NumPy array or in an object of another package, and what happens only in other
worlds than this one: here a message is a copy, so where rows merely change their ranks it is the
comparison of bits that must see what is wrong; nor a run that was resumed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from zerosim.bands import INT8, Array, Band, DType
from zerosim.checks.compare import RECOUNTED, against_plain
from zerosim.checks.perceptron import Given, Pair
from zerosim.checks.reference import Reference
from zerosim.comm import Comm
from zerosim.counts import Event, EventKind, Phase
from zerosim.layers import Layer, MicroBatch
from zerosim.model import MLP
from zerosim.records.results import Check, Failure, Settings
from zerosim.schemes import Scheme, Stage
from zerosim.util import int8
from zerosim.worlds.local import LocalRing

# What is not entered in the search for arrays, as there can be none in it: it would be most of what is looked at.
_LEAVES = frozenset({str, int, float, bool, NoneType, CodeType, ModuleType, Event, Phase, Band, EventKind, np.dtype})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType, CellType, MethodType, GeneratorType, partial)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))

KEPT = 7 / 8  # exact in every dtype, and a loss that survives rounding to any of them
HOW = ", where messages lose an eighth on the way"
PASSED = "bytes of {} sent by {}, counted as they pass"
AT_REST = "at rest"
TOLD = ("rows", "norm", "used")  # the tags of what is a few numbers for each rank
OUTSIDE, SHARED = "bytes outside the ledger", "bytes of {} of {} that are also {}"

Pause = Callable[[str], None]


def run(row: Stage, settings: Settings, ranks: int, batches: Sequence[Sequence[Given]]) -> list[Failure]:
    """Train ``row`` in the strict world and report whatever is not as it must be.

    Memory is looked at after every step, and within the last: it meets what the first have left.
    """
    ring, model = SanitizerRing(ranks), SanitizerMLP(settings.widths, settings.model_seed)
    options = replace(settings.options(), capacity=None, host_capacity=None)
    scheme = row(model, ranks, options, ring=ring, collectives=SanitizerComm)
    watch = Watch(scheme, ring.world, model)
    reference = Reference(row, settings, ranks, KEPT)
    failures: list[Failure] = []
    for step, batch in enumerate(batches, start=1):
        watch.begin(step, batch, last=step == len(batches))
        with np.errstate(all="ignore"):  # what is spoilt may be computed with before it is found
            scheme.step(batch)
        watch.look(AT_REST)
        reference.reach(step, batch)
        failures += watch.end() + against_plain(scheme, reference, step, HOW)
    return failures


# -- the world


class World:
    """What the rings of one run have in common."""

    def __init__(self) -> None:
        self.handed: list[Array] = []  # every array that the ranks were given
        self.sent = 0  # bytes per rank, of the blocks themselves
        self.passed: Counter[tuple[str, str]] = Counter()  # the same by (collective, band)
        self.told: Array | None = None  # what each rank tells the others now, a few numbers
        self.one_block = 0  # bytes of blocks that came and went in the same memory
        self.pause: Pause = lambda when: None


class SanitizerRing(LocalRing):
    """All ranks in one process. A message arrives as a copy, in the spare block, with an eighth of it lost."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.world = World()  # one for the rings of groups as well

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        array = super().empty(shape, dtype)
        self.world.handed.append(array)
        _spoil(array)
        return array

    def shift(self, block: Array, spare: Array) -> Array:
        nbytes = block.nbytes // len(self.ids)
        self.world.sent += nbytes
        if np.may_share_memory(block, spare):
            self.world.one_block += nbytes
        arrived = super().shift(block, spare)
        if block.dtype == INT8:
            np.copyto(spare, arrived)
            arrived, lost = int8.scales(arrived), int8.scales(spare)
        else:
            lost = spare
        np.multiply(arrived, lost.dtype.type(KEPT), out=lost)
        return spare


class SanitizerComm(Comm):
    """The collectives as they are, with a pause before each, and its bytes kept apart."""

    def reduce_scatter(self, *args: Any, name: str = "reduce-scatter", **options: Any) -> None:
        with self._apart(name, **options):
            super().reduce_scatter(*args, name=name, **options)

    def all_gather(self, *args: Any, name: str = "all-gather", **options: Any) -> None:
        assert isinstance(self.ring, SanitizerRing)
        self.ring.world.told = args[2] if options["band"] in TOLD else None
        with self._apart(name, **options):
            super().all_gather(*args, name=name, **options)
        self.ring.world.told = None

    @contextmanager
    def _apart(self, name: str, *, band: str, unit: str, **others: object) -> Iterator[None]:
        assert isinstance(self.ring, SanitizerRing)
        world = self.ring.world
        world.pause(f"before the {name} of {unit}")
        before = world.sent
        yield
        world.passed[name, str(band)] += world.sent - before


class SanitizerMLP(MLP):
    """The perceptron as it is, with a pause before each layer, and what it was given kept in mind."""

    def __init__(self, widths: Sequence[int], seed: int) -> None:
        super().__init__(widths, seed)
        self.pause: Pause = lambda when: None
        self.given: tuple[Array, ...] = ()
        self.layers: tuple[Layer, ...] = tuple(_SanitizerLayer(layer, self) for layer in self.layers)

    def check(self, batch: Sequence[Pair], ranks: int) -> tuple[Array, Array]:
        self.given = x, y = super().check(batch, ranks)
        return x, y


class _SanitizerLayer:
    def __init__(self, layer: Layer, model: SanitizerMLP) -> None:
        self.name, self.groups = layer.name, layer.groups
        self._layer, self._model = layer, model

    def forward(self, *args: Any) -> Any:
        self._model.pause(f"before the forward of {self.name}")
        return self._layer.forward(*args)

    def backward(self, *args: Any) -> Any:
        self._model.pause(f"before the backward of {self.name}")
        return self._layer.backward(*args)


# -- what is looked at in the pauses


class Watch:
    """Looks at a scheme's memory whenever it is told to, and spoils what is not held."""

    def __init__(self, scheme: Scheme, world: World, model: SanitizerMLP) -> None:
        self._scheme, self._world, self._model = scheme, world, model
        self._step, self._last = 0, False
        self._batch: Sequence[Given] = ()
        self._found: dict[tuple[int, str], tuple[str, int, int]] = {}  # by rank and quantity: when, and both values

    def begin(self, step: int, batch: Sequence[Given], *, last: bool) -> None:
        """A step begins; memory is looked at within the ``last``."""
        self._step, self._batch, self._last, self._found = step, batch, last, {}
        if last:
            self._world.pause = self._model.pause = self.look
        self._world.passed.clear()

    def end(self) -> list[Failure]:
        """What was found in the step, each thing where it was seen first; the ring's bytes are compared here."""
        traffic = self._scheme.reports[-1].traffic
        for name, band in dict.fromkeys([*traffic, *self._world.passed]):
            booked = traffic[name, band].sent.tolist() if (name, band) in traffic else [0] * self._scheme.ring.size
            for rank, nbytes in enumerate(booked):
                self._tell(PASSED.format(band, name), "", self._world.passed[name, band], nbytes, rank)
        return [
            Failure(
                check=Check.AS_PREDICTED, scheme=self._scheme.name, ranks=self._scheme.ring.size, step=self._step,
                rank=rank, quantity=f"{what}{when}", measured=f"{measured:,}", expected=f"{expected:,}",
            )
            for (rank, what), (when, measured, expected) in self._found.items()
        ]  # fmt: skip

    def _tell(self, what: str, when: str, measured: int, expected: int, rank: int = -1) -> None:
        if measured != expected:
            self._found.setdefault((rank, what), (f", {when}" if when else "", measured, expected))

    def look(self, when: str) -> None:
        """Compare all that can be reached now with what is held, and spoil what is not."""
        live = list(self._scheme.ranks.live())
        held = {id(_owner(array)) for _, _, array in live}
        self._recount(live, when)
        self._overlaps(live, when)
        free = [array for array in self._world.handed if id(_owner(array)) not in held]
        pairs = [pair for each in self._batch for pair in (each if isinstance(each, list) else [each])]
        given = [array for pair in pairs for array in pair]
        given += [] if self._world.told is None else [self._world.told]
        for values in _variables(sys._getframe(1)):  # a batch whose ranks differ is laid out anew
            parts = values if isinstance(values, list) else [values]
            given += [array for part in parts if isinstance(part, MicroBatch) for array in part[:2]]
        known = held | {id(_owner(array)) for array in (*free, *given, *self._model.given)}
        roots = [self._scheme, *_variables(sys._getframe(1))]
        for array in _reachable(roots, through_code=self._last and when == AT_REST):
            if id(array) not in known and array.size > self._scheme.ring.size and array.dtype != np.intp:
                self._tell(f"{OUTSIDE}, {array.dtype} of {array.shape}", when, array.nbytes, 0)
        for array in free:
            _spoil(array)

    def _recount(self, live: list[Any], when: str) -> None:
        counted: Counter[str] = Counter()
        for band, _, array in live:
            counted[band] += array.nbytes // len(array)
        booked = Counter(self._scheme.ledger.held)
        booked.update(self._scheme.ledger.host)
        for band in dict.fromkeys([*counted, *booked]):
            self._tell(RECOUNTED.format(band), when, counted[band], booked[band])

    def _overlaps(self, live: list[Any], when: str) -> None:
        """Every held array is memory of its own, with a row for each rank, and every state in use is held."""
        spans = []
        used = [(band, bucket.name, state) for bucket in self._scheme.buckets for band, state in bucket.states.items()]
        for band, unit, array in [*live, *used]:
            start, end = byte_bounds(array)
            self._tell(SHARED.format(band, unit, "another rank's"), when, array.nbytes - (end - start), 0)
        for band, unit, array in live:
            self._tell(f"{OUTSIDE}, beyond {band} of {unit}", when, _owner(array).nbytes - array.nbytes, 0)
            spans.append((*byte_bounds(array), band, unit))
        for (_, end, band, unit), (start, _, other, of) in pairwise(sorted(spans)):
            self._tell(SHARED.format(band, unit, f"{other} of {of}"), when, max(0, end - start), 0)
        self._tell("bytes of ring blocks that go and come in one place", when, self._world.one_block, 0)


def _owner(array: Array) -> Array:
    """The array that has the memory which ``array`` is a view of."""
    below: Any = array
    while (below := getattr(below, "base", None)) is not None:  # NumPy's stride tricks put an object in between
        if isinstance(below, np.ndarray):
            array = below
    return array


def _spoil(array: Array) -> None:
    """Fill with NaN what nobody may read before it is written."""
    owner = _owner(array)
    if owner.flags.c_contiguous and owner.flags.writeable:
        owner.view(np.uint8).fill(0xFF)


def _variables(frame: FrameType | None) -> Iterator[Any]:
    """Local variables of this package's functions in progress, from ``frame`` up to ``run``."""
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (__file__, "run"):
        if frame.f_code.co_filename.startswith(_PACKAGE):
            yield from frame.f_locals.values()
        frame = frame.f_back


def _reachable(roots: Iterable[Any], *, through_code: bool) -> list[Array]:
    """Arrays with memory of their own that can be reached from ``roots``.

    Containers and this package's objects are entered, but no thread's registers; what is others'
    is not. ``through_code`` enters the package's functions and classes too, and so its modules.
    """
    found: dict[int, Array] = {}
    seen: dict[int, Any] = {}  # the objects too, so that no id is given to another
    todo = list(roots)
    while todo:
        it = todo.pop()
        if id(it) in seen:
            continue
        seen[id(it)] = it
        if isinstance(it, np.ndarray):
            owner = _owner(it)
            found[id(owner)] = owner
            continue
        if isinstance(it, (type, FunctionType)):
            entered = through_code and (it.__module__ or "").startswith("zerosim")
        else:
            mine = type(it).__module__.startswith("zerosim") and not isinstance(it, threading.local)
            entered = mine or isinstance(it, _CONTAINERS)
        if entered:
            todo += [other for other in gc.get_referents(it) if type(other) not in _LEAVES]
    return list(found.values())
