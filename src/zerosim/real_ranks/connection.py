"""How a rank and whoever holds it to the simulator talk: the messages, over a socket.

Owns the messages and their framing. Messages go through ``send`` and ``recv``, which ``/proc/self/io`` does not
count: no meter of a rank sees them. (multiprocessing's connections write, and would show.) Every wait ends.
"""

from __future__ import annotations

import socket
import zlib
from typing import TypeAlias

import msgspec

from zerosim.records.real_ranks import Settings


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: who it believes to be, what it was asked for, and which code it runs on how many threads.

    ``unfit`` says why it cannot do that, if it cannot.
    """

    rank: int
    world: int
    settings: Settings
    code: str
    versions: dict[str, str]
    threads: dict[str, int]
    unfit: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: it is connected, and what it found out about the backend and its meters; its process's memory."""

    order: str
    unmeasured: dict[str, str]
    addresses: list[str]
    memory: int


class Began(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: the states with which it begins a run, as in ``Stepped``."""

    states: dict[str, dict[str, bytes]]


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: it has come to the next fence."""


class Go(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a rank: all have arrived."""


class Handed(msgspec.Struct, frozen=True, array_like=True):
    """How often torch was given one operation on so many bytes, over a ring of ``size``."""

    op: str
    nbytes: int
    size: int
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

    ``states`` are the raw bytes by band and bucket. ``written``,
    ``tcp_sent`` and ``tcp_received`` are what the kernel counted, None where it does not;
    ``opened`` and ``datagrams`` what all of its network namespace did; ``memory`` is the
    process's largest resident set up to now.
    """

    loss: float
    states: dict[str, dict[str, bytes]]
    traffic: list[Booked]
    handed: list[Handed]
    written: int | None
    tcp_sent: int | None
    tcp_received: int | None
    opened: int | None
    datagrams: int | None
    resident: dict[str, int]
    peak: dict[str, int]
    memory: int
    seconds: dict[str, float]


class Trouble(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: the error that ended its part, and whether it came while waiting for others."""

    text: str
    waiting: bool


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank that does something else than train: what it found, in a form of its own."""

    data: bytes


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a rank: it is over; ``text`` says why if there was no success."""

    text: str
    code: int


class Address(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank to the process that has forked it: where the coordinator listens."""

    host: str
    port: int


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From whoever watches a rank: how its process fares, and how far it has come.

    ``how`` completes the sentence "rank r ..." once it has ended, or was stopped; ``asked`` if that was
    asked of it. ``calls`` counts the step's operations up to the last one, ``op`` on ``nbytes``, for whose
    end it is ``waiting`` or not; ``digest`` is of all of them. ``said`` are the last lines that it printed before
    it ended.
    """

    alive: bool = True
    stopped: bool = False
    asked: bool = False
    how: str = ""
    waiting: bool = False
    calls: int = 0
    op: str = ""
    nbytes: int = 0
    digest: int = 0
    said: str = ""


def digest_of(call: tuple[str, int], before: int = 0) -> int:
    """A number that tells one sequence of operations from another, after one more than ``before`` is of."""
    return zlib.crc32(f"{call[0]} {call[1]};".encode(), before)


Message: TypeAlias = Hello | Ready | Began | Arrived | Go | Stepped | Trouble | Result | Bye | Address | Status
"""What travels over a connection."""
_DECODER = msgspec.msgpack.Decoder(Message)
_LENGTH = 8  # bytes of a message's length, in front of it
_MOST = 1 << 40  # bytes of a message: whoever announces more is no rank


class Connection:
    """One end of a connected socket. EOFError where the other end is closed, TimeoutError after ``timeout`` seconds."""

    def __init__(self, sock: socket.socket, timeout: float | None = None) -> None:
        sock.settimeout(timeout)
        self._sock = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        """The descriptor, for ``select``."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send it whole. OSError if nobody is there to take it."""
        data = msgspec.msgpack.encode(message)
        self._sock.sendall(len(data).to_bytes(_LENGTH, "big") + data)

    def receive(self) -> Message:
        """Wait for the next message."""
        while (message := self._next()) is None:
            self._fill()
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
            data = self._sock.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("the other end of the connection is closed")
        self._buffer += data

    def _next(self) -> Message | None:
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if length > _MOST:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        if len(self._buffer) < _LENGTH + length or len(self._buffer) < _LENGTH:
            return None
        with memoryview(self._buffer) as whole, whole[_LENGTH : _LENGTH + length] as view:
            message: Message = _DECODER.decode(view)
        del self._buffer[: _LENGTH + length]
        return message

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
