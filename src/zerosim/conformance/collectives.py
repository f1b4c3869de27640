"""What a rank asks of torch.distributed within a step, seen as it is asked.

Owns the dispatch mode that sees every operation, and the reading of c10d's operations: which
collective, of how many elements, among whom. It is what was *asked* that is judged: gloo's
reduce-scatter moves as much as an all-reduce, so that its counters cannot tell the two apart.
Must not know schemes, nor what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerosim.bands import Array
from zerosim.conformance.layout import array_of
from zerosim.records.conformance import Asked, Kind
from zerosim.torch_models import trees

dist: Any = torch.distributed
Tensor = Any

_KINDS = {
    "allreduce_": Kind.ALL_REDUCE,
    "allreduce_coalesced_": Kind.ALL_REDUCE,
    "all_reduce": Kind.ALL_REDUCE,
    "all_reduce_": Kind.ALL_REDUCE,
    "all_reduce_coalesced": Kind.ALL_REDUCE,
    "all_reduce_coalesced_": Kind.ALL_REDUCE,
    "reduce_scatter_": Kind.REDUCE_SCATTER,
    "_reduce_scatter_base_": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor_out": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Kind.REDUCE_SCATTER,
    "allgather_": Kind.ALL_GATHER,
    "_allgather_base_": Kind.ALL_GATHER,
    "allgather_coalesced_": Kind.ALL_GATHER,
    "allgather_into_tensor_coalesced_": Kind.ALL_GATHER,
    "all_gather_into_tensor": Kind.ALL_GATHER,
    "all_gather_into_tensor_out": Kind.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Kind.ALL_GATHER,
    "broadcast_": Kind.BROADCAST,
    "broadcast": Kind.BROADCAST,
    "reduce_": Kind.REDUCE,
    "alltoall_": Kind.ALL_TO_ALL,
    "alltoall_base_": Kind.ALL_TO_ALL,
    "all_to_all_single": Kind.ALL_TO_ALL,
    "gather_": Kind.GATHER,
    "scatter_": Kind.SCATTER,
    "send": Kind.SEND,
    "recv_": Kind.RECEIVE,
    "recv_any_source_": Kind.RECEIVE,
    "barrier": Kind.BARRIER,
    "monitored_barrier_": Kind.BARRIER,
}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
POINT_TO_POINT = (Kind.SEND, Kind.RECEIVE)


def sent(asked: Asked) -> Fraction:
    """Elements that a rank must send for it, on average over the group's ranks.

    A ring's (Patarasuk and Yuan 2009): 2(N-1)/N of the buffer for an all-reduce, (N-1)/N for its halves, and
    for a broadcast or a reduce too, where N-1 ranks get or give the buffer once.
    """
    if asked.kind is Kind.SEND:
        return Fraction(asked.elements)
    if asked.kind in (Kind.RECEIVE, Kind.BARRIER):
        return Fraction(0)
    return Fraction((asked.size - 1) * (2 if asked.kind is Kind.ALL_REDUCE else 1) * asked.elements, asked.size)


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operation within a step: tells of collectives before they begin, and of what others return.

    * ``label``: which parameters' memory a tensor is, as text;
    * ``before``: is told of each collective before it begins, and may raise;
    * ``after``: is told of the tensors that each operation has returned.

    ``asked`` are the collectives so far, ``given`` copies of what this rank put into those that only copy.
    """

    def __init__(
        self,
        label: Callable[[Tensor], str],
        before: Callable[[Asked], None],
        after: Callable[[Sequence[Tensor]], None],
        *,
        keep: bool,
    ) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self.given: list[Array] = []
        self._label, self._before, self._after, self._keep = label, before, after, keep
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing is seen: what runs is the check's own."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks for what it needs of plain tensors, which is then seen
        if func.namespace in _NAMESPACES:
            kind = _KINDS.get(func._schema.name.partition("::")[2])
            if kind is not None:
                with self.paused():
                    self._note(kind, _arguments(func, args, kwargs or {}))
        found = func(*args, **(kwargs or {}))
        self._after([leaf for leaf in tree_leaves(found) if type(leaf) in (torch.Tensor, torch.nn.Parameter)])
        return found

    def _note(self, kind: Kind, given: dict[str, Any]) -> None:
        size, group, rank, ranks = _group(given)
        into, out = _tensors(given, _INTO) or _tensors(given, _OUT), _tensors(given, _OUT)
        # Of whose memory it is: by the whole buffer, as a rank's own part of it may be of another parameter.
        whole = out if kind is Kind.ALL_GATHER else into if kind is Kind.REDUCE_SCATTER else (*into, *out)
        root = int(given.get("root_rank", given.get("src", 0)))
        asked = Asked(
            kind=kind, elements=_elements(kind, into, out, size),
            dtype=next((str(tensor.dtype).removeprefix("torch.") for tensor in (*into, *out)), ""),
            size=size, group=group, root=ranks[root] if root < len(ranks) else root,
            reduction=_reduction(given.get("reduce_op")),
            label=next((label for label in map(self._label, whole) if label), ""),
        )  # fmt: skip
        self._before(asked)
        self.asked.append(asked)
        if self._keep and (kind is Kind.ALL_GATHER or (kind is Kind.BROADCAST and root == rank)):
            self.given += [array_of(tensor) for tensor in into]


_INTO = ("input_tensors", "input_tensor", "input", "inputs", "input_list", "tensors", "self")
_OUT = ("output_tensors", "output_tensor", "output", "outputs", "output_lists", "out")


def _elements(kind: Kind, into: Sequence[Tensor], out: Sequence[Tensor], size: int) -> int:
    """Elements of the whole buffer, of which each rank has a part before or after it."""
    given, found = (sum(int(tensor.numel()) for tensor in tensors) for tensors in (into, out))
    if kind is Kind.BARRIER:
        return 0
    if kind is Kind.ALL_GATHER:
        return found or given * size
    if kind is Kind.GATHER:
        return given * size
    return found * size if kind is Kind.SCATTER else given


def _tensors(given: dict[str, Any], names: Sequence[str]) -> list[Tensor]:
    return [tensor for name in names for tensor in trees.tensors(given.get(name))]


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _group(given: dict[str, Any]) -> tuple[int, str, int, list[int]]:
    """The group's size and name, this rank's place in it, and its members' ranks."""
    boxed = given.get("process_group")
    if boxed is not None:
        group = boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)
    elif isinstance(given.get("group_name"), str):
        group = dist.distributed_c10d._resolve_process_group(given["group_name"])
    else:
        return dist.get_world_size(), "", dist.get_rank(), []
    try:
        ranks = dist.get_process_group_ranks(group)
    except (ValueError, KeyError, RuntimeError):
        ranks = []
    name = "" if len(ranks) == dist.get_world_size() else str(group.group_name)
    return int(group.size()), name, int(group.rank()), ranks


def _reduction(op: Any) -> str:
    """The operation of a reduction in small letters; nothing for a sum, nor where there is none."""
    if op is None:
        return ""
    name = op if isinstance(op, str) else dist.ReduceOp.RedOpType(op.op()).name
    return "" if name.lower() == "sum" else name.lower()
