"""Whatever is typed, whatever lies in a file, whenever the process ends: no traceback, no part of a file, no hang."""

import contextlib
import json
import os
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given
from hypothesis import Phase as Part
from hypothesis import strategies as st

from helpers import examples, plain_lab
from zerosim.bands import PRECISIONS, Band
from zerosim.cli import corroborate as corroboration
from zerosim.cli import lab as lab_command
from zerosim.cli import main as cli
from zerosim.cli import plan as planner
from zerosim.counts import Phase
from zerosim.lab.record import load
from zerosim.records import consistency as soundness
from zerosim.records import results
from zerosim.records.files import ResultsError
from zerosim.records.results import Results, Settings
from zerosim.report import plots

WHOLE_PAGE = {"results.json", "report.html", "trace.json"}
some = examples(
    by_night=150,
    by_day=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Part.explicit, Part.generate],  # what is drawn is small, and results are long to print
)


@pytest.fixture(autouse=True, scope="module")
def shapes_unchecked() -> Iterator[None]:
    """Shapes are checked elsewhere; here labs are run by the dozen."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="module")
def found() -> Results:
    """A lab run as small as one can be that has a sweep, padding and all ablations."""
    return plain_lab(
        Settings(
            ranks=3, steps=2, batch=1, seed=1, model_seed=0, precision="mixed", wire="fp32", gather="layer",
            data="noise", capacity=None, widths=[2, 3, 1],
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def card(found: Results) -> Results:
    """The same on a card on which data parallel runs out of memory and ZeRO-3 does not."""
    capacity = found.schemes[-1].steps[-1].peak.total
    return plain_lab(msgspec.structs.replace(found.settings, capacity=capacity))


@pytest.fixture(autouse=True)
def nothing_slow(monkeypatch: pytest.MonkeyPatch, found: Results) -> None:
    """The lab's run, once; no figures, no real ranks, no plans: none of it is what is tested."""

    def refuse(*_: object) -> None:
        raise ValueError("nothing is run here")

    monkeypatch.setattr(lab_command, "_run", lambda *_: found)
    monkeypatch.setattr(plots, "figures", lambda _: {})
    monkeypatch.setattr(corroboration, "_run", refuse)
    monkeypatch.setattr(planner, "_run", refuse)


def run(*arguments: str) -> Result:
    """The command in this process, which must end in words and with an exit code that means something."""
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code in (0, 1, 2), (arguments, result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert result.exit_code == 0 or result.output.strip(), arguments
    return result


# -- the loader


Path_ = tuple[str | int, ...]


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every place in a record, with what is there."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from leaves(each, (*path, key))


def change_at(record: Any, path: Path_, change: Callable[[Any, Any], None]) -> None:
    """Make a change to what holds the place, at its key."""
    for key in path[:-1]:
        record = record[key]
    change(record, path[-1])


def as_read(content: bytes, path: Path) -> Results | str:
    """What a file with this content is read as, or why it is not: the error names the file and has a reason."""
    path.write_bytes(content)
    try:
        return load(path)
    except ResultsError as error:
        said = str(error)
    assert said.startswith(f"{path}: ")
    assert len(said) > len(f"{path}: ") + 10
    return said


def check_reading(content: bytes, folder: Path) -> Results | str:
    """A file is refused, and the report with it, or its page can be made; in neither case is a part of it left."""
    read = as_read(content, folder / "damaged.json")
    with tempfile.TemporaryDirectory(dir=folder) as out:
        result = run("report", str(folder / "damaged.json"), "--out", out)
        made = {path.name for path in Path(out).iterdir()}
    assert (result.exit_code, made) == ((2, set()) if isinstance(read, str) else (0, WHOLE_PAGE - {"results.json"}))
    return read


VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**63, 2**64, -(2**63),
        10**400, "", "0", "1", "ZeRO-1", "params", "hold", "forward", "\ud800", "</script>", "\x00\x1b[31m", [], {},
        [0], {"": 0}, [[[[]]]], "x" * 10_000,
    ]
)  # fmt: skip
somewhere = st.floats(0, 1, exclude_max=True)  # a position, whatever the length


