"""What mutation testing showed that no other test noticed; docs/MUTANTS.md has what is left."""

from math import inf
from types import SimpleNamespace
from typing import Any, cast

import jaxtyping
import numpy as np
import psutil
import pytest

from zerosim import theory
from zerosim.bands import FP16, FP32, PRECISIONS, Band
from zerosim.comm import Comm
from zerosim.ledger import Event, EventKind, Ledger, Peak, Phase, Report, Traffic
from zerosim.model import MLP
from zerosim.optimizer import SGD, Adam
from zerosim.ranks import Ranks, Workspace
from zerosim.schemes import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.worlds.local import LocalRing

# -- comm


def test_an_average_is_scaled_in_fp32_and_then_rounded() -> None:
    """Three of six ranks hold fp16's least number; in fp32 the average is a tie, which rounds to even, that is to 0.

    In more than fp32 it is a little over a tie, as 1/6 is rounded up, and would round to the least number.
    """
    ring, ledger = LocalRing(6), Ledger(6)
    ranks = Ranks(ring.ids, PRECISIONS["mixed"].dtypes(FP16), ledger, ring.empty)
    comm = Comm(ring, FP16, Workspace(ranks, Band.BLOCKS), ledger)
    buffer = np.zeros((6, 6), FP16)
    buffer[:3] = 2.0**-24
    comm.all_reduce(buffer, 6, scale=1 / 6, band=Band.GRADS, unit="")
    assert float(np.float32(3 * 2.0**-24) * np.float32(1 / 6)) == 2.0**-25
    assert not buffer.any()


@pytest.mark.parametrize("stage", SCHEMES, ids=lambda stage: stage.name)
def test_what_is_sent_and_held_in_flight_is_some_layers(stage: Stage) -> None:
    """Every message, and every block that it travels in, is booked for the layer it is of, in whole bytes."""
    scheme = stage(MLP((3, 5, 2)), 3)
    x, y = np.ones((2, 3), FP32), np.ones((2, 2), FP32)
    scheme.step([(x, y)] * 3)
    flying = [event for event in scheme.reports[-1].events if event.name == Band.BLOCKS or event.kind is EventKind.SEND]
    assert {event.unit for event in flying} == {"layer 1", "layer 2"}
    assert {type(event.nbytes) for event in flying} == {int}
    assert {type(traffic.sent_each) for traffic in scheme.reports[-1].traffic.values()} == {int}
    assert {type(traffic._received) for traffic in scheme.reports[-1].traffic.values()} == {int}


# -- measure


def test_nothing_held_is_a_peak_of_nothing() -> None:
    """A ledger begins without a peak, and the first byte is one."""
    ledger = Ledger(2)
    assert (ledger.peak(), ledger.peak_without_activations()) == (Peak(0, {}, "", Phase.OTHER),) * 2
    ledger.hold(Band.PARAMS, 1, "layer")
    assert ledger.peak() == ledger.peak_without_activations() == Peak(1, {Band.PARAMS: 1}, "layer", Phase.OTHER)


# -- optimizer


@pytest.mark.parametrize(("momentum", "operations"), [(0.0, 2), (0.9, 4)])
def test_the_operations_of_sgd(momentum: float, operations: int) -> None:
    """A multiplication and a subtraction for each element of a row, and as many again for the momentum."""
    done: list[int] = []
    states = {str(band): np.zeros((3, 5), FP32) for band in SGD(momentum=momentum).states}
    SGD(momentum=momentum).update(np.ones((3, 5), FP32), np.ones((3, 5), FP32), **states, step=1, flops=done.append)
    assert done == [5 * operations]


# -- theory


