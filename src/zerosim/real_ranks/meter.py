"""What the kernel says that a process sent and received.

Owns independent readings of the same traffic, of which ``worlds.gloo`` explains the first two to the byte:

* ``/proc/self/io``: ``wchar`` grows by what the process writes, and gloo writes to its sockets
  with ``writev``. It reads them with ``recv``, which no counter of that file sees.
* the TCP sockets' own counters (``TCP_INFO``), what was sent less what was sent again, and what
  arrived; of every socket that is open, also of one that was opened meanwhile.
* ``/proc/self/net/snmp``: connections opened and datagrams sent by all processes of this network namespace.
  What goes over a connection that is opened, used with ``send`` and closed between two readings, or as a
  datagram, shows in nothing else.

And of the process itself, the most memory that it has had. Must not know torch, schemes or ledgers.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple


class Counters(NamedTuple):
    """Cumulative bytes of this process, None where they are not measured."""

    written: int | None
    """By ``write`` and its kin, whatever to: ``wchar`` of /proc/self/io."""
    tcp_sent: int | None
    """Over the sockets watched, what was sent again left out."""
    tcp_received: int | None
    opened: int | None = None
    """TCP connections that were opened in this network namespace, by whomever."""
    datagrams: int | None = None
    """UDP datagrams that were sent in it."""

    def since(self, before: Counters) -> Counters:
        """What has been added since an earlier reading."""
        return Counters(*(None if a is None or b is None else a - b for a, b in zip(self, before, strict=True)))


def tcp_sockets() -> set[int]:
    """The descriptors of this process's connected TCP sockets."""
    found = set()
    for fd in _descriptors():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _ask(fd, connected=True):
                found.add(fd)
    return found


def _descriptors() -> list[int]:
    """Those that may be open: all that are listed, or, where there is no list, all that there can be."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc/self/fd")]
    return list(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096)))


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
    """The kernel's counters for this process: what it writes, all its TCP sockets but those in ``left_out``, and more.

    ``unmeasured`` says of each meter that this platform lacks why.
    """

    # Offsets within struct tcp_info of Linux: bytes received, sent and sent again.
    _RECEIVED, _SENT, _AGAIN = 128, 200, 208

    def __init__(self, left_out: Collection[int] = ()) -> None:
        self._left_out = set(left_out)
        self.unmeasured: dict[str, str] = {}
        self._files: dict[str, int] = {}
        try:
            self._files["io"] = os.open("/proc/self/io", os.O_RDONLY)
            self._written()
        except (OSError, ValueError) as error:
            self.unmeasured["process"] = f"no wchar in /proc/self/io ({error})"
        try:
            if not tcp_sockets() - self._left_out:
                raise OSError("no connected TCP socket found")
            self._sockets()
        except (OSError, AttributeError, struct.error) as error:
            self.unmeasured["sockets"] = f"no byte counters in TCP_INFO ({error})"
        try:
            self._files["snmp"] = os.open("/proc/self/net/snmp", os.O_RDONLY)
            self._namespace()
        except (OSError, LookupError, ValueError) as error:
            self.unmeasured["namespace"] = f"no counters in /proc/self/net/snmp ({error})"

    def read(self) -> Counters:
        """Read them all."""
        written = None if "process" in self.unmeasured else self._written()
        sent, received = (None, None) if "sockets" in self.unmeasured else self._sockets()
        opened, datagrams = (None, None) if "namespace" in self.unmeasured else self._namespace()
        return Counters(written, sent, received, opened, datagrams)

    def _written(self) -> int:
        for line in os.pread(self._files["io"], 4096, 0).splitlines():
            name, _, value = line.partition(b":")
            if name == b"wchar":
                return int(value)
        raise ValueError("the file has no such line")

    def _sockets(self) -> tuple[int, int]:
        sent = received = 0
        for fd in tcp_sockets() - self._left_out:
            info = _ask(fd)
            received += int(struct.unpack_from("Q", info, self._RECEIVED)[0])
            sent += int(struct.unpack_from("Q", info, self._SENT)[0])
            sent -= int(struct.unpack_from("Q", info, self._AGAIN)[0])
        return sent, received

    def _namespace(self) -> tuple[int, int]:
        lines = [line.split() for line in os.pread(self._files["snmp"], 1 << 16, 0).decode().splitlines()]
        # A line of names and one of values for each protocol.
        found = {
            names[0]: dict(zip(names, values, strict=True))
            for names, values in zip(lines[::2], lines[1::2], strict=True)
        }
        return int(found["Tcp:"]["ActiveOpens"]), int(found["Udp:"]["OutDatagrams"])

    def close(self) -> None:
        """Give the descriptors back."""
        while self._files:
            os.close(self._files.popitem()[1])


def highest_memory() -> int:
    """Bytes of this process's largest resident set up to now.

    Of the program that runs in it: ``ru_maxrss`` has also what the process that started it had by then,
    which on Linux outlives ``exec``, so it is asked only where there is no /proc.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
