"""What of a torch module is refused, and in which words: never is anything dropped without one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from torch_models.networks import CASES, LENGTH, ROWS, made, model_of, numbers, squared, tokens  # noqa: E402
from zerosim.bands import Band  # noqa: E402
from zerosim.schemes import DP  # noqa: E402
from zerosim.torch_models import demo  # noqa: E402
from zerosim.torch_models.model import TorchModel, from_torch  # noqa: E402
from zerosim.torch_models.profile import measure  # noqa: E402

pytestmark = pytest.mark.usefixtures("as_users_call_it")
X = torch.linspace(-1, 1, ROWS * 3).view(ROWS, 3)


class Does(nn.Module):  # type: ignore[misc]
    """Two layers, and something that is done in the forward to the module, what came in, and what the first gave."""

    def __init__(self, what: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.one, self.two, self.what, self.calls = nn.Linear(3, 3), nn.Linear(3, 3), what, 0
        self.register_buffer("mean", torch.zeros(3))
        self.constant, self.last, self.seen = torch.ones(3), torch.zeros(3), list[int]()

    def forward(self, x: Any) -> Any:
        y = self.one(x)
        z = self.what(self, x, y)
        return self.two(y if z is None else z)


class Idle(nn.Module):  # type: ignore[misc]
    """Has a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.one(x)


def change(name: str, value: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], None]:
    """Sets an attribute of the module to something that depends on what it was and what the first layer gave."""
    return lambda self, x, y: setattr(self, name, value(getattr(self, name), y))


