"""A step that is cut short, by Ctrl-C or an error, wherever it is: the scheme stands as it did, or says that it cannot.

The interrupt is raised by a tracer between two lines of the package, which is where Python delivers signals.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import zerosim
from helpers import batches
from zerosim.checkpoints.save import save
from zerosim.counts import Event
from zerosim.model import MLP
from zerosim.options import LossScale, Options
from zerosim.ranks import OutOfMemory
from zerosim.schemes import DP, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.stages import HFSDP, HPZ, Offload2

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
PACKAGE = str(Path(zerosim.__file__).parent)
RANKS = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"precision": "fp32", "accumulate": 2},
    {"clip": 0.5, "loss_scale": LossScale(init=4.0)},
    {"find_unused": True, "prefetch": 1},
]
ROWS: list[tuple[Stage, dict[str, Any]]] = [
    *[(row, options) for row in (DP, ZeRO1, ZeRO2, ZeRO3) for options in OPTIONS],
    *[(row, {"node": 2}) for row in (HFSDP, HPZ)],
    (Offload2, {}),
]
STEPS = batches(RANKS, 3)
REFUSED = r"^step: step 2 was cut short while states changed: ranks may not agree\. Load what was saved before it"


def scheme(which: int) -> Scheme:
    """A run of two micro-batches or one, a step of which is behind it."""
    row, options = ROWS[which]
    run = row(MLP((5, 7, 3)), RANKS, Options(**options))
    run.step(STEPS[0])
    return run


def states(run: Scheme) -> dict[Any, bytes]:
    """Every state of every bucket, with what counts steps; of gradients what the next step reads is nothing."""
    held = {
        (bucket.name, band): state.tobytes()
        for bucket in run.buckets
        for band, state in bucket.states.items()
        if "grads" not in band
    }
    return held | {"counts": repr((run.steps, run.updates, vars(run.scaler) if run.scaler else None)).encode()}


def told(run: Scheme) -> Any:
    """What the last step's report says, but for its number and its times."""
    report = run.reports[-1]
    events = [event._replace(seconds=0.0) for event in report.events]
    traffic = {key: (moved.sent.tolist(), moved.messages) for key, moved in report.traffic.items()}
    return report.loss, events, traffic, report.peak, report.resident, report.host, report.flops, report.copies


@contextmanager
def interrupted(after: int) -> Iterator[list[int]]:
    """KeyboardInterrupt after so many lines of the package; how many there were."""
    seen = [0]

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == after:
                raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield seen
    finally:
        sys.settrace(before)


@cache
def lines(which: int) -> int:
    """How many lines a step runs through."""
    run = scheme(which)
    with interrupted(0) as seen:
        run.step(STEPS[1])
    return seen[0]


def cut_short(which: int, after: int) -> tuple[Scheme, Scheme]:
    """A run whose second step was cut short after so many lines, and its twin, which has taken one step."""
    run, twin = scheme(which), scheme(which)
    with pytest.raises(KeyboardInterrupt), interrupted(after):
        run.step(STEPS[1])
    return run, twin


@settings(max_examples=80)
@given(which=st.integers(0, len(ROWS) - 1), share=st.floats(0, 1))
def test_an_interrupted_step_has_not_happened_or_none_follows(which: int, share: float) -> None:
    """After an interrupt anywhere the next step is the same as if there had been none, in bits, bytes and log; or it is
    refused, and so is saving; or, on its last line, the step was complete."""
    run, twin = cut_short(which, 1 + int(share * (lines(which) - 1)))
    try:
        run.check_whole("step")
    except RuntimeError:
        with pytest.raises(RuntimeError, match=REFUSED):
            run.step(STEPS[2])
        with pytest.raises(RuntimeError, match=r"^save: step 2 was cut short"):
            save(run, f"{os.devnull}/nowhere")
        return
    run.step(STEPS[2])
    if run.steps == 3:
        twin.step(STEPS[1])
    twin.step(STEPS[2])
    assert states(run) == states(twin)
    assert told(run) == told(twin)


@pytest.mark.parametrize("which", range(len(ROWS)), ids=lambda which: ROWS[which][0].name)
def test_a_step_that_is_cut_short_before_the_update_can_be_taken_again(which: int) -> None:
    """What stands before the update leaves a scheme that goes on, but for the lines in which an array is in the ledger
    and not yet held, or the other way round; whatever is in the update, one that refuses."""
    went_on = 0
    for part in range(1, 9):
        run, _ = cut_short(which, part * lines(which) // 20)
        try:
            run.step(STEPS[2])
        except RuntimeError as error:
            assert re.match(REFUSED, str(error))  # noqa: PT017 - it may also go on
        else:
            went_on += 1
    assert went_on >= 3

    def updating(event: Event) -> None:
        if event.kind == "compute" and event.phase.startswith(("optimizer", "host")):
            raise ZeroDivisionError

    run = scheme(which)
    run.on_event(updating)
    with pytest.raises(ZeroDivisionError):
        run.step(STEPS[1])
    run.ledger.listeners.clear()
    with pytest.raises(RuntimeError, match=REFUSED):
        run.step(STEPS[2])


def test_a_card_that_is_full_is_no_reason_to_stop() -> None:
    """After OutOfMemory in a step the scheme takes the next that fits, as though nothing had been."""
    small, large = batches(RANKS, 1, rows=2), batches(RANKS, 1, rows=200)
    twin = ZeRO2(MLP((5, 7, 3)), RANKS)
    twin.step(small[0])
    run = ZeRO2(MLP((5, 7, 3)), RANKS, capacity=twin.ledger.peak().total)
    with pytest.raises(OutOfMemory):
        run.step(large[0])
    run.step(small[0])
    assert (states(run), told(run)) == (states(twin), told(twin))
