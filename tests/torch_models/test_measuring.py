"""Torch modules measured without values: what each layer keeps, gives and costs."""

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from torch_models.networks import (  # noqa: E402
    CASES,
    HEADS,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Containers,
    decoder,
    made,
    nbytes,
    shapes_of,
    squared,
    unit_of,
)
from zerosim.bands import Band  # noqa: E402
from zerosim.schemes import SCHEMES  # noqa: E402
from zerosim.torch_models import demo, meta_run  # noqa: E402
from zerosim.torch_models.intercept import intercepted  # noqa: E402
from zerosim.torch_models.losses import cross_entropy  # noqa: E402
from zerosim.torch_models.op_counters import Flops  # noqa: E402
from zerosim.torch_models.profile import measure  # noqa: E402
from zerosim.torch_models.units import partition  # noqa: E402
from zerosim.worlds.dry import DryRing  # noqa: E402
from zerosim.worlds.model_shapes import Tensor  # noqa: E402
from zerosim.worlds.shapes import ShapeModel  # noqa: E402

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def test_what_a_block_keeps() -> None:
    """Per position: means and deviations, what each product takes and gives, and attention's sums; no scores."""
    shapes = shapes_of(CASES["decoder"], compute="fp32")
    positions = ROWS * LENGTH
    norms = 4 + WIDTH  # of the first; the second also keeps what it normalises
    attention = WIDTH + 3 * WIDTH + WIDTH + HEADS  # into the product, out of it, what is seen, and log-sums
    mlp = WIDTH + 4 * WIDTH + 4 * WIDTH  # into up, out of it, and after the activation function
    assert nbytes(unit_of(shapes, "blocks.0").saved) == 4 * positions * (norms + attention + mlp)
    assert unit_of(shapes, "embedding").saved == ()
    assert unit_of(shapes, "head").saved == ()  # its input, and its weight
    assert unit_of(shapes, "head").outputs == (Tensor((ROWS, LENGTH, VOCABULARY), "float32"),)


