"""Megatron's own GPT as a torch module, made from a configuration.

Owns the layer and the model around it. Nothing here says how many bytes a layer keeps: autograd saves what its kernels
hand it, and that is measured like any other module. Read beside megatron/core/transformer: ``transformer_layer.py``,
``attention.py``, ``dot_product_attention.py`` and ``mlp.py``. Must not know schemes, N or cards.

Hidden states are [s, b, h], as there: sequence first. Axes: s tokens, b rows, h width, a heads, g groups of keys and
values, d the width of a head, f that of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerosim.planner import hf_inputs, hf_models
from zerosim.planner import megatron_kernels as kernels
from zerosim.planner.model_source import Inputs

ATTENTIONS = ("flash", "fused", "unfused")  # as Megatron's --attention-backend calls them


@dataclass(frozen=True)
class Shape:
    """The dimensions of a GPT, and which of Megatron's options it takes.

    ``positions`` is the length of a learned table, None where positions are rotary; ``gated`` is SwiGLU; ``biases``
    of linear layers, ``qkv_bias`` (``--add-qkv-bias``) of that one alone; the dropouts are probabilities.
    """

    layers: int
    width: int
    heads: int
    groups: int
    head: int
    feed_forward: int
    vocabulary: int
    positions: int | None
    gated: bool
    rms: bool
    biases: bool
    qkv_bias: bool
    tied: bool
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0


def shape_of(values: Mapping[str, Any], where: str) -> Shape:
    """The dimensions that a configuration gives, with its class's defaults: one of ``megatron.TYPES``."""
    config = hf_models.configuration(values, hf_models.architecture(values, where), where)
    if config.model_type == "gpt2":
        return Shape(
            config.n_layer, config.n_embd, config.n_head, config.n_head, config.n_embd // config.n_head,
            config.n_inner or 4 * config.n_embd, config.vocab_size, config.n_positions, gated=False, rms=False,
            biases=True, qkv_bias=True, tied=config.tie_word_embeddings,
            hidden_dropout=config.resid_pdrop, attention_dropout=config.attn_pdrop,
        )  # fmt: skip
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head,
        config.intermediate_size, config.vocab_size, None, gated=True, rms=True, biases=False,
        qkv_bias=config.model_type == "qwen2", tied=config.tie_word_embeddings,
        attention_dropout=config.attention_dropout,
    )  # fmt: skip


def made(values: Mapping[str, Any], where: str, kind: str, *, grouped: bool) -> tuple[GPTModel, Inputs]:
    """The model that a configuration describes, on the meta device, and what it is called with.

    ValueError where it has not as many parameters as the configuration's own class.
    """
    with torch.device("meta"):
        model = GPTModel(shape_of(values, where), kind, grouped=grouped)
    whole = hf_models.module(values, hf_models.architecture(values, where), where, hf_models.ATTENTION)
    wanted, found = (sum(each.numel() for each in part.parameters()) for part in (whole, model))
    if wanted != found:
        raise ValueError(
            f"plan(MODEL): Megatron's layer made of {where} has {found:,} parameters, and {type(whole).__name__} has "
            f"{wanted:,}: it has something that Megatron's has not. Use another --convention."
        )
    return model, hf_inputs.tokens


