"""What the kernel says that a process sent, and what gloo makes of what it is handed.

Owns two independent readings of the same traffic and the model that explains them to the byte:

* ``/proc/self/io``: ``wchar`` grows by what the process writes, and gloo writes to its sockets
  with ``writev``. It reads them with ``recv``, which no counter of that file sees.
* the TCP sockets' own counters (``TCP_INFO``), what was sent less what was sent again, and what
  arrived.
* ``moved``: for each thing handed to torch, the payload that gloo moves for it and its messages.
  A message costs three headers: its source announces it, its destination asks for it, and it
  travels behind a header of its own.

The model is what was observed of torch 2.13; the comparison with the kernel is what checks it.
Must not know torch, schemes or ledgers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import NamedTuple

HEADER = 48  # bytes of gloo's preamble
MAX_SEGMENT = 2**20  # bytes of an all-reduce's segment at most


class Op(StrEnum):
    """What can be handed to torch."""

    SEND = "send"
    RECEIVE = "receive"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"


class Moved(NamedTuple):
    """Bytes and messages that go out of a rank and come in."""

    sent: int = 0
    received: int = 0
    messages_sent: int = 0
    messages_received: int = 0

    def framing(self) -> tuple[int, int]:
        """Bytes of headers (sent, received): two from a message's source, one from its destination."""
        out, into = self.messages_sent, self.messages_received
        return HEADER * (2 * out + into), HEADER * (out + 2 * into)


def total(parts: Iterable[Moved]) -> Moved:
    """The sum, field by field."""
    return Moved(*map(sum, zip(*parts, strict=True)))


def segments(nbytes: int, size: int) -> int:
    """Messages that gloo's all-reduce of ``nbytes`` on ``size`` ranks cuts a rank's chunk into: 2 or more."""
    return max(-(-nbytes // (MAX_SEGMENT * size)), 2)


def textbook(op: Op, nbytes: int, size: int) -> Moved:
    """What must move on each of ``size`` ranks for a buffer of ``nbytes``, a multiple of ``size`` for a collective.

    Ring collectives: Patarasuk and Yuan 2009.
    """
    if op is Op.SEND:
        return Moved(sent=nbytes, messages_sent=1)
    if op is Op.RECEIVE:
        return Moved(received=nbytes, messages_received=1)
    hops = (size - 1) * (2 if op is Op.ALL_REDUCE else 1)
    return Moved(*[hops * (nbytes // size)] * 2, *[hops] * 2)


def moved(op: Op, nbytes: int, size: int) -> Moved:
    """What gloo moves on each rank.

    Its reduce-scatter is an all-reduce of which a slice is kept: twice the bytes. An
    all-reduce cuts each chunk into ``segments``, an all-gather into halves.
    """
    if op in (Op.SEND, Op.RECEIVE):
        return textbook(op, nbytes, size)
    gather = op is Op.ALL_GATHER
    payload = textbook(Op.ALL_GATHER if gather else Op.ALL_REDUCE, nbytes, size)
    cut = 2 if gather else segments(nbytes, size)
    return payload._replace(
        messages_sent=payload.messages_sent * cut, messages_received=payload.messages_received * cut
    )


class Counters(NamedTuple):
    """Cumulative bytes of this process, None where they are not measured."""

    written: int | None
    """By ``write`` and its kin, whatever to: ``wchar`` of /proc/self/io."""
    tcp_sent: int | None
    """Over the sockets watched, what was sent again left out."""
    tcp_received: int | None

    def since(self, before: Counters) -> Counters:
        """What has been added since an earlier reading."""
        return Counters(*(None if a is None or b is None else a - b for a, b in zip(self, before, strict=True)))


def tcp_sockets() -> set[int]:
    """The descriptors of this process's connected TCP sockets; none where there is no /proc."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and _ask(fd, connected=True):
                    found.add(fd)
    return found


def _ask(fd: int, *, connected: bool = False) -> bytes:
    """A socket's TCP_INFO, through a socket object that owns it for no longer. OSError if it is none."""
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        if connected:
            borrowed.getpeername()
        return borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    finally:
        borrowed.detach()


def addresses(fds: Collection[int]) -> list[str]:
    """The addresses at the near end of these TCP sockets, sorted."""
    found = set()
    for fd in fds:
        borrowed = socket.socket(fileno=os.dup(fd))
        with contextlib.closing(borrowed):
            found.add(str(borrowed.getsockname()[0]))
    return sorted(found)


class Kernel:
    """The kernel's counters for this process: ``/proc/self/io`` and ``TCP_INFO`` of the sockets ``fds``.

    ``unmeasured`` says of each meter that this platform lacks why.
    """

    # Offsets within struct tcp_info of Linux: bytes received, sent and sent again.
    _RECEIVED, _SENT, _AGAIN = 128, 200, 208

    def __init__(self, fds: Collection[int]) -> None:
        self.fds = sorted(fds)
        self.unmeasured: dict[str, str] = {}
        self._io: int | None = None
        try:
            self._io = os.open("/proc/self/io", os.O_RDONLY)
            self._written()
        except (OSError, ValueError) as error:
            self.unmeasured["process"] = f"no wchar in /proc/self/io ({error})"
        try:
            if not self.fds:
                raise OSError("no connected TCP socket found in /proc/self/fd")
            self._sockets()
        except (OSError, AttributeError, struct.error) as error:
            self.unmeasured["sockets"] = f"no byte counters in TCP_INFO ({error})"

    def read(self) -> Counters:
        """Read them all."""
        written = None if "process" in self.unmeasured else self._written()
        sent, received = (None, None) if "sockets" in self.unmeasured else self._sockets()
        return Counters(written, sent, received)

    def _written(self) -> int:
        assert self._io is not None
        for line in os.pread(self._io, 4096, 0).splitlines():
            name, _, value = line.partition(b":")
            if name == b"wchar":
                return int(value)
        raise ValueError("the file has no such line")

    def _sockets(self) -> tuple[int, int]:
        sent = received = 0
        for fd in self.fds:
            info = _ask(fd)
            received += int(struct.unpack_from("Q", info, self._RECEIVED)[0])
            sent += int(struct.unpack_from("Q", info, self._SENT)[0])
            sent -= int(struct.unpack_from("Q", info, self._AGAIN)[0])
        return sent, received

    def close(self) -> None:
        """Give the descriptor back."""
        if self._io is not None:
            os.close(self._io)
            self._io = None
