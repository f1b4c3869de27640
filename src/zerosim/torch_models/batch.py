"""The rules for a batch that a torch module is trained on, and the words of their errors.

Owns how a rank's (x, target) becomes arrays, whether they are torch's tensors or NumPy's
arrays, one or several. Must not know units, stages or ledgers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zerosim.bands import FP32, Array
from zerosim.torch_models.program import Kind, Program
from zerosim.torch_models.tensors import packed, unpacked
from zerosim.torch_models.trees import arguments, map_tensors
from zerosim.torch_models.units import numpy_dtype
from zerosim.util.arguments import PASS_UNEVEN, unmasked
from zerosim.util.shapes import Shaped


@dataclass(frozen=True)
class Example:
    """What a module is called with: positional and named arguments, and the tensors among them, in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]

    @property
    def rows(self) -> int:
        """Of the first tensor, and so of all."""
        return int(self.tensors[0].shape[0])

    def of(self, rows: int) -> Example:
        """The same with so many rows, those that there are again and again."""
        return example_of(map_tensors(lambda each: each[torch.arange(rows) % len(each)], (self.args, self.kwargs)))

    def turned(self) -> Example:
        """The same with other values, of those that there are: what depends on values shows."""
        return example_of(map_tensors(lambda each: each.flatten().flip(0).view(each.shape), (self.args, self.kwargs)))

    def on_meta(self) -> Example:
        """The same without values."""
        return example_of(map_tensors(lambda each: each.to("meta"), (self.args, self.kwargs)))


def example_of(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Example:
    """An example from arguments that are tensors already."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, call)
    return Example(*call, tuple(found))


def read_example(inputs: Any, compute: Any, device: str = "cpu") -> Example:
    """The example that a caller has passed, numbers of floating point in ``compute``. ValueError if it is none."""

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, (torch.Tensor, np.ndarray)):
            return leaf
        given = torch.as_tensor(leaf).detach().to(device)
        if given.dim() == 0 or 0 in given.shape:
            raise ValueError(
                f"TorchModel(inputs): the first axis of every tensor is the rows, one or more; got shape "
                f"{list(given.shape)}."
            )
        return given.to(compute if given.is_floating_point() else given.dtype, copy=True).contiguous()

    args, kwargs = arguments(inputs)
    example = example_of((tuple(map(tensor, args)), {name: tensor(leaf) for name, leaf in kwargs.items()}))
    if not example.tensors:
        raise ValueError(
            f"TorchModel(inputs): an example of one rank's x is needed, a tensor or an array, several in a tuple, or a "
            f"mapping of keywords; got {type(inputs).__name__}."
        )
    if len({len(each) for each in example.tensors}) > 1:
        raise ValueError(
            f"TorchModel(inputs): all tensors need the same number of rows, their first axis; got "
            f"{[list(each.shape) for each in example.tensors]}. Give the module what is the same for all rows itself."
        )
    return example


def read_target(target: Any, device: str = "cpu") -> Any:
    """The example of a target that a caller has passed, as it will come in a batch; None if there is none."""

    def tensor(leaf: Any) -> torch.Tensor:
        given = torch.as_tensor(leaf).detach().to(device)
        if given.is_floating_point():
            return given.float()
        return given if given.dtype is torch.bool else given.long()

    if isinstance(target, Mapping):
        return {name: tensor(leaf) for name, leaf in target.items()}
    if isinstance(target, tuple):
        return tuple(map(tensor, target))
    return None if target is None else tensor(target)


def check_batch(
    batch: Sequence[tuple[Any, Any]], ranks: int, example: Example, compute: Any, vocabularies: Mapping[int, int]
) -> tuple[Shaped[Array, "R B ..."], Shaped[Array, "R B ..."]]:
    """The batch as x [ranks, B, ...] and target [ranks, B, ...], once it is known to be sound.

    One (x, target) per rank. x is like ``example`` but for its rows: integers (of the k-th tensor from 0
    to ``vocabularies[k]``, if that is there) in its dtype, or finite numbers in ``compute``.
    Several tensors make one array with fields.
    """
    if not isinstance(batch, Sequence) or len(batch) != ranks:
        got = len(batch) if isinstance(batch, Sequence) else type(batch).__name__
        raise ValueError(f"step(batch): needs one (x, target) pair per rank, {ranks} in all; got {got}.")
    pairs = [_pair(rank, pair, example) for rank, pair in enumerate(batch)]
    for rank, (xs, targets) in enumerate(pairs):
        for what, arrays, first in (("x", xs, pairs[0][0]), ("target", targets, pairs[0][1])):
            for number, array in enumerate(arrays):
                which = f" {number}" * (len(arrays) > 1)
                counts = {each.shape[:1] for each in (*xs, *targets)}
                instead = PASS_UNEVEN if rank and what == "x" and len(counts) == 1 else ""
                _check(f"step(batch): {what}{which} of rank {rank}", array, first[number], pairs[0][0][0], instead)
    xs = [np.stack([pair[0][number] for pair in pairs]) for number in range(len(example.tensors))]
    for number, (x, like) in enumerate(zip(xs, example.tensors, strict=True)):
        xs[number] = _like(x, like, compute, vocabularies.get(number))
    return _one({str(number): x for number, x in enumerate(xs)}, alone=len(xs) == 1), _targets(batch, pairs)


def _targets(batch: Sequence[tuple[Any, Any]], pairs: Sequence[tuple[list[Array], list[Array]]]) -> Array:
    """The targets: of those that are tuples or mappings, an array with their fields."""
    form = batch[0][1]
    names = list(form) if isinstance(form, Mapping) else list(map(str, range(len(pairs[0][1]))))
    stacked = {name: np.stack([pair[1][number] for pair in pairs]) for number, name in enumerate(names)}
    whole = {
        name: each.astype(np.int64, copy=False) if each.dtype.kind in "iu" else each for name, each in stacked.items()
    }
    return _one(whole, alone=not isinstance(form, (Mapping, tuple)))


def _one(arrays: Mapping[str, Array], *, alone: bool) -> Array:
    return next(iter(arrays.values())) if alone else packed(arrays)


def target_of(array: Array, rank: int, rows: int) -> Any:
    """One rank's target as the loss is given it: a tensor, a tuple of them, or a mapping."""
    found = unpacked(array, rank, rows)
    if array.dtype.names is None:
        return found[""]
    return tuple(found.values()) if "0" in found else found


def _leaves(target: Any) -> list[Any]:
    if isinstance(target, Mapping):
        return list(target.values())
    return list(target) if isinstance(target, tuple) else [target]


def _pair(rank: int, pair: Any, example: Example) -> tuple[list[Array], list[Array]]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"step(batch): rank {rank} needs a pair (x, target); got {type(pair).__name__}.")
    args, kwargs = arguments(pair[0])
    places = [place for place, leaf in enumerate(example.args) if isinstance(leaf, torch.Tensor)]
    names = [name for name, leaf in example.kwargs.items() if isinstance(leaf, torch.Tensor)]
    alike = len(args) in (len(places), len(example.args)) and set(names) <= set(kwargs) <= set(example.kwargs)
    if not alike:
        wanted, got = ", ".join(names), ", ".join(map(str, kwargs))
        raise ValueError(
            f"step(batch): x of rank {rank} must be what the example was: {len(places)} tensors in order"
            f"{f' and {wanted} by name' if names else ''}; got {len(args)}{f' and {got}' if kwargs else ''}."
        )
    given = [
        *(args if len(args) == len(places) else (args[place] for place in places)),
        *(kwargs[name] for name in names),
    ]
    xs = [_array(f"step(batch): x of rank {rank}", each) for each in given]
    return xs, [_array(f"step(batch): target of rank {rank}", each) for each in _leaves(pair[1])]