class Norm(nn.Module):  # type: ignore[misc]
    """A norm over the last axis."""

    def __init__(self, width: int, rms: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = None if rms else nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[.., h] to the same."""
        return kernels.Norm.apply(x, self.weight, self.bias)


class Attention(nn.Module):  # type: ignore[misc]
    """Queries, keys and values from one product, attention, and the product that puts heads together again."""

    def __init__(self, shape: Shape, kind: str, grouped: bool) -> None:
        super().__init__()
        self.shape, self.kind, self.grouped = shape, kind, grouped
        heads, groups = shape.heads * shape.head, shape.groups * shape.head
        self.linear_qkv = nn.Linear(shape.width, heads + 2 * groups, bias=shape.qkv_bias)
        self.linear_proj = nn.Linear(heads, shape.width, bias=shape.biases)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] to the same, before the bias."""
        shape = self.shape
        length, rows, _ = x.shape
        each = shape.heads // shape.groups  # heads of a group
        mixed = self.linear_qkv(x).view(length, rows, shape.groups, (each + 2) * shape.head)
        query, key, value = mixed.split([each * shape.head, shape.head, shape.head], dim=-1)
        query = query.reshape(length, rows, shape.heads, shape.head)
        if shape.positions is None:
            query, key = kernels.Rotary.apply(query), kernels.Rotary.apply(key)
        if each > 1 and (self.kind == "unfused" or not self.grouped):
            key, value = (part.repeat_interleave(each, dim=2) for part in (key, value))
        context = self._unfused(query, key, value) if self.kind == "unfused" else self._one_kernel(query, key, value)
        return nn.functional.linear(context.reshape(length, rows, -1), self.linear_proj.weight)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``DotProductAttention``: scores, softmax and dropout are memory of their own [b·a, s, s]."""
        length, rows = query.shape[:2]
        query, key, value = (part.reshape(length, -1, self.shape.head).transpose(0, 1) for part in (query, key, value))
        probabilities = kernels.Softmax.apply(torch.bmm(query, key.transpose(1, 2)))
        if self.shape.attention_dropout:
            probabilities = torch.native_dropout(probabilities, self.shape.attention_dropout, True)[0]
        context = torch.bmm(probabilities, value).view(rows, -1, length, self.shape.head)
        return context.permute(2, 0, 1, 3).contiguous()

    def _one_kernel(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """No scores: cuDNN's takes [s, b, a, d] as it lies; FlashAttention has rows first, so all is copied for it."""
        parts = query, key, value
        grouped = query.shape[2] != key.shape[2]
        attend = nn.functional.scaled_dot_product_attention
        if self.kind == "flash":
            rows_first = (part.transpose(0, 1).contiguous().transpose(1, 2) for part in parts)
            context = attend(*rows_first, is_causal=True, enable_gqa=grouped)
            return context.permute(2, 0, 1, 3).contiguous()
        context = attend(*(part.permute(1, 2, 0, 3) for part in parts), is_causal=True, enable_gqa=grouped)
        return context.permute(2, 0, 1, 3)


class FeedForward(nn.Module):  # type: ignore[misc]
    """Two products, and a fused activation in between."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.width, shape.feed_forward * (2 if shape.gated else 1), bias=shape.biases)
        self.linear_fc2 = nn.Linear(shape.feed_forward, shape.width, bias=shape.biases)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] to the same, before the bias."""
        linear, bias = nn.functional.linear, self.linear_fc1.bias
        wide = linear(x, self.linear_fc1.weight)
        return linear(
            kernels.SwiGLU.apply(wide) if bias is None else kernels.BiasGelu.apply(wide, bias), self.linear_fc2.weight
        )


class TransformerLayer(nn.Module):  # type: ignore[misc]
    """One layer: norm, attention, bias, dropout and add; norm, feed-forward, bias, dropout and add."""

    def __init__(self, shape: Shape, kind: str, grouped: bool) -> None:
        super().__init__()
        self.dropout = shape.hidden_dropout
        self.input_layernorm = Norm(shape.width, shape.rms)
        self.self_attention = Attention(shape, kind, grouped)
        self.pre_mlp_layernorm = Norm(shape.width, shape.rms)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] to the same."""
        x = self._add(self.self_attention(self.input_layernorm(x)), self.self_attention.linear_proj.bias, x)
        return self._add(self.mlp(self.pre_mlp_layernorm(x)), self.mlp.linear_fc2.bias, x)

    def _add(self, y: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return kernels.BiasDropoutAdd.apply(y, bias, x, self.dropout)


class Embedding(nn.Module):  # type: ignore[misc]
    """Words and, where there is a table of them, positions; [b, s] to [s, b, h]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout = shape.hidden_dropout
        self.words = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.positions = None if shape.positions is None else nn.Parameter(torch.empty(shape.positions, shape.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed."""
        x = nn.functional.embedding(tokens, self.words)
        if self.positions is not None:
            x = x + nn.functional.embedding(torch.empty_like(tokens[:1]), self.positions)
        x = x.transpose(0, 1).contiguous()
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x


class Output(nn.Module):  # type: ignore[misc]
    """The head: [s, b, h] to logits [s, b, V]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """The logits, 16 bits each."""
        return nn.functional.linear(x, self.weight)


class GPTModel(nn.Module):  # type: ignore[misc]
    """The model that a ``Shape`` describes, with attention of that ``kind``; made on the meta device."""

    def __init__(self, shape: Shape, kind: str, *, grouped: bool = True) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.layers = nn.ModuleList(TransformerLayer(shape, kind, grouped) for _ in range(shape.layers))
        self.final_layernorm = Norm(shape.width, shape.rms)
        own = nn.Parameter(torch.empty(shape.vocabulary, shape.width)) if not shape.tied else self.embedding.words
        self.output_layer = Output(own)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [b, s] to logits [s, b, V]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(self.final_layernorm(x))
