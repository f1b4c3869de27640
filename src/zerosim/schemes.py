"""The four schemes and the one training step that reads them.

Owns the schedule: what is gathered, computed, released, reduced and updated, and when. It is
written once, over arrays whose first axis is the ranks of this process, and never asks in
which world it runs: the ring that it is handed decides that.

A scheme is a row of a table (``Stage``): which of the optimizer state, the gradients and the
parameters the ranks share out (ZeRO: Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from zerosim import preflight
from zerosim.bands import FP32, MODEL_STATES, PRECISIONS, WIRES, Array, Band, Precision
from zerosim.buckets import Bucket, build
from zerosim.casts import convert
from zerosim.comm import Comm, LocalRing, Ring
from zerosim.measure import Ledger, Phase, Report
from zerosim.model import MLP
from zerosim.optimizer import Adam
from zerosim.ranks import Ranks, Workspace


@dataclass(frozen=True)
class Stage:
    """A row of the table: its name and what is sharded. Calling it starts a training run, a ``Scheme``."""

    name: str
    optimizer: bool = False
    grads: bool = False
    params: bool = False

    def __post_init__(self) -> None:
        if (self.grads and not self.optimizer) or (self.params and not self.grads):
            raise ValueError(
                f"Stage {self.name!r}: a rank that lacks the gradients of a parameter cannot update it, and one "
                f"that lacks the parameter has no use for its full gradients; shard optimizer, grads, params in "
                f"this order."
            )

    def __call__(self, model: MLP, ranks: int, **options: Any) -> Scheme:
        return Scheme(self, model, ranks, **options)

    def shards(self, band: Band) -> bool:
        """Whether a rank holds only its chunk of this model state."""
        if band is Band.PARAMS:
            return self.params
        return self.grads if band is Band.GRADS else self.optimizer

    def footprint(self, sizes: Sequence[int], ranks: int, precision: Precision) -> int:
        """Bytes that one of ``ranks`` ranks will need for buckets of these sizes, activations and ring left out.

        For deciding whether to start at all: the model states, and the largest bucket's whole
        parameters and gradients where they exist only for a while.
        """
        dtypes = precision.dtypes(wire=FP32)
        chunks = [-(-size // ranks) for size in sizes]
        states = sum(
            dtypes[band].itemsize * chunk * (1 if self.shards(band) else ranks)
            for chunk in chunks
            for band in precision.states
        )
        return states + (self.params + self.grads) * precision.working.itemsize * max(chunks) * ranks


DP = Stage("data parallel")
ZeRO1 = Stage("ZeRO-1", optimizer=True)
ZeRO2 = Stage("ZeRO-2", optimizer=True, grads=True)
ZeRO3 = Stage("ZeRO-3", optimizer=True, grads=True, params=True)
SCHEMES = (DP, ZeRO1, ZeRO2, ZeRO3)


def _check_memory(stage: Stage, sizes: Sequence[int], ranks: int, precision: Precision) -> None:
    """Refuse N ranks in this process that the machine has no memory for, and say what would fit."""
    there = [1 << power for power in reversed(range((ranks - 1).bit_length()))]
    others = [(other, ranks) for other in SCHEMES] + [(stage, fewer) for fewer in there]
    preflight.check_memory(
        f"{stage.name} on {ranks} ranks",
        ranks * stage.footprint(sizes, ranks, precision),
        {f"{other.name} on {n}": n * other.footprint(sizes, n, precision) for other, n in others},
    )


class Scheme:
    """A model in training on N ranks under one stage.

    Options, all by keyword:

    * ``precision``: ``"mixed"`` (fp16 working copy, fp32 master and moments), ``"bf16"``, ``"fp32"``.
    * ``wire``: the dtype that blocks travel in, ``"fp32"``, ``"fp16"`` or ``"bf16"``.
    * ``gather``: ZeRO-3 gathers ``"layer"`` by layer and releases at once, or the whole ``"model"``.
    * ``bucket``: one flat buffer per ``"layer"``, or one for the ``"model"``.
    * ``optimizer``: an ``Adam``.
    * ``capacity``: bytes of memory of one rank's card; ``OutOfMemory`` is raised by the hold that would pass it.
    * ``ring``: the world; all N ranks in this process unless told otherwise.
    * ``collectives``: what runs over it, a ``Comm`` or something with its face.
    """

    def __init__(
        self,
        stage: Stage,
        model: MLP,
        ranks: int,
        *,
        precision: str = "mixed",
        wire: str = "fp32",
        gather: str = "layer",
        bucket: str = "layer",
        optimizer: Adam | None = None,
        capacity: int | None = None,
        ring: Ring | None = None,
        collectives: type[Comm] = Comm,
    ) -> None:
        preflight.check_options(ranks, precision=precision, wire=wire, gather=gather, bucket=bucket, capacity=capacity)
        preflight.instance_of("Scheme", "model", model, MLP)
        preflight.instance_of("Scheme", "optimizer", optimizer, Adam | None)
        ranks = int(ranks)  # NumPy's integers overflow
        self.stage, self.name, self.model = stage, stage.name, model
        self.precision, self.gather = PRECISIONS[precision], gather
        self.optimizer = optimizer or Adam()
        layers = model.layers if bucket == "layer" else (model,)
        if ring is None:
            _check_memory(stage, [layer.size for layer in layers], ranks, self.precision)
        self.ring = ring or LocalRing(ranks)
        if self.ring.size != ranks:
            raise ValueError(
                f"Scheme(ring): a ring of {self.ring.size} ranks cannot carry {ranks}; pass one of that size."
            )
        # With one rank there is nothing to share out: every stage is data parallel, and nothing is sent.
        self.shard = stage if ranks > 1 else DP
        self.ledger = Ledger(len(self.ring.ids), apart=[Band.ACTIVATIONS])
        self.ranks = Ranks(self.ring.ids, self.precision.dtypes(WIRES[wire]), self.ledger, self.ring.empty, capacity)
        self.comm = collectives(self.ring, WIRES[wire], Workspace(self.ranks, Band.BLOCKS), self.ledger)
        self._work = Workspace(self.ranks, Band.ACTIVATIONS)
        self._gathered: dict[str, Array] = {}
        self.updates = 0  # Adam's step count
        self.buckets = build(layers, model.initial(), ranks, self.precision, self.shard.shards, self.ranks)

    # -- the step

    def step(self, batch: Sequence[tuple[Array, Array]]) -> float:
        """Train on one (x [B, I], y [B, O]) fp32 pair per rank of this process; return the mean loss before it.

        Raises ValueError or TypeError, before anything changes, for a batch that does not
        fit; OutOfMemory if a card's capacity would be passed, with the report up to there.
        """
        given = preflight.check_batch(batch, len(self.ring.ids), self.model.widths[0], self.model.widths[-1])
        with self.ledger.step() as report:
            try:
                x, target = (self._load(array) for array in given)
                with self._whole_model(), self.ledger.during(Phase.FORWARD):
                    y, saved = self._forward(x)
                losses, dy = self.model.loss(y, target, self._work)
                with self._whole_model(), self.ledger.during(Phase.BACKWARD):
                    self._backward(saved, dy)
                self._work.free(x)
                with self.ledger.during(Phase.OPTIMIZER):
                    self._update()
                report.loss = float(np.mean(losses))
                report.padding = np.sum([bucket.padding(self.ring.ids) for bucket in self.buckets], axis=0).tolist()
                return report.loss
            except BaseException:
                self._abandon()
                raise

    def _load(self, given: Float[Array, "R B I"]) -> Float[Array, "R B I"]:
        self._work.unit = "batch"
        held = self._work.hold(*given.shape[1:])
        held[...] = given
        return held

    def _forward(self, x: Float[Array, "R B I"]) -> tuple[Float[Array, "R B O"], list[Any]]:
        saved = []
        for bucket in self.buckets:
            with self._params(bucket) as params:
                self._work.unit = bucket.layer.name
                x, kept = bucket.layer.forward(params, x, self._work)
                self.ledger.computed(bucket.layer.name)
                saved.append(kept)
        return x, saved

    def _backward(self, saved: list[Any], dy: Float[Array, "R B O"]) -> None:
        for index in reversed(range(len(self.buckets))):
            bucket = self.buckets[index]
            with self._params(bucket) as params:
                grads = self._full_grads(bucket)
                grads[:, bucket.layer.size :] = 0
                self._work.unit = bucket.layer.name
                dx = bucket.layer.backward(params, saved[index], dy, grads, self._work, need_dx=index > 0)
                self.ledger.computed(bucket.layer.name)
                if dx is not None:
                    dy = dx
            self._reduce(bucket, grads)

    def _update(self) -> None:
        """Adam on what each rank owns; then, where the parameters are whole but their owners many, a gather."""
        self.updates += 1
        for bucket in self.buckets:
            params, grads = bucket.states[Band.PARAMS], bucket.states[Band.GRADS]
            if self.shard.optimizer:
                params = params if self.shard.params else self.comm.own(params)
                grads = grads if self.shard.grads else self.comm.own(grads)
            master = bucket.states.get(Band.MASTER, params)
            moments = bucket.states[Band.EXP_AVG], bucket.states[Band.EXP_AVG_SQ]
            self.optimizer.update(master, grads, *moments, self.updates, self.ledger.flops)
            if master is not params:
                convert(master, params)
            self.ledger.computed(bucket.layer.name)
        if self.shard.optimizer and not self.shard.params:
            for bucket in self.buckets:
                self._all_gather(bucket, bucket.states[Band.PARAMS], None)

    # -- what the stage decides

    def _full_grads(self, bucket: Bucket) -> Array:
        """Where backward writes: the gradients themselves, or room for the layer until they are reduced."""
        if self.shard.grads:
            return self.ranks.hold(Band.UNREDUCED, (bucket.padded,), bucket.layer.name)
        return bucket.states[Band.GRADS]

    def _reduce(self, bucket: Bucket, grads: Array) -> None:
        """Average the gradients over the ranks: everywhere, or only where they will be needed."""
        options: dict[str, Any] = {"scale": 1 / self.ring.size, "band": Band.GRADS, "unit": bucket.layer.name}
        if not self.shard.optimizer:
            if self.ring.size > 1:
                self.comm.all_reduce(grads, bucket.layer.size, **options)
            return
        own = bucket.states[Band.GRADS] if self.shard.grads else self.comm.own(grads)
        self.comm.reduce_scatter(grads, own, bucket.layer.size, **options)
        if self.shard.grads:
            self.ranks.free(grads)

    @contextmanager
    def _params(self, bucket: Bucket) -> Iterator[Array]:
        """A layer's full parameters [R, padded], gathered for as long as the block lasts if they are sharded."""
        if not self.shard.params:
            yield bucket.states[Band.PARAMS]
        elif bucket.layer.name in self._gathered:
            yield self._gathered[bucket.layer.name]
        else:
            full = self._gather(bucket)
            yield full
            self.ranks.free(full)

    @contextmanager
    def _whole_model(self) -> Iterator[None]:
        """With gather="model", everything is gathered at once and released together, as a toy would do it."""
        if self.shard.params and self.gather == "model":
            self._gathered = {bucket.layer.name: self._gather(bucket) for bucket in self.buckets}
        yield
        for full in self._gathered.values():
            self.ranks.free(full)
        self._gathered = {}

    def _gather(self, bucket: Bucket) -> Array:
        full = self.ranks.hold(Band.GATHERED, (bucket.padded,), bucket.layer.name)
        self._all_gather(bucket, full, bucket.states[Band.PARAMS])
        return full

    def _all_gather(self, bucket: Bucket, full: Array, own: Array | None) -> None:
        self.comm.all_gather(full, bucket.layer.size, own, band=Band.PARAMS, unit=bucket.layer.name)

    def _abandon(self) -> None:
        """After an error within a step: give back all that does not outlive a step."""
        self._gathered = {}
        for band, _, array in list(self.ranks.live()):
            if band not in MODEL_STATES:
                self.ranks.free(array)

    # -- what a user reads

    @property
    def reports(self) -> list[Report]:
        """One record per step."""
        return self.ledger.reports

    def flat(self, band: Band) -> Float[Array, "P"]:
        """A model state as one unpadded vector [n_params], a copy, put together from the ranks of this process.

        ValueError if the state is sharded and some of its shards live in other processes.
        """
        parts = []
        for bucket in self.buckets:
            state = bucket.states[band]
            if band is Band.GRADS and self.shard.optimizer and not self.shard.grads:
                state = self.comm.own(state)  # elsewhere in its full gradients a rank has its own, not the average
            if state.shape[1] == bucket.padded:
                whole = state[0]
            elif len(self.ring.ids) == self.ring.size:
                whole = state.reshape(-1)
            else:
                raise ValueError(
                    f"Scheme.flat({band}): {self.name} shards it over {self.ring.size} ranks, of which only "
                    f"{list(self.ring.ids)} live in this process; read ranks[i] and put the shards together."
                )
            parts.append(whole[: bucket.layer.size])
        return np.concatenate(parts)

    def full_theta(self) -> Float[Array, "P"]:
        """The fp32 parameters, flat, unpadded, a copy: [n_params]. The master weights where there are any."""
        return self.flat(Band.MASTER if self.precision.master else Band.PARAMS)

    def bytes_per_param(self) -> float:
        """Resident: bytes that the fullest rank holds now, model states and whatever else, per parameter."""
        return self.ledger.total / self.model.n_params

    def peak_bytes_per_param(self) -> float:
        """The highest instant so far of what scales with the parameters, per parameter: activations left out."""
        return self.ledger.peak_without_activations().total / self.model.n_params

    def bytes_comm_per_rank(self) -> int:
        """Bytes sent so far by the busiest rank of this process."""
        return max(self.ledger.sent())
