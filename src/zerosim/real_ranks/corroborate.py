"""Corroboration: the same schemes on real ranks, held to the simulator bit for bit and byte for byte.

Owns what is run and in which order, who must agree on what before anything runs, and what
becomes of a run that ends early. Prints nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from zerosim.layers import Model
from zerosim.real_ranks import agreement, cases
from zerosim.real_ranks.cases import COLLECTIVES, Batches, Case
from zerosim.real_ranks.comparison import RunComparison
from zerosim.real_ranks.connection import Arrived, Began, Connection, Go, Hello, Ready, Stepped
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.real_ranks.processes import Heartbeat, children, meeting_point
from zerosim.real_ranks.simulation import Simulation, calls_of_a_step, check_trainable, one_thread
from zerosim.records.real_ranks import (
    BITS,
    PROCESS,
    RECIPES,
    RING,
    SCHEMA,
    SOCKETS,
    WORKING,
    Corroboration,
    Run,
    Settings,
)
from zerosim.records.results import Failure
from zerosim.util import arguments

Advance = Callable[[str], None]
METERED = ("gloo",)  # backends whose framing is known, and that sum in the order of the ring
INTERRUPTED = "Interrupted."
PATIENCE = 10  # times longer than the command do ranks wait: it is the command that ends them


def run(
    settings: Settings,
    advance: Advance = lambda doing: None,
    *,
    timeout: float = 30.0,
    interface: str | None = None,
) -> Corroboration:
    """Start the ranks on this machine and hold them to the simulator, in all of ``cases(settings)``.

    ``advance`` is told of each of the ``work(settings)`` pieces. ``timeout``: seconds without progress after
    which it is over; ``interface``: what ranks may talk over, loopback unless told otherwise. A rank that fails,
    and an interrupt, end it early: what was found up to there is returned, marked incomplete, and no process, socket
    or file is left. ValueError, or ModuleNotFoundError without torch, for what cannot be run, before anything is.
    """
    validate(settings)
    model, data = cases.trained(settings)
    check_trainable(settings, model)
    advance("starting the ranks")
    found = None
    with contextlib.suppress(KeyboardInterrupt):  # before the first run began, or while tidying up
        found = _on_this_machine(settings, advance, timeout, interface or loopback(), model, data)
    return found or nothing(settings, model)


def _on_this_machine(
    settings: Settings, advance: Advance, timeout: float, interface: str, model: Model, data: Batches
) -> Corroboration:
    from zerosim.real_ranks import worker  # only now: it imports torch
    from zerosim.worlds import torch_ring

    with meeting_point() as path:

        def rank(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
            store = torch_ring.file_store(path, settings.ranks)
            task = worker.Task(number, settings.ranks, number, settings, model, data, PATIENCE * timeout, interface)
            with contextlib.suppress(worker.Dismissed):
                worker.take_part(connection, task, store, heartbeat)

        with children(settings.ranks, rank) as ranks:
            coordinator = Coordinator([each.connection for each in ranks], timeout, ranks)
            return coordinate(coordinator, settings, advance, model, data)


def validate(settings: Settings) -> None:
    """Refuse settings that cannot be run."""
    arguments.installed("corroborate", "torch", "threadpoolctl", extra="torch")
    for option in ("ranks", "steps", "batch"):
        arguments.integer("corroborate", option, getattr(settings, option))
    if settings.ranks < 2:
        raise ValueError("corroborate(ranks): one rank alone sends nothing that could be compared; pass 2 or more.")
    for precision in settings.precisions:
        arguments.one_of("corroborate", "precision", precision, RECIPES)
    for collectives in settings.collectives:
        arguments.one_of("corroborate", "collectives", collectives, COLLECTIVES)
    arguments.one_of("corroborate", "wire", settings.wire, ("fp32", WORKING))
    for precision in settings.precisions:
        arguments.divides("corroborate(batch)", "accumulate", settings.options(precision).accumulate, settings.batch)


def work(settings: Settings) -> int:
    """How many times ``run`` will call ``advance``."""
    return 1 + len(cases.cases(settings)) * settings.steps


def coordinate(
    coordinator: Coordinator, settings: Settings, advance: Advance, model: Model, data: Batches
) -> Corroboration:
    """See that the ranks agree, take them and the simulator through all runs, and compare.

    Disagreement if they do not agree.
    """
    with one_thread():
        return _Corroboration(coordinator, settings, advance, model, data).go()


class _Corroboration:
    """A corroboration under way."""

    def __init__(
        self, coordinator: Coordinator, settings: Settings, advance: Advance, model: Model, data: Batches
    ) -> None:
        self._coordinator, self._settings, self._advance = coordinator, settings, advance
        self._model, self._data = model, data
        self._runs: list[Run] = []
        self._failures: list[Failure] = []
        self._elsewhere: dict[str, int] = {}
        self._comparison: RunComparison | None = None

    def go(self) -> Corroboration:
        """All of it, or as far as it goes; the record."""
        ready, versions, ended, errors = _NOT_READY, dict[str, str](), "", dict[int, str]()
        try:
            versions = _agree(self._coordinator)
            ready = _ready(self._coordinator, self._settings)
            for case in cases.cases(self._settings):
                comparable = case.collectives == RING or BITS not in ready.unmeasured
                self._run(case, comparable, ready.memory)
                self._keep()
        except RankFailure as failure:
            ended, errors = str(failure), failure.others
        except KeyboardInterrupt:
            verdict = self._coordinator.verdict()
            ended, errors = (verdict.text, verdict.others) if verdict else (INTERRUPTED, {})
        self._keep()
        self._coordinator.dismiss(ended, 1 if ended or self._failures else 0)
        return _record(
            self._settings, self._model, ended, versions, ready, self._runs, self._failures, errors, self._elsewhere
        )

    def _keep(self) -> None:
        """What the run under way has found."""
        if self._comparison is not None:
            self._runs.append(self._comparison.record())
            self._failures += self._comparison.failures
            for name, count in self._comparison.elsewhere.items():
                self._elsewhere[name] = self._elsewhere.get(name, 0) + count
        self._comparison = None

    def _run(self, case: Case, comparable: bool, memory: list[int]) -> None:
        coordinator, settings = self._coordinator, self._settings
        simulation = Simulation(settings, case, self._model)
        self._comparison = comparison = RunComparison(
            settings, case, metered=settings.backend in METERED, comparable=comparable
        )
        coordinator.tell(Go())
        comparison.begin(simulation.states, coordinator.gather(Began, f"{case}: the start"), memory)
        for step, batch in enumerate(self._data, start=1):
            doing = f"{case}: step {step} of {settings.steps}"
            self._advance(doing)
            coordinator.tell(Go())
            coordinator.gather(Arrived, doing)  # all have read their counters
            coordinator.calls = lambda: calls_of_a_step(settings, case, self._model, self._data[0])
            coordinator.tell(Go())
            coordinator.gather(Arrived, doing)  # all have ended the step
            coordinator.calls = None
            coordinator.tell(Go())
            stepped = coordinator.gather(Stepped, doing)
            comparison.step(simulation.step(batch), stepped)  # only now, when its computing disturbs no measurement


class _Ready(msgspec.Struct):
    """What the ranks found, put together. ``memory`` is each rank's."""

    order: str = ""
    unmeasured: dict[str, str] = {}
    addresses: list[str] = []
    memory: list[int] = []


