"""The simulator against real ranks: every number, on both kinds of collectives; and checks that can fail."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from helpers import MINE, by_night, real_settings
from zerosim.bands import Band
from zerosim.real_ranks import agreement, corroborate
from zerosim.real_ranks.cases import cases
from zerosim.records import real_ranks as records
from zerosim.records.files import ResultsError
from zerosim.records.real_ranks import (
    EXTRA_BYTES,
    EXTRA_MEMORY,
    FAULTS,
    Corroboration,
    Fault,
    Flow,
    RankRecord,
    Run,
    Settings,
)
from zerosim.records.results import Failure
from zerosim.stages import HPZ, HSDP, ROWS, SCHEMES, ZeRO2
from zerosim.worlds.gloo import HEADER

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="real ranks need torch: pip install 'zerosim[torch]'"),
    pytest.mark.usefixtures("shapes_unchecked"),  # ranks are forked from here, with what is switched on here
]
counted = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this platform has no /proc/self/io")

TIMEOUT = 60.0
WIDTHS = [64, 128, 128, 64]
N_PARAMS = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 64 + 64
DAY = real_settings(widths=WIDTHS, rows=[*SCHEMES, HSDP], schedule={"node": 2})
INT8 = real_settings(steps=1, rows=[HPZ], schedule={"node": 2, "wire_params": "int8"})
NIGHT = {
    "every precision": real_settings(widths=WIDTHS, precisions=list(records.RECIPES)),
    "five ranks": real_settings(ranks=5, rows=[*SCHEMES, MINE]),  # nothing divides by five
    "every row": real_settings(ranks=6, rows=list(ROWS), schedule={"node": 3}),
    "int8 under every row": real_settings(
        widths=WIDTHS, precisions=["bf16"], rows=list(ROWS),
        schedule={"node": 2, "wire_params": "int8", "prefetch": 1, "bucket": 12_345},
    ),
    "the largest magnitude": real_settings(
        steps=1, rows=[*SCHEMES, HSDP], schedule={"node": 2, "clip": 0.5, "norm_type": float("inf")}
    ),
    "every option": real_settings(
        batch=6, rows=list(ROWS), wire="working",
        schedule={
            "node": 2, "accumulate": 3, "sync": "each", "prefetch": 1, "bucket": 60, "padding": "rows",
            "checkpoint": True, "clip": 0.5,
        },
    ),
}  # fmt: skip


def run(asked: Settings, timeout: float = TIMEOUT) -> Corroboration:
    return corroborate.run(asked, timeout=timeout)


@pytest.fixture(scope="module")
def day() -> Corroboration:
    return run(DAY)


@cache
def night(name: str) -> Corroboration:
    return run(NIGHT[name])


@pytest.fixture(scope="module")
def int8() -> Corroboration:
    return run(INT8)


@pytest.fixture(params=["day", "int8", *by_night(*NIGHT)])
def found(request: pytest.FixtureRequest) -> Corroboration:
    record = night(request.param) if request.param in NIGHT else request.getfixturevalue(request.param)
    assert isinstance(record, Corroboration)
    return record


def flows(record: Corroboration) -> Iterator[tuple[Run, RankRecord, str, Flow]]:
    for each in record.runs:
        for rank in each.ranks:
            yield each, rank, "sent", rank.sent
            yield each, rank, "received", rank.received


# -- what was found


def test_everything_is_equal(found: Corroboration) -> None:
    """All rows run to the end on both kinds of collectives in each precision, on every rank, and nothing fails."""
    assert [str(failure) for failure in found.failures] == []
    assert found.complete, found.ended
    asked = found.settings
    expected = [(case.row, case.collectives, case.precision) for case in cases(asked)]
    assert len(expected) == len(asked.rows) * 2 * len(asked.precisions)
    assert [(each.row, each.collectives, each.precision) for each in found.runs] == expected
    for each in found.runs:
        assert each.complete
        assert [rank.rank for rank in each.ranks] == list(range(asked.ranks))
        assert len(each.times) == len(each.losses) == asked.steps


def test_every_bit_of_every_rank_is_compared(day: Corroboration) -> None:
    """0 elements differ, of all that the ranks hold, padding included, at the start and after each of two steps.

    Of gradients that are kept by more ranks than own them, those are compared that a rank owns.
    """
    n, node = 4, 2
    padded = sum(-(-(a * b + b) // n) * n for a, b in pairwise(WIDTHS))
    for each in day.runs:
        row = each.row.on(n, node)
        pieces = {band: row.piece(band, 0, n, node)[1] for band in map(Band, each.compared)}
        pieces[Band.GRADS] = row.piece(Band.MASTER, 0, n, node)[1]
        assert each.compared == {band: 3 * n * padded // count for band, count in pieces.items()}
        assert {Band.PARAMS, Band.GRADS, Band.MASTER, Band.EXP_AVG, Band.EXP_AVG_SQ} == set(each.compared)
        assert set(each.differing.values()) == {0}
        assert each.losses == each.losses_simulated


@counted
def test_no_byte_is_unexplained(found: Corroboration) -> None:
    """On every rank and in every step both meters of the kernel read payload plus framing, sent and received."""
    assert found.unmeasured == {}
    for each, rank, way, flow in flows(found):
        explained = [moved + framing for moved, framing in zip(flow.moved, flow.framing, strict=True)]
        meters = {"process", "sockets"} if way == "sent" else {"sockets"}
        assert flow.kernel == dict.fromkeys(meters, explained), (each.scheme, each.collectives, rank.rank, way)
        assert all(explained)


def test_simulator_ledger_and_calls_to_torch_agree(found: Corroboration) -> None:
    """The simulator's count, the rank's ledger and the log beside the calls to torch are the same, step by step."""
    for _, _, _, flow in flows(found):
        assert flow.simulated == flow.booked == flow.handed
        assert all(flow.handed)


def test_gloos_reduce_scatter_costs_an_all_reduce(day: Corroboration) -> None:
    """In units of P (N-1)/N the schemes are to send 2, 2, 2 and 3, and with torch's collectives send 2, 3, 3 and 4."""
    unit = 4 * N_PARAMS * 3 // 4
    handed = {"data parallel": 2, "ZeRO-1": 2, "ZeRO-2": 2, "ZeRO-3": 3}
    moved = {"ring": handed, "native": {"data parallel": 2, "ZeRO-1": 3, "ZeRO-2": 3, "ZeRO-3": 4}}
    for each, _, _, flow in flows(day):
        if each.scheme in handed:
            assert flow.handed == [handed[each.scheme] * unit] * 2
            assert flow.moved == [moved[each.collectives][each.scheme] * unit] * 2


