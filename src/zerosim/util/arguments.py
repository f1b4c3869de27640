"""Refusing what cannot be used, in words: the call, the rule, the value received, and what to do.

Owns the wording of these errors and the layout of a batch. Must not know schemes, ledgers or rings.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

import numpy as np

from zerosim.bands import Array
from zerosim.util import sizes

T = TypeVar("T")


def installed(call: str, *packages: str, extra: str, otherwise: str = "") -> None:
    """Refuse what needs packages that are not installed. ModuleNotFoundError, with what installs them.

    ``otherwise`` is what can be done without.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        instead = f", or {otherwise}" if otherwise else ""
        raise ModuleNotFoundError(f"{call} needs {' and '.join(missing)}; pip install 'zerosim[{extra}]'{instead}.")


def one_of(call: str, option: str, value: object, known: Collection[str]) -> None:
    """Refuse a value that is not among ``known``, naming them."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{call}({option}): {option} is one of {', '.join(known)}; got {value!r}.")


def instance_of(call: str, option: str, value: object, kind: type | UnionType, instead: str = "") -> None:
    """Refuse a value of another type; ``instead`` says what to pass."""
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", str(kind))
        raise TypeError(f"{call}({option}): {option} must be of type {name}; got {value!r}.{instead and ' '}{instead}")


A_MODEL = (
    "Pass zs.MLP(sizes), or what zerosim.torch_models.model.from_torch(module, batch, loss) makes of a "
    "torch.nn.Module; zs.compare and zs.dry take the module itself."
)


def real(value: object) -> float:
    """The value as Python's float, NumPy's numbers too; NaN for what is no number, or has no float."""
    try:
        return float(value) if isinstance(value, (int, float, np.integer, np.floating)) else math.nan
    except OverflowError:
        return math.nan


def positive(call: str, option: str, value: object, otherwise: str = "") -> float:
    """The value as Python's float. Anything but a positive, finite number is refused; ``otherwise`` is what else is."""
    if not 0 < (number := real(value)) < math.inf or value is True:
        raise ValueError(f"{call}({option}): a positive, finite number is needed{otherwise}; got {value!r}.")
    return number


def not_negative(call: str, option: str, value: object) -> None:
    """Refuse what is no finite number of 0 or more."""
    if not 0 <= real(value) < math.inf:
        raise ValueError(f"{call}({option}): a finite number of 0 or more is needed; got {value!r}.")


def pattern(call: str, option: str, value: str) -> None:
    """Refuse what is no regular expression."""
    instance_of(call, option, value, str)
    try:
        re.compile(value)
    except re.error as error:
        said = f"{call}({option}): a regular expression is needed; got {value!r}: {error}."
        raise ValueError(said) from error


def all_of(call: str, option: str, values: Sequence[T], kind: type[T]) -> tuple[T, ...]:
    """The values as a tuple. TypeError if that is not what they are, or if one is of another type."""
    if not isinstance(values, (tuple, list)) or not all(isinstance(each, kind) for each in values):
        raise TypeError(f"{call}({option}): a tuple of {kind.__name__} is needed; got {values!r}.")
    return tuple(values)


def ending(call: str, option: str, path: Path, what: str, known: str) -> None:
    """Refuse a file whose name promises something else than what is written to it."""
    if path.suffix.lower() != known:
        raise ValueError(f"{call}({option}): the name of {what} ends in {known}; got {path.name!r}.")


def integer(call: str, option: str, value: object, least: int = 1) -> int:
    """The value as Python's int, since NumPy's overflow. Anything else is refused, True and less than ``least`` too."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{call}({option}): {option} must be an integer of {least} or more; got {value!r}.")
    if value < least:
        raise ValueError(f"{call}({option}): {option} must be an integer of {least} or more; got {value!r}.")
    return int(value)


def as_array(value: Any) -> Any:
    """A torch tensor as an array on the same memory, where it is on the CPU; anything else as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def divides(call: str, option: str, parts: int, rows: int) -> None:
    """Refuse a batch whose rows cannot be cut into equal micro-batches."""
    if rows % parts:
        raise ValueError(
            f"{call}: {option}={parts} cuts a rank's rows into as many equal micro-batches; {rows} rows cannot be. "
            f"Pass a multiple of {parts} rows."
        )


