"""Models known by their shapes alone: what the schedule holds, sends and books for them."""

import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from zerosim.bands import Band
from zerosim.counts import EventKind, Phase
from zerosim.layers import Role
from zerosim.schemes import DP, SCHEMES, Scheme, ZeRO2, ZeRO3
from zerosim.worlds.dry import DryRing
from zerosim.worlds.shapes import GroupShapes, ModelShapes, ShapeModel, Tensor, UnitShapes

ROWS, WIDTH, KEPT = 3, 5, 7  # of a micro-batch, of every output, of what a unit keeps besides
Y = Tensor((ROWS, WIDTH), "float32")
Y_BYTES = ROWS * WIDTH * 4
KEPT_BYTES = KEPT * 2
TOKENS = Tensor((ROWS,), "int64")


def unit(index: int, **changes: Any) -> UnitShapes:
    """One of a chain, with parameters of its own."""
    fields: dict[str, Any] = {
        "name": f"unit {index}",
        "groups": (index,),
        "saved": (Tensor((KEPT,), "bfloat16"),),
        "outputs": (Y,),
        "grads": (Y,),
        "feeds": (index - 1,) if index else (),
        "forward_flops": 11,
        "backward_flops": 23,
    }
    return UnitShapes(**(fields | changes))


def shapes(*units: UnitShapes, sizes: tuple[int, ...] | None = None, feeds: tuple[int, ...] = ()) -> ModelShapes:
    sizes = sizes or (13,) * len(units)
    return ModelShapes(
        groups=tuple(GroupShapes(f"group {index}", ((size,),)) for index, size in enumerate(sizes)),
        units=units,
        loss=UnitShapes(
            name="loss",
            saved=(Tensor((1,), "float32"),),
            feeds=feeds or (len(units) - 1,),
            forward_flops=2,
            backward_flops=3,
        ),
        inputs=(TOKENS,),
        target=TOKENS,
    )


def dry(model: ModelShapes, stage: Any = DP, ranks: int = 1, *, temporaries: bool = False, **options: Any) -> Scheme:
    """A run of one step."""
    scheme: Scheme = stage(ShapeModel(model, temporaries=temporaries), ranks, ring=DryRing(ranks), **options)
    scheme.step(scheme.model.batch(options.get("accumulate", 1)))  # type: ignore[attr-defined]
    return scheme


def most(scheme: Scheme) -> int:
    """Bytes of activations at their highest instant in the step."""
    held = highest = 0
    for event in scheme.reports[-1].events:
        if event.name == Band.ACTIVATIONS and event.kind in (EventKind.HOLD, EventKind.FREE):
            held += event.nbytes if event.kind is EventKind.HOLD else -event.nbytes
            highest = max(highest, held)
    return highest


def test_a_chain_holds_what_it_says() -> None:
    """The highest instant is in the last unit's backward: all that is kept, the batch, and two gradients."""
    scheme = dry(shapes(unit(0), unit(1)))
    peak, tokens = scheme.reports[0].peak, ROWS * 8
    kept = 2 * (Y_BYTES + KEPT_BYTES) + tokens  # the target is gone by then
    assert peak.by_band[Band.ACTIVATIONS] == kept + 2 * Y_BYTES
    assert (peak.unit, peak.phase) == ("unit 1", Phase.BACKWARD)
    assert scheme.ledger.held[Band.ACTIVATIONS] == 0
    assert scheme.model.n_params == 2 * 13
    assert np.isnan(scheme.reports[0].loss)


def test_flops_are_booked_where_they_belong() -> None:
    """Forward and backward are booked under their phases, the loss's both under neither."""
    flops = dry(shapes(unit(0), unit(1), unit(2))).reports[0].flops
    assert (flops[Phase.FORWARD], flops[Phase.BACKWARD], flops[Phase.OTHER]) == (3 * 11, 3 * 23, 2 + 3)


def test_the_loss_keeps_its_own() -> None:
    """While the loss is computed what it keeps is held beside the target and the first gradient."""
    large = 1009
    model = shapes(unit(0, saved=()))
    loss = msgspec.structs.replace(model.loss, saved=(Tensor((large,), "uint8"),))
    scheme = dry(msgspec.structs.replace(model, loss=loss))
    assert most(scheme) == 2 * ROWS * 8 + 2 * Y_BYTES + large  # x and target, the output and its gradient