def test_views_of_one_storage_are_kept_once() -> None:
    """Two halves of one product that are both saved are one storage, kept whole."""

    class Gated(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(5, 14)

        def forward(self, x: Any) -> Any:
            value, gate = self.both(x).chunk(2, dim=-1)
            return value * gate

    shapes = measure(
        nn.Sequential(nn.Linear(3, 5), Gated()), torch.zeros(ROWS, 3), (nn.Linear, Gated),
        compute="bf16", loss=squared, target=torch.zeros(ROWS, 7),
    )  # fmt: skip
    assert unit_of(shapes, "1").saved == (Tensor((ROWS * 14,), "bfloat16"),)


def test_the_loss_is_measured() -> None:
    """Cross entropy keeps the log-probabilities in fp32 and a weight; the logits in fp32 are gone after it."""
    loss = shapes_of(CASES["decoder"], compute="bf16").loss
    logits = ROWS * LENGTH * VOCABULARY
    assert nbytes(loss.saved) == 4 * logits + 4
    assert loss.forward_temporaries == 4 * logits + 4  # and the loss itself
    assert loss.backward_temporaries > 0


def test_flops_are_those_of_torchs_counter() -> None:
    """The FLOPs of all units are what torch's own counter counts of the module as a whole."""
    case = CASES["decoder"]
    shapes, module = shapes_of(case, compute="fp32"), made(case)
    [(x, target)] = case.batch(1)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(target)).backward()
    attention = (2 + 5) * 2 * ROWS * HEADS * LENGTH * LENGTH * (WIDTH // HEADS)  # which it does not know on a CPU
    assert shapes.flops == counter.get_total_flops() + attention


def test_equal_units_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of units that do the same only the first has a backward; one that differs in a flag alone has its own."""

    class Either(nn.Module):  # type: ignore[misc]
        def __init__(self, smooth: bool) -> None:
            super().__init__()
            self.layer, self.smooth = nn.Linear(5, 5), smooth

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            return functional.softplus(y) if self.smooth else torch.tanh(y)

    runs = []
    once = meta_run._cost

    def counted(*args: Any) -> Any:
        runs.append(args)
        return once(*args)

    monkeypatch.setattr(meta_run, "_cost", counted)
    module = nn.Sequential(nn.Linear(5, 5), *(Either(smooth) for smooth in (False, False, True, False, True)))
    shapes = measure(
        module, torch.zeros(ROWS, 5), (Either, nn.Linear), compute="fp32", loss=squared, target=torch.zeros(ROWS, 5)
    )
    assert len(runs) == 1 + 2 + 1  # the first layer, either kind, and the loss
    assert [nbytes(unit.saved) for unit in shapes.units[1:]] == [0, 0, ROWS * 5 * 4, 0, ROWS * 5 * 4]


def test_layers_are_alike_whatever_number_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a function of their own that has arguments filled in, called with their number, are run once; one
    whose function has another argument, or that is called with another size, is run too."""

    class Told(nn.Module):  # type: ignore[misc]
        def __init__(self, approximate: str) -> None:
            super().__init__()
            self.layer, self.act = nn.Linear(5, 5), partial(functional.gelu, approximate=approximate)

        def forward(self, x: Any, layer_idx: int, times: int) -> Any:
            assert layer_idx >= 0
            return self.act(self.layer(x).repeat(times, 1)).sum(0, keepdim=True).expand_as(x)

    class Telling(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Told(kind) for kind in ("tanh", "tanh", "tanh", "none", "tanh"))

        def forward(self, x: Any) -> Any:
            for index, layer in enumerate(self.layers):
                x = layer(x, index, 2 if index == 4 else 3)
            return x

    ran, once = [], meta_run.Run._measured

    def counted(run: Any, unit: Any, *args: Any) -> Any:
        ran.append(unit.name)
        return once(run, unit, *args)

    monkeypatch.setattr(meta_run.Run, "_measured", counted)
    measure(Telling(), torch.zeros(ROWS, 5), Told, compute="fp32", loss=squared, target=torch.zeros(ROWS, 5))
    assert ran == ["layers.0", "layers.1", "layers.3", "layers.4"]  # the first one's input needs no gradient


class Rotating(nn.Module):  # type: ignore[misc]
    """Calls its blocks as language models do: keywords, a tuple of what a module without parameters made."""

    class Angles(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequency", torch.ones(7), persistent=False)

        def forward(self, x: Any) -> Any:
            return self.frequency.cos().to(x.dtype), self.frequency.sin().to(x.dtype)

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 7, bias=False)

        def forward(self, x: Any, *, angles: Any, memory: Any = None) -> Any:
            cos, sin = angles
            y = self.layer(x * cos + x * sin)
            return (y if memory is None else y + memory, None)

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.angles, self.norm = nn.Embedding(11, 7), self.Angles(), nn.LayerNorm(7)
        self.places = nn.Embedding(LENGTH, 7)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, tokens: Any, mask: Any = None) -> Any:
        x = self.inside(tokens) + self.places(torch.arange(tokens.shape[1]))
        angles = self.angles(x)
        first, _ = self.blocks[0](x, angles=angles)
        second, _ = self.blocks[1](first, angles=angles)
        third, _ = self.blocks[2](second, angles=angles, memory=first)
        return {"logits": self.norm(third)}


