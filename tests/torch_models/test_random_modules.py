"""Random modules: what is accepted trains as plain torch does, bit for bit, under every row and in every world."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402
from torch_models.random_modules import Net, loss, random_batch, random_module  # noqa: E402

from zerosim.bands import Band  # noqa: E402
from zerosim.ledger import Report  # noqa: E402
from zerosim.schemes import SCHEMES, ZeRO3  # noqa: E402
from zerosim.torch_models.draws import seed_of  # noqa: E402
from zerosim.torch_models.model import TorchModel, from_torch  # noqa: E402
from zerosim.worlds.dry import DryRing  # noqa: E402
from zerosim.worlds.shapes import ShapeModel  # noqa: E402

SEED = 3  # of dropout
DAILY = range(24)
NIGHTLY = range(1000, 1400)


def units(module: nn.Module) -> bool:
    return not isinstance(module, (Net, nn.ModuleList))


@contextmanager
def drawing(module: nn.Module, model: TorchModel, step: int) -> Iterator[None]:
    """Within the block ``module`` draws what the model's layers draw on rank 0: from a new seed where each begins."""
    starts = {plan.calls.start: number for number, plan in enumerate(model.layering(model.rows).layers)}
    paths = {unit.path for plan in model.layering(model.rows).layers for unit in plan.units}
    calls, depth = -1, 0

    def before(*_: Any) -> None:
        nonlocal calls, depth
        calls, depth = calls + (depth == 0), depth + 1
        if depth == 1 and calls in starts and calls:
            torch.manual_seed(seed_of(SEED, 0, step, 0, starts[calls]))

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    hooks = [module.get_submodule(path).register_forward_pre_hook(before) for path in paths]
    hooks += [module.get_submodule(path).register_forward_hook(after) for path in paths]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(SEED, 0, step, 0, 0))
        yield
    for hook in hooks:
        hook.remove()


def called(module: nn.Module, x: Any) -> Any:
    return module(*(each.clone() for each in x)) if isinstance(x, tuple) else module(x.clone())


def check_against_torch(module: nn.Module, model: TorchModel, batch: Any) -> None:
    """On one rank in fp32 the loss, all gradients and all buffers of two steps are those of the module itself."""
    scheme = ZeRO3(model, 1, precision="fp32")
    [(x, target)] = batch
    for step in range(2):
        theta = model.named(scheme.full_theta())
        for name, each in module.named_parameters():
            each.data.copy_(torch.from_numpy(theta[name]))
            each.grad = None
        with drawing(module, model, step):
            expected = loss(called(module, x), target)
        expected.backward()
        assert scheme.step(batch) == expected.item()
        grads = iter(np.split(scheme.flat(Band.GRADS), np.cumsum(
            [each.numel() for each in (dict(module.named_parameters())[name] for name in theta) if each.requires_grad]
        )[:-1]))  # fmt: skip
        for name in theta:
            own = dict(module.named_parameters())[name]
            if own.requires_grad:
                grad = torch.zeros_like(own) if own.grad is None else own.grad
                assert np.array_equal(next(grads), grad.numpy().reshape(-1)), name
        for bucket in scheme.buckets:
            if Band.BUFFERS in bucket.states:
                names = model.names(bucket.group)
                mine = [dict(module.named_buffers())[name].reshape(-1) for name in names]
                assert np.array_equal(bucket.states[Band.BUFFERS][0], torch.cat(mine).numpy()), names


def compare(dry: Report, simulated: Report) -> None:
    """What was held, computed and sent is the same, byte for byte."""
    assert dry.resident == simulated.resident
    assert dry.peak == simulated.peak
    assert dry.flops == simulated.flops
    assert {key: traffic.sent.tolist()[0] for key, traffic in dry.traffic.items()} == {
        key: traffic.sent.tolist()[0] for key, traffic in simulated.traffic.items()
    }


def check_all(seed: int) -> str:
    """Everything that is claimed of the module of this seed; what became of it."""
    module = random_module(seed)
    ranks = 2 + seed % 2
    batch = random_batch(seed, module, ranks)
    try:
        model = from_torch(module, batch, loss, wrap=units, seed=SEED)
    except ValueError as error:
        assert str(error).startswith("TorchModel(")
        return str(error)
    check_against_torch(random_module(seed), model, batch[:1])
    schemes = [stage(model, ranks, precision="fp32") for stage in SCHEMES]
    for _ in range(2):
        assert len({scheme.step(batch) for scheme in schemes}) == 1
    for band in (Band.PARAMS, Band.EXP_AVG, Band.EXP_AVG_SQ):
        assert len({scheme.flat(band).tobytes() for scheme in schemes}) == 1, band
    again = ZeRO3(model, ranks, precision="fp32", checkpoint=True)
    shapes = ShapeModel(model.shapes())
    for scheme, stage in zip((*schemes, again), (*SCHEMES, ZeRO3), strict=True):
        dry = stage(shapes, ranks, scheme.options, ring=DryRing(ranks))
        dry.step(dry.model.batch())  # type: ignore[attr-defined]
        if scheme is again:
            again.step(batch)
        compare(dry.reports[0], scheme.reports[0])
    return "accepted" + "".join(f"; {note}" for note in model.notes)


@pytest.mark.parametrize("seed", DAILY)
def test_random_modules_train_as_torch_does(seed: int) -> None:
    """A module is refused in words, or it trains as torch does, alike under all rows, and the dry world counts the same."""
    check_all(seed)
