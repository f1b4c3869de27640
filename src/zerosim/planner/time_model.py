"""How fast a step is expected to go: four shares of what a card and its links have, fitted on published runs.

Owns the shares and the speeds that follow from them; ``scripts/step_times.py`` fits them and writes
``time_model.json``. Must not know runs, nor how a step is made up.

In three sentences: matrix products reach a share of the fastest one that was measured on the card, whatever comes
and goes between them moves at a share of its memory's bandwidth, and attention, whose kernels have not
kept up with the peak, does so many FLOPs in the time that its memory moves a byte. Links reach a share of their
bandwidth, and a hop takes as long as NCCL has for large messages. What can hide behind computing is hidden, as
in the bound: it is the same two queues, at other speeds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.resources import files
from math import inf

import msgspec

from zerosim.planner.cards import Card
from zerosim.planner.step_time import Speeds
from zerosim.records.files import Record

# NCCL's ring takes 3.4 µs a hop over NVLink, 5.7 over PCIe and 14 over a network for large messages (Simple), where
# its fastest protocol, which the cards have, takes 0.6, 1.0 and 2.7 (src/graph/tuning.cc, hwLatencies).
LARGE_HOP = 5.5


class TimeModel(Record):
    """The fitted shares, and what they are worth.

    ``products``: of the fastest product of the card; ``attention``: FLOPs for each byte that its memory could move;
    ``memory`` and ``network``: of their bandwidths. ``runs`` of ``sources`` were fitted. Predicted by a fit without
    its source, half of the runs are off by ``median`` of what was measured at most, and nine of ten took up to the part
    ``band`` more or less than was predicted. They ran on ``cards``, on the least to the most ``gpus``, in
    ``precisions``.
    """

    products: float
    attention: float
    memory: float
    network: float
    band: float
    median: float
    runs: int
    sources: tuple[str, ...]
    cards: tuple[str, ...] = ()
    gpus: tuple[int, int] = (0, 0)
    precisions: tuple[str, ...] = ()

    def has_seen(self, card: str, dtype: str, ranks: int) -> bool:
        """Whether runs on such cards, as many, in that precision were fitted, so that the band is of such a step.

        >>> fitted().has_seen("H100", "bf16", 8), fitted().has_seen("B200", "bf16", 8)
        (True, False)
        """
        least, most = self.gpus
        return card in self.cards and dtype in self.precisions and least <= ranks <= most

    def speeds(self, card: Card, dtype: str) -> Speeds:
        """What runs reach on such cards. ValueError for a dtype that the card has no peak for.

        >>> from zerosim.planner.cards import card
        >>> found = fitted().speeds(card("A100-80GB"), "bf16")
        >>> 0.5 * 312e12 < found.products < 271.2e12
        True
        """
        products = self.products * card.reached * card.flops(dtype)
        return Speeds(
            products=products,
            attention=min(products, self.attention * card.memory_bandwidth),
            memory=self.memory * card.memory_bandwidth,
            within=self.network * card.within,
            between=self.network * card.between,
            hop_within=LARGE_HOP * card.hop_within,
            hop_between=LARGE_HOP * card.hop_between,
            node=card.node,
        )

    def stated(self, card: Card, dtype: str, efficiency: float) -> Speeds:
        """The same where somebody states which part of the peak all computing reaches: no share but the links' counts.

        ValueError for a dtype that the card has no peak for.
        """
        peak = efficiency * card.flops(dtype)
        return replace(self.speeds(card, dtype), products=peak, attention=peak, memory=inf)


@cache
def fitted() -> TimeModel:
    """The shares that the package comes with."""
    return msgspec.json.decode((files("zerosim.planner") / "time_model.json").read_bytes(), type=TimeModel)
