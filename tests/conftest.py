"""What every test runs under: shapes are checked, floating errors raise, examples repeat."""

import os

# Read once, at import. The tests' arrays are small and each worker has a core: threads would only compete.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"  # the environment, so that a command run by a test has it too

from collections.abc import Iterator

import hypothesis
import jaxtyping
import numpy as np
import pytest
from jaxtyping import install_import_hook

# Only here: users pay nothing for the shapes in the signatures. Must precede every import of zerosim.
# As for mypy, an int will do where a float is asked for.
install_import_hook("zerosim", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

# The same examples everywhere, so that what fails in one place fails in all.
# To look for new ones: pytest --hypothesis-profile=default
pytest.register_assert_rewrite("helpers", "planting")  # so that what fails there says why, as it does in a test

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


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
    from zerosim.checks import allocations, sanitizer

    for check in (allocations, sanitizer):
        monkeypatch.setattr(check, "run", lambda *_: [])
