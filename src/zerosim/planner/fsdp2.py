"""What FSDP2 (``torch.distributed.fsdp.fully_shard``, torch 2.13) holds during a step, and for how long; and DDP.

Owns these lifetimes: the root's, of what a gather and a reduction are copied through, of sharded gradients, and
of what the optimizer computes with. What is gathered, computed and reduced, and in which order, is the schedule's,
and is counted where that does it. Read beside torch's ``_fsdp_param_group.py`` and ``_fsdp_collectives.py``:
``unshard``, ``wait_for_unshard``, ``reshard``, ``post_backward`` and ``foreach_reduce`` are named here as there.

A unit is what was wrapped, a block. Whatever is left of the model is the root: one unit, gathered before the first
block and kept to the end of the backward, reduced last and all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from zerosim.bands import Array, Band, DType
from zerosim.buckets import Bucket, Sharding, shared
from zerosim.comm import Comm, Ring
from zerosim.gradients import Gradients
from zerosim.kernels.operations import Kernels
from zerosim.layers import Checkpointed, Flat, Group, Layer, Role
from zerosim.ledger import Ledger
from zerosim.parameters import Parameters
from zerosim.planner.callers_batch import CallersBatch
from zerosim.planner.recipes import PlannedOptions
from zerosim.ranks import Workspace
from zerosim.stages import Over
from zerosim.updates import Update


def wrapped(layer: Layer) -> bool:
    """Whether a layer is a unit of its own, and no part of the root."""
    own = layer.layer if isinstance(layer, Checkpointed) else layer
    shapes = getattr(own, "shapes", None)
    return shapes is None or bool(shapes.wrapped)


class _Registers(Workspace):
    """Blocks that no allocator holds: what is in flight lies in buffers of the communication library's own."""

    def __init__(self, ring: Ring, dtype: DType, kernels: Kernels) -> None:
        self._ring, self._wire, self.kernels, self.unit = ring, dtype, kernels, ""

    def hold(self, *shape: int, dtype: DType | None = None) -> Array:
        return self._ring.empty((len(self._ring.ids), *shape), dtype or self._wire)

    def free(self, array: Array) -> None:
        pass


class Library(Comm):
    """Collectives whose blocks in flight are not the allocator's, as NCCL's are not."""

    def __init__(self, ring: Ring, wire: DType, blocks: Workspace, ledger: Ledger) -> None:
        super().__init__(ring, wire, _Registers(ring, wire, blocks.kernels), ledger)


