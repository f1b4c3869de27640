"""Corroboration: the same schemes on real ranks, held to the simulator bit for bit and byte for byte.

Owns what is run and in which order, who must agree on what before anything runs, and what
becomes of a run that ends early. Prints nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from zerosim.real_ranks import agreement
from zerosim.real_ranks.cases import COLLECTIVES, cases, model
from zerosim.real_ranks.comparison import BITS, PROCESS, SOCKETS, RunComparison
from zerosim.real_ranks.connection import Arrived, Go, Hello, Job, Ready, Simulated, Stepped
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.real_ranks.launch import ForkServer, ForkServerError, Group
from zerosim.records.real_ranks import RECIPES, RING, SCHEMA, WORKING, Corroboration, Run, Settings
from zerosim.records.results import Failure
from zerosim.util import arguments

Advance = Callable[[str], None]
METERED = ("gloo",)  # backends whose framing is known, and that sum in the order of the ring
INTERRUPTED = "Interrupted."
_PATIENCE = 10  # times longer than the command do ranks that it started wait: it is the command that ends them


def run(
    settings: Settings, advance: Advance = lambda doing: None, *, timeout: float = 30.0, interface: str | None = None
) -> Corroboration:
    """Start the ranks on this machine and hold them to the simulator, in all of ``cases(settings)``.

    ``advance`` is told of each of the ``work(settings)`` pieces. ``timeout``: seconds without
    progress after which it is over; ``interface``: what ranks may talk over, loopback unless
    told otherwise. A rank that fails, and an interrupt, end it early: what was found up to there
    is returned, marked incomplete, and no process, socket or file is left. ValueError, or
    ModuleNotFoundError without torch, for what cannot be run, before anything is.
    """
    validate(settings)
    advance("starting the ranks")
    found = None
    with (
        contextlib.suppress(KeyboardInterrupt),  # before the first run began, or while tidying up
        ForkServer(interface=interface) as server,
        Group(server, settings.ranks) as group,
    ):
        found = on(group, jobs(group, settings, timeout), advance, timeout)
    return found or nothing(settings)


def on(group: Group, orders: Sequence[Job], advance: Advance, timeout: float) -> Corroboration:
    """``run`` on ranks that have been started, with what each of them is told to do."""
    coordinator = Coordinator(group.connections, timeout, group)
    for order, connection in zip(orders, group.connections, strict=True):
        connection.send(order)
    return coordinate(coordinator, group.server, orders[0].settings, advance)


def jobs(group: Group, settings: Settings, timeout: float) -> list[Job]:
    """What each rank of a group is to be told."""
    store = group.new_file("store")
    return [
        Job(rank=rank, world=settings.ranks, settings=settings, store=store, timeout=_PATIENCE * timeout)
        for rank in range(settings.ranks)
    ]


def validate(settings: Settings) -> None:
    """Refuse settings that cannot be run."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("corroborate needs torch, on which the real ranks run; pip install 'zerosim[torch]'.")
    for option in ("ranks", "steps", "batch"):
        arguments.integer("corroborate", option, getattr(settings, option))
    if settings.ranks < 2:
        raise ValueError("corroborate(ranks): one rank alone sends nothing that could be compared; pass 2 or more.")
    for precision in settings.precisions:
        arguments.one_of("corroborate", "precision", precision, RECIPES)
    for collectives in settings.collectives:
        arguments.one_of("corroborate", "collectives", collectives, COLLECTIVES)
    arguments.one_of("corroborate", "wire", settings.wire, ("fp32", WORKING))


def work(settings: Settings) -> int:
    """How many times ``run`` will call ``advance``."""
    return 1 + len(cases(settings)) * settings.steps


def coordinate(coordinator: Coordinator, server: ForkServer, settings: Settings, advance: Advance) -> Corroboration:
    """See that the ranks agree, take them and a simulator through all runs, and compare. Disagreement if they do not.

    The simulator is forked from ``server``.
    """
    found = None
    with contextlib.suppress(KeyboardInterrupt), Group(server, 1, "zerosim.real_ranks.simulated") as group:
        simulator = Coordinator(group.connections, coordinator.timeout, group, who="The simulator")
        simulator.tell(Job(rank=0, world=settings.ranks, settings=settings, store="", timeout=coordinator.timeout))
        found = _take_through(coordinator, simulator, settings, advance)
    return found or nothing(settings)


