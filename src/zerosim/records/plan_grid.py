"""The grid of a plan's page: steps that were run for every choice of its sliders, and what each held, event by event.

Owns the schema, and how a step's log of holds and frees is written down in few bytes. Computes nothing but the sums
of such a log. Must not know the simulator.

A log is a list of moves: hold or free, of which band, in which phase, for which unit (counted from the
unit of the move before), and how many bytes, by their place in the cell's own list of sizes. So cells of one row
share their moves whatever the sizes are, and layers that do the same make the same moves, which become a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from zerosim.records.files import Record
from zerosim.records.loops import Loops, folded, unfolded
from zerosim.records.plan import Cell, Plan
from zerosim.stages import Stage


class Axes(Record):
    """What can be chosen, each in order. ``sequences`` is [None] where rows have no length."""

    rows: list[Stage]
    ranks: list[int]
    micro_batches: list[int]
    sequences: list[int | None]
    checkpoints: list[str]

    @property
    def points(self) -> int:
        """How many steps there are to run, the rows that make no sense among so few ranks included."""
        each = self.rows, self.ranks, self.micro_batches, self.sequences, self.checkpoints
        return prod(len(choices) for choices in each)


class Move(Record, array_like=True):
    """A hold (1) or a free (-1): the places of band and phase in the grid's lists, and of the bytes in the cell's;
    ``unit`` is how far the unit's place is from that of the move before, the first from 0."""

    sign: int
    band: int
    phase: int
    unit: int
    size: int


class Log(NamedTuple):
    """A hold or a free as it was, and what was held after it."""

    change: int
    band: str
    phase: str
    unit: str
    held: int


class GridCell(Record):
    """A step that was run: what it was asked, what it says, and its log. ``moves`` is a place in ``Grid.logs``."""

    micro_batch: int
    sequence: int | None
    checkpoint: str
    cell: Cell
    moves: int
    sizes: list[int]


class Grid(Record):
    """A plan, and cells for every choice around what it was asked; ``left_out`` says what of it was not run, and why.

    ``bands``, ``phases`` and ``units`` are the names that ``moves`` count; ``logs`` are loops over places in ``moves``.
    """

    plan: Plan
    axes: Axes
    bands: list[str]
    phases: list[str]
    units: list[str]
    moves: list[Move]
    logs: list[Loops]
    cells: list[GridCell]
    left_out: list[str]

    def log(self, found: GridCell) -> Iterator[Log]:
        """What a cell held and freed, in order. A step begins with what it ends with, less what it changed."""
        moves = [self.moves[place] for place in unfolded(self.logs[found.moves])]
        held = sum(found.cell.resident.values()) - sum(move.sign * found.sizes[move.size] for move in moves)
        unit = 0
        for move in moves:
            change = move.sign * found.sizes[move.size]
            held += change
            unit += move.unit
            yield Log(change, self.bands[move.band], self.phases[move.phase], self.units[unit], held)


class Logs:
    """Logs that are being gathered, each list of moves once."""

    def __init__(self) -> None:
        self.bands: dict[str, int] = {}
        self.phases: dict[str, int] = {}
        self.units: dict[str, int] = {}
        self._moves: dict[tuple[int, int, int, int, int], int] = {}
        self.logs: list[Loops] = []
        self._known: dict[tuple[int, ...], int] = {}

    def add(self, changes: Iterable[tuple[int, str, str, str]]) -> tuple[int, list[int]]:
        """The place of a log of (change in bytes, band, phase, unit), and its sizes."""
        sizes: dict[int, int] = {}
        numbers: list[int] = []
        before = 0
        for change, band, phase, unit in changes:
            here = self.units.setdefault(unit, len(self.units))
            move = (
                1 if change > 0 else -1,
                self.bands.setdefault(band, len(self.bands)),
                self.phases.setdefault(phase, len(self.phases)),
                here - before,
                sizes.setdefault(abs(change), len(sizes)),
            )
            numbers.append(self._moves.setdefault(move, len(self._moves)))
            before = here
        key = tuple(numbers)
        if key not in self._known:
            self._known[key] = len(self.logs)
            self.logs.append(folded(numbers))
        return self._known[key], list(sizes)

    def moves(self) -> list[Move]:
        """All moves that there are, in the order of their places."""
        return [Move(*each) for each in self._moves]
