"""Adam on whatever slice it is handed.

Must not know ranks or sharding: it is elementwise, so a slice is updated to the same bits
whether its neighbours are there or not. That is why sharding the optimizer is free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any, ClassVar

import numpy as np

from zerosim.bands import Array, Band
from zerosim.kernels.operations import NUMPY, Kernels
from zerosim.util.arguments import all_of, instance_of, integer, not_negative, one_of, pattern, positive, real
from zerosim.util.casts import convert
from zerosim.util.shapes import Float, Float32

_BLOCK = 32_768  # elements that go through all thirteen operations while they are in the cache


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with a rate or a weight decay of their own: those of the layers whose name ``match`` is found in.

    >>> AdamW(groups=(ParamGroup("layer 1", weight_decay=0.0),)).weight_decay
    0.01
    """

    match: str
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        pattern("ParamGroup", "match", self.match)
        not_negative("ParamGroup", "lr", self.lr or 0)
        not_negative("ParamGroup", "weight_decay", self.weight_decay or 0)


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate over the steps: ``warmup`` of them from 0 up to 1, and then down to ``floor``.

    ``kind`` is ``"constant"``, ``"linear"`` or ``"cosine"``, which end after ``total`` steps: the factors that
    torch.optim.lr_scheduler.LambdaLR is given for these in general. ``counts`` says of what: ``"updates"`` that
    were applied, or ``"steps"``, skipped ones too, as a scheduler that is called each time does.

    >>> [Schedule(warmup=2, total=6, kind="linear").factor(done) for done in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    warmup: int = 0
    total: int | None = None
    kind: str = "constant"
    floor: float = 0.0
    counts: str = "updates"

    def __post_init__(self) -> None:
        one_of("Schedule", "kind", self.kind, ("constant", "linear", "cosine"))
        one_of("Schedule", "counts", self.counts, ("updates", "steps"))
        integer("Schedule", "warmup", self.warmup, 0)
        not_negative("Schedule", "floor", self.floor)
        if self.kind != "constant" and (self.total is None or self.total <= self.warmup):
            raise ValueError(f"Schedule(total): a {self.kind} schedule ends after its warm-up; got {self.total!r}.")

    def factor(self, done: int) -> float:
        """What the rate is multiplied by after so many steps."""
        if done < self.warmup:
            return done / self.warmup
        if self.kind == "constant" or self.total is None:
            return 1.0
        progress = min(1.0, (done - self.warmup) / (self.total - self.warmup))
        falling = 1 - progress if self.kind == "linear" else 0.5 * (1 + cos(pi * progress))
        return self.floor + (1 - self.floor) * falling


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, arXiv 1412.6980), bias-corrected, eps added after the square root.

    The operations and their order are those of torch.optim.Adam's for-loop form, so that
    the moments can be compared with it bit for bit.

    >>> import zerosim as zs
    >>> zs.ZeRO2(zs.MLP(), ranks=8, optimizer=Adam(lr=3e-4, betas=(0.9, 0.95))).options.optimizer.lr
    0.0003
    """

    states: ClassVar[tuple[Band, ...]] = (Band.EXP_AVG, Band.EXP_AVG_SQ)

    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: tuple[ParamGroup, ...] = ()
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            object.__setattr__(self, name, positive("Adam", name, getattr(self, name)))
        betas = tuple(map(real, self.betas)) if isinstance(self.betas, (tuple, list)) else ()
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Adam(betas): a pair of numbers in [0, 1) is needed; got {self.betas!r}.")
        not_negative("Adam", "weight_decay", self.weight_decay)
        instance_of("Adam", "schedule", self.schedule, Schedule | None)
        object.__setattr__(self, "betas", betas)
        object.__setattr__(self, "groups", all_of("Adam", "groups", self.groups, ParamGroup))

    def rates(self, name: str, shapes: Sequence[tuple[int, ...]]) -> list[tuple[float, float]]:
        """The rate and the weight decay of each parameter of a layer: what has one dimension does not decay."""
        own = next((group for group in self.groups if re.search(group.match, name)), ParamGroup(""))
        lr = self.lr if own.lr is None else own.lr
        decay = self.weight_decay if own.weight_decay is None else own.weight_decay
        return [(lr, decay if len(shape) > 1 else 0.0) for shape in shapes]

    def update(
        self,
        params: Float32[Array, "... n"],
        grads: Float[Array, "... n"],
        exp_avg: Float32[Array, "... n"],
        exp_avg_sq: Float32[Array, "... n"],
        step: int,
        flops: Callable[[int], None],
        lr: float | None = None,
        weight_decay: float = 0.0,
        kernels: Kernels = NUMPY,
    ) -> None:
        """Update ``params`` and both moments [R, n], fp32, in place from ``grads`` [R, n] of any dtype.

        ``step`` counts from 1. ``flops`` is told the operations done per row. The
        temporaries are registers: they live for one block and are not held. ``lr`` takes the place of the
        optimizer's; ``weight_decay`` is decoupled, as AdamW has it (Loshchilov and Hutter, arXiv 1711.05101).
        ``kernels`` may have the same operations in one pass.
        """
        beta1, beta2 = self.betas
        lr = self.lr if lr is None else lr
        step_size = lr / (1 - beta1**step)
        root_correction = (1 - beta2**step) ** 0.5
        if kernels.adam is not None:
            constants = beta1, beta2, self.eps, step_size, root_correction, lr * weight_decay
            if (operations := kernels.adam(params, grads, exp_avg, exp_avg_sq, *constants)) is not None:
                flops((operations + (weight_decay != 0)) * params.shape[-1])
                return
        if params.ndim > 2:  # pieces of a buffer that rows have in groups
            each: list[int] = []
            for piece in zip(params, grads, exp_avg, exp_avg_sq, strict=True):
                self.update(*piece, step=step, flops=each.append, lr=lr, weight_decay=weight_decay)
            flops(sum(each) // len(each))
            return
        rows, length = params.shape
        block = _BLOCK if isinstance(params, np.ndarray) else max(length, 1)  # a shape has no cache to stay in
        some, width = max(1, block // max(length, 1)), min(length, block)
        done = 0
        g = np.empty_like(params, shape=(min(some, rows), width))
        t = np.empty_like(g)
        for top in range(0, rows, some):
            for left in range(0, length, block):
                part = (slice(top, top + some), slice(left, left + block))
                p, m, v = params[part], exp_avg[part], exp_avg_sq[part]
                grad, tmp = g[: p.shape[0], : p.shape[1]], t[: p.shape[0], : p.shape[1]]
                convert(grads[part], grad)
                passes: tuple[tuple[Callable[..., Any], Any, Any, Array], ...] = (
                    *(((np.multiply, p, 1 - lr * weight_decay, p),) if weight_decay else ()),
                    (np.subtract, grad, m, tmp),  # m += (1 - beta1) * (g - m)
                    (np.multiply, tmp, 1 - beta1, tmp),
                    (np.add, m, tmp, m),
                    (np.multiply, v, beta2, v),  # v = beta2 * v + (1 - beta2) * g * g
                    (np.multiply, grad, 1 - beta2, tmp),
                    (np.multiply, tmp, grad, tmp),
                    (np.add, v, tmp, v),
                    (np.sqrt, v, None, tmp),  # p -= step_size * m / (sqrt(v) / root_correction + eps)
                    (np.divide, tmp, root_correction, tmp),
                    (np.add, tmp, self.eps, tmp),
                    (np.multiply, m, -step_size, grad),
                    (np.divide, grad, tmp, grad),
                    (np.add, p, grad, p),
                )
                for operation, a, b, out in passes:
                    operation(a, out=out) if b is None else operation(a, b, out=out)
                done += len(passes) * p.shape[0] * p.shape[1]
        flops(done // rows)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, on what has two or more dimensions.

    >>> AdamW(lr=3e-4).weight_decay
    0.01
    """

    weight_decay: float = 1e-2


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum unless it is 0 (heavy ball, Polyak 1964).

    The operations and their order are those of torch.optim.SGD without dampening, whose first
    momentum is the first gradient: a momentum that starts at zero comes to the same.

    >>> import zerosim as zs
    >>> zs.DP(zs.MLP(), ranks=2, optimizer=SGD(momentum=0.9)).bytes_per_param()
    12.0
    """

    lr: float = 1e-2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        positive("SGD", "lr", self.lr)
        if not (isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1):
            raise ValueError(f"SGD(momentum): a number in [0, 1) is needed; got {self.momentum!r}.")

    @property
    def schedule(self) -> None:
        """None: its rate stays as it is."""
        return None

    def rates(self, name: str, shapes: Sequence[tuple[int, ...]]) -> list[tuple[float, float]]:
        """The rate, for each parameter of a layer, and no weight decay."""
        return [(self.lr, 0.0)] * len(shapes)

    @property
    def states(self) -> tuple[Band, ...]:
        """The bands that it keeps: the momentum, if there is any."""
        return (Band.MOMENTUM,) if self.momentum else ()

    def update(
        self,
        params: Float32[Array, "... n"],
        grads: Float[Array, "... n"],
        momentum: Float32[Array, "... n"] | None = None,
        *,
        step: int,
        flops: Callable[[int], None],
        lr: float | None = None,
        weight_decay: float = 0.0,
        kernels: Kernels = NUMPY,
    ) -> None:
        """Update ``params`` and ``momentum`` [R, n], fp32, in place from ``grads`` [R, n] of any dtype.

        ``step`` is not used. ``flops`` is told the operations done per row. The temporary is a register.
        """
        lr = self.lr if lr is None else lr
        descent = np.empty_like(params)
        kernels.convert(grads, descent)
        operations = 2
        if momentum is not None:
            np.multiply(momentum, self.momentum, out=momentum)
            np.add(momentum, descent, out=momentum)
            np.multiply(momentum, lr, out=descent)
            operations += 2
        else:
            np.multiply(descent, lr, out=descent)
        np.subtract(params, descent, out=params)
        flops(operations * params.shape[-1])
