"""Measuring a torch module on the meta device: what each layer keeps, gives and costs.

Owns ``measure``, which runs a copy without values and writes down what it saw. Nothing is
restated by formula: bytes are those of the storages that autograd saved, FLOPs those that
torch's counter saw. Must not know the schedule.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from zerosim.torch_models.batch import Example, example_of
from zerosim.torch_models.copies import on_meta, to_meta
from zerosim.torch_models.groups import grouped
from zerosim.torch_models.intercept import arguments, map_tensors
from zerosim.torch_models.losses import Loss, cross_entropy
from zerosim.torch_models.meta_run import MetaRun, kernels_of, shape_of
from zerosim.torch_models.planning import Decisions, failed, planned
from zerosim.torch_models.program import tensors
from zerosim.torch_models.units import Wrap, blocks
from zerosim.util.arguments import one_of
from zerosim.worlds.model_shapes import GroupShapes, ModelShapes

CHECKPOINTS = ("none", "full", "selective")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure(
    module: torch.nn.Module,
    inputs: Any,
    wrap: Wrap = None,
    *,
    compute: str = "bf16",
    checkpoint: str = "none",
    loss: Loss = cross_entropy,
    target: Any = None,
    kernels: str = "gpu",
) -> ModelShapes:
    """What the layers of ``module`` keep, give and cost, for one micro-batch of one rank; nothing is allocated.

    * ``inputs``: what it is called with, a tensor, a tuple, or a mapping of keywords, on any device;
      the first tensor is the batch's x, and its first axis the rows.
    * ``wrap``: the class of the blocks, several, or a predicate (see ``units.partition``); by default what
      stands in a ``ModuleList``, or else the classes of the module's own parts.
    * ``compute``: the dtype of the parameters that forward reads, ``"fp32"``, ``"fp16"`` or ``"bf16"``;
      floating-point inputs are in it as well, buffers in their own.
    * ``checkpoint``: of the units that ``wrap`` matched: ``"none"``; ``"full"``, each keeps its input
      alone (Chen et al., arXiv 1604.06174); or ``"selective"``, each keeps the results of fused attention and
      of every other matrix product of its linear layers, as torchtitan's per-operation policy does.
    * ``loss``: a function of the module's output and ``target`` (by default one integer for each position).
    * ``kernels``: those of a ``"gpu"``, with fused attention and dropout, or of the ``"cpu"`` on which the
      simulator runs.

    Raises ValueError for a module that cannot run without values, or that the units do not make up.
    """
    one_of("measure", "compute", compute, DTYPES)
    one_of("measure", "checkpoint", checkpoint, CHECKPOINTS)
    one_of("measure", "kernels", kernels, ("gpu", "cpu"))
    dtype = DTYPES[compute]
    example = example_of(map_tensors(lambda tensor: to_meta(tensor, dtype), arguments(inputs)))
    if not example.tensors:
        raise ValueError(f"measure(inputs): needs at least one tensor, the batch's x first; got {inputs!r}.")
    decisions = Decisions(blocks(module) if wrap is None else wrap)
    return measured(
        module, example, decisions, compute=dtype, checkpoint=checkpoint, loss=loss, target=target, kernels=kernels
    )


def measured(
    module: torch.nn.Module,
    example: Example,
    decisions: Decisions,
    *,
    compute: Any,
    checkpoint: str,
    loss: Loss,
    target: Any,
    kernels: str,
) -> ModelShapes:
    """As ``measure``, of a module that is cut as was decided, on an example without values."""
    with ExitStack() as stack:
        for context in kernels_of(kernels):
            stack.enter_context(context)
        recorded, layering, decisions = planned("measure", lambda: on_meta(module, compute), example, decisions)
    run = MetaRun(
        recorded, layering, grouped(layering, recorded), compute=compute, checkpoint=checkpoint, kernels=kernels
    )
    try:
        wanted = _target(run, loss, target)
        ending = run.loss(loss, wanted)
        units = run.units()
    except (NotImplementedError, RuntimeError) as error:
        raise failed("measure", module, example, error) from error
    return ModelShapes(
        groups=tuple(
            GroupShapes(group.name, group.shapes, group.role, None if group.dtype is None else group.dtype.name)
            for group in run.groups
        ),
        units=tuple(units),
        loss=ending,
        inputs=tuple(shape_of(tensor) for tensor in example.tensors),
        targets=tuple(shape_of(each) for each in tensors(wanted)),
        notes=(*(why for _, why in decisions.whole), *layering.notes),
    )


def _target(run: MetaRun, loss: Loss, target: Any) -> Any:
    if target is not None:
        return map_tensors(lambda each: each.to("meta"), target)
    output = run.output()
    logits = getattr(output, "logits", output)
    if loss is not cross_entropy or not isinstance(logits, torch.Tensor):
        raise ValueError(
            "measure(target): pass an example of what the loss is given as target. Only for cross_entropy of a tensor "
            "of logits, or of an output that has them, is it known: one integer for each position."
        )
    return torch.empty(logits.shape[:-1], dtype=torch.int64, device="meta")
