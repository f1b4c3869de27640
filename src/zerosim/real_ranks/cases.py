"""What the ranks and whoever holds them to the simulator both derive from the settings.

Owns the list of cases, the model and the data, and how a step's counters are written down. Must not know torch.
"""

from __future__ import annotations

import importlib
import sys
from itertools import product
from typing import NamedTuple

import numpy as np

from zerosim.bands import Array, Band
from zerosim.buckets import Bucket
from zerosim.comm import Comm
from zerosim.counts import Report
from zerosim.lab.data import Pair, batches
from zerosim.layers import Model
from zerosim.model import MLP
from zerosim.real_ranks.connection import Booked
from zerosim.records.real_ranks import NATIVE, RING, Settings
from zerosim.schemes import Scheme
from zerosim.stages import Stage
from zerosim.worlds.native import Native

Batches = list[list[Pair]]
"""For each step an (x, y) for every rank."""
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


States = dict[Band, dict[str, Array]]
"""Model states by band and bucket, [R, n] each."""


def states(scheme: Scheme) -> States:
    """Every model state, as views: what a rank must hold as the simulator does.

    Of gradients that are reduced but kept by more ranks than own them, what a rank owns: elsewhere it may have
    its own, not the average.
    """
    return {
        band: {
            bucket.name: _owned(scheme, bucket) if band is Band.GRADS else bucket.states[band]
            for bucket in scheme.buckets
            if band in bucket.states
        }
        for band in scheme.states
    }


def _owned(scheme: Scheme, bucket: Bucket) -> Array:
    """Of each rank's gradients, those that it updates parameters with: a view where one rank is here."""
    row, kept = scheme.shard, bucket.states[Band.GRADS]
    if row.grads is row.optimizer:
        return kept
    rows = []
    for held, rank in zip(kept, scheme.ring.ids, strict=True):
        (first, pieces), (own, count) = (
            row.piece(band, rank, scheme.ring.size, scheme.options.node) for band in (Band.GRADS, Band.MASTER)
        )
        start, length = own * bucket.padded // count - first * bucket.padded // pieces, bucket.padded // count
        rows.append(held[start : start + length])
    return rows[0][np.newaxis] if len(rows) == 1 else np.stack(rows)


def model(settings: Settings) -> Model:
    """What is trained."""
    return trained(settings)[0]


def data(settings: Settings) -> Batches:
    """For each step the batch of every rank."""
    return trained(settings)[1]


def trained(settings: Settings) -> tuple[Model, Batches]:
    """A model, and for each step the batch of every rank.

    ValueError, naming the path, for a ``settings.model`` that cannot be imported or gives something else.
    """
    if settings.model:
        return _called(settings)
    widths = settings.widths[0], settings.widths[-1]
    drawn = batches("noise", settings.ranks, settings.steps, settings.batch, widths, settings.seed)
    return MLP(settings.widths, seed=settings.model_seed), list(drawn)


def _called(settings: Settings) -> tuple[Model, Batches]:
    call = f"corroborate(model): {settings.model!r}"
    module, _, name = settings.model.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{call} must be MODULE:FUNCTION, which can be imported here; {error}.") from error
    finally:
        sys.path.remove("")
    found = function(ranks=settings.ranks, steps=settings.steps, batch=settings.batch, seed=settings.seed)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Model)):
        raise ValueError(
            f"{call} must give a model, an MLP or a TorchModel, and its data; got {type(found).__name__}. Return both."
        )
    made, given = found
    if len(given) != settings.steps or any(len(batch) != settings.ranks for batch in given):
        raise ValueError(
            f"{call} must give for each of {settings.steps} steps one (x, y) for each of {settings.ranks} ranks."
        )
    return made, list(given)


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
