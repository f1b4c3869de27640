"""What changes when a rule of the simulator is broken on purpose, one rule at a time.

Owns these experiments: the whole model gathered at once, blocks in 16 bits, parameters in int8,
buckets of another size in one scheme. They show what the rules are worth; they are no checks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zerosim.bands import Array, Band
from zerosim.checks.compare import bits
from zerosim.lab.experiment import batches_of
from zerosim.model import MLP
from zerosim.options import Options
from zerosim.records.ablations import Drift, Int8Params, NarrowWire, WholeModelGather
from zerosim.records.results import Settings
from zerosim.schemes import DP, Stage, ZeRO2, ZeRO3

NARROW = {"mixed": "fp16", "bf16": "bf16"}  # precisions whose gradients and parameters 16 bits carry, and which


def whole_model_gather(settings: Settings, model: MLP) -> WholeModelGather:
    """ZeRO-3 after one step, once gathering everything at once and once layer by layer."""
    [batch] = batches_of(settings, settings.ranks, 1)
    options = Options(precision=settings.precision, wire=settings.wire)
    by_layer = ZeRO3(model, settings.ranks, options)
    at_once = ZeRO3(model, settings.ranks, options, gather="model")
    for scheme in (by_layer, at_once):
        scheme.step(batch)
    peak = at_once.reports[-1].peak_without_activations
    return WholeModelGather(
        states=sum(at_once.reports[-1].resident.values()),
        gathered=peak.by_band.get(Band.GATHERED, 0),
        zero2_resident=ZeRO2(model, settings.ranks, options).ledger.total,
        peak=peak.total,
        peak_by_layer=by_layer.reports[-1].peak_without_activations.total,
    )


def narrow_wire(settings: Settings, model: MLP) -> NarrowWire:
    """The same run with blocks as wide as the working copy, which must be of 16 bits, and in fp32."""
    wire = NARROW[settings.precision]
    [batch] = batches_of(settings, settings.ranks, 1)
    gradients, sent = [], []
    for dtype in ("fp32", wire):
        scheme = ZeRO2(model, settings.ranks, precision=settings.precision, wire=dtype)
        scheme.step(batch)
        gradients.append(scheme.flat(Band.GRADS))
        sent.append(scheme.bytes_comm_per_rank())
    differing, largest = _distance(*gradients)
    return NarrowWire(
        wire=wire,
        sent=sent[1],
        sent_fp32=sent[0],
        gradient_differing=differing,
        gradient_largest_relative=largest / float(np.abs(gradients[0].astype(np.float64)).max()),
        drift=_drift(
            settings,
            model,
            *((ZeRO2, Options(precision=settings.precision, wire=dtype)) for dtype in ("fp32", wire)),
        ),
    )


def int8_params(settings: Settings, model: MLP) -> Int8Params:
    """ZeRO-3 that sends parameters as int8 blocks with their scales, beside one that sends them as they are."""
    options = Options(precision=settings.precision, wire=settings.wire)
    losses, sent = [], []
    for each in (replace(options, wire_params="int8"), options):
        scheme = ZeRO3(model, settings.ranks, each)
        losses.append([scheme.step(batch) for batch in batches_of(settings, settings.ranks, settings.steps)])
        sent.append(max(scheme.reports[-1].sent()))
    return Int8Params(sent=sent[0], sent_exact=sent[1], losses=losses[0], losses_exact=losses[1])


def whole_model_bucket(settings: Settings, model: MLP) -> dict[str, Drift]:
    """ZeRO-2 with one bucket for everything against data parallel with one per layer, by precision."""
    drifts: dict[str, Drift] = {}
    for precision in dict.fromkeys(("fp32", settings.precision)):
        options = Options(precision=precision, wire=settings.wire if precision == settings.precision else "fp32")
        whole = replace(options, bucket="model")
        drifts[precision] = _drift(settings, model, (DP, options), (ZeRO2, whole))
    return drifts


def _drift(settings: Settings, model: MLP, *sides: tuple[Stage, Options]) -> Drift:
    """Two runs on the same batches: how far the second's fp32 parameters are from the first's after each step."""
    one, other = (row(model, settings.ranks, options) for row, options in sides)
    differing, largest, losses = [], [], []
    for batch in batches_of(settings, settings.ranks, settings.steps):
        one.step(batch)
        losses.append(other.step(batch))
        count, distance = _distance(one.full_theta(), other.full_theta())
        differing.append(count)
        largest.append(distance)
    return Drift(differing=differing, largest=largest, losses=losses)


def _distance(one: Array, other: Array) -> tuple[int, float]:
    """Elements whose bits differ, and the largest difference."""
    distance = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return int(np.count_nonzero(bits(one) != bits(other))), float(distance.max(initial=0))
