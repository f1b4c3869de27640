"""What DeepSpeed's ZeRO holds during a step, and for how long, by the settings of its ``zero_optimization``.

Owns these lifetimes, and how "auto" is resolved. Read beside deepspeed/runtime/zero: ``mark_persistent_parameters`` of
``parameter_offload.py``; ``fetch_sub_module`` and ``__params_to_release`` of ``partitioned_param_coordinator.py``;
``__add_grad_to_ipg_bucket``, ``__reduce_and_partition_ipg_grads``, ``_create_fp16_sub_groups`` and
``_prepare_fp32_grad_for_sub_group`` of ``stage3.py``; ``step`` of ``stage_1_and_2.py``. What is gathered, computed and
reduced, and in which order, is the schedule's.

DeepSpeed fetches a module's own parameters at a time, and here a block is fetched whole. Every module, those without
parameters too, prefetches another bucket, so that within a few blocks ``stage3_max_live_parameters`` are there; here
they are from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from zerosim.bands import Array, Band
from zerosim.buckets import Bucket, Sharding, shared
from zerosim.comm import Comm
from zerosim.gradients import Gradients
from zerosim.layers import Checkpointed, Flat, Group, Layer, Role
from zerosim.parameters import Parameters
from zerosim.planner.callers_batch import CallersBatch
from zerosim.planner.model_source import ModelSource
from zerosim.planner.recipes import PlannedOptions
from zerosim.records.question import Question, ZeroConfig
from zerosim.stages import Over, Stage
from zerosim.updates import Update

_BY_WIDTH: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda h: h * h,
    "prefetch_bucket_size": lambda h: int(0.9 * h * h),
    "param_persistence_threshold": lambda h: 10 * h,
}


def settings(question: Question, source: ModelSource) -> ZeroConfig:
    """The job's settings, "auto" among them resolved by the model's width h, as transformers' trainer does.

    ``trainer_config_finalize`` of transformers/integrations/deepspeed.py: a reduce bucket of h², and under stage 3 a
    prefetch bucket of 0.9 h² and a persistence threshold of 10 h, in elements. ValueError for "auto" where the model
    says no width.
    """
    given, width = question.zero, source.width
    values = {name: getattr(given, name) for name in given.__struct_fields__}
    auto = [name for name in _BY_WIDTH if values[name] == "auto"]
    if auto and width is None:
        raise ValueError(
            f"plan(config): 'auto' of {', '.join(auto)} follows from the model's hidden_size, and {source.name} says "
            f"none. Write numbers in their place."
        )
    if isinstance(question.bucket, int):
        values["reduce_bucket_size"] = question.bucket
    return ZeroConfig(**values | {name: _BY_WIDTH[name](width or 0) for name in auto})


def bucket(row: Stage, chosen: ZeroConfig) -> int:
    """Elements that gradients are collected in: under stage 2 twice as many where they are reduced meanwhile."""
    twice = bool(chosen.overlap_comm) and not row.params
    return int(chosen.reduce_bucket_size) * chosen.contiguous_gradients * (2 if twice else 1)


def _of(options: Any) -> Any:
    assert isinstance(options, PlannedOptions), "these rules are a plan's"
    return options.settings


def _stage_3(row: Stage) -> bool:
    """Whether these are the rules: parameters on the cards, sharded over all, and released after use."""
    return row.params is Over.ALL and not row.two_axes and row.reshard_after_forward is True and not row.offload


def _elements(group: Group) -> list[int]:
    """Of each parameter of a group."""
    return [prod(shape) for shape in group.shapes]


class Coordinating(Parameters):
    """Parameters that are fetched ahead, kept where they are used again soon, and whole at all times if small."""

    def __init__(self, sharding: Sharding, comms: Sequence[Comm]) -> None:
        self._settings, self._stage_3 = _of(sharding.options), _stage_3(sharding.row)
        super().__init__(sharding, comms)
        self._standing: dict[Group, Array] = {}  # what is whole of a group also when nothing computes
        if self._stage_3:
            for group in (group for group in shared(sharding.layers) if group.role is not Role.BUFFER):
                self._stand(group, self._buckets[group].padded)  # zero.Init leaves tied parameters whole
            self._stand_small()

    def forget(self) -> None:
        super().forget()
        self._coming: Array | None = None  # what has been prefetched

    def _stand(self, group: Group, elements: int) -> None:
        bucket, n = self._buckets[group], self._all.ring.size
        self._standing[group] = whole = self._ranks.hold(Band.GATHERED, (elements,), group.name, group.dtype)
        self._gather(self._all, bucket, whole, bucket.states[Band.PARAMS][:, : elements // n])

    def _stand_small(self) -> None:
        """``mark_persistent_parameters``: those of up to so many elements are whole, each padded to N."""
        n = self._all.ring.size
        for group in self._buckets:
            small = [each for each in _elements(group) if each <= self._settings.param_persistence_threshold]
            if small and group not in self._standing and group.role is not Role.BUFFER:
                self._stand(group, sum(-(-each // n) * n for each in small))

    def partition_all(self) -> None:
        """``_partition_all_parameters``, before the update: nothing is whole any more."""
        for array in self._standing.values():
            self._ranks.free(array)
        self._standing = {}

    def step_done(self) -> None:
        """``_post_step``: small parameters are gathered again."""
        if self._stage_3:
            self._stand_small()

    def begin_pass(self, layers: Sequence[Layer], *, backward: bool) -> None:
        if not self._stage_3:
            super().begin_pass(layers, backward=backward)
        self._backward = backward

    def end_pass(self) -> None:
        if not self._stage_3:
            super().end_pass()
            return
        self._free_coming()
        if self._backward:
            self._release(list(self._full), ())

    def fetch(self, layers: Sequence[Layer], index: int) -> Flat:
        if not self._stage_3:
            return super().fetch(layers, index)
        layer = layers[index]
        self._free_coming()
        self._fetch([layer])
        self._prefetch(layers[index + 1 :] if self._backward else [*layers[index + 1 :], *layers[::-1]])
        return self._flats(layer)

    def release(self, layers: Sequence[Layer], index: int) -> None:
        if not self._stage_3:
            super().release(layers, index)
        elif self._backward or not self._used_again_soon(layers, index):
            self._release(layers[index].groups, ())

    def _used_again_soon(self, layers: Sequence[Layer], index: int) -> bool:
        """``__params_to_release``: in forward, whether backward comes back within ``max_reuse_distance`` elements.

        In between lie the units that follow, and their backward; what is checkpointed runs forward again there.
        """
        between = 0
        for layer in layers[index + 1 :]:
            own = sum(group.size for group in layer.groups if group.role is not Role.BUFFER)
            between += own * (3 if isinstance(layer, Checkpointed) else 2)
        return bool(between < self._settings.max_reuse_distance)

    def _prefetch(self, coming: Sequence[Layer]) -> None:
        """``fetch_sub_module``: what comes next is there too, as far as ``max_live_parameters`` allow."""
        if not self._settings.prefetch_bucket_size:
            return
        room = self._settings.max_live_parameters - sum(self._buckets[group].size for group in self._full)
        wanted = 0
        for group in dict.fromkeys(group for layer in coming for group in layer.groups):
            if group in self._full or group in self._standing or group.role is Role.BUFFER:
                continue
            for elements in _elements(group):
                if wanted < room:
                    wanted += elements
        if wanted:
            self._coming = self._ranks.hold(Band.GATHERED, (wanted,), "prefetched")

    def _free_coming(self) -> None:
        if self._coming is not None:
            self._ranks.free(self._coming)
            self._coming = None

    def _flat(self, group: Group) -> Array:
        found = super()._flat(group)
        if not self._stage_3 or group.role is Role.BUFFER:
            return found
        return self._all.ring.empty((len(self._ranks.ids), self._buckets[group].padded), found.dtype)  # a register

    def _fetch_group(self, group: Group) -> None:
        if not self._stage_3:
            super()._fetch_group(group)
            return
        bucket, standing = self._buckets[group], self._standing.get(group)
        there = 0 if standing is None else standing.shape[1]
        if standing is not None and there == bucket.padded:
            self._full[group] = standing
            return
        full = self._ranks.hold(Band.GATHERED, (bucket.padded - there,), bucket.name, group.dtype)
        self._full[group] = full
        self._gather(self._all, bucket, full, bucket.states[Band.PARAMS][:, there // self._all.ring.size :])

    def _release(self, groups: Sequence[Group], done: Sequence[Group]) -> None:
        if not self._stage_3:
            super()._release(groups, done)
            return
        for group in groups:
            full = self._full.pop(group, None)
            if full is not None and full is not self._standing.get(group):
                self._ranks.free(full)


class Bucketing(Gradients):
    """Under stage 3, gradients that go into a bucket one by one, and are copied once more as it is reduced."""

    def __init__(self, sharding: Sharding, comms: Sequence[Comm]) -> None:
        self._settings, self._stage_3 = _of(sharding.options), _stage_3(sharding.row)
        self._tied = set(shared(sharding.layers))  # autograd adds theirs first
        super().__init__(sharding, comms)

    def _room(self, bucket: Bucket) -> Array:
        if not self._stage_3 or not self._each or bucket.group in self._tied:
            return super()._room(bucket)
        largest = self._ranks.hold(Band.UNREDUCED, (max(_elements(bucket.group)),), bucket.name)
        self._local[bucket.group] = largest
        return self._register(bucket, largest.dtype)

    def _reduce(self, bucket: Bucket, full: Array, *, last: bool) -> None:
        if not self._stage_3:
            super()._reduce(bucket, full, last=last)
            return
        sizes = _elements(bucket.group)
        together = min(bucket.size, max(self._settings.reduce_bucket_size, max(sizes)))
        copied = []
        if len(sizes) > 1:  # reduce_scatter_coalesced sends a single one as it lies
            copied.append(self._ranks.hold(Band.BLOCKS, (together,), bucket.name, full.dtype))
        super()._reduce(bucket, self._register(bucket, full.dtype), last=last)
        for array in (*copied, full):
            self._ranks.free(array)

    def _spent(self, full: Array) -> None:
        if not self._stage_3:  # there it is a register
            super()._spent(full)

    def _register(self, bucket: Bucket, dtype: Any) -> Array:
        """The group's gradients in the shape that the schedule has them in; what is held of them is held apart."""
        return self._all.ring.empty((len(self._ranks.ids), bucket.padded), dtype)


