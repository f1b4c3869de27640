"""NumPy's rules for what an operation makes of shapes, strides and dtypes, with no array at hand.

Owns these rules, as functions of tuples of Python integers, which may pass 2**63. For dtypes NumPy
itself is asked, about arrays of no or one element. Errors are NumPy's kinds of errors.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from operator import index
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

Shape = tuple[int, ...]
DType = np.dtype[Any]
Options = tuple[tuple[str, Any], ...]
_answers = lru_cache(maxsize=4096)  # a run asks the same few questions again and again


@_answers
def contiguous(shape: Shape, itemsize: int) -> Shape:
    """The strides of a new array."""
    return tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def indexed(shape: Shape, strides: Shape, key: tuple[Any, ...]) -> tuple[Shape, Shape]:
    """The shape and strides of what basic indexing selects."""
    if len(key) == 1 and shape and type(key[0]) is slice:  # what most ask for
        chosen = range(*key[0].indices(shape[0]))
        return (len(chosen), *shape[1:]), (strides[0] * chosen.step, *strides[1:])
    sides: list[int] = []
    steps: list[int] = []
    at = 0  # the next axis
    for place, part in enumerate(key):
        if part is None:
            sides.append(1)
            steps.append(0)
            continue
        if part is Ellipsis:
            later = key[place + 1 :]
            to = len(shape) - sum(other is not None for other in later)
            if to < at or any(other is Ellipsis for other in later):
                raise IndexError(f"Too many indices, or more than one ellipsis, for shape {shape}: {key!r}.")
            sides += shape[at:to]
            steps += strides[at:to]
            at = to
            continue
        if at == len(shape):
            raise IndexError(f"Too many indices for shape {shape}: {key!r}.")
        if type(part) is slice:
            chosen = range(*part.indices(shape[at]))
            sides.append(len(chosen))
            steps.append(strides[at] * chosen.step)
        elif isinstance(part, (bool, np.bool)) or not hasattr(part, "__index__"):
            raise IndexError(f"Without values only integers, slices, ... and None can be indices; got {part!r}.")
        elif not -shape[at] <= index(part) < shape[at]:
            raise IndexError(f"Index {part} is out of bounds for axis {at} of length {shape[at]}.")
        at += 1
    return (*sides, *shape[at:]), (*steps, *strides[at:])


def restrided(shape: Shape, strides: Shape, wanted: Shape, itemsize: int) -> Shape | None:
    """The strides with which ``wanted`` is a view, or None if no strides will do.

    Axes that lie evenly in memory make one run; the new axes must cut up runs, and span none.
    """
    if 0 in wanted:
        return contiguous(wanted, itemsize)
    runs: list[tuple[int, int]] = []
    for side, stride in zip(shape, strides, strict=True):
        if runs and runs[-1][1] == side * stride:
            runs[-1] = runs[-1][0] * side, stride
        elif side != 1:
            runs.append((side, stride))
    result = []
    left, step = 1, itemsize
    for side in reversed(wanted):
        if side != 1 and left == 1:
            left, step = runs.pop()
        if left % side:
            return None
        result.append(step)
        left, step = left // side, step * side
    return tuple(reversed(result))


def broadcast(*shapes: Shape) -> Shape:
    """The shape that all of these stretch to."""
    ndim = max(map(len, shapes))
    result = []
    for sides in zip(*((1,) * (ndim - len(shape)) + shape for shape in shapes), strict=True):
        wide = set(sides) - {1}
        if len(wide) > 1:
            raise ValueError(f"Operands could not be broadcast together with shapes {' '.join(map(str, shapes))}.")
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def fits(given: Shape, target: Shape) -> None:
    """Refuse what does not broadcast to ``target``, or would have to stretch it."""
    if broadcast(given, target) != target:
        raise ValueError(f"Could not broadcast from shape {given} into shape {target}.")


def assigned(given: Shape, target: Shape) -> None:
    """Refuse what cannot be written to ``target``: leading axes of length 1 are one too many without harm."""
    while len(given) > len(target) and given[0] == 1:
        given = given[1:]
    fits(given, target)


def reduced(shape: Shape, axis: Any, keepdims: bool) -> Shape:
    """What is left of a shape without the reduced axes: all for None."""
    if axis is None or (not shape and axis in (0, -1)):  # a scalar may be reduced over its one missing axis
        axis = tuple(range(len(shape)))
    axes = normalize_axis_tuple(axis, len(shape))
    if keepdims:
        return tuple(1 if at in axes else side for at, side in enumerate(shape))
    return tuple(side for at, side in enumerate(shape) if at not in axes)


def described(x: Any) -> tuple[Shape, Any]:
    """Shape and dtype of an operand; of a Python number, which takes the dtype of what it meets, its type."""
    return ((), type(x)) if type(x) in (int, float, complex) else (np.shape(x), np.asarray(x).dtype)


def _sample(kind: Any, *shape: int) -> Any:
    return np.ones(shape, kind) if isinstance(kind, np.dtype) else kind(1)


@_answers
def call(ufunc: np.ufunc, options: Options, *operands: tuple[Shape, Any]) -> tuple[Shape, DType]:
    """What a call makes of these operands, of which the last may be the output; ValueError or TypeError if nothing."""
    if ufunc.nout > 1 or (ufunc.signature is not None and ufunc is not np.matmul):
        raise TypeError(f"{ufunc.__name__} is not known for arrays without values.")
    shapes = [shape for shape, _ in operands]
    shape, fixed = _matmul(*shapes[:2]) if ufunc is np.matmul else (broadcast(*shapes[: ufunc.nin]), 0)
    if len(operands) > ufunc.nin:
        fits(shape, shapes[-1])
        if shape[len(shape) - fixed :] != shapes[-1][len(shapes[-1]) - fixed :]:
            raise ValueError(f"{ufunc.__name__}: an output of shape {shapes[-1]} cannot take a result of {shape}.")
    samples = [_sample(kind, 0, 0) for _, kind in operands]
    return shape, ufunc(*samples[: ufunc.nin], out=tuple(samples[ufunc.nin :]) or None, **dict(options)).dtype


def _matmul(a: Shape, b: Shape) -> tuple[Shape, int]:
    """The shape of a product, and how many of its axes are the matrices' own."""
    if not a or not b or a[-1] != b[-2:][0]:
        raise ValueError(
            f"matmul: the last axis of the first operand, of shape {a}, must be as long as the one before "
            f"the last of the second, of shape {b}."
        )
    own = a[-2:-1] + (b[-1:] if len(b) > 1 else ())
    return broadcast(a[:-2], b[:-2]) + own, len(own)


