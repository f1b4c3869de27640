"""What was asked for and held beside what the schedule asks for and holds: which differences are said, and how."""

import pytest

pytest.importorskip("torch")

from zerosim.conformance.layout import Layout
from zerosim.conformance.seen import Seen
from zerosim.conformance.volume import Volume
from zerosim.records.conformance import Asked, Expected, Held, Kind, Parameter, Recipe, Rule
from zerosim.stages import ZeRO3

N, ROWS, WIDTH = 4, 130, 100  # rows that four ranks cannot share evenly: 132 once they are padded
SIZE = ROWS * WIDTH
WEIGHT = Parameter(name="weight", shape=(ROWS, WIDTH), trainable=True, unit="", rule=Rule(kind="adam", lr=1e-3))
MOVED = SIZE * (N - 1) // N  # elements a rank sends for one pass over all parameters


def said(gathered: int, rest: int = 4 * SIZE, largest: tuple[str, ...] = ()) -> list[str]:
    """The lines on a step in which all ranks gather a buffer of so many elements and hold ``rest`` bytes."""
    expected = Expected(
        elements={"all-gather": MOVED}, logical={"all-gather": MOVED}, collectives={"all-gather": 1},
        resident={"params": 4 * SIZE}, peak={"params": 4 * SIZE},
    )  # fmt: skip
    volume = Volume(expected, Layout([WEIGHT]), ZeRO3, Recipe(precision="fp32"), N)
    held = Held(rest={"elsewhere": rest}, peak=0, largest=list(largest))
    asked = [Asked(Kind.ALL_GATHER, gathered, "float32", N)]
    assert volume.step([Seen(rank, 1, asked=asked, held=held) for rank in range(N)]) is None
    return volume.held


def test_more_by_padding_alone_is_said_to_be_right() -> None:
    """132 rows for 130, as FSDP2 pads them, are more than the schedule sends; as much needs no word."""
    padded, exact = (said(rows * WIDTH)[0] for rows in (132, ROWS))
    assert padded.startswith(f"asked: {4 * 132 * WIDTH * 3 // 4:,} B per rank where ZeRO-3 sends {4 * MOVED:,}")
    assert padded.endswith("; more, which is right where each parameter is padded by itself")
    assert "more" not in exact


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (48, ""), (-48, ""), (SIZE, "; 1.00 B per parameter more that are your own (outside of the states: int32 [4])"),
        (-SIZE, "; 1.00 B per parameter less"),
    ],
)  # fmt: skip
def test_what_rounds_to_nothing_is_not_said(extra: int, words: str) -> None:
    """A counter of a few bytes is no "0.00 B per parameter more"; what is more, or less, has its size."""
    _, held = said(SIZE, 4 * SIZE + extra, ("int32 [4]",))
    assert held.endswith(f"of each parameter{words}")
