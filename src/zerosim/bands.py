"""The vocabulary: which bands of memory a rank has, and which dtype each takes.

Owns the names of the bands and the recipes (precisions, wires). Knows nothing of
arrays, ledgers or schedules, so that everything else can share the names.

Axis letters in signatures, everywhere: R rows, the ranks (or copies of a model) in this
process; N world size; P parameters of a layer or bucket; L the same padded to N chunks; C one
chunk; B rows of a batch; I and O widths in and out; n any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    Array = npt.NDArray[Any]
else:  # other worlds' arrays, which have a shape and a dtype too, pass the same signatures
    Array = Any
DType = np.dtype[Any]


class Band(StrEnum):
    """One kind of thing that a rank holds. The first five are the model states."""

    PARAMS = "params"
    GRADS = "grads"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GATHERED = "gathered params"
    UNREDUCED = "unreduced grads"
    BLOCKS = "ring blocks"
    ACTIVATIONS = "activations"


MODEL_STATES = (Band.PARAMS, Band.GRADS, Band.MASTER, Band.EXP_AVG, Band.EXP_AVG_SQ)

FP32: DType = np.dtype(np.float32)
FP16: DType = np.dtype(np.float16)
BF16: DType = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Precision:
    """A recipe of mixed-precision training (Micikevicius et al., arXiv 1710.03740).

    ``working`` is the dtype of the parameters that forward and backward read and of the
    gradients. ``master`` says whether an fp32 copy of the parameters is kept beside them;
    without it the working copy is itself what the optimizer updates, and must be fp32.
    """

    name: str
    working: DType
    master: bool

    def __post_init__(self) -> None:
        if not self.master and self.working != FP32:
            raise ValueError(f"Precision {self.name!r}: without master weights the working copy must be fp32.")

    @property
    def states(self) -> tuple[Band, ...]:
        """The model states that exist under this recipe, in the order in which they are allocated."""
        return tuple(band for band in MODEL_STATES if self.master or band is not Band.MASTER)

    def dtypes(self, wire: DType) -> dict[Band, DType]:
        """Which dtype each band has, given the dtype of the ring's blocks."""
        return {
            Band.PARAMS: self.working,
            Band.GRADS: self.working,
            Band.MASTER: FP32,
            Band.EXP_AVG: FP32,
            Band.EXP_AVG_SQ: FP32,
            Band.GATHERED: self.working,
            Band.UNREDUCED: self.working,
            Band.BLOCKS: wire,
            Band.ACTIVATIONS: FP32,
        }


PRECISIONS: Mapping[str, Precision] = {
    row.name: row
    for row in (Precision("mixed", FP16, True), Precision("bf16", BF16, True), Precision("fp32", FP32, False))
}
WIRES: Mapping[str, DType] = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
