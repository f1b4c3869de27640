"""Torch modules as models: measured without values, and trained with torch's own numerics."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jaxtyping
import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from zerosim.bands import Array, Band  # noqa: E402
from zerosim.layers import Role  # noqa: E402
from zerosim.ledger import Phase, Report  # noqa: E402
from zerosim.optimizer import Adam  # noqa: E402
from zerosim.schemes import DP, SCHEMES, Scheme, ZeRO2, ZeRO3  # noqa: E402
from zerosim.torch_models import demo, meta_run  # noqa: E402
from zerosim.torch_models.intercept import intercepted  # noqa: E402
from zerosim.torch_models.model import TorchModel  # noqa: E402
from zerosim.torch_models.profile import cross_entropy, measure  # noqa: E402
from zerosim.torch_models.op_counters import Flops  # noqa: E402
from zerosim.torch_models.units import partition  # noqa: E402
from zerosim.worlds.dry import DryRing  # noqa: E402
from zerosim.worlds.shapes import ModelShapes, ShapeModel, Tensor, UnitShapes  # noqa: E402

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY = 3, 5, 14, 2, 256
Batch = list[tuple[Array, Array]]


@pytest.fixture
def shapes_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of many steps, of which the shape checks would be the better part; the others keep them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


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
    return TorchModel(made(case), example(case), case.wrap, loss=case.loss, **options)


def shapes_of(case: Case, **options: Any) -> ModelShapes:
    target = torch.from_numpy(case.batch(1)[0][1])
    return measure(made(case), example(case), case.wrap, loss=case.loss, target=target, **options)


# -- units


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


def test_the_outermost_match_is_the_unit() -> None:
    """A match within a match is part of it; the rest falls to the highest modules without one, and to containers."""
    module = Containers()
    units = partition(module, lambda each: isinstance(each, nn.Sequential) and each is not module.before)
    assert [(unit.name, unit.matched, unit.container) for unit in units] == [
        ("Containers", False, True),
        ("before", False, False),
        ("blocks.0", True, False),
        ("blocks.1", True, False),
    ]
    assert [part.names for part in units[0].parts] == [("scale",), ("offset",)]
    assert [part.group.name for part in units[0].parts] == ["Containers", "Containers buffers int64"]


def test_tied_parameters_are_one_group() -> None:
    """Units that share a parameter list the same group, whatever else each has, and it counts once."""
    module = Tied()
    module.head.bias = nn.Parameter(torch.zeros(10))
    embedding, layer, head = partition(module, nn.Linear)
    [shared] = embedding.groups
    assert head.groups[1] is shared
    assert (shared.name, shared.size, head.groups[0].name) == ("embedding + head", 40, "head")
    assert layer.groups[0].size == 16


def test_frozen_parameters_and_buffers_are_groups_apart() -> None:
    """Parameters that are not trained, and buffers of each dtype, are groups beside the unit's trainable one."""
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    module[0].weight.requires_grad_(False)
    units = partition(module, nn.Sequential)
    assert [(group.name, group.size, group.role, group.dtype) for group in units[0].groups] == [
        ("Sequential", 5 + 2 * 5, Role.TRAINABLE, None),
        ("Sequential frozen", 15, Role.FROZEN, None),
        ("Sequential buffers float32", 2 * 5, Role.BUFFER, np.dtype(np.float32)),
        ("Sequential buffers int64", 1, Role.BUFFER, np.dtype(np.int64)),
    ]


@pytest.mark.usefixtures("shapes_unchecked")
def test_wrap_rules_that_make_no_units_are_refused() -> None:
    """A rule that matches nothing, and what is no rule, is an error that says what would be one."""
    with pytest.raises(ValueError, match=r"matches no module of Tied.*Embedding, Linear"):
        partition(Tied(), nn.Conv1d)
    for wrong in ("Linear", 3, int, [nn.Linear, 3], ()):
        with pytest.raises(TypeError, match="a class of modules"):
            partition(Tied(), wrong)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        partition(3, nn.Linear)
    module = nn.Linear(3, 5)
    module.weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"weight of Linear is torch\.int8"):
        partition(module, nn.Linear)


# -- the numeric world


