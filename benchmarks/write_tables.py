"""Owns benchmarks/README.md: writes it from the recorded runs beside it, so that no figure is typed.

A recording is what ``bench_step.py --json recorded_PRECISION.json`` leaves.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PRECISIONS = ("fp32", "mixed")

INTRODUCTION = """\
<!-- Written by write_tables.py from recorded_*.json: edit it there. -->
# What a step costs

How much of a step is the training itself, and how much the ring, the casts and the counting? The floor
([floor.py](floor.py)) is plain NumPy in fp32 that does the same batched matmuls, one sum over the ranks, Adam on what
the scheme updates and one write of every rank's copy; no ring, no ledger, no casts. It trains to the same losses, which
is checked before anything is timed. Both take turns on one core; times are CPU milliseconds of one step, medians, and
a ratio is the median over neighbouring turns, with its quartiles. Machines differ: read the ratios.

    make bench                                                   # about five minutes
    make bench ARGS="--cases mission --precision fp32"
    make bench ARGS="--json benchmarks/recorded_mixed.json"      # and then python benchmarks/write_tables.py
"""
MEANING = """\
In fp32 both sides do the same arithmetic, and the ratio is what the ring and the counting cost: N - 1 hops of every
bucket, one call after another, where the floor has one sum. In the larger case they disappear behind the matmuls. In
mixed precision the package also converts what the floor never does: each rank's fp16 working copy twice, its gradients
once down and, as the ring reads them, once up. With four rows per rank a parameter takes part in few
multiplications, so that these conversions weigh more than the training; with 32 rows they do not."""


def page(recordings: dict[str, dict[str, Any]]) -> str:
    """The page, from what each precision's run recorded."""
    sections = (part for name, recording in recordings.items() for part in _section(name, recording))
    return "\n".join([INTRODUCTION, *sections, MEANING, ""])


def _section(precision: str, recording: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in recording["versions"].items() if name != "zerosim")
    yield f"## {precision}\n"
    yield f"{recording['cpu']}, {versions}; {recording['repeats']} turns each, {recording['date'][:10]}.\n"
    yield "| case | ranks | parameters | scheme | floor, ms | zerosim, ms | ratio | quartiles | target |"
    yield "| --- | --: | --: | --- | --: | --: | --: | --- | --: |"
    for row in recording["steps"]:
        target = f"{row['target']:g}" if row["target"] else ""
        yield (
            f"| {row['case']} | {row['ranks']} | {row['params']:,} | {row['scheme']} | {row['floor_ms']:.2f} "
            f"| {row['zerosim_ms']:.2f} | {row['ratio']:.2f} | {row['ratio_low']:.2f}–{row['ratio_high']:.2f} "
            f"| {target} |"
        )
    yield "\nCost per rank over that at 32 ranks (1 is growth in proportion; the ring's hops grow with N as well):\n"
    yield "| scheme | ranks | floor | zerosim |"
    yield "| --- | --: | --: | --: |"
    for cost in recording["cost_per_rank"]:
        yield f"| {cost['scheme']} | {cost['ranks']} | {cost['floor']:.2f} | {cost['zerosim']:.2f} |"
    yield ""


def recordings() -> dict[str, dict[str, Any]]:
    """The recorded runs, by precision."""
    return {name: json.loads((HERE / f"recorded_{name}.json").read_text()) for name in PRECISIONS}


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(recordings()), encoding="utf-8")
