"""Owns how much memory a process takes that simulates N ranks, beside what those ranks hold by the ledger.

Run with a job, a number of steps and a learning rate, it trains that and prints a line of JSON. A process of
its own for each, so that its highest resident set is that job's alone.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import psutil

from cases import Job
from rivals.package import scheme
from zerosim.real_ranks.meter import highest_memory


def footprint(job: Job, steps: int, lr: float) -> dict[str, Any]:
    """Train and say what it took. Bytes of the process are over what it had with the batch and before the model."""
    small = Job(job.scheme, job.precision, (64, 257), 4, 2)  # large enough for numba, and padded
    scheme(small).step(list(zip(*small.batch(), strict=True)))  # what a first step loads is no rank's
    batch = list(zip(*job.batch(), strict=True))
    before = psutil.Process().memory_info().rss
    run, seconds, losses = scheme(job, lr), [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(run.step(batch))
        seconds.append(time.perf_counter() - start)
    if not np.isfinite(losses).all():
        raise RuntimeError(f"footprint: {job.scheme} diverged, {losses}; what overflows costs another time.")
    highest = highest_memory()
    return {
        "params": job.params,
        "resident_sum": job.ranks * run.ledger.total,
        "peak_sum": job.ranks * max(report.peak.total for report in run.reports),
        "process": highest - before,
        "process_in_all": highest,
        "sent_per_rank": run.bytes_comm_per_rank() // steps,
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(json.dumps(footprint(Job.decoded(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
