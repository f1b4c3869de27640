"""The operations that may be compiled, and what they are told.

Owns the record ``Kernels``, which is handed on to whatever computes. In NumPy an operation is a formula, which
arrays without values go through as well: casts are in ``util/casts.py``, the ring's hops in ``comm.py`` and Adam in
``optimizer.py``, where each is read. A compiled twin gives the same bits. Must not know what a step is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from zerosim.bands import Array
from zerosim.util import casts

Choice = Literal["auto", "numba", "numpy"]


class Handed:
    """What the hops of rings handed on, counted at each of them: a row for every rank, as [ring, member].

    ``counts`` [ring, member, 4] has the blocks that each rank handed on, their bytes, the bytes that it was
    handed, and the part of what it handed on that is padding.
    """

    def __init__(self, rings: int, members: int) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros((rings, members, 4), np.int64)


@dataclass(frozen=True)
class Kernels:
    """Who computes: a name, and a function for each operation, None where there is none beside the formula.

    All of them leave what they cannot take, by saying None or False, to the formula.

    * ``convert(source, target)``: a cast, as ``casts.convert``.
    * ``adam(params, grads, exp_avg, exp_avg_sq, beta1, beta2, eps, step_size, root_correction, decay)``: Adam on
      [..., n], which gives the operations that it did for each element.
    * ``rings(size)``: whether the two that follow are there for a buffer of so many elements.
    * ``ring_sum(chunks, blocks, padding, handed)``: all hops of a reduce-scatter whose ranks are all here, from
      ``chunks`` [ring, member, chunk, C]. ``blocks`` are the two in flight, each [ring, chunk, C]; the sum ends in
      the one that is returned. ``padding`` has the bytes of it in each chunk [ring, chunk], and ``handed`` is told of
      each block as it is handed on.
    * ``ring_copies(block, chunks, itemsize, padding, handed)``: all hops of an all-gather whose ranks are all here:
      ``block`` [ring, chunk, C], contiguous, into ``chunks`` [ring, member, chunk, C], whose chunks of a rank are so,
      all but the chunks that the ranks own.
      ``itemsize`` is that of the dtype that blocks are sent in.
    """

    name: str
    convert: Callable[[Array, Array], None]
    adam: Callable[..., int | None] | None = None
    rings: Callable[[int], bool] = lambda size: False
    ring_sum: Callable[[Array, tuple[Array, Array], Array, Handed], Array | None] | None = None
    ring_copies: Callable[[Array, Array, int, Array, Handed], bool] | None = None


NUMPY = Kernels("numpy", casts.convert)
