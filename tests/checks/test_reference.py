"""Training written a second time is the first's, bit for bit, under each option of a step as people run it."""

from typing import Any

import pytest

from helpers import lab_settings
from zerosim.checks import compare
from zerosim.checks.reference import Reference
from zerosim.lab.experiment import batches_of, model_of
from zerosim.options import LossScale
from zerosim.stages import DP, HFSDP, HPZ, HSDP, Stage, ZeRO2, ZeRO3

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
ASKED: list[dict[str, Any]] = [
    {"warmup": 3},
    {"weight_decay": 0.125, "warmup": 2},
    {"clip": 0.5},
    {"clip": 0.25, "norm_type": float("inf"), "clip_eps": 0.5},
    {"loss_scale": LossScale(init=2.0**24, backoff=2.0**-14, interval=2)},
    {"uneven": True, "accumulate": 2, "batch": 4},
    {"uneven": True, "average": "ranks", "batch": 3},
    {"accumulate": 2, "sync": "end"},
    {"wire_params": "int8"},
    {"precision": "bf16", "wire": "bf16"},
]


@pytest.mark.parametrize("row", [DP, ZeRO2, ZeRO3, HSDP, HFSDP, HPZ], ids=lambda row: row.name)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_both_accounts_end_each_step_alike(row: Stage, asked: dict[str, Any]) -> None:
    """Every state and the loss, after each of four steps, in groups of two where the row has groups."""
    settings = lab_settings(ranks=4, node=2, steps=4, widths=[5, 7, 3], **asked)
    scheme, reference = row(model_of(settings), 4, settings.options()), Reference(row, settings, 4)
    for step, batch in enumerate(batches_of(settings, 4, 4), start=1):
        scheme.step(batch)
        reference.reach(step, batch)
        assert compare.against_plain(scheme, reference, step) == []
    if "loss_scale" in asked:
        assert {report.skipped for report in scheme.reports} == {True, False}
