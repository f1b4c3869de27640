"""A run written down instead of judged, and judged from what was written, anywhere.

Owns the folder: a manifest, the model with its loss as torch.export has it, and one file per rank and step.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import zerosim.conformance.seen as steps
from zerosim.conformance.judge import Judge
from zerosim.conformance.layout import Layout
from zerosim.conformance.local_gradients import LocalGradients, Tree, default_forward
from zerosim.conformance.seen import Seen
from zerosim.records.conformance import (
    MODEL,
    RUN_SCHEMA,
    Expected,
    Manifest,
    Recipe,
    Verdict,
    load_manifest,
    save_manifest,
)
from zerosim.records.files import ResultsError
from zerosim.stages import Stage
from zerosim.torch_models import trees
from zerosim.torch_models.units import numpy_dtype

Tensor = Any


class Recorder:
    """Writes what rank ``rank`` is seen to do into ``folder``; the first rank writes the manifest and the model.

    FileExistsError if a run lies there already.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, row: Stage, recipe: Recipe, layout: Layout) -> None:
        if rank == 0 and any(folder.glob("rank-*")):
            raise FileExistsError(f"check.record: {folder} has a run already; name another folder, or remove that one.")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._rank, self._ranks = folder, rank, ranks
        self._row, self._recipe, self._layout = row, recipe, layout

    def step(self, seen: Seen, local: LocalGradients, expect: Callable[[Tree, Tree], Expected]) -> None:
        """Write one step."""
        if self._rank == 0 and seen.step == 1:
            self._begin(seen, local, expect)
        steps.write(seen, self.folder)

    def _begin(self, seen: Seen, local: LocalGradients, expect: Callable[[Tree, Tree], Expected]) -> None:
        dtype = next(iter(local.module.parameters())).dtype
        manifest = Manifest(
            schema=RUN_SCHEMA, created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"torch": str(torch.__version__)}, row=self._row, ranks=self._ranks, recipe=self._recipe,
            parameters=self._layout.parameters, expected=expect(seen.x, seen.y),
            dtype=str(dtype).removeprefix("torch."), cast=local.cast,
            unexported=_export(local, seen, self.folder / MODEL),
        )  # fmt: skip
        save_manifest(manifest, self.folder)


class _WithLoss(torch.nn.Module):  # type: ignore[misc]
    """A module and its loss as one."""

    def __init__(self, local: LocalGradients) -> None:
        super().__init__()
        self.module, self._call = local.module, local.call

    def forward(self, x: Tree, y: Tree) -> Tensor:
        """The loss."""
        return self._call(self.module, x, y)


def _export(local: LocalGradients, seen: Seen, path: Path) -> str:
    """Write the model with its loss as a graph of operations, for any number of rows. The reason, if that fails."""
    dtype = next(iter(local.module.parameters())).dtype
    x = _cast(seen.x, dtype) if local.cast else seen.x
    rows = trees.tensors(seen.x)[0].shape[0]
    dynamic = torch.export.Dim("rows") if rows > 1 else torch.export.Dim.STATIC

    def shape(tree: Tree) -> Any:
        if isinstance(tree, torch.Tensor):
            return {0: dynamic} if tree.dim() and tree.shape[0] == rows and rows > 1 else None
        if isinstance(tree, dict):
            return {key: shape(value) for key, value in tree.items()}
        return tuple(shape(value) for value in tree)

    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            try:
                program = torch.export.export(_WithLoss(local), (x, seen.y), dynamic_shapes=(shape(x), shape(seen.y)))
            except Exception:  # noqa: BLE001 - it may be that the rows decide something
                program = torch.export.export(_WithLoss(local), (x, seen.y))
            torch.export.save(program, path)
    except Exception as error:  # noqa: BLE001 - anything may be in a user's module; without it the model is asked for
        return f"{type(error).__name__}: {error}".splitlines()[0][:400]
    finally:
        logging.disable(logging.NOTSET)
    return ""


def _cast(tree: Tree, dtype: Any) -> Tree:
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: _cast(value, dtype) for key, value in tree.items()}
    return tuple(_cast(value, dtype) for value in tree)


def judge_run(
    folder: Path, model: tuple[torch.nn.Module, Callable[[Any, Any], Any]] | None = None,
    each: Callable[[int, int], None] = lambda step, of: None,
) -> Verdict:  # fmt: skip
    """The verdict on a recorded run. ``model`` is (module, loss), for a run whose own could not be written.

    ``each`` is called before each step. ResultsError, with the reason, if the folder is not a whole run.
    """
    manifest = load_manifest(folder)
    layout = Layout(manifest.parameters)
    last = _steps(folder, manifest.ranks)
    judge = Judge(
        layout, manifest.row, manifest.ranks, manifest.recipe, numpy_dtype(getattr(torch, manifest.dtype)),
        _local(folder, manifest, layout, model),
        lambda x, y: manifest.expected,
    )  # fmt: skip
    for step in range(1, last + 1):
        each(step, last)
        judge.step([steps.read(folder, rank, step) for rank in range(manifest.ranks)])
    return judge.verdict()


def _steps(folder: Path, ranks: int) -> int:
    """How many steps every rank has recorded."""
    counts = []
    for rank in range(ranks):
        here = steps.path_of(folder, rank, 1).parent
        counts.append(len(list(here.glob("step-*.safetensors"))) if here.is_dir() else 0)
    if min(counts) == 0:
        raise ResultsError(
            f"{folder}: rank {counts.index(0)} of {ranks} has recorded no step. Put all ranks' folders into one."
        )
    return min(counts)


def _local(
    folder: Path, manifest: Manifest, layout: Layout, model: tuple[torch.nn.Module, Callable[[Any, Any], Any]] | None
) -> LocalGradients:
    if model is not None:
        module, loss = model
        names = [name for name, _ in module.named_parameters()]
        if names != layout.names:
            raise ValueError(
                f"check(model): the recorded run's parameters are {', '.join(layout.names[:6])} ...; this module's are "
                f"{', '.join(names[:6])} ... Build the module that was trained."
            )
        dtype = getattr(torch, manifest.dtype)
        return LocalGradients(
            module.to(dtype), layout, lambda net, x, y: loss(default_forward(net, x), y), cast=manifest.cast
        )
    if manifest.unexported or not (folder / MODEL).is_file():
        raise ResultsError(
            f"{folder}: the model could not be written down ({manifest.unexported or 'its file is missing'}). Pass "
            f"--model file.py:function, which returns (module, loss)."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own loading and copying
        program = torch.export.load(folder / MODEL)
        return LocalGradients(
            _Eval(program), layout, lambda module, x, y: module(x, y), cast=manifest.cast, prefix="program.module."
        )


class _Eval(torch.nn.Module):  # type: ignore[misc]
    """An exported program as a module that knows no modes."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program.module()
        graph = self.program.graph
        for node in list(graph.nodes):  # it is run in fp64 too, which these would refuse
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                graph.erase_node(node)
        self.program.recompile()

    def forward(self, x: Tree, y: Tree) -> Tensor:
        """The loss."""
        return self.program(x, y)

    def train(self, mode: bool = True) -> _Eval:
        """An exported program has the mode that it was exported in."""
        return self
