"""Owns benchmarks/README.md and its chart: writes both from the recorded runs, so that no figure is typed.

A record is what ``bench.py --record`` leaves of each of its parts.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chart import draw
from rivals import FLOOR, PLAIN, ROSTER, ZEROSIM
from zerosim.records.files import write_whole

HERE = Path(__file__).parent
CHART = "steps.png"
NAMES = {part: HERE / f"recorded_{part}.json" for part in ("fp32", "mixed", "memory", "scale")}
MEMORY_TARGET, MEMORY_FIXED = 1.5, 4e6  # times what ranks hold; and bytes beyond it that a small case may take
BUSY = 0.1  # of the core, by others, from which on times mean little

Record = dict[str, Any]

INTRODUCTION = """\
<!-- Written by write_tables.py from recorded_*.json: edit it there. -->
# What a step costs

How much of a step is the training itself, how much the ring, the casts and the counting, and what would it take to
do the same otherwise? One model, one batch, one optimizer and the same four schemes, on the same ranks, in each of
these ways:
"""
METHOD = f"""\
Each is a process of its own, and all of them share one core, on which they take turns in one run (the gloo ranks are
as many processes as ranks, all on that core). Before anything is timed they have to have trained to the same losses.
Times are wall time of one step in milliseconds, medians over the turns; in brackets is the median of the ratio to the
floor in the same turn. Machines differ: read the ratios.

    make bench                                            # all of it
    make bench ARGS="--parts fp32 --cases mission"
    make bench ARGS=--record                              # keep what is found, and write this page from it
    make bench ARGS="--against recorded"                  # beside what is kept: 1 if a row has become slower
    make bench ARGS="--clock cpu"                         # each process's own time, for a machine that is busy
    make bench ARGS=--groups                              # HSDP in nodes of 8 beside ZeRO-3: 1 if over 1.3 times

Rivals that are not installed are left out (`pip install 'zerosim[bench]'` has them). What to bear in mind:

- The floor has fp32 whatever the precision. The others keep fp16 working copies and gradients under `mixed`, beside an
  fp32 master, and convert as they compute.
- {ZEROSIM} runs every hop of the ring and counts it, and gives each rank a copy of its own of whatever it gathers. For
  JAX vmapped a gathered array is one array, of which no rank has a copy: under ZeRO-3 it multiplies everybody's rows by
  the same weights at once, and nothing is gathered. Its reduce-scatter is a sum.
- JAX devices and both ways of torch run a library's own collectives. None of the rivals counts what is held or sent.
- {ZEROSIM} computes casts, all hops of a ring and Adam in loops that numba compiles (extra `fast`). {PLAIN} has the
  same bits from NumPy: N - 1 calls where the ring is one, several passes for a cast, thirteen for Adam.
- What is left between {ZEROSIM} and the floor is the log of a hundred events a step, the ring's partial sums where the
  floor has one sum, and under `mixed` the conversions: each rank's fp16 working copy up for the forward and up again
  for the backward, its gradients down, and up as the ring reads them.
