"""The optimizer's pass over what each rank owns, on the card or on the host.

Owns which elements of a bucket are updated with which rate, and where they lie meanwhile. Must not
know layers, nor how the parameters get to the ranks that need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from zerosim.bands import FP32, MODEL_STATES, Array, Band, Place
from zerosim.buckets import Bucket, Sharding
from zerosim.counts import Phase
from zerosim.gradients import Gradients
from zerosim.parameters import Parameters
from zerosim.util.shapes import Shaped

OWNED = tuple(band for band in MODEL_STATES if band not in (Band.PARAMS, Band.GRADS))  # what the optimizer has alone


class Update:
    """Updates what is trained, each rank the pieces that are its own."""

    def __init__(self, sharding: Sharding, parameters: Parameters, gradients: Gradients) -> None:
        self._row, self._n, self._options = sharding.row, sharding.world_size, sharding.options
        self._buckets, self._parameters, self._gradients = sharding.trainable, parameters, gradients
        self._ranks, self._ledger = sharding.ranks, sharding.ranks.ledger

    def apply(
        self, factor: Shaped[Array, "R 1"] | None, *, rate: float, buckets: Sequence[Bucket] | None = None,
        used: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        """Update what each rank owns, of all ``buckets`` unless told which, with gradients read times ``factor`` and
        learning rates times ``rate``; of their parameters all unless ``used`` says which, in order, have a gradient."""
        have = iter([] if used is None else used)
        for bucket in self._buckets if buckets is None else buckets:
            here = [next(have, True) for _ in bucket.updates]
            bucket.updates = [count + has for count, has in zip(bucket.updates, here, strict=True)]
            params, grads = self._parameters.owned(bucket), self._gradients.owned(bucket)
            shape = max(params.shape, grads.shape, key=len)  # pieces of what is whole lie as their ring does
            params, grads = params.reshape(shape), grads.reshape(shape)
            if "optimizer" not in self._row.offload:
                self._update(bucket, params, grads, factor, rate, here)
                continue
            with self._on_host(bucket, params, grads) as (params, grads):
                self._update(bucket, params, grads, factor, rate, here)

    def _update(
        self, bucket: Bucket, params: Array, grads: Array, factor: Array | None, rate: float, here: Sequence[bool]
    ) -> None:
        """Update one bucket; what is read and written lies where the optimizer is, in pieces as ``params`` are."""
        shape = params.shape
        states: dict[Band, Array] = {
            band: state.reshape(shape) for band, state in bucket.states.items() if band in OWNED
        }
        if (main := states.get(Band.MAIN_GRADS)) is not None:
            self._ranks.kernels.convert(grads, main)
            grads = main
        if factor is not None:  # a register: what is kept is not rewritten
            scaled = np.empty_like(grads, FP32, shape=shape)
            self._ranks.kernels.convert(grads, scaled)
            grads = np.multiply(scaled, factor.reshape(*shape[:-1], 1), out=scaled)
            self._ledger.flops(grads.size // len(self._ranks.ids))
        master = states.get(Band.MASTER, params)
        moments = {str(band): states[band] for band in self._options.optimizer.states}
        done: list[list[int]] = []  # operations, by rank where each is updated by itself
        for part, (lr, decay, step), first in self._parts(bucket, shape, here):
            if first:
                done.append([])
            if not step:  # it has no gradient, and is left alone
                continue
            self._options.optimizer.update(
                master[part], grads[part], **{name: state[part] for name, state in moments.items()},
                step=step, flops=done[-1].append, lr=lr * rate, weight_decay=decay, kernels=self._ranks.kernels,
            )  # fmt: skip
        self._ledger.flops(max(map(sum, done)))
        if master is not params:
            self._ranks.kernels.convert(master, params)
        self._ledger.computed(bucket.name)

    def at_once(self, buckets: Sequence[Bucket], *, rate: float) -> None:
        """Update what has just been reduced, and give up its gradients."""
        with self._ledger.during(Phase.OPTIMIZER):
            self.apply(None, rate=rate, buckets=buckets)
            for bucket in buckets:
                self._parameters.update(bucket)
                self._gradients.drop(bucket)

    def _parts(
        self, bucket: Bucket, shape: tuple[int, ...], used: Sequence[bool]
    ) -> Iterator[tuple[Any, tuple[float, float, int], bool]]:
        """What ranks own of a bucket, cut where rate, weight decay or the parameter's step (0: none) change: with
        these, and if it is a rank's first."""
        given = self._options.optimizer.rates(bucket.name, bucket.group.shapes)
        steps = [count * has for count, has in zip(bucket.updates, used, strict=True)]
        rates = [(lr, decay, step) for (lr, decay), step in zip(given, steps, strict=True)]
        if len(set(rates)) == 1:
            yield ..., rates[0], True
            return
        ends = np.cumsum([prod(each) for each in bucket.group.shapes]).tolist()
        ends[-1] = bucket.padded
        n, node, length = self._n, self._options.node, shape[-1]
        for row, rank in enumerate(self._ranks.ids):
            start = self._row.piece(Band.MASTER, rank, n, node)[0] * length
            at = np.unravel_index(row, shape[:-1])
            for first, last, rate in zip([0, *ends[:-1]], ends, rates, strict=True):
                low, high = max(first - start, 0), min(last - start, length)
                if low < high:
                    yield (*at[:-1], slice(at[-1], at[-1] + 1), slice(low, high)), rate, low == 0

    @contextmanager
    def _on_host(self, bucket: Bucket, params: Array, grads: Array) -> Iterator[tuple[Array, Array]]:
        """The owned parameters and gradients [..., n] on the host, where they are copied to, and back."""
        rows, copies = len(self._ranks.ids), []

        def down(band: Band, array: Array) -> Array:
            copies.append(here := self._ranks.hold(band, (array.size // rows,), bucket.name, place=Place.HOST))
            self._ranks.kernels.convert(array, here.reshape(array.shape))
            self._ledger.copy(Place.HOST, band, here.nbytes // rows, bucket.name)
            return here.reshape(array.shape)

        if not self._row.offloads(Band.GRADS):
            grads = down(Band.GRADS, grads)
        there = self._row.offloads(Band.PARAMS)
        updated = params if there or Band.MASTER in bucket.states else down(Band.PARAMS, params)
        yield updated, grads
        if not there:
            if updated is not params:
                self._ranks.kernels.convert(updated, params)
            self._ledger.copy(Place.CARD, Band.PARAMS, params.nbytes // rows, bucket.name)
        for array in copies:
            self._ranks.free(array)