class Unsharding(Parameters):
    """Parameters that are gathered into one buffer and copied out of it, parameter by parameter."""

    def __init__(self, sharding: Sharding, comms: Sequence[Comm]) -> None:
        bare = (layer for layer in sharding.layers if not wrapped(layer))
        self._root = list(dict.fromkeys(group for layer in bare for group in layer.groups))
        self._casts = sharding.options.recipe.params != sharding.options.recipe.working
        super().__init__(sharding, comms)

    def forget(self) -> None:
        super().forget()
        self._gathering: dict[Layer | None, list[Array]] = {}  # what is gathered and not yet copied out, by unit
        self._copied: list[Array] = []  # the last that was copied out of in forward: it goes after the next copy

    def begin_pass(self, layers: Sequence[Layer], *, backward: bool) -> None:
        self._backward = backward
        if not self._row.params:
            return
        self._free_copied()
        if not backward:
            self._unshard(None)
            self._wait_for_unshard(None)
        elif (last := self._next_unit(layers[::-1], 0)) is not None:
            self._unshard(last)

    def end_pass(self) -> None:
        if self._row.params and self._backward:
            self._release(list(self._full), list(self._second))

    def loss_computed(self) -> None:
        """The root's forward, which the loss is part of, ends and frees what was copied last. Where parameters are
        released after forward, a buffer of that size comes at once for the last unit's gather: it is left here."""
        if not self._row.reshard_after_forward:
            self._free_copied()

    def fetch(self, layers: Sequence[Layer], index: int) -> Flat:
        layer = layers[index]
        if self._row.params and wrapped(layer):
            self._unshard(layer)
            self._wait_for_unshard(layer)
            if self._backward and (coming := self._next_unit(layers, index + 1)) is not None:
                self._unshard(coming)
        return self._flats(layer)

    def release(self, layers: Sequence[Layer], index: int) -> None:
        if not self._row.params:
            return
        layer = layers[index]
        own = self._groups(layer) if wrapped(layer) else []
        done = [group for group in own if self._backward and self._first[group] is layer]
        self._release(own if self._row.reshard_after_forward else done, done)
        if self._backward and layer is layers[-1]:
            self._release(self._root, ())

    def _groups(self, unit: Layer | None) -> list[Group]:
        """What is gathered for a unit; for None, the root's."""
        groups = self._root if unit is None else [group for group in unit.groups if group not in self._root]
        return [group for group in groups if group.role is not Role.BUFFER]

    def _next_unit(self, layers: Sequence[Layer], index: int) -> Layer | None:
        return next((layer for layer in layers[index:] if wrapped(layer)), None)

    def _unshard(self, unit: Layer | None) -> None:
        """Gather into one buffer; what is sent is cast in another, which lasts no longer than the copy into it."""
        groups = [group for group in self._groups(unit) if group not in self._full]
        if not groups or unit in self._gathering:
            return
        cast, self._gathering[unit] = [], []
        for group in groups:
            bucket = self._buckets[group]
            ring = (self._inner if group in self._second or self._row.params is not Over.ALL else self._all).ring
            if self._casts and group.dtype is None:
                cast.append(self._buffer(bucket, bucket.padded // ring.size))
            if ring.size > 1:
                self._gathering[unit].append(self._buffer(bucket, bucket.padded))
        for array in cast:
            self._ranks.free(array)

    def _wait_for_unshard(self, unit: Layer | None) -> None:
        """Copy what was gathered to the parameters. In forward the buffer stays until the next has been copied out of:
        ``prev_all_gather_state`` refers to it to the end of the call."""
        if (gathered := self._gathering.pop(unit, None)) is None:
            return
        for group in self._groups(unit):
            if group not in self._full:
                self._fetch_group(group)
            if self._backward and group in self._second:
                self._ranks.free(self._second.pop(group))
        if self._backward:
            for array in gathered:
                self._ranks.free(array)
        else:
            self._free_copied()
            self._copied = gathered

    def _free_copied(self) -> None:
        for array in self._copied:
            self._ranks.free(array)
        self._copied = []

    def _buffer(self, bucket: Bucket, elements: int) -> Array:
        dtype = bucket.group.dtype or self._ranks.dtypes[Band.GATHERED]
        return self._ranks.hold(Band.BLOCKS, (elements,), bucket.name, dtype)


class Accumulating(Gradients):
    """Gradients as autograd accumulates them: of tied parameters it adds two to a third.

    Where gradients outlive a step, as DDP's views of its buckets do, autograd's own are apart from them until it has
    added or copied them: those of tied parameters until both are there.
    """

    def __init__(self, sharding: Sharding, comms: Sequence[Comm]) -> None:
        self._tied = set(shared(sharding.layers))
        super().__init__(sharding, comms)

    def begin(self) -> None:
        super().begin()
        self._totals: dict[Group, Array] = {}
        self._apart: dict[Group, Array] = {}  # autograd's own, beside where they are kept

    def _room(self, bucket: Bucket) -> Array:
        outlived = Band.GRADS in bucket.states and bucket.group not in self._local
        room = super()._room(bucket)
        if outlived and room is bucket.states[Band.GRADS]:
            self._apart[bucket.group] = self._ranks.hold(Band.UNREDUCED, (bucket.padded,), bucket.name)
        if bucket.group in self._again and bucket.group in self._tied:
            self._totals[bucket.group] = self._ranks.hold(Band.UNREDUCED, (bucket.padded,), bucket.name)
        return room

    def written(self, layer: Layer, *, last: bool) -> list[Bucket]:
        self._added(layer)
        return super().written(layer, last=last)

    def _added(self, layer: Layer) -> None:
        """The sum is there, and what was added goes: of three arrays one is left."""
        for group in layer.groups:
            if (again := self._again.pop(group, None)) is not None:
                self._ranks.free(again)
                if (total := self._totals.pop(group, None)) is not None:
                    self._ranks.free(total)
            if group in self._apart and self._completes[group] is layer:
                self._ranks.free(self._apart.pop(group))


class Reducing(Accumulating):
    """Gradients that are copied to a buffer in the dtype that they are reduced in; it stays until the next unit's."""

    def __init__(self, sharding: Sharding, comms: Sequence[Comm]) -> None:
        super().__init__(sharding, comms)
        self._root = {group for layer in sharding.layers if not wrapped(layer) for group in layer.groups}
        self._end = sharding.layers[0]  # where the backward ends
        self._order = {group: place for place, group in enumerate(sharding.buckets)}
        self._wire = self._all.wire

    def begin(self) -> None:
        super().begin()
        self._reducing: list[Array] = []  # the buffers of the last reduction

    def written(self, layer: Layer, *, last: bool) -> list[Bucket]:
        if not self._row.grads:  # on one rank they are written where they are kept
            return super().written(layer, last=last)
        self._added(layer)
        if not (self._each or last):
            return []
        complete = [group for group in layer.groups if group in self._local and self._completes[group] is layer]
        reduced = self._reduce_together([group for group in complete if group not in self._root], last=last)
        if layer is self._end:
            reduced += self._reduce_together([group for group in self._local if group in self._root], last=last)
            self._free_reducing()
        return reduced

    def _reduce_together(self, groups: Sequence[Group], *, last: bool) -> list[Bucket]:
        """``foreach_reduce``: all of a unit's gradients are copied before the first of them is freed. That of the last
        parameter, as the model lists them, goes when it returns: ``unsharded_grad`` of its loop refers to it."""
        if not groups:
            return []
        buckets = [self._buckets[group] for group in groups]
        self._free_reducing()
        inputs = [self._ranks.hold(Band.BLOCKS, (each.padded,), each.name, self._wire) for each in buckets]
        for bucket in buckets:
            self._ranks.free(self._local.pop(bucket.group))
        end = max(groups, key=self._order.__getitem__)
        kept = self._ranks.hold(Band.UNREDUCED, (prod(end.shapes[-1]),), end.name)
        for bucket, given in zip(buckets, inputs, strict=True):
            self._reduce(bucket, given, last=last)
        self._ranks.free(kept)
        return buckets

    def _spent(self, full: Array) -> None:
        self._reducing.append(full)

    def _free_reducing(self) -> None:
        for array in self._reducing:
            self._ranks.free(array)
        self._reducing = []


class Stepping(Update):
    """An optimizer that works on all parameters at once (``foreach``), and gradients that go with ``zero_grad``."""

    def apply(self, factor: Any, *, rate: float, buckets: Sequence[Bucket] | None = None, used: Any = None) -> None:
        if buckets is not None:
            super().apply(factor, rate=rate, buckets=buckets, used=used)
            return
        roots, options = [], self._options
        assert isinstance(options, PlannedOptions), "these rules are a plan's"
        if options.foreach:
            for bucket in self._buckets:
                if (moment := bucket.states.get(Band.EXP_AVG_SQ)) is not None:
                    held = self._ranks.hold(Band.ACTIVATIONS, moment.shape[1:], bucket.name, moment.dtype)
                    roots.append(held)
        super().apply(factor, rate=rate, used=used)
        for array in roots:
            self._ranks.free(array)
        if options.set_to_none:
            for bucket in self._buckets:
                self._gradients.drop(bucket)


class FSDP2(CallersBatch):
    """A training step as FSDP2 runs it."""

    made_of = Reducing, Unsharding, Stepping

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        assert isinstance(self._parameters, Unsharding), "it is made of these"
        self._work.on_loss = self._parameters.loss_computed


class DDP(CallersBatch):
    """A training step as ``DistributedDataParallel`` runs it, or torch on one card; buckets are held beside it."""

    made_of = Accumulating, Parameters, Stepping
