"""Where a plan has more of something than one would think: a row than the one before it, or more GPUs than fewer.

Owns what counts as odd, and the band that is to blame. Must not know how cells are run or shown.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from zerosim.records.plan import Cell, Surprise


def surprises(cells: list[Cell]) -> list[Surprise]:
    """Where a row takes more than the one before it, or at rest more GPUs more than fewer, and the band to blame."""
    found: list[Surprise] = []
    for ranks in dict.fromkeys(cell.ranks for cell in cells):
        for lower, higher in pairwise(cell for cell in cells if cell.ranks == ranks):
            found += _more("at rest", lower, lower.resident, higher, higher.resident)
            found += _more("peak", lower, lower.peak.by_band, higher, higher.peak.by_band)
    for row in dict.fromkeys(cell.row for cell in cells):
        for fewer, more in pairwise(cell for cell in cells if cell.row == row):
            found += _more("at rest", fewer, fewer.resident, more, more.resident)
    return found


def _more(
    quantity: Literal["at rest", "peak"], one: Cell, before: dict[str, int], other: Cell, after: dict[str, int]
) -> list[Surprise]:
    more = sum(after.values()) - sum(before.values())
    if more <= 0 or (one.row == other.row and 100 * more < sum(before.values())):
        return []  # a little padding more or less with every N is nothing odd
    grown = {band: after[band] - before.get(band, 0) for band in after}
    band = max(grown, key=grown.__getitem__)
    return [
        Surprise(
            lower=f"{one.name} on {one.ranks:,}",
            higher=f"{other.name} on {other.ranks:,}",
            quantity=quantity,
            more=more,
            band=band,
            band_more=grown[band],
        )
    ]
