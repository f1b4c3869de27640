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


class Place(StrEnum):
    """Where an array lives: every rank has a card and its part of the host's memory."""

    __hash__ = str.__hash__  # Enum's is Python's, and these are looked up all the time

    CARD = "card"
    HOST = "host"


class Band(StrEnum):
    """One kind of thing that a rank holds. Down to the momentum they are the model states.

    >>> Band("exp_avg") is Band.EXP_AVG
    True
    """

    __hash__ = str.__hash__  # Enum's is Python's, and these are looked up all the time

    PARAMS = "params"
    GRADS = "grads"
    MAIN_GRADS = "main grads"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM = "momentum"
    GATHERED = "gathered params"
    SECONDARY = "second params"  # hpZ's copy of the parameters, sharded over the group
    UNREDUCED = "unreduced grads"
    PARTIAL = "partial grads"  # averaged over the group, not yet over the replicas
    BLOCKS = "ring blocks"
    SCALARS = "scalars"  # norms, flags and counts, as the ranks tell each other
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"
    CHECKPOINT = "checkpoint"  # what is copied to be written
    BUCKET = "gradient bucket"
    SCALES = "optimizer scales"


MODEL_STATES = (
    Band.PARAMS, Band.GRADS, Band.MAIN_GRADS, Band.MASTER, Band.EXP_AVG, Band.EXP_AVG_SQ, Band.MOMENTUM,
)  # fmt: skip
NOT_SAVED = (Band.GRADS, Band.MAIN_GRADS)  # in no checkpoint: the next step makes them anew

FP32: DType = np.dtype(np.float32)
FP16: DType = np.dtype(np.float16)
BF16: DType = np.dtype(ml_dtypes.bfloat16)
INT8: DType = np.dtype(np.int8)


@dataclass(frozen=True)
class Precision:
    """A recipe of mixed-precision training (Micikevicius et al., arXiv 1710.03740).

    ``working`` is the dtype of the parameters that forward and backward read and of the
    gradients that backward writes. ``master`` says whether an fp32 copy of the parameters is
    kept beside them; without it the parameters that are kept are themselves what the optimizer
    updates, and are fp32. ``grads`` is the dtype of the averaged gradients, if not ``working``;
    ``main_grads`` whether an fp32 copy of them is kept for the optimizer.

    Without a master and with a 16-bit working copy, the fp32 parameters are cast as they are
    gathered: only ZeRO-3 gathers, so only there is such a recipe of use (``everywhere`` is False).
    """

    name: str
    working: DType
    master: bool
    grads: DType | None = None
    main_grads: bool = False

    @property
    def params(self) -> DType:
        """The dtype of the parameters that are kept."""
        return self.working if self.master else FP32

    @property
    def everywhere(self) -> bool:
        """Whether every stage can use the recipe: what is kept is what forward and backward read."""
        return self.params == self.working

    @property
    def states(self) -> tuple[Band, ...]:
        """The states of a parameter and its gradient, the optimizer's own left out, in order of allocation."""
        main, master = [Band.MAIN_GRADS] * self.main_grads, [Band.MASTER] * self.master
        return (Band.PARAMS, Band.GRADS, *main, *master)

    def dtypes(self, wire: DType) -> dict[Band, DType]:
        """Which dtype each band has, given the dtype of the ring's blocks. Buffers have whichever each has."""
        grads = self.grads or self.working
        return dict.fromkeys(Band, FP32) | {
            Band.PARAMS: self.params,
            Band.GRADS: grads,
            Band.BUCKET: grads,
            Band.GATHERED: self.working,
            Band.SECONDARY: self.working,
            Band.UNREDUCED: grads if self.everywhere else self.working,
            Band.PARTIAL: wire,
            Band.BLOCKS: wire,
            Band.CHECKPOINT: np.dtype(np.uint8),
        }


PRECISIONS: Mapping[str, Precision] = {
    row.name: row
    for row in (
        Precision("mixed", FP16, True),
        Precision("bf16", BF16, True),
        Precision("fp32", FP32, False),
        # The recipes of Megatron's table: fp32 gradients instead of, or beside, those of the working copy.
        Precision("bf16-fp32-grads", BF16, True, grads=FP32),
        Precision("mixed-main-grads", FP16, True, main_grads=True),
        # FSDP2's: what is kept is fp32, what is gathered and computed with is bf16.
        Precision("fsdp", BF16, False, grads=FP32),
    )
}
WIRES: Mapping[str, DType] = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
PARAM_WIRES: Mapping[str, DType] = {**WIRES, "int8": INT8}  # parameters can be sent as blocks of int8, with scales
