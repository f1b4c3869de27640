"""The one training step, which reads a row of ``stages.py``.

Owns the schedule: what is gathered, computed, released, reduced and updated, and when. It is
written once, over arrays whose first axis is the ranks of this process, and never asks in
which world it runs: the ring that it is handed decides that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from zerosim.bands import FP32, MODEL_STATES, WIRES, Array, Band, DType, Place
from zerosim.buckets import Bucket, build, distinct, split
from zerosim.comm import Comm, Ring
from zerosim.gradients import Gradients
from zerosim.kernels import choose
from zerosim.layers import Checkpointed, MicroBatch, Model, Pass, Turn
from zerosim.ledger import Ledger, Phase, Report
from zerosim.options import LossScale, Options
from zerosim.parameters import Parameters
from zerosim.ranks import Ranks, Workspace
from zerosim.scaling import Agreement, Scaler, tell
from zerosim.stages import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.util import arguments
from zerosim.util.batches import micro_batches
from zerosim.worlds.local import LocalRing

__all__ = ["DP", "SCHEMES", "Scheme", "Stage", "ZeRO1", "ZeRO2", "ZeRO3"]
LASTING = (*MODEL_STATES, Band.BUFFERS, Band.BUCKET)  # what outlives a step
OWNED = tuple(band for band in MODEL_STATES if band not in (Band.PARAMS, Band.GRADS))  # what the optimizer has alone


def _check_memory(stage: Stage, sizes: Sequence[int], ranks: int, options: Options) -> None:
    """Refuse N ranks in this process that the machine has no memory for, and say what would fit."""

    def need(row: Stage, n: int) -> int:
        return n * row.footprint(sizes, n, options.recipe, options.optimizer.states)

    fewer = [1 << power for power in reversed(range((ranks - 1).bit_length()))]
    others = [(row, ranks) for row in SCHEMES] + [(stage, n) for n in fewer]
    arguments.check_memory(
        f"{stage.name} on {ranks} ranks", need(stage, ranks), {f"{row.name} on {n}": need(row, n) for row, n in others}
    )


class Scheme:
    """A model in training on N ranks under one row, in any world.

    ``stage`` is the row and ``options`` what else was chosen. ``ring`` is the world: all N ranks in this
    process unless told otherwise. ``collectives`` is what runs over it, ``Comm`` or something with its face.

    ValueError, TypeError or MemoryError, before anything is allocated, for what cannot be trained.
    """

    def __init__(
        self,
        stage: Stage,
        model: Model,
        ranks: int,
        options: Options | None = None,
        *,
        ring: Ring | None = None,
        collectives: type[Comm] | None = None,
    ) -> None:
        arguments.instance_of("Scheme", "model", model, Model)
        ranks = arguments.integer("Scheme", "ranks", ranks)
        self.stage, self.name, self.model = stage, stage.name, model
        self.options = options = options or Options()
        recipe = options.recipe
        if not (recipe.everywhere or stage.params):
            raise ValueError(
                f"Scheme(precision): under {recipe.name!r} the 16-bit copy exists only while it is gathered, and "
                f"{stage.name} gathers nothing. Use ZeRO-3, or precision='bf16'."
            )
        self.shard = row = stage.on(ranks, options.node, gathers=not recipe.everywhere)
        if options.all_reduce and row.two_axes:
            raise ValueError(f"Scheme(all_reduce): {stage.name} reduce-scatters within the group first. Leave it out.")
        self.layers = split(model, options.bucket)
        if options.checkpoint:
            self.layers = [Checkpointed(layer) for layer in self.layers]
        groups = distinct(self.layers)
        if ring is None:
            _check_memory(stage, [group.size for group in groups], ranks, options)
        self.ring = ring or LocalRing(ranks)
        if self.ring.size != ranks:
            raise ValueError(
                f"Scheme(ring): a ring of {self.ring.size} ranks cannot carry {ranks}; pass one of that size."
            )
        rings = self.ring.split(options.node or ranks)
        self.ring = rings[0]
        wire, wire_params = WIRES[options.wire], WIRES[options.wire_params or options.wire]
        self.ledger = Ledger(len(self.ring.ids), apart=[Band.ACTIVATIONS])
        self.ranks = Ranks(
            self.ring.ids, recipe.dtypes(wire), self.ledger, self.ring.empty, options.capacity, options.host_capacity,
            choose(options.kernels, options.threads),
        )  # fmt: skip

        def comms(dtype: DType) -> list[Comm]:
            kind, blocks = collectives or Comm, Workspace(self.ranks, Band.BLOCKS, dtype)
            return [kind(ring, dtype, blocks, self.ledger) for ring in rings]

        self._work = Workspace(self.ranks, Band.ACTIVATIONS)
        self.steps = self.updates = 0  # all, and those that were applied: the optimizer's step count
        self._turn = Turn(self.ring.ids, 0, 0)
        self.scaler = Scaler(options.loss_scale) if isinstance(options.loss_scale, LossScale) else None
        self.buckets = list(build(model, groups, options, ranks, self.shard, self.ranks))
        given = self.shard, dict(zip(groups, self.buckets, strict=True)), self.layers
        self._gradients = Gradients(*given, comms(wire), self.ranks, options)
        self._parameters = Parameters(*given, comms(wire_params), self.ranks, options)
        self._scalars = comms(FP32)[0]
        self._agreement: Agreement | None = None
        if options.clip is not None or options.loss_scale is not None:
            self._agreement = Agreement(row, self.buckets, comms(FP32), self._gradients, self.ranks, options)

    @property
    def states(self) -> tuple[Band, ...]:
        """The model states that exist under these options, in the order of allocation."""
        return self.options.states

    # -- the step

    def step(self, batch: Sequence[Any], weights: Sequence[Any] | None = None) -> float:
        """Train on one (x [B, ...], y [B, ...]) pair per rank of this process; return the mean loss before it.

        With ``uneven=True`` ranks may have different numbers of rows, none included, and each its own list of
        ``accumulate`` pairs. The mean is then over all rows, or over ``weights``: for each rank one number, such
        as of tokens, or a list of one for each micro-batch.

        Raises ValueError or TypeError, before anything changes, for a batch that does not
        fit; OutOfMemory if a card's capacity would be passed, with the report up to there.
        """
        micro_batches = self._cut(batch, weights)
        overflow: Any = None if self.scaler is None else "ignore"  # a step that overflows is skipped
        with self.ledger.step() as report, np.errstate(over=overflow, invalid=overflow):
            try:
                self._gradients.begin()
                total = self._total(micro_batches)
                losses: list[Any] = []
                for index, each in enumerate(micro_batches):
                    self._turn = Turn(self.ring.ids, self.steps, index)
                    losses.append(self._micro_batch(each, total, last=index == len(micro_batches) - 1))
                self._apply(report)
                report.loss = report.mean_of_means = float(np.mean(np.concatenate(losses)))
                if total is not None:
                    shares = np.concatenate([each.weights for each in micro_batches])
                    report.loss = float(np.average(np.concatenate(losses), weights=shares))
                padding = [bucket.padding(len(self.ring.ids)) for bucket in self.buckets]
                report.padding = np.sum(padding, axis=0).tolist()
                return report.loss
            except BaseException:
                self._abandon()
                raise

    def _cut(self, batch: Sequence[Any], weights: Sequence[Any] | None) -> list[MicroBatch]:
        """The batch as micro-batches, once it is known to be sound."""
        ranks, k = len(self.ring.ids), self.options.accumulate
        if self.options.uneven:
            return micro_batches(batch, weights, ranks, k, self.model.check)
        if weights is not None:
            raise ValueError(
                "step(weights): ranks are weighed only where they may differ. Pass uneven=True to the scheme."
            )
        x, y = self.model.check(batch, ranks)
        arguments.divides("step(batch)", "accumulate", k, x.shape[1])
        rows = x.shape[1] // k
        return [
            MicroBatch(x[:, start : start + rows], y[:, start : start + rows]) for start in range(0, k * rows, rows)
        ]

    def _total(self, parts: Sequence[MicroBatch]) -> Array | None:
        """What all ranks' micro-batches weigh together, as each rank here has heard [R]; None where they are even."""
        if not self.options.uneven:
            return None
        mine = np.sum([each.weights for each in parts], axis=0).astype(FP32)
        heard: Array = tell(self._scalars, self.ranks, mine[:, None], "rows").sum(axis=(1, 2), dtype=np.float64)
        if not heard.all():
            raise ValueError("step(batch): no rank has a row, so there is nothing to average. Leave the step out.")
        return heard

    def _micro_batch(self, given: MicroBatch, total: Array | None, *, last: bool) -> Any:
        """Forward and backward on some rows of the batch; the loss of each rank [R]."""
        x, target = self._load(given.x), self._load(given.y)
        self._work.rows = given.rows
        with self._parameters.for_pass(self.layers, backward=False), self.ledger.during(Phase.FORWARD):
            y, saved = self._forward(x)
        self._work.unit = "loss"
        losses, dy = self.model.loss(y, target, self._work)
        if total is not None:  # each rank's mean counts as much as it weighs
            shares = given.weights * self.ring.size * self.options.accumulate / total
            dy *= shares.astype(FP32).reshape(-1, *[1] * (dy.ndim - 1))
        if self.scaler is not None:
            dy *= np.float32(self.scaler.scale)
        with self._parameters.for_pass(self.layers, backward=True), self.ledger.during(Phase.BACKWARD):
            self._backward(saved, dy, last)
        self._work.free(x)
        return losses

    def _load(self, given: Shaped[Array, "R ..."]) -> Shaped[Array, "R ..."]:
        self._work.unit = "batch"
        held = self._work.hold(*given.shape[1:], dtype=given.dtype)
        held[...] = given
        return held

    def _forward(self, x: Shaped[Array, "R ..."]) -> tuple[Shaped[Array, "R ..."], list[Any]]:
        saved = []
        for index, layer in enumerate(self.layers):
            with self._parameters.of(self.layers, index) as params:
                self._work.unit = layer.name
                x, kept = layer.forward(x, Pass(params, self._work, turn=self._turn))
                self.ledger.computed(layer.name)
                saved.append(kept)
        return x, saved

    def _backward(self, saved: list[Any], dy: Shaped[Array, "R ..."], last: bool) -> None:
        order = self.layers[::-1]
        for index, layer in enumerate(order):
            with self._parameters.of(order, index) as params:
                grads = self._gradients.room(layer)
                self._work.unit = layer.name
                given = Pass(params, self._work, grads, layer is not order[-1], self._turn)
                dx = layer.backward(saved.pop(), dy, given)
                self.ledger.computed(layer.name)
                if dx is not None:
                    dy = dx
            self._gradients.written(layer, last=last)

    def _apply(self, report: Report) -> None:
        """Agree on the norm and on whether all is finite; then update, or skip the step, which changes no state."""
        self.steps += 1
        factor = None
        with self.ledger.during(Phase.HOST_OPTIMIZER if "optimizer" in self.shard.offload else Phase.OPTIMIZER):
            if self._agreement is not None:
                report.scale = 1.0 if self.scaler is None else self.scaler.scale
                agreed = self._agreement.reach(report.scale)
                factor, report.norm = agreed.factor, None if agreed.norm is None else float(agreed.norm[0])
                if self.scaler is not None:
                    self.scaler.update(finite=agreed.finite)
                    if not agreed.finite:
                        report.skipped = True
                        return
            self._update(factor)

    def _update(self, factor: Shaped[Array, "R 1"] | None) -> None:
        """The optimizer on what each rank owns; then, where parameters are held by more than own them, a gather."""
        schedule = self.options.optimizer.schedule
        rate = 1.0
        if schedule is not None:
            rate = schedule.factor(self.updates if schedule.counts == "updates" else self.steps - 1)
        self.updates += 1
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        for bucket in trainable:
            owned = [self._parameters.owned(bucket), self._gradients.owned(bucket)]
            shape = max((each.shape for each in owned), key=len)  # pieces of what is whole lie as their ring does
            with self._where_updated(bucket, *(each.reshape(shape) for each in owned)) as (params, grads):
                states: dict[Band, Array] = {
                    band: state.reshape(shape) for band, state in bucket.states.items() if band in OWNED
                }
                if (main := states.get(Band.MAIN_GRADS)) is not None:
                    self.ranks.kernels.convert(grads, main)
                    grads = main
                if factor is not None:  # a register: what is kept is not rewritten
                    scaled = np.empty_like(grads, FP32, shape=shape)
                    self.ranks.kernels.convert(grads, scaled)
                    grads = np.multiply(scaled, factor.reshape(*shape[:-1], 1), out=scaled)
                    self.ledger.flops(grads.size // len(self.ring.ids))
                master = states.get(Band.MASTER, params)
                moments = {str(band): states[band] for band in self.options.optimizer.states}
                done: list[list[int]] = []  # operations, by rank where each is updated by itself
                for part, lr, decay, first in self._parts(bucket, shape):
                    if first:
                        done.append([])
                    self.options.optimizer.update(
                        master[part], grads[part], **{name: state[part] for name, state in moments.items()},
                        step=self.updates, flops=done[-1].append, lr=lr * rate, weight_decay=decay,
                        kernels=self.ranks.kernels,
                    )  # fmt: skip
                self.ledger.flops(max(map(sum, done)))
                if master is not params:
                    self.ranks.kernels.convert(master, params)
                self.ledger.computed(bucket.name)
        for bucket in trainable:
            self._parameters.update(bucket)

    def _parts(self, bucket: Bucket, shape: tuple[int, ...]) -> Iterator[tuple[Any, float, float, bool]]:
        """What ranks own of a bucket, cut where rate or weight decay change: with both, and if it is a rank's first."""
        rates = self.options.optimizer.rates(bucket.name, bucket.group.shapes)
        if len(set(rates)) == 1:
            yield ..., *rates[0], True
            return
        ends = np.cumsum([prod(each) for each in bucket.group.shapes]).tolist()
        ends[-1] = bucket.padded
        n, node, length = self.ring.size, self.options.node, shape[-1]
        for row, rank in enumerate(self.ring.ids):
            start = self.shard.piece(Band.MASTER, rank, n, node)[0] * length
            at = np.unravel_index(row, shape[:-1])
            for first, last, (lr, decay) in zip([0, *ends[:-1]], ends, rates, strict=True):
                low, high = max(first - start, 0), min(last - start, length)
                if low < high:
                    yield (*at[:-1], slice(at[-1], at[-1] + 1), slice(low, high)), lr, decay, low == 0

    @contextmanager
    def _where_updated(self, bucket: Bucket, params: Array, grads: Array) -> Iterator[tuple[Array, Array]]:
        """The owned parameters and gradients [..., n] where the optimizer is: on the host, they are copied there."""
        if "optimizer" not in self.shard.offload:
            yield params, grads
            return
        rows, copies = len(self.ring.ids), []

        def down(band: Band, array: Array) -> Array:
            copies.append(here := self.ranks.hold(band, (array.size // rows,), bucket.name, place=Place.HOST))
            self.ranks.kernels.convert(array, here.reshape(array.shape))
            self.ledger.copy(Place.HOST, band, here.nbytes // rows, bucket.name)
            return here.reshape(array.shape)

        if not self.shard.offloads(Band.GRADS):
            grads = down(Band.GRADS, grads)
        there = self.shard.offloads(Band.PARAMS)
        updated = params if there or Band.MASTER in bucket.states else down(Band.PARAMS, params)
        yield updated, grads
        if not there:
            if updated is not params:
                self.ranks.kernels.convert(updated, params)
            self.ledger.copy(Place.CARD, Band.PARAMS, params.nbytes // rows, bucket.name)
        for array in copies:
            self.ranks.free(array)

    def _abandon(self) -> None:
        """After an error within a step: give back all that does not outlive a step."""
        self._parameters.forget()
        for band, _, array in list(self.ranks.live()):
            if band not in LASTING:
                self.ranks.free(array)

    # -- what a user reads

    @property
    def reports(self) -> list[Report]:
        """One record per step."""
        return self.ledger.reports

    def flat(self, band: Band | str) -> Shaped[Array, "n"]:
        """A model state as one unpadded vector, a copy, put together from the ranks of this process.

        [n_params] where every parameter is trained; frozen ones have no state but params.
        ValueError for a state that does not exist here, or that is sharded with some shards in other processes.
        """
        if band not in self.states:
            raise ValueError(f"Scheme.flat(band): the states here are {', '.join(self.states)}; got {str(band)!r}.")
        return np.concatenate(
            [self._whole(bucket, Band(band)) for bucket in self.buckets if Band(band) in bucket.states]
        )

    def full_theta(self) -> Float[Array, "P"]:
        """The fp32 parameters, flat, unpadded, a copy: [n_params]. The master weights where there are any."""
        return np.concatenate(
            [
                self._whole(bucket, Band.MASTER if Band.MASTER in bucket.states else Band.PARAMS).astype(FP32)
                for bucket in self.buckets
                if Band.PARAMS in bucket.states
            ]
        )

    def owned_states(self, bucket: Bucket, band: Band) -> tuple[Shaped[Array, "R n"], list[int]]:
        """What each rank here has of a state, of gradients the averaged, and which piece of that length it is."""
        if band is not Band.GRADS:  # elsewhere in its full gradients a rank has its own, not the average
            return bucket.states[band], bucket.pieces[band].tolist()
        n, node = self.ring.size, self.options.node
        pieces = [self.shard.piece(Band.MASTER, rank, n, node)[0] for rank in self.ring.ids]
        return self._gradients.owned(bucket).reshape(len(pieces), -1), pieces

    def _whole(self, bucket: Bucket, band: Band) -> Shaped[Array, "n"]:
        """One state of one bucket, unpadded, put together from the pieces that the ranks own."""
        state, pieces = self.owned_states(bucket, band)
        count = bucket.padded // state.shape[1]
        if len(set(pieces)) < count:
            raise ValueError(
                f"Scheme.flat({band}): {self.name} shards it over {count} ranks, of which only "
                f"{list(self.ring.ids)} live in this process; read ranks[i] and put the shards together."
            )
        whole: Array = state[[pieces.index(piece) for piece in range(count)]].reshape(-1)
        return whole[: bucket.size]

    def bytes_per_param(self) -> float:
        """Resident: bytes that the fullest rank holds now, model states and whatever else, per parameter."""
        return self.ledger.total / self.model.n_params

    def peak_bytes_per_param(self) -> float:
        """The highest instant so far of what scales with the parameters, per parameter: activations left out."""
        return self.ledger.peak_without_activations().total / self.model.n_params

    def bytes_comm_per_rank(self) -> int:
        """Bytes sent so far by the busiest rank of this process."""
        return max(self.ledger.sent())


Stage.train = Scheme
