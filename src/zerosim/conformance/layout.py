"""Where each parameter lies in one flat vector, and pieces of that vector that a rank has.

Owns positions: everything that is compared is brought to them, however the user has cut it.
Must not know schemes, optimizers or how anything is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zerosim.bands import BF16, Array
from zerosim.records.conformance import Parameter

Tensor = Any


class Piece(NamedTuple):
    """Consecutive elements of the flat vector, from ``start`` on: values [n]."""

    start: int
    values: Array


class Layout:
    """The flat vector of all parameters, one after another in their order."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        self.names = [each.name for each in parameters]
        sizes = [prod(each.shape) for each in parameters]
        self.starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
        self.size: int = self.starts[-1]
        self._index = {name: index for index, name in enumerate(self.names)}

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def span(self, name: str) -> slice:
        """Where a parameter lies."""
        index = self._index[name]
        return slice(self.starts[index], self.starts[index + 1])

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape."""
        return self.parameters[self._index[name]].shape

    def at(self, position: int) -> tuple[str, int]:
        """The parameter that an element belongs to, and its place within that."""
        index = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.names[index], position - self.starts[index]

    def spans(self) -> Iterator[tuple[Parameter, slice]]:
        """Each parameter and where it lies."""
        for each in self.parameters:
            yield each, self.span(each.name)

    def mask(self, names: Sequence[str]) -> Array:
        """Whether an element belongs to one of these parameters [P]."""
        found = np.zeros(self.size, bool)
        for name in names:
            found[self.span(name)] = True
        return found

    def trainable(self) -> Array:
        """Whether an element is trained [P]."""
        return self.mask([each.name for each in self.parameters if each.trainable])

    # -- what a rank has, as pieces

    def whole_or_shard(self, name: str, tensor: Tensor) -> list[Piece] | None:
        """A parameter, or something of its shape, as pieces; a DTensor's own part; None if it is of another shape."""
        start, shape = self.span(name).start, self.shape(name)
        if isinstance(tensor, DTensor):
            local = array_of(tensor.to_local())
            sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
            return _rectangle(start, shape, tuple(sizes), tuple(offsets), local)
        if tuple(tensor.shape) != shape:
            return None
        return [Piece(start, array_of(tensor))]

    def flat(self, tensor: Tensor, offset: int, names: Sequence[str]) -> list[Piece]:
        """A part of these parameters, laid end to end, from ``offset`` on; what lies beyond their end is padding."""
        values, done, found = array_of(tensor), 0, []
        for name in names:
            span = self.span(name)
            length = span.stop - span.start
            first, last = max(offset, done), min(offset + len(values), done + length)
            if first < last:
                found.append(Piece(span.start + first - done, values[first - offset : last - offset]))
            done += length
        return found


