"""What a model is made of, and how layers combine.

Owns what the schedule asks of a layer and of a model (``Layer``, ``Model``), the groups of
parameters that share a flat buffer, and the two combinators: ``Chain``, layers that are
gathered together, and ``Checkpointed``, one that keeps nothing but its input. Must not know
ranks or sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

from zerosim.bands import Array, DType
from zerosim.ranks import Workspace
from zerosim.util.shapes import Float, Shaped


class Role(StrEnum):
    """What becomes of a group of parameters."""

    TRAINABLE = "trainable"
    FROZEN = "frozen"  # read, and gathered, but without gradients and optimizer state
    BUFFER = "buffer"  # no parameter: whole on every rank, written in place, sent nowhere


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that share one flat buffer, end to end in the order of ``shapes``.

    Two layers that list the same object share its parameters (tied weights). ``dtype`` is that of a buffer,
    or of frozen parameters that are kept and gathered in one of their own; others have whichever the precision
    gives them. ``stands_for``: how many parameters are packed in these elements, if it isn't as many.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    role: Role = Role.TRAINABLE
    dtype: DType | None = None
    stands_for: int | None = None
    parts: tuple[Group, ...] = ()  # the groups that are joined in it, if there are any

    @cached_property
    def size(self) -> int:
        """P, the logical number of elements."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def params(self) -> int:
        """How many parameters, or numbers of buffers, it has."""
        return self.size if self.stands_for is None else self.stands_for


Flat = Any  # the Array [R, P or more] of a layer's one group, or a list of them, one for each of its several


class Turn(NamedTuple):
    """For whom a layer computes, and when: the ranks whose rows it is handed, the step and the micro-batch, from 0."""

    ranks: Sequence[int]
    step: int
    micro_batch: int


class Pass(NamedTuple):
    """What a layer is handed for one forward or backward.

    ``params`` are its full parameters and ``work`` where it allocates activations; ``turn`` is what random
    numbers may depend on. In a backward, ``grads`` is where the gradients of its trainable groups go, and
    ``need_dx`` says whether its input's is wanted. In ``reached`` it may note of a group which of its parameters
    have a gradient on each rank [R, how many]; of what it does not, all have one.
    """

    params: Flat
    work: Workspace
    grads: Flat = None
    need_dx: bool = True
    turn: Turn | None = None
    reached: Any = None


class MicroBatch(NamedTuple):
    """Some rows of a step's batch, x [R, B, ...] and y [R, B, ...].

    Where ranks differ, ``rows`` are those that each has, the first of B, and ``weights`` [R] what they weigh.
    """

    x: Array
    y: Array
    rows: Sequence[int] | None = None
    weights: Any = None


@runtime_checkable
class Layer(Protocol):
    """A function of flat parameters with a backward: a unit that is gathered and reduced as a whole.

    A layer owns the activation it returns and frees it in its backward, together with the
    gradient that it is handed; its input is its producer's to free. What else it keeps from
    its forward to its backward it holds and frees as well. Where several arrays pass from
    layer to layer, what it returns is an object with ``arrays``, those that it owns.
    """

    name: str
    groups: tuple[Group, ...]

    def forward(self, x: Shaped[Array, "R ..."], given: Pass) -> tuple[Shaped[Array, "R ..."], Any]:
        """The output for input ``x``, and what backward needs."""

    def backward(self, saved: Any, dy: Shaped[Array, "R ..."], given: Pass) -> Shaped[Array, "R ..."] | None:
        """Write the gradients to ``given.grads``, in its dtype; return dx if it is needed.

        What was there before is overwritten: adding is the schedule's affair.
        """


