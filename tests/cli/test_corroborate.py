"""``zerosim corroborate``, as it is typed: exit codes, what is printed, and what it leaves behind."""

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from helpers import MINE
from zerosim.cli import corroborate as cli
from zerosim.cli.errors import Refused
from zerosim.records import real_ranks as records
from zerosim.records.real_ranks import Corroboration
from zerosim.records.results import Failure

torch_needed = pytest.mark.skipif(
    find_spec("torch") is None, reason="real ranks need torch: pip install 'zerosim[torch]'"
)
pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # ranks are forked from here, with what is switched on here

COMMAND = "from zerosim.cli.corroborate import corroborate; corroborate()"
AT_A_TERMINAL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # wherever tests run
SLACK = 30.0  # seconds for a machine with other things to do
SMALL = ("--ranks", "2", "--steps", "2", "--precision", "mixed")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.corroborate, arguments)


@torch_needed
def test_what_holds_is_said_and_written(tmp_path: Path) -> None:
    """Exit code 0; verdicts come before the tables, progress goes to standard error, and the record is written."""
    result = run(*SMALL, "--scheme", "ZeRO-3", "--scheme", "mine=optimizer,grads", "--out", str(tmp_path / "made"))
    assert result.exit_code == 0, result.output
    for check in records.CHECKS:
        assert f"✓ {check} hold" in result.stdout
    assert result.stdout.index("memory holds") < result.stdout.index("moved, P")
    assert "gloo's own reduce-scatter is an all-reduce" in result.stdout
    assert "ZeRO-3, native, mixed" in result.stderr.splitlines()
    assert "ZeRO-3, native, mixed" not in result.stdout
    record = records.load(tmp_path / "made" / "corroborate.json")
    assert record.complete
    assert record.settings.ranks == 2
    assert record.settings.rows[1] == MINE
    assert {run.scheme for run in record.runs} == {"ZeRO-3", "mine"}


@torch_needed
def test_what_fails_is_named(tmp_path: Path) -> None:
    """Exit code 1; the record, here on standard output, has the failures with scheme, step, rank and both values."""
    arguments = [*SMALL, "--collectives", "ring", "--scheme", "ZeRO-2", "--break", "bit"]
    result = run(*arguments, "--json", "--out", str(tmp_path))
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "corroborate.json").read_text())
    [failure] = records.load(tmp_path / "corroborate.json").failures
    assert str(failure).startswith("bits: ZeRO-2, ring, mixed, N = 2, step 2, rank 1: params of layer 1, 1 elements, ")


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 2 and the command that installs it; nothing is written."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("--out", str(tmp_path))
    assert result.exit_code == 2
    assert "pip install 'zerosim[torch]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


