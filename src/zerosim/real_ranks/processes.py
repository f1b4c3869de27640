"""Ranks as children of the command: forked from it, watched, and ended without a trace.

Owns fork, what the kernel says of each child, where each prints, and the heartbeats in shared memory that
say how far each has come. Must not know what ranks do.

On Linux a child is killed by the kernel as soon as its parent is gone, however that came about, even if the
child is stopped. Nothing else is left: the heartbeats and what is printed are memory and files without a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

from zerosim.real_ranks.connection import Connection, Status, digest_of
from zerosim.worlds.gloo import Op

Work = Callable[["Connection", "Heartbeat", int], None]
"""What a child does, with its connection to the parent, its heartbeat, and its number."""

_OPS = ("", *map(str, Op))
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_END = 10.0  # seconds that the kernel has to end a child that was killed


class Heartbeat:
    """Where a rank writes how far it has come; without a place to share it keeps one that nobody reads."""

    _PLACE = np.dtype(
        [("waiting", "?"), ("since", np.float64)] + [(name, np.int64) for name in ("calls", "op", "nbytes", "digest")]
    )

    def __init__(self, place: npt.NDArray[Any] | None = None) -> None:
        self._place = np.zeros(1, self._PLACE) if place is None else place

    @classmethod
    def shared(cls, count: int) -> list[Heartbeat]:
        """So many, in memory that this process shares with the children that it forks."""
        table = np.frombuffer(mmap.mmap(-1, count * cls._PLACE.itemsize), cls._PLACE)
        return [cls(table[index : index + 1]) for index in range(count)]

    def begin(self) -> None:
        """A step begins."""
        self._note(waiting=False, calls=0, op=0, nbytes=0, digest=0)

    def enter(self, op: str, nbytes: int) -> None:
        """It now waits for others, in an operation on so many bytes."""
        calls, digest = int(self._place["calls"][0]) + 1, digest_of((op, nbytes), int(self._place["digest"][0]))
        self._note(waiting=True, calls=calls, op=_OPS.index(op), nbytes=nbytes, digest=digest)

    def leave(self) -> None:
        """The operation has ended."""
        self._note(waiting=False)

    def _note(self, **fields: int) -> None:
        for name, value in fields.items():
            self._place[name] = value
        self._place["since"] = time.monotonic()

    @property
    def waiting(self) -> bool:
        """Whether it waits for others."""
        return bool(self._place["waiting"][0])

    @property
    def since(self) -> float:
        """When it last came to a point where it waits or went on from one, by the monotonic clock."""
        return float(self._place["since"][0])

    def read(self) -> dict[str, int | bool | str]:
        """What is written there, as fields of a ``Status``."""
        place = self._place[0]
        return {
            "waiting": bool(place["waiting"]), "calls": int(place["calls"]), "op": _OPS[int(place["op"])],
            "nbytes": int(place["nbytes"]), "digest": int(place["digest"]),
        }  # fmt: skip


class Child:
    """A rank of this machine, as the child process that it is; ``code`` is how it ended, negative for a signal."""

    def __init__(self, pid: int, connection: Connection, heartbeat: Heartbeat, log: IO[bytes]) -> None:
        self.pid, self.connection, self.heartbeat = pid, connection, heartbeat
        self._log = log
        self._alive, self._stopped, self._how = True, False, ""
        self.code = 0

    def status(self) -> Status:
        """How it fares now, according to the kernel, and how far it has come."""
        while self._alive:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:  # somebody else has waited for it
                self._alive, self._how = False, "is gone"
                break
            if pid == 0:
                break
            self._note(status)
        said = "" if self._alive else self.said()
        return Status(
            alive=self._alive, stopped=self._stopped, how=self._how, said=said,
            **self.heartbeat.read(),  # type: ignore[arg-type]
        )  # fmt: skip

    def _note(self, status: int) -> None:
        self._stopped = os.WIFSTOPPED(status)
        if not self._stopped and not os.WIFCONTINUED(status):
            self.code = os.waitstatus_to_exitcode(status)
        if os.WIFEXITED(status):
            self._alive, self._how = False, f"exited with code {os.WEXITSTATUS(status)}"
        elif os.WIFSIGNALED(status):
            self._alive, self._how = False, f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        elif self._stopped:
            self._how = f"was stopped by {signal.Signals(os.WSTOPSIG(status)).name}"
        else:
            self._how = "goes on"

    def said(self, lines: int = 12) -> str:
        """The last lines that it printed."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 8192, max(size - 8192, 0)).decode(errors="replace").splitlines()
        return "\n".join(tail[-lines:])

    def kill(self) -> None:
        """Kill it, even if it is stopped."""
        if self.status().alive:
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait until it is gone, after ``kill``, and forget it."""
        deadline = time.monotonic() + _END
        while self.status().alive and time.monotonic() < deadline:
            time.sleep(0.001)
        self.connection.close()
        self._log.close()


@contextmanager
def children(count: int, work: Work) -> Iterator[list[Child]]:
    """So many children, each doing ``work``, for as long as the block lasts: they end with it, or with this process."""
    born: list[Child] = []
    try:
        for number, heartbeat in enumerate(Heartbeat.shared(count)):
            born.append(_fork(number, heartbeat, work, born))
        yield born
    finally:
        for child in born:  # all at once
            child.kill()
        for child in born:
            child.end()


@contextmanager
def meeting_point() -> Iterator[str]:
    """The path of an empty file that this process and its children can open, in memory where that can be done."""
    if hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd"):
        with open(os.memfd_create("zerosim"), "wb") as file:
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.TemporaryDirectory(prefix="zerosim-") as folder:
            yield os.path.join(folder, "store")


def _fork(number: int, heartbeat: Heartbeat, work: Work, siblings: Sequence[Child]) -> Child:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the child
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    sys.stdout.flush()
    with warnings.catch_warnings():
        # Threads of this process, if there are any, hold no lock that a rank needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        theirs.close()
        return Child(pid, Connection(ours), heartbeat, log)
    status = 1
    try:
        _leave_parent(parent, log, [ours, *(child.connection for child in siblings)])
        work(Connection(theirs), heartbeat, number)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, a rank must not go on as a second command
        traceback.print_exc()
    finally:
        _exit(status)


def _exit(status: int) -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(status)  # taking torch apart piece by piece takes seconds


def _leave_parent(parent: int, log: IO[bytes], ends: Sequence[socket.socket | Connection]) -> None:
    """In a child just forked: end with the parent, but not by its signals; print elsewhere; let go of others' ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    faulthandler.disable()  # it would print where the parent does
    os.setsid()  # Ctrl-C is for the command, which then ends its children
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for end in ends:
        end.close()
