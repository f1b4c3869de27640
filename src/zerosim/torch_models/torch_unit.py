"""A layer of a torch module: its forward and backward, rank by rank, through torch's own autograd on the CPU.

Owns what a layer holds: what autograd would keep from the forward to the backward is copied
into arrays of the ledger, so that the bytes held are bytes that exist. Parameters are never
kept: the backward takes them from what it is handed, which is what gathering them again
means. Must not know stages or sharding, nor how layers are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from zerosim.bands import Array
from zerosim.layers import Flat, Group, Pass, Role, Turn
from zerosim.ranks import Workspace
from zerosim.torch_models.draws import seed_of, seeded
from zerosim.torch_models.execution import Executor, overwritten
from zerosim.torch_models.groups import Part
from zerosim.torch_models.layering import Layering, LayerPlan
from zerosim.torch_models.op_counters import counting
from zerosim.torch_models.saved_tensors import SavedTensors
from zerosim.torch_models.tensors import Batch, Carried, Held, drop, row, store, view
from zerosim.util.shapes import Shaped

Flats = list[Array]


@dataclass(frozen=True)
class Work:
    """What all layers of a model share: what runs them, in which torch dtype, from which seed, cut how."""

    executor: Executor
    compute: Any
    seed: int
    layerings: Callable[[int], Layering]


@dataclass
class _Graph:
    """One rank's run, from the forward to the backward: where autograd starts, and where it is to end."""

    saved: SavedTensors
    ends: dict[int, Any]  # what is handed on, by its place among the program's tensors
    leaves: dict[int, Any]  # what came in
    own: dict[str, Any]  # parameters


