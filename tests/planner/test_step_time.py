"""How long a step takes at given speeds: each operation and the two queues, by hand; and the presets of cards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.counts import Phase
from zerosim.model import MLP
from zerosim.planner.cards import CARDS, Card, card
from zerosim.planner.step_time import (
    Computed,
    Limit,
    Operation,
    Ring,
    Sent,
    Speeds,
    bound,
    duration,
    operations,
)
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.worlds.dry import DryRing, Shapes

# Powers of two, so that seconds are exact: 8 FLOP/s, 4 B/s within a node of two cards, 2 B/s between nodes.
TOY = Card("toy", 1, {"fp32": 8}, within=4, between=2, node=2, hop_within=0.25, hop_between=8, source="made up",
           memory_bandwidth=16, reached=0.5)  # fmt: skip
FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


def toy(work: list[Operation], ranks: int, **options: Any) -> Any:
    return bound(work, TOY, ranks, dtype="fp32", **options)


def test_at_least_computing_is_flops_over_the_peak() -> None:
    """Forty FLOPs at 8 FLOP/s take 5 s, those of attention half as long, and memory is never waited for."""
    work: list[Operation] = [Computed("a", FORWARD, 24, nbytes=10**6), Computed("a", BACKWARD, 16)]
    assert toy(work, 1).compute == toy(work, 1).serial == toy(work, 1).overlapped == 40 / 8
    assert toy([Computed("a", FORWARD, 24, attention=16)], 1).compute == 8 / 8 + 16 / 16
    assert toy(work, 1).binding is Limit.COMPUTE


def test_at_given_speeds_products_attention_and_memory_add_up() -> None:
    """Each at its own speed: 24 - 8 FLOPs of products at 4, 8 of attention at 2, 6 bytes at 3."""
    speeds = Speeds(4, 2, 3, within=1, between=1, hop_within=1, hop_between=1, node=2)
    assert duration([Computed("a", FORWARD, 24, 8, 6)], speeds, 1).compute == 16 / 4 + 8 / 2 + 6 / 3
    with pytest.raises(ValueError, match=r"Speeds\(memory\): must be above zero; got 0"):
        replace(speeds, memory=0)


def test_a_ring_within_a_node_and_one_across_nodes() -> None:
    """Within a node nothing leaves it; across nodes both cards of a node send, and each hop crosses."""
    within, across = Sent("a", 12, 1, ring=Ring.WITHIN), Sent("a", 12, 2, ring=Ring.ACROSS)
    assert (toy([within], 6).bandwidth, toy([within], 6).latency) == (12 / 4, 0.25)
    assert (toy([across], 6).bandwidth, toy([across], 6).latency) == (2 * 12 / 2, 2 * 8)
    assert (toy([within], 6).link, toy([across], 6).link) == (Limit.WITHIN, Limit.BETWEEN)


def test_sending_within_a_node() -> None:
    """Bytes go at the bandwidth within the node, and each message waits a hop."""
    found = toy([Sent("a", 12, 3)], 2)
    assert (found.bandwidth, found.latency, found.link) == (12 / 4, 3 * 0.25, Limit.WITHIN)
    assert found.serial == found.communication == 3.75
    assert found.binding is Limit.WITHIN


def test_a_ring_over_several_nodes_is_as_fast_as_its_slowest_link() -> None:
    """Six ranks are three nodes: all bytes at the speed between them, and two of five hops cross."""
    found = toy([Sent("a", 10, 5), Sent("b", 30, 10)], 6)
    assert (found.bandwidth, found.link) == ((10 + 30) / 2, Limit.BETWEEN)
    assert found.latency == (2 + 4) * 8 + (3 + 6) * 0.25
    assert found.binding is Limit.LATENCY


def test_what_binds_is_the_larger_part_of_the_busier_queue() -> None:
    """Two seconds of computing are more than each part of the sending, and less than both: the larger part binds."""
    work: list[Operation] = [Computed("a", FORWARD, 16), Sent("a", 4, 6), Sent("a", 3, 0)]
    found = toy(work, 2)
    assert (found.compute, found.bandwidth, found.latency) == (16 / 8, 7 / 4, 6 * 0.25)
    assert found.binding is Limit.WITHIN
    assert toy([*work, Sent("a", 0, 2)], 2).binding is Limit.LATENCY
    assert toy([*work, Computed("a", BACKWARD, 12)], 2).binding is Limit.COMPUTE


def test_where_the_link_between_nodes_is_the_faster_one_the_node_binds() -> None:
    """Twice the bandwidth between nodes leaves the ring bound by what is within them."""
    found = bound([Sent("a", 12, 5)], replace(TOY, between=8), 6, dtype="fp32")
    assert (found.bandwidth, found.link) == (12 / 4, Limit.WITHIN)


def test_a_rank_to_a_node_hops_between_nodes_alone() -> None:
    """With one card to a node each of the N-1 hops crosses."""
    found = bound([Sent("a", 4, 3)], replace(TOY, node=1), 4, dtype="fp32")
    assert found.latency == 3 * 8


# Two layers under ZeRO-3, without latency: seconds are FLOPs / 8 and bytes / 4.
QUIET = replace(TOY, hop_within=1e-300)
STEP: list[Operation] = [
    Sent("a", 4, 1, needed_by=0), Computed("a", FORWARD, 16),
    Sent("b", 12, 1, needed_by=1), Computed("b", FORWARD, 32),
    Sent("b", 12, 1, needed_by=2), Computed("b", BACKWARD, 64), Sent("b", 12, 1),
    Sent("a", 4, 1, needed_by=3), Computed("a", BACKWARD, 32), Sent("a", 4, 1),
    Computed("a", OPTIMIZER, 8), Computed("b", OPTIMIZER, 8),
]  # fmt: skip


def test_two_queues_by_hand() -> None:
    """Gathering one layer ahead hides what it can, and the optimizer waits for the last reduction."""
    found = bound(STEP, QUIET, 2, dtype="fp32", prefetch=1)
    # Computing:  a 1..3, b 4..8 (its gather ends at 4), b back 8..16, a back 16..20, optimizer 21..23
    # Sending: a 0..1, b 1..4, b again 4..7, a again 8..9, b's gradients 16..19, a's gradients 20..21
    assert found.compute == 2 + 4 + 8 + 4 + 2
    assert found.bandwidth == 1 + 3 + 3 + 3 + 1 + 1
    assert found.serial == pytest.approx(20 + 12)
    assert found.overlapped == pytest.approx(23)
    assert found.exposed == pytest.approx(3)
    assert (found.floor, found.binding) == (20, Limit.COMPUTE)


def test_two_queues_without_gathering_ahead() -> None:
    """With no layer gathered ahead each gather is waited for; only reductions hide behind the next layer."""
    found = bound(STEP, QUIET, 2, dtype="fp32", prefetch=0)
    # Computing: a 1..3, b 6..10, b back 13..21, a back 22..26 (its gather goes before the reduction), then 27..29
    # Sending: a 0..1, b 3..6, b 10..13, a 21..22, b's gradients 22..25, a's gradients 26..27
    assert found.overlapped == pytest.approx(29)


def test_what_follows_the_optimizer_waits_for_it() -> None:
    """The gather of updated parameters has nothing to hide behind."""
    work: list[Operation] = [
        Computed("a", BACKWARD, 8),
        Sent("a", 4, 1),
        Computed("a", OPTIMIZER, 16),
        Sent("a", 8, 1),
    ]
    assert bound(work, QUIET, 2, dtype="fp32").overlapped == pytest.approx(1 + 1 + 2 + 2)


@st.composite
def steps(draw: st.DrawFn) -> list[Operation]:
    """Layers with whatever costs, as ZeRO-3 has them."""
    size = st.integers(0, 50)
    layers = draw(st.integers(1, 5))
    work: list[Operation] = []
    for position in range(2 * layers):
        phase = FORWARD if position < layers else BACKWARD
        work += [Sent("", draw(size), 1, needed_by=position), Computed("", phase, draw(size))]
        if phase is BACKWARD:
            work.append(Sent("", draw(size), 1))
    return [*work, Computed("", OPTIMIZER, draw(size)), Sent("", draw(size), 1)]


@given(work=steps(), prefetch=st.integers(0, 4), ranks=st.integers(1, 7))
def test_overlap_lies_between_the_busier_queue_and_the_sum(work: list[Operation], prefetch: int, ranks: int) -> None:
    """Whatever the costs, no overlap beats the busier queue, and none is worse than doing one thing after another."""
    found = toy(work, ranks, prefetch=prefetch)
    assert found.floor <= found.overlapped * (1 + 1e-12)
    assert found.overlapped <= found.serial * (1 + 1e-12)
    assert found.serial == pytest.approx(found.compute + found.communication)


# -- a step's log


def dry(row: Stage, ranks: int, **options: Any) -> Scheme:
    model = Shapes(MLP((7, 5, 3)))
    scheme = row(model, ranks, ring=DryRing(ranks), **options)
    scheme.step(model.batch(11 * options.get("accumulate", 1)))
    return scheme


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.name)
def test_operations_are_all_that_was_booked(row: Stage, ranks: int, accumulate: int) -> None:
    """The operations of a step have all of its FLOPs, bytes and messages, and no more."""
    report = dry(row, ranks, accumulate=accumulate).reports[-1]
    work = operations(report)
    computed = [each for each in work if isinstance(each, Computed)]
    sent = [each for each in work if isinstance(each, Sent)]
    by_phase = {phase: sum(each.flops for each in computed if each.phase == phase) for phase in report.flops}
    assert by_phase == report.flops
    assert sum(each.nbytes for each in sent) == sum(report.sent())
    assert sum(each.messages for each in sent) == sum(traffic.messages for traffic in report.traffic.values())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_memory_moves_what_forward_holds_three_times_and_what_backward_holds_once(checkpoint: bool) -> None:
    """An activation is written, read, and its gradient written; the optimizer moves 28 bytes for each 13 FLOPs."""
    report = dry(ZeRO3, 4, checkpoint=checkpoint).reports[-1]
    held: dict[Phase, int] = {}
    for event in report.events:
        if event.kind == "hold" and event.name == "activations":
            held[event.phase] = held.get(event.phase, 0) + event.nbytes
    work = [each for each in operations(report) if isinstance(each, Computed)]
    optimizer = [each for each in work if each.phase is OPTIMIZER]
    expected = 3 * (held[FORWARD] + held[Phase.OTHER]) + held[BACKWARD]
    assert sum(each.nbytes for each in work if each not in optimizer) == expected
    assert [each.nbytes for each in optimizer] == [round(each.flops * 28 / 13) for each in optimizer]


def test_what_is_beyond_a_units_products_is_attention() -> None:
    """Of a unit's FLOPs those beyond what its parameters can take are attention's, in the backward in the same part."""
    report = dry(ZeRO3, 4).reports[-1]
    forwards = [each for each in report.events if each.kind == "compute" and each.name == "forward"]
    flops = forwards[1].amount
    work = operations(report, products={"layer 1": 10**9, "layer 2": flops // 2})
    computed = [each for each in work if isinstance(each, Computed)]
    for each in computed:
        half = each.unit == "layer 2" and each.phase in (FORWARD, BACKWARD)
        assert each.attention == (each.flops / 2 if half else 0)
    assert all(each.attention == 0 for each in operations(report) if isinstance(each, Computed))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_gather_is_needed_by_the_layer_that_reads_it(prefetch: int) -> None:
    """Under ZeRO-3 each gather is needed by its own layer, however early it is started; reductions by nobody."""
    work = operations(dry(ZeRO3, 4, prefetch=prefetch).reports[-1])
    waits = [(each.unit, each.needed_by) for each in work if isinstance(each, Sent)]
    gathers = [("layer 1", 0), ("layer 2", 1), ("layer 2", 2), ("layer 1", 3)]
    assert [wait for wait in waits if wait[1] is not None] == gathers
    assert [unit for unit, needed_by in waits if needed_by is None] == ["layer 2", "layer 1"]


def test_a_reduction_is_needed_by_no_layer() -> None:
    """Under ZeRO-2 each micro-batch's gradients are reduced, and the next micro-batch's layers don't wait for them."""
    work = operations(dry(ZeRO2, 4, accumulate=3).reports[-1])
    waits = [each.needed_by for each in work if isinstance(each, Sent)]
    assert waits == [None] * (3 * 2 + 2)


