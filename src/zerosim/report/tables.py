"""How a table looks in a terminal, the same in every command. Knows nothing of what is in it."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table


def screen(console: Console | None = None, *, width: int) -> Console:
    """Where a command prints: a terminal as wide as it is, anything else ``width`` columns wide."""
    console = console or Console(highlight=False)
    return console if console.is_terminal else Console(file=console.file, highlight=False, width=width)


def number_table(title: str, *columns: str, left: int = 1, caption: str = "", tight: bool = False) -> Table:
    """A table whose first ``left`` columns are text and whose others are numbers, which are never cut.

    ``tight`` is for many columns.
    """
    made = Table(
        title=title or None, caption=caption or None, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
        collapse_padding=tight, pad_edge=not tight,
    )  # fmt: skip
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index >= left else "left", no_wrap=index < left, overflow="fold")
    return made
