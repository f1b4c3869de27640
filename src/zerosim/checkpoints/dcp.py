"""Checkpoints of torch.distributed.checkpoint (DCP), in both directions, through torch's own reader and writer.

Owns how names there and states here belong together, and what in such a folder does not fit. What it reads
and writes is what torch.distributed.checkpoint.state_dict makes of a module and its optimizer: parameters
and moments under the module's names, under whatever keys they are put in. Must not know how ranks are saved.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint

from zerosim.bands import FP32, Array, Band
from zerosim.buckets import Bucket
from zerosim.checkpoints.files import CheckpointError, vacant
from zerosim.checkpoints.load import cut
from zerosim.checkpoints.save import tensor_names
from zerosim.layers import Role
from zerosim.optimizer import SGD
from zerosim.schemes import Scheme
from zerosim.util.casts import convert

torch_dcp: Any = torch.distributed.checkpoint
MOMENTS = {Band.EXP_AVG: "exp_avg", Band.EXP_AVG_SQ: "exp_avg_sq", Band.MOMENTUM: "momentum_buffer"}


def write(scheme: Scheme, folder: str | Path) -> None:
    """Write the run's states as a DCP checkpoint, whole or not at all.

    ``model`` has the fp32 parameters and the first rank's buffers, ``optim`` the moments, the steps and the
    groups, as ``torch.distributed.checkpoint.state_dict.get_state_dict`` has them. CheckpointError if
    something is in ``folder`` already; OSError if the disk is full.
    """
    folder = Path(folder)
    vacant(folder)
    model, state, groups = {}, {}, dict[tuple[float, float], list[str]]()
    optimizer = scheme.options.optimizer
    for bucket, names in zip(scheme.buckets, tensor_names(scheme), strict=True):
        states = {band: scheme.whole(bucket, band) for band in bucket.states if band in (Band.MASTER, *MOMENTS)}
        params = states.pop(Band.MASTER, None)
        if bucket.group.role is Role.BUFFER:
            params = bucket.states[Band.BUFFERS][0]
        elif params is None:
            params = scheme.whole(bucket, Band.PARAMS).astype(FP32)
        parts = {band: _parts(bucket, whole) for band, whole in states.items()}
        for number, (name, own) in enumerate(zip(names, _parts(bucket, params), strict=True)):
            model[name] = _tensor(own)
            if bucket.trainable and (updates := bucket.updates[number]):  # torch has no state of what had no gradient
                moments = {MOMENTS[band]: _tensor(each[number]) for band, each in parts.items()}
                steps = {} if isinstance(optimizer, SGD) else {"step": torch.tensor(float(updates))}
                state[name] = steps | moments
        if bucket.trainable:
            for name, rates in zip(names, optimizer.rates(bucket.name, bucket.group.shapes), strict=True):
                groups.setdefault(rates, []).append(name)
    optim = {
        "state": state,
        "param_groups": [_group(optimizer, *rates) | {"params": of} for rates, of in groups.items()],
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.")
    try:
        with _quiet():
            torch_dcp.save(
                {"model": model, "optim": optim}, storage_writer=torch_dcp.FileSystemWriter(aside), no_dist=True
            )
        os.chmod(aside, 0o755)
        os.replace(aside, folder)
    except torch_dcp.CheckpointException as error:
        raise next((each for each, _ in error.failures.values() if isinstance(each, OSError)), error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read(folder: str | Path, scheme: Scheme) -> None:
    """Give the run the states of a DCP checkpoint: parameters, buffers and, where they are there, moments and steps.

    Whoever wrote it, FSDP2's ranks or one process: its tensors are found by the names that ``scheme``'s model
    has for them. Moments that are not there begin at zero. CheckpointError, before anything changes, for a
    folder that is none, or of another model. torch reads what it says of itself with pickle: read what you trust.
    """
    found = Folder(Path(folder))
    layout = list(zip(scheme.buckets, tensor_names(scheme), strict=True))
    shapes = {
        name: shape
        for bucket, names in layout
        if bucket.group.role is not Role.BUFFER
        for name, shape in zip(names, bucket.group.shapes, strict=True)
    }
    trained = [name for bucket, names in layout if bucket.trainable for name in names]
    prefix = found.prefix(shapes)
    moments = [band for band in scheme.options.optimizer.states if band in MOMENTS]
    kept = found.moments(trained, [MOMENTS[band] for band in moments])
    updates = found.updates(kept)
    for bucket, names in layout:
        if bucket.group.role is Role.BUFFER:
            if all(prefix + name in found.sizes for name in names):
                bucket.states[Band.BUFFERS][...] = found.flat([prefix + name for name in names], bucket.size)
            continue
        whole = np.zeros(bucket.padded, FP32)
        whole[: bucket.size] = found.flat([prefix + name for name in names], bucket.size)
        for band in (Band.PARAMS, Band.MASTER):
            _put(bucket, band, whole)
        for band in moments if bucket.trainable else ():
            whole, end = np.zeros(bucket.padded, FP32), 0
            for name, shape in zip(names, bucket.group.shapes, strict=True):
                start, end = end, end + prod(shape)
                if name in kept:
                    whole[start:end] = found.flat([f"{kept[name]}.{MOMENTS[band]}"], prod(shape))
            _put(bucket, band, whole)
        bucket.updates = [updates.get(name, 0) for name in names]
    scheme.steps = scheme.updates = max(updates.values(), default=0)


class Folder:
    """A DCP folder: what is in it by key, and its tensors. CheckpointError if it is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            metadata = torch_dcp.FileSystemReader(str(folder)).read_metadata()
            entries = metadata.state_dict_metadata
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder}: this is no checkpoint of torch.distributed.checkpoint: there is no .metadata. Name the "
                f"folder that dcp.save was given, once it is complete."
            ) from error
        except Exception as error:  # whatever a damaged pickle raises
            raise CheckpointError(
                f"{folder}: its .metadata cannot be read, by torch's own reader: {type(error).__name__}: {error}."
            ) from error
        self._entries = {key: entry for key, entry in entries.items() if hasattr(entry, "size")}
        self.sizes = {key: tuple(entry.size) for key, entry in self._entries.items()}

    def prefix(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """What stands before the parameters' names. CheckpointError naming the first that is missing or differs."""
        first, *_ = shapes
        candidates = [
            key.removesuffix(first)
            for key in self.sizes
            if key == first or (key.endswith("." + first) and not key.removesuffix(first).endswith("state."))
        ]
        whole = [prefix for prefix in candidates if all(prefix + name in self.sizes for name in shapes)]
        if not whole:
            at = candidates[0] if candidates else ""
            missing = next(name for name in shapes if at + name not in self.sizes)
            there = ", ".join([*list(self.sizes)[:3], "..."])
            raise CheckpointError(
                f"{self.folder}: it is of another model: there is no tensor {missing} in it, only {there} Load it into "
                f"the model that was saved."
            )
        if len(whole) > 1 and "model." not in whole:
            raise CheckpointError(f"{self.folder}: it has these parameters more than once, under {', '.join(whole)}.")
        prefix = "model." if "model." in whole else whole[0]
        for name, shape in shapes.items():
            if self.sizes[prefix + name] != shape:
                raise CheckpointError(
                    f"{self.folder}: it is of another model: the first tensor that differs, {name}, is "
                    f"{list(self.sizes[prefix + name])} there and {list(shape)} here. Load it into the model that was "
                    f"saved."
                )
        return prefix

    def moments(self, names: list[str], moments: list[str]) -> dict[str, str]:
        """The key of each parameter's optimizer state, of those that have some of these moments."""
        ends = tuple(f".{moment}" for moment in moments)
        states = {key.rpartition(".")[0] for key in self.sizes if ends and key.endswith(ends)}
        found = {
            name: state
            for name in names
            for state in states
            if state == f"state.{name}" or state.endswith(f".state.{name}")
        }
        for name in found or (names if states else []):
            missing = next((each for each in moments if f"{found.get(name)}.{each}" not in self.sizes), None)
            if missing:
                raise CheckpointError(
                    f"{self.folder}: it has optimizer state, but no {missing} of {name}. Save it by the parameters' "
                    f"names, as torch.distributed.checkpoint.state_dict.get_state_dict does."
                )
        return found

    def updates(self, states: Mapping[str, str]) -> dict[str, int]:
        """How many updates each parameter has had, of those that have state."""
        keys = {name: f"{state}.step" for name, state in states.items() if f"{state}.step" in self.sizes}
        return {name: int(self.flat([key], 1)[0]) for name, key in keys.items()}

    def flat(self, keys: list[str], size: int) -> Array:
        """Some tensors end to end, in fp32 if they are floating-point numbers, and else as they are."""
        state = {
            key: torch.empty(self.sizes[key], dtype=self._entries[key].properties.dtype) for key in dict.fromkeys(keys)
        }
        try:
            with _quiet():
                torch_dcp.load(state, storage_reader=torch_dcp.FileSystemReader(str(self.folder)), no_dist=True)
        except torch_dcp.CheckpointException as error:
            cause = next((each for each, _ in error.failures.values()), error)
            raise CheckpointError(f"{self.folder}: {', '.join(keys)} cannot be read: {cause}.") from error
        parts = [state[key].reshape(-1) for key in keys]
        whole: Array = torch.cat([part.float() if part.is_floating_point() else part for part in parts]).numpy()
        assert whole.size == size, "every shape has been compared"
        return whole


def _put(bucket: Bucket, band: Band, whole: Array) -> None:
    if band in bucket.states:
        cast = np.empty(whole.shape, bucket.states[band].dtype)
        convert(whole, cast)
        cut(bucket, band, cast)


def _parts(bucket: Bucket, whole: Array) -> list[Array]:
    """The tensors of a bucket, of a state without padding."""
    ends = np.cumsum([prod(shape) for shape in bucket.group.shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(whole, ends[:-1]), bucket.group.shapes, strict=True)]


def _tensor(array: Array) -> torch.Tensor:
    copy = np.array(array, order="C")
    if copy.dtype.name == "bfloat16":
        return torch.from_numpy(copy.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(copy)


def _group(optimizer: Any, lr: float, decay: float) -> dict[str, Any]:
    """A group of parameters, with everything that torch's optimizer of the kind keeps in one."""
    stand_in = [torch.zeros(1)]
    if isinstance(optimizer, SGD):
        made: Any = torch.optim.SGD(stand_in, lr=lr, momentum=optimizer.momentum)
    else:
        made = torch.optim.AdamW(stand_in, lr=lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=decay)
    group: dict[str, Any] = made.state_dict()["param_groups"][0]
    return group


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that there is no process group: that one process reads and writes is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
