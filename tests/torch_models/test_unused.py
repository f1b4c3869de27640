"""A parameter without a gradient is left alone, one with a zero gradient is not: under every row, on all ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zerosim.bands import Band
from zerosim.checkpoints.load import load
from zerosim.checkpoints.save import save
from zerosim.model import MLP
from zerosim.optimizer import AdamW
from zerosim.schemes import DP, Scheme, ZeRO2, ZeRO3
from zerosim.stages import ROWS, Stage
from zerosim.torch_models.model import TorchModel
from zerosim.worlds.dry import DryRing, Shapes

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

OPTIMIZER = AdamW(lr=0.01, weight_decay=0.1)
USED, ZERO, UNUSED = (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)  # whether the weight is used, and what its gradient is
AFTER_ONE, AFTER_ZERO = 0.989, 0.98131


class Sometimes(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A weight of 1 that is used by inputs whose first column says so, and one that always is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.always = torch.nn.Parameter(torch.ones(1, 1)), torch.nn.Parameter(torch.ones(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x[:, 1:] * self.always.sum()
        if bool(x[0, 0] > 0):
            found = found + x[:, 1:] * self.weight
        return found


def mean(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is what goes in."""
    return out.mean() + 0 * target.sum()


def run_of(row: Stage, ranks: int, **options: Any) -> Scheme:
    model = TorchModel(torch.nn.Sequential(Sometimes()), torch.ones(2, 2), loss=mean)
    return row(model, ranks, precision="fp32", optimizer=OPTIMIZER, find_unused=True, **options)


def batch(*rows: tuple[float, float]) -> list[tuple[Any, Any]]:
    """For each rank what its rows are."""
    return [(torch.tensor([row, row]), torch.zeros(2, 1)) for row in rows]


def weight(run: Scheme) -> float:
    named: Any = run.model
    return float(named.named(run.full_theta())["0.weight"].item())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_none_and_zero(row: Stage) -> None:
    """After a gradient of 1 it is 0.989; with none it stays so, with a zero one, if on one rank alone, it does not."""
    for second, expected in (
        ([UNUSED] * 4, AFTER_ONE),
        ([ZERO] * 4, AFTER_ZERO),
        ([UNUSED, UNUSED, UNUSED, ZERO], AFTER_ZERO),  # if any rank has one, it has one
    ):
        run = run_of(row, 4, node=2)
        run.step(batch(*[USED] * 4))
        assert weight(run) == pytest.approx(AFTER_ONE, abs=1e-6)
        run.step(batch(*second))
        assert weight(run) == pytest.approx(expected, abs=1e-6 if expected == AFTER_ONE else 1e-5)
        if not row.params:  # every rank has the same
            for bucket in run.buckets:
                assert (bucket.states[Band.PARAMS] == bucket.states[Band.PARAMS][:1]).all()


def test_all_rows_agree() -> None:
    """Whoever has a gradient and whoever not, rows of one order come to the same bits."""
    turns = [[USED] * 4, [UNUSED] * 4, [USED, UNUSED, ZERO, UNUSED], [UNUSED] * 4, [ZERO] * 4]
    found: dict[object, bytes] = {}
    for row in ROWS:
        run = run_of(row, 4, node=2)
        for turn in turns:
            run.step(batch(*turn))
        state = b"".join(run.flat(band).tobytes() for band in (Band.PARAMS, Band.EXP_AVG, Band.EXP_AVG_SQ))
        assert found.setdefault(run.shard.order(), state) == state, row.name


def test_torch_does_the_same() -> None:
    """Its steps count apart, as torch's do: five steps with and without a gradient are torch.optim.AdamW's."""
    net = Sometimes()
    decayed, run = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1), run_of(DP, 1)
    for turn in (USED, UNUSED, UNUSED, USED, ZERO):
        decayed.zero_grad()
        [(x, y)] = batch(turn)
        mean(net(x), y).backward()
        decayed.step()
        run.step(batch(turn))
        assert weight(run) == pytest.approx(float(net.weight.item()), abs=1e-6)
    [bucket] = run.buckets
    assert bucket.updates == [3, 5]


