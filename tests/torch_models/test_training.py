"""Torch modules in training: alike under every row, and on one rank what torch does."""

from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402

from torch_models.networks import (  # noqa: E402
    CASES,
    HEADS,
    LENGTH,
    ROWS,
    VOCABULARY,
    made,
    model_of,
    numbers,
    squared,
    tokens,
)
from zerosim.bands import Band  # noqa: E402
from zerosim.counts import Phase  # noqa: E402
from zerosim.optimizer import Adam  # noqa: E402
from zerosim.options import LossScale  # noqa: E402
from zerosim.schemes import DP, SCHEMES, Scheme, ZeRO1, ZeRO2, ZeRO3  # noqa: E402
from zerosim.torch_models import demo  # noqa: E402
from zerosim.torch_models.model import from_torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


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


@pytest.mark.parametrize(
    ("ranks", "precision", "compute"),
    [
        (3, "mixed", "fp32"),
        *(pytest.param(ranks, "mixed", "fp32", marks=pytest.mark.slow) for ranks in (2, 4, 5)),
        pytest.param(3, "bf16", "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_decoder_is_trained_alike_by_all_schemes(ranks: int, precision: str, compute: str) -> None:
    """A transformer on bytes of text has the same bits under all schemes, in every state, on every rank."""
    model = model_of(CASES["decoder"], compute=compute)
    schemes = [stage(model, ranks, precision=precision) for stage in SCHEMES]
    for batch in demo.batches(3, ranks, rows=ROWS, length=LENGTH):
        assert len({scheme.step(batch) for scheme in schemes}) == 1
    assert [differing(scheme, schemes[0]) for scheme in schemes] == [[]] * len(SCHEMES)


@pytest.mark.parametrize("name", [name for name in CASES if name != "decoder"])
def test_other_modules_are_trained_alike_by_all_schemes(name: str) -> None:
    """Tied and frozen parameters, buffers and saved integers make no difference between schemes."""
    case, ranks = CASES[name], 3
    model = model_of(case)
    schemes = [stage(model, ranks, precision="fp32") for stage in SCHEMES]
    for _ in range(2):
        assert len({scheme.step(case.batch(ranks)) for scheme in schemes}) == 1
    assert len({scheme.full_theta().tobytes() for scheme in schemes}) == 1
    assert len({scheme.flat(Band.EXP_AVG_SQ).tobytes() for scheme in schemes}) == 1


@pytest.mark.slow
def test_the_decoder_learns() -> None:
    """On its text the decoder's loss falls from that of guessing, ln 256, by a third in 30 steps."""
    model = demo.demo_model(length=LENGTH, width=16, heads=HEADS, blocks=1)
    scheme = ZeRO3(model, 2)
    losses = [scheme.step(batch) for batch in demo.batches(30, 2, rows=ROWS, length=LENGTH)]
    assert losses[0] > np.log(VOCABULARY) * 0.95
    assert np.mean(losses[-5:]) < losses[0] * 2 / 3


@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_torch(name: str) -> None:
    """On one rank in fp32 loss and gradients are those of the module itself, bit for bit, at every step."""
    case = CASES[name]
    model, module = model_of(case), made(case)
    scheme, own = ZeRO3(model, 1, precision="fp32"), dict(module.named_parameters())
    [(x, target)] = case.batch(1)
    for _ in range(3):
        theta = model.named(scheme.full_theta())
        assert theta.keys() == own.keys()
        for each, values in theta.items():
            own[each].data.copy_(torch.from_numpy(values))
            own[each].grad = None
        loss = case.loss(module(torch.from_numpy(x)), torch.from_numpy(target))
        loss.backward()
        assert scheme.step([(x, target)]) == loss.item()
        grads = [own[each].grad.numpy().reshape(-1) for each in theta if own[each].requires_grad]
        assert np.array_equal(scheme.flat(Band.GRADS), np.concatenate(grads))


def test_one_rank_learns_what_torch_learns() -> None:
    """After some steps on one rank in fp32 the weights are those of torch.optim.Adam but for rounding.

    With an eps above the rounding of gradients that should be zero, which Adam would blow up to a whole step.
    """
    case = CASES["decoder"]
    model, module = model_of(case), made(case)
    scheme = ZeRO3(model, 1, precision="fp32", optimizer=Adam(lr=1e-3, eps=1e-3))
    adam = torch.optim.Adam(module.parameters(), lr=1e-3, eps=1e-3, foreach=False)
    [(x, target)] = case.batch(1)
    for _ in range(4):
        adam.zero_grad()
        case.loss(module(torch.from_numpy(x)), torch.from_numpy(target)).backward()
        adam.step()
        scheme.step([(x, target)])
    own = dict(module.named_parameters())
    for name, values in model.named(scheme.full_theta()).items():
        np.testing.assert_allclose(values, own[name].detach().numpy(), rtol=1e-4, atol=1e-6)


def test_two_ranks_are_one_batch() -> None:
    """Two ranks with half a batch each come as near to one with all of it as rounding allows."""
    case = CASES["decoder"]
    batch = case.batch(2)
    whole = [tuple(np.concatenate(parts) for parts in zip(*batch, strict=True))]
    two, one = (ZeRO3(model_of(case), ranks, precision="fp32") for ranks in (2, 1))
    assert two.step(batch) == pytest.approx(one.step(whole), rel=1e-6)
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


@pytest.mark.parametrize("stage", [DP, ZeRO3])
def test_uneven_batches(stage: Any) -> None:
    """Ranks with different rows, one with none, come as near to one rank with all rows as rounding allows."""
    case = CASES["pooled"]
    [(x, target)] = numbers(1, (5, 2, 12), (5, 3))
    rows = [slice(0, 3), slice(3, 3), slice(3, 5)]
    uneven = stage(model_of(case), 3, precision="fp32", uneven=True)
    one = stage(model_of(case), 1, precision="fp32")
    for _ in range(2):
        loss = uneven.step([(x[some], target[some]) for some in rows])
        assert loss == pytest.approx(one.step([(x, target)]), rel=1e-6)
        np.testing.assert_allclose(uneven.full_theta(), one.full_theta(), rtol=1e-4, atol=1e-6)
    assert uneven.ledger.held[Band.ACTIVATIONS] == 0


def test_uneven_batches_are_alike_under_all_rows() -> None:
    """With ranks of different rows all rows learn the same bits, and as many rows everywhere change nothing."""
    case = CASES["decoder"]
    [(x, target)] = case.batch(1)
    model = model_of(case)
    schemes = [stage(model, 2, uneven=True) for stage in SCHEMES]
    for _ in range(2):
        assert len({scheme.step([(x[:1], target[:1]), (x, target)]) for scheme in schemes}) == 1
    assert len({scheme.full_theta().tobytes() for scheme in schemes}) == 1
    even, plain = ZeRO2(model, 2, uneven=True), ZeRO2(model, 2)
    assert even.step(case.batch(2)) == plain.step(case.batch(2))
    assert np.array_equal(even.full_theta(), plain.full_theta())


def test_a_step_without_rows_changes_no_buffer() -> None:
    """Ranks agree that there is nothing to average over before any forward writes: the scheme goes on as it was."""
    case = CASES["normalised"]
    batch = numbers(2, (ROWS, 5), (ROWS, 3))
    run, twin = (ZeRO2(model_of(case), 2, uneven=True) for _ in range(2))
    assert any(Band.BUFFERS in bucket.states for bucket in run.buckets)
    with pytest.raises(ValueError, match="sum to zero"):
        run.step(batch, weights=[0, 0])
    assert run.step(batch) == twin.step(batch)
    assert run.full_theta().tobytes() == twin.full_theta().tobytes()


def test_a_loss_scale_is_a_power_of_two_and_changes_nothing() -> None:
    """Gradients that are scaled up in the backward and down again before the update are the same in fp32."""
    case = CASES["tied"]
    scaled = ZeRO1(model_of(case), 2, precision="fp32", loss_scale=LossScale(init=512.0))
    plain = ZeRO1(model_of(case), 2, precision="fp32")
    for scheme in (scaled, plain):
        for _ in range(2):
            scheme.step(case.batch(2))
    assert np.array_equal(scaled.full_theta(), plain.full_theta())


def test_torch_tensors_are_taken_as_they_are() -> None:
    """One call makes a model of a module, a batch and a loss, be it a module, and tensors train as arrays do."""
    batch = numbers(2, (ROWS, 5), (ROWS, 3))
    as_tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batch]
    first, second = (
        ZeRO3(from_torch(made(CASES["normalised"]), given, nn.MSELoss()), 2) for given in (batch, as_tensors)
    )
    for _ in range(2):
        assert first.step(batch) == second.step(as_tensors)
    assert np.array_equal(first.full_theta(), second.full_theta())
    [one] = numbers(1, (ROWS, 5), (ROWS, 3))
    assert from_torch(made(CASES["normalised"]), one, squared).rows == ROWS
    with pytest.raises(ValueError, match=r"a pair \(x, target\) is needed"):
        from_torch(made(CASES["normalised"]), one[0], squared)


def test_other_numbers_of_rows() -> None:
    """A batch may have other rows than the example; micro-batches are each a part of it."""
    case = CASES["pooled"]
    batch = numbers(2, (6, 2, 12), (6, 3))
    whole, parts = (DP(model_of(case), 2, precision="fp32", accumulate=count) for count in (1, 3))
    assert whole.step(batch) == pytest.approx(parts.step(batch), rel=1e-6)
    np.testing.assert_allclose(whole.flat(Band.GRADS), parts.flat(Band.GRADS), rtol=1e-4, atol=1e-7)


def test_the_demo_runs() -> None:
    """The demo trains under all four schemes and says that their weights are alike."""
    result = CliRunner().invoke(demo.main, ["--ranks", "2", "--steps", "1"])
    assert result.exit_code == 0, result.output
    assert result.output.count("weights alike bit for bit") == len(SCHEMES) - 1
    assert "ZeRO-3         loss" in result.output
