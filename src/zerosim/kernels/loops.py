"""The loops that numba compiles, in the arithmetic of the formulas' NumPy, bit for bit.

Owns the loops, and how 16-bit numbers are read and written in them. Must not know rings, bands or ledgers.
Imports numba, so only ``compiled.py`` imports it, when there is something to compute.

A loop is a plain function until ``find`` is asked for it, for arrays of some dtypes. fp16 comes as ``uint16`` and
bfloat16 as ``int16``, as numba knows neither: the integer type says what the bits are. ``get`` reads a number
of any of them as fp32, and ``put`` rounds it to what is kept there, to nearest even. Without ``fastmath``
nothing is reordered or contracted: every element goes through the operations of the formula in their order.
The last axis of every array must be contiguous; ``row`` points to the first element of one row of it.

All in one file: numba sees by its time alone whether what it has kept of a loop is out of date.
"""

import platform
from collections.abc import Callable
from functools import cache
from typing import Any, no_type_check

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

HALF, BRAIN, SINGLE, COUNT = types.uint16, types.int16, types.float32, types.int64
WORD = ir.IntType(32)
AHEAD = 8  # hops that a rank's summand is asked for before it is added: with many ranks each is a line far away

# -- numbers, in LLVM's words: build is its IRBuilder


@no_type_check
def _widened(build, value, kind):
    if kind == HALF:
        return build.fpext(build.bitcast(value, ir.HalfType()), ir.FloatType())
    if kind == BRAIN:  # the upper half of an fp32
        return build.bitcast(build.shl(build.zext(value, WORD), WORD(16)), ir.FloatType())
    return value


@no_type_check
def _narrowed(build, value, kind):
    if kind == HALF:
        return build.bitcast(build.fptrunc(value, ir.HalfType()), ir.IntType(16))
    if kind == BRAIN:  # half a unit is added, less one bit where the last is even; NaN is one of each sign
        word = build.bitcast(value, WORD)
        upper = build.lshr(word, WORD(16))
        rounded = build.lshr(build.add(word, build.add(build.and_(upper, WORD(1)), WORD(0x7FFF))), WORD(16))
        nan = build.or_(build.and_(upper, WORD(0x8000)), WORD(0x7FC0))
        return build.trunc(build.select(_is_nan(build, value), nan, rounded), ir.IntType(16))
    return value


@no_type_check
def _is_nan(build, value):
    return build.fcmp_unordered("uno", value, value)


@no_type_check
def _load(build, arguments):
    return build.load(build.gep(arguments[0], [arguments[1]]))


@no_type_check
def _store(build, arguments, value):
    build.store(value, build.gep(arguments[0], [arguments[1]]))


@intrinsic
@no_type_check
def row(context, array, index):
    """Point to the first element of ``array[index]``, whose index names all axes but the last."""

    def generate(context, build, signature, arguments):
        found = context.make_array(signature.args[0])(context, build, arguments[0])
        numbers, strides = cgutils.unpack_tuple(build, arguments[1]), cgutils.unpack_tuple(build, found.strides)
        place = ir.Constant(ir.IntType(64), 0)
        for number, stride in zip(numbers, strides[:-1], strict=True):
            place = build.add(place, build.mul(number, stride))
        start = build.gep(build.bitcast(found.data, ir.IntType(8).as_pointer()), [place])
        return build.bitcast(start, context.get_value_type(signature.return_type))

    return types.CPointer(array.dtype)(array, index), generate


@intrinsic
@no_type_check
def get(context, start, place):
    """The number at ``place`` of a row, as fp32."""

    def generate(context, build, signature, arguments):
        return _widened(build, _load(build, arguments), start.dtype)

    return SINGLE(start, place), generate


@intrinsic
@no_type_check
def put(context, start, place, value):
    """Write an fp32 at ``place`` of a row, rounded to what is kept there."""

    def generate(context, build, signature, arguments):
        _store(build, arguments, _narrowed(build, arguments[2], start.dtype))
        return context.get_dummy_value()

    return types.void(start, place, SINGLE), generate


