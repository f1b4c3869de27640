"""Modules, batches and cases that several files of tests train or measure.

Owns no claim.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from zerosim.bands import Band
from zerosim.counts import Report
from zerosim.schemes import ZeRO3
from zerosim.torch_models import demo
from zerosim.torch_models.draws import seed_of
from zerosim.torch_models.losses import cross_entropy
from zerosim.torch_models.model import TorchModel
from zerosim.torch_models.profile import measure
from zerosim.worlds.model_shapes import ModelShapes, Tensor, UnitShapes

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY = 3, 5, 14, 2, 256
Batch = list[tuple[Any, Any]]


def squared(output: Any, target: Any) -> Any:
    return functional.mse_loss(output.float(), target)


def tokens(ranks: int, *shape: int, below: int = VOCABULARY, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, below, shape), rng.integers(0, below, shape)) for _ in range(ranks)]


def numbers(ranks: int, x: tuple[int, ...], y: tuple[int, ...], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal(x).astype(np.float32), rng.standard_normal(y).astype(np.float32)) for _ in range(ranks)
    ]


class Tied(nn.Module):  # type: ignore[misc]
    """Vocabulary 10, width 4, one 4 x 4 layer, and the embedding's weight again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(10, 4), nn.Linear(4, 4, False), nn.Linear(4, 10, False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(self.embedding(x)))


def frozen_base() -> nn.Module:
    """8 trainable parameters, then 1000 frozen ones."""
    module = nn.Sequential(nn.Linear(1, 8, bias=False), nn.Linear(8, 125, bias=False))
    module[1].requires_grad_(False)
    return module


def partly_frozen() -> nn.Module:
    """Units of which the first trains nothing and the last something."""
    module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    module[0].requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


def normalised() -> nn.Module:
    """Running statistics: buffers that the forward pass writes to."""
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def pooled() -> nn.Module:
    """What is kept for the backward includes integers and truth values."""

    class Clipped(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.where(x > 0, x, 0.5 * x)

    return nn.Sequential(nn.Conv1d(2, 3, 3), Clipped(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(3 * 5, 3))


def repeated() -> nn.Module:
    """One layer called twice: two units with the same parameters."""
    again = nn.Linear(5, 5)
    return nn.Sequential(again, nn.Tanh(), again, nn.Linear(5, 3))


def decoder() -> nn.Module:
    return demo.Decoder(length=LENGTH, width=WIDTH, heads=HEADS, blocks=1)


class Case(NamedTuple):
    """A module, what makes its units, its loss, and a batch for so many ranks."""

    make: Callable[[], nn.Module]
    wrap: Any
    loss: Any
    batch: Callable[[int], Batch]


CASES = {
    "decoder": Case(decoder, demo.Block, cross_entropy, lambda n: tokens(n, ROWS, LENGTH)),
    "tied": Case(Tied, nn.Linear, cross_entropy, lambda n: tokens(n, ROWS, LENGTH, below=10)),
    "frozen base": Case(frozen_base, nn.Linear, squared, lambda n: numbers(n, (ROWS, 1), (ROWS, 125))),
    "partly frozen": Case(partly_frozen, nn.Linear, squared, lambda n: numbers(n, (ROWS, 5), (ROWS, 3))),
    "normalised": Case(normalised, nn.Linear, squared, lambda n: numbers(n, (ROWS, 5), (ROWS, 3))),
    "repeated": Case(repeated, nn.Linear, squared, lambda n: numbers(n, (ROWS, 5), (ROWS, 3))),
    "pooled": Case(pooled, nn.Linear, squared, lambda n: numbers(n, (ROWS, 2, 12), (ROWS, 3))),
}

NORMALISING = ("decoder", "normalised")  # torch's normalisations in 16 bits differ by device


def example(case: Case) -> Any:
    return torch.from_numpy(case.batch(1)[0][0])


def made(case: Case) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return case.make()


def model_of(case: Case, **options: Any) -> TorchModel:
    options.setdefault("target", case.batch(1)[0][1])
    return TorchModel(made(case), example(case), case.wrap, loss=case.loss, **options)


def shapes_of(case: Case, **options: Any) -> ModelShapes:
    target = torch.from_numpy(case.batch(1)[0][1])
    return measure(made(case), example(case), case.wrap, loss=case.loss, target=target, **options)


class Containers(nn.Module):  # type: ignore[misc]
    """Blocks within a list within a module that has a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.zeros(2, dtype=torch.int64))
        self.before = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Tanh()) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = self.before(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def compare(dry: Report, simulated: Report) -> None:
    assert dry.resident == simulated.resident
    assert dry.peak == simulated.peak
    assert dry.peak_without_activations == simulated.peak_without_activations
    assert dry.flops == simulated.flops
    sent = {name: counts[0] for name, counts in dry.sent_by_collective().items()}
    assert {name: set(counts) for name, counts in simulated.sent_by_collective().items()} == {
        name: {count} for name, count in sent.items()
    }


def unit_of(shapes: ModelShapes, name: str) -> UnitShapes:
    [unit] = [unit for unit in shapes.units if unit.name == name]
    return unit


def nbytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(each.nbytes for each in tensors)


class Skipping(nn.Module):  # type: ignore[misc]
    """Two inputs, and two outputs to which several layers add up."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Any, beside: Any) -> Any:
        a = self.one(x)
        b = self.two(torch.relu(a)) + torch.cat([a[:, 2:], beside[:, :2]], 1)
        c = self.three(b * a) + a
        return {"sum": a + b + c, "last": c.tanh()}


# -- what torch does


@contextmanager
def drawing(module: nn.Module, model: TorchModel, step: int, seed: int) -> Iterator[None]:
    """Within the block ``module`` draws what the model's layers draw on rank 0: from a new seed where each begins."""
    starts = {plan.calls.start: number for number, plan in enumerate(model.layering(model.rows).layers)}
    paths = {unit.path for plan in model.layering(model.rows).layers for unit in plan.units}
    calls, depth = -1, 0

    def before(*_: Any) -> None:
        nonlocal calls, depth
        calls, depth = calls + (depth == 0), depth + 1
        if depth == 1 and calls in starts and calls:
            torch.manual_seed(seed_of(seed, 0, step, 0, starts[calls]))

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    hooks = [module.get_submodule(path).register_forward_pre_hook(before) for path in paths]
    hooks += [module.get_submodule(path).register_forward_hook(after) for path in paths]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, 0, step, 0, 0))
        yield
    for hook in hooks:
        hook.remove()


def called(module: nn.Module, x: Any) -> Any:
    return module(*(each.clone() for each in x)) if isinstance(x, tuple) else module(x.clone())


def check_against_torch(module: nn.Module, model: TorchModel, batch: Any, loss: Any, seed: int = 0) -> None:
    """On one rank in fp32 the loss, all gradients and all buffers of two steps are those of the module itself."""
    scheme = ZeRO3(model, 1, precision="fp32")
    [(x, target)] = batch
    for step in range(2):
        theta = model.named(scheme.full_theta())
        for name, each in module.named_parameters():
            each.data.copy_(torch.from_numpy(theta[name]))
            each.grad = None
        with drawing(module, model, step, seed):
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