def states(scheme: Scheme, rank: int) -> dict[str, list[bytes]]:
    bands = (Band.PARAMS, Band.MASTER, Band.EXP_AVG, Band.EXP_AVG_SQ)
    return {band: [each.tobytes() for each in scheme.ranks[rank][band]] for band in bands}


def differing(scheme: Scheme, reference: Scheme) -> list[tuple[str, int, int]]:
    """Band, bucket and rank wherever the bits are not those of the reference's rank 0, which has all of them."""
    found = []
    whole = states(reference, 0)
    for rank in range(len(scheme.ranks)):
        for band, mine in states(scheme, rank).items():
            for index, (state, all_of_it) in enumerate(zip(mine, whole[band], strict=True)):
                start = rank * len(state) if len(state) < len(all_of_it) else 0
                if state != all_of_it[start : start + len(state)]:
                    found.append((band, index, rank))
    return found


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("ranks", "precision", "compute"), [*((ranks, "mixed", "fp32") for ranks in (2, 3, 4, 5)), (3, "bf16", "bf16")]
)
def test_a_decoder_is_trained_alike_by_all_schemes(ranks: int, precision: str, compute: str) -> None:
    """A transformer on bytes of text has the same bits under all schemes, in every state, on every rank."""
    model = model_of(CASES["decoder"], compute=compute)
    schemes = [stage(model, ranks, precision=precision) for stage in SCHEMES]
    for batch in demo.batches(3, ranks, rows=ROWS, length=LENGTH):
        assert len({scheme.step(batch) for scheme in schemes}) == 1
    assert [differing(scheme, schemes[0]) for scheme in schemes] == [[]] * len(SCHEMES)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", [name for name in CASES if name != "decoder"])
def test_other_modules_are_trained_alike_by_all_schemes(name: str) -> None:
    """Tied and frozen parameters, buffers and saved integers make no difference between schemes."""
    case, ranks = CASES[name], 3
    schemes = [stage(model_of(case), ranks, precision="fp32") for stage in SCHEMES]
    for _ in range(3):
        assert len({scheme.step(case.batch(ranks)) for scheme in schemes}) == 1
    assert len({scheme.full_theta().tobytes() for scheme in schemes}) == 1
    assert len({scheme.flat(Band.EXP_AVG_SQ).tobytes() for scheme in schemes}) == 1


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_decoder_learns() -> None:
    """On its text the decoder's loss falls from that of guessing, ln 256, by a third in 30 steps."""
    model = demo.demo_model(length=LENGTH, width=16, heads=HEADS, blocks=1)
    scheme = ZeRO3(model, 2)
    losses = [scheme.step(batch) for batch in demo.batches(30, 2, rows=ROWS, length=LENGTH)]
    assert losses[0] > np.log(VOCABULARY) * 0.95
    assert np.mean(losses[-5:]) < losses[0] * 2 / 3


def parameters_of(module: nn.Module, case: Case) -> list[Any]:
    """The module's parameters in the order of the flat ones: unit by unit, tied ones where they come first."""
    groups: dict[Any, Any] = {}
    for unit in partition(module, case.wrap):
        for part in unit.parts:
            if part.group.role is not Role.BUFFER:
                groups.setdefault(part.group, part.tensors)
    return [tensor for tensors in groups.values() for tensor in tensors]


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_torch(name: str) -> None:
    """On one rank in fp32 loss and gradients are those of the module itself, bit for bit, at every step."""
    case = CASES[name]
    scheme, module = ZeRO3(model_of(case), 1, precision="fp32"), made(case)
    parameters = parameters_of(module, case)
    [(x, target)] = case.batch(1)
    for _ in range(3):
        theta = torch.from_numpy(scheme.full_theta())
        assert theta.numel() == sum(each.numel() for each in parameters)
        for each, values in zip(parameters, theta.split([each.numel() for each in parameters]), strict=True):
            each.data.copy_(values.view(each.shape))
            each.grad = None
        loss = case.loss(module(torch.from_numpy(x)), torch.from_numpy(target))
        loss.backward()
        assert scheme.step([(x, target)]) == loss.item()
        grads = [each.grad.numpy().reshape(-1) for each in parameters if each.requires_grad]
        assert np.array_equal(scheme.flat(Band.GRADS), np.concatenate(grads))


