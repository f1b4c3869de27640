"""A checkpoint's files: the index and one safetensors file per rank, whole or not at all.

Owns the format, its digests, and how an older checkpoint stays until a newer one is complete: files have
names of their own, and replacing the index is what makes them count. Must not know schemes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from zerosim.bands import Array, DType
from zerosim.records.files import Record, ResultsError, encoded, read, write_whole
from zerosim.stages import Stage

SCHEMA = "zerosim.checkpoint/1"
INDEX, WRITING = "index.json", ".writing"
# The dtypes of states and buffers, by what safetensors calls them.
DTYPES: dict[str, DType] = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}  # fmt: skip


class CheckpointError(ValueError):
    """A folder that holds no whole, sound checkpoint that can be loaded here, and why."""


class BucketRecord(Record):
    """One flat buffer: its parameters' names, shapes and updates so far, and to how many elements it is padded.

    ``dtype`` is that of a group of buffers, by NumPy's name for it, and None for parameters.
    """

    name: str
    role: str
    dtype: str | None
    names: list[str]
    shapes: list[list[int]]
    updates: list[int]
    padded: int


class FileRecord(Record):
    """One rank's file: its name in the folder, its SHA-256 and size, and which piece of which bucket's state it has.

    ``pieces`` has [bucket, band, piece, of how many] for each tensor, in the order of the file.
    """

    rank: int
    name: str
    sha256: str
    nbytes: int
    pieces: list[tuple[str, str, int, int]]


class Index(Record):
    """What a checkpoint is of: the run, where it stood, and its files. ``node`` is None without groups.

    ``options`` are those that decide the numbers; ``scaler`` is the loss scale, the steps since it changed and
    the overflows that it still tolerates; ``generator`` the state of dropout's, if there is any.
    """

    schema: str
    row: Stage
    ranks: int
    node: int | None
    options: dict[str, Any]
    model: dict[str, Any]
    n_params: int
    buckets: list[BucketRecord]
    steps: int
    updates: int
    scaler: tuple[float, int, int] | None
    generator: dict[str, Any]
    files: list[FileRecord]
    versions: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all its files, the index left out."""
        return sum(file.nbytes for file in self.files)


def tensors_bytes(tensors: Mapping[str, Array]) -> bytes:
    """Tensors as the content of a safetensors file."""
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return safetensors.numpy.save(whole, {"format": SCHEMA})


def tensors_of(content: bytes) -> dict[str, Array]:
    """The tensors in the content of a safetensors file, bfloat16 too."""
    parts: Any = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    return {name: np.frombuffer(part["data"], DTYPES[part["dtype"]]).reshape(part["shape"]) for name, part in parts}


def digest_of(path: Path, chunk: int) -> str:
    """The same of a file, of which so many bytes are read at a time."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(chunk):
            found.update(part)
    return found.hexdigest()


def digest(content: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def vacant(folder: Path) -> None:
    """Refuse a folder in which something is: what is written once, and not again as a run goes on, replaces nothing."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: something is there already, and stays. Name a folder that is not there yet.")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """While a checkpoint is written: nobody else may write there. On an error what was written so far is removed."""
    lock = folder / WRITING
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"save: this folder cannot be made ({error.strerror})", str(folder)) from error
    try:
        lock.touch(exist_ok=False)
    except FileExistsError as error:
        raise CheckpointError(
            f"{folder}: another checkpoint is being written there, or was and did not finish. Wait, or remove "
            f"{WRITING} if nobody is writing. What was there before is whole."
        ) from error
    except OSError as error:
        raise OSError(error.errno, f"save: nothing can be written here ({error.strerror})", str(folder)) from error
    before = set(folder.glob("*.safetensors"))
    try:
        yield
    except BaseException as error:
        for path in set(folder.glob("*.safetensors")) - before:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            left = "What was there before is whole" if before else "Nothing of it is left"
            raise OSError(error.errno, f"save: {error.strerror or error}. {left}", str(folder)) from error
        raise
    finally:
        lock.unlink(missing_ok=True)


def write_tensors(folder: Path, rank: int, step: int, content: bytes) -> str:
    """Write one rank's file; its name."""
    name = f"step-{step:08d}-rank-{rank:05d}-{digest(content)[:8]}.safetensors"
    write_whole(folder / name, content)
    return name


def write_index(folder: Path, index: Index) -> None:
    """Make the files that the index names the checkpoint, and remove those of the one before."""
    write_whole(folder / INDEX, encoded(index))
    kept = {file.name for file in index.files}
    for path in folder.glob("step-*.safetensors"):
        if path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


def read_index(folder: Path) -> Index:
    """The index of a folder. CheckpointError, with the reason, if there is none that can be read."""
    path = Path(folder) / INDEX
    if not path.exists():
        unfinished = (Path(folder) / WRITING).exists()
        raise CheckpointError(
            f"{folder}: there is no checkpoint here{', but one is being written' if unfinished else ''}: no {INDEX}. "
            f"{'Wait until it is complete.' if unfinished else 'Name the folder that save was given.'}"
        )
    try:
        return read(path, SCHEMA, Index)
    except ResultsError as error:
        raise CheckpointError(str(error).replace("Run it again.", "Save it again.")) from error


def read_tensors(folder: Path, file: FileRecord) -> dict[str, Array]:
    """One rank's tensors. CheckpointError if the file is missing or is not the one that was written."""
    path = Path(folder) / file.name
    try:
        content = path.read_bytes()
    except OSError as error:
        missing = "is missing" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{folder}: the file of rank {file.rank}, {file.name}, {missing}. Restore it.") from error
    if len(content) != file.nbytes or digest(content) != file.sha256:
        raise CheckpointError(
            f"{folder}: the file of rank {file.rank}, {file.name}, is damaged: it has {len(content):,} B with another "
            f"digest than the {file.nbytes:,} B that were written. Restore it."
        )
    return tensors_of(content)
