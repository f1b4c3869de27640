"""Low-rank adapters beside linear layers (LoRA: Hu et al., arXiv 2106.09685), as peft puts them there.

Owns which layers get one and what it is made of. Must not know configurations nor plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ALL = "all-linear"


class LoraLinear(torch.nn.Module):  # type: ignore[misc]
    """A frozen linear layer and what an adapter of rank ``r`` adds to it."""

    def __init__(self, base: Any, r: int) -> None:
        super().__init__()
        given, made = _widths(base)
        self.base_layer = base
        device = base.weight.device
        self.lora_A = torch.nn.Linear(given, r, bias=False, device=device)
        self.lora_B = torch.nn.Linear(r, made, bias=False, device=device)

    def forward(self, x: Any) -> Any:
        """[..., in] to [..., out]."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def _widths(layer: Any) -> tuple[int, int]:
    if isinstance(layer, torch.nn.Linear):
        return layer.in_features, layer.out_features
    given, made = layer.weight.shape  # transformers' Conv1D, the other way round
    return given, made


def _linear(layer: Any) -> bool:
    return isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D"


def add(module: Any, r: int, targets: Sequence[str]) -> None:
    """Freeze ``module`` and give an adapter of rank ``r`` to every linear layer whose name ends in one of ``targets``.

    ``"all-linear"``: to all but the one that gives the output. ValueError, naming what there is, if one matches none.
    """
    output = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    linear = {path: each for path, each in module.named_modules() if _linear(each) and each is not output}
    last = {path: path.rpartition(".")[2] for path in linear}
    for target in targets:
        if target != ALL and not any(name == target or path.endswith(f".{target}") for path, name in last.items()):
            raise ValueError(
                f"plan(lora): targets are linear layers by the last part of their names, or {ALL}; got {target!r}, and "
                f"there are {', '.join(dict.fromkeys(last.values()))}."
            )
    module.requires_grad_(False)
    for path, each in linear.items():
        if ALL in targets or any(path == target or path.endswith(f".{target}") for target in targets):
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, LoraLinear(each, r))
