"""README.md and the recordings: neither can change without the other."""

import contextlib
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jinja2
import jinja2.nodes
import matplotlib
import msgspec
import numpy as np
import pytest
from PIL import Image

import record
import write_readme
from helpers import by_night, plain_lab
from readme_views import Real
from zerosim.cli import main as cli
from zerosim.lab import suite as lab
from zerosim.real_ranks.cases import COLLECTIVES, cases, data, model
from zerosim.records import plan as plan_records
from zerosim.records.results import Results
from zerosim.report import plots
from zerosim.worlds.native import LocalCollectives

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

ROOT = Path(__file__).parents[2]
README, ARGUMENT = (page.read_text(encoding="utf-8") for page in write_readme.PAGES)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
BY_DAY = ["lab"]  # what most of the pages is of
LABS = [name for name, recording in record.RECORDINGS.items() if recording.arguments.split()[0] == "lab"]

# What may look like a number in the prose although no recording says it, and why.
ALLOWED = {
    r"ZeRO-[123]": "names of the stages",
    r"\b(fp16|fp32|bf16)\b": "names of dtypes",
    r"\b(16|32)-bit\b": "fp16 and fp32 again",
    r"https://arxiv\.org/abs/[\d.]+": "an address",
    r"\(N−1\)/N": "the share of a buffer that is not a rank's own",
    r"Exit codes: 0 [^.]*, 1 [^.]*, 2 ": "stated in cli.py and tested in test_cli.py",
    r"Apache-2\.0": "a licence",
    r"FSDP2": "a framework",
    r"llama3_h100_202412": "an address",
    r"4096,16384,4096": "an example of what can be typed",
}
NUMBER = re.compile(r"\d")


def blocks(language: str) -> list[str]:
    """The code blocks of README.md in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


# -- README.md is what the recordings say


@pytest.mark.parametrize("page", write_readme.PAGES, ids=lambda page: page.name)
def test_a_page_is_what_the_recordings_say(page: Path) -> None:
    """Writing it anew from recorded/ changes nothing: neither was edited without the other."""
    assert write_readme.written(page) == page.read_text(encoding="utf-8"), "run `make readme`"


def test_the_readme_is_short() -> None:
    """It says what this is for, and what to read next; the argument has a page of its own."""
    assert len(README.splitlines()) <= 250


@pytest.mark.parametrize("name", write_readme.FIGURES)
def test_a_figure_is_what_the_recordings_say(name: str, tmp_path: Path) -> None:
    """Drawing a figure of README.md anew from recorded/ gives the same picture, up to a few rounded pixels."""
    path = ROOT / "docs" / f"{name}.png"
    with Image.open(path) as image:
        shown, drawn_by = np.asarray(image.convert("RGB")).astype(int), image.info.get("Software", "")
    if matplotlib.__version__ not in drawn_by:
        pytest.skip(f"drawn by {drawn_by}; {matplotlib.__version__} may set type differently")
    [fresh] = plots.save_figures({name: write_readme.figure(name)}, tmp_path)
    with Image.open(fresh) as image:
        drawn = np.asarray(image.convert("RGB")).astype(int)
    assert drawn.shape == shown.shape, "run `make readme`"
    assert np.mean(np.abs(drawn - shown) > 16) < 2e-5, "run `make readme`"


def test_every_number_comes_from_a_recording() -> None:
    """What is left of the rendered prose without what expressions yielded, code blocks and ALLOWED has no digit."""
    prose = "\n".join(write_readme.render(page, mark=lambda value: f"\0{value}\1") for page in write_readme.PAGES)
    prose = re.sub(r"```.*?```|<!--.*?-->", "", prose, flags=re.DOTALL)
    prose = re.sub("\0[^\0\1]*\1", "", prose)
    for allowed in ALLOWED:
        prose, count = re.subn(allowed, "", prose)
        assert count, f"{allowed} is allowed, but nowhere to be found"
    assert [line for line in prose.splitlines() if NUMBER.search(line)] == []


@pytest.mark.parametrize("template", write_readme.PAGES.values(), ids=lambda template: template.name)
def test_no_number_hides_in_an_expression(template: Path) -> None:
    """No expression that yields text is or has a number of its own, so that what it yields is a recording's."""
    tree = jinja2.Environment().parse(template.read_text(encoding="utf-8"))
    found = []
    for output in tree.find_all(jinja2.nodes.Output):
        for expression in output.nodes:
            if isinstance(expression, jinja2.nodes.TemplateData):
                continue
            assert isinstance(expression, jinja2.nodes.Name) or expression.find(jinja2.nodes.Name), expression
            found += [
                each
                for each in _constants(expression)
                if each not in record.RECORDINGS and NUMBER.search(_without_allowed(str(each)))
            ]
    assert found == []


