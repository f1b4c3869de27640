"""What a plan answers, in sentences: what fits, where, and what is to blame. Takes records; computes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape

from zerosim.bands import Band
from zerosim.records.plan import NoFit, Peak, Plan, Question
from zerosim.util import sizes

HOW = {"at rest": "at rest", "peak": "at the peak"}
REMEDIES = {
    Band.ACTIVATIONS: "fewer rows or shorter sequences in a micro-batch, or --checkpoint full",
    Band.GATHERED: "smaller units, or a shorter --prefetch",
    Band.UNREDUCED: "smaller units",
    Band.BLOCKS: "smaller units or a narrower --wire",
    Band.BUCKET: "a smaller --bucket",
}


def lines(plan: Plan) -> Iterator[str]:
    """What was searched for, and what is to blame, in sentences."""
    question = plan.question
    if question.memory:
        numbers: list[str] = []
        for each in plan.smallest:
            found = f"{each.ranks:,}" if each.ranks else f"none up to {each.limit:,}" if each.limit > 1 else "none"
            numbers.append(f"{each.row.name} {found} ({each.states_alone or 'none'})")
        if numbers:
            yield f"[bold]smallest N that fits[/] (by model states alone): {', '.join(numbers)}"
        for ranks in question.asked:
            yield from _at(plan, ranks)
    else:
        yield "Whether it fits, and where, takes a card: --memory 80GB, or --card."
    for ranks in question.asked:
        for cell in plan.at(ranks)[-1:]:
            most = ", ".join(f"{unit} {size(question, nbytes)}" for unit, nbytes in cell.peak.by_unit.items())
            yield escape(
                f"to blame at the peak of {cell.name} on {ranks:,} ({instant(cell.peak)}): {cell.peak.largest}, "
                f"{size(question, cell.peak.by_band[cell.peak.largest])}; what comes and goes is of {most}"
            )
        yield from _saved(plan, ranks)
    for odd in plan.surprises:
        more = size(question, odd.more)
        yield (
            f"[yellow]{odd.higher} takes more than {odd.lower} {HOW[odd.quantity]}[/]: {more} more; "
            f"{'the cause is' if odd.band_more >= odd.more else 'what grew most is'} {odd.band}, "
            f"{size(question, odd.band_more)} more"
        )
    if plan.no_fit:
        yield _no_fit(question, plan.no_fit)


def _at(plan: Plan, ranks: int) -> Iterator[str]:
    question = plan.question
    first = plan.first_fit(ranks)
    if first is not None and first.room is not None:
        room = size(question, first.room)
        yield f"[bold]first scheme that fits on {ranks:,}[/]: {first.name}, with {room} to spare"
    elif any(cell.room is None for cell in plan.at(ranks)):
        alone = "the model states alone do, and they are all that is counted here"
        yield f"[bold yellow]whether it fits on {ranks:,} is not known[/]: {alone}"
    else:
        yield f"[bold red]no scheme fits on {ranks:,}[/]"
    rows = [
        f"{each.row.name} {'≥ ' if each.at_least else ''}{each.micro_batch or 'none'}"
        for each in plan.largest
        if each.ranks == ranks
    ]
    if rows:
        yield f"[bold]largest micro-batch on {ranks:,}[/]: {', '.join(rows)}"
    for cell in plan.at(ranks):
        if cell.shortage:
            held = sum(cell.shortage.held.values())
            yield escape(
                f"  {cell.name} runs out at {cell.shortage.unit or 'the start'}: {cell.shortage.band} of "
                f"{size(question, cell.shortage.asked)}, with {size(question, held)} held"
            )


def _saved(plan: Plan, ranks: int) -> Iterator[str]:
    """What a checkpoint takes on disk, rows of equal ones together, and what one file of it takes."""
    question = plan.question
    by_size: dict[tuple[int, int], list[str]] = {}
    whole = by_layer = 0
    for cell in plan.at(ranks):
        saved = cell.saved
        by_size.setdefault((saved.total, saved.rank), []).append(cell.name)
        whole, by_layer = saved.whole, max(by_layer, saved.by_layer)
    if not by_size:
        return
    found = [
        f"{', '.join(names)} {size(question, total)}, of which {size(question, rank)} in the first rank's file"
        for (total, rank), names in by_size.items()
    ]
    yield escape(
        f"a checkpoint on {ranks:,}: {'; '.join(found)}. One file of the parameters in fp32 has "
        f"{size(question, whole)}, which is what gathering all of them takes; a layer at a time takes "
        f"{size(question, by_layer)} at most"
    )


def _no_fit(question: Question, no_fit: NoFit) -> str:
    """Why no number of GPUs helps, and what would."""
    peak = no_fit.peak
    alone = peak.by_unit.get(peak.unit, 0)
    blame = f"most of it is {peak.largest}, {sizes.both(peak.by_band[peak.largest])}"
    if alone > (question.memory or 0):
        blame = f"{peak.unit} alone takes {sizes.both(alone)} then, and {blame}"
    remedy = REMEDIES.get(Band(peak.largest), "a smaller model")
    return (
        f"[bold red]no N fits[/]: {no_fit.row.name} on {no_fit.ranks:,} still peaks at {sizes.both(peak.total)} "
        f"({escape(instant(peak))}); {escape(blame)}. The smallest card that would do has "
        f"{peak.total:,} bytes, {sizes.both(peak.total, 4)}. What would help: {remedy}."
    )


def instant(peak: Peak) -> str:
    """When it is, and for which unit; the loss, between forward and backward, is both."""
    if peak.phase == "other":
        return peak.unit or "between steps"
    return f"{peak.phase}, {peak.unit}" if peak.unit else peak.phase


def size(question: Question, nbytes: int) -> str:
    """Bytes in the kind of unit that the card was given in."""
    return sizes.text(nbytes, binary=question.binary)
