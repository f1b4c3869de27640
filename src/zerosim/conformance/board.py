"""Where the ranks of one machine show each other how far they are, without sending anything.

Owns a file in memory that all ranks map: for each rank its step, what it is doing, the
collectives that it has asked for in this step, and whether it lives. Must not know what follows from it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

TOKEN, ENTRY, ENTRIES = 16, 192, 4096
_HEAD = struct.Struct("<QQQQI")  # step, collectives in it, a count of everything done, state, process id
_SLOT = _HEAD.size + ENTRY + ENTRY * ENTRIES  # and between them what it failed of
_VERDICT = 4096


class Doing(IntEnum):
    """What a rank is doing."""

    OUTSIDE = 0  # of any step
    STEP = 1
    COMPARING = 2  # it has finished the step and waits for the others
    FAILED = 3
    CLOSED = 4


class Slot(NamedTuple):
    """How far a rank is: the keys of the collectives that it has asked for in its step, by group."""

    rank: int
    step: int
    doing: Doing
    asked: list[tuple[str, str]]
    beats: int
    process: int
    failed: str


class Mismatch(NamedTuple):
    """The rank that is out of step, and how, as a sentence; or that has ``failed``, died or stopped."""

    rank: int
    step: int
    text: str
    failed: bool = False


class Board:
    """The file, mapped. ``own`` writes rank ``rank``'s part of it; everybody reads everything.

    ``path`` is where the first rank has made it. OSError where it is not there: the rank is on another machine.
    """

    def __init__(self, path: Path, token: bytes, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), TOKEN + _VERDICT + _SLOT * size)
            self._file, self._turn = os.dup(file.fileno()), threading.Lock()
        weakref.finalize(self, os.close, self._file)
        if self._map[:TOKEN] != token:
            raise OSError(f"{path} is of another job")
        self._step = self._count = self._beats = 0
        self._doing = Doing.OUTSIDE
        self._write()

    @staticmethod
    def make(path: Path, size: int) -> bytes:
        """Make the file, and the token by which it is known."""
        token = secrets.token_bytes(TOKEN)
        with path.open("wb") as file:
            file.truncate(TOKEN + _VERDICT + _SLOT * size)
            file.write(token)
        return token

    # -- one's own part

    def begin(self, step: int) -> None:
        """This rank begins a step."""
        self._step, self._count = step, 0
        self.now(Doing.STEP)

    def now(self, doing: Doing, failed: str = "") -> None:
        """What this rank is doing from now on."""
        self._doing = doing
        if failed:
            self._text(TOKEN + _VERDICT + _SLOT * self.rank + _HEAD.size, failed, ENTRY)
        self.beat()

    def ask(self, group: str, key: str) -> None:
        """This rank is about to ask for a collective."""
        place = TOKEN + _VERDICT + _SLOT * self.rank + _HEAD.size + ENTRY * (1 + self._count % ENTRIES)
        self._text(place, f"{group}\n{key}", ENTRY)
        self._count += 1
        self.beat()

    def beat(self) -> None:
        """This rank is alive and has done something."""
        self._beats += 1
        self._write()

    def _write(self) -> None:
        _HEAD.pack_into(
            self._map, TOKEN + _VERDICT + _SLOT * self.rank,
            self._step, self._count, self._beats, self._doing, os.getpid(),
        )  # fmt: skip

    def _text(self, place: int, text: str, room: int) -> None:
        raw = text.encode()[: room - 2]
        self._map[place : place + 2 + len(raw)] = len(raw).to_bytes(2, "little") + raw

    def _read(self, place: int) -> str:
        length = int.from_bytes(self._map[place : place + 2], "little")
        return self._map[place + 2 : place + 2 + length].decode(errors="replace")

    # -- everybody's

    def slot(self, rank: int) -> Slot:
        """How far a rank is."""
        base = TOKEN + _VERDICT + _SLOT * rank
        step, count, beats, doing, process = _HEAD.unpack_from(self._map, base)
        entries = [
            self._read(base + _HEAD.size + ENTRY * (1 + index % ENTRIES)).partition("\n")
            for index in range(max(0, count - ENTRIES), count)
        ]
        failed = self._read(base + _HEAD.size) if doing == Doing.FAILED else ""
        asked = [(group, key) for group, _, key in entries]
        return Slot(rank, step, Doing(doing), asked, beats, process, failed)

    def slots(self) -> list[Slot]:
        """How far each rank is."""
        return [self.slot(rank) for rank in range(self.size)]

    def beats(self) -> list[int]:
        """How much each rank has done so far: whoever has moved since has done more."""
        return [_HEAD.unpack_from(self._map, TOKEN + _VERDICT + _SLOT * rank)[2] for rank in range(self.size)]

    def announce(self, found: Mismatch) -> bool:
        """Tell all ranks why this ends. False if another was first."""
        with self._turn, _alone(self._file):  # several may have found it at once, and one is to say so
            if self.verdict() is not None:
                return False
            self._text(TOKEN, f"{found.rank}\n{found.step}\n{int(found.failed)}\n{found.text}", _VERDICT)
            return True

    def verdict(self) -> Mismatch | None:
        """Why this ends, if it does."""
        text = self._read(TOKEN)
        if not text:
            return None
        rank, step, failed, rest = text.split("\n", 3)
        return Mismatch(int(rank), int(step), rest, failed == "1")

    def close(self) -> None:
        """This rank has ended as it should."""
        with contextlib.suppress(ValueError):
            self.now(Doing.CLOSED)


@contextlib.contextmanager
def _alone(file: int) -> Iterator[None]:
    """Within the block no other process is in one with this file, where the system has such locks."""
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def dead(slot: Slot) -> bool:
    """Whether a rank's process is gone without having said so."""
    if slot.doing is Doing.CLOSED or not slot.process:
        return False
    try:
        state = Path(f"/proc/{slot.process}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX"
    except OSError:
        pass
    try:
        os.kill(slot.process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
