"""A layer's full parameters while it computes, and where they come from if they are sharded.

Owns what is gathered, over which ring, how far ahead, and how long it stays. Must not know what a
layer computes, nor gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerosim.bands import INT8, Array, Band, Place
from zerosim.buckets import Bucket, Sharding
from zerosim.comm import Comm
from zerosim.layers import Flat, Group, Layer, Role
from zerosim.ranks import Workspace
from zerosim.stages import Over
from zerosim.util.casts import convert


class Parameters:
    """The parameters of a model's groups under one row: there already or, if they are sharded, gathered for use.

    ``comms`` are the collectives over all ranks, the group's and the replicas'.
    """

    def __init__(self, sharding: Sharding, comms: Sequence[Comm]) -> None:
        self._row, self._buckets, self._ranks = sharding.row, sharding.buckets, sharding.ranks
        self._all, self._inner, self._outer = comms
        self._ahead, self._at_once = sharding.options.prefetch, sharding.options.gather == "model"
        self._master = sharding.options.recipe.master
        self._first = {group: layer for layer in reversed(sharding.layers) for group in layer.groups}  # to use a group
        self.forget()

    def forget(self) -> None:
        """Nothing is gathered; after an error others have freed what was."""
        self._full: dict[Group, Array] = {}
        self._second: dict[Group, Array] = {}  # shards of a second copy, from forward to backward [R, padded/S]
        self._staging: dict[Group, Array] = {}  # shards that the replicas put together after the update

    def begin_pass(self, layers: Sequence[Layer], *, backward: bool) -> None:
        """A pass over ``layers`` begins: where everything is gathered at once, it is gathered now."""
        self._backward = backward
        if self._at_once and self._row.params:
            self._fetch(layers)

    def end_pass(self) -> None:
        """The pass has ended: what no other needs is released."""
        if self._backward or self._row.reshard_after_forward:
            self._release(list(self._full), list(self._second) if self._backward else ())

    def fetch(self, layers: Sequence[Layer], index: int) -> Flat:
        """The full parameters of ``layers[index]``, there until its ``release``; ``layers`` are in order of use."""
        layer = layers[index]
        if self._row.params:
            self._fetch(layers[index : index + 1 + self._ahead])
        return self._flats(layer)

    def release(self, layers: Sequence[Layer], index: int) -> None:
        """``layers[index]`` has computed: what none of those that come soon needs is released."""
        if self._at_once or not self._row.params:
            return
        layer = layers[index]
        soon = {group for each in layers[index + 1 : index + 1 + self._ahead] for group in each.groups}
        done = [group for group in layer.groups if self._backward and self._first[group] is layer]
        if self._row.reshard_after_forward:
            self._release([group for group in layer.groups if group not in soon], done)
        else:
            self._release(done, ())

    def update(self, bucket: Bucket) -> None:
        """After the optimizer's update: give what it owns to those who hold more of the parameters than that."""
        row, params = self._row, bucket.states[Band.PARAMS]
        if row.params is row.optimizer:
            return
        if not row.two_axes:
            self._gather(self._all, bucket, params)
        elif row.optimizer is Over.GROUP:
            self._gather(self._inner, bucket, params)
        elif row.params:
            self._gather_replicas(bucket, params)
        else:
            shard = self._staging.pop(bucket.group)
            self._gather_replicas(bucket, shard)
            self._gather(self._inner, bucket, params, shard)
            self._ranks.free(shard)

    def owned(self, bucket: Bucket) -> Array:
        """Of the parameters that are kept, those that this rank's optimizer updates [..., n]."""
        row, params = self._row, bucket.states[Band.PARAMS]
        if row.params is row.optimizer:
            return params
        if not row.two_axes:
            return self._all.own(params)
        if row.optimizer is Over.GROUP:
            return self._inner.own(params)
        if row.params:
            return self._outer.own(params)
        # Whole, and updated in pieces of pieces: put together from the replicas first, to be gathered by the group.
        shard = self._ranks.hold(Band.GATHERED, (bucket.padded // self._inner.ring.size,), bucket.name)
        np.copyto(shard.reshape((own := self._inner.own(params)).shape), own)
        self._staging[bucket.group] = shard
        return self._outer.own(shard)

    def _flats(self, layer: Layer) -> Flat:
        flats = [self._flat(group) for group in layer.groups]
        return flats[0] if len(flats) == 1 else flats

    def _flat(self, group: Group) -> Array:
        if group.role is Role.BUFFER:
            return self._buckets[group].states[Band.BUFFERS]
        return self._full[group] if self._row.params else self._buckets[group].states[Band.PARAMS]

    def _fetch(self, layers: Sequence[Layer]) -> None:
        for group in (group for layer in layers for group in layer.groups):
            if group.role is not Role.BUFFER and group not in self._full:
                self._fetch_group(group)

    def _fetch_group(self, group: Group) -> None:
        bucket = self._buckets[group]
        self._full[group] = full = self._ranks.hold(Band.GATHERED, (bucket.padded,), bucket.name, group.dtype)
        if group in self._second:
            self._gather(self._inner, bucket, full, self._second[group])
        else:
            self._gather_shards(bucket, full)

    def _gather_shards(self, bucket: Bucket, full: Array) -> None:
        """Gather what the ranks hold; a shard on the host is first copied to the card."""
        own, comm = bucket.states[Band.PARAMS], self._all if self._row.params is Over.ALL else self._inner
        if not self._row.offloads(Band.PARAMS):
            self._gather(comm, bucket, full, own)
            return
        dtype = own.dtype if comm.wire == INT8 else bucket.group.dtype  # to int8 it is rounded once, on the card
        here = self._ranks.hold(Band.GATHERED, own.shape[1:], bucket.name, dtype)
        convert(own, here)
        self._ranks.ledger.copy(Place.CARD, Band.PARAMS, here.nbytes // len(here), bucket.name)
        self._gather(comm, bucket, full, here)
        self._ranks.free(here)

    def _gather(
        self, comm: Comm, bucket: Bucket, full: Array, own: Array | None = None, start: Any = 0, *, exact: bool = False
    ) -> None:
        dtype = full.dtype if exact else bucket.group.dtype
        if dtype is not None:  # what has a dtype of its own travels as it is
            comm = type(comm)(comm.ring, dtype, Workspace(self._ranks, Band.BLOCKS, dtype), self._ranks.ledger)
        comm.all_gather(full, bucket.size, own, band=Band.PARAMS, unit=bucket.name, start=start)

    def _gather_replicas(self, bucket: Bucket, shard: Array) -> None:
        """Put a shard together; without master weights it is all that there is, and is not rounded to be sent."""
        start = np.asarray(self._inner.ring.members) * shard.shape[1]
        self._gather(self._outer, bucket, shard, start=start, exact=not self._master)

    def _release(self, groups: Sequence[Group], done: Sequence[Group]) -> None:
        """Free what is gathered of ``groups``; ``done`` are those that this step's backward no longer needs."""
        for group in groups:
            if (full := self._full.pop(group, None)) is None:
                continue
            if self._row.reshard_after_forward == "group" and not self._backward and group not in self._second:
                own = self._inner.own(full)
                self._second[group] = second = self._ranks.hold(
                    Band.SECONDARY, own.shape[-1:], self._buckets[group].name, group.dtype
                )
                np.copyto(second.reshape(own.shape), own)
            self._ranks.free(full)
        for group in done:
            if group in self._second:
                self._ranks.free(self._second.pop(group))
