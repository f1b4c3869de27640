"""Presets of common cards: what each holds, computes and sends at most, and who says so.

Owns the numbers and their sources. Must not know models, schedules or ledgers. Every number can
be replaced: ``dataclasses.replace(CARDS["H100"], memory=96 * 10**9)``.

What is reached of the peak at most was measured: the fastest product of two bf16 matrices that could be found
(stas00's "maximum achievable matmul FLOPS", ml-engineering): 271.2 TFLOP/s on an A100 SXM, 794.5 on an H100, 1,745 on
a B200, 668.4 on an MI300X. Of the others nothing was published, and four fifths are assumed.

The memory is what a card reports to torch as its total capacity, the least of what is printed in
people's out-of-memory errors: not what is on the box. Peaks are of dense
matrices, without the doubling for sparse ones that data sheets like to print. Bandwidths are one
way, half of what is marketed for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ASSUMED = "H100"  # where no card is named
_GB = 10**9
_TERA = 10**12

# How long a hop takes before its first byte arrives: what NCCL's own model has for a ring's fastest
# protocol over NVLink, over PCIe and over a network (src/graph/tuning.cc, hwLatencies, LL).
_NVLINK_HOP, _PCIE_HOP, _NETWORK_HOP = 0.6e-6, 1.0e-6, 2.7e-6
ASSUMED_REACH = 0.8  # of the peak, where nobody measured: about what H100 and B200 reach
_A100_REACH, _H100_REACH = 271.2 / 312, 794.5 / 989.4


@dataclass(frozen=True)
class Card:
    """One GPU and its place in a node.

    ``memory`` in bytes; ``peak`` in FLOP/s by dtype; ``within`` the bytes per second that a card
    sends to the others of its node, ``between`` those that a whole node sends to the other nodes
    over all its network cards, both one way; ``node`` the cards in a node; ``hop_within`` and
    ``hop_between`` the seconds of a hop of no bytes; ``source`` who says so. ``memory_bandwidth`` is the bytes per
    second of the card's own memory, ``reached`` the part of the peak that the fastest matrix product reaches, ``host``
    the bytes per second over its link to the host, one way: PCIe x16 of its generation.
    """

    name: str
    memory: int
    peak: Mapping[str, int]
    within: int
    between: int
    node: int
    hop_within: float
    hop_between: float
    source: str
    memory_bandwidth: int
    reached: float = ASSUMED_REACH
    host: int = 64 * _GB

    def __post_init__(self) -> None:
        bandwidths = ("within", "between", "memory_bandwidth", "host")
        for name in ("memory", *bandwidths, "node", "hop_within", "hop_between", "reached"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"Card({name}) of {self.name} must be above zero; got {value!r}.")
        for dtype, flops in self.peak.items():
            if not flops > 0:
                raise ValueError(f"Card(peak) of {self.name} must be above zero FLOP/s for {dtype}; got {flops!r}.")
        object.__setattr__(self, "peak", MappingProxyType(dict(self.peak)))

    def flops(self, dtype: str) -> int:
        """Peak FLOP/s of dense matrix products in ``dtype``; ValueError if the card has no such units."""
        if dtype not in self.peak:
            raise ValueError(
                f"Card.flops(dtype): the {self.name} has no peak for {dtype!r}; it computes in "
                f"{', '.join(self.peak)}. Choose a precision with one of these, or another card."
            )
        return self.peak[dtype]


def _gib(number: float) -> int:
    return round(number * 2**30)


def _peak(half: float, single: float, bf16: bool = True) -> dict[str, int]:
    """FLOP/s from TFLOP/s: of the two 16-bit formats, equally fast where both exist, and of fp32."""
    sixteen = round(half * _TERA)
    return {**({"bf16": sixteen} if bf16 else {}), "fp16": sixteen, "fp32": round(single * _TERA)}


_A100 = "NVIDIA A100 data sheet (312 and 19.5 TFLOP/s, NVLink 600 GB/s both ways); DGX A100: 8 x 200 Gb/s"
_H100 = "NVIDIA H100 white paper, SXM5 (989.4 and 66.9 TFLOP/s, NVLink 900 GB/s both ways); DGX H100: 8 x 400 Gb/s"

CARDS: Mapping[str, Card] = MappingProxyType(
    {
        card.name: card
        for card in (
            Card(
                "V100-32GB", _gib(31.73), _peak(125, 15.7, bf16=False), 150 * _GB, 50 * _GB, 8, _NVLINK_HOP,
                _NETWORK_HOP,
                "NVIDIA V100 data sheet, SXM2 (125 and 15.7 TFLOP/s, NVLink 300 GB/s both ways); DGX-1: 4 x 100 Gb/s",
                memory_bandwidth=900 * _GB, host=16 * _GB,
            ),
            Card(
                "A100-40GB", _gib(39.38), _peak(312, 19.5), 300 * _GB, 200 * _GB, 8, _NVLINK_HOP, _NETWORK_HOP, _A100,
                memory_bandwidth=1555 * _GB, host=32 * _GB, reached=_A100_REACH,
            ),
            Card(
                "A100-80GB", _gib(79.15), _peak(312, 19.5), 300 * _GB, 200 * _GB, 8, _NVLINK_HOP, _NETWORK_HOP, _A100,
                memory_bandwidth=2039 * _GB, host=32 * _GB, reached=_A100_REACH,
            ),
            Card(
                "H100", _gib(79.11), _peak(989.4, 66.9), 450 * _GB, 400 * _GB, 8, _NVLINK_HOP, _NETWORK_HOP, _H100,
                memory_bandwidth=3350 * _GB, reached=_H100_REACH,
            ),
            Card(
                "H200", _gib(139.72), _peak(989.4, 66.9), 450 * _GB, 400 * _GB, 8, _NVLINK_HOP, _NETWORK_HOP,
                "NVIDIA H200 data sheet, SXM (141 GB; computes and sends as the H100); DGX H200: 8 x 400 Gb/s",
                memory_bandwidth=4800 * _GB, reached=_H100_REACH,
            ),
            Card(
                "B200", _gib(178.35), _peak(2250, 80), 900 * _GB, 400 * _GB, 8, _NVLINK_HOP, _NETWORK_HOP,
                "NVIDIA Blackwell data sheet, HGX at 1,000 W (2,250 and 80 TFLOP/s, NVLink 1.8 TB/s both ways); "
                "DGX B200: 8 x 180 GB, 8 x 400 Gb/s",
                memory_bandwidth=8000 * _GB, reached=1745 / 2250,
            ),
            Card(
                "L40S", _gib(44.34), _peak(362.05, 91.6), 32 * _GB, 50 * _GB, 8, _PCIE_HOP, _NETWORK_HOP,
                "NVIDIA L40S data sheet (362.05 and 91.6 TFLOP/s, PCIe 4.0 x16 64 GB/s both ways, no NVLink); "
                "Amazon EC2 g6e.48xlarge: 8 cards, 400 Gb/s",
                memory_bandwidth=864 * _GB, host=32 * _GB,
            ),
            Card(
                "RTX4090", _gib(23.52), _peak(165.2, 82.6), 32 * _GB, 1_250_000_000, 4, _PCIE_HOP, _NETWORK_HOP,
                "NVIDIA Ada GPU architecture white paper (165.2 TFLOP/s accumulating in fp32, 82.6; PCIe 4.0 x16 "
                "64 GB/s both ways); a workstation of four on 10 Gb/s Ethernet is assumed",
                memory_bandwidth=1008 * _GB, host=32 * _GB,
            ),
            Card(
                "MI300X", _gib(191.69), _peak(1307.4, 163.4), 448 * _GB, 400 * _GB, 8, _NVLINK_HOP, _NETWORK_HOP,
                "AMD Instinct MI300X data sheet (1,307.4 and 163.4 TFLOP/s, 7 Infinity Fabric links of 128 GB/s both "
                "ways); 8 x 400 Gb/s, and a hop as over NVLink, are assumed",
                memory_bandwidth=5300 * _GB, reached=668.4 / 1307.4,
            ),
        )
    }
)  # fmt: skip


def card(name: str) -> Card:
    """The preset of that name, whatever its case; ValueError that lists them for any other."""
    for known in CARDS.values():
        if known.name.lower() == name.lower():
            return known
    near = [known for known in CARDS if known.lower().startswith(name.lower())] if name else []
    meant = f" Is {' or '.join(near)} meant?" if near else ""
    raise ValueError(
        f"card({name!r}): the presets are {', '.join(CARDS)}.{meant} For another card say what it has, as in "
        f"--memory 80GB."
    )
