"""What the lab's ablations found, as a part of its results. Owns their schema; computes nothing."""

from __future__ import annotations

from typing import Annotated

import msgspec

from zerosim.records.files import Record

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # bytes, operations, elements: what a reader can count


class Drift(Record):
    """How far the master weights of one run are from another's after each step, and what its losses were."""

    differing: list[Count]
    largest: list[float]
    losses: list[float] = msgspec.field(default_factory=list)


class WholeModelGather(Record):
    """ZeRO-3 that gathers everything at once, beside ZeRO-2 at rest. Bytes per rank."""

    states: Count
    gathered: Count
    zero2_resident: Count
    peak: Count
    peak_by_layer: Count


class NarrowWire(Record):
    """The same run with blocks in the working copy's 16 bits: half the bytes, other bits.

    ``gradient`` compares the averaged gradients of the first step, where nothing else
    differs yet, so that it is the rounding of the hops alone; relative to the largest gradient.
    """

    wire: str
    sent: Count
    sent_fp32: Count
    gradient_differing: Count
    gradient_largest_relative: float
    drift: Drift


class Int8Params(Record):
    """ZeRO-3 that sends parameters in int8, with their scales, beside itself: bytes of one step, the losses of all."""

    sent: Count
    sent_exact: Count
    losses: list[float]
    losses_exact: list[float]


class Ablations(Record):
    """What changes when a rule of the simulator is broken on purpose. None or empty where it does not apply.

    ``whole_model_bucket``, by precision: ZeRO-2 with one bucket for the whole model, so that its
    sums start at other ranks, against data parallel with a bucket per layer. In fp32 each sum is
    rounded otherwise; 16-bit gradients are so short that their sums in fp32 come out exact, or
    nearly always round to the same 16 bits.
    """

    whole_model_gather: WholeModelGather | None
    narrow_wire: NarrowWire | None
    whole_model_bucket: dict[str, Drift]
    int8_params: Int8Params | None = None
