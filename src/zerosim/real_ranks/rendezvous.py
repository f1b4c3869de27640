"""Ranks that somebody else has started, on one machine or many: ``torchrun``, or a scheduler that does as it does.

Owns what the environment says, and how ranks find the one that coordinates, rank 0: it publishes an address in
the store that torch's own rendezvous uses. The process that was started watches: the rank is a child of it,
since torch may block where no deadline and no signal reaches. Nothing listens on an interface but the one on
which the store is reached.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from zerosim.real_ranks import cases, corroborate
from zerosim.real_ranks.agreement import Disagreement
from zerosim.real_ranks.blame import Verdict
from zerosim.real_ranks.connection import Address, Bye, Connection, Hello, Message, Status, Trouble
from zerosim.real_ranks.coordinator import Coordinator, RankFailure
from zerosim.real_ranks.processes import Child, Heartbeat, children
from zerosim.real_ranks.simulation import check_trainable
from zerosim.records.real_ranks import Corroboration, Settings

_LOOK = 0.05  # seconds between two looks at how a rank fares
_PARTING = 5.0  # seconds that a rank has to leave its process group in good order
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Membership:
    """Which rank a process is, according to its environment; ``place`` counts the ranks of its machine."""

    rank: int
    world: int
    place: int
    address: str
    port: int
    hosts_store: bool
    attempt: str

    @property
    def local(self) -> bool:
        """Whether the ranks meet on the loopback address, and can use no other."""
        return self.address in ("127.0.0.1", "localhost", "::1")


def membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Which rank this process is, or None if nobody has started it as one. ValueError for half a story."""
    given = [name for name in _NAMES if name in environment]
    if "RANK" not in given:
        return None
    if len(given) < len(_NAMES):
        missing = ", ".join(name for name in _NAMES if name not in given)
        raise ValueError(
            f"corroborate: a rank that was started from outside needs {', '.join(_NAMES)} in its environment; "
            f"{missing} is missing. Start it with torchrun, or unset RANK to have the ranks started here."
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        try:
            numbers[name] = int(environment[name])
        except ValueError as error:
            raise ValueError(f"corroborate: {name} must be an integer; got {environment[name]!r}.") from error
    if not 0 <= numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise ValueError(
            f"corroborate: RANK must be from 0 to WORLD_SIZE - 1; got {numbers['RANK']} of {numbers['WORLD_SIZE']}."
        )
    return Membership(
        rank=numbers["RANK"],
        world=numbers["WORLD_SIZE"],
        place=int(environment.get("LOCAL_RANK", "0")),
        address=environment["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        hosts_store=numbers["RANK"] == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def take_part(
    me: Membership,
    settings: Settings,
    advance: Callable[[str], None],
    timeout: float,
    interface: str | None,
) -> Corroboration | int:
    """Do this process's part: rank 0 coordinates and returns what was found, the others return their exit code.

    Raises as ``corroborate.run``; RankFailure also where a rank other than 0 cannot go on, or where rank 0
    cannot be reached within ``timeout``.
    """
    corroborate.validate(settings)
    from zerosim.real_ranks import worker  # only now: it imports torch
    from zerosim.worlds import torch_ring

    model, data = cases.trained(settings)
    check_trainable(settings, model)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listening(me)) if me.rank == 0 else None

        def rank(parent: Connection, heartbeat: Heartbeat, number: int) -> None:
            task = worker.Task(
                me.rank, me.world, me.place, settings, model, data, corroborate.PATIENCE * timeout,
                interface or (corroborate.loopback() if me.local else None),
            )  # fmt: skip
            key = f"zerosim-coordinator-{me.attempt}"
            try:
                _resolved(me)
                store = torch_ring.tcp_store(me.address, me.port, me.hosts_store, timeout)
                if server is not None:
                    store.set(key, " ".join(map(str, server.getsockname()[:2])))
                else:
                    host, port = store.get(key).decode().split()
                    parent.send(Address(host=host, port=int(port)))
            except Exception as error:
                worker.tell(parent, error, heartbeat)
                raise
            with contextlib.suppress(worker.Dismissed):
                worker.take_part(parent, task, store, heartbeat)

        [child] = stack.enter_context(children(1, rank))
        if server is None:
            return _relay(child, me, timeout)
        try:
            coordinator = stack.enter_context(contextlib.closing(_assemble(server, child, me.world, timeout)))
            return corroborate.coordinate(coordinator, settings, advance, model, data)
        except KeyboardInterrupt:
            return corroborate.nothing(settings, model)


def _resolved(me: Membership) -> tuple[Any, ...]:
    """The master's address as ``socket`` has it. ValueError if there is none."""
    try:
        return socket.getaddrinfo(me.address, me.port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ValueError(
            f"corroborate: MASTER_ADDR must be an address of rank 0's machine; {me.address!r} cannot be resolved: "
            f"{error.strerror or error}."
        ) from error


@contextmanager
def _listening(me: Membership) -> Iterator[socket.socket]:
    """A server on the address from which the store is reached, and on no other."""
    family, kind, _, _, address = _resolved(me)
    with socket.socket(family, kind) as trial:
        trial.connect(address)  # sends nothing; it makes the kernel choose the interface
        host = trial.getsockname()[0]
    with socket.create_server((host, 0), family=family) as server:
        yield server


def _relay(child: Child, me: Membership, timeout: float) -> int:
    """Carry messages between this machine's rank and the coordinator, and tell it how the rank fares, until it says
    that all is over: the exit code."""
    link: Connection | None = None
    told: Status | None = None
    heard = time.monotonic()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        selector.register(child.connection, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in selector.select(_LOOK):
                    heard = time.monotonic()
                    for message in key.fileobj.pump() if key.fileobj is link else _said(key.fileobj, selector):
                        if isinstance(message, Address):
                            link = stack.enter_context(contextlib.closing(_call(message, timeout)))
                            selector.register(link, selectors.EVENT_READ)
                        elif key.fileobj is child.connection and link is not None:
                            link.send(message)
                        elif isinstance(message, Trouble):
                            raise _failed(me, f"failed to start: {message.text}")
                        elif isinstance(message, Bye):
                            return _leave(message, child)
                        else:
                            child.connection.send(message)
                status = child.status()
                if link is not None and status != told:
                    link.send(status)
                    told = status
                if link is None and not status.alive:
                    raise _failed(me, _last_words(child) or f"{status.how} before it reached rank 0")
                silence = time.monotonic() - heard
                if link is None and silence > timeout:
                    raise _failed(
                        me,
                        f"could not reach rank 0 through {me.address}:{me.port} within {timeout:g} s. Start rank 0 "
                        f"with the same MASTER_ADDR and MASTER_PORT, and see that nothing else listens there",
                    )
                if silence > corroborate.PATIENCE * timeout:
                    raise _failed(me, f"has heard nothing from rank 0 for {silence:g} s")
        except (EOFError, OSError) as error:
            raise _failed(me, "lost its connection to rank 0, which coordinates") from error
        except KeyboardInterrupt:
            if link is not None:
                with contextlib.suppress(OSError):
                    link.send(Status(alive=False, asked=True, how="was asked to end"))
            raise


def _failed(me: Membership, how: str) -> RankFailure:
    return RankFailure(Verdict(f"Rank {me.rank} {how}.", [me.rank], {}))


def _call(address: Address, timeout: float) -> Connection:
    """A connection to the coordinator."""
    sock = socket.create_connection((address.host, address.port), timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(sock, corroborate.PATIENCE * timeout)


def _leave(bye: Bye, child: Child) -> int:
    """Let the rank leave its process group in good order; the exit code."""
    with contextlib.suppress(OSError):
        child.connection.send(bye)
    deadline = time.monotonic() + _PARTING
    while child.status().alive and time.monotonic() < deadline:
        time.sleep(_LOOK)
    if bye.code == 2:
        raise Disagreement(bye.text)
    return bye.code


def _last_words(child: Child) -> str:
    """What a child that has ended said of it, if that has not been heard yet."""
    with contextlib.suppress(EOFError, OSError):
        for message in child.connection.pump():
            if isinstance(message, Trouble):
                return f"failed to start: {message.text}"
    return ""


def _said(end: Any, selector: selectors.BaseSelector) -> list[Message]:
    """What has come over a connection; nothing, and no more of it, once it is closed."""
    try:
        messages: list[Message] = end.pump()
    except (EOFError, OSError, msgspec.DecodeError):
        selector.unregister(end)
        messages = []
    return messages


def _assemble(server: socket.socket, own: Child, world: int, timeout: float) -> Coordinator:
    """The coordinator, once every rank has introduced itself: this process's own, and those that call.

    Disagreement if one is not of this world; RankFailure, naming those that are missing, if they do not come in time.
    """
    hellos: dict[int, Hello] = {}
    connections: dict[int, Connection] = {}
    turned_away: set[Connection] = set()
    deadline = time.monotonic() + timeout
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            selector.register(own.connection, selectors.EVENT_READ, own.connection)
            while missing := [rank for rank in range(world) if rank not in hellos]:
                for key, _ in selector.select(_LOOK):
                    if key.fileobj is server:
                        caller = Connection(server.accept()[0], corroborate.PATIENCE * timeout)
                        turned_away.add(caller)  # unless it turns out to be a rank
                        selector.register(caller, selectors.EVENT_READ, caller)
                        continue
                    for message in _said(key.fileobj, selector):
                        if isinstance(message, Hello):
                            _admit(message, hellos, world, [key.data, *connections.values()])
                            hellos[message.rank], connections[message.rank] = message, key.data
                            selector.unregister(key.fileobj)
                        elif isinstance(message, Trouble):
                            raise RankFailure(Verdict(f"Rank 0 failed to start: {message.text}", [0], {}))
                if 0 in missing and not (status := own.status()).alive:
                    how = _last_words(own) or f"{status.how} before it began"
                    raise RankFailure(Verdict(f"Rank 0 {how}.", [0], {}))
                if time.monotonic() > deadline:
                    text = f"Of {world} ranks these have not come within {timeout:g} s: {', '.join(map(str, missing))}."
                    advice = " Start all with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
                    raise RankFailure(Verdict(text + advice, missing, {}))
        turned_away -= set(connections.values())
        ranks = range(world)
        return Coordinator([connections[rank] for rank in ranks], timeout, [own], [hellos[rank] for rank in ranks])
    finally:
        for caller in turned_away:
            caller.close()


def _admit(hello: Hello, known: Mapping[int, Hello], world: int, callers: Sequence[Connection]) -> None:
    """Turn away who is not of this world. Disagreement, which all callers are told."""
    if hello.world == world and hello.rank not in known and 0 <= hello.rank < world:
        return
    text = f"two processes say that they are rank {hello.rank}"
    if hello.world != world:
        text = f"rank {hello.rank} has world size {hello.world} where rank 0 has {world}"
    text = f"The ranks do not agree, and nothing was run: {text}."
    for caller in callers:
        with contextlib.suppress(OSError):
            caller.send(Bye(text=text, code=2))
    raise Disagreement(text)
