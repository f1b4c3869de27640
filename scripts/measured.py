"""Hold plans to what published runs measured: record the plans, and write docs/measured.md.

    python scripts/measured.py --record    # run every plan of measured_cases, and write recorded/measured.json
    python scripts/measured.py             # write the page from the recordings

Owns the plans' recording and the page. Which plan belongs to which number is ``measured_cases``'s. A number that is
out of its band stops the writing. Measures nothing.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import measured_cases as cases
from measured_cases import CASES, HELD, Case
from zerosim.bands import Band
from zerosim.records.files import write_whole

ROOT = Path(__file__).parents[1]
MEASURED, RECORDED = ROOT / "recorded" / "measured_memory.csv", ROOT / "recorded" / "measured.json"
PAGE = ROOT / "docs" / "measured.md"
CARD = ROOT / "recorded" / "measured_card.json"  # made by benchmarks/card.py
UNITS = {"B": 1, "elements": 1, "GB": 10**9, "GiB": 2**30}
MIB = 2**20

INTRO = """\
# Predicted against measured

What a plan says, beside what published runs of {frameworks} measured on their cards: {count}
numbers, each with the call that predicts it. A measured number never comes from a formula here: it stands in
[recorded/measured_memory.csv](../recorded/measured_memory.csv) with its source. A plan never comes from a measured
number: it is a training step run on shapes, and no constant belongs to a single run.

Ratios are plan over measured. An eager run's allocated or active peak is within {peak} of its plan, what it holds at
rest within {rest}; what is not has its own table and its reason. This page is written by `scripts/measured.py`, which
stops where a number leaves its band.
"""


def measured() -> dict[str, dict[str, str]]:
    """The measured numbers by name."""
    with MEASURED.open(newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def recorded() -> dict[str, dict[str, int]]:
    """What each plan said, in bytes and elements."""
    found: dict[str, dict[str, int]] = json.loads(RECORDED.read_text())
    return found


# -- the plans


def model(name: str) -> tuple[Any, dict[str, Any]]:
    """What a case's model is to ``zerosim.plan``, and further keywords that it takes."""
    if name in cases.CONFIGS:
        return cases.CONFIGS[name], {}
    if name not in cases.MODULES:
        return name, {}
    import torch

    import measured_models as models

    kind, sizes, block = cases.MODULES[name]
    with torch.device("meta"):
        made = getattr(models, kind)(*sizes)
    more: dict[str, Any] = {"wrap": getattr(models, block)}
    if kind == "LitLlama":
        more |= {"loss": models.kept_loss, "target": models.labels}
    return made, more


def predict(case: Case) -> dict[str, int]:
    """A plan's peak, what is at rest, the shard of the parameters and what is there before the first step."""
    import zerosim as zs
    from zerosim.api.plan_arguments import source_of
    from zerosim.planner.runner import Runner

    made, more = model(case.model)
    record = zs.plan(made, gpus=case.gpus, rows=[case.row], **case.options, **more).record
    [cell] = record.cells
    own = {name: more.get(name) for name in ("inputs", "wrap", "loss", "target")}
    runner = Runner(source_of(made, record.question.finetuning, **own), record.question)
    started = runner.start(case.row, case.gpus)
    held = started.ledger.held
    return {
        "params": record.model.params,
        "rest": sum(cell.resident.values()),
        "peak": cell.peak.total,
        "partition": sum(bucket.states[Band.PARAMS].shape[1] for bucket in started.buckets if bucket.trainable),
        "init": sum(int(held.get(band, 0)) for band in (Band.PARAMS, Band.GATHERED, Band.BUFFERS)),
    }


def record(names: Iterable[str] = CASES) -> None:
    """Run the plans of these names, and write them to the recording; others stay as they are."""
    found = recorded() if RECORDED.exists() else {}
    for name in names:
        found[name] = predict(CASES[name])
        print(name, found[name], flush=True)
    whole = {name: found[name] for name in CASES if name in found}
    write_whole(RECORDED, (json.dumps(whole, indent=1) + "\n").encode())


# -- bands


@cache
def value(name: str) -> float:
    """A measured number, in bytes or elements."""
    row = measured()[name]
    return float(row["value"]) * UNITS[row["unit"]]


