"""``zerosim lab``: parse, call, print.

Exit codes: 0 every check holds; 1 a check does not; 2 what was asked for cannot be run; 130 interrupted.
Heavy imports wait until it runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import click

from zerosim.bands import PRECISIONS
from zerosim.cli import options as shared
from zerosim.cli.errors import errors_for_people, printing, replacing, writable
from zerosim.cli.report import PAGE, save_pages
from zerosim.lab.data import DATA
from zerosim.optimizer import AdamW
from zerosim.options import Average, Gather, Sync
from zerosim.records.files import ResultsError
from zerosim.records.results import Results, Settings, encode, save
from zerosim.stages import SCHEMES, Stage

RESULTS = "results.json"
FIGURES = ("memory.png", "loss.png", "traffic.png", "timeline.png")


@click.command()
@shared.schemes()
@shared.training(ranks=32, least=1, ranks_help="Virtual GPUs, N.")
@click.option(
    "--precision",
    type=click.Choice([name for name, recipe in PRECISIONS.items() if recipe.everywhere]),
    default="mixed",
    show_default=True,
    help="mixed: fp16 working copy, fp32 master and moments; bf16: the same with bfloat16; fp32: no master; "
    "bf16-fp32-grads, mixed-main-grads: with fp32 gradients instead of, or beside, 16-bit ones.",
)
@shared.wire()
@shared.wire_params()
@click.option(
    "--node",
    type=click.IntRange(min=1),
    default=None,
    help="So many ranks are a node. Schemes with groups shard within it; of every scheme it counts what leaves it.",
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
    type=shared.ByteSize(),
    default=None,
    metavar="SIZE",
    help="Memory of one card, as in 2MB or 2MiB; without it a card has no limit.",
)
@click.option(
    "--host-capacity",
    type=shared.ByteSize(),
    default=None,
    metavar="SIZE",
    help="What the host has for each rank; without it that has no limit.",
)
@click.option("--clip", type=float, default=None, help="The largest norm of all gradients together.")
@click.option(
    "--norm-type",
    type=float,
    default=2.0,
    show_default=True,
    help="Which norm that is: 2, the root of the sum of squares, or inf, the largest magnitude.",
)
@click.option(
    "--clip-eps", type=float, default=1e-6, show_default=True, help="Added to the norm before it divides --clip."
)
@click.option(
    "--loss-scale", type=shared.Scale(), default=None, help="What the loss is scaled by; dynamic: as GradScaler does."
)
@click.option(
    "--accumulate",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Micro-batches that a step's --batch rows are cut into.",
)
@click.option(
    "--sync",
    type=click.Choice(get_args(Sync)),
    default=None,
    help="When all schemes reduce their gradients, after each micro-batch or at the end: those that reduce at other "
    "times sum in another order.  [default: each]",
)
@click.option(
    "--uneven",
    is_flag=True,
    help="Ranks, and their micro-batches, have up to their share of --batch rows, as the seed draws them, and some "
    "none; the first step has one micro-batch fewer.",
)
@click.option(
    "--average",
    type=click.Choice(get_args(Average)),
    default="rows",
    show_default=True,
    help="Over what uneven batches are averaged: all rows, or the ranks' own means, as DDP does.",
)
@click.option("--find-unused", is_flag=True, help="Ranks tell each other which parameters they have gradients of.")
@click.option(
    "--optimizer", type=click.Choice(["adam", "adamw"]), default="adam", show_default=True, help="What updates."
)
@click.option(
    "--weight-decay",
    "decay",
    type=click.FloatRange(min=0, max=1, max_open=True),
    default=None,
    help="AdamW's, of what has two dimensions.  [default: 0.01]",
)
@click.option("--warmup", type=click.IntRange(min=0), default=0, help="Updates over which the learning rate rises.")
@click.option(
    "--resume-at",
    type=shared.Resume(),
    default=None,
    help="After which step the run is saved, loaded, on as many ranks or on RANKS, and goes on.",
)
@shared.out("Folder for results.json, the figures, report.html and trace.json.")
@shared.as_json()
@shared.verbose("Also each step, band and collective, the work, the sweep and the broken rules.")
def lab(out: Path, as_json: bool, verbose: bool, rows: Sequence[Stage], **options: Any) -> None:
    """Train schemes side by side, count every byte and check them.

    By default data parallel, ZeRO-1, ZeRO-2 and ZeRO-3.

    Same training: after every step all schemes that sum in one order hold the same bits on every rank. As
    predicted: what was measured is what ZeRO predicts, in whole bytes. Then the sweep over N, and what changes
    when a rule is broken on purpose. Exit code 0 only if every check holds.

    Schemes with groups need nodes: zerosim lab --scheme zero-3 --scheme hsdp --node 8
    """
    from zerosim.lab import suite
    from zerosim.report import lab_console as console

    rows = rows or SCHEMES
    with errors_for_people():
        settings = Settings(widths=[64, 128, 128, 64], **_named(options))
        warnings.filterwarnings("ignore", message="LossScale")  # it was said as it was read
        suite.validate(settings, rows)
        writable(out, "lab", RESULTS, *PAGE, *FIGURES)
        found = _run(settings, rows)
    trouble, code = _write(found, out)
    with printing():
        if as_json:
            click.echo(encode(found), nl=False)
        else:
            console.show(found, None if trouble else out, verbose=verbose, drawn=_drawing())
    if trouble:
        click.echo(f"Error: {trouble}", err=True)
    sys.exit(1 if found.failures else code)


def _write(found: Results, out: Path) -> tuple[str, int]:
    """Write everything that is made of the results, all of it or nothing. If not, why and what to do; the exit code.

    What is written is read again, and must be what was found.
    """
    from zerosim.lab.record import check_written

    try:
        with replacing(out) as staging, _progress(2) as advance:
            advance("drawing the figures")
            _draw(found, staging)
            advance("writing the page")
            save_pages(found, staging)
            save(found, staging / RESULTS)
            check_written(staging / RESULTS, found)
        if not _drawing():  # those of an earlier run would be of other results
            for name in FIGURES:
                (out / name).unlink(missing_ok=True)
    except OSError as error:
        why = f"nothing was written to {out}: {error.strerror or error}. What was there before stands."
        return f"{why} Make room, or name another folder with --out, and run it again.", 2
    except ResultsError as error:
        return f"nothing was written to {out}: {error} This is a fault of zerosim's; what is printed was found.", 1
    return "", 0


def _drawing() -> bool:
    """Whether there is what draws figures."""
    return find_spec("matplotlib") is not None


def _draw(found: Results, folder: Path) -> None:
    """Write the figures, if they can be drawn."""
    if _drawing():
        from zerosim.report import plots

        plots.save_figures(plots.figures(found), folder)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """The options by the names that settings have for them."""
    step, ranks = options.pop("resume_at") or (None, None)
    decay, adamw = options.pop("decay"), options.pop("optimizer") == "adamw"
    if decay is not None and not adamw:
        raise ValueError("lab(weight_decay): Adam here has none; AdamW's is decoupled. Add --optimizer adamw.")
    decay = (AdamW.weight_decay if decay is None else decay) if adamw else 0.0
    return options | {"resume_at": step, "resume_ranks": ranks, "weight_decay": decay}


def _run(settings: Settings, rows: Sequence[Stage]) -> Results:
    from zerosim.lab import suite

    with _progress(suite.work(settings, rows)) as advance:
        return suite.run(settings, advance, rows=rows)


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[str], None]]:
    """What it is at, on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console, left = Console(stderr=True), TimeRemainingColumn(compact=True)
    columns = TextColumn("{task.description:<28.28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=total)
        yield lambda doing: progress.update(bar, advance=1, description=doing)
