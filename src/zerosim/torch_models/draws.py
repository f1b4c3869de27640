"""Random numbers in a forward pass: what dropout draws depends on whose rows it is drawn for, and when.

Owns the seeds. Must not know layers or ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(seed: int, rank: int, step: int, micro_batch: int, layer: int) -> int:
    """What torch's generator is seeded with before a layer runs: the same in every world, and when it runs again.

    All count from 0: the rank among all ranks, the step, the micro-batch in it, the layer in the model.

    >>> seed_of(0, 1, 2, 0, 3) == seed_of(0, 1, 2, 0, 3) != seed_of(0, 1, 2, 0, 4)
    True
    """
    state = np.random.SeedSequence((seed, rank, step, micro_batch, layer)).generate_state(1, np.uint64)
    return int(state[0])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block torch draws on from ``seed``; after it, from where it stood."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def deterministic(name: str) -> Iterator[None]:
    """Refuse, with ValueError, what draws random numbers within the block where they cannot be drawn again."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ValueError(
            f"{name} draws random numbers, which nobody could draw again here. Set dropout to 0, call module.eval() or "
            f"leave them out."
        )
