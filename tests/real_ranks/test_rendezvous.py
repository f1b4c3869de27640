"""Ranks that others have started: how they find each other, and how it ends if they do not."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest

from helpers import by_night, real_settings
from zerosim.real_ranks import agreement, corroborate, rendezvous
from zerosim.real_ranks.connection import Bye, Connection, Hello
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.real_ranks.processes import Child, Heartbeat, children
from zerosim.real_ranks.rendezvous import Membership
from zerosim.records.real_ranks import Corroboration

torch_needed = pytest.mark.skipif(
    find_spec("torch") is None, reason="real ranks need torch: pip install 'zerosim[torch]'"
)
pytestmark = pytest.mark.usefixtures("shapes_unchecked")

TIMEOUT = 60.0
SLACK = 20.0  # seconds for a machine with other things to do


# -- what the environment says


def test_half_an_environment_is_refused() -> None:
    """RANK without the rest is an error that names what is missing; without RANK nobody has started this process."""
    assert rendezvous.membership({"WORLD_SIZE": "2"}) is None
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT is missing"):
        rendezvous.membership({"RANK": "0", "WORLD_SIZE": "2"})
    me = rendezvous.membership({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert me is not None
    assert (me.rank, me.world, me.local, me.hosts_store) == (1, 2, True, False)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("RANK", "one", "RANK must be an integer; got 'one'"), ("RANK", "2", "from 0 to WORLD_SIZE - 1; got 2 of 2")],
)
def test_an_environment_that_makes_no_sense_is_refused(name: str, value: str, says: str) -> None:
    """The error names the variable and its value."""
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ValueError, match=says):
        rendezvous.membership(given | {name: value})


# -- rank 0 puts them in order


def hello(rank: int, world: int) -> Hello:
    return Hello(
        rank=rank, world=world, settings=real_settings(ranks=world), code="", versions={}, threads={}, unfit=""
    )


def greet(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
    """What rank 0's own process does."""
    connection.send(hello(0, 3))
    with contextlib.suppress(EOFError):
        connection.receive()


def assemble(*callers: Hello | bytes, timeout: float = TIMEOUT) -> list[Hello]:
    """Rank 0's side of three ranks when these call it, one after another; a caller may be no rank."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        [own] = stack.enter_context(children(1, greet))
        for caller in callers:
            sock = stack.enter_context(socket.create_connection(server.getsockname()))
            if isinstance(caller, Hello):
                Connection(sock).send(caller)
            else:
                sock.sendall(caller)
        coordinator = rendezvous._assemble(server, own, 3, timeout)
        assert isinstance(coordinator, Coordinator)
        stack.callback(coordinator.close)
        return coordinator.gather(Hello, "a test")


def test_ranks_are_put_in_order() -> None:
    """Whoever calls first, connection r leads to rank r; callers that are no ranks, or mute, keep nobody waiting."""
    garbage = (3).to_bytes(8, "big") + b"abc"
    assert [each.rank for each in assemble(hello(2, 3), garbage, b"GET / HTTP/1.1", b"", hello(1, 3))] == [0, 1, 2]


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
    with pytest.raises(RankFailure, match=r"these have not come within 1 s: 1\. Start all") as caught:
        assemble(hello(2, 3), timeout=1)
    assert 1 <= time.monotonic() - since < SLACK
    assert caught.value.ranks == [1]


# -- nobody waits for ever


@pytest.fixture
def deaf() -> Iterator[int]:
    """The port of a server that takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def member(rank: int, world: int, port: int, address: str = "127.0.0.1") -> Membership:
    return Membership(
        rank=rank, world=world, place=rank, address=address, port=port, hosts_store=rank == 0, attempt="0"
    )


def take_part(me: Membership, timeout: float) -> Corroboration | int:
    return rendezvous.take_part(me, real_settings(ranks=me.world), lambda doing: None, timeout, None)


