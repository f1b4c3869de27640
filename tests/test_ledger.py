"""The ledger: time, peaks, traffic, reports and the log."""

import gc
from collections import Counter

import numpy as np
import psutil
import pytest

from helpers import batches, each_gather, nonzero
from zerosim.bands import Band
from zerosim.counts import Event, EventKind, Peak, Phase, Report, Traffic
from zerosim.ledger import Ledger
from zerosim.model import MLP
from zerosim.options import Gather
from zerosim.schemes import Stage, ZeRO3


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, now: float = 1009.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


class Stop(Exception):
    """Ends a step early."""


# -- time and work


def test_phases_nest_without_double_booking() -> None:
    """An inner phase's time is booked under it alone, and the phases add up to the step."""
    clock = Clock()
    ledger = Ledger(1, clock=clock)
    with ledger.step() as report:
        clock.tick(2)
        with ledger.during(Phase.BACKWARD):
            clock.tick(3)
            with ledger.during(Phase.COMMUNICATION):
                clock.tick(5)
            clock.tick(7)
            with ledger.during(Phase.COMMUNICATION):
                clock.tick(11)
        clock.tick(13)
    assert report.seconds == {Phase.OTHER: 2 + 13, Phase.BACKWARD: 3 + 7, Phase.COMMUNICATION: 5 + 11}


def test_a_phase_within_itself_is_booked_once() -> None:
    """Entering a phase again from inside it adds nothing."""
    clock = Clock()
    ledger = Ledger(1, clock=clock)
    with ledger.step() as report, ledger.during(Phase.FORWARD):
        clock.tick(3)
        with ledger.during(Phase.FORWARD):
            clock.tick(5)
    assert report.seconds == {Phase.OTHER: 0, Phase.FORWARD: 3 + 5}


def test_time_between_steps_is_nobodys() -> None:
    """What passes before, between and after steps is in no step's report."""
    clock = Clock()
    ledger = Ledger(1, clock=clock)
    clock.tick(17)
    with ledger.step() as first:
        clock.tick(2)
    clock.tick(19)
    with ledger.step() as second:
        clock.tick(3)
    clock.tick(23)
    assert [first.seconds, second.seconds] == [{Phase.OTHER: 2}, {Phase.OTHER: 3}]


def test_a_collective_takes_communication_time() -> None:
    """While a collective is counted, time goes to communication, and then back to the phase around it."""
    clock = Clock()
    ledger = Ledger(1, clock=clock)
    with ledger.step() as report, ledger.during(Phase.OPTIMIZER):
        clock.tick(2)
        with ledger.sending("all-gather", "params", "a layer"):
            clock.tick(5)
        clock.tick(7)
    assert report.seconds == {Phase.OTHER: 0, Phase.OPTIMIZER: 2 + 7, Phase.COMMUNICATION: 5}


def test_flops_go_to_the_innermost_phase() -> None:
    """FLOPs are booked under the phase in which they are reported, and stay integers past 2^63."""
    ledger = Ledger(1)
    with ledger.step() as report, ledger.during(Phase.FORWARD):
        ledger.flops(3)
        with ledger.during(Phase.OPTIMIZER):
            ledger.flops(2**63)
        ledger.flops(5)
    assert report.flops == {Phase.FORWARD: 3 + 5, Phase.OPTIMIZER: 2**63}


def test_an_error_closes_its_phases() -> None:
    """After an error inside nested phases the ledger is back in the outermost one, and time before it is booked."""
    clock = Clock()
    ledger = Ledger(1, clock=clock)

    def break_down() -> None:
        with ledger.step(), ledger.during(Phase.BACKWARD), ledger.sending("all-reduce", "a", ""):
            clock.tick(3)
            raise Stop

    with pytest.raises(Stop):
        break_down()
    assert ledger.phase is Phase.OTHER
    assert ledger.reports[0].seconds == {Phase.OTHER: 0, Phase.BACKWARD: 0, Phase.COMMUNICATION: 3}


