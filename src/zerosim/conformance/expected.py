"""What the simulator's schedule asks for and holds on a rank of a row, for the user's module.

Owns the run on shapes that every number comes from, the units and the rule that a user's call
stands for. Nothing here is worked out by formula, and nothing is read from what the user's ranks did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerosim.bands import PRECISIONS
from zerosim.counts import EventKind
from zerosim.optimizer import SGD, Adam
from zerosim.records.conformance import Expected, Parameter, Recipe, Rule
from zerosim.schemes import Scheme
from zerosim.stages import Stage
from zerosim.torch_models import trees
from zerosim.torch_models.profile import measure
from zerosim.torch_models.units import Wrap, partition
from zerosim.worlds.dry import DryRing
from zerosim.worlds.shapes import ShapeModel

_COMPUTE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def expected(
    module: torch.nn.Module, units: Wrap, loss: Callable[[Any, Any], Any], row: Stage, ranks: int, recipe: Recipe,
    rule: Rule, x: Any, y: Any,
) -> Expected:  # fmt: skip
    """The numbers of one step on the batch (x, y) of one rank.

    Without numbers, and with the reason, for a module that cannot be measured on shapes.
    """
    rows = len(trees.tensors(x)[0])
    if rows % recipe.accumulate:
        return Expected(unknown=f"{rows} rows cannot be cut into {recipe.accumulate} equal micro-batches")
    one = slice(0, rows // recipe.accumulate)
    precision = PRECISIONS[recipe.precision]
    inputs = trees.sliced(x, one)
    try:
        shapes = measure(
            module, inputs if not isinstance(inputs, list) else tuple(inputs), units,
            compute=_COMPUTE[precision.working.name], loss=loss, target=trees.tensors(trees.sliced(y, one))[0],
        )  # fmt: skip
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        return Expected(unknown=str(error))
    model = ShapeModel(shapes)
    optimizer = Adam() if rule.kind == "adam" else SGD(momentum=rule.momentum)
    scheme: Scheme = row(
        model, ranks, ring=DryRing(ranks), precision=recipe.precision, accumulate=recipe.accumulate,
        optimizer=optimizer, all_reduce=recipe.all_reduce, node=recipe.node,
    )  # fmt: skip
    scheme.step(model.batch(recipe.accumulate))
    report = scheme.reports[-1]
    elements = {str(name): max(sent) // 4 for name, sent in report.sent_by_collective().items()}  # in fp32
    calls: dict[str, int] = {}
    for event in report.events:
        if event.kind is EventKind.SEND:
            name = str(event.name)
            calls[name] = calls.get(name, 0) + 1
    if "all-reduce" in calls:
        calls["all-reduce"] //= 2  # there it is a reduce-scatter and an all-gather
    padded, size = (sum(getattr(bucket, name) for bucket in scheme.buckets) for name in ("padded", "size"))
    return Expected(
        elements=elements,
        logical={name: count * size // max(padded, 1) for name, count in elements.items()},
        collectives=calls,
        resident={str(band): int(count) for band, count in report.resident.items()},
        peak={str(band): int(count) for band, count in report.peak.by_band.items()},
    )


def owns_parameters(module: torch.nn.Module) -> bool:
    """Whether a module has parameters of its own: what is a unit unless the user says otherwise."""
    return next(iter(module.parameters(recurse=False)), None) is not None


def parameters(net: torch.nn.Module, units: Wrap, rules: Callable[[str, Any], Rule]) -> list[Parameter]:
    """Every parameter of ``net`` with the unit that it belongs to and the rule that updates it."""
    unit_of: dict[int, str] = {}
    for unit in partition(net, units):
        for part in unit.parts:
            for tensor in part.tensors:
                unit_of.setdefault(id(tensor), part.group.name)
    return [
        Parameter(
            name=name, shape=tuple(param.shape), trainable=bool(param.requires_grad),
            unit=unit_of.get(id(param), name), rule=rules(name, param),
        )
        for name, param in net.named_parameters()
    ]  # fmt: skip


def rule_of(optimizer: Any, call: str = "check(optimizer)") -> Callable[[str, Any], Rule]:
    """The rule of each parameter, from what a user has: this package's optimizers or one of torch's, with its groups.

    TypeError for anything else.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        by_param = {
            id(param): _torch_rule(optimizer, group) for group in optimizer.param_groups for param in group["params"]
        }
        usual = _torch_rule(optimizer, optimizer.param_groups[0])
        return lambda name, param: by_param.get(id(param), usual)
    if isinstance(optimizer, Adam | SGD):
        return lambda name, param: _own_rule(optimizer, name, tuple(param.shape))
    if callable(optimizer) and not isinstance(optimizer, type):
        return lambda name, param: rule_of(optimizer(name, param), call)(name, param)
    raise TypeError(
        f"{call}: an Adam, AdamW or SGD of this package, an optimizer of torch's, or a function of (name, parameter) "
        f"that returns one; got {optimizer!r}."
    )


def _own_rule(optimizer: Adam | SGD, name: str, shape: tuple[int, ...]) -> Rule:
    [(lr, decay)] = optimizer.rates(name, [shape])
    if isinstance(optimizer, SGD):
        return Rule(kind="sgd", lr=float(lr), momentum=float(optimizer.momentum))
    return Rule(
        kind="adam", lr=float(lr), betas=optimizer.betas, eps=float(optimizer.eps), weight_decay=float(decay),
        decoupled=True,
    )  # fmt: skip


def _torch_rule(optimizer: Any, group: Mapping[str, Any]) -> Rule:
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    adam = "Adam" in kinds or "AdamW" in kinds
    if not adam and "SGD" not in kinds:
        raise TypeError(
            f"check(optimizer): the rules of Adam, AdamW and SGD are known; got {type(optimizer).__name__}. Judge a "
            f"run with one of these."
        )
    for name in ("amsgrad", "maximize", "nesterov", "dampening"):
        if group.get(name):
            raise ValueError(f"check(optimizer): {name}={group[name]!r} is not known here. Judge a run without it.")
    beta1, beta2 = group.get("betas", (0.9, 0.999))
    return Rule(
        kind="adam" if adam else "sgd",
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(group.get("eps", 1e-8)),
        momentum=float(group.get("momentum", 0.0)),
        weight_decay=float(group.get("weight_decay", 0.0)),
        decoupled=bool(group.get("decoupled_weight_decay")) or "AdamW" in kinds,
    )
