"""Rows as callers say them: the row itself, a built-in by its name, or one of the caller's own in words.

Owns which names there are and how they are read, so that Python and the command line take the same ones. Must not
know what is done with a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zerosim import stages
from zerosim.stages import OFFLOADABLE, Stage

Said = Stage | str


def one(call: str, option: str, value: Said) -> Stage:
    """The row, which may be said by name. ValueError for a name that there is not, TypeError for what is neither."""
    if isinstance(value, Stage):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{call}({option}): a row, as in zs.ZeRO3, or the name of one, as in 'zero-3', is needed; got {value!r}."
        )
    try:
        return named(value)
    except ValueError as error:
        raise ValueError(f"{call}({option}): {error}") from error


def several(call: str, option: str, values: Iterable[Said] | Said) -> list[Stage]:
    """The rows, each as ``one`` takes it; one alone needs no list."""
    if isinstance(values, str | Stage) or not isinstance(values, Iterable):
        values = [values]
    return [one(call, option, each) for each in values]


def builtin() -> dict[str, Stage]:
    """The built-in rows by the names that Python has for them."""
    return {name: value for name, value in vars(stages).items() if isinstance(value, Stage)}


def named(text: str) -> Stage:
    """The row that is named or described. ValueError, with what there is, for one that makes no sense.

    >>> named("zero-1").name, named("dp").name, str(named("mine=optimizer,grads:group").grads)
    ('ZeRO-1', 'data parallel', 'group')
    """
    name, described, states = (part.strip() for part in text.partition("="))
    if described:
        return _own(name, states)
    known = {_plain(each): stage for python, stage in builtin().items() for each in (python, stage.name)}
    if _plain(name) not in known:
        raise ValueError(
            f"no scheme is called {text!r}. There are {', '.join(stage.name for stage in builtin().values())}; "
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
