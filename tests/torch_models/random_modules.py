"""Modules that nobody would write: drawn from a seed, with glue, writes in place, residuals and what else there is.

Owns the generator. A module is a list of instructions that its forward goes through, so that what
happens depends on the seed alone. Every value has the shape [B, WIDTH].
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

WIDTH = 4
Step = tuple[Any, ...]


class Two(nn.Module):  # type: ignore[misc]
    """Takes two tensors and returns two, as a tuple or a mapping."""

    def __init__(self, mapping: bool) -> None:
        super().__init__()
        self.left, self.right, self.mapping = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), mapping

    def forward(self, x: Any, *, beside: Any) -> Any:
        y, z = self.left(x) * torch.sigmoid(beside), self.right(beside)
        return {"y": y, "z": z} if self.mapping else (y, z)


class Inside(nn.Module):  # type: ignore[misc]
    """Does in place, and in views, what one can do there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        y[:, :2] *= 0.5
        y += x
        return functional.relu_(y)


class Tracking(nn.Module):  # type: ignore[misc]
    """Has a buffer that it writes to, or assigns anew, and reads."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.layer, self.anew = nn.Linear(WIDTH, WIDTH), anew
        self.register_buffer("mean", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        if self.anew:
            y = y * self.mean
            self.mean: Any = 0.75 * self.mean + 0.25 * y.detach().mean(0)
            return y
        with torch.no_grad():
            self.mean.mul_(0.75).add_(y.mean(0), alpha=0.25)
        return y - self.mean.clone()


class Twice(nn.Module):  # type: ignore[misc]
    """Reads its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.layer(torch.tanh(self.layer(x)))