"""


def page(records: Mapping[str, Record]) -> str:
    """The page, from the records of the parts that there are."""
    roster = ["| | |", "| --- | --- |", *(f"| {rival.name} | {rival.what} |" for rival in ROSTER.values()), ""]
    picture = [f"![Milliseconds of one step, by who takes it and under which scheme]({CHART})\n"]
    return "\n".join([INTRODUCTION, *roster, METHOD, *picture, *tables(records), ""])


def tables(records: Mapping[str, Record]) -> Iterator[str]:
    """The lines of every table."""
    for part, record in records.items():
        yield f"## {TITLES[part]}\n"
        yield _about(record) + "\n"
        yield from SECTIONS[part](record)
        yield ""


def _about(record: Record) -> str:
    machine, versions = record["machine"], ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    line = f"{machine['cpu']}, one core; {versions}; {record['date'][:10]}, in {record['seconds']} s."
    if record.get("clock") == "cpu":
        line += " Times are each process's own on a core that it shared, not those of a clock on the wall."
    if machine["busy_before"] > BUSY:
        line += f" **The core was not idle, but {machine['busy_before']:.0%} busy: these times are too long.**"
    return line


def _steps(record: Record) -> Iterator[str]:
    rows = record["steps"]
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        names, first = list(mine[0]["sides"]), mine[0]
        yield f"**{case}**: {first['ranks']} ranks of {first['params']:,} parameters.\n"
        yield f"| scheme | {' | '.join(names)} |"
        yield f"| --- |{' --: |' * len(names)}"
        for row in mine:
            cells = (f"{_number(side['ms'])} ({_number(side['ratio'][1])})" for side in row["sides"].values())
            yield f"| {row['scheme']} | {' | '.join(cells)} |"
        yield ""
        yield from _verdicts(mine)
        apart = max(side["apart"] for row in mine for side in row["sides"].values())
        yield f"- The losses were within {apart:.0e} of {ZEROSIM}'s, relatively.\n"
    if costs := rank_costs(rows):
        yield "What a rank costs over what it costs at 32 ranks (1 is growth in proportion to N):\n"
        yield f"| scheme | ranks | {FLOOR} | {ZEROSIM} |"
        yield "| --- | --: | --: | --: |"
        for scheme, ranks, floor, ours in costs:
            yield f"| {scheme} | {ranks} | {floor:.2f} | {ours:.2f} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _verdicts(rows: list[Record]) -> Iterator[str]:
    """The targets, and which rows miss them."""
    if targets := {row["scheme"]: row["target"] for row in rows if row["target"]}:
        ratios = {row["scheme"]: row["sides"][ZEROSIM]["ratio"][1] for row in rows}
        missed = [f"{scheme} ({ratios[scheme]:.2f})" for scheme, target in targets.items() if ratios[scheme] > target]
        several = " ".join(f"{target:g}" for target in dict.fromkeys(targets.values()))
        yield f"- Within {several.replace(' ', ', ')} times the floor, the target: {_but(missed)}."
    for rival in ROSTER.values():
        if rival.beaten and rival.name in rows[0]["sides"]:
            times = {
                row["scheme"]: row["sides"][rival.name]["ms"] / row["sides"][ZEROSIM]["ms"]
                for row in rows
                if row["scheme"] in rival.schemes
            }
            if not times:
                continue
            missed = [scheme for scheme, factor in times.items() if factor <= 1]
            least, most = (_number(factor) for factor in (min(times.values()), max(times.values())))
            where = "" if len(times) == len(rows) else f" under {' and '.join(times)}"
            yield f"- Ahead of {rival.name}{where}, the target: {_but(missed)}, by {least} to {most} times."


def _but(missed: list[str]) -> str:
    return f"not under {', '.join(missed)}" if missed else "under every scheme"


def rank_costs(rows: list[Record]) -> list[tuple[str, int, float, float]]:
    """Scheme, ranks, and the cost of a rank there over that at the mission's 32, to the floor and to the package."""
    base = {row["scheme"]: row for row in rows if row["case"] == "mission"}
    costs = []
    for row in rows:
        if row["case"].startswith("N=") and (small := base.get(row["scheme"])):
            scale = small["ranks"] / row["ranks"]
            floor, ours = (scale * row["sides"][name]["ms"] / small["sides"][name]["ms"] for name in (FLOOR, ZEROSIM))
            costs.append((row["scheme"], row["ranks"], floor, ours))
    return costs


SLOWER = 1.1  # of the recorded ratio, from which on a row has become slower: if its quartiles are apart as well


