"""A configuration's module on the meta device, run for the first time: how it can be called, and what it then keeps.

Owns the search for a way to run a model that is known by its configuration only. Must not know
schemes, N or cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from zerosim.layers import Role
from zerosim.planner import config_file, frozen, hf_inputs, hf_models, lora
from zerosim.planner.callers_batch import as_given
from zerosim.planner.config_facts import Facts
from zerosim.planner.dense_decoder import dense_decoder
from zerosim.planner.model_source import Inputs
from zerosim.records.question import Finetuning
from zerosim.torch_models.profile import measure
from zerosim.torch_models.trees import tensors
from zerosim.torch_models.units import Wrap, partition
from zerosim.worlds.shapes import GroupShapes, ModelShapes, Tensor, UnitShapes

PROBE = 16  # tokens of the row with which ways to run a model are tried
OTHER_PARTS = {
    "frozen": "are held frozen", "left out": "are left out", "trained": "are held with gradients and optimizer state",
}  # fmt: skip


@dataclass(frozen=True)
class _Way:
    """A module and what it is called with."""

    module: Any
    inputs: Inputs
    length: bool
    attention: str
    call: int
    wrap: Wrap
    fused: bool = False


class ConfigModel:
    """The module that the values of a configuration describe. ValueError, with what would work, if it can't be run."""

    def __init__(self, values: Mapping[str, Any], where: str, finetuning: Finetuning) -> None:
        self._values, self._where, self._finetuning = values, where, finetuning
        self._architecture = hf_models.architecture(values, where)
        self._config = hf_models.configuration(values, self._architecture, where)
        self._way, probe, self._error = self._first()
        self.facts = self._facts(probe)

    def measure(
        self, rows: int, sequence: int | None, checkpoint: str, compute: str, loss: str, kv: str
    ) -> ModelShapes:
        """What a micro-batch of so many rows keeps, gives and costs. ValueError, in words, if it can't be run."""
        if self._error is not None:
            found = _states_alone(self._way, rows)
        else:
            try:
                found = self._measured(self._way, rows, sequence, checkpoint, compute, loss, kv)
            except Exception as error:  # it is the model's own code that runs, and its errors are of any kind
                raise self._failed(error, compute) from error
        if (kind := self._finetuning.frozen_dtype) is None:
            return found
        blocks = [unit.name for unit in partition(self._way.module, self._way.wrap) if unit.matched]
        return frozen.held(found, kind, blocks, 4 if compute == "fp32" else 2)

    def _ways(self) -> Iterator[_Way]:
        """Ways to run it, the likeliest first: attention in one kernel and text alone, and then what else there is."""
        refused: list[Exception] = []
        for attention in hf_models.ATTENTIONS:
            try:
                made = hf_models.module(self._values, self._architecture, self._where, attention)
            except ValueError as error:
                refused.append(error)
                continue
            if self._finetuning.lora:
                lora.add(made, self._finetuning.lora, self._finetuning.targets)
            wrap = hf_models.wrap(made) or hf_models.blocks(made)
            for call, (inputs, length) in enumerate(hf_inputs.candidates(made)):
                yield _Way(made, inputs, length, attention, call, wrap)
            if (part := hf_models.text_part(made)) is not None:
                yield _Way(part, next(hf_inputs.candidates(part))[0], True, attention, -1, wrap)
        if len(refused) == len(hf_models.ATTENTIONS):
            raise refused[-1]

    def _first(self) -> tuple[_Way, ModelShapes, Exception | None]:
        """The first way that works, and what it measures for one short row; or the first, and why it doesn't work."""
        failed: tuple[_Way, Exception] | None = None
        for way in self._ways():
            try:
                calls = hf_models.fused_calls()
                found = self._measured(way, 1, PROBE, "none", "bf16")
                return replace(way, fused=hf_models.fused_calls() > calls), found, None
            except Exception as error:  # noqa: BLE001 - the model's own code, and there may be another way
                failed = failed or (way, error)
        assert failed is not None, "there is a way to try, or none could be made"
        way, reason = failed
        if config_file.broken_rule(self._values, self._where) is not None:
            raise self._failed(reason, "bf16") from reason
        return way, _states_alone(way, 1), reason

    def _measured(
        self, way: _Way, rows: int, sequence: int | None, checkpoint: str, compute: str, loss: str = "fp32",
        kv: str = "grouped",
    ) -> ModelShapes:  # fmt: skip
        with hf_models.unpacked(), hf_models.keys_and_values(kv):
            inputs = way.inputs(rows, sequence)
            found = measure(
                way.module, inputs, way.wrap, compute=compute, checkpoint=checkpoint,
                loss=partial(hf_inputs.loss, kind=loss), target=hf_inputs.target, idle=self._finetuning.other_parts,
            )  # fmt: skip

        found = as_given(found, tensors(inputs))
        return _unreached(found, self._finetuning.other_parts, type(way.module).__name__)

    def _failed(self, error: Exception, compute: str) -> ValueError:
        name = self._architecture.name
        if (rule := config_file.broken_rule(self._values, self._where)) is not None:
            return ValueError(rule)
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())[:400].rstrip(".")
        hint = " Some kernels take 16 bits only: try --precision bf16." if compute == "fp32" else ""
        return ValueError(
            f"{config_file.CALL}: {name}, which {self._where} describes, cannot be run on shapes: {reason}. If "
            f"that is this architecture's own way, pass a Python path, package.module:factory, of a model "
            f"without.{hint}"
        )

    def _facts(self, probe: ModelShapes) -> Facts:
        way, finetuning = self._way, self._finetuning
        whole = sum(parameter.numel() for parameter in way.module.parameters())
        notes = [*self._architecture.notes, *config_file.misspelt(self._values, _declared(self._config), self._where)]
        idle = 0 if self._error is not None else _idle_parameters(probe, whole, finetuning)
        if idle:
            notes.append(f"{idle:,} parameters that text does not reach {OTHER_PARTS[finetuning.other_parts]}")
        if self._error is not None:
            reason = " ".join(str(self._error.__cause__ or self._error).split())[:150].rstrip(".")
            notes.append(
                f"it cannot be run on shapes ({reason}): activations, gathered parameters and FLOPs are left out, so "
                f"whether it fits is said only where the model states alone do not"
            )
        elif way.fused:
            notes.append("attention runs in one fused kernel")
        elif hf_models.attends(way.module):
            own = "eager" if way.attention == hf_models.ATTENTION else way.attention  # not by transformers' interface
            notes.append(f"attention runs as transformers' own {own}")
        most, table = hf_models.positions(way.module, self._config)
        return Facts(
            name=self._architecture.name, most=most, table=table, length=way.length, attention=way.attention,
            call=way.call, largest_module=_largest(way.module), notes=tuple(notes),
            runs=self._error is None, dense_decoder=dense_decoder(way.module, way.wrap),
        )  # fmt: skip


