"""Which row a framework behaves like: the one that holds as much, and of several the one that gathers as much.

Owns the choice. Must not know a framework, nor how bytes were counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from zerosim import theory
from zerosim.stages import DP, HSDP, ROWS, Over, Stage, ZeRO3
from zerosim.worlds.gloo import Op

JobUnder = Callable[[Stage], theory.Job]


def sharded(held: Mapping[str, float], job: JobUnder) -> dict[str, Over]:
    """Over whom each kind of state is sharded, given the bytes of it that a rank holds on average.

    That level of which the textbook's bytes are nearest, in ratio. What is not held at all is sharded over all.
    """
    levels = (
        {Over.NOBODY: DP, Over.GROUP: HSDP, Over.ALL: ZeRO3} if job(DP).node else {Over.NOBODY: DP, Over.ALL: ZeRO3}
    )
    textbook = {over: by_kind(theory.resident(job(row))) for over, row in levels.items()}
    return {
        what: min(levels, key=lambda over: abs(math.log(found / textbook[over][what]))) if found else Over.ALL
        for what, found in held.items()
    }


def row_of(over: Mapping[str, Over], sent: Mapping[str, int], job: JobUnder) -> Stage | None:
    """The row that shards so; None if none does.

    Rows that shard alike differ in how often they gather, and over whom. The share of all-gathers in what is
    ``sent``, bytes by collective, tells them apart, and padding hardly moves it. What a host would hold is on the
    card here, for the card is the host: rows that offload are none to choose from.
    """
    rows = [
        row
        for row in ROWS
        if all(getattr(row, what) == each for what, each in over.items())
        and not row.offload
        and (job(row).node or row.reshard_after_forward != "group")
    ]
    share = _gathered(sent)
    return min(rows, key=lambda row: abs(share - _gathered(traffic(job(row)))), default=None)


def by_kind(resident: theory.Bytes) -> dict[str, float]:
    """Bytes of what the schemes shard, by the name of the flag in their row."""
    params, grads = resident["params"], resident["grads"]
    return {"params": params, "grads": grads, "optimizer": sum(resident.values()) - params - grads}


def traffic(job: theory.Job) -> dict[str, int]:
    """Bytes that each rank sends in a step, by collective."""
    return {collective: sum(bands.values()) for collective, bands in theory.traffic(job).items()}


def _gathered(sent: Mapping[str, int]) -> float:
    """The share of all-gathers in what is sent."""
    return sent.get(Op.ALL_GATHER, 0) / max(sum(sent.values()), 1)
