"""What a run holds, measured, against what ZeRO predicts: integers, by band, for any number of ranks."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from zerosim import theory
from zerosim.bands import MODEL_STATES, Band
from zerosim.ledger import Report
from zerosim.model import MLP
from zerosim.ranks import OutOfMemory
from zerosim.schemes import DP, SCHEMES, Scheme, ZeRO1, ZeRO2, ZeRO3
from zerosim.worlds.local import LocalRing

DEFAULT, SMALL, TINY = (64, 128, 128, 64), (7, 5, 3), (5, 3, 2)  # layer widths
LAYERS = (7 * 5 + 5, 5 * 3 + 3)  # the parameters of SMALL, layer by layer
RECIPES = [("mixed", "fp32"), ("mixed", "fp16"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")]
stages = pytest.mark.parametrize("stage", range(4), ids=[stage.name for stage in SCHEMES])
recipes = pytest.mark.parametrize(("precision", "wire"), RECIPES)


@dataclass(frozen=True)
class Case:
    """One run to make: a stage, a model, a world, and the options that differ from the defaults."""

    stage: int
    n: int
    widths: tuple[int, ...] = SMALL
    rows: int = 2
    precision: str = "mixed"
    wire: str = "fp32"
    gather: str = "layer"
    bucket: str = "layer"

    def __str__(self) -> str:
        options = (f"{self.precision} over {self.wire}", f"gather={self.gather}", f"bucket={self.bucket}")
        return ", ".join((SCHEMES[self.stage].name, "-".join(map(str, self.widths)), f"N={self.n}", *options))

    def scheme(self, **more: Any) -> Scheme:
        return SCHEMES[self.stage](
            MLP(self.widths), self.n, precision=self.precision, wire=self.wire, gather=self.gather,
            bucket=self.bucket, **more,
        )  # fmt: skip

    def batch(self, rows: int | None = None) -> list[tuple[Any, Any]]:
        rng = np.random.default_rng(11)
        rows = rows or self.rows
        return [
            (
                rng.standard_normal((rows, self.widths[0])).astype(np.float32),
                rng.standard_normal((rows, self.widths[-1])).astype(np.float32),
            )
            for _ in range(self.n)
        ]

    @property
    def job(self) -> theory.Job:
        layers = tuple(zip(self.widths, self.widths[1:], strict=False))
        buckets = tuple((layer,) for layer in layers) if self.bucket == "layer" else (layers,)
        return theory.Job(self.stage, buckets, self.n, self.rows, self.precision, self.wire, self.gather)


@dataclass
class Run:
    """What was seen of two steps: bytes by band, from the ledger and from each rank, at rest each time."""

    scheme: Scheme
    ledger: list[dict[str, int]] = field(default_factory=list)
    ranks: list[list[dict[str, int]]] = field(default_factory=list)

    def look(self) -> None:
        self.ledger.append(nonzero(self.scheme.ledger.held))
        self.ranks.append([rank.held() for rank in self.scheme.ranks])


def nonzero(held: Mapping[str, int]) -> dict[str, int]:
    return {band: nbytes for band, nbytes in held.items() if nbytes}


@functools.cache
def run(case: Case) -> Run:
    """Two steps of ``case``; the same run for every test that reads it."""
    result = Run(case.scheme())
    result.look()
    for _ in range(2):
        result.scheme.step(case.batch())
        result.look()
    return result


def reports(case: Case) -> list[Report]:
    return run(case).scheme.reports


CASES = [
    *(Case(stage, n, DEFAULT) for stage in range(4) for n in (1, 2, 4, 8, 16, 32)),
    *(Case(stage, n) for stage in range(4) for n in (3, 5, 7, 12, 33)),
    *(Case(stage, 37, TINY) for stage in range(4)),  # more ranks than the 18 and 8 parameters of its layers
    *(Case(stage, 11, SMALL, 3, *recipe) for stage in range(4) for recipe in RECIPES[1:]),
    *(Case(stage, 11, SMALL, 5, bucket="model") for stage in range(4)),
    *(Case(3, n, SMALL, 5, *RECIPES[0], "model", bucket) for n in (4, 11) for bucket in ("layer", "model")),
    *(Case(stage, 1, SMALL, 5, "fp32", bucket="model") for stage in range(4)),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


# -- measured equals predicted


@cases
def test_resident_bytes_are_the_predicted_ones(case: Case) -> None:
    """At construction and after each of two steps the ledger holds what theory says, band by band, and no more."""
    assert run(case).ledger == [theory.resident(case.job)] * 3
    assert [report.resident for report in reports(case)] == [theory.resident(case.job)] * 2


@cases
def test_every_rank_holds_what_the_ledger_says(case: Case) -> None:
    """Each rank's arrays, counted anew, add up to the ledger's bands at each rest."""
    assert run(case).ranks == [[held] * case.n for held in run(case).ledger]


@cases
def test_peak_is_the_predicted_one(case: Case) -> None:
    """Both steps peak, activations and batch included, at the bytes that theory says, band by band."""
    assert [report.peak.by_band for report in reports(case)] == [theory.peak(case.job)] * 2
    assert [report.peak.total for report in reports(case)] == [sum(theory.peak(case.job).values())] * 2


@cases
def test_peak_without_activations_is_the_predicted_one(case: Case) -> None:
    """Both steps' peaks of what scales with the parameters are theory's, band by band."""
    predicted = theory.peak_without_activations(case.job)
    assert [report.peak_without_activations.by_band for report in reports(case)] == [predicted] * 2
    assert [report.peak_without_activations.total for report in reports(case)] == [sum(predicted.values())] * 2


@cases
def test_peak_is_never_below_what_is_held_at_rest(case: Case) -> None:
    """Neither peak is below the resident bytes, and the one with activations and the batch is above the other."""
    for report in reports(case):
        resident = sum(report.resident.values())
        assert resident <= report.peak_without_activations.total < report.peak.total


@cases
def test_padding_held_is_the_predicted_one(case: Case) -> None:
    """The bytes of padding among what each rank holds at rest are theory's, rank by rank."""
    assert [report.padding for report in reports(case)] == [theory.padding(case.job)] * 2