def test_any_signature_can_be_measured() -> None:
    """Keywords, tuples, sums between units and skips over them: each gradient goes where it belongs."""
    given = {"tokens": torch.zeros(ROWS, LENGTH, dtype=torch.int64), "mask": torch.zeros(ROWS, LENGTH)}
    shapes = measure(
        Rotating(), given, Rotating.Block, compute="bf16",
        loss=lambda output, target: squared(output["logits"], target), target=torch.zeros(ROWS, LENGTH, 7),
    )  # fmt: skip
    names = [unit.name for unit in shapes.units]
    assert names == ["inside", "places", "angles", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert [unit.feeds for unit in shapes.units] == [(), (), (), (0, 1), (3,), (3, 4), (5,)]
    assert shapes.loss.feeds == (6,)
    assert shapes.inputs == (Tensor((ROWS, LENGTH), "int64"), Tensor((ROWS, LENGTH), "bfloat16"))
    assert shapes.buffer_bytes == 7 * 4
    assert unit_of(shapes, "angles").outputs == (Tensor((7,), "bfloat16"),) * 2
    wide = 2 * ROWS * LENGTH * 7
    # The places asked for, and the sum that the first block takes and keeps, are no unit's output.
    assert nbytes(unit_of(shapes, "inside").saved) == 8 * LENGTH
    assert nbytes(unit_of(shapes, "angles").saved) + nbytes(unit_of(shapes, "places").saved) == 0
    assert [nbytes(unit_of(shapes, f"blocks.{index}").saved) for index in range(3)] == [wide] * 3
    for stage in SCHEMES:
        scheme = stage(ShapeModel(shapes), 3, ring=DryRing(3))
        scheme.step(scheme.model.batch())  # type: ignore[attr-defined]
        assert scheme.ledger.held[Band.ACTIVATIONS] == 0


def test_what_a_container_holds_is_measured() -> None:
    """A container's own parameters are a unit before the others, and what it passes on is kept with the one before."""
    module = Containers()
    shapes = measure(
        module, torch.zeros(ROWS, 3), lambda each: isinstance(each, nn.Sequential) and each is not module.before,
        compute="bf16", loss=squared, target=torch.zeros(ROWS, 3),
    )  # fmt: skip
    assert [unit.name for unit in shapes.units] == ["Containers", "before", "blocks.0", "blocks.1"]
    assert shapes.n_params == 3 + 3 * (3 * 3 + 3)
    assert shapes.units[0].outputs == shapes.units[0].saved == ()
    assert shapes.units[1].saved == (Tensor((ROWS * 3,), "bfloat16"),)  # the product with the scale
    assert [unit.feeds for unit in shapes.units] == [(), (), (1,), (2,)]
    assert shapes.buffer_bytes == 2 * 8


def test_kernels_are_those_of_a_card() -> None:
    """Dropout keeps a byte for each element, and attention's own keeps nothing: it is drawn again."""

    class Dropping(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            seen = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            return functional.dropout(seen, 0.5)

    shape = (ROWS, HEADS, LENGTH, 7)
    module = nn.Sequential(nn.Linear(7, 7), Dropping())
    shapes = measure(module, torch.zeros(shape), (nn.Linear, Dropping), loss=squared, target=torch.zeros(shape))
    elements = ROWS * HEADS * LENGTH * 7
    # What is seen, in 16 bits, its sums, in 32, and the mask.
    assert nbytes(unit_of(shapes, "1").saved) == 2 * elements + 4 * ROWS * HEADS * LENGTH + elements


def test_products_of_groups_are_counted() -> None:
    """Grouped products, of which a mixture of experts consists, cost what all their rows cost."""
    rows, experts = 32, 4
    with Flops() as flops:
        x, weights = torch.zeros(rows, 16, device="meta"), torch.zeros(experts, 16, 24, device="meta")
        ends = torch.zeros(experts, dtype=torch.int32, device="meta")
        torch._grouped_mm(x.bfloat16(), weights.bfloat16(), offs=ends)
    assert flops.total == 2 * rows * 16 * 24


def test_selective_checkpointing_keeps_every_other_product() -> None:
    """Of four linear layers the first and third keep their results; the rest is computed again, with its FLOPs."""
    plain, selective = (shapes_of(CASES["decoder"], compute="bf16", checkpoint=how) for how in ("none", "selective"))
    before, after = unit_of(plain, "blocks.0"), unit_of(selective, "blocks.0")
    positions = ROWS * LENGTH
    assert nbytes(after.saved) == positions * (2 * (3 * WIDTH + WIDTH + 4 * WIDTH) + 4 * HEADS)  # mixed, seen, up
    assert after.recompute_flops == 2 * positions * (WIDTH * WIDTH + 4 * WIDTH * WIDTH)  # out and down
    assert nbytes(after.saved) + nbytes(after.recomputed) == nbytes(before.saved)
    assert (after.forward_flops, after.backward_flops) == (before.forward_flops, before.backward_flops)
    assert unit_of(selective, "head") == unit_of(plain, "head")


def test_nothing_is_allocated() -> None:
    """A module of a trillion parameters is measured: neither it nor what it computes exists."""
    width = 10**6
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, 1))
    shapes = measure(
        module, torch.empty(10**5, width, device="meta"), nn.Linear, loss=squared,
        target=torch.empty(10**5, 1, device="meta"),
    )  # fmt: skip
    assert shapes.n_params == width**2 + width + 1
    assert shapes.units[0].forward_flops == 2 * 10**5 * width**2
    assert all(each.is_meta for each in module.parameters())


def test_units_are_answered_for_only_within_the_block() -> None:
    """Within the block a unit's calls are answered, even of an instance with its own forward; after it, as before."""
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(ROWS, 3)
    module[1].forward = own = lambda x: 2 * x
    before = module(x)
    with intercepted(module, partition(module, nn.Linear), lambda unit, forward, args, kwargs: -args[0]):
        assert torch.equal(module(x), x)
    assert torch.equal(module(x), before)
    assert "forward" not in vars(module[0])
    assert module[1].forward is own


def test_measuring_leaves_the_module_alone() -> None:
    """The module that is measured keeps its values, its dtype and its forward."""
    module = decoder()
    before = [each.detach().clone() for each in module.parameters()]
    forward = module.blocks[0].forward
    measure(module, torch.zeros(ROWS, LENGTH, dtype=torch.int64), demo.Block)
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))
    assert module.blocks[0].forward == forward
    assert "forward" not in vars(module.blocks[0])
