"""What the lab writes: all of it or nothing, what was found and nothing else, whatever comes in between."""

import ast
import errno
import fcntl
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

import record
from helpers import lab_settings
from zerosim.cli import main as cli
from zerosim.cli.errors import replacing
from zerosim.lab import as_records, experiment, suite
from zerosim.lab.record import check_written, contradictions
from zerosim.records import results
from zerosim.records.files import ResultsError
from zerosim.records.results import Results

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
NAMES = {"results.json", "report.html", "trace.json", "memory.png", "loss.png", "traffic.png", "timeline.png"}
LAB = import_module("zerosim.cli.lab")


def found() -> Results:
    kept = record.load("lab_mixed")
    assert isinstance(kept, Results)
    return kept


def run(monkeypatch: pytest.MonkeyPatch, out: Path, before_writing: Any = lambda: None) -> Result:
    """``zerosim lab``, of which the training has been done before."""

    def recorded(*_: Any) -> Results:
        before_writing()
        return found()

    monkeypatch.setattr(LAB, "_run", recorded)
    return CliRunner().invoke(cli.main, ["lab", "--out", str(out)])


def older(folder: Path) -> Path:
    """A results file of another run."""
    path = folder / "results.json"
    path.write_text("of another run")
    return path


def test_a_figure_s_place_is_looked_at_before_anything_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder where a figure would go is refused at once, in words."""
    (tmp_path / "memory.png").mkdir()
    result = run(monkeypatch, tmp_path, before_writing=lambda: pytest.fail("it was run"))
    assert result.exit_code == 2
    assert "memory.png in it is a folder. Name another with --out." in result.stderr


def write_all(folder: Path) -> None:
    for name in NAMES:
        (folder / name).write_text("of this run")


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_the_files_and_not_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts and the table are printed, one line says what to do, and what was there before stands alone."""
    kept = older(tmp_path)
    monkeypatch.setattr(LAB, "save_pages", full)
    result = run(monkeypatch, tmp_path)
    assert result.exit_code == 2
    assert "same training holds: " in result.stdout
    assert "  ZeRO-3 " in result.stdout
    assert "written to" not in result.stdout
    assert result.stderr == (
        f"Error: nothing was written to {tmp_path}: No space left on device. What was there before stands. Make room, "
        "or name another folder with --out, and run it again.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_a_folder_that_is_gone_costs_the_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a folder that was deleted meanwhile."""
    out = tmp_path / "out"
    result = run(monkeypatch, out, before_writing=lambda: out.rmdir())
    assert result.exit_code == 2
    assert "as predicted holds: " in result.stdout
    assert result.stderr.startswith(f"Error: nothing was written to {out}: No such file or directory.")


def test_files_take_their_places_together(tmp_path: Path) -> None:
    """If the last of them cannot, all that were there before are back, and no new one is."""
    kept = older(tmp_path)
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(IsADirectoryError), replacing(tmp_path) as staging:
        write_all(staging)
    assert kept.read_text() == "of another run"
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "trace.json"}


KILLED = """
import sys
from pathlib import Path
from zerosim.cli import errors
folder = Path(sys.argv[1])
with errors.replacing(folder) as staging:
    for name in ("results.json", "trace.json"):
        (staging / name).write_text("of a run that was killed")
    replace = Path.replace
    def killed(self, target):
        if self.name == sys.argv[2] and self.parent == staging:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)
    Path.replace = killed
"""


@pytest.mark.parametrize("at", ["results.json", "trace.json"])
def test_what_a_killed_command_left_is_swept_by_the_next(tmp_path: Path, at: str) -> None:
    """Its folder is gone, and files that it had moved aside are back until there are new ones."""
    kept = older(tmp_path)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), at], check=False)
    assert ended.returncode == -9
    assert [path.name for path in tmp_path.glob(".writing-*")]
    with pytest.raises(ZeroDivisionError), replacing(tmp_path):
        raise ZeroDivisionError
    assert kept.read_text() == "of another run"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_folder_of_a_command_at_work_is_left_alone(tmp_path: Path) -> None:
    """What somebody else is writing at the same time is not swept."""
    busy = tmp_path / ".writing-busy"
    busy.mkdir()
    handle = os.open(busy, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with replacing(tmp_path):
        pass
    assert busy.is_dir()
    os.close(handle)
    with replacing(tmp_path):
        pass
    assert not busy.exists()


# -- what is written is what was found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda kept: replace(kept, settings=replace(kept.settings, wire="fp16")), "is not of these settings"),
        (lambda kept: replace(kept, settings=replace(kept.settings, precision="fp32")), "is not of these settings"),
        (lambda kept: replace(kept, settings=replace(kept.settings, batch=9)), "is not of these settings"),
        (lambda kept: replace(kept, sweep=[]), "a lab sweeps over N"),
        (lambda kept: replace(kept, schemes=[replace(kept.schemes[0], events=[]), *kept.schemes[1:]]), "have none"),
    ],
    ids=["wire", "precision", "batch", "sweep", "events"],
)
def test_a_record_of_other_settings_is_refused(change: Any, says: str) -> None:
    """What the closed forms say of its settings is what the file has."""
    assert list(contradictions(found())) == []
    assert says in next(contradictions(change(found())))


def test_losses_that_are_all_alike_are_no_training() -> None:
    """Ten steps on ten batches do not have one loss."""
    kept = found()
    schemes = [replace(each, steps=[replace(step, loss=1.0) for step in each.steps]) for each in kept.schemes]
    assert "each have the same loss" in next(contradictions(replace(kept, schemes=schemes)))


def test_the_lab_reads_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that does not say what was found is not put in place, and the exit code is 1."""
    kept = older(tmp_path)

    def other(of: Results, path: Path) -> None:
        results.save(replace(of, created="1970-01-01T00:00:00+00:00"), path)

    monkeypatch.setattr(LAB, "save", other)
    result = run(monkeypatch, tmp_path)
    assert result.exit_code == 1
    assert "results.json: what was written is not what was found" in result.stderr
    assert kept.read_text() == "of another run"
    results.save(found(), tmp_path / "sound.json")
    check_written(tmp_path / "sound.json", found())
    with pytest.raises(ResultsError):
        check_written(kept, found())


@pytest.mark.parametrize("change", ["loss", "resident", "sent"])
def test_a_record_that_is_not_the_run_s_is_a_failure(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded losses, and bytes of a later reading, are found by the lab itself, in every scheme."""
    monkeypatch.setattr(suite, "sweep_ranks", lambda ranks, node=None: [ranks])
    made = as_records.step_record

    def wrong(*arguments: Any, **options: Any) -> Any:
        step = made(*arguments, **options)
        if change == "loss":
            return replace(step, loss=round(step.loss, 6))
        if change == "resident":
            return replace(step, resident=step.resident | {"params": step.resident["params"] // 2})
        traffic = [replace(moved, sent=[nbytes // 2 for nbytes in moved.sent]) for moved in step.traffic]
        return replace(step, traffic=traffic)

    monkeypatch.setattr(experiment, "step_record", wrong)
    failures = suite.run(lab_settings()).failures
    assert {each.scheme for each in failures} == {"data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"}
    assert all(each.quantity.endswith(", as recorded") for each in failures)
    for each in failures:
        if change == "loss":
            assert float(each.measured.strip("'")) == round(float(each.expected.strip("'")), 6)
        elif change == "sent":
            assert 2 * int(each.measured) == int(each.expected)
        else:
            halves, wholes = (ast.literal_eval(text)["params"] for text in (each.measured, each.expected))
            assert halves == wholes // 2
