"""Collectives that hold what they hold, and send nothing: for a search that asks only what fits.

Owns leaving out the hops. A hop allocates nothing, as both blocks of a collective are held before the first and
freed after the last; so whatever is held, and when, is the same, and is held and freed by the same schedule. On
4,096 ranks the hops are nine tenths of a run. Must not know what is searched for.
"""

from __future__ import annotations

from typing import Any

from zerosim.bands import Array
from zerosim.comm import Comm


def unsent(collectives: type[Comm]) -> type[Comm]:
    """The same collectives without their hops: what is in flight is held and freed, and no byte is counted as sent."""

    class Unsent(collectives):  # type: ignore[misc, valid-type]
        def reduce_scatter(
            self, buffer: Array, out: Array, size: int, *, scale: float, band: str, unit: str,
            name: str = "reduce-scatter", start: Any = 0,
        ) -> None:  # fmt: skip
            with self._flight(buffer, size, start, name, band, unit):
                pass

        def all_gather(
            self, buffer: Array, size: int, own: Array | None = None, *, band: str, unit: str,
            name: str = "all-gather", start: Any = 0,
        ) -> None:  # fmt: skip
            with self._flight(buffer, size, start, name, band, unit):
                pass

    return Unsent