def test_a_caught_error_leads_back_to_the_phase_around() -> None:
    """When an inner phase ends in an error that its caller survives, time goes to the phase around it again."""
    clock = Clock()
    ledger = Ledger(1, clock=clock)

    def break_down() -> None:
        with ledger.during(Phase.COMMUNICATION):
            clock.tick(3)
            raise Stop

    with ledger.step() as report, ledger.during(Phase.BACKWARD):
        with pytest.raises(Stop):
            break_down()
        clock.tick(5)
    assert report.seconds == {Phase.OTHER: 0, Phase.BACKWARD: 5, Phase.COMMUNICATION: 3}


# -- memory


def test_nothing_held_is_a_peak_of_nothing() -> None:
    """A ledger begins without a peak, and the first byte is one."""
    ledger = Ledger(2)
    assert (ledger.peak(), ledger.peak_without_activations()) == (Peak(0, {}, "", Phase.OTHER),) * 2
    ledger.hold(Band.PARAMS, 1, "layer")
    assert ledger.peak() == ledger.peak_without_activations() == Peak(1, {Band.PARAMS: 1}, "layer", Phase.OTHER)


def test_held_is_what_was_held_less_what_was_freed() -> None:
    """Bytes are kept by band and in total."""
    ledger = Ledger(1)
    ledger.hold("a", 7, "")
    ledger.hold("b", 11, "")
    ledger.hold("a", 13, "")
    ledger.free("a", 7, "")
    assert (ledger.held, ledger.total) == ({"a": 7 + 13 - 7, "b": 11}, 7 + 11 + 13 - 7)


def test_peak_is_taken_at_a_hold() -> None:
    """The peak is the highest instant, though less is held before and after, with the bands of that instant."""
    ledger = Ledger(1)
    with ledger.step() as report:
        with ledger.during(Phase.FORWARD):
            ledger.hold("a", 17, "first")
        ledger.free("a", 17, "first")  # so that its own maximum is not in the peak
        ledger.hold("b", 5, "second")
        with ledger.during(Phase.BACKWARD):
            ledger.hold("c", 19, "third")
        ledger.free("c", 19, "third")
        ledger.hold("d", 2, "fourth")
    assert report.peak == Peak(5 + 19, {"b": 5, "c": 19}, "third", Phase.BACKWARD)
    assert report.resident == {"b": 5, "d": 2}


def test_peak_keeps_its_bands() -> None:
    """What comes and goes after the peak changes nothing in it."""
    ledger = Ledger(1)
    ledger.hold("a", 7, "")
    peak = ledger.peak()
    ledger.free("a", 7, "")
    ledger.hold("a", 5, "")
    assert ledger.peak() == peak == Peak(7, {"a": 7}, "", Phase.OTHER)


def test_the_first_of_equal_instants_is_the_peak() -> None:
    """Within a step an instant as high as the peak does not replace it."""
    ledger = Ledger(1)
    with ledger.step() as report:
        ledger.hold("a", 7, "first")
        ledger.free("a", 7, "first")
        ledger.hold("b", 7, "second")
    assert report.peak == report.peak_without_activations == Peak(7, {"a": 7}, "first", Phase.OTHER)


def test_the_first_of_equal_steps_has_the_peak() -> None:
    """Over the run, too, the first of equals stands."""
    ledger = Ledger(1)
    for band in ("a", "b", "c"):
        with ledger.step():
            ledger.hold(band, 7, "")
            ledger.free(band, 7, "")
    assert [ledger.peak().by_band, ledger.peak_without_activations().by_band] == [{"a": 7}] * 2


def test_a_steps_peak_is_its_own() -> None:
    """A step's peak starts from what is held when it begins; the run's is the highest of all."""
    ledger = Ledger(1)
    ledger.hold("a", 3, "")
    with ledger.step() as first:
        ledger.hold("b", 11, "")
        ledger.free("b", 11, "")
    with ledger.step() as second:
        pass
    with ledger.step() as third:
        ledger.hold("b", 5, "")
        ledger.free("b", 5, "")
    assert [report.peak.total for report in (first, second, third)] == [3 + 11, 3, 3 + 5]
    assert second.peak == second.peak_without_activations == Peak(3, {"a": 3}, "", Phase.OTHER)
    assert [ledger.peak(), ledger.peak_without_activations()] == [first.peak] * 2


