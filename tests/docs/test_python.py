"""docs/python.md: what a newcomer copies runs as it stands, in five lines or so, and shows what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))


def ran(title: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that an example leaves behind."""
    monkeypatch.chdir(folder)
    space: dict[str, Any] = {}
    exec(EXAMPLES[title], space)
    return space


def test_there_are_five_and_none_is_longer_than_five_lines() -> None:
    """The five things that a newcomer wants take at most five lines each, the import included."""
    assert len(EXAMPLES) == 5
    assert {title: code for title, code in EXAMPLES.items() if len(code.splitlines()) > 5} == {}


def test_a_run_and_its_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a picture of the last of three steps."""
    run = ran("A run and its memory timeline", tmp_path, monkeypatch)["run"]
    assert run.timeline().step == len(run.reports) == 3
    with Image.open(tmp_path / "step.png") as image:
        assert min(image.size) > 500


def test_a_page_of_ones_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the run's peak and the events of its step."""
    run = ran("A page of a run of one's own", tmp_path, monkeypatch)["run"]
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert f"{run.reports[-1].peak.total:,}" in page
    assert "ZeRO-3" in page


@pytest.mark.slow
def test_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It fits, and the answer, the table and the chart say so."""
    pytest.importorskip("transformers")
    plan = ran("A plan", tmp_path, monkeypatch)["plan"]
    assert plan.fits
    assert plan.best.name in capsys.readouterr().out
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_ones_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All four rows learn the same bits."""
    pytest.importorskip("torch")
    found = ran("One's own module, row by row", tmp_path, monkeypatch)["found"]
    assert found.holds
    assert "✓ same training holds" in capsys.readouterr().out


def test_a_thousand_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank holds a 1,024th of 16 bytes per parameter at rest, padding aside."""
    report = ran("A thousand ranks", tmp_path, monkeypatch)["report"]
    parameters = 4096 * 16384 * 2 + 16384 + 4096
    assert sum(report.resident.values()) == 16 * parameters // 1024
