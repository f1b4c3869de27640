"""How a rank talks to whoever holds it to the simulator: messages over a socket, and a shared heartbeats.

Owns the messages, their framing, and the heartbeats on which ranks of this machine leave their heartbeat.
Nothing here writes to a file or to a socket that a meter watches: messages go through ``send``
and ``recv``, which ``/proc/self/io`` does not count, and the heartbeats is memory.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Sequence
from typing import IO, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from zerosim.records.real_ranks import Settings


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a rank: take part as ``rank`` of ``world``; it finds the others through the file ``store``."""

    rank: int
    world: int
    settings: Settings
    store: str
    timeout: float


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: who it believes to be, what it was asked for, and which code it runs.

    ``unfit`` says why it cannot do that, if it cannot.
    """

    rank: int
    world: int
    settings: Settings
    code: str
    versions: dict[str, str]
    unfit: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: it is connected, and what it found out about the backend and its meters."""

    order: str
    unmeasured: dict[str, str]
    addresses: list[str]


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: it has come to the next fence."""


class Go(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a rank: all have arrived."""


class Handed(msgspec.Struct, frozen=True, array_like=True):
    """How often torch was given one operation on so many bytes."""

    op: str
    nbytes: int
    times: int


class Booked(msgspec.Struct, frozen=True, array_like=True):
    """One counter of a rank's ledger: the collective, the band, and bytes."""

    collective: str
    band: str
    sent: int
    received: int
    padding: int
    messages: int


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: everything about the step that it has just done.

    ``states`` are the raw bytes of each compared band, a bucket at a time. ``written``,
    ``tcp_sent`` and ``tcp_received`` are what the kernel counted, None where it does not.
    """

    loss: float
    states: dict[str, list[bytes]]
    traffic: list[Booked]
    handed: list[Handed]
    written: int | None
    tcp_sent: int | None
    tcp_received: int | None
    resident: dict[str, int]
    peak: dict[str, int]
    rss: int
    seconds: dict[str, float]


class Simulated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the simulator: the same step of all ranks. ``states`` are [N, ...] each; ``traffic`` is by rank."""

    loss: float
    states: dict[str, list[bytes]]
    traffic: list[list[Booked]]
    resident: dict[str, int]
    peak: dict[str, int]


class Trouble(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: the error that ended its part."""

    text: str


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a rank: it is over; ``text`` says why if there was no success."""

    text: str
    code: int


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a server, with descriptors of the heartbeats's file and one connection per rank: make ``size`` ranks.

    Each calls ``function`` of ``module`` with its connection, the heartbeats and its rank. The folder
    ``scratch`` is removed when the server's connection closes.
    """

    size: int
    module: str
    function: str
    scratch: str


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a server: end these ranks."""

    pids: list[int]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a server: what it was told is done, and these are the process ids of the ranks it was to make."""

    pids: list[int]


class Change(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a server: a rank has ended, stopped or gone on; ``how`` completes the sentence "rank r ..."."""

    pid: int
    alive: bool
    stopped: bool
    how: str


Message: TypeAlias = (
    Job | Hello | Ready | Arrived | Go | Stepped | Simulated | Trouble | Bye | Fork | Kill | Done | Change
)
"""What travels over a connection."""
_DECODER = msgspec.msgpack.Decoder(Message)
_LENGTH = 8  # bytes of a message's length, in front of it


MOST_DESCRIPTORS = 250  # the kernel takes 253 at a time


def _framed(message: Message) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH, "big") + data


class Connection:
    """One end of a connected socket. EOFError where the other end is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        """The descriptor, for ``select``."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send it whole. OSError if nobody is there to take it."""
        self._sock.sendall(_framed(message))

    def receive(self, timeout: float | None = None) -> Message:
        """Wait for the next message. TimeoutError after ``timeout`` seconds without a byte."""
        self._sock.settimeout(timeout)
        try:
            while (message := self._next()) is None:
                self._fill()
        finally:
            self._sock.settimeout(None)
        return message

    def pump(self) -> list[Message]:
        """The messages that are complete, once ``select`` has found something to read."""
        self._fill()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _fill(self) -> None:
        try:
            data = self._recv()
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("the other end of the connection is closed")
        self._buffer += data

    def _recv(self) -> bytes:
        return self._sock.recv(1 << 20)

    def _next(self) -> Message | None:
        end = _LENGTH + int.from_bytes(self._buffer[:_LENGTH], "big")
        if len(self._buffer) < max(end, _LENGTH):
            return None
        with memoryview(self._buffer) as whole, whole[_LENGTH:end] as view:
            message: Message = _DECODER.decode(view)
        del self._buffer[:end]
        return message

    def close(self) -> None:
        """Close this end."""
        self._sock.close()


class ConnectionWithDescriptors(Connection):
    """A connection of a Unix socket that can carry open files as well; those that came are in ``fds``, in order."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.fds: list[int] = []

    def send_with(self, message: Message, fds: Sequence[int]) -> None:
        """Send a message, and with it up to 250 descriptors."""
        socket.send_fds(self._sock, [_framed(message)], fds)

    def _recv(self) -> bytes:
        data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, MOST_DESCRIPTORS)
        self.fds += fds
        return data


class Heartbeats:
    """Where each rank of a machine leaves its heartbeat: whether it waits for others, and since when.

    ``file`` is an unlinked file that both sides map. Times are of the monotonic clock.
    """

    def __init__(self, file: IO[bytes] | int, size: int) -> None:
        fd = file if isinstance(file, int) else file.fileno()
        nbytes = size * 2 * 8
        if os.fstat(fd).st_size < nbytes:
            os.ftruncate(fd, nbytes)
        self._table = np.frombuffer(mmap.mmap(fd, nbytes), np.float64).reshape(size, 2)

    def slot(self, rank: int) -> Heartbeat:
        """What rank ``rank`` writes to."""
        return Heartbeat(self._table[rank])

    def waiting(self) -> list[bool]:
        """Whether each rank is waiting for others."""
        return [bool(row) for row in self._table[:, 0]]

    def latest(self) -> float:
        """When a rank last came to a point where it waits, or went on from one."""
        return float(self._table[:, 1].max())


class Heartbeat:
    """One rank's place on a heartbeats; without one it keeps a place of its own, which nobody reads."""

    def __init__(self, slot: npt.NDArray[np.float64] | None = None) -> None:
        self._slot = np.zeros(2) if slot is None else slot

    def enter(self) -> None:
        """It now waits for others."""
        self._slot[:] = 1, time.monotonic()

    def leave(self) -> None:
        """It goes on."""
        self._slot[:] = 0, time.monotonic()
