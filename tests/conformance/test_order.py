"""Which rank is out of step, from what each has asked for so far, and what is said of it."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from zerosim.conformance.board import Board, Doing, Mismatch, Slot, dead
from zerosim.conformance.order import out_of_order, stalled, undecided

A, B, C = "all-reduce of 8 float32", "all-reduce of 16 float32", "all-gather of 8 float32"


def slots(*asked: str, step: int = 2, doing: Doing = Doing.STEP, group: str = "") -> list[Slot]:
    """Ranks in one step, of whose collectives each letter is one; in capitals they have finished."""
    keys = {"a": A, "b": B, "c": C}
    return [
        Slot(
            rank, step, Doing.COMPARING if some.isupper() else doing,
            [(group, keys[each]) for each in some.lower()], 0, 0, "",
        )
        for rank, some in enumerate(asked)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [("a", "ab", "abc", ""), ("ABC", "abc", "ab"), ("ab", "ab"), ("", "", "")],
    ids=lambda asked: "-".join(asked),
)
def test_who_is_only_slower_is_not_to_blame(asked: tuple[str, ...]) -> None:
    """Ranks that have come to different points of the same sequence agree."""
    assert out_of_order(slots(*asked)) is None


@pytest.mark.parametrize(
    ("asked", "rank", "says"),
    [
        (("abc", "ac", "abc"), 1, "all-gather of 8 float32 as collective 2 of the step, where ranks 0 and 2 ask"),
        (("ab", "ab", "A"), 2, "has finished its step after 1 collective, where ranks 0 and 1 ask for one more"),
        (("A", "ab", "A"), 1, "where ranks 0 and 2 have finished. Rank 1 asks for one too many."),
        (("ba", "ab", "ab", "ab"), 0, "rank 0 asks for all-reduce of 16 float32 as collective 1"),
    ],
)  # fmt: skip
def test_the_odd_one_out_is_named(asked: tuple[str, ...], rank: int, says: str) -> None:
    """The rank that differs from the majority, at the first place where it does."""
    found = out_of_order(slots(*asked))
    assert found is not None
    assert (found.rank, found.step) == (rank, 2)
    assert says in found.text


def test_of_two_the_one_that_changed_is_named() -> None:
    """Without a majority, what was asked for in the step before decides, and what comes after says what is missing."""
    found = out_of_order(slots("bc", "abc"), usual=[("", A), ("", B), ("", C)])
    assert found is not None
    assert found.rank == 0
    assert "Rank 0 has left one out." in found.text


def test_the_parameters_decide_where_the_shapes_do_not() -> None:
    """Collectives of one size on other parameters' memory differ; where it is not known of whose, they do not."""
    first, second = f"{A} (gradient of 0.weight)", f"{A} (gradient of 2.weight)"
    ranks = [Slot(rank, 1, Doing.STEP, [("", key)], 0, 0, "") for rank, key in enumerate((first, second, first, A))]
    found = out_of_order(ranks)
    assert found is not None
    assert found.rank == 1
    assert out_of_order([ranks[0], ranks[3]]) is None


def test_a_group_concerns_its_members() -> None:
    """Ranks that ask for nothing of a group are not in it; those that do must agree."""
    here = slots("ab", "ab", group="inner")
    outside = Slot(2, 2, Doing.COMPARING, [], 0, 0, "")
    assert out_of_order([*here, outside]) is None
    assert out_of_order([*slots("ab", "ba", group="inner"), outside]) is not None


def test_a_verdict_waits_for_whoever_is_still_on_its_way() -> None:
    """While a rank has not come to where two others differ, it is not decided who is in the majority."""
    assert undecided(slots("b", "a", ""))
    assert not undecided(slots("b", "a", "a"))
    assert not undecided(slots("b", "a", "A"))


def test_who_keeps_the_others_waiting() -> None:
    """Where nobody moves and all agree so far, it is the one that is elsewhere."""
    found = stalled(slots("ab", "A", "ab"), 4)
    assert found.rank == 1
    found = stalled(slots("ab", "a", "ab"), 4)
    assert found.rank == 1
    assert found.failed
    assert "nothing has moved for 4 s: rank 1 is in step 2, after 1 collectives" in found.text


def test_what_one_rank_writes_the_others_read(tmp_path: object) -> None:
    """Steps, collectives, failures and the verdict are seen through the file by every rank that maps it."""
    path = tmp_path / "board"  # type: ignore[operator]
    token = Board.make(path, 2)
    one, other = (Board(path, token, rank, 2) for rank in range(2))
    one.begin(3)
    one.ask("", A)
    one.ask("inner", B)
    seen = other.slot(0)
    assert (seen.step, seen.doing, seen.asked) == (3, Doing.STEP, [("", A), ("inner", B)])
    assert seen.process == os.getpid()
    one.begin(4)
    assert other.slot(0).asked == []
    one.now(Doing.FAILED, "ValueError: no")
    assert other.slot(0).failed == "ValueError: no"
    assert one.announce(Mismatch(1, 4, "because"))
    assert not other.announce(Mismatch(0, 4, "no, because"))
    assert other.verdict() == Mismatch(1, 4, "because")
    with pytest.raises(OSError, match="another job"):
        Board(path, b"x" * 16, 0, 2)


def test_of_ranks_that_find_it_at_once_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes while another writes the verdict waits for it, and is not the first."""
    token = Board.make(tmp_path / "board", 2)
    one, other = (Board(tmp_path / "board", token, rank, 2) for rank in range(2))
    write, said = Board._text, []
    second = threading.Thread(target=lambda: said.append(other.announce(Mismatch(1, 4, "mine"))))

    def slowly(board: Board, *given: Any) -> None:
        if board is one:
            second.start()
            second.join(timeout=0.3)
        write(board, *given)

    monkeypatch.setattr(Board, "_text", slowly)
    assert one.announce(Mismatch(0, 4, "because"))
    second.join()
    assert said == [False]
    assert other.verdict() == Mismatch(0, 4, "because")


def test_a_process_that_is_gone_is_dead() -> None:
    """One that has ended, unless it has said so; not one that lives."""
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    assert dead(Slot(0, 1, Doing.STEP, [], 0, process, ""))
    assert not dead(Slot(0, 1, Doing.CLOSED, [], 0, process, ""))
    assert not dead(Slot(0, 1, Doing.STEP, [], 0, os.getpid(), ""))
