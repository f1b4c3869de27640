"""Casts between float32, float16 and bfloat16: NumPy's bits in less time.

NumPy converts float16 one element at a time. Here the same conversion is a handful of whole-array
passes over blocks that stay in the cache. The module owns that and nothing else: it knows bit
patterns, and must not know of ranks, models or steps.

Two things are left to NumPy's own cast: a block holding what the passes cannot carry (NaN,
infinity, overflow), and bfloat16, which ml_dtypes converts fast enough.

Like a cast on hardware, `convert` never warns: overflow gives infinity, and NaN stays NaN.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from zerosim.bands import Array

_Cast = Callable[[Array, Array], None]

# Elements per block: enough to outweigh ten NumPy calls of 0.4 µs each, few enough that the
# scratch, 8 bytes for each, stays in a core's own cache.
_BLOCK = 1 << 16


class _Scratch(threading.local):
    """Two blocks of 32-bit words for each thread, allocated once."""

    def __init__(self) -> None:
        self.a, self.b = np.empty((2, _BLOCK), np.uint32)


_scratch = _Scratch()


def _word(bits: int) -> Array:
    """Make a constant operand: an array, as NumPy would convert an int at every call."""
    return np.array(bits, np.uint32)


_SIGN, _MAGNITUDE, _EXPONENT = _word(0x80000000), _word(0x7FFFFFFF), _word(0x7F800000)
_MANTISSA_GAP = _word(23 - 10)  # mantissa bits of float32 less those of float16
_HALF_FIELDS, _REBIAS = _word(0x8FFFE000), np.array(2.0 ** (127 - 15), np.float32)
_MIN_NORMAL_HALF = _word((127 - 14) << 23)  # 2**-14, as float32 bits
_TO_GRID, _PACK, _TOP = _word((13 << 23) + 2048), _word((1 << 16) + 8), _word(16)


def _quiet_copy(src: Array, out: Array) -> None:
    with np.errstate(all="ignore"):
        np.copyto(out, src, casting="unsafe")


def _half_to_single(src: Array, out: Array) -> None:
    """Move the fields into place, then mend the exponent with one multiplication.

    Extended by its sign to 32 bits and shifted left by 13, a half has its sign in float32's sign bit
    and its exponent and mantissa at the low end of float32's exponent and the top of its mantissa. The
    mask clears the copies of the sign between them. As a float32 this is the value times 2**(15 - 127),
    subnormals too, and multiplying by 2**112 is exact. Only exponent 31, infinity or NaN, would come
    out wrong; those halves, read as integers, are the largest of either sign.
    """
    signed, unsigned = src.view(np.int16), src.view(np.uint16)
    # x[x.argmax()] starts up five times as fast as x.max().
    if signed[signed.argmax()] >= 0x7C00 or unsigned[unsigned.argmax()] >= 0xFC00:
        _quiet_copy(src.reshape(out.shape), out)
        return
    fields = out.view(np.uint32)  # in place: the fewer bytes a block touches, the more of it stays in the cache
    np.copyto(fields.view(np.int32), signed.reshape(out.shape))
    np.left_shift(fields, _MANTISSA_GAP, out=fields)
    np.bitwise_and(fields, _HALF_FIELDS, out=fields)
    np.multiply(out, _REBIAS, out=out)


def _single_to_half(src: Array, out: Array) -> None:
    """Let a floating-point addition round, then pack the fields with one multiplication.

    Let |x| be in [2**e, 2**(e+1)), or e = -14 if it is smaller: there halves are 2**(e-10) apart. So
    are float32 numbers just above c = 2**(e+13), hence |x| + c is |x| rounded once, to the nearest
    half, ties to even. Its exponent field is E = e + 140, and its mantissa R = |x| / 2**(e-10), at most
    2048. The half wanted is ((e + 14) << 10) + R: the leading bit of a normal half's R, or a carry out
    of its mantissa, moves the exponent up as it should, to infinity if need be.

    Here e + 14 = E - 126 = E + 2 modulo 64, so 2 << 10 added to c (even, ties fall as before) leaves
    (E << 10) + R modulo 2**16. The factor 2**16 + 8 takes (E << 23) + R to (E << 26) + (R << 16)
    + (R << 3) modulo 2**32: that sum in the top 16 bits, and below them only R << 3.
    """
    x, a, b = src.view(np.uint32), _scratch.a[: src.size], _scratch.b[: src.size]
    np.bitwise_and(x, _MAGNITUDE, out=a)
    if a[a.view(np.int32).argmax()] >= (127 + 16) << 23:  # 2**16 or more, or NaN, as float32 bits
        _quiet_copy(src.reshape(out.shape), out)
        return
    np.bitwise_and(a, _EXPONENT, out=b)
    b.clip(_MIN_NORMAL_HALF, _EXPONENT, out=b)  # np.maximum with a scalar is three times slower
    np.add(b, _TO_GRID, out=b)
    rounded = a.view(np.float32)
    np.add(rounded, b.view(np.float32), out=rounded)
    np.multiply(a, _PACK, out=a)
    np.bitwise_and(x, _SIGN, out=b)
    np.bitwise_or(a, b, out=a)
    np.right_shift(a, _TOP, out=a)
    np.copyto(out.view(np.uint16), a.reshape(out.shape), casting="unsafe")


def _blockwise(cast: _Cast, src: Array, out: Array) -> None:
    """Apply a cast that takes a block of src, flat and contiguous, and a block of out, as it lies."""
    if src.size <= _BLOCK:
        cast(src.ravel(), out)  # copies if src is strided: cheaper than several strided passes
        return
    if src.flags.c_contiguous and out.flags.c_contiguous:
        src, out = src.reshape(-1), out.reshape(-1)
    row = src.size // len(src)
    if row > _BLOCK:
        for s, o in zip(src, out, strict=True):
            _blockwise(cast, s, o)
    else:
        step = _BLOCK // row
        for i in range(0, len(src), step):
            cast(src[i : i + step].ravel(), out[i : i + step])


_HALF, _SINGLE, _BRAIN = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_CASTS: dict[tuple[np.dtype[Any], np.dtype[Any]], _Cast] = {
    (_HALF, _SINGLE): partial(_blockwise, _half_to_single),
    (_SINGLE, _HALF): partial(_blockwise, _single_to_half),
    (_HALF, _BRAIN): _quiet_copy,
    (_SINGLE, _BRAIN): _quiet_copy,
    (_BRAIN, _HALF): _quiet_copy,  # quiet by itself only where ml_dtypes does not use the hardware's cast
}


def convert(src: Array, out: Array) -> None:
    """Write src into out, converted to out's dtype, rounding to nearest even as IEEE 754 does.

    The two have equal shapes, any strides, and no memory in common. Whatever is not a plain NumPy
    array of these dtypes goes to `np.copyto` as it is.
    """
    cast = None
    if type(src) is type(out) is np.ndarray and src.shape == out.shape and src.size:
        cast = _CASTS.get((src.dtype, out.dtype))
    if cast is None:
        np.copyto(out, src, casting="unsafe")
    else:
        cast(src, out)
