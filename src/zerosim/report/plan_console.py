"""A plan as tables and sentences in a terminal. Takes records; computes nothing but ratios and units."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from zerosim.records.plan import Cell, Estimate, LargestModel, Plan
from zerosim.records.question import Question
from zerosim.report import plan_verdict as verdict
from zerosim.report.plan_details import details
from zerosim.report.tables import number_table, screen
from zerosim.util import sizes

WIDTH = 80  # where there is no terminal to ask
BAR = 14  # characters of the bar that stands for a card
UNITS_LISTED = 7
RESERVED = (
    "not counted, and what the reserve is for: the context, libraries' workspaces and buffers, fragmentation "
    "(--reserve)"
)


def show(plan: Plan, console: Console | None = None, *, verbose: bool = False, estimates: bool = False) -> None:
    """Print what was asked, the answer, and a table of the rows; ``verbose`` for what stands behind it."""
    console = screen(console, width=WIDTH)
    console.print()
    for each in (*_asked(plan), "", *verdict.answers(plan), _overview(plan, console), *verdict.reasons(plan)):
        console.print(each)
    for each in _behind(plan, verbose=verbose):
        console.print(each)
    for table in details(plan) if verbose else ():
        console.print()
        console.print(table)
    if estimates:
        console.print()
        for rule in plan.why:
            console.print(f"{plan.question.convention}: {escape(rule)}")
        for rule in plan.left_out:
            console.print(f"[dim]not counted: {escape(rule)}[/]")
        for ranks in plan.question.asked:
            _estimates(plan, ranks, console)


def _asked(plan: Plan) -> Iterator[str]:
    """The model, the question, and whose rules and recipe, in one line each."""
    model, question = plan.model, plan.question
    trained = f", of which {model.trainable:,} are trained" if model.frozen else ""
    yield f"[bold]{escape(model.name)}: {model.params:,} parameters[/]{trained}"
    rows = f"micro-batch {question.micro_batch:,}"
    rows += f" × {model.sequence:,} tokens" if model.sequence else ""
    yield ", ".join([rows, *_step(plan), f"checkpointing {question.checkpoint}"])
    loss = [f"loss {'in ' * (question.loss in ('fp32', 'bf16'))}{question.loss}"] * bool(model.sequence)
    of = "trained parameter" if model.frozen else "parameter"
    recipe = f"{question.convention}'s rules, {plan.precision}: {plan.kept} bytes a {of} at rest"
    yield ", ".join([recipe, question.optimizer, *loss])
    if question.memory:
        named = f"{question.card}, " if question.card else ""
        reserved = f", of which {verdict.size(question, question.reserve)} reserved" if question.reserve else ""
        yield f"{named}{sizes.both(question.memory)}{reserved}"


def _behind(plan: Plan, *, verbose: bool) -> Iterator[RenderableType]:
    """What the model is made of and what was noted of it; in short, how to see more."""
    if plan.largest_models:
        yield ""
        yield _largest_models(plan)
    model = plan.model
    for note in model.notes:
        yield f"[dim]{escape(note)}[/]"
    if plan.question.reserve:
        yield f"[dim]{RESERVED}[/]"
    if not verbose:
        yield "[dim]-v: by band and collective, what is at the peak, the time; --estimators: others' answers[/]"
        return
    for ranks in plan.question.asked:
        yield from verdict.saved(plan, ranks)
    units = [
        f"{f'{unit.count} × ' if unit.count > 1 else ''}{unit.params:,} ({escape(unit.name)})"
        for unit in model.units
        if unit.params
    ]
    if len(units) > UNITS_LISTED:
        units = [f"{len(units)} kinds, the largest of {max(unit.params for unit in model.units):,}"]
    buffers = f"; and {model.buffers:,} elements of buffers" if model.buffers else ""
    yield f"units by their parameters: {', '.join(units)}{buffers}"


def _step(plan: Plan) -> Iterator[str]:
    """How many micro-batches, and how many tokens, a step has on the numbers of GPUs that were asked for."""
    question, sequence = plan.question, plan.model.sequence
    for ranks in question.asked:
        times = question.micro_batches(ranks)
        if times > 1:
            yield f"{times:,} of them a step on {ranks:,}"
        if sequence:
            yield f"{times * ranks * question.micro_batch * sequence:,} tokens a step on {ranks:,}"


def _overview(plan: Plan, console: Console) -> Table:
    """A line for each row and N. On a narrow screen the bar makes room for the numbers, and then what is sent does."""
    question = plan.question
    left_out = set() if len(question.gpus) > 1 else {"N"}
    if not question.memory:
        left_out |= {"of the card", "room"}
    table = _rows(plan, left_out)
    for column in ("of the card", "sent"):
        if console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
            left_out |= {column}
            table = _rows(plan, left_out)
    if "sent" in left_out:
        table.caption = f"what is sent has no room in {console.width} columns: a wider terminal, or -v"
    return table


def _rows(plan: Plan, left_out: Collection[str]) -> Table:
    question = plan.question
    columns = [
        each for each in ("N", "scheme", "at rest", "peak", "of the card", "room", "sent") if each not in left_out
    ]
    table = number_table("", *columns, left=0)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column.header in ("scheme", "of the card") else "right"
    for ranks in question.gpus:
        cells = sorted((*plan.at(ranks), *plan.beside(ranks)), key=lambda cell: -cell.at_rest)
        for index, cell in enumerate(cells if plan.others else plan.at(ranks)):
            row = {
                "N": f"{ranks:,}" if not index else "",
                "scheme": escape(cell.name),
                "at rest": verdict.size(question, cell.at_rest),
                "peak": verdict.size(question, cell.peak.total),
                "of the card": _bar(question, cell),
                "room": _room(question, cell),
                "sent": verdict.size(question, cell.sent),
            }
            table.add_row(*(row[name] for name in columns))
        table.add_section()
    return table


def _bar(question: Question, cell: Cell) -> str:
    """How much of the card is held at rest, and at the peak; it ends in an exclamation mark where that is more."""
    if not question.memory:
        return ""
    rest, peak = (min(BAR, round(BAR * nbytes / question.memory)) for nbytes in (cell.at_rest, cell.peak.total))
    over = cell.peak.total > question.memory
    return "█" * rest + "▒" * (peak - rest) + ("!" if over else "░" * (BAR - peak))


def _room(question: Question, cell: Cell) -> str:
    if cell.room is None:
        return ""
    if cell.tight:
        return f"[yellow]tight, {verdict.size(question, cell.room)}[/]"
    return f"[green]{verdict.size(question, cell.room)}[/]" if cell.fits else "[red]none[/]"


def _largest_models(plan: Plan) -> Table:
    assert plan.largest_models is not None
    question = plan.question
    table = number_table(
        f"The largest {plan.largest_models.family} that fits on N such cards",
        "N", "scheme", "parameters", "model", "peak", "mostly",
        caption=plan.largest_models.about,
    )  # fmt: skip
    table.columns[1].justify = table.columns[3].justify = table.columns[5].justify = "left"
    last = None
    for model in plan.largest_models.found:
        if last not in (None, model.ranks):
            table.add_section()
        table.add_row(
            f"{model.ranks:,}" if model.ranks != last else "", model.row.name, *_largest_model(question, model)
        )
        last = model.ranks
    return table


def _largest_model(question: Question, model: LargestModel) -> list[str]:
    if model.peak is None:
        return ["none", "", "", ""]
    count = f"{'≥ ' if model.at_least else ''}{model.params:,}"
    return [count, model.shape, verdict.size(question, model.peak.total), model.peak.largest]


def _differs(estimate: Estimate) -> bool:
    """By more than padding."""
    return 1000 * abs(estimate.nbytes - estimate.ours) > estimate.ours


def _estimate(question: Question, estimate: Estimate) -> str:
    text = f"{verdict.size(question, estimate.nbytes)}\n[dim]{estimate.formula}[/]"
    if _differs(estimate):
        band = max(estimate.beside, key=lambda band: abs(estimate.beside[band]))
        sign = "+" if estimate.beside[band] > 0 else ""
        text += f"\n[dim]{sign}{verdict.size(question, estimate.beside[band])} {band}[/]"
    return text


def _granted(plan: Plan) -> str:
    """What the formulas take for granted and the question does not."""
    asked = [f"optimizer {plan.question.optimizer}"] if plan.question.optimizer != "adam" else []
    if plan.model.frozen:
        asked.append(f"{plan.model.frozen:,} parameters frozen")
    return f"All take for granted Adam, and every parameter trained; asked was {', '.join(asked)}." if asked else ""


def _estimates(plan: Plan, ranks: int, console: Console) -> None:
    """The formulas by row, and below them the reasons, each once."""
    cells = plan.at(ranks)
    here = [each for each in plan.estimates if each.ranks == ranks]
    table = number_table(
        f"What well-known estimators say of the same question, N = {ranks:,}", "", *(cell.name for cell in cells),
        caption="P parameters, N ranks, L those of the largest module, U of the largest unit. Below a formula that is "
        f"more than a thousandth off our ledger at rest, the band that differs most. {_granted(plan)}",
    )  # fmt: skip
    whys: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(each.name for each in here):
        row = []
        for cell in cells:
            found = next((each for each in here if (each.name, each.row) == (name, cell.row)), None)
            row.append(_estimate(plan.question, found) if found else "–")
            if found and _differs(found):
                whys.setdefault((name, found.why), []).append(cell.name)
        table.add_row(name, *row)
    table.add_section()
    table.add_row("our ledger, at rest", *(verdict.size(plan.question, cell.at_rest) for cell in cells))
    table.add_row("our ledger, at the peak", *(verdict.size(plan.question, cell.peak.total) for cell in cells))
    console.print()
    console.print(table)
    for (name, why), rows in whys.items():
        console.print(f"[dim]{escape(name)} ({', '.join(rows)}): {escape(why)}.[/]")
