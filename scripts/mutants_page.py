"""What becomes of a run of ``mutants.py``: the record, the verdict, and the page made from them.

Owns the rules: at least 90 % of the mutants noticed, and for each that was not a reason in
``survivors.toml``, which gives none for what has not survived. Computes nothing but shares.

    python scripts/mutants_page.py     # write docs/MUTANTS.md from recorded/mutants.json again
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD, PAGE, REASONS = ROOT / "recorded/mutants.json", ROOT / "docs/MUTANTS.md", ROOT / "scripts/survivors.toml"
ENOUGH = 0.9
FATES = ("killed", "timeout", "survived")


def record(tried: Iterable[tuple[Mapping[str, Any], str]]) -> dict[str, Any]:
    """The result of a run: how many mutants of each module met which fate, and the changes that survived."""
    fates: dict[str, Counter[str]] = {}
    survivors: dict[str, list[str]] = {}
    for mutant, fate in tried:
        fates.setdefault(mutant["module"], Counter())[fate] += 1
        if fate == "survived":
            survivors.setdefault(mutant["module"], []).append(change(mutant))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "mutmut": importlib.metadata.version("mutmut"),
        "modules": {name: {fate: counts[fate] for fate in FATES} for name, counts in fates.items()},
        "survivors": {name: sorted(set(changes)) for name, changes in survivors.items()},
    }


def beside_others(found: dict[str, Any]) -> dict[str, Any]:
    """The result with what was recorded before of modules that this run left out."""
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {"modules": {}, "survivors": {}}
    return found | {part: before[part] | found[part] for part in ("modules", "survivors")}


def change(mutant: Mapping[str, Any]) -> str:
    """A change in one line: the function, and its line before and after."""
    return f"{mutant['function'] or 'the module'}: {mutant['before']}  ->  {mutant['after']}"


def reasons(path: Path = REASONS) -> dict[tuple[str, str], str]:
    """Why the tests cannot or need not notice a change, by module and change."""
    entries = tomllib.loads(path.read_text())["reason"] if path.exists() else []
    return {(entry["module"], each): entry["why"] for entry in entries for each in entry["changes"]}


def share(modules: Mapping[str, Mapping[str, int]]) -> float:
    """Of all mutants those that were noticed: by a test that failed, or by one that never ended."""
    every = sum(sum(counts.values()) for counts in modules.values())
    return 1 - sum(counts["survived"] for counts in modules.values()) / max(every, 1)


def wrong(found: Mapping[str, Any], known: Mapping[tuple[str, str], str]) -> list[str]:
    """What a run must not end with: too many survivors, some without a reason, or reasons without a survivor."""
    said = []
    if share(found["modules"]) < ENOUGH:
        said.append(f"only {share(found['modules']):.1%} of the mutants were noticed; {ENOUGH:.0%} are asked for")
    survived = {(module, each) for module, changes in found["survivors"].items() for each in changes}
    said += [f"no reason is given for {module}: {each}" for module, each in sorted(survived - known.keys())]
    stale = {key for key in known.keys() - survived if key[0] in found["modules"]}
    return said + [f"a reason is given for what has not survived, {module}: {each}" for module, each in sorted(stale)]


def judge(found: Mapping[str, Any], *, keep: bool) -> str | int:
    """Print the result; keep it, and make the page, if it is whole and nothing is wrong. An error, or 0."""
    for name, counts in found["modules"].items():
        print(f"{name}: {share({name: counts}):.1%} of {sum(counts.values())}, {counts['survived']} survived")
    known = reasons()
    if said := wrong(found, known):
        return "\n".join(["mutants.py:", *said])
    if keep:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(page(found, known))
    return 0


def page(found: Mapping[str, Any], known: Mapping[tuple[str, str], str]) -> str:
    """The page: the shares, and the survivors by reason."""
    modules = found["modules"]
    every = sum(sum(counts.values()) for counts in modules.values())
    lines = [
        "# Mutation testing",
        "",
        f"On {found['date']} `make mutants` changed the modules below in {every:,} places, one at a time, and asked "
        f"the tests each time: {share(modules):.1%} of the changes made a test fail. Each of the others is listed with "
        f"the reason why none does. Generated from `recorded/mutants.json` and `scripts/survivors.toml`; the changes "
        f"are those of mutmut {found['mutmut']}, made by `scripts/mutants.py` under Python {found['python']}.",
        "",
        "| module | mutants | a test failed | a test never ended | survived | noticed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    total = {fate: sum(counts[fate] for counts in modules.values()) for fate in FATES}
    for name, counts in [*modules.items(), ("all", total)]:
        cells = [sum(counts.values()), counts["killed"], counts["timeout"], counts["survived"]]
        shown = " | ".join(f"{cell:,}" for cell in cells)
        lines.append(f"| {name} | {shown} | {share({name: counts}):.1%} |")
    lines += ["", "## What survived, and why"]
    for module, changes in found["survivors"].items():
        by_reason: dict[str, list[str]] = {}
        for each in changes:
            by_reason.setdefault(known.get((module, each), "No reason is given."), []).append(each)
        lines += ["", f"### {module}"]
        for why, alike in by_reason.items():
            lines += ["", why.strip(), "", "```text", *alike, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page again from what was recorded."""
    PAGE.write_text(page(json.loads(RECORD.read_text()), reasons()))


if __name__ == "__main__":
    main()
