"""Dropout: every rank, step and micro-batch has its own, the same in every world and when it is drawn again."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from torch_models.networks import ROWS, check_against_torch, numbers, squared  # noqa: E402
from zerosim.bands import FP32, Band  # noqa: E402
from zerosim.layers import Pass, Turn, owned  # noqa: E402
from zerosim.ledger import Ledger  # noqa: E402
from zerosim.ranks import Ranks, Workspace  # noqa: E402
from zerosim.schemes import DP, SCHEMES, ZeRO3  # noqa: E402
from zerosim.torch_models.draws import seed_of  # noqa: E402
from zerosim.torch_models.model import TorchModel, from_torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
WIDTH = 16


class Dropping(nn.Module):  # type: ignore[misc]
    """Drops within a unit, as a unit, and between units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25))
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return functional.dropout(self.last(self.drop(self.first(x))), 0.1, self.training)


def model(**options: Any) -> TorchModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchModel(Dropping(), torch.ones(ROWS, WIDTH), nn.Linear, loss=squared, **options)


def batch(ranks: int, rows: int = ROWS) -> Any:
    return numbers(ranks, (rows, WIDTH), (rows, WIDTH))


def test_rows_and_checkpoints_draw_the_same() -> None:
    """All rows learn the same bits, and so does a layer that runs its forward again, units or all layers."""
    options: dict[str, Any] = {"accumulate": 2, "sync": "each"}
    one = model()
    runs = [stage(one, 3, **options) for stage in SCHEMES]
    runs += [ZeRO3(one, 3, checkpoint=True, **options), DP(model(checkpoint="full"), 3, **options)]
    for _ in range(2):
        assert len({run.step(batch(3, 2 * ROWS)) for run in runs}) == 1
    assert len({run.full_theta().tobytes() for run in runs[:5]}) == 1


def test_torch_draws_the_same_from_the_same_seeds() -> None:
    """On one rank loss and gradients are those of the module, seeded where each layer begins, at every step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Dropping()
    [(x, target)] = batch(1)
    given = [(torch.from_numpy(x), torch.from_numpy(target))]
    check_against_torch(module, from_torch(module, given, squared, seed=7), given, squared, seed=7)


def test_everyone_draws_something_else() -> None:
    """Ranks, steps, micro-batches, layers and seeds all have masks of their own, and again the same."""
    masks = {
        (seed, rank, step, micro): mask(seed, Turn([rank], step, micro))
        for seed, rank, step, micro in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    }
    assert len(set(masks.values())) == len(masks)
    assert mask(0, Turn([0], 0, 0)) == masks[0, 0, 0, 0]
    assert len({seed_of(*each) for each in np.ndindex(2, 2, 2, 2, 2)}) == 2**5


def mask(seed: int, turn: Turn) -> bytes:
    """What dropout leaves of ones."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    [layer] = TorchModel(module, torch.ones(ROWS, WIDTH), nn.Sequential, loss=squared, seed=seed).layers
    work = Workspace(Ranks([0], {Band.ACTIVATIONS: FP32}, Ledger(1), np.empty), Band.ACTIVATIONS)
    flats = [np.ones((1, group.size), np.float32) for group in layer.groups]
    y, _ = layer.forward(np.ones((1, ROWS, WIDTH), np.float32), Pass(flats[0], work, turn=turn))
    return bytes(owned(y)[0] != 0)


def test_the_callers_generator_is_left_alone() -> None:
    """Training neither depends on torch's global generator nor moves it."""
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        losses.append(ZeRO3(model(), 2).step(batch(2)))
        assert torch.equal(state, torch.get_rng_state())
    assert losses[0] == losses[1]


def test_evaluation_drops_nothing() -> None:
    """A module in evaluation mode is trained without dropout, whatever the seed."""
    losses = set()
    for seed in (1, 2):
        made = Dropping().eval()
        with torch.no_grad():
            for each in made.parameters():
                each.fill_(0.1)
        losses.add(DP(TorchModel(made, torch.ones(ROWS, WIDTH), loss=squared, seed=seed), 2).step(batch(2)))
    assert len(losses) == 1