_NOT_READY = _Ready()


def nothing(settings: Settings, model: Model) -> Corroboration:
    """The record of what was interrupted before it began."""
    return _record(settings, model, INTERRUPTED, {}, _NOT_READY, [], [], {}, {})


def _record(
    settings: Settings, model: Model, ended: str, versions: dict[str, str], ready: _Ready, runs: list[Run],
    failures: list[Failure], errors: dict[int, str], elsewhere: dict[str, int],
) -> Corroboration:  # fmt: skip
    return Corroboration(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        settings=settings,
        n_params=model.n_params,
        complete=not ended,
        ended=ended,
        errors={str(rank): text for rank, text in errors.items()},
        order=ready.order,
        unmeasured=ready.unmeasured,
        elsewhere=elsewhere,
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
    """What a rank believes and runs, by name."""
    return {
        "world size": hello.world,
        "code": hello.code,
        **{f"version of {name}": version for name, version in hello.versions.items()},
        **{f"threads of {name}": count for name, count in hello.threads.items()},
        **msgspec.to_builtins(hello.settings),
    }


def _ready(coordinator: Coordinator, settings: Settings) -> _Ready:
    """Wait until the ranks are connected; what they found, put together."""
    each = coordinator.gather(Ready, "connecting and the first steps")
    unmeasured = {name: why for ready in each for name, why in ready.unmeasured.items()}
    if settings.backend not in METERED:
        unmeasured |= dict.fromkeys((PROCESS, SOCKETS), f"what {settings.backend} adds to a payload is not known")
    order = "ring" if all(ready.order == "ring" for ready in each) else "other"
    if order != "ring" and settings.backend not in METERED:
        unmeasured[BITS] = f"{settings.backend}'s own all-reduce sums in another order than the ring"
    return _Ready(
        order=order,
        unmeasured=unmeasured,
        addresses=sorted({address for ready in each for address in ready.addresses}),
        memory=[ready.memory for ready in each],
    )


def loopback() -> str:
    """The name of the network interface that has 127.0.0.1."""
    import psutil

    for name, known in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in known):
            return name
    raise OSError("corroborate(interface): no interface has the address 127.0.0.1; name one with --interface.")
