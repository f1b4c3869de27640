"""Adam on whatever slice it is handed.

Must not know ranks or sharding: it is elementwise, so a slice is updated to the same bits
whether its neighbours are there or not. That is why sharding the optimizer is free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32

from zerosim.bands import Array, Band
from zerosim.kernels.operations import NUMPY, Kernels
from zerosim.util.casts import convert

_BLOCK = 32_768  # elements that go through all thirteen operations while they are in the cache


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, arXiv 1412.6980), bias-corrected, eps added after the square root.

    The operations and their order are those of torch.optim.Adam's for-loop form, so that
    the moments can be compared with it bit for bit.
    """

    states: ClassVar[tuple[Band, ...]] = (Band.EXP_AVG, Band.EXP_AVG_SQ)

    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < inf):
                raise ValueError(f"Adam({name}): a positive, finite number is needed; got {value!r}.")
        betas = self.betas if isinstance(self.betas, tuple) else ()
        if len(betas) != 2 or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"Adam(betas): a pair of numbers in [0, 1) is needed; got {self.betas!r}.")

    def update(
        self,
        params: Float32[Array, "... n"],
        grads: Float[Array, "... n"],
        exp_avg: Float32[Array, "... n"],
        exp_avg_sq: Float32[Array, "... n"],
        step: int,
        flops: Callable[[int], None],
        kernels: Kernels = NUMPY,
    ) -> None:
        """Update ``params`` and both moments [R, n], fp32, in place from ``grads`` [R, n] of any dtype.

        ``step`` counts from 1. ``flops`` is told the operations done per row. The temporaries are registers: they
        live for one block and are not held. ``kernels`` may have the same operations in one pass.
        """
        beta1, beta2 = self.betas
        step_size = self.lr / (1 - beta1**step)
        root_correction = (1 - beta2**step) ** 0.5
        if kernels.adam is not None:
            operations = kernels.adam(
                params, grads, exp_avg, exp_avg_sq,
                betas=self.betas, eps=self.eps, step_size=step_size, root_correction=root_correction,
            )  # fmt: skip
            if operations is not None:
                flops(operations * params.shape[-1])
                return
        if params.ndim > 2:  # pieces of a buffer that rows have in groups
            each: list[int] = []
            for piece in zip(params, grads, exp_avg, exp_avg_sq, strict=True):
                self.update(*piece, step=step, flops=each.append)
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
                steps: tuple[tuple[Callable[..., Any], Any, Any, Array], ...] = (
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
                for operation, a, b, out in steps:
                    operation(a, out=out) if b is None else operation(a, b, out=out)
                done += len(steps) * p.shape[0] * p.shape[1]
        flops(done // rows)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum unless it is 0 (heavy ball, Polyak 1964).

    The operations and their order are those of torch.optim.SGD without dampening, whose first
    momentum is the first gradient: a momentum that starts at zero comes to the same.
    """

    lr: float = 1e-2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, (int, float)) and 0 < self.lr < inf):
            raise ValueError(f"SGD(lr): a positive, finite number is needed; got {self.lr!r}.")
        if not (isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1):
            raise ValueError(f"SGD(momentum): a number in [0, 1) is needed; got {self.momentum!r}.")

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
        kernels: Kernels = NUMPY,
    ) -> None:
        """Update ``params`` and ``momentum`` [R, n], fp32, in place from ``grads`` [R, n] of any dtype.

        ``step`` is not used. ``flops`` is told the operations done per row. The temporary is a register.
        """
        descent = np.empty_like(params)
        kernels.convert(grads, descent)
        operations = 2
        if momentum is not None:
            np.multiply(momentum, self.momentum, out=momentum)
            np.add(momentum, descent, out=momentum)
            np.multiply(momentum, self.lr, out=descent)
            operations += 2
        else:
            np.multiply(descent, self.lr, out=descent)
        np.subtract(params, descent, out=params)
        flops(operations * params.shape[-1])
