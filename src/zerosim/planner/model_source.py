"""What a plan takes a model from: something that is made ready for any load.

Owns what a source is, and the one that needs no framework, the perceptron. Must not know how
sources are named, nor stages, N or cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from zerosim.bands import DType
from zerosim.layers import Model
from zerosim.model import MLP
from zerosim.worlds.dry import Shapes

MOST_PARAMETERS = 10**15  # a thousand trillion; what is counted of it stays below 2**63


@dataclass(frozen=True)
class Workload:
    """What is asked of a model in a step: rows, length of a row, what is recomputed, and the working copy's dtype."""

    rows: int
    sequence: int | None
    checkpoint: str
    working: DType


@dataclass(frozen=True)
class Prepared:
    """A model of the dry world with a micro-batch to train on, and options that its scheme needs."""

    model: Model
    batch: Any
    options: dict[str, Any] = field(default_factory=dict)
    largest_module: int = 0
    """Parameters of the largest single module, if that is known; 0 if not."""


@runtime_checkable
class ModelSource(Protocol):
    """A model that can be made ready for any load."""

    kind: str
    name: str
    sequence: int | None
    """The length of a row unless told otherwise; None where rows have no length."""
    notes: list[str]

    def prepare(self, load: Workload, rows: int) -> Prepared:
        """The model for micro-batches of ``load``, and a batch of ``rows`` rows in all. ValueError if it cannot be."""
        ...


class Perceptron:
    """A multi-layer perceptron of the given widths, whose rows have no length."""

    kind = "list of layer sizes"

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self.sequence: int | None = None
        self.name = f"MLP {'-'.join(map(str, widths)) if len(widths) < 9 else f'of {len(widths) - 1} layers'}"
        self.notes = ["activations are fp32, whatever the precision of the parameters"]
        self._model = Shapes(MLP(self.widths))
        too_large(self._model.n_params)

    def prepare(self, load: Workload, rows: int) -> Prepared:
        if load.sequence is not None:
            raise ValueError(
                "plan(seq): a list of layer sizes has rows, and no sequences. Leave --seq out and use --micro-batch."
            )
        if load.checkpoint == "selective":
            raise ValueError(
                "plan(checkpoint): 'selective' recomputes attention, and a list of layer sizes has none. Use 'full' "
                "or 'none'."
            )
        return Prepared(self._model, self._model.batch(rows), {"checkpoint": load.checkpoint == "full"})


def too_large(params: int) -> None:
    """Refuse more parameters than are counted here."""
    if params > MOST_PARAMETERS:
        raise ValueError(
            f"plan(MODEL): {params:,} parameters are more than the {MOST_PARAMETERS:,} that are counted here. Use "
            f"smaller layers."
        )