def test_ranks_hold_what_the_simulator_says(found: Corroboration) -> None:
    """Band by band, at rest and at the peak; and the process has more than that."""
    for each in found.runs:
        for rank in each.ranks:
            assert (rank.resident, rank.peak) == (each.resident, each.peak)
            assert rank.memory > sum(rank.peak.values())


def test_native_collectives_hold_a_copy_of_the_buffer(day: Corroboration) -> None:
    """At the peak of data parallel the ring holds two chunks of the largest layer, and native collectives N + 1."""
    chunk = 4 * (128 * 128 + 128) // 4
    for each in day.runs:
        if each.scheme == "data parallel":
            assert each.peak[Band.BLOCKS] == (2 if each.collectives == "ring" else 4 + 1) * chunk


def test_times_are_told_apart(found: Corroboration) -> None:
    """Compute and communication are positive and add up to the step."""
    for each in found.runs:
        for time in each.times:
            assert min(time.compute, time.communication) > 0
            assert time.compute + time.communication == pytest.approx(time.total)


def test_only_loopback_is_used(found: Corroboration) -> None:
    """The ranks' TCP connections have one address, 127.0.0.1; and gloo sums in the ring's order."""
    assert found.addresses == ["127.0.0.1"]
    assert found.order == "ring"


def test_the_record_is_written_and_read(day: Corroboration, tmp_path: Path) -> None:
    """What is read is what was written; another schema, half a file and no file are refused with the reason."""
    path = tmp_path / "corroborate.json"
    records.save(day, path)
    assert records.load(path) == day
    path.write_bytes(path.read_bytes().replace(b"zerosim.corroborate/2", b"zerosim.corroborate/0"))
    with pytest.raises(ResultsError, match=r"its schema is 'zerosim\.corroborate/0'"):
        records.load(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ResultsError, match="not a whole record"):
        records.load(path)
    with pytest.raises(ResultsError, match="cannot be read"):
        records.load(tmp_path / "absent.json")


# -- the checks can fail


def broken(kind: str, **more: object) -> Corroboration:
    """What is found when rank 2 of four is broken in step 2 of two runs, in one of which gradients are whole."""
    fault = Fault(kind=kind, rank=2, step=2)
    return run(real_settings(collectives=["ring"], rows=[SCHEMES[1], ZeRO2], fault=fault, **more), timeout=10)


