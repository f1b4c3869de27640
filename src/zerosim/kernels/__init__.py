"""The few whole-array operations that a step is made of, for those who may compile them.

Owns the record of them, ``Kernels``, and the choice. In NumPy an operation is a formula, which arrays without
values go through as well: casts are in ``util/casts.py``, the ring's hops in ``comm.py`` and Adam in
``optimizer.py``, where each is read. Its twin, compiled by numba (extra ``fast``), gives the same bits and is
used where numba is installed, unless the option ``kernels`` or the environment's ``ZEROSIM_KERNELS`` says
``numpy``. Must not know what a step is, nor import numba: that happens when there is something to compute.

numba compiles an operation when it is first used on some dtypes, and keeps it on disk: in ``__pycache__``
beside these files or, where that cannot be written, in the user's own cache folder, or where ``NUMBA_CACHE_DIR``
says. Where nothing can be written every process compiles anew, which takes it a few seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from zerosim.bands import Array
from zerosim.util import casts

Choice = Literal["auto", "numba", "numpy"]

SWITCH = "ZEROSIM_KERNELS"  # the environment's variable; an option that is not "auto" goes before it


class Handed:
    """What the hops of a ring handed on, counted at each of them: a row for every rank, as [ring, member]."""

    def __init__(self, rings: int, members: int) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros((rings, members, 4), np.int64)

    @property
    def messages(self) -> npt.NDArray[np.int64]:
        """Blocks that each rank handed on."""
        return self.counts[..., 0]

    @property
    def sent(self) -> npt.NDArray[np.int64]:
        """Their bytes."""
        return self.counts[..., 1]

    @property
    def received(self) -> npt.NDArray[np.int64]:
        """Bytes of the blocks that each rank was handed."""
        return self.counts[..., 2]

    @property
    def padding(self) -> npt.NDArray[np.int64]:
        """The part of what each rank sent that is padding."""
        return self.counts[..., 3]


@runtime_checkable
class AdamKernel(Protocol):
    """Adam on [..., n]: parameters and both moments fp32, gradients of any dtype, the constants Python's.

    Gives the operations done for each element, or None for arrays that it does not take.
    """

    def __call__(
        self, params: Array, grads: Array, exp_avg: Array, exp_avg_sq: Array, *,
        betas: tuple[float, float], eps: float, step_size: float, root_correction: float,
    ) -> int | None: ...  # fmt: skip


@runtime_checkable
class RingSum(Protocol):
    """All hops of a reduce-scatter, whose ranks are all here, from ``chunks`` [ring, rank, chunk, C].

    ``blocks`` are the two in flight, each [ring, chunk, C]; the sum ends in the one that is returned. ``padding``
    has the bytes of it in each chunk [ring, chunk], and ``handed`` is told of each block as it is handed on.
    """

    def __call__(
        self, chunks: Array, blocks: tuple[Array, Array], padding: npt.NDArray[np.int64], handed: Handed
    ) -> Array | None: ...


@runtime_checkable
class RingCopies(Protocol):
    """All hops of an all-gather, whose ranks are all here: ``block`` [ring, chunk, C] into ``chunks``
    [ring, rank, chunk, C], all but the chunks that the ranks own. The rest is as in ``RingSum``; ``itemsize`` is
    that of the dtype in which blocks are sent."""

    def __call__(
        self, block: Array, chunks: Array, itemsize: int, padding: npt.NDArray[np.int64], handed: Handed
    ) -> bool: ...


@dataclass(frozen=True)
class Kernels:
    """Who computes: a name, and a function for each operation, None where there is no other than the formula."""

    name: str
    convert: Callable[[Array, Array], None]
    adam: AdamKernel | None = None
    ring_sum: RingSum | None = None
    ring_copies: RingCopies | None = None


NUMPY = Kernels("numpy", casts.convert)


def choose(choice: Choice = "auto", threads: int = 1) -> Kernels:
    """The kernels for a choice, with so many threads.

    ``"auto"`` is what the environment says, and else numba's if it is installed. ValueError for numba's where it is
    not, or for something unknown.

    >>> choose("numpy").name
    'numpy'
    """
    said = "Scheme(kernels)"
    asked: str = choice
    if choice == "auto":
        asked, said = os.environ.get(SWITCH) or "auto", f"The environment's {SWITCH}"
    if asked not in get_args(Choice):
        raise ValueError(f"{said} is one of {', '.join(get_args(Choice))}; got {asked!r}.")
    if asked == "numpy" or (asked == "auto" and not installed()):
        return NUMPY
    if not installed():
        raise ValueError(f"{said} asks for numba, which is not installed. Use 'numpy', or pip install 'zerosim[fast]'.")
    from zerosim.kernels.compiled import WORTH_LOADING, Compiled  # only here: it imports this module

    return Compiled(threads, WORTH_LOADING if asked == "auto" else 0).kernels()


@cache
def installed() -> bool:
    """Whether numba is there, without loading it."""
    return find_spec("numba") is not None
