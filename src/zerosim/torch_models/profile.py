"""Measuring a torch module on the meta device: what each unit keeps, gives and costs.

Owns ``measure``, which runs a copy without values once and writes down what it saw. Nothing is
restated by formula: bytes are those of the storages that autograd saved, FLOPs those that
torch's counter saw. Must not know the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from zerosim.layers import Role
from zerosim.torch_models.copies import on_meta, to_meta
from zerosim.torch_models.costs import shape_of
from zerosim.torch_models.losses import Loss, cross_entropy
from zerosim.torch_models.meta_run import Run
from zerosim.torch_models.planning import TWO_ROWS
from zerosim.torch_models.trees import arguments, map_tensors, tensors
from zerosim.torch_models.units import Wrap, blocks, partition
from zerosim.worlds.model_shapes import GroupShapes, ModelShapes, UnitShapes

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
    target: torch.Tensor | Callable[[Any], torch.Tensor] | None = None,
    idle: Literal["refused", "left out", "frozen", "trained"] = "refused",
) -> ModelShapes:
    """What the units of ``module`` keep, give and cost, for one micro-batch of one rank; nothing is allocated.

    * ``inputs``: what it is called with, a tensor, a tuple, or a mapping of keywords, on any device;
      the first tensor is the batch's x, and its first axis the rows.
    * ``wrap``: the class of the blocks, several, or a predicate (see ``units.partition``); by default ``units.blocks``.
    * ``compute``: the dtype of the parameters that forward reads, ``"fp32"``, ``"fp16"`` or ``"bf16"``;
      floating-point inputs are in it as well, buffers in their own.
    * ``checkpoint``: of the units that ``wrap`` matched: ``"none"``; ``"full"``, each keeps its input
      alone (Chen et al., arXiv 1604.06174); or ``"selective"``, each keeps the results of fused attention and
      of every other matrix product of its linear layers, as torchtitan's per-operation policy does.
    * ``loss``: a function of the module's output and ``target`` (by default one integer for each position);
      ``target`` an example of that, or a function that makes one for an output.
    * ``idle``: units that the forward pass does not reach are ``"refused"``, ``"left out"``, or held as
      ``"frozen"`` or ``"trained"`` ones; they compute nothing.

    Raises ValueError for a module that cannot run without values, or that the units do not make up.
    """
    if compute not in DTYPES:
        raise ValueError(f"measure(compute): one of {', '.join(DTYPES)}; got {compute!r}.")
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"measure(checkpoint): one of {', '.join(CHECKPOINTS)}; got {checkpoint!r}.")
    dtype = DTYPES[compute]
    bare = on_meta(module, dtype)
    args, kwargs = map_tensors(lambda tensor: to_meta(tensor, dtype), arguments(inputs))
    given = tensors((args, kwargs))
    if not given:
        raise ValueError(f"measure(inputs): needs at least one tensor, the batch's x first; got {inputs!r}.")
    wrap = blocks(module) if wrap is None else wrap
    try:
        run, wanted, ending = _run(bare, wrap, given, checkpoint, idle, args, kwargs, loss, target)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"measure(module): {type(module).__name__} failed on the meta device, where tensors have shapes and no "
            f"values ({error}). If it is not the inputs' shapes: what depends on values, such as .item() or an if on a "
            f"tensor, must go, or be left out of training."
        ) from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        shapes = ", ".join(str(list(tensor.shape)) for tensor in given)
        raise ValueError(
            f"measure(module): {type(module).__name__} failed on inputs {shapes}: {error}. {TWO_ROWS}"
        ) from error
    groups = [
        GroupShapes(group.name, group.shapes, group.role, None if group.dtype is None else group.dtype.name)
        for group in run.groups
    ]
    units = run.units()
    if idle in ("frozen", "trained"):
        units += _idle(run, groups, idle)
    return ModelShapes(
        groups=tuple(groups),
        units=tuple(units),
        loss=ending,
        inputs=tuple(shape_of(tensor) for tensor in given),
        target=shape_of(wanted),
    )


def _run(
    bare: torch.nn.Module, wrap: Wrap, given: list[torch.Tensor], checkpoint: str, idle: str, args: tuple[Any, ...],
    kwargs: dict[str, Any], loss: Loss, target: Any,
) -> tuple[Run, torch.Tensor, UnitShapes]:  # fmt: skip
    """The run, the target, and what the loss comes to; anew where something between units writes in place."""
    writable = False
    while True:
        run = Run(bare, partition(bare, wrap), given, checkpoint, idle=idle != "refused", writable=writable)
        try:
            output = run.forward(args, kwargs)
            wanted = _target(output, loss, target)
            return run, wanted, run.loss(loss, output, wanted)
        except RuntimeError as error:
            if writable or "in-place operation" not in str(error):
                raise
            writable = True


def _idle(run: Run, groups: list[GroupShapes], idle: str) -> list[UnitShapes]:
    """Units that are not reached: what they have, no more. Frozen, their groups, unless others use them, are too."""
    found = []
    used = {group for call in run.calls for group in call.unit.groups}
    for unit in run.idle:
        own = tuple(run.groups.index(group) for group in unit.groups)
        for group, index in zip(unit.groups, own, strict=True):
            if idle == "frozen" and group not in used and group.role is Role.TRAINABLE:
                groups[index] = GroupShapes(f"{group.name} frozen", group.shapes, Role.FROZEN)
        found.append(UnitShapes(name=unit.name, groups=own))
    return found


def _target(output: Any, loss: Loss, target: torch.Tensor | Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if target is not None:
        return (target(output) if callable(target) else target).to("meta")
    if loss is not cross_entropy or not isinstance(logits, torch.Tensor):
        raise ValueError(
            "measure(target): pass an example of what the loss is given as target. Only for cross_entropy of a tensor "
            "of logits, or of an output that has them, is it known: one integer for each position."
        )
    return torch.empty(logits.shape[:-1], dtype=torch.int64, device="meta")
