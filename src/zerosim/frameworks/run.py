"""The well-known frameworks beside the simulator: DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed.

Owns which are run, and starts them. ``worker`` is what the ranks do,
``comparison`` holds what they saw to the simulator. Must not know torch.

Checked, so that the exit code depends on it: DDP's and FSDP2's gradients are the simulator's
ring over the local gradients, bit for bit; the kernel counted what the collectives' payload and
gloo's framing explain, to the byte; the ranks end with the same parameters. The rest is observed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from zerosim.frameworks.comparison import FrameworkComparison
from zerosim.frameworks.observation import Observation
from zerosim.frameworks.variants import VARIANTS, Task, Variant
from zerosim.real_ranks.agreement import versions
from zerosim.real_ranks.cases import model
from zerosim.real_ranks.connection import Arrived, Connection, Go, Result
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.real_ranks.corroborate import INTERRUPTED, PATIENCE, loopback, validate
from zerosim.real_ranks.processes import Heartbeat, children, meeting_point
from zerosim.records.frameworks import SCHEMA, Family, Framework, Frameworks
from zerosim.records.real_ranks import Settings
from zerosim.records.results import Failure

Advance = Callable[[str], None]
LEAST_STEPS = 8  # the first two differ, of the last not all is known, and of five one sees all that there is
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
        for variant in variants:
            advance(variant.name)
            if reason := variant.unfit(settings.ranks):
                found.append(_skipped(variant, reason))
                continue
            if variant.family is Family.DEEPSPEED:
                if not importlib.util.find_spec("deepspeed"):
                    found.append(_skipped(variant, "deepspeed is not installed; pip install 'zerosim[deepspeed]'"))
                    continue
                _quietly("deepspeed")  # once, before ranks are forked: it takes seconds
            observed = _observed(variant, settings, steps, timeout, interface)
            comparison = FrameworkComparison(variant, settings, steps, observed)
            found.append(comparison.record())
            failures += comparison.failures
    except RankFailure as failure:
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
    variant: Variant, settings: Settings, steps: int, timeout: float, interface: str | None
) -> list[Observation]:
    """What each rank saw of the run."""
    worker = _quietly("zerosim.frameworks.worker")  # only now: it imports torch
    task = Task(
        variant=variant, ranks=settings.ranks, steps=steps, batch=settings.batch, seed=settings.seed,
        model_seed=settings.model_seed, widths=settings.widths,
    )  # fmt: skip
    with meeting_point() as path:

        def rank(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
            worker.observe(connection, heartbeat, task, number, path, PATIENCE * timeout, interface or loopback())

        with children(settings.ranks, rank) as ranks:
            patience = timeout * (_SLOW if variant.family is Family.DEEPSPEED else 1)
            coordinator = Coordinator([each.connection for each in ranks], patience, ranks)
            doing = f"the run of {variant.name}"
            for _ in range(2 * steps + 2):  # before and after each step, when all is read, and at the end
                coordinator.gather(Arrived, doing)
                coordinator.tell(Go())
            return [pickle.loads(result.data) for result in coordinator.gather(Result, doing)]


def _quietly(module: str) -> Any:
    """Import what frameworks are part of. What they print and warn of meanwhile is theirs."""
    with (
        contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        return importlib.import_module(module)
