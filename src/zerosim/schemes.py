"""The one training step, which reads a row of ``stages.py``.

Owns the schedule: what is gathered, computed, released, reduced and updated, and when. It is
written once, over arrays whose first axis is the ranks of this process, and never asks in
which world it runs: the ring that it is handed decides that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from zerosim.bands import FP32, MODEL_STATES, WIRES, Array, Band
from zerosim.buckets import Bucket, build, distinct, split
from zerosim.comm import Comm, Ring
from zerosim.gradients import Gradients
from zerosim.layers import Checkpointed, Model, Pass, Turn
from zerosim.ledger import Ledger, Phase, Report
from zerosim.options import Options
from zerosim.parameters import Parameters
from zerosim.ranks import Ranks, Workspace
from zerosim.stages import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.util import arguments
from zerosim.util.casts import convert
from zerosim.worlds.local import LocalRing

__all__ = ["DP", "SCHEMES", "Scheme", "Stage", "ZeRO1", "ZeRO2", "ZeRO3"]
LASTING = (*MODEL_STATES, Band.BUFFERS, Band.BUCKET)  # what outlives a step


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
        # Nothing is sent by one rank. Only what has to be gathered to be read at all is gathered, by a ring of one.
        self.shard = stage.on(ranks) if recipe.everywhere else stage
        wire, wire_params = WIRES[options.wire], WIRES[options.wire_params or options.wire]
        self.ledger = Ledger(len(self.ring.ids), apart=[Band.ACTIVATIONS])
        self.ranks = Ranks(self.ring.ids, recipe.dtypes(wire), self.ledger, self.ring.empty, options.capacity)
        self.comm, self._gathers = (
            (collectives or Comm)(self.ring, dtype, Workspace(self.ranks, Band.BLOCKS, dtype), self.ledger)
            for dtype in (wire, wire_params)
        )
        self._work = Workspace(self.ranks, Band.ACTIVATIONS)
        self.updates = 0  # the optimizer's step count
        self.steps = 0  # taken so far
        self._turn = Turn(self.ring.ids, 0, 0)
        self.buckets = list(build(model, groups, options, ranks, self.shard, self.ranks))
        by_group = dict(zip(groups, self.buckets, strict=True))
        self._parameters = Parameters(
            by_group, self.ranks, self._gather,
            sharded=self.shard.params, ahead=options.prefetch, at_once=options.gather == "model",
        )  # fmt: skip
        self._gradients = Gradients(self.shard, by_group, self.layers, self.comm, self.ranks, options)

    @property
    def states(self) -> tuple[Band, ...]:
        """The model states that exist under these options, in the order of allocation."""
        return self.options.states

    # -- the step

    def step(self, batch: Sequence[tuple[Any, Any]]) -> float:
        """Train on one (x [B, ...], y [B, ...]) pair per rank of this process; return the mean loss before it.

        Raises ValueError or TypeError, before anything changes, for a batch that does not
        fit; OutOfMemory if a card's capacity would be passed, with the report up to there.
        """
        x, y = self.model.check(batch, len(self.ring.ids))
        arguments.divides("step(batch)", "accumulate", self.options.accumulate, x.shape[1])
        rows = x.shape[1] // self.options.accumulate
        with self.ledger.step() as report:
            try:
                self._gradients.begin()
                losses = []
                for number, start in enumerate(range(0, x.shape[1], rows)):
                    some = slice(start, start + rows)
                    self._turn = Turn(self.ring.ids, self.steps, number)
                    losses.append(self._micro_batch(x[:, some], y[:, some], last=start + rows == x.shape[1]))
                with self.ledger.during(Phase.OPTIMIZER):
                    self._update()
                self.steps += 1
                report.loss = float(np.mean(np.concatenate(losses)))
                report.padding = np.sum([bucket.padding(self.ring.ids) for bucket in self.buckets], axis=0).tolist()
                return report.loss
            except BaseException:
                self._abandon()
                raise

    def _micro_batch(self, given: Shaped[Array, "R ..."], wanted: Shaped[Array, "R ..."], *, last: bool) -> Any:
        """Forward and backward on some rows of the batch; the loss of each rank [R]."""
        x, target = self._load(given), self._load(wanted)
        with self._parameters.for_pass(self.layers), self.ledger.during(Phase.FORWARD):
            y, saved = self._forward(x)
        self._work.unit = "loss"
        losses, dy = self.model.loss(y, target, self._work)
        with self._parameters.for_pass(self.layers), self.ledger.during(Phase.BACKWARD):
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

    def _update(self) -> None:
        """The optimizer on what each rank owns; then, where parameters are whole but their owners many, a gather."""
        self.updates += 1
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        for bucket in trainable:
            params, grads = bucket.states[Band.PARAMS], bucket.states[Band.GRADS]
            if self.shard.optimizer:
                params = params if self.shard.params else self.comm.own(params)
                grads = grads if self.shard.grads else self.comm.own(grads)
            if (main := bucket.states.get(Band.MAIN_GRADS)) is not None:
                convert(grads, main)
                grads = main
            master = bucket.states.get(Band.MASTER, params)
            moments = {str(band): bucket.states[band] for band in self.options.optimizer.states}
            self.options.optimizer.update(master, grads, **moments, step=self.updates, flops=self.ledger.flops)
            if master is not params:
                convert(master, params)
            self.ledger.computed(bucket.name)
        if self.shard.optimizer and not self.shard.params:
            for bucket in trainable:
                self._all_gather(bucket, bucket.states[Band.PARAMS], None)

    def _gather(self, bucket: Bucket, full: Shaped[Array, "R L"]) -> None:
        self._all_gather(bucket, full, bucket.states[Band.PARAMS])

    def _all_gather(self, bucket: Bucket, full: Shaped[Array, "R L"], own: Shaped[Array, "R C"] | None) -> None:
        self._gathers.all_gather(full, bucket.size, own, band=Band.PARAMS, unit=bucket.name)

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

    def _whole(self, bucket: Bucket, band: Band) -> Shaped[Array, "n"]:
        """One state of one bucket, unpadded: the first rank's, or all ranks' shards."""
        state = bucket.states[band]
        if band is Band.GRADS and self.shard.optimizer and not self.shard.grads:
            state = self.comm.own(state)  # elsewhere in its full gradients a rank has its own, not the average
        if state.shape[1] == bucket.padded:
            whole: Array = state[0]
        elif len(self.ring.ids) == self.ring.size:
            whole = state.reshape(-1)
        else:
            raise ValueError(
                f"Scheme.flat({band}): {self.name} shards it over {self.ring.size} ranks, of which only "
                f"{list(self.ring.ids)} live in this process; read ranks[i] and put the shards together."
            )
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
