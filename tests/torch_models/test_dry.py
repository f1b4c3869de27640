"""Torch modules in the dry world: what is held, computed and sent there is what the simulator holds, byte for byte."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from torch_models.networks import CASES, ROWS, Skipping, compare, model_of, numbers, shapes_of, squared  # noqa: E402
from zerosim.schemes import DP, SCHEMES, ZeRO2, ZeRO3  # noqa: E402
from zerosim.torch_models.model import TorchModel, from_torch  # noqa: E402
from zerosim.worlds.dry import DryRing  # noqa: E402
from zerosim.worlds.shapes import ShapeModel  # noqa: E402

NORMALISING = ("decoder", "normalised")  # torch's normalisations in 16 bits differ by device
pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def dry(model: TorchModel, stage: Any, ranks: int, **options: Any) -> Any:
    """A step of the model without values."""
    scheme = stage(ShapeModel(model.shapes()), ranks, ring=DryRing(ranks), **options)
    scheme.step(scheme.model.batch(options.get("accumulate", 1)))
    return scheme.reports[0]


@pytest.mark.parametrize(
    ("name", "checkpoint", "precision", "compute"),
    [
        pytest.param("decoder", "full", "mixed", "fp32", marks=pytest.mark.slow),
        ("partly frozen", "full", "bf16", "bf16"),
        *((name, "none", "mixed", "fp32") for name in CASES if name != "decoder"),
        pytest.param("decoder", "none", "mixed", "fp32", marks=pytest.mark.slow),
        *(
            pytest.param(name, checkpoint, "bf16", "bf16", marks=pytest.mark.slow)
            for name in CASES
            for checkpoint in ("none", "full")
            if name not in NORMALISING
        ),
    ],
)
def test_the_dry_world_counts_what_the_simulator_counts(
    name: str, checkpoint: str, precision: str, compute: str
) -> None:
    """A module measured without values holds, sends and computes, byte for byte, what it does with them."""
    case = CASES[name]
    model = model_of(case, checkpoint=checkpoint, compute=compute)
    for ranks, stage in enumerate(SCHEMES, start=2):
        simulated = stage(model, ranks, precision=precision)
        simulated.step(case.batch(ranks))
        compare(dry(model, stage, ranks, precision=precision), simulated.reports[0])


def test_micro_batches_count_the_same() -> None:
    """Measured for one micro-batch, a step of three holds and sends what the simulator's step of three does."""
    case, ranks, accumulate = CASES["tied"], 2, 3
    model = model_of(case)
    simulated = ZeRO2(model, ranks, accumulate=accumulate)
    simulated.step([tuple(np.tile(part, (accumulate, 1)) for part in pair) for pair in case.batch(ranks)])
    compare(dry(model, ZeRO2, ranks, accumulate=accumulate), simulated.reports[0])


def test_what_skips_layers_counts_the_same() -> None:
    """Several inputs, several outputs, sums over several layers, and a gradient that begins as one number."""
    x, y = numbers(1, (ROWS, 4), (ROWS, 4))[0]
    batch = [((x, y), {"sum": y, "last": x})] * 3
    model = from_torch(
        Skipping(), batch, lambda found, wanted: (found["sum"] * wanted["sum"]).sum() + found["last"].mean()
    )
    for stage in (DP, ZeRO3):
        for checkpoint in (False, True):
            simulated = stage(model, 3, precision="fp32", checkpoint=checkpoint)
            simulated.step(batch)
            compare(dry(model, stage, 3, precision="fp32", checkpoint=checkpoint), simulated.reports[0])


def test_dropout_counts_the_same() -> None:
    """What a CPU keeps of dropout is a number for each element, and a GPU a byte."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    batch = numbers(2, (ROWS, 4), (ROWS, 4))
    model = from_torch(module, batch, functional.mse_loss)
    simulated = ZeRO3(model, 2)
    simulated.step(batch)
    compare(dry(model, ZeRO3, 2), simulated.reports[0])
    on_gpu = shapes_of(
        CASES["normalised"]._replace(make=lambda: module, batch=lambda n: numbers(n, (ROWS, 4), (ROWS, 4)))
    )
    kept = [unit.saved for unit in on_gpu.units if unit.name == "1"]
    assert [tensor.nbytes for tensor in kept[0]] == [ROWS * 4]
    assert [tensor.nbytes for tensor in model.shapes().units[1].saved] == [ROWS * 4 * 4]


def test_a_model_knows_its_shapes_for_other_rows() -> None:
    """Shapes are for as many rows as the example has, or for others; a loss of one's own needs a target."""
    batch = numbers(1, (ROWS, 5), (ROWS, 3))
    model = from_torch(CASES["normalised"].make(), batch[0], squared)
    assert [model.shapes(rows).inputs[0].shape for rows in (None, 7)] == [(ROWS, 5), (7, 5)]
    assert model.shapes(7).target.shape == (7, 3)
    with pytest.raises(ValueError, match=r"TorchModel\(target\)"):
        TorchModel(CASES["normalised"].make(), batch[0][0], loss=squared).shapes()


def test_normalisation_in_bf16_differs_by_device() -> None:
    """Beside 16-bit weights torch's CPU keeps a layer norm's two statistics in 16 bits, the other devices in 32."""
    case = CASES["decoder"]
    model = model_of(case, compute="bf16")
    simulated = DP(model, 2, precision="bf16")
    simulated.step(case.batch(2))
    norms, positions = 3, ROWS * case.batch(1)[0][0].shape[1]
    difference = dry(model, DP, 2, precision="bf16").peak.total - simulated.reports[0].peak.total
    assert difference == norms * positions * 2 * (4 - 2)


def test_the_tied_reference() -> None:
    """Vocabulary 10, width 4, tied, one 4 x 4 layer: 56 parameters, and 896 B at rest under data parallel."""
    model = model_of(CASES["tied"])
    assert model.n_params == shapes_of(CASES["tied"]).n_params == 10 * 4 + 4 * 4 == 56
    assert DP(model, 2).ledger.total == 16 * 56 == 896


def test_the_frozen_reference() -> None:
    """1000 frozen and 8 trainable parameters on 4 ranks: bytes at rest, and sent with 2 bytes on the wire."""
    case = CASES["frozen base"]
    for stage, rest, sent in ((ZeRO2, 2016 + 4 + 24, 24), (ZeRO3, 504 + 4 + 24, 3036)):
        scheme = stage(model_of(case), 4, wire="fp16")
        scheme.step(case.batch(4))
        assert scheme.ledger.total == rest
        assert scheme.reports[0].sent() == [sent] * 4
