"""``zerosim corroborate``: parse, call, print.

Exit codes: 0 everything that could be measured is equal; 1 something is not, or a rank failed;
2 what was asked for cannot be run; 130 interrupted. Heavy imports wait until it runs.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from zerosim.cli import options as shared
from zerosim.cli.errors import INTERRUPTED, errors_for_people, printing, writable
from zerosim.records.real_ranks import (
    BACKENDS,
    COLLECTIVES,
    FAULTS,
    RECIPES,
    Corroboration,
    Fault,
    Settings,
    encode,
    save,
)
from zerosim.stages import SCHEMES, Stage
from zerosim.util import sizes

RANKS = 4
ROOM = 4_000_000  # bytes: what a record takes at most, in its usual size


@click.command()
@shared.schemes()
@shared.training(ranks=None, least=2, ranks_help="Real ranks, N.  [default: 4, or as many as torchrun has started]")
@click.option(
    "--model",
    metavar="MODULE:FUNCTION",
    default="",
    help="What to train instead of the simulator's MLP: a function of ranks, steps, batch and seed that gives a model, "
    "an MLP or a TorchModel of your own module, and for each step the (x, y) of every rank.",
)
@click.option(
    "--collectives",
    type=click.Choice(["both", *COLLECTIVES]),
    default="both",
    show_default=True,
    help="ring: our hops, as isend and irecv; native: torch's own all-reduce, reduce-scatter, all-gather.",
)
@click.option(
    "--precision", type=click.Choice(["all", *RECIPES]), default="all", show_default=True, help="As in the lab."
)
@click.option(
    "--wire",
    type=click.Choice(["fp32", "working"]),
    default="fp32",
    show_default=True,
    help="The dtype that blocks are sent in: fp32, or that of each precision's working copy.",
)
@shared.wire_params()
@shared.schedule()
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="gloo",
    show_default=True,
    help="What carries torch's messages. The kernel's counts can be explained for gloo only.",
)
@click.option(
    "--interface",
    metavar="NAME",
    default=None,
    help="Network interface for the ranks. Without it they use loopback and nothing else; under torchrun, "
    "loopback if the master's address is, and else what the backend chooses.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1, max=86_400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Without progress for so long, it ends and names the rank that is to blame.",
)
@click.option("--frameworks", is_flag=True, help="Run DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed beside it.")
@click.option(
    "--break",
    "fault",
    type=click.Choice(list(FAULTS)),
    default=None,
    help=f"Break rank 1 on purpose, in step 2, to see that it is noticed. "
    f"{'; '.join(f'{name}: {what}' for name, what in FAULTS.items())}.",
)
@shared.out("Folder for corroborate.json (and frameworks.json).")
@shared.as_json("the record")
@shared.verbose("Also every failure, what every rank said, memory by band, both ways of the traffic, and times.")
def corroborate(
    rows: Sequence[Stage], ranks: int | None, model: str, collectives: str, precision: str, fault: str | None,
    timeout: float, interface: str | None, frameworks: bool, out: Path, as_json: bool, verbose: bool,
    wire_params: str | None, schedule: dict[str, Any], **options: Any,
) -> None:  # fmt: skip
    """Hold the simulator to real torch.distributed processes.

    Trains each scheme in N processes with the same code, and compares with the simulator after
    every step. What left each process is counted four times: by the simulator, by the rank, where
    torch is called, and by the kernel. Exit code 0 only if all that could be measured is equal.

    Starts the ranks itself, or is one of them where RANK and WORLD_SIZE are set:

    \b
        torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST --master-port 29500 \\
            -m zerosim corroborate --interface eth0    # on the other machine: --node-rank 1

    If a rank dies, stops or falls silent, the command names it and ends; if the command itself is killed,
    its ranks end at once. The latter holds on Linux. Elsewhere ranks of a killed command end when they next
    wait for it, or for each other for ten times as long as --timeout; a stopped one stays.
    """
    # What was found is to be written and shown; what takes long can be interrupted all the same.
    with _on_terminate(signal.SIG_IGN):
        with errors_for_people(), _failures_for_people():
            _known(interface)
            settings = Settings(
                ranks=_ranks(ranks),
                widths=[] if model else [64, 128, 128, 64],
                model=model,
                collectives=list(COLLECTIVES) if collectives == "both" else [collectives],
                precisions=list(RECIPES) if precision == "all" else [precision],
                rows=list(rows or SCHEMES),
                schedule=schedule if wire_params is None else {**schedule, "wire_params": wire_params},
                fault=None if fault is None else Fault(kind=fault, rank=1, step=min(2, options["steps"])),
                **options,
            )
            found = _run(settings, timeout, interface, out, frameworks)
        with printing():  # before it is written, which may fail
            if as_json:
                click.echo(encode(found), nl=False)
            else:
                from zerosim.report import real_ranks_console as console

                console.show(found, verbose=verbose)
        with errors_for_people():
            save(found, out / "corroborate.json")
        if not as_json:
            with printing():
                click.echo(f"written to {out}/: corroborate.json")
        code = _exit_code(found.ended, found.failures)
        if frameworks and found.complete:
            code = max(code, _beside(settings, timeout, interface, out, as_json, verbose))
    sys.exit(code)


def _exit_code(ended: str, failures: Sequence[object]) -> int:
    from zerosim.real_ranks import corroborate as real_ranks

    return INTERRUPTED if ended == real_ranks.INTERRUPTED else 1 if ended or failures else 0


def _beside(
    settings: Settings, timeout: float, interface: str | None, out: Path, as_json: bool, verbose: bool
) -> int:  # fmt: skip
    """Run the frameworks, show and write what was found; the exit code that it asks for."""
    from zerosim.frameworks import run as frameworks
    from zerosim.records import frameworks as records
    from zerosim.records.files import write_whole
    from zerosim.report import frameworks_console as console

    with (
        errors_for_people(),
        _failures_for_people(),
        _on_terminate(signal.default_int_handler),
        _progress(frameworks.work()) as advance,
    ):
        found = frameworks.run(settings, advance, timeout=timeout, interface=interface)
    if not as_json:
        with printing():
            console.show(found, verbose=verbose)
    with errors_for_people():
        write_whole(out / "frameworks.json", records.encode(found))
    if not as_json:
        with printing():
            click.echo(f"written to {out}/: frameworks.json")
    return _exit_code(found.ended, found.failures)


def _room(out: Path) -> None:
    """Refuse a folder in which there is no room for a record, before anything is run."""
    try:
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(
            f"corroborate(out): results take up to {sizes.text(ROOM)}, which {out} has no room for: "
            f"{error.strerror}. Name another folder with --out."
        ) from error


def _known(interface: str | None) -> None:
    """Refuse an interface that this machine does not have, before the ranks' backend does so in its own words."""
    there = [name for _, name in socket.if_nameindex()]
    if interface is not None and interface not in there:
        raise ValueError(f"corroborate(interface): one of this machine's, {', '.join(there)}; got {interface!r}.")