def check_batch(batch: Sequence[tuple[Array, Array]], ranks: int, width_in: int, width_out: int) -> tuple[Array, Array]:
    """The batch as x [ranks, B, width_in] and y [ranks, B, width_out], once it is known to be sound.

    A batch is one (x, y) of finite float32 per rank, arrays or tensors, with the same number of rows B everywhere.
    """
    if not _sound(batch, ranks, width_in, width_out):
        if isinstance(batch, Sequence):
            batch = [
                (as_array(pair[0]), as_array(pair[1])) if isinstance(pair, (tuple, list)) and len(pair) == 2 else pair
                for pair in batch
            ]
        check_layout(batch, ranks, width_in, width_out)
    widths = enumerate((width_in, width_out))
    x, y = (np.concatenate([pair[index] for pair in batch]).reshape(ranks, -1, width) for index, width in widths)
    for what, whole in (("x", x), ("y", y)):
        if not np.isfinite(whole).all():
            rank = int(np.isfinite(whole).all(axis=(1, 2)).argmin())
            raise ValueError(
                f"step(batch): {what} of rank {rank} contains NaN or infinity; remove or replace them before training."
            )
    return x, y


def _sound(batch: Any, ranks: int, width_in: int, width_out: int) -> bool:
    """Whether a batch is as ``check_layout`` wants it, by a look that does not find out what is wrong with it."""
    if type(batch) is not list or len(batch) != ranks:
        return False
    try:
        kinds = {
            (type(pair), type(x), type(y), x.dtype, y.dtype, x.shape, y.shape) for pair in batch for x, y in [pair]
        }
    except (AttributeError, TypeError, ValueError):
        return False
    rows, array = next(iter(batch[0][0].shape), 0), np.ndarray
    return rows > 0 and kinds == {(tuple, array, array, _FP32, _FP32, (rows, width_in), (rows, width_out))}


_FP32 = np.dtype(np.float32)


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
            counts = {getattr(each, "shape", ())[:1] for each in pair}
            instead = PASS_UNEVEN if rank and what == "x" and len(counts) == 1 else ""
            _check_array(f"step(batch): {what} of rank {rank}", pair[index], rows, width, instead)


def unmasked(where: str, array: object) -> None:
    """Refuse a masked array, whose mask nothing would look at."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{where} is a masked array, and its mask would be ignored. Pass an array, filled as it should be."
        )


PASS_UNEVEN = " Pass as many, or uneven=True."  # which is for ranks whose numbers of rows differ, not for a pair's


def _check_array(where: str, array: Array, rows: int, width: int, instead: str) -> None:
    unmasked(where, array)
    if getattr(array, "dtype", None) != np.float32:
        got = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{where} must be a float32 array; got {got}. Convert it with .astype(np.float32).")
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"{where} must have shape (rows, {width}); got {array.shape}.")
    if array.shape[0] == 0:
        raise ValueError(f"{where} has no rows. Every rank needs the same number of rows, at least 1.")
    if array.shape[0] != rows:
        raise ValueError(
            f"{where} has {array.shape[0]} rows and x of rank 0 has {rows}. Every rank needs the same number, or the "
            f"average over ranks would not be the average over rows.{instead}"
        )


def check_memory(call: str, need: int, alternatives: Iterable[tuple[str, int]]) -> None:
    """Refuse what would need more bytes than the machine has free, naming those of ``alternatives`` that fit.

    They are looked at for a refusal alone, so a generator costs nothing where there is room.

    Where the system does not say what is free, nothing is refused.
    """
    import psutil  # only here, as nothing else of the core needs it

    try:
        free = psutil.virtual_memory().available
    except OSError:  # where there is no /proc nobody knows
        return
    if need <= free:
        return
    fitting = [f"{name} ({sizes.text(nbytes)})" for name, nbytes in alternatives if nbytes <= free]
    advice = (
        f"These would fit: {', '.join(fitting[:4])}" if fitting else "Use far fewer ranks or rows, or a smaller model"
    )
    raise MemoryError(
        f"{call} would take {sizes.text(need)} in this process, and {sizes.text(free)} are free. {advice}."
    )