@pytest.mark.usefixtures("shapes_unchecked")
def test_one_rank_learns_what_torch_learns() -> None:
    """After some steps on one rank in fp32 the weights are those of torch.optim.Adam but for rounding.

    With an eps above the rounding of gradients that should be zero, which Adam would blow up to a whole step.
    """
    case = CASES["decoder"]
    scheme, module = ZeRO3(model_of(case), 1, precision="fp32", optimizer=Adam(lr=1e-3, eps=1e-3)), made(case)
    adam = torch.optim.Adam(module.parameters(), lr=1e-3, eps=1e-3, foreach=False)
    [(x, target)] = case.batch(1)
    for _ in range(4):
        adam.zero_grad()
        case.loss(module(torch.from_numpy(x)), torch.from_numpy(target)).backward()
        adam.step()
        scheme.step([(x, target)])
    theirs = np.concatenate([each.detach().numpy().reshape(-1) for each in parameters_of(module, case)])
    np.testing.assert_allclose(scheme.full_theta(), theirs, rtol=1e-4, atol=1e-6)


def test_two_ranks_are_one_batch() -> None:
    """Two ranks with half a batch each come as near to one with all of it as rounding allows."""
    case = CASES["decoder"]
    batch = case.batch(2)
    whole = [tuple(np.concatenate(parts) for parts in zip(*batch, strict=True))]
    two, one = (ZeRO3(model_of(case), ranks, precision="fp32") for ranks in (2, 1))
    assert two.step(batch) == pytest.approx(one.step(whole), rel=1e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(two.flat(Band.GRADS), one.flat(Band.GRADS), rtol=1e-4, atol=1e-7)


def test_ranks_do_not_see_each_other() -> None:
    """Ranks with the same batch have the same gradients, and a rank's do not depend on the others' batches."""
    case = CASES["decoder"]
    [mine], [other] = case.batch(1), tokens(1, ROWS, LENGTH, seed=1)
    losses = []
    for batch in ([mine, mine], [mine, other], [other, mine]):
        x, target = model_of(case).check(batch, 2)
        scheme = DP(model_of(case), 2)
        scheme.step(batch)
        losses.append(scheme.reports[0].loss)
        assert (x.shape, target.shape) == ((2, ROWS, LENGTH),) * 2
    assert losses[1] == losses[2] != losses[0]


def test_buffers_are_written_where_they_are_held() -> None:
    """Each rank's running statistics are those of torch on that rank's batches, in the band, and start as given."""
    case, ranks, steps = CASES["normalised"], 3, 2
    scheme = ZeRO3(model_of(case), ranks)
    batch = case.batch(ranks)
    for band in (scheme.ranks[1][Band.BUFFERS],):
        assert [each.tolist() for each in band] == [[0.0] * 7 + [1.0] * 7, [0]]
    statistics = [made(case) for _ in range(ranks)]
    first = scheme.flat(Band.MASTER)
    assert first.shape == (5 * 7 + 7 + 2 * 7 + 7 * 3 + 3,)
    scheme.step(batch)
    for rank in range(ranks):
        half = statistics[rank]
        for each in half.parameters():
            each.data = each.data.half().float()  # the working copy that forward reads
        half(torch.from_numpy(batch[rank][0]))
        mean_and_variance, count = scheme.ranks[rank][Band.BUFFERS]
        expected = torch.cat([half[1].running_mean, half[1].running_var]).numpy()
        assert np.array_equal(mean_and_variance, expected)
        assert count.tolist() == [1]
    scheme.step(batch)
    assert scheme.ranks[2][Band.BUFFERS][1].tolist() == [steps]


def test_frozen_parameters_stay() -> None:
    """What is frozen is read and gathered, never written, and has no gradients and no optimizer state."""
    case = CASES["partly frozen"]
    module = made(case)
    scheme = ZeRO3(model_of(case), 2, precision="fp32")
    before = scheme.full_theta()
    scheme.step(case.batch(2))
    frozen = 5 * 7 + 7
    assert np.array_equal(scheme.full_theta()[:frozen], before[:frozen])
    assert not np.array_equal(scheme.full_theta(), before)
    assert scheme.flat(Band.EXP_AVG).size == 7 * 11 + 11 + 11 * 3
    assert np.array_equal(before[: 5 * 7], module[0].weight.detach().numpy().reshape(-1))


@pytest.mark.usefixtures("shapes_unchecked")
def test_checkpointing_changes_nothing_but_memory() -> None:
    """Units that run forward again learn the same bits, hold less, and compute more."""
    case, ranks = CASES["decoder"], 2
    kept, again = (ZeRO3(model_of(case, checkpoint=checkpoint), ranks) for checkpoint in ("none", "full"))
    for scheme in (kept, again):
        scheme.step(case.batch(ranks))
    assert differing(again, DP_like(kept)) == []
    assert again.reports[0].peak.by_band[Band.ACTIVATIONS] < kept.reports[0].peak.by_band[Band.ACTIVATIONS]
    assert again.reports[0].flops[Phase.BACKWARD] > kept.reports[0].flops[Phase.BACKWARD]


def DP_like(scheme: Scheme) -> Scheme:  # noqa: N802
    """The same training under data parallel, whose rank 0 holds every state whole."""
    whole = DP(scheme.model, len(scheme.ranks))
    whole.step(CASES["decoder"].batch(len(scheme.ranks)))
    return whole


# -- the dry world


def compare(dry: Report, simulated: Report) -> None:
    assert dry.resident == simulated.resident
    assert dry.peak == simulated.peak
    assert dry.peak_without_activations == simulated.peak_without_activations
    assert dry.flops == simulated.flops
    sent = {name: counts[0] for name, counts in dry.sent_by_collective().items()}
    assert {name: set(counts) for name, counts in simulated.sent_by_collective().items()} == {
        name: {count} for name, count in sent.items()
    }


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize(
    ("name", "precision", "compute"),
    [
        *((name, "mixed", "fp32") for name in CASES),
        *((name, "bf16", "bf16") for name in CASES if name not in NORMALISING),
    ],
)
def test_the_dry_world_counts_what_the_simulator_counts(
    name: str, checkpoint: str, precision: str, compute: str
) -> None:
    """A module measured without values holds, sends and computes, byte for byte, what it does with them."""
    case = CASES[name]
    model = model_of(case, checkpoint=checkpoint, compute=compute)
    shapes = shapes_of(case, checkpoint=checkpoint, compute=compute)
    assert shapes.n_params == model.n_params
    for ranks, stage in enumerate(SCHEMES, start=2):
        simulated, dry = (
            stage(model, ranks, precision=precision),
            stage(ShapeModel(shapes), ranks, precision=precision, ring=DryRing(ranks)),
        )
        simulated.step(case.batch(ranks))
        dry.step(dry.model.batch())  # type: ignore[attr-defined]
        compare(dry.reports[0], simulated.reports[0])


def test_micro_batches_count_the_same() -> None:
    """Measured for one micro-batch, a step of three holds and sends what the simulator's step of three does."""
    case, ranks, accumulate = CASES["tied"], 2, 3
    simulated = ZeRO2(model_of(case), ranks, accumulate=accumulate)
    simulated.step([tuple(np.tile(part, (accumulate, 1)) for part in pair) for pair in case.batch(ranks)])  # type: ignore[misc]
    dry = ZeRO2(ShapeModel(shapes_of(case, compute="fp32")), ranks, accumulate=accumulate, ring=DryRing(ranks))
    dry.step(dry.model.batch(accumulate))  # type: ignore[attr-defined]
    compare(dry.reports[0], simulated.reports[0])


def test_normalisation_in_bf16_differs_by_device() -> None:
    """Beside 16-bit weights torch's CPU keeps a layer norm's two statistics in 16 bits, the other devices in 32."""
    case = CASES["decoder"]
    simulated = DP(model_of(case, compute="bf16"), 2, precision="bf16")
    simulated.step(case.batch(2))
    dry = DP(ShapeModel(shapes_of(case, compute="bf16")), 2, precision="bf16", ring=DryRing(2))
    dry.step(dry.model.batch())  # type: ignore[attr-defined]
    norms, positions = 3, ROWS * LENGTH
    difference = dry.reports[0].peak.total - simulated.reports[0].peak.total
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


# -- what is measured


def unit_of(shapes: ModelShapes, name: str) -> UnitShapes:
    [unit] = [unit for unit in shapes.units if unit.name == name]
    return unit


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


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


# -- what is refused


class Between(nn.Module):  # type: ignore[misc]
    """A function between, before or after its layers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.one, self.two, self.where = nn.Linear(3, 3), nn.Linear(3, 3), where

    def forward(self, x: Any) -> Any:
        x = self.one(2 * x if self.where == "before" else x)
        x = self.two(torch.tanh(x) if self.where == "between" else x)
        return torch.tanh(x) if self.where == "after" else x


class Pair(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Any, y: Any = None) -> Any:
        return (self.layer(x), x) if y is None else self.layer(x) + y


class Twice(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), Pair()

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x), x)


class Idle(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.one(x)


class Branching(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x) if x.sum().item() > 0 else x


class Counting(nn.Module):  # type: ignore[misc]
    """Keeps count of its calls in a buffer, or in something that all its copies share."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        if buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x) * self.calls


class Borrowing(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return functional.linear(self.two(self.one(x)), self.one.weight)


@pytest.mark.parametrize(
    ("module", "wrap", "words"),
    [
        (Between("before"), nn.Linear, "between the input and one"),
        (Between("between"), nn.Linear, "between one and two"),
        (Between("after"), nn.Linear, "what its last unit, two, returned"),
        (Containers(), nn.Sequential, "Containers holds scale, offset itself"),
        (nn.Sequential(Pair(), nn.Linear(3, 3)), Pair, "0 returned tuple"),
        (Twice(), Pair, "two is given 2 tensors"),
        (Idle(), nn.Linear, "never calls two"),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), nn.Linear, r"draws random numbers.*eval\(\)"),
        (Counting(buffer=False), Counting, "returns something else when it is called again"),
        (nn.Linear(3, 3).requires_grad_(False), nn.Linear, "nothing that it returns depends on"),
        (nn.Linear(3, 3, device="meta"), nn.Linear, r"is on meta.*measure\(\)"),
    ],
)
def test_what_is_no_chain_is_refused(module: nn.Module, wrap: Any, words: str) -> None:
    """A module whose units do not follow one another is refused, and the place named."""
    with pytest.raises(ValueError, match=words):
        TorchModel(module, torch.ones(ROWS, 3), wrap, loss=squared)


