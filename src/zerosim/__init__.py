"""zerosim: ZeRO made measurable. N virtual GPUs train a real model, and every byte is counted where it is.

>>> import zerosim as zs
>>> run = zs.ZeRO2(zs.MLP(), ranks=8)
>>> for batch in zs.batches(ranks=8, steps=3):
...     loss = run.step(batch)
>>> run
ZeRO-2 on 8 ranks: 33,088 parameters, mixed, 3 steps, loss 1.384...; a rank holds 124,080 B (3.7500 per parameter), ...

Names are loaded when they are asked for; ``import zerosim`` itself loads nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerosim.api.compare import Comparison, compare
    from zerosim.api.dry import dry
    from zerosim.api.models import batches
    from zerosim.api.planned import Planned
    from zerosim.api.planning import plan
    from zerosim.api.timeline import Timeline
    from zerosim.bands import Band
    from zerosim.checkpoints.load import load
    from zerosim.checkpoints.save import save
    from zerosim.conformance.check import check
    from zerosim.counts import Event, Report
    from zerosim.model import MLP
    from zerosim.optimizer import SGD, Adam, AdamW, ParamGroup, Schedule
    from zerosim.options import LossScale, Options
    from zerosim.ranks import OutOfMemory, Rank
    from zerosim.schemes import Scheme
    from zerosim.stages import (
        DP,
        HFSDP,
        HPZ,
        HSDP,
        ROWS,
        SCHEMES,
        HSDPKept,
        Infinity,
        Offload1,
        Offload2,
        Stage,
        ZeRO1,
        ZeRO1Group,
        ZeRO2,
        ZeRO2Group,
        ZeRO3,
        ZeRO3Kept,
    )

    __version__: str

# Where each public name is made: the package's one list of what it offers.
_HOMES = {
    "api.compare": ("Comparison", "compare"),
    "api.dry": ("dry",),
    "api.models": ("batches",),
    "api.planned": ("Planned",),
    "api.planning": ("plan",),
    "api.timeline": ("Timeline",),
    "bands": ("Band",),
    "checkpoints.load": ("load",),
    "checkpoints.save": ("save",),
    "conformance.check": ("check",),
    "counts": ("Event", "Report"),
    "model": ("MLP",),
    "optimizer": ("SGD", "Adam", "AdamW", "ParamGroup", "Schedule"),
    "options": ("LossScale", "Options"),
    "ranks": ("OutOfMemory", "Rank"),
    "schemes": ("Scheme",),
    "stages": (
        "DP", "HFSDP", "HPZ", "HSDP", "HSDPKept", "Infinity", "Offload1", "Offload2", "ROWS", "SCHEMES", "Stage",
        "ZeRO1", "ZeRO1Group", "ZeRO2", "ZeRO2Group", "ZeRO3", "ZeRO3Kept",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "DP", "HFSDP", "HPZ", "HSDP", "MLP", "ROWS", "SCHEMES", "SGD", "Adam", "AdamW", "Band", "Comparison", "Event",
    "HSDPKept", "Infinity", "LossScale", "Offload1", "Offload2", "Options", "OutOfMemory", "ParamGroup", "Planned",
    "Rank", "Report", "Schedule", "Scheme", "Stage", "Timeline", "ZeRO1", "ZeRO1Group", "ZeRO2", "ZeRO2Group", "ZeRO3",
    "ZeRO3Kept", "__version__", "batches", "check", "compare", "dry", "load", "plan", "save",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("zerosim")
    if name not in _HOME:
        near = import_module("zerosim.util.words").near(name, __all__)
        meant = f"did you mean {near}? " if near else ""
        raise AttributeError(f"module 'zerosim' has no attribute {name!r}; {meant}its names are {', '.join(__all__)}")
    value = getattr(import_module(f"zerosim.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