class Penalised(nn.Module):  # type: ignore[misc]
    """Takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = torch.tanh(self.layer(x))
        [slope] = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


UNITS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Tanh(),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Dropout(0.25),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)),
    lambda: Inside(),
    lambda: Tracking(False),
    lambda: Tracking(True),
    lambda: Twice(),
    lambda: Penalised(),
]

GLUE: dict[str, Callable[..., Any]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "scaled": lambda x: 1.5 * x,
    "reciprocal": lambda x: 1 / (2 + x * x),
    "turned": lambda x: x.t().contiguous().t(),
    "rolled": lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
    "viewed": lambda x: x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(x.shape),
    "stretched": lambda x: x[:, :1].expand(-1, WIDTH),
    "sorted": lambda x: x.sort(1).values,
    "dropped": lambda x: functional.dropout(x, 0.25),
    "detached": lambda x: x.detach(),
    "placed": lambda x: x + torch.arange(WIDTH, dtype=x.dtype),
    "masked": lambda x: torch.where(x > 0, x, 0.5 * x),
    "chunked": lambda x: torch.cat([part * (place + 1) for place, part in enumerate(x.chunk(2, 1))], 1),
    "quiet": torch.no_grad()(lambda x: x * 2),
    "centred": lambda x: x - x.mean(0, keepdim=True),
}
PAIRS: dict[str, Callable[..., Any]] = {
    "added": lambda x, y: x + y,
    "multiplied": lambda x, y: x * y,
    "woven": lambda x, y: torch.cat([x, y], 1)[:, ::2],
    "stacked": lambda x, y: torch.stack([x, y]).sum(0),
    "gated": lambda x, y: torch.lerp(x, y, 0.25),
}


def write(x: Any, y: Any, how: str) -> Any:
    """Change x in place; return something that reads it."""
    if how == "mul_":
        return x.mul_(0.5)
    if how == "add_":
        return x.add_(y)
    if how == "relu_":
        return torch.relu_(x)
    if how == "part":
        x[:, :2] = 0
    if how == "view":
        x.view(-1).mul_(0.5)
    if how == "copy":
        x[:, 1].copy_(y[:, 2])
    if how == "data":
        x.data.clamp_(-1, 1)
    return x


WRITES = ["mul_", "add_", "relu_", "part", "view", "copy", "data"]


class Net(nn.Module):  # type: ignore[misc]
    """Goes through its instructions; ``children`` are units or nets like it."""

    def __init__(self, parts: list[nn.Module], steps: list[Step], inputs: int, outputs: int, mapping: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.parts, self.steps, self.outputs, self.mapping = nn.ModuleList(parts), steps, outputs, mapping
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Any, beside: Any = None) -> Any:
        values = [x] if beside is None else [x, beside]
        for kind, *rest in self.steps:
            made = getattr(self, f"_{kind}")(values, *rest)
            values += made if isinstance(made, list) else [made]
        found = values[-self.outputs :]
        if self.mapping:
            return {f"y{number}": value for number, value in enumerate(found)}
        return found[0] if self.outputs == 1 else tuple(found)

    def _call(self, values: list[Any], part: int, at: int) -> Any:
        return self.parts[part](values[at])

    def _two(self, values: list[Any], part: int, at: int, beside: int) -> Any:
        found = self.parts[part](values[at], beside=values[beside])
        return list(found.values()) if isinstance(found, dict) else list(found)

    def _glue(self, values: list[Any], name: str, at: int) -> Any:
        return GLUE[name](values[at])

    def _pair(self, values: list[Any], name: str, one: int, other: int) -> Any:
        return PAIRS[name](values[one], values[other])

    def _write(self, values: list[Any], how: str, at: int, other: int) -> Any:
        return write(values[at], values[other], how)

    def _scaled(self, values: list[Any], at: int) -> Any:
        return values[at] * self.scale

    def _counted(self, values: list[Any], at: int) -> Any:
        self.seen += 1
        return values[at] / self.seen.clone()

    def _averaged(self, values: list[Any], at: int) -> Any:
        y = values[at] - self.average
        self.average: Any = 0.5 * self.average + 0.5 * values[at].detach().mean(0)
        return y

    def _borrowed(self, values: list[Any], part: int, at: int) -> Any:
        own = next(iter(self.parts[part].parameters()), self.scale)
        return values[at] + own.sum()

    def _hooked(self, values: list[Any], at: int) -> Any:
        y = values[at] * 1.25
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return y


def random_module(seed: int, depth: int = 1) -> nn.Module:
    """The module of this seed, its weights drawn from it as well."""
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _net(rng, depth, inputs=int(rng.integers(1, 3)), outer=True)
        for each in net.parameters():
            if rng.random() < 0.1:
                each.requires_grad_(False)
    return net


def _net(rng: Any, depth: int, inputs: int, *, outer: bool) -> nn.Module:
    parts: list[nn.Module] = []
    takes_two: list[bool] = []
    for _ in range(int(rng.integers(2, 5))):
        chance = rng.random()
        takes_two.append(chance < 0.2)
        if chance < 0.2:
            parts.append(Two(bool(rng.integers(2))))
        elif chance < 0.35 and depth:
            parts.append(_net(rng, depth - 1, 1, outer=False))
        else:
            parts.append(UNITS[int(rng.integers(len(UNITS)))]())
    steps: list[Step] = []
    count = inputs

    def some() -> int:
        """A value, most often a late one."""
        return int(max(0, count - 1 - rng.geometric(0.5) + 1))

    todo = [*range(len(parts)), *(int(each) for each in rng.integers(0, len(parts), int(rng.integers(0, 2))))]
    rng.shuffle(todo)
    while todo:
        chance = rng.random()
        if chance < 0.4:
            part = todo.pop()
            steps.append(("two", part, some(), some()) if takes_two[part] else ("call", part, some()))
            count += 2 if takes_two[part] else 1
            continue
        if chance < 0.6:
            steps.append(("glue", list(GLUE)[int(rng.integers(len(GLUE)))], some()))
        elif chance < 0.75:
            steps.append(("pair", list(PAIRS)[int(rng.integers(len(PAIRS)))], some(), some()))
        elif chance < 0.85:
            steps.append(("write", WRITES[int(rng.integers(len(WRITES)))], some(), some()))
        else:
            kind = ["scaled", "counted", "averaged", "borrowed", "hooked"][int(rng.integers(5))]
            steps.append((kind, int(rng.integers(len(parts))), some()) if kind == "borrowed" else (kind, some()))
        count += 1
    steps.append(("scaled", some()))
    return Net(parts, steps, inputs, int(rng.integers(1, 3)) if outer else 1, bool(rng.integers(2)) and outer)


def loss(output: Any, target: Any) -> Any:
    """Squares of all outputs against one target."""
    found = list(output.values()) if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return sum(functional.mse_loss(each, target) for each in found)


def random_batch(seed: int, module: nn.Module, ranks: int, rows: int = 3) -> list[tuple[Any, Any]]:
    """One (x, target) per rank: x is one tensor, or several, as the module takes them."""
    rng = np.random.default_rng([seed, 1])
    batch = []
    for _ in range(ranks):
        x, y, target = (torch.from_numpy(rng.standard_normal((rows, WIDTH)).astype(np.float32)) for _ in range(3))
        batch.append(((x, y) if module.inputs == 2 else x, target))
    return batch
