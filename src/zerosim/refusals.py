"""How a command meets its caller: mistakes as one line, files together or not at all, output that may be cut short.

Owns the ways in which a command ends early. Must not know what the commands do.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click


class Refused(click.ClickException):
    """What was asked for cannot be run; the message says why and what to do."""

    exit_code = 2


@contextmanager
def errors_for_people() -> Iterator[None]:
    """Errors that speak to the caller become ``Refused``."""
    try:
        yield
    except (ValueError, TypeError, MemoryError, ModuleNotFoundError, OSError) as error:
        raise Refused(str(error)) from error


def writable(folder: Path, call: str, *names: str) -> None:
    """Make the folder, and see that files of these names can be written before anything is run. Refused if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for name in names:
            if (folder / name).is_dir():
                raise IsADirectoryError(0, f"{name} in it is a folder")
    except OSError as error:
        raise Refused(
            f"{call}(out): results go to a folder that can be written; {folder} cannot: {error.strerror}. "
            f"Name another with --out."
        ) from error


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write files to, which take their places in ``folder`` together, at the end, or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as staging:
        yield Path(staging)
        for path in sorted(Path(staging).iterdir()):
            path.replace(folder / path.name)


@contextmanager
def printing() -> Iterator[None]:
    """Output that a reader cuts short, or whose encoding lacks a character, is no failure."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # the latter is how rich takes it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end
