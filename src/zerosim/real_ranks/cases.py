"""What the ranks and whoever holds them to the simulator both derive from the settings.

Owns the list of cases, the model and the data, and how a step's counters are written down. Must not know torch.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from zerosim.bands import Array
from zerosim.comm import Comm
from zerosim.lab.data import Pair, batches
from zerosim.ledger import Report
from zerosim.model import MLP
from zerosim.real_ranks.connection import Booked
from zerosim.records.real_ranks import NATIVE, RING, Settings
from zerosim.stages import Stage
from zerosim.worlds.native import Native

COLLECTIVES: dict[str, type[Comm]] = {RING: Comm, NATIVE: Native}


class Case(NamedTuple):
    """One training run: a scheme's row, on one kind of collectives, in one precision."""

    collectives: str
    precision: str
    row: Stage

    def __str__(self) -> str:
        return f"{self.row.name}, {self.collectives}, {self.precision}"


def cases(settings: Settings) -> list[Case]:
    """The cases, in the order in which they are run."""
    return [Case(*each) for each in product(settings.collectives, settings.precisions, settings.rows)]


def model(settings: Settings) -> MLP:
    """What is trained."""
    return MLP(settings.widths, seed=settings.model_seed)


def data(settings: Settings) -> list[list[Pair]]:
    """For each step the batch of every rank."""
    widths = settings.widths[0], settings.widths[-1]
    return list(batches("noise", settings.ranks, settings.steps, settings.batch, widths, settings.seed))


def booked(report: Report, row: int) -> list[Booked]:
    """The counters of a step's report for one of its process's ranks."""
    return [
        Booked(
            collective, str(band), int(each.sent[row]), int(each.received[row]), int(each.padding[row]), each.messages
        )
        for (collective, band), each in report.traffic.items()
    ]


def probe(size: int) -> Array:
    """A buffer [N, N*C] of mixed magnitudes, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng(size)
    shape = size, size * 2 * 37
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(np.float32)
