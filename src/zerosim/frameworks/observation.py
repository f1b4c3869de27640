"""What one rank saw of a framework's run. Owns these shapes; computes nothing. Bytes are integers."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from zerosim.bands import Array
from zerosim.real_ranks.meter import Counters
from zerosim.worlds.gloo import Call

SETTLED = 2  # steps after which DDP has built its buckets anew and every optimizer has its state


class Instant(NamedTuple):
    """What was allocated at one instant of a step, by when it had come: before, or in which phase. Bytes.

    Not ``exact`` if some of it may have gone already.
    """

    phase: str
    parts: dict[str, int]
    exact: bool


class StepGradients(NamedTuple):
    """One step's gradients on one rank: its local ones, and what the framework made of them, whole or its shard.

    ``groups`` are the parameters that travelled together, each in its order; ``norms`` what clip_grad_norm_
    gives of the averaged ones, by its norm type.
    """

    local: list[Array]
    averaged: list[Array]
    groups: list[list[int]]
    norms: dict[str, float]


class Observation(NamedTuple):
    """What one rank saw of a run. Bytes; a list over steps has an entry for each.

    ``held`` is by band as the update begins, ``rest`` after the step. ``strays`` are counted in
    what is elsewhere, by origin. ``asked`` are the collectives of a step, ``params`` whole, fp32,
    after the last. ``decided``: by the name of a scaler, whether it skipped each step, and its scale after it.
    """

    held: dict[str, int]
    rest: dict[str, int]
    peak: Instant
    strays: Counter[object]
    counted: list[Counters]
    unmeasured: dict[str, str]
    asked: list[Call]
    params: list[Array]
    gradients: list[StepGradients]
    decided: dict[str, list[tuple[bool, float]]]
