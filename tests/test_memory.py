"""What the papers say that a run holds, for any number of ranks, and what becomes of a run on a card too small."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from helpers import Case, each_gather, each_stage, nonzero, sizes, trained
from zerosim import theory
from zerosim.bands import MODEL_STATES, Array, Band
from zerosim.options import Gather
from zerosim.ranks import OutOfMemory
from zerosim.schemes import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.worlds.local import LocalRing

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

EVEN, SMALL, TINY = (32, 64, 32), (7, 5, 3), (5, 3, 2)  # layer widths; 32 divides every layer of the first
LAYERS = sizes(SMALL)


class Witness(LocalRing):
    """A local ring that has every rank recounted at each hop."""

    def __init__(self, look: Callable[[], None], size: int) -> None:
        super().__init__(size)
        self.look = look

    def shift(self, block: Array, spare: Array) -> Array:
        self.look()
        return super().shift(block, spare)


@each_gather
def test_every_rank_holds_what_the_ledger_says_in_mid_flight(stage: Stage, gather: Gather) -> None:
    """At every hop of a step, too, each rank's recount is the ledger's, with two blocks of a chunk in it."""
    n, case = 4, Case(stage, 4, gather=gather)
    seen: list[tuple[dict[str, int], list[dict[str, int]]]] = []
    scheme = case.scheme(
        ring=Witness(lambda: seen.append((nonzero(scheme.ledger.held), [rank.held() for rank in scheme.ranks])), n)
    )
    scheme.step(case.batch())
    assert len(seen) >= 2 * (n - 1) * len(LAYERS)
    assert [recount for _, recount in seen] == [[held] * n for held, _ in seen]
    chunks = {-(-size // n) for size in LAYERS}
    assert {held[Band.BLOCKS] for held, _ in seen} == {2 * 4 * chunk for chunk in chunks}


# -- the formulas of the papers

TEXTBOOK: dict[str, dict[Stage, Any]] = {
    "mixed": {
        DP: lambda n: Fraction(2 + 2 + 12),
        ZeRO1: lambda n: 2 + 2 + Fraction(12, n),
        ZeRO2: lambda n: 2 + Fraction(2 + 12, n),
        ZeRO3: lambda n: Fraction(2 + 2 + 12, n),
    },
    "fp32": {  # the parameters are their own master
        DP: lambda n: Fraction(4 + 4 + 8),
        ZeRO1: lambda n: 4 + 4 + Fraction(8, n),
        ZeRO2: lambda n: 4 + Fraction(4 + 8, n),
        ZeRO3: lambda n: Fraction(4 + 4 + 8, n),
    },
}


@each_stage
@pytest.mark.parametrize("precision", TEXTBOOK)
def test_resident_is_the_textbooks(stage: Stage, precision: str) -> None:
    """Where N divides every layer, 16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter are held, exactly."""
    for n in (1, 2, 4, 8, 16, 32):
        held = nonzero(Case(stage, n, EVEN, precision=precision).scheme().ledger.held)
        assert Fraction(sum(held.values()), sum(sizes(EVEN))) == TEXTBOOK[precision][stage](n)
        assert (Band.MASTER in held) == (precision == "mixed")


def test_gathering_the_whole_model_undoes_sharding_it() -> None:
    """At N = 32, 16/N plus 2 bytes of gathered parameters are more than what ZeRO-2 holds at rest."""
    peak = trained(Case(ZeRO3, 32, EVEN, gather="model")).reports[-1].peak_without_activations.by_band
    n_params = sum(sizes(EVEN))
    states = Fraction(sum(peak.get(band, 0) for band in MODEL_STATES), n_params)
    gathered = Fraction(peak[Band.GATHERED], n_params)
    assert (states, gathered) == (Fraction(16, 32), Fraction(2))
    assert states + gathered > 2 + Fraction(14, 32)


# Bytes per parameter of what is whole at rest; N > 1.
WHOLE = {"mixed": {DP: 16, ZeRO1: 2 + 2, ZeRO2: 2, ZeRO3: 0}, "fp32": {DP: 16, ZeRO1: 4 + 4, ZeRO2: 4, ZeRO3: 0}}


@each_gather
@pytest.mark.parametrize(
    ("precision", "wire", "b", "w"), [("mixed", "fp32", 2, 4), ("mixed", "fp16", 2, 2), ("fp32", "fp32", 4, 4)]
)
@pytest.mark.parametrize("n", [2, 7, 41])
def test_peak_is_resident_and_the_largest_transient(
    stage: Stage, precision: str, wire: str, b: int, w: int, n: int, gather: Gather
) -> None:
    """What comes and goes with parameters is two blocks, a full layer and two blocks, or two full layers."""
    chunks = [-(-size // n) for size in LAYERS]
    whole = WHOLE[precision][stage]
    resident = sum(whole * n * c + (16 - whole) * c for c in chunks)
    if not stage.grads:
        transient = max(2 * w * c for c in chunks)
    elif not stage.params:
        transient = max(b * n * c + 2 * w * c for c in chunks)
    elif gather == "layer":
        transient = max(max(b * n * c + 2 * w * c, b * n * c + b * n * c) for c in chunks)
    else:
        transient = b * n * sum(chunks) + max(b * n * c + 2 * w * c for c in chunks)
    scheme = trained(Case(stage, n, precision=precision, wire=wire, gather=gather))
    assert scheme.ledger.peak_without_activations().total == resident + transient


@each_stage
@pytest.mark.parametrize(("precision", "wire"), [("mixed", "fp16"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_one_rank_needs_nothing_beyond_its_states(stage: Stage, precision: str, wire: str) -> None:
    """At N = 1 all four stages hold 16 bytes per parameter, at the peak too."""
    scheme = trained(Case(stage, 1, precision=precision, wire=wire))
    assert scheme.ledger.peak_without_activations().total == scheme.ledger.total == 16 * sum(LAYERS)


@each_stage
@pytest.mark.parametrize("n", [1, 4])
def test_activations_do_not_scale_with_ranks_or_stage(stage: Stage, n: int) -> None:
    """Doubling the rows doubles the activations of the peak's instant, whatever the stage, when they decide it."""
    few, many = (trained(Case(stage, n, rows=rows)).reports[-1].peak.by_band[Band.ACTIVATIONS] for rows in (500, 1000))
    # At its widest: x, the hidden layer, y, the target and the loss's gradient, in fp32.
    assert [few, many] == [4 * rows * (7 + 5 + 3 + 3 + 3) for rows in (500, 1000)]


