"""Owns the floor's end of the line."""

from collections.abc import Iterator
from contextlib import contextmanager

from cases import Job
from floor import Floor
from line import Trainer, serve


@contextmanager
def build(job: Job) -> Iterator[Trainer]:
    """A floor, which has fp32 whatever the precision."""
    floor = Floor(job.scheme, job.widths, job.ranks, job.rows)
    x, y = job.batch()
    yield lambda steps: [floor.step(x, y) for _ in range(steps)]


if __name__ == "__main__":
    serve(build, "numpy")