@intrinsic
@no_type_check
def get_with_nan(context, start, place):
    """As ``get``, from halves, but a NaN keeps all its bits: a signalling one stays so."""

    def generate(context, build, signature, arguments):
        value = _load(build, arguments)
        bits = build.zext(value, WORD)
        sign = build.shl(build.and_(bits, WORD(0x8000)), WORD(16))
        kept = build.or_(build.or_(sign, WORD(0x7F800000)), build.shl(build.and_(bits, WORD(0x3FF)), WORD(13)))
        nan = build.icmp_unsigned(">", build.and_(bits, WORD(0x7FFF)), WORD(0x7C00))
        return build.select(nan, build.bitcast(kept, ir.FloatType()), _widened(build, value, HALF))

    return SINGLE(start, place), generate


@intrinsic
@no_type_check
def put_with_nan(context, start, place, value):
    """As ``put``, to halves, but a NaN keeps its upper bits, or one if they are none."""

    def generate(context, build, signature, arguments):
        bits = build.bitcast(arguments[2], WORD)
        upper = build.and_(build.lshr(bits, WORD(13)), WORD(0x3FF))
        some = build.select(build.icmp_unsigned("==", upper, WORD(0)), WORD(1), upper)
        kept = build.or_(build.and_(build.lshr(bits, WORD(16)), WORD(0x8000)), build.or_(some, WORD(0x7C00)))
        half = build.trunc(kept, ir.IntType(16)), _narrowed(build, arguments[2], HALF)
        _store(build, arguments, build.select(_is_nan(build, arguments[2]), *half))
        return context.get_dummy_value()

    return types.void(start, place, SINGLE), generate


@intrinsic
@no_type_check
def rounded(context, value, like):
    """An fp32 as it is after it was kept in a row such as ``like``."""

    def generate(context, build, signature, arguments):
        return _widened(build, _narrowed(build, arguments[0], like.dtype), like.dtype)

    return SINGLE(SINGLE, like), generate


@intrinsic
@no_type_check
def prefetch(context, start, place):
    """Have the line with ``place`` of a row brought to the cache, as it is needed soon."""

    def generate(context, build, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), WORD, WORD, WORD])
        known = cgutils.get_or_insert_function(build.module, kind, "llvm.prefetch.p0i8")
        line = build.bitcast(build.gep(arguments[0], [arguments[1]]), ir.IntType(8).as_pointer())
        build.call(known, [line, WORD(0), WORD(3), WORD(1)])
        return context.get_dummy_value()

    return types.void(start, place), generate


@intrinsic
@no_type_check
def move(context, target, source, count):
    """Copy so many elements of one row to another of the same kind."""

    def generate(context, build, signature, arguments):
        size = context.get_abi_sizeof(context.get_data_type(target.dtype))
        cgutils.raw_memcpy(build, arguments[0], arguments[1], arguments[2], size)
        return context.get_dummy_value()

    return types.void(target, source, count), generate


@intrinsic
@no_type_check
def count(context, tally, place, more):
    """Add ``more`` to the integer at ``place`` of a row."""

    def generate(context, build, signature, arguments):
        _store(build, arguments, build.add(_load(build, arguments), arguments[2]))
        return context.get_dummy_value()

    return types.void(tally, place, COUNT), generate


# -- the loops


@no_type_check
def convert(source, target):
    """Cast [a, b, n]."""
    for a in range(source.shape[0]):
        for b in range(source.shape[1]):
            read, written = row(source, (a, b)), row(target, (a, b))
            for i in range(source.shape[2]):
                put(written, i, get(read, i))


@no_type_check
def widen_with_nan(source, target):
    """Cast halves [a, b, n] to fp32 as NumPy does without the processor's instruction."""
    for a in range(source.shape[0]):
        for b in range(source.shape[1]):
            read, written = row(source, (a, b)), row(target, (a, b))
            for i in range(source.shape[2]):
                put(written, i, get_with_nan(read, i))


