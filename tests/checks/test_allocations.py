"""Memory has nowhere to hide: what a step keeps outside the ledger is found wherever it is, with step and bytes.

Each fault is planted in one scheme's step and keeps a copy of what the rank has for as long as it says; only the
account of the interpreter's own memory is asked.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

import zerosim.parameters
from helpers import batches
from zerosim.checks import allocations
from zerosim.lab import suite
from zerosim.options import Options
from zerosim.parameters import Parameters
from zerosim.pool import Pool
from zerosim.records.results import Check, Failure, Settings
from zerosim.stages import DP, Stage, ZeRO2, ZeRO3

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
RANKS, WIDTHS = 5, (64, 48, 16)
SETTINGS = Settings(
    ranks=RANKS, steps=2, batch=3, seed=0, model_seed=0, precision="fp32", wire="fp32", gather="layer", data="noise",
    capacity=None, widths=list(WIDTHS),
)  # fmt: skip


class Slots:
    __slots__ = ("kept",)


@lru_cache(maxsize=1)
def cached(key: int) -> list[Any]:
    return []


def suspended(array: Any) -> Iterator[int]:
    held = array.copy()
    yield held.size
    yield held.size


@contextmanager
def entered(array: Any) -> Iterator[None]:
    held = array.copy()
    yield
    held.fill(0)


LOCAL, SLOTS, SPACE, GLOBAL = threading.local(), Slots(), SimpleNamespace(), dict[str, Any]()


def in_generator(array: Any) -> None:
    GLOBAL["generator"] = it = suspended(array)
    next(it)


def in_context(array: Any) -> None:
    GLOBAL["context"] = it = entered(array)
    it.__enter__()


PLACES: dict[str, Callable[[Any], object]] = {
    "a global": lambda array: GLOBAL.update(kept=array.copy()),
    "a cache": lambda array: cached(1).append(array.copy()),
    "a generator": in_generator,
    "a context manager": in_context,
    "a namespace": lambda array: setattr(SPACE, "kept", array.copy()),
    "slots": lambda array: setattr(SLOTS, "kept", array.copy()),
    "a thread-local": lambda array: setattr(LOCAL, "kept", array.copy()),
    "numbers": lambda array: GLOBAL.update(kept=array.astype(np.intp)),
    "bytes": lambda array: GLOBAL.update(kept=array.tobytes()),
    "lists": lambda array: GLOBAL.update(kept=array.tolist()),
}


def forget() -> None:
    GLOBAL.clear()
    cached.cache_clear()
    for place in (SPACE, SLOTS, LOCAL):
        if hasattr(place, "kept"):
            del place.kept


def looked_at(ranks: int = RANKS) -> list[Failure]:
    """What the account says of two steps of ZeRO-3."""
    return allocations.run(ZeRO3, SETTINGS, ranks, batches(ranks, 2, rows=3, widths=WIDTHS))


@pytest.mark.parametrize("ranks", [RANKS, 67, 257])
def test_nothing_is_said_of_a_step_that_hides_nothing(ranks: int) -> None:
    """Every block of a step is explained, or is bookkeeping, of which there is more where there are more ranks."""
    assert looked_at(ranks) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kept", ["within a step", "from the second step on"])
def test_what_is_kept_is_found_wherever_it_is(place: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes outside the ledger, of the step, from the line that asked for it."""
    gather, calls = Parameters._fetch_group, [0]
    where = {"filename": zerosim.parameters.__file__}
    hide = eval(compile("lambda keep, array: keep(array)", where["filename"], "eval"))  # a line of the package

    def fetch(self: Parameters, group: Any) -> None:
        gather(self, group)
        calls[0] += 1
        if kept == "within a step" or calls[0] > 4:  # four are gathered in a step
            hide(PLACES[place], self._full[group])

    release = Parameters._release

    def let_go(self: Parameters, *given: Any) -> None:
        release(self, *given)
        if kept == "within a step" and self._backward and not self._full:
            forget()

    monkeypatch.setattr(Parameters, "_fetch_group", fetch)
    monkeypatch.setattr(Parameters, "_release", let_go)
    failures = looked_at()
    forget()
    assert failures, place
    first = failures[0]
    assert (first.check, first.scheme, first.ranks, first.step) == (Check.AS_PREDICTED, "ZeRO-3", RANKS, 2)
    assert (first.rank, first.expected) == (-1, "0")
    assert first.quantity.startswith("bytes outside the ledger, made at parameters.py:1, ")
    assert int(first.measured.replace(",", "")) >= RANKS * (48 * 16 + 16) * 4


def test_the_account_is_of_a_run_under_the_settings_without_a_limit() -> None:
    """Precision, batch and ranks are the lab's; a card that is too small has been said to be so elsewhere."""

    class Made(Exception):
        pass

    def row(model: object, ranks: int, options: Options, **_: object) -> None:
        raise Made(ranks, options)

    settings = replace(SETTINGS, precision="bf16", capacity=1, host_capacity=1)
    with pytest.raises(Made) as made:
        allocations.run(cast("Stage", row), settings, RANKS, [])
    assert made.value.args == (RANKS, replace(settings, capacity=None, host_capacity=None).options())


def test_a_pool_that_piles_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed arrays that are not used again show as bytes that a step made though the one before had freed as many."""
    monkeypatch.setattr(Pool, "give", lambda self, array: None)
    failures = allocations.run(ZeRO2, SETTINGS, RANKS, batches(RANKS, 2, rows=3, widths=WIDTHS))
    assert [(each.scheme, each.step) for each in failures if each.quantity == allocations.PILED] == [("ZeRO-2", 2)]


def test_the_lab_asks_of_every_scheme_on_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account is kept once for each scheme, where N is the lab's, and what it says is among the lab's failures."""
    seen = []

    def asked(row: Stage, settings: Settings, ranks: int, given: Any) -> list[Failure]:
        seen.append((row.name, ranks))
        return real(row, settings, ranks, given)

    real = allocations.run
    monkeypatch.setattr(allocations, "run", asked)
    monkeypatch.setattr(Pool, "give", lambda self, array: None)
    settings = replace(SETTINGS, ranks=2, widths=[64, 48])
    piled = [each for each in suite.run(settings, rows=[DP, ZeRO3]).failures if each.quantity == allocations.PILED]
    assert seen == [("data parallel", 2), ("ZeRO-3", 2)]
    assert {each.scheme for each in piled} == {"data parallel", "ZeRO-3"}
