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
from zerosim.planner.conventions import GRADS, NOTHING, OPTIMIZER, PARAMS, Sharded, sharded
from zerosim.schemes import DP, SCHEMES, Stage, ZeRO1, ZeRO2

Terms = Mapping[str, Fraction]


@dataclass(frozen=True)
class Facts:
    """What the estimators ask about a model and a job.

    ``params`` counts tied weights once and frozen ones too; ``largest_layer`` is the parameters
    that the largest single module has itself, ``largest_unit`` those of the largest unit that is
    gathered as a whole; of ``row`` only what it shards and offloads is read. ``node`` is the GPUs of a node.
    """

    params: int
    ranks: int
    row: Stage
    largest_layer: int
    largest_unit: int
    node: int = 8

    def __post_init__(self) -> None:
        for name in ("params", "ranks", "largest_layer", "largest_unit", "node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Facts({name}): needs an integer of 1 or more; got {value!r}.")


@dataclass(frozen=True)
class Estimate:
    """What one estimator prints for a question: bytes per rank, the formula, and why it is not the ledger's.

    ``terms`` is what the formula is made of, in bytes, by the band that each would be held in; ``quantity`` what it is
    of: a rank at rest, or the host of a node.
    """

    name: str
    formula: str
    nbytes: int
    why: str
    source: str
    terms: Terms
    quantity: str = "at rest"

    def beside(self, held: Mapping[str, int]) -> dict[str, int]:
        """Band by band what the estimator has more (or, below zero, less) than ``held``, in bytes; equal bands are out.

        A fraction of a byte, which formulas have where N does not divide P, is rounded.
        """
        bands = dict.fromkeys([*self.terms, *held])
        more = {band: round(self.terms.get(band, Fraction(0)) - held.get(band, 0)) for band in bands}
        return {str(band): nbytes for band, nbytes in more.items() if nbytes}


@dataclass(frozen=True)
class Estimator:
    """One estimator: the formula for each kind of row that it answers for, and its terms.

    ``formulas`` and ``whys`` are by what is sharded.
    """

    name: str
    formulas: Mapping[Sharded, str]
    whys: Mapping[Sharded, str]
    source: str
    terms: Callable[[Facts], Terms]
    quantity: str = "at rest"

    def __call__(self, facts: Facts) -> Estimate:
        """Its answer; ValueError for a row that it has no formula for."""
        kind = sharded(facts.row)
        if kind not in self.formulas:
            known = ", ".join(row.name for row in SCHEMES if sharded(row) in self.formulas)
            raise ValueError(f"{self.name} has no formula for {facts.row.name}; it answers for {known}.")
        terms = self.terms(facts)
        return Estimate(
            self.name,
            self.formulas[kind],
            int(sum(terms.values())),  # rounded down, as the estimators do
            self.whys[kind],
            self.source,
            terms,
            self.quantity,
        )


def _states(
    facts: Facts, row: Stage, *, params: int, grads: int, main_grads: int = 0, master: int = 4, moments: int = 8
) -> dict[str, Fraction]:
    """Bytes of each state from bytes per parameter; of what ``row`` shards, a rank's shard."""
    each = {
        Band.PARAMS: params,
        Band.GRADS: grads,
        Band.MAIN_GRADS: main_grads,
        Band.MASTER: master,
        Band.EXP_AVG: moments // 2,
        Band.EXP_AVG_SQ: moments // 2,
    }
    return {
        str(band): Fraction(nbytes * facts.params, facts.ranks if row.over(band) else 1)
        for band, nbytes in each.items()
        if nbytes
    }


def _paper(facts: Facts) -> Terms:
    return _states(facts, facts.row, params=2, grads=2)


def _documented(facts: Facts) -> Terms:
    if sharded(facts.row) == GRADS:  # 4 P of 16-bit parameters and gradients, and 16 P of fp32 sharded
        return _states(facts, ZeRO1, params=2, grads=2, main_grads=4)
    return _coded(facts)


def _coded(facts: Facts) -> Terms:
    if sharded(facts.row) == GRADS:
        return _states(facts, ZeRO2, params=2, grads=2, main_grads=4)
    layer = {
        str(Band.GATHERED): 2 * Fraction(facts.largest_layer),
        str(Band.UNREDUCED): 2 * Fraction(facts.largest_layer),
    }
    return _states(facts, facts.row, params=2, grads=0, main_grads=4) | layer


def _fsdp(facts: Facts) -> Terms:
    unit = {str(Band.GATHERED): 2 * Fraction(facts.largest_unit)}
    return _states(facts, facts.row, params=4, grads=4, master=0) | unit


