"""What a plan takes a model from: something that is prepared for any workload.

Owns what a source is, and the one that needs no framework, the perceptron. Must not know how
sources are named, nor schemes, N or cards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerosim.bands import DType
from zerosim.layers import Model
from zerosim.model import MLP
from zerosim.worlds.dry import Shapes

Inputs = Callable[[int, int | None], Any]
"""What a module is called with, for so many rows of such a length."""

MOST_PARAMETERS = 10**15  # a thousand trillion; what is counted of it stays below 2**63


@dataclass(frozen=True)
class Workload:
    """What is asked of a model in a step: rows, length of a row, what is recomputed, and the working copy's dtype.

    ``tried``: a size that is tried in a search, for which measuring anew may be spared. ``loss`` and ``kv``
    say how the loss and attention's keys and values are computed (``Question``); ``copies`` whether each unit keeps
    a 16-bit copy of the parameters that it reads, as under torch.autocast; ``frees`` whether what a unit hands on
    goes as soon as nothing needs it any more.
    """

    rows: int
    sequence: int | None
    checkpoint: str
    working: DType
    tried: bool = False
    loss: str = "fp32"
    kv: str = "grouped"
    copies: bool = False
    frees: bool = False


@dataclass(frozen=True)
class Prepared:
    """A model of the dry world with a batch to train on, and options that its scheme needs.

    ``largest_module`` is the parameters of the largest single module, 0 if that is not known; ``states_alone``
    whether what the model keeps and computes is unknown, so that a run shows its model states alone.
    """

    model: Model
    batch: Any
    options: dict[str, Any] = field(default_factory=dict)
    largest_module: int = 0
    states_alone: bool = False


class ModelSource(ABC):
    """A model that can be prepared for any workload; ``kind`` is what kind of thing names it.

    A class to inherit from: to ask an object whether it has a name would be to find it, which may load torch.
    """

    kind: str
    width: int | None = None
    """Of the hidden states of a language model, where it is known."""
    longest: int | None = None
    """The most tokens of a row that it was made for, where that is known."""
    dense_decoder: bool = False
    """Whether it is known to be a dense decoder of text."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called."""

    @property
    @abstractmethod
    def sequence(self) -> int | None:
        """The length of a row unless told otherwise; None where rows have no length."""

    @abstractmethod
    def notes_for(self, sequence: int | None) -> list[str]:
        """What is to be said about it, for rows of that length."""

    @abstractmethod
    def prepare(self, workload: Workload, rows: int) -> Prepared:
        """The model for micro-batches of ``workload``, and a batch of ``rows`` rows in all; or ValueError."""


class Perceptron(ModelSource):
    """A multi-layer perceptron of the given widths, whose rows have no length."""

    kind = "list of layer sizes"
    sequence = None

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self._model = Shapes(MLP(self.widths))
        too_large(self._model.n_params)

    @property
    def name(self) -> str:
        widths = self.widths
        return f"MLP {'-'.join(map(str, widths)) if len(widths) < 9 else f'of {len(widths) - 1} layers'}"

    def notes_for(self, sequence: int | None) -> list[str]:
        return ["activations are fp32, whatever the precision of the parameters"]

    def prepare(self, workload: Workload, rows: int) -> Prepared:
        if workload.sequence is not None:
            raise ValueError(
                "plan(seq): a list of layer sizes has rows, and no sequences. Leave --seq out and use --micro-batch."
            )
        if (workload.loss, workload.kv) != ("fp32", "grouped"):
            raise ValueError(
                "plan(loss): --loss and --kv are for language models; a list of layer sizes is none. Leave them out."
            )
        if workload.checkpoint == "selective":
            raise ValueError(
                "plan(checkpoint): 'selective' recomputes attention, and a list of layer sizes has none. Use 'full' "
                "or 'none'."
            )
        return Prepared(self._model, self._model.batch(rows), {"checkpoint": workload.checkpoint == "full"})


def too_large(params: int) -> None:
    """Refuse more parameters than are counted here."""
    if params > MOST_PARAMETERS:
        raise ValueError(
            f"plan(MODEL): {params:,} parameters are more than the {MOST_PARAMETERS:,} that are counted here. Use "
            f"smaller layers."
        )
