"""The check's own channel between the ranks: a process group beside the user's, over the same store.

Owns that group and what is sent through it: batches, states and verdicts, always outside of a
step. The user's groups are not touched, and no operation of this one is visible to what watches
them. Must not know what it carries.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from zerosim.conformance.board import Board
from zerosim.real_ranks.meter import tcp_sockets

dist: Any = torch.distributed
FOREVER = timedelta(days=7)  # it is the watch that ends a wait, and says of whom
_NUMBERS = count()  # of the checks that this process has begun; all ranks begin the same


class _Channel:
    """What this process has for all its checks."""

    store: Any = None
    group: Any = None
    sockets: frozenset[int] = frozenset()


class Side:
    """Rank ``rank`` of ``size``, and the way to the others. One alone sends nothing."""

    def __init__(self) -> None:
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.size: int = dist.get_world_size() if dist.is_initialized() else 1
        self._group: Any = None
        self._store: Any = None
        self.sockets: frozenset[int] = frozenset()
        """Descriptors of this channel's own, which are not the user's."""
        if self.size > 1:
            users = dist.distributed_c10d._get_default_store()
            if _Channel.store is not users:  # one for all checks of a process, for as long as there is the user's
                before = tcp_sockets()
                store = dist.PrefixStore("zerosim/conformance", users)
                _Channel.group = dist.ProcessGroupGloo(store, self.rank, self.size, FOREVER)
                _Channel.store, _Channel.sockets = users, frozenset(tcp_sockets() - before)
            self._group, self.sockets = _Channel.group, _Channel.sockets
            self._store = dist.PrefixStore(f"zerosim/conformance/{next(_NUMBERS)}", users)

    def board(self) -> Board:
        """The board that this machine's ranks share; one of its own for a rank on another machine than the first."""
        path, token = _made(self.size) if self.rank == 0 else (Path(), b"")
        path, token = self.broadcast((path, token))
        try:
            board = Board(path, token, self.rank, self.size)
        except OSError:
            own, token = _made(self.size)
            board = Board(own, token, self.rank, self.size)
            own.unlink()
        self.gather(None)  # all have mapped it, or cannot
        if self.rank == 0:
            path.unlink()
        return board

    def gather(self, value: Any) -> list[Any] | None:
        """What each rank has given, in their order, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        if self.rank:
            self._send(value, 0)
            return None
        return [value, *(self._receive(rank) for rank in range(1, self.size))]

    def broadcast(self, value: Any) -> Any:
        """What rank 0 has given, on every rank."""
        if self.size == 1:
            return value
        if self.rank:
            return self._receive(0)
        for rank in range(1, self.size):
            self._send(value, rank)
        return value

    def _send(self, value: Any, rank: int) -> None:
        raw = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._group.send([torch.tensor([len(raw)])], rank, 0).wait()
        self._group.send([raw], rank, 0).wait()

    def _receive(self, rank: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._group.recv([length], rank, 0).wait()
        raw = torch.empty(int(length), dtype=torch.uint8)
        self._group.recv([raw], rank, 0).wait()
        return pickle.loads(raw.numpy().tobytes())

    # -- for ranks of several machines, which have no board in common

    def publish(self, key: str, value: Any) -> None:
        """Leave something where every rank can look, without waiting for any."""
        if self._store is not None:
            self._store.set(f"{key}/{self.rank}", pickle.dumps(value))

    def published(self, key: str) -> dict[int, Any]:
        """What the ranks have left there so far."""
        if self._store is None:
            return {}
        keys = {rank: f"{key}/{rank}" for rank in range(self.size)}
        return {rank: pickle.loads(self._store.get(name)) for rank, name in keys.items() if self._store.check([name])}


def _made(size: int) -> tuple[Path, bytes]:
    """A board's file, in memory where there is such a place, and its token."""
    shared = Path("/dev/shm")
    handle, name = tempfile.mkstemp(prefix="zerosim-", dir=shared if os.access(shared, os.W_OK) else None)
    os.close(handle)
    return Path(name), Board.make(Path(name), size)