@no_type_check
def narrow_with_nan(source, target):
    """Cast fp32 [a, b, n] to halves as NumPy does without the processor's instruction."""
    for a in range(source.shape[0]):
        for b in range(source.shape[1]):
            read, written = row(source, (a, b)), row(target, (a, b))
            for i in range(source.shape[2]):
                put_with_nan(written, i, get(read, i))


@no_type_check
def adam(params, grads, exp_avg, exp_avg_sq, rest1, beta2, rest2, root_correction, eps, step, kept):
    """Adam on [a, b, n]: the operations of ``optimizer.Adam``; ``step`` is minus the step size."""
    for a in range(params.shape[0]):
        for b in range(params.shape[1]):
            p, g = row(params, (a, b)), row(grads, (a, b))
            m, v = row(exp_avg, (a, b)), row(exp_avg_sq, (a, b))
            for i in range(params.shape[2]):
                grad, first = get(g, i), get(m, i)
                first = first + (grad - first) * rest1
                second = get(v, i) * beta2 + grad * rest2 * grad
                put(m, i, first)
                put(v, i, second)
                put(p, i, get(p, i) * kept + first * step / (np.sqrt(second) / root_correction + eps))


@no_type_check
def ring_sum(chunks, even, odd, padding, handed, first, last, together, length):
    """The hops of chunks ``first`` to ``last`` of a reduce-scatter, as ``operations.Kernels`` has it.

    ``together`` chunks, ``length`` elements of each at a time, go all the way round before the next do, so that
    partial sums stay in the cache: no chunk meets another on its way. Into ``even`` goes what has made an
    even number of hops, into ``odd`` the rest.
    """
    rings, n, size = chunks.shape[0], chunks.shape[1], chunks.shape[3]
    for ring in range(rings):
        for lowest in range(first, last, together):
            highest = min(lowest + together, last)
            for start in range(0, size, length):
                stop = min(start + length, size)
                nbytes = (stop - start) * even.itemsize
                for chunk in range(lowest, highest):
                    mine, total = row(chunks, (ring, chunk - 1 if chunk else n - 1, chunk)), row(even, (ring, chunk))
                    for i in range(start, stop):
                        put(total, i, rounded(get(mine, i), total))
                for hop in range(1, n):
                    for chunk in range(lowest, highest):
                        # The rank above hands on the partial sum to the one below, which adds its own.
                        above = chunk - hop if chunk >= hop else chunk - hop + n
                        below = above - 1 if above else n - 1
                        mine = row(chunks, (ring, below, chunk))
                        prefetch(row(chunks, (ring, below - AHEAD if below >= AHEAD else 0, chunk)), start)
                        if hop % 2:
                            arrived, total = row(even, (ring, chunk)), row(odd, (ring, chunk))
                        else:
                            arrived, total = row(odd, (ring, chunk)), row(even, (ring, chunk))
                        for i in range(start, stop):
                            put(total, i, get(arrived, i) + rounded(get(mine, i), total))
                        sender = row(handed, (ring, above))
                        count(sender, 1, nbytes)
                        count(row(handed, (ring, below)), 2, nbytes)
                        if stop == size:
                            count(sender, 0, 1)
                            count(sender, 3, padding[ring, chunk])


@no_type_check
def ring_copies(block, chunks, itemsize, padding, handed, first, last):
    """The hops of an all-gather that end at ranks ``first`` to ``last``, as ``operations.Kernels`` has it.

    What is in a block does not change on its way, so the blocks that a rank is handed are written together when all
    have come: those of the chunks above its own, which are first, and then those below.
    """
    rings, n, size = chunks.shape[0], chunks.shape[1], chunks.shape[3]
    nbytes = size * itemsize
    for ring in range(rings):
        for rank in range(first, last):
            blocks = sent = beyond = 0
            for hop in range(1, n):
                blocks += 1
                sent += nbytes
                beyond += padding[ring, rank + hop if rank + hop < n else rank + hop - n]
            sender = row(handed, (ring, rank + 1 if rank + 1 < n else 0))
            count(sender, 0, blocks)
            count(sender, 1, sent)
            count(row(handed, (ring, rank)), 2, sent)
            count(sender, 3, beyond)
            if rank + 1 < n:
                move(row(chunks, (ring, rank, rank + 1)), row(block, (ring, rank + 1)), (n - 1 - rank) * size)
            if rank:
                move(row(chunks, (ring, rank, 0)), row(block, (ring, 0)), rank * size)


