"""Everything that is known of one step before it is judged: what each rank had, and what must become of it.

Owns the averaged gradient and its bound, the clip and the loss scale, and the update of any elements under the rule or
another. Bounds follow from the number of summands and their dtype: each addition, cast and
scaling on the way rounds once. Must not know what the user's ranks ended with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from zerosim.bands import FP32, Array, DType
from zerosim.conformance.intervals import Interval, State, Variant, point, tiny, unit, update
from zerosim.conformance.layout import Layout
from zerosim.conformance.local_gradients import Local
from zerosim.conformance.seen import Seen
from zerosim.records.conformance import Recipe, Rule
from zerosim.stages import Stage

FP16_MAX = 65504.0


class Clip(NamedTuple):
    """The clip coefficient, between two numbers, and the norm."""

    low: float = 1.0
    high: float = 1.0
    norm: float = 0.0

    @property
    def middle(self) -> float:
        """Halfway between the two."""
        return (self.low + self.high) / 2


@dataclass
class Evidence:
    """One step. Vectors are flat [P], in fp64 unless their dtype is the user's.

    * ``theta``: of each rank, the parameters before it, in their own dtype; ``master`` what the optimizer updates;
    * ``local``: each rank's own gradients, ``noise`` how far they may be off; ``weights`` what each counts for;
    * ``wire``: the coarsest dtype that gradients may have been rounded to on the way;
    * ``state`` and ``updates``: the optimizer's before it; ``lr`` this step's, or None for the rule's
      times ``factor``;
    * ``owner``: by element the rank that updates it, -1 where it is not known;
    * ``past``: the step before, or None; ``history``: the gradients of all updates before, as far as they are kept.
    """

    step: int
    row: Stage
    layout: Layout
    recipe: Recipe
    seen: Sequence[Seen]
    theta: list[Array]
    master: Interval
    local: list[Local]
    weights: list[float]
    noise: Array
    wire: DType
    state: State
    updates: int
    scale: float
    lr: float | None
    factor: float
    owner: Array
    past: Evidence | None = None
    history: Sequence[Interval] = ()
    exact: Array | None = None
    radius: Array = field(init=False)
    average: Interval = field(init=False)
    clipped: Interval = field(init=False)
    clip: Clip = field(init=False)

    def __post_init__(self) -> None:
        middle = self.mean([each.grad for each in self.local])
        self.radius = self._radius()
        if self.exact is not None:
            self.average = point(self.exact)
        else:
            self.average = self.around(middle)
        self.clip = self.coefficient(self.average)
        self.clipped = self.average if self.recipe.clip is None else self.scaled(self.average, self.clip)

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.local)

    @cached_property
    def mask(self) -> Array:
        """What is trained [P]."""
        return self.layout.trainable()

    def mean(self, grads: Sequence[Array]) -> Array:
        """The average over ranks [P], each with its weight."""
        with np.errstate(invalid="ignore", over="ignore"):
            total: Array = sum((grad * weight for grad, weight in zip(grads, self.weights, strict=True)),
                               np.zeros(self.layout.size)) / len(grads)  # fmt: skip
        return total

    def around(self, middle: Array) -> Interval:
        """The interval about an average: the ranks' own noise, and every rounding on the way to it."""
        return Interval(middle, middle).wider(self.radius)

    def _radius(self) -> Array:
        """How far the average may be off [P]."""
        sizes = self.mean([np.abs(each.grad) for each in self.local])
        roundings = 2 * self.ranks + self.recipe.accumulate + 4
        relative = roundings * unit(self.wire)
        dtype = self.theta[0].dtype
        own = unit(dtype) if dtype.itemsize < 4 else 4 * unit(FP32)
        smallest = (tiny(self.wire) * 2 * self.ranks + tiny(dtype)) / self.scale
        found: Array = self.noise * max(self.weights) + (relative + own) * sizes + smallest * (sizes > 0)
        return found

    # -- clipping and scaling

    def coefficient(self, average: Interval) -> Clip:
        """What all gradients are multiplied by so that their norm is at most ``clip``, as torch has it."""
        if self.recipe.clip is None:
            return Clip()
        norm = float(np.linalg.norm(average.middle))
        radius = float(np.linalg.norm(average.width / 2)) + 1e-5 * norm
        low, high = (min(1.0, self.recipe.clip / (max(each, 0.0) + 1e-6)) for each in (norm + radius, norm - radius))
        return Clip(low, high, norm)

    @staticmethod
    def scaled(average: Interval, clip: Clip) -> Interval:
        """The gradients times the clip's coefficient."""
        return average.times(clip.low, clip.high).wider(4 * unit(FP32) * np.abs(average.middle))

    def overflow(self) -> str:
        """Whether a number was not finite: ``"yes"``, ``"no"``, or ``"maybe"`` where the sum is close to the limit."""
        if self.recipe.loss_scale is None:
            return "no"
        if not all(each.finite for each in self.local):
            return "yes"
        largest = sum(each.largest for each in self.local)
        return "maybe" if self.wire.itemsize < 4 and largest > 0.9 * FP16_MAX else "no"

    # -- the update

    def advance(
        self, index: Array, grad: Interval, *, updates: int | None = None, variant: Variant | None = None,
        theta: Interval | None = None, state: State | None = None,
    ) -> tuple[Interval, State]:  # fmt: skip
        """What becomes of the elements ``index`` [n] under a gradient [n]: master weights and state after it."""
        step = (self.updates if updates is None else updates) + 1
        before = self.master[index] if theta is None else theta
        states = {band: each[index] for band, each in self.state.items()} if state is None else state
        lo, hi = np.zeros(len(index)), np.zeros(len(index))
        after: dict[str, tuple[Array, Array]] = {}
        for rule, part in self._by_rule(index):
            some, new = update(
                rule, before[part], {band: each[part] for band, each in states.items()}, grad[part], max(step, 1),
                lr=rule.lr * self.factor if self.lr is None else self.lr, variant=variant,
            )  # fmt: skip
            lo[part], hi[part] = some.lo, some.hi
            for band, each in new.items():
                low, high = after.setdefault(band, (np.zeros(len(index)), np.zeros(len(index))))
                low[part], high[part] = each.lo, each.hi
        return Interval(lo, hi), {band: Interval(*each) for band, each in after.items()}

    def other_chunk(self, index: Array, chunks: int) -> Array:
        """The same place in the chunk that lies so many ``chunks`` further on; -1 where there is none.

        Where it is not known who owns what, in an even cut of all parameters.
        """
        owner = self.owner
        if not (owner >= 0).any():
            owner = np.arange(len(owner)) // -(-len(owner) // self.ranks)
        starts = np.flatnonzero(np.concatenate([[True], np.diff(owner) != 0]))
        ends = np.concatenate([starts[1:], [len(owner)]])
        run = np.searchsorted(starts, index, side="right") - 1
        other = run + chunks
        there = (other >= 0) & (other < len(starts))
        other = np.clip(other, 0, len(starts) - 1)
        place = starts[other] + index - starts[run]
        there &= (owner[starts[other]] >= 0) & (owner[index] >= 0) & (place < ends[other])
        found: Array = np.where(there, place, -1)
        return found

    def replayed(self, index: Array, variant: Variant) -> State | None:
        """The state that all updates so far would have left under a variant; None if they are too many."""
        if len(self.history) != self.updates:
            return None
        state: State = {}
        for number, grad in enumerate(self.history):
            _, state = self.advance(index, grad[index], updates=number, variant=variant, state=state)
        return state

    def _by_rule(self, index: Array) -> list[tuple[Rule, Array]]:
        """The elements by the rule that updates them; frozen ones by none."""
        rules: dict[Rule, list[Array]] = {}
        for each, span in self.layout.spans():
            if each.trainable:
                inside = np.flatnonzero((index >= span.start) & (index < span.stop))
                if len(inside):
                    rules.setdefault(each.rule, []).append(inside)
        return [(rule, np.concatenate(parts)) for rule, parts in rules.items()]
