"""What can be broken on purpose, so that everyone can see that it is noticed.

Owns the faults and when they strike. Most strike where a rank would begin to wait for others, in the middle of
a step; some change what a rank begins with, or what it holds after the step.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

from zerosim.bands import Array, Band
from zerosim.lab.data import Pair
from zerosim.real_ranks.cases import states
from zerosim.records.real_ranks import EXTRA_BYTES, EXTRA_MEMORY, Fault
from zerosim.schemes import Scheme
from zerosim.worlds.gloo import Op
from zerosim.worlds.torch_ring import TorchRing, Watch, dist, tensor_of


class FaultyRing(TorchRing):
    """A ring on which ``fault`` strikes in its step, if it is meant for this rank; else like any other."""

    def __init__(self, rank: int, size: int, watch: Watch, device: str, fault: Fault | None) -> None:
        super().__init__(rank, size, watch, device)
        self._fault = fault
        self._armed = [""]  # what strikes next, shared by the rings that this one is split into
        self._kept: list[Array] = []

    def _kind(self, step: int = 0) -> str:
        """What is to be broken on this rank, in that step or at any time."""
        fault = self._fault
        if fault is None or fault.rank != self.rank or step not in (0, fault.step):
            return ""
        return fault.kind

    # -- before the first step

    def threads(self) -> None:
        """Before the ranks introduce themselves."""
        if self._kind() == "threads":
            threadpool_limits(2)

    def data(self, batches: list[list[Pair]]) -> list[list[Pair]]:
        """The batches that this rank trains on."""
        if self._kind() == "data":
            batches = [[(x + np.float32(1), y) for x, y in batch] for batch in batches]
        return batches

    def start(self, scheme: Scheme) -> None:
        """A run begins."""
        self._kept.clear()
        if self._kind() == "weights":
            _flip(scheme, Band.PARAMS)

    # -- in a step

    def step(self, step: int) -> None:
        """Step ``step`` of a run begins."""
        fault = self._fault
        self._armed[0] = self._kind(step)
        if fault is not None and fault.kind == "hop" and fault.step == step:
            self._armed[0] = "hop"  # it takes two

    def _call(self, op: Op, nbytes: int, run: Callable[[], None]) -> None:
        armed, self._armed[0] = self._armed[0], ""
        if armed == "skip":
            return

        def struck() -> None:
            self._strike(armed)
            run()

        super()._call(op, nbytes, struck)

    def _strike(self, kind: str) -> None:
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        elif kind == "error":
            self.watch.leave()
            raise RuntimeError("this error was asked for with --break error")
        elif kind == "hop":
            self._hop()
        elif kind == "memory":
            self._kept.append(np.ones(EXTRA_MEMORY, np.uint8))
        elif kind == "datagram":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(bytes(EXTRA_BYTES), ("127.0.0.1", 9))
        elif kind == "connection":
            with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as s:
                s.sendall(bytes(EXTRA_BYTES))

    def _hop(self) -> None:
        """A block that nobody booked goes from the fault's rank to the rank below, before the one that is due."""
        assert self._fault is not None
        block = tensor_of(np.zeros(EXTRA_BYTES, np.uint8))
        source = self._fault.rank
        below = (source - 1) % dist.get_world_size()
        if self.rank == source:
            dist.send(block, below)
        elif self.rank == below:
            dist.recv(block, source)

    # -- after the step

    def done(self, scheme: Scheme, step: int) -> None:
        """Step ``step`` has ended."""
        kind = self._kind(step)
        if kind in ("bit", "gradient"):
            _flip(scheme, Band.PARAMS if kind == "bit" else Band.GRADS)

    def loss(self, loss: float, step: int) -> float:
        """The loss that this rank tells."""
        return loss + 0.5 if self._kind(step) == "loss" else loss


def _flip(scheme: Scheme, band: Band) -> None:
    """Flip the lowest bit of the rank's first element."""
    state = next(iter(states(scheme)[band].values()))
    state[0, :1].view(f"u{state.dtype.itemsize}")[...] ^= 1
