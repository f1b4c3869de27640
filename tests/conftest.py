"""What every test runs under: shapes are checked, floating errors raise, examples repeat."""

import os

# Read once, at import. The tests' arrays are small and each worker has a core: threads would only compete.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"  # the environment, so that a command run by a test has it too

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jaxtyping
import numpy as np
import pytest
from jaxtyping import install_import_hook

check_shapes = jaxtyping.jaxtyped


def check_shapes_if_any(**how: Any) -> Callable[[Any], Any]:
    """As jaxtyping's own, but what is defined within a function, each time that it runs, costs nothing if unchecked."""
    check = check_shapes(**how)

    def checked(defined: Any) -> Any:
        unchecked = jaxtyping.config.jaxtyping_disable and "<locals>" in getattr(defined, "__qualname__", "")
        return defined if unchecked else check(defined)

    return checked


jaxtyping.jaxtyped = check_shapes_if_any  # type: ignore[assignment]
# Only here: users pay nothing for the shapes in the signatures. Must precede every import of zerosim.
# As for mypy, an int will do where a float is asked for.
install_import_hook("zerosim", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

pytest.register_assert_rewrite("helpers", "planting")  # so that what fails there says why, as it does in a test

# The same examples everywhere, so that what fails in one place fails in all; by night all that a test asks for.
# To look for new ones: pytest --hypothesis-profile=default
for profile in ("repeatable", "night"):
    hypothesis.settings.register_profile(profile, derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Where slow tests are not left out, ``helpers.examples`` draws all that it is asked for."""
    if not config.option.markexpr and not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("night")


@pytest.fixture
def as_users_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the session's own checks of types and shapes, which users do not have and which would answer first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def shapes_unchecked() -> Iterator[None]:
    """For files that train thousands of steps: checking shapes, several times as long, is left to the others."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def floating_errors_raise() -> Iterator[None]:
    """Raise on overflow, division by zero and invalid operations; underflow to zero is Adam's daily bread."""
    with np.errstate(all="raise", under="ignore"):
        yield


@pytest.fixture
def unsanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the stricter world and the account of memory, most of a small lab's time, to the tests that are of them."""
    from helpers import leave_memory_alone

    leave_memory_alone(monkeypatch)
