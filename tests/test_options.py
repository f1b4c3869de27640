"""The schedule's further options: what each costs, and that it changes nothing else."""

import inspect
import pydoc
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest

from helpers import COMPARED, draw, each_stage, sent, sizes, states
from zerosim.bands import FP32, PRECISIONS, Array, Band, DType
from zerosim.buckets import PADDINGS
from zerosim.counts import EventKind, Phase
from zerosim.layers import Checkpointed, Group, Layer, Pass, Role
from zerosim.model import MLP
from zerosim.optimizer import SGD
from zerosim.options import Options
from zerosim.ranks import OutOfMemory, Workspace
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.util.arguments import check_batch

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDTHS = (5, 7, 3, 11)
SIZES = sizes(WIDTHS)
N = 5


def trained(stage: Stage, steps: int = 2, rows: int = 4, ranks: int = N, **options: Any) -> Scheme:
    scheme = stage(MLP(WIDTHS), ranks, **options)
    for step in range(steps):
        scheme.step(draw(ranks, rows, WIDTHS, seed=step))
    return scheme


def chunks(ranks: int = N) -> list[int]:
    return [-(-size // ranks) for size in SIZES]


# -- the record


def test_options_show_typed_wherever_they_are_taken() -> None:
    """A row's signature and its help name every option with its type and default, as keywords, and nothing besides."""
    shown = inspect.signature(ZeRO2).parameters
    assert [*shown] == ["model", "ranks", "options", "ring", "collectives", *(each.name for each in fields(Options))]
    for each in fields(Options):
        option = shown[each.name]
        assert (option.kind, option.annotation) == (inspect.Parameter.KEYWORD_ONLY, each.type)
        assert option.default == getattr(Options(), each.name)
    text = pydoc.plain(pydoc.render_doc(ZeRO2))
    assert all(f"{each.name}: " in text for each in fields(Options))
    assert "precision: 'str' = 'mixed'" in text


def test_a_record_of_options_is_what_keywords_are() -> None:
    """Options as one record train as the same keywords do, and keywords count where both are given."""
    chosen: dict[str, Any] = {"precision": "bf16", "wire": "bf16", "bucket": 66, "padding": "2N"}
    one, other = trained(ZeRO2, **chosen), trained(ZeRO2, options=Options(**chosen))
    assert (states(one), sent(one), one.options) == (states(other), sent(other), other.options)
    both = ZeRO2(MLP(WIDTHS), N, Options(**chosen), wire="fp32")
    assert both.options == replace(Options(**chosen), wire="fp32")


def test_options_cannot_be_changed() -> None:
    """A record of options is frozen, and checks itself when it is made, copied with a change or handed on."""
    options = Options()
    with pytest.raises(FrozenInstanceError):
        options.wire = "fp16"  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"^Scheme\(accumulate\): accumulate must be an integer of 1 or more; got 0"):
        replace(options, accumulate=0)


# -- accumulation


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16", "mixed-main-grads", "bf16-fp32-grads"])
def test_micro_batches_reduced_each_time_agree_bit_for_bit(precision: str) -> None:
    """With every micro-batch reduced, the four schemes add the same averages in the same order."""
    runs = [trained(stage, rows=6, accumulate=3, sync="each", precision=precision) for stage in SCHEMES]
    assert all(states(run) == states(runs[0]) for run in runs)
    assert len({run.reports[-1].loss for run in runs}) == 1


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_micro_batches_summed_first_agree_bit_for_bit(precision: str) -> None:
    """Reduced once, at the end, they agree among themselves as well; with the other order only to rounding."""
    runs = [trained(stage, rows=6, accumulate=3, sync="end", precision=precision) for stage in SCHEMES]
    assert all(states(run) == states(runs[0]) for run in runs)
    each = trained(ZeRO2, rows=6, accumulate=3, sync="each", precision=precision)
    assert states(each) != states(runs[0])
    assert np.allclose(each.full_theta(), runs[0].full_theta(), atol=0.03 * 2)  # two steps of lr 0.01 at most


@each_stage
def test_the_usual_sync_is_where_gradients_are_whole(stage: Stage) -> None:
    """Left alone, stages 0 and 1 reduce at the end and stages 2 and 3 each time."""
    usual = trained(stage, rows=6, accumulate=3)
    named = trained(stage, rows=6, accumulate=3, sync="each" if stage.grads else "end")
    other = trained(stage, rows=6, accumulate=3, sync="end" if stage.grads else "each")
    assert (states(usual), sent(usual)) == (states(named), sent(named))
    assert sent(usual) != sent(other)


def test_gradients_accumulate_to_the_average_of_all_rows() -> None:
    """In fp32 the gradients of three micro-batches are those of one batch, but for rounding; at N = 1 too."""
    for ranks, sync in product((1, N), ("each", "end")):
        one = trained(ZeRO2, steps=1, rows=6, ranks=ranks, precision="fp32")
        three = trained(ZeRO2, steps=1, rows=6, ranks=ranks, precision="fp32", accumulate=3, sync=sync)
        whole, summed = one.flat(Band.GRADS), three.flat(Band.GRADS)
        assert np.abs(whole - summed).max() <= 1e-6 * np.abs(whole).max()
        assert three.reports[-1].loss == pytest.approx(one.reports[-1].loss, rel=1e-6)


@pytest.mark.parametrize("sync", ["each", "end"])
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_one_rank_averages_as_two_with_its_batch_do(precision: str, sync: str) -> None:
    """A third is rounded in fp32 and the average once more, at N = 1 too: two ranks with one batch get its bits."""
    batch = draw(1, 6, WIDTHS)
    one, two = (DP(MLP(WIDTHS), ranks, precision=precision, accumulate=3, sync=sync) for ranks in (1, 2))
    one.step(batch)
    two.step(batch * 2)
    assert states(one, [*COMPARED, Band.GRADS]) == states(two, [*COMPARED, Band.GRADS])


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("sync", ["each", "end"])
@each_stage
def test_accumulation_costs_what_is_reduced_and_gathered(stage: Stage, sync: str, k: int) -> None:
    """Reduced each time, gradients travel k times; parameters travel k times only where each pass gathers them."""
    once = (N - 1) * sum(chunks()) * 4
    found = sent(trained(stage, accumulate=k, sync=sync))
    reductions = k if sync == "each" else 1
    if stage is DP:
        assert found == {"all-reduce": 2 * reductions * once}
    else:
        assert found == {"reduce-scatter": reductions * once, "all-gather": (2 * k if stage.params else 1) * once}


@pytest.mark.parametrize("stage", [ZeRO2, ZeRO3], ids=lambda stage: stage.name)
def test_unsharded_accumulation_holds_full_gradients(stage: Stage) -> None:
    """Stages 2 and 3 that reduce at the end hold whole gradients in between, in their own band; others never."""
    padded = [chunk * N for chunk in chunks()]
    at_end = trained(stage, accumulate=2, sync="end").reports[-1].peak_without_activations
    each = trained(stage, accumulate=2, sync="each").reports[-1].peak_without_activations
    # In the second micro-batch a layer's gradients are written beside the sum of the first's.
    assert at_end.by_band[Band.UNREDUCED] == 2 * (sum(padded) + max(padded))
    assert each.by_band[Band.UNREDUCED] <= 2 * (max(padded) + max(chunks()))


@each_stage
def test_nothing_is_left_of_micro_batches(stage: Stage) -> None:
    """After a step with micro-batches a rank holds its states alone."""
    for sync in ("each", "end"):
        scheme = trained(stage, accumulate=2, sync=sync)
        assert set(scheme.ranks[0].held()) == set(scheme.states)


def test_rows_that_cannot_be_cut_are_refused() -> None:
    """A batch of 7 rows makes no 2 micro-batches; nothing has been changed."""
    scheme = ZeRO2(MLP(WIDTHS), N, accumulate=2)
    before = states(scheme)
    with pytest.raises(
        ValueError, match=r"^step\(batch\): accumulate=2 .* 7 rows cannot be. Pass a multiple of 2 rows"
    ):
        scheme.step(draw(N, 7, WIDTHS))
    assert (states(scheme), scheme.reports) == (before, [])


# -- prefetch, checkpoint, buckets, padding


@pytest.mark.parametrize("ahead", [1, 2, 13])
def test_prefetch_costs_memory_alone(ahead: int) -> None:
    """Gathering layers ahead changes no bit and no byte sent; as many more layers are held gathered at once."""
    plain, early = trained(ZeRO3), trained(ZeRO3, prefetch=ahead)
    assert (states(early), sent(early)) == (states(plain), sent(plain))
    padded = [chunk * N for chunk in chunks()]
    window = min(ahead + 1, 3)
    held, most = 0, 0
    for event in early.reports[-1].events:
        if event.name == Band.GATHERED:
            held += event.nbytes if event.kind is EventKind.HOLD else -event.nbytes
            most = max(most, held)
    assert most == 2 * max(sum(padded[start : start + window]) for start in range(3))
    assert early.peak_bytes_per_param() > plain.peak_bytes_per_param()


@each_stage
def test_checkpointing_computes_again_what_it_does_not_keep(stage: Stage) -> None:
    """Same bits, same bytes sent; backward does the forward's operations too."""
    plain, again = trained(stage), trained(stage, checkpoint=True)
    assert (states(again), sent(again)) == (states(plain), sent(plain))
    flops, twice = plain.reports[-1].flops, again.reports[-1].flops
    assert twice[Phase.FORWARD] == flops[Phase.FORWARD]
    assert twice[Phase.BACKWARD] == flops[Phase.BACKWARD] + flops[Phase.FORWARD]
    assert set(again.ranks[0].held()) == set(plain.ranks[0].held())


def test_a_checkpointed_chain_keeps_its_ends() -> None:
    """Of three layers in one bucket the middle activations are gone until backward; the peak is lower for it."""
    layers = MLP(WIDTHS).layers
    chains = trained(DP, bucket="model", rows=64), trained(DP, bucket="model", rows=64, checkpoint=True)
    before_loss = []
    for scheme in chains:
        events = scheme.reports[-1].events
        ends = next(index for index, event in enumerate(events) if event.kind is EventKind.COMPUTE)
        before_loss.append(events[ends].held - scheme.ledger.total)
    batch, widths = 4 * 64 * (5 + 11), [layer.groups[0].shapes[1][0] for layer in layers]
    assert before_loss == [batch + 4 * 64 * sum(widths), batch + 4 * 64 * widths[-1]]


@pytest.mark.parametrize(("size", "sizes"), [(41, SIZES), (66, [42 + 24, 44]), (68, [42 + 24, 44]), (110, [110])])
def test_a_bucket_size_joins_layers_up_to_it(size: int, sizes: list[int]) -> None:
    """Consecutive layers share a buffer while they fit; a layer that doesn't fit alone has one of its own."""
    scheme = trained(ZeRO3, bucket=size)
    assert [bucket.size for bucket in scheme.buckets] == sizes
    assert sent(scheme)["reduce-scatter"] == (N - 1) * sum(-(-each // N) for each in sizes) * 4


@pytest.mark.parametrize("padding", PADDINGS)
@each_stage
def test_padding_rules_cost_bytes_alone(stage: Stage, padding: str) -> None:
    """Whichever multiple buffers are padded to, gradients add up in another order at most, and padding stays zero."""
    shapes = [[(5, 7), (7,)], [(7, 3), (3,)], [(3, 11), (11,)]]
    lengths = {
        "N": [45, 25, 45],
        "2N": [50, 30, 50],
        "rows": [sum(-(-shape[0] // N) * N * (shape[1:] or (1,))[0] for shape in layer) for layer in shapes],
        "each": [35 + 10, 25 + 5, 35 + 15],
    }[padding]
    scheme = trained(stage, precision="fp32", padding=padding)
    assert [bucket.padded for bucket in scheme.buckets] == lengths
    once = 4 * (N - 1) * sum(lengths) // N
    assert sum(sent(scheme).values()) == (3 if stage.params else 2) * once
    assert np.allclose(scheme.full_theta(), trained(DP, precision="fp32").full_theta(), atol=1e-5)
    for bucket in scheme.buckets:
        for state in bucket.states.values():
            beyond = state.reshape(-1)[bucket.size :] if state.shape[1] < bucket.padded else state[:, bucket.size :]
            assert not beyond.any()


def test_a_scalar_is_one_row() -> None:
    """By rows a parameter without axes takes an element, padded like any other; no group is cut short by it."""
    for shapes, padded in ((((),), N), (((), (N, 3)), N + N * 3), (((2, 3), ()), N * 3 + N)):
        assert PADDINGS["rows"](Group("group", shapes), N) == padded


# -- wires and recipes


@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2], ids=lambda stage: stage.name)
def test_all_reducing_costs_half_as_much_again(stage: Stage) -> None:
    """Where gradients are all-reduced first, a rank sends three times (N-1)/N P instead of twice; bits stay."""
    plain, reducing = trained(stage), trained(stage, all_reduce=True)
    once = (N - 1) * sum(chunks()) * 4
    assert sent(reducing) == {"all-reduce": 2 * once, "all-gather": once}
    assert states(reducing) == states(plain)


@each_stage
def test_parameters_can_have_a_wire_of_their_own(stage: Stage) -> None:
    """Gathered in fp16 and reduced in fp32, parameters take half the bytes and gradients as many; bits stay."""
    plain, own = trained(stage), trained(stage, wire_params="fp16")
    assert states(own) == states(plain)
    for (collective, band), traffic in own.reports[-1].traffic.items():
        usual = plain.reports[-1].traffic[collective, band]
        assert int(traffic.sent[0]) * (2 if collective == "all-gather" else 1) == int(usual.sent[0])


RECIPES = {
    "mixed": (16, 4 + 12 / N, 2 + 14 / N, 16 / N),
    "bf16": (16, 4 + 12 / N, 2 + 14 / N, 16 / N),
    "fp32": (16, 8 + 8 / N, 4 + 12 / N, 16 / N),
    "bf16-fp32-grads": (18, 6 + 12 / N, 2 + 16 / N, 18 / N),
    "mixed-main-grads": (20, 4 + 16 / N, 2 + 18 / N, 20 / N),
}


@pytest.mark.parametrize("precision", RECIPES)
def test_recipes_take_their_bytes(precision: str) -> None:
    """16, 18 and 20 bytes per parameter, whole and sharded, as the recipes' authors count them."""
    model = MLP((4, 4))  # 20 parameters: no padding at N = 5
    for stage, expected in zip(SCHEMES, RECIPES[precision], strict=True):
        assert stage(model, N, precision=precision).bytes_per_param() == expected


def test_fp32_gradients_round_less() -> None:
    """bf16 with fp32 gradients ends nearer to fp32's gradients than with bf16 ones."""
    exact, wide, narrow = (
        trained(DP, steps=1, precision=precision).flat(Band.GRADS).astype(np.float64)
        for precision in ("fp32", "bf16-fp32-grads", "bf16")
    )
    assert np.abs(wide - exact).mean() < np.abs(narrow - exact).mean()


def test_main_grads_are_what_the_optimizer_reads() -> None:
    """The fp32 main gradients are the fp16 ones, widened, each rank's own; the result is that of mixed."""
    scheme, plain = trained(ZeRO1, precision="mixed-main-grads"), trained(ZeRO1, precision="mixed")
    assert np.array_equal(scheme.flat(Band.MAIN_GRADS), scheme.flat(Band.GRADS).astype(np.float32))
    assert states(scheme) == states(plain)


def test_fsdp_gathers_and_computes_in_bf16_what_it_keeps_in_fp32() -> None:
    """FSDP's recipe trains as bf16's does: its fp32 shards are the master, its gathered copy their rounding."""
    options: dict[str, Any] = {"wire": "fp32", "wire_params": "bf16"}
    fsdp = trained(ZeRO3, precision="fsdp", **options)
    bf16 = trained(ZeRO3, precision="bf16", **options)
    assert fsdp.bytes_per_param() == pytest.approx(16 * sum(chunks()) / sum(SIZES))
    assert {state.dtype for bucket in fsdp.buckets for state in bucket.states.values()} == {FP32}
    gathered = [event.nbytes for event in fsdp.reports[-1].events if event.name == Band.GATHERED]
    assert set(gathered) == {2 * chunk * N for chunk in chunks()}
    # Not the very bits: bf16's averaged gradients are rounded once more, into their band.
    assert np.abs(fsdp.full_theta() - bf16.full_theta()).max() < 1e-3


@pytest.mark.parametrize("sync", ["each", "end"])
def test_fsdps_recipe_on_one_rank_is_that_on_two(sync: str) -> None:
    """One rank computes with the bf16 copy too: two ranks with its batch get the same bits."""
    batch = draw(1, 6, WIDTHS)
    one, two = (ZeRO3(MLP(WIDTHS), n, precision="fsdp", accumulate=3, sync=sync) for n in (1, 2))
    one.step(batch)
    two.step(batch * 2)
    assert one.full_theta().tobytes() == two.full_theta().tobytes()
    assert one.bytes_comm_per_rank() == 0


@pytest.mark.parametrize("stage", [DP, ZeRO1, ZeRO2], ids=lambda stage: stage.name)
def test_fsdps_recipe_needs_a_gather(stage: Stage) -> None:
    """Where nothing is gathered there is no 16-bit copy to compute with: refused, with what would do."""
    with pytest.raises(ValueError, match=rf"'fsdp' .* {stage.name} gathers nothing. Use ZeRO-3"):
        stage(MLP(WIDTHS), N, precision="fsdp")


# -- optimizers


def test_sgd_keeps_a_momentum_or_nothing() -> None:
    """Momentum takes 4 bytes, plain descent none, on top of 8 of mixed precision's parameters, gradients, master."""
    model = MLP((4, 4))
    for optimizer, each in ((SGD(), 8), (SGD(momentum=0.9), 12)):
        for stage, kept in zip(SCHEMES, (each, 4 + (each - 4) / N, 2 + (each - 2) / N, each / N), strict=True):
            assert stage(model, N, optimizer=optimizer).bytes_per_param() == kept


@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_sgd_descends_alike_under_all_schemes(momentum: float) -> None:
    """All four schemes take the textbook's steps: v = momentum v + g, p = p - lr v, in fp32."""
    runs = [trained(stage, steps=1, precision="fp32", optimizer=SGD(0.5, momentum)) for stage in SCHEMES]
    bands = (Band.PARAMS, Band.MOMENTUM)
    assert all(states(run, bands) == states(runs[0], bands) for run in runs)
    p, v = MLP(WIDTHS).initial(), np.zeros(sum(SIZES), np.float32)
    for step in range(3):
        p_before, v_before = p, v
        for run in runs:
            if step:
                run.step(draw(N, 4, WIDTHS, seed=step))
            g = run.flat(Band.GRADS)
            v = np.float32(momentum) * v_before + g
            p = p_before - np.float32(0.5) * v
            assert np.array_equal(run.full_theta(), p)
            assert momentum == 0 or np.array_equal(run.flat(Band.MOMENTUM), v)


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": float("inf")}, {"lr": "fast"}, {"momentum": 1.0}])
def test_sgd_refuses_what_it_cannot_use(options: dict[str, Any]) -> None:
    """A rate or momentum out of range is refused by name."""
    [name] = options
    with pytest.raises(ValueError, match=rf"^SGD\({name}\): a .*number"):
        SGD(**options)


# -- groups: tied, frozen, buffers


class Scale:
    """y = x * w, elementwise, with the [width] ``tied`` weight, a frozen shift, and a buffer that counts calls."""

    def __init__(self, name: str, tied: Group, extra: Sequence[Group] = ()) -> None:
        self.name = name
        self.groups: tuple[Group, ...] = (tied, *extra)
        self.width = tied.size

    def forward(self, x: Array, given: Pass) -> tuple[Array, Any]:
        weight, *rest = given.params if isinstance(given.params, list) else [given.params]
        y = given.work.hold(*x.shape[1:])
        np.multiply(x, weight[:, None, : self.width].astype(np.float32), out=y)
        for group, flat in zip(self.groups[1:], rest, strict=True):
            if group.role is Role.BUFFER:
                flat += 1
            else:
                y += flat[:, None, : self.width].astype(np.float32)
        return y, (x, y)

    def backward(self, saved: Any, dy: Array, given: Pass) -> Array | None:
        (x, y), (params, work, grads, need_dx, *_) = saved, given
        weight = params[0] if isinstance(params, list) else params
        work.free(y)
        grads[:, : self.width] = (dy * x).sum(axis=1)
        dx = None
        if need_dx:
            dx = work.hold(*x.shape[1:])
            np.multiply(dy, weight[:, None, : self.width].astype(np.float32), out=dx)
        work.free(dy)
        return dx


class Scales:
    """A model of ``Scale`` layers, trained to least squares."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        groups = dict.fromkeys(group for layer in layers for group in layer.groups)
        self.n_params = sum(group.size for group in groups if group.role is not Role.BUFFER)
        self.width = layers[0].groups[0].size

    def initial(self) -> Array:
        return np.linspace(0.5, 1.5, self.n_params, dtype=np.float32)

    def buffer(self, group: Group) -> Array:
        return np.full(group.size, 40, group.dtype)

    def check(self, batch: Any, ranks: int) -> tuple[Array, Array]:
        return check_batch(batch, ranks, self.width, self.width)

    def loss(self, y: Array, target: Array, work: Workspace) -> tuple[Array, Array]:
        dy = work.hold(*y.shape[1:])
        np.subtract(y, target, out=dy)
        work.free(target)
        return np.square(dy).mean(axis=(1, 2)), dy


def scales(
    width: int = 7, *, ties: bool = False, frozen: bool = False, buffer: bool = False, dtype: DType = FP32
) -> Scales:
    first = Group("first", ((width,),))
    extra = [Group("shift", ((width,),), Role.FROZEN)] * frozen
    extra += [Group("calls", ((3,),), Role.BUFFER, dtype)] * buffer
    return Scales(
        [Scale("one", first), Scale("two", Group("second", ((width,),)), extra), Scale("three", first)][: 2 + ties]
    )


def run_scales(model: Scales, stage: Stage, ranks: int = N, **options: Any) -> Scheme:
    scheme = stage(model, ranks, **options)
    for _ in range(3):
        scheme.step(draw(ranks, 4, (model.width, model.width)))
    return scheme


@pytest.mark.parametrize("kind", ["ties", "frozen", "buffer"])
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_all_schemes_train_groups_alike(kind: str, precision: str) -> None:
    """Tied, frozen or with a buffer, all four end at the same bits."""
    runs = [run_scales(scales(**dict[str, Any]({kind: True})), stage, precision=precision) for stage in SCHEMES]
    assert all(states(run) == states(runs[0]) for run in runs)
    assert runs[0].reports[-1].loss < runs[0].reports[0].loss


def test_tied_parameters_are_one_with_two_gradients() -> None:
    """A weight used twice is counted once, gathered for each use, reduced once, and gets the sum of its gradients."""
    width, chunk = 7, 2
    model = scales(width, ties=True)
    assert model.n_params == 2 * width
    batch = draw(N, 4, (width, width))
    first, second = np.split(model.initial().astype(np.float64), 2)
    x, target = (np.stack([pair[end] for pair in batch]).astype(np.float64) for end in (0, 1))
    dy = x * first * second * first - target
    gradient = (dy * (x * first * second)).sum(axis=1) + (dy * first * second * x).sum(axis=1)  # last use, first use
    for stage in SCHEMES:
        scheme = stage(model, N, precision="fp32")
        scheme.step(batch)
        assert np.allclose(scheme.flat(Band.GRADS)[:width], gradient.mean(axis=0), rtol=1e-5, atol=1e-5)
        found = sent(scheme)
        once = (N - 1) * chunk * 4
        if stage is DP:
            assert found == {"all-reduce": 2 * 2 * once}
        else:
            assert found == {"reduce-scatter": 2 * once, "all-gather": (2 * 3 if stage.params else 2) * once}


def test_a_tied_weight_that_is_needed_soon_is_not_released() -> None:
    """With both its uses within the prefetch, a tied weight is gathered once per pass and not twice."""
    once = (N - 1) * 2 * 4
    for ahead, gathers in ((0, 3 + 3), (1, 3 + 3), (2, 2 + 2)):
        scheme = run_scales(scales(ties=True), ZeRO3, prefetch=ahead)
        assert sent(scheme) == {"reduce-scatter": 2 * once, "all-gather": gathers * once}


def test_frozen_parameters_have_no_gradients_and_no_moments() -> None:
    """1,000 frozen and 8 trained on 4 ranks: 2016 + 4 + 24 B under ZeRO-2, 504 + 4 + 24 B under ZeRO-3."""
    base = Group("base", ((1000,),), Role.FROZEN)
    layer = Scale("adapted", Group("adapter", ((8,),)), [base])
    model = Scales([layer])
    assert model.n_params == 1008
    two, three = (stage(model, 4, wire="fp16") for stage in (ZeRO2, ZeRO3))
    assert two.ledger.total == 2 * 1008 + 2 * 8 // 4 + 12 * 8 // 4 == 2016 + 4 + 24
    assert three.ledger.total == 2 * 1008 // 4 + 2 * 8 // 4 + 12 * 8 // 4 == 504 + 4 + 24
    for scheme, expected in ((two, 24), (three, 3036)):
        scheme.step(draw(4, 2, (8, 8)))
        assert scheme.bytes_comm_per_rank() == expected
    assert two.bytes_comm_per_rank() == 2 * 2 * (4 - 1) * 8 // 4
    assert np.array_equal(three.full_theta()[8:], np.float16(model.initial()[8:]).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.uint8], ids=lambda dtype: dtype.__name__)
@each_stage
def test_buffers_are_every_ranks_own(stage: Stage, dtype: Any) -> None:
    """A buffer is whole on every rank, in its own dtype and band, written in place, and never sent."""
    dtype = np.dtype(dtype)
    scheme = run_scales(scales(buffer=True, dtype=dtype), stage)
    plain = run_scales(scales(), stage)
    for rank in scheme.ranks:
        [buffer] = rank[Band.BUFFERS]
        assert buffer.dtype == dtype
        assert buffer.tolist() == [40 + 3] * 3
    assert scheme.reports[-1].resident[Band.BUFFERS] == 3 * dtype.itemsize
    assert sent(scheme) == sent(plain)


@pytest.mark.parametrize("kind", ["ties", "frozen"])
def test_layers_of_several_groups_share_no_bucket(kind: str) -> None:
    """A bucket for the whole model needs layers with one trained group of their own: refused, with what would do."""
    with pytest.raises(ValueError, match=r"^Chain\('model'\): .* Use a bucket per layer"):
        DP(scales(**dict[str, Any]({kind: True})), N, bucket="model")


def test_a_failed_step_with_micro_batches_gives_everything_back() -> None:
    """Out of memory in the second micro-batch leaves the states alone, and a later step on more memory is whole."""
    batch = draw(N, 4, WIDTHS)
    free = ZeRO3(MLP(WIDTHS), N, accumulate=2, sync="end")
    free.step(batch)
    tight = ZeRO3(MLP(WIDTHS), N, accumulate=2, sync="end", capacity=free.reports[-1].peak.total - 1)
    with pytest.raises(OutOfMemory):
        tight.step(batch)
    assert set(tight.ranks[0].held()) == set(tight.states)
    tight.ranks.capacity = None
    tight.step(batch)
    assert tight.reports[-1].peak == free.reports[-1].peak


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"accumulate": 0}, ValueError, "accumulate must be an integer of 1 or more; got 0"),
        ({"prefetch": -1}, ValueError, "prefetch must be an integer of 0 or more; got -1"),
        ({"prefetch": True}, TypeError, "prefetch must be an integer of 0 or more; got True"),
        ({"sync": "never"}, ValueError, "sync is one of each, end"),
        ({"padding": "4N"}, ValueError, "padding is one of N, each, 2N, rows"),
        ({"wire_params": "fp8"}, ValueError, "wire_params is one of fp32, fp16, bf16"),
        ({"wire_params": "bf16"}, ValueError, r"Scheme\(wire_params\): the wire must carry the working copy exactly"),
        ({"all_reduce": 1}, TypeError, "all_reduce must be of type bool"),
        ({"checkpoint": "full"}, TypeError, "checkpoint must be of type bool"),
        ({"precision": "fp8"}, ValueError, "precision is one of " + ", ".join(PRECISIONS)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("as_users_call_it")
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """The error names the option, the rule and the value."""
    with pytest.raises(error, match=words):
        ZeRO3(MLP(WIDTHS), N, **options)


def test_a_state_that_does_not_exist_is_refused() -> None:
    """flat() of a band that this precision and optimizer don't have names those that there are."""
    scheme = ZeRO1(MLP(WIDTHS), N, precision="fp32")
    for band in (Band.MASTER, Band.MOMENTUM, "nope"):
        with pytest.raises(ValueError, match=rf"states here are params, grads, exp_avg, exp_avg_sq; got '{band}'"):
            scheme.flat(band)


def test_checkpointing_is_of_a_layer() -> None:
    """A checkpointed layer is that layer to the schedule: its name and its groups."""
    [layer, *_] = MLP(WIDTHS).layers
    again = Checkpointed(layer)
    assert (again.name, again.groups) == (layer.name, layer.groups)
    assert isinstance(again, Layer)


def test_checkpointing_twice_is_checkpointing_once() -> None:
    """A model whose layers are checkpointed already, and a schedule that does so too, compute nothing a third time."""
    model = MLP(WIDTHS)
    model.layers = tuple(Checkpointed(layer) for layer in model.layers)
    once, twice = (DP(each, N, checkpoint=True) for each in (MLP(WIDTHS), model))
    for scheme in (once, twice):
        scheme.step(draw(N, 4, WIDTHS))
    assert states(once) == states(twice)
    assert once.reports[-1].flops == twice.reports[-1].flops


def test_a_group_of_nothing_is_refused() -> None:
    """A parameter without elements cannot be shared out: refused by name, with what to do."""
    with pytest.raises(ValueError, match=r"^Scheme\(model\): nothing has no elements.* Leave it out"):
        ZeRO3(Scales([Scale("one", Group("nothing", ((0,),)))]), N)


# -- the optimizer within the backward


@dataclass(frozen=True, kw_only=True)
class InBackward(Options):
    """As a plan's options are."""

    in_backward: bool = True


@pytest.mark.parametrize("stage", SCHEMES, ids=lambda stage: stage.name)
@pytest.mark.parametrize("ranks", [1, N])
def test_updates_within_the_backward_change_no_bit_and_keep_no_gradients(stage: Stage, ranks: int) -> None:
    """The parameters and what is sent are the same as ever; at rest there are no gradients, and at most those of one
    layer at a time."""
    usual, early = (trained(stage, ranks=ranks, options=each) for each in (Options(), InBackward()))
    assert np.array_equal(usual.full_theta(), early.full_theta())
    assert usual.bytes_comm_per_rank() == early.bytes_comm_per_rank()
    rest, before = early.reports[-1].resident, usual.reports[-1].resident
    assert rest == {band: nbytes for band, nbytes in before.items() if band != Band.GRADS}
    signs = {EventKind.HOLD: 1, EventKind.FREE: -1}
    changes = [
        signs.get(event.kind, 0) * event.nbytes for event in early.reports[-1].events if event.name == Band.GRADS
    ]
    shared = ranks if stage.grads else 1
    assert max(accumulate(changes)) == 2 * max(-(-size // ranks) * ranks for size in SIZES) // shared
