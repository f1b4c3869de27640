"""Failures as they are said: each kind once, with how many are like it and where."""

import pytest

from zerosim.records.failures import folded
from zerosim.records.results import Failure


def failure(rank: int = 0, step: int = 1, ranks: int = 4) -> Failure:
    return Failure("same training", "ZeRO-1", ranks, step, rank, "master of layer 1, element 3", "1.0", "2.0")


@pytest.mark.parametrize(
    ("others", "where"),
    [
        ([], ""),
        ([failure()], "; and 1 like it"),
        ([failure(rank=1), failure(rank=2)], "; and 2 like it (3 ranks)"),
        ([failure(step=2), failure(step=5)], "; and 2 like it (up to step 5)"),
        ([failure(ranks=8), failure(ranks=8)], "; and 2 like it (N = 4, 8)"),
        ([failure(1, 2, 8)], "; and 1 like it (2 ranks, up to step 2, N = 4, 8)"),
    ],
)
def test_what_is_like_a_failure_is_counted_and_placed(others: list[Failure], where: str) -> None:
    """By rank, step and N where these are not all one."""
    [kind] = folded([failure(), *others])
    assert str(kind) == f"{failure().found}{where}"
