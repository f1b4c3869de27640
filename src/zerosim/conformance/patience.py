"""Nobody waits for ever: what stops a step is named, and the job ends.

Owns the thread that watches the board while its rank may be stuck in a collective, which
nothing in Python can interrupt, and the exception that a rank gets before it asks for what the
others do not. Must not know what a step computes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zerosim.conformance.board import Board, Doing, Mismatch, Slot, dead
from zerosim.conformance.order import died, out_of_order, stalled, undecided
from zerosim.conformance.side import Side

LOOK = 0.25  # seconds between two looks
GRACE = 5.0  # and after a verdict until a rank that is still stuck is ended
SETTLE = 2.0  # within which whoever has failed first has been seen


class OutOfOrder(RuntimeError):
    """This rank asks for a collective that the others do not, or has left one out. ``rank`` is the one to blame."""

    def __init__(self, found: Mismatch) -> None:
        self.rank, self.step = found.rank, found.step
        super().__init__(f"step {found.step}: {found.text}")


class Patience:
    """Watches the ``board`` for as long as the check runs.

    Without progress on any rank for ``timeout`` seconds, or when a rank has died, ``ended`` is called on the
    rank that says so first, and every rank that is stuck ends with exit code 1.
    """

    def __init__(self, board: Board, side: Side, timeout: float, ended: Callable[[Mismatch], None]) -> None:
        self.board, self.side, self.timeout, self.ended = board, side, timeout, ended
        self.usual: list[tuple[str, str]] = []
        """What this rank asked for in the step before."""
        self._working = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zerosim.check", daemon=True)
        if side.size > 1:
            self._thread.start()

    def begin(self, step: int) -> None:
        """This rank begins a step."""
        self.usual = self.board.slot(self.side.rank).asked
        self.board.begin(step)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within the block this rank does something of the check's own, for which the others may wait for long."""
        self._working = True
        try:
            yield
        finally:
            self._working = False

    def stop(self) -> None:
        """The check is over on this rank."""
        self._stop.set()
        self.board.close()

    def check_order(self) -> None:
        """Raise OutOfOrder if the ranks' collectives are not the same as far as they have come."""
        if (found := self.board.verdict()) is not None:
            raise OutOfOrder(found)
        if out_of_order(self.board.slots(), self.usual) is None:
            return
        until = time.monotonic() + SETTLE
        while undecided(self.board.slots()) and time.monotonic() < until:
            time.sleep(LOOK / 10)  # so that it is the odd one that is named, and not whoever came second
        found = self.board.verdict() or out_of_order(self.board.slots(), self.usual)
        if found is not None:
            self.end(found)
            raise OutOfOrder(found)

    def end(self, found: Mismatch) -> None:
        """Say why this ends, if nobody has yet."""
        if self.board.announce(found):
            self.ended(found)

    def blame(self, error: BaseException) -> bool:
        """This rank's step has raised. Say whose fault it is; False if it is another rank's."""
        lost = any(word in str(error).lower() for word in ("connect", "gloo", "nccl", "timed out", "peer", "socket"))
        until = time.monotonic() + (SETTLE if lost else 0)
        while True:
            if self.board.verdict() is not None:
                return False
            for slot in self.board.slots():
                if slot.rank != self.side.rank and (dead(slot) or slot.doing is Doing.FAILED):
                    self.end(died(slot) if slot.doing is not Doing.FAILED else _failed(slot))
                    return False
            if time.monotonic() >= until:
                break
            time.sleep(LOOK / 5)
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        self.board.now(Doing.FAILED, text)
        found = out_of_order(self.board.slots(), self.usual) if lost else None
        self.end(found or _failed(self.board.slot(self.side.rank)))
        return found is None or found.rank == self.side.rank

    def _watch(self) -> None:
        before, since, own_since = self.board.beats(), time.monotonic(), time.monotonic()
        while not self._stop.wait(LOOK):
            if self._working:
                self.board.beat()
            now, beats = time.monotonic(), self.board.beats()
            if beats != before:
                since = now
            if beats[self.side.rank] != before[self.side.rank]:
                own_since = now
            before = beats
            own = self.board.slot(self.side.rank)
            if own.doing not in (Doing.STEP, Doing.COMPARING):
                since = own_since = now
                continue
            if self.board.verdict() is not None:
                if now - own_since > GRACE:
                    _exit()
                continue
            gone = next((slot for slot in self.board.slots() if dead(slot)), None)
            if gone is not None:
                time.sleep(SETTLE)  # whoever can say more has by then
                self._end_here(died(gone))
            elif now - since > self.timeout:
                self._end_here(stalled(self._slots(), self.timeout))

    def _end_here(self, found: Mismatch) -> None:
        self.end(found)
        time.sleep(GRACE)  # the main thread, if it is not stuck, ends by itself
        if not self._stop.is_set():
            _exit()

    def _slots(self) -> list[Slot]:
        """The board's, and those that ranks on other machines have published by now."""
        self.side.publish("stalled", self.board.slot(self.side.rank))
        time.sleep(SETTLE)
        published: dict[int, Slot] = self.side.published("stalled")
        return [published.get(slot.rank, slot) for slot in self.board.slots()]


def _failed(slot: Slot) -> Mismatch:
    return Mismatch(slot.rank, slot.step, f"rank {slot.rank} has failed in the step: {slot.failed}", failed=True)


def _exit() -> None:
    """End this process: its main thread is stuck where Python cannot reach it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
