"""Children of this process: who hears of their ends, what they print, and what is left when their parent is gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from zerosim.real_ranks import corroborate
from zerosim.real_ranks.connection import Arrived, Bye, Connection, Status
from zerosim.real_ranks.processes import Child, Heartbeat, children, meeting_point

SLACK = 20.0  # seconds for a machine with other things to do
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a parent's death cannot be told")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SLACK
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
    """Until it is told something, or for ever."""
    connection.receive()


def test_each_talks_with_its_parent_and_knows_its_number() -> None:
    """A child has its own end of a connection and its number; when it returns it ends well."""

    def work(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
        connection.send(Bye(text=f"{number} of {os.getppid()}", code=0))

    with children(3, work) as born:
        assert [each.connection.receive() for each in born] == [
            Bye(text=f"{number} of {os.getpid()}", code=0) for number in range(3)
        ]
        until(lambda: not any(each.status().alive for each in born))
        assert {each.status().how for each in born} == {"exited with code 0"}


def test_nothing_outlives_the_block() -> None:
    """With the block all children end, also one that is stopped; an error in the block changes nothing of it."""
    born: list[Child] = []

    def fail() -> None:
        with children(2, wait) as each:
            born.extend(each)
            os.kill(born[1].pid, signal.SIGSTOP)
            until(lambda: born[1].status().stopped)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(born) == 2
    assert not any(psutil.pid_exists(each.pid) for each in born)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGKILL, Status(alive=False, how="was killed by SIGKILL")),
        (signal.SIGSTOP, Status(stopped=True, how="was stopped by SIGSTOP")),
    ],
)
def test_the_kernel_says_how_a_child_fares(number: signal.Signals, expected: Status) -> None:
    """One that was killed is told from one that was stopped; one that goes on is told too."""
    with children(1, wait) as [child]:
        os.kill(child.pid, number)
        until(lambda: child.status() == expected)
        if expected.stopped:
            os.kill(child.pid, signal.SIGCONT)
            until(lambda: child.status() == Status(how="goes on"))


def test_what_a_child_printed_is_known_when_it_has_ended() -> None:
    """An error ends it with code 1; its last lines, and what libraries wrote to its descriptors, are in its status."""

    def work(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
        os.write(2, b"a library's words\n")
        print("and its own")
        raise ValueError("mine")

    with children(1, work) as [child]:
        until(lambda: not child.status().alive)
        status = child.status()
    assert status.how == "exited with code 1"
    assert status.said.startswith("a library's words\nand its own\nTraceback")
    assert status.said.endswith("ValueError: mine")


def test_a_heartbeat_shows_how_far_a_child_has_come() -> None:
    """The parent reads operations, bytes and whether it waits, while the child is blocked; a step begins at none."""

    def work(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
        heartbeat.begin()
        heartbeat.enter("send", 24)
        heartbeat.leave()
        heartbeat.enter("all-reduce", 7)
        connection.send(Arrived())
        connection.receive()

    with children(1, work) as [child]:
        child.connection.receive()
        status = child.status()
        assert (status.waiting, status.calls, status.op, status.nbytes) == (True, 2, "all-reduce", 7)
        assert time.monotonic() - SLACK < child.heartbeat.since <= time.monotonic()
        child.heartbeat.begin()
        assert (child.status().calls, child.status().digest, child.status().waiting) == (0, 0, False)


def test_signals_for_the_command_do_not_reach_its_children() -> None:
    """A child is in a session of its own, so that Ctrl-C is for the command, which then ends it."""

    def work(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
        connection.send(Bye(text=f"{os.getsid(0)} {signal.getsignal(signal.SIGTERM) == signal.SIG_DFL}", code=0))

    with children(1, work) as [child]:
        assert child.connection.receive() == Bye(text=f"{child.pid} True", code=0)


@linux
def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """A command that is killed outright cannot tidy up; its ranks end, even a stopped one, and no file is left."""
    code = (
        "import os, signal\n"
        "from zerosim.real_ranks.connection import Arrived\n"
        "from zerosim.real_ranks.processes import children, meeting_point\n"
        "def work(connection, *_):\n"
        "    connection.send(Arrived())\n"  # from here on the kernel knows that they die with their parent
        "    connection.receive()\n"
        "with meeting_point() as path, children(2, work) as born:\n"
        "    open(path, 'wb').write(b'met')\n"
        "    [child.connection.receive() for child in born]\n"
        "    print(*(child.pid for child in born), flush=True)\n"
        "    signal.pause()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as command:
        assert command.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in command.stdout.readline().split()]
        processes[-1].suspend()
        command.kill()
    assert len(processes) == 2
    _, alive = psutil.wait_procs(processes, timeout=SLACK)
    assert alive == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hidden", [False, True], ids=["in memory", "as a file"])
def test_children_meet_at_a_path_that_leaves_nothing(
    hidden: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What one child writes there another reads, also where there is no /proc; nothing is left of it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    if hidden:
        monkeypatch.delattr(os, "memfd_create", raising=False)

    with meeting_point() as path:

        def work(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
            if number == 0:
                Path(path).write_text("here")
            connection.send(Arrived())
            connection.receive()
            connection.send(Bye(text=Path(path).read_text(), code=0))

        def both(each: Child) -> object:
            return each.connection.receive()

        with children(2, work) as born:
            assert [both(each) for each in born] == [Arrived()] * 2
            for each in born:
                each.connection.send(Arrived())
            assert [both(each) for each in born] == [Bye(text="here", code=0)] * 2
        assert len(list(tmp_path.iterdir())) == hidden
    assert list(tmp_path.iterdir()) == []


def test_loopback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the interface that has 127.0.0.1, whatever else others have; without one the error says what to do."""
    known = {name: [SimpleNamespace(address=each)] for name, each in {"eth0": "192.0.2.7", "lo": "127.0.0.1"}.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    assert corroborate.loopback() == "lo"
    del known["lo"]
    with pytest.raises(OSError, match="name one with --interface"):
        corroborate.loopback()
