"""The front of the command line: it says what the commands say, without loading them."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerosim.cli.main import SUMMARIES, main


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_is_what_its_command_says(name: str) -> None:
    """The help's line for a command is the first that the command's own help has."""
    assert main.commands[name].get_short_help_str(limit=200) == SUMMARIES[name]
    done = CliRunner().invoke(main, [name, "--help"])
    assert done.exit_code == 0
    assert SUMMARIES[name][:40] in " ".join(done.output.split())


@pytest.mark.parametrize("arguments", [[], ["checkpoint"]], ids=str)
def test_summaries_are_whole_sentences_in_a_line(arguments: list[str]) -> None:
    """On a screen of 80 columns each command has one line, which ends in a full stop and is not cut short."""
    done = CliRunner().invoke(main, [*arguments, "--help"], terminal_width=80)
    listed = done.output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == sorted(SUMMARIES) if not arguments else len(listed) == 3
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= 80 for line in listed), done.output


def test_help_loads_no_numpy() -> None:
    """What is only said is said without NumPy, torch or a command's module."""
    code = (
        "import sys; sys.argv = ['zerosim', '--help']\n"
        "try:\n    from zerosim.cli.main import main; main()\n"
        "finally:\n    print(sorted({'numpy', 'torch', 'numba', 'zerosim.cli.lab'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "corroborate" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ("corroborate --out OUT", "corroborate needs torch and threadpoolctl"), ("check OUT", "check needs torch"),
        ("checkpoint convert OUT OUT/new --to dcp", "checkpoint convert needs torch"),
    ],
)  # fmt: skip
def test_without_extras_a_command_says_what_to_install(tmp_path: Path, arguments: str, needed: str) -> None:
    """Nothing that an extra brings is imported before it is asked for: exit code 2, and nothing is written."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'threadpoolctl'])\n"
        "from zerosim.cli.main import main; main(sys.argv[1:])"
    )
    typed = [each.replace("OUT", str(tmp_path)) for each in arguments.split()]
    done = subprocess.run([sys.executable, "-c", code, *typed], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert f"{needed}; pip install 'zerosim[torch]'." in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_is_refused() -> None:
    """A command that there is not is an error of usage, and no import."""
    done = CliRunner().invoke(main, ["lad"])
    assert done.exit_code == 2
    assert "No such command 'lad'" in done.output
