"""Recipes that people run beyond those that the simulator trains with: as rows whose bytes a plan counts.

Owns these rows, and the optimizers whose states have other dtypes. They say what is held and never
compute: a plan runs on shapes. Must not know conventions nor models.

* ``pure-bf16``: parameters, gradients and both moments in bf16 and nothing else, 8 bytes per parameter.
* ``bf16-moments``: bf16 with an fp32 master copy and moments in bf16, 12 bytes.
* ``bf16-master``: bf16 with a master copy and moments in bf16 as well, 10 bytes (DeepSpeed's ``bf16_master_weights``).
* ``autocast``: fp32 throughout, 16 bytes, and the 16-bit copies that torch.autocast makes of what each unit reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from zerosim.bands import BF16, FP32, MODEL_STATES, PRECISIONS, Band, DType, Precision
from zerosim.optimizer import SGD, Adam
from zerosim.options import Options

SCALE_BLOCK = 256  # elements that share one fp32 scale in 8-bit Adam (Dettmers et al., arXiv 2110.02861; torchao)
_ADAM, _SGD = 13, 2  # operations per element, as their own; a momentum takes another two


@dataclass(frozen=True)
class Recipe(Precision):
    """A precision whose states are in dtypes of their own: those of ``held`` take the place of the usual ones."""

    held: Mapping[Band, DType] = field(default_factory=dict)

    @property
    def params(self) -> DType:
        return self.held.get(Band.PARAMS, super().params)

    def dtypes(self, wire: DType) -> dict[Band, DType]:
        """Which dtype each band has."""
        return {**super().dtypes(wire), **self.held}


_MOMENTS = {Band.EXP_AVG: BF16, Band.EXP_AVG_SQ: BF16, Band.MOMENTUM: BF16}
RECIPES: Mapping[str, Precision] = {
    **PRECISIONS,
    "pure-bf16": Recipe("pure-bf16", BF16, master=False, held={Band.PARAMS: BF16, **_MOMENTS}),
    "bf16-moments": Recipe("bf16-moments", BF16, master=True, held=_MOMENTS),
    "bf16-master": Recipe("bf16-master", BF16, master=True, held={Band.MASTER: BF16, **_MOMENTS}),
    "autocast": Recipe("autocast", FP32, master=False),
}


@dataclass(frozen=True)
class Planned(Adam):
    """Adam, of which only what it keeps is known: one byte for each moment if ``eight_bit``."""

    eight_bit: bool = False

    def update(self, params: Any, grads: Any, *, step: int, flops: Callable[[int], None], **moments: Any) -> None:  # type: ignore[override]
        """Book the operations."""
        flops(_ADAM * params.shape[1])

    @property
    def held(self) -> Mapping[Band, DType]:
        """The dtypes of its moments, if they are its own."""
        return dict.fromkeys(self.states, np.dtype(np.uint8)) if self.eight_bit else {}


@dataclass(frozen=True)
class PlannedSGD(SGD):
    """SGD on parameters of any dtype, of which only what it keeps is known."""

    def update(self, params: Any, grads: Any, momentum: Any = None, *, flops: Callable[[int], None], **_: Any) -> None:
        """Book the operations."""
        flops((_SGD if momentum is None else 2 * _SGD) * params.shape[1])


OPTIMIZERS: Mapping[str, Adam | SGD] = {
    "adam": Adam(),
    "adamw": Adam(),  # weight decay keeps nothing
    "adam8bit": Planned(eight_bit=True),
    "sgd": SGD(momentum=0.0),
    "momentum": SGD(momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class PlannedOptions(Options):
    """Options of a run on shapes under any of ``RECIPES``, which is named in ``planned``.

    ``in_backward``: each unit is updated as soon as its gradients are there. ``set_to_none``: gradients are there from
    their reduction to the end of the step. ``foreach``: the optimizer works on all parameters at once, and what it
    computes on the way is as large as one of its moments. ``settings`` are the system's own, if it has any.
    """

    planned: str = ""
    in_backward: bool = False
    set_to_none: bool = False
    foreach: bool = False
    settings: Any = None

    @property
    def states(self) -> tuple[Band, ...]:
        """The model states that outlive a step."""
        gone = self.in_backward or self.set_to_none
        return tuple(band for band in super().states if not (gone and band is Band.GRADS))

    @property
    def recipe(self) -> Precision:
        """The row, with the optimizer's own dtypes in it."""
        row = RECIPES[self.planned]
        held = getattr(self.optimizer, "held", {})
        if not held:
            return row
        own = row.held if isinstance(row, Recipe) else {}
        return Recipe(row.name, row.working, row.master, row.grads, row.main_grads, held={**own, **held})


def options(base: Options, name: str, optimizer: str, **planned: Any) -> Options:
    """The options with that recipe and optimizer, and what else of ``PlannedOptions`` is asked for: plain ones where
    the simulator has all of it."""
    chosen = OPTIMIZERS[optimizer]
    values: dict[str, Any] = {each.name: getattr(base, each.name) for each in fields(Options)}
    del values["precision"], values["optimizer"]
    if name in PRECISIONS and not isinstance(chosen, Planned) and not any(planned.values()):
        return Options(**values, precision=name, optimizer=chosen)
    if isinstance(chosen, SGD):
        chosen = PlannedSGD(momentum=chosen.momentum)
    else:
        chosen = Planned(eight_bit=isinstance(chosen, Planned) and chosen.eight_bit)
    stands_for = name if name in PRECISIONS else "bf16" if RECIPES[name].working == BF16 else "fp32"
    return PlannedOptions(**values | planned, precision=stands_for, optimizer=chosen, planned=name)


def scales(optimizer: str, elements: int) -> int:
    """How many fp32 scales the optimizer keeps beside moments of so many elements."""
    return 2 * -(-elements // SCALE_BLOCK) if optimizer == "adam8bit" else 0


def bytes_per_parameter(name: str, optimizer: str) -> int:
    """Bytes of the states of one trained parameter, scales left out."""
    chosen = options(Options(), name, optimizer)
    dtypes = chosen.recipe.dtypes(FP32)
    return sum(dtypes[band].itemsize for band in chosen.states if band in MODEL_STATES)


def computed_in(name: str) -> DType:
    """The dtype that forward and backward compute in."""
    return BF16 if name == "autocast" else RECIPES[name].working
