"""Who is named for what is known of the ranks; without a rank."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest

from zerosim.real_ranks import blame
from zerosim.real_ranks.blame import Known
from zerosim.real_ranks.connection import Status, Trouble, digest_of

CALLS = [("send", 8)] * 3 + [("send", 16)] * 3
FINE, ANSWERED = Known(), Known(answered=True)
PEER = Trouble(text="RuntimeError: Connection closed by peer", waiting=True)


def after(calls: Sequence[tuple[str, int]], **more: Any) -> Status:
    """The status of a rank that has made these operations."""
    digest = reduce(lambda before, call: digest_of(call, before), calls, 0)
    op, nbytes = calls[-1] if calls else ("", 0)
    usual: dict[str, Any] = {
        "calls": len(calls), "op": op, "nbytes": nbytes, "digest": digest, "waiting": True,
    }  # fmt: skip
    return Status(**usual | more)


def dead(how: str, **more: Any) -> Known:
    return Known(closed=True, status=Status(alive=False, how=how, **more))


KILLED, STOPPED = dead("was killed by SIGKILL"), Known(status=Status(stopped=True, how="was stopped by SIGSTOP"))
TROUBLED = Known(closed=True, trouble=PEER, status=Status(alive=False, how="exited with code 1", waiting=True))
CRASHED = Known(closed=True, status=after(CALLS[:3], alive=False, how="was killed by SIGABRT", said="8 vs 16"))


@pytest.mark.parametrize(
    ("known", "text", "ranks"),
    [
        ([FINE, KILLED, TROUBLED, FINE], "Rank 1 was killed by SIGKILL, in a test.", [1]),
        ([FINE, KILLED, TROUBLED, KILLED], "Rank 1 was killed by SIGKILL; Rank 3 was killed by SIGKILL, in a test.",
         [1, 3]),
        ([dead("exited with code 3", said="oh")] * 2,
         "Rank 0 exited with code 3; Rank 1 exited with code 3, in a test. It printed:\noh", [0, 1]),
        ([TROUBLED, Known(trouble=Trouble(text="ValueError: mine", waiting=False)), TROUBLED],
         "Rank 1 failed, in a test: ValueError: mine", [1]),
        ([TROUBLED, STOPPED], "Rank 1 was stopped by SIGSTOP and did not go on, in a test.", [1]),
        ([FINE, Known(closed=True), TROUBLED], "Rank 1 closed its connection without a word, in a test.", [1]),
        ([TROUBLED, FINE, TROUBLED],
         "Rank 1 said nothing, in a test, and others gave up: RuntimeError: Connection closed by peer", [1]),
        ([TROUBLED, TROUBLED], "Rank 0 failed, in a test: RuntimeError: Connection closed by peer", [0]),
        ([ANSWERED, dead("was asked to end", asked=True)], "Rank 1 was asked to end, in a test.", [1]),
        ([KILLED, dead("was asked to end", asked=True)], "Rank 0 was killed by SIGKILL, in a test.", [0]),
        ([ANSWERED, FINE, Known(status=Status(waiting=True))], "Rank 1 made no progress for 9 s, in a test, and Rank 2 "
         "waited for it. If the work is long, give it more with --timeout.", [1]),
        ([Known(status=Status(waiting=True))] * 2, "Rank 0 and Rank 1 made no progress for 9 s, in a test. If the work "
         "is long, give it more with --timeout.", [0, 1]),
    ],
    ids=["killed", "two killed", "ended", "an error of its own", "stopped", "closed", "silent", "errors of all",
         "asked to end", "killed before others were asked to end", "slow", "all wait"],
)  # fmt: skip
def test_the_cause_is_named(known: list[Known], text: str, ranks: list[int]) -> None:
    """Who failed of itself is named with how, and not those that waited for it."""
    found = blame.verdict(known, "a test", 9)
    assert (found.text, found.ranks) == (text, ranks)


def test_what_others_said_stands_beside() -> None:
    """The errors of those that are not to blame are kept by rank, and are no part of the sentence."""
    found = blame.verdict([TROUBLED, KILLED, TROUBLED], "a test", 9)
    assert found.others == {0: PEER.text, 2: PEER.text}
    assert PEER.text not in found.text


@pytest.mark.parametrize(
    ("status", "answered", "says"),
    [
        (after(CALLS[1:5]), False, "has left out a send of 8 B"),
        (after(CALLS[:5], waiting=False), True, "has left out a send of 16 B"),
        (after(CALLS[:4], waiting=False), True, "ended the step after 4 operations, of 6 that the schedule has"),
        (after([*CALLS, ("send", 16)]), False, "has made 7 operations of a step that has 6, the last a send of 16 B"),
        (after([*CALLS[:2], ("all-reduce", 8)]), False,
         "has made 3 operations that are not the first 3 of the schedule, the last an all-reduce of 8 B"),
    ],
    ids=["one left out", "the last left out", "two left out", "one too many", "another"],
)  # fmt: skip
def test_a_rank_out_of_step_is_named_for_what_it_did_to_others(status: Status, answered: bool, says: str) -> None:
    """If its operations are not the schedule's, it is to blame, whether others crashed over it, gave up or hang."""
    odd, hangs = Known(answered=answered, status=status), Known(status=after(CALLS[:5]))
    for others in ([CRASHED, TROUBLED], [hangs, hangs]):
        found = blame.verdict([others[0], odd, others[1]], "a test", 9, lambda: CALLS)
        assert found.text.startswith(f"Rank 1 {says}, in a test.")
        assert found.ranks == [1]
    found = blame.verdict([CRASHED, odd, TROUBLED], "a test", 9, lambda: CALLS)
    assert found.text.endswith(" Rank 0 was killed by SIGABRT over it. It printed:\n8 vs 16")


def test_ranks_in_step_are_not_out_of_it() -> None:
    """Ranks that wait in different places of the same schedule are in step: one that crashed is named for itself."""
    found = blame.verdict([CRASHED, Known(status=after(CALLS[:5])), TROUBLED], "a test", 9, lambda: CALLS)
    assert found.text == "Rank 0 was killed by SIGABRT, in a test. It printed:\n8 vs 16"


@pytest.mark.parametrize(
    ("known", "failing", "certain"),
    [
        ([FINE, ANSWERED], False, False),
        ([FINE, STOPPED], False, False),  # it may go on
        ([FINE, TROUBLED], True, False),  # somebody else began it
        ([FINE, CRASHED], True, False),
        ([FINE, Known(closed=True)], True, False),
        ([FINE, KILLED], True, True),
        ([FINE, Known(trouble=Trouble(text="mine", waiting=False))], True, True),
    ],
)
def test_when_enough_is_known(known: list[Known], failing: bool, certain: bool) -> None:
    """An end, an error or a closed connection is a failure; who began it is certain once one failed of itself."""
    assert (blame.failing(known), blame.certain(known)) == (failing, certain)
