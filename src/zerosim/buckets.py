"""The flat layout: which parameters share a buffer, how it is padded, and the states that go with it.

Owns padding and chunks. Must not know communication or the schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from zerosim.bands import Array, Band, Place
from zerosim.counts import Counts
from zerosim.layers import Chain, Group, Layer, Model, Role
from zerosim.options import Options, Padding
from zerosim.ranks import Ranks
from zerosim.stages import Stage
from zerosim.util.casts import convert

COPIES = (Band.PARAMS, Band.MASTER)  # states that start as the parameters; the rest start at zero


@dataclass
class Bucket:
    """One flat buffer's worth of parameters: a group, padded with zeros to N equal chunks, and its states.

    A state is [R, padded] where every rank holds all of it, and shorter where it is sharded: ``pieces`` has,
    for each rank here, which of the pieces of that length it owns [R]. ``updates`` counts those of each parameter.
    """

    group: Group
    padded: int
    states: dict[Band, Array]
    pieces: dict[Band, Counts]
    updates: list[int]

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def size(self) -> int:
        """P, the logical number of elements."""
        return self.group.size

    @property
    def trainable(self) -> bool:
        return self.group.role is Role.TRAINABLE

    def padding(self, rows: int) -> Counts:
        """Bytes of padding that each rank here holds: of every state, what is beyond the layer [R]."""
        held = np.zeros(rows, np.int64)
        for band, pieces in self.pieces.items() if self.padded > self.size else ():
            length, itemsize = self.states[band].shape[1], self.states[band].dtype.itemsize
            held += np.clip((pieces + 1) * length - self.size, 0, length) * itemsize
        return held


@dataclass(frozen=True)
class Sharding:
    """A model under a row on N ranks: its layers, the bucket of each group, and the memory that they are held in."""

    row: Stage
    layers: Sequence[Layer]
    buckets: Mapping[Group, Bucket]
    ranks: Ranks
    world_size: int
    options: Options

    @property
    def trainable(self) -> list[Bucket]:
        """The buckets that have gradients, in the order of the model."""
        return [bucket for bucket in self.buckets.values() if bucket.trainable]


def _to_multiples(group: Group, multiple: int) -> int:
    return -(-group.size // multiple) * multiple


@lru_cache(maxsize=4096)  # the layers of a model are alike
def _by_rows(shapes: tuple[tuple[int, ...], ...], ranks: int) -> int:
    return sum(-(-(shape or (1,))[0] // ranks) * ranks * prod(shape[1:]) for shape in shapes)  # a scalar is one row


# How many elements a group of parameters takes up on N ranks.
PADDINGS: Mapping[Padding, Callable[[Group, int], int]] = {
    "N": _to_multiples,
    "each": lambda group, ranks: sum(-(-prod(shape) // ranks) * ranks for shape in group.shapes),  # DeepSpeed's stage 3
    "2N": lambda group, ranks: _to_multiples(group, 2 * ranks),  # DeepSpeed's alignment for NCCL
    # FSDP2's: each parameter is cut along its first axis. What that adds lies at the end here, not in between.
    "rows": lambda group, ranks: _by_rows(group.shapes, ranks),
}


def split(model: Model, bucket: str | int) -> list[Layer]:
    """The layers that are gathered and reduced as a whole: the model's, all in one, or some up to a size.

    An integer joins consecutive layers while they have at most so many parameters together.
    """
    layers = list(model.layers)
    if bucket == "layer":
        return layers
    if bucket == "model":
        return [Chain(layers, name="model")]
    joined: list[list[Layer]] = []
    for layer in layers:
        if joined and sum(_size(each) for each in [*joined[-1], layer]) <= int(bucket):
            joined[-1].append(layer)
        else:
            joined.append([layer])
    return [some[0] if len(some) == 1 else Chain(some, name=f"{some[0].name} to {some[-1].name}") for some in joined]


def _size(layer: Layer) -> int:
    return sum(group.size for group in layer.groups if group.role is not Role.BUFFER)


def distinct(layers: Sequence[Layer]) -> list[Group]:
    """The groups of all layers in order of first appearance: tied ones once."""
    return list(dict.fromkeys(group for layer in layers for group in layer.groups))


def shared(layers: Sequence[Layer]) -> list[Group]:
    """The groups that several layers list (tied weights), or one several times, in order of first appearance."""
    listed = Counter(group for layer in layers for group in layer.groups)
    return [group for group, times in listed.items() if times > 1]


def build(
    model: Model, groups: Sequence[Group], options: Options, world_size: int, row: Stage, ranks: Ranks
) -> Iterator[Bucket]:
    """A bucket per group, its states allocated and filled: parameters from the model, the rest with zeros.

    Of the states that ``row`` shards a rank holds only the piece that it owns.
    """
    initial, start = model.initial(), 0
    cuts = options.node if row.two_axes and options.node else world_size
    owned = {
        band: [row.piece(band, rank, world_size, options.node) for rank in ranks.ids]
        for band in (Band.PARAMS, *options.states)
    }
    for group in groups:
        if group.role is Role.BUFFER:
            buffer = ranks.hold(Band.BUFFERS, (group.size,), group.name, group.dtype)
            buffer[...] = model.buffer(group)
            yield Bucket(group, group.size, {Band.BUFFERS: buffer}, {}, [])
            continue
        if group.size == 0:
            raise ValueError(f"Scheme(model): {group.name} has no elements: nothing to shard. Leave it out.")
        padded = -(-PADDINGS[options.padding](group, cuts) // world_size) * world_size
        whole, start = initial[start : start + group.size], start + group.size
        if padded > group.size:
            own, whole = whole, np.empty_like(initial, shape=(padded,))
            whole[: group.size], whole[group.size :] = own, 0
        bucket = Bucket(group, padded, {}, {}, [0] * len(group.shapes))
        for band in options.states if group.role is Role.TRAINABLE else (Band.PARAMS,):
            length = padded // owned[band][0][1]
            place = Place.HOST if row.offloads(band) else Place.CARD
            bucket.states[band] = state = ranks.hold(band, (length,), group.name, group.dtype, place)
            bucket.pieces[band] = np.array([piece for piece, _ in owned[band]])
            if band in COPIES:
                for mine, (piece, _) in zip(state, owned[band], strict=True):
                    convert(whole[piece * length : (piece + 1) * length], mine)
            else:
                state[...] = 0
        yield bucket
