"""The closed forms, against small cases worked by hand."""

import numpy as np
import pytest

from helpers import each_stage
from zerosim import theory
from zerosim.bands import Band
from zerosim.schemes import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.theory import Job

# One layer of 5 inputs and 3 outputs on four ranks: 5 * 3 weights and 3 biases are 18 parameters, a chunk is
# ceil(18 / 4) = 5, and the bucket 4 * 5 = 20 with two elements of padding, both in rank 3's chunk.
ONE = (((5, 3),),)
P, C, L, PAD = 5 * 3 + 3, 5, 4 * 5, 2


def test_sizes_and_chunks() -> None:
    """A bucket has its layers' weights and biases; a chunk is an Nth of it, rounded up."""
    job = Job(DP, (((7, 5), (5, 3)), ((3, 2),)), 4)
    assert job.sizes() == [7 * 5 + 5 + 5 * 3 + 3, 3 * 2 + 2]
    assert job.chunks() == [15, 2]  # of 58 and 8


def test_a_chunk_is_at_least_one_element() -> None:
    """With more ranks than parameters a chunk is one element, and the bucket as long as the world is large."""
    assert Job(ZeRO3, ONE, 37).chunks() == [1]
    assert sum(theory.resident(Job(ZeRO3, ONE, 37)).values()) == 16 * 1
    assert sum(theory.resident(Job(DP, ONE, 37)).values()) == 16 * 37


# -- resident

RESIDENT = {  # in the order params, grads, master, exp_avg, exp_avg_sq
    DP: [2 * L, 2 * L, 4 * L, 4 * L, 4 * L],
    ZeRO1: [2 * L, 2 * L, 4 * C, 4 * C, 4 * C],
    ZeRO2: [2 * L, 2 * C, 4 * C, 4 * C, 4 * C],
    ZeRO3: [2 * C, 2 * C, 4 * C, 4 * C, 4 * C],
}
STATES = [Band.PARAMS, Band.GRADS, Band.MASTER, Band.EXP_AVG, Band.EXP_AVG_SQ]


@each_stage
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_resident_by_hand(stage: Stage, precision: str) -> None:
    """Whole states take L elements, sharded ones C; the optimizer's are sharded first, the parameters last."""
    expected = dict(zip(STATES, RESIDENT[stage], strict=True))
    assert theory.resident(Job(stage, ONE, 4, precision=precision)) == expected


@each_stage
def test_resident_in_fp32_by_hand(stage: Stage) -> None:
    """Without master weights params and grads take four bytes each, and no band is there in name only."""
    elements = {DP: [L, L, L, L], ZeRO1: [L, L, C, C], ZeRO2: [L, C, C, C], ZeRO3: [C, C, C, C]}[stage]
    bands = [Band.PARAMS, Band.GRADS, Band.EXP_AVG, Band.EXP_AVG_SQ]
    expected = {band: 4 * count for band, count in zip(bands, elements, strict=True)}
    assert theory.resident(Job(stage, ONE, 4, precision="fp32")) == expected


@each_stage
def test_buckets_are_padded_one_by_one(stage: Stage) -> None:
    """Two buckets of 18 and 8 on seven ranks are chunks of 3 and 2: what they hold is the sum of the two."""
    both = theory.resident(Job(stage, (((5, 3),), ((3, 2),)), 7))
    first, second = theory.resident(Job(stage, ONE, 7)), theory.resident(Job(stage, (((3, 2),),), 7))
    assert both == {band: first[band] + second[band] for band in first}
    assert both[Band.PARAMS] == 2 * (3 + 2) * (1 if stage.params else 7)


@each_stage
def test_one_rank_shards_nothing(stage: Stage) -> None:
    """At N = 1 every stage is data parallel: in bytes, padding, traffic, work and peak."""
    one, data_parallel = Job(stage, ONE, 1, rows=2), Job(DP, ONE, 1, rows=2)
    for formula in (theory.resident, theory.padding, theory.traffic, theory.padding_sent, theory.flops, theory.peak):
        assert formula(one) == formula(data_parallel)
    assert sum(theory.resident(one).values()) == 16 * P
    assert (theory.padding(one), theory.traffic(one), theory.padding_sent(one)) == ([0], {}, [0])


