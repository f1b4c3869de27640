"""Ranks that die, stop, disagree or fall silent: who is named, how soon, and what is left behind."""

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

import zerosim
from helpers import real_settings
from zerosim.real_ranks import agreement, cases, corroborate, processes
from zerosim.real_ranks.connection import Arrived, Bye, Connection, Hello, Status, Trouble
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.records.real_ranks import Corroboration, Fault, Settings

torch_needed = pytest.mark.skipif(
    find_spec("torch") is None, reason="real ranks need torch: pip install 'zerosim[torch]'"
)
pytestmark = pytest.mark.usefixtures("shapes_unchecked")

TIMEOUT = 60.0
SLACK = 20.0  # seconds for a machine with other things to do


# -- real ranks


class Ending:
    """How a run ended, how long that took, and which processes it had."""

    def __init__(self, asked: Settings, timeout: float, advance: corroborate.Advance = lambda doing: None) -> None:
        since = time.monotonic()
        self.pids: set[int] = set()

        def note(doing: str) -> None:
            nonlocal since
            since = time.monotonic()
            self.pids |= {child.pid for child in psutil.Process().children()}
            advance(doing)

        self.found = corroborate.run(asked, note, timeout=timeout)
        self.seconds = time.monotonic() - since

    def assert_kept(self) -> None:
        """The first run is there up to the first step, sound, all is marked incomplete, and no process is left."""
        assert not self.found.complete
        [kept] = self.found.runs
        assert not kept.complete
        assert len(kept.losses) == 1
        assert self.found.failures == []
        assert len(self.pids) == self.found.settings.ranks
        assert not any(psutil.pid_exists(pid) for pid in self.pids)


@torch_needed
def test_a_killed_rank_is_named_at_once() -> None:
    """It ends long before the timeout, says which rank was killed by what and where, and leaves nothing behind."""
    ending = Ending(real_settings(fault=Fault(kind="kill", rank=2, step=2)), TIMEOUT)
    assert ending.found.ended == "Rank 2 was killed by SIGKILL, in data parallel, ring, mixed: step 2 of 2."
    assert ending.seconds < SLACK < TIMEOUT
    ending.assert_kept()


@torch_needed
def test_a_stopped_rank_is_named_within_the_timeout() -> None:
    """It is the stopped rank that is named, not those that wait for it; it is killed, and nothing is left behind."""
    timeout = 5.0
    ending = Ending(real_settings(fault=Fault(kind="stop", rank=1, step=2)), timeout)
    assert ending.found.ended == (
        "Rank 1 was stopped by SIGSTOP and did not go on, in data parallel, ring, mixed: step 2 of 2."
    )
    assert timeout / 2 < ending.seconds < timeout
    ending.assert_kept()


@torch_needed
@pytest.mark.slow
def test_a_rank_that_goes_on_does_no_harm() -> None:
    """A rank that is stopped for a moment and continued delays the others, and everything is equal in the end."""
    timers: list[threading.Timer] = []

    def pause(doing: str) -> None:
        if not timers and "step 1" in doing:
            rank = psutil.Process().children()[3].pid
            os.kill(rank, signal.SIGSTOP)
            timers.append(threading.Timer(0.3, os.kill, (rank, signal.SIGCONT)))
            timers[0].start()

    found = Ending(real_settings(), TIMEOUT, pause).found
    timers[0].join()
    assert found.complete, found.ended
    assert found.failures == []


