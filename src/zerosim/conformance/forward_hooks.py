"""What goes into a rank's module and what comes out of it within a step.

Owns the hooks on the module and on ``torch.autograd.backward``: which rows are forwarded, each call's loss, the
parameters that forward reads where they are not whole at rest, and the number that backward begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerosim.conformance.collectives import Watch
from zerosim.conformance.layout import Layout, Piece, array_of
from zerosim.conformance.seen import Seen
from zerosim.torch_models import trees

Tensor = Any
Tree = Any


class ForwardHooks(ExitStack):
    """Within the block, ``seen`` is told what ``net`` does; what the hooks themselves do, ``watch`` does not see.

    ``partial`` names the parameters that are not whole at rest.
    """

    def __init__(
        self, net: torch.nn.Module, layout: Layout, loss: Callable[[Any, Any], Any], seen: Seen, watch: Watch,
        partial: Collection[str],
    ) -> None:  # fmt: skip
        super().__init__()
        self._net, self._layout, self._loss = net, layout, loss
        self._seen, self._watch, self._partial = seen, watch, partial
        self._taken = 0  # rows of the batch that the module has been called on
        self._read: set[str] = set()

    def __enter__(self) -> ForwardHooks:
        super().__enter__()
        net = self._net
        self.callback(net.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True).remove)
        self.callback(net.register_forward_hook(self._after, with_kwargs=True).remove)
        for path, module in net.named_modules():
            own = {name: f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
            own = {name: full for name, full in own.items() if full in self._partial}
            if own:  # after the user's own hooks, which gather them
                self.callback(module.register_forward_pre_hook(self._reading(own)).remove)
        backward = torch.autograd.backward
        self.callback(setattr, torch.autograd, "backward", backward)
        torch.autograd.backward = self._backward(backward)
        return self

    def _backward(self, backward: Any) -> Any:
        """torch's ``backward``, and beside it a look at the number that it begins with."""

        def watched(tensors: Any, *args: Any, **options: Any) -> Any:
            one = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
            if isinstance(one, torch.Tensor) and one.numel() == 1:
                with self._watch.paused():
                    self._seen.backward.append(float(one.detach()))
            return backward(tensors, *args, **options)

        return watched

    def _before(self, _: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            with self._watch.paused(), torch.no_grad():
                given = trees.tensors((args, kwargs))
                rows = _rows(given)
                self._seen.forwarded = max(self._seen.forwarded, 0) + rows
                declared = trees.tensors(trees.sliced(self._seen.x, slice(self._taken, self._taken + rows)))
                self._seen.strange += _strange(given, declared)

    def _after(self, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            given = trees.tensors((args, kwargs))
            part = slice(self._taken, self._taken + _rows(given))
            with self._watch.paused(), torch.no_grad(), suppress(Exception):
                wanted = _moved(trees.sliced(self._seen.y, part), given[0].device)
                self._seen.losses.append(float(self._loss(output, wanted)))
            self._taken = part.stop

    def _reading(self, own: dict[str, str]) -> Any:
        def hook(module: Any, _: Any) -> None:
            for name, full in own.items():
                tensor = getattr(module, name, None)
                if full in self._read or not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
                    continue
                if tuple(tensor.shape) == self._layout.shape(full):
                    with self._watch.paused():
                        self._seen.read.append(Piece(self._layout.span(full).start, array_of(tensor)))
                    self._read.add(full)

        return hook


def _rows(given: Sequence[Tensor]) -> int:
    return len(given[0]) if given else 0


def _strange(given: Sequence[Tensor], declared: Sequence[Tensor]) -> int:
    """Elements of what the module was given that are not the batch's, cast as it has been."""
    count = 0
    for one, other in zip(given, declared, strict=False):
        if one.shape != other.shape:
            return count + int(one.numel())
        count += int((one.detach().cpu() != other.to(one.dtype)).sum())
    return count


def _moved(tree: Tree, device: Any) -> Tree:
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: _moved(value, device) for key, value in tree.items()}
    return tuple(_moved(value, device) for value in tree) if isinstance(tree, list | tuple) else tree
