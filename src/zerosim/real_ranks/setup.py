"""What the ranks and whoever holds them to the simulator both derive from the settings.

Owns the list of runs, the model, the data and a run's options, and how a rank identifies the
code that it runs. Must not know torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerosim.bands import PRECISIONS, WIRES, Array
from zerosim.comm import Comm
from zerosim.lab.data import Pair, batches
from zerosim.ledger import Report
from zerosim.model import MLP
from zerosim.real_ranks.messages import Booked
from zerosim.records.real_ranks import NATIVE, RING, Settings
from zerosim.schemes import SCHEMES, Stage
from zerosim.worlds.native import Native

COLLECTIVES: dict[str, type[Comm]] = {RING: Comm, NATIVE: Native}
WORKING = "working"

SOURCES = Path(__file__).parents[1]  # the package's


class Plan(NamedTuple):
    """One run."""

    collectives: str
    precision: str
    stage: Stage

    def __str__(self) -> str:
        return f"{self.stage.name}, {self.collectives}, {self.precision}"


def plans(settings: Settings) -> list[Plan]:
    """The runs, in order."""
    return [Plan(*each) for each in product(settings.collectives, settings.precisions, SCHEMES)]


def wire(settings: Settings, precision: str) -> str:
    """What blocks travel as in runs of that precision."""
    if settings.wire != WORKING:
        return settings.wire
    return next(name for name, dtype in WIRES.items() if dtype == PRECISIONS[precision].working)


def options(settings: Settings, plan: Plan) -> dict[str, Any]:
    """The options of the run's ``Scheme`` that a rank and the simulator share."""
    return {
        "precision": plan.precision,
        "wire": wire(settings, plan.precision),
        "collectives": COLLECTIVES[plan.collectives],
    }


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


def code_version() -> str:
    """A hash of the package's sources."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(SOURCES).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of whatever could make two ranks compute different bits."""
    return {name: importlib.metadata.version(name) for name in ("numpy", "ml_dtypes", "torch")} | {
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def probe(size: int) -> Array:
    """A buffer [N, N*C] of mixed magnitudes, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng(size)
    shape = size, size * 2 * 37
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(np.float32)
