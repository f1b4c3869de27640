"""How verdicts and tables look in a terminal, the same in every command. Knows nothing of what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

ANY = 10_000  # columns: wider than any table


def screen(console: Console | None = None, *, width: int) -> Console:
    """Where a command prints: a terminal as wide as it is, anything else ``width`` columns wide."""
    console = console or Console(highlight=False)
    return console if console.is_terminal else Console(file=console.file, highlight=False, width=width)


def verdict(check: str, holds: bool | None, said: str, *, partly: bool = False) -> Text:
    """A line: whether a check holds, or None if nothing was measured, ``partly`` if not everything was; and of what."""
    s = "" if check.endswith("s") else "s"
    words, style = {
        True: (f"✓ {check} hold{s}", "bold green"),
        False: (f"✗ {check} FAIL{s.upper()}", "bold red"),
        None: (f"- {check} not measured", "bold yellow"),
    }[holds]
    return Text.assemble((words, style), " where measured" * partly, f": {said}")


class NumberTable(Table):
    """A table whose first ``left`` columns say what a row is, and stay with it on a screen that is too narrow.

    There headers and texts are broken between words first. What then still has no room stands below, under the first
    columns again, so that no number is ever cut.
    """

    left = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        if _width(self, console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        for part, columns in enumerate(self._parts(console, options)):
            made = self._of(columns, self._least(columns, console, options), console, options)
            made.title = self.title if part == 0 else None
            yield from Table.__rich_console__(made, console, options)
        if self.caption:
            yield Text.from_markup(str(self.caption), style="table.caption")

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[list[Column]]:
        """Columns that have room beside each other, the first ones with each."""
        labels = self.columns[: self.left]
        part = list(labels)
        for column in self.columns[self.left :]:
            some = [*part, column]
            table = self._of(some, self._least(some, console, options), console, options, spread=False)
            if len(part) > len(labels) and _width(table, console, options) > options.max_width:
                yield part
                part = [*labels]
            part.append(column)
        yield part

    def _least(self, columns: Sequence[Column], console: Console, options: ConsoleOptions) -> list[int]:
        """How wide each must be: for its longest word or, if it holds numbers or says what a row is, for all of it."""
        return [
            max(
                _width(column.header, console, options, words=True),
                *(_width(cell, console, options, words=_breaks(column)) for cell in column.cells),
                1,
            )
            for column in columns
        ]

    def _of(
        self, columns: Sequence[Column], widths: Sequence[int], console: Console, options: ConsoleOptions, *,
        spread: bool = True,
    ) -> Table:  # fmt: skip
        """Some columns as a table; what room is left on the screen goes to the first that can use it."""
        made = Table(
            box=self.box, title_justify="left", caption_justify="left", collapse_padding=True, pad_edge=False,
        )  # fmt: skip
        for column, width in zip(columns, widths, strict=True):
            made.add_column(column.header, justify=column.justify, width=width, overflow="fold")
        for row, cells in zip(self.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
            made.add_row(*cells, end_section=row.end_section)
        room = options.max_width - _width(made, console, options)
        for column, wide in zip(made.columns, columns, strict=True) if spread else ():
            needed = max(_width(each, console, options) for each in (wide.header, *wide.cells))
            more = max(min(room, needed - (column.width or 0)), 0)
            column.width, room = (column.width or 0) + more, room - more
        return made


def _breaks(column: Column) -> bool:
    """Whether what is in it may be broken between words: not numbers, which stand on the right."""
    return column.justify == "left" and not column.no_wrap


def _width(it: RenderableType, console: Console, options: ConsoleOptions, *, words: bool = False) -> int:
    """How wide it is where there is room; or its longest word."""
    measured = console.measure(it, options=options.update(width=ANY))
    return measured.minimum if words else measured.maximum


def number_table(title: str, *columns: str, left: int = 1, caption: str = "", tight: bool = False) -> NumberTable:
    """A table whose first ``left`` columns are text and whose others are numbers; ``tight`` is for many columns."""
    made = NumberTable(
        title=title or None, caption=caption or None, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
        collapse_padding=tight, pad_edge=not tight,
    )  # fmt: skip
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index >= left else "left", no_wrap=index < left)
    made.left = max(left, 1)
    return made