def _constants(expression: jinja2.nodes.Node) -> Iterator[Any]:
    """The constants of an expression, but for those that a value is compared with or picked by."""
    if isinstance(expression, jinja2.nodes.Const):
        yield expression.value
    elif isinstance(expression, jinja2.nodes.Getitem):
        yield from _constants(expression.node)
    elif not isinstance(expression, jinja2.nodes.Compare):
        for child in expression.iter_child_nodes():
            yield from _constants(child)


def _without_allowed(text: str) -> str:
    return functools.reduce(lambda rest, allowed: re.sub(allowed, "", rest), ALLOWED, text)


# -- and would not be what a different recording says


def _changed(monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes) -> None:
    """Let the recording of the lab be another."""
    load = record.load

    def changed(name: str) -> Any:
        found = load(name)
        if name != "lab":
            return found
        content = msgspec.json.encode(found)
        assert old in content
        return msgspec.json.decode(content.replace(old, new), type=Results)

    monkeypatch.setattr(record, "load", changed)


def test_a_different_number_makes_a_different_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Had ZeRO-3's blocks been a byte larger, the comparison with README.md would fail."""
    _changed(monkeypatch, b'"EXP_AVG"'.lower() + b":4136", b'"exp_avg":4137')
    assert write_readme.reflow(write_readme.render(write_readme.ARGUMENT)) != ARGUMENT


def test_a_claim_that_does_not_hold_stops_the_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Had ZeRO-1 and ZeRO-2 sent other than data parallel does, no README.md would claim that they send the same."""
    _changed(monkeypatch, b"128216", b"128217")
    with pytest.raises(write_readme.Contradiction, match="ZeRO-1 and ZeRO-2 send what data parallel sends"):
        write_readme.render(write_readme.ARGUMENT)


def test_a_recording_with_a_failed_check_stops_the_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded failure is named, and nothing is written."""
    failure = (
        b'"failures":[{"check":"as predicted","scheme":"ZeRO-1","ranks":2,"step":1,"rank":0,"quantity":"bytes",'
        b'"measured":"1","expected":"2"}]'
    )
    _changed(monkeypatch, b'"failures":[]', failure)
    with pytest.raises(write_readme.Contradiction, match=r"lab\.json: as predicted: ZeRO-1"):
        write_readme.render()


