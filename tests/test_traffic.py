"""What a run sends, measured, against what ZeRO and the ring predict: integers, by collective, band and rank."""

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from zerosim import theory
from zerosim.ledger import Report
from zerosim.model import MLP
from zerosim.schemes import SCHEMES, Scheme

DEFAULT, SMALL, TINY = (64, 128, 128, 64), (7, 5, 3), (5, 3, 2)  # layer widths
LAYERS = (7 * 5 + 5, 5 * 3 + 3)  # the parameters of SMALL, layer by layer
RECIPES = [("mixed", "fp32"), ("mixed", "fp16"), ("bf16", "bf16"), ("fp32", "fp32")]
stages = pytest.mark.parametrize("stage", range(4), ids=[stage.name for stage in SCHEMES])
STEPS = 2


@dataclass(frozen=True)
class Case:
    """One run to make: a stage, a model, a world, and the options that differ from the defaults."""

    stage: int
    n: int
    widths: tuple[int, ...] = SMALL
    precision: str = "mixed"
    wire: str = "fp32"
    gather: str = "layer"
    bucket: str = "layer"

    def __str__(self) -> str:
        options = (f"{self.precision} over {self.wire}", f"gather={self.gather}", f"bucket={self.bucket}")
        return ", ".join((SCHEMES[self.stage].name, "-".join(map(str, self.widths)), f"N={self.n}", *options))

    @property
    def job(self) -> theory.Job:
        layers = tuple(zip(self.widths, self.widths[1:], strict=False))
        buckets = tuple((layer,) for layer in layers) if self.bucket == "layer" else (layers,)
        return theory.Job(self.stage, buckets, self.n, 2, self.precision, self.wire, self.gather)


@functools.cache
def run(case: Case) -> Scheme:
    """Some steps of ``case``; the same run for every test that reads it."""
    rng = np.random.default_rng(5)

    def draw(width: int) -> Any:
        return rng.standard_normal((2, width)).astype(np.float32)

    scheme = SCHEMES[case.stage](
        MLP(case.widths), case.n, precision=case.precision, wire=case.wire, gather=case.gather, bucket=case.bucket
    )
    for _ in range(STEPS):
        scheme.step([(draw(case.widths[0]), draw(case.widths[-1])) for _ in range(case.n)])
    return scheme


def reports(case: Case) -> list[Report]:
    return run(case).reports


def sent(report: Report) -> dict[str, dict[str, list[int]]]:
    """Bytes by collective, band and rank."""
    result: dict[str, dict[str, list[int]]] = {}
    for (collective, band), traffic in report.traffic.items():
        result.setdefault(collective, {})[band] = traffic.sent.tolist()
    return result