@some
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["flip", "cut", "double", "insert", "truncate"]),
            somewhere,
            st.integers(1, 60),
            st.binary(min_size=1, max_size=20),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_file_with_other_bytes_is_refused_or_read_whole(
    found: Results, tmp_path: Path, damages: list[tuple[str, float, int, bytes]]
) -> None:
    """Bytes flipped, cut out, doubled or put in: an error with the reason, or results that make a page."""
    content = bytearray(results.encode(found))
    for kind, where, length, other in damages:
        at = int(where * len(content))
        if kind == "flip":
            content[at : at + 1] = other[:1]
        elif kind == "cut":
            del content[at : at + length]
        elif kind == "double":
            content[at:at] = content[at : at + length]
        elif kind == "insert":
            content[at:at] = other
        else:
            del content[at:]
    check_reading(bytes(content), tmp_path)


@some
@given(
    st.booleans(), somewhere, VALUES, st.text(string.printable, max_size=9),
    st.sampled_from(["swap", "swap", "drop", "twice", "rename", "reverse"]),
)  # fmt: skip
def test_a_file_with_another_value_is_refused_or_read_whole(
    found: Results, card: Results, tmp_path: Path, limited: bool, where: float, value: object, name: str, kind: str
) -> None:
    """A value of another type or size, gone, twice or in another place: refused with the reason, or a page."""
    record = json.loads(results.encode(card if limited else found))
    places = [path for path, _ in leaves(record) if path]

    def change(holder: Any, key: Any) -> None:
        if kind == "swap":
            holder[key] = value
        elif kind == "drop":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[name] = holder.pop(key)
        elif kind == "twice" and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif isinstance(holder, list):
            holder.reverse()

    change_at(record, places[int(where * len(places))], change)
    check_reading(json.dumps(record).encode(), tmp_path)


# Integers that can be anything: what was asked for and is not in any number measured, and what has no counterpart.
FREE = {
    "settings.batch", "settings.seed", "settings.model_seed", "settings.capacity", "settings.warmup",
    "settings.accumulate",
    "schemes.steps.traffic.messages", "schemes.out_of_memory.held",
    "schemes.out_of_memory.asked", "schemes.out_of_memory.rank",
    "ablations.whole_model_gather.states", "ablations.whole_model_gather.gathered",
    "ablations.whole_model_gather.zero2_resident", "ablations.whole_model_gather.peak",
    "ablations.whole_model_gather.peak_by_layer", "ablations.narrow_wire.sent", "ablations.narrow_wire.sent_fp32",
    "ablations.narrow_wire.gradient_differing", "ablations.narrow_wire.drift.differing",
    "ablations.whole_model_bucket.differing", "ablations.int8_params.sent", "ablations.int8_params.sent_exact",
}  # fmt: skip
NAMES = {*Band, *Phase, *PRECISIONS, "all-reduce", "reduce-scatter", "all-gather"}  # keys that are no fields


def kind_of(path: Path_) -> str:
    """A place without positions and without the names of bands: which field of which record."""
    return ".".join(key for key in path if isinstance(key, str) and key not in NAMES)


def accepted(run: Results) -> set[str]:
    """The kinds of places of which one more or one less contradicts nothing, tried at up to four of each kind."""
    record = msgspec.to_builtins(run)
    places: dict[str, list[tuple[Path_, int]]] = {}
    for path, value in leaves(record):
        if type(value) is int:
            places.setdefault(kind_of(path), []).append((path, value))
    found = set()
    for kind, alike in places.items():
        for path, value in {*alike[:2], *alike[-2:]}:
            for other in (value - 1, value + 1, value):
                change_at(record, path, lambda holder, key, other=other: holder.__setitem__(key, other))  # type: ignore[misc]
                with contextlib.suppress(msgspec.ValidationError):
                    read = msgspec.convert(record, Results)
                    if other != value and next(soundness.contradictions(read), None) is None:
                        found.add(kind)
    return found


