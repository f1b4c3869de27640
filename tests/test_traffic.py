"""What the papers say that a run sends, for any number of ranks."""

from fractions import Fraction
from typing import Any

import pytest

from helpers import Case, each_gather, each_stage, padding_sent, sizes, traffic, trained
from zerosim.model import MLP
from zerosim.options import Gather
from zerosim.schemes import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.stages import HPZ, HSDP
from zerosim.worlds.local import LocalRing

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

EVEN, SMALL = (32, 64, 32), (7, 5, 3)  # layer widths; 32 divides every layer of the first
LAYERS = sizes(SMALL)
TIMES = {DP: 2, ZeRO1: 2, ZeRO2: 2, ZeRO3: 3}  # how often the parameters' bytes, less a rank's own, are sent in a step


@each_stage
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
def test_a_step_sends_what_the_textbook_says(stage: Stage, n: int) -> None:
    """Where N divides, a rank sends 2 (N-1)/N of the parameters' bytes in a step, under ZeRO-3 3 (N-1)/N, exactly."""
    report, unit = trained(Case(stage, n, EVEN)).reports[0], sum(sizes(EVEN)) * 4
    assert {Fraction(nbytes, unit) for nbytes in report.sent() or [0]} == {TIMES[stage] * Fraction(n - 1, n)}
    assert set(padding_sent(report)) <= {0}


@each_stage
@pytest.mark.parametrize("n", [2, 3, 7, 33])
def test_a_step_sends_whole_chunks(stage: Stage, n: int) -> None:
    """Where N does not divide, (N-1) ceil(P/N) elements of each layer, two or three times, padding counted apart."""
    report = trained(Case(stage, n)).reports[0]
    chunks = [-(-size // n) for size in LAYERS]
    assert report.sent() == [TIMES[stage] * (n - 1) * sum(chunks) * 4] * n
    pads = sum(n * chunk - size for chunk, size in zip(chunks, LAYERS, strict=True))
    assert sum(padding_sent(report)) == TIMES[stage] * (n - 1) * pads * 4
    assert sum(report.sent()) - sum(padding_sent(report)) == TIMES[stage] * (n - 1) * sum(LAYERS) * 4


@each_gather
def test_one_rank_sends_nothing(stage: Stage, gather: Gather) -> None:
    """At N = 1 no collective runs at all."""
    scheme = trained(Case(stage, 1, gather=gather))
    assert [report.traffic for report in scheme.reports] == [{}, {}]
    assert scheme.bytes_comm_per_rank() == 0


@pytest.mark.parametrize("n", [2, 5, 33])
@pytest.mark.parametrize("bucket", ["layer", "model"])
def test_the_first_three_stages_send_alike(n: int, bucket: Gather) -> None:
    """Data parallel, ZeRO-1 and ZeRO-2 send the same bytes on every rank; ZeRO-3 half as much again."""
    data_parallel, zero1, zero2, zero3 = (trained(Case(stage, n, bucket=bucket)).ledger.sent() for stage in SCHEMES)
    assert data_parallel == zero1 == zero2
    assert zero3 == [nbytes * 3 // 2 for nbytes in data_parallel]
    assert min(data_parallel) > 0


@each_stage
@pytest.mark.parametrize(("precision", "wire"), [("mixed", "fp16"), ("bf16", "bf16")])
def test_a_two_byte_wire_halves_the_traffic(stage: Stage, precision: str, wire: str) -> None:
    """Sent, received and padding are half of what they are on an fp32 wire, in as many messages."""
    narrow = trained(Case(stage, 7, precision=precision, wire=wire)).reports[0].traffic
    wide = trained(Case(stage, 7, precision=precision)).reports[0].traffic
    assert {key: numbers(t, 2) for key, t in narrow.items()} == {key: numbers(t, 1) for key, t in wide.items()}
    assert wide


def numbers(moved: Any, times: int) -> tuple[list[int], list[int], list[int], int]:
    counts = ((times * nbytes).tolist() for nbytes in (moved.sent, moved.received, moved.padding))
    return (*counts, moved.messages)


@pytest.mark.parametrize("other", [{"precision": "bf16"}, {"precision": "fp32"}, {"gather": "model"}], ids=str)
def test_the_wire_decides_what_is_sent(other: dict[str, Any]) -> None:
    """On an fp32 wire every precision sends the same, and so does gathering the whole model at once."""
    for n in (2, 5):
        assert [traffic(report) for report in trained(Case(ZeRO3, n, **other)).reports] == [
            traffic(report) for report in trained(Case(ZeRO3, n)).reports
        ]


class Postman(LocalRing):
    """A caller's own ring, which counts at its hops what each rank hands over."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sent = [0]  # in a list: the rings of groups that are made of this one count here too

    def shift(self, block: Any, spare: Any) -> Any:
        self.sent[0] += block.nbytes // len(block)
        return super().shift(block, spare)


@pytest.mark.parametrize(("stage", "node"), [(DP, None), (ZeRO3, None), (ZeRO3, 2), (HSDP, 2), (HPZ, 2)])
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_a_ring_of_ones_own_makes_every_hop(stage: Stage, node: int | None, kernels: str) -> None:
    """Whatever a ring does at a hop is done at every hop, in the rings within and between nodes as well."""
    if kernels == "numba":
        pytest.importorskip("numba")
    ring, case = Postman(6), Case(stage, 6)
    scheme = stage(MLP(case.widths), 6, ring=ring, node=node, kernels=kernels)
    scheme.step(case.batch())
    assert ring.sent == [scheme.bytes_comm_per_rank()]
    assert ring.sent[0]