def test_finding_the_order_of_units_leaves_everything_alone() -> None:
    """A count in a buffer is no obstacle; neither it nor the example is touched, whatever the module does to them."""
    module, example = nn.Sequential(nn.ReLU(inplace=True), Counting(buffer=True)), torch.full((ROWS, 3), -1.0)
    TorchModel(module, example, (nn.ReLU, Counting), loss=squared)
    assert module[1].calls == 0
    assert (example == -1).all()


@pytest.mark.parametrize(
    ("module", "x", "words"),
    [
        (Branching(), torch.zeros(ROWS, 3), r"Branching failed on the meta device.*\.item\(\)"),
        (nn.Sequential(Idle(), nn.ReLU()), torch.zeros(ROWS, 3), "never calls 0.two"),
        (Borrowing(), torch.zeros(ROWS, dtype=torch.int64), "one.weight is read outside the forward pass"),
        (nn.Linear(3, 3), 3, "at least one tensor"),
    ],
)
def test_what_cannot_be_measured_is_refused(module: nn.Module, x: Any, words: str) -> None:
    """A module that needs values, leaves a unit out or reads another's parameters is refused, and the reason named."""
    with pytest.raises(ValueError, match=words):
        measure(module, x, nn.Linear, loss=squared, target=torch.zeros(ROWS, 3))