class TorchUnit:
    """The layer of a module that is number ``number`` in ``plan``'s order, for a ``Scheme``."""

    def __init__(self, number: int, plan: LayerPlan, parts: Sequence[Part], work: Work) -> None:
        self.name, self.groups = plan.name, tuple(part.group for part in parts)
        self.number, self.parts, self._with = number, tuple(parts), work

    def forward(self, x: Shaped[Array, "R ..."] | Carried, given: Pass) -> tuple[Any, Any]:
        came = x if isinstance(x, Carried) else self._begun(x, given.work)
        batch, graphs, operations = came.batch, dict[int, _Graph](), 0
        flats, held = _flats(given.params), Held(given.work)
        turn = given.turn or Turn(range(len(batch.rows)), 0, 0)
        for rank in batch.turns:
            first = rank == batch.turns[0]
            program, plan = batch.layering(rank).program, batch.layering(rank).layers[self.number]
            memory = came.memory((*plan.inputs, *plan.ins), rank)
            own = self._tensors(flats, rank)
            there = {**own, **_named(memory), **self._with.executor.constants(program, plan)}
            own.update((name, own[name].clone()) for name in list(own) if name in program.assigned)
            seed = seed_of(self._with.seed, turn.ranks[rank], turn.step, turn.micro_batch, self.number)
            saved = SavedTensors(there)
            try:
                with seeded(seed), counting(first) as flops, saved.recording():
                    leaves, outs, assigned = self._with.executor.run(program, plan, memory, own)
            except Exception as error:
                error.add_note(f"In layer {self.name}, on the rows of rank {turn.ranks[rank]}.")
                raise
            if first:
                self._check_unwritten(flats, rank, own)
            operations += flops()
            stores = {program.tensors[index].store: outs[index] for index in plan.outs}
            handed = {number: stores[number] for number in plan.holds}
            kept = saved.finish(_named(handed))
            held.take(rank, handed)
            held.keep(rank, kept)
            for name, tensor in assigned.items():
                there[name].copy_(tensor)
            graphs[rank] = _Graph(saved, *(_edges(some) for some in (outs, leaves, own)))
            for leaf in (*leaves.values(), *own.values()):
                drop(leaf)
        given.work.flops(operations)
        return came.and_then(held.arrays), (came, held, graphs)

    def _begun(self, x: Shaped[Array, "R ..."], work: Workspace) -> Carried:
        """What the first layer is handed: of each rank its rows of x."""
        rows = [x.shape[1]] * len(x) if work.rows is None else list(work.rows)
        return Carried(Batch(x, rows, self._with.layerings), {}, {})

    def backward(self, saved: Any, dy: Any, given: Pass) -> Any:
        (came, held, graphs), work, pending, operations = saved, given.work, dy, 0
        flats, batch = _flats(given.params), came.batch
        targets = given.grads if isinstance(given.grads, list) else [given.grads]
        under_way = pending.indices  # before any rank adds to them
        for rank in range(len(batch.rows)):
            if rank not in graphs:
                self._store({}, targets, rank)
        for rank, graph in graphs.items():
            first = rank == batch.turns[0]
            plan = batch.layering(rank).layers[self.number]
            inputs = [*graph.leaves.values(), *graph.own.values()]
            found: Sequence[Any] = [None] * len(inputs)
            ends = [index for index in graph.ends if index in under_way]
            if ends and inputs:
                # What is under way for those that came in goes first, as it would if all were one graph.
                roots = {index: graph.ends[index] for index in ends}
                roots |= {index: edge for index, edge in graph.leaves.items() if index in under_way}
                graph.saved.sources = self._sources(came, plan, held, flats, rank)
                with counting(first) as flops:
                    dys = [pending.of(index, rank) for index in roots]
                    found = torch.autograd.grad(list(roots.values()), inputs, dys, allow_unused=True)
                operations += flops()
                graph.saved.sources = {}
            for_leaves = {index: grad for index, grad in zip(graph.leaves, found, strict=False) if grad is not None}
            pending.put(rank, for_leaves, work, first=first)
            grads = dict(zip(graph.own, found[len(graph.leaves) :], strict=True))
            self._store(grads, targets, rank)
            if given.reached is not None:
                self._note(grads, given.reached, rank, len(batch.rows))
        work.flops(operations)
        held.free()
        outs = [batch.layering(rank).layers[self.number].outs for rank in batch.turns[:1]]
        pending.free([index for some in outs for index in some], work)
        return pending

    def constants(self, layering: Layering) -> list[torch.Tensor]:
        """What is there whatever happens."""
        return list(self._with.executor.constants(layering.program, layering.layers[self.number]).values())

    @staticmethod
    def reads(saved: Any) -> dict[str, int]:
        """How often the first rank's forward has read each parameter, by the edges of autograd's graph."""
        _, _, graphs = saved
        graph = graphs[0]
        names = {edge.node: name for name, edge in graph.own.items()}
        counts = dict.fromkeys(graph.own, 0)
        seen, todo = set(), [edge.node for edge in graph.ends.values()]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for following, _ in node.next_functions:
                if following in names:
                    counts[names[following]] += 1
                elif following is not None:
                    todo.append(following)
        return counts

    def _sources(
        self, came: Carried, plan: LayerPlan, held: Held, flats: Flats, rank: int
    ) -> dict[Hashable, torch.Tensor]:
        outs = {number: row(array, rank) for number, array in held.arrays.items()}
        program = came.batch.layering(rank).program
        return {
            **self._with.executor.constants(program, plan),
            **self._tensors(flats, rank), **_named(came.memory((*plan.inputs, *plan.ins), rank)), **_named(outs),
            **held.sources(rank),
        }  # fmt: skip

    def _store(self, grads: Mapping[str, torch.Tensor | None], targets: Sequence[Array], rank: int) -> None:
        trainable = [part for part in self.parts if part.group.role is Role.TRAINABLE]
        for target, part in zip(targets, trainable, strict=False):
            start = 0
            for slot in part.slots:
                stop = start + prod(slot.shape)
                store(grads.get(slot.name), view(target[rank, start:stop]))
                start = stop

    def _note(
        self, grads: Mapping[str, torch.Tensor | None], reached: dict[Group, Array], rank: int, ranks: int
    ) -> None:
        """Of which parameters this rank has a gradient, in this pass or in one before."""
        for part in self.parts:
            if part.group.role is Role.TRAINABLE:
                noted = reached.setdefault(part.group, np.zeros((ranks, len(part.slots)), np.bool_))
                noted[rank] |= [grads.get(slot.name) is not None for slot in part.slots]

    def _tensors(self, flats: Flats, rank: int) -> dict[Any, torch.Tensor]:
        """One rank's tensors of the module by name: buffers themselves, parameters in registers.

        Each starts at an address of its own, in the dtype of the arithmetic, as torch would have it.
        """
        found: dict[Any, torch.Tensor] = {}
        for flat, part in zip(flats, self.parts, strict=True):
            start = 0
            for slot in part.slots:
                stop = start + prod(slot.shape)
                tensor = view(flat[rank, start:stop]).view(slot.shape)
                if part.group.role is not Role.BUFFER:
                    tensor = tensor.to(self._with.compute, copy=True)
                found[slot.name] = tensor.requires_grad_(part.group.role is Role.TRAINABLE)
                start = stop
        return found

    def _check_unwritten(self, flats: Flats, rank: int, own: Mapping[str, torch.Tensor]) -> None:
        """Refuse a run that has written to a parameter by whatever way: what it computed with is what it was given."""
        fresh = self._tensors(flats, rank)
        for slot in (slot for part in self.parts if part.group.role is not Role.BUFFER for slot in part.slots):
            if not _same(own[slot.name], fresh[slot.name]):
                raise overwritten(self.name, slot.name)


def _flats(params: Flat) -> Flats:
    return params if isinstance(params, list) else [params]


def _edges(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, Any]:
    """Where autograd knows those that have gradients."""
    return {name: get_gradient_edge(tensor) for name, tensor in tensors.items() if tensor.requires_grad}


def _named(memory: Mapping[int, torch.Tensor]) -> dict[Hashable, torch.Tensor]:
    """Memory by a name that is no parameter's and no number of what is kept."""
    return {("memory", number): tensor for number, tensor in memory.items()}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one.detach().view(-1).view(torch.uint8), other.detach().view(-1).view(torch.uint8)))
