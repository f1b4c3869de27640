"""What one run of a torch function without values came to: what it keeps, its operations, its temporaries.

Owns how that is worked out from what was watched. Must not know units or layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerosim.torch_models.op_counters import Watch
from zerosim.torch_models.saved_tensors import Kept, SavedTensors, total
from zerosim.torch_models.units import numpy_dtype
from zerosim.worlds.model_shapes import Tensor


@dataclass
class Cost:
    """What one run of a layer came to."""

    saved: tuple[Tensor, ...] = ()
    recomputed: tuple[Tensor, ...] = ()
    forward_flops: int = 0
    backward_flops: int = 0
    recompute_flops: int = 0
    forward_temporaries: int = 0
    backward_temporaries: int = 0


def cost_of(
    saved: SavedTensors,
    outputs: Mapping[Any, torch.Tensor],
    output_bytes: int,
    ends: Sequence[torch.Tensor],
    dys: Sequence[torch.Tensor],
    needing: Sequence[torch.Tensor],
    watch: Watch,
) -> tuple[Cost, Sequence[torch.Tensor | None]]:
    """What a run that has just been recorded came to, and its backward from ``ends`` to the leaves ``needing`` it.

    ``outputs`` are kept as such, ``output_bytes`` of them; ``dys`` are the gradients of the ends.
    """
    all_kept = saved.finish(outputs)
    chosen = {id(tensor.untyped_storage()): Kept(tensor.untyped_storage(), tensor.dtype) for tensor in watch.chosen}
    for tensor in outputs.values():
        chosen.pop(id(tensor.untyped_storage()), None)
    rest = [kept for kept in all_kept if id(kept.storage) not in chosen]
    held = total(all_kept) + output_bytes
    forward = watch.total
    cost = Cost(
        saved=tuple(map(_kept, chosen.values() if watch.selective else all_kept)),
        recomputed=tuple(map(_kept, rest)) if watch.selective else (),
        forward_flops=forward,
        recompute_flops=forward - watch.chosen_flops if watch.selective else 0,
        forward_temporaries=max(0, watch.most - held),
    )
    del all_kept, chosen, rest
    watch.chosen.clear()
    grads: Sequence[torch.Tensor | None] = [None] * len(needing)
    if ends and needing:
        watch.most = watch.now
        grads = torch.autograd.grad(ends, needing, dys, allow_unused=True)
        held += sum(map(_nbytes, (*dys, *needing)))
        cost.backward_flops = watch.total - forward
        cost.backward_temporaries = max(0, watch.most - held)
    return cost, grads


def shape_of(tensor: torch.Tensor) -> Tensor:
    """What is written down of a tensor."""
    return Tensor(tuple(map(int, tensor.shape)), numpy_dtype(tensor.dtype).name)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _kept(kept: Kept) -> Tensor:
    return elements(kept.storage.nbytes(), kept.dtype)


def elements(nbytes: int, dtype: Any) -> Tensor:
    """Memory of so many bytes, as it is held: in elements, if that comes out even."""
    kind = numpy_dtype(dtype)
    whole = nbytes % kind.itemsize == 0
    return Tensor((nbytes // kind.itemsize,), kind.name) if whole else Tensor((nbytes,), "uint8")
