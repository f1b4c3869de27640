"""Models that published runs trained and that no configuration describes, by what autograd saves of them.

Owns these modules, written for the meta device: same products, same norms, same views, no values. Nothing else is of
interest, so nothing is initialised. Who trained them, and where, is said by ``measured_cases``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerosim.planner.hf_inputs import Kept


class EncoderBlock(nn.Module):  # type: ignore[misc]
    """torch's MultiheadAttention and a feed-forward of four widths, each added and then normed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        x = self.norm1(x + self.attention(x, x, x)[0])
        return self.norm2(x + self.ff(x))


class Encoder(nn.Module):  # type: ignore[misc]
    """The model of DeepSpeedExamples' training/bf16_master_weight/train.py: learned positions, a head with a bias."""

    def __init__(self, words: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.pos_embedding = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.output_proj = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [b, s] to logits [b, s, V]."""
        x = self.embedding(tokens) + self.pos_embedding(torch.empty_like(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.output_proj(x)


class RMSNorm(nn.Module):  # type: ignore[misc]
    """litgpt's, in single steps and in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[.., h] to the same."""
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight


class LitBlock(nn.Module):  # type: ignore[misc]
    """litgpt's block of Llama 2: one product for queries, keys and values, of which values stay a view."""

    def __init__(self, width: int, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.attn = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.fc_1 = nn.Linear(width, feed_forward, bias=False)
        self.fc_2 = nn.Linear(width, feed_forward, bias=False)
        self.out = nn.Linear(feed_forward, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        rows, length, width = x.shape
        mixed = self.attn(self.norm_1(x)).view(rows, length, self.heads, 3, -1).permute(0, 2, 3, 1, 4)
        query, key, value = (part.reshape(rows, self.heads, length, -1) for part in mixed.split(1, dim=2))
        query, key = self._turned(query), self._turned(key)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.proj(y.transpose(1, 2).reshape(rows, length, width)) + x
        normed = self.norm_2(x)
        return self.out(nn.functional.silu(self.fc_1(normed)) * self.fc_2(normed)) + x

    def _turned(self, x: Tensor) -> Tensor:
        """``apply_rope``, and the copy that joins what was turned with what was not."""
        angles = torch.empty(x.shape[-2:], dtype=x.dtype, device=x.device)
        one, other = x.chunk(2, dim=-1)
        turned = x * angles + torch.cat((-other, one), dim=-1) * angles
        return torch.cat((turned, x[..., x.shape[-1] :]), dim=-1)


class LitLlama(nn.Module):  # type: ignore[misc]
    """litgpt's Llama 2."""

    def __init__(self, words: int, width: int, layers: int, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.h = nn.ModuleList(LitBlock(width, heads, feed_forward) for _ in range(layers))
        self.ln_f = RMSNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [b, s] to logits [b, s, V]."""
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def kept_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy in 16 bits, of logits that benchmark_litgpt.py has a name for until its next iteration."""
    return nn.functional.cross_entropy(Kept.apply(logits).flatten(0, -2), target.flatten())


def labels(rows: int, sequence: int) -> Tensor:
    """Labels [b, s]."""
    return torch.empty((rows, sequence), dtype=torch.int64, device="meta")