class Stepping(Update):
    """An optimizer that is handed its gradients copied and cast, a sub-group at a time."""

    def apply(self, factor: Any, *, rate: float, buckets: Sequence[Bucket] | None = None, used: Any = None) -> None:
        parameters, options = self._parameters, self._options
        assert isinstance(parameters, Coordinating), "these rules are a plan's"
        if buckets is None:  # in the backward what follows still reads them
            parameters.partition_all()
        copies = []
        if buckets is None and self._row.optimizer and "optimizer" not in self._row.offload:
            grads, largest = self._ranks.dtypes[Band.GRADS], self._sub_group()
            copies.append(self._ranks.hold(Band.BLOCKS, (largest,), "sub-group", grads))
            master = self._ranks.dtypes[Band.MASTER if options.recipe.master else Band.PARAMS]
            if master != grads:
                copies.append(self._ranks.hold(Band.MAIN_GRADS, (largest,), "sub-group", master))
        super().apply(factor, rate=rate, buckets=buckets, used=used)
        for array in copies:
            self._ranks.free(array)
        parameters.step_done()

    def _sub_group(self) -> int:
        """Elements of the largest: under stage 3 parameters are taken until they are ``sub_group_size``, below all."""
        n = self._n
        if not self._row.params:
            return sum(bucket.padded for bucket in self._buckets) // n
        largest = current = 0
        for bucket in self._buckets:
            for elements in _elements(bucket.group):
                current += -(-elements // n)
                largest = max(largest, current)
                if current >= _of(self._options).sub_group_size:
                    current = 0
        return largest


class DeepSpeed(CallersBatch):
    """A training step as DeepSpeed runs it."""

    made_of = Bucketing, Coordinating, Stepping
