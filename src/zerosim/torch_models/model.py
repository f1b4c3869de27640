"""A torch module as a model of the simulator: real numerics, through torch's own autograd on the CPU.

Owns ``TorchModel`` and its layers. A unit's forward and backward run rank by rank on views of
that rank's row; what autograd would keep in between is held in the ledger's arrays instead, so
that the bytes held are bytes that exist. Parameters are never kept: backward takes them from
what it is handed, which is what gathering them again means. Must not know stages or sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch.autograd.graph import get_gradient_edge

from zerosim.bands import Array
from zerosim.layers import Checkpointed, Flat, Group, Layer, Pass, Role
from zerosim.ranks import Workspace
from zerosim.torch_models.batch import check_batch
from zerosim.torch_models.chain import Link, chain, check_repeatable
from zerosim.torch_models.intercept import map_tensors
from zerosim.torch_models.meta_run import Loss
from zerosim.torch_models.op_counters import Flops
from zerosim.torch_models.profile import DTYPES, cross_entropy, measure
from zerosim.torch_models.saved_tensors import SavedTensors
from zerosim.torch_models.tensors import OUTPUT, Held, drop, row, store, view
from zerosim.torch_models.units import Part, Wrap, partition

__all__ = ["TorchModel", "TorchUnit", "cross_entropy", "measure"]


class TorchUnit:
    """One unit of a chain as a layer: ``link`` says what is called and how, ``compute`` in which torch dtype."""

    def __init__(self, link: Link, compute: Any) -> None:
        self.name, self.groups = link.name, link.unit.groups
        self._link, self._compute, self._parts = link, compute, link.unit.parts

    def forward(self, x: Shaped[Array, "R ..."], given: Pass) -> tuple[Shaped[Array, "R ..."], Any]:
        work = given.work
        flats, held, records, edges, operations = self._flats(given.params), Held(work), [], [], 0
        for rank in range(len(x)):
            own = self._tensors(flats, rank)
            leaf_x = row(x, rank).requires_grad_(self._link.x_grad)
            record = SavedTensors({"": leaf_x, **own})
            with counting(rank) as flops, record.recording(), torch.enable_grad(), deterministic(self.name, rank == 0):
                versions = {name: leaf._version for name, leaf in (("", leaf_x), *own.items())}
                after = dict(own)  # where torch leaves what the module has assigned to a name
                y = torch.func.functional_call(self._link.module, after, *self._call(leaf_x))
            self._check_written({"": leaf_x, **own}, {"": leaf_x, **after}, versions)
            operations += flops()
            held.take(rank, y, record.finish({OUTPUT: y}))
            records.append(record)
            inputs = [get_gradient_edge(leaf) for leaf in (leaf_x, *own.values()) if leaf.requires_grad]
            edges.append((get_gradient_edge(y) if y.requires_grad else None, inputs))
            for leaf in (leaf_x, *own.values()):
                drop(leaf)
        work.flops(operations)
        return held.y, (x, held, records, edges)

    def backward(self, saved: Any, dy: Shaped[Array, "R ..."], given: Pass) -> Shaped[Array, "R ..."] | None:
        (x, held, records, edges), (params, work, grads, need_dx) = saved, given
        flats, operations, dx = self._flats(params), 0, None
        targets = grads if isinstance(grads, list) else [grads]
        if need_dx:  # without elements if nothing before this unit trains
            dx = work.hold(*x.shape[1:], dtype=x.dtype) if self._link.x_grad else work.hold(0)
        for rank, (end, inputs) in enumerate(edges):
            records[rank].sources = held.sources(rank, x, self._tensors(flats, rank))
            found: Sequence[Any] = [None] * len(inputs)
            if end is not None and inputs:
                with counting(rank) as flops:
                    found = torch.autograd.grad([end], inputs, [row(dy, rank)], allow_unused=True)
                operations += flops()
            records[rank].sources = {}
            rest = list(found)
            if self._link.x_grad:
                first = rest.pop(0)
                if dx is not None:
                    store(first, view(dx[rank]))
            for target, part in zip(targets, self._trainable, strict=True):
                start = 0
                for shape in part.group.shapes:
                    stop = start + prod(shape)
                    store(rest.pop(0), view(target[rank, start:stop]))
                    start = stop
        work.flops(operations)
        held.free()
        work.free(dy)
        return dx

    @property
    def _trainable(self) -> list[Part]:
        return [part for part in self._parts if part.group.role is Role.TRAINABLE]

    def _check_written(
        self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], versions: Mapping[str, int]
    ) -> None:
        """Refuse a forward that has changed anything but its buffers, or those otherwise than in place."""
        buffers = {name for part in self._parts if part.group.role is Role.BUFFER for name in part.names}
        for name, leaf in before.items():
            if after[name] is not leaf:
                raise RuntimeError(
                    f"TorchModel: {self.name} assigns a new tensor to {name}, which would be lost: each rank has its "
                    f"own memory for it. Write to a buffer in place, with copy_() say."
                )
            if leaf._version == versions[name] or name in buffers:
                continue
            if name:
                raise RuntimeError(
                    f"TorchModel: {self.name} overwrites its parameter {name}, which would be lost: it computes with a "
                    f"copy, and only the optimizer writes to the original. Change parameters out of place, as in "
                    f"torch.nn.utils.parametrizations."
                )
            raise RuntimeError(
                f"TorchModel: {self.name} overwrites its input, which belongs to the unit before it. Use the "
                f"out-of-place form (inplace=False), or match a module around both."
            )

    def _flats(self, params: Flat) -> list[Array]:
        return params if isinstance(params, list) else [params]

    def _call(self, given: torch.Tensor) -> tuple[Any, Any]:
        return map_tensors(lambda _: given, (self._link.args, self._link.kwargs))  # type: ignore[no-any-return]

    def _tensors(self, flats: Sequence[Array], rank: int) -> dict[str, torch.Tensor]:
        """One rank's tensors of the module by name: buffers themselves, parameters in registers.

        Each starts at an address of its own, in the dtype of the arithmetic, as torch would have it.
        """
        found: dict[str, torch.Tensor] = {}
        for flat, part in zip(flats, self._parts, strict=True):
            start = 0
            for name, shape in zip(part.names, part.group.shapes, strict=True):
                stop = start + prod(shape)
                tensor = view(flat[rank, start:stop])
                if part.group.role is not Role.BUFFER:
                    tensor = tensor.to(self._compute, copy=True)
                found[name] = tensor.view(shape).requires_grad_(part.group.role is Role.TRAINABLE)
                start = stop
        return found


class TorchModel:
    """``module`` cut into units (``wrap``: see ``units.partition``), for a ``Scheme`` in the simulator.

    * ``inputs``: an example of one rank's x [B, ...], by which the units' order is found.
    * ``compute``: the dtype of the arithmetic and of floating-point activations, ``"fp32"``, ``"fp16"`` or
      ``"bf16"``. Where the working copy has another it is cast in a register.
    * ``checkpoint``: ``"full"`` for units that ``wrap`` matched keep their input alone.
    * ``loss``: a function of the output and the target of one rank, both tensors, to a number.

    ValueError if the units do not chain: each takes one tensor, what the one before returned,
    and the last one's is what the module returns. A module that draws random numbers
    (dropout) is refused, for every stage and every rank would draw others, and so is one that
    remembers its calls elsewhere than in buffers, which every rank has for itself.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Any,
        wrap: Wrap,
        *,
        compute: str = "fp32",
        checkpoint: str = "none",
        loss: Loss = cross_entropy,
    ) -> None:
        if compute not in DTYPES:
            raise ValueError(f"TorchModel(compute): one of {', '.join(DTYPES)}; got {compute!r}.")
        if checkpoint not in ("none", "full"):
            raise ValueError(
                f"TorchModel(checkpoint): 'none' or 'full'; got {checkpoint!r}. Only measure() knows selective "
                f"checkpointing."
            )
        units = partition(module, wrap)
        self._compute, self._loss = DTYPES[compute], loss
        self._example = torch.as_tensor(inputs)
        with deterministic(type(module).__name__):
            self._links = chain(module, units, self._example)
        check_repeatable(module, self._example)
        self.layers: list[Layer] = []
        for link in self._links:
            layer = TorchUnit(link, self._compute)
            self.layers.append(Checkpointed(layer) if checkpoint == "full" and link.unit.matched else layer)
        self._values = {
            part.group: torch.cat([tensor.detach().reshape(-1) for tensor in part.tensors]).clone()
            for link in self._links
            for part in link.unit.parts
        }

    @property
    def n_params(self) -> int:
        """The logical number of parameters: tied ones once, frozen ones too, buffers left out."""
        return sum(group.size for group in self._values if group.role is not Role.BUFFER)

    def initial(self) -> Float[Array, "P"]:
        """The parameters [n_params] that the module had when this was made, fp32."""
        flats = [flat.float() for group, flat in self._values.items() if group.role is not Role.BUFFER]
        values: Array = torch.cat(flats).numpy()
        return values

    def buffer(self, group: Group) -> Array:
        """The values of a group of buffers [its size] when this was made."""
        values: Array = self._values[group].view(torch.uint8).numpy().view(group.dtype)
        return values

    def check(
        self, batch: Sequence[tuple[Any, Any]], ranks: int
    ) -> tuple[Shaped[Array, "R ..."], Shaped[Array, "R ..."]]:
        """One (x [B, ...], target [B, ...]) per rank, x like the example but for B, which is the same everywhere."""
        first = self._links[0].module
        vocabulary = first.num_embeddings if isinstance(first, torch.nn.Embedding) else None
        return check_batch(batch, ranks, self._example, self._compute, vocabulary)

    def loss(
        self, y: Shaped[Array, "R ..."], target: Shaped[Array, "R ..."], work: Workspace
    ) -> tuple[Float[Array, "R"], Shaped[Array, "R ..."]]:
        """Each rank's loss [R] and the gradient of its output [R, ...], held. Frees ``target``."""
        held, records, ends, operations = Held(work), [], [], 0
        for rank in range(len(y)):
            given, wanted = row(y, rank).requires_grad_(), row(target, rank)
            record = SavedTensors({"": given, "target": wanted})
            with counting(rank) as flops, record.recording(), torch.enable_grad(), deterministic("the loss", rank == 0):
                value = self._loss(given, wanted)
            if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError(f"TorchModel(loss): must return one number that depends on the output; got {value!r}.")
            operations += flops()
            held.keep(rank, record.finish({}))
            records.append(record)
            ends.append((value, given))
        dy = work.hold(*y.shape[1:], dtype=y.dtype)
        for rank, (value, given) in enumerate(ends):
            records[rank].sources = held.sources(rank, y, {"target": row(target, rank)})
            with counting(rank) as flops:
                [grad] = torch.autograd.grad(value, [given], allow_unused=True)
            operations += flops()
            store(grad, view(dy[rank]))
            records[rank].sources = {}
        work.flops(operations)
        held.free()
        work.free(target)
        return np.array([value.item() for value, _ in ends], np.float64), dy


@contextmanager
def counting(rank: int) -> Iterator[Callable[[], int]]:
    """Count FLOPs within the block, of the first rank alone: what the others do has the same shapes."""
    if rank:
        yield lambda: 0
        return
    with Flops() as flops:
        yield lambda: flops.total


@contextmanager
def deterministic(name: str, watched: bool = True) -> Iterator[None]:
    """Refuse what draws random numbers within the block."""
    before = torch.get_rng_state() if watched else None
    yield
    if before is not None and not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ValueError(
            f"TorchModel: {name} draws random numbers in its forward pass, which every rank and stage would draw "
            f"differently. Set dropout to 0, or call module.eval()."
        )
