"""The averaged gradient as the simulator's schedule makes it, to the bit: for layouts that are declared to be its own.

Owns a model that computes nothing: its backward hands the schedule the gradients that the ranks' modules have.
The buckets, the rings and the roundings are then the row's own. Must not know what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerosim.bands import FP32, Array, Band
from zerosim.conformance.layout import Layout
from zerosim.conformance.local_gradients import Local
from zerosim.layers import Group, Layer, Pass
from zerosim.records.conformance import Recipe
from zerosim.schemes import Scheme
from zerosim.stages import Stage


def exact_average(layout: Layout, local: Sequence[Local], recipe: Recipe, row: Stage) -> Array:
    """The averaged gradient [P] of the ranks' own under ``row``, before any clipping, in fp64; frozen ones are 0."""
    model = _Given(layout, local)
    scheme: Scheme = row(
        model, len(local), precision=recipe.precision, accumulate=recipe.accumulate, all_reduce=recipe.all_reduce,
        node=recipe.node,
    )  # fmt: skip
    scheme.step(model.batch(recipe.accumulate))
    flat, result, start = scheme.flat(Band.GRADS), np.zeros(layout.size), 0
    for where in model.places:
        result[where] = flat[start : start + len(where)].astype(np.float64)
        start += len(where)
    return result


class _Unit:
    """A unit whose gradients are known: by micro-batch, one row per rank [R, P]."""

    def __init__(self, group: Group, grads: Sequence[Array]) -> None:
        self.name = group.name
        self.groups: tuple[Group, ...] = (group,)
        self._grads, self._next = grads, 0

    def forward(self, x: Array, given: Pass) -> tuple[Array, Any]:
        y = given.work.hold(*x.shape[1:], dtype=x.dtype)
        y[...] = x
        return y, y

    def backward(self, saved: Any, dy: Array, given: Pass) -> Array | None:
        given.grads[:, : self.groups[0].size] = self._grads[self._next]
        self._next += 1
        given.work.free(saved)
        return dy


class _Given:
    """The ranks' gradients as a model, a unit for each of the layout's."""

    def __init__(self, layout: Layout, local: Sequence[Local]) -> None:
        self._ranks = len(local)
        self.layers: list[Layer] = []
        self.places: list[Array] = []
        for name in dict.fromkeys(each.unit for each in layout.parameters if each.trainable):
            own = [(each, span) for each, span in layout.spans() if each.unit == name and each.trainable]
            where = np.concatenate([np.arange(span.start, span.stop) for _, span in own])
            grads = [np.stack(parts)[:, where] for parts in zip(*(each.parts for each in local), strict=True)]
            self.layers.append(_Unit(Group(name, tuple(each.shape for each, _ in own)), grads))
            self.places.append(where)

    @property
    def n_params(self) -> int:
        """All that is trained."""
        return sum(map(len, self.places))

    def initial(self) -> Array:
        """Nothing is computed with them."""
        return np.zeros(self.n_params, FP32)

    def buffer(self, group: Group) -> Array:
        raise AssertionError(f"There are no buffers; asked for {group.name}.")

    def batch(self, rows: int) -> list[tuple[Array, Array]]:
        """One number for each micro-batch of each rank."""
        return [(np.zeros((rows, 1), FP32), np.zeros((rows, 1), FP32))] * self._ranks

    def check(self, batch: Sequence[tuple[Any, Any]], ranks: int) -> tuple[Array, Array]:
        x, y = (np.stack([pair[index] for pair in batch]) for index in range(2))
        return x, y

    def loss(self, y: Array, target: Array, work: Any) -> tuple[Array, Array]:
        dy: Array = work.hold(*y.shape[1:], dtype=y.dtype)
        dy[...] = 0
        work.free(target)
        return np.zeros(len(y)), dy
