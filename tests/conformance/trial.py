"""Runs a training by hand under the check, on forked ranks: with a piece of its source in another form, or as it is."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from zerosim.conformance import check
from zerosim.optimizer import Adam
from zerosim.options import LossScale
from zerosim.schemes import SCHEMES

SOURCE = Path(__file__).with_name("own_zero.py")
RANKS, STEPS, ROWS = 4, 3, 6
WIDTHS = (7, 13, 5)


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two linear layers, of which nothing divides by four."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.ReLU(), nn.Linear(WIDTHS[1], WIDTHS[2]))
    return net.to(dtype)


def batches(rank: int, steps: int = STEPS, rows: int = ROWS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's rows of each step."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(rows, WIDTHS[0], generator=generator), torch.randn(rows, WIDTHS[-1], generator=generator))
        for _ in range(steps)
    ]


def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error in fp32."""
    return mse_loss(out.float(), y)


def edited(edits: Sequence[tuple[str, str]]) -> Any:
    """``own_zero`` with each ``old`` of its source, which must be there once, in another form."""
    source = SOURCE.read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"own_zero.py has {source.count(old)} of {old!r}"
        source = source.replace(old, new)
    module = types.ModuleType("own_zero")
    sys.modules["own_zero"] = module
    exec(compile(source, str(SOURCE), "exec"), module.__dict__)
    return module


def train(rank: int, stage: int, case: Mapping[str, Any]) -> Any:
    """One case on this rank: the check that has watched it, not yet reported."""
    warnings.filterwarnings("ignore", message="Full backward hook")
    own = edited([(case["old"], case["new"]), *case.get("also", [])] if "old" in case else [])
    options = dict(case.get("with", {}))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.float16}[options.pop("precision", "fp32")]
    rows, steps = options.pop("rows", ROWS), options.pop("steps", STEPS)
    uneven, hand = options.pop("uneven", False), options.pop("hand", ["params"])
    net = network(rank if case.get("seeds") else 0, dtype)
    rule: Any = Adam(lr=options.get("lr", 1e-3))
    if options.get("decay"):
        rule = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=options["decay"])
    checked = check(
        net, scheme=SCHEMES[stage], loss=loss, optimizer=rule, accumulate=options.get("accumulate", 1),
        clip=options.get("max_norm"), loss_scale=LossScale() if options.get("scale") else None, memory=False,
        timeout=case.get("timeout", 60),
    )  # fmt: skip
    if "record" in case:
        checked.record(case["record"])
    trainer = own.Zero(net, stage, **options)

    def hand_over(band: str, what: str) -> None:
        for unit in trainer.units:
            tensor = getattr(unit, what)
            whole = len(tensor) == len(unit.full) or len(tensor) == unit.numel
            checked.band(band, tensor, 0 if whole else rank * unit.chunk, of=unit.module)

    if "grads" in hand:
        trainer.ready = lambda: hand_over("grads", "grad")
    for x, y in batches(rank, steps, rows + rank if uneven else rows):
        with checked.step(x, y, loss_scale=trainer.scale if options.get("scale") else None):
            trainer.train(loss, x.to(dtype), y)
            if stage == 3 and "params" in hand:
                hand_over("params", "shard")
    return checked