# -- the card's limit


def peak_of(case: Case) -> int:
    return sum(theory.peak(case.job).values())


def resident_of(case: Case) -> int:
    return sum(theory.resident(case.job).values())


LIMITED = [
    *(Case(stage, n) for stage in SCHEMES for n in (1, 5)),
    *(Case(stage, 7, precision="fp32", bucket="model") for stage in (DP, ZeRO2)),
    Case(ZeRO3, 5, gather="model"),
    *(Case(stage, 37, TINY) for stage in (ZeRO1, ZeRO3)),  # more ranks than the parameters of a layer
]
limited = pytest.mark.parametrize("case", LIMITED, ids=str)


@limited
def test_a_card_of_the_predicted_peak_suffices_and_no_smaller_one(case: Case) -> None:
    """At exactly theory's peak a run trains to the bits of one without a limit; with one byte less it ends at once."""
    scheme = case.scheme(capacity=peak_of(case))
    losses = [scheme.step(case.batch()) for _ in range(2)]
    assert losses == [report.loss for report in trained(case).reports]
    assert scheme.full_theta().tobytes() == trained(case).full_theta().tobytes()
    scheme = case.scheme(capacity=peak_of(case) - 1)
    with pytest.raises(OutOfMemory) as failure:
        scheme.step(case.batch())
    assert sum(failure.value.held.values()) + failure.value.asked == peak_of(case)
    assert [report.complete for report in scheme.reports] == [False]
    assert scheme.reports[-1].peak.total <= peak_of(case) - 1


@limited
def test_a_card_of_the_resident_bytes_holds_the_states_alone(case: Case) -> None:
    """The model states fit into exactly their bytes; with one less the run is not even constructed."""
    assert case.scheme(capacity=resident_of(case)).ledger.total == resident_of(case)
    with pytest.raises(OutOfMemory) as failure:
        case.scheme(capacity=resident_of(case) - 1)
    assert failure.value.unit == case.scheme().buckets[-1].name
    assert sum(failure.value.held.values()) + failure.value.asked == resident_of(case)
    assert failure.value.band in MODEL_STATES


@each_gather
def test_wherever_memory_ends_only_model_states_stay(stage: Stage, gather: Gather) -> None:
    """A step that dies at any height between rest and peak leaves the resident bytes, in ledger and ranks."""
    case = Case(stage, 5, gather=gather)
    low, high = resident_of(case), peak_of(case)
    for sixths in range(7):
        scheme = case.scheme(capacity=low + (high - 1 - low) * sixths // 6)
        with pytest.raises(OutOfMemory):
            scheme.step(case.batch())
        assert nonzero(scheme.ledger.held) == theory.resident(case.job)
        assert [rank.held() for rank in scheme.ranks] == [theory.resident(case.job)] * case.n
        assert scheme.reports[-1].resident == theory.resident(case.job)


@limited
def test_the_record_outlives_out_of_memory(case: Case) -> None:
    """A step too large for the card spoils no report but its own, and the run ends with the bits of one without it."""
    larger = 2 * case.rows
    scheme = case.scheme(capacity=peak_of(case))
    scheme.step(case.batch())
    with pytest.raises(OutOfMemory):
        scheme.step(case.batch(larger))
    scheme.step(case.batch())
    assert [(report.step, report.complete) for report in scheme.reports] == [(1, True), (2, False), (3, True)]
    first, _, third = scheme.reports
    for report in (first, third):
        assert (report.peak.by_band, report.resident) == (theory.peak(case.job), theory.resident(case.job))
        assert sum(report.sent()) == sum(case.n * sum(bands.values()) for bands in theory.traffic(case.job).values())
    assert [first.loss, third.loss] == [report.loss for report in trained(case).reports]
    assert scheme.full_theta().tobytes() == trained(case).full_theta().tobytes()
