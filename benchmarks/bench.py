"""Owns the run: every scheme's step, the package beside its floor and its rivals, and the memory that it takes.

Each side is a process of its own, all of them on one core, of which they take turns; what counts is the median
over the turns, and the median of the ratios of neighbouring turns, so that a machine that slows down slows all.
Times are wall time, as only that is the same thing for one process and for 32: the core should be idle otherwise. On
a busy one ``--clock cpu`` takes each process's own time, and leaves out those that are several.
Before anything is timed, all sides have to have trained to the same losses.
"""

import argparse
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

from cases import CASES, PRECISIONS, SCALE, SCALE_LR, STAGES, Case, Job
from floor import LR
from line import CLOCKS, THREADS, Side, SideFailed, environment, on_cpu
from rivals import FLOOR, ROSTER, ZEROSIM
from write_tables import BUSY, HERE, NAMES, beside, recorded, tables, write_page
from zerosim.records.files import write_whole

TURN = 0.1  # seconds at least: the first step of a turn finds another side's data in the cache
SAME = 1e-4  # of a loss: what another order of summation, and of rounding, may change
ROUNDED = 1e-3  # and what fp32 does where the others have fp16 copies
BYTES_PER_PARAMETER = 24  # of a rank, that a side takes under data parallel: states, and what a step makes of them
GROUPED = 1.3  # times ZeRO-3's: what a step with groups may cost at most
PARTS = (*PRECISIONS, "memory", "scale")


@dataclass(frozen=True)
class Timed:
    """One side's figures in a row."""

    ms: float
    """Of one step, the median over the turns."""
    ratio: tuple[float, float, float]
    """To the floor: quartile, median, quartile over the turns."""
    apart: float
    """The largest relative difference of a loss from the package's, before anything was timed."""


@dataclass(frozen=True)
class Row:
    """What was measured for one scheme in one case."""

    case: str
    scheme: str
    ranks: int
    params: int
    target: float | None
    sides: dict[str, Timed]


