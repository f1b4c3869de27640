"""Owns torch's own simulation of ranks in one process: a tensor of it is one tensor per rank, and each operation is
done to all of them in turn."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from cases import Job
from line import Trainer, serve
from rivals.torch_training import Rank


@contextmanager
def build(job: Job) -> Iterator[Trainer]:
    """All ranks under the mode, with a process group that moves nothing: the mode does."""
    dist.init_process_group("fake", rank=0, world_size=job.ranks, store=FakeStore())
    with LocalTensorMode(job.ranks) as mode:
        rank = Rank(job, mode.rank_map)

        def train(steps: int) -> list[float]:
            losses = [rank.step() for _ in range(steps)]
            with mode.disable():
                return [sum(loss._local_tensors[r].item() for r in range(job.ranks)) / job.ranks for loss in losses]

        yield train
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(build, "torch")
