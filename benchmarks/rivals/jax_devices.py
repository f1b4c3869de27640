"""Owns JAX with one virtual host device per rank: the same step under shard_map, and XLA's own collectives."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cases import Job
from line import Trainer, serve
from rivals.jax_training import AXIS, initial, rank_step, trainer


@contextmanager
def build(job: Job) -> Iterator[Trainer]:
    """The ranks' rows on a device each. The first job fixes how many devices this process has."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.ranks}"  # read at first use
    devices = jax.devices()
    if len(devices) != job.ranks:
        raise RuntimeError(f"JAX devices: {len(devices)} are there for {job.ranks} ranks; start another process.")
    mesh = Mesh(devices, (AXIS,))
    rows, everywhere = PartitionSpec(AXIS), PartitionSpec()

    def device_step(state: object, t: object, x: object, y: object) -> object:
        """One device's row, without and again with its first axis."""
        mine = jax.tree.map(lambda array: array[0], (state, x, y))
        return jax.tree.map(lambda array: array[None], rank_step(job, True, mine[0], t, *mine[1:]))

    step = jax.shard_map(
        device_step, mesh=mesh, in_specs=(rows, everywhere, rows, rows), out_specs=rows, check_vma=False
    )
    given = jax.device_put((initial(job, together=True), *job.batch()), NamedSharding(mesh, rows))
    yield trainer(jax.jit(step, donate_argnums=0), *given)


if __name__ == "__main__":
    serve(build, "jax")
