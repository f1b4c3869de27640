"""Command options that several commands have, said once: what a training run is made of, where results go, sizes, rows.

Owns the options' names, types and help. Must not know what the commands do with them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, get_args

import click

from zerosim.bands import PARAM_WIRES, WIRES
from zerosim.cli.errors import Folder
from zerosim.options import Gather, LossScale, Padding, Sync
from zerosim.stages import Stage
from zerosim.util import sizes
from zerosim.util.rows import named

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


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


class Rate(ByteSize):
    """A number of bytes per second with its unit, as in 450GB/s."""

    name = "rate"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return super().convert(value if isinstance(value, int) else value.strip().removesuffix("/s"), param, ctx)


class Row(click.ParamType[Stage]):
    """A scheme: a built-in row by its name, or one of the caller's own, as in ``mine=optimizer,grads``."""

    name = "scheme"

    def convert(self, value: str | Stage, param: click.Parameter | None, ctx: click.Context | None) -> Stage:
        if isinstance(value, Stage):
            return value
        try:
            return named(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Bucket(click.ParamType[str | int]):
    """What shares a flat buffer: ``layer``, ``model``, or a number of parameters."""

    name = "layer|model|N"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        if value in get_args(Gather):
            return value
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r} is none of {', '.join(get_args(Gather))}, and no number of parameters.", param, ctx)
        return int(value)


class Scale(click.ParamType[LossScale]):
    """A loss scale: a number that stays, or ``dynamic``. One that rounds is taken, with a note."""

    name = "float|dynamic"

    def convert(self, value: str | LossScale, param: click.Parameter | None, ctx: click.Context | None) -> LossScale:
        if isinstance(value, LossScale):
            return value
        if value == "dynamic":
            return LossScale()
        try:
            scale = LossScale(float(value), dynamic=False)
        except ValueError:
            self.fail(f"{value!r} is neither dynamic nor a positive, finite number.", param, ctx)
        if scale.note:
            click.echo(f"note: {scale.note}", err=True)
        return scale


class Resume(click.ParamType[tuple[int, int | None]]):
    """After which step a run is resumed, and on how many ranks: ``5``, or ``5:8``."""

    name = "step[:ranks]"

    def convert(
        self, value: str | tuple[int, int | None], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int | None]:
        if isinstance(value, tuple):
            return value
        step, colon, ranks = value.partition(":")
        if not all(each.isdecimal() and int(each) for each in (step, *([ranks] if colon else []))):
            self.fail(f"{value!r} is no step, and no step and ranks, as in 5 or 5:8.", param, ctx)
        return int(step), int(ranks) if colon else None


# -- blocks of options


def _several(*options: Decorator) -> Decorator:
    def decorate(command: Function) -> Function:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def training(*, ranks: int | None, least: int, ranks_help: str) -> Decorator:
    """What every training run is made of: ``--ranks``, ``--steps``, ``--batch``, ``--seed`` and ``--model-seed``."""
    return _several(
        click.option(
            "--ranks", type=click.IntRange(min=least), default=ranks, show_default=ranks is not None, help=ranks_help
        ),
        click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps."),
        click.option(
            "--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows per rank and step."
        ),
        click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Draws the data."),
        click.option(
            "--model-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Draws the initial weights."
        ),
    )


def schemes() -> Decorator:
    """``--scheme NAME``, as often as there are schemes to run; the command gets ``rows``, empty for the default."""
    return click.option(
        "--scheme", "rows", type=Row(), multiple=True, metavar="NAME",
        help="A scheme to run, as often as you like: one of the built-in, or NAME=STATES for one of your own that "
        "shards any of optimizer, grads, params, as in mine=optimizer,grads.  [default: data parallel, ZeRO-1, -2, -3]",
    )  # fmt: skip


def wire(help: str = "The dtype that blocks are sent in.") -> Decorator:
    """``--wire``, one of ``bands.WIRES``."""
    return click.option("--wire", type=click.Choice(list(WIRES)), default="fp32", show_default=True, help=help)


def wire_params() -> Decorator:
    """``--wire-params``, one of ``bands.PARAM_WIRES`` or none."""
    return click.option(
        "--wire-params",
        type=click.Choice(list(PARAM_WIRES)),
        default=None,
        help="What parameters are sent in; int8: blocks of 256 that share an fp32 scale.  [default: as --wire]",
    )


_SCHEDULE: dict[str, tuple[Any, str]] = {
    "node": (click.IntRange(min=1), "So many ranks are a group: what rows shard within, and what leaves is counted."),
    "gather": (click.Choice(get_args(Gather)), "What ZeRO-3 gathers at a time."),
    "prefetch": (click.IntRange(min=0), "How many further layers ZeRO-3 gathers before one computes."),
    "bucket": (Bucket(), "One flat buffer per layer, for the model, or for layers of so many parameters together."),
    "padding": (click.Choice(get_args(Padding)), "What buffers are padded to a multiple of."),
    "accumulate": (click.IntRange(min=1), "Micro-batches that a step's batch is cut into."),
    "sync": (click.Choice(get_args(Sync)), "When gradients are reduced: after each micro-batch, or at the end."),
    "clip": (click.FloatRange(min=0, min_open=True), "The largest norm of all gradients together."),
    "norm_type": (float, "Which norm that is: 2, the root of the sum of squares, or inf, the largest magnitude."),
}


def schedule() -> Decorator:
    """Further options of a training run; the command gets those that were given as the keywords ``schedule``."""

    def decorate(command: Function) -> Function:
        @wraps(command)
        def with_schedule(**given: Any) -> Any:
            chosen = {name: given.pop(name) for name in [*_SCHEDULE, "all_reduce", "checkpoint"]}
            return command(schedule={name: each for name, each in chosen.items() if each}, **given)

        return with_schedule

    options = [
        click.option(f"--{name.replace('_', '-')}", type=kind, default=None, help=said)
        for name, (kind, said) in _SCHEDULE.items()
    ]
    flags = [
        click.option("--all-reduce", is_flag=True, help="All-reduce gradients where they could be reduce-scattered."),
        click.option("--checkpoint", is_flag=True, help="Keep a layer's input alone, and run it again in backward."),
    ]
    return _several(*options, *flags, decorate)


def out(help: str, *, default: str | None = "out") -> Decorator:
    """``--out FOLDER``."""
    path = None if default is None else Path(default)
    return click.option("--out", type=Folder(), default=path, show_default=default is not None, help=help)


def as_json(what: str = "the results") -> Decorator:
    """``--json``; the command gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON instead of tables.")


def verbose(help: str) -> Decorator:
    """``--verbose``, also ``-v``."""
    return click.option("-v", "--verbose", is_flag=True, help=help)
