"""What one rank did in one step, as plain data: what is sent to the judge, or written to a file.

Owns the record and its form in a safetensors file. Must not know where the values come from,
nor what becomes of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zerosim.conformance.layout import Piece, array_of, tensor_of
from zerosim.records.conformance import Asked, Held
from zerosim.records.files import ResultsError

Tensor = Any
Tree = Any  # a tensor, or tuples, lists and mappings of them

FORMAT = "zerosim.conformance.step/1"


@dataclass
class Seen:
    """One rank's step. Pieces are of the flat vector of all parameters.

    * ``x``, ``y``: the batch that ``step`` was given; ``rows`` of it, and ``forwarded`` those that the module was
      called with (-1: it was not seen), of which ``strange`` elements are not the batch's;
    * ``before``: the parameters when the step began, in the first step or where they had changed since the last;
    * ``created``: rank 0's when the check was made, in the first step;
    * ``params``: those at its end; ``alike`` names those whose bits are rank 0's, which are left out;
    * ``read``: those that forward was seen to read, where they are not whole at rest;
    * ``bands``: what was handed over or seen of an optimizer: gradients after any clipping as ``"grads"``, those handed
      over as ``"handed grads"``, its state after the step;
    * ``losses``: of each call of the module; ``backward``: of what ``backward`` was called on;
    * ``owned``: (start, stop) of what this rank gave to others;
    * ``buffers``: the module's when the step began, by name;
    * ``numbers``: of an optimizer of torch's that took a step: its numbers, and how often in this step (``calls``).
    """

    rank: int
    step: int
    x: Tree = None
    y: Tree = None
    rows: int = 0
    forwarded: int = -1
    strange: int = 0
    before: list[Piece] | None = None
    created: list[Piece] = field(default_factory=list)
    params: list[Piece] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    read: list[Piece] = field(default_factory=list)
    bands: dict[str, list[Piece]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    owned: list[tuple[int, int]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    held: Held | None = None
    kernel: int | None = None
    lr: float | None = None
    loss_scale: float | None = None
    training: bool = True
    numbers: dict[str, float] = field(default_factory=dict)


_PLAIN = (
    "rank", "step", "rows", "forwarded", "strange", "alike", "losses", "backward", "owned", "kernel", "lr",
    "loss_scale", "training", "numbers",
)  # fmt: skip
_PIECES = ("params", "read", "created")


def path_of(folder: Path, rank: int, step: int) -> Path:
    """Where a rank's step lies in a run's folder."""
    return folder / f"rank-{rank:04}" / f"step-{step:06}.safetensors"


def write(seen: Seen, folder: Path) -> None:
    """Write it, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    said: dict[str, Any] = {name: getattr(seen, name) for name in _PLAIN}
    said |= {"x": _flatten(seen.x, "x", tensors), "y": _flatten(seen.y, "y", tensors)}
    groups = {name: getattr(seen, name) for name in _PIECES} | {f"band {band}": p for band, p in seen.bands.items()}
    if seen.before is not None:
        groups["before"] = seen.before
    said["pieces"] = {}
    for group, pieces in groups.items():
        said["pieces"][group] = [start for start, _ in pieces]
        for index, (_, values) in enumerate(pieces):
            tensors[f"{group}/{index}"] = tensor_of(np.ascontiguousarray(values)).clone()
    said["buffers"] = list(seen.buffers)
    tensors |= {f"buffer/{name}": tensor.contiguous().clone() for name, tensor in seen.buffers.items()}
    said["asked"] = msgspec.to_builtins(seen.asked)
    said["held"] = msgspec.to_builtins(seen.held)
    path = path_of(folder, seen.rank, seen.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".writing")
    save_file(tensors, aside, metadata={"format": FORMAT, "said": json.dumps(said)})
    aside.replace(path)


def read(folder: Path, rank: int, step: int) -> Seen:
    """Read what ``write`` wrote. ResultsError, with the reason, for anything else."""
    path = path_of(folder, rank, step)
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ResultsError(f"{path}: its format is {about.get('format')!r}; what is read here is {FORMAT!r}.")
            said = json.loads(about["said"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        found = Seen(**{name: said[name] for name in _PLAIN})
        found.owned = [(start, stop) for start, stop in said["owned"]]
        found.x, found.y = (_restore(said[name], tensors) for name in ("x", "y"))
        groups = {
            group: [Piece(start, array_of(tensors[f"{group}/{index}"])) for index, start in enumerate(starts)]
            for group, starts in said["pieces"].items()
        }
        found.params, found.read, found.created = (groups[name] for name in _PIECES)
        found.before = groups.get("before")
        found.bands = {name[5:]: pieces for name, pieces in groups.items() if name.startswith("band ")}
        found.buffers = {name: tensors[f"buffer/{name}"] for name in said["buffers"]}
        found.asked = msgspec.convert(said["asked"], list[Asked])
        found.held = msgspec.convert(said["held"], Held | None)
    except ResultsError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path}: not a whole record of a step: {error!r}. Record the run again.") from error
    return found


def _flatten(tree: Tree, name: str, tensors: dict[str, Tensor]) -> Any:
    """The shape of a tree in JSON, its tensors put among the others."""
    if isinstance(tree, torch.Tensor):
        tensors[name] = tree.detach().cpu().contiguous().clone()
        return name
    if isinstance(tree, dict):
        return {"of": {key: _flatten(value, f"{name}.{key}", tensors) for key, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return [_flatten(value, f"{name}.{index}", tensors) for index, value in enumerate(tree)]
    return None


def _restore(shape: Any, tensors: dict[str, Tensor]) -> Tree:
    if isinstance(shape, str):
        return tensors[shape]
    if isinstance(shape, dict):
        return {key: _restore(value, tensors) for key, value in shape["of"].items()}
    return None if shape is None else tuple(_restore(each, tensors) for each in shape)


def copied(tree: Tree) -> Tree:
    """A tree's tensors copied to the CPU, arrays as tensors."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(copied(value) for value in tree)
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    return tree.detach().to("cpu", copy=True) if isinstance(tree, torch.Tensor) else tree
