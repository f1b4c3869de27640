"""The well-known frameworks beside the simulator: DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed.

Owns which are run, and starts them. ``rank`` is what the ranks do, ``judge``
holds what they saw to the simulator. Must not know torch.

Checked, so that the exit code depends on it: DDP's and FSDP2's gradients are the simulator's
ring over the local gradients, bit for bit; the kernel counted what the collectives' payload and
gloo's framing explain, to the byte; the ranks end with the same parameters. The rest is observed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import pickle
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from zerosim.frameworks.comparison import Judge
from zerosim.real_ranks import setup as agreed
from zerosim.real_ranks.coordinator import Hub, RankFailure
from zerosim.real_ranks.corroborate import INTERRUPTED, jobs, validate
from zerosim.real_ranks.launch import Group, Nursery, NurseryError
from zerosim.real_ranks.messages import Arrived, Go
from zerosim.records.frameworks import JOB, SCHEMA, SEEN, Family, Framework, Frameworks, Row, Seen, Task
from zerosim.records.real_ranks import Settings
from zerosim.records.results import Failure

Advance = Callable[[str], None]
LEAST_STEPS = 8  # the first two differ, of the last not all is known, and of five one sees all that there is
_LOADED = {
    True: "deepspeed",
    False: "zerosim.frameworks.worker",
}  # before ranks are forked, by whether it is DeepSpeed's
_SLOW = 4  # how much more patience DeepSpeed needs
# DeepSpeed gathers a small model once and keeps it, and its bucket has room for 5e8 gradients. Not so with these.
_NOTHING_KEPT = {
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "reduce_bucket_size": 50_000,
}
ROWS = (
    Row("DDP", Family.DDP),
    Row("DDP, gradient_as_bucket_view", Family.DDP, options={"gradient_as_bucket_view": True}),
    Row("DDP, fp16_compress_hook", Family.DDP, wire="fp16"),
    Row("DDP + ZeroRedundancyOptimizer", Family.ZERO_REDUNDANCY),
    Row("FSDP2, reshard_after_forward=False", Family.FSDP, options={"reshard_after_forward": False}),
    Row("FSDP2, reshard_after_forward=True", Family.FSDP, options={"reshard_after_forward": True}),
    Row("FSDP2, reshard_after_forward=True, bf16", Family.FSDP, "bf16", "bf16", {"reshard_after_forward": True}),
    *(
        Row(
            f"DeepSpeed stage {stage}{kept}, {precision}",
            Family.DEEPSPEED,
            precision,
            precision,
            {"stage": stage} | more,
        )
        for precision in ("fp32", "bf16")
        for stage, kept, more in ((1, "", {}), (2, "", {}), (3, "", {}), (3, ", nothing kept", _NOTHING_KEPT))
    ),
)


def work(rows: Sequence[Row] = ROWS) -> int:
    """How many times ``run`` will call ``advance``."""
    return len(rows)


def run(
    settings: Settings,
    advance: Advance = lambda doing: None,
    *,
    timeout: float = 30.0,
    interface: str | None = None,
    rows: Sequence[Row] = ROWS,
) -> Frameworks:
    """Train ``rows`` on gloo, each on ``settings.ranks`` real ranks of this machine, and compare.

    Options as of ``corroborate.run``; at least ``LEAST_STEPS`` steps are made. ValueError, or
    ModuleNotFoundError without torch, for what cannot be run. A rank that fails, and an
    interrupt, end it early: what was found is returned, and ``ended`` says why.
    """
    validate(settings)
    steps = max(settings.steps, LEAST_STEPS)
    versions = agreed.versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["deepspeed"] = importlib.metadata.version("deepspeed")
    found: list[Framework] = []
    failures: list[Failure] = []
    ended = ""
    try:
        for special, some in groupby(rows, key=lambda row: row.family is Family.DEEPSPEED):
            if special and not importlib.util.find_spec("deepspeed"):
                for row in some:
                    advance(row.name)
                    found.append(_skipped(row, "deepspeed is not installed; pip install 'zerosim[deepspeed]'"))
                continue
            with Nursery(_LOADED[special], interface) as nursery:
                for row in some:
                    advance(row.name)
                    judge = Judge(row, settings, steps, _watched(nursery, row, settings, steps, timeout))
                    found.append(judge.record())
                    failures += judge.failures
    except (RankFailure, NurseryError) as failure:
        ended = str(failure)
    except KeyboardInterrupt:
        ended = INTERRUPTED
    found += [_skipped(row, "not reached") for row in rows[len(found) :]]
    return Frameworks(
        schema=SCHEMA,
        versions=versions,
        settings=settings,
        steps=steps,
        n_params=agreed.model(settings).n_params,
        ended=ended,
        rows=found,
        failures=failures,
    )


def _skipped(row: Row, reason: str) -> Framework:
    return Framework(name=row.name, family=row.family, precision=row.precision, wire=row.wire, skipped=reason)


def _watched(nursery: Nursery, row: Row, settings: Settings, steps: int, timeout: float) -> list[Seen]:
    """What each rank saw of the run."""
    task = Task(
        row=row, ranks=settings.ranks, steps=steps, batch=settings.batch, seed=settings.seed,
        model_seed=settings.model_seed, widths=settings.widths,
    )  # fmt: skip
    with Group(nursery, settings.ranks, "zerosim.frameworks.worker") as group:
        folder = Path(group.scratch)
        (folder / JOB).write_bytes(pickle.dumps(task))
        for order, line in zip(jobs(group, settings, timeout), group.lines, strict=True):
            line.send(order)
        hub = Hub(group.lines, timeout * (_SLOW if row.family is Family.DEEPSPEED else 1), group)
        for _ in range(2 * steps + 2):  # before and after each step, when all is read, and at the end
            hub.gather(Arrived, f"the run of {row.name}")
            hub.tell(Go())
        return [pickle.loads((folder / SEEN.format(rank)).read_bytes()) for rank in range(settings.ranks)]
