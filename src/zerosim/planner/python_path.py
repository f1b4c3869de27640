"""Models that a Python path names: a module, measured on the meta device for every micro-batch and length of row.

Owns the source of a torch module, and the reading of a Python path. The code behind a path is
run because the caller has named it; nothing else is. Must not know schemes, N or cards.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zerosim.bands import FP32
from zerosim.model import MLP
from zerosim.planner import frozen
from zerosim.planner.batch_sizes import BatchSizes, compact
from zerosim.planner.callers_batch import as_given
from zerosim.planner.dense_decoder import dense_decoder
from zerosim.planner.model_source import Inputs, ModelSource, Perceptron, Prepared, Workload, too_large
from zerosim.torch_models.losses import cross_entropy
from zerosim.torch_models.profile import measure
from zerosim.torch_models.trees import tensors
from zerosim.torch_models.units import blocks, partition
from zerosim.worlds.shapes import ModelShapes, ShapeModel

SEQUENCE = 2048  # the length of a row unless told otherwise
KEYS = {
    "module": "the torch.nn.Module",
    "inputs": "a function of rows and sequence that gives what the module is called with",
    "wrap": "the class of the blocks, several, or a predicate on modules",
    "loss": "a function of the module's output and the target",
    "target": "a function of rows and sequence that gives an example of the target",
    "sequence": "the length of a row, or None where rows have none",
}

HINT = "It was called with token numbers [rows, sequence]; if it takes others, return a mapping with inputs."


class TorchModelSource(ModelSource):
    """A module on the meta device. ``inputs`` and ``target`` are functions of rows and length of a row."""

    kind = "Python path"

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        inputs: Inputs,
        wrap: Any,
        *,
        sequence: int | None,
        loss: Callable[[Any, Any], Any] = cross_entropy,
        target: Inputs | None = None,
        notes: Sequence[str] = (),
        hint: str = "",
        frozen_dtype: str | None = None,
    ) -> None:
        self._name, self._sequence, self._notes = name, sequence, list(notes)
        self._module, self._inputs, self._wrap = module, inputs, wrap
        self._loss, self._target, self._hint = loss, target, hint
        self._frozen = frozen_dtype
        self.dense_decoder = dense_decoder(module, wrap)
        self._sizes: dict[tuple[int | None, str, str], BatchSizes] = {}
        too_large(sum(parameter.numel() for parameter in module.parameters()))

    @property
    def name(self) -> str:
        return self._name

    @property
    def sequence(self) -> int | None:
        return self._sequence

    def notes_for(self, sequence: int | None) -> list[str]:
        return self._notes

    def prepare(self, workload: Workload, rows: int) -> Prepared:
        sequence = workload.sequence or self.sequence
        if workload.sequence is not None and self.sequence is None:
            raise ValueError("plan(seq): rows of this model have no length. Leave --seq out and use --micro-batch.")
        if (workload.loss, workload.kv) != ("fp32", "grouped"):
            raise ValueError(
                "plan(loss): --loss and --kv are for a config.json or a model's name; a Python path says itself what "
                "its loss is and how it attends. Leave them out."
            )
        compute = "fp32" if workload.working == FP32 else "bf16"  # as many bytes as fp16, which some kernels lack
        key = sequence, workload.checkpoint, compute
        if key not in self._sizes:
            self._sizes[key] = BatchSizes(partial(self._measure, *key))
        shapes = self._sizes[key].tried(workload.rows) if workload.tried else self._sizes[key].at(workload.rows)
        model = ShapeModel(compact(shapes, copies=workload.copies), temporaries=True, frees=workload.frees)
        return Prepared(model, model.batch(rows // workload.rows), largest_module=_largest(self._module))

    def _measure(self, sequence: int | None, checkpoint: str, compute: str, rows: int) -> ModelShapes:
        inputs = self._example("inputs", self._inputs, rows, sequence)
        target = None if self._target is None else self._example("target", self._target, rows, sequence)
        try:
            with _rows_apart():
                found = measure(
                    self._module, inputs, self._wrap, compute=compute, checkpoint=checkpoint,
                    loss=self._loss, target=target,
                )  # fmt: skip
        except Exception as error:  # it is the model's own code that runs, and its errors are of any kind
            known = isinstance(error, ValueError)
            reason = str(error) if known else f"plan(MODEL): {self.name} failed: {type(error).__name__}: {error}"
            hint = "Some kernels take 16 bits only: try --precision bf16." if compute == "fp32" else ""
            raise ValueError(" ".join(filter(None, (f"{reason.rstrip('.')}.", self._hint, hint)))) from error
        found = as_given(found, tensors(inputs))
        if self._frozen is None:
            return found
        blocks = [unit.name for unit in partition(self._module, self._wrap) if unit.matched]
        return frozen.held(found, self._frozen, blocks, 4 if compute == "fp32" else 2)

    def _example(self, key: str, make: Inputs, rows: int, sequence: int | None) -> Any:
        """What the caller's own function gives."""
        try:
            return make(rows, sequence)
        except Exception as error:
            raise ValueError(
                f"plan(MODEL): the {key} of {self.name}, for {rows} rows and a sequence of {sequence}, failed: "
                f"{type(error).__name__}: {error}. It must be {KEYS[key]}."
            ) from error


