"""The loss of a torch module, rank by rank, and the gradients with which the backward begins.

Owns what a loss may be. Must not know layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from zerosim.bands import Array
from zerosim.ranks import Workspace
from zerosim.torch_models.batch import target_of
from zerosim.torch_models.draws import deterministic
from zerosim.torch_models.op_counters import counting
from zerosim.torch_models.saved_tensors import SavedTensors
from zerosim.torch_models.tensors import Carried, Gradients, Held
from zerosim.torch_models.trees import tensors
from zerosim.util.shapes import Float, Shaped

Loss = Callable[[Any, Any], Any]


def cross_entropy(output: Any, target: Any) -> Any:
    """The mean cross entropy of every position, computed in fp32: of logits [..., V] and integers [...].

    ``output`` may also be an object with ``logits``, as language models' are.
    """
    logits = getattr(output, "logits", output)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), target.flatten())


class RankLoss:
    """A function of what a module returns and the target, for the rows of one rank after another."""

    def __init__(self, loss: Loss) -> None:
        self.function = loss
        if isinstance(loss, torch.nn.Module) and any(each.requires_grad for each in loss.parameters()):
            raise ValueError(
                f"TorchModel(loss): {type(loss).__name__} has parameters of its own, which nobody would train. Make it "
                f"a part of the module, and return its value."
            )

    def __call__(
        self, y: Carried, target: Shaped[Array, "R ..."], work: Workspace
    ) -> tuple[Float[Array, "R"], Gradients]:
        """Each rank's loss [R] and the gradients of what it was computed from, held. Frees ``target``."""
        batch, held, grads, operations = y.batch, Held(work), Gradients(len(y.batch.rows)), 0
        values = np.zeros(len(batch.rows))
        runs: list[tuple[int, SavedTensors, Any, dict[int, torch.Tensor]]] = []
        for rank in batch.turns:
            first = rank == batch.turns[0]
            program = batch.layering(rank).program
            memory = y.memory(program.returns, rank)
            leaves = {
                index: (known := program.tensors[index]).on(memory[known.store]).requires_grad_(known.requires_grad)
                for index in program.returns
            }
            wanted = target_of(target, rank, batch.rows[rank])
            saved = SavedTensors(_there(memory, wanted))
            drawing = deterministic("TorchModel(loss): the loss")
            with counting(first) as flops, saved.recording(), torch.enable_grad(), drawing:
                value = self._value(program.returned(leaves), wanted)
            check_value("TorchModel", value, leaves.values())
            operations += flops()
            held.keep(rank, saved.finish({}))
            values[rank] = value.item()
            runs.append((rank, saved, value, {index: leaf for index, leaf in leaves.items() if leaf.requires_grad}))
        for rank, saved, value, leaves in runs:
            first = rank == batch.turns[0]
            memory = y.memory(batch.layering(rank).program.returns, rank)
            saved.sources = _there(memory, target_of(target, rank, batch.rows[rank])) | held.sources(rank)
            with counting(first) as flops:
                found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            operations += flops()
            given = {index: grad for index, grad in zip(leaves, found, strict=True) if grad is not None}
            grads.put(rank, given, work, first=first)
            saved.sources = {}
        work.flops(operations)
        held.free()
        work.free(target)
        return values, grads

    def _value(self, output: Any, wanted: Any) -> Any:
        try:
            return self.function(output, wanted)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            one, other = ([f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors(x)] for x in (output, wanted))
            raise ValueError(
                f"TorchModel(loss): {name} failed on the output {', '.join(one)} and the target {', '.join(other)} "
                f"({error}). Pass a loss that takes them, as in loss=torch.nn.functional.mse_loss."
            ) from error


def _there(memory: dict[int, torch.Tensor], wanted: Any) -> dict[Any, torch.Tensor]:
    """What a loss is computed from, by names that last."""
    return {("memory", number): each for number, each in memory.items()} | {
        ("target", number): each for number, each in enumerate(tensors(wanted))
    }


def check_value(call: str, value: Any, leaves: Iterable[torch.Tensor]) -> None:
    """Refuse what is no loss: not one number, or not one of these tensors, or not of these alone."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"{call}(loss): must return one number that depends on the output, and that on a trainable parameter; got "
            f"{value!r}."
        )
    known = {id(leaf) for leaf in leaves}
    seen, todo = set(), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in known:
            raise ValueError(
                f"{call}(loss): depends on a tensor of shape {list(node.variable.shape)} with gradients that is no "
                f"output, a parameter say, and they would be lost. Compute with it in the module and return that."
            )
        todo += [following for following, _ in node.next_functions]
