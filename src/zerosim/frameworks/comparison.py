"""One framework's run, held to the simulator's ring, to the kernel's counts, and to the textbook.

Owns these comparisons, and the reasons for which a framework leaves the row that it behaves like; ``likeness``
chooses that. Must not know how ranks are started, nor torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np

from zerosim import theory
from zerosim.bands import WIRES, Array
from zerosim.checks import compare as checks
from zerosim.frameworks import agreements, averages, likeness
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
from zerosim.stages import DP, Stage
from zerosim.worlds import gloo

_SHARDED = {"params": (PARAMS,), "grads": (GRADS,), "optimizer": (MASTER, STATE)}  # by the flag in a scheme's row
_WHY: dict[object, str] = {
    "moved": "its reduce-scatter is an all-reduce of which each rank keeps a slice",
    (Family.DDP, "elsewhere"): "its buckets are copies of the gradients",
    (Family.DDP, "peak"): "what autograd hands on and the optimizer's temporaries are tensors too",
    (Family.ZERO_REDUNDANCY, "elsewhere"): "DDP's buckets are copies of the gradients",
    (Family.ZERO_REDUNDANCY, "uneven"): "tensors are dealt out whole, not cut",
    (Family.ZERO_REDUNDANCY, "peak"): "DDP's buckets, and the optimizer's temporaries",
    (Family.ZERO_REDUNDANCY, "asked"): "DDP all-reduces the gradients over all ranks, then owners broadcast parameters",
    (Family.FSDP, "uneven"): "a parameter's rows are dealt out in equal chunks, of which the last is short",
    (Family.FSDP, "peak"): "a layer is gathered into a buffer and copied out of it, and the next one is gathered ahead",
    (Family.FSDP, "bands"): "every parameter is padded to chunks of equally many rows",
    (Family.FSDP, "asked"): "every parameter is padded to chunks of equally many rows, and that travels too",
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
        sharded, group = self._variant.family is Family.FSDP, self._variant.group or self._settings.ranks
        average = partial(averages.fsdp_average, node=group) if sharded else averages.ddp_average
        for step, samples in enumerate(zip(*(seen.gradients for seen in self._seen), strict=True), start=1):
            expected = average([each.local for each in samples], samples[0].groups, WIRES[self._variant.wire])
            real = [each.averaged for each in samples]
            if sharded:  # each group's shards, put together
                parts = (zip(*real[first : first + group], strict=True) for first in range(0, len(real), group))
                real = [[np.concatenate(shards) for shards in each] for each in parts]
            differing = 0
            for rank, grads in enumerate(real):
                unequal = sum(_differing(*pair) for pair in zip(grads, expected, strict=True))
                self._expect(GRADIENTS, step, rank if len(real) > 1 else -1, "gradients that differ", unequal, 0)
                differing += unequal
            found.append(Gradients(step=step, compared=len(real) * self._n_params, differing=differing))
        return found

    def _rank(self, rank: int, seen: Observation) -> RankSeen:
        size = self._settings.ranks
        each = [gloo.moved(asked, *asked.place(rank, size)) for asked in seen.asked]
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
            asked=sum(gloo.textbook(asked, *asked.place(rank, size)).sent for asked in seen.asked),
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
        """The row that shards the same bands as the framework was seen to, and where the framework leaves it."""
        size, held = self._settings.ranks, {}
        for what, bands in _SHARDED.items():
            held[what] = sum(rank.held.get(band, 0) for rank in ranks for band in bands) / size
        n, itemsize = self._n_params, WIRES[self._variant.wire].itemsize
        unit = n * itemsize * (size - 1) / size
        asked = float(np.mean([rank.asked for rank in ranks])) / unit
        sharded = likeness.sharded(held, self._job)
        row = likeness.row_of(sharded, self._sent(), self._job)
        if row is None:
            shards = " and ".join(f"{what} over {over}" for what, over in sharded.items() if over)
            return None, [f"shards {shards}, as no scheme does"]
        job = self._job(row)
        padded = itemsize * sum(job.chunks()) * (size - 1)  # a unit, of what is sent with padding
        units = sum(likeness.traffic(job).values()) / padded
        totals = [sum(rank.held.values()) / n for rank in ranks]
        elsewhere = min(rank.held[ELSEWHERE] for rank in ranks) / n
        mean, rest = sum(held.values()) / n, np.mean([sum(rank.rest.values()) for rank in ranks]) / n
        textbook = sum(theory.resident(job).values()) / n
        known = [rank.moved for rank in ranks if rank.moved is not None]
        moved = float(np.mean(known)) / unit if known else asked
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
            (abs(asked - units) > 0.05, "asked", f"it asks for {asked:.2f} P for {units:.3g}"),
            (abs(moved - asked) > 0.05, "moved", f"gloo moves {moved:.2f} P"),
        ]
        return row, [self._because(kind, found) for leaves, kind, found in departures if leaves]

    def _sent(self) -> Counter[str]:
        """Bytes that all ranks must send in a step, by what was asked for."""
        sent: Counter[str] = Counter()
        for rank, seen in enumerate(self._seen):
            for asked in seen.asked:
                sent[asked.op] += gloo.textbook(asked, *asked.place(rank, self._settings.ranks)).sent
        return sent

    def _because(self, kind: str, found: str) -> str:
        """What was found, and the reason if it is known."""
        why = _WHY.get((self._variant.family, kind)) or _WHY.get(kind)
        return f"{found} ({why})" if why else found

    def _job(self, row: Stage) -> theory.Job:
        """This run under a row, for the formulas."""
        buckets = tuple((pair,) for pair in pairwise(self._settings.widths))
        return theory.Job(
            row, buckets, self._settings.ranks, self._settings.batch, self._variant.states, self._variant.wire,
            node=self._variant.node,
        )  # fmt: skip


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
