"""Shapes at any micro-batch from three that were measured, so that a search over sizes runs the model three times.

Owns the straight line between measured sizes and the proof that it is one. Every number of a
record (a side of a tensor, FLOPs, the most bytes of scratch memory) is a sum, or the larger, of amounts
that are fixed or grow with the rows: a convex function of them. One that lies on the line between
its values at the ends somewhere in between lies on it everywhere. Must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from zerosim.layers import Role
from zerosim.worlds.shapes import ModelShapes, Tensor, UnitShapes

MOST_ROWS = 65_536  # the far end, and the largest micro-batch that is searched for

Measure = Callable[[int], ModelShapes]


class BatchSizes:
    """What ``measure`` gives for any number of rows, up to ``MOST_ROWS``: measured, or on the line if it is one.

    ``at`` measures, ``tried`` may answer from the line.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._measured: dict[int, ModelShapes] = {}
        self._straight: bool | None = None

    def at(self, rows: int) -> ModelShapes:
        """The shapes of micro-batches of so many rows, measured."""
        if rows not in self._measured:
            self._measured[rows] = self._measure(rows)
        return self._measured[rows]

    def tried(self, rows: int) -> ModelShapes:
        """The same, from the line between 1 and ``MOST_ROWS`` rows where that is what is measured in between."""
        if rows in self._measured:
            return self._measured[rows]
        if self._straight is None:
            self._straight = self._on_a_line()
        found = self._between(rows) if self._straight and rows <= MOST_ROWS else None
        return self.at(rows) if found is None else found

    def _on_a_line(self) -> bool:
        between = next((rows for rows in self._measured if 1 < rows < MOST_ROWS), 2)
        try:
            measured = self.at(between)
            self.at(1), self.at(MOST_ROWS)
        except (ValueError, ArithmeticError, RuntimeError):  # too large for some operation: then each size by itself
            return False
        return self._between(between) == measured

    def _between(self, rows: int) -> ModelShapes | None:
        low, high = (msgspec.to_builtins(self._measured[end]) for end in (1, MOST_ROWS))
        try:
            return msgspec.convert(_line(low, high, rows - 1, MOST_ROWS - 1), ModelShapes)
        except _Off:
            return None


class _Off(Exception):
    """Not on a line of integers."""


def _line(low: Any, high: Any, part: int, whole: int) -> Any:
    kind = type(low)
    if kind is not type(high):
        raise _Off
    if kind is int:
        grown, rest = divmod((high - low) * part, whole)
        if rest:
            raise _Off
        return low + grown
    if kind is dict:
        if low.keys() != high.keys():
            raise _Off
        return {name: _line(each, high[name], part, whole) for name, each in low.items()}
    if kind in (list, tuple):
        if len(low) != len(high):
            raise _Off
        return [_line(a, b, part, whole) for a, b in zip(low, high, strict=True)]
    if low != high:
        raise _Off
    return low


def compact(shapes: ModelShapes, *, copies: bool = False) -> ModelShapes:
    """The same model with what a unit saves as one piece of memory: as many bytes, in fewer allocations.

    ``copies``: each unit also saves a 16-bit copy of the parameters that it reads.
    """
    units = []
    for unit in shapes.units:
        read = sum(shapes.groups[group].size for group in unit.groups if shapes.groups[group].role is not Role.BUFFER)
        more = (Tensor((read,), "bfloat16"),) if copies and read and unit.outputs else ()
        units.append(_compact(unit, more))
    return msgspec.structs.replace(shapes, units=tuple(units), loss=_compact(shapes.loss))


def _compact(unit: UnitShapes, more: tuple[Tensor, ...] = ()) -> UnitShapes:
    return msgspec.structs.replace(unit, saved=_one((*unit.saved, *more)), recomputed=_one(unit.recomputed))


def _one(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    nbytes = sum(each.nbytes for each in tensors)
    return (Tensor((nbytes,), "uint8"),) if nbytes else ()
