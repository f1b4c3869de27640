"""The averages that DDP and FSDP2 make of local gradients on gloo, put together from the simulator's own ring.

Owns each framework's layout of the buffers that travel. Gradients are arrays, one per parameter, in the module's
order. Must not know torch, nor where the gradients came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerosim.bands import FP32, Array, Band, DType
from zerosim.comm import Comm
from zerosim.ledger import Ledger
from zerosim.ranks import Ranks, Workspace
from zerosim.worlds.gloo import chunk
from zerosim.worlds.local import LocalRing

Grads = Sequence[Array]


def ring_sum(summands: Array) -> Array:
    """The sum [n] of ``summands`` [N, n], as gloo's all-reduce rounds it: the simulator's ring on gloo's chunks.

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


def fsdp_average(
    local: Sequence[Grads], groups: Sequence[Sequence[int]], wire: DType, node: int | None = None
) -> list[Array]:
    """The gradients that ``fully_shard`` gives, put together from the ranks' shards, from each rank's local ones.

    ``groups`` lists the parameters that are sharded together. Every parameter is cut along its
    first axis into N chunks of equally many rows, padded with zero rows; a group travels as one
    flat buffer [rank][parameter] in the ``wire``'s dtype, is summed, and then divided by N.

    On a 2-D mesh of ``node`` ranks a row, S, that is done in every row, with S for N. Each shard of the
    averages is then summed over the D rows, and divided by D.
    """
    ranks = node or len(local)
    average: list[Array] = [np.empty(0)] * len(local[0])
    for group in groups:
        shapes = [_padded(local[0][index].shape, ranks) for index in group]
        flat = np.stack([_by_rank([grads[index] for index in group], shapes, ranks, wire) for grads in local])
        replicas = [ring_sum(each) / wire.type(ranks) for each in flat.reshape(-1, ranks, flat.shape[1])]
        shards = _over_replicas(np.stack(replicas).reshape(len(replicas), ranks, -1)).astype(FP32)
        start = 0
        for index, (rows, *rest) in zip(group, shapes, strict=True):
            stop = start + rows // ranks * int(np.prod(rest))
            whole = shards[:, start:stop].reshape(rows, *rest)
            average[index] = whole[: len(local[0][index])]
            start = stop
    return average


def _over_replicas(shards: Array) -> Array:
    """The average [S, n] of each of S shards over D replicas, from what these have [D, S, n]."""
    average: Array = shards[0]
    if (replicas := len(shards)) > 1:
        average = np.stack([ring_sum(shards[:, shard]) for shard in range(shards.shape[1])])
        average /= shards.dtype.type(replicas)
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
