"""A Hugging Face configuration as the source of a plan: measured shapes from the cache, or measured now.

Owns what is asked of a configuration and what is found out about it, as plain data. Loads torch
only where something is not in the cache. Must not know schemes, N or cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from zerosim.planner import shape_cache
from zerosim.planner.batch_sizes import BatchSizes, compact
from zerosim.planner.config_facts import Facts
from zerosim.planner.model_source import ModelSource, Prepared, Workload, too_large
from zerosim.records.question import Finetuning
from zerosim.util import arguments
from zerosim.worlds.shapes import ModelShapes, ShapeModel

PLAIN = "pass a list of layer sizes"  # what is planned without torch
SEQUENCE = 2048  # the length of a row unless told otherwise, if the model takes so many


class ConfigSource(ModelSource):
    """The model that the values of a configuration describe; ``where`` is where they come from."""

    kind = "config.json"

    def __init__(
        self, values: Mapping[str, Any], where: str, label: str, finetuning: Finetuning | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._values, self._where, self._label = values, where, label
        self._finetuning = finetuning or Finetuning()
        self._content = shape_cache.key(
            {name: value for name, value in values.items() if name not in ("auto_map", "_name_or_path")},
            msgspec.to_builtins(self._finetuning),
        )
        self._own_notes = notes
        self._sizes: dict[tuple[int | None, str, str, str, str], BatchSizes] = {}
        self._found: Facts | None = None
        self._model: Any = None  # what torch has of it, once that was needed

    @property
    def facts(self) -> Facts:
        """What is known of it, kept or from a first run. ValueError, with what would work, if it can't be run."""
        if self._found is None:
            self._found = shape_cache.load(self._content, Facts)
        if self._found is None:
            self._found = self._torch().facts
            shape_cache.save(self._content, self._found)
        return self._found

    @property
    def name(self) -> str:
        """Its label and its class."""
        return f"{self._label} ({self.facts.name})"

    @property
    def width(self) -> int | None:  # type: ignore[override]
        """Of the hidden states, as the configuration calls it."""
        parts = [self._values, self._values.get("text_config") or {}]
        names = ("hidden_size", "n_embd", "d_model")
        return next((part[name] for part in parts for name in names if isinstance(part.get(name), int)), None)

    @property
    def longest(self) -> int | None:  # type: ignore[override]
        """The most tokens of a row that it was made for."""
        return self.facts.most

    @property
    def sequence(self) -> int | None:
        """The length of a row unless told otherwise."""
        facts = self.facts
        return (min(SEQUENCE, facts.most) if facts.most else SEQUENCE) if facts.length else None

    @property
    def dense_decoder(self) -> bool:  # type: ignore[override]
        """Whether its class is one of text."""
        return self.facts.dense_decoder

    @property
    def notes(self) -> list[str]:
        """What is to be said about it."""
        return [*self._own_notes, *self.facts.notes]

    def notes_for(self, sequence: int | None) -> list[str]:
        """The same, for rows of a length."""
        most = self.facts.most
        if sequence and most and sequence > most:
            return [*self.notes, f"rows of {sequence:,} tokens are longer than the {most:,} that it was trained on"]
        return self.notes

    def prepare(self, workload: Workload, rows: int) -> Prepared:
        """The model for micro-batches of ``workload``. ValueError, with what would work, if it can't be."""
        sequence = workload.sequence or self.sequence
        facts = self.facts
        if workload.sequence is not None and not facts.length:
            raise ValueError("plan(seq): rows of this model have no length. Leave --seq out and use --micro-batch.")
        if sequence is not None and facts.table and facts.most is not None and sequence > facts.most:
            raise ValueError(
                f"plan(seq): {self.name} has positions for at most {facts.most:,} tokens a row; got {sequence:,}. Use "
                f"--seq {facts.most}."
            )
        compute = "fp32" if workload.working == "float32" else "bf16"  # as many bytes as fp16, which some kernels lack
        key = sequence, workload.checkpoint, compute, workload.loss, workload.kv
        if key not in self._sizes:
            self._sizes[key] = BatchSizes(partial(self._measure, key))
        sizes = self._sizes[key]
        shapes = sizes.tried(workload.rows) if workload.tried else sizes.at(workload.rows)
        too_large(shapes.n_params)
        model = ShapeModel(compact(shapes, copies=workload.copies), temporaries=True, frees=workload.frees)
        return Prepared(
            model, model.batch(rows // workload.rows), largest_module=facts.largest_module, states_alone=not facts.runs
        )

    def _measure(self, how: tuple[int | None, str, str, str, str], rows: int) -> ModelShapes:
        name = shape_cache.key(self._content, rows, *how)
        shapes = shape_cache.load(name, ModelShapes)
        if shapes is None:
            shapes = self._torch().measure(rows, *how)
            shape_cache.save(name, shapes)
        return shapes

    def _torch(self) -> Any:
        if self._model is None:
            arguments.installed("plan(MODEL)", "torch", "transformers", extra="plan", otherwise=PLAIN)
            from zerosim.planner.config_model import ConfigModel

            self._model = ConfigModel(self._values, self._where, self._finetuning)
        return self._model
