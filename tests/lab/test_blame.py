"""Who is blamed, and first: the scheme that is at fault, in the earliest step, for what went wrong before the rest."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from helpers import Batch, batches, lab_settings
from zerosim.api.compare import _Plain as Plain
from zerosim.bands import Band
from zerosim.lab import suite
from zerosim.lab.side_by_side import together
from zerosim.model import MLP
from zerosim.options import Options
from zerosim.records.consistency import contradictions
from zerosim.records.failures import folded, ordered
from zerosim.records.results import Check, Failure, Results
from zerosim.report import lab_console
from zerosim.schemes import SCHEMES, Scheme

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, from_step: int = 1, rank: int = 2) -> None:
    """From a step on one element of the first layer's parameters is another on one rank of one scheme."""
    step = Scheme.step

    def wrong(self: Scheme, batch: Any, weights: Any = None) -> float:
        loss = step(self, batch, weights)
        if self.name == name and self.ring.size == 5 and self.steps == from_step:
            self.buckets[0].states[Band.PARAMS][rank, 3] += 1
        return loss

    monkeypatch.setattr(Scheme, "step", wrong)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Results:
    """A lab in which data parallel alone is wrong, on rank 2 from step 1 on."""
    monkeypatch.setattr(suite, "sweep_ranks", lambda ranks, node=None: [ranks])
    spoil(monkeypatch, "data parallel")
    return suite.run(lab_settings(steps=3))


def test_a_fault_of_the_first_scheme_is_not_the_others(found: Results) -> None:
    """Where data parallel alone is wrong, nobody else is blamed; the record is one that can have been."""
    assert {failure.scheme for failure in found.failures} == {"data parallel"}
    first = found.failures[0]
    assert (first.step, first.rank) == (1, 2)
    assert first.quantity == "params of layer 1, element 3, against plain training"
    assert list(contradictions(found)) == []


def test_the_screen_says_each_kind_of_failure_once(found: Results) -> None:
    """A line for each kind, the earliest step first, with how many like it there are and where."""
    lines = [str(line) for line in lab_console.verdicts(found, 20)]
    assert lines[0].startswith("✗ same training FAILS: ")
    assert lines[1].startswith("  data parallel, N = 5, step 1, rank 2: params of layer 1, element 3")
    assert "up to step 3" in lines[1]
    assert len(lines) < len(found.failures)


@pytest.mark.parametrize("name", ["data parallel", "ZeRO-2"])
def test_without_a_second_account_it_is_the_one_that_is_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of schemes that have only each other to be compared with, the one that differs from all others is named."""
    spoil(monkeypatch, name, rank=0)
    runs = [Plain(row, MLP((5, 7, 3)), 5, Options()) for row in SCHEMES]
    steps: list[Batch] = batches(5, 1)
    failures = together(runs, steps, 5)[2]
    assert {(each.scheme, each.rank) for each in failures} == {(name, 0)}


def failure(quantity: str, step: int = 1, rank: int = 0, ranks: int = 5) -> Failure:
    return Failure(
        check=Check.SAME_TRAINING, scheme="ZeRO-1", ranks=ranks, step=step, rank=rank, quantity=quantity,
        measured="1.0", expected="2.0",
    )  # fmt: skip


def test_what_is_made_first_is_said_first() -> None:
    """In a step: the loss, gradients, their norm, the scale, moments, master, parameters, and then what is counted."""
    said = [
        "loss", "main grads of layer 1, element 3", "grads of layer 1, element 3", "norm of all gradients, against x",
        "loss scale, against x", "exp_avg of layer 1, element 3", "master of layer 1, element 3",
        "params of layer 1, element 3", "bytes of params at rest",
    ]  # fmt: skip
    assert [each.quantity for each in ordered(map(failure, reversed(said)))] == said
    assert [each.step for each in ordered([failure("loss", 2), failure("params of a, element 3", 1)])] == [1, 2]


def test_repetitions_are_folded_with_a_count() -> None:
    """Other ranks, layers, elements, steps and N are the same kind; another band, check or scheme is not."""
    like: Sequence[Failure] = [
        failure("grads of layer 1, element 3"),
        failure("grads of layer 2, element 4", step=2, rank=1),
        failure("grads of layer 1, element 3", rank=2, ranks=4),
    ]
    other = [failure("params of layer 1, element 3"), replace(like[0], scheme="ZeRO-2")]
    assert [len(each.others) for each in folded([*other, *like])] == [0, 2, 0]
    [first] = folded(like)
    assert str(first).endswith("measured 1.0, expected 2.0; and 2 like it (3 ranks, up to step 2, N = 4, 5)")
    assert str(folded(like[:1])[0]).endswith("measured 1.0, expected 2.0")