def _cookbook(facts: Facts) -> Terms:
    states = _states(facts, facts.row, params=2, grads=4)
    if facts.ranks > 1 and facts.row.optimizer:
        states[str(Band.BLOCKS)] = 2 * Fraction(500_000_000)
    if facts.ranks > 1 and facts.row.params:
        states[str(Band.GATHERED)] = 2 * Fraction(1_000_000_000)
    return states


def _accelerate(facts: Facts) -> Terms:
    return {str(Band.EXP_AVG): 4 * Fraction(facts.params), str(Band.EXP_AVG_SQ): 4 * Fraction(facts.params)}


def _on_card(facts: Facts) -> Terms:
    """What DeepSpeed has on a card where the optimizer's state is on the host, and parameters perhaps too."""
    if sharded(facts.row) != PARAMS:
        return {str(Band.PARAMS): 2 * Fraction(facts.params)}
    layer = 2 * Fraction(facts.largest_layer)
    kept = {} if "params" in facts.row.offload else {str(Band.PARAMS): Fraction(2 * facts.params // facts.ranks)}
    return kept | {str(Band.GATHERED): layer, str(Band.UNREDUCED): layer}


def _on_host(facts: Facts) -> Terms:
    """What DeepSpeed has on a node's host then, half as much again for what it allocates besides."""
    nodes = max(1, facts.ranks // facts.node)
    if sharded(facts.row) != PARAMS:
        each = Fraction(max(4 * facts.ranks, 16))
    else:
        each = Fraction(18 if "params" in facts.row.offload else 16, nodes)
    return {str(Band.MASTER): each * facts.params * Fraction(3, 2)}


_FP32_GRADS = "adds 4 bytes per parameter for an fp32 copy of the gradients, made while the optimizer runs"
_DEEPSPEED = "DeepSpeed 0.19.8, deepspeed/runtime/zero"
_UNSHARDED = "knows no ranks: it is the answer for one card without ZeRO, whatever N is"

EVERY = (NOTHING, OPTIMIZER, GRADS, PARAMS)
ESTIMATORS: tuple[Estimator, ...] = (
    Estimator(
        "ZeRO paper, Table 1",
        {NOTHING: "16 P", OPTIMIZER: "4 P + 12 P/N", GRADS: "2 P + 14 P/N", PARAMS: "16 P/N"},
        dict.fromkeys(
            EVERY,
            "model states at rest alone: no padding, and none of what a step holds for a while (a gathered layer, "
            "gradients not yet reduced, blocks in flight, activations)",
        ),
        "Rajbhandari et al., arXiv 1910.02054, section 5, K = 12",
        _paper,
    ),
    Estimator(
        "DeepSpeed's estimator, as documented",
        {GRADS: "4 P + 16 P/N", PARAMS: "4 L + 18 P/N"},
        {
            GRADS: "counts the 16-bit gradients whole, which stage 2 frees as soon as they are reduced, and "
            f"{_FP32_GRADS}",
            PARAMS: "counts the largest single module gathered (2 L) and its gradients (2 L), where a whole unit is "
            f"gathered; {_FP32_GRADS}, and leaves the 16-bit ones out",
        },
        "DeepSpeed documentation, Memory Requirements",
        _documented,
    ),
    Estimator(
        "DeepSpeed's estimator, as coded",
        {GRADS: "2 P + 18 P/N", PARAMS: "4 L + 18 P/N"},
        {
            GRADS: f"{_FP32_GRADS}; neither the gradient bucket (5e8 elements) nor a layer's gradients before they are "
            "reduced are in it",
            PARAMS: "counts the largest single module gathered (2 L) and its gradients (2 L), where a whole unit is "
            f"gathered; {_FP32_GRADS}, and leaves the 16-bit ones and the gradient bucket out",
        },
        f"{_DEEPSPEED}, estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs",
        _coded,
    ),
    Estimator(
        "Megatron's theoretical memory report",
        {NOTHING: "18 P", OPTIMIZER: "6 P + 12 P/N"},
        dict.fromkeys(
            (NOTHING, OPTIMIZER),
            "counts gradients in fp32 only, 4 bytes and whole, as Megatron accumulates them; the paper's 16 bytes have "
            "2 of gradients",
        ),
        "Megatron-LM, megatron/training/theoretical_memory_usage.py, without its activations",
        lambda facts: _states(facts, facts.row, params=2, grads=4),
    ),
    Estimator(
        "Megatron's distributed optimizer, fp16 gradients",
        {NOTHING: "20 P", OPTIMIZER: "4 P + 16 P/N"},
        dict.fromkeys(
            (NOTHING, OPTIMIZER),
            "keeps fp32 main gradients beside the fp16 ones: 4 bytes that the paper's 16 do not have",
        ),
        "Megatron Core user guide, Distributed Optimizer",
        lambda facts: _states(facts, facts.row, params=2, grads=2, main_grads=4),
    ),
    Estimator(
        "Megatron's distributed optimizer, all fp32",
        {NOTHING: "16 P", OPTIMIZER: "8 P + 8 P/N"},
        dict.fromkeys(
            (NOTHING, OPTIMIZER),
            "parameters and gradients are 4 bytes each and there is no master copy: the same 16 bytes, but 8 of them "
            "are not the optimizer's and stay whole",
        ),
        "Megatron Core user guide, Distributed Optimizer",
        lambda facts: _states(facts, facts.row, params=4, grads=4, master=0),
    ),
    Estimator(
        "FSDP's rule: shards and the largest unit",
        {PARAMS: "16 P/N + 2 U"},
        {
            PARAMS: "gathers one unit; with prefetch two are gathered at a time, and backward holds the unit's "
            "gradients and the reduction's blocks as well"
        },
        "Zhao et al., arXiv 2304.11277, section 3: the sum of the shards plus the largest unit; here with fp32 "
        "shards, gradients and moments, and the unit in 16 bits",
        _fsdp,
    ),
    Estimator(
        "EleutherAI's cookbook",
        {
            NOTHING: "18 P",
            OPTIMIZER: "6 P + 12 P/N + 1e9 if N > 1",
            GRADS: "2 P + 16 P/N + 1e9 if N > 1",
            PARAMS: "18 P/N + 3e9 if N > 1",
        },
        {
            NOTHING: "counts gradients in fp32, 4 bytes",
            OPTIMIZER: "counts gradients in fp32, 4 bytes, and DeepSpeed's bucket for gathering (5e8 elements) in full",
            GRADS: "counts gradients in fp32, 4 bytes, and DeepSpeed's bucket for gathering (5e8 elements) in full",
            PARAMS: "counts gradients in fp32, 4 bytes, DeepSpeed's bucket for gathering (5e8 elements) in full, and "
            "stage3_max_live_parameters (1e9) as though so many were always gathered, even of a smaller model",
        },
        "EleutherAI cookbook, calc/calc_transformer_mem.py (Transformer Math 101), without its activations",
        _cookbook,
    ),
    Estimator(
        "Hugging Face's anatomy of a training step",
        dict.fromkeys(EVERY, "18 P"),
        dict.fromkeys(EVERY, f"{_UNSHARDED}; it counts gradients in fp32, 4 bytes"),
        "Hugging Face transformers documentation, GPU memory usage",
        lambda facts: _states(facts, DP, params=2, grads=4),
    ),
    Estimator(
        "accelerate estimate-memory, 16-bit",
        dict.fromkeys(EVERY, "8 P"),
        dict.fromkeys(
            EVERY,
            f"{_UNSHARDED}; and it prints the largest of its parts (model 4 P, gradients 6 P, optimizer 8 P) as though "
            "they were not held at once",
        ),
        "accelerate 1.15.0, estimate_training_usage, what the command prints for float16",
        _accelerate,
    ),
)


_OFFLOADED = dict.fromkeys((OPTIMIZER, GRADS), "2 P") | {PARAMS: "4 L + 2 P/N, or 4 L with the parameters there"}
_HOST = dict.fromkeys((OPTIMIZER, GRADS), "1.5 P max(4 N, 16)") | {
    PARAMS: "24 P/nodes, or 27 with the parameters there"
}
OFFLOADED: tuple[Estimator, ...] = (
    Estimator(
        "DeepSpeed's estimator, as coded",
        _OFFLOADED,
        dict.fromkeys(
            _OFFLOADED, "counts 16-bit parameters, and the largest single module gathered with its gradients; no bucket"
        ),
        f"{_DEEPSPEED}, estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs",
        _on_card,
    ),
    Estimator(
        "DeepSpeed's estimator, as coded, a node's host",
        _HOST,
        dict.fromkeys(
            _HOST, "multiplies by 1.5 for what is allocated besides; with stage 2 it grows with N, as every rank pins "
            "gradients of all parameters",
        ),
        f"{_DEEPSPEED}, the same, with additional_buffer_factor 1.5 and zero_init",
        _on_host,
        "on the host",
    ),
)  # fmt: skip


def estimates(facts: Facts) -> list[Estimate]:
    """The answers of all estimators that have a formula for this row, in the order of the table.

    Of rows with states on the host only DeepSpeed's know.
    """
    known = OFFLOADED if facts.row.offload else ESTIMATORS
    return [estimator(facts) for estimator in known if sharded(facts.row) in estimator.formulas]
