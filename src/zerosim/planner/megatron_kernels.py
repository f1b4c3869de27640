"""Megatron's fused kernels and its loss, by what each of them saves for the backward and what it makes.

Owns these kernels. None has values: what autograd is handed to save is measured, so nothing here says how many bytes
a layer keeps. Read beside megatron/core/fusions and ``tensor_parallel/cross_entropy.py``. Must not know the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from zerosim.planner import hf_inputs


class Norm(Function):  # type: ignore[misc]
    """LayerNorm or RMSNorm in one kernel (Apex's, Transformer Engine's): keeps its input and fp32 statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1 if bias is None else 2), dtype=torch.float32))
        ctx.biased = bias is not None
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight) if ctx.biased else None


class BiasGelu(Function):  # type: ignore[misc]
    """``bias_gelu_impl``: keeps what goes in, before the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, bias = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(bias)


class SwiGLU(Function):  # type: ignore[misc]
    """``bias_swiglu_impl``: keeps both halves of what goes in [.., 2f]; what it gives is [.., f]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


class BiasDropoutAdd(Function):  # type: ignore[misc]
    """``bias_dropout_add_fused_train``: keeps a mask of one byte an element, where anything is dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float) -> Tensor:
        ctx.bias, ctx.dropout = None if bias is None else bias.shape, dropout
        if dropout:
            ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        bias = None if ctx.bias is None else grad.new_empty(ctx.bias)
        return torch.empty_like(grad) if ctx.dropout else grad, bias, grad, None


class Softmax(Function):  # type: ignore[misc]
    """``scaled_upper_triang_masked_softmax``: keeps what it gives; its backward writes over the gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        probabilities = torch.empty_like(scores)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Rotary(Function):  # type: ignore[misc]
    """``apply_rotary_pos_emb``: keeps nothing but the angles, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


class CrossEntropy(Function):  # type: ignore[misc]
    """``_VocabParallelCrossEntropy``: an fp32 copy of the logits becomes their softmax, and then their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        softmax = logits.float()  # calculate_logits_max; from here on all is done in place
        softmax.exp_()
        ctx.save_for_backward(softmax, target)
        ctx.dtype = logits.dtype
        return softmax.new_empty(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        softmax, _ = ctx.saved_tensors
        return softmax.to(ctx.dtype), None


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens: ``compute_language_model_loss`` of logits [s, b, V] and labels [b, s]."""
    entropy: Tensor = CrossEntropy.apply(logits, target.transpose(0, 1).contiguous())
    return entropy.mean()


def loss_of(kind: str) -> Callable[[Any, Any], Any]:
    """Megatron's loss, or for anything but ``"fp32"`` the one that is asked for, by ``Question.loss``."""
    if kind == "fp32":
        return loss
    return lambda logits, target: hf_inputs.cross_entropy(logits.flatten(0, -2), target.flatten(), kind)


def target(logits: Tensor) -> Tensor:
    """Labels [b, s] for these logits."""
    return torch.empty((logits.shape[1], logits.shape[0]), dtype=torch.int64, device="meta")
