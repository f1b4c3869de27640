"""One step of one row on N ranks, run on shapes.

Owns the way from a question to a run: the options that a row runs with, and which runs need not be made. A run is kept
and answers every later question that it can. Must not know how questions are searched or shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerosim.bands import FP32, MODEL_STATES, Band, DType
from zerosim.comm import Comm
from zerosim.options import Options
from zerosim.planner import recipes
from zerosim.planner.conventions import Convention, convention
from zerosim.planner.model_source import ModelSource, Prepared, Workload
from zerosim.planner.question import node_size
from zerosim.planner.step_run import StepRun, plain, step_run
from zerosim.planner.unsent import unsent
from zerosim.ranks import OutOfMemory
from zerosim.records.plan import Peak, Shortage
from zerosim.records.question import Question
from zerosim.schemes import Scheme, Stage
from zerosim.worlds.dry import DryRing


class Runner:
    """Runs a question's rows; a prepared model and a run that is there are used again."""

    def __init__(self, source: ModelSource, question: Question) -> None:
        self.question = question
        self.convention: Convention = convention(question.convention)
        self.convention.check(question)
        self.source = self.convention.source(source, question.attention)
        self._prepared: dict[tuple[Workload, int], Prepared] = {}
        self._runs: dict[tuple[Stage, int, int, bool], StepRun] = {}
        self._alone: dict[Stage, int] = {}  # what one card would have of a row's states

    def precision(self, row: Stage) -> str:
        """The name of the recipe that a row runs with: what was asked for, or the convention's."""
        return self.convention.precision_of(row, self.question.precision)

    @property
    def tokens(self) -> int | None:
        """Of a micro-batch; None where rows have no length."""
        sequence = self.question.sequence or self.source.sequence
        return None if sequence is None else self.question.micro_batch * sequence

    def node(self, ranks: int) -> int:
        """How many of so many ranks are on a node."""
        return min(node_size(self.question), ranks)

    def kept(self, row: Stage) -> int:
        """Bytes of a trained parameter between steps by the recipe."""
        options = self.options(row)
        dtypes = options.recipe.dtypes(FP32)
        return sum(dtypes[band].itemsize for band in options.states if band in MODEL_STATES)

    def options(self, row: Stage, ranks: int = 1, micro_batch: int | None = None) -> Options:
        """What ``row`` runs with: the convention's options, and over them what was asked for."""
        question = self.question
        asked: dict[str, Any] = {
            name: value
            for name in ("wire", "wire_params", "padding", "all_reduce", "sync", "prefetch")
            if (value := getattr(question, name)) is not None
        }
        if question.wire is not None:  # one dtype was asked for, for all that is sent
            asked.setdefault("wire_params", None)
        if question.bucket is not None and not self.convention.of(row).bucket:
            asked["bucket"] = question.bucket
        base = self.convention.options(row, question.precision)
        chosen = recipes.options(
            base, self.precision(row), question.optimizer,
            in_backward=question.optimizer_in_backward, foreach=self.convention.foreach and not question.fused,
            set_to_none=self.convention.set_to_none and question.set_to_none and not self._in_buckets(row, ranks),
            settings=self.convention.settled(question, self.source),
        )  # fmt: skip
        node = self.node(ranks)
        if row.two_axes or row.reshard_after_forward == "group" or ranks % node == 0:
            asked["node"] = node
        return replace(chosen, **asked, accumulate=question.micro_batches(ranks, micro_batch))

    def _beside(self, row: Stage, scheme: Scheme) -> dict[Band, int]:
        """What the convention holds beside the states, elements by band; there a bucket's size is its own."""
        trained = sum(each.size for each in scheme.buckets if each.trainable)
        return self.convention.beside(row, self.convention.bucket(row, self.question, self.source), trained=trained)

    def _in_buckets(self, row: Stage, ranks: int) -> bool:
        """Whether gradients are views of the buckets, and stay as these do."""
        return ranks > 1 and self.question.bucket_view and self.convention.of(row).bucket == "all trained"

    def working(self, row: Stage) -> DType:
        """The dtype that forward and backward read parameters in."""
        return recipes.computed_in(self.precision(row))

    def prepare(self, row: Stage, micro_batch: int | None = None, ranks: int = 1) -> Prepared:
        """The model and a batch of the question's micro-batches, or of micro-batches of another size."""
        rows = micro_batch or self.question.micro_batch
        question = self.question
        workload = Workload(
            rows, question.sequence, question.checkpoint, self.working(row), tried=rows != question.micro_batch,
            loss=question.loss, kv=question.kv, copies=self.precision(row) == "autocast", frees=self.convention.frees,
        )  # fmt: skip
        times = question.micro_batches(ranks, micro_batch)
        key = workload, times
        if key not in self._prepared:
            self._prepared[key] = self.source.prepare(workload, rows * times)
        return self._prepared[key]

    def start(
        self, row: Stage, ranks: int, capacity: int | None = None, micro_batch: int | None = None, *, sends: bool = True
    ) -> Scheme:
        """A scheme with its model states held, and what the convention holds beside them. OutOfMemory if too much.

        Where it does not send, its collectives hold what they hold, and make no hop.
        """
        prepared = self.prepare(row, micro_batch, ranks)
        memory = self.question.host_memory
        host_capacity = None if capacity is None or memory is None else memory // self.node(ranks)
        options = replace(
            self.options(row, ranks, micro_batch), capacity=capacity, host_capacity=host_capacity, **prepared.options
        )
        ring = DryRing(ranks, scattered=self.question.placement == "round robin")
        made = self.convention.of(row).scheme or self.convention.scheme
        collectives = self.convention.collectives or Comm
        scheme = made(
            row, prepared.model, ranks, options, ring=ring, collectives=collectives if sends else unsent(collectives)
        )
        if ranks > 1 and not self._in_buckets(row, ranks):  # with one nothing is reduced, and no bucket is there
            for band, elements in self._beside(row, scheme).items():
                scheme.ranks.hold(band, (elements,), "bucket")
        moments = scheme.ledger.held.get(Band.EXP_AVG, 0)  # of one byte each, where there are scales
        if elements := recipes.scales(self.question.optimizer, moments):
            scheme.ranks.hold(Band.SCALES, (elements,), "optimizer")
        return scheme

    def run(self, row: Stage, ranks: int, micro_batch: int | None = None) -> StepRun:
        """A step that no card limits."""
        found = self._run(row, ranks, None, micro_batch, sends=True)
        assert isinstance(found, StepRun), "only a card's capacity makes a run end"
        return found

    def peak(self, row: Stage, ranks: int, most: int | None = None) -> Peak | None:
        """The peak of a step that no card limits, or None if it is above ``most`` bytes."""
        if self.question.host_memory is not None:  # a limit would be the host's as well
            most = None
        if most is not None and self._too_few(row, ranks, most):
            return None
        found = self._kept(row, ranks) or self._run(row, ranks, most)
        return found.peak if isinstance(found, StepRun) and (most is None or found.peak.total <= most) else None

    def shortage(self, row: Stage, ranks: int, capacity: int) -> Shortage | None:
        """The allocation that a card of ``capacity`` bytes has no room for, or None where it has room for the step."""
        found = self._run(row, ranks, capacity)
        return found if isinstance(found, Shortage) else None

    def fits(self, row: Stage, ranks: int, capacity: int, micro_batch: int | None = None) -> bool:
        """Whether a card has room for a step."""
        return isinstance(self._run(row, ranks, capacity, micro_batch), StepRun)

    def _run(
        self, row: Stage, ranks: int, capacity: int | None, micro_batch: int | None = None, *, sends: bool = False
    ) -> StepRun | Shortage:
        """A step, new or one that was run before: what a card has room for, it runs as one without a limit does.

        Where only memory is asked for, nothing is sent.
        """
        known = self._kept(row, ranks, micro_batch, sends=sends)
        if known is not None and (capacity is None or (known.peak.total <= capacity and not known.host_short)):
            return known
        try:
            scheme = self.start(row, ranks, capacity, micro_batch, sends=sends)
            scheme.step(self.prepare(row, micro_batch, ranks).batch)
        except OutOfMemory as error:
            return Shortage(band=str(error.band), unit=error.unit, asked=error.asked, held=plain(error.held))
        self._runs[row, ranks, micro_batch or self.question.micro_batch, sends] = found = self.ran(scheme)
        return found

    def _kept(self, row: Stage, ranks: int, micro_batch: int | None = None, *, sends: bool = False) -> StepRun | None:
        """A step that was run before, with all that it sent if that is asked for."""
        asked = row, ranks, micro_batch or self.question.micro_batch
        return self._runs.get((*asked, True)) or (None if sends else self._runs.get((*asked, False)))

    def ran(self, scheme: Scheme) -> StepRun:
        """What a scheme's last step says."""
        return step_run(scheme, self.question.host_memory, self.node(scheme.ring.size))

    def holds_states(self, row: Stage, ranks: int, capacity: int) -> bool:
        """Whether a card has room for the model states, with nothing trained."""
        if self._too_few(row, ranks, capacity):
            return False
        try:
            self.start(row, ranks, capacity, sends=False)
        except OutOfMemory:
            return False
        return True

    def _too_few(self, row: Stage, ranks: int, capacity: int) -> bool:
        """Whether so many cards hold less together than the states of one alone: shards add up to no less than that."""
        if row not in self._alone:
            self._alone[row] = self.start(row, 1, sends=False).ledger.total
        return ranks * capacity < self._alone[row]
