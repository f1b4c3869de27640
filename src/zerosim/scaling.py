"""What all ranks must agree on before an update: the norm of all gradients, and that they are finite.

Owns global-norm clipping (torch.nn.utils.clip_grad_norm_'s rule), the loss scale (torch.amp.GradScaler's,
with DeepSpeed's hysteresis as an option), and the one message that they take. Must not know layers.

Each bucket is N pieces, whatever the row. A piece's squares are summed in fp32 by a fixed tree, 256 lanes
added down and then halved; pieces are added in the order of the flat buffer, buckets in the order of the
model. Where ranks own different pieces each sends the sums of its own to all, in fp32. So every rank under
every row comes to the same bits. Padding is zero, and counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from zerosim.bands import FP32, Array, Band
from zerosim.buckets import Bucket, Sharding
from zerosim.comm import Comm
from zerosim.gradients import Gradients
from zerosim.layers import MicroBatch
from zerosim.options import LossScale
from zerosim.ranks import Ranks
from zerosim.stages import Over
from zerosim.util.casts import convert
from zerosim.util.shapes import Shaped

LANES = 256


def tell(comm: Comm, ranks: Ranks, mine: Shaped[Array, "R k"], what: str) -> Shaped[Array, "R n k"]:
    """What the members of each rank's ring have to tell each other, in fp32, by member; ``what`` is its tag."""
    n, k = comm.ring.size, mine.shape[1]
    held = ranks.hold(Band.SCALARS, (n * k,), what)
    comm.all_gather(held, n * k, mine, band=what, unit=what)
    everyone = held.reshape(len(held), n, k)
    if isinstance(held, np.ndarray):
        everyone = everyone.copy()
    ranks.free(held)
    return everyone


def total_weight(comm: Comm, ranks: Ranks, parts: Sequence[MicroBatch]) -> Array:
    """What all ranks' micro-batches weigh together, as each rank here has heard [R]."""
    mine = np.sum([each.weights for each in parts], axis=0).astype(FP32)
    heard: Array = tell(comm, ranks, mine[:, None], "rows").sum(axis=(1, 2), dtype=np.float64)
    if not heard.all():
        raise ValueError("step(batch): the rows or weights of all ranks sum to zero. Leave the step out.")
    return heard


def in_use(comm: Comm, ranks: Ranks, gradients: Gradients) -> list[bool] | None:
    """Which trainable parameters, in order, any rank has a gradient of; None, for all, where there are shapes alone."""
    found = gradients.found()
    everyone = tell(comm, ranks, found, "used")
    ranks.free(found)
    used: list[bool] = np.any(everyone, axis=(0, 1)).tolist() if isinstance(everyone, np.ndarray) else []
    return used or None


class Scaler:
    """The loss scale of a run as it grows and backs off: ``rule`` says how."""

    def __init__(self, rule: LossScale) -> None:
        self.rule, self.scale = rule, rule.init
        self.good_steps, self.tolerated = 0, rule.hysteresis

    def update(self, *, finite: bool) -> None:
        """A step was applied, or, where gradients were not finite, skipped."""
        rule = self.rule
        if not rule.dynamic:
            return
        if not finite:
            self.good_steps = 0
            self.tolerated -= 1
            if self.tolerated <= 0:
                self.scale, self.tolerated = max(self.scale * rule.backoff, rule.least), 1
            return
        self.good_steps += 1
        if self.good_steps == rule.interval:
            self.good_steps, self.tolerated = 0, rule.hysteresis
            self.scale = min(self.scale * rule.growth, 2.0**127)


@dataclass(frozen=True)
class Agreed:
    """What was agreed: the norm [R], what gradients are read times [R, 1] on each rank here, and if all are finite."""

    norm: Array | None
    factor: Array
    finite: bool