@cases
def test_bytes_per_param_are_bytes_over_parameters(case: Case) -> None:
    """What a user reads is the measured bytes over the logical parameters, padding in the bytes alone."""
    scheme = run(case).scheme
    parameters = sum(fan_in * fan_out + fan_out for fan_in, fan_out in zip(case.widths, case.widths[1:], strict=False))
    assert scheme.bytes_per_param() == sum(theory.resident(case.job).values()) / parameters
    assert scheme.peak_bytes_per_param() == sum(theory.peak_without_activations(case.job).values()) / parameters


class Witness(LocalRing):
    """A local ring that has every rank recounted at each hop."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.scheme: Scheme | None = None
        self.seen: list[tuple[dict[str, int], list[dict[str, int]]]] = []

    def shift(self, block: Any, spare: Any) -> Any:
        assert self.scheme is not None
        self.seen.append((nonzero(self.scheme.ledger.held), [rank.held() for rank in self.scheme.ranks]))
        return super().shift(block, spare)


@stages
@pytest.mark.parametrize("gather", ["layer", "model"])
def test_every_rank_holds_what_the_ledger_says_in_mid_flight(stage: int, gather: str) -> None:
    """At every hop of a step, too, each rank's recount is the ledger's, with two blocks of a chunk in it."""
    n = 4
    ring = Witness(n)
    case = Case(stage, n, gather=gather)
    ring.scheme = case.scheme(ring=ring)
    ring.scheme.step(case.batch())
    assert len(ring.seen) >= 2 * (n - 1) * len(LAYERS)
    assert [recount for _, recount in ring.seen] == [[held] * n for held, _ in ring.seen]
    chunks = {-(-size // n) for size in LAYERS}
    assert {held[Band.BLOCKS] for held, _ in ring.seen} == {2 * 4 * chunk for chunk in chunks}


# -- the formulas of the papers

TEXTBOOK = {
    DP: lambda n: Fraction(16),
    ZeRO1: lambda n: 4 + Fraction(12, n),
    ZeRO2: lambda n: 2 + Fraction(14, n),
    ZeRO3: lambda n: Fraction(16, n),
}


@stages
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
def test_resident_is_the_textbooks(stage: int, n: int) -> None:
    """Where N divides every layer, 16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter are held, exactly."""
    case = Case(stage, n, DEFAULT)
    held, n_params = run(case).ledger[-1], MLP(DEFAULT).n_params
    assert Fraction(sum(held.values()), n_params) == TEXTBOOK[SCHEMES[stage]](n)


FP32 = {
    DP: lambda n: Fraction(4 + 4 + 8),
    ZeRO1: lambda n: 4 + 4 + Fraction(8, n),
    ZeRO2: lambda n: 4 + Fraction(4 + 8, n),
    ZeRO3: lambda n: Fraction(4 + 4 + 8, n),
}


@stages
@pytest.mark.parametrize("n", [1, 2, 32])
def test_resident_in_fp32_has_no_master(stage: int, n: int) -> None:
    """In fp32 the parameters are their own master: 4 + 4 + 8 bytes, the optimizer's 8 sharded first."""
    case = Case(stage, n, DEFAULT, precision="fp32")
    held, n_params = run(case).ledger[-1], MLP(DEFAULT).n_params
    assert Band.MASTER not in held
    assert Fraction(sum(held.values()), n_params) == FP32[SCHEMES[stage]](n)


