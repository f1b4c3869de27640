"""Files of records: JSON with a schema, written whole or not at all, and read only if sound.

Owns the format. Must not know what is recorded.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))  # what msgspec does, for mypy
class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a file: it cannot be changed, and a field that it does not know is an error on reading."""


CHUNK = 1 << 20  # bytes of a large file that are read at a time
Kind = TypeVar("Kind", bound=Record)


class ResultsError(ValueError):
    """A file that is not a whole, sound record of this schema, and why."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that whoever looks sees the old one or the new one, never a part. OSError if it can't be."""
    with writing_whole(path) as file:
        file.write(content)


@contextmanager
def writing_whole(path: Path, check: Callable[[str], None] = lambda written: None) -> Iterator[IO[bytes]]:
    """A file to write to, which is at ``path`` once the block has ended well and ``check`` of what is written has too.

    OSError if the folder cannot be written, or the path is there and no file: a device is not to be replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there, and no file", str(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # which has the temporary name, that nobody has asked for
        raise OSError(error.errno, f"its folder cannot be written to ({error.strerror})", str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def encoded(record: Record) -> bytes:
    """A record as indented JSON. What is no finite number, in a run that diverged, stands as NaN or Infinity."""
    return json.dumps(msgspec.to_builtins(record), indent=1).encode() + b"\n"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields. ValueError if one is given twice: a reader that takes the other would read something else."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"{twice!r} is given twice")
    return fields


def read(path: Path, schema: str, kind: type[Kind]) -> Kind:
    """The record of ``kind`` in a file that says that it is of ``schema``.

    ResultsError, with the reason, if the file cannot be read, is not whole, is of another
    schema, or has a field that the record does not, too few, one twice, or one of another type.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or a device might never end
            raise OSError(0, "it is no file")
        content = path.read_bytes()
    except (OSError, MemoryError, ValueError) as error:  # a ValueError for a name that no file can have
        raise ResultsError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        values = json.loads(content, object_pairs_hook=_once)
        if b"\\ud" in content.lower():  # half a character, perhaps, which could be read but not written
            json.dumps(values, ensure_ascii=False).encode()
        found = values.get("schema") if isinstance(values, dict) else None
        if found != schema:
            raise ResultsError(f"{path}: its schema is {found!r}; what is read here is {schema!r}. Run it again.")
        return msgspec.convert(values, kind)
    except ResultsError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:  # msgspec's are ValueErrors too
        raise ResultsError(f"{path}: not a whole record of {schema}: {error}. Run it again.") from error
