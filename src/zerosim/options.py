"""What a caller may pass, checked before anything is allocated or changed.

Owns the rules for options and batches and the words of their errors: the call, the rule, the
value received, and what to do. Must not know schemes, ledgers or rings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import UnionType
from typing import Any

import numpy as np
import psutil

from zerosim.bands import PRECISIONS, WIRES, Array, Band

GATHERS = BUCKETS = ("layer", "model")


def one_of(call: str, option: str, value: object, known: Collection[str]) -> None:
    """Refuse a value that is not among ``known``, naming them."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{call}({option}): {option} is one of {', '.join(known)}; got {value!r}.")


def instance_of(call: str, option: str, value: object, kind: type | UnionType) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", str(kind))
        raise TypeError(f"{call}({option}): {option} must be of type {name}; got {value!r}.")


def positive_int(call: str, option: str, value: object) -> None:
    """Refuse anything but an integer of at least 1 (True is not one)."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{call}({option}): {option} must be a positive integer; got {value!r}. Pass 1 or more.")
    if value < 1:
        raise ValueError(f"{call}({option}): {option} must be a positive integer; got {value!r}. Pass 1 or more.")


def check_options(
    ranks: Any,
    *,
    precision: Any,
    wire: Any,
    gather: Any,
    bucket: Any,
    capacity: Any,
    wire_params: Any = None,
    prefetch: Any = 0,
    accumulate: Any = 1,
    all_reduce: Any = False,
    checkpoint: Any = False,
) -> None:
    """The options of a Scheme, one by one and together."""
    positive_int("Scheme", "ranks", ranks)
    one_of("Scheme", "precision", precision, PRECISIONS)
    one_of("Scheme", "wire", wire, WIRES)
    one_of("Scheme", "gather", gather, GATHERS)
    if isinstance(bucket, str):
        one_of("Scheme", "bucket", bucket, BUCKETS)
    else:
        positive_int("Scheme", "bucket", bucket)
    if capacity is not None:
        positive_int("Scheme", "capacity", capacity)
    positive_int("Scheme", "accumulate", accumulate)
    if prefetch != 0 or isinstance(prefetch, bool):
        positive_int("Scheme", "prefetch", prefetch)
    for option, value in (("all_reduce", all_reduce), ("checkpoint", checkpoint)):
        instance_of("Scheme", option, value, bool)
    row = PRECISIONS[precision]
    grads = row.dtypes(WIRES[wire])[Band.UNREDUCED]
    if wire_params is None:
        wire_params = wire
    else:
        one_of("Scheme", "wire_params", wire_params, WIRES)
    for option, given, carried in (("wire", wire, grads), ("wire_params", wire_params, row.working)):
        if given != "fp32" and WIRES[given] != carried:
            option = "wire" if given == wire else option
            raise ValueError(
                f"Scheme({option}): the wire must carry the working copy exactly, or the gathered copies would differ "
                f"from their owners' and the stages from each other; {given} does not carry precision={precision!r} "
                f"({carried}). Use {option}='fp32'{', or the dtype of the working copy' * (carried != 'float32')}."
            )


def divides(call: str, option: str, parts: int, rows: int) -> None:
    """Refuse a batch whose rows cannot be cut into equal micro-batches."""
    if rows % parts:
        raise ValueError(
            f"{call}: {option}={parts} cuts a rank's rows into as many equal micro-batches; {rows} rows cannot be. "
            f"Pass a multiple of {parts} rows."
        )


def check_batch(batch: Sequence[tuple[Array, Array]], ranks: int, width_in: int, width_out: int) -> tuple[Array, Array]:
    """The batch as x [ranks, B, width_in] and y [ranks, B, width_out], once it is known to be sound.

    A batch is one (x, y) of finite float32 per rank, with the same number of rows B everywhere.
    """
    check_layout(batch, ranks, width_in, width_out)
    x, y = (np.stack([pair[index] for pair in batch]) for index in (0, 1))
    for what, whole in (("x", x), ("y", y)):
        if not np.isfinite(whole).all():
            rank = int(np.isfinite(whole).all(axis=(1, 2)).argmin())
            raise ValueError(
                f"step(batch): {what} of rank {rank} contains NaN or infinity; remove or replace them before training."
            )
    return x, y


def check_layout(batch: Sequence[tuple[Array, Array]], ranks: int, width_in: int, width_out: int) -> None:
    """Refuse a batch that is not one (x [B, width_in], y [B, width_out]) of float32 per rank, B the same everywhere."""
    if not isinstance(batch, Sequence) or len(batch) != ranks:
        got = len(batch) if isinstance(batch, Sequence) else type(batch).__name__
        raise ValueError(f"step(batch): needs one (x, y) pair per rank, {ranks} in all; got {got}.")
    for rank, pair in enumerate(batch):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            got = type(pair).__name__ + (f" of {len(pair)}" if isinstance(pair, (tuple, list)) else "")
            raise ValueError(f"step(batch): rank {rank} needs a pair (x, y); got {got}.")
    rows = next(iter(getattr(batch[0][0], "shape", ())), 0)
    for index, (what, width) in enumerate((("x", width_in), ("y", width_out))):
        for rank, pair in enumerate(batch):
            _check_array(f"step(batch): {what} of rank {rank}", pair[index], rows, width)


def _check_array(where: str, array: Array, rows: int, width: int) -> None:
    if getattr(array, "dtype", None) != np.float32:
        got = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{where} must be a float32 array; got {got}. Convert it with .astype(np.float32).")
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"{where} must have shape (rows, {width}); got {array.shape}.")
    if array.shape[0] != rows or rows == 0:
        raise ValueError(
            f"{where} has {array.shape[0]} rows and x of rank 0 has {rows}; every rank needs the same number, at "
            f"least 1, or the average over ranks would not be the average over rows."
        )


def check_memory(call: str, need: int, alternatives: Mapping[str, int]) -> None:
    """Refuse what would need more bytes than the machine has free, naming those of ``alternatives`` that fit."""
    free = psutil.virtual_memory().available
    if need <= free:
        return
    fitting = [f"{name} ({size(nbytes)})" for name, nbytes in alternatives.items() if nbytes <= free]
    advice = f"These would fit: {', '.join(fitting[:4])}" if fitting else "Use far fewer ranks or a smaller model"
    raise MemoryError(f"{call} would take {size(need)} in this process, and {size(free)} are free. {advice}.")


def size(nbytes: int) -> str:
    """Bytes for a reader, in powers of ten."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}"
