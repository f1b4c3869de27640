"""A process that has torch loaded, forks ranks at once, and tells how each of them fares.

Started by ``launch.ForkServer`` as ``python -m zerosim.real_ranks.fork_server FD MODULE``: FD is its connection, and
MODULE what ranks need, loaded before any is made. It leads a process group of its own, in which
the ranks live too. When its connection is closed, however that came about, it kills them and removes
their scratch folders. As their parent it learns from the kernel when one ends, stops or goes on.
"""

from __future__ import annotations

import importlib
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from zerosim.real_ranks.connection import Change, Connection, ConnectionWithDescriptors, Done, Fork, Heartbeats, Kill


class _Server:
    def __init__(self, sock: socket.socket) -> None:
        self._connection = ConnectionWithDescriptors(sock)
        self._alive: set[int] = set()  # process ids
        self._scratch: list[str] = []
        self._woken, self._wake = os.pipe()

    def run(self) -> None:
        """Do as told until the connection is closed."""
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that the descriptor is written to
        try:
            self._connection.send(Done(pids=[]))
            while True:
                ready, _, _ = select.select([self._connection.fileno(), self._woken], [], [])
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._tell()
                if self._connection.fileno() in ready:
                    for message in self._connection.pump():
                        self._obey(message)
        except (EOFError, BrokenPipeError):
            pass
        finally:
            self._kill(self._alive)
            for folder in self._scratch:
                shutil.rmtree(folder, ignore_errors=True)

    def _obey(self, message: object) -> None:
        if isinstance(message, Fork):
            self._connection.send(Done(pids=self._fork(message)))
        elif isinstance(message, Kill):
            self._kill(message.pids)
            self._connection.send(Done(pids=[]))

    def _fork(self, order: Fork) -> list[int]:
        fds, self._connection.fds = self._connection.fds, []
        self._scratch.append(order.scratch)
        target = getattr(importlib.import_module(order.module), order.function)
        born = []
        for rank in range(order.size):
            pid = os.fork()
            if pid == 0:
                self._live(rank, order.size, target, fds)
            born.append(pid)
            self._alive.add(pid)
        for fd in fds:
            os.close(fd)
        return born

    def _live(
        self, rank: int, size: int, target: Callable[[Connection, Heartbeats, int], None], fds: list[int]
    ) -> NoReturn:
        """The rest of a rank's life, in the process just forked."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._connection.close()
            for fd in {*fds[1:], self._wake, self._woken} - {fds[1 + rank]}:
                os.close(fd)
            target(Connection(socket.socket(fileno=fds[1 + rank])), Heartbeats(fds[0], size), rank)
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it is, a rank must not go on as a second server
            traceback.print_exc()
        finally:
            os._exit(status)

    def _tell(self) -> None:
        """Report every rank whose state has changed."""
        while self._alive:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return
            if os.WIFEXITED(status):
                how = f"exited with code {os.WEXITSTATUS(status)}"
            elif os.WIFSIGNALED(status):
                how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
            elif os.WIFSTOPPED(status):
                how = f"was stopped by {signal.Signals(os.WSTOPSIG(status)).name}"
            else:
                how = "goes on"
            alive = not (os.WIFEXITED(status) or os.WIFSIGNALED(status))
            if not alive:
                self._alive.discard(pid)
            self._connection.send(Change(pid=pid, alive=alive, stopped=os.WIFSTOPPED(status), how=how))

    def _kill(self, pids: Iterable[int]) -> None:
        """End these ranks, stopped ones too, and wait until they are gone."""
        doomed = self._alive.intersection(pids)  # the id of one that has been waited for may be another's by now
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        for pid in doomed:
            os.waitpid(pid, 0)
        self._alive -= doomed


def main() -> None:
    """Load what ranks need, then serve."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module(sys.argv[2])
    _Server(sock).run()
    os._exit(0)  # taking torch apart piece by piece takes seconds


if __name__ == "__main__":
    main()
