"""All four schemes learn the same thing, bit for bit, on every rank, after every step.

One comparison serves the whole file: ``differences`` names each state, layer and rank whose raw bits
are not those of data parallel's rank 0. The last tests show that it finds what is there to be found.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from helpers import COMPARED, Batch, apart, batches, each_stage
from zerosim.bands import Band
from zerosim.model import MLP
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3

STEPS = 10
WIDTHS = (5, 7, 3)  # layers of 42 and 24 parameters: 33 ranks are more than the second has
RUNS: tuple[tuple[Stage, dict[str, Any]], ...] = (*((stage, {}) for stage in SCHEMES), (ZeRO3, {"gather": "model"}))

Where = tuple[str, int, int]  # band, layer, rank


pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def differences(scheme: Scheme, reference: Scheme) -> list[Where]:
    """Where a rank of ``scheme`` holds other bits than rank 0 of ``reference``, which holds all of every state."""
    found = []
    for band in (band for band in COMPARED if band in reference.states):
        wholes = [whole.tobytes() for whole in reference.ranks[0][band]]
        for rank in scheme.ranks:
            mine = [state.tobytes() for state in rank[band]]
            for layer, (state, whole) in enumerate(zip(mine, wholes, strict=True)):
                start = rank.id * len(state) if len(state) < len(whole) else 0
                if state != whole[start : start + len(state)]:
                    found.append((str(band), layer, rank.id))
    return found


def steps_that_differ(schemes: Sequence[Scheme], data: list[Batch]) -> dict[tuple[int, int], list[Where]]:
    """Train in lockstep; by step and position in ``schemes``, what differs from the first."""
    found = {}
    for step, batch in enumerate(data, start=1):
        losses = [scheme.step(batch) for scheme in schemes]
        for index, (scheme, loss) in enumerate(zip(schemes, losses, strict=True)):
            where = differences(scheme, schemes[0])
            if where or loss != losses[0]:
                found[step, index] = where
    return found


# -- the claim


@pytest.mark.parametrize(
    ("precision", "wire"),
    [("mixed", "fp32"), ("mixed", "fp16"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")],
)
@pytest.mark.parametrize(("ranks", "bucket"), [*((ranks, "layer") for ranks in (3, 5, 8, 33)), (5, "model")])
def test_all_schemes_are_alike_bit_for_bit(ranks: int, precision: str, wire: str, bucket: str) -> None:
    """After each of three steps every rank of every scheme holds the same bits and has had the same loss."""
    options: dict[str, Any] = {"precision": precision, "wire": wire, "bucket": bucket}
    schemes = [stage(MLP(WIDTHS), ranks, **options, **gather) for stage, gather in RUNS]
    assert steps_that_differ(schemes, batches(ranks, 3)) == {}


def test_all_schemes_are_alike_on_the_default_model() -> None:
    """The same holds, for ten steps, for MLP() on 8 ranks with 8 rows each, where no bucket has padding."""
    schemes = [stage(MLP(), 8) for stage in SCHEMES]
    assert steps_that_differ(schemes, batches(8, STEPS, rows=8, widths=MLP().widths)) == {}


@pytest.mark.parametrize("precision", ["mixed", "bf16", "fp32"])
def test_one_rank_is_one_rank(precision: str) -> None:
    """At N = 1 all four hold the same bytes and bits, send nothing and log no collective."""
    schemes = [stage(MLP(WIDTHS), 1, precision=precision, **gather) for stage, gather in RUNS]
    assert steps_that_differ(schemes, batches(1, STEPS)) == {}
    assert [scheme.bytes_comm_per_rank() for scheme in schemes] == [0] * len(RUNS)
    assert [report.traffic for scheme in schemes for report in scheme.reports] == [{}] * len(RUNS) * STEPS
    assert all(scheme.ledger.held == schemes[0].ledger.held for scheme in schemes)
    assert all(scheme.ledger.peak() == schemes[0].ledger.peak() for scheme in schemes)


@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@each_stage
def test_ranks_apart_are_alike_bit_for_bit(stage: Stage, precision: str) -> None:
    """Five ranks that each hold one row and exchange real blocks end at the bits of five rows in one process."""
    together = stage(MLP(WIDTHS), 5, precision=precision)
    alone = [stage(MLP(WIDTHS), 5, precision=precision, ring=ring) for ring in apart(5)]
    for batch in batches(5, steps=3):
        together.step(batch)
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda scheme, pair: scheme.step([pair]), alone, batch))
    for scheme, rank in zip(alone, together.ranks, strict=True):
        for band in together.states:
            assert [a.tobytes() for a in scheme.ranks[0][band]] == [a.tobytes() for a in rank[band]]
    assert [scheme.bytes_comm_per_rank() for scheme in alone] == together.ledger.sent()


# -- that what they all learn is right


def train_in_float64(model: MLP, data: list[Batch]) -> list[float]:
    """Losses of a single process that trains on the whole global batch, every line of it the textbook's."""
    theta = model.initial().astype(np.float64)
    m, v, losses = np.zeros_like(theta), np.zeros_like(theta), []
    shapes = list(pairwise(model.widths))
    cuts = np.cumsum([size for fan_in, fan_out in shapes for size in (fan_in * fan_out, fan_out)])[:-1]
    for step, batch in enumerate(data, start=1):
        x, y = (np.concatenate(parts).astype(np.float64) for parts in zip(*batch, strict=True))
        flat = np.split(theta, cuts)
        weights = [weight.reshape(shape) for weight, shape in zip(flat[::2], shapes, strict=True)]
        activations = [x]
        for depth, (weight, bias) in enumerate(zip(weights, flat[1::2], strict=True), start=1):
            z = activations[-1] @ weight + bias
            activations.append(z if depth == len(shapes) else np.maximum(z, 0))
        error = activations[-1] - y
        losses.append(float((error**2).mean()))
        delta, grads = 2 * error / error.size, []
        for depth in reversed(range(len(shapes))):
            grads += [delta.sum(axis=0), (activations[depth].T @ delta).reshape(-1)]
            delta = (delta @ weights[depth].T) * (activations[depth] > 0)
        g = np.concatenate(grads[::-1])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        theta = theta - 1e-2 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return losses


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_losses_are_those_of_one_process_in_float64(ranks: int) -> None:
    """In fp32, N ranks on N parts of a batch follow a float64 process on the whole of it."""
    data = batches(ranks, STEPS)
    model = MLP(WIDTHS)
    scheme = ZeRO2(model, ranks, precision="fp32")
    losses = [scheme.step(batch) for batch in data]
    # An fp32 rounding errs by 2^-24, relative. Sums average the errors of their terms, so sixteen
    # roundings one upon the other are ample; a single 16-bit rounding would be 2^-12.
    np.testing.assert_allclose(losses, train_in_float64(model, data), rtol=16 * 2**-24, atol=0)


