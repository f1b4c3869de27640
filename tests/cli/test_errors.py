"""How a command ends early, asked within this process: in words, with an exit code, wherever its output goes."""

import errno
import io
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import zerosim as zs
from zerosim.cli import errors
from zerosim.cli.errors import INTERRUPTED, Commands, Refused, errors_for_people, printing, writable
from zerosim.cli.main import SUMMARIES, main

pytestmark = pytest.mark.usefixtures("as_users_call_it")


def that_raises(error: BaseException) -> Commands:
    """A command line of one command, which ends so."""

    @click.group(cls=Commands)
    def front() -> None:
        """Nothing."""

    @front.command()
    def fail() -> None:
        raise error

    return front


def test_an_interrupted_command_says_that_nothing_was_written() -> None:
    """Ctrl-C is one line to stderr and the exit code that shells give it."""
    done = CliRunner().invoke(that_raises(KeyboardInterrupt()), ["fail"])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted; nothing was written\n")
    assert INTERRUPTED == 130


def test_output_that_cannot_be_written_is_an_error_in_words() -> None:
    """What is left to be an OSError is about the output: exit code 2, and the reason in one line."""
    done = CliRunner().invoke(that_raises(OSError(errno.ENOSPC, "No space left on device")), ["fail"])
    assert (done.exit_code, done.stderr) == (2, "Error: the output cannot be written: No space left on device\n")
    done = CliRunner().invoke(that_raises(OSError("gone")), ["fail"])
    assert (done.exit_code, done.stderr) == (2, "Error: the output cannot be written: gone\n")


def test_keywords_are_said_as_they_are_typed() -> None:
    """What the command has an option for is named by it; anything else, and quotations, stay as they are."""

    @click.command()
    @click.option("--node-size", "-n", type=int)
    @click.option("--wire", default="fp32")
    @click.option("--uneven", is_flag=True)
    def said(**_: Any) -> None:
        with errors_for_people():
            raise ValueError(
                "as in node_size=8. Use wire='fp32', uneven=True or clip=1.0, not wire=; --wire=x, uneven=1"
            )

    done = CliRunner().invoke(said, [])
    assert done.exit_code == 2
    assert done.output == (
        "Error: as in --node-size 8. Use --wire fp32, --uneven or clip=1.0, not wire=; --wire=x, uneven=1\n"
    )
    with pytest.raises(Refused, match=r"^as in node=8$"), errors_for_people():
        raise ValueError("as in node=8")


@pytest.mark.parametrize("scheme", [["--scheme", "hsdp"], ["--scheme", "HSDP, kept"]])
def test_a_row_with_groups_is_told_the_option(scheme: list[str], tmp_path: Path) -> None:
    """`lab` and `checkpoint convert` both say how large groups are with an option, and name it."""
    zs.DP(zs.MLP((3, 2)), ranks=2).save(tmp_path / "a")
    for command in (["lab"], ["checkpoint", "convert", str(tmp_path / "a"), str(tmp_path / "b")]):
        done = CliRunner().invoke(main, [*command, *scheme])
        assert done.exit_code == 2
        assert "Say how large they are, as in --node 8." in " ".join(done.output.split())


@pytest.mark.parametrize("kind", [ValueError, TypeError, MemoryError, ModuleNotFoundError, OSError])
def test_errors_that_speak_to_the_caller_are_refusals(kind: Callable[[str], Exception]) -> None:
    """Their words stay, the exit code is 2; what speaks of a mistake in the program passes through."""
    with pytest.raises(Refused, match=r"^ranks must be 1 or more$") as refused, errors_for_people():
        raise kind("ranks must be 1 or more")
    assert refused.value.exit_code == 2
    with pytest.raises(ZeroDivisionError), errors_for_people():
        raise ZeroDivisionError


def test_a_folder_that_can_be_written_is_made(tmp_path: Path) -> None:
    """With the folders above it, and empty; one that is there stays as it is."""
    writable(tmp_path / "a" / "b", "lab", "results.json")
    (tmp_path / "a" / "b" / "results.json").write_text("{}")
    writable(tmp_path / "a" / "b", "lab", "results.json")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["results.json"]


def test_a_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A file, a link to nothing, and a folder where a file is to be: the call, the folder, the reason, what to do."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "results.json").mkdir()
    for folder, reason in {
        tmp_path / "file": "File exists",
        tmp_path / "link": f"it is a link to {tmp_path / 'nowhere'}, which is not there",
        tmp_path: "results.json in it is a folder",
    }.items():
        with pytest.raises(Refused) as refused:
            writable(folder, "lab", "page.html", "results.json")
        assert str(refused.value) == (
            f"lab(out): results go to a folder that can be written; {folder} cannot: {reason}. Name another with --out."
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_that_comes_while_files_are_prepared_ends_the_command_then(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept until there is something to clear away: nothing is run, nothing stays, and the handlers are back."""
    before, make = signal.getsignal(number), tempfile.mkdtemp

    def made(**where: Any) -> str:
        signal.raise_signal(number)
        folder: str = make(**where)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    ends = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(ends) as ended, errors.replacing(tmp_path):
        pytest.fail("it went on")
    assert number == signal.SIGINT or ended.value.args == (128 + number,)
    assert (list(tmp_path.iterdir()), signal.getsignal(number)) == ([], before)


def test_an_empty_name_of_a_folder_is_refused() -> None:
    """It is no other word for the folder that one is in; any other name is a path."""
    with pytest.raises(click.BadParameter, match=r"^a folder has a name; the one that you are in is called '\.'$"):
        errors.Folder().convert("", None, None)
    assert errors.Folder().convert("there", None, None) == Path("there")


def test_what_an_encoding_lacks_is_written_plainly() -> None:
    """Each of our signs as another in ASCII, and what is none of ours as a question mark."""
    assert "✓ ✗ → – ≤ … é".encode("ascii", "plain") == b"+ x -> - <= ... ?"


def test_printing_takes_signs_and_readers_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a command prints, a sign that the output lacks is no error, and neither is a reader that has enough."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with printing():
        print("a → b", end="")
    assert written.getvalue() == b"a -> b"
    for error in (BrokenPipeError(), SystemExit(1)):
        with printing():
            raise error
    monkeypatch.setattr(sys, "stdout", None)
    with printing():
        pass


def test_commands_are_listed_by_name() -> None:
    """As a shell's completion asks for them; what is no command is none, and is not imported."""
    context = click.Context(main)
    assert main.list_commands(context) == sorted(SUMMARIES)
    assert main.get_command(context, "lad") is None
    with pytest.raises(KeyError, match="lad"):
        main.commands["lad"]