def beside(record: Record, before: Record) -> tuple[list[str], bool]:
    """A table of the package's ratios to the floor beside those that were recorded, and whether one is worse."""
    lines = ["| case | scheme | side | recorded | now | |", "| --- | --- | --- | --: | --: | --- |"]
    kept = {(row["case"], row["scheme"]): row["sides"] for row in before["steps"]}
    worse = False
    for row in record["steps"]:
        for name in (ZEROSIM, PLAIN):
            now, then = row["sides"].get(name), kept.get((row["case"], row["scheme"]), {}).get(name)
            if now is None or then is None:
                continue
            slower = now["ratio"][1] > SLOWER * then["ratio"][1] and now["ratio"][0] > then["ratio"][2]
            worse = worse or slower
            lines.append(
                f"| {row['case']} | {row['scheme']} | {name} | {then['ratio'][1]:.2f} | {now['ratio'][1]:.2f} "
                f"| {'**slower**' if slower else ''} |"
            )
    return lines, worse


def _memory(record: Record) -> Iterator[str]:
    yield "What the process grew by, building the scheme and training two steps, beside what all its ranks together"
    yield "held at the peak, by the ledger. `mixed`. What is imported is left out; numba takes 120 MB if it is used.\n"
    yield "| case | scheme | ranks hold, MB | process, MB | beyond, MB | ratio |"
    yield "| --- | --- | --: | --: | --: | --: |"
    missed = []
    for row in record["rows"]:
        held, grown = row["peak_sum"], row["process"]
        if grown is None:
            yield f"| {row['case']} | {row['scheme']} | {held / 1e6:,.1f} | not measured | | |"
            continue
        yield (
            f"| {row['case']} | {row['scheme']} | {held / 1e6:,.1f} | {grown / 1e6:,.1f} | {(grown - held) / 1e6:,.1f} "
            f"| {grown / held:.2f} |"
        )
        if grown > max(MEMORY_TARGET * held, held + MEMORY_FIXED):
            missed.append(f"{row['scheme']} of {row['case']}")
    most = f"{MEMORY_TARGET:g} times what the ranks hold, or {MEMORY_FIXED / 1e6:g} MB above it"
    yield f"\n- Within {most}, the target: {_but(missed)}."


def _scale(record: Record) -> Iterator[str]:
    for row in record["rows"]:
        first, *later = row["seconds"]
        yield (
            f"{row['params']:,} parameters in {len(row['widths']) - 1} layers under {row['scheme']} on {row['ranks']} "
            f"ranks with {row['rows']} rows each, `{row['precision']}`.\n"
        )
        yield "| | |"
        yield "| --- | --: |"
        yield f"| a step, s (the first: {first:.1f}) | {min(later):.1f} |"
        yield f"| held by a rank between steps, GB | {row['resident_sum'] / row['ranks'] / 1e9:.3f} |"
        yield f"| held by a rank at the peak, GB | {row['peak_sum'] / row['ranks'] / 1e9:.3f} |"
        yield f"| sent by a rank in a step, GB | {row['sent_per_rank'] / 1e9:.3f} |"
        yield f"| held by all ranks at the peak, GB | {row['peak_sum'] / 1e9:.2f} |"
        if row["process"] is not None:
            yield f"| the process, GB | {row['process_in_all'] / 1e9:.2f} |"
            yield f"| what it grew by over what the ranks hold | {row['process'] / row['peak_sum']:.2f} |"


TITLES = {
    "fp32": "A step in fp32",
    "mixed": "A step in mixed precision",
    "memory": "Memory",
    "scale": "A hundred million parameters",
}
SECTIONS = {"fp32": _steps, "mixed": _steps, "memory": _memory, "scale": _scale}


def recorded() -> dict[str, Record]:
    """The records that there are, by part."""
    return {part: json.loads(path.read_text(encoding="utf-8")) for part, path in NAMES.items() if path.exists()}


def write_page() -> None:
    """Write README.md and its chart."""
    records = recorded()
    write_whole(HERE / "README.md", page(records).encode())
    draw(records, HERE / CHART)


if __name__ == "__main__":
    write_page()
