"""Owns what is trained: the cases that are timed, and the job that one of them is for one scheme.

Every side of the benchmark gets its batch and its initial weights from here or from ``floor.py``, so that
all train the same. It must not know the package, nor any library but NumPy.
"""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]

STAGES = {"data parallel": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
"""The schemes, and how many of optimizer state, gradients and parameters each shards, in this order."""
PRECISIONS = ("fp32", "mixed")


@dataclass(frozen=True)
class Job:
    """What a side is asked to train: an MLP under one scheme on so many ranks, ``rows`` of data on each."""

    scheme: str
    precision: str
    widths: tuple[int, ...]
    ranks: int
    rows: int

    def __post_init__(self) -> None:
        if self.scheme not in STAGES or self.precision not in PRECISIONS:
            raise ValueError(
                f"Job(scheme, precision): one of {', '.join(STAGES)} and one of {', '.join(PRECISIONS)}; "
                f"got {self.scheme!r} and {self.precision!r}."
            )

    @property
    def stage(self) -> int:
        """How many of optimizer state, gradients and parameters are sharded."""
        return STAGES[self.scheme]

    @property
    def mixed(self) -> bool:
        """Whether working copies are fp16 beside an fp32 master."""
        return self.precision == "mixed"

    @property
    def params(self) -> int:
        """Parameters of the model."""
        return sum(d_in * d_out + d_out for d_in, d_out in pairwise(self.widths))

    def batch(self) -> tuple[F32, F32]:
        """The batch of every step, x [R, B, D_0] and y [R, B, D_L]: noise."""
        rng = np.random.default_rng(1)
        shapes = [(self.ranks, self.rows, width) for width in (self.widths[0], self.widths[-1])]
        x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        return x, y

    def encoded(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def target(self, case: str) -> float | None:
        """The package's time over the floor's should stay below this, if there is a target for the case."""
        targets = TARGETS.get((case, self.precision))
        return targets and targets[(0, 1, 1, 2)[self.stage]]

    @classmethod
    def decoded(cls, line: str) -> "Job":
        """The job in a line of JSON."""
        fields = json.loads(line)
        return cls(**fields | {"widths": tuple(fields["widths"])})


@dataclass(frozen=True)
class Case:
    """A model and a number of ranks that all schemes are timed on."""

    name: str
    widths: tuple[int, ...]
    ranks: int
    rows: int
    rivals: tuple[str, ...] | None = ()
    """Who is timed beside the floor and the package; None for all."""
    check: int = 5
    """Steps that all sides train, and have to agree on, before any is timed."""
    rounds: int = 7
    """Turns of each side."""

    def job(self, scheme: str, precision: str) -> Job:
        """What is trained under a scheme."""
        return Job(scheme, precision, self.widths, self.ranks, self.rows)


MISSION = (64, 128, 128, 64)
LARGE = (512, 2048, 2048, 512)
CASES = {
    case.name: case
    for case in (
        Case("mission", MISSION, 32, 4, rivals=None, rounds=5),
        Case("large", LARGE, 32, 32, ("JAX vmapped", "torch LocalTensor"), check=2, rounds=3),  # 20 GB with these
        Case("N=256", MISSION, 256, 4, ("zerosim without numba",), check=3, rounds=3),
        Case("N=1024", MISSION, 1024, 4, ("zerosim without numba",), check=2, rounds=3),
    )
}
TARGETS: dict[tuple[str, str], tuple[float, float, float]] = {
    ("mission", "fp32"): (0.6, 1.3, 1.6),
    ("mission", "mixed"): (0.7, 1.6, 1.9),
    ("large", "fp32"): (0.9, 1.0, 1.0),
    ("large", "mixed"): (1.0, 1.1, 1.1),
    **{(name, precision): (1, 2, 3) for name in ("N=256", "N=1024") for precision in PRECISIONS},
}
"""By case and precision, what the package's time over the floor's should stay below under data parallel, under ZeRO-1
and -2, and under ZeRO-3."""
SCALE = Case("scale", (2048,) * 25, 32, 4)
"""About 100 million parameters in 24 layers."""
SCALE_LR = 1e-4
"""With the others' 1e-2 it diverges."""