def test_a_gradient_in_any_micro_batch_is_one() -> None:
    """Over micro-batches a parameter has a gradient if one of them gives it one."""
    run = run_of(ZeRO2, 2, accumulate=2)
    both = [(torch.tensor([USED, USED]), torch.zeros(2, 1)), (torch.tensor([UNUSED, USED]), torch.zeros(2, 1))]
    run.step(both)
    assert run.buckets[0].updates == [1, 1]


def test_the_layer_s_place_in_a_larger_buffer() -> None:
    """Where layers share a buffer each has its own parameters left alone."""
    net = torch.nn.Sequential(Sometimes(), torch.nn.Linear(1, 1, bias=False))
    model = TorchModel(net, torch.ones(2, 2), loss=mean)
    run = ZeRO3(model, 2, bucket="model", precision="fp32", optimizer=OPTIMIZER, find_unused=True)
    run.step(batch(UNUSED, UNUSED))
    [bucket] = run.buckets
    assert bucket.updates == [0, 1, 1]
    assert weight(run) == 1.0


def test_a_multilayer_perceptron_has_every_gradient() -> None:
    """Where the target is what it says all gradients are zero, and weights decay all the same."""
    run = ZeRO3(MLP((3, 2)), 2, precision="fp32", optimizer=OPTIMIZER, find_unused=True)
    before = run.full_theta()
    x = np.ones((1, 3), np.float32)
    y = (x @ before[:6].reshape(3, 2)).astype(np.float32)
    run.step([(x, y)] * 2)
    np.testing.assert_allclose(run.full_theta()[:6], before[:6] * np.float32(1 - 0.01 * 0.1), rtol=1e-6)


def test_what_is_told_is_counted_and_foreseen() -> None:
    """One number for each parameter to each other rank, under a tag of its own; on shapes as on values."""
    model, real = MLP((3, 2)), ZeRO3(MLP((3, 2)), 3, find_unused=True)
    shapes = Scheme(ZeRO3, Shapes(model), 3, real.options, ring=DryRing(3))
    real.step([(np.ones((1, 3), np.float32), np.ones((1, 2), np.float32))] * 3)
    shapes.step(Shapes(model).batch(1))
    for run in (real, shapes):
        sent = {band: int(each.sent.max()) for (_, band), each in run.reports[-1].traffic.items()}
        assert sent["used"] == 2 * 2 * 4
    assert shapes.reports[-1].peak == real.reports[-1].peak


def test_steps_are_saved(tmp_path: Path) -> None:
    """How many updates each parameter has had is in a checkpoint, and counts when it goes on."""
    straight, stopped = run_of(ZeRO3, 2), run_of(ZeRO3, 2)
    for run in (straight, stopped):
        run.step(batch(USED, USED))
        run.step(batch(UNUSED, UNUSED))
    save(stopped, tmp_path)
    again = load(tmp_path, ZeRO2, model=stopped.model)
    assert again.buckets[0].updates == [1, 2]
    for run in (straight, again):
        run.step(batch(USED, UNUSED))
    assert again.full_theta().tobytes() == straight.full_theta().tobytes()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_rank_without_rows_has_no_gradients(row: Stage) -> None:
    """Where the others have none of a parameter, or have one, it has no say; its neighbours' rows decide."""
    for second, updates, expected in ((UNUSED, [1, 2], AFTER_ONE), (USED, [2, 2], 1 - 2 * (1 - AFTER_ONE))):
        run = run_of(row, 4, node=2, uneven=True)
        run.step(batch(*[USED] * 4))
        pairs = batch(*[second] * 4)
        run.step([*pairs[:3], tuple(array[:0] for array in pairs[3])])
        assert run.buckets[0].updates == updates
        assert weight(run) == pytest.approx(expected, abs=2e-5)
