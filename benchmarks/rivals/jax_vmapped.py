"""Owns JAX with the ranks as rows of one array: its axis is vmapped, and collectives are sums and reshapes over it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax

from cases import Job
from line import Trainer, serve
from rivals.jax_training import AXIS, initial, rank_step, trainer


@contextmanager
def build(job: Job) -> Iterator[Trainer]:
    """All ranks in one jitted function; what they held before a step is given up to it."""
    step = jax.vmap(partial(rank_step, job, False), in_axes=(0, None, 0, 0), axis_name=AXIS)
    yield trainer(jax.jit(step, donate_argnums=0), *jax.device_put((initial(job, together=False), *job.batch())))


if __name__ == "__main__":
    serve(build, "jax")
