"""Ranks for one's own implementation: each end is told, and none outlives who asked for them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

from zerosim.conformance import launch, run_ranks


def test_each_rank_ends_in_its_own_way_and_none_later_than_was_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """Codes by rank: done, an exit code, an error with its traceback, a signal, and killed when time is up."""

    def rank_of(rank: int) -> None:
        print("I am", rank)
        if rank == 1:
            sys.exit(3)
        if rank == 2:
            raise KeyError("mine")
        if rank == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if rank == 4:
            time.sleep(60)

    ran = run_ranks(rank_of, 5, timeout=15, show=False)
    assert ran.codes == [0, 3, 1, -signal.SIGTERM, -signal.SIGKILL]
    assert ran.output == "".join(f"I am {rank}\n" for rank in range(5))
    assert ran.errors[2].endswith("KeyError: 'mine'\n")
    assert not ran.holds
    assert capfd.readouterr().out == ""


def test_nobody_begins_before_all_have_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ends at once leaves the others' group whole, as each has it by then."""
    join = launch.dist.init_process_group

    def joins_late(*args: Any, rank: int, **kwargs: Any) -> None:
        join(*args, rank=rank, **kwargs)
        if rank == 1:
            time.sleep(0.5)
            print(time.monotonic())

    monkeypatch.setattr(launch.dist, "init_process_group", joins_late)
    ran = run_ranks(lambda rank: print(time.monotonic()), 3, show=False)
    began, joined, *rest = map(float, ran.output.split())
    assert joined < min(began, *rest)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_no_rank_outlives_who_started_it(tmp_path: Path) -> None:
    """Killed while its ranks train, the process that called ``run_ranks`` leaves none behind."""
    code = (
        "import os, pathlib, sys, time\n"
        "from zerosim.conformance import run_ranks\n"
        "def rank_of(rank):\n"
        "    pathlib.Path(sys.argv[1], str(os.getpid())).touch()\n"
        "    time.sleep(100)\n"
        "run_ranks(rank_of, 2)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        until = time.monotonic() + 100
        while len(ranks := [int(path.name) for path in tmp_path.iterdir()]) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(ranks) == 2
        assert all(psutil.pid_exists(rank) for rank in ranks)
    finally:
        caller.kill()
        caller.wait()
    until = time.monotonic() + 10
    while any(map(psutil.pid_exists, ranks)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, ranks))
