"""The well-known frameworks beside the simulator: DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed.

Owns which are run, and starts them. ``worker`` is what the ranks do,
``comparison`` holds what they saw to the simulator. Must not know torch.

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

from zerosim.frameworks.comparison import FrameworkComparison
from zerosim.frameworks.observation import Observation
from zerosim.frameworks.variants import VARIANTS, Task, Variant
from zerosim.real_ranks.agreement import versions
from zerosim.real_ranks.cases import model
from zerosim.real_ranks.connection import Arrived, Go
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.real_ranks.corroborate import INTERRUPTED, jobs, validate
from zerosim.real_ranks.launch import ForkServer, ForkServerError, Group
from zerosim.records.frameworks import SCHEMA, Family, Framework, Frameworks
from zerosim.records.real_ranks import Settings
from zerosim.records.results import Failure

Advance = Callable[[str], None]
TASK, OBSERVATION = "task", "observation-{}"  # files beside the ranks' store: what they shall do, what each saw
LEAST_STEPS = 8  # the first two differ, of the last not all is known, and of five one sees all that there is
_LOADED = {
    True: "deepspeed",
    False: "zerosim.frameworks.worker",
}  # before ranks are forked, by whether it is DeepSpeed's
_SLOW = 4  # how much more patience DeepSpeed needs


def work(variants: Sequence[Variant] = VARIANTS) -> int:
    """How many times ``run`` will call ``advance``."""
    return len(variants)


def run(
    settings: Settings,
    advance: Advance = lambda doing: None,
    *,
    timeout: float = 30.0,
    interface: str | None = None,
    variants: Sequence[Variant] = VARIANTS,
) -> Frameworks:
    """Train ``variants`` on gloo, each on ``settings.ranks`` real ranks of this machine, and compare.

    Options as of ``corroborate.run``; at least ``LEAST_STEPS`` steps are made. ValueError, or
    ModuleNotFoundError without torch, for what cannot be run. A rank that fails, and an
    interrupt, end it early: what was found is returned, and ``ended`` says why.
    """
    validate(settings)
    steps = max(settings.steps, LEAST_STEPS)
    known = versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        known["deepspeed"] = importlib.metadata.version("deepspeed")
    found: list[Framework] = []
    failures: list[Failure] = []
    ended = ""
    try:
        for special, some in groupby(variants, key=lambda each: each.family is Family.DEEPSPEED):
            if special and not importlib.util.find_spec("deepspeed"):
                for variant in some:
                    advance(variant.name)
                    found.append(_skipped(variant, "deepspeed is not installed; pip install 'zerosim[deepspeed]'"))
                continue
            with ForkServer(_LOADED[special], interface) as server:
                for variant in some:
                    advance(variant.name)
                    comparison = FrameworkComparison(
                        variant, settings, steps, _observed(server, variant, settings, steps, timeout)
                    )
                    found.append(comparison.record())
                    failures += comparison.failures
    except (RankFailure, ForkServerError) as failure:
        ended = str(failure)
    except KeyboardInterrupt:
        ended = INTERRUPTED
    found += [_skipped(variant, "not reached") for variant in variants[len(found) :]]
    return Frameworks(
        schema=SCHEMA,
        versions=known,
        settings=settings,
        steps=steps,
        n_params=model(settings).n_params,
        ended=ended,
        rows=found,
        failures=failures,
    )


def _skipped(variant: Variant, reason: str) -> Framework:
    return Framework(
        name=variant.name, family=variant.family, precision=variant.precision, wire=variant.wire, skipped=reason
    )


def _observed(
    server: ForkServer, variant: Variant, settings: Settings, steps: int, timeout: float
) -> list[Observation]:
    """What each rank saw of the run."""
    task = Task(
        variant=variant, ranks=settings.ranks, steps=steps, batch=settings.batch, seed=settings.seed,
        model_seed=settings.model_seed, widths=settings.widths,
    )  # fmt: skip
    with Group(server, settings.ranks, "zerosim.frameworks.worker") as group:
        folder = Path(group.scratch)
        (folder / TASK).write_bytes(pickle.dumps(task))
        for order, connection in zip(jobs(group, settings, timeout), group.connections, strict=True):
            connection.send(order)
        coordinator = Coordinator(
            group.connections, timeout * (_SLOW if variant.family is Family.DEEPSPEED else 1), group
        )
        for _ in range(2 * steps + 2):  # before and after each step, when all is read, and at the end
            coordinator.gather(Arrived, f"the run of {variant.name}")
            coordinator.tell(Go())
        return [pickle.loads((folder / OBSERVATION.format(rank)).read_bytes()) for rank in range(settings.ranks)]