# -- padding

PADDING = {  # bytes per padding element that is whole, so on every rank, and that is in rank 3's shard
    DP: (2 + 2 + 12, 0),
    ZeRO1: (2 + 2, 12),
    ZeRO2: (2, 2 + 12),
    ZeRO3: (0, 2 + 2 + 12),
}


@each_stage
def test_padding_by_hand(stage: Stage) -> None:
    """A whole state's padding is on every rank, a sharded one's only where the padding is."""
    everywhere, owner = PADDING[stage]
    assert theory.padding(Job(stage, ONE, 4)) == [
        everywhere * PAD,
        everywhere * PAD,
        everywhere * PAD,
        (everywhere + owner) * PAD,
    ]


@pytest.mark.parametrize("n", [2, 3, 4, 7, 11, 17, 37])
@pytest.mark.parametrize(("stage", "whole"), [(DP, 16), (ZeRO1, 4), (ZeRO2, 2), (ZeRO3, 0)])
def test_padding_is_what_is_not_logical(n: int, stage: Stage, whole: int) -> None:
    """Over all ranks, what is resident less padding is N times the whole states and one copy of the sharded."""
    job = Job(stage, (((5, 3),), ((3, 2),)), n)
    logical = (5 * 3 + 3) + (3 * 2 + 2)
    held = n * sum(theory.resident(job).values())
    assert held - sum(theory.padding(job)) == (n * whole + (16 - whole)) * logical


def test_whole_chunks_can_be_padding() -> None:
    """Eight parameters on seven ranks are chunks of two: the last three hold nothing else under ZeRO-3."""
    job = Job(ZeRO3, (((3, 2),),), 7)
    assert theory.padding(job) == [0, 0, 0, 0, 16 * 2, 16 * 2, 16 * 2]


# -- traffic


@pytest.mark.parametrize(("wire", "w"), [("fp32", 4), ("fp16", 2)])
def test_traffic_by_hand(wire: str, w: int) -> None:
    """Three blocks of five elements past each of four ranks, for each collective and each gather."""
    once = 3 * 5 * w
    assert [theory.traffic(Job(stage, ONE, 4, wire=wire)) for stage in SCHEMES] == [
        {"all-reduce": {Band.GRADS: 2 * once}},
        {"reduce-scatter": {Band.GRADS: once}, "all-gather": {Band.PARAMS: once}},
        {"reduce-scatter": {Band.GRADS: once}, "all-gather": {Band.PARAMS: once}},
        {"reduce-scatter": {Band.GRADS: once}, "all-gather": {Band.PARAMS: 2 * once}},
    ]


def test_traffic_adds_buckets() -> None:
    """Chunks of 3 and 2 on seven ranks travel six hops each."""
    assert theory.traffic(Job(DP, (((5, 3),), ((3, 2),)), 7)) == {"all-reduce": {Band.GRADS: 2 * 6 * (3 + 2) * 4}}


@each_stage
def test_padding_sent_by_hand(stage: Stage) -> None:
    """Rank 3's padded chunk is not sent by rank 3 in a reduce-scatter, nor by rank 0, where it ends, in a gather."""
    reduce_scatter = np.array([1, 1, 1, 0]) * PAD * 4
    all_gather = np.array([0, 1, 1, 1]) * PAD * 4
    expected = reduce_scatter + (2 if stage.params else 1) * all_gather
    assert theory.padding_sent(Job(stage, ONE, 4)) == expected.tolist()


