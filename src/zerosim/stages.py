"""The rows: what each scheme shards. Start here.

A scheme is a row of a table: for each kind of state (optimizer, gradients, parameters), whether
the ranks shard it (ZeRO: Rajbhandari et al., arXiv 1910.02054). Owns the rows and the rules that
a row must keep. Must not know the training step, which reads them: ``schemes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zerosim.bands import FP32, Band, Precision
from zerosim.optimizer import Adam

if TYPE_CHECKING:
    from zerosim.layers import Model
    from zerosim.schemes import Scheme


@dataclass(frozen=True)
class Stage:
    """A row of the table: its name and what is sharded. Calling it starts a training run, a ``Scheme``."""

    train: ClassVar[Callable[..., Scheme]]  # the training step, which knows the rows: schemes.py puts itself here

    name: str
    optimizer: bool = False
    grads: bool = False
    params: bool = False

    def __post_init__(self) -> None:
        if (self.grads and not self.optimizer) or (self.params and not self.grads):
            raise ValueError(
                f"Stage {self.name!r}: a rank that lacks the gradients of a parameter cannot update it, and one "
                f"that lacks the parameter has no use for its full gradients; shard optimizer, grads, params in "
                f"this order."
            )

    def __call__(self, model: Model, ranks: int, **options: Any) -> Scheme:
        return self.train(self, model, ranks, **options)

    def shards(self, band: Band) -> bool:
        """Whether a rank holds only its chunk of this model state."""
        if band is Band.PARAMS:
            return self.params
        return self.grads if band is Band.GRADS else self.optimizer

    def footprint(
        self, sizes: Sequence[int], ranks: int, precision: Precision, moments: Sequence[Band] = Adam.states
    ) -> int:
        """Bytes that one of ``ranks`` ranks will need for buckets of these sizes, activations and ring left out.

        For deciding whether to start at all: the model states, and the largest bucket's whole
        parameters and gradients where they exist only for a while.
        """
        dtypes = precision.dtypes(wire=FP32)
        chunks = [-(-size // ranks) for size in sizes]
        states = sum(
            dtypes[band].itemsize * chunk * (1 if self.shards(band) else ranks)
            for chunk in chunks
            for band in (*precision.states, *moments)
        )
        return states + (self.params + self.grads) * precision.working.itemsize * max(chunks) * ranks


DP = Stage("data parallel")
ZeRO1 = Stage("ZeRO-1", optimizer=True)
ZeRO2 = Stage("ZeRO-2", optimizer=True, grads=True)
ZeRO3 = Stage("ZeRO-3", optimizer=True, grads=True, params=True)
SCHEMES = (DP, ZeRO1, ZeRO2, ZeRO3)