# -- compiling


@no_type_check
def _array(kind, ndim, *, written=False):
    """The type of an array of any strides; one that is only read may be read-only."""
    return types.Array(kind, ndim, "A", readonly=not written)


@no_type_check
def _cast(source, target):
    return _array(source, 3), _array(target, 3, written=True)


_OWN = _array(SINGLE, 3, written=True)  # parameters and moments
_RING = (_array(COUNT, 2), _array(COUNT, 3, written=True), COUNT, COUNT)  # padding, handed, first and last

# By name: the loop, and the types of its arguments, given those of the arrays that may be of several.
LOOPS: dict[str, tuple[Callable[..., None], Callable[..., tuple[Any, ...]]]] = {
    "convert": (convert, _cast),
    "widen_with_nan": (widen_with_nan, _cast),
    "narrow_with_nan": (narrow_with_nan, _cast),
    "adam": (adam, lambda grads: (_OWN, _array(grads, 3), _OWN, _OWN, *[SINGLE] * 7)),
    "ring_sum": (
        ring_sum,
        lambda chunks, wire: (_array(chunks, 4), *[_array(wire, 3, written=True)] * 2, *_RING, COUNT, COUNT),
    ),
    "ring_copies": (ring_copies, lambda kind: (_array(kind, 3), _array(kind, 4, written=True), COUNT, *_RING)),
}


@cache
def find(name: str, dtypes: tuple[Any, ...]) -> Callable[..., None] | None:
    """The loop of that name for arrays of these dtypes, compiled, or loaded from where it was kept when it was.

    None for a dtype that the loops do not know, or that this processor does not convert by itself, and for casts
    that are left to NumPy: within one dtype, and between the 16-bit ones.
    """
    known = {np.dtype(np.float32): SINGLE, np.dtype(np.uint16): HALF, np.dtype(np.int16): BRAIN}
    kinds = [known.get(dtype) for dtype in dtypes]
    if None in kinds or (HALF in kinds and not converts_halves()):
        return None
    if name == "convert":
        if kinds.count(SINGLE) != 1:
            return None
        if kinds[0] == HALF and not _quiets(np.uint16(0x7C01).view(np.float16), np.float32, 0x400000):
            name = "widen_with_nan"
        elif kinds[1] == HALF and not _quiets(np.uint32(0x7F802000).view(np.float32), np.float16, 0x200):
            name = "narrow_with_nan"
    loop, arguments = LOOPS[name]
    signature = types.void(*arguments(*kinds))
    options: Any = {"nogil": True, "error_model": "numpy"}  # NumPy's divisions: Python's would not be vectorised
    try:
        made: Callable[..., None] = njit([signature], cache=True, **options)(loop)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = njit([signature], **options)(loop)  # there is no folder to keep it in
    return made


def converts_halves() -> bool:
    """Whether this processor casts between fp16 and fp32. If not, LLVM would call a routine that is not there."""
    return platform.machine() in ("arm64", "aarch64") or bool(binding.get_host_cpu_features().get("f16c"))


def _quiets(nan: Any, dtype: Any, quiet: int) -> bool:
    """Whether NumPy's cast to ``dtype`` makes a signalling NaN a ``quiet`` one: where it has the processor do it."""
    with np.errstate(all="ignore"):
        return bool(int(nan.astype(dtype).view(f"u{np.dtype(dtype).itemsize}")) & quiet)
