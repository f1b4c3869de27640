"""What a step begins with beside the parameters: the optimizer's state, master weights, the count of updates.

Owns what is carried from step to step: the user's own where it was seen, ours, as bounds, where it was not. Must
not know what is right.
"""

from __future__ import annotations

import numpy as np

from zerosim.bands import Array
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.intervals import Interval, State, before_rounding, narrow, point
from zerosim.conformance.reading import Reader, Rows, union

KEPT = 8  # updates whose gradients are kept


class Carried:
    """``state``, ``master`` and ``updates`` before the next step; ``history`` has the first updates' gradients."""

    def __init__(self, reader: Reader) -> None:
        self.state: State = {}
        self.master: Interval | None = None
        self.updates = 0
        self.history: list[Interval] = []
        self._reader = reader

    def begin(self, theta: Array) -> Interval:
        """What the optimizer updates: master weights, or the parameters ``theta`` [P] themselves."""
        if not narrow(theta.dtype):
            self.master = point(theta)
        elif self.master is None:
            self.master = before_rounding(theta)
        return self.master

    def after(self, e: Evidence, right: tuple[Interval, State] | None = None, rows: Rows | None = None) -> None:
        """A step was applied. ``right`` is what had to come of it, and ``rows`` the parameters that did."""
        self.updates = e.updates + 1
        if len(self.history) == e.updates < KEPT:
            self.history.append(e.clipped)
        master, state = right or e.advance(np.arange(e.layout.size), e.clipped)
        if rows is not None and narrow(e.theta[0].dtype):
            kept, known = union(*rows)
            was = before_rounding(kept)
            lo, hi = np.maximum(master.lo, was.lo), np.minimum(master.hi, was.hi)
            master = Interval(np.where(known, lo, master.lo), np.where(known, hi, master.hi))
        self.state = {band: self._own(e, band, each) for band, each in state.items()}
        self.master = self._own(e, "master", master)

    def _own(self, e: Evidence, band: str, ours: Interval) -> Interval:
        values, known = union(*self._reader.band(e.seen, band))
        exact = values.astype(np.float64)
        return Interval(np.where(known, exact, ours.lo), np.where(known, exact, ours.hi))