def test_the_peak_before_the_first_step_counts() -> None:
    """The run's peak remembers what was held, and freed again, before any step."""
    ledger = Ledger(1)
    ledger.hold("a", 29, "")
    ledger.free("a", 29, "")
    with ledger.step():
        ledger.hold("b", 3, "")
    assert ledger.peak() == ledger.peak_without_activations() == Peak(29, {"a": 29}, "", Phase.OTHER)


def test_apart_bands_are_left_out_of_the_second_peak() -> None:
    """The peak without activations has an instant of its own, and no band that is apart."""
    ledger = Ledger(1, apart=["x"])
    with ledger.step() as report:
        ledger.hold("a", 5, "first")
        ledger.hold("x", 23, "second")
        ledger.free("a", 5, "first")
        ledger.hold("b", 7, "third")
        ledger.free("x", 23, "second")
        ledger.hold("x", 2, "fourth")
    assert report.peak == Peak(23 + 7, {"x": 23, "b": 7}, "third", Phase.OTHER)
    assert report.peak_without_activations == Peak(7, {"b": 7}, "third", Phase.OTHER)


def test_holding_an_apart_band_is_no_peak_without_it() -> None:
    """However much of an apart band is held, at the step's start too, the second peak does not move."""
    ledger = Ledger(1, apart=["x"])
    ledger.hold("a", 5, "first")
    ledger.hold("x", 31, "second")
    with ledger.step() as report:
        ledger.hold("x", 37, "third")
    assert report.peak_without_activations.total == ledger.peak_without_activations().total == 5
    assert report.peak.total == ledger.peak().total == 5 + 31 + 37


# -- traffic


def test_a_hop_is_counted_for_every_rank() -> None:
    """Bytes sent, received and padding add up rank by rank, and messages by hop."""
    traffic = Traffic(3)
    traffic.hop(7, 11, np.array([2, 0, 3]))
    traffic.hop(13, 17, None)
    traffic.hop(0, 0, np.array([0, 5, 0]))
    assert traffic.sent.tolist() == [7 + 13] * 3
    assert traffic.received.tolist() == [11 + 17] * 3
    assert traffic.padding.tolist() == [2, 5, 3]
    assert traffic.messages == 3


def send(ledger: Ledger, nbytes: int, collective: str = "all-gather", band: str = "params", unit: str = "") -> None:
    with ledger.sending(collective, band, unit) as traffic:
        traffic.hop(nbytes, nbytes, None)


def test_sent_accumulates_over_the_run() -> None:
    """Bytes sent before, in, between and after steps are all in the run's count, as Python integers."""
    ledger = Ledger(2)
    totals = [ledger.sent()]
    send(ledger, 2)
    totals.append(ledger.sent())
    for nbytes in (3, 5):
        with ledger.step():
            send(ledger, nbytes)
            totals.append(ledger.sent())
        send(ledger, 100 * nbytes)
        totals.append(ledger.sent())
    expected = [0, 2, 2 + 3, 2 + 3 + 300, 2 + 3 + 300 + 5, 2 + 3 + 300 + 5 + 500]
    assert totals == [[total] * 2 for total in expected]
    assert {type(nbytes) for total in totals for nbytes in total} == {int}


def test_counts_of_bytes_are_integers_of_64_bits() -> None:
    """What a collective moved is counted per rank in int64, padding and what left the node too."""
    traffic = Traffic(3)
    traffic.hop(2**40, 2**41, np.array([0, 1, 2]))
    assert [each.dtype for each in (traffic.sent, traffic.received)] == [np.int64] * 2
    assert [each.dtype for each in (traffic.padding, traffic.outside)] == [np.int64] * 2
    assert (traffic.outside.tolist(), traffic.node_outside) == ([0] * 3, 0)
    assert (traffic.sent.tolist(), traffic.received.tolist()) == ([2**40] * 3, [2**41] * 3)


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


def test_a_collectives_hops_share_a_counter() -> None:
    """Within a step the same collective for the same band counts on; another band or collective has its own."""
    ledger = Ledger(2)
    with ledger.step() as report:
        send(ledger, 2, "all-gather", "params", "layer 1")
        send(ledger, 3, "all-gather", "params", "layer 2")
        send(ledger, 5, "all-gather", "norms")
        send(ledger, 7, "reduce-scatter", "grads")
    sent = {key: traffic.sent.tolist() for key, traffic in report.traffic.items()}
    assert sent == {
        ("all-gather", "params"): [2 + 3] * 2,
        ("all-gather", "norms"): [5] * 2,
        ("reduce-scatter", "grads"): [7] * 2,
    }
    assert report.sent_by_collective() == {"all-gather": [2 + 3 + 5] * 2, "reduce-scatter": [7] * 2}
    assert report.sent() == [2 + 3 + 5 + 7] * 2


