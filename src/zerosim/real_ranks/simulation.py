"""What the ranks are held to: the same run in the simulator, in this process.

Linear algebra on another number of threads may sum in another order: ``one_thread`` gives every process the one
that a rank has. Owns the simulated side of a comparison; must not know torch, nor what the ranks said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from zerosim.bands import Array, DType
from zerosim.comm import Ring
from zerosim.layers import Model
from zerosim.real_ranks.cases import COLLECTIVES, Case, States, booked, states
from zerosim.real_ranks.connection import Booked
from zerosim.records.real_ranks import NATIVE, Settings
from zerosim.schemes import Scheme
from zerosim.util.shapes import Shaped
from zerosim.worlds.gloo import Op
from zerosim.worlds.native import LocalCollectives


@contextmanager
def one_thread() -> Iterator[None]:
    """Linear algebra on one thread, for as long as the block lasts."""
    from threadpoolctl import threadpool_limits  # only now, as of torch: without them the command must say so

    with threadpool_limits(1):
        yield


def threads() -> dict[str, int]:
    """On how many threads each library of linear algebra in this process computes."""
    from threadpoolctl import threadpool_info

    return {str(each["internal_api"]): int(each["num_threads"]) for each in threadpool_info()}


class Expected(NamedTuple):
    """A step of all ranks. ``states`` are [N, n]; ``losses`` and ``traffic`` by rank."""

    losses: list[float]
    states: States
    traffic: list[list[Booked]]
    resident: dict[str, int]
    peak: dict[str, int]


class Simulation:
    """A case in the simulator.

    The bits are those of the plain simulator, whichever the collectives. A simulated library
    with the layout of a real one says what is held and counted where they are handed over whole.
    """

    def __init__(self, settings: Settings, case: Case, model: Model) -> None:
        options = settings.options(case.precision)
        self._plain = self._twin = case.row(model, settings.ranks, options)
        if case.collectives == NATIVE:
            ring = LocalCollectives(settings.ranks)
            self._twin = case.row(model, settings.ranks, options, ring=ring, collectives=COLLECTIVES[NATIVE])

    @property
    def states(self) -> States:
        """The states now, on all ranks: views."""
        return states(self._plain)

    def step(self, batch: Sequence[tuple[Array, Array]]) -> Expected:
        """Train one step."""
        self._plain.step(batch)
        if self._twin is not self._plain:
            self._twin.step(batch)
        report = self._twin.reports[-1]
        return Expected(
            losses=self._plain.reports[-1].losses,
            states=self.states,
            traffic=[booked(report, rank) for rank in self._twin.ring.ids],
            resident=dict(report.resident),
            peak=dict(report.peak.by_band),
        )


class _Alone(Ring):
    """Rank 0, whose neighbours send nothing but zeros; it notes what it would hand to torch."""

    ids, members, leaves, leaving = (0,), (0,), (0,), 0

    def __init__(self, size: int, calls: list[tuple[str, int]]) -> None:
        self.size, self.calls = size, calls

    def split(self, node: int) -> tuple[Ring, Ring, Ring]:
        return self, _Alone(node, self.calls), _Alone(self.size // node, self.calls)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return np.empty(shape, dtype)

    def chunks(self, buffer: Shaped[Array, "1 L"], hop: int) -> list[tuple[slice, Array]]:
        length = buffer.shape[1] // self.size
        start = hop % self.size * length
        return [(slice(0, 1), buffer[:, start : start + length])]

    def shift(self, block: Shaped[Array, "1 C"], spare: Shaped[Array, "1 C"]) -> Shaped[Array, "1 C"]:
        self._note(Op.SEND, block, spare)
        return spare

    def all_reduce(self, whole: Shaped[Array, "1 L"]) -> None:
        self._note(Op.ALL_REDUCE, whole, whole)

    def reduce_scatter(self, whole: Shaped[Array, "1 L"], own: Shaped[Array, "1 C"]) -> None:
        self._note(Op.REDUCE_SCATTER, whole, own)

    def all_gather(self, own: Shaped[Array, "1 C"], whole: Shaped[Array, "1 L"]) -> None:
        self._note(Op.ALL_GATHER, whole, whole)

    def _note(self, op: Op, whole: Array, result: Array) -> None:
        self.calls.append((str(op), whole.nbytes))
        result[...] = 0


def check_trainable(settings: Settings, model: Model) -> None:
    """Let each scheme say what it cannot train, in its own words, before a rank is started."""
    for precision in settings.precisions:
        for row in settings.rows:
            row(model, settings.ranks, settings.options(precision), ring=_Alone(settings.ranks, []))


def calls_of_a_step(
    settings: Settings, case: Case, model: Model, batch: Sequence[tuple[Array, Array]]
) -> list[tuple[str, int]]:
    """The operations that a rank hands to torch in a step, in their order, with the bytes of each: rank 0's."""
    ring = _Alone(settings.ranks, [])
    options = settings.options(case.precision)
    scheme: Scheme = case.row(model, settings.ranks, options, ring=ring, collectives=COLLECTIVES[case.collectives])
    scheme.step(batch[:1])
    return ring.calls
