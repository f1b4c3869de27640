"""How known systems do it, as options that a run obeys; and the estimators, as formulas that say what they print."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest

from zerosim.bands import FP32, MODEL_STATES, PRECISIONS, Band
from zerosim.buckets import PADDINGS
from zerosim.model import MLP
from zerosim.planner.conventions import CONVENTIONS, DEEPSPEED_BUCKET, NOTHING, Convention, Rules, convention
from zerosim.planner.estimators import ESTIMATORS, Facts, estimates
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.worlds.dry import DryRing, Shapes

# Two layers of 7 x 5 + 5 = 40 and 5 x 3 + 3 = 18 parameters on four ranks: 18 is no multiple of 4.
N = 4
EVERY = [(name, row) for name, rules in CONVENTIONS.items() for row in rules.rows()]


def dry(name: str, row: Stage, precision: str | None = None) -> Scheme:
    """One step of the small model as a convention has it."""
    model = Shapes(MLP((7, 5, 3)))
    scheme = Scheme(row, model, N, CONVENTIONS[name].options(row, precision), ring=DryRing(N))
    scheme.step(model.batch(2))
    return scheme


@pytest.mark.parametrize(("name", "row"), EVERY, ids=str)
@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_a_run_takes_every_convention(name: str, row: Stage, precision: str | None) -> None:
    """For each of its rows, and with any precision that the row allows, a convention's options make a run."""
    if precision is not None and not PRECISIONS[precision].everywhere and not row.params:
        with pytest.raises(ValueError, match="exists only while it is gathered"):
            dry(name, row, precision)
    else:
        scheme = dry(name, row, precision)
        assert scheme.options.precision == (precision or CONVENTIONS[name].precision)
        assert scheme.reports[-1].complete


@pytest.mark.parametrize(
    ("precision", "wires"),
    [
        ("mixed", ("fp16", "fp16")),
        ("bf16", ("bf16", "bf16")),
        ("fp32", ("fp32", "fp32")),
        ("bf16-fp32-grads", ("fp32", "bf16")),
        ("mixed-main-grads", ("fp16", "fp16")),
        ("fsdp", ("fp32", "bf16")),
    ],
)
def test_what_travels_in_which_dtype(precision: str, wires: tuple[str, str]) -> None:
    """Gradients travel in the dtype that they are kept in, parameters in the one that is computed with."""
    assert precision in PRECISIONS
    for name, row in EVERY:
        options = CONVENTIONS[name].options(row, "mixed" if precision == "fsdp" and not row.params else precision)
        expected = ("fp16", "fp16") if precision == "fsdp" and not row.params else wires
        assert (options.wire, options.wire_params or options.wire) == expected


@pytest.mark.parametrize(("name", "row"), EVERY)
@pytest.mark.parametrize(("precision", "each"), [("mixed", 16), ("mixed-main-grads", 20), ("bf16-fp32-grads", 18)])
def test_bytes_per_parameter_do_not_depend_on_the_convention(name: str, row: Stage, precision: str, each: int) -> None:
    """Over all ranks a recipe's sharded states are one copy; what is whole is there N times; nothing else is."""
    states = dry(name, row, precision).reports[-1].resident
    padded = sum(PADDINGS[CONVENTIONS[name].options(row).padding](group, N) for group in groups())
    dtypes = PRECISIONS[precision].dtypes(FP32)
    bands = [band for band in MODEL_STATES if band in states]
    assert sum(dtypes[band].itemsize for band in bands) == each
    for band in bands:
        share = padded // row.piece(band, 0, N)[1]
        assert states[band] == dtypes[band].itemsize * share


def groups() -> list[Any]:
    return [group for layer in MLP((7, 5, 3)).layers for group in layer.groups]


