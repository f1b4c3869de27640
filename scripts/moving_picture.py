"""The moving picture of README.md: one training step under every scheme of a recording, in lockstep.

Owns how it is drawn: above, who holds what of each layer on each rank, and what moves; below, the memory of a rank,
band upon band, with a cursor. What happens in each slot comes from ``moving_steps.py``, and the paper from
``moving_sheet.py``. Measures nothing; must not know a scheme by its name.

    python scripts/moving_picture.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import record
from moving_sheet import EMPTY, PALE, SCALE, TINTS, Sheet, blend, font, gif
from moving_steps import TRANSIENT, Instant, Story, stories
from zerosim.bands import MODEL_STATES, Band
from zerosim.records.files import write_whole
from zerosim.records.results import Results
from zerosim.report.colors import BANDS
from zerosim.report.figure_style import INK, each_value, ranks_text
from zerosim.util import sizes

ROOT = Path(__file__).parents[1]
PICTURE, RECORDING = ROOT / "docs" / "player.gif", "lab_mixed"

WIDTH, MARGIN, GAP = 800, 8, 16
STRIP, LANE, BETWEEN = 9, 7, 15  # heights of a state of a layer, of where its blocks move, and the room to the next
CHART = 150
FIRST, LAST, COMPUTED, OTHER = 1600, 2600, 300, 100  # milliseconds that a slot is shown

WHOLE = dict(zip((Band.PARAMS, Band.GRADS), TRANSIENT, strict=True))  # what a state is called while a layer is whole
PHASES = dict(zip(("forward", "backward", "optimizer"), (TINTS[0], TINTS[1], TINTS[0]), strict=True))
EXPLAINED = (
    "Filled: what a rank holds of a layer. Hatched: what it has gathered for a while. "
    "Dark red: blocks, from rank to rank."
)


class Picture:
    """The picture of some stories: what stands, and what changes from slot to slot."""

    def __init__(self, results: Results) -> None:
        self.stories, self.ranks, self.node = stories(results), results.settings.ranks, results.settings.node
        self.slots = len(self.stories[0].instants)
        self.units = list(dict.fromkeys(each.computed for each in self.stories[0].instants if each.computed))
        self.most = max(story.peak for story in self.stories)
        self.across = (WIDTH - 2 * MARGIN + GAP) / len(self.stories) - GAP  # a scheme's width
        self.pitch = self.across / self.ranks  # a rank's, of which some is left free
        self.cell = self.pitch - max(2, self.pitch // 6)
        self.head = 48
        self.grid = self.head + 44
        self.tall = STRIP * 3 + 2 + LANE + BETWEEN
        self.chart = self.grid + self.tall * len(self.units) + 26
        self.foot = self.chart + CHART + 42
        used = {band for story in self.stories for instant in story.instants for band in instant.held}
        self.bands = [band for band in Band if band in used]
        self.still, self.full = self._still()

    def finding(self) -> str:
        """What the picture says, in a sentence."""
        peaks = {story.name: story.peak for story in self.stories}
        ends = {name: peak for name, peak in peaks.items() if peak in (max(peaks.values()), min(peaks.values()))}
        return f"One training step on {ranks_text(self.ranks)}: at its peak a rank holds {each_value(ends, sizes.text)}"

    def left(self, place: int) -> float:
        """Where the panel of a scheme begins."""
        return MARGIN + place * (self.across + GAP)

    # -- what stands

    def _still(self) -> tuple[Sheet, Sheet]:
        """All that does not change, with the memory to come pale; and the same with it in full color."""
        sheet = Sheet(WIDTH, round(self.foot + 34))
        sheet.text(MARGIN, MARGIN + 11, self.finding(), 12, bold=True)
        sheet.text(MARGIN, MARGIN + 26, EXPLAINED, 9.5)
        for place, story in enumerate(self.stories):
            left = self.left(place)
            sheet.text(left, self.head + 12, story.name, 12, bold=True)
            for number, unit in enumerate(self.units if not place else ()):
                sheet.text(left, self.grid + self.tall * number - 3, unit, 9)
            for rank in range(self.ranks):
                middle = left + rank * self.pitch + self.cell / 2
                sheet.text(middle, self.chart - 16, str(rank) if rank else "rank 0", 9, anchor="ms")
            self._phases(sheet, place)
            found = f"at rest {sizes.text(story.at_rest)}, at the peak {sizes.text(story.peak)}"
            sheet.text(left, self.chart + CHART + 31, found, 9.5)
        self._keys(sheet)
        full = sheet.copy()
        for place, story in enumerate(self.stories):
            self._memory(sheet, place, story, PALE)
            self._memory(full, place, story, 1)
        return sheet, full

    def x(self, place: int, slot: int) -> float:
        """Where a slot begins in the chart of a scheme, on a pixel."""
        return round(SCALE * (self.left(place) + slot * self.across / self.slots)) / SCALE

    def _memory(self, sheet: Sheet, place: int, story: Story, share: float) -> None:
        for slot, instant in enumerate(story.instants):
            x, top = self.x(place, slot), 0
            for band in self.bands:
                low, top = top, top + instant.held.get(band, 0)
                y = [round(SCALE * (1 - each / self.most) * CHART) / SCALE for each in (top, low)]
                color = BANDS[band] if share == 1 else blend(BANDS[band], share)
                sheet.box(x, self.chart + y[0], self.x(place, slot + 1) - x, y[1] - y[0], color)

    def _phases(self, sheet: Sheet, place: int) -> None:
        """Under the chart, where each phase is: that of the scheme which is furthest behind."""
        order = list(PHASES)
        together = zip(*(story.instants for story in self.stories), strict=True)
        behind = [[order.index(each.phase) for each in slot if each.phase] for slot in together]
        for number, (phase, tint) in enumerate(PHASES.items()):
            slots = [slot for slot, found in enumerate(behind) if found and min(found) == number]
            x, end = self.x(place, slots[0]), self.x(place, slots[-1] + 1)
            sheet.box(x, self.chart + CHART + 3, end - x, 14, tint)
            sheet.text((x + end) / 2, self.chart + CHART + 13, phase, 9, anchor="ms")

    def _keys(self, sheet: Sheet) -> None:
        """What each color stands for."""
        lines = [[band for band in self.bands if (band in MODEL_STATES) is states] for states in (True, False)]
        for number, (what, bands) in enumerate(zip(("at rest", "in the step"), lines, strict=True)):
            x, y = MARGIN + 72.0, self.foot + 12 + 15 * number
            sheet.text(MARGIN, y, what, 9, bold=True)
            for band in bands:
                sheet.box(x, y - 8, 12, 9, BANDS[band])
                sheet.text(x + 16, y, str(band), 9)
                x += 16 + font(9, bold=False).getlength(str(band)) / SCALE + 18

    # -- what changes

    def milliseconds(self) -> list[int]:
        """How long each slot is shown."""
        shown = [COMPUTED if instant.computed else OTHER for instant in self.stories[0].instants]
        return [FIRST, *shown[1:-1], LAST]

    def frame(self, slot: int) -> Sheet:
        """The picture in one slot."""
        sheet = self.still.copy()
        for place, story in enumerate(self.stories):
            instant, left = story.instants[slot], self.left(place)
            sheet.text(left + self.across, self.head + 12, sizes.text(instant.total), 11, anchor="rs")
            sheet.text(left, self.head + 26, self.saying(instant, slot), 9.5)
            for number, unit in enumerate(self.units):
                self._layer(sheet, left, self.grid + self.tall * number, story, instant, unit)
            self._past(sheet, place, slot)
        return sheet

    def saying(self, instant: Instant, slot: int) -> str:
        """What a scheme is doing, in a few words."""
        if hop := instant.hop:
            return f"{hop.collective} {hop.unit}, hop {hop.done} of {hop.hops}"
        if instant.computed:
            return f"{instant.phase} of {instant.computed}"
        if instant.released:
            return f"lets go of {instant.released}"
        return "at rest" if slot in (0, self.slots - 1) else ""

    def _past(self, sheet: Sheet, place: int, slot: int) -> None:
        """The memory so far in full color, and the cursor."""
        x, cursor = self.x(place, 0), self.x(place, slot + 1)
        sheet.paste(self.full, x, self.chart, cursor - x, CHART)
        sheet.box(cursor - 0.5, self.chart - 4, 1, CHART + 6, INK)

    def _layer(self, sheet: Sheet, left: float, top: float, story: Story, instant: Instant, unit: str) -> None:
        """A layer on every rank: of each state what the rank has, and the blocks that are handed on."""
        heights, hop = _heights(story.states), instant.hop if instant.hop and instant.hop.unit == unit else None
        for rank in range(self.ranks):
            x, y = left + rank * self.pitch, top + 2
            for band in story.states:
                self._state(sheet, x, y, heights[band], story, instant, band, rank, unit)
                if hop and hop.band == band:
                    self._piece(sheet, x, y, heights[band], BANDS[Band.BLOCKS], hop.chunk(rank, self.ranks), self.ranks)
                y += heights[band] + (band in WHOLE)
            if hop:
                followed = hop.chunk(rank, self.ranks) == 0
                color = BANDS[Band.BLOCKS] if followed else blend(BANDS[Band.BLOCKS], PALE)
                sheet.box(x + self.cell / 2 - 4, y + 1, 8, LANE - 1, color)
        if instant.computed == unit:
            sheet.frame(left, top + 2, self.across - self.pitch + self.cell, STRIP * 3 + 2, INK)

    def _state(
        self, sheet: Sheet, x: float, y: float, height: float, story: Story, instant: Instant, band: Band, rank: int,
        unit: str,
    ) -> None:  # fmt: skip
        """One state of a layer on a rank: the room for all of it, what is whole for a while, and what is its own."""
        sheet.box(x, y, self.cell, height, EMPTY)
        transient, hop = WHOLE.get(band), instant.hop
        if transient and (transient, unit) in instant.whole:
            filling = hop and hop.unit == unit and hop.band == band and not hop.sums
            chunks = hop.arrived(rank, self.ranks) if hop and filling else range(self.ranks)
            for chunk in chunks:
                self._piece(sheet, x, y, height, BANDS[transient], chunk, self.ranks, hatched=band == Band.PARAMS)
        if not story.row.offloads(band):
            self._piece(sheet, x, y, height, BANDS[band], *story.row.piece(band, rank, self.ranks, self.node))

    def _piece(
        self, sheet: Sheet, x: float, y: float, height: float, color: str, piece: int, pieces: int, *,
        hatched: bool = False,
    ) -> None:  # fmt: skip
        """One of the equal pieces of a rank's cell."""
        begin, end = (round(SCALE * self.cell * each / pieces) / SCALE for each in (piece, piece + 1))
        sheet.box(x + begin, y, end - begin, height, color, hatched=hatched)


def _heights(states: Sequence[Band]) -> Mapping[Band, float]:
    """How high each state is drawn: what only the optimizer has shares a strip."""
    own = [band for band in states if band not in WHOLE]
    return {band: STRIP if band in WHOLE else STRIP / len(own) for band in states}


def encoded(results: Results) -> bytes:
    """The picture as a GIF, the same for the same recording."""
    picture = Picture(results)
    return gif([picture.frame(slot) for slot in range(picture.slots)], picture.milliseconds())


def main() -> None:
    """Write it."""
    found = record.load(RECORDING)
    assert isinstance(found, Results)
    write_whole(PICTURE, encoded(found))


if __name__ == "__main__":
    main()
