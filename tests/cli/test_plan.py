"""``zerosim plan`` as it is typed: what it answers, and how it refuses."""

import gzip
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import zerosim as zs
from helpers import by_night
from zerosim.cli import plan as cli
from zerosim.cli.main import main
from zerosim.planner import plan, question
from zerosim.planner.cards import CARDS
from zerosim.records import plan as records
from zerosim.report import plan_console
from zerosim.schemes import ZeRO1, ZeRO2
from zerosim.util import sizes

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

MODEL = "67,131,127,61"
PARAMS = 67 * 131 + 131 + 131 * 127 + 127 + 127 * 61 + 61


@pytest.fixture(autouse=True)
def _shorter_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_RANKS", 32)
    monkeypatch.setattr(plan, "MOST_ROWS", 512)


def run(*arguments: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(cli.plan, arguments)


def paper(*arguments: str) -> Result:
    """The command by the rules of the paper and of our own ring, with nothing reserved."""
    return run(*arguments, "--convention", "zero", "--reserve", "0")


def test_fsdp2_is_what_a_reader_most_likely_runs() -> None:
    """By default a plan says whose rules it goes by, what is at rest by them, and looks at its other rows."""
    result = run(MODEL, "--gpus", "4", "--memory", "1MB")
    assert result.exit_code == 0, result.output
    lines = result.output.strip().splitlines()
    assert lines[2] == "fsdp2's rules, fsdp: 12 bytes a parameter at rest, adam"
    assert lines[3] == "1.00 MB (977 KiB), of which 100 kB reserved"
    assert lines[5].startswith("✓ fits on 4 with ZeRO-3; ZeRO-3 leaves ")
    assert lines[5].endswith(" free, 100 kB of it reserved")
    table = [line.split("  ")[1].strip() for line in lines if line.startswith("  ") and " kB" in line]
    assert table == ["data parallel", "ZeRO-3", "ZeRO-3, kept"]
    assert "estimators say" not in result.output


def test_three_verdicts_and_a_code_for_scripts() -> None:
    """What fits beside the reserve fits; within it is tight; and only the first ends --check with 0."""
    [cell] = json.loads(run(MODEL, "--gpus", "4", "--json", "-").stdout)["cells"]
    peak = cell["peak"]["total"]

    def verdict(memory: int, *options: str) -> tuple[str, int]:
        result = run(MODEL, "--gpus", "4", "--scheme", "zero3", "--memory", f"{memory}B", "--check", *options)
        return next(line for line in result.output.splitlines() if line[:1] in "✓~✗" and line)[:7], result.exit_code

    assert verdict(2 * peak, "--reserve", f"{peak}B") == ("✓ fits ", 0)
    assert verdict(2 * peak - 1, "--reserve", f"{peak}B") == ("~ tight", 1)
    assert verdict(peak, "--reserve", "1B") == ("~ tight", 1)
    assert verdict(peak, "--reserve", "0") == ("✓ fits ", 0)
    assert verdict(peak - 1, "--reserve", "0") == ("✗ no sc", 1)
    assert verdict(peak + peak // 8) == ("✓ fits ", 0)  # a tenth is reserved
    assert verdict(peak + peak // 10) == ("~ tight", 1)
    assert run(MODEL, "--gpus", "4", "--check").exit_code == 2


def test_it_answers_at_a_glance() -> None:
    """The answer stands above the table, in which --sweep has every scheme on N and the powers of two around it."""
    result = paper(MODEL, "--gpus", "3", "--sweep", "--memory", "290kB")
    assert result.exit_code == 0, result.output
    lines = result.output.strip().splitlines()
    assert f"{PARAMS:,} parameters" in lines[0]
    assert lines[2:4] == ["zero's rules, mixed: 16 bytes a parameter at rest, adam", "290 kB (283 KiB)"]
    assert lines[5].startswith("✓ fits on 3 with ZeRO-2 and ZeRO-3; ZeRO-2 leaves ")
    assert lines[6].startswith("→ largest micro-batch on 3: ZeRO-2 ")
    assert re.match(
        r"→ a step takes about .* at least .*, with ZeRO-2 on 3 H100 \(assumed\)$",
        " ".join(" ".join(lines[7:9]).split()),
    )
    assert lines[9].startswith("→ smallest N that fits: data parallel none")
    assert "to blame at the peak of ZeRO-3 on 3 (" in result.output
    rows = [line.split() for line in lines if "ZeRO-1" in line]
    assert [row[0] for row in rows if row[0].isdecimal()] == []  # N stands beside data parallel, the first scheme
    assert [line.split()[0] for line in lines if " data parallel " in line and "B" in line][:5] == list("12348")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut(width: int) -> None:
    """On a narrow screen columns are left out, whole, and never the scheme, what it holds and what room there is."""
    found = zs.plan(MODEL, gpus=3, memory="290kB").record
    out = io.StringIO()
    with mock.patch.object(plan_console, "WIDTH", width):
        plan_console.show(found, Console(file=out), verbose=True)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"\d[^ ]*…", text) is None  # a word may be, a number never
    for cell in found.cells:
        assert re.search(f"{cell.name} .*{sizes.text(cell.at_rest)} +{sizes.text(cell.peak.total)}", text), cell.name
    assert ("█" in text) == (width >= 80)


def test_what_stands_behind_the_answer_is_shown_when_asked_for() -> None:
    """Bands, collectives, units and times are a -v away, and the screen says so."""
    behind = ("At the peak by band", "Sent by each GPU", "How long a step takes", "units by their parameters")
    short, long = run(MODEL, "--gpus", "2").output, run(MODEL, "--gpus", "2", "-v").output
    assert [each for each in behind if each in short] == []
    assert "-v: by band and collective" in short
    assert [each for each in behind if each not in long] == []


def test_json_is_all_there_is_on_standard_output() -> None:
    """With --json - the output is the plan, by the schema that it says."""
    result = run(MODEL, "--gpus", "3", "--json", "-", "--stage", "3")
    found = json.loads(result.stdout)
    assert found["schema"] == records.SCHEMA
    assert {cell["row"]["name"] for cell in found["cells"]} == {"ZeRO-3"}


def test_plan_and_chart_are_written_where_they_were_asked_for(tmp_path: Path) -> None:
    """Both files and no other; the plan reads back as what was asked."""
    target, picture = tmp_path / "plan.json", tmp_path / "peaks.svg"
    options = [
        "--stage", "2", "--stage", "1", "--precision", "bf16", "--wire", "fp32", "--accumulate", "2", "--bucket", "5kB",
        "--optimizer", "momentum", "--micro-batch", "3", "--sync", "end", "--card", "h100", "--bandwidth", "100GB/s",
        "--latency", "5", "--node-size", "2", "--efficiency", "0.25", "--peak", "500",
    ]  # fmt: skip
    result = paper(MODEL, "--gpus", "2,5", *options, "--json", str(target), "--out", str(picture))
    assert result.exit_code == 0, result.output
    assert sorted(tmp_path.iterdir()) == [picture, target]
    found = records.load(target)
    asked = found.question
    assert (asked.gpus, asked.rows, asked.memory, asked.card) == ([2, 5], [ZeRO1, ZeRO2], CARDS["H100"].memory, "H100")
    assert (asked.bucket, asked.accumulate, asked.sync, asked.optimizer) == (5000 // 2, 2, "end", "momentum")
    assert found.cluster is not None
    assert (found.cluster.peak, found.cluster.efficiency, found.cluster.node) == (500e12, 0.25, 2)
    assert (found.cluster.within, found.cluster.hop_within) == (100e9, 5 * 1e-6)
    assert "written to" in result.output


def test_the_time_stands_as_an_estimate_and_a_bound_and_its_card_is_named() -> None:
    """Without --card the one that the time is for is said to be assumed; of a perceptron no error is claimed."""
    assert re.search("scheme +about +at least +computing", run(MODEL, "--gpus", "2", "-v").output)
    short = " ".join(run(MODEL, "--gpus", "2", "--memory", "1MB").output.split())
    assert re.search(r"about [\d.]+ .s \(error unknown\), at least [\d.]+ .s, with", short)
    assert "as of the H100, for want of a --card" in " ".join(run(MODEL, "--gpus", "2", "-v").output.split())


def test_what_the_time_is_bounded_with_is_all_there() -> None:
    """Peak, efficiency, bandwidths and hops are shown, and what was given is not put down to a card."""
    preset, given = (
        " ".join(paper(MODEL, "--gpus", "2", "--card", "H100", "-v", *options).output.split())
        for options in ([], ["--peak", "500", "--latency", "7"])
    )
    assert "450 GB/s within a node of 8, 400 GB/s between nodes; 0.6 and 2.7 µs a hop; as of the H100." in preset
    assert "At least: 500 TFLOP/s (fp16), 450 GB/s" in given
    assert "About: at the speeds that published runs of language models" in preset
    stated = run(MODEL, "--gpus", "2", "--efficiency", "0.4", "-v").output
    assert "About: 0.4 of the peak, as stated" in " ".join(stated.split())
    assert "7 and 2.7 µs a hop; what was not given is as of the H100." in given


def test_the_convention_s_rules_and_the_estimators_are_shown_when_asked_for() -> None:
    """With --estimators the formulas stand beside the ledger; without, the answer is ours alone."""
    named = " ".join(paper(MODEL, "--gpus", "2", "--estimators").output.split())
    assert "What well-known estimators say of the same question, N = 2" in named
    assert "zero: Mixed precision with Adam takes 16 bytes per parameter" in named
    assert "well-known" not in paper(MODEL, "--gpus", "2").output


def test_each_difference_from_a_formula_is_put_down_to_the_band_that_makes_it() -> None:
    """Megatron's own report is the ledger but for padding, and is given no reason; what the paper has less of, and what
    no formula knows of the question, is said."""
    named = " ".join(
        run(MODEL, "--gpus", "2", "--convention", "megatron", "--stage", "0", "--estimators").output.split()
    )
    assert f"-{sizes.text(2 * PARAMS)} grads" in named
    assert "ZeRO paper, Table 1 (data parallel): " in named
    assert "Megatron's theoretical memory report (data parallel): " not in named
    assert "asked was" not in named
    other = " ".join(paper(MODEL, "--gpus", "2", "--optimizer", "sgd", "--estimators").output.split())
    assert "asked was optimizer sgd." in other
    result = run(MODEL, "--gpus", "2", "--convention", "zero", "--optimizer", "sgd", "--stage", "0", "--json", "-")
    formula = json.loads(result.stdout)["estimates"][0]
    assert formula["beside"]["exp_avg"] == formula["beside"]["exp_avg_sq"] == 4 * PARAMS
    assert sum(formula["beside"].values()) == formula["nbytes"] - formula["ours"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["64,128", "--gpus", "4", "--memory", "80"], "'80' has no unit: 80GB is 80,000,000,000 bytes"),
        (["64,128", "--gpus", "4", "--memory", "80XB"], "one of B, kB, MB, GB"),
        (["64,128", "--gpus", "4", "--memory", "0GB"], "at least one byte"),
        (["64,0,3", "--gpus", "4"], "a layer has size 0"),
        (["64,-1,3", "--gpus", "4"], "two or more positive integers"),
        (["64,1.5", "--gpus", "4"], "two or more positive integers"),
        (["64", "--gpus", "4"], "two or more positive integers"),
        (["9" * 30 + ",9", "--gpus", "4"], "two or more positive integers"),
        (["99999999999,99999999999", "--gpus", "4"], "9,999,999,999,900,000,000,000 parameters are more than"),
        (["64,128", "--gpus", "0"], "an integer from 1 to"),
        (["64,128", "--gpus", "-3"], "an integer from 1 to"),
        (["64,128", "--gpus", "9-3"], "from a smaller number to a larger"),
        (["64,128", "--gpus", "9" * 30], "an integer from 1 to"),
        (["2,3", "--gpus", "10"], "10 ranks cannot shard 9 parameters"),
        (["no/such/file", "--gpus", "4"], "no model of that name is known here"),
        (["nul\0", "--gpus", "4"], "MODEL is a list of layer sizes"),
        (["no_such_module:factory", "--gpus", "4"], "package.module:factory"),
        (["64,128", "--gpus", "4", "--seq", "5"], "Leave --seq out"),
        (["64,128", "--gpus", "4", "--checkpoint", "selective"], "Use 'full' or 'none'"),
        (["64,128", "--gpus", "4", "--convention", "nope"], "zero, deepspeed, fsdp2, megatron"),
        (["64,128", "--gpus", "4", "--card", "nope"], "A100-80GB"),
        (["64,128", "--gpus", "4", "--convention", "fsdp2", "--stage", "1"], "or --convention zero, which has it"),
        (["64,128", "--gpus", "4", "--convention", "zero", "--precision", "fsdp", "--stage", "1"], "Use ZeRO-3"),
        (["64,128", "--gpus", "4", "--scheme", "ddp", "--wire", "bf16"], "Use --wire fp32"),
        (["64,128", "--gpus", "4", "--bucket", "5"], "'5' has no unit"),
        (["64,128", "--gpus", "4", "--largest-model", "mlp"], "--memory 80GB"),
        (["64,128", "--gpus", "4", "--out", "x.pdf"], ".html (a page with sliders), .png (a chart)"),
        (["64,128", "--gpus", "4", "--out", "x.html.gz"], "got 'x.html.gz'"),
        (["64,128", "--gpus", "4", "--json", "/no/such/folder/x.json"], "the folder /no/such/folder does not exist"),
        (["64,128", "--gpus", "4", "--out", f"{__file__}/x.png"], "does not exist"),
        (["64,128", "--gpus", "4", "--json", "/"], "is a folder"),
        (["64,128", "--gpus", "4", "--micro-batch", "9" * 15], "at most 2,147,483,648"),
        (["64,128", "--gpus", "4", "--efficiency", "1.5"], "--efficiency"),
        (["64,128", "--gpus", "4", "--bandwidth", "9"], "has no unit"),
        (["64,128", "--gpus", "4", "--bandwidth", "400Gb/s"], "'400Gb/s' may mean bits"),
        (["64,128", "--gpus", "4", "--node-bandwidth", "400gb/s"], "'400gb/s' may mean bits"),
        (["64,128", "--gpus", "4", "--memory", "80Gb"], "'80Gb' is in bits"),
        (["64,128", "--gpus", "4", "--card", "V100-32GB", "--precision", "bf16"], "Use --precision mixed"),
        (["64,128", "--gpus", "4", "--convention", "megatron", "--precision", "fsdp"], "--convention megatron gathers"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_a_sentence(arguments: list[str], words: str) -> None:
    """Exit code 2, and an error that names the rule and what would work; never a traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert words in " ".join(result.output.split())


def test_what_is_refused_leaves_no_file(tmp_path: Path) -> None:
    """A plan that cannot be made writes nothing, and one that is interrupted neither."""
    target = tmp_path / "plan.json"
    assert run("2,3", "--gpus", "10", "--json", str(target)).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_file_takes_no_other_thing_s_place(tmp_path: Path) -> None:
    """What a name leads to stays what it is: a pipe is refused, and of a link what it leads to is written."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "plan.json"
    os.mkfifo(pipe)
    result = run(MODEL, "--gpus", "2", "--json", str(pipe))
    assert (result.exit_code, pipe.is_fifo()) == (2, True), result.output
    assert "is no file. Name another, or print the plan with --json -" in " ".join(result.output.split())
    link.symlink_to(target)
    assert run(MODEL, "--gpus", "2", "--json", str(link)).exit_code == 0
    assert link.is_symlink()
    assert records.load(target).question.model == MODEL


def test_plan_and_chart_are_two_files(tmp_path: Path) -> None:
    """One name for both is refused, as one would be lost."""
    target = tmp_path / "both.svg"
    result = run(MODEL, "--gpus", "2", "--json", str(target), "--out", f"{tmp_path}/./both.svg")
    assert (result.exit_code, target.exists()) == (2, False), result.output
    assert "is named for two things" in " ".join(result.output.split())


def test_each_ending_asks_for_its_form(tmp_path: Path) -> None:
    """All forms at once, each begins as such files do, and of each is said what it holds."""
    begins = {
        "page.html": b"<!doctype html>", "peaks.png": b"\x89PNG", "peaks.svg": b"<?xml", "step.pickle": b"\x80\x04",
        "step.trace.json": b'{"traceEvents"', "step.trace.json.gz": b"\x1f\x8b", "plan.json": b'{\n "schema"',
    }  # fmt: skip
    named = [option for name in begins for option in ("--out", str(tmp_path / name))]
    result = run(MODEL, "--gpus", "2", "--memory", "1MB", *named)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == set(begins)
    for name, begin in begins.items():
        assert (tmp_path / name).read_bytes().startswith(begin), name
    words = " ".join(result.output.split())
    assert re.search(r"page\.html: a page with sliders, \d+ steps that were run, [\d.]+ kB", words)
    assert "step.pickle: a snapshot for torch's memory_viz, a step of ZeRO-3 on 2" in words
    assert records.load(tmp_path / "plan.json").question.model == MODEL
    zipped = gzip.decompress((tmp_path / "step.trace.json.gz").read_bytes())
    plain = (tmp_path / "step.trace.json").read_bytes()
    assert json.loads(zipped) == json.loads(plain)


def test_a_chart_says_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib a chart is refused with what to install, and a page is made all the same."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = run(MODEL, "--gpus", "2", "--out", str(tmp_path / "peaks.png"))
    assert result.exit_code == 2
    assert "pip install 'zerosim[plots]', or write a page" in " ".join(result.output.split())
    assert run(MODEL, "--gpus", "2", "--out", str(tmp_path / "page.html")).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_an_interrupted_plan_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C ends it with the shell's code, says so, and leaves no file."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "make", interrupted)
    result = CliRunner().invoke(main, ["plan", MODEL, "--gpus", "2", "--json", str(tmp_path / "plan.json")])
    assert (result.exit_code, list(tmp_path.iterdir())) == (130, [])
    assert "nothing was written" in result.output


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["8"], [8]),
        (["2-64"], [2, 4, 8, 16, 32, 64]),
        (["3..20"], [3, 4, 8, 16, 20]),
        (["4,2", "16", "4"], [2, 4, 16]),
        (["5-5"], [5]),
    ],
)
def test_numbers_of_gpus_are_lists_and_ranges(texts: list[str], numbers: list[int]) -> None:
    """Commas, repeated options and ranges, which are the powers of two between their ends; each once, in order."""
    assert question.gpus(texts) == numbers


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [(1, [1, 2, 4]), (3, [1, 2, 3, 4, 8]), (8, [2, 4, 8, 16, 32]), (65_536, [16_384, 32_768, 65_536])],
)
def test_one_number_is_shown_among_powers_of_two(ranks: int, shown: list[int]) -> None:
    """Two powers of two on each side, where there are any."""
    assert question.around(ranks) == shown


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("80gb", 80 * 10**9),
        ("1.5 kB", 1500),
        ("0.1GB", 10**8),
        ("7B", 7),
        ("2PB", 2 * 10**15),
    ],
)
def test_sizes_say_their_unit(text: str, nbytes: int) -> None:
    """GB is a power of ten and GiB a power of two, in either case, to the byte."""
    assert sizes.parse(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["80", "GB", "80XB", "80Gb", "80Gib", "-1GB", "0B", "nanGB", "infB", "8 0 GB", ""],
)
def test_a_size_without_sense_is_refused(text: str) -> None:
    """What is no number with a unit, or too little to be a size, is an error that gives an example."""
    with pytest.raises(ValueError, match=r"as in (2MB|80GB)\."):
        sizes.parse(text)


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="a shell closes the streams")
@pytest.mark.parametrize("closed", [">&- 2>&-", *by_night(">&-", "2>&-")])
def test_streams_that_are_closed_are_no_failure(closed: str) -> None:
    """A plan with nowhere to print ends as one that was printed does."""
    command = f'"$0" -m zerosim plan 64,64 --gpus 2 {closed}'
    assert subprocess.run(["/bin/sh", "-c", command, sys.executable], check=False).returncode == 0


def test_a_narrow_screen_says_what_it_leaves_out() -> None:
    """The column of what is sent goes first, and not without a word."""
    found = zs.plan([67, 131, 127, 61], gpus=[2, 4], memory="1MB").record
    for width, narrow in ((44, True), (80, False)):
        shown = io.StringIO()
        plan_console.show(found, Console(file=shown, force_terminal=True, width=width, no_color=True))
        assert ("what is sent has no room" in " ".join(shown.getvalue().split())) == narrow


def test_what_takes_long_is_told_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line every so often on standard error, with what it is at."""
    monkeypatch.setattr(cli, "TOLD_EVERY", 0.01)
    with cli._progress("reading the model") as advance:
        advance("ZeRO-3, N = 4", 7)
        time.sleep(0.2)
    assert re.search(r"working for \d+ s: ZeRO-3, N = 4\n", capfd.readouterr().err)
