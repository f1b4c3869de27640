"""The command line, as a newcomer types it."""

import html
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import zerosim
from helpers import by_night, leave_memory_alone
from zerosim.bands import PRECISIONS, WIRES, Band
from zerosim.cli import lab as lab_command
from zerosim.cli import main as cli
from zerosim.cli import options
from zerosim.model import MLP
from zerosim.records import results
from zerosim.schemes import Scheme
from zerosim.stages import DP, Stage, ZeRO2

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SMALL = ["lab", "--ranks", "3", "--steps", "2", "--batch", "2"]


def run(*arguments: str, out: Path | None = None) -> Result:
    """The command in this process."""
    return CliRunner().invoke(cli.main, [*arguments, *(["--out", str(out)] if out else [])])


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures, most of what is left of a small lab's time, to the tests that are of them."""
    monkeypatch.setattr("zerosim.report.plots.figures", lambda _: {})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a small lab writes, and what it prints with --json."""
    folder = tmp_path_factory.mktemp("recorded") / "lab"
    with pytest.MonkeyPatch.context() as patch:
        leave_memory_alone(patch)
        patch.setattr("zerosim.report.plots.figures", lambda _: {})
        result = run(*SMALL, "--json", out=folder)
    assert result.exit_code == 0, result.output
    (folder / "printed.json").write_text(result.stdout)
    return folder


def test_the_lab_prints_its_verdicts_and_writes_results_and_figures(tmp_path: Path) -> None:
    """Exit code 0, both verdicts, results.json, the page, the trace and four figures, and no other file."""
    result = run(*SMALL, out=tmp_path / "made" / "here")
    assert result.exit_code == 0, result.output
    assert "✓ same training holds: " in result.output
    assert "✓ as predicted holds: " in result.output
    names = {path.name for path in (tmp_path / "made" / "here").iterdir()}
    assert names == {"results.json", "report.html", "trace.json", *lab_command.FIGURES}
    assert results.load(tmp_path / "made" / "here" / "results.json").settings.ranks == 3


@pytest.mark.usefixtures("unsanitized")
def test_without_matplotlib_there_are_no_figures_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts, results, page and trace are there all the same; figures of an earlier run are not left beside them."""
    for name in (*lab_command.FIGURES, "mine.png"):
        (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*SMALL, out=tmp_path)
    assert result.exit_code == 0, result.output
    assert "✓ same training holds: " in result.output
    assert "(figures take matplotlib: pip install 'zerosim[plots]')" in " ".join(result.output.split())
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.html", "trace.json", "mine.png"}
    run_of_mine = ZeRO2(MLP(), 2)
    run_of_mine.step(zerosim.batches(ranks=2)[0])
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib; pip install 'zerosim\[plots\]'"):
        run_of_mine.timeline().plot()


def test_json_is_all_there_is_on_standard_output(recorded: Path) -> None:
    """With --json the output is the results file, and progress goes to standard error."""
    assert json.loads((recorded / "printed.json").read_text()) == json.loads((recorded / "results.json").read_text())


@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_a_failed_check_is_named_and_exits_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme that learns something else makes the command fail, with scheme, step, rank, band and both values."""
    step = Scheme.step

    def wrong(self: Scheme, batch: object) -> float:
        loss = step(self, batch)  # type: ignore[arg-type]
        if (self.name, self.ring.size) == ("ZeRO-1", 3):
            self.buckets[0].states[Band.PARAMS][1, 2] += 1
        return loss

    monkeypatch.setattr(Scheme, "step", wrong)
    result = run(*SMALL, out=tmp_path)
    assert result.exit_code == 1
    assert "✗ same training FAILS: " in result.output
    assert "  ZeRO-1, N = 3, step 1, rank 1: params of layer 1, element 2, against plain training: " in result.output
    assert results.load(tmp_path / "results.json").failures


@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_a_card_of_limited_memory_is_reported(tmp_path: Path) -> None:
    """--capacity says which schemes ran out of memory where, and the others' numbers stand."""
    result = run(*SMALL, "--capacity", "400kB", out=tmp_path)
    assert result.exit_code == 0, result.output
    short = {
        record.name: record.out_of_memory is not None for record in results.load(tmp_path / "results.json").schemes
    }
    assert short == {"data parallel": True, "ZeRO-1": False, "ZeRO-2": False, "ZeRO-3": False}
    assert "out of memory" in result.output


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2MB", 2 * 10**6), ("2MiB", 2 * 2**20), ("1.5 kB", 1500), ("7B", 7), ("3gib", 3 * 2**30), ("80GB", 80 * 10**9)],
)
def test_sizes_have_units(text: str, nbytes: int) -> None:
    """GB is a power of ten and GiB a power of two, in either case."""
    assert options.ByteSize().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["2", "MB", "2XB", "-1MB", "0B", "nanMB", "infB", "2 M B", ""])
