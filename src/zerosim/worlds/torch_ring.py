"""One rank per process: the world over torch.distributed. The only room beside the frameworks that knows torch.

Owns the process group, the hop as ``isend`` and ``irecv``, the library's own collectives, and
the log of what was handed to torch. R = 1: rank r's arrays are NumPy's, and torch reads and
writes their memory. Must not know schemes, models or ledgers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import torch
import torch.distributed
from jaxtyping import Shaped

from zerosim.bands import Array, DType
from zerosim.comm import Ring
from zerosim.records.real_ranks import BACKENDS
from zerosim.worlds.gloo import Op

dist: Any = torch.distributed


class Watch(Protocol):
    """Is told when a rank begins and ceases to wait for others."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class TorchRing(Ring):
    """Rank ``rank`` of ``size`` on the default process group.

    ``device`` is where torch's tensors must lie for the group's backend; blocks are copied there
    and back unless it is the CPU. ``handed`` counts what torch was given, by operation and bytes.
    """

    def __init__(self, rank: int, size: int, watch: Watch, device: str = "cpu") -> None:
        self.rank, self.size = rank, size
        self.ids: Sequence[int] = [rank]
        self.members, self.leaves, self.leaving = self.ids, [0], 0
        self.watch, self.device = watch, torch.device(device)
        self.handed: Counter[tuple[Op, int]] = Counter()

    def split(self, node: int) -> tuple[Ring, Ring, Ring]:
        if node != self.size:
            raise ValueError(f"TorchRing: {self.size} real ranks cannot be cut into nodes yet. Leave node out.")
        return self, self, self

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return np.empty(shape, dtype)

    def chunks(self, buffer: Shaped[Array, "1 L"], hop: int) -> list[tuple[slice, Array]]:
        length = buffer.shape[1] // self.size
        start = (self.rank + hop) % self.size * length
        return [(slice(0, 1), buffer[:, start : start + length])]

    def shift(self, block: Shaped[Array, "1 C"], spare: Shaped[Array, "1 C"]) -> Shaped[Array, "1 C"]:
        """Hand ``block`` to rank r-1 and return ``spare``, filled with what rank r+1 handed over."""
        # As bytes: a point-to-point message needs no dtype, and NumPy's bfloat16 is not torch's.
        going, coming = self._tensor(block.view(np.uint8)), self._tensor(spare.view(np.uint8))
        self._hand(Op.SEND, going)
        self._hand(Op.RECEIVE, coming)
        with self._waiting():
            pair = [
                dist.P2POp(dist.isend, going, (self.rank - 1) % self.size),
                dist.P2POp(dist.irecv, coming, (self.rank + 1) % self.size),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
        self._fetch(coming, spare.view(np.uint8))
        return spare

    def all_reduce(self, whole: Shaped[Array, "1 L"]) -> None:
        """Replace ``whole`` [1, n] by the sum over ranks."""
        tensor = self._tensor(whole)
        self._hand(Op.ALL_REDUCE, tensor)
        with self._waiting():
            dist.all_reduce(tensor)
        self._fetch(tensor, whole)

    def reduce_scatter(self, whole: Shaped[Array, "1 L"], own: Shaped[Array, "1 C"]) -> None:
        """Write to ``own`` [1, C] the sum over ranks of chunk r of ``whole`` [1, N*C]."""
        given, result = self._tensor(whole), self._tensor(own)
        self._hand(Op.REDUCE_SCATTER, given)
        with self._waiting():
            dist.reduce_scatter_single(result, given)
        self._fetch(result, own)

    def all_gather(self, own: Shaped[Array, "1 C"], whole: Shaped[Array, "1 L"]) -> None:
        """Fill ``whole`` [1, N*C] with the ranks' ``own`` [1, C], in the order of ranks."""
        given, result = self._tensor(own), self._tensor(whole)
        self._hand(Op.ALL_GATHER, result)
        with self._waiting():
            dist.all_gather_single(result, given)
        self._fetch(result, whole)

    def _hand(self, op: Op, tensor: Any) -> None:
        self.handed[op, tensor.numel() * tensor.element_size()] += 1

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.watch.enter()
        yield
        self.watch.leave()

    def _tensor(self, array: Array) -> Any:
        """The array's memory as a flat tensor, or a copy of it on the device."""
        return tensor_of(array).to(self.device)

    def _fetch(self, tensor: Any, array: Array) -> None:
        """Bring a result back, if it is not in the array's own memory already."""
        if self.device.type != "cpu":
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


def file_store(path: Path, size: int) -> Any:
    """Where ranks of one machine find each other: a file, so that no port is opened for it."""
    return dist.FileStore(str(path), size)


def tcp_store(address: str, port: int, hosts: bool, timeout: float) -> Any:
    """Where ranks of several machines find each other; one of them ``hosts`` it unless their launcher does."""
    return dist.TCPStore(
        address, port, is_master=hosts, timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
    )


@contextmanager
def process_group(backend: str, store: Any, rank: int, size: int, timeout: float, place: int) -> Iterator[str]:
    """The default process group for as long as the block lasts; gives the device that its tensors must lie on.

    An operation that waits for longer than ``timeout`` seconds raises. ``place`` counts the ranks of
    this machine: with NCCL each takes the GPU of that number.
    """
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
