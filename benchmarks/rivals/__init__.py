"""Owns the roster: who is timed beside whom, and what each needs to be installed.

Each is a module that speaks the protocol of ``line.py``. Nothing is imported here.
"""

import importlib.util
from dataclasses import dataclass

FLOOR, ZEROSIM = "NumPy floor", "zerosim"


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

    @property
    def installed(self) -> bool:
        """Whether what it needs is there."""
        return importlib.util.find_spec(self.needs) is not None


ROSTER = {
    rival.name: rival
    for rival in (
        Rival(FLOOR, "rivals.numpy_floor", "numpy", "hand-tuned NumPy, fp32, without ring, ledger or casts"),
        Rival(ZEROSIM, "rivals.package", "zerosim", "this package: every hop run, every byte counted"),
        Rival("JAX vmapped", "rivals.jax_vmapped", "jax", "the rank axis vmapped, collectives by axis name, jitted"),
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
            "the same step on one real process per rank, torch.distributed with gloo", beaten=True,
        ),
    )
}  # fmt: skip