def test_a_size_without_a_known_unit_is_refused(tmp_path: Path, text: str) -> None:
    """What is not a number with a unit is an error that names the units, and nothing is run or written."""
    result = run(*SMALL, "--capacity", text, out=tmp_path / "out")
    assert result.exit_code == 2
    assert "GiB" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["99999999999PB", "1e400MB", "9223372036854775808B", "8192PiB"])
def test_a_size_beyond_counting_is_refused_as_such(tmp_path: Path, text: str) -> None:
    """It is too large, and not less than a byte; what is advised is taken."""
    result = run(*SMALL, "--capacity", text, out=tmp_path / "out")
    assert result.exit_code == 2
    assert "more than any machine has. Give less than 8192PiB" in " ".join(result.output.split())
    assert options.ByteSize().convert("8191PiB", None, None) == 8191 * 2**50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "0 is not in the range x>=1"),
        (["--ranks", "many"], "'many' is not a valid integer"),
        (["--precision", "fp8"], "'mixed', 'bf16', 'fp32'"),
        (["--data", "mnist"], "'noise', 'digits'"),
        (["--stage", "3"], "No such option"),
        (["--precision", "fp32", "--wire", "fp16"], "must carry the working copy exactly"),
        (["--ranks", "99999999"], "would take"),
        (["--clip", "-1"], "the largest norm is a positive, finite number; got -1.0"),
        (["--clip", "nan"], "the largest norm is a positive, finite number; got nan"),
        (["--loss-scale", "big"], "neither dynamic nor a positive, finite number"),
        (["--loss-scale", "0"], "neither dynamic nor a positive, finite number"),
        (["--weight-decay", "0.1"], "Add --optimizer adamw"),
        (["--resume-at", "2"], "after step 2 of 2 no step follows"),
        (["--resume-at", "1:x"], "as in 5 or 5:8"),
        (["--resume-at", "1:0"], "as in 5 or 5:8"),
        (["--resume-at", "1:3", "--node", "2", "--ranks", "4", "--scheme", "hsdp"], "cannot be cut into groups of 2"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_said_in_words(tmp_path: Path, arguments: list[str], message: str) -> None:
    """A caller's mistake is one message and exit code 2: no traceback, no results."""
    result = run(*SMALL, *arguments, out=tmp_path)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is under a file is refused, with its name, before a scheme is started."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Scheme, "__init__", lambda *_, **__: pytest.fail("a scheme was started"))
    result = run(*SMALL, out=tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "--out" in result.output


@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_an_interrupted_lab_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at the last moment, the lab replaces no file and leaves none, and says so with exit code 130."""
    (tmp_path / "results.json").write_text("old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab_command, "save", interrupt)
    result = run(*SMALL, out=tmp_path)
    assert result.exit_code == 130
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("results.json", "old")]


def test_a_folder_in_a_files_place_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where results.json cannot be replaced the lab says so before a scheme is started."""
    (tmp_path / "results.json").mkdir()
    monkeypatch.setattr(Scheme, "__init__", lambda *_, **__: pytest.fail("a scheme was started"))
    result = run(*SMALL, out=tmp_path)
    assert result.exit_code == 2
    assert "results.json in it is a folder" in result.output


@pytest.mark.parametrize("encoding", by_night("utf-8", "ascii"))
def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path, encoding: str) -> None:
    """Output that is cut short, or in an encoding without our characters, leaves the verdict's exit code."""
    command = [sys.executable, "-m", "zerosim", *SMALL, "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as running:
        assert running.stdout
        assert running.stderr
        running.stdout.close()
        told = running.stderr.read()
    assert (running.returncode, "Traceback" in told) == (0, False), told


def test_an_encoding_without_our_characters_still_says_what_holds(tmp_path: Path) -> None:
    """In a C locale every character has one that stands for it."""
    done = subprocess.run(
        [sys.executable, "-m", "zerosim", *SMALL, "--steps", "1", "--capacity", "400kB", "-v", "--out", str(tmp_path)],
        env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True,
    )  # fmt: skip
    text = done.stdout.decode("ascii")
    assert "+ same training holds: " in text
    assert "?" not in text
    assert "| data parallel" in text


def test_parts_that_do_not_fit_together_are_refused(recorded: Path, tmp_path: Path) -> None:
    """A results file that is sound part by part but not as a whole gets one line, exit code 2, and no page."""
    record = json.loads((recorded / "results.json").read_text())
    record["differences"][0]["step"] = 99
    (tmp_path / "odd.json").write_text(json.dumps(record))
    result = run("report", str(tmp_path / "odd.json"), out=tmp_path / "out")
    assert (result.exit_code, "do not fit together" in result.output) == (2, True), result.output
    assert not (tmp_path / "out").exists()


def test_a_report_is_made_from_results(recorded: Path, tmp_path: Path) -> None:
    """``zerosim report`` writes the page and the trace that the lab writes, from its results alone."""
    result = run("report", str(recorded / "results.json"), out=tmp_path / "again")
    assert result.exit_code == 0, result.output
    for name in ("report.html", "trace.json"):
        assert (tmp_path / "again" / name).read_bytes() == (recorded / name).read_bytes()


def test_a_report_of_something_else_is_refused(tmp_path: Path) -> None:
    """What is not a results file gets one line that says why, exit code 2, and no page."""
    (tmp_path / "foreign.json").write_text('{"schema": "other"}')
    result = run("report", str(tmp_path / "foreign.json"), out=tmp_path / "out")
    assert result.exit_code == 2
    assert "its schema is 'other'" in result.output
    assert not (tmp_path / "out").exists()


def test_the_module_is_the_command() -> None:
    """``python -m zerosim --version`` prints the version."""
    done = subprocess.run([sys.executable, "-m", "zerosim", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("zerosim, version ")


# -- a training step as people run it


@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_a_step_as_people_run_it_is_checked_and_shown(tmp_path: Path) -> None:
    """Clipped, scaled, uneven, decayed and resumed on other ranks: all holds, and what was agreed on is shown."""
    asked = ["--clip", "0.5", "--loss-scale", "65536", "--uneven", "--optimizer", "adamw", "--resume-at", "1:2"]
    result = run(*SMALL, *asked, "-v", out=tmp_path)
    assert result.exit_code == 0, result.output
    found = results.load(tmp_path / "results.json")
    steps = found.scheme("ZeRO-3").steps
    assert [len(step.padding) for step in steps] == [3, 2]
    assert all(step.norm and step.mean_of_means for step in steps)
    assert any(step.mean_of_means != step.loss for step in steps)
    assert "Step by step" in result.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "All of the last step, on the 2 ranks on which the run was resumed." in " ".join(result.output.split())
    said = "clipped to 0.5, loss scale 65536, uneven batches, AdamW with weight decay 0.01, resumed after step 1"
    assert said in page
    assert said.replace(" ", "") in "".join(result.output.split())
    for step in steps:
        assert f"{step.norm:.6f}" in page
        assert f"{step.norm:.6f}" in result.output


@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_what_a_naive_mean_would_have_been_is_said(tmp_path: Path) -> None:
    """Uneven micro-batches pass every check, and the screen and the page say both losses in one line."""
    asked = ["--uneven", "--accumulate", "2", "--clip", "0.5", "--norm-type", "inf", "--clip-eps", "0"]
    result = run(*SMALL, *asked, out=tmp_path)
    assert result.exit_code == 0, result.output
    found = results.load(tmp_path / "results.json")
    step = found.scheme("ZeRO-3").steps[-1]
    assert step.mean_of_means is not None
    assert step.mean_of_means != step.loss
    line = (
        f"Uneven batches: over all rows the loss of step {step.step} is {step.loss:.6f}; the naive mean of the ranks' "
        f"means, 0 where there are no rows, would have been {step.mean_of_means:.6f}."
    )
    assert line.replace(" ", "") in "".join(result.output.split())
    assert line in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    said = "clipped to 0.5 (inf norm, eps 0), 2 micro-batches, reduced after each, uneven batches"
    assert said.replace(" ", "") in "".join(result.output.split())


@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_averaged_over_ranks_there_is_no_other_mean(tmp_path: Path) -> None:
    """What is taken is the mean of means, which is said at the top and not again."""
    result = run(*SMALL, "--uneven", "--average", "ranks", out=tmp_path)
    assert result.exit_code == 0, result.output
    assert "uneven batches, averaged over ranks" in " ".join(result.output.split())
    assert "naive mean" not in result.output
    for record in results.load(tmp_path / "results.json").schemes:
        assert all(step.mean_of_means == step.loss for step in record.steps)


@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_a_scale_that_rounds_is_noted(tmp_path: Path) -> None:
    """A loss scale that is no power of two is taken, and said to round."""
    result = run(*SMALL, "--steps", "1", "--loss-scale", "1000", out=tmp_path)
    assert result.exit_code == 0, result.output
    assert " 1 step of " in result.output
    assert "note: LossScale: 1000.0 is no power of two, so that scaling rounds gradients." in result.stderr


# -- schemes by name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero-4", "There are data parallel, ZeRO-1, ZeRO-2, ZeRO-3"),
        ("mine=optimiser", "mine shards any of optimizer, grads, params; got 'optimiser'"),
        ("mine=grads", "cannot update it"),
        ("=optimizer", "needs a name"),
    ],
)
def test_a_scheme_that_there_is_not_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """An unknown name, an unknown state and a row that makes no sense end in words, before anything is run."""
    result = run(*SMALL, "--scheme", text, out=tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_rows_are_chosen_and_ones_own_goes_all_the_way(tmp_path: Path) -> None:
    """The rows that are named are those that are run, in this order; the file of a row of one's own can be read."""
    chosen = ["--scheme", "dp", "--scheme", "mine=optimizer,grads", "--scheme", "zero-2"]
    result = run(*SMALL, *chosen, out=tmp_path)
    assert result.exit_code == 0, result.output
    found = results.load(tmp_path / "results.json")
    assert [record.row for record in found.schemes] == [DP, Stage("mine", optimizer=True, grads=True), ZeRO2]
    mine, twin = (found.scheme(name) for name in ("mine", "ZeRO-2"))
    assert [step.peak for step in mine.steps] == [step.peak for step in twin.steps]
    assert run("report", str(tmp_path / "results.json"), out=tmp_path / "again").exit_code == 0
    assert "mine, rank 0" in (tmp_path / "again" / "trace.json").read_text()


CHOICES = {
    "precision": [name for name, recipe in PRECISIONS.items() if recipe.everywhere],
    "wire": [*WIRES],
    "wire_params": [*WIRES, "int8"],
    "gather": ["layer", "model"],
    "data": ["noise", "digits"],
    "sync": ["each", "end"],
    "average": ["rows", "ranks"],
    "optimizer": ["adam", "adamw"],
}
# Options without choices of what a training step is; a flag has no value.
STEP: dict[str, list[str]] = {
    "clip": ["0.5"], "loss_scale": ["1024", "dynamic"], "uneven": [""], "warmup": ["3"], "resume_at": ["1", "1:3"],
    "accumulate": ["2"], "find_unused": [""], "clip_eps": ["0"], "norm_type": ["2", "inf"],
}  # fmt: skip
CLIPPED = ["--clip", "0.5"]
BESIDE = {  # what an option does nothing without
    "norm_type": CLIPPED, "clip_eps": CLIPPED, "average": ["--uneven"], "sync": ["--accumulate", "2"],
}  # fmt: skip


def test_the_choices_are_those_of_the_command() -> None:
    """The table below lists every choice of every option that has any."""
    params = {param.name: param.type for param in cli.main.commands["lab"].params}
    assert {name: list(kind.choices) for name, kind in params.items() if isinstance(kind, click.Choice)} == CHOICES


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param(option, value, marks=[] if value == values[-1] else pytest.mark.slow)
        for option, values in (CHOICES | STEP).items()
        for value in values
    ],
)
@pytest.mark.usefixtures("unsanitized", "undrawn")
def test_what_the_lab_writes_the_report_reads(tmp_path: Path, option: str, value: str) -> None:
    """Whatever is chosen, the file of a lab that succeeds can be made a page of; what cannot be run leaves no file."""
    if value == "digits":
        pytest.importorskip("sklearn")
    precision = {"fp16": ["--precision", "mixed"], "bf16": ["--precision", "bf16"]} if "wire" in option else {}
    arguments = [
        *SMALL,
        "--ranks",
        "2",
        "--steps",
        "2" if option == "resume_at" else "1",
        f"--{option.replace('_', '-')}",
        *filter(None, [value]),
        *precision.get(value, []),
        *BESIDE.get(option, []),
    ]
    result = run(*arguments, out=tmp_path / "lab")
    assert result.exit_code == 0, result.output
    again = run("report", str(tmp_path / "lab" / "results.json"), out=tmp_path / "again")
    assert again.exit_code == 0, again.output
