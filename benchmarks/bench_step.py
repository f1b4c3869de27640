"""Owns the speed figures: a training step of every scheme, the package against its floor, in one run.

Both run in turns on one thread, and what counts is the median of the ratios of neighbouring turns, so that
a machine that slows down slows both. Times are CPU time: on one thread that is the wall time of an idle
machine, and other processes do not count.
"""

import argparse
import cProfile
import json
import os
import platform
import pstats
import sys
import time
from collections.abc import Callable
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
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from floor import Floor
from zerosim.model import MLP
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
TURN = 0.05  # seconds at least: the first step of a turn finds the other side's data in the cache
WARM_UP = 2  # steps
BYTES_PER_ELEMENT = 40  # of floor and package together, at most: states, gathered or unreduced, scratch

Pair = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True)
class Case:
    """A model, a number of ranks and the rows of each rank's batch."""

    name: str
    widths: tuple[int, ...]
    ranks: int
    rows: int
    target: float | None = None
    """The ratio that a step should stay below."""

    def batch(self) -> list[Pair]:
        """One (x, y) per rank: noise."""
        rng = np.random.default_rng(1)
        shapes = [(self.rows, self.widths[0]), (self.rows, self.widths[-1])]
        x, y = (rng.standard_normal((self.ranks, *shape)).astype(np.float32) for shape in shapes)
        return list(zip(x, y, strict=True))


MISSION = (64, 128, 128, 64)
CASES = {
    case.name: case
    for case in (
        Case("mission", MISSION, 32, 4, target=5),
        Case("N=256", MISSION, 256, 4),
        Case("N=1024", MISSION, 1024, 4),
        Case("large", (512, 2048, 2048, 512), 32, 32, target=2),
    )
}
STAGES = {"dp": DP, "zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}


@dataclass(frozen=True)
class Row:
    """What was measured for one scheme in one case; times are ms of one step, medians over the turns."""

    case: str
    scheme: str
    ranks: int
    params: int
    floor_ms: float
    zerosim_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    target: float | None


def sides(stage: Stage, case: Case, precision: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """The floor's step and the package's, on the same batch."""
    batch = case.batch()
    x, y = (np.stack(arrays) for arrays in zip(*batch, strict=True))
    floor = Floor(stage.name, case.widths, case.ranks, case.rows)
    scheme: Scheme = stage(MLP(case.widths), case.ranks, precision=precision)
    return lambda: floor.step(x, y), lambda: scheme.step(batch)


def check() -> None:
    """Prove that the floors train: their losses are the package's in fp32. RuntimeError if not."""
    for stage in SCHEMES:
        ours, theirs = ([step() for _ in range(10)] for step in sides(stage, CASES["mission"], "fp32"))
        if not np.allclose(ours, theirs, rtol=0, atol=1e-6):
            raise RuntimeError(f"{stage.name}: floor and package train apart, {ours} and {theirs}.")


def turn(step: Callable[[], float], steps: int) -> float:
    """CPU seconds of one step, the mean over a turn."""
    start = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - start) / steps


def measure(stage: Stage, case: Case, precision: str, repeats: int, tick: Callable[[], None]) -> Row:
    """Let floor and package take turns."""
    both = sides(stage, case, precision)
    lengths = [ceil(TURN / turn(step, WARM_UP)) for step in both]
    pairs = []
    for _ in range(repeats):
        pairs.append([turn(step, steps) for step, steps in zip(both, lengths, strict=True)])
        tick()
    floor_ms, zerosim_ms = (1e3 * median(side) for side in zip(*pairs, strict=True))
    low, mid, high = np.quantile([b / a for a, b in pairs], (0.25, 0.5, 0.75)).tolist()
    params = MLP(case.widths).n_params
    return Row(case.name, stage.name, case.ranks, params, floor_ms, zerosim_ms, mid, low, high, case.target)


def fits(case: Case) -> bool:
    """Whether the case's largest scheme fits into the memory that is free."""
    needed: int = case.ranks * MLP(case.widths).n_params * BYTES_PER_ELEMENT
    return needed < psutil.virtual_memory().available


def step_table(rows: list[Row]) -> Table:
    """Every row beside its target."""
    table = Table(title="One training step, CPU ms on one thread")
    for column in ("case", "scheme"):
        table.add_column(column, no_wrap=True)
    for column in ("floor", "zerosim", "ratio", "quartiles", "target"):
        table.add_column(column, justify="right")
    for row in rows:
        style = None if row.target is None else "green" if row.ratio <= row.target else "red"
        table.add_row(
            row.case,
            row.scheme,
            f"{row.floor_ms:.2f}",
            f"{row.zerosim_ms:.2f}",
            f"{row.ratio:.2f}",
            f"{row.ratio_low:.2f}–{row.ratio_high:.2f}",
            "" if row.target is None else f"{row.target:g}",
            style=style,
        )
    return table


def rank_costs(rows: list[Row]) -> list[dict[str, Any]]:
    """What a rank costs at N ranks over what it costs at 32, in the mission's model: 1 is linear growth."""
    base = {row.scheme: row for row in rows if row.case == "mission"}
    costs = []
    for row in rows:
        if row.case.startswith("N=") and (small := base.get(row.scheme)):
            scale = small.ranks / row.ranks
            floor, zerosim = scale * row.floor_ms / small.floor_ms, scale * row.zerosim_ms / small.zerosim_ms
            costs.append({"scheme": row.scheme, "ranks": row.ranks, "floor": floor, "zerosim": zerosim})
    return costs


def rank_table(costs: list[dict[str, Any]]) -> Table:
    """The costs per rank."""
    table = Table("scheme", title="Cost per rank, over that at 32 ranks")
    for column in ("ranks", "floor", "zerosim"):
        table.add_column(column, justify="right")
    for cost in costs:
        table.add_row(cost["scheme"], str(cost["ranks"]), f"{cost['floor']:.2f}", f"{cost['zerosim']:.2f}")
    return table


def cpu_model() -> str:
    """The processor's name, as well as the platform knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def package_version() -> str:
    """The installed version; a source tree on the path has none."""
    try:
        return version("zerosim")
    except PackageNotFoundError:
        return "not installed"


def record(rows: list[Row], precision: str, repeats: int) -> dict[str, Any]:
    """Everything needed to read the figures later."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "versions": {
            "zerosim": package_version(),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "blas": np.show_config(mode="dicts")["Build Dependencies"]["blas"]["version"],
        },
        "precision": precision,
        "repeats": repeats,
        "steps": [asdict(row) for row in rows],
        "cost_per_rank": rank_costs(rows),
    }


