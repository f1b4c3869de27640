"""docs/time.md: published runs, what was predicted of each, and how far that is off.

Owns the record that the page is made of, and its tables; the words are in docs/time.md.j2. Computes ratios and their
medians; must not plan nor fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from measured_runs import ALL, NODE, WITHIN, Run
from readme_tables import table
from write_readme import environment, reflow
from zerosim.planner.time_model import LARGE_HOP, TimeModel
from zerosim.records.files import Record

ROOT = Path(__file__).resolve().parent.parent
RECORDED, PAGE, TEMPLATE = ROOT / "recorded/step_times.json", ROOT / "docs/time.md", ROOT / "docs/time.md.j2"
BEND = 0.035

# How a size is called, and how the names of its models end.
SIZES: Mapping[str, tuple[str, ...]] = {
    "up to 0.8 billion": ("125m", "350m", "760m"),
    "1 to 3 billion": ("1b", "3b", "1.1B"),
    "7 to 8 billion": ("7b", "7B", "8B"),
    "13 billion": ("13b", "13B"),
    "30 to 34 billion": ("30b", "34B"),
    "70 billion": ("70b", "70B"),
}


class Predicted(Record):
    """Seconds of a step of one run: the least, the estimate, and what a fit without its publisher gives."""

    bound: float
    estimate: float
    left_out: float


class Recorded(Record):
    """The fit, the fits that leave out a publisher each, and what is predicted of each run, in their order."""

    model: TimeModel
    others: dict[str, TimeModel]
    predicted: list[Predicted]


Row = tuple[Run, Predicted]


def recorded() -> Recorded:
    """What ``step_times.py`` has recorded."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=Recorded)


def off(seconds: float, run: Run) -> float:
    """How far a prediction is from what was measured, as a part of it."""
    return abs(seconds / run.seconds - 1)


def page(runs: Sequence[Run], found: Recorded) -> str:
    """The whole page."""
    rows = list(zip(runs, found.predicted, strict=True))
    pair = curves(rows)
    lost = [1 - of(pair[2 * NODE][0]) / of(pair[NODE][0]) for of in (_measured, _estimated)]

    def ratio(**asked: object) -> str:
        meant = [row for row in rows if all(getattr(row[0], name) == value for name, value in asked.items())]
        return f"{median(each.estimate / run.seconds for run, each in meant):.2f}"

    text = environment().from_string(TEMPLATE.read_text(encoding="utf-8"))
    return reflow(
        text.render(
            rows=rows, model=found.model, others=found.others, large_hop=LARGE_HOP, least_bend=BEND, lost=lost,
            highest=max(each.bound / run.seconds for run, each in rows),
            inside=median(off(each.estimate, run) for run, each in rows),
            shares=_shares(found), groups=_groups(rows), tiers=_tiers(pair), every=list(_every(rows)),
            bends=[bend({n: of(each[place]) for n, each in pair.items()}) for place in (0, 1) for of in _BOTH],
            ratio=ratio, fms="foundation-model-stack/fms-fsdp", titan="pytorch/torchtitan",
        )
    )  # fmt: skip


def _shares(found: Recorded) -> str:
    fits = [("all runs", found.model), *((f"all but {name}", fit) for name, fit in found.others.items())]
    return table(
        [
            "fitted on", "products, of the fastest", "attention, FLOPs per byte", "memory, of its bandwidth",
            "links, of their bandwidth",
        ],
        [
            [name, f"{fit.products:.3f}", f"{fit.attention:.1f}", f"{fit.memory:.3f}", f"{fit.network:.3f}"]
            for name, fit in fits
        ],
    )  # fmt: skip


