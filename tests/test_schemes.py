"""The schemes: what options cost and change, padding, reports, and what a user reads."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from helpers import Batch, apart, batches, bits, contents, each_gather, each_stage, sizes
from zerosim.bands import FP32, MODEL_STATES, Array, Band, DType
from zerosim.buckets import Bucket
from zerosim.counts import EventKind, Phase
from zerosim.model import MLP
from zerosim.optimizer import Adam
from zerosim.options import Gather
from zerosim.ranks import OutOfMemory, Rank
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.worlds.local import LocalRing

WIDTHS = (5, 7, 3)
SIZES = sizes(WIDTHS)
ROWS = 2
LAYERS = ["layer 1", "layer 2"]


def train(scheme: Scheme, data: list[Batch]) -> list[float]:
    return [scheme.step(batch) for batch in data]


def states(scheme: Scheme) -> Iterator[tuple[Array, Array]]:
    """Every model state [R, n] and which of its elements are padding."""
    for bucket in scheme.buckets:
        for state in bucket.states.values():
            yield state, padding(bucket, state, scheme.ring.size)


def padding(bucket: Bucket, state: Array, ranks: int) -> Array:
    """Where the flat index of an element is beyond the layer: that of a shard counts from its rank's first."""
    first = np.arange(ranks)[:, None] * state.shape[1] if state.shape[1] < bucket.padded else np.zeros((ranks, 1))
    return np.asarray(first + np.arange(state.shape[1]) >= SIZES[LAYERS.index(bucket.name)])


# -- the table


def test_the_table() -> None:
    """The four schemes, in order, shard one more of optimizer state, gradients and parameters each."""
    rows = [(stage.name, stage.optimizer, stage.grads, stage.params) for stage in SCHEMES]
    assert rows == [
        ("data parallel", "nobody", "nobody", "nobody"),
        ("ZeRO-1", "all", "nobody", "nobody"),
        ("ZeRO-2", "all", "all", "nobody"),
        ("ZeRO-3", "all", "all", "all"),
    ]
    assert replace(DP, name="ZeRO-2", optimizer=True, grads=True) == ZeRO2
    assert all(known is stage for known, stage in zip(SCHEMES, (DP, ZeRO1, ZeRO2, ZeRO3), strict=True))


@pytest.mark.parametrize(
    "shards", [("grads",), ("params",), ("grads", "params"), ("optimizer", "params")], ids="+".join
)
def test_a_stage_shards_in_order(shards: tuple[str, ...]) -> None:
    """A row that shards gradients without optimizer state, or parameters without gradients, is refused by name."""
    with pytest.raises(ValueError, match=r"'odd'.*Shard the optimizer over at least as many ranks as grads"):
        Stage("odd", **dict[str, Any](dict.fromkeys(shards, True)))


# -- construction


@each_stage
@pytest.mark.parametrize("precision", ["mixed", "bf16", "fp32"])
@pytest.mark.parametrize("ranks", [1, 5, 33])
def test_training_starts_from_the_models_initial_values(stage: Stage, precision: str, ranks: int) -> None:
    """At first the fp32 parameters are the model's, the working copies those rounded, and all else is zero."""
    model = MLP(WIDTHS, seed=3)
    scheme = stage(model, ranks, precision=precision)
    assert np.array_equal(bits(scheme.full_theta()), bits(model.initial()))
    working = model.initial().astype(scheme.options.recipe.working)
    assert np.array_equal(bits(scheme.flat(Band.PARAMS)), bits(working))
    for band in (Band.GRADS, Band.EXP_AVG, Band.EXP_AVG_SQ):
        assert not bits(scheme.flat(band)).any()


def test_a_process_that_holds_one_rank_holds_its_shard() -> None:
    """A rank alone in its process starts with its own row, and a sharded state cannot be put together there."""
    together, alone = ZeRO3(MLP(WIDTHS), 5), ZeRO3(MLP(WIDTHS), 5, ring=apart(5)[3])
    assert [rank.id for rank in alone.ranks] == [3]
    for band in alone.options.recipe.states:
        assert [a.tobytes() for a in alone.ranks[0][band]] == [a.tobytes() for a in together.ranks[3][band]]
    with pytest.raises(ValueError, match=r"ZeRO-3 shards it over 5 ranks.*\[3\]"):
        alone.flat(Band.MASTER)
    assert np.array_equal(ZeRO2(MLP(WIDTHS), 5, ring=apart(5)[3]).flat(Band.PARAMS), together.flat(Band.PARAMS))


