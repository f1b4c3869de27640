"""A verdict as text: the answer first, then what is wrong, what holds, and what was not compared; 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from zerosim.records.conformance import EVERY, Finding, Verdict

WIDTH = 80
SHOWN = 8  # findings


def text(found: Verdict, width: int = WIDTH) -> str:
    """The whole report. Its first line is the answer."""
    return "\n".join(_lines(found, width))


def answer(found: Verdict) -> str:
    """The first line."""
    who = f"{found.row} on {found.ranks} rank{'s' * (found.ranks > 1)}"
    if not found.findings:
        if not found.held:
            return f"• {who}: nothing was compared"
        return f"✓ {who}: {found.steps} step{'s' * (found.steps != 1)} as the simulator has them"
    first = found.findings[0]
    where = "" if first.rank == EVERY else f", rank {first.rank}"
    return f"✗ {who}: wrong in step {first.step}{where} ({first.cause})"


def sentence(found: Finding) -> str:
    """One finding."""
    where = f"step {found.step}" if found.step else "before the first step"
    rank = f", rank {found.rank}" if found.rank != EVERY else ""
    said = found.text.removeprefix(f"rank {found.rank} ") if found.rank != EVERY else found.text
    return f"{where}{rank}: {said}"


def _lines(found: Verdict, width: int) -> Iterator[str]:
    yield answer(found)
    for each in found.findings[:SHOWN]:
        yield from _wrapped("✗ " + sentence(each), width)
    if len(found.findings) > SHOWN:
        yield f"  and {len(found.findings) - SHOWN} more"
    for line in found.held:
        yield from _wrapped("✓ " + line, width)
    for line in found.notes:
        yield from _wrapped("• " + line, width)


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