def named(record: Corroboration) -> list[tuple[str, int, int, str]]:
    """Check, step, rank and quantity of the failures that concern the first step in which a run has any."""
    first: list[Failure] = []
    for each in record.runs:
        mine = [failure for failure in record.failures if failure.scheme.startswith(each.scheme)]
        order = [(failure.step, list(records.CHECKS).index(failure.check)) for failure in mine]
        first += [failure for failure, place in zip(mine, order, strict=True) if place == min(order)]
    return [(failure.check, failure.step, failure.rank, failure.quantity) for failure in first]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("weights", ("start", 0, 2, "params of layer 1, 1 elements, the first of them 0")),
        ("data", ("losses", 1, 2, "its loss")),
        pytest.param("loss", ("losses", 2, 2, "its loss"), marks=pytest.mark.slow),
        ("bit", ("bits", 2, 2, "params of layer 1, 1 elements, the first of them 0")),
        pytest.param(
            "gradient", ("bits", 2, 2, "grads of layer 1, 1 elements, the first of them 0"), marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_a_rank_with_other_numbers_is_named(kind: str, expected: tuple[str, int, int, str]) -> None:
    """Other weights, data, losses, parameters or gradients on one rank: that rank comes first, where it began."""
    record = broken(kind)
    assert record.complete
    assert named(record) == [expected] * 2


def test_a_rank_on_other_threads_is_named_before_anything_runs() -> None:
    """A library of linear algebra that computes on two threads on one rank is a disagreement, and nothing is run."""
    with pytest.raises(agreement.Disagreement, match=r"nothing was run: rank 2 has threads of .* 2 where"):
        broken("threads")


@counted
def test_one_hop_sent_twice_is_found() -> None:
    """Bytes that nobody booked fail the check of bytes by both meters, on the two ranks that they concern, no other."""
    record = broken("hop")
    assert record.complete
    payload, source, destination = EXTRA_BYTES, 2 * HEADER, HEADER
    for each in record.runs:
        for rank in each.ranks:
            sent = {2: payload + source, 1: destination}.get(rank.rank, 0)
            received = {1: payload + source, 2: destination}.get(rank.rank, 0)
            for flow, extra in ((rank.sent, sent), (rank.received, received)):
                for counts in flow.kernel.values():
                    assert [c - m - f for c, m, f in zip(counts, flow.moved, flow.framing, strict=True)] == [0, extra]
    assert {failure.check for failure in record.failures} == {"bytes"}
    assert {(failure.step, failure.rank) for failure in record.failures} == {(2, 1), (2, 2)}
    assert len(record.failures) == len(record.runs) * 2 * 3


@counted
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "opened", "datagrams"), [("connection", 2, 0), ("datagram", 0, 2)])
def test_what_no_meter_of_a_rank_covers_is_said(kind: str, opened: int, datagrams: int) -> None:
    """A connection that is opened and closed within a step, and a datagram, are counted in the network namespace."""
    record = broken(kind)
    assert record.failures == []
    assert record.elsewhere["opened"] >= opened  # others may be in the same namespace
    assert record.elsewhere["datagrams"] >= datagrams


@pytest.mark.slow
def test_memory_outside_of_the_ledger_is_found() -> None:
    """A process that grows by far more than its bands do fails the check of memory, in that step and on that rank."""
    record = broken("memory")
    [failure] = [failure for failure in record.failures if failure.scheme.startswith("ZeRO-1")]
    assert (failure.check, failure.step, failure.rank) == ("memory", 2, 2)
    assert int(failure.measured.replace(",", "")) >= EXTRA_MEMORY


# -- the cause is named, alone


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("error", r"^Rank 2 failed, in ZeRO-1, ring, mixed: step 2 of 2: RuntimeError: this error was asked for with "
                  r"--break error$"),
        ("skip", r"^Rank 2 has left out a send of 24 B, in ZeRO-1, ring, mixed: step 2 of 2\."),
    ],
)  # fmt: skip
def test_the_rank_that_began_it_is_named_alone(kind: str, says: str) -> None:
    """An error in a rank, or an operation that it leaves out, is the cause; what it did to the others stands beside."""
    record = broken(kind)
    assert not record.complete
    assert re.search(says, record.ended), record.ended
    assert "2" not in record.errors
    [kept] = record.runs
    assert len(kept.losses) == 1


def test_every_fault_is_tried() -> None:
    """Each thing that --break can break is tried above or among the ranks that die or stop."""
    tried = {"weights", "data", "loss", "bit", "gradient", "threads", "hop", "connection", "datagram", "memory"}
    assert tried | {"error", "skip", "kill", "stop"} == set(FAULTS)
