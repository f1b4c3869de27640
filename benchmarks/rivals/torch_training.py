"""Owns the training step of one rank in torch, with the collectives of torch.distributed.

What a rank's tensors are, its own or one LocalTensor of all ranks, is up to whoever makes them. A layer is one
flat bucket [L], W row by row and then b, padded to a multiple of N. In mixed precision the working copy and the
gradients are fp16; the master, the moments, what is summed and all arithmetic are fp32. Forward and backward are
written out, which spares torch the autograd, and ZeRO-3 the second gather of the first layer, which nothing reads.

Axis letters: L a bucket's length, C one rank's chunk of it.
"""

from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cases import Job
from floor import BETA1, BETA2, EPS, LR, initial_theta

Make = Callable[[Callable[[int], Any]], Any]
"""A tensor from what rank r is to have of it."""


class Rank:
    """A rank's share of a job, and its step. ``make`` makes its tensors."""

    def __init__(self, job: Job, make: Make) -> None:
        self.job, self.updates = job, 0
        self.shapes = list(pairwise(job.widths))
        theta, start, wholes = initial_theta(job.widths, seed=0), 0, []
        for d_in, d_out in self.shapes:
            stop = start + d_in * d_out + d_out
            wholes.append(np.pad(theta[start:stop], (0, -(stop - start) % job.ranks)))
            start = stop

        def held(sharded: bool, dtype: Any) -> Any:
            """All buckets end to end, or a rank's chunk of each, so that Adam is a few operations on one tensor."""
            if not sharded:
                return make(lambda rank: torch.from_numpy(np.concatenate(wholes)).to(dtype))
            chunks = [bucket.reshape(job.ranks, -1) for bucket in wholes]
            return make(lambda rank: torch.from_numpy(np.concatenate([rows[rank] for rows in chunks])).to(dtype))

        working, stage = torch.float16 if job.mixed else torch.float32, job.stage
        self.params = held(stage == 3, working)
        self.master = held(stage > 0, torch.float32) if job.mixed or stage in (1, 2) else self.params
        self.exp_avg, self.exp_avg_sq, self.scratch = (torch.zeros_like(self.master) for _ in range(3))
        self.lengths = [bucket.size for bucket in wholes]
        own = [length // job.ranks for length in self.lengths]
        self.grads = torch.zeros_like(self.master, dtype=working)
        # ZeRO-1 keeps its own full gradients as well, until the step ends.
        unreduced = torch.zeros_like(self.params).split(self.lengths) if stage == 1 else ()
        self.buckets = self.params.split(own if stage == 3 else self.lengths)
        self.means, self.unreduced = self.grads.split(own if stage else self.lengths), unreduced
        x, y = job.batch()
        self.x, self.y = make(lambda rank: torch.from_numpy(x[rank])), make(lambda rank: torch.from_numpy(y[rank]))

    def step(self) -> Any:
        """One update; the loss before it, a tensor."""
        acts, last, stage = [self.x], len(self.shapes) - 1, self.job.stage
        for layer in range(last + 1):
            weight, bias = self._weights(layer)
            acts.append(torch.addmm(bias, acts[-1], weight))
            if layer < last:
                acts[-1].relu_()
        delta = acts[-1].sub_(self.y)
        loss = delta.square().mean()
        delta.mul_(2 / (self.job.rows * self.job.widths[-1]))
        for layer in reversed(range(last + 1)):
            if layer < last:
                delta = torch.ops.aten.threshold_backward(delta, acts[layer + 1], 0)
            grads = self._gradients(layer, acts[layer], delta)
            if stage != 1:
                self._reduce(layer, grads)
            if layer:
                delta = delta @ self._weights(layer)[0].T
        for layer, grads in enumerate(self.unreduced):
            self._reduce(layer, grads)
        self._update()
        return loss

    def _weights(self, layer: int) -> tuple[Any, Any]:
        """W and b of one layer in fp32, from the rank's working copy, or gathered."""
        held, (rows, cols) = self.buckets[layer], self.shapes[layer]
        if self.job.stage == 3:
            own, held = held, self._room(layer, held)
            dist.all_gather_into_tensor(held, own)
        flat = held.float()
        return flat[: rows * cols].view(rows, cols), flat[rows * cols : rows * cols + cols]

    def _room(self, layer: int, like: Any) -> Any:
        """A tensor [L] for a whole bucket, contents undefined."""
        return like.new_empty(self.lengths[layer])

    def _gradients(self, layer: int, act: Any, delta: Any) -> Any:
        """This rank's gradients of a layer [L], where the scheme keeps them."""
        rows, cols = self.shapes[layer]
        if self.unreduced:
            grads = self.unreduced[layer]
        else:
            grads = self.means[layer] if self.job.stage == 0 else self._room(layer, self.means[layer])
            grads[rows * cols + cols :].zero_()
        weight, bias = grads[: rows * cols].view(rows, cols), grads[rows * cols : rows * cols + cols]
        if self.job.mixed:
            weight.copy_(act.T @ delta)
            bias.copy_(delta.sum(0))
        else:
            torch.mm(act.T, delta, out=weight)
            torch.sum(delta, 0, out=bias)
        return grads

    def _reduce(self, layer: int, grads: Any) -> None:
        """Average a bucket's gradients over the ranks: everywhere, or where they are needed."""
        wide, mean = grads.float(), self.means[layer]  # of fp32, float() is the tensor itself
        if self.job.stage == 0:
            total = wide
            dist.all_reduce(total)
        else:
            total = wide.new_empty(mean.shape[0]) if self.job.mixed else mean
            dist.reduce_scatter_tensor(total, wide)
        total.mul_(1 / self.job.ranks)
        if self.job.mixed:
            mean.copy_(total)

    def _update(self) -> None:
        """Adam on what this rank owns, and a gather of what all have to have."""
        self.updates += 1
        g = self.grads.float()
        self.exp_avg.lerp_(g, 1 - BETA1)
        self.exp_avg_sq.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        torch.sqrt(self.exp_avg_sq, out=self.scratch)
        self.scratch.div_(sqrt(1 - BETA2**self.updates)).add_(EPS)
        self.master.addcdiv_(self.exp_avg, self.scratch, value=-LR / (1 - BETA1**self.updates))
        if self.job.stage in (1, 2):
            fresh = self.master.to(self.params.dtype).split([mean.shape[0] for mean in self.means])
            for whole, own in zip(self.buckets, fresh, strict=True):
                dist.all_gather_into_tensor(whole, own)
        elif self.master is not self.params:
            self.params.copy_(self.master)
