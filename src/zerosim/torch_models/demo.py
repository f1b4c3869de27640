"""A decoder transformer that learns bytes of text, under all four schemes: ``python -m zerosim.torch_models.demo``.

Owns a small language model, as one would write it for torch, its batches and the comparison.
It is an example of ``torch_models.model``: nothing here is needed to train another module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from zerosim.bands import Array
from zerosim.optimizer import Adam
from zerosim.schemes import SCHEMES
from zerosim.torch_models.model import TorchModel

TEXT = (
    "A rank that keeps everything needs no one. It has the parameters, the gradients, the master weights and both "
    "moments, and so has every other rank: the same numbers, many times over. A rank that keeps a share of the "
    "optimizer state has to be told the rest of the parameters after every step. A rank that keeps a share of the "
    "gradients hands the others theirs as soon as they are summed. And a rank that keeps a share of the parameters "
    "asks for each layer before it computes, and lets it go again. What they learn is the same, bit for bit. "
)
VOCABULARY = 256


class Embedding(nn.Module):  # type: ignore[misc]
    """Bytes and their places, added: one module, so that it is one unit."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)

    def forward(self, x: Any) -> Any:
        """Tokens [B, T] to vectors [B, T, D]."""
        return self.bytes(x) + self.places.weight[: x.shape[1]]


class Block(nn.Module):  # type: ignore[misc]
    """Causal self-attention and a feed-forward layer, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Vectors [B, T, D] to the same shape."""
        rows, length, width = x.shape
        mixed = self.mixed(self.before_attention(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(self.before_mlp(x))))


class Decoder(nn.Module):  # type: ignore[misc]
    """Embedding, ``blocks`` blocks, a last normalisation, and a head whose weight is the embedding's."""

    def __init__(self, *, length: int = 32, width: int = 32, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.bytes.weight
        nn.init.normal_(self.head.weight, std=width**-0.5)

    def forward(self, x: Any) -> Any:
        """Tokens [B, T] to logits [B, T, 256]."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(
    steps: int, ranks: int, *, rows: int = 4, length: int = 32, seed: int = 0, text: str = TEXT
) -> Iterator[list[tuple[Array, Array]]]:
    """For each step, one (x, target) per rank: bytes of ``text`` [rows, length], and the byte that follows each."""
    data = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    if len(data) <= length:
        raise ValueError(f"batches(text): needs more than length={length} bytes; got {len(data)}.")
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(data) - length, (ranks, rows, 1))
        places = starts + np.arange(length)
        yield [(data[place], data[place + 1]) for place in places]


def demo_model(*, seed: int = 0, length: int = 32, **options: Any) -> TorchModel:
    """The decoder as a model of the simulator, its weights drawn from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Decoder(length=length, **options)
    return TorchModel(module, torch.zeros(1, length, dtype=torch.int64), Block)


@click.command()
@click.option("--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="Virtual GPUs.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Training steps.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the weights and batches.")
def main(ranks: int, steps: int, seed: int) -> None:
    """Train a small decoder transformer on bytes of text under all four schemes and compare their weights."""
    model = demo_model(seed=seed)
    click.echo(f"{model.n_params:,} parameters in {len(model.layers)} units, {ranks} ranks, {steps} steps")
    first: bytes | None = None
    for stage in SCHEMES:
        scheme = stage(model, ranks, optimizer=Adam(lr=3e-3))
        losses = [scheme.step(batch) for batch in batches(steps, ranks, seed=seed)]
        weights = scheme.full_theta().tobytes()
        compared = "" if first is None else f", weights {'alike bit for bit' if weights == first else 'DIFFERENT'}"
        first = first or weights
        click.echo(
            f"{scheme.name:<14} loss {losses[0]:.4f} to {losses[-1]:.4f}, {scheme.bytes_per_param():.3f} bytes per "
            f"parameter at rest{compared}"
        )


if __name__ == "__main__":
    main()
