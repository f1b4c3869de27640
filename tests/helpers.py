"""What many files of tests need: batches, bits, states, predictions, and the doubles that stand in for a neighbour.

Owns no claim. Everything here is plain enough to be checked by reading, as what is tested is not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings as drawing

from zerosim import theory
from zerosim.bands import FP32, PRECISIONS, WIRES, Array, Band, DType
from zerosim.buckets import PADDINGS
from zerosim.checks import allocations, sanitizer
from zerosim.comm import Ring
from zerosim.counts import Report
from zerosim.lab import suite
from zerosim.model import MLP
from zerosim.optimizer import SGD, Adam
from zerosim.options import Gather, Options, Sync
from zerosim.ranks import Workspace
from zerosim.records.real_ranks import Settings as RealSettings
from zerosim.records.results import Results, Settings
from zerosim.schemes import SCHEMES, Scheme, Stage, ZeRO3

Pair = tuple[Array, Array]
Batch = list[Pair]


def by_night(*values: Any) -> list[Any]:
    """Parameters of a test that are tried at night alone, as one by day tells as much."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def some_by_night(cases: Iterable[Any], by_day: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test, those by day picked by what they are; a tuple is one value for each of several names."""
    values = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [pytest.param(*each, marks=() if by_day(case) else pytest.mark.slow) for case, each in values]


def examples(by_night: int, by_day: int, **more: Any) -> drawing:
    """How many examples are drawn, fewer of them by day; ``more`` is hypothesis's."""
    # The night's profile is conftest's, and that of who looks for new examples is hypothesis's own.
    daily = drawing.get_current_profile_name() == "repeatable"
    return drawing(max_examples=by_day if daily else by_night, **more)


MINE = Stage("mine", optimizer=True, grads=True)  # a row of one's own, which shards what ZeRO-2 does
OWN = [  # and one for each of the four
    Stage("mine"),
    Stage("mine", optimizer=True),
    MINE,
    Stage("mine", optimizer=True, grads=True, params=True),
]
COMPARED = (Band.PARAMS, Band.MASTER, Band.EXP_AVG, Band.EXP_AVG_SQ)  # what is alike on every rank of every scheme

each_stage = pytest.mark.parametrize("stage", SCHEMES, ids=lambda stage: stage.name)
each_gather = pytest.mark.parametrize(  # gathering at once is for those that gather at all
    ("stage", "gather"),
    [pytest.param(stage, "layer", id=stage.name) for stage in SCHEMES] + [pytest.param(ZeRO3, "model", id="at once")],
)


# -- what is trained, and on what


def batches(ranks: int, steps: int = 1, rows: int = 2, widths: Sequence[int] = (5, 7, 3), seed: int = 7) -> list[Batch]:
    """For each step one (x [rows, in], y [rows, out]) of noise per rank."""
    rng = np.random.default_rng(seed)

    def draw(width: int) -> Array:
        return rng.standard_normal((rows, width)).astype(np.float32)

    return [[(draw(widths[0]), draw(widths[-1])) for _ in range(ranks)] for _ in range(steps)]


def draw(ranks: int, rows: int = 2, widths: Sequence[int] = (5, 7, 3), seed: int = 7) -> Batch:
    """One step's batch."""
    [batch] = batches(ranks, 1, rows, widths, seed)
    return batch