class Stashing(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Keeps a tensor where nobody looks."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.x = x * 2
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy * ctx.x


class Stash(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return Stashing.apply(x)


class Saved(nn.Module):  # type: ignore[misc]
    """Changes in place what its backward needs."""

    def forward(self, x: Any) -> Any:
        y = torch.tanh(x)
        y.add_(1)
        return y


class Hooking(nn.Module):  # type: ignore[misc]
    """Hangs a hook on its parameter in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        self.layer.weight.register_hook(lambda grad: grad * 2)
        return self.layer(x)


class Checkpointing(nn.Module):  # type: ignore[misc]
    """Runs its layer again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def hooked() -> nn.Module:
    module = nn.Linear(3, 3)
    module.weight.register_hook(lambda grad: grad * 2)
    return module


def frozen() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


def integers() -> nn.Module:
    module = nn.Linear(3, 3)
    module.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False)
    return module


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    # A parameter, between the units or within one, however it is written to.
    (
        lambda: Does(lambda self, x, y: self.one.weight.data.clamp_(-1, 1)),
        "overwrites.*parameter one.weight.*optimizer",
    ),
    (lambda: Does(torch.no_grad()(lambda self, x, y: self.two.bias.add_(1))), "overwrites.*the parameter two.bias"),
    (lambda: Does(lambda self, x, y: nn.init.zeros_(self.one.bias)), "overwrites.*the parameter one.bias"),
    (lambda: nn.Sequential(Does(lambda self, x, y: self.one.weight.detach().mul_(2))), "0 overwrites the parameter"),
    (hooked, r"weight has a hook.*register_hook"),
    (lambda: Does(lambda self, x, y: self.one.weight.register_hook(lambda g: 2 * g) and None), "one.weight has a hook"),
    (lambda: nn.Sequential(Hooking()), "0.layer.weight has a hook.*Remove the hook"),
    # What is remembered from call to call, elsewhere than in buffers.
    (lambda: Does(change("calls", lambda calls, y: calls + 1)), "changes calls when it is called again"),
    (lambda: Does(lambda self, x, y: self.seen.append(0)), "changes seen when it is called again"),
    (lambda: Does(lambda self, x, y: y * self.constant.add_(1)), "neither made in the forward nor a buffer"),
    (lambda: Does(lambda self, x, y: y + np.random.default_rng().random()), "draws random numbers otherwise"),
    (lambda: Does(change("mean", lambda mean, y: y.mean(0))), "replaces the buffer mean.*Detach it"),
    (lambda: Does(change("mean", lambda mean, y: torch.zeros(4))), "replaces the buffer mean"),
    # What would be lost, or nobody would see.
    (lambda: Does(lambda self, x, y: checkpoint(self.two, y, use_reentrant=False)), "two runs under hooks for saved"),
    (lambda: nn.Sequential(Checkpointing()), "0 runs under hooks for saved.*pass checkpoint='full'"),
    (lambda: nn.Sequential(nn.Linear(3, 3), Stash()), "keeps 36 B from the forward to the backward elsewhere"),
    (lambda: nn.Sequential(nn.Linear(3, 3), Saved()), "modified by an inplace operation"),
    (lambda: Idle(), "never uses two.weight"),
    (frozen, "nothing that it returns depends on"),
    (lambda: nn.Sequential(nn.Embedding(3, 3, sparse=True)), "sparse=False"),
    # What cannot be.
    (lambda: nn.LazyLinear(3), "weight has no shape yet.*Call the module once"),
    (lambda: nn.Linear(3, 3).double(), "weight is torch.float64.*module.float()"),
    (lambda: nn.Linear(3, 3).half(), "weight is torch.float16.*or to TorchModel compute=.fp16."),
    (lambda: nn.Linear(3, 3, device="meta"), r"is on meta.*measure\(\)"),
    (integers, r"weight is torch\.int8"),
    (lambda: nn.Linear(4, 3), r"Linear failed on inputs float32\[3, 3\]: RuntimeError: mat1 and mat2"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_would_be_lost_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    """A module that does what no rank could do the same, or what training would drop, is refused, and says what."""
    x = torch.zeros(ROWS, 3, dtype=torch.int64) if "sparse" in words else X
    with pytest.raises(ValueError, match=f"(?s)^(TorchModel|partition)\\(.*{words}"):
        TorchModel(make(), x, loss=squared)


def test_normalising_one_row_is_refused_in_words() -> None:
    """Statistics over one row are refused by training and by a measurement alike, and the remedy named."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    words = "Normalising over the rows takes two of them or more"
    with pytest.raises(ValueError, match=words):
        TorchModel(module, X[:1], loss=squared)
    with pytest.raises(ValueError, match=rf"measure\(module\).*\[1, 3\].*{words}"):
        measure(module, X[:1], loss=squared, target=X[:1])
    with pytest.raises(ValueError, match=rf"step\(batch\).*{words}"):
        DP(TorchModel(module, X, loss=squared), 1).step(numbers(1, (1, 3), (1, 3)))


def test_the_example_and_the_module_are_left_alone() -> None:
    """Neither the module nor the example is touched, whatever is done to them; what changes later is not seen."""
    module = nn.Sequential(nn.ReLU(inplace=True), Does(torch.no_grad()(lambda self, x, y: y + self.mean.add_(1))))
    x = X.clone()
    model = TorchModel(module, x, loss=squared)
    assert torch.equal(x, X)
    assert (module[1].mean == 0).all()
    assert not [name for each in module.modules() for name, value in vars(each).items() if "impl" in name and value]
    before = model.initial()
    with torch.no_grad():
        module[1].one.weight.zero_()
    assert np.array_equal(model.initial(), before)


def test_what_is_written_only_later_is_refused_then() -> None:
    """A write that the example did not show stops the step that makes it, and leaves nothing held."""

    class Later(nn.Module):  # type: ignore[misc]
        def __init__(self, how: str) -> None:
            super().__init__()
            self.layer, self.how = nn.Linear(3, 3, bias=False), how

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            if x.sum() > 100:
                if self.how == "parameter":
                    self.layer.weight.data.mul_(2)
                if self.how == "shape":
                    return y * y[y > 0].square().sum()
                if self.how == "input":
                    x.detach().mul_(2)
            return y

    for how, words in (
        ("parameter", "overwrites its parameter 1.layer.weight"),
        ("input", "overwrites what it is given"),
    ):
        module = nn.Sequential(nn.Linear(3, 3), Later(how))
        with torch.no_grad():
            module[0].weight.copy_(torch.eye(3))
            module[0].bias.zero_()
        scheme = DP(TorchModel(module, X, (nn.Linear, Later), loss=squared), 2, precision="fp32")
        scheme.step(numbers(2, (ROWS, 3), (ROWS, 3)))
        before = scheme.full_theta()
        with pytest.raises(RuntimeError, match=words) as raised:
            scheme.step([(np.full((ROWS, 3), 100, np.float32), np.zeros((ROWS, 3), np.float32))] * 2)
        if how == "input":
            assert raised.value.__notes__ == ["In layer 1, on the rows of rank 0."]
        assert scheme.ledger.held[Band.ACTIVATIONS] == 0
        assert np.array_equal(scheme.full_theta(), before)


def test_shapes_that_depend_on_values_are_refused() -> None:
    """What one rank keeps must be as large on the others: rows of one array."""

    class Positive(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            return y * y[y > 0].square().sum()

    module = Positive()
    with torch.no_grad():
        module.layer.weight.copy_(torch.eye(3))
    scheme = DP(TorchModel(module, X, loss=squared), 2)
    x, target = np.ones((ROWS, 3), np.float32), np.zeros((ROWS, 3), np.float32)
    with pytest.raises(ValueError, match="same shapes on every rank"):
        scheme.step([(x * scale, target) for scale in (np.float32(0), np.float32(1))])
    assert scheme.ledger.held[Band.ACTIVATIONS] == 0


def test_what_cannot_be_measured_is_refused() -> None:
    """A module that needs values, or leaves a layer out, is refused, and the reason named."""
    branching = Does(lambda self, x, y: y if x.sum().item() > 0 else -y)
    for module, x, words in (
        (branching, X, r"Does failed on the meta device.*\.item\(\)"),
        (nn.Sequential(Idle(), nn.ReLU()), X, "never calls 0.two"),
        (nn.Linear(3, 3), 3, "at least one tensor"),
    ):
        with pytest.raises(ValueError, match=rf"(?s){words}"):
            measure(module, x, nn.Linear, loss=squared, target=X)


def test_unknown_options_are_refused() -> None:
    """Each option says what it may be."""
    module = nn.Linear(3, 3)
    wrong: dict[str, Any]
    for wrong, words in (
        ({"compute": "fp8"}, "fp32, fp16, bf16; got 'fp8'"),
        ({"checkpoint": "some"}, "none, full, selective; got 'some'"),
        ({"loss": squared, "target": None}, r"measure\(target\): pass an example"),
        ({"loss": lambda y, target: y}, "must return one number"),
    ):
        with pytest.raises(ValueError, match=words):
            measure(module, X, nn.Linear, **{"target": X} | wrong)
    for wrong, words in (
        ({"compute": "fp8"}, "fp32, fp16, bf16; got 'fp8'"),
        ({"checkpoint": "selective"}, "Only measure"),
        ({"seed": -1}, "0 or more"),
        ({"loss": nn.Linear(3, 1)}, "has parameters of its own"),
    ):
        with pytest.raises(ValueError, match=words):
            TorchModel(module, X, **wrong)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module is needed"):
        TorchModel(3, X)


def test_losses_that_are_none_are_refused() -> None:
    """A loss is one number of the outputs alone: no parameter of its own, no random numbers."""
    module = nn.Linear(3, 3)
    for loss, words in (
        (lambda y, target: y, "must return one number"),
        (lambda y, target: target.sum(), "must return one number"),
        (lambda y, target: y.sum() + module.weight.sum(), r"depends on a tensor of shape \[3, 3\] with gradients"),
        (lambda y, target: functional.dropout(y, 0.5).sum(), "draws random numbers"),
    ):
        scheme = DP(TorchModel(module, X, loss=loss), 2)
        with pytest.raises(ValueError, match=words):
            scheme.step(numbers(2, (ROWS, 3), (ROWS, 3)))
        assert scheme.ledger.held[Band.ACTIVATIONS] == 0


def test_examples_that_are_none_are_refused() -> None:
    """An example has tensors, and all of them rows, as many."""
    for inputs, words in (
        (3, "an example of one rank's x"),
        ((X, X[:2]), "same number of rows"),
        ((X, torch.zeros(())), "the first axis of every tensor is the rows"),
    ):
        with pytest.raises(ValueError, match=words):
            TorchModel(nn.Linear(3, 3), inputs, loss=squared)


def test_other_batches_are_refused() -> None:
    """A batch is checked before anything changes."""
    model = model_of(CASES["decoder"])
    x, target = tokens(1, ROWS, LENGTH)[0]
    for batch, error, words in (
        ([(x, target)], ValueError, "2 in all; got 1"),
        ([(x, target), x], ValueError, r"rank 1 needs a pair"),
        ([(x, target), (3, target)], TypeError, "x of rank 1 must be a NumPy array or a torch tensor; got int"),
        ([(x, target), (x, target[:2])], ValueError, r"target of rank 1 needs as many rows"),
        (
            [(x, target), (x[:2], target[:2])],
            ValueError,
            r"x of rank 1 .*\. Pass as many, or uneven=True",
        ),
        ([(x, target), (x, target[:2])], ValueError, r"got shape \[2, \d+\]\.$"),
        ([(x, target), (x.astype(np.int32), target)], ValueError, "must be like that of rank 0"),
        ([(x.astype(np.float64), target)] * 2, TypeError, "booleans or float32; got float64"),
        ([(x.astype(np.float32), target)] * 2, ValueError, "x must be integers"),
        ([(x[:, :4], target)] * 2, ValueError, rf"of shape \[B, {LENGTH}\]"),
        ([((x, x), target)] * 2, ValueError, "must be what the example was: 1 tensors in order; got 2"),
        ([(np.ma.masked_array(x), target)] * 2, TypeError, "masked array, and its mask would be ignored"),
    ):
        with pytest.raises(error, match=words):
            model.check(batch, 2)
    tied = model_of(CASES["tied"])
    with pytest.raises(ValueError, match="of 0 to 9; got 0 to 10"):
        tied.check([(np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 11, target)], 1)
    nan = np.full((ROWS, 5), np.nan, np.float32)
    with pytest.raises(ValueError, match="x of rank 0 must be finite; it has 15"):
        model_of(CASES["normalised"]).check([(nan, nan)], 1)
    with pytest.raises(ValueError, match="more than length=600 bytes"):
        list(demo.batches(1, 1, length=600))
    with pytest.raises(ValueError, match=r"a pair \(x, target\)"):
        from_torch(made(CASES["tied"]), [x])


class OwnSlope(nn.Module):  # type: ignore[misc]
    """Adds the slope of its layer at an input that it makes require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        y = self.layer(x.requires_grad_())
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def test_gradients_of_an_input_are_refused() -> None:
    """Nobody would take them; in words, not by what is left in the ledger."""
    with pytest.raises(ValueError, match=r"OwnSlope would not train .* as of an input after requires_grad_\(\)"):
        TorchModel(OwnSlope(), X, loss=squared)


def test_a_loss_that_cannot_take_the_output_is_named() -> None:
    """With the shapes that it was given; the loss that is advised takes them."""
    batch = numbers(2, (ROWS, 3), (ROWS, 3))
    scheme = DP(from_torch(nn.Linear(3, 3), batch), 2)
    with pytest.raises(ValueError, match=rf"^TorchModel\(loss\): cross_entropy failed .* float32\[{ROWS}, 3\]"):
        scheme.step(batch)
    advised = functional.mse_loss
    assert DP(from_torch(nn.Linear(3, 3), batch, loss=advised), 2).step(batch) > 0
