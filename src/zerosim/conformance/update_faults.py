"""What may be wrong with an optimizer's step, under the right gradient, as numbers.

Owns the list of these faults, each with the sentence that names it. Must not know how it is decided which one it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from zerosim.bands import Array
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.gradient_faults import away, others
from zerosim.conformance.intervals import Interval, Variant
from zerosim.records.conformance import Cause, Rule

Result = Callable[[Array, Array], Interval]
"""Of elements [n] and the rank that computed each [n], what they would have become."""


class OfUpdate(NamedTuple):
    """A fault of the optimizer's step, under the right gradient: what would have come of it, and of whose state."""

    cause: Cause
    text: str
    result: Result


def of_update(e: Evidence) -> Iterator[OfUpdate]:
    """Faults of the optimizer's step."""
    rules = {each.rule for each in e.layout.parameters if each.trainable}
    yield OfUpdate(Cause.STEP, "The update is applied twice.", _twice(e, counted=True))
    if any(rule.kind == "adam" for rule in rules):
        yield OfUpdate(Cause.STEP, "The update is applied twice, with the same step count.", _twice(e, counted=False))
        yield from _of_adam(e)
    if e.updates > 0 and any(rule.states for rule in rules):
        yield from _of_state(e)
    yield from _numbers(e, rules)
    if any(rule.weight_decay for rule in rules):
        yield from _decay(e, rules)


def _under(e: Evidence, variant: Variant | None = None, updates: int | None = None) -> Result:
    """What the gradient makes under a variant of the rule."""
    return lambda index, _: e.advance(index, e.clipped[index], variant=variant, updates=updates)[0]


def _twice(e: Evidence, *, counted: bool) -> Result:
    def result(index: Array, _: Array) -> Interval:
        theta, state = e.advance(index, e.clipped[index])
        return e.advance(index, e.clipped[index], theta=theta, state=state, updates=e.updates + counted)[0]

    return result


def _of_adam(e: Evidence) -> Iterator[OfUpdate]:
    t, n = e.updates, e.ranks
    counted = "The optimizer's step is counted"
    for count, text in (
        (t + 1, f"{counted} once too often: its bias correction is that of the next step."),
        (2 * t + 1, f"{counted} twice in every step."),
        (2 * t, f"{counted} twice in every step."),
        (0, "The optimizer's step count stays at 1: its bias correction is that of the first step."),
        (t - 1, f"{counted} once too few: its bias correction is that of the step before."),
        (n * (t + 1) - 1, f"{counted} {n} times in every step, once per rank."),
    ):
        if count != t and count >= 0:
            yield OfUpdate(Cause.STEP, text, _under(e, updates=count))
    text = "The moments are not corrected for their bias."
    yield OfUpdate(Cause.OPTIMIZER, text, _under(e, Variant(corrected=False)))
    text = "eps is added before the square root, not after."
    yield OfUpdate(Cause.OPTIMIZER, text, _under(e, Variant(eps_inside=True)))
    if len(e.history) == t:
        swapped = Variant(swapped=True)
        yield OfUpdate(
            Cause.OPTIMIZER, "The two betas are exchanged.",
            lambda i, _: e.advance(i, e.clipped[i], variant=swapped, state=e.replayed(i, swapped))[0],
        )  # fmt: skip


def _of_state(e: Evidence) -> Iterator[OfUpdate]:
    text = "The optimizer's state is lost: it is new in this step."
    yield OfUpdate(Cause.STATE, text, _under(e, Variant(forget=True), updates=0))
    text = "The optimizer's state is lost, its step count is not."
    yield OfUpdate(Cause.STATE, text, _under(e, Variant(forget=True)))
    for other in others(e):

        def of_other(index: Array, _: Array, other: int = other) -> Interval:
            at = e.other_chunk(index, other)
            state = {band: each[np.maximum(at, 0)] for band, each in e.state.items()}
            return e.advance(index, e.clipped[index], state=state)[0].where(at >= 0)

        yield OfUpdate(Cause.STATE, f"The optimizer's state is that of the chunk {away(other)}.", of_other)


def _numbers(e: Evidence, rules: Collection[Rule]) -> Iterator[OfUpdate]:
    seen = next((seen.numbers for seen in e.seen if "lr" in seen.numbers), None)
    rate = e.lr if e.lr is not None else next(iter(rules)).lr * e.factor
    if seen is not None and rate and abs(seen["lr"] - rate) > 1e-6 * rate:
        text = f"The optimizer's lr is {seen['lr']:g}; the check was told {rate:g}."
        yield OfUpdate(Cause.OPTIMIZER, text, _under(e, Variant(lr=seen["lr"] / rate)))
    n = e.ranks
    for factor, text in (
        (float(n), f"The learning rate is {n} times as large."),
        (1 / n, f"The learning rate is divided by {n}."),
        (2.0, "The learning rate is twice as large."),
        (0.5, "The learning rate is half as large."),
        (10.0, "The learning rate is 10 times as large."),
        (0.1, "The learning rate is a tenth."),
    ):
        yield OfUpdate(Cause.OPTIMIZER, text, _under(e, Variant(lr=factor)))
    yield OfUpdate(Cause.OPTIMIZER, "The update has the wrong sign.", _under(e, Variant(ascent=True)))


def _decay(e: Evidence, rules: Collection[Rule]) -> Iterator[OfUpdate]:
    yield OfUpdate(Cause.OPTIMIZER, "There is no weight decay.", _under(e, Variant(decay="none")))
    for decoupled, which, how in (
        (True, "coupled", "added to the gradient, as Adam's"),
        (False, "decoupled", "taken off the parameter, as AdamW's"),
    ):
        if any(rule.decoupled is decoupled and rule.weight_decay for rule in rules):
            yield OfUpdate(Cause.OPTIMIZER, f"Weight decay is {how} is.", _under(e, Variant(decay=which)))
    yield OfUpdate(Cause.OPTIMIZER, "Weight decay is applied twice.", _under(e, Variant(decay="twice")))
    if any(not rule.weight_decay for rule in rules):
        text = "Weight decay is applied to what must not decay, as biases and norms mostly are. If all is to decay, "
        text += "pass check a torch optimizer that does so, made before sharding: zs.AdamW leaves them out."
        most = max(rule.weight_decay for rule in rules)
        yield OfUpdate(Cause.OPTIMIZER, text, _under(e, Variant(decay="all", amount=most)))