@pytest.mark.parametrize("n", [2, 3, 4, 7, 11, 17, 37])
@pytest.mark.parametrize(("stage", "collectives"), [(DP, 2), (ZeRO1, 2), (ZeRO2, 2), (ZeRO3, 3)])
def test_padding_sent_adds_up(n: int, stage: Stage, collectives: int) -> None:
    """Over all ranks every collective carries each element of padding N-1 times."""
    pads = sum(-(-size // n) * n - size for size in (5 * 3 + 3, 3 * 2 + 2))
    job = Job(stage, (((5, 3),), ((3, 2),)), n)
    assert sum(theory.padding_sent(job)) == collectives * (n - 1) * pads * 4


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (DP, {"all-reduce": 2 * 6}),
        (ZeRO1, {"reduce-scatter": 6, "all-gather": 6}),
        (ZeRO2, {"reduce-scatter": 6, "all-gather": 6}),
        (ZeRO3, {"reduce-scatter": 6, "all-gather": 2 * 6}),
    ],
)
def test_messages_by_hand(stage: Stage, expected: dict[str, int]) -> None:
    """Two buckets on four ranks: three messages each for a reduce-scatter or an all-gather, six for an all-reduce."""
    assert theory.messages(Job(stage, (((5, 3),), ((3, 2),)), 4)) == expected
    assert theory.messages(Job(stage, ONE, 1)) == {}


# -- work


@each_stage
def test_flops_by_hand(stage: Stage) -> None:
    """Two per weight and row forward; four backward but two in the first layer; 13 per element that is updated."""
    job = Job(stage, (((7, 5),), ((5, 3),)), 4, rows=11)  # 40 and 18 parameters: chunks of 10 and 5
    assert theory.flops(job) == {
        "forward": 2 * 11 * 7 * 5 + 2 * 11 * 5 * 3,
        "backward": 2 * 11 * 7 * 5 + 4 * 11 * 5 * 3,
        "optimizer": 13 * (10 + 5) * (1 if stage.optimizer else 4),
    }


# -- peak

ROWS = 2
# Bytes of activations per instant: what is alive, in widths, times rows of four bytes.
ROW = 4 * ROWS


@pytest.mark.parametrize(
    ("stage", "extra"),
    [
        (DP, {Band.BLOCKS: 2 * 4 * C}),
        (ZeRO1, {Band.BLOCKS: 2 * 4 * C}),
        (ZeRO2, {Band.UNREDUCED: 2 * L, Band.BLOCKS: 2 * 4 * C}),
        (ZeRO3, {Band.GATHERED: 2 * L, Band.BLOCKS: 2 * 4 * C}),  # equal to a layer and its gradients: the first stands
    ],
)
def test_peak_without_activations_by_hand(stage: Stage, extra: dict[str, int]) -> None:
    """Beside the states the highest instant has the ring's blocks, a full layer's gradients, or a gathered layer."""
    job = Job(stage, ONE, 4, ROWS)
    assert theory.peak_without_activations(job) == {**theory.resident(job), **extra}


@pytest.mark.parametrize(
    ("stage", "rows", "extra", "widths"),
    [
        # Few rows: the gradients are on their way, x alone is left.
        (DP, 1, {Band.BLOCKS: 2 * 4 * C}, 5),
        (ZeRO1, 1, {Band.BLOCKS: 2 * 4 * C}, 5),
        (ZeRO2, 1, {Band.UNREDUCED: 2 * L, Band.BLOCKS: 2 * 4 * C}, 5),
        # Backward gathers: x, y and the gradient of y.
        (ZeRO3, 1, {Band.GATHERED: 2 * L, Band.BLOCKS: 2 * 4 * C}, 5 + 3 + 3),
        # Many rows: the loss, x, y, the target and the gradient of y.
        (DP, 100, {}, 5 + 3 + 3 + 3),
        (ZeRO1, 100, {}, 5 + 3 + 3 + 3),
        (ZeRO2, 100, {}, 5 + 3 + 3 + 3),
        (ZeRO3, 100, {}, 5 + 3 + 3 + 3),
    ],
)
def test_peak_by_hand(stage: Stage, rows: int, extra: dict[str, int], widths: int) -> None:
    """With activations the instant depends on the rows: few, and the ring decides; many, and the loss does."""
    job = Job(stage, ONE, 4, rows)
    assert theory.peak(job) == {**theory.resident(job), **extra, Band.ACTIVATIONS: 4 * rows * widths}


