"""What mutation testing showed that no other test noticed; docs/MUTANTS.md has what is left."""

from typing import Any

import jaxtyping
import numpy as np
import pytest

from zerosim import theory
from zerosim.bands import FP16, FP32, PRECISIONS, Band
from zerosim.comm import Comm, LocalRing
from zerosim.measure import EventKind, Ledger, Peak, Phase
from zerosim.model import MLP
from zerosim.optimizer import SGD
from zerosim.ranks import Ranks, Workspace
from zerosim.schemes import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3

# -- comm


def test_an_average_is_scaled_in_fp32_and_then_rounded() -> None:
    """Three of six ranks hold fp16's least number; in fp32 the average is a tie, which rounds to even, that is to 0.

    In more than fp32 it is a little over a tie, as 1/6 is rounded up, and would round to the least number.
    """
    ring, ledger = LocalRing(6), Ledger(6)
    ranks = Ranks(ring.ids, PRECISIONS["mixed"].dtypes(FP16), ledger, ring.empty)
    comm = Comm(ring, FP16, Workspace(ranks, Band.BLOCKS), ledger)
    buffer = np.zeros((6, 6), FP16)
    buffer[:3] = 2.0**-24
    comm.all_reduce(buffer, 6, scale=1 / 6, band=Band.GRADS, unit="")
    assert float(np.float32(3 * 2.0**-24) * np.float32(1 / 6)) == 2.0**-25
    assert not buffer.any()


@pytest.mark.parametrize("stage", SCHEMES, ids=lambda stage: stage.name)
def test_what_is_sent_and_held_in_flight_is_some_layers(stage: Stage) -> None:
    """Every message, and every block that it travels in, is booked for the layer it is of, in whole bytes."""
    scheme = stage(MLP((3, 5, 2)), 3)
    x, y = np.ones((2, 3), FP32), np.ones((2, 2), FP32)
    scheme.step([(x, y)] * 3)
    flying = [event for event in scheme.reports[-1].events if event.name == Band.BLOCKS or event.kind is EventKind.SEND]
    assert {event.unit for event in flying} == {"layer 1", "layer 2"}
    assert {type(event.nbytes) for event in flying} == {int}
    assert {type(traffic.sent_each) for traffic in scheme.reports[-1].traffic.values()} == {int}
    assert {type(traffic._received) for traffic in scheme.reports[-1].traffic.values()} == {int}


# -- measure


def test_nothing_held_is_a_peak_of_nothing() -> None:
    """A ledger begins without a peak, and the first byte is one."""
    ledger = Ledger(2)
    assert (ledger.peak(), ledger.peak_without_activations()) == (Peak(0, {}, "", Phase.OTHER),) * 2
    ledger.hold(Band.PARAMS, 1, "layer")
    assert ledger.peak() == ledger.peak_without_activations() == Peak(1, {Band.PARAMS: 1}, "layer", Phase.OTHER)


# -- optimizer


@pytest.mark.parametrize(("momentum", "operations"), [(0.0, 2), (0.9, 4)])
def test_the_operations_of_sgd(momentum: float, operations: int) -> None:
    """A multiplication and a subtraction for each element of a row, and as many again for the momentum."""
    done: list[int] = []
    states = {str(band): np.zeros((3, 5), FP32) for band in SGD(momentum=momentum).states}
    SGD(momentum=momentum).update(np.ones((3, 5), FP32), np.ones((3, 5), FP32), **states, step=1, flops=done.append)
    assert done == [5 * operations]


# -- theory


def test_the_moments_of_gathering_everything_at_once() -> None:
    """Bucket upon bucket is gathered, 2 bytes for each padded parameter, and only then does anything compute."""
    job = theory.Job(stage=3, buckets=(((2, 3),), ((3, 5),)), ranks=2, rows=1, gather="model")
    first, second = 2 * (10 // 2 + 0) * 2, 2 * 10 * 2  # 2·3 + 3 = 9 and 3·5 + 5 = 20 parameters in two chunks each
    gathered = [moment[Band.GATHERED] for moment in theory.moments(job)]
    both = [first + second] * 2
    assert gathered[:5] == [0, first, first + second, *both]


def test_a_job_without_rows_has_no_activations() -> None:
    """The rows of a batch are for activations alone: without any, the peak is the same as the one without them."""
    for stage in range(4):
        job = theory.Job(stage=stage, buckets=(((7, 11),),), ranks=3)
        assert theory.peak(job) == theory.peak_without_activations(job)


# -- schemes


@pytest.mark.parametrize(
    ("stage", "whole", "sharded", "transient"),
    [(DP, 2 + 2 + 12, 0, 0), (ZeRO1, 2 + 2, 12, 0), (ZeRO2, 2, 2 + 12, 2), (ZeRO3, 0, 2 + 2 + 12, 2 + 2)],
    ids=str,
)
def test_the_memory_that_a_stage_will_need(stage: Stage, whole: int, sharded: int, transient: int) -> None:
    """States whole or sharded, and the largest bucket's gathered parameters and unreduced gradients for a while."""
    small, large = 7, 13  # chunks of 2 and 3 elements on five ranks
    states = whole * 5 * (2 + 3) + sharded * (2 + 3)
    assert stage.footprint([small, large], 5, PRECISIONS["mixed"]) == states + transient * 5 * 3


@pytest.mark.parametrize("stage", SCHEMES, ids=str)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", "MLP"), ("optimizer", "Adam"), ("padding", "3N"), ("sync", "never"), ("precision", "fp8"),
        ("accumulate", 0), ("prefetch", -1), ("bucket", "row"), ("gather", "all"), ("wire_params", "fp8"),
        ("all_reduce", 1), ("checkpoint", 1), ("capacity", 0), ("ranks", 0),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_refused_by_name(
    stage: Stage, option: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing checks types, the error begins with the call and the option, whichever it is."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    arguments: dict[str, Any] = {"model": MLP([2, 3]), "ranks": 2} | {option: value}
    with pytest.raises((TypeError, ValueError), match=rf"^Scheme\({option}\): "):
        stage(**arguments)


class Counted(MLP):
    """An MLP that takes integers, as a model of language does."""

    def check(self, batch: Any, ranks: int) -> tuple[Any, Any]:
        x, y = super().check(batch, ranks)
        return x.astype(np.int64), y


def test_a_batch_is_held_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers of 8 bytes are held as such, beside targets of 4 bytes."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    scheme = DP(Counted([5, 3]), 2)
    scheme.step([(np.ones((7, 5), np.float32), np.ones((7, 3), np.float32))] * 2)
    first, second, *_ = [event for event in scheme.reports[0].events if event.unit == "batch"]
    assert (first.nbytes, second.nbytes) == (8 * 7 * 5, 4 * 7 * 3)