def test_nothing_is_said_of_real_ranks_that_were_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a recorded corroboration the pages are written, and claim nothing of it."""
    load = record.load
    monkeypatch.setattr(record, "load", lambda name: None if name == "corroborate" else load(name))
    argument = write_readme.reflow(write_readme.render(write_readme.ARGUMENT))
    assert "corroborate" not in argument
    assert "gloo" not in argument
    checked = write_readme.reflow(write_readme.render()).partition("## How it is checked")[2]
    assert "Real ranks agree" not in checked


# -- the recordings are what a run finds


@pytest.mark.parametrize("name", LABS)
def test_a_recording_is_of_the_command_that_is_shown_for_it(name: str) -> None:
    """The settings in a recording are those of its command as the command line reads it."""
    command, *options = shlex.split(record.RECORDINGS[name].arguments)
    asked = cli.main.commands[command].make_context(command, list(options)).params
    recorded = msgspec.to_builtins(_lab(name).settings)
    assert {key: asked[key] for key in recorded if key in asked} == {
        key: value for key, value in recorded.items() if key in asked
    }


@pytest.mark.parametrize("name", [*BY_DAY, *by_night(*(name for name in LABS if name not in BY_DAY))])
def test_recorded_integers_are_those_of_a_fresh_run(name: str) -> None:
    """Bytes, messages, FLOPs, events, shortages of memory and the sweep come out again; losses to four digits."""
    recorded = _lab(name)
    if recorded.settings.data == "digits":
        pytest.importorskip("sklearn")
    steps = min(2, recorded.settings.steps)
    run = plain_lab if name in BY_DAY else lab.run
    fresh = run(msgspec.structs.replace(recorded.settings, steps=steps))
    assert fresh.failures == []
    assert _integers(record.slim(fresh), steps) == _integers(recorded, steps)
    for one, other in zip(fresh.schemes, recorded.schemes, strict=True):
        assert [step.loss for step in one.steps] == pytest.approx([step.loss for step in other.steps[:steps]], rel=1e-4)


def test_a_recorded_plan_is_that_of_a_fresh_run(tmp_path: Path) -> None:
    """The plan that README.md shows comes out again, every byte, message and second of it."""
    pytest.importorskip("transformers")
    record.make("plan", tmp_path)
    found, recorded = (
        msgspec.to_builtins(plan) for plan in (plan_records.load(tmp_path / "plan.json"), record.load("plan"))
    )
    for each in (found, recorded):
        for field in ("created", "versions"):
            each.pop(field)
    assert found == recorded


def _lab(name: str) -> Results:
    found = record.load(name)
    assert isinstance(found, Results)
    return found


def _integers(results: Any, steps: int) -> Any:
    """All of a lab that another machine must find too, for the first steps."""
    short = msgspec.structs.replace(
        results,
        settings=msgspec.structs.replace(results.settings, steps=steps),
        schemes=[msgspec.structs.replace(each, steps=each.steps[:steps]) for each in results.schemes],
        differences=[each for each in results.differences if each.step <= steps],
    )
    found = msgspec.to_builtins(short)
    for field in ("created", "versions"):
        del found[field]
    found["ablations"].pop("whole_model_bucket")  # which bits differ is one machine's
    if found["ablations"]["narrow_wire"]:
        for field in ("drift", "gradient_differing"):
            del found["ablations"]["narrow_wire"][field]
    return _without_floats(found)


def _without_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_floats(each) for key, each in value.items() if not isinstance(each, float)}
    if isinstance(value, list):
        return [_without_floats(each) for each in value if not isinstance(each, float)]
    return value


@pytest.mark.skipif(record.load("corroborate") is None, reason="no corroboration has been recorded")
def test_recorded_real_ranks_are_what_a_fresh_simulation_says() -> None:
    """What the ranks held and sent, per scheme and kind of collectives, and what the kernel counted, is simulated."""
    found = record.load("corroborate")
    assert found is not None
    real = Real(found)  # type: ignore[arg-type]
    settings = msgspec.structs.replace(real.found.settings, steps=1)
    assert real.found.complete
    assert real.found.failures == []
    assert real.differing == real.unexplained == 0
    assert real.meters == ["process", "sockets"]
    [batch] = data(settings)
    for case, run in zip(cases(settings), real.found.runs, strict=True):
        assert (run.row, run.collectives, run.precision) == (case.row, case.collectives, case.precision)
        twin = case.row(
            model(settings), settings.ranks, settings.options(case.precision),
            ring=LocalCollectives(settings.ranks), collectives=COLLECTIVES[case.collectives],
        )  # fmt: skip
        twin.step(batch)
        report = twin.reports[-1]
        for rank, sent in zip(run.ranks, report.sent(), strict=True):
            assert set(rank.sent.simulated) == set(rank.sent.handed) == {sent}
            assert rank.resident == run.resident == report.resident
            assert rank.peak == run.peak == report.peak.by_band


# -- what is shown runs


def test_the_python_of_the_readme_runs_and_yields_what_its_comments_say() -> None:
    """The example is executed line by line; a comment that begins with a number is the line's value."""
    [example] = blocks("python")
    space: dict[str, Any] = {}
    checked = 0
    for line in example.splitlines():
        code, _, comment = line.partition("  # ")
        if number := re.match(r"[\d.]+", comment.strip()):
            digits = len(number[0].partition(".")[2])
            assert f"{eval(code, space):.{digits}f}" == number[0], line
            checked += 1
        else:
            exec(code, space)
    assert checked == 3


def test_the_shell_lines_of_the_readme_are_commands_that_exist() -> None:
    """Targets are in the Makefile, extras in pyproject.toml, and the command line takes all options and values."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    inline = re.findall(r"`((?:make|zerosim|pip) [^`]*)`", README)
    seen = set()
    for line in [*lines, *inline]:
        program, *arguments = shlex.split(line.partition("|")[0], comments=True) or [""]
        seen.add(program)
        if program == "make":
            assert set(arguments) <= targets, line
        elif program in ("pip", ".venv/bin/pip"):
            editable = "-e " * program.startswith(".venv")  # as `make` has it there: edits are to count
            ours, cpu = rf"{editable}\.(\[[a-z,]+\])?", r"torch --index-url https://download\.pytorch\.org/whl/cpu"
            assert re.fullmatch(f"install ({ours}|{cpu})", " ".join(arguments)), line
            assert {each for some in re.findall(r"\[([a-z,]+)\]", line) for each in some.split(",")} <= set(EXTRAS), (
                line
            )
        elif program in ("zerosim", ".venv/bin/zerosim"):
            name, *options = arguments
            command = cli.main.get_command(click.Context(cli.main), name)
            assert command is not None, line
            if not options:  # only named
                continue
            with pytest.raises(click.exceptions.Exit) if "--help" in options else contextlib.nullcontext():
                command.make_context(name, options)
        else:
            assert program == "", line
    assert {"make", "pip", "zerosim", ".venv/bin/zerosim"} <= seen


@pytest.mark.parametrize("page", write_readme.PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is to a file of the project, and every anchor to a heading of the page."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    assert len(links) > 5
    for link in links:
        assert link[1:] in anchors if link.startswith("#") else (page.parent / link).is_file(), link
