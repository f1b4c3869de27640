"""The least time of a step, from its log and a card: the question's numbers over the preset's.

Owns which card and which numbers are meant. What a bound is, ``bound`` owns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerosim.bands import WIRES, DType
from zerosim.planner.cards import ASSUMED, Card, card
from zerosim.planner.runner import StepRun
from zerosim.planner.step_time import bound, operations
from zerosim.records.plan import Cluster, Question, Time

EFFICIENCY = 0.5  # of the peak, where none is stated: what good training code reaches on dense models


def cluster(question: Question, working: DType) -> tuple[Card, Cluster]:
    """The card that the time is bounded with, and its record. ValueError if it has no peak for ``working``."""
    asked = question.network
    dtype = next(name for name, known in WIRES.items() if known == working)
    chosen = card(question.card or ASSUMED)
    given: dict[str, Any] = {
        name: value if name.startswith("hop") else round(value)
        for name in ("within", "between", "hop_within", "hop_between", "node")
        if (value := getattr(asked, name)) is not None
    }
    if asked.peak is not None:
        given["peak"] = {**chosen.peak, dtype: round(asked.peak)}
    chosen = replace(chosen, **given)
    return chosen, Cluster(
        card=chosen.name,
        assumed=question.card is None,
        dtype=dtype,
        peak=float(chosen.flops(dtype)),
        efficiency=asked.efficiency or EFFICIENCY,
        within=float(chosen.within),
        between=float(chosen.between),
        node=chosen.node,
        hop_within=chosen.hop_within,
        hop_between=chosen.hop_between,
        source=chosen.source,
    )


def time(ran: StepRun, ranks: int, chosen: Card, record: Cluster, prefetch: int) -> Time:
    """The bound of a step that was run."""
    least = bound(
        operations(ran.report, ran.groups), chosen, ranks,
        dtype=record.dtype, efficiency=record.efficiency, prefetch=prefetch,
    )  # fmt: skip
    return Time(
        compute=least.compute,
        bandwidth=least.bandwidth,
        latency=least.latency,
        serial=least.serial,
        overlapped=least.overlapped,
        binding=str(least.binding),
    )