@_answers
def reduce(ufunc: np.ufunc, options: Options, array: tuple[Shape, Any], *out: tuple[Shape, Any]) -> tuple[Shape, DType]:
    """What a reduction makes of an array, given an output or none."""
    how = dict(options)
    shape = reduced(array[0], how.pop("axis", 0), how.pop("keepdims", False))
    if out and out[0][0] != shape:
        raise ValueError(f"{ufunc.__name__}.reduce: an output of shape {out[0][0]} cannot take a result of {shape}.")
    target = _sample(out[0][1]) if out else None
    return shape, ufunc.reduce(_sample(array[1], 1), out=target, **how).dtype


@_answers
def cast(kind: Any, into: DType, casting: Any) -> None:
    """Refuse a cast with TypeError if the rule ``casting`` does."""
    np.copyto(_sample(into), _sample(kind), casting=casting)


@_answers
def mean_dtype(kind: DType, dtype: Any) -> DType:
    """The dtype of a mean of elements of ``kind``, ``dtype`` if that is given."""
    mean: DType = np.mean(_sample(kind, 1), dtype=dtype).dtype
    return mean


@_answers
def joint_dtype(*kinds: DType) -> DType:
    """The dtype of an array that is put together from arrays of these."""
    return np.concatenate([_sample(kind, 0) for kind in kinds]).dtype
