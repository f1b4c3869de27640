"""The stricter world: what is kept or shared is said, with what it is and when it was seen."""

import re
from typing import Any

import numpy as np
import pytest

import zerosim.updates
from helpers import lab_settings
from zerosim.checks import sanitizer
from zerosim.lab.experiment import batches_of
from zerosim.pool import Pool
from zerosim.records.results import Failure
from zerosim.stages import DP, Stage, ZeRO3
from zerosim.updates import Update

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def found(row: Stage = ZeRO3, **asked: Any) -> list[Failure]:
    settings = lab_settings(ranks=2, widths=[5, 3], **asked)
    return sanitizer.run(row, settings, 2, [*batches_of(settings, 2, 2)])


@pytest.mark.parametrize("row", [DP, ZeRO3], ids=lambda row: row.name)
@pytest.mark.parametrize(
    "asked", [{}, {"uneven": True, "batch": 4}, {"uneven": True, "batch": 4, "accumulate": 2}], ids=str
)
def test_a_step_that_hides_nothing_is_clean(row: Stage, asked: dict[str, Any]) -> None:
    """Nothing is said of what is held, nor of a batch, also where ranks have different rows and it is laid out anew."""
    assert found(row, **asked) == []


def test_what_a_module_keeps_is_found_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last step the package's globals are looked through: bytes, dtype and shape, and that it was at rest."""
    apply = Update.apply

    def kept(self: Update, *given: Any, **options: Any) -> Any:
        monkeypatch.setattr(zerosim.updates, "LEFT", np.ones(1_009), raising=False)
        return apply(self, *given, **options)

    monkeypatch.setattr(Update, "apply", kept)
    assert [(each.quantity, each.step, each.measured, each.expected) for each in found()] == [
        ("bytes outside the ledger, float64 of (1009,), at rest", 2, f"{8 * 1_009:,}", "0")
    ]


def test_memory_of_two_arrays_is_said_with_both_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that is held lies in one place: whose bytes are also whose, and during what."""
    memory = np.zeros(10_007, np.uint8)
    monkeypatch.setattr(Pool, "take", lambda self, shape, dtype: np.ndarray(shape, dtype, memory))
    shared = [each.quantity for each in found(DP) if " that are also " in each.quantity]
    assert shared
    for quantity in shared:
        assert re.fullmatch(r"bytes of [\w ]+ of [\w ]+ that are also [\w ]+ of [\w ]+, [\w ,]+", quantity), quantity
