"""Messages of int8 with scales: their layout, what becomes of numbers in them, and who has what of it."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings

from helpers import draw
from zerosim.bands import FP32, INT8, Array, Band
from zerosim.comm import Comm
from zerosim.ledger import Ledger
from zerosim.model import MLP
from zerosim.options import Options
from zerosim.ranks import Ranks, Workspace
from zerosim.schemes import DP, ZeRO1, ZeRO3
from zerosim.stages import HSDP, Infinity, Stage
from zerosim.util import int8
from zerosim.worlds.dry import DryArray
from zerosim.worlds.local import LocalRing


def sent(values: Array) -> Array:
    """The message that ``values`` make."""
    message = np.empty((values.size // values.shape[-1], int8.length(values.shape[-1])), np.int8)
    int8.pack(values, message)
    return message


def received(message: Array, like: Array) -> Array:
    """What it says, in the shape and dtype of ``like``."""
    out = np.empty_like(like)
    int8.unpack(message.reshape(*like.shape[:-1], -1), out)
    return out


def one_by_one(values: Array) -> Array:
    """What becomes of a row of numbers, worked out block by block in Python."""
    found: list[float] = []
    for start in range(0, len(values), 256):
        block = [np.float32(value) for value in values[start : start + 256]]
        scale = np.float32(max(abs(value) for value in block) / np.float32(127))
        for value in block:
            number = round(float(np.float32(value / (scale or np.float32(1)))))  # ties to even, as Python has it
            found.append(float(np.float32(max(-127, min(127, number))) * scale))
    return np.array(found, np.float32)


finite = st.floats(-6e4, 6e4, width=16)


@settings(max_examples=60)
@given(hnp.arrays(np.float16, st.integers(1, 600), elements=finite))
@example(np.zeros(3, np.float16))
@example(np.array([6e-8] * 300, np.float16))
@example(np.arange(257).astype(np.float16))
def test_numbers_become_multiples_of_their_blocks_scale(values: Array) -> None:
    """Each is the nearest of 255 multiples of its block's largest magnitude over 127, with ties to even."""
    found = received(sent(values.astype(np.float32)), values.astype(np.float32))
    assert found.tobytes() == (one_by_one(values) + np.float32(0)).tobytes()
    for start in range(0, len(values), 256):
        block = values[start : start + 256].astype(np.float64)
        assert np.abs(found[start : start + 256] - block).max() <= np.abs(block).max() / 127 / 2 * (1 + 1e-6)


