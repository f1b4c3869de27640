"""Tables on screens of any width: every number is there, whole, and beside what it is of."""

import io
from typing import Any

import pytest
from rich.console import Console

from zerosim.report.tables import number_table

HEADERS = ("scheme", "at rest", "with activations", "sent by each rank", "messages", "final loss")
ROWS = (
    ("data parallel", "1,234,567", "16.4956", "256,432", "31", "0.993121"),
    ("ZeRO-1 within groups", "234,567", "4.8706", "1,256,928", "186", "0.993121"),
)


def printed(width: int, rows: tuple[tuple[str, ...], ...] = ROWS, **options: Any) -> list[str]:
    """The lines of a table on a screen of that width."""
    table = number_table("Held and sent", *HEADERS, caption="All of it was measured.", **options)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", range(36, 121, 7))
def test_every_number_is_whole_and_stands_in_its_row(width: int) -> None:
    """Whatever has no room beside the others stands below, in a line that begins with what it is of."""
    lines = printed(width)
    assert max(map(len, lines)) <= width
    for name, *numbers in ROWS:
        own = [line.split() for line in lines if line.strip().startswith(name)]
        assert [number for line in own for number in line][: len(name.split())] == name.split()
        assert [number for line in own for number in line[len(name.split()) :]] == numbers


def test_a_screen_that_is_wide_enough_shows_one_table() -> None:
    """Nothing is broken, and nothing is said twice."""
    lines = printed(110)
    assert [sum(header in line for line in lines) for header in HEADERS] == [1] * len(HEADERS)
    assert sum("─" in line for line in lines) == 1


@pytest.mark.parametrize("tight", [False, True])
def test_numbers_stand_below_each_other_and_words_on_the_left(tight: bool) -> None:
    """A number ends where its header ends, a name begins where its header does, title and caption at the left."""
    title, _, headers, _, *rows, _, caption = printed(120, tight=tight)
    assert (title, caption) == ("Held and sent", "All of it was measured.")
    ends = [headers.index(header) + len(header) for header in HEADERS[1:]]
    for line, (name, *numbers) in zip(rows, ROWS, strict=True):
        assert line.index(name) == headers.index(HEADERS[0]) == 2 - tight
        assert [line[:end].split()[-1] for end in ends] == numbers


def test_a_tight_table_has_less_between_its_columns() -> None:
    """One space less between any two of six, and none at the edges."""
    loose, tight = (max(map(len, printed(120, tight=tight))) for tight in (False, True))
    assert loose - tight == (len(HEADERS) - 1) + 2


def test_title_and_caption_are_said_once() -> None:
    """Above the first part and below the last."""
    lines = [line for line in printed(40) if line.strip()]
    assert sum("─" in line for line in lines) > 1
    assert (lines[0].strip(), lines[-1].strip()) == ("Held and sent", "All of it was measured.")
    assert sum("Held and sent" in line for line in lines) == 1
