"""Rows with groups, kept copies and places: what they hold and send, and what is plain about them where they are."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from helpers import EVERYWHERE, batches, draw, lab_settings, nonzero, padding_sent, traffic, wires
from zerosim import theory
from zerosim.bands import FP32, Array, Band, Place
from zerosim.checkpoints.load import load
from zerosim.checkpoints.save import save
from zerosim.checks import compare, sanitizer
from zerosim.checks.reference import Reference
from zerosim.comm import Comm
from zerosim.counts import Report
from zerosim.ledger import Ledger
from zerosim.model import MLP
from zerosim.options import Gather, Sync
from zerosim.ranks import OutOfMemory, Ranks, Workspace
from zerosim.records.results import Settings
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.stages import (
    HFSDP,
    HPZ,
    HSDP,
    OFFLOADABLE,
    ROWS,
    HSDPKept,
    Infinity,
    Offload1,
    Offload2,
    Over,
    ZeRO1Group,
    ZeRO2Group,
    ZeRO3Kept,
)  # fmt: skip
from zerosim.worlds.dry import DryRing, Shapes
from zerosim.worlds.local import LocalRing

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def valid() -> Iterator[Stage]:
    """Every row that makes sense."""
    offloads = [(), ("optimizer",), ("optimizer", "grads"), ("optimizer", "params"), OFFLOADABLE]
    stays: list[Any] = [True, False, "group"]
    for optimizer, grads, params, reshard, offload in product(Over, Over, Over, stays, offloads):
        name = f"{optimizer}, {grads}, {params}, {reshard}, {offload}"
        try:
            yield Stage(name, optimizer, grads, params, reshard_after_forward=reshard, offload=offload)
        except ValueError:
            continue


VALID = list(valid())
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Stage, int, tuple[int, ...], int, dict[str, Any]]:
    """A row, N, widths, rows of a batch and options that go together, those that the closed forms know."""
    row, node, replicas = draw(st.sampled_from(VALID)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    precision, accumulate = draw(st.sampled_from(EVERYWHERE)), draw(st.integers(1, 3))
    grouped = row.two_axes or row.reshard_after_forward == "group"
    options = {
        "node": node if grouped or draw(st.booleans()) else None,
        "precision": precision,
        "wire": draw(wires(precision)),
        "wire_params": draw(st.sampled_from([None, "fp32" if precision == "fp32" else "int8"])),
        "gather": draw(st.sampled_from(get_args(Gather))),
        "accumulate": accumulate,
        "sync": draw(st.sampled_from([None, *get_args(Sync)])),
    }
    widths = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    return row, node * replicas, widths, accumulate * draw(st.integers(1, 2)), options


def runs(row: Stage, options: dict[str, Any]) -> bool:
    """Whether the row gathers nothing, or is in groups that have something to gather."""
    return not ("params" in row.offload and row.params is Over.GROUP and options["node"] == 1)


# -- predictions


@settings(max_examples=50)
@given(trainings(), st.sampled_from(get_args(Gather)))
@example((HSDP, 15, (7, 5, 3), 2, {"node": 5}), "layer")
@example((HPZ, 6, (7, 5, 3), 2, {"node": 2, "precision": "bf16", "wire": "bf16", "accumulate": 2}), "layer")
@example((Infinity, 1, (7, 5, 3), 1, {"wire_params": "int8"}), "layer")
def test_every_count_is_the_predicted_one(
    training: tuple[Stage, int, tuple[int, ...], int, dict[str, Any]], bucket: Gather
) -> None:
    """Held by either place, sent by link, copied, computed: integers, by band and by rank, of any row that makes sense.

    The instants, too, come in the order in which they are predicted.
    """
    row, n, widths, rows, options = training
    if not runs(row, {"node": None, **options}):
        return
    layers = tuple(pairwise(widths))
    job = theory.Job(row, tuple((each,) for each in layers) if bucket == "layer" else (layers,), n, rows, **options)
    scheme = row(MLP(widths), n, bucket=bucket, **options)
    with np.errstate(all="ignore"):
        for batch in batches(n, 2, rows, widths):
            scheme.step(batch)
    report = scheme.reports[-1]
    assert nonzero(report.resident) == nonzero(theory.resident(job))
    assert nonzero(report.host) == nonzero(theory.host_resident(job))
    assert nonzero(report.peak.by_band) == theory.peak(job)
    assert nonzero(report.peak_without_activations.by_band) == theory.peak_without_activations(job)
    assert nonzero(report.host_peak.by_band) == theory.host_peak(job)
    sent = {(name, band): [nbytes] * n for name, bands in theory.traffic(job).items() for band, nbytes in bands.items()}
    assert {key: each for key, each in traffic(report).items() if any(each)} == sent
    outside = {(name, band): ranks for name, bands in theory.outside(job).items() for band, ranks in bands.items()}
    for key, moved in report.traffic.items():
        expected = outside.get(key, [0] * n)
        assert moved.outside.tolist() == expected
        assert moved.node_outside == sum(expected[: options.get("node") or n])
        assert moved.received.tolist() == moved.sent.tolist()
    told = Counter[str]()
    for (name, _), moved in report.traffic.items():
        told[name] += moved.messages
    assert nonzero(told) == theory.messages(job)
    assert (padding_sent(report) or [0] * n) == theory.padding_sent(job)
    assert report.padding == theory.padding(job)
    assert report.copies == theory.copies(job)
    assert dict(report.flops) == {phase: count for phase, count in theory.flops(job).items() if count}
    held = iter([sum(report.resident.values()), *(event.held for event in report.events)])
    assert all(any(here == sum(instant.values()) for here in held) for instant in theory.moments(job))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(("n", "node"), [(1, 1), (2, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("bucket", ["layer", "model"])
def test_what_ranks_tell_each_other_is_as_predicted(row: Stage, n: int, node: int, bucket: Gather) -> None:
    """Their rows, the sums of squares, and for each weight and bias whether they have a gradient of it: tags, bytes,
    messages, what leaves a node, and the instants at which it is held, as integers."""
    widths, layers = (7, 5, 3), ((7, 5), (5, 3))
    scheme = row(MLP(widths), n, node=node, bucket=bucket, clip=1.0, uneven=True, find_unused=True)
    scheme.step(draw(n, 2, widths))
    report, buckets = scheme.reports[-1], (layers,) if bucket == "model" else tuple((each,) for each in layers)
    job = theory.Job(row, buckets, n, 2, node=node, clip=True, uneven=True, find_unused=True)
    tags = {"rows", "norm", "used"}
    sent = {tag: moved.sent.tolist() for (_, tag), moved in report.traffic.items() if tag in tags and n > 1}
    predicted = theory.traffic(job).get("all-gather", {})
    assert sent == {tag: [nbytes] * n for tag, nbytes in predicted.items() if tag in tags}
    assert sent.get("used", [0] * n) == [(n - 1) * 4 * 4] * n  # two weights and two biases, in fp32
    outside = {tag: moved.outside.tolist() for (_, tag), moved in report.traffic.items() if tag in tags and n > 1}
    assert outside == {tag: each for tag, each in theory.outside(job).get("all-gather", {}).items() if tag in tags}
    messages = Counter[str]()
    for (name, _), moved in report.traffic.items():
        messages[name] += moved.messages
    assert nonzero(messages) == theory.messages(job)
    held = iter([sum(report.resident.values()), *(event.held for event in report.events)])
    assert all(any(here == sum(instant.values()) for here in held) for instant in theory.moments(job))
    assert nonzero(report.peak.by_band) == theory.peak(job)


def test_rows_that_make_sense() -> None:
    """10 choices of who is sharded over whom; what is gathered may stay; on the host is what is updated there."""
    over = [(row.optimizer, row.grads, row.params) for row in VALID]
    levels = list(Over)
    ordered = {each for each in product(levels, repeat=3) if sorted(each, key=levels.index, reverse=True) == list(each)}
    assert set(over) == ordered
    assert len(ordered) == 10
    stay = Counter(row.reshard_after_forward for row in VALID if not row.offload)
    assert stay == {True: 10, False: 4, "group": 1}  # gathered at all: params over the group (3) or over all (1)
    offloaded = [row for row in VALID if "params" in row.offload]
    assert all(row.params and "optimizer" in row.offload for row in offloaded)


# -- numbers that can be checked by hand

P = 64 * 128 + 128  # of one layer, which 32 ranks divide
N, S, D = 32, 8, 4


def one_step(row: Stage, **options: Any) -> Report:
    """A step of one layer of P parameters on N ranks, in nodes of S unless told otherwise."""
    scheme = row(MLP((64, 128)), N, **{"node": S, **options})
    scheme.step(draw(N, 1, (64, 128)))
    return scheme.reports[-1]


@pytest.mark.parametrize(
    ("row", "card", "host"),
    [
        (HSDP, 16 * P // S, 0),
        (HSDPKept, 16 * P // S, 0),
        (ZeRO1Group, 4 * P + 12 * P // S, 0),
        (ZeRO2Group, 2 * P + 14 * P // S, 0),
        (HFSDP, 4 * P // S + 12 * P // N, 0),
        (HPZ, 16 * P // N, 0),
        (ZeRO3Kept, 16 * P // N, 0),
        (Offload1, 4 * P, 12 * P // N),
        (Offload2, 2 * P, 14 * P // N),
        (Infinity, 0, 16 * P // N),
        (Stage("stage 3, its optimizer on the host", "all", "all", "all", offload=("optimizer", "grads")),
         2 * P // N, 14 * P // N),
    ],
    ids=lambda each: getattr(each, "name", None),
)  # fmt: skip
def test_bytes_at_rest_are_those_of_the_papers(row: Stage, card: int, host: int) -> None:
    """16/S under HSDP, 4 + 12/S and 4/S + 12/N where the optimizer is sharded otherwise; 4, 2 and 0 when offloaded."""
    report = one_step(row)
    assert (sum(report.resident.values()), sum(report.host.values())) == (card, host)


def test_second_copies_come_to_two_bytes_over_the_group() -> None:
    """From forward to backward hpZ holds 2/S bytes per parameter more, and a row that keeps its parameters 2."""
    highest = {row.name: one_step(row).peak.by_band for row in (HPZ, ZeRO3Kept)}
    assert highest[HPZ.name][Band.SECONDARY] == 2 * P // S
    assert highest[ZeRO3Kept.name][Band.GATHERED] == 2 * P


W = 4  # bytes of a number on the wire


@pytest.mark.parametrize(
    ("row", "times"),
    [(ZeRO3, 3), (HPZ, 2), (ZeRO3Kept, 2), (DP, 2), (ZeRO1, 2), (ZeRO2, 2)],
    ids=lambda each: getattr(each, "name", None),
)  # fmt: skip
def test_between_nodes_the_ring_of_all_sends_once_per_collective(row: Stage, times: int) -> None:
    """Per node and step 3(N-1) C w under ZeRO-3 and 2(N-1) C w under hpZ, all of it by one rank of each node."""
    report, C = one_step(row), P // N
    assert sum(moved.node_outside for moved in report.traffic.values()) == times * (N - 1) * C * W
    outside = sum(moved.outside for moved in report.traffic.values())
    assert np.asarray(outside).tolist() == [times * (N - 1) * C * W, *[0] * (S - 1)] * D


@pytest.mark.parametrize("row", [HSDP, HSDPKept, ZeRO1Group, ZeRO2Group, HFSDP], ids=lambda row: row.name)
def test_between_groups_only_shards_are_sent(row: Stage) -> None:
    """2 f(D)/S per rank, by every rank, whether as one all-reduce or as a reduce-scatter and an all-gather."""
    report = one_step(row)
    outside = sum(moved.outside for moved in report.traffic.values())
    assert np.asarray(outside).tolist() == [2 * (D - 1) * (P // S // D) * W] * N
    assert sum(moved.node_outside for moved in report.traffic.values()) == S * 2 * (D - 1) * (P // N) * W


@pytest.mark.parametrize(
    ("row", "inside"),
    [(HSDP, 3), (HSDPKept, 2), (ZeRO1Group, 2), (HFSDP, 3), (HPZ, 1)],
    ids=lambda each: getattr(each, "name", None),
)  # fmt: skip
def test_within_the_group_whole_buckets_are_sent(row: Stage, inside: int) -> None:
    """A reduce-scatter and one or two all-gathers of f(S), hpZ's in backward alone."""
    report = one_step(row)
    sent = sum(moved.sent - moved.outside for moved in report.traffic.values())
    if row is HPZ:  # its other collectives run over all ranks, most of them within a node
        sent = sent - 2 * (N - 1) * (P // N) * W * np.array([0, *[1] * (S - 1)] * D)
    assert np.asarray(sent).tolist() == [inside * (S - 1) * (P // S) * W] * N


@pytest.mark.parametrize(
    ("row", "copies"),
    [
        (Offload1, {("host", "grads"): 2 * P // N, ("card", "params"): 2 * P // N}),
        (Offload2, {("host", "grads"): 2 * P // N, ("card", "params"): 2 * P // N}),
        (Infinity, {("host", "grads"): 2 * P // N, ("card", "params"): 2 * (2 * P // N)}),
        (HSDP, {}),
    ],
    ids=lambda each: getattr(each, "name", None),
)  # fmt: skip
def test_copies_over_the_host_link(row: Stage, copies: dict[tuple[str, str], int]) -> None:
    """4 P/N bytes when the optimizer is offloaded; the shard goes up for each gather where the parameters are."""
    assert one_step(row).copies == copies


# -- groups of one and of all are plain rows

PLAIN = [
    (HSDP, DP, ZeRO3),
    (HSDPKept, DP, ZeRO3Kept),
    (ZeRO1Group, DP, ZeRO1),
    (ZeRO2Group, DP, ZeRO2),
    (HFSDP, ZeRO1, ZeRO3),
    (HPZ, ZeRO3Kept, ZeRO3),
]


def account(scheme: Scheme) -> list[Any]:
    """Everything that a run has come to: its bits, and its last report but for the clock."""
    report = scheme.reports[-1]
    bits = [state.tobytes() for bucket in scheme.buckets for state in bucket.states.values()]
    moved = {
        key: (each.sent.tolist(), each.padding.tolist(), each.outside.tolist(), each.node_outside, each.messages)
        for key, each in report.traffic.items()
    }
    events = [event._replace(seconds=0.0) for event in report.events]
    return [bits, repr(report.loss), report.resident, report.peak, report.host_peak, report.copies, moved, events]


@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@pytest.mark.parametrize("whole", [False, True], ids=["S = 1", "S = N"])
@pytest.mark.parametrize(("row", "one", "every"), PLAIN, ids=lambda row: row.name)
def test_groups_of_one_and_of_all_are_plain_rows(
    row: Stage, one: Stage, every: Stage, whole: bool, precision: str
) -> None:
    """Bit for bit and byte for byte, event by event."""
    n, widths = 6, (7, 5, 3)
    node = n if whole else 1
    grouped, plain = (each(MLP(widths), n, node=node, precision=precision) for each in (row, every if whole else one))
    for batch in batches(n, 2, 2, widths):
        grouped.step(batch)
        plain.step(batch)
    assert account(grouped) == account(plain)


@pytest.mark.parametrize("row", [*SCHEMES, ZeRO3Kept, Offload1, Offload2, Infinity], ids=lambda row: row.name)
def test_nodes_under_a_plain_row_change_no_bit_and_count_its_links(row: Stage) -> None:
    """All is as without nodes, but what leaves them is counted: N/S of the ranks send everything outward."""
    schemes = [row(MLP((7, 5, 3)), 6, node=node) for node in (None, 2)]
    for scheme in schemes:
        for batch in batches(6, 2, 2, (7, 5, 3)):
            scheme.step(batch)
    alone, nodes = (account(scheme) for scheme in schemes)
    assert all(event.outside == event.nbytes * (event.kind == "send") for event in nodes[7])
    assert [*alone[:6], alone[7]] == [*nodes[:6], [event._replace(outside=0) for event in nodes[7]]]
    for key, (sent, padding, outside, node_outside, messages) in nodes[6].items():
        assert alone[6][key] == (sent, padding, [0] * 6, 0, messages)
        assert outside == [nbytes * (rank % 2 == 0) for rank, nbytes in enumerate(sent)]
        assert node_outside == sent[0]


# -- the same training


@pytest.mark.parametrize("wire_params", [None, "int8"])
@pytest.mark.parametrize(("node", "precision"), [(2, "mixed"), (3, "fp32"), (3, "bf16-fp32-grads")])
def test_rows_of_one_order_agree_in_every_bit(node: int, precision: str, wire_params: str | None) -> None:
    """On every rank, after every step; each agrees with training written a second time in its own order."""
    if (precision, wire_params) == ("fp32", "int8"):
        return
    n, widths, seed = 6, (7, 5, 3), 3
    asked = lab_settings(
        ranks=n, widths=[*widths], model_seed=seed, node=node, precision=precision, wire_params=wire_params
    )
    schemes = [row(MLP(widths, seed), n, asked.options()) for row in ROWS]
    first: dict[tuple[object, ...], dict[Band, list[Array]]] = {}
    plain: dict[tuple[object, ...], Reference] = {}
    for step, batch in enumerate(batches(n, 2, 2, widths), start=1):
        first.clear()
        for scheme in schemes:
            order = scheme.shard.order(wire_params)
            if order not in plain:
                plain[order] = Reference(scheme.stage, asked, n)
            scheme.step(batch)
            plain[order].reach(step, batch)
            assert compare.against_plain(scheme, plain[order], step) == []
            assert compare.compare(scheme, first.setdefault(order, compare.whole_states(scheme)), step)[1] == []
    assert len(plain) == (2 if wire_params is None else 7)


@pytest.mark.parametrize("wires", [{"wire": "bf16"}, {"wire_params": "bf16"}, {"wire_params": "int8"}], ids=str)
def test_replicas_keep_parameters_that_have_no_master_exactly(wires: dict[str, Any], tmp_path: Path) -> None:
    """Without master weights the fp32 parameters are all that there is: no row rounds what it keeps of them, so that
    replicas have their owners' bits, rows of one order agree, and a run that is loaded goes on with the same."""
    runs = [row(MLP((7, 5, 3)), 8, node=4, precision="fsdp", **wires) for row in (HSDP, HFSDP)]
    *before, last = batches(8, 3, 2, (7, 5, 3))
    for run in runs:
        for batch in before:
            run.step(batch)
    groups, cut = runs
    assert cut.full_theta().tobytes() == groups.full_theta().tobytes()
    for bucket in cut.buckets:
        once, again = np.split(bucket.states[Band.PARAMS], 2)
        assert once.tobytes() == again.tobytes()
    save(cut, tmp_path)
    taken_up = load(tmp_path)
    assert taken_up.step(last) == cut.step(last)
    assert taken_up.full_theta().tobytes() == cut.full_theta().tobytes()


def test_what_the_host_holds_is_rounded_to_int8_as_what_the_card_holds() -> None:
    """Without master weights, in the one precision where what is kept is wider than what is gathered: from the host
    it goes to the card as it is, and is rounded once."""
    runs = [row(MLP((7, 5, 3)), 4, precision="fsdp", wire_params="int8") for row in (ZeRO3, Infinity)]
    for batch in batches(4, 3, 2, (7, 5, 3)):
        assert len({run.step(batch) for run in runs}) == 1
    assert runs[0].full_theta().tobytes() == runs[1].full_theta().tobytes()


def test_gradients_over_two_axes_are_rounded_alike_whoever_keeps_them() -> None:
    """On a wire that is narrower than what gradients are kept in, over replicas whose number rounds."""
    runs = [row(MLP((7, 5, 3)), 6, node=2, precision="fsdp", wire="bf16") for row in (HSDP, HFSDP)]
    for batch in batches(6, 2, 2, (7, 5, 3)):
        for run in runs:
            run.step(batch)
        assert runs[0].flat(Band.GRADS).tobytes() == runs[1].flat(Band.GRADS).tobytes()
    assert runs[0].full_theta().tobytes() == runs[1].full_theta().tobytes()


def test_orders_are_told_apart() -> None:
    """In fp32 the two orders of summation do not come to the same, or nothing would have been compared above."""
    n, widths = 6, (7, 5, 3)
    schemes = [row(MLP(widths), n, node=3, precision="fp32") for row in (ZeRO3, HSDP)]
    for batch in batches(n, 2, 2, widths):
        for scheme in schemes:
            scheme.step(batch)
    difference, _ = compare.compare(schemes[1], compare.whole_states(schemes[0]), 2)
    assert difference.differing[Band.PARAMS] > 0
    assert 0 < difference.largest[Band.PARAMS] < 1e-6


@settings(max_examples=12)
@given(st.sampled_from(VALID), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["mixed", "fp32", "bf16"]))
def test_every_row_is_what_it_must_be_where_messages_lose_an_eighth(
    row: Stage, node: int, replicas: int, precision: str
) -> None:
    """In the stricter world each rank holds what its own messages brought it, and nothing lies outside the ledger."""
    if not runs(row, {"node": node}):
        return
    asked = Settings(
        ranks=node * replicas, steps=2, batch=2, seed=7, model_seed=0, precision=precision, wire="fp32",
        gather="layer", data="noise", capacity=None, widths=[7, 5, 3], node=node,
    )  # fmt: skip
    assert sanitizer.run(row, asked, node * replicas, batches(node * replicas, 2, 2, (7, 5, 3))) == []


# -- the order of summation, worked out once more


def ring_sum(shares: Array) -> Array:
    """Of arrays [member, n*C], what a ring makes of them: chunk c is x[c-1] + x[c-2] + ... + x[c], in fp32."""
    n = len(shares)
    chunks = shares.reshape(n, n, -1)
    total = np.stack([chunks[chunk - 1, chunk] for chunk in range(n)])
    for hop in range(2, n + 1):
        total = total + np.stack([chunks[(chunk - hop) % n, chunk] for chunk in range(n)])
    return total.reshape(-1)


def fsdp2(grads: Array, node: int) -> Array:
    """FSDP2's average over a 2-D mesh: the sum over the shard group over S, and of that over the replicas over D."""
    groups = np.stack([ring_sum(group) / np.float32(node) for group in grads.reshape(-1, node, grads.shape[1])])
    shards = groups.reshape(len(groups), node, -1)
    return np.concatenate([ring_sum(shards[:, shard]) / np.float32(len(groups)) for shard in range(node)])


def own_gradients(widths: tuple[int, ...], rank_batch: Any) -> Array:
    """The gradients of one rank's own batch, fp32, of the first layer."""
    alone = DP(MLP(widths), 1, precision="fp32")
    alone.step([rank_batch])
    return np.array(alone.buckets[0].states[Band.GRADS][0])


@pytest.mark.parametrize(("node", "replicas"), [(2, 2), (4, 2), (2, 4)])
def test_the_averaged_gradient_is_fsdp2s(node: int, replicas: int) -> None:
    """Where S and D are powers of two a division is a multiplication, and every bit is FSDP2's."""
    n, widths = node * replicas, (7, 8)  # 64 parameters: a group's shard divides by 2 D
    batch = draw(n, 3, widths)
    scheme = HSDP(MLP(widths), n, node=node, precision="fp32")
    scheme.step(batch)
    expected = fsdp2(np.stack([own_gradients(widths, each) for each in batch]), node)
    assert scheme.flat(Band.GRADS).tobytes() == expected.tobytes()


def test_its_division_applied_to_our_sums_is_fsdp2s_for_any_sizes() -> None:
    """With S = 3 the two differ, as multiplying by 1/3 is not dividing by 3; the rings' sums are the same."""
    node, replicas, length = 3, 2, 36
    n = node * replicas
    grads = np.random.default_rng(5).standard_normal((n, length)).astype(np.float32)
    ledger = Ledger(n)
    ranks = Ranks(range(n), {Band.BLOCKS: FP32}, ledger, lambda shape, dtype: np.empty(shape, dtype))
    _, inner, outer = (Comm(ring, FP32, Workspace(ranks, Band.BLOCKS), ledger) for ring in LocalRing(n).split(node))
    partial = np.empty((n, length // node), np.float32)
    inner.reduce_scatter(grads.copy(), partial, length, scale=1.0, band="grads", unit="layer")
    partial /= np.float32(node)
    outer.all_reduce(partial, length, scale=1.0, band="grads", unit="layer")
    partial /= np.float32(replicas)
    assert partial[:node].reshape(-1).tobytes() == fsdp2(grads, node).tobytes()
    assert partial[node:].tobytes() == partial[:node].tobytes()
    ours = HSDP(MLP((5, 6)), n, node=node, precision="fp32")
    batch = draw(n, 2, (5, 6))
    ours.step(batch)
    theirs = fsdp2(np.stack([own_gradients((5, 6), each) for each in batch]), node)
    assert ours.flat(Band.GRADS).tobytes() != theirs.tobytes()
    assert np.allclose(ours.flat(Band.GRADS), theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sync", get_args(Sync))
def test_micro_batches_are_scaled_with_the_ring_that_runs_first(sync: Sync) -> None:
    """1/(S k) before the replicas' ring, which runs once, after the last; "each" adds averages, "end" averages sums."""
    n, node, k, widths = 8, 4, 2, (7, 8)
    batch = draw(n, 2 * k, widths)
    scheme = HSDP(MLP(widths), n, node=node, accumulate=k, sync=sync, precision="fp32")
    scheme.step(batch)
    halves = [
        np.stack([own_gradients(widths, (x[2 * part :][:2], y[2 * part :][:2])) for x, y in batch]) for part in range(k)
    ]
    scale = np.float32(1 / (node * k))
    groups: list[Array] = []
    for group in range(n // node):
        some = slice(group * node, group * node + node)
        if sync == "end":
            groups.append(ring_sum(halves[0][some] + halves[1][some]) * scale)
        else:
            groups.append(ring_sum(halves[0][some]) * scale + ring_sum(halves[1][some]) * scale)
    shards = np.stack(groups).reshape(len(groups), node, -1)
    expected = [ring_sum(shards[:, shard]) * np.float32(node / n) for shard in range(node)]
    assert scheme.flat(Band.GRADS).tobytes() == np.concatenate(expected).tobytes()
    messages = {name: moved.messages for (name, _), moved in scheme.reports[-1].traffic.items()}
    assert messages["all-reduce"] == 2 * (n // node - 1)
    assert messages["reduce-scatter"] == (node - 1) * (k if sync == "each" else 1)


# -- the pieces


@pytest.mark.parametrize(("row", "band"), [(HFSDP, Band.MASTER), (HSDP, Band.PARAMS), (HPZ, Band.PARAMS)])
def test_who_owns_which_piece(row: Stage, band: Band) -> None:
    """Rank d S + s owns shard s of its group, and piece s D + d of N where a row with groups shards over all."""
    owned = [row.piece(band, rank, 6, 2) for rank in range(6)]
    assert (
        owned
        == {
            HFSDP.name: [(0, 6), (3, 6), (1, 6), (4, 6), (2, 6), (5, 6)],  # s D + d
            HSDP.name: [(0, 2), (1, 2)] * 3,
            HPZ.name: [(rank, 6) for rank in range(6)],  # no state in groups: in the order of ranks
        }[row.name]
    )


@pytest.mark.parametrize("padding", ["N", "2N", "each", "rows"])
@each_row
def test_every_bucket_is_padded_to_a_multiple_of_all_ranks(row: Stage, padding: str) -> None:
    """Whatever the row, so that a group's shard can be cut among the groups; and what is put together is the model."""
    scheme = row(MLP((7, 5, 3)), 6, node=2, padding=padding)
    assert all(bucket.padded % 6 == 0 for bucket in scheme.buckets)
    assert scheme.flat(Band.PARAMS).tobytes() == MLP((7, 5, 3)).initial().astype(np.float16).tobytes()


@each_row
def test_parameters_that_are_cut_by_rows_are_cut_among_the_ranks_of_a_group(row: Stage) -> None:
    """Where states are sharded over a group: each parameter to a multiple of its ranks, and the whole to one of all."""

    def up(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    cut = 2 if row.two_axes else 6
    scheme = row(MLP((7, 5, 3)), 6, node=2, padding="rows")
    sizes = [up(up(7, cut) * 5 + up(5, cut), 6), up(up(5, cut) * 3 + up(3, cut), 6)]
    assert [bucket.padded for bucket in scheme.buckets] == sizes


# -- memory that runs out


@pytest.mark.parametrize("row", [HSDP, HFSDP, HPZ, Offload1, Infinity], ids=lambda row: row.name)
def test_the_predicted_peak_is_enough_and_a_byte_less_is_not(row: Stage) -> None:
    """On the card and on the host; the error says which of the two was full, and what it held."""
    job = theory.Job(row, (((7, 5),), ((5, 3),)), 6, 2, node=2)
    needs = {Place.CARD: sum(theory.peak(job).values()), Place.HOST: sum(theory.host_peak(job).values())}
    names = {Place.CARD: "capacity", Place.HOST: "host_capacity"}
    batch = draw(6, 2, (7, 5, 3))

    def train(**capacities: Any) -> None:
        row(MLP((7, 5, 3)), 6, node=2, **capacities).step(batch)

    train(capacity=needs[Place.CARD], host_capacity=needs[Place.HOST] or 1)
    for place, need in needs.items():
        if need:
            with pytest.raises(
                OutOfMemory, match="its part of the host" if place is Place.HOST else "the card"
            ) as full:
                train(**{names[place]: need - 1})
            assert full.value.place is place
            assert sum(full.value.held.values()) + full.value.asked > need - 1


# -- the dry world


@settings(max_examples=25)
@given(trainings(), st.integers(0, 2), st.booleans(), st.sampled_from(["layer", "model", 20]))
def test_the_dry_world_counts_what_the_simulator_does(
    training: tuple[Stage, int, tuple[int, ...], int, dict[str, Any]], prefetch: int, checkpoint: bool, bucket: Any
) -> None:
    """Event by event, by link and by place, for the rank at its node's edge, and for a node's ranks together."""
    row, n, widths, rows, options = training
    if not runs(row, options):
        return
    more = {"prefetch": prefetch, "checkpoint": checkpoint, "bucket": bucket}
    scheme = row(MLP(widths), n, **options, **more)
    with np.errstate(all="ignore"):
        scheme.step(draw(n, rows, widths))
    shapes = Shapes(MLP(widths))
    dry = row(shapes, n, ring=DryRing(n), **options, **more)
    dry.step(shapes.batch(rows))
    one, other = scheme.reports[-1], dry.reports[-1]
    for each in (one, other):
        each.events = [event._replace(seconds=0.0) for event in each.events]
    for what in ("events", "peak", "peak_without_activations", "host_peak", "host", "resident", "copies", "flops"):
        assert getattr(one, what) == getattr(other, what), what
    assert one.traffic.keys() == other.traffic.keys()
    for key, moved in one.traffic.items():
        counted = other.traffic[key]
        assert (moved.node_outside, moved.messages) == (counted.node_outside, counted.messages)
        for what in ("sent", "received", "outside", "padding"):
            assert getattr(moved, what)[0] == getattr(counted, what)[0]


# -- what is refused


@pytest.mark.parametrize("row", [HSDP, HFSDP, HPZ, ZeRO1Group], ids=lambda row: row.name)
def test_rows_with_groups_ask_how_large_they_are(row: Stage) -> None:
    """The advice in the message is right."""
    with pytest.raises(ValueError, match=r"within groups of ranks\. Say how large they are, as in node=8"):
        row(MLP((7, 5)), 8)
    row(MLP((7, 5)), 8, node=8)


@pytest.mark.parametrize("row", [ZeRO3, HSDP, DP], ids=lambda row: row.name)
def test_groups_that_do_not_divide_the_ranks_are_refused_with_what_would(row: Stage) -> None:
    """12 ranks can be cut into groups of 1, 2, 3, 4, 6 and 12; each of them runs."""
    with pytest.raises(ValueError, match=r"12 ranks cannot be cut into groups of 5\. Use 1, 2, 3, 4, 6, 12\."):
        row(MLP((7, 5)), 12, node=5)
    for node in (1, 2, 3, 4, 6, 12):
        row(MLP((7, 5)), 12, node=node).step(draw(12, 1, (7, 5)))


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ({"grads": "all"}, "a rank that lacks the gradients of a parameter cannot update it"),
        ({"optimizer": "group", "grads": "all"}, "Shard the optimizer over at least as many ranks as grads"),
        ({"optimizer": "all", "params": "group"}, "lacks the parameter has no use for its full gradients"),
        ({"optimizer": "node"}, "optimizer is sharded over nobody, group, all; got 'node'"),
        ({"optimizer": "all", "reshard_after_forward": False}, "whole parameters are never gathered"),
        (
            {"optimizer": "all", "grads": "group", "params": "group", "reshard_after_forward": "group"},
            "a second copy within the group needs parameters that are sharded over all",
        ),
        ({"optimizer": "all", "reshard_after_forward": 2}, "reshard_after_forward is True, False or 'group'; got 2"),
        ({"optimizer": "all", "offload": ("master",)}, "offload is of optimizer, grads, params; got 'master'"),
        ({"optimizer": "all", "grads": "all", "offload": ("grads",)}, "so the optimizer must be there too"),
        ({"optimizer": "all", "offload": ("optimizer", "params")}, "gathered for each use, so they must be sharded"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused_when_it_is_made(states: dict[str, Any], reason: str) -> None:
    """With its name and the reason."""
    with pytest.raises(ValueError, match=f"Stage 'mine': .*{reason}"):
        Stage("mine", **states)


def test_one_all_reduce_of_everything_is_no_option_of_a_row_with_groups() -> None:
    """Its gradients are reduce-scattered within the group first; without the option it runs."""
    with pytest.raises(ValueError, match=r"Scheme\(all_reduce\): HSDP reduce-scatters within the group first"):
        HSDP(MLP((7, 5)), 4, node=2, all_reduce=True)
    HSDP(MLP((7, 5)), 4, node=2)


def test_parameters_on_the_host_need_a_group_to_be_gathered_by() -> None:
    """A group of one holds all of them, and there is nothing that brings them up; a larger one does."""
    row = Stage("mine", "group", "group", "group", offload=OFFLOADABLE)
    with pytest.raises(ValueError, match="a group of one has nothing to gather"):
        row(MLP((7, 5)), 4, node=1)
    row(MLP((7, 5)), 4, node=2).step(draw(4, 1, (7, 5)))


def test_whole_parameters_beside_states_in_groups_are_those_of_their_order() -> None:
    """With the optimizer over all and gradients in groups they are gathered twice, and are HSDP's bit for bit."""
    ends = []
    for row in (HSDP, Stage("in between", Over.ALL, Over.GROUP, Over.NOBODY)):
        scheme = row(MLP((7, 5, 3)), 6, node=2)
        for batch in batches(6, 2, widths=(7, 5, 3)):
            scheme.step(batch)
        ends.append(scheme.flat(Band.PARAMS).tobytes())
    assert ends[0] == ends[1]
