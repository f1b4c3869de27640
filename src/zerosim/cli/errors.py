"""How a command meets its caller: mistakes as one line, files together or not at all, output that may be cut short.

Owns the ways in which a command ends early. Must not know what the commands do.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import click

INTERRUPTED = 128 + signal.SIGINT  # as shells have it


class Commands(click.Group):
    """Commands that end in words and with an exit code that means something, wherever their output goes."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:  # all others have been refused by then: it is the output that cannot be written
            _give_up(sys.stdout)
            try:
                click.echo(f"Error: the output cannot be written: {error.strerror or error}", err=True)
            except OSError:
                _give_up(sys.stderr)
            sys.exit(Refused.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was written", err=True)
            sys.exit(INTERRUPTED)


class Folder(click.Path):
    """A folder to write to, which need not exist yet."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("a folder has a name; the one that you are in is called '.'", param, ctx)
        return super().convert(value, param, ctx)


class Refused(click.ClickException):
    """What was asked for cannot be run; the message says why and what to do."""

    exit_code = 2


@contextmanager
def errors_for_people() -> Iterator[None]:
    """Errors that speak to the caller become ``Refused``, in the words that are typed here."""
    try:
        yield
    except (ValueError, TypeError, MemoryError, ModuleNotFoundError, OSError) as error:
        raise Refused(_as_typed(str(error))) from error


def _as_typed(said: str) -> str:
    """What is said in Python's words, ``node=8``, in those of the running command, ``--node 8``, where it has them."""
    context = click.get_current_context(silent=True)
    params = context.command.params if context is not None else []
    options = {param.name: param for param in params if isinstance(param, click.Option)}

    def typed(match: re.Match[str]) -> str:
        if (option := options.get(match["keyword"])) is None or (option.is_flag and match["value"] != "True"):
            return match[0]
        name = max(option.opts, key=len)
        return name if option.is_flag else f"{name} {match['value']}"

    return _KEYWORD.sub(typed, said)


_KEYWORD = re.compile(r"(?<![\w.-])(?P<keyword>[a-z]\w*)=(?P<quote>['\"]?)(?P<value>\w+(?:[.+-]+\w+)*)(?P=quote)")


def writable(folder: Path, call: str, *names: str) -> None:
    """Make the folder, and see that files of these names can be written before anything is run. Refused if not."""
    try:
        if folder.is_symlink() and not folder.exists():
            raise FileNotFoundError(0, f"it is a link to {os.readlink(folder)}, which is not there")
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
    """A folder to write files to, which take their places in ``folder`` together, at the end, or not at all.

    Told to end (SIGINT, SIGTERM), it leaves nothing behind; once the files are complete it is finished first. What a
    command left behind that was killed outright is swept, and the older files are put back if it had not placed all.
    """
    early: list[int] = []

    def end(number: int, _: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.signal(number, lambda number, _: early.append(number)) for number in _ENDING}
    try:
        for left in folder.glob(f"{_STAGING}*"):
            with _alone(left) as dead:
                if dead:
                    _restore(left, folder)
                    shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(dir=folder, prefix=_STAGING))
        try:
            with _alone(staging):
                _handle(end)
                for number in early:
                    end(number, None)
                yield staging
                _handle(signal.SIG_IGN)
                _place(staging, folder)
        finally:
            _handle(signal.SIG_IGN)
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_STAGING, _OLDER, _ABSENT = ".writing-", ".older", ".absent"


def _place(staging: Path, folder: Path) -> None:
    """Move all files to the folder; if one cannot be, those that were there come back. OSError then.

    What is there stays until a new file takes its place, and is kept beside until all have: so that a command that is
    killed in between leaves whole files, and the next one can put back those that belong together.
    """
    files = sorted(staging.iterdir())
    older, absent = staging / _OLDER, staging / _ABSENT
    older.mkdir()
    absent.mkdir()
    try:
        for path in files:
            target = folder / path.name
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{path.name} in it is a folder", str(target))
            if target.exists():
                _keep(target, older / path.name)
            else:
                (absent / path.name).touch()
        for path in files:
            path.replace(folder / path.name)
        older.rename(staging / ".done")  # from here on there is nothing to put back
    except BaseException:
        _restore(staging, folder)
        raise


def _keep(path: Path, beside: Path) -> None:
    """Give a file a second name, or where that cannot be a copy."""
    try:
        os.link(path, beside)
    except OSError:
        shutil.copy2(path, beside)


def _restore(staging: Path, folder: Path) -> None:
    """Put back what was there before, unless all new files have taken their places."""
    if (older := staging / _OLDER).is_dir():
        for path in older.iterdir():
            path.replace(folder / path.name)
        for path in (staging / _ABSENT).glob("*"):
            (folder / path.name).unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Hold a folder for as long as the block lasts; whether nobody else does. The system lets go of what dies."""
    try:
        import fcntl
    except ModuleNotFoundError:  # where there are no such locks nothing is known to be dead
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


_ENDING = (signal.SIGINT, signal.SIGTERM)


def _handle(handler: Any) -> None:
    for number in _ENDING:
        signal.signal(number, handler)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What stands for a character that the output's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(each, "?") for each in error.object[error.start : error.end]), error.end


_PLAIN = {
    "✓": "+", "✗": "x", "→": "->", "–": "-", "−": "-", "—": "-", "×": "x", "·": "*", "≤": "<=", "≥": ">=", "’": "'",
    "█": "#", "▒": "=", "░": ".", "─": "-", "µ": "u", "…": "...",
}  # fmt: skip
codecs.register_error("plain", _plain)


@contextmanager
def printing() -> Iterator[None]:
    """Output that a reader cuts short, that goes nowhere, or whose encoding lacks a character, is no failure."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="plain")
    try:
        yield
        if sys.stdout:  # None if it was closed
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # the latter is how rich takes it
        _give_up(sys.stdout)


def _give_up(stream: TextIO) -> None:
    """Let a stream that cannot be written end in nothing, or Python would complain at its own end."""
    with suppress(OSError, AttributeError):  # one without a file has nothing to complain of
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
