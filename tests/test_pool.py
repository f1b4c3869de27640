"""Freed memory is handed out again, never twice at once, and no more of it is kept than is needed."""

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.lib.array_utils import byte_bounds

from zerosim.bands import FP16, FP32, Array, DType
from zerosim.model import MLP
from zerosim.pool import PAGE, SLACK, Pool
from zerosim.schemes import SCHEMES, Stage


class Made:
    """Makes arrays and counts their bytes."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def __call__(self, shape: tuple[int, ...], dtype: DType) -> Array:
        array: Array = np.empty(shape, dtype)
        self.nbytes.append(array.nbytes)
        return array


@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([3, 1_031, 2_053, 9_001, 40_009])), max_size=60),
    st.booleans(),
)
def test_what_is_in_use_never_overlaps(moves: list[tuple[int, int]], exact: bool) -> None:
    """However arrays come and go, each is of the shape and dtype asked for, and has its bytes to itself."""
    pool, live = Pool(np.empty, exact=exact), dict[int, Array]()
    for slot, length in moves:
        if slot in live:
            pool.give(live.pop(slot))
            continue
        shape, dtype = (2, length), (FP32, FP16)[length % 2]
        live[slot] = array = pool.take(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        spans = sorted(byte_bounds(each) for each in live.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_another_shape_comes_to_the_same_memory() -> None:
    """An array that is smaller by less than the slack lies in the block of the one before; a much smaller does not."""
    made = Made()
    pool = Pool(made, exact=False)
    first = pool.take((5, 40_009), FP32)
    start, end = byte_bounds(first)
    pool.give(first)
    for shape, dtype in (((5, 40_009), FP16), ((7, 20_011), FP32), ((40_009 * 5 // SLACK + PAGE,), FP32)):
        array = pool.take(shape, dtype)
        assert (byte_bounds(array)[0], byte_bounds(array)[1] <= end) == (start, True)
        pool.give(array)
    assert len(made.nbytes) == 1
    pool.take((11,), FP32)
    assert made.nbytes[1:] == [44]


def test_a_block_that_is_too_small_is_given_up() -> None:
    """Growing requests, one after another, leave one block: the process keeps what is needed at once, not their sum."""
    made = Made()
    pool = Pool(made, exact=False)
    for length in (40_009, 60_013, 90_001):
        pool.give(pool.take((length,), FP32))
    held = [pool.take((length,), FP32) for length in (40_009, 60_013)]
    assert len(made.nbytes) == 4
    assert byte_bounds(held[0])[0] != byte_bounds(held[1])[0]


def test_an_exact_pool_uses_a_block_for_its_like_alone() -> None:
    """Where blocks are of one shape and dtype for good, another shape of as many bytes has one of its own."""
    made = Made()
    pool = Pool(made, exact=True)
    first = pool.take((3, 4), FP32)
    pool.give(first)
    again: Any = pool.take((3, 4), FP32)
    assert byte_bounds(again) == byte_bounds(first)
    assert again is not first
    pool.give(again)
    pool.take((4, 3), FP32)
    assert made.nbytes == [48, 48]


@pytest.mark.parametrize("stage", SCHEMES, ids=lambda stage: stage.name)
def test_the_process_keeps_little_more_than_the_ranks_hold(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers of several sizes, what all blocks take together stays within 1.5 of what ranks held at the peak."""
    made = Made()
    monkeypatch.setattr("zerosim.worlds.local.LocalRing.empty", lambda _, shape, dtype: made(shape, dtype))
    ranks, widths = 6, (101, 211, 307, 103)
    run = stage(MLP(widths), ranks, kernels="numpy")
    rng = np.random.default_rng(0)
    batch = [tuple(rng.standard_normal((2, width)).astype(np.float32) for width in (101, 103)) for _ in range(ranks)]
    for _ in range(3):
        run.step(batch)
    kept = sum(len(block) for blocks in run.ranks._pool._free.values() for block in blocks)
    assert run.ledger.total * ranks + kept <= 1.5 * ranks * run.ledger.peak().total