def test_gathering_the_whole_model_undoes_sharding_it() -> None:
    """At N = 32, 16/N plus 2 bytes of gathered parameters are more than what ZeRO-2 holds at rest."""
    peak = reports(Case(3, 32, DEFAULT, gather="model"))[-1].peak_without_activations.by_band
    n_params = MLP(DEFAULT).n_params
    states = Fraction(sum(peak.get(band, 0) for band in MODEL_STATES), n_params)
    gathered = Fraction(peak[Band.GATHERED], n_params)
    assert (states, gathered) == (Fraction(16, 32), Fraction(2))
    assert states + gathered > 2 + Fraction(14, 32)


# Bytes per parameter of what is sharded and what is whole at rest, by stage; N > 1.
WHOLE = {"mixed": (16, 2 + 2, 2, 0), "bf16": (16, 2 + 2, 2, 0), "fp32": (16, 4 + 4, 4, 0)}


@pytest.mark.parametrize(("stage", "gather"), [(0, "layer"), (1, "layer"), (2, "layer"), (3, "layer"), (3, "model")])
@recipes
@pytest.mark.parametrize("n", [2, 7, 41])
def test_peak_is_resident_and_the_largest_transient(stage: int, precision: str, wire: str, n: int, gather: str) -> None:
    """What comes and goes with parameters is two blocks, a full layer and two blocks, or two full layers."""
    chunks = [-(-size // n) for size in LAYERS]
    whole = WHOLE[precision][stage]
    b, w = 4 if precision == "fp32" else 2, 2 if wire in ("fp16", "bf16") else 4
    resident = sum(whole * n * c + (16 - whole) * c for c in chunks)
    if stage < 2:
        transient = max(2 * w * c for c in chunks)
    elif stage == 2:
        transient = max(b * n * c + 2 * w * c for c in chunks)
    elif gather == "layer":
        transient = max(max(b * n * c + 2 * w * c, b * n * c + b * n * c) for c in chunks)
    else:
        transient = b * n * sum(chunks) + max(b * n * c + 2 * w * c for c in chunks)
    case = Case(stage, n, precision=precision, wire=wire, gather=gather)
    assert run(case).scheme.ledger.peak_without_activations().total == resident + transient


@stages
@recipes
def test_one_rank_needs_nothing_beyond_its_states(stage: int, precision: str, wire: str) -> None:
    """At N = 1 all four stages hold 16 bytes per parameter, at the peak too."""
    scheme = run(Case(stage, 1, precision=precision, wire=wire)).scheme
    assert scheme.ledger.peak_without_activations().total == scheme.ledger.total == 16 * sum(LAYERS)


@stages
@pytest.mark.parametrize("n", [1, 4])
def test_activations_do_not_scale_with_ranks_or_stage(stage: int, n: int) -> None:
    """Doubling the rows doubles the activations of the peak's instant, whatever the stage, when they decide it."""
    few, many = (reports(Case(stage, n, rows=rows))[-1].peak.by_band[Band.ACTIVATIONS] for rows in (500, 1000))
    # At its widest: x, the hidden layer, y, the target and the loss's gradient, in fp32.
    assert [few, many] == [4 * rows * (7 + 5 + 3 + 3 + 3) for rows in (500, 1000)]


# -- the card's limit


def peak_of(case: Case) -> int:
    return sum(theory.peak(case.job).values())


def resident_of(case: Case) -> int:
    return sum(theory.resident(case.job).values())


LIMITED = [
    *(Case(stage, n) for stage in range(4) for n in (1, 2, 5, 12)),
    *(Case(stage, 7, precision="fp32", bucket="model") for stage in range(4)),
    Case(3, 5, gather="model"),
    *(Case(stage, 37, TINY) for stage in range(4)),
]
limited = pytest.mark.parametrize("case", LIMITED, ids=str)


@limited
def test_a_card_of_the_predicted_peak_suffices(case: Case) -> None:
    """With exactly theory's peak as its capacity a run trains to the bits of one without a limit."""
    scheme = case.scheme(capacity=peak_of(case))
    losses = [scheme.step(case.batch()) for _ in range(2)]
    assert losses == [report.loss for report in reports(case)]
    assert scheme.full_theta().tobytes() == run(case).scheme.full_theta().tobytes()


@limited
def test_a_card_of_one_byte_less_does_not(case: Case) -> None:
    """With one byte less the hold that makes the peak fails, in the first step, and the record says so."""
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
    assert sum(failure.value.held.values()) + failure.value.asked == resident_of(case)
    assert failure.value.band in MODEL_STATES


@pytest.mark.parametrize(("stage", "gather"), [(0, "layer"), (1, "layer"), (2, "layer"), (3, "layer"), (3, "model")])
@pytest.mark.parametrize("sixths", range(7))
def test_wherever_memory_ends_only_model_states_stay(stage: int, gather: str, sixths: int) -> None:
    """A step that dies at any height between rest and peak leaves the resident bytes, in ledger and ranks."""
    case = Case(stage, 5, gather=gather)
    low, high = resident_of(case), peak_of(case)
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
    assert [first.loss, third.loss] == [report.loss for report in reports(case)]
    assert scheme.full_theta().tobytes() == run(case).scheme.full_theta().tobytes()