def _array(what: str, given: Any) -> Array:
    if isinstance(given, torch.Tensor):
        given = given.detach().to("cpu")
        given = (given.float() if given.dtype in (torch.float16, torch.bfloat16) else given).numpy()
    if not isinstance(given, np.ndarray):
        raise TypeError(f"{what} must be a NumPy array or a torch tensor; got {type(given).__name__}.")
    return given


def _like(x: Array, example: torch.Tensor, compute: Any, vocabulary: int | None) -> Array:
    shape, whole = tuple(example.shape[1:]), not example.is_floating_point()
    if x.shape[2:] != shape or (x.dtype.kind in "iub") != whole:
        raise ValueError(
            f"step(batch): x must be {'integers' if whole else 'float32'} of shape "
            f"[{', '.join(map(str, ('B', *shape)))}], like the example; got {x.dtype} {list(x.shape[1:])}."
        )
    if vocabulary is not None and not 0 <= x.min() <= x.max() < vocabulary:
        raise ValueError(f"step(batch): tokens must be of 0 to {vocabulary - 1}; got {x.min()} to {x.max()}.")
    return x.astype(numpy_dtype(example.dtype if whole else compute), copy=False)


def _check(what: str, array: Any, first: Any, x: Any, instead: str) -> None:
    unmasked(what, array)
    if array.dtype.kind not in "iub" and array.dtype != FP32:
        raise TypeError(f"{what} must be integers, booleans or float32; got {array.dtype}. Use astype, or float().")
    if array.ndim < 1 or array.size == 0 or array.shape[0] != x.shape[0]:
        got = f"got shape {list(array.shape)}.{instead}"
        raise ValueError(f"{what} needs as many rows as x of rank 0, one or more; {got}")
    if array.shape != first.shape or array.dtype != first.dtype:
        raise ValueError(
            f"{what} must be like that of rank 0, {first.dtype} {list(first.shape)}; got {array.dtype} "
            f"{list(array.shape)}."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(
            f"{what} must be finite; it has {np.count_nonzero(~np.isfinite(array))} elements that are not."
        )


def vocabularies(program: Program, module: torch.nn.Module) -> dict[int, int]:
    """For inputs that an embedding of ``module`` is called with, by number: how many tokens it knows."""
    found: dict[int, int] = {}
    for op in program.ops:
        unit: Any = None if op.unit is None else module.get_submodule(op.unit.path)
        for index in op.takes if isinstance(unit, torch.nn.Embedding) else ():
            if program.tensors[index].kind is Kind.INPUT:
                found[program.stores[program.tensors[index].store].input] = unit.num_embeddings
    return found
