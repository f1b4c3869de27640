"""Norm, loss scale and uneven rows by hand, and what is refused of them."""

from typing import Any

import numpy as np
import pytest

import zerosim as zs
from helpers import draw
from zerosim.bands import Array, Band, DType
from zerosim.options import LossScale, Options
from zerosim.scaling import Scaler
from zerosim.stages import SCHEMES, ZeRO1, ZeRO2
from zerosim.worlds.local import LocalRing

WIDTHS = (2, 4)  # 12 parameters, 6 for each of two ranks
each_scheme = pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.name)


def agreed(row: Any, whole: Array, **options: Any) -> Any:
    """What two ranks agree on whose averaged gradients are these."""
    run = row(zs.MLP(WIDTHS), 2, precision="fp32", **options)
    [bucket] = run.buckets
    grads = bucket.states[Band.GRADS]
    grads[...] = whole if grads.shape[1] == len(whole) else whole.reshape(2, -1)
    with run.ledger.step():
        return run.agreement.reach(1.0)


TWO_SHARDS = np.array([2, 4, 0, 0, 0, 0, 6, -8, 0, 0, 0, 0], np.float32)  # squares of 20, and of 100


@each_scheme
def test_two_shards_have_one_norm(row: Any) -> None:
    """Squares that sum to 20 and to 100 have the norm of 120 on every rank, which says what all are multiplied by."""
    found = agreed(row, TWO_SHARDS, clip=1.0)
    np.testing.assert_allclose(found.norm, [120**0.5] * 2, rtol=1e-7)
    np.testing.assert_allclose(found.factor, [[1 / (120**0.5 + 1e-6)]] * 2, rtol=1e-6)


@each_scheme
def test_the_largest_magnitude_is_a_norm(row: Any) -> None:
    """The infinity norm is that of the largest element on any rank, whatever its sign, exactly."""
    found = agreed(row, TWO_SHARDS, clip=1.0, norm_type=float("inf"))
    assert found.norm.tolist() == [8.0, 8.0]
    assert found.factor.tolist() == [[np.float32(1) / (np.float32(8) + np.float32(1e-6))]] * 2


@each_scheme
def test_what_is_added_to_the_norm_may_be_nothing(row: Any) -> None:
    """With ``clip_eps=0``, as optax and TensorFlow have it, the coefficient is max_norm / norm; 1e-6 shows at small
    norms. A gradient of zero is left alone either way."""
    small = TWO_SHARDS * np.float32(2**-20)
    norm, most = np.float32(np.sqrt(np.float32(120))) * np.float32(2**-20), np.float32(2**-22)
    exact = agreed(row, small, clip=2**-22, clip_eps=0.0)
    usual = agreed(row, small, clip=2**-22)
    assert exact.factor.tolist() == [[most / norm]] * 2
    assert usual.factor.tolist() == [[most / (norm + np.float32(1e-6))]] * 2
    assert exact.factor[0, 0] > 1.05 * usual.factor[0, 0]
    assert agreed(row, np.zeros_like(small), clip=1.0, clip_eps=0.0).factor.tolist() == [[1.0]] * 2


def test_six_overflows_in_a_row() -> None:
    """With a hysteresis of 2 the first is tolerated, and each that follows halves the scale."""
    scaler, seen = Scaler(LossScale(hysteresis=2)), []
    for _ in range(6):
        scaler.update(finite=False)
        seen.append(scaler.scale)
    assert seen == [65536.0, 32768.0, 16384.0, 8192.0, 4096.0, 2048.0]


@each_scheme
def test_gradients_that_vanish_survive_where_the_loss_is_scaled(row: Any) -> None:
    """In fp16 all of a layer's gradients are zero at a loss of 1e-12 without a scale, and none of them with one."""
    layer, x = zs.MLP((17, 257)), draw(1, 8, (17, 257))[0][0]
    flat, cut = zs.DP(layer, 1).flat(Band.PARAMS).astype(np.float32), 17 * 257
    y = x @ flat[:cut].reshape(17, 257) + flat[cut:] + np.float32(1e-6)
    found = []
    for scale in (None, 2.0**16):
        run = row(layer, 2, loss_scale=scale)
        assert run.step([(x, y)] * 2) == pytest.approx(1e-12, rel=0.1)
        found.append(np.count_nonzero(run.whole(run.buckets[0], Band.GRADS)))
    assert found == [0, layer.n_params]


