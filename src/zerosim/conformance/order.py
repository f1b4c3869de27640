"""Which rank is out of step: the ranks' collectives, compared as far as they have come.

Owns the comparison and its sentences. Must not know where ranks show how far they are, nor what collectives are for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zerosim.conformance.board import Doing, Mismatch, Slot


def out_of_order(slots: Sequence[Slot], usual: Sequence[tuple[str, str]] = ()) -> Mismatch | None:
    """The rank whose collectives are not those of the others, as far as it can be told already.

    Ranks are compared in the step that is the furthest: where two have asked for an n-th collective of a group it
    is the same, and who has finished has asked for all of them. ``usual`` is what was asked for in the step before.
    """
    step = max((slot.step for slot in slots), default=0)
    here = [slot for slot in slots if slot.step == step and slot.doing is not Doing.FAILED]
    for group in dict.fromkeys(group for slot in here for group, _ in slot.asked):
        sequences = {slot.rank: [key for name, key in slot.asked if name == group] for slot in here}
        finished = {slot.rank for slot in here if slot.doing in (Doing.COMPARING, Doing.CLOSED)}
        if group:  # of another group's collectives, who is not in it asks for none
            sequences = {rank: keys for rank, keys in sequences.items() if keys}
        before = [key for name, key in usual if name == group]
        if (found := _first_difference(step, sequences, finished, before)) is not None:
            return found
    return None


def undecided(slots: Sequence[Slot]) -> bool:
    """Whether ranks have yet to come to where two others differ: then a majority may still form."""
    step = max((slot.step for slot in slots), default=0)
    here = [slot for slot in slots if slot.doing not in (Doing.FAILED, Doing.CLOSED)]
    most = max((len(slot.asked) for slot in here if slot.step == step), default=0)
    return any(slot.step < step or (len(slot.asked) < most and slot.doing is not Doing.COMPARING) for slot in here)


def _first_difference(
    step: int, sequences: dict[int, list[str]], finished: set[int], usual: Sequence[str]
) -> Mismatch | None:
    for index in range(max(map(len, sequences.values()), default=0)):
        at = {
            rank: keys[index] if index < len(keys) else ""
            for rank, keys in sequences.items()
            if index < len(keys) or rank in finished
        }
        if len({_bare(key) for key in at.values()}) > 1:
            return _named(step, index, at, usual)
        labelled = {rank: key for rank, key in at.items() if key != _bare(key)}  # those that are known to be of whose
        if len(set(labelled.values())) > 1:
            return _named(step, index, labelled, usual)
    return None


def _bare(key: str) -> str:
    """A collective without the parameters that it is of."""
    return key.partition(" (")[0]


def _named(step: int, index: int, at: dict[int, str], usual: Sequence[str]) -> Mismatch:
    common, times = Counter(at.values()).most_common(1)[0]
    if times * 2 <= len(at):  # no majority: what was asked for in the step before, or what the first asks for
        common = usual[index] if index < len(usual) and usual[index] in at.values() else at[min(at)]
    odd = next(rank for rank, key in at.items() if key != common)
    others = [rank for rank, key in at.items() if key == common]
    what = f"collective {index + 1} of the step"
    if not at[odd]:
        text = (
            f"rank {odd} has finished its step after {index} collective{'s' * (index != 1)}, where {_ranks(others)} "
            f"{_verb(others, 'ask')} for one more, {common}. Rank {odd} has left one out."
        )
    elif not common:
        text = (
            f"rank {odd} asks for {at[odd]} as {what}, where {_ranks(others)} {_verb(others, 'have')} finished. Rank "
            f"{odd} asks for one too many."
        )
    else:
        text = f"rank {odd} asks for {at[odd]} as {what}, where {_ranks(others)} {_verb(others, 'ask')} for {common}. "
        following = list(map(_bare, usual[index + 1 :]))
        if following and _bare(usual[index]) == _bare(common) and following[0] == _bare(at[odd]):
            text += f"Rank {odd} has left one out."
        elif _bare(at[odd]) in map(_bare, usual) or not usual:
            text += f"On rank {odd} it is out of order, or one too many or too few."
        else:
            text += f"Rank {odd} asks for one too many, or for another."
    return Mismatch(odd, step, text)


def _verb(ranks: Sequence[int], verb: str) -> str:
    if len(ranks) > 1:
        return verb
    return {"ask": "asks", "have": "has"}[verb]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def stalled(slots: Sequence[Slot], seconds: float) -> Mismatch:
    """Who keeps the others waiting, when nobody has moved for so long."""
    if (found := out_of_order(slots)) is not None:
        return found
    places = Counter((slot.step, slot.doing, len(slot.asked)) for slot in slots)
    usual, _ = max(places.items(), key=lambda item: (item[1], item[0]))
    odd = next((slot for slot in slots if (slot.step, slot.doing, len(slot.asked)) != usual), slots[-1])
    last = odd.asked[-1][1] if odd.asked else "none"
    what = {
        Doing.OUTSIDE: "is not in the step",
        Doing.STEP: f"is in step {odd.step}, after {len(odd.asked)} collectives, the last of them: {last}",
        Doing.COMPARING: f"has finished step {odd.step}, after {len(odd.asked)} collectives",
        Doing.FAILED: f"has failed: {odd.failed}",
        Doing.CLOSED: "has ended",
    }[odd.doing]
    others = _ranks([slot.rank for slot in slots if slot.rank != odd.rank])
    return Mismatch(
        odd.rank,
        usual[0],
        f"nothing has moved for {seconds:.0f} s: rank {odd.rank} {what}, and {others} wait for it.",
        failed=True,
    )


def died(slot: Slot) -> Mismatch:
    """A rank whose process is gone."""
    last = f", the last of them: {slot.asked[-1][1]}" if slot.asked else ""
    return Mismatch(
        slot.rank, slot.step, f"rank {slot.rank} has died in step {slot.step}, after {len(slot.asked)} "
        f"collectives{last}.", failed=True,
    )  # fmt: skip