def _groups(rows: Sequence[Row]) -> str:
    ways: list[tuple[str, Callable[[Run], str]]] = [
        ("published by", lambda run: run.publisher),
        ("card:", lambda run: run.card),
        ("precision:", lambda run: run.precision),
        ("parameters:", size),
        ("GPUs:", lambda run: f"{run.gpus:5,}"),
        ("checkpointing:", lambda run: run.checkpoint),
    ]
    lines = [_group("**all**", rows)]
    for name, way in ways:
        keys = {way(run) for run, _ in rows}
        for key in [*(each for each in SIZES if each in keys), *sorted(keys - SIZES.keys())]:
            lines.append(_group(f"{name} {key.strip()}", [row for row in rows if way(row[0]) == key]))
    return table(
        ["", "runs", "highest bound / measured", "estimate, half off by", "left out, half off by", "nine of ten by"],
        lines,
    )


def size(run: Run) -> str:
    """Of the model, in words."""
    return next(name for name, ends in SIZES.items() if run.model.rsplit("-", 1)[1] in ends)


def _group(name: str, rows: Sequence[Row]) -> list[str]:
    out = sorted(off(each.left_out, run) for run, each in rows)
    most = max(each.bound / run.seconds for run, each in rows)
    inside, within = median(off(each.estimate, run) for run, each in rows), out[-(-9 * len(out) // 10) - 1]
    return [name, str(len(rows)), f"{most:.2f}", *(f"{100 * each:.1f} %" for each in (inside, median(out), within))]


def curves(rows: Iterable[Row]) -> dict[int, tuple[Row, Row]]:
    """InternEvo's pair by the number of GPUs: the optimizer's states over all ranks, and within a node."""
    by = {(run.scheme, run.gpus): (run, each) for run, each in rows if run.table == "throughput"}
    return {gpus: (by[ALL, gpus], by[WITHIN, gpus]) for gpus in sorted({gpus for _, gpus in by})}


def bend(tokens: Mapping[int, float]) -> int | None:
    """The first doubling of the GPUs, once there are two nodes, that costs each of them more than ``BEND``.

    >>> bend({8: 100.0, 16: 90.0, 32: 89.0, 64: 85.0})
    64
    """
    for fewer, more in pairwise(sorted(tokens)):
        if fewer > NODE and tokens[more] < (1 - BEND) * tokens[fewer]:
            return more
    return None


def _measured(row: Row) -> float:
    return row[0].tokens_per_second


def _estimated(row: Row) -> float:
    return row[0].tokens_per_second * row[0].seconds / row[1].estimate


_BOTH = (_measured, _estimated)


def _tiers(pair: Mapping[int, tuple[Row, Row]]) -> str:
    lines = []
    for gpus, each in pair.items():
        every, within = ([of(row) for of in _BOTH] for row in each)
        parts = (f"{a / b:.2f}" for a, b in zip(every, within, strict=True))
        lines.append([f"{gpus:,}", *(f"{tokens:,.0f}" for tokens in (*every, *within)), *parts])
    return table(
        ["GPUs", "over all", "estimate", "within a node", "estimate", "over all / within a node", "estimate"], lines
    )


def _every(rows: Sequence[Row]) -> Iterable[tuple[str, str]]:
    header = [
        "model", "GPUs", "card", "scheme", "step", "checkpointing", "measured", "at least", "about", "about / measured",
        "left out / measured",
    ]  # fmt: skip
    for source in dict.fromkeys(run.source for run, _ in rows):
        yield source, table(header, [_line(*row) for row in rows if row[0].source == source])


def _line(run: Run, each: Predicted) -> list[str]:
    return [
        run.model,
        f"{run.gpus:,}",
        f"{run.card}{', fp8' * (run.precision == 'fp8')}{', compiled' * run.compiled}",
        run.scheme,
        f"{run.accumulate} × {run.micro_batch} × {run.sequence:,}",
        run.checkpoint,
        *(f"{seconds:.3f}" for seconds in (run.seconds, each.bound, each.estimate)),
        *(f"{seconds / run.seconds:.2f}" for seconds in (each.estimate, each.left_out)),
    ]
