"""The compiled kernels: which loop takes which arrays, and on how many threads.

Owns what lies between a call on NumPy's arrays and ``loops.py``: dtypes, layouts, how much is done at a time.
What no loop takes is left to the formula. Must not know rings, bands or ledgers. numba is imported at the
first call that is worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from zerosim.bands import Array, DType
from zerosim.kernels.operations import Handed, Kernels
from zerosim.util import casts

# As what the loops are passed a dtype's arrays.
PASSED: dict[DType, DType] = {
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float16): np.dtype(np.uint16),
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.int16),
}
WORTH_LOADING = 1 << 14  # elements: below, numba takes longer to import than it will save for some hundred steps
WORTH_A_THREAD = 1 << 17  # elements: a thread takes 20 µs or so to begin
AT_A_TIME = 2048  # elements of partial sums that go round the ring together: two blocks of them stay in the cache
TOGETHER = 16  # chunks at most: each hop reads a line of each from another rank's memory


class Compiled:
    """The operations of ``Kernels`` on ``threads`` threads, each of which does some of the ranks.

    Arrays smaller than ``least`` are left to the formulas until numba is loaded for a larger one.
    """

    def __init__(self, threads: int, least: int) -> None:
        self._threads, self._least = threads, least
        self._module: ModuleType | None = None
        self._found: dict[Any, Callable[..., None] | None] = {}

    def kernels(self) -> Kernels:
        """The record that is handed on."""
        return Kernels("numba", self.convert, self.adam, self.worth, self.ring_sum, self.ring_copies)

    def worth(self, size: int) -> bool:
        """Whether numba is loaded, or worth loading for an array of so many elements."""
        return self._module is not None or size >= self._least

    # -- operations

    def convert(self, source: Array, target: Array) -> None:
        """As ``casts.convert``."""
        if type(source) is np.ndarray is type(target) and source.shape == target.shape:
            loop = self._loop("convert", source.size, source.dtype, target.dtype)
            if loop is not None and (views := _passed(source, target)):
                self._each(views[0].shape, loop, views)
                return
        casts.convert(source, target)

    def adam(
        self, params: Array, grads: Array, exp_avg: Array, exp_avg_sq: Array,
        beta1: float, beta2: float, eps: float, step_size: float, root_correction: float, decay: float,
    ) -> int | None:  # fmt: skip
        """As in ``Kernels``."""
        if type(params) is not np.ndarray:
            return None
        loop = self._loop("adam", params.size, grads.dtype)
        if loop is None or not (views := _passed(params, grads, exp_avg, exp_avg_sq)):
            return None
        constants = (1 - beta1, beta2, 1 - beta2, root_correction, eps, -step_size, 1 - decay)
        self._each(views[0].shape, loop, views, *map(np.float32, constants))  # as NumPy has a number beside an array
        return 13  # and the decay's, which is none of the formula's where there is none

    def ring_sum(
        self, chunks: Array, blocks: tuple[Array, Array], padding: npt.NDArray[np.int64], handed: Handed
    ) -> Array | None:
        """As in ``Kernels``."""
        even, odd = blocks
        n, length = chunks.shape[2:]
        loop = self._loop("ring_sum", chunks.size, chunks.dtype, even.dtype)
        if loop is None or not length:
            return None
        x, a, b = (array.view(PASSED[array.dtype]) for array in (chunks, even, odd))
        together = min(TOGETHER, max(1, AT_A_TIME // length))
        self._ranges(n, chunks.size, handed, lambda first, last, counts: loop(
            x, a, b, padding, counts, first, last, together, min(length, AT_A_TIME)
        ))  # fmt: skip
        return even if n % 2 else odd

    def ring_copies(
        self, block: Array, chunks: Array, itemsize: int, padding: npt.NDArray[np.int64], handed: Handed
    ) -> bool:
        """As in ``Kernels``."""
        loop = self._loop("ring_copies", chunks.size, chunks.dtype)
        if loop is None:
            return False
        b, x = (array.view(PASSED[array.dtype]) for array in (block, chunks))
        self._ranges(chunks.shape[1], chunks.size, handed, lambda first, last, counts: loop(
            b, x, itemsize, padding, counts, first, last
        ))  # fmt: skip
        return True

    # -- loops and threads

    def _loop(self, name: str, size: int, *dtypes: DType) -> Callable[..., None] | None:
        """The loop of that name for arrays of these dtypes; None where the formula has to do."""
        key = name, dtypes
        if key not in self._found:
            if not self.worth(size):
                return None
            self._found[key] = self._made(name, dtypes)
        return self._found[key]

    def _made(self, name: str, dtypes: tuple[DType, ...]) -> Callable[..., None] | None:
        from zerosim.kernels import loops

        self._module = loops
        return loops.find(name, tuple(PASSED.get(dtype) for dtype in dtypes))

    def _each(self, shape: tuple[int, ...], loop: Callable[..., None], views: list[Array], *more: Any) -> None:
        """Call ``loop`` on views [a, b, n], each thread on some of the longer of the first two axes."""
        if self._threads == 1 or shape[0] * shape[1] * shape[2] < WORTH_A_THREAD:
            loop(*views, *more)
            return
        axis = int(shape[1] > shape[0])
        parts = _parts(shape[axis], self._threads)
        cut = [[view[part] if axis == 0 else view[:, part] for view in views] for part in parts]
        list(self._pool.map(lambda some: loop(*some, *more), cut))

    def _ranges(self, n: int, size: int, handed: Handed, call: Callable[[int, int, Any], None]) -> None:
        """``call`` on ranges of 0 to ``n``, each of which counts for itself."""
        if self._threads == 1 or size < WORTH_A_THREAD:
            call(0, n, handed.counts)
            return
        parts = _parts(n, self._threads)
        counts = [np.zeros_like(handed.counts) for _ in parts]
        list(self._pool.map(lambda part, mine: call(part.start, part.stop, mine), parts, counts))
        handed.counts += sum(counts)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "zerosim-kernels")


def _parts(length: int, count: int) -> list[slice]:
    """``length`` cut into so many slices, or fewer, of about equal length."""
    ends = [length * part // count for part in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(ends) if first < last]


def _passed(*arrays: Array) -> list[Array] | None:
    """The arrays as the loops take them, [a, b, n] and of a type that numba knows; None if they do not lie so."""
    views = []
    for array in arrays:
        if not (1 <= array.ndim <= 3 and array.strides[-1] == array.itemsize):
            return None
        passed = PASSED[array.dtype]
        view = array if passed is array.dtype else array.view(passed)
        views.append(view if array.ndim == 3 else view[None] if array.ndim == 2 else view[None, None])
    return views
