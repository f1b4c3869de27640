"""The rows: what each scheme shards. Start here, then read ``schemes.py``.

A scheme is a row of a table: for each kind of state (optimizer, gradients, parameters), whether
the ranks shard it (ZeRO: Rajbhandari et al., arXiv 1910.02054). Owns the rows, and the rules that
a row must keep. Must not know the training step that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zerosim.bands import FP32, Band, Precision
from zerosim.options import Options, chosen, with_options

if TYPE_CHECKING:
    from zerosim.schemes import Scheme


@dataclass(frozen=True)
class Stage:
    """A row of the table: its name and what is sharded. Calling it starts a training run, a ``Scheme``.

    ValueError for a row that makes no sense.

    >>> mine = Stage("mine", optimizer=True, grads=True)
    >>> mine.pieces(Band.GRADS, ranks=8), mine.pieces(Band.PARAMS, ranks=8)
    (8, 1)
    """

    train: ClassVar[Callable[..., Any]]  # Scheme: schemes.py, which reads these rows, puts itself here

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

    @with_options
    def __call__(
        self, model: Any, ranks: int, options: Options | None = None, *, ring: Any = None, collectives: Any = None,
        **keywords: Any,
    ) -> Scheme:  # fmt: skip
        """Start training ``model`` on N ``ranks``: a ``Scheme``, whose page explains ``ring`` and ``collectives``.

        Options come as keywords, as one record, or as both, and then the keywords count.
        """
        scheme: Scheme = self.train(self, model, ranks, chosen(options, keywords), ring=ring, collectives=collectives)
        return scheme

    def on(self, ranks: int) -> Stage:
        """The row as so many ranks run it: one alone has nobody to shard with, and is data parallel."""
        return self if ranks > 1 else Stage(self.name)

    def shards(self, band: Band) -> bool:
        """Whether a rank holds only its chunk of this model state."""
        return {Band.PARAMS: self.params, Band.GRADS: self.grads}.get(band, self.optimizer)

    def pieces(self, band: Band, ranks: int) -> int:
        """Over how many of N ``ranks`` this state is sharded: 1 where each holds all of it."""
        return ranks if self.shards(band) else 1

    def footprint(self, sizes: Sequence[int], ranks: int, precision: Precision, moments: Sequence[Band]) -> int:
        """Bytes that one of ``ranks`` ranks will need for buckets of these sizes, activations and ring left out.

        For deciding whether to start at all: the model states, and the largest bucket's whole
        parameters and gradients where they exist only for a while.
        """
        dtypes = precision.dtypes(wire=FP32)
        chunks = [-(-size // ranks) for size in sizes]
        states = sum(
            dtypes[band].itemsize * chunk * ranks // self.pieces(band, ranks)
            for chunk in chunks
            for band in (*precision.states, *moments)
        )
        return states + (self.params + self.grads) * precision.working.itemsize * max(chunks) * ranks


DP = Stage("data parallel")
ZeRO1 = Stage("ZeRO-1", optimizer=True)
ZeRO2 = Stage("ZeRO-2", optimizer=True, grads=True)
ZeRO3 = Stage("ZeRO-3", optimizer=True, grads=True, params=True)
SCHEMES = (DP, ZeRO1, ZeRO2, ZeRO3)
