"""One rank per process: the world over torch.distributed. The only room beside the frameworks that knows torch.

Owns the process group, the hop as ``isend`` and ``irecv``, the library's own collectives, and
the log of what was handed to torch. R = 1: rank r's arrays are NumPy's, and torch reads and
writes their memory. Must not know schemes, models or ledgers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
import torch
import torch.distributed

from zerosim.bands import Array, DType
from zerosim.comm import Ring
from zerosim.records.real_ranks import BACKENDS
from zerosim.util.shapes import Shaped
from zerosim.worlds.gloo import Op

dist: Any = torch.distributed


@runtime_checkable
class Watch(Protocol):
    """Is told when a rank begins to wait for others, in an operation on so many bytes, and when that has ended."""

    def enter(self, op: str, nbytes: int) -> None: ...

    def leave(self) -> None: ...


class TorchRing(Ring):
    """Rank ``rank`` of ``ranks`` on the default process group, in the ring of all, or one that it was split into.

    ``device`` is where torch's tensors must lie for the group's backend; blocks are copied there
    and back unless it is the CPU. ``handed`` counts what torch was given, by operation, bytes and the size of the ring.
    """

    def __init__(self, rank: int, ranks: int, watch: Watch, device: str = "cpu") -> None:
        self.rank, self.ranks = rank, ranks
        self.ids: Sequence[int] = [rank]
        self.watch, self.device = watch, device
        self.handed: Counter[tuple[Op, int, int]] = Counter()
        self._groups: dict[tuple[int, int], Any] = {}  # this rank's process group for rings of that size and step
        self._lie(ranks, 1, ranks)

    def _lie(self, size: int, step: int, node: int) -> None:
        """Take the place in a ring of ``size`` ranks that are ``step`` apart, in nodes of so many."""

        def below(rank: int) -> int:
            member = rank // step % size
            return rank + ((member - 1) % size - member) * step

        self.size, self._step = size, step
        self._member = self.rank // step % size
        self.members: Sequence[int] = [self._member]
        self._below = below(self.rank)
        self._above = self.rank + ((self._member + 1) % size - self._member) * step
        self.leaves: Sequence[int] = [int(self.rank // node != self._below // node)]
        self.leaving = sum(rank // node != below(rank) // node for rank in range(node))

    def split(self, node: int) -> tuple[Ring, Ring, Ring]:
        count = self.ranks // node
        return self._beside(self.ranks, 1, node), self._beside(node, 1, node), self._beside(count, node, node)

    def _beside(self, size: int, step: int, node: int) -> TorchRing:
        """Another ring of the same world, with a process group of its own."""
        ring = copy(self)
        ring._lie(size, step, node)
        if 1 < size < self.ranks and (size, step) not in self._groups:
            for first in dict.fromkeys(rank - rank // step % size * step for rank in range(self.ranks)):
                members = range(first, first + size * step, step)
                made = dist.new_group(members)  # by all ranks, also those that are not in it
                if self.rank in members:
                    self._groups[size, step] = made
        return ring

    @property
    def _group(self) -> Any:
        return self._groups.get((self.size, self._step))

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return np.empty(shape, dtype)

    def chunks(self, buffer: Shaped[Array, "1 L"], hop: int) -> list[tuple[slice, Array]]:
        length = buffer.shape[1] // self.size
        start = (self._member + hop) % self.size * length
        return [(slice(0, 1), buffer[:, start : start + length])]

    def shift(self, block: Shaped[Array, "1 C"], spare: Shaped[Array, "1 C"]) -> Shaped[Array, "1 C"]:
        """Hand ``block`` to the member below and return ``spare``, filled with what the one above handed over."""
        # As bytes: a point-to-point message needs no dtype, and NumPy's bfloat16 is not torch's.
        going, coming = self._tensor(block.view(np.uint8)), self._tensor(spare.view(np.uint8))
        self.handed[Op.RECEIVE, spare.nbytes, self.size] += 1

        def exchange() -> None:
            pair = [
                dist.P2POp(dist.isend, going, self._below),
                dist.P2POp(dist.irecv, coming, self._above),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        self._call(Op.SEND, block.nbytes, exchange)
        self._fetch(coming, spare.view(np.uint8))
        return spare

    def all_reduce(self, whole: Shaped[Array, "1 L"]) -> None:
        """Replace ``whole`` [1, n] by the sum over the ring."""
        tensor = self._tensor(whole)
        self._call(Op.ALL_REDUCE, whole.nbytes, partial(dist.all_reduce, tensor, group=self._group))
        self._fetch(tensor, whole)

    def reduce_scatter(self, whole: Shaped[Array, "1 L"], own: Shaped[Array, "1 C"]) -> None:
        """Write to ``own`` [1, C] the sum over the ring of this member's chunk of ``whole`` [1, n*C]."""
        given, result = self._tensor(whole), self._tensor(own)
        self._call(
            Op.REDUCE_SCATTER, whole.nbytes, lambda: dist.reduce_scatter_single(result, given, group=self._group)
        )
        self._fetch(result, own)

    def all_gather(self, own: Shaped[Array, "1 C"], whole: Shaped[Array, "1 L"]) -> None:
        """Fill ``whole`` [1, n*C] with the members' ``own`` [1, C], in their order."""
        given, result = self._tensor(own), self._tensor(whole)
        self._call(Op.ALL_GATHER, whole.nbytes, partial(dist.all_gather_single, result, given, group=self._group))
        self._fetch(result, whole)

    def _call(self, op: Op, nbytes: int, run: Callable[[], None]) -> None:
        """Hand torch an operation, and wait for its end."""
        self.handed[op, nbytes, self.size] += 1
        self.watch.enter(op, nbytes)
        run()
        self.watch.leave()

    def _tensor(self, array: Array) -> Any:
        """The array's memory as a flat tensor, or a copy of it on the device."""
        return tensor_of(array).to(self.device)

    def _fetch(self, tensor: Any, array: Array) -> None:
        """Bring a result back, if it is not in the array's own memory already."""
        if self.device != "cpu":
            tensor_of(array).copy_(tensor)


