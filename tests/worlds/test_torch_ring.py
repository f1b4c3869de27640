"""Collectives over real torch.distributed ranks: their bits, and their bytes on the kernel's word."""

import contextlib
import json
from importlib.util import find_spec
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from zerosim.bands import Band
from zerosim.comm import Comm, Ring
from zerosim.ledger import Ledger
from zerosim.ranks import Ranks, Workspace
from zerosim.real_ranks import meter
from zerosim.real_ranks.connection import Arrived, Connection, Go, Result
from zerosim.real_ranks.coordinator import Coordinator
from zerosim.real_ranks.processes import Heartbeat, children, meeting_point
from zerosim.worlds import gloo
from zerosim.worlds.local import LocalRing
from zerosim.worlds.native import LocalCollectives, Native

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="real ranks need torch: pip install 'zerosim[torch]'"),
    pytest.mark.usefixtures("shapes_unchecked"),  # ranks are forked from here, with what is switched on here
]

FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = [(FP32, FP32), (FP16, FP32), (FP16, FP16), (BF16, FP32), (BF16, BF16)]  # of the buffer, of the wire
ODD, LONG = 5, 2 * gloo.MAX_SEGMENT // 4 + 3  # elements of a chunk; the second takes more than two segments
WORLDS = (4, pytest.param(5, marks=pytest.mark.slow))  # with fewer, another order of summation need not show


class Case(NamedTuple):
    """One collective."""

    kind: type[Comm]
    collective: str
    chunk: int
    band: Any
    wire: Any

    def __str__(self) -> str:
        return f"{self.kind.__name__} {self.collective} of {self.chunk} {self.band} as {self.wire}"


CASES = [
    Case(kind, collective, ODD, *dtypes)
    for kind in (Comm, Native)
    for collective in ("all-reduce", "reduce-scatter", "all-gather")
    for dtypes in DTYPES
] + [Case(kind, "all-reduce", LONG, FP32, FP32) for kind in (Comm, Native)]


class Seen(NamedTuple):
    """What a rank found in one case."""

    differing: int
    """Elements whose bits are not those of the simulated ring."""
    expected: list[int]
    """Bytes that the model says were sent and received."""
    written: int | None
    tcp_sent: int | None
    tcp_received: int | None


def draw(n: int, case: Case) -> Any:
    """A buffer for each rank, of mixed magnitudes, so that the order of a sum shows, repeated."""
    rng = np.random.default_rng(n)
    drawn = rng.standard_normal(1009) * 2.0 ** rng.integers(-3, 4, 1009)
    return np.resize(drawn.astype(case.band), (n, n * case.chunk))


def comm(case: Case, ring: Ring) -> Comm:
    ledger = Ledger(len(ring.ids))
    ranks = Ranks(ring.ids, {Band.BLOCKS: case.wire}, ledger, ring.empty)
    return (case.kind if hasattr(ring, "all_reduce") else Comm)(ring, case.wire, Workspace(ranks, Band.BLOCKS), ledger)


def collect(case: Case, on: Comm, buffer: Any) -> Any:
    """Run it in place."""
    if case.collective == "all-reduce":
        on.all_reduce(buffer, buffer.shape[1], scale=1 / on.ring.size, band="grads", unit="")
    elif case.collective == "reduce-scatter":
        on.reduce_scatter(buffer, on.own(buffer), buffer.shape[1], scale=1 / on.ring.size, band="grads", unit="")
    else:
        on.all_gather(buffer, buffer.shape[1], band="params", unit="")
    return buffer


def exercise(connection: Connection, heartbeat: Heartbeat, rank: int, n: int, path: str) -> None:
    """A rank's part: all cases, each between two fences; what was seen goes back as JSON."""
    from zerosim.worlds import torch_ring

    known, seen = meter.tcp_sockets(), []

    def fence() -> None:
        connection.send(Arrived())
        assert connection.receive() == Go()

    with torch_ring.process_group("gloo", torch_ring.file_store(path, n), rank, n, 60, rank, "lo"):
        ring = torch_ring.TorchRing(rank, n, heartbeat)
        for case in CASES[:30:5]:  # what libraries do once, they do now
            collect(case, comm(case, ring), draw(n, case)[rank : rank + 1])
        kernel = meter.Kernel(known)
        assert kernel.unmeasured == {}
        for case in CASES:
            data = draw(n, case)
            mine, on = data[rank : rank + 1].copy(), comm(case, ring)
            ring.handed.clear()
            before = kernel.read()
            fence()
            collect(case, on, mine)
            fence()
            counted = kernel.read().since(before)
            collect(case, comm(case, LocalRing(n)), data)
            bits = [np.ascontiguousarray(row).view(f"u{case.band.itemsize}") for row in (mine[0], data[rank])]
            each = [
                (gloo.moved(gloo.Call(op, nbytes), rank, size), times)
                for (op, nbytes, size), times in ring.handed.items()
            ]
            moved = gloo.total(one for one, times in each if one for _ in range(times))
            framing = moved.framing()
            expected = [moved.sent + framing[0], moved.received + framing[1]]
            seen.append(Seen(int(np.count_nonzero(bits[0] != bits[1])), expected, *counted[:3]))
        kernel.close()
    connection.send(Result(data=json.dumps(seen).encode()))
    with contextlib.suppress(EOFError):  # until all have answered
        connection.receive()


@pytest.fixture(scope="module", params=WORLDS)
def seen(request: pytest.FixtureRequest) -> list[list[Seen]]:
    """For each case what each rank saw."""
    n = request.param

    def rank(connection: Connection, heartbeat: Heartbeat, number: int) -> None:
        exercise(connection, heartbeat, number, n, path)

    with meeting_point() as path, children(n, rank) as ranks:
        coordinator = Coordinator([each.connection for each in ranks], 60, ranks)
        for case in CASES:
            for _ in range(2):
                coordinator.gather(Arrived, str(case))
                coordinator.tell(Go())
        results = coordinator.gather(Result, "the end")
    by_rank = [[Seen(*each) for each in json.loads(result.data)] for result in results]
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def test_real_ranks_have_the_simulated_rings_bits(seen: list[list[Seen]]) -> None:
    """Every collective, by hops and by torch's own, in every dtype and in long chunks, on every rank: 0 bits differ."""
    wrong = {str(case): [rank.differing for rank in ranks] for case, ranks in zip(CASES, seen, strict=True)}
    assert {name: differing for name, differing in wrong.items() if any(differing)} == {}


def test_the_kernel_counts_what_the_model_says(seen: list[list[Seen]]) -> None:
    """For every collective and rank, both meters read payload and framing, sent and received, to the byte."""
    wrong = {
        str(case): rank
        for case, ranks in zip(CASES, seen, strict=True)
        for rank in ranks
        if (rank.written, rank.tcp_sent, rank.tcp_received) != (rank.expected[0], *rank.expected)
    }
    assert wrong == {}


def test_another_order_would_show() -> None:
    """A sum in the order of ranks has other bits than the ring's, unless the wire holds sums exactly."""
    for case in CASES:
        if case.band == case.wire:
            data = draw(4, case)
            total = ((data[0] + data[1]) + data[2]) + data[3]
            LocalCollectives(4).all_reduce(data)
            assert (total.view(f"u{case.wire.itemsize}") != data[0].view(f"u{case.wire.itemsize}")).any()