def test_gradients_wait_for_their_producer() -> None:
    """A unit that feeds two later ones has one gradient, held from the later one's backward to its own."""
    skip = shapes(unit(0), unit(1), unit(2, feeds=(1, 0)))
    plain = shapes(unit(0), unit(1), unit(2))
    assert most(dry(skip)) == most(dry(plain)) + Y_BYTES
    assert dry(skip).ledger.held[Band.ACTIVATIONS] == 0


def test_a_unit_beside_the_chain_passes_gradients_on() -> None:
    """A unit that nothing needs a gradient of, rotary embeddings say, sits in the chain and takes none."""
    beside = shapes(unit(0), unit(1, grads=(), feeds=(), groups=()), unit(2, feeds=(0,)), sizes=(13, 13, 13))
    scheme = dry(beside, ZeRO3, 2)
    assert scheme.ledger.held[Band.ACTIVATIONS] == 0
    frees = [event.unit for event in scheme.reports[0].events if event.kind is EventKind.FREE]
    assert frees.index("unit 2") < frees.index("unit 1") < frees.index("unit 0")


def test_checkpointed_units_keep_their_input_alone() -> None:
    """Checkpointing takes what is saved out of every unit but the one in its backward, for a second forward."""
    units = 5
    kept = dry(shapes(*map(unit, range(units))))
    again = dry(shapes(*(unit(index, checkpointed=True) for index in range(units))))
    assert most(kept) - most(again) == (units - 1) * KEPT_BYTES
    assert again.reports[0].flops[Phase.BACKWARD] == units * (11 + 23)


def test_selective_checkpointing_brings_the_rest_back() -> None:
    """What is recomputed is held in its unit's backward alone, and its FLOPs are booked there."""
    rest = (Tensor((17,), "float32"),)
    plain = dry(shapes(unit(0), unit(1)))
    again = dry(shapes(*(unit(index, recomputed=rest, recompute_flops=5) for index in range(2))))
    assert most(again) - most(plain) == 17 * 4
    assert again.reports[0].flops[Phase.BACKWARD] == 2 * (23 + 5)


def test_temporaries_are_held_if_asked_for() -> None:
    """Scratch memory counts at its highest instant if temporaries are asked for, and not at all otherwise."""
    model = shapes(unit(0), unit(1, backward_temporaries=101, forward_temporaries=1))
    assert most(dry(model, temporaries=True)) == most(dry(model)) + 101


def test_a_frozen_base() -> None:
    """1000 frozen and 8 trainable parameters on 4 ranks: bytes at rest and sent, as derived by hand.

    Stage 2: 2 B of every parameter and 14 B of two trainable ones; sent, gradients reduced and
    parameters gathered. Stage 3 also shards the frozen ones and gathers them twice.
    """
    base = msgspec.structs.replace(
        shapes(unit(0, groups=(0, 1))),
        groups=(GroupShapes("adapter", ((8,),)), GroupShapes("base", ((1000,),), role=Role.FROZEN)),
    )
    assert (base.n_params, base.n_trainable) == (1008, 8)
    for stage, rest, sent in (
        (ZeRO2, 1008 * 2 + 2 * 2 + 2 * 12, 2 * 6 * 2),
        (ZeRO3, 252 * 2 + 2 * 2 + 2 * 12, 2 * 252 * 3 * 2 + 6 * 2),
    ):
        scheme = dry(base, stage, 4, wire="fp16")
        assert scheme.ledger.total == rest
        assert scheme.reports[0].sent() == [sent]


def test_buffers_are_counted_apart() -> None:
    """Buffers are whole on every rank, in their own dtypes, and no parameters."""
    buffered = msgspec.structs.replace(
        shapes(unit(0, groups=(0, 1, 2))),
        groups=(
            GroupShapes("weights", ((13,),)),
            GroupShapes("statistics", ((5,), (5,)), role=Role.BUFFER, dtype="float32"),
            GroupShapes("count", ((),), role=Role.BUFFER, dtype="int64"),
        ),
    )
    assert buffered.buffer_bytes == 2 * 5 * 4 + 8
    for stage in SCHEMES:
        scheme = dry(buffered, stage, 3)
        assert scheme.ledger.held[Band.BUFFERS] == buffered.buffer_bytes
        assert scheme.model.n_params == 13