@pytest.mark.parametrize(
    ("name", "row", "padded"),
    [
        ("zero", ZeRO2, (40, 20)),
        ("megatron", ZeRO1, (40, 20)),
        ("deepspeed", DP, (40, 20)),
        ("deepspeed", ZeRO1, (40, 24)),
        ("deepspeed", ZeRO2, (40, 24)),
        ("deepspeed", ZeRO3, (36 + 8, 16 + 4)),  # each parameter: 35 and 5, 15 and 3
        ("fsdp2", ZeRO3, (8 * 5 + 8, 8 * 3 + 4)),  # rows of 7 and 5 become 8, of 5 and 3 become 8 and 4
    ],
)
def test_padding(name: str, row: Stage, padded: tuple[int, int]) -> None:
    """Buffers are padded to N, to 2N by parameter or by rows of each, as the system does."""
    assert tuple(bucket.padded for bucket in dry(name, row).buckets) == padded


@pytest.mark.parametrize("name", CONVENTIONS)
def test_collectives(name: str) -> None:
    """DeepSpeed's stages 1 and 2 all-reduce gradients; all others reduce-scatter what is sharded."""
    for row in CONVENTIONS[name].rows():
        sent = {collective for collective, band in dry(name, row).reports[-1].traffic if band == Band.GRADS}
        whole = row is DP or (name == "deepspeed" and row in (ZeRO1, ZeRO2))
        assert sent == ({"all-reduce"} if whole else {"reduce-scatter"})


def test_what_is_held_beside_the_states() -> None:
    """DeepSpeed's gradient bucket is there from stage 2 on, of 5e8 elements or of as many as it is told."""
    assert DEEPSPEED_BUCKET == 5 * 10**8
    for name, row in EVERY:
        bucket = name == "deepspeed" and row.grads
        assert CONVENTIONS[name].beside(row) == ({Band.BUCKET: 5 * 10**8} if bucket else {})
        assert CONVENTIONS[name].beside(row, 101) == ({Band.BUCKET: 101} if bucket else {})


def test_fsdp2_gathers_one_unit_ahead() -> None:
    """Its next unit is gathered while one computes; nobody else's is."""
    ahead = {name: each.options(each.rows()[-1]).prefetch for name, each in CONVENTIONS.items()}
    assert ahead == {"zero": 0, "deepspeed": 0, "fsdp2": 1, "megatron": 0}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_every_rule_is_a_sentence(name: str) -> None:
    """A row says why, in whole sentences that fit beside a table, and carries its own name."""
    row = convention(name)
    assert row.name == name
    assert len(row.why) >= 3
    assert all(re.fullmatch(r"[A-Z].{20,400}\.", sentence) for sentence in (*row.why, *row.left_out))


def test_unknown_conventions_stages_and_precisions() -> None:
    """The error names what there is."""
    with pytest.raises(ValueError, match=r"'horovod'.*zero, deepspeed, fsdp2, megatron"):
        convention("horovod")
    with pytest.raises(
        ValueError, match=r"FSDP2 \(fully_shard\) has no ZeRO-2; it has data parallel, ZeRO-3, ZeRO-3, kept, HSDP, hpZ"
    ):
        CONVENTIONS["fsdp2"].options(ZeRO2)
    with pytest.raises(ValueError, match="has no ZeRO-3; it has data parallel, ZeRO-1"):
        CONVENTIONS["megatron"].beside(ZeRO3)
    with pytest.raises(ValueError, match=r"precision.*mixed, bf16, .*got 'fp8'"):
        CONVENTIONS["zero"].options(ZeRO1, "fp8")


def test_a_row_checks_itself() -> None:
    """A convention with a precision that does not exist, or without rules, is refused when it is made."""
    with pytest.raises(ValueError, match=r"'x'\(precision\): precision is one of .*got 'fp8'"):
        Convention("x", "X", "fp8", {NOTHING: Rules()}, ())
    with pytest.raises(ValueError, match=r"'x': needs rules for at least one kind of row"):
        Convention("x", "X", "mixed", {}, ())


def test_a_row_of_ones_own_follows_the_rules_of_what_it_shards() -> None:
    """A row that shards what ZeRO-2 shards runs as ZeRO-2 does, and every estimator for ZeRO-2 answers for it."""
    mine = Stage("mine", optimizer=True, grads=True)
    for each in CONVENTIONS.values():
        if ZeRO2 in each.rows():
            assert (each.options(mine), each.beside(mine)) == (each.options(ZeRO2), each.beside(ZeRO2))
    told = [[answer.nbytes for answer in estimates(Facts(**FACTS, ranks=4, row=row))] for row in (mine, ZeRO2)]
    assert told[0] == told[1] != []


