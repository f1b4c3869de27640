"""The command line: parse, call, print.

Exit codes: 0 every check holds; 1 a check does not; 2 what was asked for cannot be run; 130 interrupted.
Heavy imports wait for the command that needs them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import click

from zerosim.bands import PRECISIONS, WIRES
from zerosim.cli.corroborate import corroborate
from zerosim.cli.errors import Commands, Folder, errors_for_people, printing, replacing, writable
from zerosim.cli.plan import plan
from zerosim.lab.data import DATA
from zerosim.options import Gather
from zerosim.records.consistency import load
from zerosim.records.results import Results, Settings, encode, save
from zerosim.util import sizes

RESULTS, PAGE = "results.json", ("report.html", "trace.json")


class ByteSize(click.ParamType[int]):
    """A number of bytes with its unit, so that GB and GiB cannot be mistaken for each other."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return sizes.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="zerosim", prog_name="zerosim")
def main() -> None:
    """ZeRO made measurable: train on N virtual GPUs and count every byte held and sent."""


@main.command()
@click.option("--ranks", type=click.IntRange(min=1), default=32, show_default=True, help="Virtual GPUs, N.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows per rank and step.")
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Draws the data.")
@click.option(
    "--model-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Draws the initial weights."
)
@click.option(
    "--precision",
    type=click.Choice([name for name, recipe in PRECISIONS.items() if recipe.everywhere]),
    default="mixed",
    show_default=True,
    help="mixed: fp16 working copy, fp32 master and moments; bf16: the same with bfloat16; fp32: no master; "
    "bf16-fp32-grads, mixed-main-grads: with fp32 gradients instead of, or beside, 16-bit ones.",
)
@click.option(
    "--wire", type=click.Choice(list(WIRES)), default="fp32", show_default=True, help="What blocks travel as."
)
@click.option(
    "--gather",
    type=click.Choice(get_args(Gather)),
    default="layer",
    show_default=True,
    help="What ZeRO-3 gathers at a time.",
)
@click.option(
    "--data",
    type=click.Choice(list(DATA)),
    default="noise",
    show_default=True,
    help="noise: standard normal pairs; digits: handwritten digits, to be reproduced (needs scikit-learn).",
)
@click.option(
    "--capacity",
    type=ByteSize(),
    default=None,
    metavar="SIZE",
    help="Memory of one card, as in 2MB or 2MiB; without it a card has no limit.",
)
@click.option(
    "--out",
    type=Folder(),
    default=Path("out"),
    show_default=True,
    help="Folder for results.json, the figures, report.html and trace.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of tables.")
def lab(out: Path, as_json: bool, **options: object) -> None:  # fmt: skip
    """Train data parallel, ZeRO-1, ZeRO-2 and ZeRO-3 side by side and check them.

    Same training: after every step all four hold the same bits on every rank. As predicted: what was
    measured is what ZeRO predicts, in whole bytes. Then the sweep over N, and what changes when
    a rule is broken on purpose. Exit code 0 only if every check holds.
    """
    from zerosim.lab import suite as lab
    from zerosim.report import lab_console as console
    from zerosim.report import plots

    with errors_for_people():
        settings = Settings(widths=[64, 128, 128, 64], **options)  # type: ignore[arg-type]
        lab.validate(settings)
        writable(out, "lab", RESULTS, *PAGE)
        found = _run(settings)
        with replacing(out) as staging:
            plots.save_figures(plots.figures(found), staging)
            _save_page(found, staging)
            save(found, staging / RESULTS)
    with printing():
        if as_json:
            click.echo(encode(found), nl=False)
        else:
            console.show(found, out)
    sys.exit(1 if found.failures else 0)


@main.command()
@click.argument("recorded", metavar="RESULTS", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--out",
    type=Folder(),
    default=None,
    help="Folder for report.html and trace.json.  [default: that of RESULTS]",
)
def report(recorded: Path, out: Path | None) -> None:
    """Write report.html and trace.json from a results.json that the lab has written.

    The page opens offline: verdicts, tables, charts, and a player that replays the events of a
    step. The trace opens in Perfetto or chrome://tracing.
    """
    out = out or recorded.parent
    with errors_for_people():
        found = load(recorded)
        writable(out, "report", *PAGE)
        try:
            with replacing(out) as staging:
                _save_page(found, staging)
        except (LookupError, ArithmeticError) as error:
            raise ValueError(f"{recorded}: its parts do not fit together ({error!r}). Run the lab again.") from error
    with printing():
        click.echo(f"written to {out}/: {' and '.join(PAGE)}")


def _save_page(found: Results, out: Path) -> None:
    """The page and the trace, whose libraries nothing else needs."""
    from zerosim.report.page import save_page
    from zerosim.report.trace import save_trace

    for save_one, name in zip((save_page, save_trace), PAGE, strict=True):
        save_one(found, out / name)


def _run(settings: Settings) -> Results:
    """The lab with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from zerosim.lab import suite as lab

    columns = TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("starting", total=lab.work(settings))

        def advance(doing: str) -> None:
            progress.update(bar, advance=1, description=doing)

        return lab.run(settings, advance)


main.add_command(corroborate)
main.add_command(plan)
