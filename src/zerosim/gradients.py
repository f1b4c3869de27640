"""Gradients, from the backward that writes them to the optimizer that reads them.

Owns where backward writes, how what is written twice is added (tied parameters, micro-batches),
when it is reduced over the ranks, and what is given back then. Must not know layers' arithmetic,
nor where parameters come from.

Under accumulation gradients are reduced once, at the end, if every rank keeps them whole in
between, or each time. The two add in different orders, so they agree only to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Shaped

from zerosim.bands import FP32, Array, Band
from zerosim.buckets import Bucket
from zerosim.comm import Comm
from zerosim.layers import Flat, Group, Layer
from zerosim.options import Options
from zerosim.ranks import Ranks
from zerosim.stages import Stage


class Gradients:
    """The gradients of a model's trainable groups over the micro-batches of a step, under one row."""

    def __init__(
        self,
        row: Stage,
        buckets: Mapping[Group, Bucket],
        layers: Sequence[Layer],
        comm: Comm,
        ranks: Ranks,
        options: Options,
    ) -> None:
        self._row, self._buckets, self._comm, self._ranks = row, buckets, comm, ranks
        self._each = row.grads if options.sync is None else options.sync == "each"
        self._all_reduce = options.all_reduce
        self._scale = 1 / (comm.ring.size * options.accumulate)
        # Backward comes to the layers in reverse, so the first to use a group is the last to write its gradients.
        self._completes = {group: layer for layer in reversed(layers) for group in layer.groups}
        self._local: dict[Group, Array] = {}  # this rank's own, summed so far, not reduced yet [R, padded]
        self._again: dict[Group, Array] = {}  # written on top of what is in _local already
        self._reduced: set[Group] = set()  # whose average over some micro-batches is there already

    def begin(self) -> None:
        """A step begins: nothing has been written."""
        self._local, self._again, self._reduced = {}, {}, set()

    def room(self, layer: Layer) -> Flat:
        """Where the layer's backward writes: an array [R, padded] for each trainable group; padding is zero."""
        rooms = [self._room(self._buckets[group]) for group in layer.groups if self._buckets[group].trainable]
        return rooms[0] if len(rooms) == 1 else rooms

    def _room(self, bucket: Bucket) -> Array:
        group = bucket.group
        kept = bucket.states[Band.GRADS]
        if group not in self._local and not self._row.grads and group not in self._reduced:
            full = self._local[group] = kept
        else:
            full = self._ranks.hold(Band.UNREDUCED, (bucket.padded,), bucket.name)
            (self._again if group in self._local else self._local)[group] = full
        full[:, bucket.size :] = 0
        return full

    def written(self, layer: Layer, *, last: bool) -> None:
        """The layer's backward has written; ``last`` says that this was the last micro-batch."""
        for group in layer.groups:
            if (again := self._again.pop(group, None)) is not None:
                _add(self._local[group], again)
                self._ranks.free(again)
            if group in self._local and self._completes[group] is layer and (self._each or last):
                self._reduce(self._buckets[group], self._local.pop(group))

    def _reduce(self, bucket: Bucket, full: Shaped[Array, "R L"]) -> None:
        """Average over ranks and micro-batches: everywhere, or only where it will be needed."""
        kept, size = bucket.states[Band.GRADS], bucket.size
        target = kept if self._row.grads or not self._row.optimizer else self._comm.own(kept)
        if not self._row.optimizer or self._all_reduce:
            if self._comm.ring.size > 1:
                self._comm.all_reduce(full, size, scale=self._scale, band=Band.GRADS, unit=bucket.name)
            elif self._scale != 1:  # nothing travels; scaled as the ring would, in fp32, and rounded once
                register = np.empty_like(full, FP32)
                self._ranks.kernels.convert(full, register)
                np.multiply(register, np.float32(self._scale), out=register)
                self._ranks.kernels.convert(register, full)
            average = self._comm.own(full) if self._row.optimizer else full
            self._keep(bucket.group, target, average, there=full is kept)
        elif bucket.group in self._reduced:
            average = self._ranks.hold(Band.UNREDUCED, (bucket.chunk,), bucket.name)
            self._scatter(bucket, full, average)
            self._keep(bucket.group, target, average, there=False)
            self._ranks.free(average)
        else:
            self._scatter(bucket, full, target)
        self._reduced.add(bucket.group)
        if full is not kept:
            self._ranks.free(full)

    def _scatter(self, bucket: Bucket, full: Shaped[Array, "R L"], out: Shaped[Array, "R C"]) -> None:
        self._comm.reduce_scatter(full, out, bucket.size, scale=self._scale, band=Band.GRADS, unit=bucket.name)

    def _keep(self, group: Group, target: Shaped[Array, "R n"], average: Shaped[Array, "R n"], *, there: bool) -> None:
        """Put the average of some micro-batches where the optimizer will look, on top of those before it."""
        if group in self._reduced:
            _add(target, average)
        elif not there:
            self._ranks.kernels.convert(average, target)


def _add(target: Shaped[Array, "R n"], more: Shaped[Array, "R n"]) -> None:
    np.add(target, more, out=target, dtype=target.dtype)
