"""The flat layout: which parameters share a buffer, how it is padded, and the states that go with it.

Owns padding and chunks. Must not know communication or the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from zerosim.bands import Array, Band, Precision
from zerosim.casts import convert
from zerosim.model import Layer
from zerosim.ranks import Ranks


@dataclass
class Bucket:
    """One flat buffer's worth of parameters: a layer, padded with zeros to N equal chunks, and its states.

    A state is [R, padded] where every rank holds all of it and [R, chunk] where it is sharded.
    """

    layer: Layer
    chunk: int
    padded: int
    states: dict[Band, Array]

    def padding(self, ids: Sequence[int]) -> Array:
        """Bytes of padding that each rank of ``ids`` holds: of every state, what is beyond the layer [R]."""
        held = np.zeros(len(ids), np.int64)
        if self.padded == self.layer.size:
            return held
        for state in self.states.values():
            start = np.asarray(ids) * self.chunk if state.shape[1] < self.padded else 0
            beyond = start + state.shape[1] - self.layer.size
            held += np.clip(beyond, 0, state.shape[1]) * state.dtype.itemsize
        return held


def build(
    layers: Sequence[Layer],
    initial: Float32[Array, "P"],
    world_size: int,
    precision: Precision,
    shards: Callable[[Band], bool],
    ranks: Ranks,
) -> list[Bucket]:
    """A bucket per layer, its states allocated and filled: parameters from ``initial``, the rest with zeros.

    ``shards`` says of which states a rank holds only the chunk that it owns.
    """
    start, buckets = 0, []
    for layer in layers:
        chunk = -(-layer.size // world_size)
        padded = chunk * world_size
        whole = np.zeros(padded, np.float32)
        whole[: layer.size] = initial[start : start + layer.size]
        start += layer.size
        states = {}
        for band in precision.states:
            length = chunk if shards(band) else padded
            states[band] = state = ranks.hold(band, (length,), layer.name)
            if band in (Band.PARAMS, Band.MASTER):
                for row, rank in enumerate(ranks.ids):
                    convert(whole if length == padded else whole[rank * chunk : (rank + 1) * chunk], state[row])
            else:
                state[...] = 0
        buckets.append(Bucket(layer, chunk, padded, states))
    return buckets
