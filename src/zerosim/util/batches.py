"""Batches whose ranks and micro-batches have different numbers of rows, laid out for the schedule.

Owns that layout and the words of its errors. Must not know schemes, models or ledgers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zerosim.bands import Array
from zerosim.layers import MicroBatch
from zerosim.util.arguments import real

_MOST = 1e30  # a rank's weights are told in fp32, as one sum
Check = Callable[[Any, int], tuple[Array, Array]]


def micro_batches(
    batch: Sequence[Any], weights: Sequence[Any] | None, ranks: int, count: int, check: Check
) -> list[MicroBatch]:
    """``count`` micro-batches of a batch that has for each rank a pair (x, y), or a list of so many, or all of fewer.

    ``weights`` has for each rank a number, or a list of one for each micro-batch; without them rows count.
    ``check`` refuses a rank's pair that the model cannot take. ValueError or TypeError for what does not fit.
    """
    if not isinstance(batch, Sequence) or len(batch) != ranks:
        raise ValueError(f"step(batch): needs one entry per rank, {ranks} in all; got {_size(batch)}.")
    if isinstance(batch[0], list) and 0 < len(batch[0]) < count:  # the last window of an epoch
        count = len(batch[0])
    by_rank = [_listed(each, count, f"step(batch): rank {rank}", "pairs") for rank, each in enumerate(batch)]
    weighed = None
    if weights is not None:
        if _size(weights) != ranks:
            raise ValueError(f"step(weights): needs one entry per rank, {ranks} in all; got {_size(weights)}.")
        weighed = [_listed(each, count, f"step(weights): rank {rank}", "numbers") for rank, each in enumerate(weights)]
    return [
        _laid_out([pairs[index] for pairs in by_rank], weighed and [each[index] for each in weighed], check)
        for index in range(count)
    ]


def _listed(entry: Any, count: int, where: str, what: str) -> list[Any]:
    entries = list(entry) if isinstance(entry, list) else [entry]
    if len(entries) != count:
        raise ValueError(f"{where} has {len(entries)} {what}; every rank needs {count}, one for each micro-batch.")
    return entries


def _laid_out(pairs: Sequence[Any], weights: Sequence[Any] | None, check: Check) -> MicroBatch:
    for rank, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"step(batch): rank {rank} needs a pair (x, y); got {type(pair).__name__}.")
        if not _rows(pair[0]) and _rows(pair[1]):
            raise ValueError(
                f"step(batch): x of rank {rank} has no rows and y has {_rows(pair[1])}, which would not be looked at. "
                f"Pass as many rows of both."
            )
    rows = [_rows(x) for x, _ in pairs]
    checked = [check([pair], 1) if count else None for pair, count in zip(pairs, rows, strict=True)]
    like: Sequence[Array] = next((each for each in checked if each is not None), ())
    if not like:  # nobody has a row in this one
        like = [np.zeros((1, 0, *each.shape[1:]), each.dtype) for each in pairs[0]]
    x, y = (np.zeros((len(pairs), max(rows), *each.shape[2:]), each.dtype) for each in like)
    for rank, each in enumerate(checked):
        if each is not None:
            x[rank, : rows[rank]], y[rank, : rows[rank]] = each[0][0], each[1][0]
    weighed = np.array([real(each) for each in (rows if weights is None else weights)])
    if not ((weighed >= 0).all() and (weighed <= _MOST).all()):
        raise ValueError(
            f"step(weights): weights are finite and not negative, {_MOST} at most; got {weighed.tolist()}."
        )
    return MicroBatch(x, y, rows, weighed)


def _rows(x: Any) -> int:
    """The rows of one array, or of the first of several."""
    first = next(iter(x.values()), ()) if isinstance(x, Mapping) else x[0] if isinstance(x, tuple) else x
    return len(first)


def _size(batch: object) -> object:
    return len(batch) if isinstance(batch, Sequence | np.ndarray) else type(batch).__name__