def test_unknown_options_are_refused() -> None:
    """Each option says what it may be."""
    x, module = torch.zeros(ROWS, 3), nn.Linear(3, 3)
    with pytest.raises(ValueError, match="fp32, fp16, bf16; got 'fp8'"):
        measure(module, x, nn.Linear, compute="fp8")
    with pytest.raises(ValueError, match="none, full, selective; got 'some'"):
        measure(module, x, nn.Linear, checkpoint="some")
    with pytest.raises(ValueError, match=r"measure\(target\): pass an example"):
        measure(module, x, nn.Linear, loss=squared)
    with pytest.raises(ValueError, match="must return one number"):
        measure(module, x, nn.Linear, loss=lambda y, target: y, target=x)
    with pytest.raises(ValueError, match="fp32, fp16, bf16; got 'fp8'"):
        TorchModel(module, x, nn.Linear, compute="fp8")
    with pytest.raises(ValueError, match="Only measure"):
        TorchModel(module, x, nn.Linear, checkpoint="selective")
    scheme = DP(TorchModel(module, x, nn.Linear, loss=lambda y, target: y), 2)
    with pytest.raises(ValueError, match="must return one number"):
        scheme.step(numbers(2, (ROWS, 3), (ROWS, 3)))


def test_what_changes_what_is_kept_is_refused() -> None:
    """Overwriting an input, a parameter or what is saved, new buffers, and shapes that depend on values are errors."""

    class Odd(nn.Module):  # type: ignore[misc]
        def __init__(self, how: str) -> None:
            super().__init__()
            self.layer, self.how = nn.Linear(3, 3, bias=False), how
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            if self.how == "parameter":
                self.layer.weight.detach().mul_(2)
                return y * 1
            if self.how == "buffer":
                self.calls: Any = self.calls + 1
            if self.how == "input":
                x.detach().mul_(2)
            if self.how == "saved":
                y = torch.tanh(y)
                z = y * 1
                y.add_(1)
                return z * y.detach()
            if self.how == "shape":
                return y * y[y > 0].square().sum()
            return y

    [(x, target)] = numbers(1, (ROWS, 3), (ROWS, 3))
    batch = [(x, target), (-x, target)]  # without biases, of nine numbers as many are positive as were negative
    for how, error, words in (
        ("input", RuntimeError, "overwrites its input"),
        ("parameter", RuntimeError, "overwrites its parameter layer.weight"),
        ("buffer", RuntimeError, "assigns a new tensor to calls"),
        ("saved", RuntimeError, "modified in place"),
        ("shape", ValueError, "same shapes on every rank"),
    ):
        module = nn.Sequential(nn.Linear(3, 3, bias=False), Odd(how))
        scheme = DP(TorchModel(module, torch.ones(ROWS, 3), (nn.Linear, Odd), loss=squared), 2)
        with pytest.raises(error, match=words):
            scheme.step(batch)
        assert scheme.ledger.held[Band.ACTIVATIONS] == 0


