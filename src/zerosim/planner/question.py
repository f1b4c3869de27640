"""What a plan may be asked, checked before any of it is run.

Owns the rules for the options and the words of their errors. Must not know the simulator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Literal

import msgspec

from zerosim.bands import WIRES, DType
from zerosim.planner.cards import ASSUMED, card
from zerosim.planner.recipes import RECIPES
from zerosim.records.question import Question
from zerosim.stages import DP, HSDP, ROWS, SCHEMES, Stage, ZeRO3
from zerosim.util import sizes

MOST_RANKS = 65_536
RESERVED = 0.1  # of a card, unless told otherwise
MOST_ROWS = 2**31
_NAMES = {re.sub("[-_ ,]", "", row.name.lower()): row for row in ROWS}
_NAMES |= {str(number): row for number, row in enumerate(SCHEMES)}
_NAMES |= dict.fromkeys(("ddp", "dp", "zero0"), DP) | {"mics": HSDP, "fsdp": ZeRO3}
NAMED = ("ddp", *(re.sub("[, ]+", "-", re.sub(r"zero-(?=\d)", "zero", row.name.lower())) for row in ROWS[1:]))
_RANGE = re.compile(r"(\d+)\s*(?:-|\.\.|:)\s*(\d+)")


def gpus(texts: Sequence[str]) -> list[int]:
    """Numbers of GPUs from what was typed: 8, or 4,8,16, or 2-64, which is the powers of two from 2 to 64 and its ends.

    ValueError for anything but integers from 1 to ``MOST_RANKS``.
    """
    found: list[int] = []
    for text in (part.strip() for each in texts for part in each.split(",")):
        if match := _RANGE.fullmatch(text):
            low, high = map(int, match.groups())
            if not 1 <= low <= high <= MOST_RANKS:
                raise ValueError(
                    f"plan(gpus): a range goes from a smaller number to a larger, 1 to {MOST_RANKS:,}, as in 2-64; "
                    f"got {text!r}."
                )
            found += [low, *(1 << power for power in range(17) if low < 1 << power < high), high]
        elif text.isascii() and text.isdecimal() and len(text) < 20 and 1 <= int(text) <= MOST_RANKS:
            found.append(int(text))
        else:
            raise ValueError(
                f"plan(gpus): a number of GPUs is an integer from 1 to {MOST_RANKS:,}, several with commas, or a "
                f"range as in 2-64; got {text!r}."
            )
    return sorted(set(found))


def around(ranks: int) -> list[int]:
    """A number of GPUs with the powers of two on both its sides, two each."""
    below = [1 << power for power in range(17) if 1 << power < ranks][-2:]
    above = [1 << power for power in range(17) if 1 << power > ranks][:2]
    return [*below, ranks, *above]


def bucket(text: str, precision: str | None) -> Literal["layer", "model"] | int:
    """``layer``, ``model``, or the parameters whose gradients fill a size with a unit; ValueError for anything else."""
    if text == "layer" or text == "model":
        return text  # type: ignore[return-value]
    try:
        nbytes = sizes.parse(text)
    except ValueError as error:
        raise ValueError(f"plan(bucket): 'layer', 'model', or a size. {error}") from error
    return max(1, nbytes // gradient(precision or "mixed").itemsize)


def rows(names: Sequence[str]) -> list[Stage]:
    """Built-in rows by what they are called, as in ZeRO-2, zero2, 2 or hsdp; each once, in the order of the table.

    ValueError, naming what there is, for any other.
    """
    found = set()
    for name in (part.strip() for each in names for part in each.split(",")):
        row = _NAMES.get(re.sub("[-_ ]", "", name.lower()))
        if row is None:
            raise ValueError(f"plan(scheme): one of {', '.join(NAMED)} (or 0 to 3); got {name!r}.")
        found.add(row)
    return [row for row in ROWS if row in found]


def node_size(question: Question) -> int:
    """Cards in a node: as asked for, or as the card's preset has it."""
    return question.network.node or card(question.card or ASSUMED).node


def offloaded(rows: Sequence[Stage], what: str | None) -> list[Stage]:
    """The rows with the optimizer's state, and gradients where they are sharded, on the host; or parameters as well.

    ValueError for what makes no sense of a row.
    """
    if what is None:
        return list(rows)
    if what not in ("optimizer", "params"):
        raise ValueError(f"plan(offload): optimizer, or params, which takes the optimizer along; got {what!r}.")
    found = []
    for row in rows:
        if what == "params" and not row.params:
            raise ValueError(
                f"plan(offload): parameters on the host are gathered for each use, so they must be sharded, and "
                f"{row.name} keeps them whole. Use --offload optimizer, or --scheme zero3."
            )
        there = ["optimizer", *["grads"] * bool(row.grads), *["params"] * (what == "params")]
        name = f"{row.name}, {what if what == 'optimizer' else 'all'} on the host"
        found.append(replace(row, name=name, offload=tuple(there)))
    return found