@torch_needed
@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (1, r"^Rank 1 could not reach rank 0 through 127\.0\.0\.1:\d+ within 1 s\. .* nothing else listens there\.$"),
        (0, r"^Rank 0 failed to start: .*address already in use$"),
    ],
    ids=["a store that does not answer", "a port in use"],
)
def test_something_else_at_the_stores_port(rank: int, says: str, deaf: int) -> None:
    """The handshake blocks in C++, where no deadline reaches, and yet it ends in one line, and leaves no process."""
    since = time.monotonic()
    with pytest.raises(RankFailure, match=says):
        take_part(member(rank, 2, deaf), 1)
    assert time.monotonic() - since < SLACK
    assert psutil.Process().children() == []


@torch_needed
def test_a_rank_alone_says_what_is_missing() -> None:
    """Without a rank 0 there is no store to reach, and without others rank 0 has nobody to coordinate."""
    with pytest.raises(RankFailure, match="could not reach rank 0"):
        take_part(member(1, 2, free_port()), 0.5)
    with pytest.raises(RankFailure, match=r"Of 2 ranks these have not come within 2 s: 1\."):
        take_part(member(0, 2, free_port()), 2)


@torch_needed
def test_an_address_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named in one line, by rank 0 and by others."""

    def unknown(*given: object, **named: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    says = "'no.such.host' cannot be resolved: Name or service not known"
    with pytest.raises(ValueError, match=says):
        take_part(member(0, 2, 1, "no.such.host"), SLACK)
    with pytest.raises(RankFailure, match=f"Rank 1 failed to start: .*{says}"):
        take_part(member(1, 2, 1, "no.such.host"), SLACK)


@torch_needed
def test_a_request_to_end_is_met_while_the_handshake_blocks(deaf: int) -> None:
    """A signal reaches this process though torch is blocked: the rank is in another."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            take_part(member(1, 2, deaf), TIMEOUT)
        timer.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert psutil.Process().children() == []


# -- and together


def started(port: int, steps: int, world: int = 4) -> contextlib.AbstractContextManager[list[Child]]:
    """Ranks 1, 2, ... as a launcher starts them: each a process that takes part, and ends with its exit code."""

    def process(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
        settings = real_settings(ranks=world, steps=steps, collectives=["ring"])
        code = rendezvous.take_part(member(number + 1, world, port), settings, lambda doing: None, TIMEOUT, None)
        connection.send(Bye(text="", code=code if isinstance(code, int) else -1))

    return children(world - 1, process)


@torch_needed
def test_ranks_of_separate_processes_are_held_to_the_simulator() -> None:
    """Rank 0 finds everything equal, to the byte; the others are told the exit code."""
    port = free_port()
    with started(port, steps=1, world=3) as others:
        settings = real_settings(ranks=3, steps=1, collectives=["ring"])
        found = rendezvous.take_part(member(0, 3, port), settings, lambda doing: None, TIMEOUT, None)
        assert isinstance(found, Corroboration)
        assert (found.complete, found.failures, found.addresses) == (True, [], ["127.0.0.1"]), found.ended
        assert [each.connection.receive() for each in others] == [Bye(text="", code=0)] * 2


@torch_needed
@pytest.mark.parametrize("what", ["process", *by_night("rank")])
def test_two_that_die_at_once_are_both_named(what: str) -> None:
    """Two of four are killed in a step, with the processes that watch them or alone: both are named, and how."""
    port = free_port()
    with started(port, steps=100) as others:

        def kill(doing: str) -> None:
            if doing.endswith("step 3 of 100"):
                for each in others[1:]:
                    [rank] = psutil.Process(each.pid).children()
                    os.kill(each.pid if what == "process" else rank.pid, signal.SIGKILL)

        settings = real_settings(steps=100, collectives=["ring"])
        found = rendezvous.take_part(member(0, 4, port), settings, kill, TIMEOUT, None)
    assert isinstance(found, Corroboration)
    how = "closed its connection without a word" if what == "process" else "was killed by SIGKILL"
    assert found.ended == f"Rank 2 {how}; Rank 3 {how}, in data parallel, ring, mixed: step 3 of 100."
    assert corroborate.INTERRUPTED not in found.ended
