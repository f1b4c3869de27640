"""``zerosim corroborate``, as it is typed: exit codes, what is printed, and what it leaves behind."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from zerosim.cli import corroborate as cli_corroborate
from zerosim.real_ranks import corroborate
from zerosim.real_ranks.launch import ForkServer
from zerosim.records import real_ranks as corroborate_records

torch_needed = pytest.mark.skipif(
    find_spec("torch") is None, reason="real ranks need torch: pip install 'zerosim[torch]'"
)

COMMAND = "from zerosim.cli.corroborate import corroborate; corroborate()"
SLACK = 20.0  # seconds for a machine with other things to do


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli_corroborate.corroborate, arguments)


@torch_needed
def test_what_holds_is_said_and_written(server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 0; every check's verdict is printed, progress goes to standard error, and the record is written."""
    monkeypatch.setattr(corroborate, "ForkServer", lambda interface: contextlib.nullcontext(server))
    result = run("--ranks", "2", "--steps", "2", "--precision", "mixed", "--out", str(tmp_path / "made" / "here"))
    assert result.exit_code == 0, result.output
    for check in ("bits", "losses", "bytes", "memory"):
        assert f"{check} holds: " in result.stdout
    assert "gloo's own reduce-scatter is an all-reduce" in result.stdout
    assert "ZeRO-3, native, mixed" in result.stderr.splitlines()
    assert "ZeRO-3, native, mixed" not in result.stdout
    record = corroborate_records.load(tmp_path / "made" / "here" / "corroborate.json")
    assert record.complete
    assert record.settings.ranks == 2


@torch_needed
def test_what_fails_is_named(server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 1; the record, here on standard output, has the failures with scheme, step, rank and both values."""
    monkeypatch.setattr(corroborate, "ForkServer", lambda interface: contextlib.nullcontext(server))
    arguments = ["--ranks", "2", "--steps", "1", "--collectives", "ring", "--precision", "fp32", "--break", "bit"]
    result = run(*arguments, "--json", "--out", str(tmp_path))
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "corroborate.json").read_text())
    failures = corroborate_records.load(tmp_path / "corroborate.json").failures
    assert [(each.check, each.rank) for each in failures] == [("bits", 1)] * 4
    assert "bits: ZeRO-2, ring, fp32, N = 2, step 1, rank 1: params of layer 1, 1 elements" in str(failures[2])


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 2 and the command that installs it; nothing is written."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("--out", str(tmp_path))
    assert result.exit_code == 2
    assert "pip install 'zerosim[torch]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--ranks", "1"], {}, "1 is not in the range x>=2"),
        (["--collectives", "other"], {}, "'other' is not one of 'both', 'ring', 'native'"),
        (["--ranks", "3"], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
         "according to WORLD_SIZE 2 ranks were started; got --ranks 3"),
    ],
    ids=["one rank", "unknown collectives", "another world size"],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(
    arguments: list[str], environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 2, with the rule, the value and what to do."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


@torch_needed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C or a request to terminate, while ranks work: exit code 130, what was found is kept, and that is all."""
    temporary, out = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    arguments = ["--ranks", "2", "--steps", "1000", "--precision", "mixed", "--collectives", "ring", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
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
    assert not corroborate_records.load(out / "corroborate.json").complete
    assert len(started) == 1 + 2 + 1  # the server, the ranks, the simulator
    assert not any(process.is_running() for process in started)
    assert list(temporary.iterdir()) == []


@torch_needed
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
    assert done.stdout.count("bytes holds") == 1
    record = corroborate_records.load(tmp_path / "corroborate.json")
    assert record.settings.ranks == 2
    assert (record.complete, record.failures, record.addresses) == (True, [], ["127.0.0.1"])