def _ranks(asked: int | None) -> int:
    """How many ranks there are: as many as were started, or as were asked for."""
    from zerosim.real_ranks import rendezvous

    me = rendezvous.membership()
    if me is None:
        return asked or RANKS
    if asked not in (None, me.world):
        raise ValueError(
            f"corroborate(ranks): according to WORLD_SIZE {me.world} ranks were started; got --ranks {asked}. "
            f"Leave it out."
        )
    return me.world


def _run(settings: Settings, timeout: float, interface: str | None, out: Path, frameworks: bool) -> Corroboration:
    """All of it, with a progress bar on standard error. A rank that does not lead ends here, with its exit code."""
    from zerosim.real_ranks import corroborate as real_ranks
    from zerosim.real_ranks import rendezvous

    me = rendezvous.membership()
    if me is not None and frameworks:
        raise ValueError("corroborate(frameworks): they are run on ranks of this machine; leave torchrun out.")
    if settings.model and frameworks:
        raise ValueError("corroborate(frameworks): they train the simulator's MLP; leave --model out.")
    if me is None or me.rank == 0:
        writable(out, "corroborate", "corroborate.json")
        _room(out)
    with _on_terminate(signal.default_int_handler), _progress(real_ranks.work(settings)) as advance:
        if me is None:
            return real_ranks.run(settings, advance, timeout=timeout, interface=interface)
        outcome = rendezvous.take_part(me, settings, advance, timeout, interface)
    if isinstance(outcome, int):
        sys.exit(outcome)
    return outcome


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[str], None]]:
    """What it is at, on standard error: a bar, or a line for each run where that is no terminal.

    It moves when it is told to and at no other time: a rank that is being measured may live in this process.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    width = max(min(48, console.width - 32), 8)  # the numbers are never cut
    doing = TextColumn(f"{{task.description:<{width}.{width}}}")
    columns = doing, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("starting", total=total)
        last = ""

        def advance(doing: str) -> None:
            nonlocal last
            progress.update(bar, advance=1, description=doing, refresh=True)
            run, last = last, doing.partition(":")[0]
            if last != run and not console.is_terminal:
                click.echo(last, err=True)

        yield advance


@contextmanager
def _on_terminate(handler: Any) -> Iterator[None]:
    """Meet a request to terminate with ``handler`` for as long as the block lasts."""
    requests = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = [signal.signal(request, handler) for request in requests]
    try:
        yield
    finally:
        for request, previous in zip(requests, before, strict=True):
            signal.signal(request, previous)


@contextmanager
def _failures_for_people() -> Iterator[None]:
    """Ranks that failed before anything was found become one line and exit code 1."""
    from zerosim.real_ranks.coordinator import RankFailure

    try:
        yield
    except RankFailure as error:
        raise click.ClickException(str(error)) from error