CASES = [
    *(Case(stage, n, DEFAULT) for stage in range(4) for n in (1, 2, 4, 8, 16, 32)),
    *(Case(stage, n) for stage in range(4) for n in (3, 5, 7, 12, 33)),
    *(Case(stage, 37, TINY) for stage in range(4)),  # more ranks than the 18 and 8 parameters of its layers
    *(Case(stage, 11, SMALL, *recipe) for stage in range(4) for recipe in RECIPES[1:]),
    *(Case(stage, 11, bucket="model") for stage in range(4)),
    *(Case(3, n, gather="model", bucket=bucket) for n in (4, 11) for bucket in ("layer", "model")),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


# -- measured equals predicted


@cases
def test_bytes_sent_are_the_predicted_ones(case: Case) -> None:
    """In every step each rank sends what theory says, collective by collective and band by band, and nothing else."""
    predicted = {
        collective: {band: [nbytes] * case.n for band, nbytes in bands.items()}
        for collective, bands in theory.traffic(case.job).items()
    }
    assert [sent(report) for report in reports(case)] == [predicted] * STEPS


@cases
def test_padding_sent_is_the_predicted_one(case: Case) -> None:
    """The padding among what each rank sends is theory's, rank by rank, in every step."""
    measured = [
        [int(nbytes) for nbytes in sum((t.padding for t in report.traffic.values()), np.zeros(case.n, np.int64))]
        for report in reports(case)
    ]
    assert measured == [theory.padding_sent(case.job)] * STEPS


@cases
def test_bytes_received_are_those_sent(case: Case) -> None:
    """In a ring every rank receives, of each collective and band, as much as it sends."""
    traffics = [traffic for report in reports(case) for traffic in report.traffic.values()]
    assert [t.received.tolist() for t in traffics] == [t.sent.tolist() for t in traffics]
    assert bool(traffics) is (case.n > 1)


@cases
def test_the_runs_bytes_are_the_sum_of_its_steps(case: Case) -> None:
    """Bytes so far are one step's times the steps, on every rank and on the busiest, as a Python integer."""
    each = sum(nbytes for bands in theory.traffic(case.job).values() for nbytes in bands.values())
    assert run(case).ledger.sent() == [STEPS * each] * case.n
    assert run(case).bytes_comm_per_rank() == STEPS * each
    assert type(run(case).bytes_comm_per_rank()) is int


@cases
def test_a_collective_is_n_minus_one_messages(case: Case) -> None:
    """Each bucket's reduce-scatter and all-gather take N-1 messages, an all-reduce 2 (N-1), a second gather as many."""
    buckets = len(case.widths) - 1 if case.bucket == "layer" else 1
    each = (case.n - 1) * buckets
    by_stage: list[dict[tuple[str, str], int]] = [
        {("all-reduce", "grads"): 2 * each},
        {("reduce-scatter", "grads"): each, ("all-gather", "params"): each},
        {("reduce-scatter", "grads"): each, ("all-gather", "params"): each},
        {("reduce-scatter", "grads"): each, ("all-gather", "params"): 2 * each},
    ]
    expected = by_stage[case.stage] if case.n > 1 else {}
    measured = [{key: traffic.messages for key, traffic in report.traffic.items()} for report in reports(case)]
    assert measured == [expected] * STEPS


# -- the formulas of the papers


@stages
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
def test_a_step_sends_what_the_textbook_says(stage: int, n: int) -> None:
    """Where N divides, a rank sends 2 (N-1)/N of the parameters' bytes in a step, under ZeRO-3 3 (N-1)/N, exactly."""
    unit = MLP(DEFAULT).n_params * 4
    [each] = {Fraction(sum(column), unit) for column in [per_rank(Case(stage, n, DEFAULT), r) for r in range(n)]}
    assert each == (3 if stage == 3 else 2) * Fraction(n - 1, n)


def per_rank(case: Case, rank: int) -> list[int]:
    return [nbytes[rank] for bands in sent(reports(case)[0]).values() for nbytes in bands.values()]


@stages
@pytest.mark.parametrize("n", [2, 3, 5, 7, 12, 33])
def test_a_step_sends_whole_chunks(stage: int, n: int) -> None:
    """Where N does not divide, a rank sends (N-1) ceil(P/N) elements of each layer, two or three times."""
    once = (n - 1) * sum(-(-size // n) for size in LAYERS) * 4
    assert reports(Case(stage, n))[0].sent() == [(3 if stage == 3 else 2) * once] * n


@stages
@pytest.mark.parametrize("gather", ["layer", "model"])
def test_one_rank_sends_nothing(stage: int, gather: str) -> None:
    """At N = 1 no collective runs at all."""
    assert [report.traffic for report in reports(Case(stage, 1, gather=gather))] == [{}] * STEPS
    assert run(Case(stage, 1, gather=gather)).bytes_comm_per_rank() == 0


@pytest.mark.parametrize("n", [2, 3, 5, 12, 33])
@pytest.mark.parametrize("bucket", ["layer", "model"])
def test_the_first_three_stages_send_alike(n: int, bucket: str) -> None:
    """Data parallel, ZeRO-1 and ZeRO-2 send the same bytes on every rank; ZeRO-3 half as much again."""
    data_parallel, zero1, zero2, zero3 = (run(Case(stage, n, bucket=bucket)).ledger.sent() for stage in range(4))
    assert data_parallel == zero1 == zero2
    assert zero3 == [nbytes * 3 // 2 for nbytes in data_parallel]
    assert min(data_parallel) > 0


@stages
@pytest.mark.parametrize("n", [2, 5, 7])
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_a_two_byte_wire_halves_the_traffic(stage: int, n: int, precision: str) -> None:
    """Sent, received and padding are half of what they are on an fp32 wire, in as many messages."""
    narrow = reports(Case(stage, n, precision=precision, wire={"mixed": "fp16"}.get(precision, precision)))[0].traffic
    wide = reports(Case(stage, n, precision=precision))[0].traffic
    assert {key: numbers(t, 2) for key, t in narrow.items()} == {key: numbers(t, 1) for key, t in wide.items()}
    assert wide


def numbers(traffic: Any, times: int) -> tuple[list[int], list[int], list[int], int]:
    counts = ((times * nbytes).tolist() for nbytes in (traffic.sent, traffic.received, traffic.padding))
    return (*counts, traffic.messages)


@pytest.mark.parametrize("n", [2, 5, 7])
@pytest.mark.parametrize("precision", ["mixed", "bf16", "fp32"])
def test_the_wire_decides_what_is_sent_not_the_precision(n: int, precision: str) -> None:
    """On an fp32 wire every precision sends the same."""
    assert [sent(report) for report in reports(Case(3, n, precision=precision))] == [
        sent(report) for report in reports(Case(3, n))
    ]


@pytest.mark.parametrize("n", [2, 5, 7])
def test_when_parameters_are_gathered_does_not_matter(n: int) -> None:
    """Gathering the whole model at once sends what gathering it layer by layer does."""
    assert sent(reports(Case(3, n, gather="model"))[0]) == sent(reports(Case(3, n))[0])


@stages
def test_padding_is_part_of_what_is_sent(stage: int) -> None:
    """Over all ranks, each collective carries N-1 times the padding, counted apart, and N-1 times the parameters."""
    n = 7
    pads = [-(-size // n) * n - size for size in LAYERS]
    assert pads == [2, 3]
    [report] = reports(Case(stage, n))[:1]
    padding = sum(int(traffic.padding.sum()) for traffic in report.traffic.values())
    assert padding == (3 if stage == 3 else 2) * (n - 1) * sum(pads) * 4
    assert sum(report.sent()) - padding == (3 if stage == 3 else 2) * (n - 1) * sum(LAYERS) * 4


@stages
def test_no_padding_is_sent_where_n_divides(stage: int) -> None:
    """Where N divides every layer, no byte sent is padding."""
    [report] = reports(Case(stage, 2))[:1]
    assert {int(nbytes) for traffic in report.traffic.values() for nbytes in traffic.padding} == {0}
