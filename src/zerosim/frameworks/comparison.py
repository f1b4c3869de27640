"""One framework's run, held to the simulator's ring, to the kernel's counts, and to the textbook.

Owns these comparisons, the choice of the scheme that a framework behaves like, and the reasons
for which it leaves it. Must not know how ranks are started, nor torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from zerosim import theory
from zerosim.bands import WIRES, Array
from zerosim.checks import compare as checks
from zerosim.frameworks import agreements, averages
from zerosim.frameworks.observation import SETTLED, Observation
from zerosim.frameworks.variants import DEEPSPEED, Variant
from zerosim.real_ranks.cases import data, model
from zerosim.records.frameworks import (
    BEFORE,
    BYTES,
    ELSEWHERE,
    GRADIENTS,
    GRADS,
    MASTER,
    PARAMS,
    RANKS,
    STATE,
    Family,
    Framework,
    Gradients,
    RankSeen,
)
from zerosim.records.real_ranks import Settings
from zerosim.records.results import Failure
from zerosim.stages import DP, SCHEMES, Stage, ZeRO3
from zerosim.worlds import gloo

_SHARDED = {"params": (PARAMS,), "grads": (GRADS,), "optimizer": (MASTER, STATE)}  # by the flag in a scheme's row
_WHY: dict[object, str] = {
    "moved": "its reduce-scatter is an all-reduce of which each rank keeps a slice",
    (Family.DDP, "elsewhere"): "its buckets are copies of the gradients",
    (Family.DDP, "peak"): "what autograd hands on and the optimizer's temporaries are tensors too",
    (Family.ZERO_REDUNDANCY, "elsewhere"): "DDP's buckets are copies of the gradients",
    (Family.ZERO_REDUNDANCY, "uneven"): "tensors are dealt out whole, not cut",
    (Family.ZERO_REDUNDANCY, "peak"): "DDP's buckets, and the optimizer's temporaries",
    (Family.ZERO_REDUNDANCY, "asked"): "DDP all-reduces the gradients, then the owners broadcast the parameters",
    (Family.FSDP, "uneven"): "a parameter's rows are dealt out in equal chunks, of which the last is short",
    (Family.FSDP, "peak"): "a layer is gathered into a buffer and copied out of it, and the next one is gathered ahead",
    (Family.FSDP, "asked"): "what forward has gathered is kept for backward",
    (Family.DEEPSPEED, "stage 1"): "it lets go of the gradients that it does not own before the update",
    (Family.DEEPSPEED, "stage 3"): "it keeps a small model gathered",
    (Family.DEEPSPEED, "elsewhere"): "a flat bucket for gradients, for 5e8 of them by default",
    (Family.DEEPSPEED, "bands"): "fp32 parameters have master weights too, and shards stay beside what is gathered",
    (Family.DEEPSPEED, "uneven"): "it keeps whole the gradient of a tensor that it owns in part",
    (Family.DEEPSPEED, "rest"): "the update lets go of the gradients",
    (Family.DEEPSPEED, "peak"): "a flat bucket for gradients, for 5e8 of them by default",
    (Family.DEEPSPEED, "asked"): "gradients are all-reduced by default, and parameters then gathered",
}


class FrameworkComparison:
    """Holds what the ranks saw of one framework to the simulator's ring, to the kernel, and to the textbook."""

    def __init__(self, variant: Variant, settings: Settings, steps: int, seen: list[Observation]) -> None:
        self._variant, self._settings, self._steps, self._seen = variant, settings, steps, _without_strays(seen)
        self._n_params = model(settings).n_params
        self.failures: list[Failure] = []

    def record(self) -> Framework:
        """All that was found; what does not hold is in ``failures``."""
        simulated = _simulated(self._settings, self._steps, self._variant.precision)
        ranks = [self._rank(rank, seen) for rank, seen in enumerate(self._seen)]
        thetas = [_flat(seen.params) for seen in self._seen]
        for rank, theta in enumerate(thetas):
            self._expect(
                RANKS, self._steps, rank, "parameters that differ from rank 0's", _differing(theta, thetas[0]), 0
            )
        names = [asked.op for asked in self._seen[0].asked]
        row, departs = self._textbook(ranks)
        return Framework(
            name=self._variant.name,
            family=self._variant.family,
            precision=self._variant.precision,
            wire=self._variant.wire,
            ranks=ranks,
            collectives={name: names.count(name) for name in dict.fromkeys(names)},
            differing=_differing(thetas[0], simulated),
            largest=float(np.abs(thetas[0].astype(np.float64) - simulated).max()),
            gradients=self._gradients(),
            unmeasured={name: why for seen in self._seen for name, why in seen.unmeasured.items()},
            scheme=row.name if row else "",
            departs=departs,
            norms=agreements.norms(self._settings, self._seen, self._expect),
            decisions=agreements.decisions(self._settings, self._seen, self._expect),
        )

    def _expect(self, check: str, step: int, rank: int, quantity: str, measured: int, expected: int) -> None:
        if measured != expected:
            self.failures.append(
                Failure(
                    check=check, scheme=self._variant.name, ranks=self._settings.ranks, step=step, rank=rank,
                    quantity=quantity, measured=f"{measured:,}", expected=f"{expected:,}",
                )
            )  # fmt: skip

    def _gradients(self) -> list[Gradients]:
        found = []
        average = averages.fsdp_average if self._variant.family is Family.FSDP else averages.ddp_average
        for step, samples in enumerate(zip(*(seen.gradients for seen in self._seen), strict=True), start=1):
            expected = average([each.local for each in samples], samples[0].groups, WIRES[self._variant.wire])
            if self._variant.family is Family.FSDP:  # the ranks' shards, put together
                real = [[np.concatenate(shards) for shards in zip(*(each.averaged for each in samples), strict=True)]]
            else:
                real = [each.averaged for each in samples]
            differing = 0
            for rank, grads in enumerate(real):
                unequal = sum(_differing(*pair) for pair in zip(grads, expected, strict=True))
                self._expect(GRADIENTS, step, rank if len(real) > 1 else -1, "gradients that differ", unequal, 0)
                differing += unequal
            found.append(Gradients(step=step, compared=len(real) * self._n_params, differing=differing))
        return found

    def _rank(self, rank: int, seen: Observation) -> RankSeen:
        size = self._settings.ranks
        each = [gloo.moved(asked, rank, size) for asked in seen.asked]
        known = [moved for moved in each if moved is not None]
        moved = gloo.total(known) if len(known) == len(each) else None
        if moved is not None:
            self._explain(rank, seen, moved)
        readings = {
            "process": [counters.written for counters in seen.counted],
            "sockets": [counters.tcp_sent for counters in seen.counted],
        }
        return RankSeen(
            held=seen.held,
            rest=seen.rest,
            peak=seen.peak.parts,
            peak_phase=seen.peak.phase,
            exact=seen.peak.exact,
            asked=sum(gloo.textbook(asked, rank, size).sent for asked in seen.asked),
            moved=moved.sent if moved else None,
            framing=moved.framing()[0] if moved else None,
            kernel={name: [n for n in each if n is not None] for name, each in readings.items() if None not in each},
        )

    def _explain(self, rank: int, seen: Observation, moved: gloo.Moved) -> None:
        """The kernel's counts of every settled step. What a process writes is no evidence where it writes a log too."""
        framing_sent, framing_received = moved.framing()
        sent, received = moved.sent + framing_sent, moved.received + framing_received
        for step, counters in list(enumerate(seen.counted, start=1))[SETTLED:]:
            readings = [
                ("sent according to the TCP sockets", counters.tcp_sent, sent),
                ("received according to the TCP sockets", counters.tcp_received, received),
            ]
            if self._variant.family is not Family.DEEPSPEED:
                readings.append(("written according to /proc/self/io", counters.written, sent))
            for what, counted, explained in readings:
                if counted is not None:
                    self._expect(BYTES, step, rank, f"bytes {what}, against payload and framing", counted, explained)

    # -- the textbook

    def _textbook(self, ranks: list[RankSeen]) -> tuple[Stage | None, list[str]]:
        """The scheme that shards the same bands as the framework was seen to, and where the framework leaves it."""
        size, held = self._settings.ranks, {}
        for what, bands in _SHARDED.items():
            held[what] = sum(rank.held.get(band, 0) for rank in ranks for band in bands) / size
        whole, shard = (_by_kind(theory.resident(self._job(row))) for row in (DP, ZeRO3))
        sharded = {what: _nearer(held[what], shard[what], whole[what]) for what in _SHARDED}
        row = next(
            (each for each in SCHEMES if all(bool(getattr(each, what)) == sharded[what] for what in _SHARDED)), None
        )
        if row is None:
            return None, [f"shards {' and '.join(what for what in _SHARDED if sharded[what])}, as no scheme does"]
        job = self._job(row)
        n, unit = self._n_params, self._n_params * WIRES[self._variant.wire].itemsize * (size - 1) / size
        totals = [sum(rank.held.values()) / n for rank in ranks]
        elsewhere = min(rank.held[ELSEWHERE] for rank in ranks) / n
        mean, rest = sum(held.values()) / n, np.mean([sum(rank.rest.values()) for rank in ranks]) / n
        textbook = sum(theory.resident(job).values()) / n
        asked = np.mean([rank.asked for rank in ranks]) / unit
        known = [rank.moved for rank in ranks if rank.moved is not None]
        moved = np.mean(known) / unit if known else asked
        units = 3 if row.params else 2
        peak = max(sum(rank.peak.values()) for rank in ranks) / n
        highest = sum(theory.peak(job).values()) / n
        configured = self._variant.options.get("stage")
        departures = [
            (
                configured is not None and DEEPSPEED[configured] != row,
                f"stage {configured}",
                f"though configured as stage {configured}",
            ),
            (elsewhere > 0.05, "elsewhere", f"+{elsewhere:,.2f} B elsewhere"),
            (abs(mean - textbook) > 0.05, "bands", f"its bands take {mean:.2f} B for {textbook:.2f}"),
            (
                max(totals) - min(totals) > 0.05,
                "uneven",
                f"its ranks hold from {min(totals):,.2f} to {max(totals):,.2f} B",
            ),
            (np.mean(totals) - rest > 0.05, "rest", f"{rest:,.2f} B between steps"),
            (peak > 1.1 * highest, "peak", f"its peak is {peak:,.2f} B for {highest:.2f}"),
            (abs(asked - units) > 0.05, "asked", f"it asks for {asked:.2f} P for {units}"),
            (abs(moved - asked) > 0.05, "moved", f"gloo moves {moved:.2f} P"),
        ]
        return row, [self._because(kind, found) for leaves, kind, found in departures if leaves]

    def _because(self, kind: str, found: str) -> str:
        """What was found, and the reason if it is known."""
        why = _WHY.get((self._variant.family, kind)) or _WHY.get(kind)
        return f"{found} ({why})" if why else found

    def _job(self, row: Stage) -> theory.Job:
        """This run under a row, for the formulas."""
        buckets = tuple((pair,) for pair in pairwise(self._settings.widths))
        return theory.Job(
            row, buckets, self._settings.ranks, self._settings.batch, self._variant.states, self._variant.wire
        )


