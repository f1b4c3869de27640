"""Owns the package's end of the line."""

from collections.abc import Iterator
from contextlib import contextmanager

from cases import Job
from floor import LR
from line import Trainer, serve
from zerosim.kernels.choice import choose
from zerosim.model import MLP
from zerosim.optimizer import Adam
from zerosim.schemes import SCHEMES, Scheme


def scheme(job: Job, lr: float = LR) -> Scheme:
    """A run of the package, ready to train."""
    [stage] = [stage for stage in SCHEMES if stage.name == job.scheme]
    return stage(MLP(job.widths), job.ranks, precision=job.precision, optimizer=Adam(lr=lr))


@contextmanager
def build(job: Job) -> Iterator[Trainer]:
    """The scheme, on all its ranks, as a user would call it."""
    run = scheme(job)
    batch = list(zip(*job.batch(), strict=True))
    yield lambda steps: [run.step(batch) for _ in range(steps)]


if __name__ == "__main__":
    serve(build, "numpy", *(["numba"] if choose().name == "numba" else []))
