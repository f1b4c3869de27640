"""Training on N ranks as a textbook has it: what every scheme must come to, written a second time.

Owns an account of a step that shares nothing with the first: ranks and chunks in plain loops,
states as whole vectors, no ring, ledger, shards or blocks, and constants of its own. It must
not import the rooms that it is held against; only the bands' names and the rows are common.

A fault that all schemes have in common makes them no less alike; against this one it shows.
The order of every sum is the ring's, so that the bits are equal and not only close.

``kept`` is what a message keeps of its value at each hop. With 1 nothing is lost, all ranks and
stages come to the same, and one account serves them all. With less, what a rank has depends on
which messages reached it and how often they were handed on, so that a rank which has read
another's memory instead of its message gives itself away.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np

from zerosim.bands import Array, Band, DType
from zerosim.stages import Stage

FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WIRE: dict[str, DType] = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
# By precision: what forward and backward read, and what gradients are kept in.
RECIPES: dict[str, tuple[DType, DType]] = {
    "mixed": (FP16, FP16), "bf16": (BF16, BF16), "fp32": (FP32, FP32),
    "mixed-main-grads": (FP16, FP16), "bf16-fp32-grads": (BF16, FP32),
}  # fmt: skip
LR, BETA1, BETA2, EPS = 1e-2, 0.9, 0.999, 1e-8  # Adam's

Pair = tuple[Array, Array]


class Reference:
    """A perceptron trained under one ``row`` on N ranks, each with rows of its own.

    ``states`` has, by band, an array [N, L] or [1, L] for each layer of P parameters, L being P
    padded to a multiple of N: a row per rank, or one row where the ranks shard it or are
    alike. It has every band that any precision keeps. The gradients are the averaged ones.
    """

    def __init__(
        self, row: Stage, widths: Sequence[int], seed: int, ranks: int, precision: str, wire: str, kept: float = 1
    ) -> None:
        self.row, self.ranks, self.kept = row, ranks, kept
        (self.working, self.averaged), self.wire = RECIPES[precision], WIRE[wire]
        self.steps = 0
        self.loss = float("nan")
        self._shapes = list(pairwise(widths))
        rng = np.random.default_rng(seed)
        whole = [self._padded(rng.standard_normal(shape) * np.sqrt(2 / shape[0])) for shape in self._shapes]
        self._alike = kept == 1
        main = [np.repeat(layer, self._rows(among_all=not row.optimizer), axis=0) for layer in whole]
        params = [np.repeat(layer, self._rows(among_all=not row.params), axis=0) for layer in whole]
        self.states: dict[Band, list[Array]] = {
            Band.PARAMS: [layer.astype(self.working) for layer in params],
            Band.GRADS: [np.zeros_like(layer, self.averaged) for layer in main],
            Band.MAIN_GRADS: [np.zeros_like(layer) for layer in main],
            Band.EXP_AVG: [np.zeros_like(layer) for layer in main],
            Band.EXP_AVG_SQ: [np.zeros_like(layer) for layer in main],
            Band.MASTER: main,
        }

    def _rows(self, *, among_all: bool) -> int:
        """How many, of a state that every rank has all of or that they shard."""
        return self.ranks if among_all and not self._alike else 1

    def _padded(self, weight: Array) -> Array:
        """A layer's parameters [1, L]: the weights row by row, zero biases, zero padding."""
        size = weight.size + weight.shape[1]
        layer = np.zeros((1, -(-size // self.ranks) * self.ranks), FP32)
        layer[0, : weight.size] = weight.reshape(-1)
        return layer

    def reach(self, step: int, batch: Sequence[Pair]) -> None:
        """Take the ``step``-th step, counted from 1, on one (x [B, I], y [B, O]) per rank, unless it is taken."""
        if self.steps >= step:
            return
        self.steps += 1
        with np.errstate(all="ignore"):
            outputs = self._forward(batch)
            errors = np.stack([output[-1] - y for output, (_, y) in zip(outputs, batch, strict=True)])
            self.loss = float(np.mean(np.square(errors).mean(axis=(1, 2), dtype=np.float64)))
            for layer, grads in enumerate(self._backward(outputs, errors)):
                self._update(layer, grads)

    # -- the model, rank by rank

    def _forward(self, batch: Sequence[Pair]) -> list[list[Array]]:
        """For each rank its input and every layer's output."""
        outputs = [[x] for x, _ in batch]
        for layer, params in enumerate(self.states[Band.PARAMS]):
            full = self._full(params)
            for rank, output in enumerate(outputs):
                weight, bias = self._split(layer, full[rank % len(full)])
                y = output[-1] @ weight + bias
                output.append(np.maximum(y, 0) if layer < len(self._shapes) - 1 else y)
        return outputs

    def _backward(self, outputs: list[list[Array]], errors: Array) -> list[Array]:
        """For each layer the gradients [N, L] of each rank's own mean squared error, in their dtype."""
        found: list[Array] = []
        slopes = list(errors * np.float32(2 / errors[0].size))  # of each rank's loss, by the layer's output
        for layer in reversed(range(len(self._shapes))):
            full = self._full(self.states[Band.PARAMS][layer])
            grads = np.zeros((self.ranks, full.shape[1]), self.averaged)
            for rank in range(self.ranks):
                weight, _ = self._split(layer, full[rank % len(full)])
                x, y = outputs[rank][layer : layer + 2]
                slope = slopes[rank] if layer == len(self._shapes) - 1 else slopes[rank] * (y > 0)
                flat = np.concatenate([(x.T @ slope).reshape(-1), slope.sum(axis=0)])
                grads[rank, : flat.size] = flat.astype(self.averaged)
                slopes[rank] = slope @ weight.T
            found.insert(0, grads)
        return found

    def _split(self, layer: int, flat: Array) -> tuple[Array, Array]:
        fan_in, fan_out = self._shapes[layer]
        return flat[: fan_in * fan_out].reshape(fan_in, fan_out), flat[fan_in * fan_out :][:fan_out]

    # -- what passes between ranks

    def _full(self, params: Array) -> Array:
        """A layer's parameters as each rank computes with them, fp32 [N or 1, L]."""
        return self._spread(params, among_all=self.row.params).astype(FP32)

    def _spread(self, state: Array, *, among_all: bool) -> Array:
        """A state that the ranks shard, gathered by all of them; or the state as it is."""
        return self._gather(state[0]) if among_all and not self._alike else state

    def _reduce(self, grads: Array) -> Array:
        """The average [1, L] of the gradients [N, L]: chunk c is summed from rank c-1 down to rank c."""
        chunk = np.arange(self.ranks)
        table = grads.astype(self.wire).reshape(self.ranks, self.ranks, -1)  # [rank, chunk, C]
        total = table[chunk - 1, chunk]
        for hop in range(1, self.ranks):
            total = total * self.wire.type(self.kept) + table[(chunk - 1 - hop) % self.ranks, chunk]
        return (total.astype(FP32) * np.float32(1 / self.ranks)).astype(self.averaged).reshape(1, -1)

    def _gather(self, whole: Array) -> Array:
        """What each rank gets [N, L] of what all have together [L]: chunk c reaches rank c-t with the t-th hop."""
        chunk = np.arange(self.ranks)
        own = whole.reshape(self.ranks, -1)
        table = np.empty_like(own, shape=(self.ranks, *own.shape))  # [rank, chunk, C]
        table[chunk, chunk], message = own, own.astype(self.wire)
        for hop in range(1, self.ranks):
            message = message * self.wire.type(self.kept)
            table[chunk - hop, chunk] = message.astype(own.dtype)
        return table.reshape(self.ranks, -1)

    # -- Adam

    def _update(self, layer: int, grads: Array) -> None:
        states = {band: arrays[layer] for band, arrays in self.states.items()}
        average = self._spread(self._reduce(grads), among_all=not self.row.optimizer)
        g = average.astype(FP32)
        m = states[Band.EXP_AVG] + (1 - BETA1) * (g - states[Band.EXP_AVG])
        v = BETA2 * states[Band.EXP_AVG_SQ] + (1 - BETA2) * g * g
        denominator = np.sqrt(v) / (1 - BETA2**self.steps) ** 0.5 + EPS
        main = states[Band.MASTER] + (-LR / (1 - BETA1**self.steps)) * m / denominator
        params = self._spread(main.astype(self.working), among_all=self.row.optimizer and not self.row.params)
        new = {
            Band.PARAMS: params, Band.GRADS: average, Band.MAIN_GRADS: g,
            Band.MASTER: main, Band.EXP_AVG: m, Band.EXP_AVG_SQ: v,
        }  # fmt: skip
        for band, array in new.items():
            self.states[band][layer] = array