def test_tied_groups_count_once() -> None:
    """A group that two units list is held once, and its gradients are written twice."""
    tied = shapes(unit(0), unit(1), unit(2, groups=(0,)), sizes=(13, 17))
    scheme = dry(tied, precision="fp32")
    assert scheme.model.n_params == 13 + 17
    assert scheme.ledger.total == 16 * (13 + 17)
    again = [event for event in scheme.reports[0].events if event.name == Band.UNREDUCED]
    assert [(event.kind, event.nbytes) for event in again] == [(EventKind.HOLD, 13 * 4), (EventKind.FREE, 13 * 4)]


def test_accumulation_takes_so_many_micro_batches() -> None:
    """Each micro-batch is as it was measured, so accumulating adds the rest of the batch to nothing."""
    once, thrice = dry(shapes(unit(0), unit(1))), dry(shapes(unit(0), unit(1)), accumulate=3)
    assert most(thrice) == most(once)
    assert thrice.reports[0].flops[Phase.FORWARD] == 3 * once.reports[0].flops[Phase.FORWARD]


def test_further_inputs_are_held() -> None:
    """What a module is called with besides x is held from the first forward to the last backward."""
    plain = shapes(unit(0), unit(1))
    masked = msgspec.structs.replace(plain, inputs=(TOKENS, Tensor((ROWS, 19), "bool")))
    assert most(dry(masked)) == most(dry(plain)) + ROWS * 19


def test_other_batches_are_refused() -> None:
    """A batch that was not measured has other bytes: it is refused, and the right call named."""
    model = ShapeModel(shapes(unit(0), unit(1)))
    scheme = DP(model, 2, ring=DryRing(2))
    [(x, target)] = model.batch()
    with pytest.raises(ValueError, match=r"target must be int64 of shape \[3\].*batch\(\)"):
        scheme.step([(x, target.astype(np.int32))])
    with pytest.raises(ValueError, match=r"measured for micro-batches of int64 of shape .3.; got 6 rows"):
        scheme.step(model.batch(2))
    with pytest.raises(ValueError, match="DryRing"):
        model.check([(x, target)] * 2, 2)
    assert scheme.ledger.held[Band.ACTIVATIONS] == 0


def test_records_that_do_not_fit_together_are_refused() -> None:
    """Gradients that go forward, groups that do not exist, and a loss of nothing are errors."""
    for wrong, words in (
        (shapes(unit(0), unit(1, feeds=(1,))), "unit 1, unit 1, feeds .1."),
        (shapes(unit(0), unit(1, groups=(2,))), "the model's 2; unit 1 has .2."),
        (shapes(unit(0), feeds=(3,)), "loss, unit 1, feeds .3."),
        (msgspec.structs.replace(shapes(unit(0)), inputs=()), "got 1, 0 and .0."),
    ):
        with pytest.raises(ValueError, match=words):
            ShapeModel(wrong)


def test_it_is_plain_data() -> None:
    """A model written as JSON and read again is the same model."""
    model = shapes(unit(0), unit(1, checkpointed=True))
    assert msgspec.json.decode(msgspec.json.encode(model), type=ModelShapes) == model
    assert model.activation_bytes == 2 * Y_BYTES + KEPT_BYTES
    assert model.flops == 11 + 23 + 2 * 11 + 23 + 2 + 3


def test_torch_is_not_loaded() -> None:
    """Shapes need no torch: a planner that is given sizes alone loads none."""
    code = "import sys, zerosim.worlds.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=40)
@given(data=st.data(), stage=st.sampled_from(SCHEMES), ranks=st.integers(1, 5), checkpoint=st.booleans())
def test_whatever_feeds_whom_nothing_stays(data: st.DataObject, stage: Any, ranks: int, checkpoint: bool) -> None:
    """For any graph of units a step ends with no activations held, and every unit's gradient is held at most once."""
    count = data.draw(st.integers(1, 6))
    feeds = [data.draw(st.sets(st.integers(0, index - 1))) if index else set() for index in range(count)]
    model = shapes(
        *(unit(index, feeds=tuple(sorted(feeds[index])), checkpointed=checkpoint) for index in range(count)),
        feeds=tuple(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))),
    )
    scheme = dry(model, stage, ranks)
    assert scheme.ledger.held[Band.ACTIVATIONS] == 0
    everything = count * (Y_BYTES * 2 + KEPT_BYTES) + 2 * ROWS * 8 + Y_BYTES
    assert most(scheme) <= everything
