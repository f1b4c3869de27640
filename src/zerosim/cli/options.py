"""Command options that several commands have, said once: what a training run is made of, where results go, sizes, rows.

Owns the options' names, types and help. Must not know what the commands do with them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zerosim import stages
from zerosim.bands import WIRES
from zerosim.cli.errors import Folder
from zerosim.stages import OFFLOADABLE, Stage
from zerosim.util import sizes

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
            return row(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def rows() -> dict[str, Stage]:
    """The built-in rows by the names that Python has for them."""
    return {name: value for name, value in vars(stages).items() if isinstance(value, Stage)}


def row(text: str) -> Stage:
    """The row that is named or described. ValueError, with what there is, for one that makes no sense.

    >>> row("zero-1").name, row("dp").name, str(row("mine=optimizer,grads:group").grads)
    ('ZeRO-1', 'data parallel', 'group')
    """
    name, described, states = (part.strip() for part in text.partition("="))
    if described:
        return _own(name, states)
    known = {_plain(each): stage for python, stage in rows().items() for each in (python, stage.name)}
    if _plain(name) not in known:
        raise ValueError(
            f"no scheme is called {text!r}. There are {', '.join(stage.name for stage in rows().values())}; "
            f"one of your own is a name and what it shards, as in mine=optimizer,grads."
        )
    return known[_plain(name)]


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _own(name: str, states: str) -> Stage:
    """A row of the caller's own, each state as in ``optimizer``, sharded over all, or ``grads:group``."""
    chosen: dict[str, Any] = {}
    if not name:
        raise ValueError("a scheme of your own needs a name before the =, as in mine=optimizer,grads.")
    for each in filter(None, (part.strip() for part in states.split(","))):
        state, _, over = each.partition(":")
        if state not in OFFLOADABLE:
            raise ValueError(f"{name} shards any of {', '.join(OFFLOADABLE)}; got {state!r}.")
        chosen[state] = over or "all"
    return Stage(name, **chosen)


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


def out(help: str, *, default: str | None = "out") -> Decorator:
    """``--out FOLDER``."""
    path = None if default is None else Path(default)
    return click.option("--out", type=Folder(), default=path, show_default=default is not None, help=help)


def as_json(what: str = "the results") -> Decorator:
    """``--json``; the command gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON instead of tables.")