RANKED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--ranks", "1"], {}, "1 is not in the range x>=2"),
        (["--collectives", "other"], {}, "'other' is not one of 'both', 'ring', 'native'"),
        (["--ranks", "3"], RANKED, "according to WORLD_SIZE 2 ranks were started; got --ranks 3"),
        (["--frameworks"], RANKED, "leave torchrun out"),
        (["--bucket", "0"], {}, "'0' is none of layer, model, and no number of parameters"),
        pytest.param(["--scheme", "HSDP"], {}, "Say how large they are, as in --node 8.", marks=torch_needed),
        pytest.param(["--node", "3"], {}, "4 ranks cannot be cut into groups of 3. Use 1, 2, 4", marks=torch_needed),
        pytest.param(["--accumulate", "3"], {}, "accumulate", marks=torch_needed),
        pytest.param(["--model", "absent:model"], {}, "'absent:model' must be MODULE:FUNCTION", marks=torch_needed),
        pytest.param(["--model", "helpers:draw"], {}, "", marks=torch_needed),
        (["--model", "a:b", "--frameworks"], {}, "leave --model out"),
        (["--interface", "absent0"], {}, "got 'absent0'"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(
    arguments: list[str], environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 2, with the rule, the value and what to do, before anything is run."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())


MODEL = """
import numpy as np
import torch
from torch import nn
from zerosim.torch_models.model import TorchModel

def make(ranks, steps, batch, seed):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    rng = np.random.default_rng(seed)
    draw = lambda width: rng.standard_normal((batch, width)).astype(np.float32)
    data = [[(draw(5), draw(3)) for _ in range(ranks)] for _ in range(steps)]
    return TorchModel(net, data[0][0][0], nn.Linear, loss=nn.functional.mse_loss), data

def half(ranks, steps, batch, seed):
    return make(ranks, steps, batch, seed)[0]

def short(ranks, steps, batch, seed):
    model, data = make(ranks, steps, batch, seed)
    return model, data[1:]
"""


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a model of one's own, in the folder that one is in."""
    (tmp_path / "own_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    return "own_model"


@torch_needed
def test_ones_own_module_and_options(own_model: str, tmp_path: Path) -> None:
    """An ``nn.Module`` trains on real ranks as in the simulator, with every option that a schedule has."""
    options = ["--accumulate", "2", "--prefetch", "1", "--checkpoint", "--padding", "each"]
    options += ["--node", "1", "--clip", "0.5", "--scheme", "ZeRO-3", "--precision", "mixed"]
    options += ["--wire-params", "int8"]
    arguments = ["--ranks", "2", "--steps", "2", "--model", f"{own_model}:make", *options]
    result = run(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    settings = records.load(tmp_path / "corroborate.json").settings
    assert settings.model == "own_model:make"
    assert settings.schedule == {
        "accumulate": 2, "prefetch": 1, "checkpoint": True, "padding": "each", "node": 1, "clip": 0.5,
        "wire_params": "int8",
    }  # fmt: skip


@torch_needed
def test_what_a_scheme_cannot_train_is_refused_in_its_words(own_model: str, tmp_path: Path) -> None:
    """Before a rank is started the command ends with exit code 2 and what the scheme says."""
    result = run(*SMALL, "--model", f"{own_model}:make", "--bucket", "40", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "Use a bucket per layer" in " ".join(result.stderr.split())
    assert "starting the ranks" not in result.stderr


@torch_needed
@pytest.mark.parametrize(
    ("name", "says"),
    [("half", "must give a model, an MLP or a TorchModel, and its data; got TorchModel"), ("short", "each of 2 steps")],
)
def test_half_a_model_is_refused(own_model: str, name: str, says: str, tmp_path: Path) -> None:
    """A function that gives something else is named, with what it gave."""
    result = run(*SMALL, "--model", f"{own_model}:{name}", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


# -- what is printed, without ranks


def recorded(failures: list[Failure], **more: Any) -> Corroboration:
    usual: dict[str, Any] = {
        "schema": records.SCHEMA, "created": "", "versions": {}, "settings": settings(), "n_params": 1,
        "complete": not more, "ended": "", "errors": {}, "order": "ring", "unmeasured": {}, "elsewhere": {},
        "addresses": [], "runs": [], "failures": failures,
    }  # fmt: skip
    return Corroboration(**usual | more)


def settings() -> records.Settings:
    return records.Settings(
        ranks=2, steps=2, batch=1, seed=7, model_seed=0, widths=[1, 1], collectives=["ring"], precisions=["fp32"],
        wire="fp32", backend="gloo", fault=None, rows=[MINE],
    )  # fmt: skip


def shown(found: Corroboration, monkeypatch: pytest.MonkeyPatch, *arguments: str, out: Path) -> Result:
    monkeypatch.setattr(cli, "_run", lambda *given: found)
    return run(*arguments, "--out", str(out))


def failure(check: str, step: int, rank: int) -> Failure:
    return Failure(check=check, scheme="mine", ranks=2, step=step, rank=rank, quantity="q", measured="1", expected="2")


def test_the_first_failure_is_named_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of failures the one that can have caused the others is printed, with their number; --verbose prints all."""
    failures = [failure("bits", 2, 0), failure("bits", 1, 0), failure("losses", 1, 1), failure("memory", 1, 0)]
    result = shown(recorded(failures), monkeypatch, out=tmp_path)
    assert result.exit_code == 1
    assert "losses: mine, N = 2, step 1, rank 1: q: measured 1, expected 2" in result.stdout
    assert result.stdout.count("measured 1") == 1
    assert "and 3 more, which may follow from it" in result.stdout
    assert shown(recorded(failures), monkeypatch, "--verbose", out=tmp_path).stdout.count("measured 1") == 4


def test_what_others_said_is_printed_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cause stands alone; --verbose adds the errors of those that it made fail."""
    found = recorded([], ended="Rank 1 failed.", errors={"0": "connection reset"})
    result = shown(found, monkeypatch, out=tmp_path)
    assert result.exit_code == 1
    assert "incomplete: Rank 1 failed." in result.stdout
    assert "connection reset" not in result.stdout
    assert "rank 0 said: connection reset" in shown(found, monkeypatch, "--verbose", out=tmp_path).stdout


def test_what_was_found_is_printed_before_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a disk that is full by then nothing of the run is lost but the file, and the exit code says so."""

    def full(found: Corroboration, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(cli, "save", full)
    result = shown(recorded([]), monkeypatch, out=tmp_path)
    assert result.exit_code == Refused.exit_code
    assert "- start not measured: " in result.stdout
    assert "No space left on device" in result.stderr


def test_a_disk_without_room_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    """A folder that takes an empty file and not a record is refused, with what is needed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        result = run("--out", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert result.exit_code == 2
    assert "results take up to 4.00 MB" in " ".join(result.stderr.split())


# -- as processes


@torch_needed
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C or a request to terminate, while ranks work: exit code 130, what was found is kept, and that is all."""
    temporary, out = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    arguments = ["--ranks", "2", "--steps", "1000", "--precision", "mixed", "--collectives", "ring", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL + COMMAND, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    ) as command:  # fmt: skip
        assert command.stderr is not None
        while "data parallel" not in (line := command.stderr.readline()):
            assert line, "it ended before a run began"
        started = psutil.Process(command.pid).children(recursive=True)
        os.killpg(command.pid, number)  # as a terminal does
        printed, _ = command.communicate(timeout=SLACK)
    assert command.returncode == 130
    assert "Interrupted. What was found before is kept." in printed
    assert not records.load(out / "corroborate.json").complete
    assert len(started) == 2
    assert not any(process.is_running() for process in started)
    assert list(temporary.iterdir()) == []


@torch_needed
@pytest.mark.slow
def test_torchrun_starts_the_same(tmp_path: Path) -> None:
    """Ranks started by torchrun agree, rank 0 prints and writes, and everything holds, to the byte."""
    script = tmp_path / "script.py"
    script.write_text(COMMAND)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), "--steps", "1", "--precision", "mixed", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=6 * SLACK, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bytes hold: ") == 1
    record = records.load(tmp_path / "corroborate.json")
    assert record.settings.ranks == 2
    assert (record.complete, record.failures, record.addresses) == (True, [], ["127.0.0.1"])


@torch_needed
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there can /proc be hidden")
def test_without_proc_it_says_what_was_not_measured(tmp_path: Path) -> None:
    """Where /proc is hidden everything but its counters is measured, and the exit code is 0."""
    hide = "mount -t tmpfs none /proc"
    if subprocess.run(["unshare", "-rm", "sh", "-c", hide], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let /proc be hidden")
    inner = f"{hide} && exec '{sys.executable}' -c '{COMMAND}' {' '.join(SMALL)} --scheme ZeRO-2 --out '{tmp_path}'"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inner], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=6 * SLACK, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = records.load(tmp_path / "corroborate.json")
    assert record.complete
    assert set(record.unmeasured) == {"process", "namespace"}
    assert all(set(rank.sent.kernel) == {"sockets"} for each in record.runs for rank in each.ranks)
