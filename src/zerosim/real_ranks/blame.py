"""Who is to blame when ranks fail, and the sentence that says so.

Owns the reasoning, from what is known of each rank: what it answered, how its process fares, how far it has
come. The cause is named alone; what others then said of it is kept beside it. Must not know how that was learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

from zerosim.real_ranks.connection import Status, Trouble, digest_of

Calls = Sequence[tuple[str, int]]
"""The operations of a step in their order, and bytes."""
_CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS")  # how a library ends that was handed something it cannot take


class Known(NamedTuple):
    """What is known of one rank: whether it has answered, closed its connection, told of an error, and its status."""

    answered: bool = False
    closed: bool = False
    trouble: Trouble | None = None
    status: Status = Status()

    @property
    def ended(self) -> bool:
        """Whether its process is gone without having told why, and without having been asked to."""
        return not self.status.alive and self.trouble is None and not self.status.asked

    @property
    def crashed(self) -> bool:
        """Whether that was a library's doing."""
        return self.ended and any(self.status.how.endswith(name) for name in _CRASHES)


class Verdict(NamedTuple):
    """The cause in a sentence, the ranks to blame, and by rank what the others said."""

    text: str
    ranks: list[int]
    others: dict[int, str]


def failing(known: Sequence[Known]) -> bool:
    """Whether something has gone wrong already."""
    return any(not each.status.alive or each.closed or each.trouble is not None for each in known)


def certain(known: Sequence[Known]) -> bool:
    """Whether it is known who was first to fail, and how."""
    return any(
        (each.ended and not each.crashed) or (each.trouble is not None and not each.trouble.waiting) for each in known
    )


def verdict(
    known: Sequence[Known],
    doing: str,
    timeout: float,
    calls: Callable[[], Calls] | None = None,
    who: str = "Rank {}",
) -> Verdict:
    """Whom to name and what to say. ``doing`` is what the ranks are at, and ``calls`` the operations of the step."""
    text, ranks = _cause(known, doing, timeout, calls, who)
    others = {
        rank: each.trouble.text for rank, each in enumerate(known) if each.trouble is not None and rank not in ranks
    }
    return Verdict(text, ranks, others)


def _cause(
    known: Sequence[Known], doing: str, timeout: float, calls: Callable[[], Calls] | None, who: str
) -> tuple[str, list[int]]:
    def ranks(holds: Callable[[Known], bool]) -> list[int]:
        return [rank for rank, each in enumerate(known) if holds(each)]

    def sentence(named: Sequence[int], say: Callable[[int], str]) -> str:
        return "; ".join(f"{who.format(rank)} {say(rank)}" for rank in named) + f", in {doing}."

    def how(rank: int) -> str:
        return known[rank].status.how

    if killed := ranks(lambda each: each.ended and not each.crashed):
        said = "".join(f" It printed:\n{known[rank].status.said}" for rank in killed[:1] if known[rank].status.said)
        return sentence(killed, how) + said, killed
    if own := ranks(lambda each: each.trouble is not None and not each.trouble.waiting):
        return f"{who.format(own[0])} failed, in {doing}: {_text(known[own[0]])}", own[:1]
    if stopped := ranks(lambda each: each.status.alive and each.status.stopped):
        return sentence(stopped, lambda rank: f"{how(rank)} and did not go on"), stopped
    if calls is not None and (odd := _out_of_step(known, calls())):
        return sentence(list(odd), odd.__getitem__) + _crash(known, who), list(odd)
    if crashed := ranks(lambda each: each.ended):
        return sentence(crashed, how) + _crash(known, who, named=True), crashed
    if closed := ranks(lambda each: each.closed and each.trouble is None and not each.status.asked):
        return sentence(closed, lambda rank: "closed its connection without a word"), closed
    troubled = ranks(lambda each: each.trouble is not None)
    silent = ranks(lambda each: not each.answered and each.trouble is None and not each.status.asked)
    busy = [rank for rank in silent if not known[rank].status.waiting]
    if troubled and busy:
        return (
            f"{_names(busy, who)} said nothing, in {doing}, and others gave up: {_text(known[troubled[0]])}",
            busy,
        )
    if troubled:
        return f"{who.format(troubled[0])} failed, in {doing}: {_text(known[troubled[0]])}", troubled[:1]
    if asked := ranks(lambda each: each.status.asked):
        return sentence(asked, how), asked
    named = busy or silent
    waited = [rank for rank in silent if rank not in named]
    text = f"{_names(named, who)} made no progress for {timeout:g} s, in {doing}"
    text += f", and {_names(waited, who)} waited for it" if waited else ""
    return f"{text}. If the work is long, give it more with --timeout.", named


def _out_of_step(known: Sequence[Known], calls: Calls) -> dict[int, str]:
    """The ranks whose operations up to now are not those with which the schedule begins, and in what they differ."""
    digests = list(accumulate(calls, lambda before, call: digest_of(call, before), initial=0))
    odd = {}
    for rank, each in enumerate(known):
        done, last = each.status.calls, f"the last {_a(each.status.op)} of {each.status.nbytes:,} B"
        too_few = each.answered and done < len(calls)
        if done <= len(calls) and each.status.digest == digests[done] and not too_few:
            continue
        if too_few and done < len(calls) - 1:
            odd[rank] = f"ended the step after {done} operations, of {len(calls)} that the schedule has"
        elif left_out := _left_out(each.status, calls):
            odd[rank] = f"has left out {_a(left_out[0])} of {left_out[1]:,} B"
        elif done > len(calls):
            odd[rank] = f"has made {done} operations of a step that has {len(calls)}, {last}"
        else:
            odd[rank] = f"has made {done} operations that are not the first {done} of the schedule, {last}"
    return odd


def _a(op: str) -> str:
    return f"{'an' if op[:1] in 'aeiou' else 'a'} {op}"


def _left_out(status: Status, calls: Calls) -> tuple[str, int] | None:
    """The one operation of the schedule without which a rank's operations are the schedule's."""
    for index, call in enumerate(calls[: status.calls + 1]):
        rest = [*calls[:index], *calls[index + 1 :]][: status.calls]
        if len(rest) == status.calls and reduce(lambda before, each: digest_of(each, before), rest, 0) == status.digest:
            return call
    return None


def _crash(known: Sequence[Known], who: str, named: bool = False) -> str:
    """Which ranks crashed over it, and the library's own words."""
    for rank, each in enumerate(known):
        if each.crashed:
            said = f" It printed:\n{each.status.said}" if each.status.said else ""
            return said if named else f" {who.format(rank)} {each.status.how} over it.{said}"
    return ""


def _text(each: Known) -> str:
    assert each.trouble is not None
    return each.trouble.text


def _names(ranks: Sequence[int], who: str) -> str:
    return " and ".join(who.format(rank) for rank in ranks)