def _by_kind(resident: theory.Bytes) -> dict[str, float]:
    """Bytes of what the schemes shard, by the name of the flag in their row."""
    params, grads = resident["params"], resident["grads"]
    return {"params": params, "grads": grads, "optimizer": sum(resident.values()) - params - grads}


def _nearer(value: float, one: float, other: float) -> bool:
    """Whether a count of bytes is nearer to one than to the other, in ratio."""
    return value == 0 or abs(math.log(value / one)) < abs(math.log(value / other))


def _flat(params: Iterable[Array]) -> Array:
    """Weights [O, I] and biases [O] as the simulator's flat vector [P]."""
    return np.concatenate([param.T.reshape(-1) for param in params])


def _differing(one: Array, other: Array) -> int:
    """Elements whose bits differ."""
    return int(np.count_nonzero(checks.bits(one) != checks.bits(other)))


def _simulated(settings: Settings, steps: int, precision: str) -> Array:
    """The simulator's fp32 parameters [P] after so many steps: the same under every scheme."""
    scheme = DP(model(settings), settings.ranks, precision=precision)
    for batch in data(msgspec.structs.replace(settings, steps=steps)):
        scheme.step(batch)
    return scheme.full_theta()


def _without_strays(seen: Sequence[Observation]) -> list[Observation]:
    """Of the strays, leave only what every rank has: all do the same, and what has gone on one has gone."""
    common = Counter[object]({origin: min(each.strays[origin] for each in seen) for origin in seen[0].strays})
    found = []
    for each in seen:
        excess = (each.strays - common).total()
        held, rest, parts = dict(each.held), dict(each.rest), dict(each.peak.parts)
        held[ELSEWHERE] -= excess
        rest[ELSEWHERE] -= excess
        parts[BEFORE] -= excess
        found.append(each._replace(held=held, rest=rest, peak=each.peak._replace(parts=parts)))
    return found
