"""What the well-known estimators say to the same question, as named formulas beside the ledger.

Owns their formulas, each with its source and the reason for which it differs. Must not know
schedules or ledgers: it computes what the estimator would print and never what is held.

P is the parameters, N the ranks, L the parameters of the largest single module, U those of the
largest unit that is gathered as a whole. "At rest" is the paper's own count, bytes per parameter
of mixed precision with Adam: 2 of parameters, 2 of gradients, 4 of master weights, 8 of moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from zerosim.bands import Band

Terms = Mapping[str, Fraction]


@dataclass(frozen=True)
class Facts:
    """What the estimators ask about a model and a job.

    ``params`` counts tied weights once and frozen ones too; ``largest_layer`` is the parameters
    that the largest single module has itself, ``largest_unit`` those of the largest unit that is
    gathered as a whole; ``stage`` is 0 for data parallel, 1, 2 or 3.
    """

    params: int
    ranks: int
    stage: int
    largest_layer: int
    largest_unit: int

    def __post_init__(self) -> None:
        for name in ("params", "ranks", "largest_layer", "largest_unit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Facts({name}): needs an integer of 1 or more; got {value!r}.")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"Facts(stage): 0 for data parallel, 1, 2 or 3; got {self.stage!r}.")


@dataclass(frozen=True)
class Estimate:
    """What one estimator prints for a question: bytes per rank, the formula, and why it is not the ledger's.

    ``terms`` is what the formula is made of, in bytes, by the band that each would be held in.
    """

    name: str
    formula: str
    nbytes: int
    why: str
    source: str
    terms: Terms

    def beside(self, held: Mapping[str, int]) -> dict[str, int]:
        """Band by band what the estimator has more (or, below zero, less) than ``held``, in bytes; equal bands are out.

        A fraction of a byte, which formulas have where N does not divide P, is rounded.
        """
        bands = dict.fromkeys([*self.terms, *held])
        more = {band: round(self.terms.get(band, Fraction(0)) - held.get(band, 0)) for band in bands}
        return {str(band): nbytes for band, nbytes in more.items() if nbytes}


@dataclass(frozen=True)
class Estimator:
    """A row of the table: the formula at each stage that the estimator answers for, and its terms.

    ``formulas`` and ``whys`` are by stage.
    """

    name: str
    formulas: Mapping[int, str]
    whys: Mapping[int, str]
    source: str
    terms: Callable[[Facts], Terms]

    def __call__(self, facts: Facts) -> Estimate:
        """Its answer; ValueError for a stage that it has no formula for."""
        if facts.stage not in self.formulas:
            answers = ", ".join(map(str, self.formulas))
            raise ValueError(f"{self.name} has no formula for stage {facts.stage}; it answers for {answers}.")
        terms = self.terms(facts)
        return Estimate(
            self.name,
            self.formulas[facts.stage],
            int(sum(terms.values())),  # rounded down, as the estimators do
            self.whys[facts.stage],
            self.source,
            terms,
        )


def _states(
    facts: Facts, *, params: int, grads: int, main_grads: int = 0, master: int = 4, moments: int = 8, sharded: int
) -> dict[str, Fraction]:
    """Bytes of each state from bytes per parameter; those from ``sharded`` on are a share of N.

    ``sharded``: 0 nothing, 1 the optimizer's, 2 gradients too, 3 parameters too.
    """

    def part(each: int, of_stage: int) -> Fraction:
        return Fraction(each * facts.params, facts.ranks if sharded >= of_stage else 1)

    found = {
        Band.PARAMS: part(params, 3),
        Band.GRADS: part(grads, 2),
        Band.MAIN_GRADS: part(main_grads, 1),
        Band.MASTER: part(master, 1),
        Band.EXP_AVG: part(moments // 2, 1),
        Band.EXP_AVG_SQ: part(moments // 2, 1),
    }
    return {str(band): nbytes for band, nbytes in found.items() if nbytes}


def _paper(facts: Facts) -> Terms:
    return _states(facts, params=2, grads=2, sharded=facts.stage)


def _documented(facts: Facts) -> Terms:
    if facts.stage == 2:  # 4 P of 16-bit parameters and gradients, and 16 P of fp32 shared out
        return _states(facts, params=2, grads=2, main_grads=4, sharded=1)
    return _coded(facts)


def _coded(facts: Facts) -> Terms:
    if facts.stage == 2:
        return _states(facts, params=2, grads=2, main_grads=4, sharded=2)
    layer = {
        str(Band.GATHERED): 2 * Fraction(facts.largest_layer),
        str(Band.UNREDUCED): 2 * Fraction(facts.largest_layer),
    }
    return _states(facts, params=2, grads=0, main_grads=4, sharded=3) | layer


def _fsdp(facts: Facts) -> Terms:
    unit = {str(Band.GATHERED): 2 * Fraction(facts.largest_unit)}
    return _states(facts, params=4, grads=4, master=0, sharded=3) | unit


def _cookbook(facts: Facts) -> Terms:
    states = _states(facts, params=2, grads=4, sharded=facts.stage)
    if facts.ranks > 1 and facts.stage >= 1:
        states[str(Band.BLOCKS)] = 2 * Fraction(500_000_000)
    if facts.ranks > 1 and facts.stage == 3:
        states[str(Band.GATHERED)] = 2 * Fraction(1_000_000_000)
    return states


def _accelerate(facts: Facts) -> Terms:
    return {str(Band.EXP_AVG): 4 * Fraction(facts.params), str(Band.EXP_AVG_SQ): 4 * Fraction(facts.params)}


_FP32_GRADS = "adds 4 bytes per parameter for an fp32 copy of the gradients, made while the optimizer runs"
_DEEPSPEED = "DeepSpeed 0.19.8, deepspeed/runtime/zero"
_UNSHARDED = "knows no ranks: it is the answer for one card without ZeRO, whatever N is"

ESTIMATORS: tuple[Estimator, ...] = (
    Estimator(
        "ZeRO paper, Table 1",
        {0: "16 P", 1: "4 P + 12 P/N", 2: "2 P + 14 P/N", 3: "16 P/N"},
        dict.fromkeys(
            range(4),
            "model states at rest alone: no padding, and none of what a step holds for a while (a gathered layer, "
            "gradients not yet reduced, blocks in flight, activations)",
        ),
        "Rajbhandari et al., arXiv 1910.02054, section 5, K = 12",
        _paper,
    ),
    Estimator(
        "DeepSpeed's estimator, as documented",
        {2: "4 P + 16 P/N", 3: "4 L + 18 P/N"},
        {
            2: f"counts the 16-bit gradients whole, which stage 2 frees as soon as they are reduced, and {_FP32_GRADS}",
            3: "counts the largest single module gathered (2 L) and its gradients (2 L), where a whole unit is "
            f"gathered; {_FP32_GRADS}, and leaves the 16-bit ones out",
        },
        "DeepSpeed documentation, Memory Requirements",
        _documented,
    ),
    Estimator(
        "DeepSpeed's estimator, as coded",
        {2: "2 P + 18 P/N", 3: "4 L + 18 P/N"},
        {
            2: f"{_FP32_GRADS}; neither the gradient bucket (5e8 elements) nor a layer's gradients before they are "
            "reduced are in it",
            3: "counts the largest single module gathered (2 L) and its gradients (2 L), where a whole unit is "
            f"gathered; {_FP32_GRADS}, and leaves the 16-bit ones and the gradient bucket out",
        },
        f"{_DEEPSPEED}, estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs",
        _coded,
    ),
    Estimator(
        "Megatron's theoretical memory report",
        {0: "18 P", 1: "6 P + 12 P/N"},
        dict.fromkeys(
            (0, 1),
            "counts gradients in fp32 only, 4 bytes and whole, as Megatron accumulates them; the paper's 16 bytes have "
            "2 of gradients",
        ),
        "Megatron-LM, megatron/training/theoretical_memory_usage.py, without its activations",
        lambda facts: _states(facts, params=2, grads=4, sharded=facts.stage),
    ),
    Estimator(
        "Megatron's distributed optimizer, fp16 gradients",
        {0: "20 P", 1: "4 P + 16 P/N"},
        dict.fromkeys(
            (0, 1), "keeps fp32 main gradients beside the fp16 ones: 4 bytes that the paper's 16 do not have"
        ),
        "Megatron Core user guide, Distributed Optimizer",
        lambda facts: _states(facts, params=2, grads=2, main_grads=4, sharded=facts.stage),
    ),
    Estimator(
        "Megatron's distributed optimizer, all fp32",
        {0: "16 P", 1: "8 P + 8 P/N"},
        dict.fromkeys(
            (0, 1),
            "parameters and gradients are 4 bytes each and there is no master copy: the same 16 bytes, but 8 of them "
            "are not the optimizer's and stay whole",
        ),
        "Megatron Core user guide, Distributed Optimizer",
        lambda facts: _states(facts, params=4, grads=4, master=0, sharded=facts.stage),
    ),
    Estimator(
        "FSDP's rule: shards and the largest unit",
        {3: "16 P/N + 2 U"},
        {
            3: "gathers one unit; with prefetch two are gathered at a time, and backward holds the unit's gradients "
            "and the reduction's blocks as well"
        },
        "Zhao et al., arXiv 2304.11277, section 3: the sum of the shards plus the largest unit; here with fp32 "
        "shards, gradients and moments, and the unit in 16 bits",
        _fsdp,
    ),
    Estimator(
        "EleutherAI's cookbook",
        {
            0: "18 P",
            1: "6 P + 12 P/N + 1e9 if N > 1",
            2: "2 P + 16 P/N + 1e9 if N > 1",
            3: "18 P/N + 3e9 if N > 1",
        },
        {
            0: "counts gradients in fp32, 4 bytes",
            1: "counts gradients in fp32, 4 bytes, and DeepSpeed's bucket for gathering (5e8 elements) in full",
            2: "counts gradients in fp32, 4 bytes, and DeepSpeed's bucket for gathering (5e8 elements) in full",
            3: "counts gradients in fp32, 4 bytes, DeepSpeed's bucket for gathering (5e8 elements) in full, and "
            "stage3_max_live_parameters (1e9) as though so many were always gathered, even of a smaller model",
        },
        "EleutherAI cookbook, calc/calc_transformer_mem.py (Transformer Math 101), without its activations",
        _cookbook,
    ),
    Estimator(
        "Hugging Face's anatomy of a training step",
        dict.fromkeys(range(4), "18 P"),
        dict.fromkeys(range(4), f"{_UNSHARDED}; it counts gradients in fp32, 4 bytes"),
        "Hugging Face transformers documentation, GPU memory usage",
        lambda facts: _states(facts, params=2, grads=4, sharded=0),
    ),
    Estimator(
        "accelerate estimate-memory, 16-bit",
        dict.fromkeys(range(4), "8 P"),
        dict.fromkeys(
            range(4),
            f"{_UNSHARDED}; and it prints the largest of its parts (model 4 P, gradients 6 P, optimizer 8 P) as though "
            "they were not held at once",
        ),
        "accelerate 1.15.0, estimate_training_usage, what the command prints for float16",
        _accelerate,
    ),
)


def estimates(facts: Facts) -> list[Estimate]:
    """The answers of all estimators that have a formula for this stage, in the order of the table."""
    return [estimator(facts) for estimator in ESTIMATORS if facts.stage in estimator.formulas]
