"""What torch's own optimizers are seen to do within a step, whoever has made them.

Owns the hooks before and after ``torch.optim.Optimizer.step``, and the way from an optimizer's
tensors to the parameters: by identity, by memory in common, or, where it works on copies, by
their bits. An optimizer that is not torch's is not seen. Must not know what is expected.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerosim.conformance.collectives import Watch
from zerosim.conformance.layout import Matcher, Memory, Piece, array_of

Tensor = Any

BANDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}
NUMBERS = ("lr", "eps", "weight_decay", "momentum")
SHORTEST = 8  # of a run of copied values that is taken for one
Runs = list[tuple[int, int, int]]


class Optimizers(ExitStack):
    """Within the block, ``bands`` are filled with gradients before, and state after, each optimizer's step.

    ``numbers`` are the last one's, with ``calls``, how often one has stepped on the same tensors; ``tensors``
    all that they keep beside the gradients.
    """

    def __init__(
        self, memory: Memory, matcher: Callable[[], Matcher | None], watch: Watch, runs: dict[int, tuple[Tensor, Runs]]
    ) -> None:
        super().__init__()
        self._memory, self._make_matcher, self._watch = memory, matcher, watch
        self._names = {id(each): name for name, each in memory.net.items()}
        self._matcher: Matcher | None = None
        self._made = False
        self._runs = runs  # with the tensors, so that no other takes their place
        self._calls: dict[int, int] = {}
        self._inside = False
        self.bands: dict[str, list[Piece]] = {}
        self.numbers: dict[str, float] = {}
        self.tensors: list[Tensor] = []

    def __enter__(self) -> Optimizers:
        super().__enter__()
        for hook in (register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)):
            self.callback(hook.remove)
        return self

    def _before(self, optimizer: Any, *_: Any) -> None:
        if self._wraps(optimizer):
            return
        with self._watch.paused(), torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    self._calls[id(param)] = self._calls.get(id(param), 0) + 1
                    if param.grad is not None and self._calls[id(param)] == 1:
                        self._add("grads", self._pieces(param, param.grad))
            group = optimizer.param_groups[0]
            self.numbers = {name: float(group[name]) for name in NUMBERS if name in group}
            if "betas" in group:
                self.numbers |= {"beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}
            self.numbers["decoupled"] = float(isinstance(optimizer, torch.optim.AdamW))
            self.numbers["adam"] = float(isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)))
            self.numbers["calls"] = float(max(self._calls.values(), default=0))

    def _after(self, optimizer: Any, *_: Any) -> None:
        if self._wraps(optimizer):
            return
        with self._watch.paused(), torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    self._keep(param, optimizer.state.get(param, {}))

    def _keep(self, param: Tensor, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not any(value is each for each in self.tensors):
                self.tensors.append(value)
            if name in BANDS and isinstance(value, torch.Tensor):
                self._replace(BANDS[name], self._pieces(param, value))
            elif name == "step":
                self.numbers["step"] = float(value)
        if id(param) not in self._names:
            dtypes = {each.dtype for each in self._memory.net.values()}
            if param.dtype == torch.float32 and torch.float32 not in dtypes:
                self._replace("master", self._pieces(param, param))
                self.tensors.append(param)

    def _wraps(self, optimizer: Any) -> bool:
        """Whether it is a shell around another, which will be seen for itself."""
        inner = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None)
        return isinstance(inner, torch.optim.Optimizer)

    def _add(self, band: str, pieces: list[Piece]) -> None:
        self.bands.setdefault(band, []).extend(pieces)

    def _replace(self, band: str, pieces: list[Piece]) -> None:
        """A later step's in place of an earlier one's."""
        starts = {piece.start for piece in pieces}
        self.bands[band] = [piece for piece in self.bands.get(band, []) if piece.start not in starts] + pieces

    def _pieces(self, param: Tensor, tensor: Tensor) -> list[Piece]:
        """An optimizer's tensor for ``param`` as pieces; none where it isn't known what of the parameters that is."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        own = param.to_local() if isinstance(param, DTensor) else param
        if local.shape != own.shape:
            return []
        if (name := self._names.get(id(param))) is not None:
            found = self._memory.layout.whole_or_shard(name, tensor)
            if found is not None:
                return found
        if (found := self._memory.pieces(tensor, param)) and sum(len(piece.values) for piece in found):
            return found
        values = array_of(tensor)
        return [Piece(place, values[first : first + length]) for place, first, length in self._copied(param)]

    def _copied(self, param: Tensor) -> Runs:
        """Which parts of the parameters it was a copy of when it was first seen."""
        if id(param) not in self._runs:
            if not self._made:
                self._matcher, self._made = self._make_matcher(), True
            if self._matcher is None:
                return []
            given = array_of(param)
            if given.dtype != self._matcher.dtype:
                given = given.astype(self._matcher.dtype)
            found = self._matcher.find(given)
            self._runs[id(param)] = param, [run for run in found if run[2] >= min(SHORTEST, given.size)]
        return self._runs[id(param)][1]
