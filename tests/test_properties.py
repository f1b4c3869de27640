"""What holds for every model, every number of ranks and every option, on examples drawn at random.

The examples are the same at every run; ``--hypothesis-profile=default`` looks for new ones.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import EVERYWHERE, MINE, OWN, Batch, bits, draw, examples, nonzero, options, perceptrons, traffic, wires
from zerosim.bands import MODEL_STATES, PRECISIONS, WIRES, Band
from zerosim.buckets import PADDINGS
from zerosim.checks import compare as checks
from zerosim.counts import Report
from zerosim.lab.experiment import Run, batches_of, model_of
from zerosim.model import MLP
from zerosim.records.results import Failure, Settings
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

Options = dict[str, Any]
ROWS = (*SCHEMES, *OWN)


# -- what is drawn


@st.composite
def labs(draw: st.DrawFn) -> Settings:
    """Settings of a lab on a model of up to four layers and on up to 40 ranks."""
    precision = draw(st.sampled_from(EVERYWHERE))
    return Settings(
        widths=draw(st.lists(st.integers(1, 11), min_size=2, max_size=5)),
        ranks=draw(st.integers(1, 40)),
        steps=draw(st.integers(1, 3)),
        batch=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 2**32)),
        model_seed=draw(st.integers(0, 2**32)),
        precision=precision,
        wire=draw(wires(precision)),
        gather=draw(st.sampled_from(["layer", "model"])),
        data="noise",
        capacity=None,
    )


ranks = st.integers(1, 13)


def batch_for(scheme: Scheme, seed: int) -> Batch:
    """A pair of noise for each rank, with two rows for each micro-batch."""
    assert isinstance(scheme.model, MLP)
    return draw(scheme.ring.size, 2 * scheme.options.accumulate, scheme.model.widths, seed)


def steps(schemes: list[Scheme], count: int = 2) -> Iterator[int]:
    """Train the schemes side by side on the same batches, watching each, and stop after every step."""
    for step in range(1, count + 1):
        for scheme in schemes:
            step_watched(scheme, batch_for(scheme, step))
        yield step


# -- what holds of any scheme at any time


def live(scheme: Scheme) -> list[tuple[str, str, int]]:
    """What is held: band, unit and the very array."""
    return [(band, unit, id(array)) for band, unit, array in scheme.ranks.live()]


def step_watched(scheme: Scheme, batch: Batch) -> None:
    """A step that leaves nothing behind, forgets nothing and keeps padding zero, on every rank."""
    before = dict(scheme.ledger.held), scheme.ledger.total, live(scheme)
    scheme.step(batch)
    held = nonzero(scheme.ledger.held)
    assert ({band: before[0].get(band, 0) for band in held}, *before[1:]) == (held, scheme.ledger.total, live(scheme))
    assert scheme.ledger.total == sum(held.values())
    assert all(rank.held() == held for rank in scheme.ranks)
    assert scheme.reports[-1].resident == held
    for bucket in scheme.buckets:
        for band, state in bucket.states.items():
            n, length = scheme.ring.size, state.shape[1]
            pieces = [scheme.shard.piece(band, rank, n) for rank in range(n)]
            assert {length * count for _, count in pieces} == {bucket.padded}
            for held, (piece, _) in zip(state, pieces, strict=True):
                padding = held[max(0, bucket.size - piece * length) :]
                assert not bits(padding).any(), f"{band} of {bucket.name} has padding that is not zero"


def alike(schemes: list[Scheme], step: int) -> list[Failure]:
    """Where a scheme holds other bits than the first, on any rank, or has had another loss."""
    reference = checks.whole_states(schemes[0])
    losses = {f"{index}, {each.name}": each.reports[-1].loss for index, each in enumerate(schemes)}
    failures = checks.same_losses(losses, schemes[0].ring.size, step)
    for scheme in schemes:
        failures += checks.compare(scheme, reference, step)[1]
    return failures


def flops(report: Report) -> dict[str, int]:
    return {phase: count for phase, count in report.flops.items() if count}


# -- the properties


@examples(by_night=30, by_day=15)
@given(labs(), st.sampled_from(OWN), st.integers(0, 4))
def test_every_equality_of_the_lab_holds(lab: Settings, mine: Stage, sanitized: int) -> None:
    """The four schemes and a row of one's own agree bit for bit on all ranks, and all counts are the closed forms'.

    One of them is run in the stricter world as well.
    """
    runs = [Run(stage, lab, model_of(lab), lab.ranks) for stage in (*SCHEMES, mine)]
    for step, batch in enumerate(batches_of(lab, lab.ranks, lab.steps), start=1):
        for run in runs:
            before = dict(run.scheme.ledger.held), live(run.scheme)
            run.step(batch)
            assert ({band: run.scheme.ledger.held[band] for band in before[0]}, live(run.scheme)) == before
        assert alike([run.scheme for run in runs], step) == []
    failures = [run.finish(sanitized=index == sanitized) for index, run in enumerate(runs)]
    assert [str(failure) for some in failures for failure in some] == []


@examples(by_night=30, by_day=15)
@given(perceptrons, ranks, options(), st.booleans(), st.integers(0, 3), st.sampled_from(["layer", "model"]))
def test_all_schemes_are_alike_under_the_same_options(
    model: MLP, ranks: int, shared: Options, all_reduce: bool, prefetch: int, gather: str
) -> None:
    """Whatever they share, micro-batches and when they are reduced included, the schemes hold the same bits.

    So they do if ZeRO-1 and -2 all-reduce, and however much ZeRO-3 gathers and how far ahead.
    """
    own: list[tuple[Stage, Options]] = [
        (DP, {}),
        (MINE, {}),
        (ZeRO1, {"all_reduce": all_reduce}),
        (ZeRO2, {"all_reduce": all_reduce}),
        (ZeRO3, {"prefetch": prefetch, "gather": gather}),
    ]
    schemes = [stage(model, ranks, **shared, **more) for stage, more in own]
    for step in steps(schemes):
        assert [str(failure) for failure in alike(schemes, step)] == []


@examples(by_night=30, by_day=15)
@given(perceptrons, ranks, options([*EVERYWHERE, "fsdp"]), st.integers(1, 4))
def test_gathering_ahead_changes_memory_alone(model: MLP, ranks: int, shared: Options, prefetch: int) -> None:
    """ZeRO-3 that gathers layers ahead learns, sends, computes and rests at the same; its peak is no lower."""
    schemes = [ZeRO3(model, ranks, **shared, prefetch=ahead) for ahead in (0, prefetch)]
    for step in steps(schemes):
        assert [str(failure) for failure in alike(schemes, step)] == []
        lazy, eager = (scheme.reports[-1] for scheme in schemes)
        assert (traffic(lazy), flops(lazy), lazy.resident) == (traffic(eager), flops(eager), eager.resident)
        assert lazy.peak.total <= eager.peak.total


@examples(by_night=30, by_day=15)
@given(perceptrons, ranks, options(), st.sampled_from(ROWS))
def test_checkpointing_costs_a_second_forward(model: MLP, ranks: int, shared: Options, stage: Stage) -> None:
    """A layer that runs forward again learns and sends the same, and its backward has the forward's FLOPs on top."""
    schemes = [stage(model, ranks, **shared | {"checkpoint": again}) for again in (False, True)]
    for step in steps(schemes):
        assert [str(failure) for failure in alike(schemes, step)] == []
        once, twice = (scheme.reports[-1] for scheme in schemes)
        assert traffic(once) == traffic(twice)
        extra = {"backward": once.flops["backward"] + once.flops["forward"]}  # type: ignore[index]
        assert flops(twice) == flops(once) | extra


