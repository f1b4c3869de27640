"""Judges a run, step by step, from what its ranks were seen to do: each step from the user's own states before it.

Owns the order in which things are compared, so that the first thing said is the cause and not a consequence, and
what is carried from one step to the next. Must not know how ranks are watched, nor how what is found is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zerosim.bands import BF16, FP16, FP32, Array, DType
from zerosim.conformance import diagnose, volume
from zerosim.conformance.board import Doing, Slot, out_of_order
from zerosim.conformance.collectives import POINT_TO_POINT
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.exact import exact_average
from zerosim.conformance.forward import Forward
from zerosim.conformance.intervals import Interval, State, before_rounding, point, rounded, unit
from zerosim.conformance.layout import Layout, Piece, assemble
from zerosim.conformance.local_gradients import Local, LocalGradients, noise
from zerosim.conformance.scaler import Scaler
from zerosim.conformance.seen import Seen
from zerosim.records.conformance import EVERY, VERDICT_SCHEMA, Cause, Expected, Finding, Recipe, Verdict
from zerosim.stages import Stage

OPTIMIZER_BANDS = ("exp_avg", "exp_avg_sq", "momentum", "master")
GRADS = ("handed grads", "grads")


class Judge:
    """Holds N ranks' steps to the row that they say they follow. ``dtype`` is that of the module's parameters.

    ``expected`` gives the schedule's numbers when the first batch is there. ``beat`` is called now and then, so
    that whoever waits knows that this goes on.
    """

    def __init__(
        self, layout: Layout, row: Stage, ranks: int, recipe: Recipe, dtype: DType, local: LocalGradients,
        expected: Callable[[Any, Any], Expected], beat: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.layout, self.row, self.ranks, self.recipe = layout, row.on(ranks), ranks, recipe
        self.name, self.dtype = row.name, dtype
        self.findings: list[Finding] = []
        self.steps = self.judged = 0
        self.compared: dict[str, int] = {}
        self._local, self._expect, self._beat = local, expected, beat
        self._forward = Forward(local, layout)
        self._scaler = Scaler(recipe.loss_scale, dynamic=recipe.dynamic)
        self._volume: volume.Volume | None = None
        self._after: list[tuple[Array, Array]] = []  # of each rank, the parameters after the last step, and which
        self._state: State = {}
        self._master: Interval | None = None
        self._updates = 0
        self._past: Evidence | None = None
        self._pending: tuple[Evidence, list[tuple[Array, Array]]] | None = None
        self._owner = np.full(layout.size, -1)
        self._stopped = False
        self.notes: list[str] = []

    # -- a step

    def step(self, seen: Sequence[Seen]) -> list[Finding]:
        """Judge one step of all ranks; what is newly found to be wrong."""
        already, self.steps = len(self.findings), seen[0].step
        _share(seen, self.layout)
        if not self._out_of_order(seen) and not self._stopped:
            self._values(seen)
        if self._volume is None:
            self._volume = volume.Volume(self._expect(seen[0].x, seen[0].y), self.layout, self.name, self.ranks)
        if (found := self._volume.step(seen)) is not None and not any(f.cause is Cause.VOLUME for f in self.findings):
            self.findings.append(found)
        return self.findings[already:]

    def _found(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._stopped = True

    def _out_of_order(self, seen: Sequence[Seen]) -> bool:
        slots = [
            Slot(each.rank, each.step, Doing.COMPARING,
                 [(asked.group, str(asked)) for asked in each.asked if asked.kind not in POINT_TO_POINT], 0, 0, "")
            for each in seen
        ]  # fmt: skip
        found = out_of_order(slots)
        if found is not None and not any(f.cause is Cause.ORDER for f in self.findings):
            self._found(Finding(found.step, found.rank, "collectives", Cause.ORDER, found.text))
        return found is not None

    def _values(self, seen: Sequence[Seen]) -> None:
        theta = self._before(seen)
        if self._stopped or theta is None:
            return
        if any(each.rows == 0 for each in seen) and all(each.rows == 0 for each in seen):
            return
        local = self._locals(seen, theta)
        if (wrong := self._forward.judge(seen, theta, local, self._past, self._redo)) is not None:
            self._found(wrong)
            return
        e = self._evidence(seen, theta, local)
        if self._skipped(e):
            self._past = e
            self._after = self._ends(seen)
            return
        gradients = self._gradients(e)
        if self._stopped:
            return
        ends = self._ends(seen)
        self._after = ends
        if all(known.all() for _, known in ends) or np.any([known for _, known in ends], axis=0).all():
            self._update(e, ends, gradients)
        else:
            self._pending = e, ends  # until the next forward shows the rest
            self._carry(e, None)
        self._past = replace(e, past=None)

    def _before(self, seen: Sequence[Seen]) -> list[Array] | None:
        """Each rank's whole parameters before the step, in their own dtype; None if some are not known."""
        own = []
        for each in seen:
            if each.before is not None or not self._after:
                own.append(self._assembled(each.before or [], self.dtype))
            else:
                own.append((self._after[each.rank][0].copy(), self._after[each.rank][1].copy()))
        if self._pending is not None:
            self._finish(seen)
            if self._stopped:
                return None
        if self._past is None and self._different_start(seen, own):
            return None
        together, known = own[0][0].copy(), own[0][1].copy()
        for values, mine in own[1:]:
            new = mine & ~known
            together[new], known = values[new], known | mine
        result = []
        for each, (values, mine) in zip(seen, own, strict=True):
            read, was_read = self._assembled(each.read, values.dtype)
            if (stale := self._stale(each, read, was_read & known, together)) is not None:
                self._found(stale)
                return None
            whole = np.where(mine, values, np.where(known, together, read)).astype(values.dtype)
            if not (mine | known | was_read).all():
                self._cannot("parameters", mine | known | was_read)
                return None
            result.append(whole)
        return result

    def _stale(self, seen: Seen, read: Array, comparable: Array, right: Array) -> Finding | None:
        """What a forward read that is not what the ranks hold."""
        differs = comparable & (read != right.astype(read.dtype))
        if not differs.any():
            return None
        name, start = self.layout.at(int(np.flatnonzero(differs)[0]))
        span = self.layout.span(name)
        here = differs[span]
        return Finding(
            seen.step, seen.rank, "gathered params", Cause.FORWARD,
            f"its forward reads values of {name} that are not those that the ranks hold: {int(here.sum()):,} of "
            f"{here.size:,} elements. A stale or misplaced gather: gather after the last update, each chunk in its "
            f"place.", name, start, int(np.flatnonzero(here)[-1]) + 1, int(differs.sum()), int(comparable.sum()),
            float(np.abs(read.astype(np.float64) - right)[differs].max()),
        )  # fmt: skip

    def _different_start(self, seen: Sequence[Seen], own: list[tuple[Array, Array]]) -> bool:
        first, known = own[0]
        for rank in range(1, self.ranks):
            both = known & own[rank][1]
            differs = both & (own[rank][0] != first)
            if differs.any():
                odd, others = rank, "rank 0"
                if self.ranks > 2 and all(np.array_equal(own[rank][0], own[r][0]) for r in range(1, self.ranks)):
                    odd, others, = 0, "the others"
                name, start = self.layout.at(int(np.flatnonzero(differs)[0]))
                self._found(
                    Finding(
                        seen[0].step, odd, "params", Cause.INITIAL,
                        f"rank {odd} starts with other weights than {others}: {int(differs.sum()):,} of "
                        f"{int(both.sum()):,} elements, first in {name}. Give all ranks the same seed, or broadcast "
                        f"from rank 0 before the first step.", name, start, start + 1, int(differs.sum()),
                        int(both.sum()), float(np.abs(own[rank][0].astype(np.float64) - first)[differs].max()),
                    )
                )  # fmt: skip
                return True
        return False

    def _locals(self, seen: Sequence[Seen], theta: list[Array]) -> list[Local]:
        scale = self._scale(seen)
        return [self._one(each, values, scale) for each, values in zip(seen, theta, strict=True)]

    def _one(self, seen: Seen, theta: Array, scale: float) -> Local:
        self._beat()
        if seen.rows == 0:
            nothing = np.zeros(self.layout.size)
            return Local(0.0, 0.0, nothing, nothing, [nothing] * self.recipe.accumulate, [], True, 0.0)
        return self._local.run(
            theta, seen.buffers, seen.x, seen.y, micro=self.recipe.accumulate, scale=scale, training=seen.training
        )

    def _redo(self, seen: Seen, theta: Array) -> Local:
        return self._one(seen, theta, 1.0)

    def _scale(self, seen: Sequence[Seen]) -> float:
        return next((each.loss_scale for each in seen if each.loss_scale), None) or self._scaler.scale or 1.0

    # -- the average

    def _evidence(self, seen: Sequence[Seen], theta: list[Array], local: list[Local]) -> Evidence:
        total = sum(each.rows for each in seen)
        by_rows = self.recipe.average == "rows"
        weights = [self.ranks * each.rows / total if by_rows else 1.0 for each in seen]
        self._find_owners(seen)
        if self._master is None:
            self._master = before_rounding(theta[0]) if theta[0].dtype.itemsize < 4 else point(theta[0])
        elif theta[0].dtype.itemsize >= 4:
            self._master = point(theta[0])
        return Evidence(
            step=seen[0].step, row=self.row, layout=self.layout, recipe=self.recipe, seen=seen, theta=theta,
            master=self._master, local=local, weights=weights, noise=noise(self.layout, local), wire=_wire(seen),
            state=self._state, updates=self._updates, scale=self._scale(seen), lr=seen[0].lr, owner=self._owner,
            past=self._past,
            exact=exact_average(self.layout, local, self.recipe, self.row) if self.recipe.exact else None,
        )  # fmt: skip

    def _find_owners(self, seen: Sequence[Seen]) -> None:
        """Which rank updates each element: by its optimizer's state, or by what it gives to the others."""
        if not self.row.optimizer:
            return
        for each in seen:
            pieces = [piece for band in OPTIMIZER_BANDS for piece in each.bands.get(band, [])]
            if sum(len(piece.values) for piece in each.bands.get("exp_avg", pieces)) >= self.layout.size:
                pieces = []  # it has all of it, and owns none
            spans = [(piece.start, piece.start + len(piece.values)) for piece in pieces] or each.owned
            for start, stop in spans:
                part = self._owner[start:stop]
                part[part < 0] = each.rank

    def _skipped(self, e: Evidence) -> bool:
        """Whether the step had to be skipped for a number that is not finite; who did not is found."""
        overflow = e.overflow()
        if overflow == "no":
            self._scaler.went_well()
            return False
        ends = self._ends(e.seen)
        kept = [
            bool(np.array_equal(values[known], theta[known])) for (values, known), theta in zip(ends, e.theta, strict=True)
        ]
        if overflow == "maybe" and not all(kept):
            self._scaler.went_well()
            return False
        self._scaler.overflowed()
        if not all(kept):
            odd = [rank for rank, same in enumerate(kept) if not same]
            culprits = [rank for rank, local in enumerate(e.local) if not local.finite]
            rank = odd[0] if len(odd) < self.ranks else EVERY
            whose = f"rank {culprits[0]}'s gradient" if culprits else "the sum"
            who = f"rank {rank} updates its parameters" if rank != EVERY else "the parameters are updated"
            self._found(
                Finding(
                    e.step, rank, "params", Cause.SCALING,
                    f"{who} though {whose} is not finite at a loss scale of {e.scale:g}: all ranks must skip this step. "
                    f"Tell every rank of it (all-reduce the flag with MAX) before the optimizer's step.",
                )
            )  # fmt: skip
        return True

    def _gradients(self, e: Evidence) -> bool:
        """Compare the gradients that were seen; whether all of them were, and are right."""
        seen_everywhere = np.zeros(self.layout.size, bool)
        for band in GRADS:
            values, known = self._band(e.seen, band)
            if not known.any():
                continue
            within = self._allowed(e, e.clipped, values)
            if band == "handed grads" and e.recipe.clip is not None:
                whole = self._allowed(e, e.average, values)
                within = whole if (whole.outside(values) & known).sum() < (within.outside(values) & known).sum() else within
            mask = known & self.layout.trainable() & np.stack([within.outside(row) for row in values])
            self._count("gradients", known)
            if mask.any():
                wrong = diagnose.Wrong(mask, values, known, within)
                who = diagnose.culprit(e, wrong, gathered=not self.row.grads and not self.row.optimizer)
                if self.row.optimizer and len(np.flatnonzero(mask.any(1))) == 1:
                    who = who._replace(text="")
                self._found(diagnose.finding(e, "gradient", wrong, who, diagnose.of_gradients(e, wrong, who), ""))
                return False
            seen_everywhere |= known.any(0)
        return bool(seen_everywhere[self.layout.trainable()].all())

    def _allowed(self, e: Evidence, grad: Interval, values: Array) -> Interval:
        if e.exact is not None and e.recipe.clip is None:
            return rounded(grad, values.dtype)
        size = np.maximum(np.abs(grad.lo), np.abs(grad.hi))
        return grad.wider(unit(values.dtype) * size)

    # -- the update

    def _update(self, e: Evidence, ends: list[tuple[Array, Array]], gradients: bool) -> None:
        everything = np.arange(self.layout.size)
        master, state = e.advance(everything, e.clipped)
        frozen = ~e.mask
        dtype = e.theta[0].dtype
        theta = e.theta[0].astype(np.float64)
        master = Interval(np.where(frozen, theta, master.lo), np.where(frozen, theta, master.hi))
        if not self._states(e, state, gradients):
            return
        kept = rounded(master, dtype) if dtype.itemsize < 4 else master
        values = np.stack([value for value, _ in ends])
        known = np.stack([mine for _, mine in ends])
        mask = known & np.stack([kept.outside(row) for row in values])
        self._count("parameters", known)
        more = "Gradients were right." if gradients else ""
        if mask.any():
            wrong = diagnose.Wrong(mask, values, known, kept)
            who = diagnose.culprit(e, wrong, gathered=self.row.optimizer)
            named = diagnose.of_parameters(e, wrong, who, gradients_right=gradients)
            self._found(diagnose.finding(e, "params", wrong, who, named, more))
            return
        if (apart := _replicas(e, values, known)) is not None:
            self._found(apart)
            return
        self.judged = e.step
        self._carry(e, (master, state, values, known))

    def _states(self, e: Evidence, expected: State, gradients: bool) -> bool:
        """Compare the optimizer's state that was seen."""
        for band, within in expected.items():
            values, known = self._band(e.seen, band)
            if not known.any():
                continue
            mask = known & e.mask & np.stack([within.outside(row) for row in values])
            self._count("optimizer state", known)
            if not mask.any():
                continue
            wrong = diagnose.Wrong(mask, values, known, within)
            who = diagnose.culprit(e, wrong, gathered=False)
            ends = self._ends(e.seen)
            theta = diagnose.Wrong(
                mask & np.stack([k for _, k in ends]), np.stack([v for v, _ in ends]), known,
                e.advance(np.arange(self.layout.size), e.clipped)[0],
            )  # fmt: skip
            named = (
                diagnose.of_parameters(e, theta, who, gradients_right=gradients)
                if theta.mask[who.shown_by].any() and theta.mask[who.shown_by].sum() == mask[who.shown_by].sum()
                else diagnose.UNKNOWN
            )
            if named.cause is Cause.UNKNOWN:
                named = diagnose.Named(
                    Cause.STATE, "The optimizer's state is not what its last state and this step's gradient make of it."
                )
            self._found(diagnose.finding(e, band, wrong, who, named, "Gradients were right." if gradients else ""))
            return False
        return True

    def _carry(self, e: Evidence, right: tuple[Interval, State, Array, Array] | None) -> None:
        """What the next step begins with: the user's own state where it was seen, ours where it was not."""
        self._updates = e.updates + 1
        if right is None:
            master, state = e.advance(np.arange(self.layout.size), e.clipped)
        else:
            master, state, values, known = right
            first = values[known.argmax(0), np.arange(self.layout.size)]
            if first.dtype.itemsize < 4:
                was = before_rounding(first)
                master = Interval(np.maximum(master.lo, was.lo), np.minimum(master.hi, was.hi))
        for band in state:
            values, known = self._band(e.seen, band)
            if known.any():
                which = known.any(0)
                own = values[known.argmax(0), np.arange(self.layout.size)].astype(np.float64)
                state[band] = Interval(np.where(which, own, state[band].lo), np.where(which, own, state[band].hi))
        values, known = self._band(e.seen, "master")
        if known.any():
            which = known.any(0)
            own = values[known.argmax(0), np.arange(self.layout.size)].astype(np.float64)
            master = Interval(np.where(which, own, master.lo), np.where(which, own, master.hi))
        self._master, self._state = master, state

    def _finish(self, seen: Sequence[Seen] | None) -> None:
        """Judge the update that could not be judged before its parameters were seen."""
        assert self._pending is not None
        (e, ends), self._pending = self._pending, None
        if seen is not None:
            full = []
            for each, (values, known) in zip(seen, ends, strict=True):
                read, was_read = self._assembled(each.read, values.dtype)
                full.append((np.where(known, values, read).astype(values.dtype), known | was_read))
            ends = full
        updates, self._updates = self._updates, e.updates
        self._update(e, ends, False)
        self._updates = max(updates, self._updates)

    # -- reading what was seen

    def _assembled(self, pieces: Sequence[Piece], dtype: DType | None = None) -> tuple[Array, Array]:
        dtype = dtype or (pieces[0].values.dtype if pieces else FP32)
        values, known = np.zeros(self.layout.size, dtype), np.zeros(self.layout.size, bool)
        assemble(pieces, values, known)
        return values, known

    def _ends(self, seen: Sequence[Seen]) -> list[tuple[Array, Array]]:
        return [self._assembled(each.params, self.dtype) for each in seen]

    def _band(self, seen: Sequence[Seen], band: str) -> tuple[Array, Array]:
        """What the ranks have of a band [N, P], and where it is known."""
        each = [self._assembled(one.bands.get(band, [])) for one in seen]
        return np.stack([values for values, _ in each]), np.stack([known for _, known in each])

    def _count(self, what: str, known: Array) -> None:
        self.compared[what] = self.compared.get(what, 0) + int(known.sum())

    def _cannot(self, what: str, known: Array) -> None:
        name, _ = self.layout.at(int(np.flatnonzero(~known)[0]))
        self.notes.append(
            f"{what} not compared: {name} is nowhere whole or as a shard. Hand it over: check.band('params', shard, "
            f"offset, of=module)."
        )
        self._stopped = True

    # -- the end

    def verdict(self) -> Verdict:
        """All that was found."""
        if self._pending is not None and not self._stopped:
            e, ends = self._pending
            if any(known.any() for _, known in ends):
                self._finish(None)
            else:
                self._pending = None
                self.notes.append(
                    f"the update of step {e.step} was not compared: its parameters were not seen. Hand over the "
                    f"shards with check.band('params', ...), or run one forward more."
                )
        held = []
        if self.compared and not any(f.cause is not Cause.VOLUME for f in self.findings):
            counts = ", ".join(f"{count:,} of {what}" for what, count in self.compared.items())
            held.append(f"trained: {self.steps} steps as they must be; elements compared: {counts}")
        missing = [what for what in ("gradients", "optimizer state") if what not in self.compared]
        if missing and not self.findings:
            self.notes.append(f"not seen: {' and '.join(missing)} (check.band hands them over)")
        if self._volume is not None:
            held += self._volume.held
            self.notes += self._volume.notes
        return Verdict(
            schema=VERDICT_SCHEMA, row=self.name, ranks=self.ranks, steps=self.steps, findings=self.findings,
            held=held, notes=self.notes,
        )  # fmt: skip