def test_a_gather_after_the_optimizer_is_needed_by_nobody_in_the_step() -> None:
    """Under ZeRO-1 gathers come last, and wait for what was computed."""
    work = operations(dry(ZeRO1, 4).reports[-1])
    assert [each.needed_by for each in work if isinstance(each, Sent)] == [None] * 4
    assert all(isinstance(each, Sent) for each in work[-2:])


def test_groups_that_are_not_named_as_their_unit() -> None:
    """Where a unit reads groups of other names, it is told which, and waits for all of them."""
    scheme = dry(ZeRO3, 4, bucket="model")
    report = scheme.reports[-1]
    renamed = [event._replace(unit="group") if event.kind == "send" else event for event in report.events]
    report.events[:] = renamed
    unknown = operations(report)
    assert [each.needed_by for each in unknown if isinstance(each, Sent)] == [None, None, None]
    known = operations(report, {"model": ["group"]})
    assert [each.needed_by for each in known if isinstance(each, Sent)] == [0, 1, None]


def test_a_real_step_on_a_real_card() -> None:
    """Data parallel on 8 H100: an all-reduce is 2 (N-1)/N of the gradients over NVLink, and 2 (N-1) hops a layer."""
    scheme = dry(DP, 8, wire="fp16")
    found = bound(operations(scheme.reports[-1]), card("h100"), 8, dtype="fp16")
    padded = 8 * (5 + 3)  # 40 and 18 parameters
    assert found.bandwidth == pytest.approx(2 * 7 / 8 * 2 * padded / 450e9)
    assert found.latency == pytest.approx(2 * 2 * 7 * 0.6e-6)
    assert found.binding is Limit.LATENCY


