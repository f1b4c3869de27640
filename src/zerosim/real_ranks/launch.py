"""Starting ranks on this machine, watching them, and ending them without a trace.

Owns the server's process and the groups of ranks that it forks. Must not know what ranks do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO

import psutil

from zerosim.real_ranks.connection import (
    MOST_DESCRIPTORS,
    Change,
    Connection,
    ConnectionWithDescriptors,
    Done,
    Fork,
    Heartbeats,
    Kill,
    Message,
)

_START = 120.0  # seconds for a server to load torch, on a machine with other things to do
_END = 10.0  # seconds for it to end by itself


class ForkServerError(RuntimeError):
    """The ranks' parent is gone or did not start; the message ends with what it printed."""


class ForkServer:
    """A process that has ``module`` loaded and can fork ranks in no time; a context manager.

    Nothing outlives it: all its processes are one process group, which is killed, and its log is
    a file without a name. ``interface`` is the network interface that the ranks may use, loopback
    unless told otherwise.
    """

    def __init__(self, module: str = "zerosim.real_ranks.worker", interface: str | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.connection = ConnectionWithDescriptors(ours)
        self.fates: dict[int, Change] = {}
        """What was last heard of each process, by its id."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),  # the same code as here
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface or loopback(),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "zerosim.real_ranks.fork_server", str(theirs.fileno()), module],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for the command, which then ends them
                env=environment,
            )
        try:
            self.answer(_START)
        except BaseException:
            self.close()
            raise

    def answer(self, timeout: float) -> list[int]:
        """Wait until what was asked for is done; the process ids of the ranks. ForkServerError if it is not."""
        deadline = time.monotonic() + timeout
        try:
            while not isinstance(message := self.connection.receive(max(deadline - time.monotonic(), 0.01)), Done):
                self._note(message)
        except (EOFError, TimeoutError) as error:
            raise ForkServerError(
                f"The process that starts the ranks is gone, or mute ({error}). {self.said()}"
            ) from error
        return message.pids

    @property
    def pid(self) -> int:
        """Its process id, and that of its process group."""
        return self._process.pid

    def listen(self) -> None:
        """Take note of how its ranks fare, once ``select`` has found news. ForkServerError if it is gone."""
        try:
            for message in self.connection.pump():
                self._note(message)
        except EOFError as error:
            raise ForkServerError(f"The process that starts the ranks is gone. {self.said()}") from error

    def _note(self, message: Message) -> None:
        if isinstance(message, Change):
            self.fates[message.pid] = message

    def said(self, lines: int = 12) -> str:
        """The last lines that it and its ranks printed."""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        start = max(size - 8192, 0)
        tail = os.pread(self._log.fileno(), 8192, start).decode(errors="replace").splitlines()[-lines:]
        return "\n".join(["It printed:", *tail]) if tail else "It printed nothing."

    def close(self) -> None:
        """End it and whatever it has started."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Group:
    """``size`` ranks just forked, each calling ``function`` of ``module`` with its connection, heartbeats and rank."""

    def __init__(
        self, server: ForkServer, size: int, module: str = "zerosim.real_ranks.worker", function: str = "serve"
    ) -> None:
        if not 1 <= size < MOST_DESCRIPTORS:
            raise ValueError(f"Group(size): between 1 and {MOST_DESCRIPTORS - 1} ranks fit one machine; got {size}.")
        self.server = server
        self.scratch = tempfile.mkdtemp(prefix="zerosim-")
        self.pids: list[int] = []
        self._files = 0
        pairs = [socket.socketpair() for _ in range(size)]
        self.connections = [Connection(ours) for ours, _ in pairs]
        try:
            with tempfile.TemporaryFile() as file:
                self.heartbeats = Heartbeats(file, size)
                order = Fork(size=size, module=module, function=function, scratch=self.scratch)
                server.connection.send_with(order, [file.fileno(), *(theirs.fileno() for _, theirs in pairs)])
            self.pids = server.answer(_START)
        except BaseException:
            self.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()

    def new_file(self, name: str) -> str:
        """A path in the scratch folder that was not given out before."""
        self._files += 1
        return os.path.join(self.scratch, f"{name}-{self._files}")

    @property
    def fates(self) -> dict[int, Change]:
        """What was last heard of each rank that has ended or was stopped at some time."""
        return {rank: self.server.fates[pid] for rank, pid in enumerate(self.pids) if pid in self.server.fates}

    def close(self) -> None:
        """Kill the ranks, close their connections and remove their files."""
        for connection in self.connections:
            connection.close()
        with contextlib.suppress(OSError, ForkServerError):
            self.server.connection.send(Kill(pids=self.pids))
            self.server.answer(_END)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def loopback() -> str:
    """The name of the interface that has 127.0.0.1."""
    for name, known in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in known):
            return name
    raise OSError("corroborate(interface): no interface has the address 127.0.0.1; name one with --interface.")
