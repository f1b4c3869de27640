"""Ranks that die, stop, disagree or never come: who is named, how soon, and what is left behind."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest

import zerosim
from zerosim.real_ranks import agreement, corroborate, rendezvous
from zerosim.real_ranks.connection import Arrived, Bye, Connection, Hello, Job, Trouble
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.real_ranks.launch import ForkServer, ForkServerError, Group, loopback
from zerosim.records.real_ranks import Corroboration, Fault, Settings
from zerosim.stages import SCHEMES

torch_needed = pytest.mark.skipif(
    find_spec("torch") is None, reason="real ranks need torch: pip install 'zerosim[torch]'"
)

FOUR = 4
TIMEOUT = 60.0
SLACK = 10.0  # seconds for a machine with other things to do


def settings(fault: Fault | None = None, ranks: int = FOUR, steps: int = 2) -> Settings:
    return Settings(
        ranks=ranks, steps=steps, batch=3, seed=7, model_seed=0, widths=[5, 7, 3], collectives=["ring", "native"],
        precisions=["mixed"], wire="fp32", backend="gloo", fault=fault, rows=list(SCHEMES),
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


class Ending(NamedTuple):
    """How a run ended, how long that took, and what its processes and folder were."""

    found: Corroboration
    seconds: float
    pids: list[int]
    scratch: Path


def run(
    server: ForkServer, asked: Settings, timeout: float, advance: corroborate.Advance = lambda doing: None
) -> Ending:
    since = time.monotonic()

    def note(doing: str) -> None:
        nonlocal since
        since = time.monotonic()
        advance(doing)

    with Group(server, asked.ranks) as group:
        found = corroborate.on(group, corroborate.jobs(group, asked, timeout), note, timeout)
    return Ending(found, time.monotonic() - since, group.pids, Path(group.scratch))


def assert_nothing_left(ending: Ending) -> None:
    assert not any(psutil.pid_exists(pid) for pid in ending.pids)
    assert not ending.scratch.exists()


def assert_kept(ending: Ending, step: int) -> None:
    """The first run is there up to the step before, sound, and everything is marked incomplete."""
    assert not ending.found.complete
    [kept] = ending.found.runs
    assert not kept.complete
    assert len(kept.losses) == step - 1
    assert ending.found.failures == []


# -- ranks that die or stop


@torch_needed
def test_a_killed_rank_is_named_at_once(server: ForkServer) -> None:
    """It ends long before the timeout, says which rank was killed by what and where, and leaves nothing behind."""
    ending = run(server, settings(Fault(kind="kill", rank=2, step=2)), TIMEOUT)
    assert ending.found.ended == "Rank 2 was killed by SIGKILL, in data parallel, ring, mixed: step 2 of 2."
    assert ending.seconds < SLACK < TIMEOUT
    assert_kept(ending, 2)
    assert_nothing_left(ending)


@torch_needed
def test_a_stopped_rank_is_named_within_the_timeout(server: ForkServer) -> None:
    """It is the stopped rank that is named, not those that wait for it; it is killed, and nothing is left behind."""
    timeout = 5.0
    ending = run(server, settings(Fault(kind="stop", rank=1, step=2)), timeout)
    assert ending.found.ended == (
        "Rank 1 was stopped by SIGSTOP and did not go on, in data parallel, ring, mixed: step 2 of 2."
    )
    assert timeout / 2 < ending.seconds < timeout
    assert_kept(ending, 2)
    assert_nothing_left(ending)


@torch_needed
def test_a_rank_that_goes_on_does_no_harm(server: ForkServer) -> None:
    """A rank that is stopped for a moment and continued delays the others, and everything is equal in the end."""
    with Group(server, FOUR) as group:
        timers: list[threading.Timer] = []

        def pause(doing: str) -> None:
            if not timers:
                os.kill(group.pids[3], signal.SIGSTOP)
                timers.append(threading.Timer(0.3, os.kill, (group.pids[3], signal.SIGCONT)))
                timers[0].start()

        found = corroborate.on(group, corroborate.jobs(group, settings(), TIMEOUT), pause, TIMEOUT)
        timers[0].join()
    assert found.complete, found.ended
    assert found.failures == []
    assert group.fates[3].how == "goes on"


@torch_needed
def test_an_interrupt_keeps_what_was_found(server: ForkServer) -> None:
    """Ctrl-C in the middle of a run ends it there; what was found is marked incomplete, and nothing is left behind."""

    def interrupt(doing: str) -> None:
        if doing.endswith("step 2 of 2"):
            signal.raise_signal(signal.SIGINT)

    ending = run(server, settings(), TIMEOUT, interrupt)
    assert ending.found.ended == corroborate.INTERRUPTED
    assert ending.seconds < SLACK
    assert_kept(ending, 2)
    assert_nothing_left(ending)


@torch_needed
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """A command that is killed outright cannot tidy up; its ranks end, even a stopped one, and their folder goes."""
    code = (
        "import sys, signal\n"
        "from zerosim.real_ranks.launch import Group, ForkServer\n"
        "group = Group(ForkServer(), 2)\n"
        "print(group.server.pid, *group.pids, group.scratch, flush=True)\n"
        "signal.pause()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as command:
        assert command.stdout is not None
        *pids, scratch = command.stdout.readline().split()
        assert Path(scratch).exists()
        processes = [psutil.Process(int(pid)) for pid in pids]
        processes[-1].suspend()
        command.kill()
    _, alive = psutil.wait_procs(processes, timeout=SLACK)
    assert alive == []
    assert list(tmp_path.iterdir()) == []


# -- ranks that disagree


def orders(group: Group, changed: int, **change: object) -> list[Job]:
    """The ranks' jobs, one of which is not like the others."""
    jobs = corroborate.jobs(group, settings(), TIMEOUT)
    fields = {name: getattr(jobs[changed], name) for name in jobs[changed].__struct_fields__}
    jobs[changed] = Job(**fields | change)
    return jobs


