"""What happens between units: it takes effect, whatever it is, and layers are no larger than it needs them to be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from torch_models.networks import ROWS, Containers, check_against_torch, numbers, squared  # noqa: E402
from zerosim.schemes import DP, ZeRO3  # noqa: E402
from zerosim.torch_models.model import TorchModel, from_torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
WIDTH = 8


class Net(nn.Module):  # type: ignore[misc]
    """Three layers, called as its function says."""

    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.relu, self.how = nn.ReLU(inplace=True), forward
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.mask = torch.ones(WIDTH, WIDTH).tril()

    def forward(self, x: Any) -> Any:
        return self.how(self, x)


def written(x: Any) -> Any:
    x[:, :4] = 0
    return x


class Double(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Its gradient is no derivative of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy * 3


def hooked(x: Any) -> Any:
    x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return x


def listed(self: Any, x: Any) -> Any:
    kept: list[Any] = []
    for layer in (self.a, self.b, self.c):
        x = layer(x)
        kept.append(x)
    return torch.stack(kept).mean(0)


CUT: dict[str, tuple[Callable[[Any, Any], Any], list[str] | None]] = {
    # each layer a unit: what is between them is carried
    "glue": (lambda self, x: self.c(torch.relu(self.b(torch.relu(self.a(x))))), ["a", "b", "c"]),
    "before and after": (lambda self, x: self.c(self.b(self.a(2 * x))).tanh(), ["a", "b", "c"]),
    "a residual over units": (lambda self, x: (y := self.a(x)) + self.c(self.b(y)), ["a", "b", "c"]),
    "a value that many use": (listed, ["a", "b", "c"]),
    "in place on what a unit returned": (lambda self, x: self.c(self.b(self.a(x).mul_(2))), ["a", "b", "c"]),
    "an activation in place": (lambda self, x: self.c(torch.relu_(self.b(torch.relu_(self.a(x))))), ["a", "b", "c"]),
    "a part in place": (lambda self, x: self.c(written(self.b(written(self.a(x))))), ["a", "b", "c"]),
    "the input in place": (lambda self, x: self.c(self.b(self.a(x.add_(1)))), ["a", "b", "c"]),
    "a parameter between units": (lambda self, x: self.c(self.b(self.a(x) * self.scale)) * self.scale, ["a", "b", "c"]),
    "another unit's weight": (lambda self, x: self.c(self.b(self.a(x))) @ self.a.weight, ["a", "b", "c"]),
    "a constant": (lambda self, x: self.c(self.b(self.a(x) @ self.mask)), ["a", "b", "c"]),
    "a buffer that counts": (lambda self, x: self.c(self.b(self.a(x) / self.count.add_(1))), ["a", "b", "c"]),
    "a mask made by vmap": (
        lambda self, x: self.c(self.b(self.a(x)) * torch.vmap(lambda i: i + 1.0)(torch.arange(WIDTH))), ["a", "b", "c"],
    ),
    "no gradient": (lambda self, x: self.c(self.b(x).detach() + self.a(x)), ["b", "a", "c"]),
    "shared layers": (lambda self, x: self.a(self.b(self.a(self.c(x)))), ["c", "a", "b", "a (call 2)"]),
    # joined: what is done to one's memory by another it can only do as one with it
    "a unit in place": (lambda self, x: self.c(self.relu(self.b(self.a(x)))), ["a", "b + relu", "c"]),
    "in place, later": (
        lambda self, x: (z := self.a(x), self.b(torch.tanh(z)), z.add_(1))[1] + self.c(z), ["a + b", "c"],
    ),
    "a part of a parameter": (
        lambda self, x: (w := self.scale[:4], self.a(x))[1] + functional.pad(w, (0, 4)) * self.c(self.b(x)), None,
    ),
    # whole: what cannot be done again by a list of operations
    "a hook on a tensor": (lambda self, x: self.c(self.b(hooked(self.a(x)))), ["Net"]),
    "a function of one's own": (lambda self, x: self.c(self.b(Double.apply(self.a(x)))), ["Net"]),
    "values that decide": (
        lambda self, x: self.c(self.a(x) if x.abs().sum() > 0 else self.b(self.a(x))) + self.b(x), ["Net"],
    ),
    "a number": (lambda self, x: self.c(self.b(self.a(x)) * self.a.bias.abs().max().item()), ["Net"]),
    "a gradient": (
        lambda self, x: self.c(self.b(torch.autograd.grad(self.a(z := x.clone().requires_grad_()).sum(), z)[0])),
        ["Net"],
    ),
    "autocast": (
        lambda self, x: torch.autocast("cpu", torch.bfloat16)(lambda: self.c(self.b(self.a(x))))().float(), ["Net"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_whatever_is_between_units_takes_effect(name: str) -> None:
    """Loss and gradients are those of torch, rows agree, and layers are joined or taken whole where they must be."""
    forward, names = CUT[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Net(forward)
    if "scale" not in name and "parameter" not in name:
        del module.scale
    batch = numbers(2, (ROWS, WIDTH), (ROWS, WIDTH))
    model = from_torch(module, batch, squared, wrap=nn.Linear)
    if names is not None:
        assert [layer.name for layer in model.layers] == names
        assert len(model.notes) == sum(" + " in each or each == "Net" for each in names)
    as_tensors = [tuple(map(torch.from_numpy, pair)) for pair in batch]
    check_against_torch(module, model, as_tensors[:1], squared)
    schemes = [stage(model, 2, precision="fp32") for stage in (DP, ZeRO3)]
    assert len({scheme.step(batch) for scheme in schemes}) == 1
    assert len({scheme.full_theta().tobytes() for scheme in schemes}) == 1


def test_notes_say_why() -> None:
    """Each layer that is more than a unit comes with its reason, in words."""
    x = torch.ones(ROWS, WIDTH)

    def notes(name: str) -> str:
        module = Net(CUT[name][0])
        del module.scale
        return "; ".join(TorchModel(module, x, nn.Linear, loss=squared).notes)

    assert notes("glue") == ""
    assert notes("a unit in place") == "b + relu are one unit: the last writes in place to what the first returned"
    assert notes("values that decide") == (
        "Net is one unit as a whole: it goes by the values of tensors (__bool__) between its modules"
    )
    assert notes("a hook on a tensor") == "Net is one unit as a whole: it uses register_hook between its modules"


def test_only_the_smallest_module_is_taken_whole() -> None:
    """What a module inside does is no reason to take those around it whole, too."""
    inner = Net(CUT["values that decide"][0])
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH))
    del inner.scale
    model = TorchModel(module, torch.ones(ROWS, WIDTH), nn.Linear, loss=squared)
    assert [layer.name for layer in model.layers] == ["0", "1", "2"]
    assert model.notes == ("1 is one unit as a whole: it goes by the values of tensors (__bool__) between its modules",)


def test_parameters_around_units_train() -> None:
    """What a module around the units holds is trained with the layers that use it."""
    model = TorchModel(Containers(), torch.ones(ROWS, 3), nn.Sequential, loss=squared)
    scheme = ZeRO3(model, 2)
    before = model.named(scheme.full_theta())["scale"].copy()
    scheme.step(numbers(2, (ROWS, 3), (ROWS, 3)))
    assert not np.array_equal(model.named(scheme.full_theta())["scale"], before)


class Cache:
    """What a language model hands from block to block beside its tensors."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class Caching(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching.Block() for _ in range(2))

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any, cache: Cache) -> Any:
            cache.seen.append(x)
            return self.layer(sum(cache.seen))

    def forward(self, x: Any) -> Any:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Last(nn.Module):  # type: ignore[misc]
    """The first output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x.view(-1, 2, WIDTH // 2))[0].flatten(1)


class Attending(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH // 2, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        x = x.view(-1, 2, WIDTH // 2)
        return self.layer(x, x, x)[0].flatten(1)


STOCK: dict[str, Callable[[], nn.Module]] = {
    "a cache that is handed on": Caching,
    "LSTM": lambda: Last(nn.LSTM(WIDTH // 2, WIDTH // 2, batch_first=True)),
    "attention": Attending,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "a forward hook": lambda: _with_hook(nn.Linear(WIDTH, WIDTH)),
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (4, 2)), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 8)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3), nn.Flatten(), nn.GELU()),
    "batch norm, cumulative": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)),
    "a transformer's layer": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Flatten()
    ),
}


def _with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    module.register_forward_hook(lambda _, given, out: out.tanh())
    return module


@pytest.mark.parametrize("name", STOCK)
def test_what_torch_brings_trains(name: str) -> None:
    """Recurrent layers, attention, norms, parametrizations and hooks train as they do in torch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = STOCK[name]()
    x, target = (torch.from_numpy(each) for each in numbers(1, (ROWS, WIDTH), (ROWS, WIDTH))[0])
    model = from_torch(module, (x, target), squared)
    check_against_torch(module, model, [(x, target)], squared)