@examples(by_night=30, by_day=15)
@given(perceptrons, ranks, options(), st.sampled_from([ZeRO1, ZeRO2]))
def test_all_reducing_sends_twice_the_gradients(model: MLP, ranks: int, shared: Options, stage: Stage) -> None:
    """ZeRO-1 or -2 that all-reduces instead of reduce-scattering learns the same and sends gradients twice."""
    schemes = [stage(model, ranks, **shared, all_reduce=twice) for twice in (False, True)]
    for step in steps(schemes):
        assert [str(failure) for failure in alike(schemes, step)] == []
        scattered, reduced = (traffic(scheme.reports[-1]) for scheme in schemes)
        grads = scattered.pop(("reduce-scatter", Band.GRADS), None)
        assert reduced.pop(("all-reduce", Band.GRADS), None) == (grads and [2 * nbytes for nbytes in grads])
        assert scattered == reduced


@examples(by_night=30, by_day=15)
@given(perceptrons, ranks, options(["mixed", "bf16", "mixed-main-grads", "bf16-fp32-grads"]), st.sampled_from(ROWS))
def test_parameters_may_travel_in_their_own_dtype(model: MLP, ranks: int, shared: Options, stage: Stage) -> None:
    """Parameters sent in 16 bits instead of 32 arrive as they were, for half the bytes; gradients are as before."""
    narrow = next(name for name, dtype in WIRES.items() if dtype == PRECISIONS[shared["precision"]].working)
    schemes = [stage(model, ranks, **shared | {"wire": "fp32", "wire_params": wire}) for wire in ("fp32", narrow)]
    for step in steps(schemes):
        assert [str(failure) for failure in alike(schemes, step)] == []
        wide, half = (traffic(scheme.reports[-1]) for scheme in schemes)
        key = ("all-gather", Band.PARAMS)
        assert half == wide | {key: [nbytes // 2 for nbytes in wide[key]] for key in [key] if key in wide}


@examples(by_night=30, by_day=15)
@given(perceptrons, st.integers(1, 2), options(), st.sampled_from(sorted(PADDINGS)), st.integers(1, 200))
def test_buckets_and_padding_change_bytes_alone(
    model: MLP, ranks: int, shared: Options, padding: str, bucket: int
) -> None:
    """On two ranks, where a sum has one order, other buckets and other padding leave every parameter as it is."""
    shared = shared | {"bucket": "layer", "padding": "N"}
    for stage in SCHEMES:
        one, other = (
            stage(model, ranks, **shared),
            stage(model, ranks, **shared | {"bucket": bucket, "padding": padding}),
        )
        for _ in steps([one, other]):
            assert one.reports[-1].loss == other.reports[-1].loss
            for band in one.states:
                assert one.flat(band).tobytes() == other.flat(band).tobytes()


def test_all_states_that_ranks_share_are_compared() -> None:
    """Of the model states only the gradients are not compared: under ZeRO-1 each rank keeps its own of them."""
    assert set(MODEL_STATES) - set(checks.COMPARED) == {Band.GRADS}
