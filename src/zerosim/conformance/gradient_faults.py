"""What may be wrong with an averaged gradient, as numbers: each usual fault says what would have come of it.

Owns the list of these faults, each with the sentence that names it, and the ways in which chunks are taken for each
other. Must not know how it is decided which one it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerosim.bands import Array
from zerosim.conformance.evidence import Evidence
from zerosim.records.conformance import Cause

Values = Callable[[Array, Array], Array]
"""Of elements [n] and the rank that computed each [n], what their gradient would be [n]; NaN where there is none."""


class OfGradient(NamedTuple):
    """A fault of the averaged gradient."""

    cause: Cause
    text: str
    values: Values


def of_gradient(e: Evidence) -> Iterator[OfGradient]:
    """Faults of the average, the likelier first."""
    middle = e.mean([each.grad for each in e.local])
    yield from _factors(e, middle)
    yield from _some_ranks(e, middle)
    yield from _micro_batches(e)
    yield from _clips(e, middle)
    yield from _stale(e, middle)
    yield from _shifts(e, middle)
    for name, pick in (("largest", np.max), ("smallest", np.min)):
        text = f"It is the {name} of the ranks' gradients: reduce with SUM, then divide."
        yield OfGradient(Cause.REDUCTION, text, _whole(pick([each.grad for each in e.local], axis=0)))
    yield from _uneven(e)


def _whole(values: Array) -> Values:
    """A gradient [P] that is the same whoever has computed it."""
    return lambda index, _: values[index]


def _by_rank(values: Array) -> Values:
    """One for each rank that may have computed it [N, P]."""
    return lambda index, ranks: np.where(ranks < 0, np.nan, values[np.maximum(ranks, 0), index])


def _factors(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    n, k, scale = e.ranks, e.recipe.accumulate, e.scale
    factors = [
        (Cause.AVERAGE, float(n), f"It is the sum over ranks, not their average: divide by {n}."),
        (Cause.AVERAGE, 1 / n, f"It is divided by {n} twice."),
        (Cause.ACCUMULATION, float(k), f"It is the sum over {k} micro-batches, not their average: divide by {k} too."),
        (Cause.AVERAGE, float(n * k), f"It is the sum over ranks and micro-batches: divide by {n * k}."),
        (Cause.ACCUMULATION, 1 / k, f"It is divided by the {k} micro-batches twice."),
        (
            Cause.SCALING,
            scale,
            f"It still has the loss scale in it: divide by {scale:g} before the optimizer reads it.",
        ),
        (Cause.SCALING, 1 / scale, f"The loss scale is divided out twice, by {scale:g} each time."),
        (Cause.AVERAGE, n / max(n - 1, 1), f"It is divided by {n - 1}, not by {n}."),
        (Cause.AVERAGE, n / (n + 1), f"It is divided by {n + 1}, not by {n}."),
        (Cause.AVERAGE, 2.0, "It is twice as large: reduced or added twice, or divided by half of what it must be."),
        (Cause.AVERAGE, 0.5, "It is half as large: divided by twice what it must be."),
        (Cause.AVERAGE, -1.0, "Its sign is wrong."),
    ]
    if e.recipe.node not in (None, 1, n):
        inner = float(e.recipe.node or 1)
        factors += [
            (Cause.AVERAGE, inner, f"It is not divided by the {inner:.0f} ranks of the group."),
            (Cause.AVERAGE, n / inner, f"It is not divided by the {n / inner:.0f} replicas of the group."),
        ]
    done = {1.0}
    for cause, factor, text in factors:
        if factor not in done:
            done.add(factor)
            yield OfGradient(cause, text, _whole(middle * factor))


def _some_ranks(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    """Sums over some ranks, or with one too often."""
    n = e.ranks
    if n == 1:
        return
    grads = np.stack([each.grad * weight for each, weight in zip(e.local, e.weights, strict=True)])
    hows = ((1.0, ""), (1 / n, f", divided by {n}"))
    for factor, how in hows:
        text = f"It is the rank's own gradient{how}: the reduction over ranks is missing."
        yield OfGradient(Cause.REDUCTION, text, _by_rank(grads * factor))
    for rank in range(n):
        text = f"Rank {rank}'s gradient is missing from the sum"
        yield OfGradient(Cause.REDUCTION, f"{text}.", _whole(middle - grads[rank] / n))
        if n > 2:
            rest = (middle * n - grads[rank]) / (n - 1)
            yield OfGradient(Cause.REDUCTION, f"{text}, which is divided by {n - 1}.", _whole(rest))
        text = f"Rank {rank}'s gradient is in the sum twice."
        yield OfGradient(Cause.REDUCTION, text, _whole(middle + grads[rank] / n))
        for factor, how in hows:
            text = f"It is rank {rank}'s gradient alone{how}: the others' are missing."
            yield OfGradient(Cause.REDUCTION, text, _whole(grads[rank] * factor))
    for name, groups in _groups(e):
        of = {rank: list(members) for members in groups for rank in members}
        for number in {len(groups[0]), n}:
            sums = np.stack(
                [grads[of[rank]].sum(0) if rank in of else np.full_like(middle, np.nan) for rank in range(n)]
            )
            text = f"It is the sum over {name} alone, divided by {number}: reduce over all {n}."
            yield OfGradient(
                Cause.REDUCTION,
                text,
                _by_rank(sums / number) if len(groups) > 1 else _whole(sums[groups[0][0]] / number),
            )


def _groups(e: Evidence) -> Iterator[tuple[str, list[Sequence[int]]]]:
    """Parts of the ranks that gradients may be summed over instead of all."""
    n, node = e.ranks, e.recipe.node
    if node not in (None, 1, n):
        size = int(node or 1)
        yield "the rank's own group", [range(first, first + size) for first in range(0, n, size)]
        yield "the rank's own replicas", [range(first, n, size) for first in range(size)]
    if n >= 4:
        yield "each half of the ranks", [range(n // 2), range(n // 2, n)]
        for name, members in (
            ("the first half of the ranks", range(n // 2)), ("the second half of the ranks", range(n // 2, n)),
            ("the even ranks", range(0, n, 2)), ("the odd ranks", range(1, n, 2)),
        ):  # fmt: skip
            yield name, [members]


def _micro_batches(e: Evidence) -> Iterator[OfGradient]:
    k = e.recipe.accumulate
    if k == 1 or any(len(each.parts) != k for each in e.local):
        return
    names = {0: "the first micro-batch's", k - 1: "the last micro-batch's"}
    for number in range(k):
        part = e.mean([each.parts[number] for each in e.local])
        for factor, how in ((1.0, ""), (1 / k, f", divided by {k}")):
            name = names.get(number, f"that of micro-batch {number + 1}")
            text = f"It is {name} alone{how}: the others' are not added."
            yield OfGradient(Cause.ACCUMULATION, text, _whole(part * factor))
    for number in range(k):
        rest = e.mean([sum(each.parts, -each.parts[number]) for each in e.local]) / k
        yield OfGradient(Cause.ACCUMULATION, f"Micro-batch {number + 1} of {k} is missing from it.", _whole(rest))


def _clips(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    """Norms that are not the whole gradient's."""
    most, norm = e.recipe.clip, e.clip.norm
    if most is None:
        return

    def factor(norm: float) -> float:
        return min(1.0, most / (norm + 1e-6))

    yield OfGradient(Cause.CLIPPING, f"It is not clipped: the norm is {norm:.4g}.", _whole(middle))
    shards = [float(np.linalg.norm(middle[e.owner == rank])) for rank in range(e.ranks)]
    if any(shards):
        text = (
            f"It is clipped by the norm of the rank's own shard; the norm is over all shards, {norm:.4g}: add the "
            f"ranks' squared norms before the root."
        )
        yield OfGradient(Cause.CLIPPING, text, _by_rank(np.stack([middle * factor(each) for each in shards])))
    own = [float(np.linalg.norm(each.grad)) for each in e.local]
    text = "It is clipped by the norm of the rank's own gradient, before the average."
    yield OfGradient(Cause.CLIPPING, text, _by_rank(np.stack([middle * factor(each) for each in own])))
    before = e.mean([each.grad * factor(size) for each, size in zip(e.local, own, strict=True)])
    text = "Each rank's gradient is clipped before the average: average first, then clip."
    yield OfGradient(Cause.CLIPPING, text, _whole(before))
    for name, other in (
        ("the largest of the shards' norms", max(shards)), ("the sum of the shards' norms", sum(shards)),
        ("the sum over ranks of the whole norm", norm * e.ranks**0.5), ("the norm of the ranks' sum", norm * e.ranks),
        ("the norm with the loss scale in it", norm * e.scale), ("the squared norm", norm**2),
    ):  # fmt: skip
        if other and abs(factor(other) - e.clip.middle) > 1e-3 * e.clip.middle:
            text = f"It is clipped by {name}, {other:.4g}; the norm is {norm:.4g}."
            yield OfGradient(Cause.CLIPPING, text, _whole(middle * factor(other)))