def layers(widths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(fan-in, fan-out) of each layer."""
    return tuple(pairwise(widths))


def sizes(widths: Sequence[int]) -> list[int]:
    """The parameters of each layer: its weights and biases."""
    return [fan_in * fan_out + fan_out for fan_in, fan_out in layers(widths)]


@dataclass(frozen=True)
class Case:
    """A perceptron to be trained on N ranks, and how: what a scheme and the closed forms are both given."""

    stage: Stage
    n: int
    widths: tuple[int, ...] = (7, 5, 3)
    rows: int = 2
    precision: str = "mixed"
    wire: str = "fp32"
    gather: Gather = "layer"
    bucket: Gather = "layer"

    def __str__(self) -> str:
        options = (f"{self.precision} over {self.wire}", f"gather={self.gather}", f"bucket={self.bucket}")
        return ", ".join((self.stage.name, "-".join(map(str, self.widths)), f"N={self.n}", *options))

    def scheme(self, **more: Any) -> Scheme:
        options = Options(precision=self.precision, wire=self.wire, gather=self.gather, bucket=self.bucket)
        return self.stage(MLP(self.widths), self.n, options, **more)

    def batch(self, rows: int | None = None) -> Batch:
        return draw(self.n, rows or self.rows, self.widths)

    @property
    def job(self) -> theory.Job:
        each = layers(self.widths)
        buckets = tuple((layer,) for layer in each) if self.bucket == "layer" else (each,)
        return theory.Job(self.stage, buckets, self.n, self.rows, self.precision, self.wire, self.gather)


@cache
def trained(case: Case) -> Scheme:
    """Two steps of ``case``; the same run for every test that reads it."""
    scheme = case.scheme()
    for _ in range(2):
        scheme.step(case.batch())
    return scheme


def lab_settings(**changes: Any) -> Settings:
    """A small lab, nothing of which divides by anything."""
    usual: dict[str, Any] = {
        "ranks": 5, "steps": 2, "batch": 2, "seed": 7, "model_seed": 0, "precision": "mixed", "wire": "fp32",
        "gather": "layer", "data": "noise", "capacity": None, "widths": [7, 11, 3],
    }  # fmt: skip
    return Settings(**usual | changes)


def leave_memory_alone(patch: pytest.MonkeyPatch) -> None:
    """Let a lab do without the stricter world and the account of memory, most of a small one's time."""
    for check in (allocations, sanitizer):
        patch.setattr(check, "run", lambda *_: [])


def plain_lab(settings: Settings, **more: Any) -> Results:
    """What a lab finds, for tests of what becomes of it: memory is left to the tests that are of it."""
    with pytest.MonkeyPatch.context() as patch:
        leave_memory_alone(patch)
        return suite.run(settings, **more)


def real_settings(**changes: Any) -> RealSettings:
    """Two steps of every scheme on four real ranks, small."""
    usual: dict[str, Any] = {
        "ranks": 4, "steps": 2, "batch": 3, "seed": 7, "model_seed": 0, "widths": [5, 7, 3],
        "collectives": ["ring", "native"], "precisions": ["mixed"], "wire": "fp32", "backend": "gloo", "fault": None,
        "rows": list(SCHEMES),
    }  # fmt: skip
    return RealSettings(**usual | changes)


# -- what is drawn at random

EVERYWHERE = [name for name, recipe in PRECISIONS.items() if recipe.everywhere]  # the precisions of every stage


@st.composite
def wires(draw: st.DrawFn, precision: str) -> str:
    """A wire that carries what backward writes and what forward reads under this precision."""
    recipe = PRECISIONS[precision]
    carried = {recipe.working, recipe.dtypes(WIRES["fp32"])[Band.UNREDUCED]}
    return draw(st.sampled_from([name for name, dtype in WIRES.items() if name == "fp32" or {dtype} == carried]))


@st.composite
def options(draw: st.DrawFn, precisions: Sequence[str] = EVERYWHERE) -> dict[str, Any]:
    """Options that all stages can share, among which ``sync`` says for all when gradients are reduced."""
    precision = draw(st.sampled_from(precisions))
    return {
        "precision": precision,
        "wire": draw(wires(precision)),
        "bucket": draw(st.sampled_from(["layer", "model"]) | st.integers(1, 200)),
        "padding": draw(st.sampled_from(sorted(PADDINGS))),
        "accumulate": draw(st.integers(1, 3)),
        "sync": draw(st.sampled_from(get_args(Sync))),
        "checkpoint": draw(st.booleans()),
        "optimizer": draw(st.sampled_from([Adam(), SGD(), SGD(momentum=0.9), Adam(lr=1e-3, betas=(0.5, 0.9))])),
    }


perceptrons = st.builds(MLP, st.lists(st.integers(1, 9), min_size=2, max_size=5), seed=st.integers(0, 99))


# -- what is read


def bits(array: Array) -> Array:
    """The raw bits as unsigned integers, so that -0.0 is not 0.0 and a NaN is itself."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def states(scheme: Scheme, bands: Sequence[Band] = COMPARED) -> dict[str, bytes]:
    """The bits of those states that there are, put together from the ranks."""
    return {band: scheme.flat(band).tobytes() for band in bands if band in scheme.states}


def contents(scheme: Scheme) -> list[bytes]:
    """The bits of every state of every rank."""
    return [state.tobytes() for bucket in scheme.buckets for state in bucket.states.values()]


def sent(scheme: Scheme) -> dict[str, int]:
    """Bytes that the first rank sent in the last step, by collective."""
    return {name: each[0] for name, each in scheme.reports[-1].sent_by_collective().items()}


def traffic(report: Report) -> dict[tuple[str, str], list[int]]:
    """Bytes that each rank sent in a step, by collective and band."""
    return {key: moved.sent.tolist() for key, moved in report.traffic.items()}


def padding_sent(report: Report) -> list[int]:
    """Bytes of padding that each rank sent in a step; nothing where nothing was sent."""
    return [sum(column) for column in zip(*(moved.padding.tolist() for moved in report.traffic.values()), strict=True)]


def nonzero(held: Mapping[str, int]) -> dict[str, int]:
    """The bands of which something is held."""
    return {band: nbytes for band, nbytes in held.items() if nbytes}


# -- what stands in for others


class Allocation(NamedTuple):
    """Something held or freed: its shape without the ranks, how many arrays are held after it, and whose it is."""

    what: str
    shape: tuple[int, ...]
    held: int
    unit: str


class Recorder(Workspace):
    """A workspace that remembers: what is alive, everything held and freed in order, and the FLOPs.

    Memory comes as NaN, as its contents are undefined: reading them shows.
    """

    def __init__(self, rows: int, dtype: DType = FP32) -> None:
        self.unit, self.rows = "", None
        self.copies, self.dtype, self.operations = rows, dtype, 0
        self.live: list[Array] = []
        self.log: list[Allocation] = []

    def hold(self, *shape: int, dtype: DType | None = None) -> Array:
        assert dtype in (None, self.dtype)
        array = np.full((self.copies, *shape), np.nan, self.dtype)
        self.live.append(array)
        self.log.append(Allocation("hold", shape, len(self.live), self.unit))
        return array

    def free(self, array: Array) -> None:
        [index] = [index for index, live in enumerate(self.live) if live is array]
        del self.live[index]
        self.log.append(Allocation("free", array.shape[1:], len(self.live), self.unit))

    def flops(self, count: int) -> None:
        self.operations += count

    def take(self, values: Array) -> Array:
        """Hold an array and fill it."""
        array = self.hold(*values.shape[1:])
        array[...] = values
        return array


Post = dict[tuple[int, int, int], "SimpleQueue[Array]"]  # a mailbox for each rank of each kind of ring


class OneOfMany(Ring):
    """The ring, of ``size`` ranks ``step`` apart, of a process that is one rank of N.

    Blocks travel through mailboxes, as bytes of their own.
    """

    def __init__(
        self, rank: int, ranks: int, post: Post, *, size: int | None = None, step: int = 1, node: int | None = None
    ) -> None:
        self.size, self.step, self.ranks, self.node = size or ranks, step, ranks, node or ranks
        self.ids: Sequence[int] = [rank]
        self.members: Sequence[int] = [rank // step % self.size]
        self.leaves: Sequence[int] = [self._leaves(rank)]
        self.leaving = sum(map(self._leaves, range(self.node)))
        self._post = post
        self.handed: list[Array] = []

    def _below(self, rank: int) -> int:
        """The rank to which a rank sends."""
        member = rank // self.step % self.size
        return rank + ((member - 1) % self.size - member) * self.step

    def _leaves(self, rank: int) -> int:
        return int(self._below(rank) // self.node != rank // self.node)

    def split(self, node: int) -> tuple[Ring, Ring, Ring]:
        [rank], n = self.ids, self.ranks
        sizes = (n, 1), (node, 1), (n // node, node)
        every, inner, outer = (OneOfMany(rank, n, self._post, size=s, step=t, node=node) for s, t in sizes)
        return every, inner, outer

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return np.full(shape, np.nan, dtype)

    def shift(self, block: Array, spare: Array) -> Array:
        letter, [rank] = block.copy(), self.ids
        self.handed.append(letter)
        self._post[self.size, self.step, self._below(rank)].put(letter)
        spare[...] = self._post[self.size, self.step, rank].get(timeout=30)
        return spare

    def chunks(self, buffer: Array, hop: int) -> list[tuple[Any, Array]]:
        chunk = buffer.shape[1] // self.size
        start = (self.members[0] + hop) % self.size * chunk
        return [(slice(0, 1), buffer[:, start : start + chunk])]


def apart(ranks: int) -> list[OneOfMany]:
    """The rings of N processes, connected."""
    post: Post = defaultdict(SimpleQueue)
    return [OneOfMany(rank, ranks, post) for rank in range(ranks)]
