"""The optimizers whose rules are known: the simulator's own, AdamW, and torch's."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.optimizer import Adam


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), for telling ``check`` of it."""

    weight_decay: float = 1e-2
