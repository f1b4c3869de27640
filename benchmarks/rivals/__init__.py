"""Owns the roster: who is timed beside whom, and what each needs to be installed.

Each is a module that speaks the protocol of ``line.py``. Nothing is imported here.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

FLOOR, ZEROSIM, PLAIN = "NumPy floor", "zerosim", "zerosim without numba"


@dataclass(frozen=True)
class Rival:
    """One way to train N ranks in, or on, one core."""

    name: str
    module: str
    needs: str
    what: str
    """In words, for the page."""
    beaten: bool = False
    """Whether the package is meant to be faster in every row."""
    schemes: tuple[str, ...] = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    """Or only under these."""
    processes: int | None = 1
    """Of which it consists; None for one for each rank."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Whether what it needs is there."""
        return importlib.util.find_spec(self.needs) is not None


ROSTER = {
    rival.name: rival
    for rival in (
        Rival(FLOOR, "rivals.numpy_floor", "numpy", "hand-tuned NumPy, fp32, without ring, ledger or casts"),
        Rival(ZEROSIM, "rivals.package", "zerosim", "this package: every hop run, every byte counted"),
        Rival(
            PLAIN, "rivals.package", "zerosim", "the same without the kernels that numba compiles",
            environment={"ZEROSIM_KERNELS": "numpy"},
        ),
        Rival(
            "JAX vmapped", "rivals.jax_vmapped", "jax", "the rank axis vmapped, collectives by axis name, jitted",
            beaten=True, schemes=("data parallel", "ZeRO-1"),
        ),
        Rival(
            "JAX devices", "rivals.jax_devices", "jax",
            "the same step under shard_map, on one virtual host device per rank", beaten=True,
        ),
        Rival(
            "torch LocalTensor", "rivals.torch_local", "torch",
            "torch's own simulation of ranks in one process, LocalTensorMode", beaten=True,
        ),
        Rival(
            "gloo processes", "rivals.torch_gloo", "torch",
            "the same step on one real process per rank, torch.distributed with gloo", beaten=True, processes=None,
        ),
    )
}  # fmt: skip