def test_a_step_without_traffic_has_none() -> None:
    """A report in which nothing was sent says so with empty records."""
    ledger = Ledger(3)
    with ledger.step() as report:
        pass
    assert (report.traffic, report.sent(), report.sent_by_collective()) == ({}, [], {})


# -- reports


def test_a_report_begins_empty() -> None:
    """A report of a step that has not begun has nothing of anything, and shares nothing with another."""
    one, other = Report(step=3), Report(step=4)
    assert (one.step, one.complete, one.peak, one.peak_without_activations) == (3, False, Peak(), Peak())
    assert (one.resident, one.padding, one.traffic, one.flops, one.seconds, one.events) == ({}, [], {}, {}, {}, [])
    assert (one.losses, one.norm, one.scale, one.skipped) == ([], None, 1.0, False)
    assert (one.host, one.host_peak, one.copies) == ({}, Peak(), {})
    assert np.isnan([one.loss, one.mean_of_means]).all()
    assert repr(one) == (
        "Report(step 3, incomplete: a rank holds 0 B at rest and 0 B at the peak, in the other; it sends 0 B)"
    )
    full = Report(step=4, loss=0.5, complete=True, resident={"params": 3}, peak=Peak(7, {}, "layer 2", Phase.FORWARD))
    assert repr(full) == (
        "Report(step 4: loss 0.500000; a rank holds 3 B at rest and 7 B at the peak, in the forward of layer 2; "
        "it sends 0 B)"
    )
    one.resident["params"] = 1
    one.events.append(Event(EventKind.FREE, "params", "", 1, 0, 0.0, Phase.OTHER))
    assert (other.resident, other.events) == ({}, [])
    assert (Peak(), Peak().by_band, Peak().unit, Peak().phase) == (Peak(0, {}, "", Phase.OTHER), {}, "", Phase.OTHER)


def test_the_words_that_results_are_written_in() -> None:
    """Phases and kinds of events stand in results files under these names."""
    phases = ["forward", "backward", "communication", "optimizer", "optimizer on the host", "other"]
    kinds = ["hold", "free", "send", "compute", "copy", "host hold", "host free"]
    assert ([str(phase) for phase in Phase], [str(kind) for kind in EventKind]) == (phases, kinds)


def test_reports_keep_steps_that_ended_early() -> None:
    """An error leaves a step's report in the record, incomplete, with its numbers up to there."""
    clock = Clock()
    ledger = Ledger(1, clock=clock)

    def break_down() -> None:
        with ledger.step(), ledger.during(Phase.FORWARD):
            ledger.hold("a", 7, "")
            send(ledger, 11)
            ledger.free("a", 7, "")
            ledger.hold("b", 3, "")
            clock.tick(5)
            raise Stop

    with ledger.step():
        pass
    with pytest.raises(Stop):
        break_down()
    with ledger.step():
        pass
    assert [(report.step, report.complete) for report in ledger.reports] == [(1, True), (2, False), (3, True)]
    broken = ledger.reports[1]
    assert broken.peak == Peak(7, {"a": 7}, "", Phase.FORWARD)
    assert (broken.resident, broken.sent(), broken.seconds[Phase.FORWARD]) == ({"b": 3}, [11], 5)
    assert ledger.reports[2].traffic == {}


def test_a_step_is_incomplete_until_it_ends() -> None:
    """A report is in the record from the step's start, without a loss and not complete."""
    ledger = Ledger(1)
    with ledger.step() as report:
        assert ledger.reports == [report]
        assert (report.complete, report.step, str(report.loss)) == (False, 1, "nan")
    assert report.complete


# -- the log


