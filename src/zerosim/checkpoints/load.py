"""Taking up a run from a folder, under any row and on any number of ranks.

Owns how states that were cut in one way are cut in another: put together to what they are without
padding, and cut anew. Must not know the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.bands import Array, Band
from zerosim.buckets import Bucket
from zerosim.checkpoints import files
from zerosim.checkpoints.files import CheckpointError, Index
from zerosim.checkpoints.outline import Outline
from zerosim.model import MLP
from zerosim.optimizer import SGD, Adam, AdamW, ParamGroup, Schedule
from zerosim.options import LossScale, Options, chosen, with_options
from zerosim.schemes import Scheme
from zerosim.util import arguments
from zerosim.util.rows import Said, one

OPTIMIZERS = {kind.__name__: kind for kind in (Adam, AdamW, SGD)}


@with_options
def load(
    folder: str | Path, row: Said | None = None, ranks: int | None = None, *, model: Any = None, **keywords: Any
) -> Scheme:
    """The run that ``save`` wrote to ``folder``, under ``row`` (or its name) and on ``ranks`` ranks, or as it was.

    Its states are the same bits, padding cut anew; where the number of ranks and the order of summation are
    the same, so is the training that follows. ``model`` is needed for any but an ``MLP``; options are the
    saved ones unless keywords say otherwise.

    >>> import zerosim as zs
    >>> run = zs.ZeRO2(zs.MLP(), ranks=8)
    >>> _ = run.step(*zs.batches(ranks=8))
    >>> run.save("folder")
    >>> again = zs.load("folder", zs.ZeRO3, ranks=16)
    >>> again.name, again.steps, bool((again.full_theta() == run.full_theta()).all())
    ('ZeRO-3', 1, True)

    CheckpointError, with what is wrong, for a folder that is
    damaged, incomplete, foreign, or of another model.
    """
    arguments.instance_of("load", "folder", folder, str | Path)
    folder = Path(folder)
    index = files.read_index(folder)
    stage, ranks = index.row if row is None else one("load", "row", row), index.ranks if ranks is None else ranks
    ranks = arguments.integer("load", "ranks", ranks)
    if "node" not in keywords and index.node is not None and ranks % index.node == 0:
        keywords["node"] = index.node
    saved = options_of(index.options)
    options = chosen(saved, keywords)
    scheme: Scheme = stage(model if model is not None else _model(index, folder), ranks, options)
    _check(scheme, index, folder)
    states = assembled(folder, index)
    for band in dict.fromkeys(band for bucket in scheme.buckets for band in bucket.states):
        if (str(band) in {name for _, name in states}) and band is not Band.BUFFERS:
            _fill(scheme, band, _flat(index, states, str(band)))
    _fill_buffers(scheme, index, states)
    scheme.steps, scheme.updates = index.steps, index.updates
    updates = [count for bucket in index.buckets for count in bucket.updates]
    for bucket in scheme.buckets:
        bucket.updates, updates = updates[: len(bucket.updates)], updates[len(bucket.updates) :]
    if scheme.scaler is not None and index.scaler is not None and options.loss_scale == saved.loss_scale:
        scheme.scaler.scale, scheme.scaler.good_steps, scheme.scaler.tolerated = index.scaler
    if index.generator and hasattr(scheme.model, "load_generator_state"):
        scheme.model.load_generator_state(index.generator)
    return scheme


def options_of(record: Mapping[str, Any]) -> Options:
    """The options that ``save`` wrote."""
    values = {field.name: record[field.name] for field in fields(Options) if field.name in record}
    optimizer = dict(values["optimizer"])
    kind = OPTIMIZERS[optimizer.pop("kind")]
    if "betas" in optimizer:
        schedule = optimizer["schedule"]
        optimizer["betas"] = tuple(optimizer["betas"])
        optimizer["groups"] = tuple(ParamGroup(**group) for group in optimizer["groups"])
        optimizer["schedule"] = None if schedule is None else Schedule(**schedule)
    values["optimizer"] = kind(**optimizer)
    if isinstance(values.get("loss_scale"), dict):
        values["loss_scale"] = LossScale(**values["loss_scale"])
    return Options(**values)


def assembled(folder: Path, index: Index) -> dict[tuple[str, str], Array]:
    """Every state of every bucket, padded as it was, put together from the ranks' files; buffers as [ranks, size]."""
    shapes = {bucket.name: bucket for bucket in index.buckets}
    whole: dict[tuple[str, str], Array] = {}
    for file in index.files:
        tensors = files.read_tensors(folder, file)
        for bucket, band, piece, count in file.pieces:
            part = tensors[f"{bucket}/{band}"]
            if band == Band.BUFFERS:
                state = whole.setdefault((bucket, band), np.zeros((count, part.size), part.dtype))
                state[piece] = part
            else:
                state = whole.setdefault((bucket, band), np.empty(shapes[bucket].padded, part.dtype))
                state[piece * part.size : (piece + 1) * part.size] = part
    return whole


