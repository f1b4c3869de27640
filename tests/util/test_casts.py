"""casts.convert has NumPy's bits: every claim here is judged on raw bits against NumPy's own cast."""

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import pytest

from zerosim.bands import Array
from zerosim.util import casts
from zerosim.util.casts import convert

DType = np.dtype[Any]
Layout = Callable[[tuple[int, ...], DType], tuple[Array, Array]]
HALF, SINGLE, BRAIN = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
PAIRS = list(product([HALF, SINGLE, BRAIN], repeat=2))
EVERY_16_BITS = np.arange(1 << 16).astype(np.uint16)


def bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


def numpys(src: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return src.astype(dtype)


def check(src: Array, dtype: DType) -> None:
    out = np.empty(src.shape, dtype)
    convert(src, out)
    np.testing.assert_array_equal(bits(out), bits(numpys(src, dtype)))


def finite(array: Array) -> Array:
    """Those that stay finite as a half too: one that does not sends its whole block to NumPy."""
    return array[np.abs(numpys(array, SINGLE)) < 65520]


def around(narrow: DType) -> Array:
    """Every float32 that rounding to ``narrow`` could turn on: its values, their midpoints, and the
    float32 neighbours of each, of both signs."""
    values = numpys(EVERY_16_BITS[: 1 << 15].view(narrow), np.dtype(np.float64))
    values = np.sort(values[np.isfinite(values)])
    values = np.append(values, 2 * values[-1] - values[-2])  # where overflow begins is a midpoint too
    grid = numpys(np.concatenate([values, (values[1:] + values[:-1]) / 2]), SINGLE)
    steps = np.add.outer(bits(grid).astype(np.int64), [-1, 0, 1])
    near: Array = steps.clip(0, 0x7F800000).astype(np.uint32).view(np.float32).reshape(-1)
    return np.concatenate([near, -near])


@pytest.mark.parametrize("narrow", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("wide", [SINGLE, HALF, BRAIN], ids=str)
def test_every_bit_pattern_of_16_bits(narrow: DType, wide: DType) -> None:
    """Each of the 65,536 halves and bfloat16 numbers, NaNs included, converts to NumPy's bits."""
    values = EVERY_16_BITS.view(narrow)
    check(values, wide)
    check(finite(values), wide)


@pytest.mark.parametrize("narrow", [HALF, BRAIN], ids=str)
def test_rounding_is_to_nearest_even_at_every_midpoint(narrow: DType) -> None:
    """Every value, every midpoint, and the float32 numbers on either side of them round as IEEE 754 says."""
    values = around(narrow)
    check(values, narrow)
    check(finite(values), narrow)


@pytest.mark.parametrize("narrow", [HALF, BRAIN], ids=str)
def test_random_float32_bit_patterns(narrow: DType) -> None:
    """Two million float32 bit patterns, NaNs, infinities and subnormals among them, get NumPy's bits."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 2_000_000, dtype=np.uint32).view(np.float32)
    check(values, narrow)
    check(finite(values), narrow)


@pytest.mark.parametrize(("src", "out"), [(HALF, SINGLE), (SINGLE, HALF)], ids=str)
def test_finite_values_take_the_fast_route(src: DType, out: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value that is finite in both dtypes, of either sign, is left to NumPy's slow cast."""

    def refuse(*_: Array) -> NoReturn:
        raise AssertionError("NumPy was asked")

    monkeypatch.setattr(casts, "_quiet_copy", refuse)
    check(finite(EVERY_16_BITS.view(HALF)).astype(src), out)
    special = np.full(3, np.inf, src)
    with pytest.raises(AssertionError, match="NumPy was asked"):  # so that the patch is known to bite
        convert(special, np.empty(3, out))


@pytest.mark.parametrize(("src", "out"), [(HALF, SINGLE), (SINGLE, HALF)], ids=str)
def test_one_special_value_is_noticed(src: DType, out: DType) -> None:
    """A single infinity, NaN or overflow of either sign comes out right among ordinary values."""
    for special in (np.inf, np.nan, 65519.996, 65520.0, *2.0 ** np.arange(16, 128)):
        for value in (special, -special):
            check(numpys(np.array([1.0, value, -1.0]), src), out)


def contiguous(shape: tuple[int, ...], dtype: DType) -> tuple[Array, Array]:
    base = np.zeros(shape, dtype)
    return base, base


def rows_apart(shape: tuple[int, ...], dtype: DType) -> tuple[Array, Array]:
    base = np.zeros((*shape[:1], 3, *shape[1:]), dtype)
    return base, base[(slice(None), 1) if shape else (1, ...)]


def elements_apart(shape: tuple[int, ...], dtype: DType) -> tuple[Array, Array]:
    base = np.zeros((*shape, 3), dtype)
    return base, base[..., 1]


def transposed(shape: tuple[int, ...], dtype: DType) -> tuple[Array, Array]:
    base = np.zeros(shape[::-1], dtype)
    return base, base.T


LAYOUTS = [contiguous, rows_apart, elements_apart, transposed]  # each gives an array and a view of it
SHAPES: list[tuple[int, ...]] = [
    *[(), (0,), (0, 5), (5, 0), (13,), (7, 11), (3, 5, 7)],
    *[(65521,), (65537,), (131101,)],  # the primes about a block of 2**16 elements, and one beyond two
    *[(131, 509), (22003, 3), (13, 71, 73)],  # rows that do not fill blocks
    *[(3, 65537), (2, 3, 65537)],  # rows longer than a block
]


@pytest.mark.parametrize("out_layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("src_layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_shapes_and_strides(src_layout: Layout, out_layout: Layout) -> None:
    """Any shape, from any strides into any strides, across block boundaries, writes out and only out."""
    pool = finite(EVERY_16_BITS.view(HALF))
    rng = np.random.default_rng(0)
    for shape, (src_dtype, out_dtype) in product(SHAPES, [(HALF, SINGLE), (SINGLE, HALF), (BRAIN, HALF)]):
        src_base, src = src_layout(shape, src_dtype)
        src[...] = numpys(rng.choice(pool, shape), src_dtype)
        if src.ndim > 1:
            src[-1:] = np.nan  # so that blocks of both routes meet in one array
        before = src_base.copy()
        got_base, got = out_layout(shape, out_dtype)
        want_base, want = out_layout(shape, out_dtype)
        convert(src, got)
        want[...] = numpys(src, out_dtype)
        np.testing.assert_array_equal(bits(got_base), bits(want_base), f"{shape} {src_dtype} -> {out_dtype}")
        np.testing.assert_array_equal(bits(src_base), bits(before), f"{shape}: the source was changed")


@pytest.mark.parametrize(("src", "out"), [(HALF, SINGLE), (SINGLE, HALF)], ids=str)
def test_memory_beyond_the_arrays_is_bounded(src: DType, out: DType) -> None:
    """However large the arrays and whatever their strides, a conversion takes less than 1 MB of its own."""
    here, there = np.ones((1009, 2003), src)[:, 1:], np.zeros((1009, 2002), out)
    tracemalloc.start()
    try:
        convert(here, there)
        convert(there[:, 1:], here[:, 1:])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [HALF, SINGLE, BRAIN], ids=str)
def test_one_dtype_is_a_plain_copy(dtype: DType) -> None:
    """Between arrays of one dtype every bit is copied, a NaN's payload too."""
    pattern = np.random.default_rng(0).integers(0, 1 << 16, 10_007 * dtype.itemsize // 2).astype(np.uint16)
    out = np.empty(10_007, dtype)
    convert(pattern.view(dtype), out)
    np.testing.assert_array_equal(out.view(np.uint16), pattern)


@pytest.mark.parametrize(("src", "out"), PAIRS, ids=str)
def test_no_cast_warns(src: DType, out: DType) -> None:
    """Overflow, underflow and NaN, signalling or not, are quiet even where floating errors raise."""
    patterns = EVERY_16_BITS.astype(np.uint32) << 16 | 0xFFFF if src == SINGLE else EVERY_16_BITS
    with np.errstate(all="raise"):
        values = patterns.view(src)
        for some in (values, finite(values)):
            convert(some, np.empty(some.shape, out))


def test_other_arrays_are_numpys_affair() -> None:
    """An array that brings its own functions, and any other dtype or shape, goes to np.copyto untouched."""
    calls: list[tuple[Any, Any, Any]] = []

    class Elsewhere(np.ndarray[tuple[int, ...], DType]):
        def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> None:
            calls.append((func, args, kwargs))

    here, there = np.ones(5, HALF), np.zeros(5, SINGLE).view(Elsewhere)
    for src, out in ((here, there), (there, here)):
        convert(src, out)
        func, args, kwargs = calls.pop()
        assert func is np.copyto
        assert args[0] is out
        assert args[1] is src
        assert kwargs == {"casting": "unsafe"}

    swapped = np.array([1, -2.5, 65504], np.dtype(">f2"))
    out = np.empty((2, 3), SINGLE)  # broadcasting, too
    convert(swapped, out)
    np.testing.assert_array_equal(out, [[1, -2.5, 65504]] * 2)
    with pytest.raises(ValueError, match="broadcast"):
        convert(np.zeros(5, HALF), np.zeros(7, SINGLE))


def test_threads_do_not_share_scratch() -> None:
    """Conversions in several threads at once do not disturb each other."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(400_009).astype(SINGLE) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, arrays, [HALF] * 4))
