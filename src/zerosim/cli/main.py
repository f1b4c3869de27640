"""The command line: the commands, joined. Each parses, calls and prints in a module of its own."""

from __future__ import annotations

import click

from zerosim.cli.corroborate import corroborate
from zerosim.cli.errors import Commands
from zerosim.cli.lab import lab
from zerosim.cli.plan import plan
from zerosim.cli.report import report


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="zerosim", prog_name="zerosim")
def main() -> None:
    """ZeRO made measurable: train on N virtual GPUs and count every byte held and sent."""


for command in (lab, report, corroborate, plan):
    main.add_command(command)
