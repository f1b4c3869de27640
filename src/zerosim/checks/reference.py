"""Training on N ranks as a textbook has it: what every scheme must come to, written a second time.

Owns an account of a step that shares nothing with the first: ranks and chunks in plain loops,
states as whole vectors, no ring, ledger, shards or blocks, and constants of its own. It must
not import the rooms that it is held against; only the bands' names and the rows are common.

A fault that all schemes have in common makes them no less alike; against this one it shows.
The order of every sum is the ring's, so that the bits are equal and not only close.

``kept`` is what a message keeps of its value at each hop. With 1 nothing is lost, all ranks and all
rows that sum in one order come to the same, and one account serves them. With less, what a rank has
depends on which messages reached it and how often they were handed on, so that a rank which has read
another's memory instead of its message gives itself away.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np

from zerosim.bands import Array, Band, DType
from zerosim.stages import Over, Stage

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
    """A perceptron trained under one ``row`` on N ranks, each with rows of its own, in groups of ``node``.

    ``states`` has, by band, an array for each layer of P parameters, L being P padded to a multiple of N:
    [N, L], a row for each rank that has all of it, [D, L] where the D groups shard it, [1, L] where all
    ranks do or where nothing is lost. It has every band that any precision keeps. The gradients are the
    averaged ones.
    """

    def __init__(
        self, row: Stage, widths: Sequence[int], seed: int, ranks: int, precision: str, wire: str, kept: float = 1,
        node: int | None = None,
    ) -> None:  # fmt: skip
        self.row, self.ranks, self.kept, self.members = row, ranks, kept, node or ranks
        self.groups = ranks // self.members
        (self.working, self.averaged), self.wire = RECIPES[precision], WIRE[wire]
        self.steps = 0
        self.loss = float("nan")
        self._shapes = list(pairwise(widths))
        rng = np.random.default_rng(seed)
        whole = [self._padded(rng.standard_normal(shape) * np.sqrt(2 / shape[0])) for shape in self._shapes]
        self._alike = kept == 1
        main = [np.repeat(layer, self._copies(row.optimizer), axis=0) for layer in whole]
        params = [np.repeat(layer, self._copies(row.params), axis=0) for layer in whole]
        self.states: dict[Band, list[Array]] = {
            Band.PARAMS: [layer.astype(self.working) for layer in params],
            Band.GRADS: [np.zeros_like(layer, self.averaged) for layer in main],
            Band.MAIN_GRADS: [np.zeros_like(layer) for layer in main],
            Band.EXP_AVG: [np.zeros_like(layer) for layer in main],
            Band.EXP_AVG_SQ: [np.zeros_like(layer) for layer in main],
            Band.MASTER: main,
        }

    @property
    def two_axes(self) -> bool:
        """Whether sums are made within the groups first, and then over them."""
        grouped = Over.GROUP in (self.row.optimizer, self.row.grads, self.row.params)
        return grouped and self.groups > 1 < self.members

    def _cut(self, over: Over) -> int:
        """Into how many pieces a state is cut."""
        return {Over.NOBODY: 1, Over.GROUP: self.members, Over.ALL: self.ranks}[over]

    def _copies(self, over: Over) -> int:
        """How many different copies of a state there are."""
        return 1 if self._alike else self.ranks // self._cut(over)

    def expected(self, band: Band, layer: int, pieces: Sequence[int], length: int) -> Array:
        """What each rank must have [N, length] of a state of which it has the piece of that number."""
        state = self.states[band][layer]
        share = self.ranks // len(state)  # how many ranks one copy serves
        return np.stack([state[rank // share][piece * length :][:length] for rank, piece in enumerate(pieces)])

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
            full = [self._forward_params(params) for params in self.states[Band.PARAMS]]
            outputs = self._forward(full, batch)
            errors = np.stack([output[-1] - y for output, (_, y) in zip(outputs, batch, strict=True)])
            self.loss = float(np.mean(np.square(errors).mean(axis=(1, 2), dtype=np.float64)))
            for layer, grads in enumerate(
                self._backward([self._backward_params(each) for each in full], outputs, errors)
            ):
                self._update(layer, grads)

    # -- the model, rank by rank

    def _forward(self, full: Sequence[Array], batch: Sequence[Pair]) -> list[list[Array]]:
        """For each rank its input and every layer's output."""
        outputs = [[x] for x, _ in batch]
        for layer, params in enumerate(full):
            for rank, output in enumerate(outputs):
                weight, bias = self._split(layer, params[rank % len(params)].astype(FP32))
                y = output[-1] @ weight + bias
                output.append(np.maximum(y, 0) if layer < len(self._shapes) - 1 else y)
        return outputs

    def _backward(self, full: Sequence[Array], outputs: list[list[Array]], errors: Array) -> list[Array]:
        """For each layer the gradients [N, L] of each rank's own mean squared error, in their dtype."""
        found: list[Array] = []
        slopes = list(errors * np.float32(2 / errors[0].size))  # of each rank's loss, by the layer's output
        for layer in reversed(range(len(self._shapes))):
            params = full[layer]
            grads = np.zeros((self.ranks, params.shape[1]), self.averaged)
            for rank in range(self.ranks):
                weight, _ = self._split(layer, params[rank % len(params)].astype(FP32))
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

    def _forward_params(self, params: Array) -> Array:
        """A layer's parameters as each rank computes with them in forward [N or 1, L]."""
        if self._alike or self._cut(self.row.params) == 1:
            return params
        return self._within_groups(params) if self.two_axes else self._among_all(params)

    def _backward_params(self, full: Array) -> Array:
        """The same in backward: as in forward, unless they come from the group's second copy."""
        if self._alike or self.row.reshard_after_forward != "group" or 1 in (self.groups, self.members):
            return full
        shards = full.reshape(self.groups, self.members, self.members, -1)  # [group, rank, shard, G]
        own = np.arange(self.members)
        return self._within_groups(shards[:, own, own].reshape(self.groups, -1))

    def _average(self, grads: Array) -> Array:
        """The average of the gradients [N, L], as the optimizer's copies of it [N, D or 1, L]."""
        if not self.two_axes:
            total = self._sums(grads[None], self.ranks)
            return self._spread(total.astype(self.averaged)[0], self._cut(self.row.optimizer) == 1)
        within = self._sums(grads.reshape(self.groups, self.members, -1), self.members).astype(self.wire)  # [D, L]
        shards = within.reshape(self.groups, self.members, -1).swapaxes(0, 1)  # [shard, group, G]
        total = self._sums(shards, self.groups).astype(self.wire).reshape(1, -1)  # [shard, group's chunk] in a row
        if self.row.optimizer is Over.GROUP and not self._alike:
            total = self._among_groups(total)
        return total.astype(self.averaged)

    def _updated(self, params: Array) -> Array:
        """Updated parameters, given by those who own them to those who hold more."""
        optimizer, whole = self._cut(self.row.optimizer), self._cut(self.row.params) == 1
        if self._alike or self._cut(self.row.params) == optimizer:
            return params
        if not self.two_axes:
            return self._spread(params[0], whole)
        if optimizer == self.ranks:
            params = self._among_groups(params)
        return self._within_groups(params) if whole else params

    def _spread(self, whole: Array, among_all: bool) -> Array:
        return self._among_all(whole[None]) if among_all and not self._alike else whole[None]

    def _sums(self, tables: Array, size: int) -> Array:
        """For each ring of ``size`` members [rings, member, L], the average [rings, L] in fp32, chunk by chunk.

        Chunk c is summed from member c-1 down to member c, rounded at every hop.
        """
        chunk = np.arange(size)
        table = tables.astype(self.wire).reshape(len(tables), size, size, -1)  # [ring, member, chunk, C]
        total = table[:, chunk - 1, chunk]
        for hop in range(1, size):
            total = total * self.wire.type(self.kept) + table[:, (chunk - 1 - hop) % size, chunk]
        return (total.astype(FP32) * np.float32(1 / size)).reshape(len(tables), -1)

    def _gather(self, owned: Array) -> Array:
        """What each member gets [rings, member, L] of what a ring's have together [rings, member's chunk, C].

        Chunk c reaches member c-t with the t-th hop.
        """
        rings, size, _ = owned.shape
        chunk = np.arange(size)
        table = np.empty_like(owned, shape=(rings, size, *owned.shape[1:]))  # [ring, member, chunk, C]
        table[:, chunk, chunk], message = owned, owned.astype(self.wire)
        for hop in range(1, size):
            message = message * self.wire.type(self.kept)
            table[:, chunk - hop, chunk] = message.astype(owned.dtype)
        return table.reshape(rings, size, -1)

    def _among_all(self, whole: Array) -> Array:
        """[1, L], a chunk for each rank, to [N, L]."""
        everyone: Array = self._gather(whole.reshape(1, self.ranks, -1))[0]
        return everyone

    def _within_groups(self, shards: Array) -> Array:
        """[D, L], a shard for each member of each group, to [N, L]."""
        return self._gather(shards.reshape(self.groups, self.members, -1)).reshape(self.ranks, -1)

    def _among_groups(self, whole: Array) -> Array:
        """[1, L], in each shard a chunk for each group, to [D, L]."""
        gathered = self._gather(whole.reshape(self.members, self.groups, -1))  # [shard, group, G]
        shards: Array = gathered.swapaxes(0, 1).reshape(self.groups, -1)
        return shards

    # -- Adam

    def _update(self, layer: int, grads: Array) -> None:
        states = {band: arrays[layer] for band, arrays in self.states.items()}
        average = self._average(grads)
        g = average.astype(FP32)
        m = states[Band.EXP_AVG] + (1 - BETA1) * (g - states[Band.EXP_AVG])
        v = BETA2 * states[Band.EXP_AVG_SQ] + (1 - BETA2) * g * g
        denominator = np.sqrt(v) / (1 - BETA2**self.steps) ** 0.5 + EPS
        main = states[Band.MASTER] + (-LR / (1 - BETA1**self.steps)) * m / denominator
        new = {
            Band.PARAMS: self._updated(main.astype(self.working)), Band.GRADS: average, Band.MAIN_GRADS: g,
            Band.MASTER: main, Band.EXP_AVG: m, Band.EXP_AVG_SQ: v,
        }  # fmt: skip
        for band, array in new.items():
            self.states[band][layer] = array