def test_the_log_says_what_whose_how_much_and_when() -> None:
    """Holds, frees, sends and computations are logged with unit, bytes, bytes held after, time, phase and count."""
    clock = Clock()
    ledger = Ledger(1, clock=clock)
    ledger.hold("a", 3, "before")
    with ledger.step() as report:
        clock.tick(2)
        with ledger.during(Phase.FORWARD):
            ledger.hold("b", 5, "u")
            clock.tick(7)
            with ledger.sending("all-gather", "b", "v") as traffic:
                traffic.hop(11, 11, None)
                traffic.hop(11, 11, None)
                clock.tick(1)
            ledger.flops(13)
            ledger.flops(17)
            ledger.computed("w")
            ledger.computed("x")
        ledger.free("b", 5, "u")
    assert report.events == [
        Event(EventKind.HOLD, "b", "u", 5, 3 + 5, 2, Phase.FORWARD),
        Event(EventKind.SEND, "all-gather", "v", 11 + 11, 3 + 5, 2 + 7 + 1, Phase.COMMUNICATION, 2),
        Event(EventKind.COMPUTE, "forward", "w", 0, 3 + 5, 2 + 7 + 1, Phase.FORWARD, 13 + 17),
        Event(EventKind.COMPUTE, "forward", "x", 0, 3 + 5, 2 + 7 + 1, Phase.FORWARD, 0),
        Event(EventKind.FREE, "b", "u", 5, 3, 2 + 7 + 1, Phase.OTHER),
    ]


def test_a_second_send_logs_its_own_bytes() -> None:
    """Each collective's entry has its own bytes, though the counter goes on."""
    ledger = Ledger(2)
    with ledger.step() as report:
        send(ledger, 5)
        send(ledger, 7)
    assert [event.nbytes for event in report.events] == [5, 7]


def test_two_sends_of_a_step_log_their_own_messages() -> None:
    """The second entry of a collective has the messages since the first."""
    ledger = Ledger(2)
    with ledger.step() as report:
        for hops in (2, 3):
            with ledger.sending("all-gather", "params", "layer") as traffic:
                for _ in range(hops):
                    traffic.hop(7, 7, None)
    assert [event.amount for event in report.events] == [2, 3]


@each_gather
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_log_is_enough_to_rebuild_the_step(stage: Stage, n: int, gather: Gather) -> None:
    """Replaying a step's log gives its running total, both peaks by band, its traffic and its time again."""
    scheme = stage(MLP((7, 5, 3)), n, gather=gather)
    for batch in batches(n, steps=2, widths=(7, 5, 3)):
        scheme.step(batch)
    sign = {EventKind.HOLD: 1, EventKind.FREE: -1, EventKind.SEND: 0, EventKind.COMPUTE: 0}
    for report in scheme.reports:
        held, logged = Counter(report.resident), Counter[str]()
        peaks = {"": report.peak, Band.ACTIVATIONS: report.peak_without_activations}
        best = {apart: Peak(held.total(), dict(held)) for apart in peaks}
        for event in report.events:
            if sign[event.kind]:
                held[event.name] += sign[event.kind] * event.nbytes
            assert event.held == held.total()
            if event.kind is EventKind.SEND:
                logged[event.name] += event.nbytes
            for apart, highest in best.items():
                bands = {band: nbytes for band, nbytes in held.items() if nbytes and band != apart}
                if sum(bands.values()) > highest.total:
                    best[apart] = Peak(sum(bands.values()), bands, event.unit, event.phase)
        assert nonzero(held) == report.resident
        assert best == peaks
        assert report.sent_by_collective() == {name: [nbytes] * n for name, nbytes in logged.items()}
        assert min(report.seconds.values()) >= 0
        assert report.events[-1].seconds <= sum(report.seconds.values()) * (1 + 1e-9)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("steps", [1_200, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_run_takes_no_more_memory_than_a_short_one(steps: int) -> None:
    """The process has after so many steps what it had after 400, within what an interpreter needs: 256 kB."""
    run = ZeRO3(MLP((3, 2)), 2, precision="fp32", keep_reports=10)
    [batch] = batches(2, rows=1, widths=(3, 2))
    after: list[int] = []
    for step in range(1, steps + 1):
        run.step(batch)
        if step in (400, steps):
            gc.collect()
            after.append(psutil.Process().memory_info().rss)
    assert len(run.reports) == 10
    assert run.ledger.steps == steps
    assert after[1] - after[0] < 256 * 1024
