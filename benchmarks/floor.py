"""Owns the speed floor: one training step of each scheme in bare NumPy, as fast as one core allows.

A floor does what the scheme's arithmetic demands and nothing else: each rank's own matmuls (stacked), one
plain sum of the gradients over the ranks, Adam on every element that the scheme updates, and one write of
every rank's working copy where the scheme keeps one. No ring, no ledger, no padding, and no casts: it is
fp32 throughout, since fp16 copies would halve one write and add an upcast before every matmul. It must not
know the package.

What a floor may not do is learn the same with less than the ranks' work: one matmul over everybody's rows
would give the same weights, but no rank would have computed a gradient of its own.

Axis letters: R ranks, B batch rows of one rank, D width, P parameters.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]

LR, BETA1, BETA2, EPS = 1e-2, 0.9, 0.999, 1e-8

# Found by experiment, at 32 to 1024 ranks of 33 thousand parameters and 32 of 6.3 million.
ADAM_BLOCK = 1 << 15  # elements: a block's five arrays take 640 KiB of a core's second-level cache
CACHE = 5 << 20  # bytes of gradients written in one go: still in the last-level cache when they are summed
TOGETHER = 64  # ranks that go through the layers together: backward finds their weights in cache


@dataclass(frozen=True)
class Demand:
    """What a scheme forces on its floor."""

    updates_every_copy: bool
    """Adam runs on all R copies, not once per element."""
    keeps_copies: bool
    """Every rank holds full working parameters between steps."""
    keeps_grads: bool
    """Every rank holds its full gradients until the step ends."""


DEMANDS = {
    "data parallel": Demand(updates_every_copy=True, keeps_copies=True, keeps_grads=True),
    "ZeRO-1": Demand(updates_every_copy=False, keeps_copies=True, keeps_grads=True),
    "ZeRO-2": Demand(updates_every_copy=False, keeps_copies=True, keeps_grads=False),
    # Its one write of every rank's copy is of a layer at a time, before the forward and before the backward.
    "ZeRO-3": Demand(updates_every_copy=False, keeps_copies=False, keeps_grads=False),
}


class Adam:
    """Adam in place: 13 passes over blocks that stay in cache."""

    def __init__(self, size: int) -> None:
        self.exp_avg = np.zeros(size, np.float32)
        self.exp_avg_sq = np.zeros(size, np.float32)
        self.scratch = np.empty(ADAM_BLOCK, np.float32)

    def step(self, theta: F32, grads: F32, t: int) -> None:
        """Update theta, one or R copies of [P] end to end, by grads [P] that they share; t counts from 1."""
        # Zero-dimensional arrays and positional outputs: the cheapest spelling of a NumPy call.
        scalars = (BETA1, 1 - BETA1, BETA2, 1 - BETA2, 1 / sqrt(1 - BETA2**t), EPS, LR / (1 - BETA1**t))
        beta1, rest1, beta2, rest2, unbias, eps, rate = (np.array(value, np.float32) for value in scalars)
        for copy in range(0, theta.size, grads.size):
            for start in range(0, grads.size, ADAM_BLOCK):
                g = grads[start : start + ADAM_BLOCK]
                block = slice(copy + start, copy + start + g.size)
                w, m, v, s = theta[block], self.exp_avg[block], self.exp_avg_sq[block], self.scratch[: g.size]
                np.multiply(m, beta1, m)
                np.multiply(g, rest1, s)
                np.add(m, s, m)
                np.multiply(v, beta2, v)
                np.multiply(g, g, s)
                np.multiply(s, rest2, s)
                np.add(v, s, v)
                np.sqrt(v, s)
                np.multiply(s, unbias, s)
                np.add(s, eps, s)
                np.divide(m, s, s)
                np.multiply(s, rate, s)
                np.subtract(w, s, w)


class Floor:
    """The least work of one scheme's training step on an MLP with ReLU between its layers.

    A layer is one [D_in + 1, D_out] matrix whose last row is the bias, and activations carry a column of
    ones: no bias is added, and no bias gradient summed, in a pass of its own.
    """

    def __init__(self, scheme: str, widths: tuple[int, ...], ranks: int, batch: int, seed: int = 0) -> None:
        if scheme not in DEMANDS:
            raise ValueError(f"Floor(scheme): must be one of {', '.join(DEMANDS)}; got {scheme!r}.")
        self.demand, self.ranks, self.updates = DEMANDS[scheme], ranks, 0
        self.shapes = [(d_in + 1, d_out) for d_in, d_out in pairwise(widths)]
        sizes = [rows * cols for rows, cols in self.shapes]
        self.spans = list(pairwise([0, *np.cumsum(sizes).tolist()]))

        master = initial_theta(widths, seed)
        # [R, P] working copies, or the [1, P] that every rank's layer is copied from before it is used.
        self.copies = np.repeat(master[None], ranks, axis=0) if self.demand.keeps_copies else master[None]
        self.theta = self.copies.reshape(-1) if self.demand.updates_every_copy else master
        self.adam = Adam(self.theta.size)

        # Ranks whose gradients of a layer are written in one go; at least one, however large the layer.
        self.groups = [min(ranks, TOGETHER, max(1, CACHE // (4 * size))) for size in sizes]
        room = max(group * size for group, size in zip(self.groups, sizes, strict=True))
        self.grads = np.empty((ranks, master.size) if self.demand.keeps_grads else room, np.float32)
        self.sum = np.empty(master.size, np.float32)
        self.part = np.empty(max(sizes), np.float32)
        together = min(ranks, TOGETHER)
        self.ones = np.ones(together, np.float32)
        self.gathered = np.empty(0 if self.demand.keeps_copies else together * max(sizes), np.float32)
        self.acts = [np.ones((together, batch, width + 1), np.float32) for width in widths]
        self.deltas = [np.empty((together, batch, width), np.float32) for width in widths]
        self.alive = [np.empty((together, batch, width), np.bool_) for width in widths]

    def step(self, x: F32, y: F32) -> float:
        """Train on x [R, B, D_0] and y [R, B, D_L]; return the ranks' mean loss before the update."""
        error = 0.0
        for lo in range(0, self.ranks, TOGETHER):
            error += self._forward_backward(x, y, lo, min(lo + TOGETHER, self.ranks))
        self.updates += 1
        self.adam.step(self.theta, self.sum, self.updates)
        if self.demand.keeps_copies and not self.demand.updates_every_copy:
            np.copyto(self.copies, self.theta)
        return error / y.size

    def _forward_backward(self, x: F32, y: F32, lo: int, hi: int) -> float:
        """Take ranks lo to hi through the layers and back; return the sum of their squared errors."""
        n, last = hi - lo, len(self.shapes) - 1
        acts = [act[:n] for act in self.acts]
        acts[0][..., :-1] = x[lo:hi]
        for layer in range(last):
            np.matmul(acts[layer], self._weights(layer, lo, hi), acts[layer + 1][..., :-1])
            # With its column of ones, which ReLU leaves alone, the array is contiguous.
            np.maximum(acts[layer + 1], 0, out=acts[layer + 1])
        delta = self.deltas[last + 1][:n]
        np.matmul(acts[last], self._weights(last, lo, hi), delta)
        np.subtract(delta, y[lo:hi], delta)
        error = float(np.vdot(delta, delta))
        # The mean over the ranks is taken here, on activations: gradients are larger.
        np.multiply(delta, np.float32(2 / y.size), delta)
        for layer in range(last, 0, -1):
            self._add_grads(layer, lo, acts[layer], delta)
            below, alive = self.deltas[layer][:n], self.alive[layer][:n]
            np.matmul(delta, self._weights(layer, lo, hi)[:, :-1].transpose(0, 2, 1), below)
            np.greater(acts[layer][..., :-1], 0, alive)
            np.multiply(below, alive, below)
            delta = below
        self._add_grads(0, lo, acts[0], delta)
        return error

    def _weights(self, layer: int, lo: int, hi: int) -> F32:
        """Ranks lo to hi's own copies of one layer [R, D_in + 1, D_out]; ZeRO-3's are written now."""
        start, stop = self.spans[layer]
        if self.demand.keeps_copies:
            copies = self.copies[lo:hi, start:stop]
        else:
            copies = self.gathered[: (hi - lo) * (stop - start)].reshape(hi - lo, -1)
            np.copyto(copies, self.copies[:, start:stop])
        return copies.reshape(-1, *self.shapes[layer])

    def _add_grads(self, layer: int, lo: int, act: F32, delta: F32) -> None:
        """Compute every rank's gradients of one layer, from rank lo on, and add them to the sum."""
        (start, stop), (rows, cols) = self.spans[layer], self.shapes[layer]
        group, act_t = self.groups[layer], act.transpose(0, 2, 1)
        # One strip, unless a single rank's layer overflows the cache; the ranks are then the inner loop.
        strip = max(1, CACHE // (4 * cols))
        for top in range(0, rows, strip):
            bottom = min(top + strip, rows)
            total = self.sum[start + top * cols : start + bottom * cols]
            for first in range(0, len(act), group):
                some = slice(first, min(first + group, len(act)))
                n = some.stop - first
                if self.demand.keeps_grads:
                    flat = self.grads[lo + first : lo + some.stop, start:stop]
                else:
                    flat = self.grads[: n * rows * cols].reshape(n, -1)
                np.matmul(act_t[some, top:bottom], delta[some], flat.reshape(n, rows, cols)[:, top:bottom])
                self._accumulate(flat[:, top * cols : bottom * cols], total, fresh=lo + first == 0)

    def _accumulate(self, grads: F32, total: F32, *, fresh: bool) -> None:
        """Sum grads [R, n] over the ranks into total [n], which is overwritten if fresh."""
        # A row of ones times a matrix: the BLAS needs half the time of np.add.reduce.
        if fresh:
            np.matmul(self.ones[: len(grads)], grads, total)
        elif len(grads) == 1:
            np.add(total, grads[0], total)
        else:
            np.matmul(self.ones[: len(grads)], grads, self.part[: total.size])
            np.add(total, self.part[: total.size], total)


def initial_theta(widths: tuple[int, ...], seed: int) -> F32:
    """The flat parameters [P] before training: per layer He's weights, then zero biases."""
    rng = np.random.default_rng(seed)
    parts = []
    for d_in, d_out in pairwise(widths):
        parts += [(rng.standard_normal((d_in, d_out)) * np.sqrt(2 / d_in)).ravel(), np.zeros(d_out)]
    return np.concatenate(parts).astype(np.float32)
