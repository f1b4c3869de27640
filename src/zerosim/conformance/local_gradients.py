"""What a rank's own gradients must be, from its parameters and its rows alone: plain torch, no ranks.

Owns a copy of the module, and how far a gradient may be from it without being wrong: the same
gradient is computed in fp64 as well, and how far apart the two are says how much rounding this
module, on these rows, makes of it. Must not know how gradients are averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zerosim.bands import Array
from zerosim.conformance.layout import Layout, tensor_of
from zerosim.torch_models import trees
from zerosim.torch_models.draws import deterministic

Tensor = Any
Tree = Any
Call = Callable[[torch.nn.Module, Tree, Tree], Tensor]
SLACK = 8.0  # times the largest error seen in a tensor, as another order of the same sums may make more of it


class Local(NamedTuple):
    """One rank's own: its loss, and its gradient [P] in fp64, of the module's arithmetic and exact.

    ``parts`` are each micro-batch's; the gradient is their mean. ``finite`` says whether the scaled gradient is.
    """

    loss: float
    exact_loss: float
    grad: Array
    exact: Array
    parts: list[Array]
    losses: list[float]
    finite: bool
    largest: float


def default_forward(module: torch.nn.Module, x: Tree) -> Any:
    """Call a module with x: a tensor, a tuple of positional arguments, or a mapping of keywords."""
    args, kwargs = trees.arguments(x)
    return module(*args, **kwargs)


class LocalGradients:
    """``call(module, x, y)``, a loss, run on whatever parameters ``module``, a copy, is handed.

    ``cast`` says whether floating-point x is brought to the dtype of the parameters first; ``prefix`` is what the
    module has before the parameters' names.
    """

    def __init__(
        self, module: torch.nn.Module, layout: Layout, call: Call, *, cast: bool = False, prefix: str = ""
    ) -> None:
        self.layout, self.cast = layout, cast
        self.call, self._prefix = call, prefix
        self.module = copy.deepcopy(module)
        self._exact = copy.deepcopy(module).double()

    def tensors(self) -> list[Tensor]:
        """Everything that the copies hold."""
        return [each for module in (self.module, self._exact) for each in (*module.parameters(), *module.buffers())]

    def run(
        self, theta: Array, buffers: Mapping[str, Tensor], x: Tree, y: Tree, *, micro: int, scale: float, training: bool
    ) -> Local:
        """One rank's gradient at ``theta`` [P], in its own dtype, of the mean loss over ``micro`` micro-batches."""
        rows = len(trees.tensors(x)[0])
        size = -(-rows // micro)
        starts = range(0, rows, size)
        found = [self._pass(theta, buffers, x, y, slice(a, a + size), scale, training, exact=False) for a in starts]
        exact = [self._pass(theta, buffers, x, y, slice(a, a + size), 1.0, training, exact=True) for a in starts]
        largest = max(float(np.abs(grad).max(initial=0)) for _, grad in found)
        finite = all(bool(np.isfinite(grad).all()) for _, grad in found)
        with np.errstate(invalid="ignore", over="ignore"):
            parts = [grad / scale for _, grad in found]
            mean = np.mean(parts, axis=0)
        return Local(
            loss=float(np.mean([loss for loss, _ in found])), exact_loss=float(np.mean([loss for loss, _ in exact])),
            grad=mean, exact=np.mean([grad for _, grad in exact], axis=0), parts=parts,
            losses=[loss for loss, _ in found], finite=finite, largest=largest,
        )  # fmt: skip

    def _pass(
        self, theta: Array, buffers: Mapping[str, Tensor], x: Tree, y: Tree, rows: slice, scale: float, training: bool,
        *, exact: bool,
    ) -> tuple[float, Array]:  # fmt: skip
        module = self._exact if exact else self.module
        module.train(training)
        flat = tensor_of(theta.copy())
        if exact:
            flat = flat.double()
        own: dict[str, Tensor] = {}
        for each, span in self.layout.spans():
            own[each.name] = flat[span].view(each.shape).clone().requires_grad_(each.trainable)
        values = {name: buffer.double() if exact and buffer.is_floating_point() else buffer.clone()
                  for name, buffer in buffers.items()}  # fmt: skip
        some, wanted = trees.sliced(x, rows), trees.sliced(y, rows)
        if exact:
            some, wanted = (trees.map_tensors(_double, tree) for tree in (some, wanted))
        elif self.cast:
            some = trees.map_tensors(lambda leaf: leaf.to(flat.dtype) if leaf.is_floating_point() else leaf, some)
        with torch.enable_grad(), deterministic(type(module).__name__):
            inside = {f"module.{self._prefix}{name}": tensor for name, tensor in (own | values).items()}
            loss = torch.func.functional_call(_Called(module, self.call), inside, (some, wanted))
            trained = [own[each.name] for each in self.layout.parameters if each.trainable]
            grads = iter(torch.autograd.grad(loss * scale, trained, allow_unused=True))
        result = np.zeros(self.layout.size)
        for each, span in self.layout.spans():
            if each.trainable and (grad := next(grads)) is not None:
                result[span] = grad.detach().double().reshape(-1).numpy()
        return float(loss.detach()), result


class _Called(torch.nn.Module):  # type: ignore[misc]
    """A module as the user calls it, so that its parameters can be given from outside."""

    def __init__(self, module: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self._call = module, call

    def forward(self, x: Tree, y: Tree) -> Tensor:
        """The loss."""
        return self._call(self.module, x, y)


def _double(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


def noise(layout: Layout, ranks: Sequence[Local]) -> Array:
    """How far a rank's own gradient may be from the exact one without being wrong [P].

    By tensor ``SLACK`` times the largest error seen on any rank, or what is usual among the tensors, if that
    is more: a tensor of few elements may happen to have hardly any. Where everything is zero, nothing.
    """
    errors, sizes = [], []
    for _, span in layout.spans():
        errors.append(max(float(np.abs(each.grad[span] - each.exact[span]).max(initial=0)) for each in ranks))
        sizes.append(max(float(np.abs(each.exact[span]).max(initial=0)) for each in ranks))
    ratios = [error / size for error, size in zip(errors, sizes, strict=True) if size and np.isfinite(error)]
    usual = float(np.median(ratios)) if ratios else 0.0
    found = np.zeros(layout.size)
    for (_, span), error, size in zip(layout.spans(), errors, sizes, strict=True):
        found[span] = SLACK * max(error, usual * size)
    nothing = np.all([(each.grad == 0) & (each.exact == 0) for each in ranks], axis=0)
    found[nothing] = 0
    return found