def test_no_count_can_be_changed_alone(found: Results, card: Results) -> None:
    """One more or one less of anything that was counted contradicts something else, save what stands for itself."""
    assert accepted(found) - FREE == set()
    alone = ("schemes.prediction", "schemes.out_of_memory", "schemes.events", "sweep.")  # of what has no step measured
    assert {kind for kind in accepted(card) - FREE if not kind.startswith(alone)} == set()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace('"ranks": 3', '"ranks": 3, "ranks": 3', 1), "'ranks' is given twice"),
        (lambda text: text.replace('"loss": ', '"loss": 1' + "0" * 5000 + ', "x": ', 1), "integer string conversion"),
        (lambda text: text.replace('"noise"', '"\\ud800"', 1), "surrogates not allowed"),
        (lambda text: text.replace('"messages": ', f'"messages": {2**63}', 1), "<= 9223372036854775807"),
        (lambda text: text.replace('"step": 1', '"step": -1', 1), ">= 0"),
        (lambda text: text.replace('"name": "ZeRO-1"', '"name": "ZeRO-4"', 1), "each of its own scheme"),
        (lambda text: "{" + '"a": {' * 50_000, "not a whole record"),
    ],
    ids=["a field twice", "too many digits", "half a character", "too large", "negative", "no such scheme", "too deep"],
)
def test_what_json_allows_and_a_record_does_not(
    found: Results, tmp_path: Path, damage: Callable[[str], str], reason: str
) -> None:
    """Each is refused in words of its own, and no page is made."""
    read = check_reading(damage(results.encode(found).decode()).encode(), tmp_path)
    assert isinstance(read, str)
    assert reason in read


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A folder, a device without end, a pipe that nobody writes to and a link in a circle are not waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "pipe", tmp_path / "circle", tmp_path / ("x" * 300)):
        assert run("report", str(path), "--out", str(tmp_path / "out")).exit_code == 2
    assert not (tmp_path / "out").exists()


# -- the verdicts of a file


def altered(run: Results, place: str, value: object) -> Results:
    """The results with another value at a place such as ``schemes.1.name``."""
    record = msgspec.to_builtins(run)
    path = tuple(int(key) if key.isdigit() else key for key in place.split("."))
    change_at(record, path, lambda holder, key: holder.__setitem__(key, value))
    return msgspec.convert(record, Results)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("differences.2.differing.params", 1, "bits of ZeRO-2 differ after step 1, and no failure says so"),
        ("schemes.3.steps.1.loss", 0.5, "losses differ in step 2, and no failure says so"),
        ("schemes.2.prediction.flops.forward", 1, "ZeRO-2: what was measured is not what is predicted"),
        ("sweep.0.fits_predicted", False, "the sweep, data parallel, N = 1: not as predicted"),
        ("differences", [], "comparisons belong to these steps"),
        ("sweep", [], ""),
        ("schemes.0.events", [], ""),
        ("schemes.0.steps", [], "2 completed steps"),
        ("schemes.1.steps.0.seconds.forward", float("nan"), "a time is negative or no number"),
        ("schemes.1.steps.0.peak.by_band.grads", 7, "the bands at the peak sum to"),
        ("schemes.1.steps.0.resident", {"memes": 7}, "no band at rest is called 'memes'"),
        ("ablations.narrow_wire.drift.differing", [], "a drift is given after each of the 2 steps"),
        ("ablations.narrow_wire.drift.losses", [1.0], "losses with a rule broken are those of 2 steps"),
        ("settings.accumulate", 37, "rows cannot be cut into 37 micro-batches"),
        ("settings.uneven", True, "the mean of the ranks' means is that of a run on uneven batches"),
        ("schemes.1.steps.0.mean_of_means", 1.0, "the mean of the ranks' means is that of a run on uneven batches"),
        ("settings.widths", [], "widths [] make 0 parameters"),
        ("schemes.0.events.0.4", 0, "of its log"),
    ],
)  # fmt: skip
def test_numbers_that_contradict_each_other_are_refused(found: Results, place: str, value: object, reason: str) -> None:
    """A page would be wrong where two parts of a file cannot both be true; what is only left out makes it shorter."""
    assert reason in next(soundness.contradictions(altered(found, place, value)), "")