def check(job: Job, losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How far each side's losses are from the package's, relatively; RuntimeError for one that trains another way.

    Adam divides a gradient by its own size, so what losses cannot show is a constant factor: an average that is
    only a sum.
    """
    ours, apart = losses[ZEROSIM], {}
    for name, theirs in losses.items():
        apart[name] = max(abs(a - b) / abs(b) for a, b in zip(theirs, ours, strict=True))
        allowed = ROUNDED if name == FLOOR and job.mixed else SAME
        if not apart[name] <= allowed:
            raise RuntimeError(
                f"{name} and {ZEROSIM} train apart under {job.scheme} in {job.precision}, by {apart[name]:.1e} of the "
                f"loss where {allowed:g} is allowed: {list(theirs)} and {list(ours)}. Nothing was timed."
            )
    return apart


def measure(case: Case, job: Job, sides: Sequence[Side], tick: Callable[[], None]) -> Row:
    """Let all sides train the job, hold their losses to one another, and let them take turns."""
    losses, lengths = {}, []
    for side in sides:
        side.train(job)
        seconds, losses[side.name] = side.step(case.check)
        if seconds < 5 * TURN:  # the first step, which may have been compiled, is among them
            seconds, _ = side.step(1)
        lengths.append(ceil(TURN / seconds))
        tick()
    apart = check(job, losses)
    rounds = []
    for _ in range(case.rounds):
        rounds.append([1e3 * side.step(steps)[0] for side, steps in zip(sides, lengths, strict=True)])
        tick()
    turns = dict(zip((side.name for side in sides), np.transpose(rounds), strict=True))
    timed = {
        name: Timed(median(ms.tolist()), tuple(np.quantile(ms / turns[FLOOR], (0.25, 0.5, 0.75)).tolist()), apart[name])
        for name, ms in turns.items()
    }
    return Row(case.name, job.scheme, job.ranks, job.params, job.target(case.name), timed)


def steps(precision: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The record of a precision: all cases, schemes and sides."""
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for case in (CASES[name] for name in options.cases):
        wanted = [
            name
            for name in options.rivals
            if (case.rivals is None or name in case.rivals) and (options.clock == "wall" or ROSTER[name].processes)
        ]
        names = [FLOOR, ZEROSIM, *wanted]
        needed = len(names) * case.ranks * case.job(options.schemes[0], precision).params * BYTES_PER_PARAMETER
        if needed > psutil.virtual_memory().available:
            console.print(f"{case.name}, {precision}: skipped, too little free memory", markup=False)
            continue
        with ExitStack() as stack, Progress(console=console, transient=True) as progress:
            sides = [
                stack.enter_context(
                    Side(
                        name, ROSTER[name].module, cpu=options.cpu, variables=ROSTER[name].environment,
                        clock=options.clock,
                    )
                )
                for name in names
            ]  # fmt: skip
            ticks = len(options.schemes) * (len(sides) + case.rounds)
            tick = partial(progress.advance, progress.add_task(f"{case.name}, {precision}", total=ticks))
            rows += [measure(case, case.job(scheme, precision), sides, tick) for scheme in options.schemes]
            for side in sides:
                versions |= side.libraries
    return {
        "precision": precision, "clock": options.clock, "versions": versions, "steps": [asdict(row) for row in rows],
    }  # fmt: skip


def footprint(job: Job, steps: int, cpu: int | None, lr: float = LR) -> dict[str, Any]:
    """What ``footprint.py`` finds, in a process of its own."""
    command = [sys.executable, str(HERE / "footprint.py"), job.encoded(), str(steps), str(lr)]
    with on_cpu(cpu):
        done = subprocess.run(command, env=environment([HERE]), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"footprint of {job.scheme}: it ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return {"scheme": job.scheme, "precision": job.precision, "ranks": job.ranks, "widths": job.widths} | found


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """The record of what the process takes beside what its ranks hold."""
    cases = [CASES[name] for name in options.cases if name != "N=256"]
    rows = [
        {"case": case.name} | footprint(case.job(scheme, "mixed"), 2, options.cpu)
        for case in cases
        for scheme in options.schemes
    ]
    return {"versions": {"numpy": np.__version__}, "rows": rows}


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """The record of the largest model: ZeRO-3 alone."""
    found = footprint(SCALE.job("ZeRO-3", "mixed"), 2, options.cpu, SCALE_LR)
    return {"versions": {"numpy": np.__version__}, "rows": [{"case": SCALE.name, "rows": SCALE.rows} | found]}


RUNS = {"memory": memory, "scale": scale}


def machine(cpu: int | None) -> dict[str, Any]:
    """What it ran on, and how busy the core was before it did."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    busy = psutil.cpu_percent(1.0) if cpu is None else psutil.cpu_percent(1.0, percpu=True)[cpu]
    return {
        "cpu": next(models, platform.processor()),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "busy_before": busy / 100,
    }


def package_version() -> str:
    """The installed version; a source tree on the path has none."""
    try:
        return version("zerosim")
    except PackageNotFoundError:
        return "not installed"


def profile(options: argparse.Namespace) -> None:
    """Print where 20 of the package's steps spend their time."""
    from rivals.package import build

    with build(CASES[options.cases[0]].job(options.profile, options.parts[0])) as train:
        train(2)
        profiler = cProfile.Profile()
        profiler.runcall(train, 20)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def groups(options: argparse.Namespace, console: Console) -> int:
    """Print what a step of HSDP in nodes of 8 takes over one of ZeRO-3; 1 if it is more than ``GROUPED`` times that.

    Both in this process, which they take turns in, and by its own time.
    """
    from zerosim.kernels.choice import installed
    from zerosim.model import MLP
    from zerosim.stages import HSDP, ZeRO3

    case, much = CASES[options.cases[0]], False
    for precision in (part for part in options.parts if part in PRECISIONS):
        job = case.job("ZeRO-3", precision)
        batch = list(zip(*job.batch(), strict=True))
        for kernels in ("numba", "numpy") if installed() else ("numpy",):
            shared: dict[str, Any] = {"precision": precision, "kernels": kernels}
            runs = [row(MLP(job.widths), job.ranks, node=node, **shared) for row, node in ((ZeRO3, None), (HSDP, 8))]
            for run in runs:
                _seconds(run.step, batch)
            turns = np.array([[_seconds(run.step, batch) for run in runs] for _ in range(12 * case.rounds)])
            plain, grouped = np.median(turns, axis=0)
            low, ratio, high = np.quantile(turns[:, 1] / turns[:, 0], (0.25, 0.5, 0.75))
            much = much or bool(ratio > GROUPED)
            console.print(
                f"{case.name}, {precision}, {kernels}: ZeRO-3 {1e3 * plain:.2f} ms, HSDP {1e3 * grouped:.2f} ms, "
                f"{ratio:.2f} times (quartiles {low:.2f} and {high:.2f})", markup=False, soft_wrap=True,
            )  # fmt: skip
    return int(much)


def _seconds(step: Callable[[Any], Any], batch: Any) -> float:
    """What a turn of steps takes of this process's time, for each of them."""
    start, steps = time.process_time(), 0
    while time.process_time() - start < TURN:
        step(batch)
        steps += 1
    return (time.process_time() - start) / steps


def arguments() -> argparse.Namespace:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    rivals = [name for name in ROSTER if name not in (FLOOR, ZEROSIM)]
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--schemes", nargs="+", choices=STAGES, default=list(STAGES), help="default: all")
    parser.add_argument("--rivals", nargs="*", choices=rivals, default=rivals, help="beside the floor; default: all")
    parser.add_argument("--record", action="store_true", help="keep what is found, and write README.md from it")
    parser.add_argument("--against", choices=["recorded"], help="beside what is kept; 1 if something has become slower")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu for a busy machine; default: wall")
    last = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    parser.add_argument("--cpu", type=int, default=last, help="the core to stay on (Linux; default: the last)")
    parser.add_argument("--profile", choices=STAGES, help="profile this scheme in the first case and part, and stop")
    parser.add_argument("--groups", action="store_true", help="time HSDP beside ZeRO-3 in the first case, and stop")
    return parser.parse_args()


def present(names: Sequence[str], console: Console) -> list[str]:
    """Those rivals that are installed; a line for each that is not."""
    for name in names:
        if not ROSTER[name].installed:
            needs = f"{name}: skipped, {ROSTER[name].needs} is not installed (pip install 'zerosim[bench]')"
            console.print(needs, markup=False, soft_wrap=True)
    return [name for name in names if ROSTER[name].installed]


def main() -> int:
    """Parse, measure, print, record."""
    options, console, errors = arguments(), Console(), Console(stderr=True)
    if options.groups:
        if all(os.environ.get(name) == "1" for name in THREADS):
            return groups(options, console)
        with on_cpu(options.cpu):  # NumPy has made its threads by now
            return subprocess.call([sys.executable, *sys.argv], env=os.environ | dict.fromkeys(THREADS, "1"))
    os.environ.update(dict.fromkeys(THREADS, "1"))
    if options.profile:
        profile(options)
        return 0
    options.rivals = present(options.rivals, errors)
    before, slower = recorded() if options.against else {}, False
    for part in options.parts:
        about: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(options.cpu),
        }
        if about["machine"]["busy_before"] > BUSY:
            errors.print(f"{part}: the core is {about['machine']['busy_before']:.0%} busy; times will be too long")
        start = time.perf_counter()
        try:
            record = steps(part, options, errors) if part in PRECISIONS else RUNS[part](options)
        except (RuntimeError, SideFailed) as error:
            errors.print(f"{part}: {error}", markup=False)
            return 1
        versions = {"zerosim": package_version(), "python": platform.python_version()} | record["versions"]
        seconds = round(time.perf_counter() - start)
        record = about | {"seconds": seconds} | record | {"versions": versions}
        for line in tables({part: record}):
            console.print(line, markup=False, soft_wrap=True)
        if part in before and part in PRECISIONS:
            lines, worse = beside(record, before[part])
            for line in lines:
                console.print(line, markup=False, soft_wrap=True)
            slower = slower or worse
        if options.record:
            write_whole(NAMES[part], json.dumps(record, indent=1).encode() + b"\n")
    if options.record:
        write_page()
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
