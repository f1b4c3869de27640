"""Shapes at any micro-batch from a few that were measured, so that a search over sizes need not run each of them.

Owns the straight line between measured sizes and the proof that it is one. Every number of a
record (a side of a tensor, FLOPs, the most bytes of scratch memory) is a sum, or the larger, of amounts
that are fixed or grow with the rows: a convex function of them. One that lies on the line between
its values at two ends somewhere in between lies on it everywhere in between. Must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from zerosim.worlds.shapes import ModelShapes, Tensor, UnitShapes

MOST_ROWS = 65_536  # the largest micro-batch that is searched for
SPAN = 8  # from one end of a line to the other

Measure = Callable[[int], ModelShapes]


class _Off(Exception):
    """Not on a line of integers."""


_FAILURES = (ValueError, ArithmeticError, RuntimeError, _Off)  # no line, or too large for some operation


class BatchSizes:
    """What ``measure`` gives for any number of rows: measured, or on the line between measured ends if it is one.

    ``at`` measures, ``tried`` may answer from a line.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._measured: dict[int, ModelShapes] = {}
        self._straight: dict[int, bool] = {}

    def at(self, rows: int) -> ModelShapes:
        """The shapes of micro-batches of so many rows, measured."""
        if rows not in self._measured:
            self._measured[rows] = self._measure(rows)
        return self._measured[rows]

    def tried(self, rows: int) -> ModelShapes:
        """The same, from the line between two powers of ``SPAN`` if what is measured in between is on it."""
        if rows in self._measured:
            return self._measured[rows]
        low = 1
        while low * SPAN <= rows:
            low *= SPAN
        for start in (1, low):  # the sizes that most searches end among are measured with the first
            if start not in self._straight:
                self._straight[start] = self._on_a_line(start)
        return self._between(low, rows) if self._straight[low] else self.at(rows)

    def _on_a_line(self, low: int) -> bool:
        try:
            self.at(low), self.at(low * SPAN)
            if self._between(low, 2 * low) == self.at(2 * low):
                return True
        except _FAILURES:
            pass
        if low == 1:  # each by itself, while what measures is loaded
            for rows in range(1, SPAN):
                with suppress(*_FAILURES):
                    self.at(rows)
        return False

    def _between(self, low: int, rows: int) -> ModelShapes:
        left, right = (msgspec.to_builtins(self._measured[end]) for end in (low, low * SPAN))
        return msgspec.convert(_line(left, right, rows - low, low * SPAN - low), ModelShapes)


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

    ``copies``: each unit also saves a 16-bit copy of the parameters that it reads, if they have no dtype of their own.
    """
    units = []
    for unit in shapes.units:
        read = sum(shapes.groups[group].size for group in unit.groups if shapes.groups[group].dtype is None)
        more = (Tensor((read,), "bfloat16"),) if copies and read and unit.outputs else ()
        units.append(_compact(unit, more))
    return msgspec.structs.replace(shapes, units=tuple(units), loss=_compact(shapes.loss))


def _compact(unit: UnitShapes, more: tuple[Tensor, ...] = ()) -> UnitShapes:
    return msgspec.structs.replace(unit, saved=_one((*unit.saved, *more)), recomputed=_one(unit.recomputed))


def _one(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    nbytes = sum(each.nbytes for each in tensors)
    return (Tensor((nbytes,), "uint8"),) if nbytes else ()