@pytest.mark.usefixtures("shapes_unchecked")
def test_other_batches_are_refused() -> None:
    """A batch is checked before anything changes."""
    model = model_of(CASES["decoder"])
    x, target = tokens(1, ROWS, LENGTH)[0]
    for batch, error, words in (
        ([(x, target)], ValueError, "2 in all; got 1"),
        ([(x, target), x], ValueError, r"rank 1 needs a pair"),
        ([(x, target), (x.tolist(), target)], TypeError, "x of rank 1 must be a NumPy array; got list"),
        ([(x, target), (x, target[:2])], ValueError, r"target of rank 1 needs as many rows"),
        ([(x, target), (x.astype(np.int32), target)], ValueError, "must be like that of rank 0"),
        ([(x.astype(np.float64), target)] * 2, TypeError, "integers or float32; got float64"),
        ([(x.astype(np.float32), target)] * 2, ValueError, "x must be integers"),
        ([(x[:, :4], target)] * 2, ValueError, rf"of shape \[B, {LENGTH}\]"),
    ):
        with pytest.raises(error, match=words):
            model.check(batch, 2)  # type: ignore[arg-type]
    tied = model_of(CASES["tied"])
    with pytest.raises(ValueError, match="of 0 to 9; got 0 to 10"):
        tied.check([(np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 11, target)], 1)
    nan = np.full((ROWS, 5), np.nan, np.float32)
    with pytest.raises(ValueError, match="x of rank 0 must be finite; it has 15"):
        model_of(CASES["normalised"]).check([(nan, nan)], 1)
    with pytest.raises(ValueError, match="more than length=600 bytes"):
        list(demo.batches(1, 1, length=600))


def test_the_demo_runs() -> None:
    """The demo trains under all four schemes and says that their weights are alike."""
    result = CliRunner().invoke(demo.main, ["--ranks", "2", "--steps", "1"])
    assert result.exit_code == 0, result.output
    assert result.output.count("weights alike bit for bit") == len(SCHEMES) - 1
    assert "ZeRO-3         loss" in result.output
