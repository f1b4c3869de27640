"""A module's forward as a list of operations: calls of units, and whatever the modules around them do in between.

Owns the record of such a forward (plain data), and how some of its operations are run again on
other tensors. Must not know how it was recorded, which operations make a layer, nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zerosim.layers import Role
from zerosim.torch_models.slots import Slot
from zerosim.torch_models.units import Unit

PLAIN: tuple[Any, ...] = (
    type(None), bool, int, float, complex, str, bytes, slice, range, type, type(Ellipsis), StrEnum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip
"""What an argument may be besides a tensor, for nobody can change it from call to call."""
NOBODY = Slot("", Role.BUFFER, (), None)


@dataclass(frozen=True, slots=True)
class Ref:
    """In an operation's arguments, in place of a tensor: its place among the program's."""

    index: int


class Kind(StrEnum):
    """Where a tensor, or its memory, comes from."""

    INPUT = "input"  # the batch's
    SLOT = "slot"  # a parameter or buffer
    CONSTANT = "constant"  # it was there before, and belongs to nobody
    MADE = "made"  # by an operation


@dataclass(eq=False)
class Store:
    """The memory of one or more tensors; ``op`` is which operation made it."""

    kind: Kind
    nbytes: int
    dtype: Any
    op: int = -1
    input: int = -1
    slot: Slot = NOBODY
    constant: torch.Tensor | None = None


@dataclass(eq=False)
class Known:
    """A tensor of the program: where its memory is, how it lies there, and which operation made it."""

    kind: Kind
    store: int
    dtype: Any
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    op: int = -1

    def on(self, storage: torch.Tensor) -> torch.Tensor:
        """A tensor that lies like this one on the memory of ``storage``."""
        like = torch.empty(0, dtype=self.dtype, device=storage.device)
        return like.set_(storage.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(eq=False)
class Op:
    """One operation: a function, or the call of a unit.

    ``results`` are, for each leaf of what it returns, which of the program's tensors, if any;
    ``trace`` what torch did in it, with the shapes that came of it.
    """

    function: Any  # None if it is a call
    unit: Unit | None
    leaves: list[Any]
    spec: TreeSpec
    grad: bool  # whether gradients were enabled
    results: list[int | None] = field(default_factory=list)
    trace: tuple[Any, ...] = ()

    @property
    def takes(self) -> list[int]:
        """The tensors among the arguments."""
        return [leaf.index for leaf in self.leaves if isinstance(leaf, Ref)]

    @property
    def gives(self) -> list[int]:
        """The tensors among the results."""
        return [index for index in self.results if index is not None]


class Write(NamedTuple):
    """An operation that writes to what was given, or made before the last unit call, or to memory of unknown origin."""

    op: int
    store: int | None  # what was given
    made: int | None  # the operation that made it
    shape: tuple[int, ...]


@dataclass(eq=False)
class Program:
    """A forward: its operations in order, the tensors and memory they are about, and what it returns.

    ``assigned`` are buffers that a module assigns anew, by name, and the tensor that each becomes, or
    None if it is a unit that does so.
    """

    ops: list[Op]
    tensors: list[Known]
    stores: list[Store]
    writes: list[Write]
    output: list[Any]  # leaves, Ref for tensors
    output_spec: TreeSpec
    assigned: dict[str, int | None] = field(default_factory=dict)

    @property
    def inputs(self) -> list[int]:
        """The tensors that the module is called with, in order."""
        return [index for index, known in enumerate(self.tensors) if known.kind is Kind.INPUT]

    def slot(self, index: int) -> Slot:
        """The parameter or buffer that a tensor is, itself or in part; ``NOBODY`` if it is none."""
        return self.stores[self.tensors[index].store].slot

    def returned(self, values: dict[int, torch.Tensor]) -> Any:
        """What the module returns, with these tensors."""
        return tree_unflatten(_filled(self.output, values), self.output_spec)

    @property
    def returns(self) -> list[int]:
        """The tensors among what the module returns, each once."""
        return list(dict.fromkeys(self.returned_leaves))

    @property
    def returned_leaves(self) -> list[int]:
        """The tensors among what the module returns, one for each place."""
        return [leaf.index for leaf in self.output if isinstance(leaf, Ref)]


CallUnit = Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any]


def run(ops: Sequence[tuple[Op, Sequence[int]]], values: dict[int, torch.Tensor], call: CallUnit) -> None:
    """Run operations on ``values``, adding what they return; after each, let go of the tensors listed with it."""
    for op, dead in ops:
        args, kwargs = tree_unflatten(_filled(op.leaves, values), op.spec)
        with torch.set_grad_enabled(op.grad):
            answer = op.function(*args, **kwargs) if op.unit is None else call(op.unit, args, kwargs)
        if op.results:
            for leaf, index in zip(tree_flatten(answer)[0], op.results, strict=True):
                if index is not None:
                    values[index] = leaf
        del args, kwargs, answer
        for index in dead:
            values.pop(index, None)


def _filled(leaves: Sequence[Any], values: dict[int, torch.Tensor]) -> list[Any]:
    return [values[leaf.index] if isinstance(leaf, Ref) else leaf for leaf in leaves]
