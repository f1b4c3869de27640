"""The plan: a question's rows on its numbers of GPUs, run one by one, and the answers that are searched for.

Owns which runs are made and what is compared with what. Every number comes from a run's
ledger; a search asks with the card's capacity. Must not know how a plan is shown.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version

import msgspec

from zerosim.bands import Band
from zerosim.layers import Role
from zerosim.planner import cluster as hardware
from zerosim.planner import frozen, remedies, search
from zerosim.planner.batch_sizes import MOST_ROWS
from zerosim.planner.cards import Card
from zerosim.planner.estimators import Facts, estimates
from zerosim.planner.model_source import ModelSource, too_large
from zerosim.planner.question import beyond, node_size
from zerosim.planner.recipes import RECIPES
from zerosim.planner.runner import Runner
from zerosim.planner.surprises import surprises
from zerosim.records.plan import (
    SCHEMA,
    Cell,
    Cluster,
    Estimate,
    LargestBatch,
    ModelRecord,
    NoFit,
    Peak,
    Plan,
    SmallestRanks,
    Unit,
)
from zerosim.records.question import Question
from zerosim.stages import Stage
from zerosim.util.garbage import collection_paused

IN_BACKWARD = "each unit is updated in the backward pass, as soon as its gradients are there, which are then freed"
MOST_RANKS = 4096  # a smallest N is searched for up to here

Advance = Callable[[str], None]


def work(question: Question) -> int:
    """How often ``make`` tells that it has advanced, the largest models left out."""
    searches = 1 + len(question.rows) * (1 + len(question.asked)) if question.memory else 0
    return 1 + len(question.rows) * len(question.gpus) + len(question.others) * len(question.asked) + searches


@collection_paused()
def make(source: ModelSource, question: Question, advance: Advance) -> Plan:
    """Run everything that answers the question. ValueError, with what would work, where it cannot be run."""
    model = _model(Runner(source, question))
    for ranks in question.asked:
        beyond(ranks, model.params)
    # What is shown beside what was asked for is left out where it makes no sense.
    question = msgspec.structs.replace(question, gpus=_sensible(question, model.params))
    runner = Runner(source, question)
    advance("the model")
    chosen, cluster = hardware.cluster(question, runner.working(question.rows[0]))
    cells = []
    for ranks in question.gpus:
        for row in question.rows:
            cells.append(cell(runner, row, ranks, chosen, cluster))
            advance(f"{row.name}, N = {ranks:,}")
    others = []
    for ranks in question.asked:
        for row in (row for row in question.others if possible(runner, row, ranks)):
            others.append(cell(runner, row, ranks, chosen, cluster))
            advance(f"{row.name}, N = {ranks:,}")
    smallest: list[SmallestRanks] = []
    largest: list[LargestBatch] = []
    usable = None if question.memory is None else question.memory - question.reserve
    if usable is not None and not runner.prepare(question.rows[0]).states_alone:
        limit = min(MOST_RANKS, model.params)
        for row in question.rows:
            fit = [cell.ranks for cell in cells if cell.row == row and cell.fits]
            smallest.append(_smallest(runner, row, usable, limit, fit))
            advance(f"smallest N under {row.name}")
        for ranks in question.asked:
            for row in question.rows:
                largest.append(_largest(runner, row, ranks, usable))
                advance(f"largest micro-batch under {row.name}")
    no_fit = None
    if usable is not None and smallest and all(each.ranks is None for each in smallest):
        no_fit = _no_fit(runner, min(MOST_RANKS, model.params), usable)
        advance("what takes less")
        no_fit = msgspec.structs.replace(no_fit, remedies=tuple(remedies.tried(source, question, no_fit, usable)))
    return Plan(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"zerosim": version("zerosim"), "python": platform.python_version()},
        question=question,
        precision=runner.precision(question.rows[0]),
        kept=runner.kept(question.rows[0]),
        model=model,
        cluster=cluster,
        cells=cells,
        others=others,
        smallest=smallest,
        largest=largest,
        no_fit=no_fit,
        surprises=surprises(cells),
        estimates=_estimates(runner, model, cells, question),
        largest_models=None,
        why=list(runner.convention.why),
        left_out=list(runner.convention.left_out),
    )


def possible(runner: Runner, row: Stage, ranks: int) -> bool:
    """Whether another row is one of its own on so many GPUs, and can be run with what was asked for."""
    node = node_size(runner.question)
    if (row.two_axes or row.reshard_after_forward == "group") and (ranks <= node or ranks % node):
        return False
    try:
        runner.options(row, ranks)
    except ValueError:  # such as a wire that does not carry the row's own precision
        return False
    return bool(ranks > 1 and (row.params or RECIPES[runner.precision(row)].everywhere))


def _sensible(question: Question, params: int) -> list[int]:
    """Of the numbers of GPUs that are shown those that were asked for, or that can divide parameters and batch."""
    batch, rows = question.global_batch, question.micro_batch
    return [
        ranks
        for ranks in question.gpus
        if ranks in question.asked or (ranks <= params and (batch is None or batch % (ranks * rows) == 0))
    ]


def _model(runner: Runner) -> ModelRecord:
    """What there is to shard, as the schedule sees it: units in order, equal ones in a row counted together."""
    source = runner.source
    model = runner.prepare(runner.question.rows[0]).model
    too_large(model.n_params)
    groups = dict.fromkeys(group for layer in model.layers for group in layer.groups)
    by_role = {role: sum(group.params for group in groups if group.role is role) for role in Role}
    units: list[Unit] = []
    seen: set[object] = set()
    for layer in model.layers:
        own = [group for group in layer.groups if group.role is not Role.BUFFER and group not in seen]
        seen.update(own)
        params = sum(group.params for group in own)
        if units and units[-1].params == params:
            units[-1] = Unit(name=units[-1].name, params=params, count=units[-1].count + 1)
        else:
            units.append(Unit(name=layer.name, params=params))
    return ModelRecord(
        name=source.name,
        kind=source.kind,
        params=model.n_params,
        trainable=by_role[Role.TRAINABLE],
        frozen=by_role[Role.FROZEN],
        buffers=by_role[Role.BUFFER],
        units=units,
        sequence=runner.question.sequence or source.sequence,
        notes=[
            *runner.question.notes,
            *source.notes_for(runner.question.sequence or source.sequence),
            *frozen.note(runner.question.finetuning.frozen_dtype),
            *([IN_BACKWARD] if runner.question.optimizer_in_backward else []),
        ],
    )


def cell(
    runner: Runner, row: Stage, ranks: int, chosen: Card, cluster: Cluster, *, blame: bool = True
) -> Cell:  # fmt: skip
    """A step without a limit, so that its peak is known; to ``blame``, what a card too small for it has no room for."""
    question = runner.question
    ran = runner.run(row, ranks)
    room = shortage = None
    if question.memory is not None:
        room = question.memory - ran.peak.total
        if blame:
            shortage = runner.shortage(row, ranks, question.memory)
            assert (shortage is None) == (room >= 0 and not ran.host_short), "a card holds what its peak does not pass"
        if room >= 0 and runner.prepare(row).states_alone:
            room = None  # of what a step adds nothing is known
    time = None
    if not runner.prepare(row).states_alone:
        error = hardware.error(question, ran, ranks, row, cluster, dense_decoder=runner.source.dense_decoder)
        options = runner.options(row, ranks)
        time = hardware.time(ran, ranks, chosen, cluster, options, runner.tokens, row, question.placement, error)
    return Cell(
        row=row,
        ranks=ranks,
        resident=ran.resident,
        peak=ran.peak,
        traffic=ran.traffic,
        flops=ran.flops,
        room=room,
        reserve=question.reserve if room is not None else 0,
        shortage=shortage,
        time=time,
        saved=ran.saved,
        host=ran.host,
    )


def _smallest(runner: Runner, row: Stage, memory: int, limit: int, fit: list[int]) -> SmallestRanks:
    """Where nothing is sharded one card is like any number of them, but for the ring's blocks and its padding.

    ``fit`` are numbers that it is known to fit on: where rows are padded to N, more GPUs may take more, and
    a search that doubles N would pass by what the table shows. What has no room for the states has none for a step.
    """
    most = limit if row.optimizer else 1
    states = search.smallest(lambda ranks: runner.holds_states(row, ranks, memory), most)
    found = None
    if states is not None:
        found = search.smallest(lambda ranks: runner.fits(row, ranks, memory), most, least=states)
    return SmallestRanks(
        row=row, ranks=min([*fit, *([] if found is None else [found])], default=None), states_alone=states, limit=most
    )


def _largest(runner: Runner, row: Stage, ranks: int, memory: int) -> LargestBatch:
    """The search begins where the peak would be the card's if all that a step adds to what is at rest grew with it."""
    asked = runner.question.micro_batch
    run = runner.run(row, ranks)
    rest = sum(run.resident.values())
    guess = asked * (memory - rest) // max(1, run.peak.total - rest)
    found = search.largest(
        lambda rows: runner.fits(row, ranks, memory, rows), MOST_ROWS, first=max(1, min(guess, MOST_ROWS))
    )
    return LargestBatch(row=row, ranks=ranks, micro_batch=found, at_least=found == MOST_ROWS)