def tensor_of(array: Array) -> Any:
    """A contiguous NumPy array as a flat tensor on the same memory, bfloat16 too."""
    flat = np.reshape(array, -1, copy=False)
    if flat.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(flat)


def unfit(backend: str, place: int) -> str:
    """Why the rank numbered ``place`` on its machine cannot use this backend; nothing if it can."""
    if not getattr(dist, f"is_{backend}_available")():
        have = ", ".join(name for name in BACKENDS if getattr(dist, f"is_{name}_available")()) or "none"
        return (
            f"corroborate(backend): this build of torch ({torch.__version__}) has no {backend}, but {have}. Use that, "
            f"or install a build that has it."
        )
    if backend == "nccl" and torch.cuda.device_count() <= place:
        return (
            f"corroborate(backend): with nccl each rank needs a GPU of its own; this machine has "
            f"{torch.cuda.device_count()}, too few for rank {place} on it. Use fewer ranks, or gloo."
        )
    return ""


def file_store(path: str, size: int) -> Any:
    """Where ranks of one machine find each other: a file, so that no port is opened for it."""
    return dist.FileStore(path, size)


def tcp_store(address: str, port: int, hosts: bool, timeout: float) -> Any:
    """Where ranks of several machines find each other; one of them ``hosts`` it unless their launcher does."""
    return dist.TCPStore(
        address, port, is_master=hosts, timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
    )


@contextmanager
def process_group(
    backend: str, store: Any, rank: int, size: int, timeout: float, place: int, interface: str | None = None
) -> Iterator[str]:
    """The default process group for as long as the block lasts; gives the device that its tensors must lie on.

    An operation that waits for longer than ``timeout`` seconds raises. ``place`` counts the ranks of
    this machine: with NCCL each takes the GPU of that number. ``interface`` is the network interface to use,
    what the backend chooses unless told otherwise.
    """
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{place}"
        torch.cuda.set_device(place)
    where = {} if backend == "mpi" else {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **where)
    try:
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise RuntimeError(
                f"{backend} says that this is rank {dist.get_rank()} of {dist.get_world_size()}, the environment "
                f"that it is rank {rank} of {size}. Use mpirun, and set RANK and WORLD_SIZE as it has them."
            )
        yield device
    finally:
        dist.destroy_process_group()