def _take_through(
    coordinator: Coordinator, simulator: Coordinator, settings: Settings, advance: Advance
) -> Corroboration:
    runs: list[Run] = []
    failures: list[Failure] = []
    ready = _NOT_READY
    versions: dict[str, str] = {}
    comparison: RunComparison | None = None
    ended = ""
    try:
        versions = _agree(coordinator)
        ready = _ready(coordinator, settings)
        for case in cases(settings):
            comparable = case.collectives == RING or BITS not in ready.unmeasured
            comparison = RunComparison(settings, case, metered=settings.backend in METERED, comparable=comparable)
            for step in range(1, settings.steps + 1):
                doing = f"{case}: step {step} of {settings.steps}"
                advance(doing)
                coordinator.tell(Go())
                for _ in ("before the step", "after it"):  # where all have read their counters, and all may
                    coordinator.gather(Arrived, doing)
                    coordinator.tell(Go())
                told = coordinator.gather(Stepped, doing)
                simulator.tell(Go())  # only now, when its computing disturbs no measurement
                [expected] = simulator.gather(Simulated, doing)
                comparison.step(expected, told)
            runs.append(comparison.record())
            failures += comparison.failures
            comparison = None
    except (RankFailure, ForkServerError) as failure:
        ended = str(failure)
    except KeyboardInterrupt:
        ended = coordinator.verdict() or INTERRUPTED
    if comparison is not None:
        runs.append(comparison.record())
        failures += comparison.failures
    coordinator.dismiss(ended, 1 if ended or failures else 0)
    return _record(settings, ended, versions, ready, runs, failures)


_NOT_READY = Ready(order="", unmeasured={}, addresses=[])


def nothing(settings: Settings) -> Corroboration:
    """The record of what was interrupted before it began."""
    return _record(settings, INTERRUPTED, {}, _NOT_READY, [], [])


def _record(
    settings: Settings, ended: str, versions: dict[str, str], ready: Ready, runs: list[Run], failures: list[Failure]
) -> Corroboration:
    return Corroboration(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        settings=settings,
        n_params=model(settings).n_params,
        complete=not ended,
        ended=ended,
        order=ready.order,
        unmeasured=ready.unmeasured,
        addresses=ready.addresses,
        runs=runs,
        failures=failures,
    )


def _agree(coordinator: Coordinator) -> dict[str, str]:
    """Let the ranks begin if all can, believe the same and run the code that runs here; their libraries' versions."""
    hellos = coordinator.gather(Hello, "introducing themselves")
    if unfit := next((hello.unfit for hello in hellos if hello.unfit), ""):
        coordinator.dismiss(unfit, 2)
        raise ValueError(unfit)
    found = agreement.differences(
        {f"rank {rank}": facts(hello) for rank, hello in enumerate(hellos)}
        | {"the command": {"code": agreement.code_version()}}
    )
    if found:
        text = f"The ranks do not agree, and nothing was run: {'; '.join(found)}."
        coordinator.dismiss(text, 2)
        raise agreement.Disagreement(text)
    coordinator.tell(Go())
    return hellos[0].versions


def facts(hello: Hello) -> dict[str, Any]:
    """What a rank believes, by name."""
    return {
        "world size": hello.world,
        "code": hello.code,
        **{f"version of {name}": version for name, version in hello.versions.items()},
        **msgspec.to_builtins(hello.settings),
    }


def _ready(coordinator: Coordinator, settings: Settings) -> Ready:
    """Wait until the ranks are connected; what they found, put together."""
    each = coordinator.gather(Ready, "connecting and the first steps")
    unmeasured = {name: why for ready in each for name, why in ready.unmeasured.items()}
    if settings.backend not in METERED:
        unmeasured = dict.fromkeys((PROCESS, SOCKETS), f"what {settings.backend} adds to a payload is not known")
    order = "ring" if all(ready.order == "ring" for ready in each) else "other"
    if order != "ring" and settings.backend not in METERED:
        unmeasured[BITS] = f"{settings.backend}'s own all-reduce sums in another order than the ring"
    return Ready(
        order=order,
        unmeasured=unmeasured,
        addresses=sorted(set(_flat(ready.addresses for ready in each))),
    )


def _flat(lists: Iterable[list[str]]) -> list[str]:
    return [each for some in lists for each in some]
