"""What gloo makes of a framework's buffers: the order in which it sums them, and what it sends for them.

Owns gloo's chunk boundaries, the averages that DDP and FSDP2 make of local gradients (put
together from ``comm``'s own ring), and the bytes and messages of each collective on a buffer of
any length. Must not know torch. Gradients are arrays, one per parameter, in the module's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerosim.bands import FP32, Array, Band, DType
from zerosim.comm import Comm
from zerosim.ledger import Ledger
from zerosim.ranks import Ranks, Workspace
from zerosim.real_ranks.meter import MAX_SEGMENT, Moved, total
from zerosim.records.frameworks import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Collective
from zerosim.worlds.local import LocalRing

Grads = Sequence[Array]


# -- the order of summation


def chunk(elements: int, itemsize: int, ranks: int) -> int:
    """Elements of one of the ``ranks`` chunks into which gloo's all-reduce cuts a buffer; the last may be short."""
    count, segment = _segments(elements, itemsize, ranks)
    return count // ranks * segment


def _segments(elements: int, itemsize: int, ranks: int) -> tuple[int, int]:
    """How many segments gloo cuts a buffer into, a multiple of ``ranks``, and the elements of each but the last."""
    wanted = max(-(-elements * itemsize // MAX_SEGMENT), 2 * ranks)
    count = -(-wanted // ranks) * ranks
    return count, -(-elements // count)


def ring_sum(summands: Array) -> Array:
    """The sum [n] of ``summands`` [N, n], as gloo's all-reduce rounds it: this package's ring on gloo's chunks.

    Rounded to the summands' own dtype at every hop.
    """
    ranks, elements = summands.shape
    length = chunk(elements, summands.dtype.itemsize, ranks)
    buffer = np.zeros((ranks, ranks * length), summands.dtype)
    buffer[:, :elements] = summands
    comm = _comm(ranks, summands.dtype)
    comm.all_reduce(buffer, elements, scale=1.0, band=Band.GRADS, unit="")
    return buffer[0, :elements]


def _comm(ranks: int, wire: DType) -> Comm:
    """The ring of one process, with a ledger that nobody reads."""
    ring, ledger = LocalRing(ranks), Ledger(ranks)
    return Comm(ring, wire, Workspace(Ranks(ring.ids, {Band.BLOCKS: wire}, ledger, ring.empty), Band.BLOCKS), ledger)


def ddp_average(local: Sequence[Grads], buckets: Sequence[Sequence[int]], wire: DType) -> list[Array]:
    """The gradients that DistributedDataParallel gives every rank, from each rank's local ones.

    ``buckets`` lists the parameters of each bucket, in their order in it. Each rank divides
    first (multiplies by the reciprocal in fp32, but divides in the ``wire``'s dtype where a hook
    compresses to that), and the buckets are all-reduced one by one.
    """
    ranks = len(local)
    average: list[Array] = [np.empty(0)] * len(local[0])
    for bucket in buckets:
        flat = np.stack([np.concatenate([grads[index].reshape(-1) for index in bucket]) for grads in local])
        mine = flat * FP32.type(1 / ranks) if wire == FP32 else flat.astype(wire) / wire.type(ranks)
        summed = ring_sum(mine).astype(FP32)
        start = 0
        for index in bucket:
            shape = local[0][index].shape
            stop = start + local[0][index].size
            average[index] = summed[start:stop].reshape(shape)
            start = stop
    return average


def fsdp_average(local: Sequence[Grads], groups: Sequence[Sequence[int]], wire: DType) -> list[Array]:
    """The gradients that ``fully_shard`` gives, put together from the ranks' shards, from each rank's local ones.

    ``groups`` lists the parameters that are sharded together. Every parameter is cut along its
    first axis into N chunks of equally many rows, padded with zero rows; a group travels as one
    flat buffer [rank][parameter] in the ``wire``'s dtype, is summed, and then divided by N.
    """
    ranks = len(local)
    average: list[Array] = [np.empty(0)] * len(local[0])
    for group in groups:
        shapes = [_padded(local[0][index].shape, ranks) for index in group]
        flat = np.stack([_by_rank([grads[index] for index in group], shapes, ranks, wire) for grads in local])
        summed = (ring_sum(flat) / wire.type(ranks)).astype(FP32)
        shards = summed.reshape(ranks, -1)
        start = 0
        for index, (rows, *rest) in zip(group, shapes, strict=True):
            stop = start + rows // ranks * int(np.prod(rest))
            whole = shards[:, start:stop].reshape(rows, *rest)
            average[index] = whole[: len(local[0][index])]
            start = stop
    return average


def _padded(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The shape with its first side rounded up to a multiple of N."""
    return -(-shape[0] // ranks) * ranks, *shape[1:]


def _by_rank(grads: Grads, shapes: Sequence[tuple[int, ...]], ranks: int, wire: DType) -> Array:
    """One flat buffer: for each rank its chunk of rows of every parameter, one after another."""
    columns = []
    for grad, shape in zip(grads, shapes, strict=True):
        whole = np.zeros(shape, wire)
        whole[: len(grad)] = grad
        columns.append(whole.reshape(ranks, -1))
    return np.concatenate(columns, axis=1).reshape(-1)


# -- bytes and messages


def textbook(asked: Collective, rank: int, ranks: int) -> int:
    """Bytes that a rank must send for it: the ring's (Patarasuk and Yuan 2009), a broadcast's along its tree."""
    if asked.name == BROADCAST:
        return _broadcast(asked, rank, ranks).sent
    hops = (ranks - 1) * (2 if asked.name == ALL_REDUCE else 1)
    return hops * asked.nbytes // ranks


def moved(asked: Collective, rank: int, ranks: int) -> Moved | None:
    """What gloo moves for it on ``rank``, payload and messages; None if how it does so is not known.

    A reduce-scatter is an all-reduce of which a slice is kept. What lies beyond the buffer is
    not sent.
    """
    if asked.name in (ALL_REDUCE, REDUCE_SCATTER):
        chunks = _chunks(asked, ranks)
        # Scattering, a rank hands over all chunks but its own; gathering, all but that of the rank below.
        # Its neighbour above does the same, and that is what it receives.
        return total((_hops(chunks, rank, rank + 1), _hops(chunks, rank - 1, rank)))
    if asked.name == ALL_GATHER:
        own = asked.nbytes // ranks
        return _hops([[half for half in (own // 2, own - own // 2) if half]] * ranks, rank - 1, rank)
    return _broadcast(asked, rank, ranks) if asked.name == BROADCAST else None


def _chunks(asked: Collective, ranks: int) -> list[list[int]]:
    """For each chunk of an all-reduce the bytes of its segments, those beyond the buffer left out."""
    count, segment = _segments(asked.elements, asked.itemsize, ranks)
    lengths = [min(segment, asked.elements - index * segment) * asked.itemsize for index in range(count)]
    each = count // ranks
    return [[length for length in lengths[c * each : (c + 1) * each] if length > 0] for c in range(ranks)]


def _hops(chunks: Sequence[Sequence[int]], kept: int, missed: int) -> Moved:
    """A turn of the ring: all chunks but ``kept`` are sent, all but ``missed`` received, a message per segment."""
    out = [segment for c, chunk in enumerate(chunks) if (c - kept) % len(chunks) for segment in chunk]
    into = [segment for c, chunk in enumerate(chunks) if (c - missed) % len(chunks) for segment in chunk]
    return Moved(sum(out), sum(into), len(out), len(into))


def _broadcast(asked: Collective, rank: int, ranks: int) -> Moved:
    """Down a binomial tree: the v-th rank from the root gets it from the one without v's highest bit."""
    v = (rank - asked.root) % ranks
    below = sum(1 for power in range(ranks.bit_length()) if v < 1 << power and v + (1 << power) < ranks)
    return Moved(below * asked.nbytes, asked.nbytes if v else 0, below, 1 if v else 0)