@torch_needed
def test_an_interrupt_keeps_what_was_found() -> None:
    """Ctrl-C in the middle of a run ends it there; what was found is marked incomplete, and nothing is left behind."""

    def interrupt(doing: str) -> None:
        if doing.endswith("step 2 of 2"):
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal, wherever tests run
    try:
        ending = Ending(real_settings(), TIMEOUT, interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ending.found.ended == corroborate.INTERRUPTED
    assert ending.seconds < SLACK
    ending.assert_kept()


@torch_needed
def test_another_version_of_the_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the ranks run other sources than the command, nothing is run."""
    here = os.getpid()
    version = agreement.code_version()
    monkeypatch.setattr(agreement, "code_version", lambda: "another" if os.getpid() == here else version)
    with pytest.raises(agreement.Disagreement, match="the command has code 'another'"):
        corroborate.run(real_settings(ranks=2), timeout=TIMEOUT)


# -- what ranks must agree on


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
    """Each fact is compared with the commonest; what only some have is compared among those."""
    facts: dict[str, dict[str, object]] = {
        "rank 0": {"steps": 2, "code": "b"},
        "rank 1": {"steps": 2, "code": "a"},
        "rank 2": {"steps": 3, "code": "a"},
        "the command": {"code": "a"},
    }
    assert agreement.differences(facts) == [
        "rank 2 has steps 3 where most have 2",
        "rank 0 has code 'b' where most have 'a'",
    ]
    assert agreement.differences({"rank 0": {"steps": 2}, "rank 1": {"steps": 2}}) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"settings": real_settings(steps=3)}, "rank 2 has steps 3 where most have 2"),
        ({"world": 5}, "rank 2 has world size 5 where most have 4"),
        ({"threads": {"openblas": 2}}, "rank 2 has threads of openblas 2 where most have 1"),
    ],
    ids=["settings", "world size", "threads"],
)
def test_ranks_that_disagree_refuse_to_start(change: dict[str, object], says: str) -> None:
    """One that was told something else is named, with what differs and how, before any step; all are sent home."""
    pairs = [socket.socketpair() for _ in range(4)]
    ours, theirs = ([Connection(pair[end]) for pair in pairs] for end in (0, 1))
    usual: dict[str, Any] = {
        "world": 4, "settings": real_settings(), "code": agreement.code_version(), "versions": {"torch": "2"},
        "threads": {"openblas": 1}, "unfit": "",
    }  # fmt: skip
    for rank, connection in enumerate(theirs):
        connection.send(Hello(rank=rank, **usual | (change if rank == 2 else {})))
    settings = real_settings()
    model, data = cases.model(settings), cases.data(settings)
    with pytest.raises(agreement.Disagreement) as caught:
        corroborate.coordinate(Coordinator(ours, 1), settings, pytest.fail, model, data)
    text = f"The ranks do not agree, and nothing was run: {says}."
    assert str(caught.value) == text
    assert [connection.receive() for connection in theirs] == [Bye(text=text, code=2)] * 4
    for connection in (*ours, *theirs):
        connection.close()


# -- the coordinator, without ranks


@pytest.fixture
def connections() -> Iterator[tuple[list[Connection], list[Connection]]]:
    """Three connections: the coordinator's ends and the ranks'."""
    pairs = [socket.socketpair() for _ in range(3)]
    ours, theirs = ([Connection(pair[end], SLACK) for pair in pairs] for end in (0, 1))
    yield ours, theirs
    for connection in ours + theirs:
        connection.close()


Ends = tuple[list[Connection], list[Connection]]


def test_messages_come_in_the_order_of_ranks(connections: Ends) -> None:
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


def test_a_closed_connection_names_its_rank(connections: Ends) -> None:
    """A rank that closes without a word is to blame, not those that then complain."""
    ours, theirs = connections
    theirs[0].send(Trouble(text="connection reset", waiting=True))
    theirs[1].close()
    with pytest.raises(RankFailure, match=r"^Rank 1 closed its connection without a word, in a test\.$") as caught:
        Coordinator(ours, 1).gather(Arrived, "a test")
    assert (caught.value.ranks, caught.value.others) == ([1], {0: "connection reset"})


def test_two_ranks_that_are_told_to_be_dead_are_both_named(connections: Ends) -> None:
    """What those say that watch ranks elsewhere counts; who dies a moment after the first is named with it."""
    ours, theirs = connections
    theirs[0].send(Status(alive=False, how="was killed by SIGKILL"))
    later = threading.Timer(0.1, theirs[2].send, [Status(alive=False, how="was killed by SIGBUS of the OOM")])
    later.start()
    with pytest.raises(RankFailure, match=r"^Rank 0 was killed by SIGKILL; Rank 2 was killed by SIGBUS of the OOM, in"):
        Coordinator(ours, TIMEOUT).gather(Arrived, "a test")
    later.join()


def test_garbage_is_a_closed_connection() -> None:
    """Bytes that are no message end what is heard of a rank, and do not end the coordinator."""
    ours, theirs = socket.socketpair()
    theirs.sendall((3).to_bytes(8, "big") + b"abc")
    with pytest.raises(RankFailure, match="Rank 0 closed its connection"):
        Coordinator([Connection(ours)], 0.2).gather(Arrived, "a test")
    for end in (ours, theirs):
        end.close()


def test_silence_ends_with_the_timeout(connections: Ends) -> None:
    """Ranks that say nothing at all are named after the timeout, and one that has answered is not."""
    ours, theirs = connections
    theirs[1].send(Arrived())
    since = time.monotonic()
    with pytest.raises(RankFailure, match=r"^Rank 0 and Rank 2 made no progress for 0\.2 s, in a test\."):
        Coordinator(ours, 0.2).gather(Arrived, "a test")
    assert 0.2 <= time.monotonic() - since < SLACK


def test_progress_puts_the_timeout_off() -> None:
    """A rank that says nothing but goes from operation to operation is waited for; when it halts, it is over."""

    def work(connection: Connection, heartbeat: processes.Heartbeat, number: int) -> None:
        for _ in range(10):
            time.sleep(0.1)
            heartbeat.enter("send", 1)
        time.sleep(SLACK)

    with processes.children(1, work) as [child]:
        since = time.monotonic()
        with pytest.raises(RankFailure, match=r"made no progress for 0\.5 s"):
            Coordinator([child.connection], 0.5, [child]).gather(Arrived, "a test")
    assert time.monotonic() - since > 1.0


def test_nothing_is_recorded_of_what_did_not_begin() -> None:
    """The record of what was interrupted at once is empty, and says so."""
    settings = real_settings()
    found = corroborate.nothing(settings, cases.model(settings))
    assert isinstance(found, Corroboration)
    assert (found.ended, found.complete, found.runs) == (corroborate.INTERRUPTED, False, [])
