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
from math import prod
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Shaped

from zerosim.bands import Array, DType


@runtime_checkable
class Workspace(Protocol):
    """What a layer may ask of the world: room for activations, and a counter of its FLOPs."""

    def hold(self, *shape: int, dtype: DType | None = None) -> Array: ...

    def free(self, array: Array) -> None: ...

    def flops(self, count: int) -> None: ...


class Role(StrEnum):
    """What becomes of a group of parameters."""

    TRAINABLE = "trainable"
    FROZEN = "frozen"  # read, and gathered, but without gradients and optimizer state
    BUFFER = "buffer"  # no parameter: whole on every rank, written in place, sent nowhere


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that share one flat buffer, end to end in the order of ``shapes``.

    Two layers that list the same object share its parameters (tied weights). ``dtype`` is
    that of a buffer; parameters have whichever the precision gives them.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    role: Role = Role.TRAINABLE
    dtype: DType | None = None

    @property
    def size(self) -> int:
        """P, the logical number of elements."""
        return sum(prod(shape) for shape in self.shapes)


Flat = Any  # the Array [R, P or more] of a layer's one group, or a list of them, one for each of its several


@runtime_checkable
class Layer(Protocol):
    """A function of flat parameters with a backward: a unit that is gathered and reduced as a whole.

    A layer owns the activation it returns and frees it in its backward, together with the
    gradient that it is handed; its input is its producer's to free. What else it keeps from
    its forward to its backward it holds and frees as well.
    """

    name: str
    groups: tuple[Group, ...]

    def forward(self, params: Flat, x: Shaped[Array, "R ..."], work: Workspace) -> tuple[Shaped[Array, "R ..."], Any]:
        """The output for ``params`` and the input ``x``, and what backward needs."""
        ...

    def backward(
        self,
        params: Flat,
        saved: Any,
        dy: Shaped[Array, "R ..."],
        grads: Flat,
        work: Workspace,
        *,
        need_dx: bool,
    ) -> Shaped[Array, "R ..."] | None:
        """Write the gradients of the trainable groups to ``grads``, in its dtype; return dx if it is needed.

        What was there before is overwritten: adding is the schedule's affair.
        """
        ...


@runtime_checkable
class Model(Protocol):
    """Layers one after another, and a loss: what a ``Scheme`` trains."""

    @property
    def layers(self) -> Sequence[Layer]:
        """The units, in the order of the forward pass."""
        ...

    @property
    def n_params(self) -> int:
        """The logical number of parameters: tied ones once, frozen ones too, padding and buffers left out."""
        ...

    def initial(self) -> Float[Array, "P"]:
        """The initial parameters [P], fp32, the same at every call: the groups' in order of first appearance."""
        ...

    def buffer(self, group: Group) -> Array:
        """What a group of buffers starts with [its size], in the group's dtype."""
        ...

    def check(
        self, batch: Sequence[tuple[Any, Any]], ranks: int
    ) -> tuple[Shaped[Array, "R ..."], Shaped[Array, "R ..."]]:
        """A batch of one (x, y) per rank as two arrays [R, B, ...], or ValueError or TypeError if it isn't one."""
        ...

    def loss(
        self, y: Shaped[Array, "R ..."], target: Shaped[Array, "R ..."], work: Workspace
    ) -> tuple[Float[Array, "R"], Shaped[Array, "R ..."]]:
        """Each copy's loss [R] and the gradient of its output, held. Frees ``target``."""
        ...


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
        whole = Group(name, tuple(shape for group in groups for shape in group.shapes))
        self.groups: tuple[Group, ...] = (whole,)
        self.size = whole.size

    def forward(
        self, params: Shaped[Array, "R L"], x: Shaped[Array, "R ..."], work: Workspace
    ) -> tuple[Shaped[Array, "R ..."], Any]:
        saved = []
        for layer, part in self._parts():
            x, kept = layer.forward(params[:, part], x, work)
            saved.append(kept)
        return x, saved

    def backward(
        self,
        params: Shaped[Array, "R L"],
        saved: Any,
        dy: Shaped[Array, "R ..."],
        grads: Shaped[Array, "R L"],
        work: Workspace,
        *,
        need_dx: bool,
    ) -> Shaped[Array, "R ..."] | None:
        parts = list(self._parts())
        for index in reversed(range(len(parts))):
            layer, part = parts[index]
            wanted = need_dx or index > 0
            dx = layer.backward(params[:, part], saved[index], dy, grads[:, part], work, need_dx=wanted)
            if dx is None:
                return None
            dy = dx
        return dy

    def _parts(self) -> Iterator[tuple[Layer, slice]]:
        start = 0
        for layer in self.layers:
            [group] = layer.groups
            yield layer, slice(start, start + group.size)
            start += group.size


class Checkpointed:
    """A layer that keeps its input alone and runs forward again in its backward (Chen et al., arXiv 1604.06174).

    Its output stays its own as well. What forward writes to buffers is written twice, as it is in torch; of
    one that is checkpointed already forward runs again once.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer: Layer = layer.layer if isinstance(layer, Checkpointed) else layer
        self.name, self.groups = layer.name, layer.groups

    def forward(self, params: Flat, x: Shaped[Array, "R ..."], work: Workspace) -> tuple[Shaped[Array, "R ..."], Any]:
        watched = _Watched(work)
        y, _ = self.layer.forward(params, x, watched)
        for array in list(watched.held.values()):
            if array is not y:
                work.free(array)
        return y, (x, y)

    def backward(
        self,
        params: Flat,
        saved: Any,
        dy: Shaped[Array, "R ..."],
        grads: Flat,
        work: Workspace,
        *,
        need_dx: bool,
    ) -> Shaped[Array, "R ..."] | None:
        x, y = saved
        work.free(y)
        _, saved = self.layer.forward(params, x, work)
        return self.layer.backward(params, saved, dy, grads, work, need_dx=need_dx)


class _Watched:
    """A workspace that remembers what is held through it."""

    def __init__(self, work: Workspace) -> None:
        self._work = work
        self.held: dict[int, Array] = {}

    def hold(self, *shape: int, dtype: DType | None = None) -> Array:
        array = self._work.hold(*shape, dtype=dtype)
        self.held[id(array)] = array
        return array

    def free(self, array: Array) -> None:
        self.held.pop(id(array), None)
        self._work.free(array)

    def flops(self, count: int) -> None:
        self._work.flops(count)
