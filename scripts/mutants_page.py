"""What becomes of a run of ``mutants.py``: the record, the verdict, and the page made from them.

Owns the rules: of the mutants that were tried, but for those that compute the same, at least 95 % are noticed, and each
of the others has a reason in ``survivors.toml``, which has none for what did not survive. Computes nothing but shares.

    python scripts/mutants_page.py     # write docs/MUTANTS.md from recorded/mutants.json again
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD, PAGE, REASONS = ROOT / "recorded/mutants.json", ROOT / "docs/MUTANTS.md", ROOT / "scripts/survivors.toml"
ENOUGH, SAME = 0.95, "The same: "  # how a reason begins that no test could notice

Modules = Mapping[str, Mapping[str, Any]]
Reasons = Sequence[Mapping[str, Any]]  # each: why, and by module pieces of the changes that it is said of


def entry(changes: int, fates: Sequence[tuple[str, str]], seconds: float) -> dict[str, Any]:
    """What is recorded of a module, of whose changes some were tried and met these fates, asked for so many seconds."""
    described = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return {
        "commit": subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
        "python": platform.python_version(),
        "mutmut": importlib.metadata.version("mutmut"),
        "changes": changes,
        "tried": len(fates),
        "seconds": seconds,
        "never ended": sum(fate == "timeout" for _, fate in fates),
        "survived": sorted(change for change, fate in fates if fate == "survived"),
    }


def share(modules: Modules) -> float:
    """Of the mutants that were tried those that were noticed: by a test that failed, or by one that never ended."""
    survived = sum(len(each["survived"]) for each in modules.values())
    return 1 - survived / total(modules, "tried")


def telling(modules: Modules, reasons: Reasons) -> float:
    """The same of those alone that do not compute the same, as the reasons have it."""
    same = sum(len(changes) for why, changes in by_reason(modules, reasons).items() if why.startswith(SAME))
    tried, survived = total(modules, "tried") - same, sum(len(each["survived"]) for each in modules.values()) - same
    return 1 - survived / tried


def total(modules: Modules, what: str) -> int:
    """A number of all modules together."""
    return sum(int(each[what]) for each in modules.values())


def by_reason(modules: Modules, reasons: Reasons) -> dict[str, list[tuple[str, str]]]:
    """The changes that survived, each with its module, by the first reason that speaks of it; by none under ""."""
    found: dict[str, list[tuple[str, str]]] = {reason["why"]: [] for reason in (*reasons, {"why": ""})}
    for name, module in modules.items():
        for change in module["survived"]:
            said = (each["why"] for each in reasons if any(piece in change for piece in each.get(name, ())))
            found[next(said, "")].append((name, change))
    return found


def wrong(modules: Modules, reasons: Reasons) -> list[str]:
    """What a run must not end with: too many survivors, one without a reason, or a reason without a survivor."""
    said = []
    if (noticed := telling(modules, reasons)) < ENOUGH:
        said.append(f"only {noticed:.1%} of the mutants that tell were noticed; {ENOUGH:.0%} are asked for")
    said += [f"no reason is given for {name}: {change}" for name, change in by_reason(modules, reasons)[""]]
    for reason in reasons:
        for name in reason.keys() - {"why"}:
            survived = modules.get(name, {"survived": ()})["survived"]
            stale = [piece for piece in reason[name] if not any(piece in change for change in survived)]
            said += [f"a reason is given for what has not survived, {name}: {piece}" for piece in stale]
    return said


def page(modules: Modules, reasons: Reasons) -> str:
    """The page: the shares, and the survivors by reason."""
    lines = [
        "# Mutation testing",
        "",
        f"`make mutants` changes functions of the source in one place at a time, and asks the tests each time. Of "
        f"{total(modules, 'changes'):,} changes that can be made to these {len(modules)} modules, "
        f"{total(modules, 'tried'):,} were tried, drawn at random, alike each time: {share(modules):.1%} of them were "
        f"noticed, by a test that failed or never ended, and {telling(modules, reasons):.1%} of those that do not "
        f"compute the same. Each of the others is listed with the reason why no test notices it. Asked are the tests "
        f"that run what is changed, but for those that need torch, a browser or processes: the quickest, for as many "
        f"seconds as the table says. Tables, defaults and what else runs on import alone are not changed. The commit "
        f"is that of which source and tests were read.",
        "",
        "| module | changes | tried | survived | noticed | seconds | commit |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, each in modules.items():
        numbers = f"{each['changes']:,} | {each['tried']:,} | {len(each['survived'])} | {share({name: each}):.1%}"
        lines.append(f"| {name} | {numbers} | {each['seconds']:g} | {each['commit']} |")
    lines += ["", "## What survived, and why"]
    for why, changes in by_reason(modules, reasons).items():
        if changes:
            lines += ["", why.strip() or "No reason is given.", "", "```text"]
            lines += [f"{name}: {change}" for name, change in changes] + ["```"]
    return "\n".join(lines) + "\n"


def kept() -> tuple[Modules, Reasons]:
    """What was recorded, and the reasons."""
    return json.loads(RECORD.read_text()), tomllib.loads(REASONS.read_text())["reason"]


def keep(found: Modules) -> list[str]:
    """Record what was found, beside the other modules', and make the page. What is wrong with all of it."""
    before, reasons = kept()
    modules = dict(sorted({**before, **found}.items()))
    RECORD.write_text(json.dumps(modules, indent=1) + "\n")
    PAGE.write_text(page(modules, reasons))
    return wrong(modules, reasons)


if __name__ == "__main__":
    keep({})