def outlined(folder: str | Path) -> Outline | None:
    """A stand-in for the model of a checkpoint that cannot be made again; None for one that can."""
    index = files.read_index(Path(folder))
    return None if index.model["kind"] == "MLP" else Outline(index)


def _model(index: Index, folder: Path) -> MLP:
    if index.model["kind"] != "MLP":
        raise CheckpointError(f"{folder}: it is of a {index.model['kind']}, which is not saved with it. Pass model=.")
    return MLP(index.model["widths"], seed=index.model["seed"])


def _check(scheme: Scheme, index: Index, folder: Path) -> None:
    """Refuse a checkpoint of another model, or with other states."""
    saved = [(bucket.name, tuple(shape)) for bucket in index.buckets for shape in bucket.shapes]
    here = [(bucket.name, shape) for bucket in scheme.buckets for shape in bucket.group.shapes]
    for (name, was), (_, shape) in zip(saved, here, strict=False):
        if was != shape:
            raise CheckpointError(
                f"{folder}: it is of another model: the first tensor that differs, of {name}, is {list(was)} there and "
                f"{list(shape)} here. Load it into the model that was saved."
            )
    if len(saved) != len(here):
        raise CheckpointError(f"{folder}: it is of another model: {len(saved)} tensors there, {len(here)} here.")
    bands = {band for file in index.files for _, band, _, _ in file.pieces}
    wanted = {
        str(band) for bucket in scheme.buckets for band in bucket.states if band not in (Band.GRADS, Band.MAIN_GRADS)
    }
    if bands != wanted:
        raise CheckpointError(
            f"{folder}: it has {', '.join(sorted(bands))}, and this run needs {', '.join(sorted(wanted))}. Use the "
            f"precision and optimizer that it was saved with."
        )


def _flat(index: Index, states: Mapping[tuple[str, str], Array], band: str) -> Array:
    """A state of all buckets that have it, without padding, end to end."""
    sizes = {bucket.name: sum(int(np.prod(shape)) for shape in bucket.shapes) for bucket in index.buckets}
    return np.concatenate([states[name, band][: sizes[name]] for name in sizes if (name, band) in states])


def _fill(scheme: Scheme, band: Band, flat: Array) -> None:
    """Cut a state anew."""
    start = 0
    for bucket in (bucket for bucket in scheme.buckets if band in bucket.states):
        whole = np.zeros(bucket.padded, flat.dtype)
        whole[: bucket.size] = flat[start : start + bucket.size]
        start += bucket.size
        cut(bucket, band, whole)


def cut(bucket: Bucket, band: Band, whole: Array) -> None:
    """Give each rank its piece of a state [padded]."""
    state = bucket.states[band]
    length = state.shape[1]
    for mine, piece in zip(state, bucket.pieces[band].tolist(), strict=True):
        mine[...] = whole[piece * length : (piece + 1) * length]


def _fill_buffers(scheme: Scheme, index: Index, states: Mapping[tuple[str, str], Array]) -> None:
    """Buffers, which each rank has of its own: ranks beyond those that were saved begin again with the first's."""
    for bucket in scheme.buckets:
        if (saved := states.get((bucket.name, str(Band.BUFFERS)))) is not None:
            for row, rank in enumerate(scheme.ring.ids):
                bucket.states[Band.BUFFERS][row] = saved[rank % len(saved)]
