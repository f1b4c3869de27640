"""Whether each rank's forward ran on its own rows and on the parameters that the last update left.

Owns the comparison of the rows and of each rank's loss, which needs nothing of the user's but a call of the module.
Must not know gradients' averages or updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from zerosim.bands import Array
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.intervals import unit
from zerosim.conformance.layout import Layout
from zerosim.conformance.local_gradients import SLACK, Local, LocalGradients
from zerosim.conformance.seen import Seen
from zerosim.records.conformance import Cause, Finding

Redo = Callable[[Seen, Array], Local]


class Forward:
    """Compares what was seen of the ranks' forward passes."""

    def __init__(self, local: LocalGradients, layout: Layout) -> None:
        self._local, self._layout = local, layout
        self.compared = 0

    def judge(
        self, seen: Sequence[Seen], theta: Sequence[Array], local: Sequence[Local], past: Evidence | None, redo: Redo
    ) -> Finding | None:
        """What is wrong, of the first rank of which something is."""
        for each in seen:
            if (found := self._rows(each)) is not None:
                return found
        errors = [abs(one.loss - one.exact_loss) for one in local]
        dtype = theta[0].dtype
        for each, values, own in zip(seen, theta, local, strict=True):
            if not each.losses or each.rows == 0:
                continue
            loss = float(np.mean(each.losses)) if len(each.losses) != len(own.losses) else each.losses[-1]
            right = own.loss if len(each.losses) != len(own.losses) else own.losses[-1]
            allowed = SLACK * max(errors) + 64 * unit(dtype) * abs(right)
            self.compared += 1
            if not abs(loss - right) <= allowed:
                return self._loss(each, values, loss, right, allowed, seen, past, redo)
        return self._backward(seen, theta, local, max(errors), redo)

    def _backward(
        self, seen: Sequence[Seen], theta: Sequence[Array], local: Sequence[Local], error: float, redo: Redo
    ) -> Finding | None:
        """A rank whose backward begins with another number than its rows make, up to a factor that all ranks share."""
        factors: dict[int, float] = {}
        for each, own in zip(seen, local, strict=True):
            if each.rows and len(each.backward) in (1, len(own.losses)) and own.loss:
                factors[each.rank] = sum(each.backward) / len(each.backward) / own.loss
        allowed = 2 * SLACK * error + 256 * unit(theta[0].dtype) * max((abs(own.loss) for own in local), default=0.0)
        usual = float(np.median(list(factors.values()))) if len(factors) > 2 else 0.0
        for rank, factor in factors.items():
            if usual and abs(factor - usual) * abs(local[rank].loss) > allowed * abs(usual):
                loss, right = factor * local[rank].loss / usual, local[rank].loss
                return self._loss(seen[rank], theta[rank], loss, right, allowed, seen, None, redo,
                                  bool(seen[rank].losses))  # fmt: skip
        return None

    @staticmethod
    def _rows(seen: Seen) -> Finding | None:
        if seen.strange:
            return Finding(
                seen.step, seen.rank, "batch", Cause.DATA,
                f"rank {seen.rank} calls its module on other rows than check.step was given: {seen.strange:,} elements "
                f"differ. Give check.step the rank's own batch, and train on that.", wrong=seen.strange,
            )  # fmt: skip
        if seen.forwarded >= 0 and seen.forwarded != seen.rows:
            return Finding(
                seen.step, seen.rank, "batch", Cause.DATA,
                f"rank {seen.rank} calls its module on {seen.forwarded:,} rows; its batch in check.step has "
                f"{seen.rows:,}.", wrong=abs(seen.forwarded - seen.rows),
            )  # fmt: skip
        return None

    def _loss(
        self, seen: Seen, theta: Array, loss: float, right: float, allowed: float, all_seen: Sequence[Seen],
        past: Evidence | None, redo: Redo, each_right: bool = False,
    ) -> Finding:  # fmt: skip
        if each_right:
            return Finding(
                seen.step, seen.rank, "loss", Cause.DATA,
                f"rank {seen.rank} calls backward on a loss of {loss:.6g}; its outputs and the y of check.step make "
                f"{right:.6g}. Its targets or its loss are others.", wrong=1, total=1, largest=abs(loss - right),
            )  # fmt: skip
        why, cause = "Its forward reads other parameters than it holds, or its loss is another.", Cause.FORWARD
        if past is not None:
            stale = redo(seen, past.theta[seen.rank])
            if abs(float(np.mean(stale.losses)) - loss) <= allowed:
                why = (
                    "It is the loss of the parameters before the last update: a stale gather. Forward must read what "
                    "the update left."
                )
        for other in all_seen:
            if other.rank != seen.rank and other.rows == seen.rows:
                theirs = redo(Seen(seen.rank, seen.step, other.x, other.y, other.rows, buffers=seen.buffers,
                                   training=seen.training), theta)  # fmt: skip
                if abs(theirs.loss - loss) <= allowed:
                    why, cause = f"It is the loss of rank {other.rank}'s batch.", Cause.DATA
        return Finding(
            seen.step, seen.rank, "loss", cause,
            f"rank {seen.rank}'s loss is {loss:.6g}; its parameters and its batch make {right:.6g}. {why}",
            wrong=1, total=1, largest=abs(loss - right),
        )  # fmt: skip