def out_of_band(plans: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The measured numbers whose plan is out of its band, with both."""
    wrong = []
    for name, held in HELD.items():
        if held.case is None:
            continue
        said, seen = plans[held.case][held.quantity], value(name)
        ratio = said / seen
        low, high = {
            "eager": (1 - cases.PEAK, 1 + cases.PEAK) if held.quantity == "peak" else (1 - cases.REST, 1 + cases.REST),
            "exact": (1, 1), "compiled": cases.COMPILED, "reserved": cases.RESERVED, "workspace": (0, 1),
        }[held.kind]  # fmt: skip
        if not low <= ratio <= high:
            wrong.append(f"{name}: {ratio:.4f} of what was measured, and {low:g} to {high:g} is its band")
        if held.kind == "workspace" and not cases.WORKSPACE[0] <= (seen - said) / MIB <= cases.WORKSPACE[1]:
            wrong.append(
                f"{name}: {(seen - said) / MIB:.1f} MiB more than planned, {cases.WORKSPACE} MiB are workspaces"
            )
    for name, (said, seen) in growth(plans).items():
        most = cases.FLASH if HELD[name].case in ("mg-flash", "mg-fused") else cases.GROWTH
        if abs(said / seen - 1) > most:
            wrong.append(f"{name}: grows by {said / seen:.4f} of what was measured, within {most:g} is its band")
    return wrong


def growth(plans: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[int, float]]:
    """Of Megatron's runs how much the peak is above what is held at rest: planned and measured."""
    found = {}
    for name, held in HELD.items():
        if name.startswith("mg-") and held.quantity == "peak":
            assert held.case is not None, "every run of Megatron's is planned"
            plan = plans[held.case]
            found[name] = plan["peak"] - plan["rest"], value(name) - value(name.replace("-peak", "-rest"))
    return found


# -- the page


def _size(number: float, unit: str) -> str:
    if unit == "elements":
        return f"{number:,.0f}"
    return f"{number / 2**30:.3f} GiB" if unit == "GiB" else f"{number / 10**9:.3f} GB"


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    columns = head.split(" | ")
    lines = [head, " | ".join("---:" if each in ("measured", "plan", "ratio") else "---" for each in columns)]
    return "\n".join(f"| {line} |" for line in [*lines, *(" | ".join(row) for row in rows)]) + "\n"


def _run(row: Mapping[str, str]) -> str:
    return f"{row['run']}; {row['gpus']} × {row['card'] or 'card not said'}"


def _rows(kinds: tuple[str, ...], plans: Mapping[str, Mapping[str, int]]) -> Iterable[tuple[str, ...]]:
    seen, places = measured(), list(CASES)
    for name, held in HELD.items():
        if held.kind in kinds and held.case is not None:
            row, said = seen[name], plans[held.case][held.quantity]
            yield (
                f"`{name}`", _run(row), row["metric"], _size(value(name), row["unit"]), _size(said, row["unit"]),
                f"{said / value(name):.3f}", f"[{places.index(held.case) + 1}](#the-plans)", held.cause,
            )  # fmt: skip


HEAD = "number | run | what | measured | plan | ratio | plan no. | what remains"


def call(case: Case) -> str:
    """The plan as one types it."""
    if case.model in cases.MODULES:
        kind, sizes, block = cases.MODULES[case.model]
        first = f"models.{kind}{sizes}"
        more = {"wrap": f"models.{block}"}
        if kind == "LitLlama":
            more |= {"loss": "models.kept_loss", "target": "models.labels"}
    else:
        first = f"CONFIGS[{case.model!r}]" if case.model in cases.CONFIGS else repr(case.model)
        more = {}
    row = "".join(each for each in case.row.name.title() if each.isalnum()).replace("Zero", "ZeRO")
    row = {"DataParallel": "DP"}.get(row, row)
    options = {"gpus": repr(case.gpus), "rows": f"[zs.{row}]", **{k: repr(v) for k, v in case.options.items()}, **more}
    return f"zs.plan({first}, {', '.join(f'{name}={each}' for name, each in options.items())})".replace("'", '"')


def _card(path: Path = CARD) -> str:
    """What ``benchmarks/card.py`` found on a card at hand, or how to find it."""
    head = (
        "\n## On a card at hand\n\n`python benchmarks/card.py` trains a model of 217 million parameters in four ways "
        "on "
    )
    if not path.exists():
        return (
            f"{head}one GPU, and prints what is allocated, reserved and held by libraries beside the plan. No such "
            "run is recorded here.\n"
        )
    found = json.loads(path.read_text())
    return f"{head}one GPU. On {found['card']}, torch {found['torch']}:\n\n" + _table(
        "way | at rest | plan | peak | plan | ratio | reserved | workspaces | step",
        (
            (
                row["way"], *(f"{size / MIB:,.1f} MiB" for size in (
                    row["measured"]["rest"], row["plan"]["rest"], row["measured"]["peak"], row["plan"]["peak"],
                )),
                f"{row['plan']['peak'] / row['measured']['peak']:.3f}", f"{row['measured']['reserved'] / MIB:,.0f} MiB",
                f"{row['workspace'] / MIB:,.1f} MiB", f"{1000 * row['measured']['seconds']:.1f} ms",
            )
            for row in found["rows"]
        ),
    )  # fmt: skip


def page() -> str:
    """docs/measured.md. ValueError where a number is out of its band."""
    plans, seen = recorded(), measured()
    if wrong := out_of_band(plans):
        raise ValueError(f"measured: out of their bands: {'; '.join(wrong)}. Find the cause, or run with --record.")
    parts = [
        INTRO.format(
            frameworks="Megatron, DeepSpeed, FSDP, torchtune and litgpt", count=len(HELD),
            peak=f"{cases.PEAK:.0%}", rest=f"{cases.REST:.0%}",
        ),
        "\n## Eager runs: allocated and active memory\n\n",
        _table(HEAD, _rows(("eager", "exact"), plans)),
        "\n## Megatron's runs at rest: states and workspaces\n\nA ledger sees no library's memory. "
        f"These runs hold {cases.WORKSPACE[0]} to {cases.WORKSPACE[1]} MiB beside their states, so that with a model "
        f"as small as this one the plan is not within {cases.REST:.0%}.\n\n",
        _table("number | run | measured | plan | measured − plan | what it is", (
            (f"`{name}`", _run(seen[name]), f"{value(name):,.0f} B", f"{plans[held.case][held.quantity]:,} B",
             f"{(value(name) - plans[held.case][held.quantity]) / MIB:.1f} MiB", held.cause)
            for name, held in HELD.items() if held.kind == "workspace" and held.case is not None
        )),
        f"\nHow far the peak is above that: within {cases.GROWTH:.0%}, and {cases.FLASH:.0%} where attention is one "
        "kernel.\n\n",
        _table("number | measured | plan | ratio", (
            (f"`{name}`", f"{there:,.0f} B", f"{said:,} B", f"{said / there:.4f}")
            for name, (said, there) in growth(plans).items()
        )),
        "\n## Compiled runs\n\nA plan is of an eager run. `torch.compile` fuses operations and recomputes what is "
        f"cheap, and how much is the compiler's affair: a plan says {cases.COMPILED[0]:g} to {cases.COMPILED[1]:g} "
        "times what these runs took. For a compiled run it is out of scope; read it as that range.\n\n",
        _table(HEAD, _rows(("compiled",), plans)),
        "\n## Reserved memory\n\nWhat the allocator has taken from the card goes by the order of allocations and the "
        f"size of the card. What is allocated is {cases.RESERVED[0]:g} to {cases.RESERVED[1]:g} of it here.\n\n",
        _table(HEAD, _rows(("reserved",), plans)),
        _card(),
        "\n## Not predicted\n\n",
        _table("number | run | measured | why not", (
            (f"`{name}`", _run(seen[name]), _size(value(name), seen[name]["unit"]), held.cause)
            for name, held in HELD.items() if held.case is None
        )),
        "\n## The plans\n\nWith `import zerosim as zs`, `CONFIGS` from `scripts/measured_cases.py`, and `models` for "
        "`scripts/measured_models.py`, whose modules are made under `torch.device(\"meta\")`.\n\n",
        "".join(f"{place}. `{call(case)}`\n" for place, case in enumerate(CASES.values(), 1)),
        "\n## Sources\n\n",
        "".join(f"* {each}\n" for each in dict.fromkeys(row["source"] for row in seen.values())),
    ]  # fmt: skip
    return "".join(parts)


if __name__ == "__main__":
    if "--record" in sys.argv:
        record([name for name in sys.argv[1:] if name in CASES] or CASES)
    write_whole(PAGE, page().encode())
