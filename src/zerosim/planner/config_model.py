"""A configuration's module on the meta device, run for the first time: how it can be called, and what it then keeps.

Owns the search for a way to run a model that is known by its configuration only. Must not know
schemes, N or cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.planner import config_file, hf_inputs, hf_models, lora
from zerosim.planner.config_source import Facts, Finetuning
from zerosim.planner.model_source import Inputs
from zerosim.torch_models.profile import measure
from zerosim.torch_models.units import Wrap
from zerosim.worlds.shapes import ModelShapes

PROBE = 16  # tokens of the row with which ways to run a model are tried
NOTE = "attention runs in one fused kernel, and the loss is the cross entropy of every token, in fp32"
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


class ConfigModel:
    """The module that the values of a configuration describe. ValueError, with what would work, if it can't be run."""

    def __init__(self, values: Mapping[str, Any], where: str, finetuning: Finetuning) -> None:
        self._values, self._where, self._finetuning = values, where, finetuning
        self._architecture = hf_models.architecture(values, where)
        self._config = hf_models.configuration(values, self._architecture, where)
        self._way, probe = self._first()
        self.facts = self._facts(probe)

    def measure(self, rows: int, sequence: int | None, checkpoint: str, compute: str) -> ModelShapes:
        """What a micro-batch of so many rows keeps, gives and costs. ValueError, in words, if it can't be run."""
        try:
            return self._measured(self._way, rows, sequence, checkpoint, compute)
        except Exception as error:  # it is the model's own code that runs, and its errors are of any kind
            raise self._failed(error, compute) from error

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

    def _first(self) -> tuple[_Way, ModelShapes]:
        """The first way that works, and what it measures for one short row."""
        failed: Exception | None = None
        for way in self._ways():
            try:
                return way, self._measured(way, 1, PROBE, "none", "bf16")
            except Exception as error:  # noqa: BLE001 - the model's own code, and there may be another way
                failed = failed or error
        assert failed is not None, "there is a way to try, or none could be made"
        raise self._failed(failed, "bf16") from failed

    def _measured(self, way: _Way, rows: int, sequence: int | None, checkpoint: str, compute: str) -> ModelShapes:
        with hf_models.unpacked():
            return measure(
                way.module, way.inputs(rows, sequence), way.wrap, compute=compute, checkpoint=checkpoint,
                loss=hf_inputs.loss, target=hf_inputs.target, idle=self._finetuning.other_parts,
            )  # fmt: skip

    def _failed(self, error: Exception, compute: str) -> ValueError:
        name = self._architecture.name
        if (rule := config_file.broken_rule(self._values, self._where)) is not None:
            return ValueError(rule)
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())[:400].rstrip(".")
        hint = " Some kernels take 16 bits only: try --precision bf16." if compute == "fp32" else ""
        return ValueError(
            f"{config_file.CALL}: {name}, which {self._where} describes, was made but cannot be run on shapes: {reason}. "
            f"If that is this architecture's own way, pass a Python path, package.module:factory, of a model "
            f"without.{hint}"
        )

    def _facts(self, probe: ModelShapes) -> Facts:
        way, finetuning = self._way, self._finetuning
        whole = sum(parameter.numel() for parameter in way.module.parameters())
        notes = [*self._architecture.notes, *config_file.misspelt(self._values, _declared(self._config), self._where)]
        idle = _idle_parameters(probe, whole, finetuning)
        if idle:
            notes.append(f"{idle:,} parameters that text does not reach {OTHER_PARTS[finetuning.other_parts]}")
        notes.append(NOTE)
        if way.attention != hf_models.ATTENTION:
            notes[-1] = NOTE.replace("in one fused kernel", f"as transformers' own {way.attention}")
        most, table = hf_models.positions(way.module, self._config)
        return Facts(
            name=self._architecture.name, most=most, table=table, length=way.length, attention=way.attention,
            call=way.call, largest_module=_largest(way.module), notes=tuple(notes),
        )  # fmt: skip


def _idle_parameters(probe: ModelShapes, whole: int, finetuning: Finetuning) -> int:
    if finetuning.other_parts == "left out":
        return whole - probe.n_params
    used = {group for unit in probe.units if unit.outputs or unit.saved for group in unit.groups}
    idle = [group for unit in probe.units if not unit.outputs and not unit.saved for group in unit.groups]
    return sum(probe.groups[group].size for group in set(idle) - used if probe.groups[group].role.value != "buffer")


def _declared(config: Any) -> set[str]:
    return set(getattr(type(config), "__dataclass_fields__", {})) | set(getattr(config, "attribute_map", {}))


def _largest(module: Any) -> int:
    """Parameters that the largest single module has itself."""
    return max(int(sum(own.numel() for own in each.parameters(recurse=False))) for each in module.modules())