@contextlib.contextmanager
def _rows_apart() -> Iterator[None]:
    """Where the caller's code has loaded transformers: as a configuration's model is run."""
    if "transformers" not in sys.modules:
        yield
        return
    from zerosim.planner import hf_models

    with hf_models.unpacked():
        yield


def _largest(module: torch.nn.Module) -> int:
    """Parameters that the largest single module has itself."""
    return max(int(sum(own.numel() for own in each.parameters(recurse=False))) for each in module.modules())


def tokens(rows: int, sequence: int | None) -> torch.Tensor:
    """Token numbers [rows, sequence], without values."""
    return torch.empty((rows, sequence or 1), dtype=torch.int64, device="meta")


def _called(module: torch.nn.Module) -> Inputs:
    """Token numbers; to a Hugging Face model by name, and without the cache that only generating needs."""
    if not hasattr(module, "config"):
        return tokens
    names = inspect.signature(module.forward).parameters
    every = any(each.kind is each.VAR_KEYWORD for each in names.values())
    if "input_ids" not in names and not every:
        return tokens
    without = {"use_cache": False} if "use_cache" in names or every else {}
    return lambda rows, sequence: {"input_ids": tokens(rows, sequence), **without}


def from_python(text: str, frozen_dtype: str | None = None) -> ModelSource:
    """The model that ``package.module:factory`` returns when it is called, on the meta device.

    A module, or a mapping with ``KEYS``, or an ``MLP``. ValueError, with what would work, for
    anything else and for whatever goes wrong in that code.
    """
    path, _, attribute = text.partition(":")
    try:
        factory: Any = importlib.import_module(path)
        for name in attribute.split("."):
            factory = getattr(factory, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"plan(MODEL): {text!r} is no Python path here: {error}. Name a module that can be imported and a function "
            f"in it that returns a model, package.module:factory."
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"plan(MODEL): importing {path} failed: {type(error).__name__}: {error}.") from error
    try:
        with torch.device("meta"):
            made = factory()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"plan(MODEL): {text}() failed on the meta device, where tensors have shapes and no values: "
            f"{type(error).__name__}: {error}. It must return a model without arguments, and without reading values."
        ) from error
    return source(made, text, frozen_dtype)


def source(made: Any, text: str, frozen_dtype: str | None = None) -> ModelSource:
    """The source of what a factory, ``text``, has made; what is frozen of a module is kept in ``frozen_dtype``."""
    if isinstance(made, MLP):
        if frozen_dtype is not None:
            raise ValueError("plan(frozen_dtype): nothing of a perceptron is frozen. Leave --frozen-dtype out.")
        return Perceptron(made.widths)
    parts: Mapping[str, Any] = made if isinstance(made, Mapping) else {"module": made}
    module = parts.get("module")
    unknown = [key for key in parts if key not in KEYS]
    if not isinstance(module, torch.nn.Module) or unknown:
        keys = "; ".join(f"{key!r}, {what}" for key, what in KEYS.items())
        raise ValueError(
            f"plan(MODEL): {text}() must return a torch.nn.Module, or a mapping with {keys}; got "
            f"{f'unknown key {unknown[0]!r}' if unknown else repr(made)[:80]}."
        )
    if next(module.parameters(), None) is None:
        raise ValueError(f"plan(MODEL): {text}() returned a {type(module).__name__} that has no parameters.")
    sequence = parts.get("sequence", None if parts.get("inputs") else SEQUENCE)
    if sequence is not None and (isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 1):
        raise ValueError(f"plan(MODEL): the sequence of {text}() is {KEYS['sequence']}, 1 or more; got {sequence!r}.")
    for key in ("inputs", "target", "loss"):
        if parts.get(key) is not None and not callable(parts[key]):
            raise ValueError(f"plan(MODEL): the {key} of {text}() must be {KEYS[key]}; got {parts[key]!r}.")
    options = {key: parts[key] for key in ("loss", "target") if parts.get(key) is not None}
    return TorchModelSource(
        f"{text} ({type(module).__name__})",
        module,
        parts.get("inputs") or _called(module),
        parts["wrap"] if parts.get("wrap") is not None else blocks(module),
        sequence=sequence,
        notes=[] if parts.get("inputs") else ["called with token numbers [rows, sequence]"],
        hint="" if parts.get("inputs") else HINT,
        frozen_dtype=frozen_dtype,
        **options,
    )
