"""The command line: the commands, joined. Each parses, calls and prints in a module of its own.

A command's module is imported when it is run or asked about, so that ``--help`` need not load NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from zerosim.cli.errors import Commands

# Each command is the function of that name in the module of that name; beside it, what it first says of itself.
SUMMARIES = {
    "check": "Hold a recorded training to the simulator.",
    "checkpoint": "Look at a checkpoint, cut it anew, or put it into one file.",
    "corroborate": "Hold the simulator to real torch.distributed processes.",
    "lab": "Train schemes side by side, count every byte and check them.",
    "plan": "Say what training MODEL takes on N GPUs before they are rented.",
    "report": "Write the page and the trace of a results.json of the lab's.",
}


class _Loaded(dict[str, click.Command]):
    """The commands by name, each imported when it is looked up."""

    def __missing__(self, name: str) -> click.Command:
        if name not in SUMMARIES:
            raise KeyError(name)
        command: click.Command = getattr(import_module(f"zerosim.cli.{name}"), name)
        self[name] = command
        return command


class _LazyCommands(Commands):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands = _Loaded()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUMMARIES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return self.commands[name] if name in SUMMARIES else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SUMMARIES.items()))


@click.group(cls=_LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="zerosim", prog_name="zerosim")
def main() -> None:
    """ZeRO made measurable: train on N virtual GPUs and count every byte held and sent."""