def _share(seen: Sequence[Seen], layout: Layout) -> None:
    """Give every rank the parameters that are rank 0's bit for bit, which it has left out."""
    for each in seen[1:]:
        if each.alike:
            spans = [layout.span(name) for name in each.alike]
            each.params = each.params + [
                piece for piece in seen[0].params if any(s.start <= piece.start < s.stop for s in spans)
            ]
            each.alike = []


def _wire(seen: Sequence[Seen]) -> DType:
    """The coarsest dtype that anything of floating point was handed to a collective in."""
    coarse = {"bfloat16": BF16, "float16": FP16}
    found = {coarse[asked.dtype] for each in seen for asked in each.asked if asked.dtype in coarse}
    return max(found, key=unit, default=FP32)


def _replicas(e: Evidence, values: Array, known: Array) -> Finding | None:
    """Ranks that hold the same elements in other bits, each within its bounds."""
    for rank in range(1, e.ranks):
        both = known[0] & known[rank]
        differs = both & (values[rank] != values[0])
        if differs.any():
            name, start = e.layout.at(int(np.flatnonzero(differs)[0]))
            return Finding(
                e.step, rank, "params", Cause.REPLICAS,
                f"rank {rank} and rank 0 end the step with other bits of {name}: {int(differs.sum()):,} of "
                f"{int(both.sum()):,} elements, within rounding. Replicas must stay identical, or they drift apart: "
                f"let each element be summed and updated once, or in the same order everywhere.", name, start,
                start + 1, int(differs.sum()), int(both.sum()),
                float(np.abs(values[rank].astype(np.float64) - values[0])[differs].max()),
            )  # fmt: skip
    return None

