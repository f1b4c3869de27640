"""What may have gone wrong, as numbers: each usual fault says what would have come of it.

Owns the list of faults, of the averaged gradient and of the update, each with the sentence that
names it. Must not know how it is decided which one it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from zerosim.bands import Array
from zerosim.conformance.evidence import Evidence
from zerosim.conformance.intervals import Interval, Variant
from zerosim.records.conformance import Cause

Values = Callable[[Array, Array], Array]
"""Of elements [n] and the rank that computed each [n], what their gradient would be [n]."""


class OfGradient(NamedTuple):
    """A fault of the averaged gradient."""

    cause: Cause
    text: str
    values: Values


class OfUpdate(NamedTuple):
    """A fault of the optimizer's step, under the right gradient: what would have come of it, and of whose state."""

    cause: Cause
    text: str
    result: Callable[[Array, Array], Interval]


def of_gradient(e: Evidence) -> Iterator[OfGradient]:
    """Faults of the average, the likelier first."""
    middle = e.mean([each.grad for each in e.local])
    n = e.ranks
    yield from _factors(e, middle)
    yield from _some_ranks(e, middle)
    yield from _micro_batches(e)
    if e.recipe.clip is not None:
        yield from _clips(e, middle)
    yield from _stale(e, middle)
    yield from _shifts(e, middle)
    grads = np.stack([each.grad for each in e.local])
    yield OfGradient(
        Cause.REDUCTION, "It is the largest of the ranks' gradients: reduce with SUM, then divide.",
        lambda i, _: grads[:, i].max(0),
    )  # fmt: skip
    yield OfGradient(
        Cause.REDUCTION, "It is the smallest of the ranks' gradients: reduce with SUM, then divide.",
        lambda i, _: grads[:, i].min(0),
    )  # fmt: skip
    if len({seen.rows for seen in e.seen}) > 1:
        plain = grads.mean(0)
        by_rows = sum(each * seen.rows for each, seen in zip(grads, e.seen, strict=True)) / sum(s.rows for s in e.seen)
        naive, other = (plain, "rows") if e.recipe.average == "rows" else (by_rows, "ranks")
        yield OfGradient(
            Cause.AVERAGE,
            f"The ranks have different numbers of rows, and the average is over "
            f"{'ranks: the mean of their means' if other == 'rows' else 'rows'}. Weigh each rank by its rows, or say "
            f"check(average={'ranks' if other == 'rows' else 'rows'!r}) if that is meant.",
            lambda i, _: naive[i],
        )  # fmt: skip


