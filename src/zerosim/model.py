"""The linear layer with an explicit forward and backward and a flat layout; the MLP and its loss.

Must not know ranks or sharding: the leading axis of every array is "copies of the model",
each with weights and data of its own. Parameters arrive as one flat row per copy, in the
working dtype; arithmetic is fp32, and the upcast is a register of the matmul, made anew
each time it is needed and kept nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from zerosim.bands import FP32, Array
from zerosim.layers import Chain, Group, Pass
from zerosim.ranks import Workspace
from zerosim.util.arguments import check_batch, integer
from zerosim.util.shapes import Float

_REGISTER_BYTES = 3 * 2**20  # fp32 temporaries of about this size at a time, so that they stay in the cache


class Linear:
    """y = x W + b, then ReLU if ``relu``. Flat layout: W [I, O] row by row, then b [O]."""

    def __init__(self, fan_in: int, fan_out: int, *, relu: bool, name: str) -> None:
        self.fan_in, self.fan_out, self.relu, self.name = fan_in, fan_out, relu, name
        self.size = fan_in * fan_out + fan_out
        self.groups: tuple[Group, ...] = (Group(name, ((fan_in, fan_out), (fan_out,))),)

    def init(self, rng: np.random.Generator) -> Float[Array, "P"]:
        """He's initialisation (arXiv 1502.01852) and zero biases."""
        weight = rng.standard_normal((self.fan_in, self.fan_out)) * np.sqrt(2 / self.fan_in)
        return np.concatenate([weight.reshape(-1), np.zeros(self.fan_out)]).astype(np.float32)

    def forward(self, x: Float[Array, "R B I"], given: Pass) -> tuple[Float[Array, "R B O"], Any]:
        params, work, y = given.params, given.work, given.work.hold(x.shape[1], self.fan_out)
        most = 0
        with _quietly():
            for some, rows, register in self._registers(work.rows, params):
                weight, bias = self._split(_as_fp32(params[some, : self.size], register, work))
                out = y[some, rows]
                most = max(most, _multiply(x[some, rows], weight, out))
                np.add(out, bias[:, None, :], out=out)
            if self.relu:
                np.maximum(y, 0, out=y)
        work.flops(most)
        return y, (x, y)

    def backward(self, saved: Any, dy: Float[Array, "R B O"], given: Pass) -> Float[Array, "R B I"] | None:
        (x, y), (params, work, grads, need_dx) = saved, given[:4]
        most = 0
        with _quietly():
            if self.relu:
                np.multiply(dy, y > 0, out=dy)
            work.free(y)
            dx = work.hold(x.shape[1], self.fan_in) if need_dx else None
            for some, rows, register in self._registers(work.rows, params, grads):
                target, dy_some = grads[some, : self.size], dy[some, rows]
                grad = target if target.dtype == FP32 else register
                weight, bias = self._split(grad)
                done = _multiply(x[some, rows].swapaxes(1, 2), dy_some, weight)
                np.add.reduce(dy_some, axis=1, out=bias)
                if grad is register:
                    work.kernels.convert(grad, target)
                if dx is not None:
                    weight, _ = self._split(_as_fp32(params[some, : self.size], register, work))
                    done += _multiply(dy_some, weight.swapaxes(1, 2), dx[some, rows])
                most = max(most, done)
        work.free(dy)
        work.flops(most)
        return dx

    def _split(self, flat: Array) -> tuple[Array, Array]:
        """Views of W [R, I, O] and b [R, O]."""
        cut = self.fan_in * self.fan_out
        return flat[:, :cut].reshape(-1, self.fan_in, self.fan_out, copy=False), flat[:, cut : self.size]

    def _registers(
        self, rows: Sequence[int] | None, params: Array, *more: Array
    ) -> Iterator[tuple[slice, slice, Array]]:
        """Go through the copies a few at a time, with an fp32 scratch [some, P] that stays in the cache.

        Where everything is fp32 already there is no need of one, nor to take it apart. Where ranks have
        different ``rows`` of the batch, each copy comes alone, with its own.
        """
        copies = len(params)
        plain = all(flat.dtype == FP32 for flat in (params, *more))
        some = copies if plain else min(copies, max(1, _REGISTER_BYTES // (4 * self.size)))
        scratch = params if plain else np.empty_like(params, FP32, shape=(some, self.size))
        if rows is not None:
            for copy, count in enumerate(rows):
                here = slice(copy, copy + 1)
                yield here, slice(count), params[here] if plain else scratch[:1]
            return
        for start in range(0, copies, some):
            stop = min(start + some, copies)
            yield slice(start, stop), slice(None), scratch[: stop - start]


def _quietly() -> np.errstate:
    """Without warnings of invalid numbers.

    Where ranks have different rows, what lies beyond a rank's own may be anything, and nobody reads it. Where a side
    is 1, OpenBLAS has been seen to raise the flag for finite numbers and a right result.
    """
    return np.errstate(invalid="ignore")


def _multiply(a: Array, b: Array, out: Array) -> int:
    """out = a b, and each copy's operations: a multiplication and an addition for each term of each element."""
    np.matmul(a, b, out=out)
    return 2 * prod(out.shape[1:]) * int(a.shape[-1])


def _as_fp32(values: Array, register: Array, work: Workspace) -> Array:
    if values.dtype == FP32:
        return values
    work.kernels.convert(values, register)
    return register


class MLP(Chain):
    """A multi-layer perceptron with ReLU between layers, trained to least squares.

    ``widths`` are the layer widths, input first: the default is 64-128-128-64, 33,088
    parameters. ``seed`` fixes the initial weights, drawn layer by layer.

    >>> MLP((7, 5, 3))
    MLP((7, 5, 3), seed=0: 58 parameters in 2 layers)
    """

    def __init__(self, widths: Sequence[int] = (64, 128, 128, 64), seed: int = 0) -> None:
        try:
            self.widths = tuple(integer("MLP", "widths", width) for width in widths)
        except (TypeError, ValueError):
            self.widths = ()
        if len(self.widths) < 2:
            raise ValueError(f"MLP(widths): needs two or more positive integers, input width first; got {widths!r}.")
        self.seed = integer("MLP", "seed", seed, 0)
        last = len(self.widths) - 2
        self.linears = [
            Linear(fan_in, fan_out, relu=index < last, name=f"layer {index + 1}")
            for index, (fan_in, fan_out) in enumerate(pairwise(self.widths))
        ]
        super().__init__(self.linears, name="model")

    def __repr__(self) -> str:
        return f"MLP({self.widths}, seed={self.seed}: {self.n_params:,} parameters in {len(self.linears)} layers)"

    @property
    def n_params(self) -> int:
        """The logical number of parameters, padding left out."""
        return self.size

    def initial(self) -> Float[Array, "P"]:
        """The initial parameters [P], fp32: the same at every call."""
        rng = np.random.default_rng(self.seed)
        return np.concatenate([layer.init(rng) for layer in self.linears])

    def buffer(self, group: Group) -> Array:
        raise AssertionError(f"A perceptron has no buffers; asked for {group.name}.")

    def check(
        self, batch: Sequence[tuple[Array, Array]], ranks: int
    ) -> tuple[Float[Array, "R B I"], Float[Array, "R B O"]]:
        """One (x [B, I], y [B, O]) of finite float32 per rank, B the same everywhere."""
        return check_batch(batch, ranks, self.widths[0], self.widths[-1])

    def loss(
        self, y: Float[Array, "R B O"], target: Float[Array, "R B O"], work: Workspace
    ) -> tuple[Float[Array, "R"], Float[Array, "R B O"]]:
        """Mean squared error of each copy over its own rows and columns [R], and its gradient [R, B, O].

        Frees ``target``, which is not needed any more.
        """
        dy = work.hold(*y.shape[1:])
        if work.rows is None:
            np.subtract(y, target, out=dy)
            work.free(target)
            losses = np.add.reduce(np.square(dy), axis=(1, 2), dtype=np.float64) / prod(dy.shape[1:])
            np.multiply(dy, np.float32(2 / (dy.shape[1] * dy.shape[2])), out=dy)
            return losses, dy
        losses = np.zeros(len(dy))
        for rank, count in enumerate(work.rows):
            mine, dy[rank, count:] = dy[rank, :count], 0
            np.subtract(y[rank, :count], target[rank, :count], out=mine)
            if count:
                losses[rank] = np.square(mine).mean(dtype=np.float64)
                np.multiply(mine, np.float32(2 / mine.size), out=mine)
        work.free(target)
        return losses, dy
