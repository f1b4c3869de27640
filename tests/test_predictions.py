"""What a run holds, sends and computes, measured, is what the closed forms say: integers, by band and by rank."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import EVERYWHERE, OWN, Case, nonzero, padding_sent, sizes, traffic, wires
from zerosim import theory
from zerosim.schemes import DP, SCHEMES, ZeRO1, ZeRO2, ZeRO3

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

DEFAULT = (64, 128, 128, 64)
STEPS = 2


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any row, perceptron, N and recipe, and a wire that carries it."""
    precision = draw(st.sampled_from(EVERYWHERE))
    return Case(
        draw(st.sampled_from([*SCHEMES, *OWN])),
        draw(st.integers(1, 13) | st.integers(14, 40)),
        tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))),
        draw(st.integers(1, 5)),
        precision,
        draw(wires(precision)),
        draw(st.sampled_from(["layer", "model"])),
        draw(st.sampled_from(["layer", "model"])),
    )


@settings(max_examples=60)
@given(cases())
@example(Case(DP, 32, DEFAULT))
@example(Case(ZeRO1, 1, DEFAULT))
@example(Case(ZeRO3, 32, DEFAULT))
@example(Case(ZeRO2, 37, (5, 3, 2)))  # more ranks than the 18 and 8 parameters of its layers
@example(Case(ZeRO3, 37, (5, 3, 2)))
@example(Case(ZeRO3, 11, gather="model", bucket="model", precision="bf16", wire="bf16"))
@example(Case(ZeRO2, 4, (4, 3, 5)))  # 15 parameters are padded and 20 are not
@example(Case(ZeRO3, 4, rows=1000))
def test_every_count_is_the_predicted_one(case: Case) -> None:
    """At rest, at both peaks, on the wire and in the arithmetic, in every step and on every rank, and nothing else."""
    job, ranks = case.job, range(case.n)
    resident, peak, without = theory.resident(job), theory.peak(job), theory.peak_without_activations(job)
    sends = {
        (name, band): [nbytes for _ in ranks]
        for name, bands in theory.traffic(job).items()
        for band, nbytes in bands.items()
    }
    scheme = case.scheme()
    for step in range(STEPS + 1):
        assert nonzero(scheme.ledger.held) == resident
        assert [rank.held() for rank in scheme.ranks] == [resident for _ in ranks]
        if step < STEPS:
            scheme.step(case.batch())
    for report in scheme.reports:
        assert (report.resident, report.padding) == (resident, theory.padding(job))
        assert (report.peak.by_band, report.peak.total) == (peak, sum(peak.values()))
        lower = report.peak_without_activations
        assert (lower.by_band, lower.total) == (without, sum(without.values()))
        assert sum(resident.values()) <= lower.total < report.peak.total
        assert traffic(report) == sends
        assert padding_sent(report) == (theory.padding_sent(job) if sends else [])
        assert {name: moved.messages for (name, _), moved in report.traffic.items()} == theory.messages(job)
        assert all(moved.received.tolist() == moved.sent.tolist() for moved in report.traffic.values())
        assert report.flops == theory.flops(job)
    each = sum(nbytes for nbytes, *_ in sends.values())
    assert scheme.ledger.sent() == [STEPS * each for _ in ranks]
    assert (scheme.bytes_comm_per_rank(), type(scheme.bytes_comm_per_rank())) == (STEPS * each, int)
    parameters = sum(sizes(case.widths))
    assert scheme.bytes_per_param() == sum(resident.values()) / parameters
    assert scheme.peak_bytes_per_param() == sum(without.values()) / parameters
