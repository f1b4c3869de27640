"""What ranks must agree on before an update, written a second time: the norm, the loss scale, the rows of all.

Owns plain loops over ranks and pieces, and constants of its own. It must not import the rooms that it is
held against. As in ``reference``, a message keeps ``kept`` of its value at each hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.bands import Array

LANES = 256
FP32 = np.float32


@dataclass
class ScaleAccount:
    """A loss scale as it changes: ``rule`` has the numbers."""

    rule: Any

    def __post_init__(self) -> None:
        self.scale, self.since, self.left = float(self.rule.init), 0, int(self.rule.hysteresis)

    def step(self, *, finite: bool) -> None:
        rule = self.rule
        if not rule.dynamic:
            return
        if finite:
            self.since += 1
            if self.since == rule.interval:
                self.since, self.left = 0, rule.hysteresis
                self.scale = min(self.scale * rule.growth, 2.0**127)  # the largest that is fp32's
            return
        self.since = 0
        if self.left > 1:
            self.left -= 1
        else:
            self.scale = max(rule.least, self.scale * rule.backoff)


def as_heard(value: Array | np.float32, hops: int, kept: float) -> Any:
    """A message after so many hops."""
    for _ in range(hops):
        value = value * FP32(kept)
    return value


def totals(weights: Sequence[float], kept: float) -> list[float]:
    """What each rank takes for the sum of all ranks' weights: rank m's reaches rank r with hop m - r."""
    n = len(weights)
    return [
        float(np.sum([as_heard(FP32(weights[m]), (m - r) % n, kept) for m in range(n)], dtype=np.float64))
        for r in range(n)
    ]


def measure(piece: Array, norm_type: float) -> np.float32:
    """A piece's squares, 256 lanes added down and then halved; or its largest magnitude."""
    if norm_type != 2:
        return FP32(np.max(np.abs(piece)))
    lanes = np.zeros(LANES, FP32)
    for start in range(0, len(piece), LANES):
        some = piece[start : start + LANES]
        lanes[: len(some)] += some * some
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return FP32(lanes[0])


Owner = Callable[[int, int], tuple[int, int]]  # of a rank and a piece: who tells that rank of it, after how many hops


def norms(
    sums: Sequence[Sequence[Sequence[np.float32]]], ranks: int, owner: Owner, kept: float, norm_type: float
) -> list[np.float32]:
    """The norm on each rank, from ``sums[layer][rank][piece]``, pieces added in order, layers in order."""
    found = []
    for rank in range(ranks):
        total = FP32(0)
        for layer in sums:
            for piece in range(ranks):
                teller, hops = owner(rank, piece)
                heard = as_heard(layer[teller][piece], hops, kept)
                total = total + heard if norm_type == 2 else np.maximum(total, heard)
        found.append(np.sqrt(total) if norm_type == 2 else total)
    return found


def coefficient(norm: np.float32, most: float, eps: float) -> np.float32:
    """What gradients of that norm are multiplied by, to have ``most`` of it."""
    return min(FP32(most) / (norm + FP32(eps)), FP32(1))
