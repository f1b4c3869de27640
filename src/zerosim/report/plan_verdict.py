"""What a plan answers, in sentences: what fits, where, and what is to blame. Takes records; computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from rich.markup import escape

from zerosim.bands import Band
from zerosim.records.plan import NoFit, Peak, Plan
from zerosim.records.question import Question
from zerosim.report import plan_time
from zerosim.util import sizes

_GIB = 2**30
HOW = {"at rest": "at rest", "peak": "at the peak"}
REMEDIES = {
    Band.ACTIVATIONS: "fewer rows or shorter sequences in a micro-batch, or more checkpointing",
    Band.BUCKET: "a smaller --bucket",
}


def answers(plan: Plan) -> Iterator[str]:
    """Whether it fits and with what, and what else was searched for: the next best thing to do."""
    question = plan.question
    if not question.memory:
        yield "Whether it fits, and where, takes a card: --memory 80GB, or --card."
        return
    for ranks in question.asked:
        yield _fits(plan, ranks)
        yield from _better(plan, ranks)
        rows = [
            f"{each.row.name} {'≥ ' if each.at_least else ''}{each.micro_batch}"
            for each in plan.largest
            if each.ranks == ranks and each.micro_batch
        ]
        if rows:
            yield f"→ largest micro-batch on {ranks:,}: {', '.join(rows)}"
        yield from plan_time.sentence(plan, ranks)
    numbers = []
    for found in plan.smallest:
        none = f"none up to {found.limit:,}" if found.limit > 1 else "none"
        numbers.append(
            f"{found.row.name} {f'{found.ranks:,}' if found.ranks else none} (model states alone: "
            f"{f'{found.states_alone:,}' if found.states_alone else 'none'})"
        )
    if numbers:
        yield f"→ smallest N that fits: {', '.join(numbers)}"
    if plan.no_fit:
        yield _no_fit(question, plan.no_fit)


def _fits(plan: Plan, ranks: int) -> str:
    question, cells = plan.question, plan.at(ranks)
    reserved = f" free, {size(question, question.reserve)} of it reserved" if question.reserve else " free"
    fitting = [cell for cell in cells if cell.fits and cell.room is not None]
    if fitting:
        *others, last = (cell.name for cell in fitting)
        names = f"{', '.join(others)} and {last}" if others else last
        left = f"{fitting[0].name} leaves {size(question, fitting[0].room or 0)}{reserved}"
        return f"[bold green]✓ fits on {ranks:,}[/] with {names}; {left}"
    if tight := [cell for cell in cells if cell.tight]:
        first = min(tight, key=lambda cell: cell.peak.total)
        left = f"it leaves {size(question, first.room or 0)}, less than the {size(question, question.reserve)} reserved"
        return f"[bold yellow]~ tight on {ranks:,}[/] with {first.name}: {left}"
    if any(cell.room is None for cell in cells):
        alone = "the model states alone do, and they are all that is counted here"
        return f"[bold yellow]whether it fits on {ranks:,} is not known[/]: {alone}"
    least = min(cells, key=lambda cell: cell.peak.total)
    takes = f"{least.name} takes {size(question, least.peak.total)}"
    if least.host is not None and least.host.short:
        takes += f", and a node's host is short of {size(question, -(least.host.room or 0))}"
    return f"[bold red]✗ no scheme fits on {ranks:,}[/]: {takes}"


def _better(plan: Plan, ranks: int) -> Iterator[str]:
    """Another row that fits where none of those asked for does, or that sends less."""
    fitting = [cell for cell in plan.beside(ranks) if cell.fits]
    first = plan.first_fit(ranks)
    if not fitting:
        return
    best = min(fitting, key=lambda cell: (cell.sent, cell.peak.total))
    if first is None:
        yield f"→ {best.name} fits: {size(plan.question, best.peak.total)} at the peak"
    elif best.sent < first.sent:
        yield (
            f"→ {best.name} fits too, and sends {size(plan.question, best.sent)} a step instead of "
            f"{size(plan.question, first.sent)}"
        )


def reasons(plan: Plan) -> Iterator[str]:
    """What is to blame for the peak, where memory runs out, and what is not as one expects."""
    question = plan.question
    for ranks in question.asked:
        for cell in plan.at(ranks)[-1:]:
            most = ", ".join(f"{unit} {size(question, nbytes)}" for unit, nbytes in cell.peak.by_unit.items())
            yield escape(
                f"to blame at the peak of {cell.name} on {ranks:,} ({instant(cell.peak)}): {cell.peak.largest}, "
                f"{size(question, cell.peak.by_band[cell.peak.largest])}; temporary memory then: {most}"
            )
        for cell in plan.at(ranks):
            if cell.host is not None:
                rest = sum(cell.host.resident.values())
                yield escape(
                    f"on the host each rank of {cell.name} on {ranks:,} holds {size(question, rest)} at rest and "
                    f"{size(question, cell.host.peak)} at the peak, and copies {size(question, cell.host.copied)} in a "
                    f"step"
                )
            if cell.shortage:
                held = sum(cell.shortage.held.values())
                yield escape(
                    f"{cell.name} runs out at {cell.shortage.unit or 'the start'}: {cell.shortage.band} of "
                    f"{size(question, cell.shortage.asked)}, with {size(question, held)} held"
                )
    for odd in plan.surprises:
        more = size(question, odd.more)
        yield (
            f"[yellow]{odd.higher} takes more than {odd.lower} {HOW[odd.quantity]}[/]: {more} more; "
            f"{'the cause is' if odd.band_more >= odd.more else 'what grew most is'} {odd.band}, "
            f"{size(question, odd.band_more)} more"
        )


def saved(plan: Plan, ranks: int) -> Iterator[str]:
    """What a checkpoint takes on disk, rows of equal ones together, and what one file of it takes."""
    question = plan.question
    by_size: dict[tuple[int, int], list[str]] = {}
    whole = by_layer = 0
    for cell in plan.at(ranks):
        written = cell.saved
        by_size.setdefault((written.total, written.rank), []).append(cell.name)
        whole, by_layer = written.whole, max(by_layer, written.by_layer)
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
    least = ", which takes the least of those tried," if no_fit.row.optimizer else ""
    return (
        f"[bold red]no N fits[/]: {no_fit.row.name} on {no_fit.ranks:,}{least} still peaks at "
        f"{sizes.both(peak.total)} ({escape(instant(peak))}); {escape(blame)}. The smallest card that would do has "
        f"{_card(peak.total)}{' beside the reserve' if question.reserve else ''}. {_remedies(question, no_fit)}"
    )


def _card(nbytes: int) -> str:
    """A size that is no less."""
    return f"{nbytes:,} bytes" if nbytes < _GIB else f"{ceil(10 * nbytes / _GIB) / 10:,.1f} GiB"


def _remedies(question: Question, no_fit: NoFit) -> str:
    """What was tried and takes less."""
    if not no_fit.remedies:
        return "Nothing else that was tried takes less: a larger card is needed, or a smaller model."
    tried = [
        f"{each.option} takes {size(question, each.peak)}{f' on {each.ranks:,}' * (each.ranks != no_fit.ranks)}"
        f"{', which fits' * each.fits}"
        for each in no_fit.remedies
    ]
    return f"What takes less, as tried one by one: {'; '.join(tried)}."


def instant(peak: Peak) -> str:
    """When it is, and for which unit; the loss, between forward and backward, is both."""
    if peak.phase == "other":
        return peak.unit or "between steps"
    return f"{peak.phase}, {peak.unit}" if peak.unit else peak.phase


def size(question: Question, nbytes: int) -> str:
    """Bytes in the kind of unit that the card was given in."""
    return sizes.text(nbytes, binary=question.binary)