def reserve(text: str | int | None, memory: int | None) -> int:
    """Bytes of a card that are for what no ledger sees, from a size or a part of the card as in 10%.

    By default a tenth: eager runs reserve 10 to 20 % more than they allocate, and libraries' workspaces take 68 to 101
    MiB (recorded by Megatron-LM's tests). ValueError for anything else, or no less than the card.
    """
    if memory is None:
        return 0
    if text is None:
        return round(memory * RESERVED)
    given = str(text).strip()
    try:
        if isinstance(text, int) or given == "0":
            found = int(given)
        elif given.endswith("%"):
            found = round(memory * float(given[:-1]) / 100)
        else:
            found = sizes.parse(given)
    except ValueError as error:
        raise ValueError(f"plan(reserve): a size as in 8GiB, or a part of the card as in 10%. {error}") from error
    if not 0 <= found < memory:
        raise ValueError(
            f"plan(reserve): some of the card's {memory:,} bytes must be left; got {text!r}, {found:,}. Pass less."
        )
    return found


def gradient(precision: str) -> DType:
    """The dtype of a precision's gradients."""
    row = RECIPES[precision]
    return row.grads or row.working


def check(question: Question) -> Question:
    """The question, once it is known to be sound; ValueError with what would work."""
    for name in ("precision", "wire", "wire_params"):
        known = RECIPES if name == "precision" else WIRES
        value = getattr(question, name)
        if value is not None and value not in known:
            raise ValueError(f"plan({name}): one of {', '.join(known)}; got {value!r}.")
    if not question.gpus or not question.asked:
        raise ValueError("plan(gpus): at least one number of GPUs is needed, as in --gpus 8.")
    if not question.rows and question.precision is not None:
        raise ValueError(
            f"plan(precision): under {question.precision!r} the 16-bit copy of a parameter is there only while it is "
            f"gathered, and no scheme of --convention {question.convention} gathers parameters. Use another "
            f"--precision, or --convention fsdp2."
        )
    if not question.rows:
        raise ValueError("plan(rows): at least one row is needed, as in [ZeRO3].")
    for name, most in (("micro_batch", MOST_ROWS), ("sequence", MOST_ROWS), ("accumulate", 2**16), ("prefetch", 2**16)):
        value = getattr(question, name)
        if value is not None and value > most:
            raise ValueError(f"plan({name}): at most {most:,}; got {value:,}. Pass fewer.")
    _in_backward(question)
    _divides(question)
    for name in ("efficiency", "peak", "within", "between", "hop_within", "hop_between"):
        value = getattr(question.network, name)
        if value is not None and not 0 < value < inf:
            raise ValueError(f"plan({name}): a positive number is needed; got {value!r}.")
    efficiency = question.network.efficiency
    if efficiency is not None and efficiency > 1:
        raise ValueError(f"plan(efficiency): a part of the peak, above 0 and at most 1; got {efficiency!r}.")
    try:
        return msgspec.convert(msgspec.to_builtins(question), Question)
    except msgspec.ValidationError as error:
        raise ValueError(f"plan: {error}.") from error


def _in_backward(question: Question) -> None:
    """Refuse what needs the gradients of a whole step where they are freed one by one."""
    if question.optimizer_in_backward and (question.accumulate != 1 or question.global_batch is not None):
        what = "accumulate" if question.global_batch is None else "global_batch"
        raise ValueError(
            f"plan(optimizer_in_backward): gradients are freed as soon as they are used, so those of several "
            f"micro-batches cannot be added; got {what} {getattr(question, what):,}. Leave "
            f"--{what.replace('_', '-')} out and use --micro-batch."
        )


def _divides(question: Question) -> None:
    """Refuse numbers of GPUs among which a global batch can't be divided, naming them and what would do."""
    batch, rows = question.global_batch, question.micro_batch
    if batch is None:
        return
    if question.accumulate != 1:
        raise ValueError(
            f"plan(global_batch): it says how many micro-batches a step has, and so does accumulate; got {batch:,} and "
            f"{question.accumulate:,}. Pass one of them."
        )
    wrong = [ranks for ranks in question.asked if batch % (ranks * rows)]
    if wrong:
        fit = [ranks for ranks in range(1, min(batch // rows, MOST_RANKS) + 1) if batch % (ranks * rows) == 0]
        near = sorted(sorted(fit, key=lambda ranks: abs(ranks - wrong[0]))[:4])
        fitting = ", ".join(map(str, near))
        raise ValueError(
            f"plan(global_batch): {batch:,} rows in micro-batches of {rows:,} cannot be divided among "
            f"{', '.join(f'{ranks:,}' for ranks in wrong)} GPUs. "
            f"{f'Use one of {fitting} GPUs' if near else f'Pass a multiple of {rows:,} rows'}."
        )


def beyond(ranks: int, params: int) -> None:
    """Refuse more ranks than there are parameters."""
    if ranks > params:
        raise ValueError(
            f"plan(gpus): {ranks:,} ranks cannot shard {params:,} parameters: some would own nothing but padding. "
            f"Use at most {params:,}."
        )
