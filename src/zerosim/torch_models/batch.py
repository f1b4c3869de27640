"""The rules for a batch that a torch module is trained on, and the words of their errors.

Must not know units, stages or ledgers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped

from zerosim.bands import FP32, Array
from zerosim.torch_models.units import numpy_dtype


def check_batch(
    batch: Sequence[tuple[Any, Any]], ranks: int, example: torch.Tensor, compute: Any, vocabulary: int | None
) -> tuple[Shaped[Array, "R B ..."], Shaped[Array, "R B ..."]]:
    """The batch as x [ranks, B, ...] and target [ranks, B, ...], once it is known to be sound.

    One (x, target) of NumPy arrays per rank. x is like ``example`` but for its rows, integers
    (of 0 to ``vocabulary``, if there is one) in its dtype or finite numbers in ``compute``.
    """
    if not isinstance(batch, Sequence) or len(batch) != ranks:
        got = len(batch) if isinstance(batch, Sequence) else type(batch).__name__
        raise ValueError(f"step(batch): needs one (x, target) pair per rank, {ranks} in all; got {got}.")
    for rank, pair in enumerate(batch):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"step(batch): rank {rank} needs a pair (x, target); got {type(pair).__name__}.")
        for what, array in zip(("x", "target"), pair, strict=True):
            _check(f"step(batch): {what} of rank {rank}", array, batch[0][what == "target"], batch[0][0])
    x, target = (np.stack([pair[index] for pair in batch]) for index in range(2))
    shape, whole = tuple(example.shape[1:]), not example.is_floating_point()
    if x.shape[2:] != shape or np.issubdtype(x.dtype, np.integer) != whole:
        raise ValueError(
            f"step(batch): x must be {'integers' if whole else 'float32'} of shape [B, {', '.join(map(str, shape))}], "
            f"like the example; got {x.dtype} {list(x.shape[1:])}."
        )
    if vocabulary is not None and not 0 <= x.min() <= x.max() < vocabulary:
        raise ValueError(f"step(batch): tokens must be of 0 to {vocabulary - 1}; got {x.min()} to {x.max()}.")
    x = x.astype(numpy_dtype(example.dtype if whole else compute), copy=False)
    return x, target.astype(np.int64, copy=False) if target.dtype.kind in "iu" else target


def _check(what: str, array: Any, first: Any, x: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what} must be a NumPy array; got {type(array).__name__}.")
    if array.dtype.kind not in "iu" and array.dtype != FP32:
        raise TypeError(f"{what} must be integers or float32; got {array.dtype}. Use astype.")
    if array.ndim < 1 or array.size == 0 or array.shape[0] != x.shape[0]:
        raise ValueError(f"{what} needs as many rows as x of rank 0, one or more; got shape {list(array.shape)}.")
    if array.shape != first.shape or array.dtype != first.dtype:
        raise ValueError(
            f"{what} must be like that of rank 0, {first.dtype} {list(first.shape)}; got {array.dtype} "
            f"{list(array.shape)}."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(
            f"{what} must be finite; it has {np.count_nonzero(~np.isfinite(array))} elements that are not."
        )
