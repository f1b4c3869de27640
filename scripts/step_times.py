"""Fit the shares of ``planner/time_model.py`` on published runs, and record what they make of every run.

    python scripts/step_times.py          # plan all runs, fit, and write; ten minutes on two cores
    python scripts/step_times.py --page   # write docs/time.md from what is recorded

Owns the fit. Each run is planned (``measured_runs.py``), which gives its operations; the four shares are those with
which the two queues come closest to what was measured, by least squares of the logarithm of the ratio, with SciPy's
soft_l1 so that a single run counts for little. Then every publisher in turn is left out of the fit, and its runs
are predicted by what the others say: those errors are what the estimate is worth, and its band is of them.

It writes ``src/zerosim/planner/time_model.json``, ``recorded/step_times.json`` and ``docs/time.md``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

import measured_runs
import time_page
from measured_runs import Run
from time_page import Predicted, Recorded
from zerosim.planner.step_time import Operation, bound, duration
from zerosim.planner.time_model import TimeModel
from zerosim.records.files import encoded, write_whole

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "src" / "zerosim" / "planner" / "time_model.json"
START = (0.8, 100.0, 0.9, 0.5)  # products, attention, memory, network
LEAST, MOST = (0.1, 1.0, 0.05, 0.05), (1.0, 1000.0, 10.0, 1.0)  # no product passes the fastest, no link its bandwidth
DTYPE = "bf16"

Numbers = npt.NDArray[np.float64]


class Planned:
    """Published runs with their operations."""

    def __init__(self, runs: Sequence[Run], work: Sequence[list[Operation]]) -> None:
        self.runs, self.work = runs, work
        self.measured = np.array([run.seconds for run in runs])
        self.publishers = [run.publisher for run in runs]

    def only(self, places: Sequence[int]) -> Planned:
        """Some of them."""
        return Planned([self.runs[place] for place in places], [self.work[place] for place in places])

    def least(self) -> list[float]:
        """The bounds, in seconds."""
        return [
            bound(work, run.machine, run.gpus, dtype=DTYPE).overlapped
            for run, work in zip(self.runs, self.work, strict=True)
        ]

    def expected(self, model: TimeModel) -> Numbers:
        """The estimates at these shares, in seconds."""
        return np.array(
            [
                duration(work, model.speeds(run.machine, DTYPE), run.gpus).overlapped
                for run, work in zip(self.runs, self.work, strict=True)
            ]
        )

    def fit(self) -> TimeModel:
        """The shares that come closest to these runs."""

        def off(logs: Numbers) -> Numbers:
            ratios: Numbers = self.expected(shares(np.exp(logs))) / self.measured
            return np.asarray(np.log(ratios), np.float64)

        found = least_squares(
            off, np.log(START), bounds=(np.log(LEAST), np.log(MOST)), loss="soft_l1", f_scale=0.1, xtol=1e-4
        )
        return shares(np.round(np.exp(found.x), 4))


def shares(values: Sequence[float] | Numbers) -> TimeModel:
    """Shares of which nothing else is known."""
    products, attention, memory, network = map(float, values)
    return TimeModel(products, attention, memory, network, band=1.0, median=1.0, runs=0, sources=())


def record() -> Recorded:
    """Plan, fit, leave out in turn, and write."""
    runs = measured_runs.runs()
    work = []
    for number, run in enumerate(runs, 1):
        work.append(run.work)
        print(f"\r{number} of {len(runs)} planned", end="", file=sys.stderr)
    found = with_left_out(Planned(runs, work))
    write_whole(time_page.RECORDED, encoded(found))
    write_whole(MODEL, encoded(found.model))
    return found


def with_left_out(planned: Planned) -> Recorded:
    """The fit, those without each publisher, and what they predict."""
    runs, model = planned.runs, planned.fit()
    left_out = np.zeros(len(runs))
    others = {}
    for publisher in dict.fromkeys(planned.publishers):
        inside = [place for place, each in enumerate(planned.publishers) if each == publisher]
        rest = planned.only([place for place in range(len(runs)) if place not in set(inside)])
        others[publisher] = rest.fit()
        left_out[inside] = planned.only(inside).expected(others[publisher])
    estimates = planned.expected(model)
    model = msgspec.structs.replace(
        model,
        band=round(float(np.quantile(np.abs(planned.measured / left_out - 1), 0.9)), 3),
        median=round(float(np.median(np.abs(left_out / planned.measured - 1))), 3),
        runs=len(runs),
        sources=tuple(others),
        cards=tuple(sorted({run.card for run in runs})),
        gpus=(min(run.gpus for run in runs), max(run.gpus for run in runs)),
        precisions=tuple(sorted({run.precision for run in runs})),
    )
    return Recorded(
        model=model,
        others=others,
        predicted=[
            Predicted(bound=round(least, 4), estimate=round(float(estimate), 4), left_out=round(float(other), 4))
            for least, estimate, other in zip(planned.least(), estimates, left_out, strict=True)
        ],
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page alone, from what is recorded")
    started = time.monotonic()
    found = time_page.recorded() if parser.parse_args().page else record()
    time_page.PAGE.write_text(time_page.page(measured_runs.runs(), found), encoding="utf-8")
    print(f"\n{time_page.PAGE} after {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
