"""``zerosim checkpoint``: what a folder holds, the same for another number of ranks, and one file of it.

Exit codes: 0 done; 2 what was asked for cannot be done.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zerosim.cli.errors import errors_for_people, printing
from zerosim.cli.options import Row
from zerosim.stages import Stage
from zerosim.util import sizes

FOLDER = click.argument("folder", type=click.Path(path_type=Path))
FORMAT = click.Choice(["zerosim", "dcp"])


@click.group()
def checkpoint() -> None:
    """Look at a checkpoint, cut it anew, or put it into one file."""


@checkpoint.command()
@FOLDER
def info(folder: Path) -> None:
    """Say what a checkpoint is of and what it takes on disk.

    The model, the row, the ranks and the step; its files are read, so that damage is found.
    """
    from zerosim.checkpoints import files

    with errors_for_people():
        index = files.read_index(folder)
        for file in index.files:
            files.read_tensors(folder, file)
    groups = f" in groups of {index.node}" if index.node else ""
    with printing():
        click.echo(f"{index.model['kind']} of {index.n_params:,} parameters after step {index.steps}, undamaged")
        click.echo(f"{index.row.name} on {index.ranks} ranks{groups}; {index.updates} updates applied")
        per = index.nbytes / index.n_params
        click.echo(f"{sizes.text(index.nbytes)} in {len(index.files)} files, {per:.4g} B per parameter")
        click.echo(f"one file of the parameters alone takes {sizes.text(4 * index.n_params)}")


@checkpoint.command()
@FOLDER
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), default=None, help="Ranks to cut it for.  [default: as it is]")
@click.option("--scheme", "row", type=Row(), default=None, help="The row to cut it for.  [default: as it is]")
@click.option("--node", type=click.IntRange(min=1), default=None, help="Ranks of a group.  [default: as it is]")
@click.option("--to", "to", type=FORMAT, default="zerosim", help="Write torch.distributed.checkpoint's format.")
@click.option("--from", "origin", type=FORMAT, default="zerosim", help="Read it: FOLDER is what dcp.save wrote.")
@click.option(
    "--like", type=click.Path(path_type=Path), help="With --from dcp: a checkpoint of the same model, for its options."
)
def convert(
    folder: Path, out: Path, ranks: int | None, row: Stage | None, node: int | None, to: str, origin: str,
    like: Path | None,
) -> None:  # fmt: skip
    """Write a checkpoint anew, for another row or other ranks.

    OUT, where nothing may be yet, has the same bits, cut otherwise. It may be read from, or written to, the format of
    torch.distributed.checkpoint (DCP), which FSDP2's users save.
    """
    if (origin == "dcp") != (like is not None):
        raise click.UsageError("--from dcp and --like go together: a DCP folder says nothing of rows and options.")
    from zerosim.checkpoints import files
    from zerosim.checkpoints.load import load, outlined
    from zerosim.checkpoints.save import save
    from zerosim.util import arguments

    with errors_for_people():
        if "dcp" in (to, origin):
            arguments.installed("checkpoint convert", "torch", extra="torch")
            from zerosim.checkpoints import dcp
        files.vacant(out)
        run = load(like or folder, row, ranks, model=outlined(like or folder), **({"node": node} if node else {}))
        if origin == "dcp":
            dcp.read(folder, run)
        if to == "dcp":
            dcp.write(run, out)
            with printing():
                click.echo(f"{out}: {run.model.n_params:,} parameters after step {run.steps}, for torch's dcp.load")
            return
        index = save(run, out)
    with printing():
        click.echo(
            f"{out}: {index.row.name} on {index.ranks} ranks, {sizes.text(index.nbytes)} in {len(index.files)} files"
        )


@checkpoint.command()
@FOLDER
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def consolidate(folder: Path, out: Path) -> None:
    """Write the parameters of a checkpoint, in fp32, to one file.

    A safetensors file, put together a layer at a time.
    """
    from zerosim.checkpoints import consolidate as room

    with errors_for_people():
        ledger = room.consolidate(folder, out)
    peak = ledger.host_peak().total
    with printing():
        click.echo(
            f"{out}: {sizes.text(out.stat().st_size)}, put together with {sizes.text(peak)} of memory at its peak"
        )
    sys.exit(0)
