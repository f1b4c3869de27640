"""The plan: a question's stages on its numbers of GPUs, run one by one, and the answers that are searched for.

Owns which runs are made and what is compared with what. Every number comes from a run's
ledger; a search asks with the card's capacity. Must not know how a plan is shown.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from typing import Literal

import msgspec

from zerosim.bands import Band
from zerosim.layers import Role
from zerosim.planner import clusters, search
from zerosim.planner.cards import Card
from zerosim.planner.estimators import Facts, estimates
from zerosim.planner.question import beyond
from zerosim.planner.runs import Ran, Runner
from zerosim.planner.sources import Source, too_large
from zerosim.records.plan import (
    SCHEMA,
    Cell,
    Cluster,
    Estimate,
    Largest,
    ModelRecord,
    Nowhere,
    Oddity,
    Plan,
    Question,
    Shortage,
    Smallest,
    Unit,
)
from zerosim.schemes import SCHEMES

MOST_RANKS = 4096  # a smallest N is searched for up to here
MOST_ROWS = 65_536  # and a largest micro-batch up to here

Advance = Callable[[str], None]


def work(question: Question) -> int:
    """How often ``make`` tells that it has advanced, the ladder left out."""
    searches = len(question.stages) * (1 + len(question.asked)) if question.memory else 0
    return 1 + len(question.stages) * len(question.gpus) + searches


def make(source: Source, question: Question, advance: Advance) -> Plan:
    """Run everything that answers the question. ValueError, with what would work, where it cannot be run."""
    model = _model(Runner(source, question))
    for ranks in question.asked:
        beyond(ranks, model.params)
    # What is shown beside what was asked for is left out where it makes no sense.
    question = msgspec.structs.replace(question, gpus=[ranks for ranks in question.gpus if ranks <= model.params])
    runner = Runner(source, question)
    advance("the model")
    chosen, cluster = clusters.cluster(question, runner.working(question.stages[0]))
    cells = []
    for ranks in question.gpus:
        for stage in question.stages:
            cells.append(_cell(runner, stage, ranks, chosen, cluster))
            advance(f"{SCHEMES[stage].name}, N = {ranks:,}")
    smallest: list[Smallest] = []
    largest: list[Largest] = []
    if question.memory is not None:
        limit = min(MOST_RANKS, model.params)
        for stage in question.stages:
            fit = [cell.ranks for cell in cells if cell.stage == stage and cell.fits]
            smallest.append(_smallest(runner, stage, question.memory, limit, fit))
            advance(f"smallest N under {SCHEMES[stage].name}")
        for ranks in question.asked:
            for stage in question.stages:
                largest.append(_largest(runner, stage, ranks, question.memory))
                advance(f"largest micro-batch under {SCHEMES[stage].name}")
    nowhere = None
    if question.memory is not None and all(each.ranks is None for each in smallest):
        nowhere = _nowhere(runner, min(MOST_RANKS, model.params), question.memory)
    return Plan(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"zerosim": version("zerosim"), "python": platform.python_version()},
        question=question,
        precision=runner.options(question.stages[0])["precision"],
        model=model,
        cluster=cluster,
        cells=cells,
        smallest=smallest,
        largest=largest,
        nowhere=nowhere,
        oddities=_oddities(cells),
        estimates=_estimates(runner, model, cells, question),
        ladder=None,
        why=list(runner.convention.why),
        left_out=list(runner.convention.left_out),
    )


def _model(runner: Runner) -> ModelRecord:
    """What there is to share out, as the schedule sees it: units in order, equal ones in a row counted together."""
    source = runner.source
    model = runner.ready(runner.question.stages[0]).model
    too_large(model.n_params)
    groups = dict.fromkeys(group for layer in model.layers for group in layer.groups)
    by_role = {role: sum(group.size for group in groups if group.role is role) for role in Role}
    units: list[Unit] = []
    seen: set[object] = set()
    for layer in model.layers:
        own = [group for group in layer.groups if group.role is not Role.BUFFER and group not in seen]
        seen.update(own)
        params = sum(group.size for group in own)
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
        notes=source.notes,
    )


def _cell(runner: Runner, stage: int, ranks: int, chosen: Card, cluster: Cluster) -> Cell:
    """A step without a limit, so that its peak is known, and where a card is too small what it has no room for."""
    question = runner.question
    ran = runner.run(stage, ranks)
    assert isinstance(ran, Ran), "only a card's capacity makes a run end"
    room = None if question.memory is None else question.memory - ran.peak.total
    shortage = None
    if question.memory is not None:
        limited = runner.run(stage, ranks, question.memory)
        shortage = limited if isinstance(limited, Shortage) else None
        assert (shortage is None) == (ran.peak.total <= question.memory), "a card holds what its peak does not pass"
    return Cell(
        stage=stage,
        name=SCHEMES[stage].name,
        ranks=ranks,
        resident=ran.resident,
        peak=ran.peak,
        traffic=ran.traffic,
        flops=ran.flops,
        room=room,
        shortage=shortage,
        time=clusters.time(ran, ranks, chosen, cluster, runner.options(stage).get("prefetch", 0)),
    )


def _smallest(runner: Runner, stage: int, memory: int, limit: int, fit: list[int]) -> Smallest:
    """Under data parallel one card is like any number of them, but for the ring's blocks and its padding.

    ``fit`` are numbers that it is known to fit on: where rows are padded to N, more GPUs may take more, and
    a search that doubles N would pass by what the table shows.
    """
    most = limit if SCHEMES[stage].optimizer else 1
    found = search.smallest(lambda ranks: runner.fits(stage, ranks, memory), most)
    return Smallest(
        stage=stage,
        name=SCHEMES[stage].name,
        ranks=min([*fit, *([] if found is None else [found])], default=None),
        states_alone=search.smallest(lambda ranks: runner.holds_states(stage, ranks, memory), most),
        limit=most,
    )


def _largest(runner: Runner, stage: int, ranks: int, memory: int) -> Largest:
    found = search.largest(
        lambda rows: runner.fits(stage, ranks, memory, rows), MOST_ROWS, first=runner.question.micro_batch
    )
    return Largest(stage=stage, name=SCHEMES[stage].name, ranks=ranks, micro_batch=found, at_least=found == MOST_ROWS)


def _nowhere(runner: Runner, limit: int, memory: int) -> Nowhere:
    """The stage and the number of ranks that need least, of equals the highest and fewest, and what is left then.

    It need not be the highest stage: one that shards more may hold more beside, as buckets and gathered layers.
    """
    runs = []
    for stage in runner.question.stages:
        most = limit if SCHEMES[stage].optimizer else 1
        powers = {1 << power for power in range(most.bit_length())}
        for ranks in powers | {*range(1, min(search.EVERY, most) + 1), most}:
            ran = runner.run(stage, ranks)
            assert isinstance(ran, Ran), "only a card's capacity makes a run end"
            runs.append((ran.peak.total, -stage, ranks, ran.peak))
    _, negative, ranks, peak = min(runs, key=lambda run: run[:3])
    stage = -negative
    shortage = runner.run(stage, ranks, memory)
    assert isinstance(shortage, Shortage), "the search has found that it does not fit"
    return Nowhere(stage=stage, name=SCHEMES[stage].name, ranks=ranks, peak=peak, shortage=shortage)


def _oddities(cells: list[Cell]) -> list[Oddity]:
    """Where a stage takes more than the one below it, or at rest more GPUs more than fewer, and the band to blame."""
    found: list[Oddity] = []
    for ranks in dict.fromkeys(cell.ranks for cell in cells):
        for lower, higher in pairwise(cell for cell in cells if cell.ranks == ranks):
            found += _more("at rest", lower, lower.resident, higher, higher.resident)
            found += _more("peak", lower, lower.peak.by_band, higher, higher.peak.by_band)
    for stage in dict.fromkeys(cell.stage for cell in cells):
        for fewer, more in pairwise(cell for cell in cells if cell.stage == stage):
            found += _more("at rest", fewer, fewer.resident, more, more.resident)
    return found


def _more(
    quantity: Literal["at rest", "peak"], one: Cell, before: dict[str, int], other: Cell, after: dict[str, int]
) -> list[Oddity]:
    more = sum(after.values()) - sum(before.values())
    if more <= 0 or (one.stage == other.stage and 100 * more < sum(before.values())):
        return []  # a little padding more or less with every N is nothing odd
    grown = {band: after[band] - before.get(band, 0) for band in after}
    band = max(grown, key=grown.__getitem__)
    return [
        Oddity(
            lower=f"{one.name} on {one.ranks:,}",
            higher=f"{other.name} on {other.ranks:,}",
            quantity=quantity,
            more=more,
            band=band,
            band_more=grown[band],
        )
    ]


def _estimates(runner: Runner, model: ModelRecord, cells: list[Cell], question: Question) -> list[Estimate]:
    """What the well-known formulas say, beside what our ledger has at rest."""
    found = []
    for cell in cells:
        if cell.ranks not in question.asked:
            continue
        facts = Facts(
            params=model.params,
            ranks=cell.ranks,
            stage=cell.stage,
            largest_layer=runner.ready(cell.stage).largest_module or max(unit.params for unit in model.units),
            largest_unit=max(unit.params for unit in model.units),
        )
        held = {band: nbytes for band, nbytes in cell.resident.items() if band != Band.BUFFERS}
        found += [
            Estimate(
                name=each.name, stage=cell.stage, ranks=cell.ranks, formula=each.formula, nbytes=each.nbytes,
                ours=sum(held.values()), quantity="at rest", beside=each.beside(held), why=each.why, source=each.source,
            )
            for each in estimates(facts)
        ]  # fmt: skip
    return found
