"""Ranks that somebody else has started, on one machine or many: ``torchrun``, or a scheduler that does as it does.

Owns what the environment says, and how ranks find the one that leads, rank 0: it publishes an
address in the store that torch's own rendezvous uses, and they call it. Nothing listens on an
interface but the one on which the store is reached.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from zerosim.real_ranks import corroborate
from zerosim.real_ranks.agreement import Disagreement
from zerosim.real_ranks.connection import Connection, Heartbeat, Hello, Job
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.real_ranks.launch import ForkServer, loopback
from zerosim.records.real_ranks import Corroboration, Settings

_FIRST = 0.8  # ranks give up waiting for another before rank 0 does for all: who does not complain is to blame
_PARTING = 5.0  # seconds that a rank has to leave its process group in good order
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Member:
    """Who a process is, according to its environment; ``place`` counts the ranks of its machine."""

    rank: int
    world: int
    place: int
    address: str
    port: int
    hosts_store: bool
    attempt: str

    @property
    def at_home(self) -> bool:
        """Whether the ranks meet on the loopback address, and can use no other."""
        return self.address in ("127.0.0.1", "localhost", "::1")


def member(environment: Mapping[str, str] = os.environ) -> Member | None:
    """Who this process is, or None if nobody has started it as a rank. ValueError for half a story."""
    given = [name for name in _NAMES if name in environment]
    if "RANK" not in given:
        return None
    if len(given) < len(_NAMES):
        missing = ", ".join(name for name in _NAMES if name not in given)
        raise ValueError(
            f"corroborate: a rank that was started from outside needs {', '.join(_NAMES)} in its environment; "
            f"{missing} is missing. Start it with torchrun, or unset RANK to have the ranks started here."
        )
    rank = int(environment["RANK"])
    return Member(
        rank=rank,
        world=int(environment["WORLD_SIZE"]),
        place=int(environment.get("LOCAL_RANK", "0")),
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def take_part(
    me: Member, settings: Settings, advance: Callable[[str], None], timeout: float, interface: str | None
) -> Corroboration | int:
    """Do this process's part: rank 0 leads and returns what was found, the others return their exit code.

    Raises as ``corroborate.run``; RankFailure also where a rank other than 0 cannot go on.
    """
    from zerosim.real_ranks import worker
    from zerosim.worlds import torch_ring

    corroborate.validate(settings)
    if interface or me.at_home:
        os.environ["GLOO_SOCKET_IFNAME"] = interface or loopback()
    store = torch_ring.tcp_store(me.address, me.port, me.hosts_store, timeout)
    key = f"zerosim-coordinator-{me.attempt}"
    job = Job(rank=me.rank, world=me.world, settings=settings, store="", timeout=_FIRST * timeout)
    if me.rank == 0:
        return _lead(me, job, store, key, advance, timeout)
    connection = Connection(_call(store, key, me, timeout))
    try:
        code = worker.take_part(connection, job, store, me.place, Heartbeat()).code
        with contextlib.suppress(EOFError):  # its launcher would end rank 0 if it left with an error before rank 0 does
            connection.receive()
        return code
    except worker.Dismissed as home:
        raise Disagreement(str(home)) from home
    except EOFError as error:
        raise RankFailure(f"Rank 0, which leads, closed its connection to rank {me.rank}.", [0]) from error
    except Exception as error:  # which rank 0 has been told
        raise RankFailure(f"Rank {me.rank}: {type(error).__name__}: {error}", [me.rank]) from error


def _lead(me: Member, job: Job, store: Any, key: str, advance: Callable[[str], None], timeout: float) -> Corroboration:
    """Rank 0: one thread is the rank, this one holds all of them to the simulator."""
    from zerosim.real_ranks import worker

    def rank() -> None:
        with contextlib.suppress(Exception):  # it has told the coordinator
            worker.take_part(Connection(theirs), job, store, me.place, Heartbeat())

    ours, theirs = socket.socketpair()
    found = None
    with (
        contextlib.suppress(KeyboardInterrupt),  # before it began, or while tidying up
        _listening(me) as listener, ours, theirs, ForkServer("zerosim.real_ranks.simulated") as server,
    ):  # fmt: skip
        host, port = listener.getsockname()[:2]
        store.set(key, f"{host} {port}")
        thread = threading.Thread(target=rank, daemon=True)
        thread.start()
        coordinator = _assemble(listener, Connection(ours), me.world, timeout)
        found = corroborate.coordinate(coordinator, server, job.settings, advance)
        thread.join(_PARTING)
    return found or corroborate.nothing(job.settings)


@contextmanager
def _listening(me: Member) -> Iterator[socket.socket]:
    """A server on the address from which the store is reached, and on no other."""
    family, kind, _, _, address = socket.getaddrinfo(me.address, me.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as trial:
        trial.connect(address)  # sends nothing; it makes the kernel choose the interface
        host = trial.getsockname()[0]
    with socket.create_server((host, 0), family=family) as server:
        yield server


def _call(store: Any, key: str, me: Member, timeout: float) -> socket.socket:
    """A connection to rank 0. RankFailure if it does not answer."""
    try:
        host, port = store.get(key).decode().split()
        sock = socket.create_connection((host, int(port)), timeout)
    except (OSError, RuntimeError) as error:
        raise RankFailure(
            f"Rank {me.rank} cannot reach rank 0, which leads, within {timeout:g} s: {error}", [0]
        ) from error
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _assemble(server: socket.socket, own: Connection, world: int, timeout: float) -> Coordinator:
    """The coordinator, once every rank has called and introduced itself.

    Disagreement if one is not of this world; RankFailure, naming those that are missing, if they do not come in time.
    """
    connections, hellos = {0: own}, {0: own.receive(timeout)}
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as if_it_fails:
        while missing := [rank for rank in range(world) if rank not in connections]:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                sock, _ = server.accept()
            except TimeoutError as error:
                raise RankFailure(
                    f"Of {world} ranks these have not come within {timeout:g} s: {', '.join(map(str, missing))}. Start "
                    f"all with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
                    missing,
                ) from error
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock)
            if_it_fails.callback(connection.close)
            try:
                hello = connection.receive(max(deadline - time.monotonic(), 0.001))
            except (EOFError, TimeoutError, msgspec.DecodeError):
                connection.close()  # whoever that was, it was no rank
                continue
            assert isinstance(hello, Hello)
            if hello.world != world or hello.rank not in missing:
                text = f"two processes say that they are rank {hello.rank}"
                if hello.world != world:
                    text = f"rank {hello.rank} has world size {hello.world} where rank 0 has {world}"
                text = f"The ranks do not agree, and nothing was run: {text}."
                Coordinator([*connections.values(), connection], timeout).dismiss(text, 2)
                raise Disagreement(text)
            connections[hello.rank], hellos[hello.rank] = connection, hello
        if_it_fails.pop_all()
    return Coordinator(
        [connections[rank] for rank in range(world)], timeout, early=[[hellos[rank]] for rank in range(world)]
    )
