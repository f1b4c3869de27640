"""An array in all but its values.

Owns ``DryArray``, on which code written for NumPy's arrays runs unchanged and is told of the
same mistakes: whatever NumPy would do to the values is left undone. Knows NumPy, and nothing
of ranks, rings or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from operator import index
from typing import Any, SupportsIndex

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from zerosim.worlds import dry_rules as rules
from zerosim.worlds.dry_rules import Shape

_ALL = slice(None)
_ANSWERS: dict[str, Callable[..., Any]] = {"__call__": rules.call, "reduce": rules.reduce}


class DryArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A NumPy array without its values: shape, dtype, strides and whether it can be written.

    Operations check and return what NumPy's do: shapes that do not broadcast, casts that are
    refused and outputs that are read-only raise NumPy's kinds of errors, and a result has the
    dtype that NumPy would give it, wider or not. New arrays are in C order. What would need
    values raises TypeError, except that as a float it is NaN: a number that is not known.
    Sizes and bytes are Python integers, so they may pass 2**63.
    """

    __slots__ = ("_frozen", "described", "dtype", "nbytes", "shape", "strides", "writeable")

    def __init__(
        self, shape: Sequence[SupportsIndex], dtype: Any, strides: Shape | None = None, *, writeable: bool = True
    ) -> None:
        self.shape = sides = tuple(map(index, shape))  # Python's integers: NumPy's overflow
        if min(sides, default=0) < 0:
            raise ValueError(f"DryArray(shape): sides cannot be negative; got {shape}.")
        self.dtype, self.writeable = np.dtype(dtype), writeable
        self.described = sides, self.dtype  # all that most operations go by
        self.nbytes = prod(sides) * self.dtype.itemsize
        self.strides = rules.contiguous(sides, self.dtype.itemsize) if strides is None else strides
        self._frozen: DryArray | None = None

    def __repr__(self) -> str:
        return f"DryArray({self.shape}, {self.dtype})"

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements there are."""
        return prod(self.shape)

    @property
    def flags(self) -> _Flags:
        """``c_contiguous`` and ``writeable``."""
        return _Flags(self)

    # -- what would need values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError(f"{self!r} has no values to make an ordinary array of; keep it among its own kind.")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} has no values, so that nothing can be decided by them.")

    def __float__(self) -> float:
        if self.size != 1:
            raise TypeError(f"Only arrays of one element convert to a float; got {self!r}.")
        return float("nan")

    def tolist(self) -> Any:
        """Numbers that are not known, in lists of lists like ``np.ndarray.tolist``'s."""
        return [each.tolist() for each in self] if self.shape else float("nan")

    # -- views

    def _viewed(self, shape: Shape, strides: Shape, dtype: Any = None) -> DryArray:
        """Of a shape that is known to be sound, so that nothing is looked at again: most arrays are views."""
        view = DryArray.__new__(DryArray)
        view.shape, view.strides, view.writeable, view._frozen = shape, strides, self.writeable, None
        view.dtype = kind = self.dtype if dtype is None else np.dtype(dtype)
        view.described = shape, kind
        view.nbytes = self.nbytes if shape is self.shape else prod(shape) * kind.itemsize
        return view

    def frozen(self) -> DryArray:
        """A view of all of it that cannot be written: the same one at every call."""
        if self._frozen is None:
            self._frozen = self._viewed(self.shape, self.strides)
            self._frozen.writeable = False
        return self._frozen

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes.")
        return self.shape[0]

    def __iter__(self) -> Iterator[DryArray]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, key: Any) -> DryArray:
        if key is Ellipsis or (type(key) is slice and key == _ALL and self.shape):
            return self  # nobody can tell it from a view, and loops ask for it by the million
        return self._viewed(*rules.indexed(self.shape, self.strides, key if isinstance(key, tuple) else (key,)))

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        if not target.writeable:
            raise ValueError("Assignment destination is read-only.")
        given = value.shape if type(value) is DryArray else () if type(value) is int else np.shape(value)
        if given and given != target.shape:  # one number goes anywhere
            rules.assigned(given, target.shape)

    def view(self, dtype: Any = None) -> DryArray:
        """The same memory, read as ``dtype`` if that is given."""
        shape, strides, old = self.shape, self.strides, self.dtype.itemsize
        new = old if dtype is None else np.dtype(dtype).itemsize
        if old != new:
            if not shape or (strides[-1] != old and shape[-1] != 1 and self.size) or shape[-1] * old % new:
                raise ValueError(
                    f"To view {self!r} as {dtype}, its last axis must be contiguous and a multiple of {new} bytes."
                )
            shape, strides = (*shape[:-1], shape[-1] * old // new), (*strides[:-1], new)
        return self._viewed(shape, strides, dtype)

    def reshape(self, *shape: Any, copy: bool | None = None) -> DryArray:
        """A view, or where that cannot be a copy; ``copy`` True and False ask for the one and refuse the other."""
        given = shape[0] if len(shape) == 1 else shape
        wanted = tuple(map(index, given)) if isinstance(given, Sequence) else (index(given),)
        if wanted.count(-1) == 1 and (rest := -prod(wanted)) > 0:
            wanted = tuple(self.size // rest if side == -1 else side for side in wanted)
        if prod(wanted) != self.size or min(wanted, default=0) < 0:
            raise ValueError(f"Cannot reshape an array of shape {self.shape} into shape {given}.")
        strides = None if copy else rules.restrided(self.shape, self.strides, wanted, self.dtype.itemsize)
        if strides is None and copy is False:
            raise ValueError(f"Unable to avoid a copy of {self!r} with strides {self.strides} as shape {wanted}.")
        return DryArray(wanted, self.dtype) if strides is None else self._viewed(wanted, strides)

    def swapaxes(self, axis1: int, axis2: int) -> DryArray:
        """A view with two axes exchanged."""
        order = list(range(self.ndim))
        [a], [b] = normalize_axis_tuple(axis1, self.ndim), normalize_axis_tuple(axis2, self.ndim)
        order[a], order[b] = b, a
        return self._viewed(tuple(self.shape[axis] for axis in order), tuple(self.strides[axis] for axis in order))

    # -- new arrays

    def copy(self) -> DryArray:
        """A new array like this one."""
        return DryArray(self.shape, self.dtype)

    def astype(self, dtype: Any) -> DryArray:
        """A new array of this shape and another dtype."""
        return DryArray(self.shape, dtype)

    def sum(self, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> DryArray:
        """As ``np.sum``."""
        options = ("axis", axis), ("dtype", dtype), ("keepdims", keepdims)
        return DryArray(*rules.reduce(np.add, options, self.described))

    def mean(self, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> DryArray:
        """As ``np.mean``."""
        return DryArray(rules.reduced(self.shape, axis, keepdims), rules.mean_dtype(self.dtype, dtype))

    # -- NumPy's own functions

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Any, ...] = (), **options: Any
    ) -> Any:
        if method not in _ANSWERS or not options.keys() <= {"dtype", "casting", "axis", "keepdims"}:
            return NotImplemented
        operands = [x.described if type(x) is DryArray else rules.described(x) for x in inputs + out]
        shape, dtype = _ANSWERS[method](ufunc, tuple(options.items()), *operands)
        if not out:
            return DryArray(shape, dtype)
        [target] = out
        if type(target) is not DryArray:
            raise TypeError(f"{ufunc.__name__}: a result without values cannot be written to {type(target).__name__}.")
        if not target.writeable:
            raise ValueError(f"{ufunc.__name__}: output array is read-only.")
        return target

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        answer = _FUNCTIONS.get(function)
        return NotImplemented if answer is None else answer(*args, **kwargs)


class _Flags:
    """What ``flags`` of an array says of its memory."""

    def __init__(self, array: DryArray) -> None:
        self._array = array

    @property
    def c_contiguous(self) -> bool:
        array = self._array
        plain = rules.contiguous(array.shape, array.dtype.itemsize)
        sides = zip(array.shape, array.strides, plain, strict=True)
        return 0 in array.shape or all(side == 1 or step == wanted for side, step, wanted in sides)

    @property
    def writeable(self) -> bool:
        return self._array.writeable

    @writeable.setter
    def writeable(self, value: bool) -> None:
        self._array.writeable = value


def _empty_like(prototype: Any, dtype: Any = None, *, shape: Any = None) -> DryArray:
    sides = prototype.shape if shape is None else shape if isinstance(shape, Sequence) else (shape,)
    return DryArray(sides, prototype.dtype if dtype is None else dtype)


def _copyto(dst: Any, src: Any, casting: Any = "same_kind") -> None:
    shape, kind = (src.shape, src.dtype) if type(src) is DryArray else rules.described(src)
    if type(dst) is not DryArray:
        raise TypeError(f"copyto: {src!r} has no values to copy to {type(dst).__name__}.")
    if not dst.writeable:
        raise ValueError("copyto: the destination is read-only.")
    rules.cast(kind, dst.dtype, casting)
    if shape != dst.shape:
        rules.assigned(shape, dst.shape)


def _concatenate(arrays: Sequence[Any], axis: int = 0) -> DryArray:
    [at] = normalize_axis_tuple(axis, arrays[0].ndim)
    shapes = [array.shape for array in arrays]
    if len({(len(shape), shape[:at], shape[at + 1 :]) for shape in shapes}) > 1:
        raise ValueError(f"concatenate: all sides but axis {axis} must be equal; got shapes {shapes}.")
    total = sum(shape[at] for shape in shapes)
    return DryArray(
        (*shapes[0][:at], total, *shapes[0][at + 1 :]), rules.joint_dtype(*(array.dtype for array in arrays))
    )


def _stack(arrays: Sequence[Any], axis: int = 0) -> DryArray:
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"stack: all arrays must have the same shape; got {[array.shape for array in arrays]}.")
    [at] = normalize_axis_tuple(axis, arrays[0].ndim + 1)
    shape = arrays[0].shape
    return DryArray((*shape[:at], len(arrays), *shape[at:]), rules.joint_dtype(*(array.dtype for array in arrays)))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.concatenate: _concatenate,
    np.copyto: _copyto,
    np.empty_like: _empty_like,
    np.mean: DryArray.mean,
    np.reshape: DryArray.reshape,
    np.stack: _stack,
    np.sum: DryArray.sum,
    np.swapaxes: DryArray.swapaxes,
    np.zeros_like: _empty_like,
}