def test_a_ring_of_another_size_is_refused() -> None:
    """A ring that does not have as many ranks as asked for is refused, with both numbers."""
    with pytest.raises(ValueError, match=r"Scheme\(ring\): a ring of 5 ranks cannot carry 3"):
        DP(MLP(WIDTHS), 3, ring=LocalRing(5))


# -- the step


@each_stage
def test_step_returns_the_mean_loss_before_the_update(stage: Stage) -> None:
    """The loss is the mean of what each rank's batch loses alone, under the parameters that the step starts from."""
    model, data = MLP(WIDTHS), batches(5, steps=2)
    scheme, losses = stage(model, 5), []
    for batch in data:
        alone = []
        for pair in batch:
            single = DP(model, 1)
            for band in (Band.PARAMS, Band.MASTER):
                for bucket, other in zip(single.buckets, np.split(scheme.flat(band), [SIZES[0]]), strict=True):
                    bucket.states[band][0] = other
            alone.append(single.step([pair]))
        losses.append((scheme.step(batch), float(np.mean(alone))))
    assert [returned for returned, _ in losses] == [mean for _, mean in losses]
    assert losses[0] != losses[1]


@each_stage
def test_forward_reads_the_working_copies(stage: Stage) -> None:
    """One flipped bit of a fp16 parameter changes the loss of the next step; one of the master weights does not."""
    [batch] = batches(5)
    loss = {}
    for band in (None, Band.PARAMS, Band.MASTER):
        scheme = stage(MLP(WIDTHS), 5)
        if band is not None:
            state = scheme.buckets[-1].states[band]
            state.view(f"u{state.itemsize}")[:, 0] ^= 1
        loss[band] = scheme.step(batch)
    assert loss[Band.MASTER] == loss[None]
    assert loss[Band.PARAMS] != loss[None]


@each_stage
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_working_copies_are_the_master_weights_rounded(stage: Stage, precision: str) -> None:
    """After a step the parameters that forward will read are the fp32 master weights, rounded once."""
    scheme = stage(MLP(WIDTHS), 5, precision=precision)
    train(scheme, batches(5, steps=2))
    rounded = scheme.full_theta().astype(scheme.options.recipe.working)
    assert np.array_equal(bits(scheme.flat(Band.PARAMS)), bits(rounded))


def test_the_optimizer_is_an_option() -> None:
    """The update is made by the Adam that was passed: from zero moments, a step moves by its learning rate."""
    scheme = ZeRO2(MLP(WIDTHS), 3, precision="fp32", optimizer=Adam(lr=0.25, eps=1e-30))
    before = scheme.full_theta()
    train(scheme, batches(3))
    moved = np.abs(scheme.full_theta() - before)[scheme.flat(Band.GRADS) != 0]
    np.testing.assert_allclose(moved, 0.25, rtol=0, atol=2**-20)  # parameters of order 1: roundings of 2^-24
    assert moved.size > 0


def local_gradients(batch: Batch) -> Array:
    """The fp16 gradients [N, P] of each rank's own batch at the initial parameters, as float64."""
    gradients = []
    for pair in batch:
        alone = DP(MLP(WIDTHS), 1)
        alone.step([pair])
        gradients.append(alone.flat(Band.GRADS).astype(np.float64))
    return np.stack(gradients)


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", [DP, ZeRO2, ZeRO3], ids=lambda stage: stage.name)
def test_gradients_are_averaged_in_the_wires_precision(stage: Stage, wire: str) -> None:
    """Gradients are the ranks' mean, but for a rounding to the wire's dtype per addition and a last one to theirs."""
    ranks = 5
    [batch] = batches(ranks)
    scheme = stage(MLP(WIDTHS), ranks, wire=wire)
    scheme.step(batch)
    each = local_gradients(batch)
    mean, partial = each.mean(axis=0), np.abs(each).sum(axis=0)  # no partial sum is larger than that of the sizes
    unit, smallest = {"fp32": (2.0**-24, 2.0**-150), "fp16": (2.0**-11, 2.0**-25)}[wire]
    summing = (ranks - 1) * (unit * partial + smallest) / ranks
    storing = 2.0**-11 * (np.abs(mean) + summing) + 2.0**-25
    error = np.abs(scheme.flat(Band.GRADS) - mean)
    assert (error <= 1.01 * (summing + storing)).all()
    assert error.any()