def profile(stage: Stage, case: Case, precision: str) -> None:
    """Print where 20 of the package's steps spend their time."""
    _, step = sides(stage, case, precision)
    turn(step, WARM_UP)
    profiler = cProfile.Profile()
    profiler.runcall(turn, step, 20)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def on_one_thread() -> None:
    """Start over with one thread per library; they read it when they are loaded, which they have been."""
    if any(os.environ.get(name) != "1" for name in THREADS):
        os.environ.update(dict.fromkeys(THREADS, "1"))
        os.execv(sys.executable, sys.orig_argv)


def arguments() -> argparse.Namespace:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--schemes", nargs="+", choices=STAGES, default=list(STAGES), help="default: all")
    parser.add_argument("--precision", default="mixed", help="the package's; the floor has fp32")
    parser.add_argument("--repeats", type=int, default=11, help="turns of each side (default: 11)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a record here")
    parser.add_argument("--cpu", type=int, metavar="N", help="stay on this CPU (Linux)")
    parser.add_argument("--profile", choices=STAGES, help="profile this scheme in the first case, and stop")
    return parser.parse_args()


def main() -> None:
    """Parse, measure, print."""
    options = arguments()
    on_one_thread()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    cases = [CASES[name] for name in options.cases]
    if options.profile:
        profile(STAGES[options.profile], cases[0], options.precision)
        return

    check()
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for case in cases:
            if not fits(case):
                progress.console.print(f"{case.name}: skipped, too little free memory")
                continue
            task = progress.add_task(case.name, total=len(options.schemes) * options.repeats)
            for name in options.schemes:
                tick = partial(progress.advance, task)
                rows.append(measure(STAGES[name], case, options.precision, options.repeats, tick))
    console = Console()
    console.print(step_table(rows))
    if costs := rank_costs(rows):
        console.print(rank_table(costs))
    if options.json:
        options.json.write_text(json.dumps(record(rows, options.precision, options.repeats), indent=2) + "\n")


if __name__ == "__main__":
    main()
