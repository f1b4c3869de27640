"""Random modules: what is accepted trains as plain torch does, bit for bit, under every row and in every world."""

from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402

from torch_models.networks import check_against_torch, compare  # noqa: E402
from torch_models.random_modules import Net, loss, random_batch, random_module  # noqa: E402
from zerosim.bands import Band  # noqa: E402
from zerosim.schemes import DP, SCHEMES, ZeRO3  # noqa: E402
from zerosim.stages import Stage  # noqa: E402
from zerosim.torch_models.model import from_torch  # noqa: E402
from zerosim.worlds.dry import DryRing  # noqa: E402
from zerosim.worlds.shapes import ShapeModel  # noqa: E402

SEED = 3  # of dropout
DAILY = range(5)
NIGHTLY = range(1000, 1400)
pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def units(module: nn.Module) -> bool:
    return not isinstance(module, (Net, nn.ModuleList))


@cache
def check_all(seed: int, stages: tuple[Stage, ...] = (DP, ZeRO3)) -> str:
    """Everything that is claimed of the module of this seed under these rows; what became of it."""
    module = random_module(seed)
    ranks = 2 + seed % 2
    batch = random_batch(seed, module, ranks)
    try:
        model = from_torch(module, batch, loss, wrap=units, seed=SEED)
    except ValueError as error:
        if not str(error).startswith("TorchModel("):
            raise
        return str(error)
    check_against_torch(random_module(seed), model, batch[:1], loss, seed=SEED)
    schemes = [stage(model, ranks, precision="fp32") for stage in stages]
    for _ in range(2):
        assert len({scheme.step(batch) for scheme in schemes}) == 1
    for band in (Band.PARAMS, Band.EXP_AVG, Band.EXP_AVG_SQ):
        assert len({scheme.flat(band).tobytes() for scheme in schemes}) == 1, band
    again = ZeRO3(model, ranks, precision="fp32", checkpoint=True)
    again.step(batch)
    shapes = ShapeModel(model.shapes())
    for scheme in (*schemes, again):
        dry = scheme.stage(shapes, ranks, scheme.options, ring=DryRing(ranks))
        dry.step(shapes.batch())
        compare(dry.reports[0], scheme.reports[0])
    return "accepted" + "".join(f"; {note}" for note in model.notes)


@pytest.mark.parametrize("seed", DAILY)
def test_random_modules_train_as_torch_does(seed: int) -> None:
    """A module is refused in words, or it trains as torch does, alike under all rows, and the dry world agrees."""
    check_all(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", NIGHTLY)
def test_more_random_modules_train_as_torch_does(seed: int) -> None:
    """As above, of hundreds."""
    check_all(seed, SCHEMES)


def test_most_random_modules_are_accepted() -> None:
    """What is accepted is the better part, and has what there is to have: or the tests above would claim little."""
    assert sum(check_all(seed).startswith("accepted") for seed in DAILY) > len(DAILY) / 2
