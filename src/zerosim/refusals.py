"""What the caller got wrong, as one line and exit code 2 instead of a traceback."""

from __future__ import annotations

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


def writable(folder: Path, call: str) -> None:
    """Make the folder, and see that a file can be written there before anything is run. Refused if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(
            f"{call}(out): results go to a folder that can be written; {folder} cannot: {error.strerror}. "
            f"Name another with --out."
        ) from error
