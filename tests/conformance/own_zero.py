"""Data parallel and ZeRO-1, -2 and -3 by hand, in plain torch, as a careful engineer would write them first.

A unit is a module with parameters of its own: one flat buffer, padded to N even chunks, of which rank r owns the
r-th. ``bugs/bugs.toml`` has pieces of this file's source that become others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed


class Unit:
    """One module's parameters as a flat buffer, and what this rank keeps of it."""

    def __init__(self, module: Any, stage: int, rank: int, size: int) -> None:
        self.module, self.params = module, list(module.parameters(recurse=False))
        self.numel = sum(param.numel() for param in self.params)
        self.chunk = -(-self.numel // size)
        self.own = slice(rank * self.chunk, (rank + 1) * self.chunk)
        self.full = torch.zeros(self.chunk * size, dtype=self.params[0].dtype)
        start = 0
        for param in self.params:
            part = self.full[start : start + param.numel()]
            part.copy_(param.detach().reshape(-1))
            param.data = part.view_as(param)
            start += param.numel()
        self.shard = self.full if stage == 0 else self.full[self.own]
        if stage == 3:
            self.shard = self.shard.clone()
        self.master = self.shard if self.shard.dtype == torch.float32 else self.shard.float()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.grad: Any = None
        self.waiting = 0

    def collect(self) -> Any:
        """This rank's gradients, flat and padded; they are let go."""
        grads = torch.zeros_like(self.full) if self.full.untyped_storage().nbytes() else self.empty().zero_()
        start = 0
        for param in self.params:
            grads[start : start + param.numel()] = param.grad.reshape(-1)
            param.grad = None
            start += param.numel()
        return grads

    def empty(self) -> Any:
        return torch.empty(len(self.full), dtype=self.full.dtype)

    def release(self) -> None:
        self.full.untyped_storage().resize_(0)

    def allocate(self) -> None:
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())


class Zero:
    """Trains ``net`` in stage 0 to 3."""

    def __init__(
        self, net: Any, stage: int, *, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, decay: float = 0.0, accumulate: int = 1, max_norm: float = 0.0, scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.net, self.stage = net, stage
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.accumulate, self.max_norm, self.scale = accumulate, max_norm, scale
        self.count = 0
        self.ready: Callable[[], None] = lambda: None  # called when the averages are there, before the update
        modules = [each for each in net.modules() if list(each.parameters(recurse=False))]
        self.units = [Unit(module, stage, self.rank, self.size) for module in modules]
        for unit in self.units:
            if stage >= 2:
                for param in unit.params:
                    param.register_post_accumulate_grad_hook(lambda _, unit=unit: self.written(unit))
            if stage == 3:
                unit.module.register_forward_pre_hook(lambda *_, unit=unit: self.gather(unit))
                unit.module.register_forward_hook(lambda *_, unit=unit: unit.release())
                unit.module.register_full_backward_pre_hook(lambda *_, unit=unit: self.gather(unit))
                unit.release()

    # -- one step

    def train(self, loss_of: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> None:
        for some, wanted in zip(x.chunk(self.accumulate), y.chunk(self.accumulate), strict=True):
            loss = loss_of(self.net(some), wanted)
            (loss * self.scale).backward()
        self.step()

    def written(self, unit: Unit) -> None:
        """A gradient of this unit is there: with the last one it is reduced."""
        unit.waiting += 1
        if unit.waiting == len(unit.params):
            unit.waiting = 0
            self.reduce(unit)
            if self.stage == 3:
                unit.release()

    def reduce(self, unit: Unit) -> None:
        """The average over ranks, and over micro-batches so far."""
        grads = unit.collect()
        if self.stage == 0:
            dist.all_reduce(grads)
            total = grads
        else:
            total = torch.empty(unit.chunk, dtype=grads.dtype)
            dist.reduce_scatter_single(total, grads)
        average = total.float() / self.size / self.accumulate / self.scale
        unit.grad = average if unit.grad is None else unit.grad + average

    def step(self) -> None:
        if self.stage < 2:
            for unit in reversed(self.units):
                self.reduce(unit)
        if self.scale != 1 and self.overflowed():
            self.scale /= 2
            self.forget()
            return
        if self.max_norm:
            self.clip()
        self.ready()
        self.count += 1
        for unit in self.units:
            self.update(unit)
        self.forget()
        if self.stage in (1, 2):
            for unit in self.units:
                self.gather(unit)

    def gather(self, unit: Unit) -> None:
        """The whole unit, from the ranks' chunks."""
        unit.allocate()
        with torch.no_grad():
            dist.all_gather_single(unit.full, unit.shard.clone())

    def forget(self) -> None:
        for unit in self.units:
            unit.grad = None

    def overflowed(self) -> bool:
        finite = all(bool(unit.grad.isfinite().all()) for unit in self.units if unit.grad is not None)
        flag = torch.tensor([0.0 if finite else 1.0])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def clip(self) -> None:
        squares = torch.stack([unit.grad.square().sum() for unit in self.units]).sum().reshape(1)
        if self.stage > 0:
            dist.all_reduce(squares)
        coefficient = (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for unit in self.units:
            unit.grad *= coefficient

    def update(self, unit: Unit) -> None:
        """AdamW on what this rank owns."""
        beta1, beta2 = self.betas
        unit.master *= 1 - self.lr * self.decay
        unit.exp_avg.lerp_(unit.grad, 1 - beta1)
        unit.exp_avg_sq.mul_(beta2).addcmul_(unit.grad, unit.grad, value=1 - beta2)
        first, second = 1 - beta1**self.count, 1 - beta2**self.count
        root = unit.exp_avg_sq.sqrt() / second**0.5 + self.eps
        unit.master.addcdiv_(unit.exp_avg, root, value=-self.lr / first)
        if unit.shard is not unit.master:
            unit.shard.copy_(unit.master)