def test_a_run_that_failed_its_checks_is_no_contradiction(found: Results) -> None:
    """What is not alike or not as predicted can be read, if the failures say so."""
    for place, value, check in (
        ("differences.2.differing.params", 1, "same training"),
        ("schemes.2.prediction.flops.forward", 1, "as predicted"),
    ):
        failure = results.Failure(
            check=check, scheme="ZeRO-2", ranks=3, step=1, rank=0, quantity="", measured="", expected=""
        )
        failed = msgspec.structs.replace(altered(found, place, value), failures=[failure])
        assert list(soundness.contradictions(failed)) == []


# -- the command line


WORDS = st.sampled_from(
    ["0", "1", "-1", "3", "1.5", "1e3", "nan", "inf", "9" * 20, "9" * 5000, "mixed", "bf16", "fp32", "fp16", "layer",
     "model", "noise", "digits", "2MB", "1e400GB", "80GiB", "GB", "", "-", "--", "-h", "é", "\udcff", "[bold]", "out",
     "nowhere/out", "out/results.json", "/dev/null/out", "x" * 300, "results.json", "ring", "gloo", "lo", "llama-7b",
     "gpt", "mlp:64-128", "H100", "8-64", "4,8", "64-8", "450GB/s", "plan.png", "plan.html", "plan.exe"]
)  # fmt: skip
COMMANDS = dict(cli.main.commands)
OPTIONS = {name: [each for param in command.params for each in param.opts] for name, command in COMMANDS.items()}


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A command and words after it, most of them its own options with a value."""
    name = draw(st.sampled_from([*COMMANDS, *COMMANDS, "labs", ""]))
    own = st.sampled_from(OPTIONS.get(name, ["--ranks"]))
    pieces = st.one_of(st.tuples(own, WORDS), st.tuples(own, WORDS), st.tuples(WORDS), st.tuples(own))
    words = draw(st.lists(pieces, max_size=5))
    return [name, *(word for piece in words for word in piece)]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@examples(by_night=300, by_day=90, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines())
def test_whatever_is_typed_ends_in_words(found: Results, line: list[str]) -> None:
    """Exit code 0 with all of the files, or 2 with none; never a traceback, never a part."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        results.save(found, Path("results.json"))
        result = run(*line)
        made = {Path(name).name for name in files(Path(folder))} - {"results.json"}
        assert made in (set(), WHOLE_PAGE - {"results.json"}), (line, made)
        assert result.exit_code != 2 or not made, line


# -- where the output goes, and whenever the process ends


PREPARED = """
import os, resource, signal, sys
from pathlib import Path
import msgspec
from zerosim.cli import lab as lab_command, main as cli
from zerosim.records import results
from zerosim.report import lab_console as console, plots

plots.figures = lambda found: {}
console.show = lambda *_, **__: None
found = results.load(Path(sys.argv[1]))
lab_command._run = lambda *_: found
command = ["lab", "--out", sys.argv[2]]
"""
EVERY_INSTANT = (
    PREPARED
    + """
FILES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.listdir", "os.scandir"}
numbers, limit = msgspec.json.decode(sys.argv[3]), int(sys.argv[4])
instant = 0
while True:
    instant += 1
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        passed = 0
        def watch(event, arguments):
            global passed
            if event in FILES and sys.argv[2] in str(arguments[:1]):
                passed += 1
                if passed == instant:
                    os.kill(os.getpid(), numbers[instant % len(numbers)])
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit * instant, -1))
        else:
            sys.addaudithook(watch)
        cli.main(command)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = sorted(path.name for path in Path(sys.argv[2]).iterdir())
    there = results.load(Path(sys.argv[2]) / "results.json").created
    print(msgspec.json.encode([status, left, there]).decode(), flush=True)
    if status == 0:
        break
"""
)