class Agreement:
    """How the ranks of a run come to the norm of all gradients, and to whether they are finite.

    ``comms`` are collectives in fp32 over all ranks, the group's and the replicas'.
    """

    def __init__(self, sharding: Sharding, gradients: Gradients, comms: Sequence[Comm]) -> None:
        self._row, self._ranks, self._options = sharding.row, sharding.ranks, sharding.options
        self._buckets, self._gradients = sharding.trainable, gradients
        self._all, self._inner, _ = comms
        self._comm = {Over.ALL: self._all, Over.GROUP: self._inner}.get(sharding.row.optimizer)

    def reach(self, scale: float) -> Agreed:
        """Agree, on gradients that are ``scale`` times too large."""
        rows, inverse = len(self._ranks.ids), np.float32(1 / scale)
        owned = [self._gradients.owned(bucket) for bucket in self._buckets]
        if not isinstance(owned[0], np.ndarray):  # shapes alone, of which all are finite
            everyone = self._exchange(np.empty_like(owned[0], FP32, shape=(rows, self._count(owned) + 1)))
            return Agreed(None, np.empty_like(owned[0], FP32, shape=(rows, 1)), True)
        with np.errstate(all="ignore"):  # a square that overflows is no reason to skip
            everyone = self._exchange(self._told(owned, inverse))  # [R, member, its pieces' sums by bucket and a flag]
            finite = not np.any(everyone[..., -1])
            if self._options.clip is None:
                return Agreed(None, np.full((rows, 1), inverse, FP32), finite)
            most, eps = np.float32(self._options.clip), np.float32(self._options.clip_eps)
            norm = self._norm(everyone[..., :-1])
            coefficient = np.minimum(most / (norm + eps), np.float32(1))
        return Agreed(norm, (inverse * coefficient)[:, None], finite)

    def _told(self, owned: Sequence[Array], inverse: np.float32) -> Shaped[Array, "R k"]:
        """What each rank here has to tell: the sums of its pieces, and whether one of them is not finite."""
        sums, broken = [], np.zeros((len(self._ranks.ids), 1), FP32)
        for grads, bucket in zip(owned, self._buckets, strict=True):
            part = self._pieces(grads, bucket)
            broken[:, 0] += ~np.isfinite(part).all(axis=(1, 2))
            if self._options.clip is not None:
                sums.append(self._sums(part * inverse))
        return np.concatenate([*sums, np.minimum(broken, 1)], axis=1, dtype=FP32)

    def _count(self, owned: Sequence[Array]) -> int:
        """Sums that a rank sends: one for each of the N pieces that it owns."""
        if self._options.clip is None:
            return 0
        n = self._all.ring.size
        return sum(n * grads.shape[-1] // bucket.padded for grads, bucket in zip(owned, self._buckets, strict=True))

    def _pieces(self, grads: Array, bucket: Bucket) -> Shaped[Array, "R k C"]:
        """What a rank owns of a bucket, in fp32, as the k of the N pieces that it is."""
        flat = np.empty(grads.shape, FP32)
        convert(grads, flat)
        return flat.reshape(len(self._ranks.ids), -1, bucket.padded // self._all.ring.size)

    def _sums(self, pieces: Shaped[Array, "R k C"]) -> Shaped[Array, "R k"]:
        """Each piece's squares summed by the tree; or, for the infinity norm, its largest magnitude."""
        if self._options.norm_type == inf:
            largest: Array = np.abs(pieces).max(axis=2)
            return largest
        lanes = np.zeros((*pieces.shape[:2], -(-pieces.shape[2] // LANES), LANES), FP32)
        lanes.reshape(*pieces.shape[:2], -1)[..., : pieces.shape[2]] = np.square(pieces)
        total: Array = lanes[:, :, 0].copy()
        for row in range(1, lanes.shape[2]):
            total += lanes[:, :, row]
        while total.shape[2] > 1:
            total = total[..., : total.shape[2] // 2] + total[..., total.shape[2] // 2 :]
        return total[..., 0]

    def _exchange(self, mine: Shaped[Array, "R k"]) -> Shaped[Array, "R n k"]:
        """What the members of each rank's ring have, by member; where all own everything nobody sends."""
        if self._comm is None or self._comm.ring.size == 1:
            return mine[:, None]
        return tell(self._comm, self._ranks, mine, "norm")

    def _norm(self, sums: Shaped[Array, "R n k"]) -> Shaped[Array, "R"]:
        """The norm on each rank, its pieces added in the order of the flat buffer."""
        rows, members, k = sums.shape
        per = k // len(self._buckets)  # pieces of each bucket that a member owns
        by_bucket = sums.reshape(rows, members, len(self._buckets), per).swapaxes(1, 2)
        if self._row.two_axes and self._row.optimizer is Over.ALL:  # rank d S + s has piece s D + d
            size = self._inner.ring.size
            by_bucket = by_bucket.reshape(rows, len(self._buckets), -1, size).swapaxes(2, 3)
        pieces = by_bucket.reshape(rows, -1)
        if self._options.norm_type == inf:
            largest: Array = pieces.max(axis=1)
            return largest
        total: Array = np.sqrt(np.add.accumulate(pieces, axis=1, dtype=FP32)[:, -1])
        return total
