"""The lab: four schemes side by side, the two checks, the sweep over N, and the ablations.

Owns what is run and in which order. Prints and draws nothing.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from zerosim import theory
from zerosim.kernels.choice import choose
from zerosim.lab import ablations
from zerosim.lab.data import DATA
from zerosim.lab.experiment import batches_of, job_of, model_of
from zerosim.lab.record import unlike
from zerosim.lab.side_by_side import predicted, together
from zerosim.model import MLP
from zerosim.records.ablations import Ablations
from zerosim.records.failures import ordered
from zerosim.records.results import SCHEMA, Failure, Results, Settings, SweepRow
from zerosim.schemes import SCHEMES, Stage
from zerosim.util import arguments

Advance = Callable[[str], None]
# Measured as the growth of a fresh process, of the four schemes on 32 to 128 ranks with 8 rows each: what is loaded and
# compiled, and how often all that the ranks hold at their peaks is there, as schemes, second accounts and registers.
LOADED, TIMES_HELD = 122_000_000, 2.7
SWEEP_STEPS = 2  # the second shows that a step ends where it began


def run(settings: Settings, advance: Advance = lambda doing: None, *, rows: Sequence[Stage] = SCHEMES) -> Results:
    """Everything that ``zerosim lab`` measures, of the four schemes or of other ``rows``.

    ``advance`` is called for each of the ``work(settings, rows)`` pieces. Raises ValueError, TypeError,
    ModuleNotFoundError or MemoryError for settings that cannot be run, before anything is run.
    """
    validate(settings, rows)
    model = model_of(settings)
    runs = predicted(settings, rows, model, settings.ranks, resumes=True)
    differences, between, failures = together(
        runs, batches_of(settings, settings.ranks, settings.steps, resumed=True), settings.ranks,
        lambda step, row: advance(f"step {step} of {settings.steps}: {row.name}"),
    )  # fmt: skip
    records = [each.record() for each in runs]
    for each, recorded in zip(runs, records, strict=True):
        if each.running:
            failures += unlike(recorded, each.scheme, each.losses, resumed=settings.resume_at is not None)
    del runs, each  # and with them what all ranks hold
    sweep, found = _sweep(settings, rows, model, advance)
    return Results(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        settings=settings,
        n_params=model.n_params,
        schemes=records,
        differences=differences,
        between_orders=between,
        sweep=sweep,
        ablations=_ablations(settings, model, advance),
        failures=ordered(failures + found),
    )


def validate(settings: Settings, rows: Sequence[Stage] = SCHEMES) -> None:
    """Refuse what cannot be run."""
    for option, least in (("ranks", 1), ("steps", 1), ("batch", 1), ("seed", 0), ("model_seed", 0)):
        arguments.integer("lab", option, getattr(settings, option), least)
    names = [row.name for row in rows]
    if not rows or len(set(names)) < len(names):
        raise ValueError(f"lab(rows): one or more rows are needed, each of another name; got {names}.")
    if not settings.options().recipe.everywhere:
        raise ValueError(
            f"lab(precision): {settings.precision} exists under ZeRO-3 alone, and the lab compares all four. Use bf16."
        )
    for row in rows:
        for ranks in (*sweep_ranks(settings.ranks, settings.node), settings.resume_ranks or settings.ranks):
            row.on(ranks, settings.node)
    if settings.resume_at is not None and settings.resume_at >= settings.steps:
        raise ValueError(
            f"lab(resume_at): after step {settings.resume_at} of {settings.steps} no step follows. Use an earlier one, "
            f"or more steps."
        )
    if settings.resume_ranks and settings.resume_at is None:
        raise ValueError("lab(resume_ranks): ranks to resume on are of a run that is resumed. Say after which step.")
    arguments.divides("lab(batch)", "accumulate", settings.accumulate, settings.batch)
    if settings.sync and settings.accumulate == 1:
        raise ValueError(f"lab(sync): of one micro-batch it says nothing; got {settings.sync!r}. Accumulate several.")
    arguments.one_of("lab", "data", settings.data, DATA)
    model = model_of(settings)
    ranks = settings.ranks
    fewer = {f"ranks={n}": (settings, n) for n in sweep_ranks(ranks, settings.node)[-2::-1]}
    for batch in _fewer_rows(settings):
        fewer[f"batch={batch}"] = msgspec.structs.replace(settings, batch=batch), ranks
    arguments.check_memory(
        f"lab(ranks={ranks}, batch={settings.batch})",
        _footprint(settings, rows, model, ranks),
        ((name, _footprint(asked, rows, model, n)) for name, (asked, n) in fewer.items()),
    )
    next(batches_of(settings, 1, 1))


def _fewer_rows(settings: Settings) -> list[int]:
    """Smaller batches that can be cut into as many micro-batches, the largest first."""
    most = settings.batch // settings.accumulate
    return [settings.accumulate << power for power in reversed(range((most - 1).bit_length()))]


def _footprint(settings: Settings, rows: Sequence[Stage], model: MLP, ranks: int) -> int:
    """Bytes that a lab on ``ranks`` ranks takes: so much whatever is run, and a multiple of what the ranks hold."""
    jobs = [job_of(settings, model, row, ranks) for row in rows]
    held = ranks * sum(sum(peak(job).values()) for job in jobs for peak in (theory.peak, theory.host_peak))
    return LOADED + int(TIMES_HELD * held)


def sweep_ranks(ranks: int, node: int | None = None) -> list[int]:
    """The powers of two up to ``ranks`` that can be cut into nodes, and ``ranks``."""
    return sorted({n for power in range(ranks.bit_length()) if (n := 1 << power) % (node or 1) == 0} | {ranks})


def work(settings: Settings, rows: Sequence[Stage] = SCHEMES) -> int:
    """How many times ``run`` will call ``advance``."""
    return len(rows) * (settings.steps + len(sweep_ranks(settings.ranks, settings.node))) + 4


def _sweep(
    settings: Settings, schemes: Sequence[Stage], model: MLP, advance: Advance
) -> tuple[list[SweepRow], list[Failure]]:
    """All schemes on each N, a few steps each, audited like the rest."""
    rows: list[SweepRow] = []
    failures: list[Failure] = []
    for ranks in sweep_ranks(settings.ranks, settings.node):
        runs = predicted(settings, schemes, model, ranks)
        for batch in batches_of(settings, ranks, SWEEP_STEPS):
            for each in runs:
                each.step(batch)
        while runs:  # each gives its memory back before the next is looked at
            each = runs.pop(0)
            advance(f"sweep, N = {ranks}: {each.row.name}")
            rows.append(each.sweep_row())
            failures += each.finish()
    return rows, failures


def _ablations(settings: Settings, model: MLP, advance: Advance) -> Ablations:
    """With one rank there is nothing to see, and fp32 parameters cannot travel in 16 bits."""
    even = {"uneven": False, "average": "rows"}  # of what these rules are worth, that is no part
    settings = msgspec.structs.replace(settings, **even)
    several = settings.ranks > 1
    advance("gathering the whole model at once")
    gather = ablations.whole_model_gather(settings, model) if several else None
    advance("a narrow wire")
    narrow = ablations.narrow_wire(settings, model) if several and settings.precision in ablations.NARROW else None
    advance("parameters in int8")
    int8 = ablations.int8_params(settings, model) if several and settings.options().recipe.master else None
    advance("buckets of another size in one scheme")
    bucket = ablations.whole_model_bucket(settings, model) if several else {}
    return Ablations(whole_model_gather=gather, narrow_wire=narrow, whole_model_bucket=bucket, int8_params=int8)


def versions() -> dict[str, str]:
    """What it was run with."""
    packages = ("zerosim", "numpy", "ml_dtypes", *(["numba"] if choose().name == "numba" else []))  # which kernels
    return {name: importlib.metadata.version(name) for name in packages} | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
    }
