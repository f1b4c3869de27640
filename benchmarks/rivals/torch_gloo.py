"""Owns the real thing: one process per rank, all on the CPU of this one, that talk over gloo."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cases import Job
from line import Trainer, serve
from rivals.torch_training import Rank


def be_rank(rank: int, job: Job, store: str, line: Connection) -> None:
    """Train as many steps as the line says, and send each one's loss, until it says none."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if os.uname().sysname == "Darwin" else "lo"
    group = {"rank": rank, "world_size": job.ranks, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", store=dist.FileStore(store, job.ranks), **group)
    mine = Rank(job, lambda make: make(rank))
    dist.barrier()
    line.send(None)
    while steps := line.recv():
        losses = [mine.step() for _ in range(steps)]
        line.send([loss.item() for loss in losses])
    dist.destroy_process_group()


@contextmanager
def build(job: Job) -> Iterator[Trainer]:
    """Ranks forked from here, where torch is loaded already."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        lines, ranks = [], []
        for rank in range(job.ranks):
            line, end = fork.Pipe()
            ranks.append(fork.Process(target=be_rank, args=(rank, job, f"{folder}/store", end), daemon=True))
            ranks[-1].start()
            end.close()
            lines.append(line)

        def answers() -> list[Any]:
            """What every rank says next. EOFError if one has ended."""
            for line in lines:
                if line not in wait([line, *(other.sentinel for other in ranks)]):
                    raise EOFError(f"gloo: a rank has ended with {[other.exitcode for other in ranks]}.")
            return [line.recv() for line in lines]

        def train(steps: int) -> Any:
            for line in lines:
                line.send(steps)
            return np.transpose(answers())

        answers()
        yield train
        for line in lines:
            line.send(0)
        for process in ranks:
            process.join()


if __name__ == "__main__":
    serve(build, "torch")
