"""Owns the training step of one rank in JAX, with its collectives by axis name.

What the axis is, the rows of one array or as many devices, is up to whoever maps it, and so is how a layer is
cut into buckets, W and b in one or each in its own, since either suits one of the two better. A bucket is flat
[L], padded to a multiple of N. In mixed precision the working copy and the gradients are fp16; the master, the
moments, what is summed and all arithmetic are fp32.

Axis letters: R ranks, L a bucket's length, C one rank's chunk of it.
"""

from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cases import Job
from floor import BETA1, BETA2, EPS, LR, initial_theta

AXIS = "ranks"


def initial(job: Job, together: bool) -> list[dict[str, Any]]:
    """What all ranks hold, bucket by bucket, with the ranks as first axis: [R, L], or [R, C] where sharded."""
    theta, start, buckets = initial_theta(job.widths, seed=0), 0, []
    for shapes in _buckets(job, together):
        size = sum(map(prod, shapes))
        whole = np.pad(theta[start : start + size], (0, -size % job.ranks))
        start += size
        copies, chunks = np.tile(whole, (job.ranks, 1)), whole.reshape(job.ranks, -1)
        params, grads, states = (chunks if job.stage >= stage else copies for stage in (3, 2, 1))
        working = np.float16 if job.mixed else np.float32
        held = {
            "params": params.astype(working),
            "grads": np.zeros(grads.shape, working),
            "exp_avg": np.zeros(states.shape, np.float32),
            "exp_avg_sq": np.zeros(states.shape, np.float32),
        }
        # In fp32 a rank could find its chunk in the whole; a copy of it, by 1/N more, costs less to find.
        if job.mixed or job.stage in (1, 2):
            held["master"] = states.astype(np.float32)
        buckets.append(held)
    return buckets


def rank_step(job: Job, together: bool, state: list[dict[str, Any]], t: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """One rank's step on x [B, D_0] and y [B, D_L]: its state after the t-th update, and its loss before it."""
    buckets, per_layer = _buckets(job, together), 1 if together else 2
    layers = [slice(first, first + per_layer) for first in range(0, len(buckets), per_layer)]
    acts = [x]
    for layer in layers:
        weight, bias = _weights(job, state[layer], buckets[layer])
        h = acts[-1] @ weight + bias
        acts.append(h if layer is layers[-1] else jnp.maximum(h, 0))
    error = acts.pop() - y
    delta = error * (2 / error.size)
    after = list(state)
    for layer in reversed(layers):
        act, held = acts.pop(), state[layer]
        grads = iter([act.T @ delta, delta.sum(0)])
        for index in range(layer.start, layer.stop):
            parts = [next(grads).reshape(-1) for _ in buckets[index]]
            padding = jnp.zeros(-sum(part.size for part in parts) % job.ranks, jnp.float32)
            after[index] = _update(job, state[index], jnp.concatenate([*parts, padding]), t)
        if layer is not layers[0]:
            if job.stage == 3:
                # ZeRO-3 has released the layer and gathers it again. What does not depend on the backward, the
                # compiler would gather once and keep.
                nothing = (0 * delta[0, 0]).astype(held[0]["params"].dtype)
                held = [bucket | {"params": bucket["params"] + nothing} for bucket in held]
            weight, _ = _weights(job, held, buckets[layer])
            delta = jnp.where(act > 0, delta @ weight.T, 0)
    return after, jnp.mean(error**2)


def _buckets(job: Job, together: bool) -> list[list[tuple[int, ...]]]:
    """The shapes of what is in each bucket, layer by layer."""
    layers = [[(d_in, d_out), (d_out,)] for d_in, d_out in pairwise(job.widths)]
    return layers if together else [[shape] for shapes in layers for shape in shapes]


def _weights(job: Job, held: list[dict[str, Any]], buckets: list[list[tuple[int, ...]]]) -> list[Any]:
    """W and b of one layer in fp32, from the rank's working copy, or gathered."""
    tensors = []
    for bucket, shapes in zip(held, buckets, strict=True):
        flat, start = bucket["params"], 0
        if job.stage == 3:
            flat = lax.all_gather(flat, AXIS, tiled=True)
        for shape in shapes:
            tensors.append(flat[start : start + prod(shape)].astype(jnp.float32).reshape(shape))
            start += prod(shape)
    return tensors


def _update(job: Job, held: dict[str, Any], grads: Any, t: Any) -> dict[str, Any]:
    """Average a bucket's gradients over the ranks, and let Adam update what this rank owns."""
    working = held["params"].dtype
    grads = grads.astype(working)
    wide = grads.astype(jnp.float32)
    if job.stage == 0:
        mean = (lax.psum(wide, AXIS) / job.ranks).astype(working)
    else:
        mean = (lax.psum_scatter(wide, AXIS, tiled=True) / job.ranks).astype(working)
    g = mean.astype(jnp.float32)
    exp_avg = BETA1 * held["exp_avg"] + (1 - BETA1) * g
    exp_avg_sq = BETA2 * held["exp_avg_sq"] + (1 - BETA2) * g * g
    root = jnp.sqrt(exp_avg_sq) / jnp.sqrt(1 - BETA2**t)
    master = held.get("master", held["params"]) - LR / (1 - BETA1**t) * exp_avg / (root + EPS)
    params = master.astype(working)
    if job.stage in (1, 2):
        params = lax.all_gather(params, AXIS, tiled=True)
    # What the scheme holds until the next step is an output, so that it is really written.
    after = {"params": params, "grads": grads if job.stage == 1 else mean, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return after | ({"master": master} if "master" in held else {})


def trainer(step: Any, state: Any, x: Any, y: Any) -> Any:
    """Train by ``step``, already jitted, from ``state``; a step begins as soon as the one before is queued."""
    updates = 0

    def train(steps: int) -> list[Any]:
        nonlocal state, updates
        losses = []
        for _ in range(steps):
            updates += 1
            state, loss = step(state, np.float32(updates), x, y)
            losses.append(loss)
        jax.block_until_ready((state, losses))
        return losses

    return train
