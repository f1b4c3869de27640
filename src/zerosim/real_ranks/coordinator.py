"""The ranks in lock-step: what they answer, all of them or none, within a deadline.

Owns the deadline and the listening; ``blame`` says who is at fault. Must not know what the messages are about.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from zerosim.real_ranks import blame
from zerosim.real_ranks.blame import Calls, Known, Verdict
from zerosim.real_ranks.connection import Bye, Connection, Message, Status, Trouble
from zerosim.real_ranks.processes import Child

M = TypeVar("M", bound=Message)
_SETTLE = 2.0  # seconds in which the cause of a failure may still show after its first consequence
_QUIET = 0.4  # seconds in which others may fail of themselves after the first did
_LOOK = 0.05  # seconds between two looks at how the processes fare


class RankFailure(RuntimeError):
    """A rank ended, stopped or fell silent; the message names it and says how.

    ``ranks`` are those to blame, and ``others`` what the others said, by rank.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.ranks, self.others = verdict.ranks, verdict.others


class Coordinator:
    """``connections[r]`` leads to rank r. ``timeout``: seconds without progress after which it is over.

    How the ranks of ``children`` fare the kernel says; of the others whoever watches them says so over their
    connections. ``early`` are messages that have come before. ``calls`` may be set to what gives the
    operations of a step.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        timeout: float,
        children: Sequence[Child] = (),
        early: Sequence[Message] = (),
    ) -> None:
        self.timeout = timeout
        self.calls: Callable[[], Calls] | None = None
        self._connections, self._children = list(connections), list(children)
        self._inbox: list[list[Message]] = [[] for _ in connections]
        for inbox, message in zip(self._inbox, early, strict=False):
            inbox.append(message)
        self._heard = time.monotonic()
        self._doing = ""
        self._answered: set[int] = set()
        self._closed: set[int] = set()
        self._troubles: dict[int, Trouble] = {}
        self._statuses = [Status() for _ in connections]
        self._stopped_since: float | None = None
        self._selector = selectors.DefaultSelector()
        for rank, connection in enumerate(connections):
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def tell(self, message: Message) -> None:
        """Send ``message`` to every rank that can still hear it."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(message)

    def gather(self, kind: type[M], doing: str) -> list[M]:
        """One message of that kind from every rank, in the order of ranks. RankFailure if one does not come.

        ``doing`` says what the ranks are at, for the message.
        """
        self._heard, self._doing = time.monotonic(), doing
        self._answered = set()
        while True:
            self._answered |= {rank for rank, inbox in enumerate(self._inbox) if inbox}
            if len(self._answered) == len(self._connections):
                got = [inbox.pop(0) for inbox in self._inbox]
                for message in got:
                    assert isinstance(message, kind), message
                return got  # type: ignore[return-value]
            known = self._known()
            if blame.failing(known):
                raise RankFailure(self._settled())
            if self._deadline(known) <= time.monotonic():
                raise RankFailure(self._verdict())
            self._listen(_LOOK)

    def verdict(self) -> Verdict | None:
        """Who is to blame, if something has gone wrong already."""
        return self._settled() if blame.failing(self._known()) else None

    def _settled(self) -> Verdict:
        """The verdict, after it is known who was first to fail, and a moment more, or after a little while."""
        deadline = time.monotonic() + min(_SETTLE, self.timeout / 2)
        quiet = False
        while time.monotonic() < deadline:
            if not quiet and blame.certain(self._known()):
                quiet, deadline = True, min(deadline, time.monotonic() + _QUIET)
            self._listen(_LOOK)
        return self._verdict()

    def _verdict(self) -> Verdict:
        return blame.verdict(self._known(), self._doing, self.timeout, self.calls)

    def _known(self) -> list[Known]:
        for rank, child in enumerate(self._children):
            self._statuses[rank] = child.status()
        return [
            Known(rank in self._answered, rank in self._closed, self._troubles.get(rank), status)
            for rank, status in enumerate(self._statuses)
        ]

    def _deadline(self, known: Sequence[Known]) -> float:
        """When patience ends: the timeout after the last progress, or half of it after a rank was stopped."""
        latest = max([self._heard, *(child.heartbeat.since for child in self._children)])
        if not any(each.status.stopped for each in known):
            self._stopped_since = None
            return latest + self.timeout
        if self._stopped_since is None:
            self._stopped_since = time.monotonic()
        return min(latest + self.timeout, self._stopped_since + self.timeout / 2)

    def _listen(self, wait: float) -> None:
        """Take what comes within so many seconds, and no more than once from each."""
        if not self._selector.get_map():
            time.sleep(wait)
        for key, _ in self._selector.select(wait):
            rank = key.data
            try:
                messages = self._connections[rank].pump()
            except (EOFError, OSError, msgspec.DecodeError):
                self._closed.add(rank)
                self._selector.unregister(key.fileobj)
                continue
            self._heard = time.monotonic()
            for message in messages:
                if isinstance(message, Trouble):
                    self._troubles[rank] = message
                elif isinstance(message, Status):
                    self._statuses[rank] = message
                else:
                    self._inbox[rank].append(message)

    def dismiss(self, text: str, code: int) -> None:
        """Send all ranks home."""
        self.tell(Bye(text=text, code=code))

    def close(self) -> None:
        """Close the connections."""
        self._selector.close()
        for connection in self._connections:
            connection.close()