def _states_alone(way: _Way, rows: int) -> ModelShapes:
    """The model by its parameters and buffers alone, a unit for each block and one for the rest."""
    kinds = tuple(way.wrap)
    seen: set[int] = set()
    named = [(name, each) for name, each in way.module.named_modules() if isinstance(each, kinds)]
    groups: list[GroupShapes] = []
    units: list[UnitShapes] = []
    for name, part in [*named, ("the rest", way.module)]:
        own = [each for each in part.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        first = len(groups)
        for role in (Role.TRAINABLE, Role.FROZEN):
            shapes = tuple(tuple(each.shape) for each in own if each.requires_grad == (role is Role.TRAINABLE))
            if shapes:
                groups.append(GroupShapes(name if role is Role.TRAINABLE else f"{name} frozen", shapes, role))
        if len(groups) > first:
            units.append(UnitShapes(name=name, groups=tuple(range(first, len(groups)))))
    row = Tensor((rows, 1), "int64")
    loss = UnitShapes(name="loss", feeds=(len(units) - 1,))
    return ModelShapes(groups=tuple(groups), units=tuple(units), loss=loss, inputs=(row,), target=row)


def _unreached(shapes: ModelShapes, other_parts: str, whole: str) -> ModelShapes:
    """What a module holds itself, such as a table of positions, is as idle as the units in it if none is reached."""
    reached = [unit for unit in shapes.units if unit.outputs or unit.saved]
    used = {group for unit in reached for group in unit.groups}
    idle = {
        group
        for unit in shapes.units
        if not unit.outputs and unit.name != whole and not any(each.name.startswith(unit.name) for each in reached)
        for group in unit.groups
        if group not in used and shapes.groups[group].role is Role.TRAINABLE
    }
    if not idle or other_parts == "trained":
        return shapes
    if other_parts == "frozen":
        groups = tuple(
            GroupShapes(f"{group.name} frozen", group.shapes, Role.FROZEN) if index in idle else group
            for index, group in enumerate(shapes.groups)
        )
        return msgspec.structs.replace(shapes, groups=groups)
    kept = [index for index in range(len(shapes.groups)) if index not in idle]
    units = tuple(
        msgspec.structs.replace(unit, groups=tuple(kept.index(group) for group in unit.groups if group not in idle))
        for unit in shapes.units
    )
    return msgspec.structs.replace(shapes, groups=tuple(shapes.groups[index] for index in kept), units=units)


def _idle_parameters(probe: ModelShapes, whole: int, finetuning: Finetuning) -> int:
    if finetuning.other_parts == "left out":
        return max(0, whole - probe.n_params)
    used = {group for unit in probe.units if unit.outputs or unit.saved for group in unit.groups}
    idle = [group for unit in probe.units if not unit.outputs and not unit.saved for group in unit.groups]
    return sum(probe.groups[group].size for group in set(idle) - used if probe.groups[group].role.value != "buffer")


def _declared(config: Any) -> set[str]:
    return set(getattr(type(config), "__dataclass_fields__", {})) | set(getattr(config, "attribute_map", {}))


def _largest(module: Any) -> int:
    """Parameters that the largest single module has itself."""
    return max(int(sum(own.numel() for own in each.parameters(recurse=False))) for each in module.modules())