# -- mistakes


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"prefetch": -1}, r"prefetch.*got -1"),
        ({"ranks": 0}, r"ranks.*got 0"),
        ({"dtype": "bf16"}, r"toy has no peak for 'bf16'; it computes in fp32"),
    ],
)
def test_a_bound_says_what_it_cannot_use(options: dict[str, Any], what: str) -> None:
    """Numbers that mean nothing, and dtypes that the card does not compute in, are refused with the value."""
    with pytest.raises(ValueError, match=what):
        bound([], TOY, **{"ranks": 2, "dtype": "fp32", **options})


# -- cards


@pytest.mark.parametrize("name", CARDS)
def test_presets_are_whole(name: str) -> None:
    """Every preset is found under its name in any case, cites a source, and computes fastest in 16 bits."""
    found = card(name.lower())
    assert found is CARDS[name]
    assert found.name == name
    assert "data sheet" in found.source or "white paper" in found.source
    assert found.peak["fp16"] > found.peak["fp32"]
    assert found.peak.get("bf16", found.peak["fp16"]) == found.peak["fp16"]
    assert all(type(value) is int for value in (found.memory, found.within, found.between, *found.peak.values()))
    assert found.memory % 10**9 != 0  # as reported, not as sold


def test_every_number_of_a_card_can_be_replaced() -> None:
    """A card of one's own is a preset with other numbers; numbers that are not above zero are refused."""
    assert replace(CARDS["H100"], memory=96 * 10**9).memory == 96 * 10**9
    assert replace(CARDS["H100"], peak={"bf16": 835 * 10**12}).flops("bf16") == 835 * 10**12
    with pytest.raises(ValueError, match=r"Card\(memory\) of H100 must be above zero; got 0"):
        replace(CARDS["H100"], memory=0)
    with pytest.raises(ValueError, match=r"Card\(peak\) of H100 .* for bf16; got -1"):
        replace(CARDS["H100"], peak={"bf16": -1})


def test_an_unknown_card_and_an_unknown_dtype() -> None:
    """The error names what there is."""
    with pytest.raises(ValueError, match=r"presets are V100-32GB, A100-40GB, .*MI300X"):
        card("H1000")
    with pytest.raises(ValueError, match="V100-32GB has no peak for 'bf16'; it computes in fp16, fp32"):
        card("V100-32GB").flops("bf16")
