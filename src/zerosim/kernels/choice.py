"""Which kernels compute: numba's where it is installed, unless told otherwise.

Owns the choice, by the option ``kernels`` and the environment's ``ZEROSIM_KERNELS``. Must not import numba:
that happens when there is something to compute.

numba (extra ``fast``) compiles an operation when it is first used on some dtypes, which takes it a few seconds for
all of them, and keeps it on disk: in ``__pycache__`` beside these files or, where that cannot be written, in the
user's own cache folder, or where ``NUMBA_CACHE_DIR`` says. Where nothing can be written, every process compiles.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import get_args

from zerosim.kernels.compiled import WORTH_LOADING, Compiled
from zerosim.kernels.operations import NUMPY, Choice, Kernels

SWITCH = "ZEROSIM_KERNELS"  # an option that is not "auto" goes before it


def choose(choice: Choice = "auto", threads: int = 1) -> Kernels:
    """The kernels for a choice, with so many threads.

    ``"auto"`` is what the environment says, and else numba's if it is installed, for arrays that are worth loading
    it. ValueError for numba's where it is not installed, or for something unknown.

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
    return Compiled(threads, WORTH_LOADING if asked == "auto" else 0).kernels()


@cache
def installed() -> bool:
    """Whether numba is there, without loading it."""
    return find_spec("numba") is not None