@each_stage
def test_a_half_wire_sends_half_and_rounds(stage: Stage) -> None:
    """wire="fp16" sends exactly half the bytes and changes what is learnt, by a fraction of what Adam moves."""
    runs = {wire: stage(MLP(WIDTHS), 5, wire=wire) for wire in ("fp32", "fp16")}
    data = batches(5, steps=3)
    for scheme in runs.values():
        train(scheme, data)
    assert 2 * runs["fp16"].bytes_comm_per_rank() == runs["fp32"].bytes_comm_per_rank()
    difference = np.abs(runs["fp16"].full_theta() - runs["fp32"].full_theta())
    assert difference.any()
    assert np.median(difference) < 0.01 * 3 * Adam().lr  # three steps move by about lr each; 2^-11 is 0.0005


# -- options that only cost


def test_gathering_the_whole_model_undoes_zero3() -> None:
    """At N = 32, gather="model" needs 0.5 + 2.0 bytes a parameter, more than ZeRO-2, for the same traffic and bits."""
    model, ranks = MLP(), 32
    [batch] = batches(ranks, widths=model.widths)
    at_once, by_layer = ZeRO3(model, ranks, gather="model"), ZeRO3(model, ranks)
    assert at_once.step(batch) == by_layer.step(batch)
    peak = at_once.reports[-1].peak_without_activations.by_band
    shards = sum(peak.get(band, 0) for band in MODEL_STATES)
    assert (shards, peak[Band.GATHERED]) == (16 * model.n_params // ranks, 2 * model.n_params)
    assert (shards + peak[Band.GATHERED]) / model.n_params == 0.5 + 2.0
    assert ZeRO2(model, ranks).bytes_per_param() == 2 + 14 / ranks == 2.4375
    assert at_once.reports[-1].sent_by_collective() == by_layer.reports[-1].sent_by_collective()
    assert contents(at_once) == contents(by_layer)
    assert at_once.peak_bytes_per_param() > by_layer.peak_bytes_per_param()


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_other_bucket_boundaries_change_the_order_of_the_sums(ranks: int) -> None:
    """One bucket for the model in one scheme only: the same bits at N = 2, as addition commutes, a drift from N = 3."""
    model, steps = MLP(), 10
    by_layer, by_model = DP(model, ranks, precision="fp32"), ZeRO2(model, ranks, precision="fp32", bucket="model")
    largest = []
    for batch in batches(ranks, steps=steps, rows=4, widths=model.widths):
        by_layer.step(batch)
        by_model.step(batch)
        largest.append(float(np.abs(by_layer.full_theta() - by_model.full_theta()).max()))
    if ranks == 2:
        assert largest == [0.0] * steps
    else:
        assert 0 < largest[0] < 1e-6  # some last bits of parameters of order 0.1 to 1, hence 2^-27 to 2^-24 each
        assert 0 < min(largest) <= max(largest) < 1e-5


@each_stage
@pytest.mark.parametrize("bucket", ["layer", "model"])
def test_buckets_cover_the_model(stage: Stage, bucket: str) -> None:
    """A bucket is a layer, or the model, padded to N equal chunks; a state is whole, or one chunk if sharded."""
    ranks = 5
    scheme = stage(MLP(WIDTHS), ranks, bucket=bucket)
    sizes = SIZES if bucket == "layer" else [sum(SIZES)]
    assert [each.padded for each in scheme.buckets] == [-(-size // ranks) * ranks for size in sizes]
    sharded = {Band.PARAMS: stage.params, Band.GRADS: stage.grads}
    for each in scheme.buckets:
        for band, state in each.states.items():
            length = each.padded // ranks if sharded.get(band, stage.optimizer) else each.padded
            assert state.shape == (ranks, length)


# -- padding


@each_stage
@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@pytest.mark.parametrize("ranks", [5, 33])
def test_padding_is_never_read(stage: Stage, precision: str, ranks: int) -> None:
    """NaN in all the padding of all states changes no bit of anything else, nor the loss, in the next steps."""
    clean, filled = (stage(MLP(WIDTHS), ranks, precision=precision) for _ in range(2))
    first, *later = batches(ranks, steps=3)
    for scheme in (clean, filled):
        scheme.step(first)
    for state, beyond in states(filled):
        assert beyond.any()
        state[beyond] = np.nan
    assert train(filled, later) == train(clean, later)
    for (mine, beyond), (twin, _) in zip(states(filled), states(clean), strict=True):
        assert np.array_equal(bits(mine)[~beyond], bits(twin)[~beyond])
    assert np.array_equal(bits(filled.full_theta()), bits(clean.full_theta()))


class DirtyRing(LocalRing):
    """The local ring with memory as one gets it: full of something else, here NaN, or of targets -1."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        array = super().empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        return array


@each_stage
@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@pytest.mark.parametrize("ranks", [5, 33])
def test_padding_stays_zero(stage: Stage, precision: str, ranks: int) -> None:
    """After training in dirty memory every bit of padding is zero, in every state of every rank, and no state is."""
    scheme = stage(MLP(WIDTHS), ranks, precision=precision, ring=DirtyRing(ranks))
    train(scheme, batches(ranks, steps=3))
    for state, beyond in states(scheme):
        assert not bits(state)[beyond].any()
        assert bits(state)[~beyond].any()


# -- what a user reads


@each_stage
def test_full_theta_is_a_copy_in_fp32_without_padding(stage: Stage) -> None:
    """full_theta is a new fp32 vector of n_params at every call: writing to it changes nothing."""
    scheme = stage(MLP(WIDTHS), 5)
    train(scheme, batches(5))
    before, theta = contents(scheme), scheme.full_theta()
    assert (str(theta.dtype), theta.shape) == ("float32", (sum(SIZES),))
    theta[:] = np.nan
    assert contents(scheme) == before
    assert np.isfinite(scheme.full_theta()).all()


@each_stage
def test_ranks_are_rows(stage: Stage) -> None:
    """ranks[i] is row i of every state, for reading only; slices and negative indices work as in a list."""
    scheme = stage(MLP(WIDTHS), 5)
    train(scheme, batches(5))
    assert [rank.id for rank in scheme.ranks] == [0, 1, 2, 3, 4]
    assert [rank.id for rank in scheme.ranks[1::2]] == [1, 3]
    assert scheme.ranks[-1].id == 4
    with pytest.raises(IndexError):
        scheme.ranks[5]
    rank = scheme.ranks[3]
    assert isinstance(rank, Rank)
    for band in scheme.options.recipe.states:
        rows = [bucket.states[band][3] for bucket in scheme.buckets]
        assert [view.tobytes() for view in rank[band]] == [row.tobytes() for row in rows]
        assert all(np.shares_memory(view, row) for view, row in zip(rank[band], rows, strict=True))
    with pytest.raises(ValueError, match="read-only"):
        rank[Band.PARAMS][0][0] = 1
    assert rank.held() == scheme.reports[-1].resident


@each_stage
def test_one_report_per_step(stage: Stage) -> None:
    """A report has its number, the loss that was returned, FLOPs and time by phase, and the bytes at rest."""
    ranks = 5
    scheme = stage(MLP(WIDTHS), ranks)
    losses = train(scheme, batches(ranks, steps=3))
    products = [2 * ROWS * fan_in * fan_out for fan_in, fan_out in pairwise(WIDTHS)]
    padded = [-(-size // ranks) * ranks for size in SIZES]
    assert [(report.step, report.complete, report.loss) for report in scheme.reports] == [
        (step, True, loss) for step, loss in enumerate(losses, start=1)
    ]
    for report in scheme.reports:
        assert report.flops == {
            Phase.FORWARD: sum(products),
            Phase.BACKWARD: 2 * sum(products) - products[0],
            Phase.OPTIMIZER: 13 * sum(padded) // (ranks if stage.optimizer else 1),
        }
        assert set(report.seconds) == set(Phase) - {Phase.HOST_OPTIMIZER}
        assert min(report.seconds.values()) >= 0
        assert sum(report.resident.values()) == scheme.ledger.total <= report.peak_without_activations.total
    assert {event.phase for event in scheme.reports[-1].events} == set(Phase) - {Phase.HOST_OPTIMIZER}
    assert sum(report.sent()[0] for report in scheme.reports) == scheme.ledger.sent()[0]


@each_gather
def test_nothing_outlives_a_step_but_the_states(stage: Stage, gather: Gather) -> None:
    """Between steps a rank holds its model states and nothing else: no gathered layer, block or activation."""
    scheme = stage(MLP(WIDTHS), 5, gather=gather)
    before = scheme.ranks[0].held()
    train(scheme, batches(5, steps=2))
    assert scheme.ranks[0].held() == before
    assert set(before) == set(scheme.states)
    assert {band for band, nbytes in scheme.ledger.held.items() if nbytes} == set(before)


@each_gather
def test_out_of_memory_leaves_a_report(stage: Stage, gather: Gather) -> None:
    """A step that passes the capacity reports what it did, gives back all but the states, and changes none."""
    ranks, rows = 5, 11
    [batch] = batches(ranks, rows=rows)
    free = stage(MLP(WIDTHS), ranks, gather=gather)
    free.step(batch)
    peak = free.reports[-1].peak
    scheme = stage(MLP(WIDTHS), ranks, gather=gather, capacity=peak.total - 1)
    before, at_rest = contents(scheme), scheme.ranks[0].held()
    for step in (1, 2):
        with pytest.raises(OutOfMemory) as caught:
            scheme.step(batch)
        report = scheme.reports[-1]
        assert len(scheme.reports) == report.step == step
        assert not report.complete
        assert np.isnan(report.loss)
        assert report.peak.total <= peak.total - 1 < caught.value.asked + sum(caught.value.held.values())
        assert report.flops[Phase.FORWARD] == free.reports[-1].flops[Phase.FORWARD]
        assert report.resident == at_rest == scheme.ranks[0].held()
        assert scheme.ledger.phase is Phase.OTHER
    assert contents(scheme) == before
    assert scheme.updates == 0


@each_stage
def test_a_card_of_the_peak_suffices(stage: Stage) -> None:
    """A capacity of exactly the peak, in bytes, carries the run, to the same bits."""
    [batch] = batches(5, rows=11)
    free = stage(MLP(WIDTHS), 5)
    free.step(batch)
    scheme = stage(MLP(WIDTHS), 5, capacity=free.reports[-1].peak.total)
    scheme.step(batch)
    assert contents(scheme) == contents(free)


def test_models_can_be_shared() -> None:
    """One model serves any number of runs: training one leaves what the next starts from."""
    model = MLP(WIDTHS)
    first = ZeRO1(model, 3)
    start = first.full_theta()
    train(first, batches(3))
    assert not np.array_equal(first.full_theta(), start)
    assert np.array_equal(bits(ZeRO1(model, 3).full_theta()), bits(start))


@each_stage
def test_flat_gradients_are_the_averaged_ones(stage: Stage) -> None:
    """Put together from the ranks, every stage's gradients are data parallel's, also where a rank keeps its own too."""
    flat = []
    for each in (DP, stage):
        scheme = each(MLP(WIDTHS), 3)
        train(scheme, batches(3))
        flat.append(scheme.flat(Band.GRADS))
    assert flat[0].tobytes() == flat[1].tobytes()


class Counted(MLP):
    """An MLP that takes integers, as a model of language does."""

    def check(self, batch: Any, ranks: int) -> tuple[Any, Any]:
        x, y = super().check(batch, ranks)
        return x.astype(np.int64), y


@pytest.mark.usefixtures("as_users_call_it")
def test_a_batch_is_held_as_it_is() -> None:
    """Integers of 8 bytes are held as such, beside targets of 4 bytes."""
    scheme = DP(Counted([5, 3]), 2)
    scheme.step([(np.ones((7, 5), np.float32), np.ones((7, 3), np.float32))] * 2)
    first, second, *_ = [event for event in scheme.reports[0].events if event.unit == "batch"]
    assert (first.nbytes, second.nbytes) == (8 * 7 * 5, 4 * 7 * 3)


@each_stage
def test_what_is_sent_and_held_in_flight_is_some_layers(stage: Stage) -> None:
    """Every message, and every block that it travels in, is booked for the layer it is of, in whole bytes."""
    scheme = stage(MLP((3, 5, 2)), 3)
    x, y = np.ones((2, 3), FP32), np.ones((2, 2), FP32)
    scheme.step([(x, y)] * 3)
    flying = [event for event in scheme.reports[-1].events if event.name == Band.BLOCKS or event.kind is EventKind.SEND]
    assert {event.unit for event in flying} == {"layer 1", "layer 2"}
    assert {type(event.nbytes) for event in flying} == {int}
    assert {type(traffic.sent_each) for traffic in scheme.reports[-1].traffic.values()} == {int}
    assert {type(traffic.received_each) for traffic in scheme.reports[-1].traffic.values()} == {int}


def test_events_are_of_whom_they_are() -> None:
    """Activations are the batch's, a layer's or the loss's, and each layer's arithmetic is logged under its name."""
    scheme = ZeRO2(MLP((5, 7, 3)), 3)
    scheme.step([(np.ones((2, 5), FP32), np.ones((2, 3), FP32))] * 3)
    events = scheme.reports[-1].events
    held = [event.unit for event in events if event.kind is EventKind.HOLD and event.name == Band.ACTIVATIONS]
    # The batch's two parts; outputs; the loss's gradient; and backward through layer 2, which needs its input's.
    assert held == ["batch", "batch", "layer 1", "layer 2", "loss", "layer 2"]
    done = [(str(event.name), event.unit) for event in events if event.kind is EventKind.COMPUTE]
    assert done == [
        *[("forward", f"layer {index}") for index in (1, 2)],
        *[("backward", f"layer {index}") for index in (2, 1)],
        *[("optimizer", f"layer {index}") for index in (1, 2)],
    ]
