"""What a run of a torch function keeps for its backward, apart from what is there anyway.

Owns the saved-tensor hooks: which storages a run saves, each once however many views of it
are saved, and how they are found again in the backward. Must not know units or worlds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Name = Any  # a number is that of a storage which is kept


@dataclass(eq=False)
class _Saved:
    """In place of a saved tensor: a view of a storage, and which. Until the run is over, the tensor itself."""

    tensor: torch.Tensor | None
    version: int
    storage: int
    dtype: Any
    offset: int
    size: Any
    stride: Any
    conj: bool
    neg: bool
    stale: bool = False


@dataclass(frozen=True)
class Kept:
    """A storage that only the saved tensors keep alive, and the dtype of the first that was saved."""

    storage: Any
    dtype: Any


class SavedTensors:
    """One run, and its backward.

    ``there`` are tensors that exist before and will be there in the backward, by name: what is
    saved of them isn't kept again. Run within ``recording()``, then call ``finish`` with the
    outputs by name; it returns what has to be kept, and the record itself holds none of it. For
    the backward, ``sources`` must give a tensor for each name, laid out as it was, and one for
    each kept storage by its number. With ``hold``, what is saved stays with torch instead, as
    usual, and needs no sources: the record only takes note.
    """

    def __init__(self, there: Mapping[Name, torch.Tensor], *, hold: bool = False) -> None:
        self._hold = hold
        self._names: dict[int, Name] = {}
        self._alive: list[Any] = []  # so that no storage's place is taken by another before the run is over
        self._saved: list[_Saved] = []
        self._kept: dict[int, Kept] = {}
        self.touched: set[Name] = set()
        """The names of what is there and was saved."""
        self.sources: Mapping[Name, torch.Tensor] = {}
        for name, tensor in there.items():
            self.know(name, tensor)

    def know(self, name: Name, tensor: torch.Tensor) -> None:
        """From now on this, too, is there anyway."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._names.setdefault(storage._cdata, name)

    def keep(self, tensor: torch.Tensor) -> None:
        """Treat a tensor as one that was saved."""
        self._pack(tensor.detach())

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether the run has saved it, or a view of it, and nothing else keeps it."""
        return tensor.untyped_storage()._cdata in self._kept

    @property
    def count(self) -> int:
        """How many storages are to be kept so far."""
        return len(self._kept)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch what is saved within the block."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except BaseException:
            for saved in self._saved:  # a graph that holds its own output would never go
                saved.tensor = None
            raise

    def finish(self, outputs: Mapping[Name, torch.Tensor]) -> list[Kept]:
        """The storages to be kept, in order: those of ``outputs``, which are kept as such, left out."""
        for saved in self._saved:
            assert saved.tensor is not None, "the run is not over yet"
            saved.stale = saved.tensor._version != saved.version
        for name, tensor in outputs.items():
            self.know(name, tensor)
        kept = [each for key, each in self._kept.items() if key not in self._names]
        for number, each in enumerate(kept):
            self._names[each.storage._cdata] = number
        for saved in self._saved:
            saved.tensor = saved.tensor if self._hold else None
        self._alive, self._saved, self._kept = [], [], {}
        return kept

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        if storage._cdata in self._names:
            self.touched.add(self._names[storage._cdata])
        else:
            self._kept.setdefault(storage._cdata, Kept(storage, tensor.dtype))
        saved = _Saved(
            tensor, tensor._version, storage._cdata, tensor.dtype, tensor.storage_offset(), tensor.size(),
            tensor.stride(), tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        self._saved.append(saved)
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.stale or (saved.tensor is not None and saved.tensor._version != saved.version):
            raise RuntimeError(
                f"a tensor of shape {list(saved.size)} that the backward needs has been modified in place since it was "
                f"saved; use the out-of-place form of that operation."
            )
        if saved.tensor is not None:  # a backward within the run
            return saved.tensor
        source = self.sources[self._names[saved.storage]].untyped_storage()
        view = torch.empty(0, dtype=saved.dtype, device=source.device)
        view.set_(source, saved.offset, saved.size, saved.stride)
        view = torch._neg_view(view) if saved.neg else view
        return view.conj() if saved.conj else view


def total(kept: Sequence[Kept]) -> int:
    """Bytes of what is kept."""
    return sum(each.storage.nbytes() for each in kept)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is laid out row by row and is all there is in its storage."""
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return bool(whole and tensor.is_contiguous())
