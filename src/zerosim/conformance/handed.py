"""What a user hands over with ``check.band``: tensors in any of several forms, brought to pieces of the flat vector.

Owns these forms and the words of their errors. Must not know when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerosim.conformance.layout import Layout, Piece
from zerosim.util.arguments import integer

Tensor = Any


def names_of(layout: Layout, net: torch.nn.Module, of: torch.nn.Module | Sequence[str] | None) -> list[str]:
    """The parameters that are meant: all, a module's, or those of these names."""
    if of is None:
        return layout.names
    if isinstance(of, torch.nn.Module):
        path = next((path for path, each in net.named_modules() if each is of), None)
        names = [] if path is None else [name for name in layout.names if not path or name.startswith(f"{path}.")]
    else:
        names = list(of)
    unknown = [name for name in names if name not in layout]
    if not names or unknown:
        raise ValueError(
            f"check.band(of): a module within the checked one, or names of its parameters, "
            f"{', '.join(layout.names[:8])} ...; got {unknown[0] if unknown else of!r}."
        )
    return names


def pieces_of(layout: Layout, tensors: Any, offset: Any, names: Sequence[str]) -> Callable[[], list[Piece]]:
    """How to read what was handed over, now or later. ValueError for what fits no parameter."""
    if isinstance(tensors, torch.Tensor):
        first = integer("check.band", "offset", offset, 0)
        if tensors.dim() != 1:
            raise ValueError(
                f"check.band(tensors): one tensor is a flat shard; got shape {list(tensors.shape)}. Pass "
                f"tensor.flatten(), or a mapping from names to whole tensors."
            )
        return lambda: layout.flat(tensors, first, names)
    pairs = _pairs(layout, tensors, offset, names)
    if isinstance(offset, Mapping):
        return lambda: [
            piece for name, each in pairs for piece in layout.flat(each.reshape(-1), int(offset[name]), [name])
        ]
    return lambda: [piece for name, each in pairs for piece in layout.whole_or_shard(name, each) or []]


def _pairs(layout: Layout, tensors: Any, offset: Any, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    if not isinstance(tensors, Mapping) and len(tensors) != len(names):
        raise ValueError(
            f"check.band(tensors): a list has one tensor for each of the {len(names)} parameters, or None; got "
            f"{len(tensors)}. Pass a mapping from names to tensors."
        )
    given = tensors.items() if isinstance(tensors, Mapping) else zip(names, tensors, strict=True)
    pairs = [(name, each) for name, each in given if each is not None]
    for name, each in pairs:
        if name not in layout:
            raise ValueError(f"check.band(tensors): there is no parameter {name!r}; there are {', '.join(names[:8])}.")
        if not isinstance(offset, Mapping) and tuple(each.shape) != layout.shape(name):
            raise ValueError(
                f"check.band(tensors): {name} has shape {list(layout.shape(name))}; got {list(each.shape)}. For shards "
                f"pass their offsets too: offset={{name: first element}}."
            )
        if isinstance(offset, Mapping) and name not in offset:
            raise ValueError(
                f"check.band(offset): the first element of each shard, by name; there is none of {name!r}."
            )
    return pairs


def tensors_of(tensors: Any) -> list[Tensor]:
    """The tensors themselves, whatever form they come in."""
    flat = list(tensors.values()) if isinstance(tensors, Mapping) else tensors
    return [flat] if isinstance(flat, torch.Tensor) else [each for each in flat if each is not None]
