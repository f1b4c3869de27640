"""Make the recordings that README.md argues from: run each command and keep what it found.

Owns which commands are recorded and what of their results is kept; computes nothing. Without
arguments all are made again; what needs a package that is not installed is left as it was.

    python scripts/record.py [NAME ...]
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from zerosim.records import plan as plan_records
from zerosim.records import real_ranks as corroborate_records
from zerosim.records import results
from zerosim.records.files import ResultsError, write_whole
from zerosim.records.plan import Plan
from zerosim.records.real_ranks import Corroboration
from zerosim.records.results import Results

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recorded"
LLAMA = "tests/planner/configs/llama-3.1-8b.json"

Found = Results | Corroboration | Plan


class Recording(NamedTuple):
    """What is typed after ``zerosim`` for a recording, and the package, if any, without which it cannot be made."""

    arguments: str
    needs: str = ""


RECORDINGS = {
    "lab": Recording("lab"),
    "lab_fp32": Recording("lab --ranks 8 --precision fp32"),
    "lab_mixed": Recording("lab --ranks 8"),
    "digits": Recording("lab --ranks 8 --data digits --steps 40", "sklearn"),
    "card": Recording("lab --ranks 64 --steps 2 --capacity 130kB"),
    "small_card": Recording("lab --ranks 64 --steps 2 --capacity 66kB"),
    "corroborate": Recording("corroborate", "torch"),
    "plan": Recording(f"plan {LLAMA} --gpus 8 --card H100 --seq 8192 --checkpoint full", "transformers"),
    "plan_fsdp2": Recording(
        f"plan {LLAMA} --gpus 8 --card H100 --seq 8192 --micro-batch 2 --checkpoint selective",
        "transformers",
    ),
}


def load(name: str) -> Found | None:
    """A recording, or None where there is none. ResultsError for a file that this version cannot read."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return None
    return _read(RECORDINGS[name].arguments.split()[0], path)


def _read(command: str, path: Path) -> Found:
    readers: dict[str, Callable[[Path], Found]] = {
        "lab": results.load, "corroborate": corroborate_records.load, "plan": plan_records.load
    }  # fmt: skip
    return readers[command](path)


def make(name: str, folder: Path = FOLDER) -> str:
    """Run a recording's command and keep what it found in ``folder``; what became of it, in words.

    ResultsError if the command failed, or found that a check does not hold.
    """
    arguments, needs = RECORDINGS[name]
    if needs and importlib.util.find_spec(needs) is None:
        return f"needs {needs}, which is not installed; left as it was"
    command, *options = shlex.split(arguments)
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            [sys.executable, "-m", "zerosim", command, *options, *_into(command, out)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        )  # fmt: skip
        if done.returncode:
            raise ResultsError(f"zerosim {arguments} ended with exit code {done.returncode}:\n{done.stdout}")
        found = _read(command, Path(out) / ("results.json" if command == "lab" else f"{command}.json"))
    content = msgspec.json.encode(slim(found))
    write_whole(folder / f"{name}.json", content + b"\n")
    return f"{len(content) / 1000:.0f} kB"


def _into(command: str, out: str) -> list[str]:
    """The options that have the results written to the folder ``out``."""
    return ["--json", str(Path(out) / "plan.json")] if command == "plan" else ["--out", out]


def slim(found: Found) -> Found:
    """Without the sweep's events: half of a file, and drawn from nowhere but the page."""
    if isinstance(found, Results):
        return msgspec.structs.replace(found, sweep=[msgspec.structs.replace(row, events=[]) for row in found.sweep])
    return found


def main(names: list[str]) -> None:
    """Make the recordings of these names, or all."""
    unknown = [name for name in names if name not in RECORDINGS]
    if unknown:
        sys.exit(f"record.py: no recording is called {', '.join(unknown)}; there are {', '.join(RECORDINGS)}.")
    FOLDER.mkdir(exist_ok=True)
    for name in names or RECORDINGS:
        print(f"{name}: zerosim {RECORDINGS[name].arguments}: ", end="", flush=True)
        print(make(name))


if __name__ == "__main__":
    main(sys.argv[1:])