# -- estimators

FACTS: dict[str, Any] = {"params": 64 * 1009, "largest_layer": 101, "largest_unit": 103}


def reckoned(formula: str, ranks: int) -> Fraction:
    """What a formula's text comes to."""
    text, _, condition = formula.partition(" if N > 1")
    assert not condition
    if formula != text and ranks == 1:
        text = text[: text.rindex("+")]
    values = {"P": FACTS["params"], "L": FACTS["largest_layer"], "U": FACTS["largest_unit"]}
    total = Fraction(0)
    for term in text.split(" + "):
        number, _, of = term.partition(" ")
        letter, _, share = of.partition("/")
        total += Fraction(number) * values.get(letter, 1) / (ranks if share else 1)
    return total


@pytest.mark.parametrize("ranks", [1, 7, 64])
@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.name)
def test_formulas_are_what_is_computed(row: Stage, ranks: int) -> None:
    """An estimator's number is what its own formula's text comes to, rounded down to a byte."""
    answers = estimates(Facts(**FACTS, ranks=ranks, row=row))
    assert answers
    for answer in answers:
        assert answer.nbytes == int(reckoned(answer.formula, ranks)), answer.name
        assert type(answer.nbytes) is int


def test_every_estimator_says_why_and_who() -> None:
    """Each has a reason for each kind of row that it answers for, a source, and a name of its own."""
    assert len({row.name for row in ESTIMATORS}) == len(ESTIMATORS)
    for row in ESTIMATORS:
        assert row.source
        assert row.whys.keys() == row.formulas.keys()
        assert all(len(why) > 30 for why in row.whys.values())


def test_estimators_answer_for_their_rows_only() -> None:
    """DeepSpeed's know ZeRO-2 and -3, Megatron's data parallel and ZeRO-1; asked for another, they say so."""

    def who(name: str) -> list[Stage]:
        return [row for row in SCHEMES if any(name in e.name for e in estimates(Facts(**FACTS, ranks=4, row=row)))]

    assert (who("DeepSpeed"), who("Megatron"), who("FSDP")) == ([ZeRO2, ZeRO3], [DP, ZeRO1], [ZeRO3])
    [coded] = [row for row in ESTIMATORS if row.name == "DeepSpeed's estimator, as coded"]
    with pytest.raises(ValueError, match="no formula for ZeRO-1; it answers for ZeRO-2, ZeRO-3"):
        coded(Facts(**FACTS, ranks=4, row=ZeRO1))


def test_the_largest_answers_are_twice_the_smallest() -> None:
    """The estimators disagree on one question by more than a factor of two, which is why they stand side by side."""
    answers = [e.nbytes for e in estimates(Facts(2_851 * 10**6, 8, ZeRO3, 32 * 10**6, 32 * 10**6))]
    assert max(answers) > 2 * min(answers)


def test_beside_names_the_bands_that_differ() -> None:
    """Bands in which an estimate has what is held are left out; of the rest it says by how much."""
    [paper] = [e for e in estimates(Facts(8, 2, ZeRO1, 1, 1)) if e.name.startswith("ZeRO paper")]
    held: dict[str, int] = {"params": 16, "grads": 17, "master": 16, "exp_avg": 16, "ring blocks": 5}
    assert paper.beside(held) == {"grads": -1, "exp_avg_sq": 16, "ring blocks": -5}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"params": 0}, r"Facts\(params\).*got 0"),
        ({"ranks": -1}, r"Facts\(ranks\).*got -1"),
        ({"largest_unit": 0}, r"Facts\(largest_unit\).*got 0"),
        ({"largest_layer": True}, r"Facts\(largest_layer\).*got True"),
    ],
)
def test_facts_that_cannot_be(wrong: dict[str, Any], what: str) -> None:
    """Numbers that no model has are refused with the value."""
    with pytest.raises(ValueError, match=what):
        Facts(**{**FACTS, "ranks": 4, "row": ZeRO1, **wrong})
