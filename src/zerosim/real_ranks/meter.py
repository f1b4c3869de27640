"""What the kernel says that a process sent and received.

Owns two independent readings of the same traffic, which ``worlds.gloo`` explains to the byte:

* ``/proc/self/io``: ``wchar`` grows by what the process writes, and gloo writes to its sockets
  with ``writev``. It reads them with ``recv``, which no counter of that file sees.
* the TCP sockets' own counters (``TCP_INFO``), what was sent less what was sent again, and what
  arrived.

Must not know torch, schemes or ledgers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection
from typing import NamedTuple


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
