"""Tables on screens of any width: every number is there, whole, and beside what it is of."""

import io

import pytest
from rich.console import Console

from zerosim.report.tables import number_table

HEADERS = ("scheme", "at rest", "with activations", "sent by each rank", "messages", "final loss")
ROWS = (
    ("data parallel", "1,234,567", "16.4956", "256,432", "31", "0.993121"),
    ("ZeRO-1 within groups", "234,567", "4.8706", "1,256,928", "186", "0.993121"),
)


def printed(width: int, rows: tuple[tuple[str, ...], ...] = ROWS) -> list[str]:
    """The lines of a table on a screen of that width."""
    table = number_table("Held and sent", *HEADERS, caption="All of it was measured.")
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


def test_title_and_caption_are_said_once() -> None:
    """Above the first part and below the last."""
    lines = [line for line in printed(40) if line.strip()]
    assert sum("─" in line for line in lines) > 1
    assert (lines[0].strip(), lines[-1].strip()) == ("Held and sent", "All of it was measured.")
    assert sum("Held and sent" in line for line in lines) == 1