def _stale(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    if e.past is None:
        return
    before = e.past.mean([each.grad for each in e.past.local])
    text = "The last step's gradient is still in it: zero the gradients before the backward."
    yield OfGradient(Cause.ACCUMULATION, text, _whole(middle + before))
    text = "The last step's average is still in it, on every rank, and is reduced again: zero the gradients."
    yield OfGradient(Cause.ACCUMULATION, text, _whole(middle + before * e.ranks))
    text = "It is the gradient of the step before: wait for the reduction before it is read."
    yield OfGradient(Cause.REDUCTION, text, _whole(before))


def _uneven(e: Evidence) -> Iterator[OfGradient]:
    rows = np.array([seen.rows for seen in e.seen], float)
    if len(set(rows)) == 1:
        return
    weights, name, other = (rows / rows.sum(), "rows", "rows")
    if e.recipe.average == "rows":
        weights, name, other = np.full(e.ranks, 1 / e.ranks), "ranks: the mean of their means", "ranks"
    text = (
        f"The ranks have different numbers of rows, and the average is over {name}. Weigh each rank by its rows, or "
        f"say check(average={other!r}) if that is meant."
    )
    grads = sum((each.grad * weight for each, weight in zip(e.local, weights, strict=True)), np.zeros(e.layout.size))
    yield OfGradient(Cause.AVERAGE, text, _whole(grads))


def _shifts(e: Evidence, middle: Array) -> Iterator[OfGradient]:
    bounds = "the shard's bounds are not the same for parameters and gradients."
    for other in others(e):

        def of_other(index: Array, _: Array, other: int = other) -> Array:
            at = e.other_chunk(index, other)
            return np.where(at < 0, np.nan, middle[np.maximum(at, 0)])

        yield OfGradient(Cause.BOUNDS, f"It is the gradient of the chunk {away(other)}: {bounds}", of_other)
    for shift in (1, -1, 2, -2):
        where = "after" if shift > 0 else "before"
        text = f"Each element has the gradient of the one {abs(shift)} {where} it: {bounds}"
        yield OfGradient(Cause.BOUNDS, text, _whole(np.roll(middle, -shift)))


# -- chunks taken for each other


def others(e: Evidence) -> list[int]:
    """How many chunks away another rank's may be, the nearest first."""
    return [sign * chunks for chunks in range(1, e.ranks) for sign in (1, -1)]


def away(chunks: int) -> str:
    """Which chunk is meant."""
    if abs(chunks) == 1:
        return "after it" if chunks > 0 else "before it"
    return f"{abs(chunks)} {'after' if chunks > 0 else 'before'} it"
