"""Finds an optimizer's state among a rank's tensors by what it looks like after the first step.

A user's own Adam keeps its moments somewhere. After one step the first is proportional to the averaged gradient, the
second to its square, wherever they lie and however the parameters were cut; a pair of tensors of which both is true,
by factors that belong together, is the state of that part of the parameters. Owns this search and
what it has found. Must not know what is right: the factor may well be a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zerosim.bands import Array
from zerosim.conformance.layout import Layout, Piece, array_of
from zerosim.records.conformance import Rule

Tensor = Any
SHORTEST = 6  # elements of a run that says anything
CLOSE = 2e-2  # relative to the largest of the run
AGREES = 0.02  # how far the two moments' factors may be from belonging together


class Match(NamedTuple):
    """A run of a tensor that is ``factor`` times a run of a vector: their first elements and its length."""

    tensor: Tensor
    place: int
    first: int
    length: int
    factor: float


class State:
    """The state that was found: its tensors, and which part of the parameters each belongs to."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._found: dict[str, list[Match]] = {}

    def look(self, tensors: Iterable[Tensor], grad: Array, rule: Rule) -> dict[str, list[Piece]]:
        """Look among ``tensors`` for the moments that a first step with a gradient like ``grad`` [P] leaves."""
        if rule.kind != "adam":
            return {}
        candidates = [
            each for each in tensors
            if each.dtype == torch.float32 and each.numel() >= SHORTEST and each.is_contiguous()
        ]  # fmt: skip
        first = list(_matches(candidates, grad))
        second = {(m.place, m.length): m for m in _matches(candidates, grad * grad)}
        for m in first:
            other = second.get((m.place, m.length))
            if other is None or other.tensor is m.tensor or m.factor == 0:
                continue
            scale = m.factor / (1 - rule.betas[0])
            if abs(other.factor / (1 - rule.betas[1]) / scale**2 - 1) < AGREES:
                self._found.setdefault("exp_avg", []).append(m)
                self._found.setdefault("exp_avg_sq", []).append(other)
        return self.bands()

    def bands(self) -> dict[str, list[Piece]]:
        """What those tensors have now."""
        return {
            band: [Piece(m.place, array_of(m.tensor)[m.first : m.first + m.length]) for m in matches]
            for band, matches in self._found.items()
        }

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that were found."""
        return [m.tensor for matches in self._found.values() for m in matches]


def _matches(tensors: Sequence[Tensor], vector: Array) -> Iterable[Match]:
    """Runs of tensors that are proportional to runs of the vector."""
    with np.errstate(all="ignore"):
        ratios = vector[1:] / vector[:-1]
    ratios[~np.isfinite(ratios)] = 0
    order = np.argsort(ratios)
    ordered = ratios[order]
    for tensor in tensors:
        values = array_of(tensor).astype(np.float64)
        if not np.isfinite(values).all() or not values.any():
            continue
        yield from _runs(tensor, values, vector, order, ordered)


def _runs(tensor: Tensor, values: Array, vector: Array, order: Array, ordered: Array) -> Iterable[Match]:
    anchor = _anchor(values)
    if anchor is None:
        return
    ratio = values[anchor + 1] / values[anchor]
    width = CLOSE * max(abs(ratio), 1e-3)
    low, high = np.searchsorted(ordered, [ratio - width, ratio + width])
    best: Match | None = None
    for place in order[low:high]:
        start = int(place) - anchor
        first, stop = max(0, -start), min(len(values), len(vector) - start)
        part, wanted = values[first:stop], vector[start + first : start + stop]
        if vector[place] == 0 or len(part) < SHORTEST:
            continue
        factor = float(part @ wanted / (wanted @ wanted)) if wanted.any() else 0.0
        off = np.abs(part - factor * wanted) > CLOSE * np.abs(part).max()
        length = int(np.flatnonzero(off)[0]) if off.any() else len(part)
        rest = values[first + length :]
        if length >= SHORTEST and not rest.any() and not values[:first].any():  # what is beyond is padding
            wanted = wanted[:length]
            factor = float(part[:length] @ wanted / (wanted @ wanted))
            if best is None or length > best.length:
                best = Match(tensor, start + first, first, length, factor)
    if best is not None:
        yield best


def _anchor(values: Array) -> int | None:
    """Two neighbours of which neither is small: the pair whose smaller one is largest."""
    sizes = np.abs(values)
    pairs = np.minimum(sizes[:-1], sizes[1:])
    place = int(pairs.argmax())
    return place if pairs[place] > 0 else None