@runtime_checkable
class Model(Protocol):
    """Layers one after another, and a loss: what a ``Scheme`` trains."""

    @property
    def layers(self) -> Sequence[Layer]:
        """The units, in the order of the forward pass."""

    @property
    def n_params(self) -> int:
        """The logical number of parameters: tied ones once, frozen ones too, padding and buffers left out."""

    def initial(self) -> Float[Array, "P"]:
        """The initial parameters [P], fp32, the same at every call: the groups' in order of first appearance."""

    def buffer(self, group: Group) -> Array:
        """What a group of buffers starts with [its size], in the group's dtype."""

    def check(
        self, batch: Sequence[tuple[Any, Any]], ranks: int
    ) -> tuple[Shaped[Array, "R ..."], Shaped[Array, "R ..."]]:
        """A batch of one (x, y) per rank as two arrays [R, B, ...], or ValueError or TypeError if it isn't one."""

    def loss(
        self, y: Shaped[Array, "R ..."], target: Shaped[Array, "R ..."], work: Workspace
    ) -> tuple[Float[Array, "R"], Shaped[Array, "R ..."]]:
        """Each copy's loss [R] and the gradient of its output, held. Frees ``target``."""


class Chain:
    """Layers one after another, itself a layer: the flat layout is theirs, end to end.

    ValueError for layers of several groups, or of one that does not train: they have no layout in common.
    """

    def __init__(self, layers: Sequence[Layer], *, name: str) -> None:
        self.layers, self.name = tuple(layers), name
        groups = [group for layer in layers for group in layer.groups]
        if len(set(groups)) != len(layers) or any(group.role is not Role.TRAINABLE for group in groups):
            raise ValueError(
                f"Chain({name!r}): layers share a buffer only if each has one group of trainable parameters of its "
                f"own; got groups {', '.join(group.name for group in groups)}. Use a bucket per layer."
            )
        whole = Group(name, tuple(shape for group in groups for shape in group.shapes), parts=tuple(groups))
        self.groups: tuple[Group, ...] = (whole,)
        self.size = whole.size

    def forward(self, x: Shaped[Array, "R ..."], given: Pass) -> tuple[Shaped[Array, "R ..."], Any]:
        saved = []
        for layer, part in self._parts(given):
            x, kept = layer.forward(x, part)
            saved.append(kept)
        return x, saved

    def backward(self, saved: Any, dy: Shaped[Array, "R ..."], given: Pass) -> Shaped[Array, "R ..."] | None:
        for index, (layer, part) in reversed(list(enumerate(self._parts(given)))):
            dx = layer.backward(saved[index], dy, part._replace(need_dx=given.need_dx or index > 0))
            if dx is None:
                return None
            dy = dx
        return dy

    def _parts(self, given: Pass) -> Iterator[tuple[Layer, Pass]]:
        """Each layer with its part of the flat parameters and gradients."""
        start = 0
        for layer in self.layers:
            part = slice(start, start := start + layer.groups[0].size)
            grads = None if given.grads is None else given.grads[:, part]
            yield layer, given._replace(params=given.params[:, part], grads=grads)


class Checkpointed:
    """A layer that keeps its input alone and runs forward again in its backward (Chen et al., arXiv 1604.06174).

    Its output stays its own as well. What forward writes to buffers is written twice, as it is in torch; of
    one that is checkpointed already forward runs again once.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer: Layer = layer.layer if isinstance(layer, Checkpointed) else layer
        self.name, self.groups = layer.name, layer.groups

    def forward(self, x: Shaped[Array, "R ..."], given: Pass) -> tuple[Shaped[Array, "R ..."], Any]:
        before = given.work.mark()
        y, _ = self.layer.forward(x, given)
        given.work.free_since(before, keep=owned(y))
        return y, (x, y)

    def backward(self, saved: Any, dy: Shaped[Array, "R ..."], given: Pass) -> Shaped[Array, "R ..."] | None:
        x, y = saved
        for array in owned(y):
            given.work.free(array)
        _, saved = self.layer.forward(x, given)
        return self.layer.backward(saved, dy, given)


def owned(y: Shaped[Array, "R ..."]) -> Sequence[Array]:
    """The arrays that a layer owns of what its forward has returned: that itself, or its ``arrays``."""
    arrays: Sequence[Array] = getattr(y, "arrays", (y,))
    return arrays
