"""One file with the whole parameters, from a checkpoint, with a bounded peak.

Owns the order in which it is put together: one parameter's layer at a time, so that no more than one layer
is ever in memory, whatever the model. Must not know schemes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from zerosim.bands import Array, Band, Place
from zerosim.checkpoints import files
from zerosim.checkpoints.files import BucketRecord, CheckpointError, Index
from zerosim.ledger import Ledger
from zerosim.records.files import CHUNK, writing_whole


def consolidate(folder: str | Path, out: str | Path) -> Ledger:
    """Write the fp32 parameters of a checkpoint to one safetensors file, whole or not at all.

    Returns the ledger of what it took: its peak on the host is one layer's parameters, where gathering
    everything first takes them all. CheckpointError for a folder that holds no sound checkpoint; OSError if the
    file cannot be written.
    """
    folder, out = Path(folder), Path(out)
    index, ledger = files.read_index(folder), Ledger(1)
    for file in index.files:
        _check(folder, file)
    layout: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for bucket in _parameters(index):
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            start, end = end, end + 4 * prod(shape)
            layout[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(layout).encode()
    header += b" " * (-len(header) % 8)

    def readable(written: str) -> None:
        with safetensors.safe_open(written, "np") as file:
            assert set(file.keys()) == set(layout) - {"__metadata__"}

    with writing_whole(out, readable) as target:  # the format's own layout: its library wants all of it in memory
        target.write(struct.pack("<Q", len(header)) + header)
        for bucket in _parameters(index):
            whole = _layer(folder, index, bucket, ledger)
            target.write(whole[: sum(map(prod, bucket.shapes))].data)
            ledger.free(Band.CHECKPOINT, whole.nbytes, bucket.name, Place.HOST)
    return ledger


def _parameters(index: Index) -> Iterator[BucketRecord]:
    return (bucket for bucket in index.buckets if bucket.role != "buffer")


def _layer(folder: Path, index: Index, bucket: BucketRecord, ledger: Ledger) -> Array:
    """A layer's parameters, padded, in fp32, put together from the ranks' files: only its own tensors are read."""
    bands = {band for file in index.files for name, band, _, _ in file.pieces if name == bucket.name}
    band = str(Band.MASTER if Band.MASTER in bands else Band.PARAMS)
    whole = np.empty(bucket.padded, np.float32)
    ledger.hold(Band.CHECKPOINT, whole.nbytes, bucket.name, Place.HOST)
    for file in index.files:
        mine = [piece for piece in file.pieces if piece[:2] == (bucket.name, band)]
        for _, _, piece, count in mine:
            length = bucket.padded // count
            target = whole[piece * length : (piece + 1) * length]
            for part in _parts(folder / file.name, f"{bucket.name}/{band}"):
                ledger.hold(Band.CHECKPOINT, part.nbytes, bucket.name, Place.HOST)
                target[: part.size], target = part, target[part.size :]
                ledger.free(Band.CHECKPOINT, part.nbytes, bucket.name, Place.HOST)
    return whole


def _parts(path: Path, name: str) -> Iterator[Array]:
    """One tensor of a file, and nothing else of it, some at a time."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))[name]
        start, end = entry["data_offsets"]
        file.seek(8 + length + start)
        for at in range(start, end, CHUNK):
            yield np.frombuffer(file.read(min(CHUNK, end - at)), files.DTYPES[entry["dtype"]])


def _check(folder: Path, file: files.FileRecord) -> None:
    """Refuse a file that is missing or not the one that was written, reading a part of it at a time."""
    try:
        found = files.digest_of(folder / file.name, CHUNK)
    except OSError as error:
        raise CheckpointError(f"{folder}: rank {file.rank}'s {file.name} cannot be read: {error.strerror}.") from error
    if found != file.sha256:
        raise CheckpointError(f"{folder}: the file of rank {file.rank}, {file.name}, is damaged. Restore it.")