def test_peak_of_two_layers_by_hand() -> None:
    """A gathered layer, its unreduced gradients and all that backward keeps alive make ZeRO-3's peak."""
    job = Job(ZeRO3, (((7, 5),), ((5, 3),)), 7, ROWS, "fp32")  # 40 and 18 parameters: chunks of 6 and 3
    first = 7 * 6
    # Layer 1 going back: its output is freed before its gradients are full, but not before they are allocated.
    alive = 7 + 5 + 5  # x, the hidden layer, and the gradient of the hidden layer
    assert theory.peak(job) == {
        **theory.resident(job),
        Band.GATHERED: 4 * first,
        Band.UNREDUCED: 4 * first,
        Band.ACTIVATIONS: ROW * alive,
    }


def test_gathering_the_model_holds_it_all() -> None:
    """With gather="model" both layers are gathered while the larger's gradients are reduced."""
    job = Job(ZeRO3, (((7, 5),), ((5, 3),)), 7, ROWS, gather="model")
    first, second = 7 * 6, 7 * 3
    assert theory.peak_without_activations(job) == {
        **theory.resident(job),
        Band.GATHERED: 2 * (first + second),
        Band.UNREDUCED: 2 * first,
        Band.BLOCKS: 2 * 4 * 6,
    }


def test_the_moments_of_gathering_everything_at_once() -> None:
    """Bucket upon bucket is gathered, 2 bytes for each padded parameter, and only then does anything compute."""
    job = Job(row=ZeRO3, buckets=(((2, 3),), ((3, 5),)), ranks=2, rows=1, gather="model")
    first, second = 2 * 5 * 2, 2 * 10 * 2  # of 2·3 + 3 = 9 and 3·5 + 5 = 20 parameters, in two chunks each
    moments = list(theory.moments(job))
    gathered = [moment.get(Band.GATHERED, 0) for moment in moments]
    batch = 4 * (2 + 5)
    computing = next(index for index, moment in enumerate(moments) if moment.get(Band.ACTIVATIONS, 0) > batch)
    assert list(dict.fromkeys(gathered[: computing + 1])) == [0, first, first + second]
    assert gathered[computing] == first + second


def test_a_job_without_rows_has_no_activations() -> None:
    """The rows of a batch are for activations alone: without any, the peak is the same as the one without them."""
    for stage in SCHEMES:
        job = Job(row=stage, buckets=(((7, 11),),), ranks=3)
        assert theory.peak(job) == theory.peak_without_activations(job)


def test_a_layer_at_a_time_is_what_is_usual() -> None:
    """A job that does not say otherwise gathers by layer."""
    buckets = (((5, 7),), ((7, 3),))
    usual, named = Job(ZeRO3, buckets, 3, 2), Job(ZeRO3, buckets, 3, 2, gather="layer")
    at_once = Job(ZeRO3, buckets, 3, 2, gather="model")
    assert usual == named
    assert theory.peak(usual) == theory.peak(named) != theory.peak(at_once)


def test_a_block_of_int8_carries_a_scale_for_each_256_numbers() -> None:
    """ZeRO-3 gathers twice, and a block is a byte for each number and an fp32 for each 256 or what is left."""
    job = theory.Job(ZeRO3, (((64, 48),),), 4, 2, wire_params="int8")
    chunk = (64 * 48 + 48) // 4
    assert theory.traffic(job)["all-gather"] == {Band.PARAMS: 2 * (4 - 1) * (chunk + 4 * -(-chunk // 256))}
    assert theory.traffic(job)["reduce-scatter"] == {Band.GRADS: (4 - 1) * 4 * chunk}


@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.name)
def test_nodes_change_nothing_of_what_a_row_without_groups_holds(row: Stage) -> None:
    """Pieces are the ranks' own in their order, and so is the padding in them; what leaves a node is apart."""
    five = (((4, 1),),)  # on four ranks three elements of padding, one with rank 2 and two with rank 3
    plain, nodes = Job(row, five, 4), Job(row, five, 4, node=2)
    for formula in (theory.resident, theory.peak, theory.traffic, theory.padding, theory.padding_sent):
        assert formula(plain) == formula(nodes)
    assert theory.padding(Job(ZeRO3, five, 4, node=2)) == [0, 0, 16, 2 * 16]