@torch_needed
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"settings": settings(steps=3)}, "rank 2 has steps 3 where most have 2"),
        ({"world": 5}, "rank 2 has world size 5 where most have 4"),
    ],
    ids=["settings", "world size"],
)
def test_ranks_that_disagree_refuse_to_start(server: ForkServer, change: dict[str, object], says: str) -> None:
    """One that was told something else is named, with what differs and how, before any step; all go home unharmed."""
    with Group(server, FOUR) as group:
        with pytest.raises(agreement.Disagreement) as caught:
            corroborate.on(group, orders(group, 2, **change), lambda doing: pytest.fail(doing), TIMEOUT)
        assert str(caught.value) == f"The ranks do not agree, and nothing was run: {says}."
        found = corroborate.on(group, corroborate.jobs(group, settings(), TIMEOUT), lambda doing: None, TIMEOUT)
    assert found.complete
    assert found.failures == []


@torch_needed
def test_another_version_of_the_code_is_refused(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the ranks run other sources than the command, nothing is run."""
    monkeypatch.setattr(agreement, "code_version", lambda: "another")
    with Group(server, 2) as group, pytest.raises(agreement.Disagreement, match="the command has code 'another'"):
        corroborate.on(group, corroborate.jobs(group, settings(ranks=2), TIMEOUT), lambda doing: None, TIMEOUT)


def test_the_version_of_the_code_is_that_of_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy of the sources has the same version, and one byte more or a file more another; caches do not count."""
    here = agreement.code_version()
    copy = tmp_path / "copy"
    shutil.copytree(Path(zerosim.__file__).parent, copy)
    monkeypatch.setattr(agreement, "SOURCES", copy)
    assert agreement.code_version() == here
    (copy / "note.txt").touch()
    assert agreement.code_version() == here
    (copy / "real_ranks" / "new.py").touch()
    changed = agreement.code_version()
    with (copy / "stages.py").open("a") as file:
        file.write("\n")
    assert len({here, changed, agreement.code_version()}) == 3


def test_whoever_differs_from_most_is_named() -> None:
    """Each belief is compared with the commonest; what only some have is compared among those."""
    beliefs: dict[str, dict[str, object]] = {
        "rank 0": {"steps": 2, "code": "b"},
        "rank 1": {"steps": 2, "code": "a"},
        "rank 2": {"steps": 3, "code": "a"},
        "the command": {"code": "a"},
    }
    assert agreement.differences(beliefs) == [
        "rank 2 has steps 3 where most have 2",
        "rank 0 has code 'b' where most have 'a'",
    ]
    assert agreement.differences({"rank 0": {"steps": 2}, "rank 1": {"steps": 2}}) == []


# -- the coordinator, without ranks


@pytest.fixture
def connections() -> Iterator[tuple[list[Connection], list[Connection]]]:
    """Three connections: the coordinator's ends and the ranks'."""
    pairs = [socket.socketpair() for _ in range(3)]
    ours, theirs = ([Connection(pair[end]) for pair in pairs] for end in (0, 1))
    yield ours, theirs
    for connection in ours + theirs:
        connection.close()


def test_messages_come_in_the_order_of_ranks(connections: tuple[list[Connection], list[Connection]]) -> None:
    """Whoever speaks first, answers are by rank; one that runs ahead is heard in its turn."""
    ours, theirs = connections
    coordinator = Coordinator(ours, TIMEOUT)
    theirs[2].send(Arrived())
    theirs[2].send(Bye(text="2", code=0))
    for rank in (1, 0):
        theirs[rank].send(Arrived())
    assert coordinator.gather(Arrived, "a test") == [Arrived()] * 3
    for rank in (1, 0):
        theirs[rank].send(Bye(text=str(rank), code=0))
    assert [bye.text for bye in coordinator.gather(Bye, "a test")] == ["0", "1", "2"]


def test_a_closed_connection_names_its_rank(connections: tuple[list[Connection], list[Connection]]) -> None:
    """A rank whose connection closes without a word is to blame, not those that then complain."""
    ours, theirs = connections
    theirs[0].send(Trouble(text="connection reset"))
    theirs[1].close()
    with pytest.raises(RankFailure, match=r"^Rank 1 closed its connection without a word, in a test\.$") as caught:
        Coordinator(ours, TIMEOUT).gather(Arrived, "a test")
    assert caught.value.ranks == [1]


def test_a_silent_rank_is_named_when_others_give_up(connections: tuple[list[Connection], list[Connection]]) -> None:
    """If all but one say that they gave up waiting, it is the silent one that is to blame."""
    ours, theirs = connections
    for rank in (0, 2):
        theirs[rank].send(Trouble(text="timed out"))
    with pytest.raises(
        RankFailure,
        match=r"^Rank 1 said nothing, in a test, and others gave up: Rank 0: timed out; Rank 2: timed out\.$",
    ) as caught:
        Coordinator(ours, 0.5).gather(Arrived, "a test")
    assert caught.value.ranks == [1]


def test_an_error_is_passed_on(connections: tuple[list[Connection], list[Connection]]) -> None:
    """A rank's own error is told in its words when nobody else is to blame."""
    ours, theirs = connections
    theirs[0].send(Arrived())
    theirs[1].send(Trouble(text="ValueError: no such thing"))
    theirs[2].send(Arrived())
    with pytest.raises(RankFailure, match=r"Errors in a test: Rank 1: ValueError: no such thing"):
        Coordinator(ours, 0.5).gather(Arrived, "a test")


def test_silence_ends_with_the_timeout(connections: tuple[list[Connection], list[Connection]]) -> None:
    """Ranks that say nothing at all are named after the timeout, and one that has answered is not."""
    ours, theirs = connections
    theirs[1].send(Arrived())
    since = time.monotonic()
    with pytest.raises(RankFailure, match=r"^Rank 0 and Rank 2 made no progress for 0\.2 s, in a test\."):
        Coordinator(ours, 0.2).gather(Arrived, "a test")
    assert 0.2 <= time.monotonic() - since < SLACK


# -- ranks that others have started


def hello(rank: int, world: int) -> Hello:
    return Hello(rank=rank, world=world, settings=settings(ranks=world), code="", versions={}, unfit="")


def assemble(*callers: Hello | bytes, timeout: float = TIMEOUT) -> list[Hello]:
    """Rank 0's side of three ranks when these call it, one after another; a caller may be no rank."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        Connection(theirs).send(hello(0, 3))
        for caller in callers:
            sock = stack.enter_context(socket.create_connection(server.getsockname()))
            if isinstance(caller, Hello):
                Connection(sock).send(caller)
            else:
                sock.sendall(caller)
                sock.shutdown(socket.SHUT_WR)
        coordinator = rendezvous._assemble(server, Connection(ours), 3, timeout)
        hellos = coordinator.gather(Hello, "a test")
        for connection in coordinator.connections:
            connection.close()
        return hellos


def test_ranks_are_put_in_order() -> None:
    """Whoever calls first, connection r leads to rank r; a caller that is no rank is turned away."""
    garbage = (3).to_bytes(8, "big") + b"abc"
    assert [each.rank for each in assemble(hello(2, 3), garbage, b"GET / HTTP/1.1", hello(1, 3))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("callers", "says"),
    [
        ([hello(1, 2)], "rank 1 has world size 2 where rank 0 has 3"),
        ([hello(1, 3), hello(1, 3)], "two processes say that they are rank 1"),
    ],
    ids=["another world", "the same rank"],
)
def test_ranks_of_another_world_are_refused(callers: list[Hello], says: str) -> None:
    """They are named as soon as they come, and nobody waits for the rest."""
    with pytest.raises(agreement.Disagreement, match=f"nothing was run: {says}"):
        assemble(*callers)


def test_ranks_that_do_not_come_are_named() -> None:
    """After the timeout the error says which are missing."""
    since = time.monotonic()
    with pytest.raises(RankFailure, match=r"these have not come within 0\.2 s: 1\. Start all") as caught:
        assemble(hello(2, 3), timeout=0.2)
    assert 0.2 <= time.monotonic() - since < SLACK
    assert caught.value.ranks == [1]


# -- starting


def test_a_server_that_cannot_start_says_why() -> None:
    """The error ends with what the process printed."""
    with pytest.raises(ForkServerError, match=r"No module named 'zerosim\.absent'"):
        ForkServer("zerosim.absent")


def test_loopback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the interface that has 127.0.0.1, whatever else others have; without one the error says what to do."""
    known = {name: [SimpleNamespace(address=each)] for name, each in {"eth0": "192.0.2.7", "lo": "127.0.0.1"}.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    assert loopback() == "lo"
    del known["lo"]
    with pytest.raises(OSError, match="name one with --interface"):
        loopback()


def test_half_an_environment_is_refused() -> None:
    """RANK without the rest is an error that names what is missing; without RANK nobody has started this process."""
    assert rendezvous.member({"WORLD_SIZE": "2"}) is None
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT is missing"):
        rendezvous.member({"RANK": "0", "WORLD_SIZE": "2"})
    me = rendezvous.member({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert me is not None
    assert (me.rank, me.world, me.at_home) == (1, 2, True)