@pytest.mark.parametrize("shape", [(5,), (3, 256), (2, 257), (2, 3, 300)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rows_are_messages_of_their_own(shape: tuple[int, ...], dtype: type) -> None:
    """Any leading axes, any strides; a row is its scales, 4 bytes for every 256 numbers begun, then a byte for each."""
    values: Array = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    message = sent(values)
    count = shape[-1]
    assert message.shape[1] == 4 * -(-count // 256) + count
    assert int8.scales(message).shape[1] == -(-count // 256)
    found = received(message, values)
    for row, mine in zip(found.reshape(-1, count), values.reshape(-1, count), strict=True):
        assert row.tobytes() == received(sent(mine), mine).tobytes()
    apart = np.repeat(values, 2, axis=-1)[..., ::2]
    assert sent(apart).tobytes() == message.tobytes()


def test_what_is_zero_stays_zero_and_its_scale_is_zero() -> None:
    """A block of zeros divides by nothing; what is so small that its scale is nothing becomes zero."""
    for values in (np.zeros((1, 300), np.float32), np.full((1, 5), 1e-45, np.float32)):
        message = sent(values)
        assert not int8.scales(message).any()
        assert not received(message, values).any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_finite_on_arrival(wrong: float) -> None:
    """Its block is lost, and no other; nothing warns."""
    values = np.ones((1, 512), np.float32)
    values[0, 300] = wrong
    found = received(sent(values), values)[0]
    assert np.isfinite(found[:256]).all()
    assert not np.isfinite(found[256:]).any()


def test_shapes_without_values_are_left_alone() -> None:
    """In the dry world there is nothing to round."""
    int8.pack(DryArray((1, 7), FP32), DryArray((1, int8.length(7)), INT8))  # type: ignore[arg-type]
    int8.unpack(DryArray((1, int8.length(7)), INT8), DryArray((1, 7), FP32))  # type: ignore[arg-type]


# -- on the ring


def gathered(n: int, node: int, which: int, chunk: int) -> tuple[Array, Array, Ledger]:
    """Of N ranks' own chunks, what an all-gather in a ring makes of them on every rank."""
    ledger = Ledger(n)
    ranks = Ranks(range(n), {Band.BLOCKS: INT8}, ledger, lambda shape, dtype: np.empty(shape, dtype))
    comm = Comm(LocalRing(n).split(node)[which], INT8, Workspace(ranks, Band.BLOCKS, INT8), ledger)
    own = np.random.default_rng(1).standard_normal((n, chunk)).astype(np.float16)
    buffer = np.zeros((n, chunk * comm.ring.size), np.float16)
    comm.all_gather(buffer, buffer.shape[1] - 1, own, band="params", unit="layer")
    return own, buffer, ledger


@pytest.mark.parametrize(("which", "size"), [(0, 6), (1, 2), (2, 3)], ids=["all", "inner", "outer"])
def test_the_owner_has_what_everybody_has(which: int, size: int) -> None:
    """Each chunk is on every rank of its ring what its owner's message says; what was owned is as it was."""
    chunk, node = 300, 2
    own, buffer, ledger = gathered(6, node, which, chunk)
    said = received(sent(own), own)
    assert said.tobytes() != own.tobytes()
    for rank in range(6):
        first = rank - rank % 2  # of its group
        members = [range(6), range(first, first + 2), range(rank % 2, 6, 2)][which]
        expected = np.concatenate([said[other] for other in members])
        assert buffer[rank].tobytes() == expected.tobytes()
    [moved] = ledger._open.traffic.values()
    assert moved.sent.tolist() == [(size - 1) * (chunk + 4 * 2)] * 6
    assert moved.messages == size - 1


def test_padding_is_what_a_message_would_be_shorter_by() -> None:
    """A byte for each number of padding, and the scale of a block that is nothing but padding."""
    n, chunk = 2, 257
    ledger = Ledger(n)
    ranks = Ranks(range(n), {Band.BLOCKS: INT8}, ledger, lambda shape, dtype: np.empty(shape, dtype))
    comm = Comm(LocalRing(n), INT8, Workspace(ranks, Band.BLOCKS, INT8), ledger)
    buffer = np.ones((n, n * chunk), np.float16)
    comm.all_gather(buffer, n * chunk - 3, band="params", unit="layer")
    [moved] = ledger._open.traffic.values()
    assert moved.padding.tolist() == [0, 3 + 4]  # rank 1 sends the last chunk: 257 numbers make two blocks, 254 one


def test_one_rank_alone_rounds_nothing() -> None:
    """It gathers from its own host, and sends to nobody."""
    exact, rounded = (Infinity(MLP((7, 5)), 1, wire_params=wire) for wire in ("fp32", "int8"))
    for scheme in (exact, rounded):
        scheme.step(draw(1, 2, (7, 5)))
    assert exact.full_theta().tobytes() == rounded.full_theta().tobytes()


def test_the_master_keeps_what_is_exact() -> None:
    """After a step the parameters that everybody has are rounded, and the master weights are not."""
    scheme = ZeRO1(MLP((7, 5)), 4, wire_params="int8")
    exact = ZeRO1(MLP((7, 5)), 4)
    for each in (scheme, exact):
        each.step(draw(4, 2, (7, 5)))  # before it nothing was sent, so the gradients are the same
    assert scheme.flat(Band.MASTER).tobytes() == exact.flat(Band.MASTER).tobytes()
    params, chunk = scheme.buckets[0].states[Band.PARAMS], 10
    masters = scheme.flat(Band.MASTER).astype(np.float16).reshape(4, chunk)
    assert params[2].tobytes() == received(sent(masters), masters).tobytes()


def test_gradients_are_not_rounded() -> None:
    """Data parallel sends no parameters, so it trains as without."""
    exact, same = (DP(MLP((7, 5)), 4, wire_params=wire) for wire in ("fp32", "int8"))
    for scheme in (exact, same):
        for _ in range(2):
            scheme.step(draw(4, 2, (7, 5)))
    assert exact.full_theta().tobytes() == same.full_theta().tobytes()


@pytest.mark.parametrize("row", [ZeRO3, HSDP], ids=lambda row: row.name)
def test_a_quarter_of_fp32_is_sent(row: Stage) -> None:
    """Of parameters: C + 4 for each 256 begun instead of 4 C, for every gather."""
    scheme = row(MLP((64, 128)), 4, node=2, wire_params="int8")
    scheme.step(draw(4, 1, (64, 128)))
    moved = scheme.reports[-1].traffic["all-gather", Band.PARAMS]
    chunk = (64 * 128 + 128) // (4 if row is ZeRO3 else 2)
    assert moved.sent_each == 2 * (3 if row is ZeRO3 else 1) * (chunk + 4 * -(-chunk // 256))


def test_a_precision_without_master_weights_is_refused() -> None:
    """What int8 rounds would be rounded again in every step; with either of the advised, it is taken."""
    with pytest.raises(ValueError, match=r"Scheme\(wire_params\): .*precision='fp32' has none. Use precision='mixed'"):
        Options(precision="fp32", wire_params="int8")
    for precision in ("mixed", "bf16"):
        Options(wire_params="int8", precision=precision)
    Options(precision="fp32")
    with pytest.raises(ValueError, match=r"Scheme\(wire\): wire is one of fp32, fp16, bf16; got 'int8'"):
        Options(wire="int8")