def _no_fit(runner: Runner, limit: int, memory: int) -> NoFit:
    """The row and the number of ranks that need least, of equals the last row and the fewest, and what is left then.

    It need not be the row that shards most: it may hold more beside, as buckets and gathered layers.
    """
    least: tuple[tuple[int, int, int], Stage, Peak] | None = None
    for place, row in enumerate(runner.question.rows):
        most = limit if row.optimizer else 1
        powers = {1 << power for power in range(most.bit_length())}
        # The most ranks first: what holds more than the least so far ends there.
        for ranks in sorted(powers | {*range(1, min(search.EVERY, most) + 1), most}, reverse=True):
            peak = runner.peak(row, ranks, None if least is None else least[0][0])
            if peak is not None and (least is None or (peak.total, -place, ranks) < least[0]):
                least = (peak.total, -place, ranks), row, peak
    assert least is not None, "the first was run without a limit"
    (_, _, ranks), row, peak = least
    shortage = runner.shortage(row, ranks, memory)
    assert shortage is not None, "the search has found that it does not fit"
    return NoFit(row=row, ranks=ranks, peak=peak, shortage=shortage)


def _estimates(runner: Runner, model: ModelRecord, cells: list[Cell], question: Question) -> list[Estimate]:
    """What the well-known formulas say, beside what our ledger has at rest."""
    found, unit = [], max(unit.params for unit in model.units)
    for asked in (each for each in cells if each.ranks in question.asked):
        node, layer = runner.node(asked.ranks), runner.prepare(asked.row).largest_module or unit
        facts = Facts(model.params, asked.ranks, asked.row, largest_layer=layer, largest_unit=unit, node=node)
        there = {} if asked.host is None else {band: node * nbytes for band, nbytes in asked.host.resident.items()}
        card = {band: nbytes for band, nbytes in asked.resident.items() if band != Band.BUFFERS}
        for each in estimates(facts):
            held = there if each.quantity == "on the host" else card
            found.append(
                Estimate(
                    name=each.name, row=asked.row, ranks=asked.ranks, formula=each.formula, nbytes=each.nbytes,
                    ours=sum(held.values()), quantity=each.quantity, beside=each.beside(held), why=each.why,
                    source=each.source,
                )
            )  # fmt: skip
    return found
