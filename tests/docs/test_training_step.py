"""docs/training_step.md: what it shows runs, and comes out as it says."""

import doctest
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

PAGE = Path(__file__).parents[2] / "docs" / "training_step.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example, one after the other, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    with np.errstate(all="warn"):
        failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert (failed, tried > 10) == (0, True)