@pytest.mark.parametrize("clip", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_largest_norm_that_is_none_is_refused(clip: float) -> None:
    """The error names the option, the rule and the value."""
    with pytest.raises(ValueError, match=rf"Scheme\(clip\): .* positive, finite number; got {clip}"):
        Options(clip=clip)


@pytest.mark.parametrize("norm_type", [1.0, 0.0, float("nan")])
def test_a_norm_of_another_type_is_refused(norm_type: float) -> None:
    """There are two."""
    with pytest.raises(ValueError, match=rf"Scheme\(norm_type\): 2 or inf; got {norm_type}"):
        Options(norm_type=norm_type)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_what_cannot_be_added_to_a_norm_is_refused(eps: float) -> None:
    """The error names the option and the value."""
    with pytest.raises(ValueError, match=rf"Scheme\(clip_eps\): .* 0 or more; got {eps}"):
        Options(clip=1.0, clip_eps=eps)


@pytest.mark.parametrize(
    ("option", "other"),
    [({"norm_type": float("inf")}, "clip"), ({"clip_eps": 0.0}, "clip"), ({"average": "ranks"}, "uneven")],
    ids=str,
)
def test_an_option_that_would_do_nothing_is_refused(option: dict[str, Any], other: str) -> None:
    """It says what it takes."""
    with pytest.raises(ValueError, match=rf"without {other} it does nothing; got .*\. Pass {other} too"):
        Options(**option)


@pytest.mark.parametrize(
    "rule",
    [
        {"init": 0.0}, {"init": -1.0}, {"init": float("nan")}, {"init": float("inf")}, {"growth": 1.0},
        {"backoff": 1.0}, {"backoff": 0.0}, {"least": -1.0}, {"interval": 0}, {"hysteresis": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_loss_scale_that_cannot_be_is_refused(rule: dict[str, Any]) -> None:
    """Whatever number of it cannot be, in words."""
    with pytest.raises(ValueError, match="LossScale"):
        LossScale(**rule)


def test_a_scale_that_is_no_power_of_two_is_noted() -> None:
    """It is taken, with a warning; powers of two, below 1 too, have none."""
    with pytest.warns(UserWarning, match=r"1000.0 is no power of two, so that scaling rounds gradients"):
        Options(loss_scale=1000.0)
    with pytest.warns(UserWarning, match=r"3.0 is no power of two"):
        Options(loss_scale=LossScale(growth=3.0))
    assert Options(loss_scale=0.25).loss_scale == LossScale(0.25, dynamic=False)


@each_scheme
@pytest.mark.parametrize("nothing", ["rows", "weights"])
def test_nothing_to_average_is_refused_and_changes_nothing(row: Any, nothing: str) -> None:
    """Weights that sum to zero, or no rows at all, are refused in words, and every state stays as it was."""
    run = row(zs.MLP(WIDTHS), 2, uneven=True)
    batch = draw(2, 3, WIDTHS)
    run.step(batch)
    before = [state.tobytes() for bucket in run.buckets for state in bucket.states.values()]
    empty, weights = ([(x[:0], y[:0]) for x, y in batch], None) if nothing == "rows" else (batch, [0, 0])
    with pytest.raises(ValueError, match="the rows or weights of all ranks sum to zero"):
        run.step(empty, weights=weights)
    assert [state.tobytes() for bucket in run.buckets for state in bucket.states.values()] == before
    assert (run.steps, run.updates) == (1, 1)


@pytest.mark.parametrize("weights", [[-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_a_weight_that_is_none_is_refused(weights: list[float]) -> None:
    """Weights are finite and not negative."""
    with pytest.raises(ValueError, match=r"step\(weights\): weights are finite and not negative"):
        ZeRO1(zs.MLP(WIDTHS), 2, uneven=True).step(draw(2, 3, WIDTHS), weights=weights)


@pytest.mark.parametrize(
    ("spoil", "weights", "says"),
    [
        (lambda x, y: (x[:0], y), None, r"step\(batch\): x of rank 0 has no rows and y has 3"),
        (lambda x, y: x, None, r"step\(batch\): rank 0 needs a pair \(x, y\); got ndarray"),
        (lambda x, y: (x, y), [1e39, 1], r"step\(weights\): weights are finite and not negative, 1e\+30 at most"),
        (lambda x, y: (x, y), ["1", 1], r"step\(weights\): weights are finite"),
        (lambda x, y: (x, y), 2, r"step\(weights\): needs one entry per rank, 2 in all; got int"),
    ],
)
@pytest.mark.usefixtures("as_users_call_it")
def test_what_uneven_ranks_cannot_have_is_refused(spoil: Any, weights: Any, says: str) -> None:
    """Targets that nobody would look at, what is no pair, and weights whose shares would be nothing."""
    run, batch = ZeRO1(zs.MLP(WIDTHS), 2, uneven=True), draw(2, 3, WIDTHS)
    with pytest.raises(ValueError, match=says):
        run.step([spoil(*batch[0]), batch[1]], weights=weights)
    assert run.step(batch) == ZeRO1(zs.MLP(WIDTHS), 2, uneven=True).step(batch)


def test_on_shapes_all_ranks_have_as_many_rows() -> None:
    """One rank stands for all, so uneven ones are refused in words."""
    with pytest.raises(ValueError, match=r"^dry\(uneven\): on shapes one rank stands for all"):
        zs.dry(zs.MLP(WIDTHS), ZeRO1, ranks=2, uneven=True)


def test_ranks_are_weighed_only_where_they_may_differ() -> None:
    """Weights for an even batch say what to pass."""
    with pytest.raises(ValueError, match="Pass uneven=True"):
        ZeRO1(zs.MLP(WIDTHS), 2).step(draw(2, 3, WIDTHS), weights=[1, 1])


@each_scheme
def test_one_and_three_rows_are_four(row: Any) -> None:
    """The loss is the average over all rows, and the naive mean of two means is said beside it."""
    run = row(zs.MLP(WIDTHS), 2, uneven=True)
    [(x, y), other] = draw(2, 3, WIDTHS)
    loss = run.step([(x[:1], y[:1]), other])
    first, second = run.reports[-1].losses
    assert loss == pytest.approx((first + 3 * second) / 4, rel=1e-15)
    assert run.reports[-1].mean_of_means == pytest.approx((first + second) / 2, rel=1e-15)


# -- micro-batches that differ

ROWS = [[1, 0], [3, 2]]  # of two ranks, in each of two micro-batches


def window(rows: list[list[int]], seed: int = 7) -> list[list[tuple[Array, Array]]]:
    """For each rank its micro-batches of so many rows."""
    whole = draw(len(rows), 9, WIDTHS, seed=seed)
    ends = [np.cumsum(counts).tolist() for counts in rows]
    return [
        [(x[end - count : end], y[end - count : end]) for count, end in zip(counts, each, strict=True)]
        for (x, y), counts, each in zip(whole, rows, ends, strict=True)
    ]


def gradient(row: Any, batch: Any, *, ranks: int = 2, **options: Any) -> Any:
    """A run after one step on it, and the averaged gradient."""
    run = row(zs.MLP(WIDTHS), ranks, precision="fp32", **options)
    run.step(batch)
    return run, run.flat(Band.GRADS) if run.shard.grads or ranks == 1 else run.whole(run.buckets[0], Band.GRADS)


@each_scheme
@pytest.mark.parametrize("sync", ["each", "end"])
def test_every_row_of_every_micro_batch_counts_alike(row: Any, sync: str) -> None:
    """Over ranks and micro-batches of 1, 0, 3 and 2 rows the average is that of one rank with all six."""
    batch = window(ROWS)
    run, found = gradient(row, batch, accumulate=2, uneven=True, sync=sync)
    one = [np.concatenate([array for pairs in batch for array in (pair[side] for pair in pairs)]) for side in (0, 1)]
    alone, expected = gradient(row, [tuple(one)], ranks=1)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)
    assert run.reports[-1].loss == pytest.approx(alone.reports[-1].loss, rel=1e-6)
    losses = [gradient(row, [pair], ranks=1)[0].reports[-1].loss for pairs in batch for pair in pairs if len(pair[0])]
    assert run.reports[-1].mean_of_means == pytest.approx(sum(losses) / 4, rel=1e-15)  # what is empty counts as 0


@each_scheme
def test_a_micro_batch_that_nobody_has_rows_in_changes_no_bit(row: Any) -> None:
    """Every rank takes part in it with nothing, and what comes of the others is what came of them."""
    rows = window([[2], [1]])
    empty = [(x[:0], y[:0]) for [(x, y)] in rows]
    runs = [row(zs.MLP(WIDTHS), 2, accumulate=2, uneven=True) for _ in range(2)]
    runs[0].step([[pair, nothing] for [pair], nothing in zip(rows, empty, strict=True)])
    runs[1].step(rows)  # the same, as a window of one
    assert runs[0].full_theta().tobytes() == runs[1].full_theta().tobytes()
    assert runs[0].reports[-1].loss == runs[1].reports[-1].loss


class Spoilt(LocalRing):
    """All ranks, with memory that raises in whatever is computed with it before it is written."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        array = super().empty(shape, dtype)
        memory = array.reshape(-1).view(np.uint8)
        memory[...] = np.resize(np.frombuffer(b"\x00\x00\xa0\x7f", np.uint8), memory.size)  # signalling NaNs
        return array


@each_scheme
def test_what_lies_beyond_a_ranks_rows_is_not_computed_with(row: Any) -> None:
    """Where ranks have different rows, nothing but their own is read, whatever memory holds."""
    run = row(zs.MLP((2, 3, 4)), 2, uneven=True, accumulate=2, precision="fp32", ring=Spoilt(2))
    for _ in range(2):
        assert np.isfinite(run.step(window(ROWS)))
    assert np.isfinite(run.full_theta()).all()


@each_scheme
def test_an_incomplete_window_is_divided_by_what_it_has(row: Any) -> None:
    """Three micro-batches of four are averaged over their rows; over ranks and micro-batches they are three quarters
    of their mean, as in a loop that divides each loss by four."""
    batch = window([[2, 2, 2], [2, 2, 2]])
    _, full = gradient(row, batch, accumulate=3, uneven=True)
    short, over_rows = gradient(row, batch, accumulate=4, uneven=True)
    _, over_ranks = gradient(row, batch, accumulate=4, uneven=True, average="ranks")
    np.testing.assert_allclose(over_rows, full, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(over_ranks, full * np.float32(3 / 4), rtol=2e-6, atol=1e-7)
    assert short.reports[-1].flops["forward"] == 3 * 2 * 2 * 2 * 4  # of three micro-batches of two rows, and no more


@each_scheme
def test_over_ranks_the_average_is_the_mean_of_means(row: Any) -> None:
    """As DistributedDataParallel averages: one row weighs as much as three, the loss says so, and nobody tells rows."""
    [(x, y), other] = draw(2, 3, WIDTHS)
    batch = [(x[:1], y[:1]), other]
    run, found = gradient(row, batch, uneven=True, average="ranks")
    each = [gradient(row, [pair], ranks=1)[1] for pair in batch]
    np.testing.assert_allclose(found, (each[0] + each[1]) / 2, rtol=2e-6, atol=1e-7)
    assert run.reports[-1].loss == run.reports[-1].mean_of_means == sum(run.reports[-1].losses) / 2
    assert not any(tag == "rows" for _, tag in run.reports[-1].traffic)
    with pytest.raises(ValueError, match=r"step\(weights\): .* averaged over rows"):
        run.step(batch, weights=[1, 1])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1, 1], [1]], "rank 1 has 1 pairs; every rank needs 2, one for each micro-batch"),
        ([[1], [1, 1]], "rank 1 has 2 pairs; every rank needs 1, one for each micro-batch"),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], "rank 0 has 4 pairs; every rank needs 3, one for each micro-batch"),
        ([[], []], "rank 0 has 0 pairs; every rank needs 3, one for each micro-batch"),
    ],
    ids=str,
)
def test_ranks_have_as_many_micro_batches(rows: list[list[int]], said: str) -> None:
    """A window may be short, but of all ranks alike."""
    with pytest.raises(ValueError, match=said):
        ZeRO2(zs.MLP(WIDTHS), 2, accumulate=3, uneven=True).step(window(rows))
