"""What a rank's tensors hold: their storages, each counted once, at rest and at the peak.

Owns the account of storages: those that are found by walking, those that operations return within
a step, and their ends. On a GPU the peak is the allocator's own. Must not know what is expected.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerosim.records.conformance import Held

Tensor = Any
LARGEST = 3  # of what is in no band, named
SETTLED = 0.01  # seconds in which nothing has ended, after which what is there is taken to stay


class Storages:
    """Bytes of the storages that are alive: ``total`` now, ``peak`` since the step began.

    What was there when this was made, the parameters of ``net`` aside, is somebody else's. Where it isn't
    ``counting``, nothing else is found out.
    """

    def __init__(self, net: Mapping[str, Tensor], *, counting: bool) -> None:
        self.counting = counting
        self.total = self.peak = 0
        self._alive: dict[int, tuple[int, str]] = {}
        self._resize = torch.UntypedStorage.resize_
        own = {_key(tensor) for tensor in net.values()}
        self._foreign: set[int] = set()
        for tensor in _everything():
            if _key(tensor) not in own:
                self._ignore(tensor)
        self._walked = False
        self._cuda = torch.cuda.is_available() and any(tensor.is_cuda for tensor in net.values())

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """These are the batch, or the check's own: they do not count, now or later."""
        for tensor in tensors:
            self._ignore(tensor)

    def _ignore(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key not in self._foreign:
            self._foreign.add(key)
            weakref.finalize(storage, self._foreign.discard, key).atexit = False
        if key in self._alive:
            self._end(key)

    def begin(self) -> None:
        """A step begins. What was made since this was, outside of any step, is found once, before the first."""
        if not self.counting:
            return
        if not self._walked:
            self.see(_everything())
            self._walked = True
        self.peak = self.total
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Within the block, storages that are given another size, or none, are noticed: no operation returns them."""

        def resize_(storage: Any, nbytes: int) -> Any:
            found = self._resize(storage, nbytes)
            if (before := self._alive.get(storage._cdata)) is not None:
                self._alive[storage._cdata] = nbytes, before[1]
                self.total += nbytes - before[0]
                self.peak = max(self.peak, self.total)
            return found

        torch.UntypedStorage.resize_ = resize_
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = self._resize

    def users(self) -> list[Tensor]:
        """Every dense tensor that was made since this was, or is one of the parameters, and whose memory is there."""
        return [
            each for each in _everything()
            if _key(each) not in self._foreign and _there(each)
        ]  # fmt: skip

    def see(self, tensors: Sequence[Tensor]) -> None:
        """These exist."""
        if not self.counting:
            return
        for tensor in tensors:
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._foreign:
                continue
            nbytes, before = storage.nbytes(), self._alive.get(key)
            if before is None:
                weakref.finalize(storage, self._end, key).atexit = False
            if before is None or before[0] != nbytes:  # one may have been resized
                self._alive[key] = nbytes, f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                self.total += nbytes - (before[0] if before else 0)
        self.peak = max(self.peak, self.total)

    def _end(self, key: int) -> None:
        self.total -= self._alive.pop(key, (0, ""))[0]

    def held(self, bands: Mapping[str, Iterable[Tensor]]) -> Held | None:
        """What is held now, by band, a storage of two bands belonging to the first; the rest is ``"elsewhere"``."""
        if not self.counting:
            return None
        self._settle()
        rest: dict[str, int] = {}
        taken: set[int] = set()
        for band, tensors in bands.items():
            found = list(tensors)
            self.see(found)
            rest[band] = 0
            for tensor in found:
                key = _key(tensor)
                if key not in taken and key in self._alive:
                    taken.add(key)
                    rest[band] += self._alive[key][0]
        others = sorted((each for key, each in self._alive.items() if key not in taken), reverse=True)
        rest["elsewhere"] = sum(nbytes for nbytes, _ in others)
        peak = torch.cuda.max_memory_allocated() if self._cuda else self.peak
        return Held(rest=rest, peak=peak, largest=[f"{name}, {nbytes:,} B" for nbytes, name in others[:LARGEST]])

    def _settle(self) -> None:
        """Let what is over end: a collective's own thread gives up its tensors a moment after the collective."""
        before, since = self.total, time.monotonic()
        while time.monotonic() - since < SETTLED:
            time.sleep(SETTLED / 10)
            if self.total != before:
                before, since = self.total, time.monotonic()


def _key(tensor: Tensor) -> int:
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata)


def _there(tensor: Tensor) -> bool:
    """Whether a tensor's memory has not been given back."""
    return bool(tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size())


def _everything() -> list[Tensor]:
    """Every dense tensor that Python knows of, and their gradients."""
    found = []
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided:
            found.append(each)
            if each.is_leaf and each.grad is not None:
                found.append(each.grad)
    return found