def _rectangle(
    start: int, shape: tuple[int, ...], sizes: tuple[int, ...], offsets: tuple[int, ...], local: Array
) -> list[Piece]:
    """A block of a tensor as the runs of elements that it has of it."""
    if not local.size:
        return []
    where = (
        np.arange(prod(shape))
        .reshape(shape)[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        .reshape(-1)
    )
    breaks = np.flatnonzero(np.diff(where) != 1) + 1
    edges = [0, *breaks.tolist(), len(where)]
    return [Piece(start + int(where[a]), local[a:b]) for a, b in pairwise(edges)]


def assemble(pieces: Sequence[Piece], into: Array, known: Array) -> None:
    """Write the pieces into a flat vector [P] where nothing is ``known`` [P] yet, and note what is known now."""
    for start, values in pieces:
        part = slice(start, start + len(values))
        new = ~known[part]
        into[part][new] = values[new]
        known[part] = True


def ranges(mask: Array) -> list[tuple[int, int]]:
    """The runs of true elements of a mask [P], as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def array_of(tensor: Tensor) -> Array:
    """A flat copy of a tensor in memory of NumPy's, bfloat16 as ml_dtypes has it."""
    # A copy first: a storage that NumPy has looked at cannot be resized any more, and this one is the user's.
    flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        bits: Array = flat.view(torch.int16).numpy().copy().view(BF16)
        return bits
    return np.array(flat.numpy())


def tensor_of(array: Array) -> Tensor:
    """A flat array as a tensor with the same bits, on the same memory."""
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def bits(array: Array) -> Array:
    """An array's bits as unsigned integers."""
    return array.view(f"u{array.dtype.itemsize}")


class Memory:
    """Which memory belongs to which parameter: finds tensors that share the parameters' or their gradients' storage."""

    def __init__(self, layout: Layout, net: Mapping[str, Tensor]) -> None:
        self.layout, self.net = layout, net

    def regions(self, *, grads: bool) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's tensor that owns memory of its shape, or its gradient's."""
        for name, param in self.net.items():
            tensor = param.grad if grads else param
            if tensor is not None and isinstance(tensor, torch.Tensor):
                yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def names(self, tensor: Tensor, *, grads: bool) -> list[str]:
        """The parameters of whose memory, or gradients' memory, this tensor's storage range has a part."""
        storage, found = tensor.untyped_storage()._cdata, []
        first, last = _extent(tensor)
        for name, other in self.regions(grads=grads):
            if other.untyped_storage()._cdata == storage and other.numel():
                start, stop = _extent(other)
                if start < last and first < stop:
                    found.append(name)
        return found

    def pieces(self, tensor: Tensor, like: Tensor) -> list[Piece]:
        """``tensor``, cut like ``like``, as pieces, as far as ``like`` shares memory with whole parameters."""
        storage, found = like.untyped_storage()._cdata, []
        if not like.is_contiguous() or not like.numel():
            return []
        first, last = _extent(like)
        values, item = array_of(tensor), like.element_size()
        for name, other in self.regions(grads=False):
            if tuple(other.shape) != self.layout.shape(name) or not other.is_contiguous():
                continue
            if other.untyped_storage()._cdata != storage:
                continue
            start, stop = _extent(other)
            a, b = max(first, start), min(last, stop)
            if a < b:
                place = self.layout.span(name).start + (a - start) // item
                found.append(Piece(place, values[(a - first) // item : (b - first) // item]))
        return found


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans, if it is contiguous."""
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + tensor.numel() * tensor.element_size()


class Matcher:
    """Finds where values come from: copies of parts of a flat vector [P], by their bits."""

    def __init__(self, flat: Array, known: Array) -> None:
        where = np.flatnonzero(known)
        values = bits(flat)[where]
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        lonely = np.ones(len(ordered), bool)
        lonely[1:] &= ordered[1:] != ordered[:-1]
        lonely[:-1] &= ordered[1:] != ordered[:-1]
        self._values, self._places = ordered[lonely], where[order][lonely]
        self._bits, self.dtype = bits(flat), flat.dtype

    def find(self, given: Array) -> list[tuple[int, int, int]]:
        """Runs (place in the vector, place in ``given`` [n], length) that begin and end with an unmistakable value.

        Where ``given`` is one run as a whole, but for zeros behind it, all of it is taken. Where it is several, what
        lies between two of them may be of either: ones and zeros, as layers begin with, look alike everywhere.
        """
        if given.dtype != self.dtype or not len(self._values) or not len(given):
            return []
        wanted = bits(given)
        index = np.minimum(np.searchsorted(self._values, wanted), len(self._values) - 1)
        hit = self._values[index] == wanted
        shift = np.where(hit, self._places[index] - np.arange(len(given)), np.iinfo(np.int64).min)
        found: list[tuple[int, int, int]] = []
        done = 0
        for anchor in np.flatnonzero(hit):
            if anchor < done:
                continue
            place = int(shift[anchor])
            first = int(anchor)
            while first > done and self._same(place + first - 1, wanted[first - 1]):
                first -= 1
            last = self._until(int(anchor), place, wanted)
            if found or first > 0 or (last < len(given) and given[last:].any()):
                sure = np.flatnonzero(shift[first:last] == place)
                first, last = first + int(sure[0]), first + int(sure[-1]) + 1
            found.append((place + first, first, last - first))
            done = last
        return found

    def _same(self, place: int, value: Any) -> bool:
        return 0 <= place < len(self._bits) and bool(self._bits[place] == value)

    def _until(self, anchor: int, place: int, wanted: Array) -> int:
        """Where the run that begins at ``anchor`` ends."""
        stop = min(len(wanted), len(self._bits) - place)
        differs = np.flatnonzero(self._bits[place + anchor : place + stop] != wanted[anchor:stop])
        return anchor + int(differs[0]) if len(differs) else stop