@pytest.mark.parametrize(("precision", "loss"), [("fp32", "1.021900"), ("mixed", "1.0216")])
@each_stage
def test_the_published_loss(stage: Stage, precision: str, loss: str) -> None:
    """MLP() on 8 ranks, 8 rows each from seed 7, ends its tenth step at the loss that is published for every scheme."""
    scheme = stage(MLP(), 8, precision=precision)
    for batch in batches(8, STEPS, rows=8, widths=MLP().widths):
        last = scheme.step(batch)
    assert f"{last:.{len(loss) - 2}f}" == loss


@each_stage
def test_training_learns(stage: Stage) -> None:
    """On one and the same batch the loss falls at every step."""
    scheme = stage(MLP(WIDTHS), 3)
    [batch] = batches(3, steps=1)
    losses = [scheme.step(batch) for _ in range(STEPS)]
    assert all(later < earlier for earlier, later in pairwise(losses))


# -- that the comparison can fail


def trained(stage: Stage, batch: Batch) -> Scheme:
    scheme = stage(MLP(WIDTHS), 3)
    scheme.step(batch)
    return scheme


@each_stage
def test_another_batch_on_one_rank_is_found(stage: Stage) -> None:
    """If one rank is given other data, everything that any rank holds comes out different."""
    [batch], [other] = batches(3, steps=1), batches(3, steps=1, seed=8)
    reference, scheme = trained(DP, batch), trained(stage, [batch[0], other[1], batch[2]])
    everything = [(str(band), layer, rank) for band in COMPARED for rank in range(3) for layer in range(2)]
    assert differences(scheme, reference) == everything


@each_stage
@pytest.mark.parametrize("band", ["params", "master", "exp_avg", "exp_avg_sq"])
def test_one_flipped_bit_is_found(band: str, stage: Stage) -> None:
    """The last bit of one number on one rank, flipped, is found there and nowhere else, in data parallel too."""
    [batch] = batches(3, steps=1)
    reference, scheme = trained(DP, batch), trained(stage, batch)
    assert differences(scheme, reference) == []
    state = scheme.buckets[1].states[Band(band)]
    state.view(f"u{state.itemsize}")[2, 3] ^= 1
    assert differences(scheme, reference) == [(band, 1, 2)]


def test_a_flipped_bit_of_the_master_weights_stays() -> None:
    """A last bit of the master weights, flipped before a step, makes that step differ."""
    first, second = batches(3, steps=2)
    reference, scheme = trained(DP, first), trained(ZeRO1, first)
    scheme.buckets[0].states[Band.MASTER].view(np.uint32)[1, 2] ^= 1
    assert ("master", 0, 1) in steps_that_differ([reference, scheme], [second])[1, 1]


def test_a_miscounted_step_is_found() -> None:
    """With Adam's step count off by one the moments stay alike, and the weights differ on every rank."""
    first, second = batches(3, steps=2)
    reference, scheme = trained(DP, first), trained(ZeRO3, first)
    for bucket in scheme.buckets:
        bucket.updates = [count + 1 for count in bucket.updates]
    found = steps_that_differ([reference, scheme], [second])[1, 1]
    assert {(band, rank) for band, _, rank in found} == {(band, r) for band in ("params", "master") for r in range(3)}
