"""The ranks seen from outside: what they say, all of them or none, and who is to blame if one does not.

Owns the lock-step with the ranks, the deadline, and the sentence that names a rank and how it
ended. Must not know what the messages are about.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Collection, Sequence
from typing import TypeVar

from zerosim.real_ranks.connection import Bye, Connection, Message, Trouble
from zerosim.real_ranks.launch import Group

M = TypeVar("M", bound=Message)
_SETTLE = 2.0  # seconds in which the cause of a failure may still show after its first consequence


class RankFailure(RuntimeError):
    """A rank ended, stopped or fell silent; the message names it and says how. ``ranks`` are those to blame."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class Coordinator:
    """``connections[r]`` leads to rank r. ``timeout``: seconds without progress after which it is over.

    With a ``group``, the ranks of this machine, it is known how each fares; without one, only
    whether its connection is open. ``who`` names a rank, and ``early`` are messages that came before.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        timeout: float,
        group: Group | None = None,
        who: str = "Rank {}",
        early: Sequence[list[Message]] | None = None,
    ) -> None:
        self._who = who
        self.connections, self.timeout, self.group = list(connections), timeout, group
        self._early = list(early) if early else [[] for _ in connections]
        self._heard = time.monotonic()
        self._doing = ""
        self._gone: set[int] = set()
        self._troubles: dict[int, str] = {}
        self._stopped_since: float | None = None

    def tell(self, message: Message) -> None:
        """Send ``message`` to every rank that can still hear it."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(message)

    def gather(self, kind: type[M], doing: str) -> list[M]:
        """One message of that kind from every rank, in the order of ranks. RankFailure if one does not come.

        ``doing`` says what the ranks are at, for the message.
        """
        self._heard, self._doing = time.monotonic(), doing
        got: dict[int, M] = {}
        while True:
            for rank, early in enumerate(self._early):
                if rank not in got and early:
                    message = early.pop(0)
                    assert isinstance(message, kind), message
                    got[rank] = message
            if len(got) == len(self.connections):
                return [got[rank] for rank in range(len(self.connections))]
            if self._failing():
                self._settle()
                raise self._failure(got, doing)
            left = self._deadline() - time.monotonic()
            if not self._listen(max(left, 0)) and left <= 0 and self._deadline() <= time.monotonic():
                raise self._failure(got, doing)

    def verdict(self) -> str:
        """Who is to blame, if something is known to have gone wrong; else nothing."""
        return str(self._failure({}, self._doing)) if self._failing() else ""

    def _failing(self) -> bool:
        ended = self.group is not None and any(not fate.alive for fate in self.group.fates.values())
        return bool(ended or self._gone or self._troubles)

    def _settle(self) -> None:
        """Listen on until it is known who was first to fail, or for a little while."""
        deadline = time.monotonic() + min(_SETTLE, self.timeout / 2)
        while (left := deadline - time.monotonic()) > 0:
            culprits = self._culprits()
            if culprits and (self.group is None or any(not self.group.fates[rank].alive for rank in culprits)):
                return
            self._listen(left)

    def _deadline(self) -> float:
        """When patience ends: the timeout after the last progress, or half of it after a rank was stopped."""
        latest = max(self._heard, self.group.heartbeats.latest() if self.group else 0.0)
        stopped = self.group is not None and any(fate.stopped for fate in self.group.fates.values())
        if not stopped:
            self._stopped_since = None
            return latest + self.timeout
        if self._stopped_since is None:
            self._stopped_since = time.monotonic()
        return min(latest + self.timeout, self._stopped_since + self.timeout / 2)

    def _listen(self, wait: float) -> bool:
        """Take what has come, waiting so many seconds for it; whether anything had."""
        speakers: dict[int, int | None] = {
            connection.fileno(): rank for rank, connection in enumerate(self.connections) if rank not in self._gone
        }
        if self.group is not None:
            speakers[self.group.server.connection.fileno()] = None
        ready, _, _ = select.select(list(speakers), [], [], wait)
        for fd in ready:
            rank = speakers[fd]
            if rank is None:
                assert self.group is not None
                self.group.server.listen()
                continue
            try:
                messages = self.connections[rank].pump()
            except EOFError:
                self._gone.add(rank)
                continue
            self._heard = time.monotonic()
            for message in messages:
                if isinstance(message, Trouble):
                    self._troubles[rank] = message.text
                else:
                    self._early[rank].append(message)
        return bool(ready)

    def _culprits(self) -> list[int]:
        """The ranks that failed by themselves, as far as it is known; not those that an absent rank made fail."""
        if self.group is not None:
            fates = self.group.fates
            killed = [rank for rank, fate in fates.items() if not fate.alive and rank not in self._troubles]
            return sorted(killed or [rank for rank, fate in fates.items() if fate.stopped])
        return sorted(self._gone - set(self._troubles))

    def _failure(self, got: Collection[int], doing: str) -> RankFailure:
        """Whom to name and what to say, from what is known now; ``got`` are the ranks that have answered."""
        fates = self.group.fates if self.group else {}
        silent = [rank for rank in range(len(self.connections)) if rank not in got and rank not in self._troubles]
        troubles = "; ".join(f"{self._name([rank])}: {text}" for rank, text in self._troubles.items())
        if culprits := self._culprits():
            ends = []
            for rank in culprits:
                end = fates[rank].how if rank in fates else "closed its connection without a word"
                ends.append(
                    f"{self._name([rank])} {end}{' and did not go on' if rank in fates and fates[rank].alive else ''}"
                )
            text = f"{'; '.join(ends)}, in {doing}."
            if self.group and any("exited" in fates[rank].how for rank in culprits):
                text += f" {self.group.server.said()}"
            return RankFailure(text, culprits)
        if self._troubles and silent and self.group is None:
            return RankFailure(
                f"{self._name(silent)} said nothing, in {doing}, and others gave up: {troubles}.", silent
            )
        if self._troubles:  # in the order in which they were told: the first may have caused the others
            return RankFailure(f"Errors in {doing}: {troubles}.", list(self._troubles))
        waiting = self.group.heartbeats.waiting() if self.group else [False] * len(self.connections)
        busy = [rank for rank in silent if not waiting[rank]] or silent
        others = [rank for rank in silent if rank not in busy]
        text = f"{self._name(busy)} made no progress for {self.timeout:g} s, in {doing}"
        text += f", and {self._name(others)} waited for it" if others else ""
        return RankFailure(f"{text}. If the work is long, give it more with --timeout.", busy)

    def _name(self, ranks: Sequence[int]) -> str:
        return " and ".join(self._who.format(rank) for rank in ranks)

    def dismiss(self, text: str, code: int) -> None:
        """Send all ranks home."""
        self.tell(Bye(text=text, code=code))
