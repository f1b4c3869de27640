"""Writing a run to a folder.

Owns what of a run is written and by whom: each piece of each state once, by the lowest rank that has it.
Gradients are not: the next step makes them anew. Must not know the format.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

from zerosim.bands import NOT_SAVED, Array, Band, Place
from zerosim.buckets import distinct
from zerosim.checkpoints import files
from zerosim.checkpoints.files import BucketRecord, FileRecord, Index
from zerosim.checkpoints.outline import Outline
from zerosim.model import MLP
from zerosim.options import LossScale, Options
from zerosim.schemes import Scheme
from zerosim.util import arguments

RUN_ONLY = ("capacity", "host_capacity", "node", "kernels", "threads")  # options that decide no number


def save(scheme: Scheme, folder: str | Path) -> Index:
    """Write the run to ``folder``, whole or not at all: one file per rank and an index. Returns the index.

    What was there before stays until all of it is written. A rank's pieces are copied to its host before
    they are written; the ledger has the copies. OSError, with the older checkpoint intact, if the disk is full;
    CheckpointError if another is being written there; ValueError for a run of which not all ranks live here;
    RuntimeError for one whose last step was cut short while states changed.

    >>> import zerosim as zs
    >>> zs.save(zs.ZeRO2(zs.MLP(), ranks=2), "folder").row.name
    'ZeRO-2'
    """
    arguments.instance_of("save", "folder", folder, str | Path)
    folder = Path(folder)
    scheme.check_whole("save")
    if len(scheme.ring.ids) != scheme.ring.size:
        raise ValueError(
            f"save: {len(scheme.ring.ids)} of {scheme.ring.size} ranks live in this process. Save where all of them do."
        )
    owners: dict[tuple[str, Band], dict[int, int]] = {}
    for bucket in scheme.buckets:
        for band in _saved(bucket.states):
            pieces = bucket.pieces[band].tolist() if band in bucket.pieces else list(scheme.ring.ids)
            owners[bucket.name, band] = {piece: pieces.index(piece) for piece in dict.fromkeys(pieces)}
    records = []
    with files.writing(folder):
        for row, rank in enumerate(scheme.ring.ids):
            tensors: dict[str, Array] = {}
            found: list[tuple[str, str, int, int]] = []
            held: list[tuple[str, int]] = []
            try:
                for bucket in scheme.buckets:
                    for band in _saved(bucket.states):
                        mine = [piece for piece, owner in owners[bucket.name, band].items() if owner == row]
                        for piece in mine:
                            tensors[f"{bucket.name}/{band}"] = copy = bucket.states[band][row].copy()
                            scheme.ledger.copy(Place.HOST, Band.CHECKPOINT, copy.nbytes, bucket.name)
                            held.append((bucket.name, copy.nbytes))
                            scheme.ledger.hold(Band.CHECKPOINT, copy.nbytes, bucket.name, Place.HOST)
                            found.append((bucket.name, str(band), piece, len(owners[bucket.name, band])))
                content = files.tensors_bytes(tensors)
                name = files.write_tensors(folder, rank, scheme.steps, content)
                records.append(FileRecord(rank, name, files.digest(content), len(content), found))
            finally:  # ranks write one after another here, and each holds its own alone, written or not
                for unit, nbytes in held:
                    scheme.ledger.free(Band.CHECKPOINT, nbytes, unit, Place.HOST)
        index = _index(scheme, records)
        files.write_index(folder, index)
    return index


def _saved(states: dict[Band, Array]) -> list[Band]:
    return [band for band in states if band not in NOT_SAVED]


def _index(scheme: Scheme, records: list[FileRecord]) -> Index:
    scaler = scheme.scaler
    return Index(
        schema=files.SCHEMA,
        row=scheme.stage,
        ranks=scheme.ring.size,
        node=scheme.options.node,
        options=options_record(scheme.options),
        model=model_record(scheme.model),
        n_params=scheme.model.n_params,
        buckets=[
            BucketRecord(
                bucket.name,
                str(bucket.group.role),
                bucket.group.dtype and str(bucket.group.dtype),
                names,
                [list(shape) for shape in bucket.group.shapes],
                bucket.updates,
                bucket.padded,
            )
            for bucket, names in zip(scheme.buckets, tensor_names(scheme), strict=True)
        ],
        steps=scheme.steps,
        updates=scheme.updates,
        scaler=None if scaler is None else (scaler.scale, scaler.good_steps, scaler.tolerated),
        generator=dict(getattr(scheme.model, "generator_state", dict)()),
        files=records,
        versions={name: importlib.metadata.version(name) for name in ("zerosim", "numpy", "safetensors")},
    )


def tensor_names(scheme: Scheme) -> list[list[str]]:
    """What each bucket's tensors are called: as the model calls them, or by their layer and a number."""
    model = scheme.model
    found: list[str] = []
    for group in distinct(model.layers):
        if hasattr(model, "names"):
            found += model.names(group)
        else:
            parts = ["weight", "bias"] if isinstance(model, MLP) else map(str, range(len(group.shapes)))
            found += [f"{group.name}.{part}" for part in parts]
    rest = iter(found)
    return [list(islice(rest, len(bucket.group.shapes))) for bucket in scheme.buckets]


def options_record(options: Options) -> dict[str, Any]:
    """The options that decide numbers, as plain values; the optimizer with its kind."""
    found: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in RUN_ONLY:
            continue
        if field.name == "optimizer":
            value = {"kind": type(value).__name__} | asdict(value)
        elif isinstance(value, LossScale):
            value = asdict(value)
        found[field.name] = value
    return found


def model_record(model: Any) -> dict[str, Any]:
    """What it takes to make the model again, or its kind alone."""
    if isinstance(model, Outline):
        return model.record
    if type(model) is MLP:
        return {"kind": "MLP", "widths": list(model.widths), "seed": model.seed}
    return {"kind": type(model).__name__}
