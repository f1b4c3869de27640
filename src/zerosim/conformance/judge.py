"""Judges a run, step by step, from what its ranks were seen to do: each step from the user's own states before it.

Owns the order in which things are compared, so that the first thing said is the cause and not a consequence, and
what is carried from one step to the next. Must not know how ranks are watched, nor how what is found is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from zerosim.bands import BF16, FP16, FP32, Array, DType
from zerosim.conformance import compare, volume
from zerosim.conformance.board import Doing, Slot
from zerosim.conformance.carried import Carried
from zerosim.conformance.collectives import POINT_TO_POINT
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.exact import exact_average
from zerosim.conformance.forward import Forward
from zerosim.conformance.intervals import unit
from zerosim.conformance.layout import Layout, Piece
from zerosim.conformance.local_gradients import Local, LocalGradients, noise
from zerosim.conformance.order import out_of_order
from zerosim.conformance.reading import Beginnings, Reader, Rows, share, stacked
from zerosim.conformance.seen import Seen
from zerosim.records.conformance import VERDICT_SCHEMA, Cause, Expected, Finding, Recipe, Verdict
from zerosim.scaling import Scaler
from zerosim.stages import Stage

OPTIMIZER_BANDS = ("exp_avg", "exp_avg_sq", "momentum", "master")
GRADS = ("handed grads", "grads")
Search = Callable[[Array], Sequence[dict[str, list[Piece]]] | None]


class _Pending(NamedTuple):
    """A step whose parameters are not known before the next forward reads them."""

    e: Evidence
    ends: list[Rows]
    skipped: bool


class Judge:
    """Holds N ranks' steps to the row that they say they follow. ``dtype`` is that of the module's parameters.

    ``expected`` gives the schedule's numbers when the first batch is there. ``search`` asks the ranks for tensors that
    look like an optimizer's state after the first step, given the gradient that it was made with.
    """

    def __init__(
        self, layout: Layout, row: Stage, ranks: int, recipe: Recipe, dtype: DType, local: LocalGradients,
        expected: Callable[[Any, Any], Expected], search: Search | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.row, self.ranks, self.recipe = layout, row.on(ranks, recipe.node), ranks, recipe
        self._asked_row = row
        self.name, self.findings, self.notes = row.name, list[Finding](), list[str]()
        self.steps = 0
        self.compared: dict[str, int] = {}
        self._reader = Reader(layout, dtype)
        self._beginnings = Beginnings(self._reader)
        self._local, self._expect, self._search = local, expected, search
        self._forward = Forward(local, layout)
        self._scaler = Scaler(recipe.loss_scale) if recipe.loss_scale is not None else None
        self._volume: volume.Volume | None = None
        self._carried = Carried(self._reader)
        self._past: Evidence | None = None
        self._pending: _Pending | None = None
        self._owner = np.full(layout.size, -1)
        self._stopped = False

    def step(self, seen: Sequence[Seen]) -> list[Finding]:
        """Judge one step of all ranks; what is newly found to be wrong."""
        already, self.steps = len(self.findings), seen[0].step
        share(seen, self.layout)
        with np.errstate(all="ignore"):  # a user's numbers may be anything
            if self._in_order(seen) and not self._stopped:
                self._values(seen)
        if self._volume is None:
            self._volume = volume.Volume(
                self._expect(seen[0].x, seen[0].y), self.layout, self._asked_row, self.recipe, self.ranks
            )
        if (found := self._volume.step(seen)) is not None and not any(f.cause is Cause.VOLUME for f in self.findings):
            self.findings.append(found)
        return self.findings[already:]

    def _stop(self, finding: Finding | None) -> bool:
        """Whether this is a finding, after which values are compared no more: what follows follows from it."""
        if finding is not None:
            self.findings.append(finding)
            self._stopped = True
        return finding is not None

    def _in_order(self, seen: Sequence[Seen]) -> bool:
        slots = []
        for each in seen:
            asked = [(one.group, str(one)) for one in each.asked if one.kind not in POINT_TO_POINT]
            slots.append(Slot(each.rank, each.step, Doing.COMPARING, asked, 0, 0, ""))
        found = out_of_order(slots)
        if found is not None and not any(f.cause is Cause.ORDER for f in self.findings):
            self._stop(Finding(found.step, found.rank, "collectives", Cause.ORDER, found.text))
        return found is None

    # -- a step's values

    def _values(self, seen: Sequence[Seen]) -> None:
        theta = self._begin(seen)
        if theta is None or not any(each.rows for each in seen):
            return
        local = [self._one(each, values, self._scale(seen)) for each, values in zip(seen, theta, strict=True)]
        if self._stop(self._forward.judge(seen, theta, local, self._past, self._redo)):
            return
        e = self._evidence(seen, theta, local)
        ends = self._reader.params(seen)
        if self._skipped(e, ends):
            self._past, self._beginnings.after = replace(e, past=None), ends
            return
        if self._carried.updates == 0 and not any(each.bands.get("exp_avg") for each in seen):
            self._look_for_state(e)
        right = self._gradients(e)
        if self._stopped:
            return
        self._beginnings.after = ends
        if stacked(ends)[1].any(0).all():
            self._update(e, ends, right)
        else:
            self._pending = _Pending(e, ends, skipped=False)
            self._carried.after(e)
        self._past = replace(e, past=None)

    def _begin(self, seen: Sequence[Seen]) -> list[Array] | None:
        """Each rank's whole parameters before the step, in their own dtype; None if this step cannot be judged."""
        own = self._beginnings.own(seen)
        if self._pending is not None:
            self._finish(seen)
        self._find_owners(seen)
        if self._stopped or (self._past is None and self._stop(self._beginnings.other_start(seen, own, self._owner))):
            return None
        last = self._past.theta[0] if self._past is not None else None
        if self._stop(self._beginnings.stale(seen, own, self._owner, last)):
            return None
        theta, known = self._beginnings.whole(seen, own)
        if not known.all():
            name, _ = self.layout.at(int(np.flatnonzero(~known)[0]))
            self.notes.append(
                f"values not compared: {name} is nowhere whole, nor as a shard. Hand it over: check.band('params', "
                f"shard, offset, of=module)."
            )
            self._stopped = True
            return None
        return theta

    def _one(self, seen: Seen, theta: Array, scale: float) -> Local:
        if seen.rows == 0:
            nothing = np.zeros(self.layout.size)
            return Local(0.0, 0.0, nothing, nothing, [nothing] * self.recipe.accumulate, [], True, 0.0)
        return self._local.run(
            theta, seen.buffers, seen.x, seen.y, micro=self.recipe.accumulate, scale=scale, training=seen.training
        )

    def _redo(self, seen: Seen, theta: Array) -> Local:
        return self._one(seen, theta, 1.0)

    def _scale(self, seen: Sequence[Seen]) -> float:
        return next((each.loss_scale for each in seen if each.loss_scale), None) or (
            self._scaler.scale if self._scaler is not None else 1.0
        )

    def _factor(self) -> float:
        """What the schedule makes of the learning rate in this step."""
        schedule = self.recipe.schedule
        if schedule is None:
            return 1.0
        return schedule.factor(self._carried.updates if schedule.counts == "updates" else self.steps - 1)

    def _evidence(self, seen: Sequence[Seen], theta: list[Array], local: list[Local]) -> Evidence:
        total = sum(each.rows for each in seen)
        by_rows = self.recipe.average == "rows"
        return Evidence(
            step=seen[0].step, row=self.row, layout=self.layout, recipe=self.recipe, seen=seen, theta=theta,
            master=self._carried.begin(theta[0]), local=local,
            weights=[self.ranks * r.rows / total if by_rows else 1.0 for r in seen],
            noise=noise(self.layout, local), wire=_wire(seen), state=self._carried.state, updates=self._carried.updates,
            scale=self._scale(seen), lr=seen[0].lr, factor=self._factor(), owner=self._owner, past=self._past,
            history=tuple(self._carried.history),
            exact=exact_average(self.layout, local, self.recipe, self._asked_row) if self.recipe.exact else None,
        )  # fmt: skip

    def _find_owners(self, seen: Sequence[Seen]) -> None:
        """Which rank updates each element: by its optimizer's state, its shard, or what it gives to the others."""
        if not self.row.optimizer:
            return
        for each in seen:
            spans = [
                [(piece.start, piece.start + len(piece.values)) for piece in pieces]
                for pieces in (*(each.bands.get(band, []) for band in OPTIMIZER_BANDS), each.params)
            ]
            spans = [some for some in spans if 0 < sum(stop - start for start, stop in some) < self.layout.size]
            for start, stop in (spans or [each.owned])[0]:
                part = self._owner[start:stop]
                part[part < 0] = each.rank

    def _look_for_state(self, e: Evidence) -> None:
        """Have the ranks look among their tensors for the optimizer's state, by what it must be proportional to."""
        found = self._search(e.clipped.middle) if self._search is not None else None
        for each, bands in zip(e.seen, found or (), strict=False):
            for band, pieces in bands.items():
                each.bands.setdefault(band, pieces)
        self._find_owners(e.seen)

    def _skipped(self, e: Evidence, ends: list[Rows]) -> bool:
        """Whether the step had to be skipped for a number that is not finite; a rank that did not is found."""
        overflow, wrong = e.overflow(), compare.not_skipped(e, ends)
        finite = overflow == "no" or (overflow == "maybe" and wrong is not None)
        if self._scaler is not None:
            self._scaler.update(finite=finite)
        if finite:
            return False
        if not self._stop(wrong) and not stacked(ends)[1].any(0).all():
            self._pending = _Pending(e, ends, skipped=True)
        return True

    def _gradients(self, e: Evidence) -> bool:
        """Compare the gradients that were seen; whether all of them were, and are right."""
        everywhere = np.zeros(self.layout.size, bool)
        for band in GRADS:
            rows = self._reader.band(e.seen, band)
            if rows[1].any():
                self._count("gradients", rows)
                if self._stop(compare.gradients(e, band, rows)):
                    return False
                everywhere |= rows[1].any(0)
        return bool(everywhere[self.layout.trainable()].all())

    def _update(self, e: Evidence, ends: list[Rows], right: bool) -> None:
        master, state = e.advance(np.arange(self.layout.size), e.clipped)
        seen = {band: self._reader.band(e.seen, band) for band in state}
        for band in seen:
            self._count("optimizer state", seen[band])
        rows = stacked(ends)
        self._count("parameters", rows)
        states = compare.states(e, state, seen, gradients_right=right)
        moments = [rows[1] for band, rows in seen.items() if band in ("exp_avg", "momentum")]
        right = right or (states is None and any(self._everyones(known) for known in moments))
        params = compare.parameters(e, master, rows, gradients_right=right)
        # A state that follows from a wrong gradient says more than what became of the parameters, and else less.
        if states is not None and (params is None or states.cause is not Cause.STATE):
            self._stop(states)
        elif not self._stop(params):
            self._carried.after(e, (master, state), rows)

    def _everyones(self, known: Array) -> bool:
        """Whether a state was seen of every trained element, on its owner: if it is right, so was the gradient."""
        owned = np.arange(self.ranks)[:, None] == self._owner
        there = (known & (owned | (self._owner < 0))).any(0)
        return bool(there[self.layout.trainable()].all())

    def _finish(self, seen: Sequence[Seen] | None) -> None:
        """Judge the step that could not be judged before its parameters were seen."""
        assert self._pending is not None
        (e, ends, skipped), self._pending = self._pending, None
        for each in seen or ():
            values, known = ends[each.rank]
            read, was_read = self._reader.one(each.read, values.dtype)
            ends[each.rank] = np.where(known, values, read).astype(values.dtype), known | was_read
        if skipped:
            self._stop(compare.not_skipped(e, ends))
        else:
            self._update(e, ends, False)

    def _count(self, what: str, rows: Rows) -> None:
        if count := int(rows[1].sum()):
            self.compared[what] = self.compared.get(what, 0) + count

    def verdict(self) -> Verdict:
        """All that was found."""
        if self._pending is not None and not self._stopped:
            if stacked(self._pending.ends)[1].any():
                self._finish(None)
            else:
                self.notes.append(
                    f"the update of step {self.steps} was not compared: no forward has read it. Hand over the shards "
                    f"with check.band('params', ...), or run one step more."
                )
        held = []
        if self.compared and not any(f.cause is not Cause.VOLUME for f in self.findings):
            counts = ", ".join(f"{count:,} of {what}" for what, count in self.compared.items())
            judged = self.steps - (self._pending is not None)
            held.append(f"trained: {judged} steps as they must be; elements compared: {counts}")
        missing = [what for what in ("gradients", "optimizer state") if what not in self.compared]
        if missing and not self.findings:
            self.notes.append(f"not seen: {' and '.join(missing)} (check.band hands them over)")
        if self._volume is not None:
            held += self._volume.held
            self.notes += self._volume.notes
        return Verdict(
            schema=VERDICT_SCHEMA, row=self.name, ranks=self.ranks, steps=self.steps, findings=self.findings,
            held=held, notes=list(dict.fromkeys(self.notes)),
        )  # fmt: skip


def _wire(seen: Sequence[Seen]) -> DType:
    """The coarsest dtype that anything of floating point was handed to a collective in."""
    coarse = {"bfloat16": BF16, "float16": FP16}
    found = {coarse[asked.dtype] for each in seen for asked in each.asked if asked.dtype in coarse}
    return max(found, key=unit, default=FP32)
