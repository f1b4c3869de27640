"""The one training step, which reads a row of ``stages.py``.

Owns the schedule: what is gathered, computed, released, reduced and updated, and when. It is
written once, over arrays whose first axis is the ranks of this process, and never asks in
which world it runs: the ring that it is handed decides that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zerosim.bands import FP32, MODEL_STATES, PARAM_WIRES, WIRES, Array, Band, DType
from zerosim.buckets import Bucket, Sharding, build, distinct, split
from zerosim.comm import Comm, Ring
from zerosim.counts import Event, Phase, Report
from zerosim.gradients import Gradients
from zerosim.kernels.choice import choose
from zerosim.layers import Checkpointed, MicroBatch, Model, Pass, Turn
from zerosim.ledger import Ledger
from zerosim.options import LossScale, Options
from zerosim.parameters import Parameters
from zerosim.ranks import Ranks, Workspace
from zerosim.scaling import Agreement, Scaler, in_use, total_weight
from zerosim.stages import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.updates import Update
from zerosim.util import arguments
from zerosim.util.batches import micro_batches
from zerosim.util.front_door import public
from zerosim.util.shapes import Float, Shaped
from zerosim.worlds.local import LocalRing, check_room
from zerosim.worlds.local_comm import LocalComm

if TYPE_CHECKING:
    from zerosim.api.compare import Comparison
    from zerosim.api.timeline import Timeline

Listener = TypeVar("Listener", bound=Callable[[Event], object])
__all__ = ["DP", "SCHEMES", "Scheme", "Stage", "ZeRO1", "ZeRO2", "ZeRO3"]
LASTING = (*MODEL_STATES, Band.BUFFERS, Band.BUCKET)  # what outlives a step


class Scheme:
    """A model in training on N ranks under one row, in any world.

    ``stage`` is the row and ``options`` what else was chosen. ``ring`` is the world: all N ranks in this
    process unless told otherwise. ``collectives`` is what runs over it, ``Comm`` or a class with its methods.

    ValueError, TypeError or MemoryError, before anything is allocated, for what cannot be trained.

    >>> import zerosim as zs
    >>> run = zs.ZeRO3(zs.MLP(), ranks=4, precision="bf16")
    >>> seen = []
    >>> _ = run.on_event(lambda event: seen.append(event.name))
    >>> [batch] = zs.batches(ranks=4)
    >>> f"{run.step(batch):.4f}", run.reports[-1].peak.by_band["gathered params"], len(seen)
    ('2.9...', 33024, 88)
    """

    made_of: tuple[type[Gradients], type[Parameters], type[Update]] = Gradients, Parameters, Update

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
        arguments.instance_of("Scheme", "model", model, Model, instead=arguments.A_MODEL)
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
            check_room(stage, [group.size for group in groups], ranks, options)
        self.ring = ring or LocalRing(ranks)
        arguments.instance_of("Scheme", "ring", self.ring, Ring)
        kind = collectives or (LocalComm if self.ring.here else Comm)
        if not hasattr(kind, "reduce_scatter"):
            raise TypeError(f"Scheme(collectives): Comm, or a class with its methods, is needed; got {collectives!r}.")
        if (size := self.ring.size) != ranks:
            raise ValueError(f"Scheme(ring): a ring of {size} ranks cannot carry {ranks}; pass one of that size.")
        self.ring, *_ = rings = self.ring.split(options.node or ranks)
        wire, wire_params = WIRES[options.wire], PARAM_WIRES[options.wire_params or options.wire]
        self.ledger = Ledger(
            len(self.ring.ids), apart=[Band.ACTIVATIONS],
            keep_reports=options.keep_reports, keep_events=options.keep_events,
        )  # fmt: skip
        self.ranks = Ranks(
            self.ring.ids, recipe.dtypes(wire), self.ledger, self.ring.empty, options.capacity, options.host_capacity,
            choose(options.kernels, options.threads), exact=not self.ring.here,
        )  # fmt: skip

        def comms(dtype: DType) -> list[Comm]:
            blocks = Workspace(self.ranks, Band.BLOCKS, dtype)
            return [kind(ring, dtype, blocks, self.ledger) for ring in rings]

        self._work = Workspace(self.ranks, Band.ACTIVATIONS)
        self._changed, self._doubt = False, ""  # whether a step has begun to change states; why none may follow
        self.steps = self.updates = 0  # all, and those that were applied: the optimizer's step count
        self._turn, self._weighed = Turn(self.ring.ids, 0, 0), options.uneven and options.average == "rows"
        self.scaler = Scaler(options.loss_scale) if isinstance(options.loss_scale, LossScale) else None
        self.buckets = list(build(model, groups, options, ranks, self.shard, self.ranks))
        self._padding: list[int] = np.sum(
            [bucket.padding(len(self.ring.ids)) for bucket in self.buckets], axis=0
        ).tolist()
        sharding = Sharding(row, self.layers, dict(zip(groups, self.buckets, strict=True)), self.ranks, ranks, options)
        gradients, parameters, update = self.made_of
        self._gradients = gradients(sharding, comms(wire))
        self._parameters = parameters(sharding, comms(wire_params))
        self._update = update(sharding, self._parameters, self._gradients)
        self._scalars = comms(FP32)
        self.agreement: Agreement | None = None
        if options.clip is not None or options.loss_scale is not None:
            self.agreement = Agreement(sharding, self._gradients, self._scalars)

    @property
    def states(self) -> tuple[Band, ...]:
        """The model states that exist under these options, in the order of allocation."""
        return self.options.states

    # -- the step

    def step(self, batch: Sequence[Any], weights: Sequence[Any] | None = None) -> float:
        """Train on one (x [B, ...], y [B, ...]) pair per rank of this process; return the mean loss before it.

        With ``uneven=True`` ranks may have different numbers of rows, none included, and each its own list of
        ``accumulate`` pairs, or all of fewer. The mean is then over all rows, or over ``weights``: for each rank
        one number, such as of tokens, or a list of one for each micro-batch.

        Raises ValueError or TypeError, before anything changes, for a batch that does not
        fit; OutOfMemory if a card's capacity would be passed, with the report up to there. After an error or an
        interrupt the scheme stands where it stood before the step or, if states were changing, refuses to go on.
        """
        self.check_whole("step")
        micro_batches = self._cut(batch, weights)
        said = f"step {self.steps + 1} was cut short while states changed: ranks may not agree"
        self._changed, self._doubt = False, said
        overflow: Any = None if self.scaler is None else "ignore"  # a step that overflows is skipped
        with self.ledger.step() as report, np.errstate(over=overflow, invalid=overflow):
            try:
                self._gradients.begin()
                total = total_weight(self._scalars[0], self.ranks, micro_batches) if self._weighed else None
                self._changed = any(Band.BUFFERS in bucket.states for bucket in self.buckets)  # forward may write there
                losses: list[Any] = []
                for index, each in enumerate(micro_batches):
                    self._turn = Turn(self.ring.ids, self.steps, index)
                    losses.append(self._micro_batch(each, total, last=index == len(micro_batches) - 1))
                self._apply(report)
                report.loss = report.mean_of_means = float(np.mean(np.concatenate(losses)))
                report.losses = np.mean(np.stack(losses, axis=1), axis=1).tolist()
                if total is not None:
                    shares = np.concatenate([each.weights for each in micro_batches])
                    report.loss = float(np.average(np.concatenate(losses), weights=shares))
                report.padding = self._padding.copy()
            except BaseException:
                self._abandon()
                raise
        self._doubt = ""
        return report.loss

    def _cut(self, batch: Sequence[Any], weights: Sequence[Any] | None) -> list[MicroBatch]:
        """The batch as micro-batches, once it is known to be sound."""
        ranks, k = len(self.ring.ids), self.options.accumulate
        if weights is not None and not self._weighed:
            raise ValueError("step(weights): they are for uneven batches, averaged over rows. Pass uneven=True alone.")
        if self.options.uneven:
            return micro_batches(batch, weights, ranks, k, self.model.check)
        x, y = self.model.check(batch, ranks)
        arguments.divides("step(batch)", "accumulate", k, x.shape[1])
        rows = x.shape[1] // k
        return [MicroBatch(x[:, at : at + rows], y[:, at : at + rows]) for at in range(0, k * rows, rows)]

    def _micro_batch(self, given: MicroBatch, total: Array | None, *, last: bool) -> Any:
        """Forward and backward on some rows of the batch; the loss of each rank [R]."""
        x, target = self._load(given.x), self._load(given.y)
        self._work.rows = given.rows
        y, saved = self._forward(x)
        self._work.unit = "loss"
        losses, dy = self.model.loss(y, target, self._work)
        if total is not None:  # each rank's mean counts as much as it weighs
            shares = given.weights * self.ring.size * self.options.accumulate / total
            dy *= shares.astype(FP32).reshape(-1, *[1] * (dy.ndim - 1))
        if self.scaler is not None:
            dy *= np.float32(self.scaler.scale)
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
        self._parameters.begin_pass(self.layers, backward=False)
        with self.ledger.during(Phase.FORWARD):
            for index, layer in enumerate(self.layers):
                params, self._work.unit = self._parameters.fetch(self.layers, index), layer.name
                x, kept = layer.forward(x, Pass(params, self._work, turn=self._turn))
                self.ledger.computed(layer.name)
                saved.append(kept)
                del params  # or its memory, once given up by the pool, would stay for a layer more
                self._parameters.release(self.layers, index)
        self._parameters.end_pass()
        return x, saved

    def _backward(self, saved: list[Any], dy: Shaped[Array, "R ..."], last: bool) -> None:
        order = self.layers[::-1]
        self._parameters.begin_pass(self.layers, backward=True)
        with self.ledger.during(Phase.BACKWARD):
            for index, layer in enumerate(order):
                params, grads = self._parameters.fetch(order, index), self._gradients.room(layer)
                self._work.unit = layer.name
                given = Pass(params, self._work, grads, layer is not order[-1], self._turn, self._gradients.reached)
                if (dx := layer.backward(saved.pop(), dy, given)) is not None:
                    dy = dx
                self.ledger.computed(layer.name)
                del given, grads, params  # as above
                self._parameters.release(order, index)
                reduced = self._gradients.written(layer, last=last)
                if self.options.in_backward:
                    self._changed = True
                    self._update.at_once(reduced, rate=self._rate())
        self._parameters.end_pass()

    def _apply(self, report: Report) -> None:
        """Agree on the norm and on whether all is finite; then update, or skip the step, which changes no state."""
        factor = None
        with self.ledger.during(Phase.HOST_OPTIMIZER if "optimizer" in self.shard.offload else Phase.OPTIMIZER):
            if self.agreement is not None:
                report.scale = 1.0 if self.scaler is None else self.scaler.scale
                agreed = self.agreement.reach(report.scale)
                factor, report.norm = agreed.factor, None if agreed.norm is None else float(agreed.norm[0])
            used = None
            if self.options.find_unused and (self.scaler is None or agreed.finite):
                used = in_use(self._scalars[0], self.ranks, self._gradients)
            self._changed = True
            self.steps += 1
            if self.scaler is not None:
                self.scaler.update(finite=agreed.finite)
                if not agreed.finite:
                    report.skipped = True
                    return
            self.updates += 1
            if self.options.in_backward:  # all has been done
                return
            self._update.apply(factor, rate=self._rate(), used=used)
            for bucket in self.buckets:
                if bucket.trainable:
                    self._parameters.update(bucket)

    def _rate(self) -> float:
        """What the schedule multiplies every learning rate by."""
        if (schedule := self.options.optimizer.schedule) is None:
            return 1.0
        return schedule.factor(self.updates - 1 if schedule.counts == "updates" else self.steps - 1)

    def _abandon(self) -> None:
        """After an error within a step: give back all that does not outlive a step, so that another can begin."""
        self._parameters.forget()
        for band, _, array in self.ranks.live():
            if band not in LASTING:
                self.ranks.free(array)
        if not self._changed and self.ledger.agrees(self.ranks[0].held()):
            self._doubt = ""

    def check_whole(self, call: str) -> None:
        """Refuse to go on after a step that has changed some of what is kept and not the rest. RuntimeError."""
        if self._doubt:
            raise RuntimeError(f"{call}: {self._doubt}. Load what was saved before it, or build the scheme anew.")

    # -- what a user reads

    def __repr__(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        done = "not stepped yet" if not self.reports else f"{steps}, loss {self.reports[-1].loss:.6f}"
        return (
            f"{self.name} on {self.ring.size} ranks: {self.model.n_params:,} parameters, "
            f"{self.options.precision}, {done}; a rank holds {self.ledger.total:,} B "
            f"({self.bytes_per_param():.4f} per parameter), {self.ledger.peak().total:,} B at the peak"
        )

    @property
    def reports(self) -> list[Report]:
        """One record per step, the last ones: the options ``keep_reports`` and ``keep_events`` say how many."""
        return self.ledger.reports

    def on_event(self, listener: Listener) -> Listener:
        """Call ``listener`` with each ``Event`` that follows: every hold, free, computation and collective."""
        arguments.instance_of("Scheme.on_event", "listener", listener, Callable)  # type: ignore[arg-type]
        self.ledger.listeners.append(listener)
        return listener

    def save(self, folder: str | Path) -> None:
        """Write the run to a folder, whole or not at all; ``zerosim.load`` takes it up, under any row and ranks."""
        public("save")(self, folder)

    def timeline(self, step: int = -1) -> Timeline:
        """What a rank held from event to event of a step, by default the last: to plot, or to save."""
        found: Timeline = public("Timeline")(self, step)
        return found

    def results(self) -> Comparison:
        """Everything recorded so far: a table, a page, a results file."""
        found: Comparison = public("Comparison").of(self)
        return found

    def flat(self, band: Band | str) -> Shaped[Array, "n"]:
        """A model state as one unpadded vector, a copy, put together from the ranks of this process.

        [n_params] where every parameter is trained; frozen ones have no state but params.
        ValueError for a state that does not exist here, or that is sharded with some shards in other processes.
        """
        if band not in self.states:
            raise ValueError(f"Scheme.flat(band): the states here are {', '.join(self.states)}; got {str(band)!r}.")
        return np.concatenate([self.whole(each, Band(band)) for each in self.buckets if Band(band) in each.states])

    def full_theta(self) -> Float[Array, "P"]:
        """The fp32 parameters, flat, unpadded, a copy: [n_params]. The master weights where there are any."""
        return np.concatenate(
            [
                self.whole(bucket, Band.MASTER if Band.MASTER in bucket.states else Band.PARAMS).astype(FP32)
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

    def whole(self, bucket: Bucket, band: Band) -> Shaped[Array, "n"]:
        """One state of one bucket, unpadded, put together from the pieces that the ranks own."""
        state, pieces = self.owned_states(bucket, band)
        count = bucket.padded // state.shape[1]
        if len(set(pieces)) < count:
            raise ValueError(
                f"Scheme.flat({band}): {self.name} shards it over {count} ranks, of which only "
                f"{list(self.ring.ids)} live in this process; read ranks[i] and put the shards together."
            )
        whole: Array = np.concatenate([state[pieces.index(piece)] for piece in range(count)])
        return whole[: bucket.size]

    def bytes_per_param(self) -> float:
        """Resident: bytes that the fullest rank holds now, model states and whatever else, per parameter."""
        return self.ledger.total / self.model.n_params

    def peak_bytes_per_param(self) -> float:
        """The peak so far of what scales with the parameters, per parameter: activations left out."""
        return self.ledger.peak_without_activations().total / self.model.n_params

    def bytes_comm_per_rank(self) -> int:
        """Bytes sent so far by the busiest rank of this process."""
        return max(self.ledger.sent())