def environment() -> dict[str, str]:
    return os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def at_every_instant(
    found: Results, folder: Path, numbers: list[int], limit: int = 0
) -> list[tuple[int, list[str], str]]:
    """A lab ended by a signal at its first operation on a file, the next at its second, until one is left alone.

    For each its exit code, the files in its folder, and which results lie there: the old ones or the new.
    """
    out = folder / "out"
    out.mkdir()
    results.save(msgspec.structs.replace(found, created="new"), folder / "new.json")
    for name in WHOLE_PAGE:
        (out / name).write_text("old")
    results.save(msgspec.structs.replace(found, created="old"), out / "results.json")
    done = subprocess.run(
        [sys.executable, "-c", EVERY_INSTANT, str(folder / "new.json"), str(out), json.dumps(numbers), str(limit)],
        capture_output=True, text=True, timeout=120, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGKILL], id="killed"),
        pytest.param([signal.SIGINT, signal.SIGTERM], id="told to end", marks=pytest.mark.slow),
    ],
)
def test_a_lab_that_is_ended_at_any_instant_can_be_run_again(
    found: Results, tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    """Ended at any of its operations on files, it leaves results that are whole, old or new; left alone, new ones.

    Told to end, rather than killed, it leaves nothing else either, and finishes what is complete.
    """
    *ended, (code, _, created) = at_every_instant(found, tmp_path, list(numbers))
    assert (code, created) == (0, "new")
    assert len(ended) > 10
    if numbers == [signal.SIGKILL]:
        assert {(code, created) for code, _, created in ended} == {(-signal.SIGKILL, "old"), (-signal.SIGKILL, "new")}
    else:
        assert {created for code, _, created in ended if code in (130, 143)} == {"old"}
        assert [left for code, left, _ in ended if code in (130, 143) and set(left) != WHOLE_PAGE] == []
        assert {code for code, _, _ in ended} >= {130, 143}


@pytest.mark.slow
def test_a_lab_on_a_full_disk_leaves_what_was_there(found: Results, tmp_path: Path) -> None:
    """However early a file can grow no further, exit code 2, the old results and no part of the new ones."""
    *failed, (code, _, created) = at_every_instant(found, tmp_path, [], limit=30_000)
    assert (code, created) == (0, "new")
    assert len(failed) > 2
    assert {(code, tuple(left), created) for code, left, created in failed} == {(2, tuple(sorted(WHOLE_PAGE)), "old")}


SINKS = (
    PREPARED
    + """
for line, sink in msgspec.json.decode(sys.argv[3]):
    child = os.fork()
    if not child:
        os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open("/dev/full" if sink == "full" else os.devnull, os.O_WRONLY), 1)
        if sink == "errors":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        if sink == "closed":  # as Python finds it when it starts without one
            os.close(1)
            sys.stdout = None
        cli.main(line)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(msgspec.json.encode([status, Path(sys.argv[2]).read_text()]).decode(), flush=True)
"""
)


def test_output_that_cannot_be_written_is_no_traceback(found: Results, tmp_path: Path) -> None:
    """A full output gets exit code 2 and one line that says so; a closed one is done without."""
    recorded = tmp_path / "results.json"
    results.save(found, recorded)
    out = ["--out", str(tmp_path / "out")]
    lines = (["--help"], ["lab", *out, "--json"], ["lab", *out, "--ranks", "0"], ["report", str(recorded), *out])
    cases = [(line, sink) for line in lines for sink in ("full", "closed", "errors")]
    done = subprocess.run(
        [sys.executable, "-c", SINKS, str(recorded), str(tmp_path / "errors"), json.dumps(cases)],
        capture_output=True, text=True, timeout=60, env=environment(),
    )  # fmt: skip
    told = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(told) == len(cases), done.stderr
    full = (2, "Error: the output cannot be written: No space left on device\n")
    for (line, sink), (code, errors) in zip(cases, told, strict=True):
        refused = "0" in line
        assert "Traceback" not in errors
        assert code == (2 if refused or sink == "full" else 0), (line, sink, errors)
        assert (code, errors) == full or refused or sink != "full", (line, sink, errors)


def test_an_output_folder_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty --out is not taken for the folder that one is in, nor a link to nothing for a folder."""
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("nothing")
    assert "a folder has a name" in run("lab", "--out", "").output
    assert "it is a link to nothing, which is not there" in run("lab", "--out", "link").output
    assert files(tmp_path) == ["link"]
