"""Where the ranks of one machine show each other how far they are, without sending anything.

Owns a file in memory that all ranks map: for each rank its step, what it is doing, the
collectives that it has asked for in this step, and whether it lives. And the comparison: which
rank is out of step, in a sentence. Must not know what collectives are for.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
from collections import Counter
from collections.abc import Sequence
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


# -- who is out of step


def out_of_order(slots: Sequence[Slot], usual: Sequence[tuple[str, str]] = ()) -> Mismatch | None:
    """The rank whose collectives are not those of the others, as far as it can be told already.

    Ranks are compared in the step that is the furthest: where two have asked for an n-th collective of a group it
    is the same, and who has finished has asked for all of them. ``usual`` is what was asked for in the step before.
    """
    step = max((slot.step for slot in slots), default=0)
    here = [slot for slot in slots if slot.step == step and slot.doing is not Doing.FAILED]
    for group in dict.fromkeys(group for slot in here for group, _ in slot.asked):
        sequences = {slot.rank: [key for name, key in slot.asked if name == group] for slot in here}
        finished = {slot.rank for slot in here if slot.doing in (Doing.COMPARING, Doing.CLOSED)}
        if group:  # of another group's collectives, who is not in it asks for none
            sequences = {rank: keys for rank, keys in sequences.items() if keys}
        before = [key for name, key in usual if name == group]
        if (found := _first_difference(step, sequences, finished, before)) is not None:
            return found
    return None


def undecided(slots: Sequence[Slot]) -> bool:
    """Whether ranks of the furthest step have yet to come to where two others differ: then a majority may still form."""
    step = max((slot.step for slot in slots), default=0)
    here = [slot for slot in slots if slot.doing not in (Doing.FAILED, Doing.CLOSED)]
    most = max((len(slot.asked) for slot in here if slot.step == step), default=0)
    return any(slot.step < step or (len(slot.asked) < most and slot.doing is not Doing.COMPARING) for slot in here)


def _first_difference(
    step: int, sequences: dict[int, list[str]], finished: set[int], usual: Sequence[str]
) -> Mismatch | None:
    for index in range(max(map(len, sequences.values()), default=0)):
        at = {
            rank: keys[index] if index < len(keys) else ""
            for rank, keys in sequences.items()
            if index < len(keys) or rank in finished
        }
        if len({_bare(key) for key in at.values()}) > 1:
            return _named(step, index, at, usual)
        labelled = {rank: key for rank, key in at.items() if key != _bare(key)}  # those that are known to be of whose
        if len(set(labelled.values())) > 1:
            return _named(step, index, labelled, usual)
    return None


def _bare(key: str) -> str:
    """A collective without the parameters that it is of."""
    return key.partition(" (")[0]


def _named(step: int, index: int, at: dict[int, str], usual: Sequence[str]) -> Mismatch:
    common, times = Counter(at.values()).most_common(1)[0]
    if times * 2 <= len(at):  # no majority: what was asked for in the step before, or what the first asks for
        common = usual[index] if index < len(usual) and usual[index] in at.values() else at[min(at)]
    odd = next(rank for rank, key in at.items() if key != common)
    others = [rank for rank, key in at.items() if key == common]
    what = f"collective {index + 1} of the step"
    if not at[odd]:
        text = (
            f"rank {odd} has finished its step after {index} collective{'s' * (index != 1)}, where {_ranks(others)} "
            f"{_verb(others, 'ask')} for one more, {common}. Rank {odd} has left one out."
        )
    elif not common:
        text = (
            f"rank {odd} asks for {at[odd]} as {what}, where {_ranks(others)} {_verb(others, 'have')} finished. Rank "
            f"{odd} asks for one too many."
        )
    else:
        text = f"rank {odd} asks for {at[odd]} as {what}, where {_ranks(others)} {_verb(others, 'ask')} for {common}. "
        following = list(map(_bare, usual[index + 1 :]))
        if following and _bare(usual[index]) == _bare(common) and following[0] == _bare(at[odd]):
            text += f"Rank {odd} has left one out."
        elif _bare(at[odd]) in map(_bare, usual) or not usual:
            text += f"On rank {odd} it is out of order, or one too many or too few."
        else:
            text += f"Rank {odd} asks for one too many, or for another."
    return Mismatch(odd, step, text)


def _verb(ranks: Sequence[int], verb: str) -> str:
    if len(ranks) > 1:
        return verb
    return {"ask": "asks", "have": "has"}[verb]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def stalled(slots: Sequence[Slot], seconds: float) -> Mismatch:
    """Who keeps the others waiting, when nobody has moved for so long."""
    if (found := out_of_order(slots)) is not None:
        return found
    places = Counter((slot.step, slot.doing, len(slot.asked)) for slot in slots)
    usual, _ = max(places.items(), key=lambda item: (item[1], item[0]))
    odd = next((slot for slot in slots if (slot.step, slot.doing, len(slot.asked)) != usual), slots[-1])
    last = odd.asked[-1][1] if odd.asked else "none"
    what = {
        Doing.OUTSIDE: "is not in the step",
        Doing.STEP: f"is in step {odd.step}, after {len(odd.asked)} collectives, the last of them: {last}",
        Doing.COMPARING: f"has finished step {odd.step}, after {len(odd.asked)} collectives",
        Doing.FAILED: f"has failed: {odd.failed}",
        Doing.CLOSED: "has ended",
    }[odd.doing]
    others = _ranks([slot.rank for slot in slots if slot.rank != odd.rank])
    return Mismatch(
        odd.rank,
        usual[0],
        f"nothing has moved for {seconds:.0f} s: rank {odd.rank} {what}, and {others} wait for it.",
        failed=True,
    )


def died(slot: Slot) -> Mismatch:
    """A rank whose process is gone."""
    last = f", the last of them: {slot.asked[-1][1]}" if slot.asked else ""
    return Mismatch(
        slot.rank, slot.step, f"rank {slot.rank} has died in step {slot.step}, after {len(slot.asked)} "
        f"collectives{last}.", failed=True,
    )  # fmt: skip
