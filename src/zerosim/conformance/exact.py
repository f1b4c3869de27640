"""The averaged gradient as the simulator's ring makes it, to the bit: for layouts that are declared to be its own.

Owns the units' buffers and the run of the package's ring over them. Must not know what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerosim.bands import FP32, PRECISIONS, Array, Band
from zerosim.comm import Comm
from zerosim.conformance.layout import Layout
from zerosim.conformance.local_gradients import Local
from zerosim.ledger import Ledger
from zerosim.ranks import Ranks, Workspace
from zerosim.records.conformance import Recipe
from zerosim.stages import Stage
from zerosim.util.casts import convert
from zerosim.worlds.local import LocalRing


def exact_average(layout: Layout, local: Sequence[Local], recipe: Recipe, row: Stage) -> Array:
    """The averaged gradient [P] of the ranks' own, each unit a flat buffer padded to N chunks, in fp64."""
    ranks = len(local)
    ring, ledger = LocalRing(ranks), Ledger(ranks)
    blocks: Any = Workspace(Ranks(ring.ids, {Band.BLOCKS: FP32}, ledger, ring.empty), Band.BLOCKS)
    comm = Comm(ring, FP32, blocks, ledger)
    precision = PRECISIONS[recipe.precision]
    dtype = precision.dtypes(FP32)[Band.GRADS]
    scale = 1 / (ranks * recipe.accumulate)
    result = np.zeros(layout.size)
    parts = [each.parts for each in local]
    for unit in dict.fromkeys(each.unit for each in layout.parameters if each.trainable):
        where = np.concatenate(
            [np.arange(span.start, span.stop) for each, span in layout.spans() if each.unit == unit and each.trainable]
        )
        padded = -(-len(where) // ranks) * ranks
        micro = []
        for number in range(recipe.accumulate):
            buffer = np.zeros((ranks, padded), dtype)
            buffer[:, : len(where)] = np.stack([each[number][where] for each in parts])
            micro.append(buffer)
        if not row.grads:  # summed on each rank first, and reduced once
            for more in micro[1:]:
                np.add(micro[0], more, out=micro[0], dtype=dtype)
            micro = micro[:1]
        total: Array | None = None
        for buffer in micro:
            comm.all_reduce(buffer, len(where), scale=scale, band=Band.GRADS, unit=unit)
            if total is None:
                total = buffer[0].copy()
            else:
                np.add(total, buffer[0], out=total, dtype=dtype)
        assert total is not None
        register = np.empty(padded, FP32)
        convert(total, register)
        result[where] = register[: len(where)]
    return result