def test_the_moments_of_gathering_everything_at_once() -> None:
    """Bucket upon bucket is gathered, 2 bytes for each padded parameter, and only then does anything compute."""
    job = theory.Job(stage=3, buckets=(((2, 3),), ((3, 5),)), ranks=2, rows=1, gather="model")
    first, second = 2 * (10 // 2 + 0) * 2, 2 * 10 * 2  # 2·3 + 3 = 9 and 3·5 + 5 = 20 parameters in two chunks each
    gathered = [moment[Band.GATHERED] for moment in theory.moments(job)]
    both = [first + second] * 2
    assert gathered[:5] == [0, first, first + second, *both]


def test_a_job_without_rows_has_no_activations() -> None:
    """The rows of a batch are for activations alone: without any, the peak is the same as the one without them."""
    for stage in range(4):
        job = theory.Job(stage=stage, buckets=(((7, 11),),), ranks=3)
        assert theory.peak(job) == theory.peak_without_activations(job)


# -- schemes


@pytest.mark.parametrize(
    ("stage", "whole", "sharded", "transient"),
    [(DP, 2 + 2 + 12, 0, 0), (ZeRO1, 2 + 2, 12, 0), (ZeRO2, 2, 2 + 12, 2), (ZeRO3, 0, 2 + 2 + 12, 2 + 2)],
    ids=str,
)
def test_the_memory_that_a_stage_will_need(stage: Stage, whole: int, sharded: int, transient: int) -> None:
    """States whole or sharded, and the largest bucket's gathered parameters and unreduced gradients for a while."""
    small, large = 7, 13  # chunks of 2 and 3 elements on five ranks
    states = whole * 5 * (2 + 3) + sharded * (2 + 3)
    assert stage.footprint([small, large], 5, PRECISIONS["mixed"]) == states + transient * 5 * 3


@pytest.mark.parametrize("stage", SCHEMES, ids=str)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", "MLP"), ("optimizer", "Adam"), ("padding", "3N"), ("sync", "never"), ("precision", "fp8"),
        ("accumulate", 0), ("prefetch", -1), ("bucket", "row"), ("gather", "all"), ("wire_params", "fp8"),
        ("all_reduce", 1), ("checkpoint", 1), ("capacity", 0), ("ranks", 0),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_refused_by_name(
    stage: Stage, option: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing checks types, the error begins with the call and the option, whichever it is."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    arguments: dict[str, Any] = {"model": MLP([2, 3]), "ranks": 2} | {option: value}
    with pytest.raises((TypeError, ValueError), match=rf"^Scheme\({option}\): "):
        stage(**arguments)


class Counted(MLP):
    """An MLP that takes integers, as a model of language does."""

    def check(self, batch: Any, ranks: int) -> tuple[Any, Any]:
        x, y = super().check(batch, ranks)
        return x.astype(np.int64), y


def test_a_batch_is_held_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers of 8 bytes are held as such, beside targets of 4 bytes."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    scheme = DP(Counted([5, 3]), 2)
    scheme.step([(np.ones((7, 5), np.float32), np.ones((7, 3), np.float32))] * 2)
    first, second, *_ = [event for event in scheme.reports[0].events if event.unit == "batch"]
    assert (first.nbytes, second.nbytes) == (8 * 7 * 5, 4 * 7 * 3)


# -- the vocabulary, ranks and reports


def test_the_words_that_results_are_written_in() -> None:
    """Phases and kinds of events stand in results files under these names."""
    assert [str(phase) for phase in Phase] == ["forward", "backward", "communication", "optimizer", "other"]
    assert [str(kind) for kind in EventKind] == ["hold", "free", "send", "compute"]


def test_a_report_begins_empty() -> None:
    """A report of a step that has not begun has nothing of anything, and shares nothing with another."""
    one, other = Report(step=3), Report(step=4)
    assert (one.step, one.complete, one.peak, one.peak_without_activations) == (3, False, Peak(), Peak())
    assert (one.resident, one.padding, one.traffic, one.flops, one.seconds, one.events) == ({}, [], {}, {}, {}, [])
    assert np.isnan(one.loss)
    one.resident["params"] = 1
    one.events.append(Event(EventKind.FREE, "params", "", 1, 0, 0.0, Phase.OTHER))
    assert (other.resident, other.events) == ({}, [])
    assert (Peak(), Peak().by_band, Peak().unit, Peak().phase) == (Peak(0, {}, "", Phase.OTHER), {}, "", Phase.OTHER)


def test_counts_of_bytes_are_integers_of_64_bits() -> None:
    """What a collective moved is counted per rank in int64, padding too."""
    traffic = Traffic(3)
    traffic.hop(2**40, 2**41, np.array([0, 1, 2]))
    assert [each.dtype for each in (traffic.sent, traffic.received, traffic.padding)] == [np.int64] * 3
    assert (traffic.sent.tolist(), traffic.received.tolist()) == ([2**40] * 3, [2**41] * 3)


def _ranks() -> Ranks:
    return Ranks(range(2), PRECISIONS["mixed"].dtypes(FP32), Ledger(2), LocalRing(2).empty)


def test_what_is_given_back_is_handed_out_again() -> None:
    """A freed array of the same shape and dtype is the next one's memory; of another shape or dtype it is not."""
    ranks = _ranks()
    first = ranks.hold(Band.MASTER, (5,))
    ranks.free(first)
    others = ranks.hold(Band.PARAMS, (5,)), ranks.hold(Band.MASTER, (7,))
    again = ranks.hold(Band.EXP_AVG, (5,))
    assert [np.shares_memory(first, each) for each in (*others, again)] == [False, False, True]
    assert not np.shares_memory(again, ranks.hold(Band.EXP_AVG, (5,)))


def test_what_is_given_back_is_logged_for_its_owner() -> None:
    """The log's entry of a free names the unit of the hold."""
    ranks = _ranks()
    ranks.free(ranks.hold(Band.MASTER, (5,), "layer 7"))
    with ranks.ledger.step() as report:
        ranks.free(ranks.hold(Band.MASTER, (5,), "layer 9"))
    assert [event.unit for event in report.events] == ["layer 9", "layer 9"]


def test_a_band_of_one_dtype_takes_no_other() -> None:
    """Another dtype for a band that has one is refused in words; its own is not, nor any for a band of several."""
    ranks = _ranks()
    with pytest.raises(
        ValueError,
        match=r"^Ranks.hold\(dtype\): master is held in float32 here; got float16. Leave dtype",
    ):
        ranks.hold(Band.MASTER, (5,), dtype=FP16)
    assert ranks.ledger.total == 0
    assert ranks.hold(Band.MASTER, (5,), dtype=FP32).dtype == FP32
    assert ranks.hold(Band.ACTIVATIONS, (5,), dtype=FP16).dtype == FP16


def test_scratch_belongs_to_nobody_at_first() -> None:
    """What a workspace holds before it is told for whom has no unit."""
    ranks = _ranks()
    with ranks.ledger.step() as report:
        Workspace(ranks, Band.ACTIVATIONS).hold(3)
    assert [event.unit for event in report.events] == [""]


def test_a_ranks_view_cannot_be_written() -> None:
    """A rank's arrays are for reading."""
    ranks = _ranks()
    ranks.hold(Band.MASTER, (5,))
    [view] = ranks[1][Band.MASTER]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_linear_layer_does_not_write_its_parameters() -> None:
    """Backward leaves fp32 parameters alone where the gradients are narrower, and has no other place to round them."""
    [layer] = MLP((3, 2)).linears
    ranks = _ranks()
    work = Workspace(ranks, Band.ACTIVATIONS)
    params = np.linspace(-1, 1, 2 * layer.size, dtype=np.float32).reshape(2, -1)
    before = params.copy()
    x, dy = work.hold(5, 3), work.hold(5, 2)
    x[...], dy[...] = 0.3, 0.7
    _, saved = layer.forward(params, x, work)
    layer.backward(params, saved, dy, np.empty((2, layer.size), FP16), work, need_dx=True)
    assert np.array_equal(params, before)


# -- the closed forms and the log against what runs


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("precision", ["bf16-fp32-grads", "mixed-main-grads"])
@pytest.mark.parametrize("stage", range(4))
def test_closed_forms_of_the_wider_recipes(stage: int, precision: str, ranks: int) -> None:
    """At rest, at the peak, on the wire and in messages, the recipes with fp32 gradients are as predicted, by band."""
    widths, rows = (5, 7, 3), 2
    scheme = SCHEMES[stage](MLP(widths), ranks, precision=precision)
    scheme.step([(np.ones((rows, 5), FP32), np.ones((rows, 3), FP32))] * ranks)
    report, job = scheme.reports[-1], theory.Job(stage, (((5, 7),), ((7, 3),)), ranks, rows, precision)
    assert report.resident == theory.resident(job)
    assert report.peak.by_band == theory.peak(job)
    assert report.peak_without_activations.by_band == theory.peak_without_activations(job)
    assert report.padding == theory.padding(job)
    sent = {name: traffic.messages for (name, _), traffic in report.traffic.items()}
    assert sent == theory.messages(job)
    logged = dict.fromkeys(sent, 0)
    for event in report.events:
        if event.kind is EventKind.SEND:
            logged[event.name] += event.amount
    assert logged == sent


def test_a_layer_at_a_time_is_what_is_usual() -> None:
    """A job that does not say otherwise gathers by layer."""
    buckets = (((5, 7),), ((7, 3),))
    usual, named = theory.Job(3, buckets, 3, 2), theory.Job(3, buckets, 3, 2, gather="layer")
    at_once = theory.Job(3, buckets, 3, 2, gather="model")
    assert usual == named
    assert theory.peak(usual) == theory.peak(named) != theory.peak(at_once)


def test_what_is_sent_before_the_first_step_counts() -> None:
    """Traffic outside of steps is in the total, as integers, and each collective's entry has its own messages."""
    ledger = Ledger(2)
    assert ledger.sent() == [0, 0]
    for hops in (2, 3):
        with ledger.sending("all-gather", "params", "layer") as traffic:
            for _ in range(hops):
                traffic.hop(7, 7, None)
    assert ledger.sent() == [(2 + 3) * 7] * 2
    with ledger.step() as report, ledger.sending("all-gather", "params", "layer") as traffic:
        traffic.hop(11, 11, None)
    assert ledger.sent() == [(2 + 3) * 7 + 11] * 2
    assert [event.amount for event in report.events] == [1]
    assert {type(count) for count in ledger.sent()} == {int}


def test_two_sends_of_a_step_log_their_own_messages() -> None:
    """The second entry of a collective has the messages since the first."""
    ledger = Ledger(2)
    with ledger.step() as report:
        for hops in (2, 3):
            with ledger.sending("all-gather", "params", "layer") as traffic:
                for _ in range(hops):
                    traffic.hop(7, 7, None)
    assert [event.amount for event in report.events] == [2, 3]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", range(4))
def test_padding_that_is_held_and_sent(stage: int, ranks: int) -> None:
    """Layers of 15 and 20 parameters, 16 and 20 in all on two and on four ranks: padding as predicted, rank by rank."""
    scheme = SCHEMES[stage](MLP((4, 3, 5)), ranks)
    scheme.step([(np.ones((2, 4), FP32), np.ones((2, 5), FP32))] * ranks)
    report, job = scheme.reports[-1], theory.Job(stage, (((4, 3),), ((3, 5),)), ranks, 2)
    sent = [sum(int(traffic.padding[row]) for traffic in report.traffic.values()) for row in range(ranks)]
    assert sent == theory.padding_sent(job)
    assert (sum(sent) > 0) == (ranks > 1)
    assert report.padding == theory.padding(job)


def test_what_adam_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are finite, betas a tuple in [0, 1), the ends as said; a plain descent has a rate of 0.01 unless told."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert Adam(betas=(0.0, 0.0)).betas == (0.0, 0.0)
    assert SGD().lr == 0.01
    for options in ({"lr": inf}, {"eps": inf}, {"betas": [0.9, 0.999]}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}):
        [name] = options
        with pytest.raises(ValueError, match=rf"^Adam\({name}\): "):
            Adam(**cast("dict[str, Any]", options))


def test_adams_operations_are_whole() -> None:
    """What is booked for a row is an integer: 13 operations an element."""
    done: list[int] = []
    p, g, m, v = (np.ones((3, 5), FP32) for _ in range(4))
    Adam().update(p, g, m, v, step=1, flops=done.append)
    assert (done, type(done[0])) == ([13 * 5], int)


# -- schemes


@pytest.mark.parametrize("optimizer", [Adam(), SGD()], ids=["adam", "sgd"])
def test_what_there_is_no_memory_for_is_refused_with_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, optimizer: Adam | SGD
) -> None:
    """With memory for half of the ranks, the refusal names the scheme and N, and first the other stages that fit, then
    the powers of two below; a ring of one's own is not asked.
    """
    model, n = MLP((5, 7, 3)), 9
    sizes = [5 * 7 + 7, 7 * 3 + 3]

    def needed(stage: Stage, ranks: int) -> int:
        return ranks * stage.footprint(sizes, ranks, PRECISIONS["mixed"], optimizer.states)

    free = needed(DP, 8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    with pytest.raises(MemoryError, match=r"^data parallel on 9 ranks would take ") as caught:
        DP(model, n, optimizer=optimizer)
    named = str(caught.value).partition("would fit: ")[2]
    others = [f"{stage.name} on {n}" for stage in SCHEMES if needed(stage, n) <= free]
    fewer = [f"data parallel on {ranks}" for ranks in (8, 4, 2, 1)]
    assert [each.split(" (")[0] for each in named.split(", ")][:4] == [*others, *fewer][:4]
    assert DP(model, n, optimizer=optimizer, ring=LocalRing(n)).ring.size == n


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


def test_a_batch_that_cannot_be_cut_names_the_call() -> None:
    """The refusal begins with the call and the option."""
    scheme = ZeRO2(MLP((5, 7, 3)), 3, accumulate=2)
    with pytest.raises(ValueError, match=r"^step\(batch\): accumulate=2 "):
        scheme.step([(np.ones((3, 5), FP32), np.ones((3, 3), FP32))] * 3)
