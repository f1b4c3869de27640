"""What the simulator's ranks agree on before an update, beside what a framework's do: the norm, and whether to skip.

Owns the case that scalers are shown: one element of one rank's shard that overflows. Must not know torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from zerosim.bands import Array, Band
from zerosim.frameworks.observation import Observation
from zerosim.options import LossScale
from zerosim.real_ranks.cases import model
from zerosim.records.frameworks import DECISIONS, NORMS, ULPS, Decision, Norm
from zerosim.records.real_ranks import Settings
from zerosim.scaling import Scaler
from zerosim.schemes import ZeRO3

SCALE = LossScale(init=1024.0, interval=2)
SCALED_STEPS, OVERFLOW_STEP, OVERFLOW_RANK = 4, 1, 1  # the second of four steps overflows, on the second rank

Expect = Callable[[str, int, int, str, int, int], None]
"""Told the check, step, rank, what it is about, what was found and what should have been."""


def norms(settings: Settings, seen: Sequence[Observation], expect: Expect) -> list[Norm]:
    """The norms that clip_grad_norm_ gave of each step's averaged gradients, beside ours of the same ones."""
    found = []
    for step, samples in enumerate(zip(*(each.gradients for each in seen), strict=True), start=1):
        whole = samples[0].averaged
        if [part.shape for part in whole] != [part.shape for part in samples[0].local]:  # shards, to be put together
            whole = [np.concatenate(parts) for parts in zip(*(each.averaged for each in samples), strict=True)]
        flat = np.concatenate([part.T.reshape(-1) for part in whole])  # torch keeps W as [O, I]
        for kind, theirs in samples[0].norms.items():
            ours = norm(settings, flat, float(kind))
            ulps = abs(int(np.float32(theirs).view(np.int32)) - int(np.float32(ours).view(np.int32)))
            for rank, each in enumerate(samples):
                differs = each.norms[kind] != theirs
                expect(NORMS, step, rank, f"norms of type {kind} other than rank 0's", int(differs), 0)
            if ulps > (ULPS if kind == "2.0" else 0):
                expect(NORMS, step, -1, f"ulp between norms of type {kind}", ulps, 0)
            found.append(Norm(step=step, kind=kind, theirs=theirs, ours=ours, ulps=ulps))
    return found


def decisions(settings: Settings, seen: Sequence[Observation], expect: Expect) -> list[Decision]:
    """What each scaler made of the steps on every rank, beside what ours does."""
    found, ours = [], decided(settings)
    for scaler in seen[0].decided:
        by_step = zip(*(each.decided[scaler] for each in seen), strict=True)
        for step, (by_rank, (skipped, scale)) in enumerate(zip(by_step, ours, strict=True), start=1):
            for rank, theirs in enumerate(by_rank):
                expect(DECISIONS, step, rank, f"skipped by {scaler}", int(theirs[0]), int(skipped))
                expect(DECISIONS, step, rank, f"scale of {scaler}", int(theirs[1]), int(scale))
            found.append(
                Decision(
                    scaler=scaler, step=step, skipped=[theirs[0] for theirs in by_rank], scale=by_rank[0][1],
                    ours_skipped=skipped, ours_scale=scale,
                )
            )  # fmt: skip
    return found


def norm(settings: Settings, grads: Array, kind: float) -> float:
    """The norm that all ranks of ZeRO-3 agree on where ``grads`` [P] are the average."""
    run = ZeRO3(model(settings), settings.ranks, precision="fp32", clip=1.0, norm_type=kind)
    start = 0
    for bucket in run.buckets:
        whole = np.zeros(bucket.padded, np.float32)
        whole[: bucket.size] = grads[start : start + bucket.size]
        start += bucket.size
        bucket.states[Band.GRADS][...] = whole.reshape(settings.ranks, -1)
    assert run.agreement is not None, "there is something to clip"
    agreed = run.agreement.reach(1.0)
    assert agreed.norm is not None, "there are values"
    return float(agreed.norm[0])


def decided(settings: Settings) -> list[tuple[bool, float]]:
    """Whether the simulator's ranks skip each of the steps, and the scale after it."""
    run = ZeRO3(model(settings), settings.ranks, precision="fp32", loss_scale=SCALE)
    scaler, found = Scaler(SCALE), []
    assert run.agreement is not None, "there is a scale"
    for step in range(SCALED_STEPS):
        run.buckets[0].states[Band.GRADS][OVERFLOW_RANK, 0] = np.inf if step == OVERFLOW_STEP else 1.0
        finite = run.agreement.reach(scaler.scale).finite
        scaler.update(finite=finite)
        found.append((not finite, scaler.scale))
    return found
