"""The time of a step, from its log and a card: the question's numbers over the preset's.

Owns which card and which numbers are meant. What a bound is, ``step_time`` owns, and how fast cards are expected
to be, ``time_model``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from zerosim.bands import WIRES, DType
from zerosim.layers import Layer, Role
from zerosim.options import Options
from zerosim.planner.cards import ASSUMED, Card, card
from zerosim.planner.recipes import RECIPES, computed_in
from zerosim.planner.step_run import StepRun
from zerosim.planner.step_time import Limit, Operation, Ring, Sent, Speeds, bound, duration, operations, queues
from zerosim.planner.time_model import fitted
from zerosim.records.plan import Cluster, StepEstimate, Time
from zerosim.records.question import Question
from zerosim.stages import Stage

# Parameters; the models that the estimate was fitted on have 125 million to 70 billion.
SMALLEST, LARGEST = 10**8, 10**11


def cluster(question: Question, working: DType) -> tuple[Card, Cluster]:
    """The card that the time is for, and its record. ValueError if it has no peak for ``working``."""
    asked = question.network
    dtype = _named(working)
    chosen = card(question.card or ASSUMED)
    given: dict[str, Any] = {
        name: value if name.startswith("hop") else round(value)
        for name in ("within", "between", "hop_within", "hop_between", "node")
        if (value := getattr(asked, name)) is not None
    }
    if asked.peak is not None:
        given["peak"] = {**chosen.peak, dtype: round(asked.peak)}
    chosen = replace(chosen, **given)
    if dtype not in chosen.peak:
        able = [name for name in RECIPES if _named(computed_in(name)) in chosen.peak]
        raise ValueError(
            f"plan(card): a {chosen.name} computes in {', '.join(chosen.peak)}; {dtype} was asked for, or is this "
            f"convention's default. Use --precision {' or '.join(able)}, or say how fast it is, as in "
            f"--peak 30."
        )
    return chosen, Cluster(
        card=chosen.name,
        assumed=question.card is None,
        dtype=dtype,
        peak=float(chosen.flops(dtype)),
        efficiency=asked.efficiency,
        within=float(chosen.within),
        between=float(chosen.between),
        node=chosen.node,
        hop_within=chosen.hop_within,
        hop_between=chosen.hop_between,
        source=chosen.source,
    )


def _named(dtype: DType) -> str:
    return next(name for name, known in WIRES.items() if known == dtype)


def products(layers: Iterable[Layer], tokens: int) -> dict[str, int]:
    """FLOPs of each layer's forward that can be products with its parameters: two for each of them and token."""
    return {
        layer.name: 2 * tokens * sum(group.params for group in layer.groups if group.role is not Role.BUFFER)
        for layer in layers
    }


def error(
    question: Question, ran: StepRun, ranks: int, row: Stage, record: Cluster, *, dense_decoder: bool
) -> float | None:
    """How far the estimate is off, as far as that was measured: of steps like those that it was fitted on.

    None where there was no such run: of another model than a dense decoder of text whose parameters are all trained, of
    another size, with states on the host, or on other cards; and where the reader says how fast the cards are.
    """
    stated = record.efficiency is not None or question.network.peak is not None
    groups = {group for layer in ran.layers for group in layer.groups if group.role is not Role.BUFFER}
    trained = all(group.role is Role.TRAINABLE for group in groups)
    sized = SMALLEST <= sum(group.params for group in groups) <= LARGEST
    seen = dense_decoder and trained and sized and not row.offload and not stated
    return fitted().band if seen and fitted().has_seen(record.card, record.dtype, ranks) else None


def on_rings(work: Iterable[Operation], row: Stage, ranks: int, node: int | None, placement: str) -> list[Operation]:
    """The same operations, each collective on the ring that it goes round, as one round k ranks takes k-1 hops.

    Where nodes are as many as the cards of one, an all-reduce is the replicas', what else there is the group's.
    ``placement`` in turn puts neighbours on different nodes, and replicas on one where that comes out even.
    """
    found, groups = [], node is not None and (row.two_axes or row.reshard_after_forward == "group") and ranks > node
    for each in work:
        if isinstance(each, Sent) and ranks > 1:
            ring = Ring.ALL
            if groups and node is not None:
                sizes = {ranks - 1: Ring.ALL, ranks // node - 1: Ring.ACROSS}
                if each.name != "all-reduce" or node != ranks // node:
                    sizes[node - 1] = Ring.WITHIN
                ring = sizes[each.messages]
            if placement == "round robin" and node is not None and ranks > node:
                even = node % (ranks // node) == 0
                ring = Ring.WITHIN if ring is Ring.ACROSS and even else Ring.ACROSS
            each = replace(each, ring=ring)
        found.append(each)
    return found


def _work(
    ran: StepRun, row: Stage, ranks: int, options: Options, tokens: int | None, placement: str
) -> list[Operation]:  # fmt: skip
    """What a step computes and sends, in the order of its log."""
    done = operations(ran.report, ran.groups, None if tokens is None else products(ran.layers, tokens))
    return on_rings(done, row, ranks, options.node, placement)


def _expected(chosen: Card, record: Cluster) -> Speeds:
    """The speeds that runs reach, or that somebody states."""
    if record.efficiency is None:
        return fitted().speeds(chosen, record.dtype)
    return fitted().stated(chosen, record.dtype, record.efficiency)


def spans(
    ran: StepRun, ranks: int, chosen: Card, record: Cluster, options: Options, tokens: int | None, row: Stage,
    placement: str,
) -> list[tuple[float, float]]:  # fmt: skip
    """When each computation and each collective of a step's log begins and ends, by the estimate; seconds."""
    work = _work(ran, row, ranks, options, tokens, placement)
    return queues(work, _expected(chosen, record), ranks, prefetch=options.prefetch)


def time(
    ran: StepRun, ranks: int, chosen: Card, record: Cluster, options: Options, tokens: int | None, row: Stage,
    placement: str, error: float | None = None,
) -> Time:  # fmt: skip
    """The bound of a step that was run, and the estimate; ``tokens`` of a micro-batch, None where rows have no length.

    What goes over the link to the host takes its time, whatever else there is to do; it hides behind that, and what
    the host itself computes, the optimizer's pass, is left out. ``error`` is the estimate's, where that is known. Where
    an efficiency is stated, the estimate takes that part of the peak, and its error is the reader's.
    """
    work = _work(ran, row, ranks, options, tokens, placement)
    least = bound(work, chosen, ranks, dtype=record.dtype, prefetch=options.prefetch)
    speeds = _expected(chosen, record)
    expected = duration(work, speeds, ranks, prefetch=options.prefetch)
    copying = 0.0 if ran.host is None else ran.host.copied / chosen.host
    bound_by = str(Limit.HOST) if copying > least.overlapped else str(least.binding)
    expected_by = str(Limit.HOST) if copying > expected.overlapped else str(expected.binding)
    return Time(
        compute=least.compute,
        bandwidth=least.bandwidth,
        latency=least.latency,
        serial=least.serial + copying,
        overlapped=max(least.overlapped, copying),
        binding=bound_by,
        estimate=StepEstimate(
            seconds=max(expected.overlapped, least.overlapped, copying),
            computing=expected.compute,
            exposed=expected.exposed,
            binding=expected_by,
            error=error,
        ),
    )
