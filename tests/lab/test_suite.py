"""The lab before and while it runs: what it refuses, in words, and what it says that it is at."""

from typing import Any

import pytest

from helpers import lab_settings
from zerosim.checks import compare
from zerosim.lab import suite
from zerosim.records.results import Failure
from zerosim.stages import DP, HSDP, ZeRO3

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 0}, r"^lab\(ranks\): ranks must be an integer of 1 or more; got 0\.$"),
    ({"steps": 0}, r"^lab\(steps\): steps must be an integer of 1 or more; got 0\.$"),
    ({"batch": 0}, r"^lab\(batch\): batch must be an integer of 1 or more; got 0\.$"),
    ({"seed": -1}, r"^lab\(seed\): seed must be an integer of 0 or more; got -1\.$"),
    ({"model_seed": -1}, r"^lab\(model_seed\): model_seed must be an integer of 0 or more; got -1\.$"),
    ({"precision": "fsdp"}, r"^lab\(precision\): fsdp exists under ZeRO-3 alone, .* Use bf16\.$"),
    ({"resume_at": 2}, r"^lab\(resume_at\): after step 2 of 2 no step follows\. Use an earlier one, or more steps\.$"),
    ({"resume_ranks": 3}, r"^lab\(resume_ranks\): ranks to resume on are of a run that is resumed\. Say after which"),
    ({"accumulate": 3}, r"^lab\(batch\): "),
    ({"sync": "end"}, r"^lab\(sync\): of one micro-batch it says nothing; got 'end'\. Accumulate several\.$"),
    ({"data": "words"}, r"^lab\(data\): data is one of noise, digits; got 'words'\.$"),
    ({"data": "digits"}, r"needs a model with 64 inputs and outputs"),
    ({"node": 2}, r"^Scheme\(node\): 5 ranks cannot be cut into groups of 2\. Use 1, 5\.$"),
    ({"resume_at": 1, "resume_ranks": 3, "ranks": 4, "node": 2}, r"^Scheme\(node\): 3 ranks cannot be cut"),
]


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize(("asked", "says"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_cannot_be_run_is_refused_before_anything_is(asked: dict[str, Any], says: str) -> None:
    """Each with the option, the rule and what to do; one step less to resume after, or one more row, is taken."""
    with pytest.raises(ValueError, match=says):
        suite.validate(lab_settings(**asked))
    suite.validate(lab_settings(resume_at=1, resume_ranks=3, accumulate=2, sync="end"))


def test_a_lab_has_rows_each_of_another_name() -> None:
    """None, or one twice, is refused."""
    for rows in ([], [DP, ZeRO3, DP]):
        with pytest.raises(
            ValueError, match=r"^lab\(rows\): one or more rows are needed, each of another name; got \["
        ):
            suite.validate(lab_settings(), rows)


def test_a_row_with_groups_needs_them_wherever_it_is_run() -> None:
    """Of the sweep's numbers of ranks those are left out that nodes do not divide."""
    assert suite.sweep_ranks(6) == [1, 2, 4, 6]
    assert suite.sweep_ranks(6, 2) == [2, 4, 6]
    assert suite.sweep_ranks(8, 8) == [8]
    with pytest.raises(ValueError, match="HSDP shards within groups of ranks"):
        suite.validate(lab_settings(), [HSDP])


def test_a_lab_says_what_it_is_at() -> None:
    """Each step and each run of the sweep, scheme by scheme, then the experiments beside: as many as were announced."""
    settings, said = lab_settings(ranks=2, widths=[2, 3]), list[str]()
    suite.run(settings, rows=[DP, ZeRO3], advance=said.append)
    names = ["data parallel", "ZeRO-3"]
    assert said == [
        *[f"step {step} of 2: {name}" for step in (1, 2) for name in names],
        *[f"sweep, N = {ranks}: {name}" for ranks in (1, 2) for name in names],
        "gathering the whole model at once", "a narrow wire", "parameters in int8",
        "buckets of another size in one scheme",
    ]  # fmt: skip
    assert len(said) == suite.work(settings, [DP, ZeRO3])


def test_losses_are_compared_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all rows of an order, on the lab's ranks, and what is said names the step."""
    seen = []

    def same(losses: dict[str, float], ranks: int, step: int, *how: str) -> list[Failure]:
        if how:  # against the second account
            return []
        seen.append((sorted(losses), ranks, step))
        return real({**losses, "ZeRO-3": 0.0}, ranks, step)

    real = compare.same_losses
    monkeypatch.setattr(compare, "same_losses", same)
    failures = suite.run(lab_settings(ranks=2, widths=[2, 3]), rows=[DP, ZeRO3]).failures
    assert seen == [(["ZeRO-3", "data parallel"], 2, step) for step in (1, 2)]
    assert [(each.quantity, each.scheme, each.step) for each in failures] == [
        ("loss", "ZeRO-3", 1),
        ("loss", "ZeRO-3", 2),
    ]


def test_a_lab_that_is_resumed_goes_on_with_as_many_ranks_as_were_asked_for() -> None:
    """A step before it was saved, and one after, of which each rank there is has sent."""
    settings = lab_settings(ranks=2, widths=[2, 3], resume_at=1, resume_ranks=3)
    [record] = suite.run(settings, rows=[DP]).schemes
    assert [len(moved.sent) for step in record.steps for moved in step.traffic[:1]] == [2, 3]


def test_what_an_option_is_worth_is_measured_where_there_is_something_to_see() -> None:
    """With several ranks each experiment has found something; with one there is nothing to send, nor to gather."""
    one, several = (suite.run(lab_settings(ranks=n, widths=[2, 3]), rows=[DP]).ablations for n in (1, 2))
    assert None not in (several.whole_model_gather, several.narrow_wire, several.int8_params)
    assert several.whole_model_bucket
    assert (one.whole_model_gather, one.narrow_wire, one.int8_params) == (None, None, None)
    assert one.whole_model_bucket == {}
