"""What torch's own code holds during a step, by torch's own memory trackers: what plans are compared with.

``fully_shard`` runs under FakeTensorMode and a fake process group, so that no memory and no GPU is needed; plain
torch and ``DistributedDataParallel`` run on real, small tensors. The second step counts: the first also counts what
DTensor's cold propagation of shardings makes up.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

VOCABULARY = 1000


class Block(torch.nn.Module):  # type: ignore[misc]
    """A residual block of a norm and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):  # type: ignore[misc]
    """Token numbers [rows, sequence] to logits, by blocks; the head may be the embedding's."""

    def __init__(self, width: int = 96, blocks: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Convolution(torch.nn.Module):  # type: ignore[misc]
    """A residual block of a norm and a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.convolution = torch.nn.GroupNorm(1, width), torch.nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.convolution(self.norm(x)))


class Images(torch.nn.Module):  # type: ignore[misc]
    """Images [rows, 3, height, width] to logits of ten classes, by blocks."""

    def __init__(self, width: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, width, 3, padding=1)
        self.blocks = torch.nn.ModuleList(Convolution(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


class Training(torch.nn.Module):  # type: ignore[misc]
    """The model with its loss within, as Hugging Face's have it, so that the logits go with the call."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.model(tokens), target)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over all positions, in fp32."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), target.flatten())


def fsdp2_peak(
    model: Model, ranks: int, shape: tuple[int, int], *, reshard: bool | int | None = None, node: int | None = None,
    checkpoint: bool = False, foreach: bool = True, steps: int = 2,
) -> int:  # fmt: skip
    """Bytes at the peak of a step of ``fully_shard`` over so many ranks, on a mesh of two axes if in nodes."""
    with _group("fake", ranks, FakeStore()):
        sides, names = ((ranks,), ("shard",)) if node is None else ((ranks // node, node), ("replica", "shard"))
        mesh = init_device_mesh("cpu", sides, mesh_dim_names=names)
        training = Training(model_like(model))
        inner = training.model
        if checkpoint:
            for index, block in enumerate(inner.blocks):
                inner.blocks[index] = checkpoint_wrapper(block)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in inner.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True if reshard is None else reshard)
        fully_shard(training, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(training.parameters(), foreach=foreach)
        tokens = torch.zeros(shape, dtype=torch.int64)
        tracker = FSDPMemTracker(training, optimizer)
        tracker.track_inputs((tokens, tokens))
        return _highest(tracker, lambda: training(tokens, tokens).backward(), optimizer, steps)


def images_peak(ranks: int, shape: tuple[int, ...]) -> int:
    """Bytes at the peak of a step of ``fully_shard`` that is given images in fp32."""
    with _group("fake", ranks, FakeStore()):
        mesh = init_device_mesh("cpu", (ranks,))
        training = Training(Images())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*training.model.blocks, training):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(training.parameters())
        images, target = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64)
        tracker = FSDPMemTracker(training, optimizer)
        tracker.track_inputs((images, target))
        return _highest(tracker, lambda: training(images, target).backward(), optimizer, 2)


def plain_peak(model: Model, shape: tuple[int, int], *, buckets: str | None = None, foreach: bool = True) -> int:
    """Bytes at the peak of a step of plain torch in fp32, or under DDP whose gradients are copied to its buckets or
    ``"views"`` of them."""
    with _group("gloo", 1, dist.HashStore()) if buckets else FakeTensorMode():
        training: Any = Training(model_like(model))
        tokens = torch.zeros(shape, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(training, tokens)
        if buckets:
            with tracker:
                training = DistributedDataParallel(training, gradient_as_bucket_view=buckets == "views")
        optimizer = torch.optim.AdamW(training.parameters(), foreach=foreach)
        tracker.track_external(optimizer)
        return _highest(tracker, lambda: training(tokens, tokens).backward(), optimizer, 3)


def model_like(model: Model) -> Model:
    """The same model anew, in the mode that is on, and of it the same trained."""
    anew = Model(model.embedding.embedding_dim, len(model.blocks), tied=model.head.weight is model.embedding.weight)
    for parameter, given in zip(anew.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(given.requires_grad)
    return anew


def _highest(tracker: Any, backward: Any, optimizer: torch.optim.Optimizer, steps: int) -> int:
    for _ in range(steps):
        tracker.reset_mod_stats()
        with tracker:
            backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    peak = tracker.get_tracker_snapshot("peak")
    found = int(sum(snap["Total"] for snap in peak.values()))
    gc.collect()
    return found


@contextlib.contextmanager
def _group(backend: str, ranks: int, store: Any) -> Iterator[None]:
    dist.init_process_group(backend, rank=0, world_size=ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