def _factors(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    n, k = e.ranks, e.recipe.accumulate
    factors: dict[float, str] = {}

    def may_be(factor: float, text: str) -> None:
        if abs(factor - 1) > 1e-6:
            factors.setdefault(factor, text)

    may_be(float(n), f"It is the sum over ranks, not their average: divide by {n}.")
    may_be(1 / n, f"It is divided by {n} twice.")
    if k > 1:
        may_be(float(k), f"It is the sum over {k} micro-batches, not their average: divide by {k} too.")
        may_be(float(n * k), f"It is the sum over ranks and micro-batches: divide by {n * k}.")
        may_be(1 / k, f"It is divided by the {k} micro-batches twice.")
    if e.recipe.loss_scale:
        may_be(e.scale, f"It still has the loss scale in it: divide by {e.scale:g} before the optimizer reads it.")
        may_be(1 / e.scale, f"The loss scale is divided out twice, by {e.scale:g} each time.")
    may_be(n / (n - 1) if n > 1 else 1.0, f"It is divided by {n - 1}, not by {n}.")
    may_be(n / (n + 1), f"It is divided by {n + 1}, not by {n}.")
    may_be(2.0, "It is twice as large: reduced or added twice, or divided by half of what it must be.")
    may_be(0.5, "It is half as large: divided by twice what it must be.")
    may_be(-1.0, "Its sign is wrong.")  # which parameters alone cannot tell from an update's
    cause = {
        e.scale: Cause.SCALING, 1 / e.scale: Cause.SCALING,
        float(k): Cause.ACCUMULATION if k > 1 else Cause.AVERAGE, 1 / k: Cause.ACCUMULATION,
    }  # fmt: skip
    for factor, text in factors.items():
        named = cause.get(factor, Cause.AVERAGE) if factor not in (float(n), 1 / n) else Cause.AVERAGE
        yield OfGradient(named, text, lambda i, _, f=factor: middle[i] * f)  # type: ignore[misc]


def _some_ranks(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    """Sums over some ranks, or with one too often."""
    n = e.ranks
    if n == 1:
        return
    grads = np.stack([each.grad * weight for each, weight in zip(e.local, e.weights, strict=True)])
    for factor, how in ((1.0, ""), (1 / n, f", divided by {n}")):
        yield OfGradient(
            Cause.REDUCTION,
            f"It is the rank's own gradient{how}: the reduction over ranks is missing.",
            lambda i, rank, f=factor: np.where(rank < 0, np.nan, grads[np.maximum(rank, 0), i]) * f,  # type: ignore[misc]
        )
    for other in range(n):
        yield OfGradient(
            Cause.REDUCTION,
            f"Rank {other}'s gradient is missing from the sum.",
            lambda i, _, r=other: middle[i] - grads[r, i] / n,  # type: ignore[misc]
        )
        if n > 2:
            yield OfGradient(
                Cause.REDUCTION,
                f"Rank {other}'s gradient is missing from the sum, which is divided by {n - 1}.",
                lambda i, _, r=other: (middle[i] * n - grads[r, i]) / (n - 1),  # type: ignore[misc]
            )
        yield OfGradient(
            Cause.REDUCTION,
            f"Rank {other}'s gradient is in the sum twice.",
            lambda i, _, r=other: middle[i] + grads[r, i] / n,  # type: ignore[misc]
        )
        for factor, how in ((1.0, ""), (1 / n, f", divided by {n}")):
            yield OfGradient(
                Cause.REDUCTION,
                f"It is rank {other}'s gradient alone{how}: the others' are missing.",
                lambda i, _, r=other, f=factor: grads[r, i] * f,  # type: ignore[misc]
            )
    if n >= 4:
        for name, members in (
            ("the first half of the ranks", range(n // 2)), ("the second half of the ranks", range(n // 2, n)),
            ("the even ranks", range(0, n, 2)), ("the odd ranks", range(1, n, 2)),
        ):  # fmt: skip
            for number in (len(members), n):
                yield OfGradient(
                    Cause.REDUCTION,
                    f"It is the sum over {name} alone, divided by {number}: reduce over all {n}.",
                    lambda i, _, m=members, d=number: grads[list(m)][:, i].sum(0) / d,  # type: ignore[misc]
                )


def _micro_batches(e: Evidence) -> Iterator[OfGradient]:
    k = e.recipe.accumulate
    if k == 1 or any(len(each.parts) != k for each in e.local):
        return
    for number in range(k):
        part = e.mean([each.parts[number] for each in e.local])
        which = {0: "the first micro-batch's", k - 1: "the last micro-batch's"}
        for factor, how in ((1.0, ""), (1 / k, f", divided by {k}")):
            yield OfGradient(
                Cause.ACCUMULATION,
                f"It is {which.get(number, f'that of micro-batch {number + 1}')} alone{how}: the others' are not added.",
                lambda i, _, p=part, f=factor: p[i] * f,  # type: ignore[misc]
            )
    for number in range(k):
        rest = e.mean([sum(each.parts) - each.parts[number] for each in e.local]) / k
        yield OfGradient(
            Cause.ACCUMULATION,
            f"Micro-batch {number + 1} of {k} is missing from it.",
            lambda i, _, p=rest: p[i],  # type: ignore[misc]
        )


def _clips(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    """Norms that are not the whole gradient's."""
    assert e.recipe.clip is not None
    right = (e.clip.low + e.clip.high) / 2

    def by(norms: Array) -> Values:
        factors = np.minimum(1.0, e.recipe.clip / (norms + 1e-6))
        return lambda i, rank: np.where(rank < 0, np.nan, middle[i] * factors[np.maximum(rank, 0)])

    yield OfGradient(Cause.CLIPPING, f"It is not clipped: the norm is {e.clip.norm:.4g}.", lambda i, _: middle[i])
    own = [float(np.linalg.norm(middle[e.owner == rank])) for rank in range(e.ranks)]
    if (e.owner >= 0).any():
        yield OfGradient(
            Cause.CLIPPING,
            f"It is clipped by the norm of the rank's own shard; the norm is over all shards, {e.clip.norm:.4g}: add "
            f"the ranks' squared norms before the root.",
            by(np.array(own)),
        )
    local = np.array([float(np.linalg.norm(each.grad)) for each in e.local])
    yield OfGradient(
        Cause.CLIPPING, "It is clipped by the norm of the rank's own gradient, before the average.", by(local)
    )
    clipped = [each.grad * min(1.0, e.recipe.clip / (norm + 1e-6)) for each, norm in zip(e.local, local, strict=True)]
    yield OfGradient(
        Cause.CLIPPING, "Each rank's gradient is clipped before the average: average first, then clip.",
        lambda i, _: e.mean(clipped)[i],
    )  # fmt: skip
    for name, norm in (
        ("the largest of the shards' norms", max(own)),
        ("the sum of the shards' norms", sum(own)),
        ("the sum over ranks of the whole norm", e.clip.norm * e.ranks**0.5),
        ("the norm of the ranks' sum", e.clip.norm * e.ranks),
        ("the norm with the loss scale in it", e.clip.norm * e.scale),
        ("the squared norm", e.clip.norm**2),
    ):
        factor = min(1.0, e.recipe.clip / (norm + 1e-6))
        if norm and abs(factor - right) > 1e-3 * right:
            yield OfGradient(
                Cause.CLIPPING,
                f"It is clipped by {name}, {norm:.4g}; the norm is {e.clip.norm:.4g}.",
                lambda i, _, f=factor: middle[i] * f,  # type: ignore[misc]
            )


def _stale(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    if e.past is None:
        return
    before = e.past.mean([each.grad for each in e.past.local])
    yield OfGradient(
        Cause.ACCUMULATION, "The last step's gradient is still in it: zero the gradients before the backward.",
        lambda i, _: middle[i] + before[i],
    )  # fmt: skip
    yield OfGradient(
        Cause.ACCUMULATION,
        "The last step's average is still in it, on every rank, and is reduced again: zero the gradients.",
        lambda i, _: middle[i] + before[i] * e.ranks,
    )
    yield OfGradient(
        Cause.REDUCTION,
        "It is the gradient of the step before: wait for the reduction before it is read.",
        lambda i, _: before[i],
    )


def _shifts(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    for other in _others(e):

        def of_other(i: Array, _: Array, other: int = other) -> Array:
            at = e.other_chunk(i, other)
            return np.where(at < 0, np.nan, middle[np.maximum(at, 0)])

        yield OfGradient(
            Cause.BOUNDS,
            f"It is the gradient of the chunk {_away(other)}: the shard's bounds are not the same for parameters and "
            f"gradients.",
            of_other,
        )
    size = len(middle)
    for shift in (1, -1, 2, -2):
        yield OfGradient(
            Cause.BOUNDS,
            f"Each element has the gradient of the one {abs(shift)} {'after' if shift > 0 else 'before'} it: the shard's "
            f"bounds are not the same for parameters and gradients.",
            lambda i, _, s=shift: np.where(  # type: ignore[misc]
                (i + s >= 0) & (i + s < size), middle[np.clip(i + s, 0, size - 1)], 0.0
            ),
        )


def _others(e: Evidence) -> list[int]:
    """How many chunks away another rank's may be, the nearest first."""
    return [sign * chunks for chunks in range(1, e.ranks) for sign in (1, -1)]


def _away(chunks: int) -> str:
    """Which chunk is meant."""
    if abs(chunks) == 1:
        return "after it" if chunks > 0 else "before it"
    return f"{abs(chunks)} {'after' if chunks > 0 else 'before'} it"


def misplaced(e: Evidence) -> Iterator[tuple[str, Callable[[Array], Array]]]:
    """Places that values may have been put in instead of their own: what is said, and where they belong, -1 nowhere."""
    for other in _others(e):
        yield (
            f"They are the right values of the chunk {_away(other)}: the gather puts chunks in the wrong place.",
            lambda i, o=other: e.other_chunk(i, o),  # type: ignore[misc]
        )


# -- of the update


def of_update(e: Evidence) -> Iterator[OfUpdate]:
    """Faults of the optimizer's step."""

    def under(variant: Variant | None = None, updates: int | None = None) -> Callable[[Array, Array], Interval]:
        return lambda i, _: e.advance(i, e.clipped[i], variant=variant, updates=updates)[0]

    def twice(i: Array, _: Array) -> Interval:
        theta, state = e.advance(i, e.clipped[i])
        return e.advance(i, e.clipped[i], theta=theta, state=state, updates=e.updates + 1)[0]

    def twice_counted_once(i: Array, _: Array) -> Interval:
        theta, state = e.advance(i, e.clipped[i])
        return e.advance(i, e.clipped[i], theta=theta, state=state)[0]

    rules = {each.rule for each in e.layout.parameters if each.trainable}
    adam = any(rule.kind == "adam" for rule in rules)
    t = e.updates
    yield OfUpdate(Cause.STEP, "The update is applied twice.", twice)
    if adam:
        yield OfUpdate(Cause.STEP, "The update is applied twice, with the same step count.", twice_counted_once)
        for count, text in (
            (t + 1, "The optimizer's step is counted once too often: its bias correction is that of the next step."),
            (2 * t + 1, "The optimizer's step is counted twice in every step."),
            (2 * t, "The optimizer's step is counted twice in every step."),
            (0, "The optimizer's step count stays at 1: its bias correction is that of the first step."),
            (t - 1, "The optimizer's step is counted once too few: its bias correction is that of the step before."),
            (e.ranks * (t + 1) - 1, f"The optimizer's step is counted {e.ranks} times in every step, once per rank."),
        ):
            if count != t and count >= 0:
                yield OfUpdate(Cause.STEP, text, under(updates=count))
        yield OfUpdate(
            Cause.OPTIMIZER, "The moments are not corrected for their bias.", under(Variant(corrected=False))
        )
        yield OfUpdate(
            Cause.OPTIMIZER, "eps is added before the square root, not after.", under(Variant(eps_inside=True))
        )
        swapped = Variant(swapped=True)
        if len(e.history) == t:
            yield OfUpdate(
                Cause.OPTIMIZER, "The two betas are exchanged.",
                lambda i, _: e.advance(i, e.clipped[i], variant=swapped, state=e.replayed(i, swapped))[0],
            )  # fmt: skip
    if t > 0 and any(rule.states for rule in rules):
        yield OfUpdate(
            Cause.STATE,
            "The optimizer's state is lost: it is new in this step.",
            under(Variant(forget=True), updates=0),
        )
        yield OfUpdate(
            Cause.STATE, "The optimizer's state is lost, its step count is not.", under(Variant(forget=True))
        )
        for other in _others(e):

            def of_other(i: Array, _: Array, other: int = other) -> Interval:
                at = e.other_chunk(i, other)
                state = {band: each[np.maximum(at, 0)] for band, each in e.state.items()}
                found = e.advance(i, e.clipped[i], state=state)[0]
                return Interval(np.where(at < 0, np.nan, found.lo), np.where(at < 0, np.nan, found.hi))

            yield OfUpdate(Cause.STATE, f"The optimizer's state is that of the chunk {_away(other)}.", of_other)
    yield from _numbers(e, under)


def _numbers(e: Evidence, under: Callable[..., Callable[[Array, Array], Interval]]) -> Iterator[OfUpdate]:
    rules = {each.rule for each in e.layout.parameters if each.trainable}
    seen = next((seen.numbers for seen in e.seen if "lr" in seen.numbers), None)
    rate = e.lr if e.lr is not None else next(iter(rules)).lr
    if seen is not None and abs(seen["lr"] - rate) > 1e-6 * rate:
        yield OfUpdate(
            Cause.OPTIMIZER, f"The optimizer's lr is {seen['lr']:g}; the check was told {rate:g}.",
            under(Variant(lr=seen["lr"] / rate)),
        )  # fmt: skip
    n = e.ranks
    for factor, text in (
        (float(n), f"The learning rate is {n} times as large."),
        (1 / n, f"The learning rate is divided by {n}."),
        (2.0, "The learning rate is twice as large."),
        (0.5, "The learning rate is half as large."),
        (10.0, "The learning rate is 10 times as large."),
        (0.1, "The learning rate is a tenth."),
    ):
        yield OfUpdate(Cause.OPTIMIZER, text, under(Variant(lr=factor)))
    yield OfUpdate(Cause.OPTIMIZER, "The update has the wrong sign.", under(Variant(ascent=True)))
    if any(rule.weight_decay for rule in rules):
        yield OfUpdate(Cause.OPTIMIZER, "There is no weight decay.", under(Variant(decay="none")))
        for decoupled, how in (
            (True, "added to the gradient, as Adam's"),
            (False, "taken off the parameter, as AdamW's"),
        ):
            if any(rule.decoupled is decoupled and rule.weight_decay for rule in rules):
                which = "coupled" if decoupled else "decoupled"
                yield OfUpdate(Cause.OPTIMIZER, f"Weight decay is {how} is.", under(Variant(decay=which)))
        yield OfUpdate(Cause.OPTIMIZER, "Weight decay is applied twice.", under(Variant(decay="twice")))
