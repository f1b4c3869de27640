"""What can be broken on purpose, so that everyone can see that it is noticed.

Owns the faults and when they strike. A fault strikes where a rank begins to wait for others,
in the middle of a step, or, for a flipped bit, right after the step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import numpy as np

from zerosim.bands import Band
from zerosim.records.real_ranks import EXTRA_HOP, Fault
from zerosim.schemes import Scheme
from zerosim.worlds.torch_ring import Watch, dist, tensor_of

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class FaultInjector:
    """A watch that strikes in the given step, and otherwise does what the ``watch`` behind it does."""

    def __init__(self, watch: Watch, fault: Fault | None, rank: int, size: int) -> None:
        self._watch, self._fault, self._rank, self._size = watch, fault, rank, size
        self._strike: Callable[[], None] | None = None

    def step(self, step: int) -> None:
        """Step ``step`` of a run begins."""
        fault = self._fault
        self._strike = None
        if fault is None or fault.step != step:
            return
        if fault.kind in _SIGNALS and fault.rank == self._rank:
            self._strike = lambda: os.kill(os.getpid(), _SIGNALS[fault.kind])
        elif fault.kind == "hop":
            self._strike = lambda: self._hop(fault.rank)

    def enter(self) -> None:
        self._watch.enter()
        strike, self._strike = self._strike, None
        if strike is not None:
            strike()

    def leave(self) -> None:
        self._watch.leave()

    def _hop(self, source: int) -> None:
        """A block that nobody booked goes from rank ``source`` to the rank below, before the one that is due."""
        block = tensor_of(np.zeros(EXTRA_HOP, np.uint8))
        below = (source - 1) % self._size
        if self._rank == source:
            dist.send(block, below)
        elif self._rank == below:
            dist.recv(block, source)

    def flip(self, scheme: Scheme, step: int) -> None:
        """After step ``step``: flip the lowest bit of the rank's first parameter."""
        fault = self._fault
        if fault is not None and (fault.kind, fault.rank, fault.step) == ("bit", self._rank, step):
            state = scheme.buckets[0].states[Band.PARAMS]
            state[0, :1].view(f"u{state.dtype.itemsize}")[...] ^= 1
