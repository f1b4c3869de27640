"""Gradients, from the backward that writes them to the optimizer that reads them.

Owns where backward writes, how what is written twice is added (tied parameters, micro-batches),
when and over which rings it is reduced, and what is freed then. Must not know layers' arithmetic,
nor where parameters come from.

Under accumulation gradients are reduced once, at the end, if every rank keeps them whole in
between, or each time. The two add in different orders, so they agree only to rounding. Over two
axes that is about the group's ring; the replicas' ring runs once, after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerosim.bands import FP32, Array, Band, Place
from zerosim.buckets import Bucket, Sharding
from zerosim.comm import Comm
from zerosim.layers import Flat, Group, Layer
from zerosim.stages import Over
from zerosim.util.shapes import Shaped


class Gradients:
    """The gradients of a model's trainable groups over the micro-batches of a step, under one row.

    ``comms`` are the collectives over all ranks, the group's and the replicas'.
    """

    def __init__(self, sharding: Sharding, comms: Sequence[Comm]) -> None:
        row, options = sharding.row, sharding.options
        self._row, self._buckets, self._ranks = row, sharding.buckets, sharding.ranks
        self._all, self._inner, self._outer = comms
        self._each = bool(row.grads) if options.sync is None else options.sync == "each"
        self._all_reduce = options.all_reduce
        first = self._inner if row.two_axes else self._all  # the ring that runs first has the scale of accumulation
        self._scale = 1 / (first.ring.size * options.accumulate)
        # Backward comes to the layers in reverse, so the first to use a group is the last to write its gradients.
        self._members = np.asarray(self._inner.ring.members)
        self._completes = {group: layer for layer in reversed(sharding.layers) for group in layer.groups}
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing has been written."""
        self._local: dict[Group, Array] = {}  # this rank's own, summed so far, not reduced yet [R, padded]
        self._again: dict[Group, Array] = {}  # written on top of what is in _local already
        self._partial: dict[Group, Array] = {}  # averaged over the group, not yet over the replicas [R, padded/S]
        self.reached: dict[Group, Array] = {}  # what layers have noted: which of its parameters have a gradient [R, k]
        self._reduced: set[Group] = set()  # whose average over some micro-batches is there already

    def found(self) -> Shaped[Array, "R k"]:
        """For each trainable parameter in order 1, or 0 where a rank has no gradient of it; held."""
        groups = [bucket.group for bucket in self._buckets.values() if bucket.trainable]
        parts = [part for group in groups for part in group.parts or (group,)]
        ends = np.cumsum([len(part.shapes) for part in parts]).tolist()
        found = self._ranks.hold(Band.SCALARS, (ends[-1],), "used")
        found[...] = 1
        for part, end in zip(parts, ends, strict=True):
            if part in self.reached:
                found[:, end - len(part.shapes) : end] = self.reached[part]
        return found

    def room(self, layer: Layer) -> Flat:
        """Where the layer's backward writes: an array [R, padded] for each trainable group; padding is zero."""
        rooms = [self._room(self._buckets[group]) for group in layer.groups if self._buckets[group].trainable]
        return rooms[0] if len(rooms) == 1 else rooms

    def _room(self, bucket: Bucket) -> Array:
        group = bucket.group
        usable = not self._row.grads and not self._row.offloads(Band.GRADS)
        if group not in self._local and usable and (self._row.two_axes or group not in self._reduced):
            full = self._local[group] = self._kept(bucket)
        else:
            full = self._ranks.hold(Band.UNREDUCED, (bucket.padded,), bucket.name)
            (self._again if group in self._local else self._local)[group] = full
        full[:, bucket.size :] = 0
        return full

    def _kept(self, bucket: Bucket) -> Array:
        """Where averages are kept: from the start, or from now on until they are dropped."""
        if (kept := bucket.states.get(Band.GRADS)) is None:
            pieces = self._row.piece(Band.GRADS, 0, self._all.ring.size, self._inner.ring.size)[1]
            kept = bucket.states[Band.GRADS] = self._ranks.hold(Band.GRADS, (bucket.padded // pieces,), bucket.name)
        return kept

    def drop(self, bucket: Bucket) -> None:
        """They have been used, and nobody needs them any more."""
        self._ranks.free(bucket.states.pop(Band.GRADS))

    def written(self, layer: Layer, *, last: bool) -> list[Bucket]:
        """The layer's backward has written; ``last``: this was the last micro-batch. What has been reduced now."""
        reduced = []
        for group in layer.groups:
            if (again := self._again.pop(group, None)) is not None:
                _add(self._local[group], again)
                self._ranks.free(again)
            if group in self._local and self._completes[group] is layer and (self._each or last):
                reduced.append(bucket := self._buckets[group])
                self._reduce(bucket, self._local.pop(group), last=last)
        return reduced

    def owned(self, bucket: Bucket) -> Shaped[Array, "... n"]:
        """Of the gradients that are kept, those that this rank's optimizer reads."""
        kept = self._kept(bucket)
        if self._row.grads is self._row.optimizer:
            return kept
        if not self._row.two_axes:
            return self._all.own(kept)
        return (self._outer if self._row.grads else self._inner).own(kept)

    def _reduce(self, bucket: Bucket, full: Shaped[Array, "R L"], *, last: bool) -> None:
        """Average over ranks and micro-batches: everywhere, or only where it will be needed."""
        kept = self._kept(bucket)
        label = {"band": Band.GRADS, "unit": bucket.name}
        if self._row.two_axes:
            self._reduce_group(bucket, full, label)
        elif not self._row.optimizer or self._all_reduce:
            if self._all.ring.size > 1:
                self._all.all_reduce(full, bucket.size, scale=self._scale, **label)
            elif self._scale != 1:  # nothing is sent; scaled as the ring would, in fp32, and rounded once
                register = np.empty_like(full, FP32)
                self._ranks.kernels.convert(full, register)
                np.multiply(register, np.float32(self._scale), out=register)
                self._ranks.kernels.convert(register, full)
            average = self._all.own(full) if self._row.optimizer else full
            self._keep(bucket, average, there=full is kept)
        elif bucket.group in self._reduced:
            average = self._ranks.hold(Band.UNREDUCED, (bucket.padded // self._all.ring.size,), bucket.name)
            self._all.reduce_scatter(full, average, bucket.size, scale=self._scale, **label)
            self._keep(bucket, average, there=False)
            self._ranks.free(average)
        else:
            self._all.reduce_scatter(full, self.owned(bucket), bucket.size, scale=self._scale, **label)
            self._came_down(bucket)
        self._reduced.add(bucket.group)
        if full is not kept:
            self._spent(full)
        if self._row.two_axes and last:
            self._reduce_replicas(bucket, self._partial.pop(bucket.group), label)

    def _spent(self, full: Array) -> None:
        """What has been reduced is needed no more."""
        self._ranks.free(full)

    def _reduce_group(self, bucket: Bucket, full: Shaped[Array, "R L"], label: Mapping[str, Any]) -> None:
        """Average over the group, on top of what earlier micro-batches came to."""
        partial = self._ranks.hold(Band.PARTIAL, (bucket.padded // self._inner.ring.size,), bucket.name)
        self._inner.reduce_scatter(full, partial, bucket.size, scale=self._scale, **label)
        if (before := self._partial.setdefault(bucket.group, partial)) is not partial:
            _add(before, partial)
            self._ranks.free(partial)

    def _reduce_replicas(self, bucket: Bucket, partial: Shaped[Array, "R G"], label: Mapping[str, Any]) -> None:
        """Average over the replicas, and round to the dtype in which gradients are kept."""
        outer, target = self._outer, self.owned(bucket)
        where = {"start": self._members * partial.shape[1], "scale": 1 / outer.ring.size}
        average = partial
        if self._row.optimizer is Over.ALL:  # rounded as it would be to be sent on, as where replicas have all of it
            average = outer.own(partial)
            outer.reduce_scatter(partial, average, bucket.size, **where, **label)
        else:
            outer.all_reduce(partial, bucket.size, **where, **label)
        self._ranks.kernels.convert(average.reshape(target.shape), target)
        self._came_down(bucket)
        self._ranks.free(partial)

    def _keep(self, bucket: Bucket, average: Shaped[Array, "... n"], *, there: bool) -> None:
        """Put the average of some micro-batches where the optimizer will look, on top of those before it."""
        target = self.owned(bucket)
        if bucket.group in self._reduced:
            _add(target, average.reshape(target.shape))
        elif not there:
            self._ranks.kernels.convert(average.reshape(target.shape), target)
        self._came_down(bucket)

    def _came_down(self, bucket: Bucket) -> None:
        """Where the host holds the gradients, what has just been written to them was copied to it."""
        if self._row.offloads(Band.GRADS):
            copied = self.owned(bucket).nbytes // len(self._ranks.ids)
            self._ranks.ledger.copy(Place.HOST, Band.GRADS, copied, bucket.name)


def _add(target: Shaped[Array, "R n"], more: Shaped[Array, "R n"]) -> None:
    np.add(target, more, out=target, dtype=target.dtype)
