"""The two checks: are the schemes alike bit for bit, and is what was measured what ZeRO predicts.

Owns the comparisons, and names what does not hold: scheme, step, rank, quantity and both
values. Reads runs and predictions; changes neither.

The same training (``Check.SAME_TRAINING``): every scheme is compared with data parallel
(``compare``), and with training that was written a second time (``against_plain``), so that what all
of them get wrong alike is found too. As predicted (``Check.AS_PREDICTED``): every count is compared
with its closed form (``audit``); the log, from which the timeline is drawn, must add up to the same.
What neither can see in a world as obliging as one process, ``sanitizer`` looks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from zerosim import theory
from zerosim.bands import MODEL_STATES, Array, Band
from zerosim.buckets import Bucket
from zerosim.checks.reference import Reference
from zerosim.counts import Counts, Event, EventKind, Report
from zerosim.records.results import Check, Difference, Failure, OutOfMemoryRecord
from zerosim.schemes import Scheme

PLAIN, LOADED = ", against plain training", ", as loaded"
NORM, SCALE, SKIPPED, UPDATES = "norm of all gradients", "loss scale", "whether the step is skipped", "applied updates"
RESIDENT, PEAK = "bytes of {} at rest", "bytes of {} at the peak"
PEAK_WITHOUT = "bytes of {} at the peak without activations"
RECOUNTED = "bytes of {} counted from the arrays"
SENT, RECEIVED = "bytes of {} sent by {}", "bytes of {} received by {}"
OUTWARD, NODE_OUTWARD = "bytes of {} sent out of the node by {}", "bytes of {} sent out of each node by {}"
HOST_RESIDENT, HOST_PEAK = "bytes of {} at rest on the host", "bytes of {} at the peak on the host"
COPIED = "bytes of {} copied to the {}"
PADDING_HELD, PADDING_SENT = "bytes of padding held", "bytes of padding sent"
FLOPS, MESSAGES = "FLOPs of the {}", "messages of {}"
LOGGED_END, LOGGED_PEAK, LOGGED_SENT = "bytes held at the end", "bytes held at the highest", "bytes sent by {}"
LOGGED_COPIED = "bytes copied to the {}"
INSTANTS = "instants predicted that the log has, in their order"
LOGGED, STEP = "{}, by the log", "number of the step"
# Not gradients, of which each rank may keep its own. Buffers are each rank's own too: compared with those of its twin.
COMPARED = (*(band for band in MODEL_STATES if band is not Band.GRADS), Band.BUFFERS)


def bits(array: Array) -> Array:
    """The array's raw bits as unsigned integers, so that -0.0 is not 0.0 and a NaN is itself."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


def whole_states(scheme: Scheme) -> dict[Band, list[Array]]:
    """Every compared state as one padded vector per bucket that has it, a copy of the pieces of the first ranks."""
    wholes = {band: [_whole(bucket, band) for bucket in _having(scheme, band)] for band in COMPARED}
    return {band: found for band, found in wholes.items() if found}


def _having(scheme: Scheme, band: Band) -> list[Bucket]:
    return [bucket for bucket in scheme.buckets if band in bucket.states]


def _pieces(bucket: Bucket, band: Band) -> Counts:
    """Which piece each rank here has [R]; a buffer is each rank's own."""
    return bucket.pieces.get(band, np.arange(len(bucket.states[band])))


def _whole(bucket: Bucket, band: Band) -> Array:
    _, first = np.unique(_pieces(bucket, band), return_index=True)
    return bucket.states[band][first].reshape(-1)


def compare(scheme: Scheme, reference: Mapping[Band, list[Array]], step: int) -> tuple[Difference, list[Failure]]:
    """The same training, after a step: all that ``scheme`` holds against ``reference``, from ``whole_states``.

    Compared are the raw bits, padding included. A failure is reported for each rank and
    bucket, with the first element that differs.
    """
    differing: dict[str, int] = {}
    largest: dict[str, float] = {}
    failures: list[Failure] = []
    for band, wholes in reference.items():
        differing[band], largest[band] = 0, 0.0
        for bucket, whole in zip(_having(scheme, band), wholes, strict=True):
            mine = bucket.states[band]
            theirs = whole.reshape(-1, mine.shape[1])[_pieces(bucket, band)]
            unequal = bits(mine) != bits(theirs)
            if not unequal.any():
                continue
            differing[band] += int(np.count_nonzero(unequal))
            distance = np.abs(mine[unequal].astype(np.float64) - theirs[unequal].astype(np.float64))
            largest[band] = float(np.maximum(largest[band], distance.max()))  # a NaN stays
            failures += _unlike(scheme, step, f"{band} of {bucket.name}, element {{}}", mine, theirs)
    return Difference(scheme=scheme.name, step=step, differing=differing, largest=largest), failures


def _differs(scheme: Scheme, step: int, rank: int, quantity: str, measured: str, expected: str) -> Failure:
    return Failure(
        check=Check.SAME_TRAINING, scheme=scheme.name, ranks=scheme.ring.size, step=step, rank=rank,
        quantity=quantity, measured=measured, expected=expected,
    )  # fmt: skip


def _unlike(scheme: Scheme, step: int, quantity: str, mine: Array, theirs: Array) -> list[Failure]:
    """A failure for each rank that has other bits [R, n], with the first element that differs."""
    unequal = bits(mine) != bits(theirs)
    found = []
    for row in np.flatnonzero(unequal.any(axis=1)).tolist():
        at = int(np.argmax(unequal[row]))
        values = repr(float(mine[row, at])), repr(float(theirs[row, at]))
        found.append(_differs(scheme, step, scheme.ring.ids[row], quantity.format(at), *values))
    return found


def against_plain(scheme: Scheme, reference: Reference, step: int, how: str = PLAIN) -> list[Failure]:
    """The same training as that written a second time: every state and the loss, after as many steps.

    What all schemes get wrong alike is found here. Of gradients that are reduced but of which more is kept,
    what a rank owns is compared: elsewhere it has its own, not the average.
    """
    report = scheme.reports[-1]
    failures = same_losses({"": reference.loss, scheme.name: report.loss}, scheme.ring.size, step, how)
    for quantity, mine, expected in (
        (NORM, report.norm, reference.norm), (SCALE, report.scale, reference.scale_used),
        (SKIPPED, report.skipped, reference.skipped), (UPDATES, scheme.updates, reference.updates),
    ):  # fmt: skip
        if repr(mine) != repr(expected):  # of numbers that are none the sign is no matter
            failures.append(_differs(scheme, step, -1, f"{quantity}{how}", repr(mine), repr(expected)))
    return failures + _states_against(scheme, reference, step, scheme.states, how)


def as_loaded(scheme: Scheme, reference: Reference, step: int) -> list[Failure]:
    """The same training, by the states of a run that was saved and loaded: those of plain training, cut anew."""
    return _states_against(scheme, reference, step, COMPARED, LOADED)


def _states_against(scheme: Scheme, reference: Reference, step: int, bands: Sequence[Band], how: str) -> list[Failure]:
    failures = []
    for band in (band for band in bands if band in reference.states and band in scheme.states):
        for layer, bucket in enumerate(scheme.buckets):
            mine, pieces = scheme.owned_states(bucket, band)
            expected = reference.expected(band, layer, pieces, mine.shape[1], loaded=how == LOADED)
            failures += _unlike(scheme, step, f"{band} of {bucket.name}, element {{}}{how}", mine, expected)
    return failures


def same_losses(losses: Mapping[str, float], ranks: int, step: int, how: str = "") -> list[Failure]:
    """The same training, by the losses of a step: every scheme's is that of the first, to the last bit."""
    expected = next(iter(losses.values()), None)
    return [
        Failure(
            check=Check.SAME_TRAINING, scheme=name, ranks=ranks, step=step, rank=-1,
            quantity=f"loss{how}", measured=repr(loss), expected=repr(expected),
        )
        for name, loss in losses.items()
        if np.float64(loss).tobytes() != np.float64(expected).tobytes()
    ]  # fmt: skip


def fits_on_card(scheme: str, ranks: int, shortage: OutOfMemoryRecord | None, predicted: bool) -> list[Failure]:
    """As predicted, on a card of limited memory: the run ends if, and only if, the predicted peak does not fit."""
    if (shortage is None) == predicted:
        return []
    return [
        Failure(
            check=Check.AS_PREDICTED, scheme=scheme, ranks=ranks, step=shortage.step if shortage else 0,
            rank=shortage.rank if shortage else -1, quantity="fits on the card",
            measured=f"out of memory at {shortage.band} of {shortage.unit}" if shortage else "fits",
            expected="fits" if predicted else "out of memory",
        )
    ]  # fmt: skip


Count = dict[tuple[int, str], int]  # by rank (-1: every rank) and quantity


def audit(scheme: Scheme, report: Report, job: theory.Job, step: int) -> list[Failure]:
    """As predicted, for one step: every number of ``report`` against the closed form, as integers, on every rank."""
    measured = _measured(scheme, report) | {(-1, INSTANTS): _instants(report, job)}
    expected = _predicted(job, tuple(scheme.ring.ids)) | {(-1, STEP): scheme.ledger.steps}
    return [
        Failure(
            check=Check.AS_PREDICTED, scheme=scheme.name, ranks=job.ranks, step=step, rank=key[0],
            quantity=key[1], measured=f"{measured.get(key, 0):,}", expected=f"{expected.get(key, 0):,}",
        )
        for key in dict.fromkeys([*expected, *measured])
        if measured.get(key, 0) != expected.get(key, 0)
    ]  # fmt: skip


def _measured(scheme: Scheme, report: Report) -> Count:
    count: Count = {(-1, STEP): report.step}
    for what, bands in (
        (RESIDENT, report.resident),
        (PEAK, report.peak.by_band),
        (PEAK_WITHOUT, report.peak_without_activations.by_band),
        (HOST_RESIDENT, report.host),
        (HOST_PEAK, report.host_peak.by_band),
    ):
        count |= {(-1, what.format(band)): nbytes for band, nbytes in bands.items()}
    count |= {(-1, FLOPS.format(phase)): flops for phase, flops in report.flops.items()}
    count |= {(-1, COPIED.format(band, place)): nbytes for (place, band), nbytes in report.copies.items()}
    for (collective, band), moved in report.traffic.items():
        count[-1, NODE_OUTWARD.format(band, collective)] = moved.node_outside
        key = (-1, MESSAGES.format(collective))
        count[key] = count.get(key, 0) + moved.messages
    count |= {(-1, LOGGED.format(what)): total for what, total in _logged(report.events).items()}
    for row, rank in enumerate(scheme.ring.ids):
        count |= {(rank, RECOUNTED.format(band)): nbytes for band, nbytes in scheme.ranks[row].held().items()}
        for (collective, band), traffic in report.traffic.items():
            count[rank, SENT.format(band, collective)] = int(traffic.sent[row])
            count[rank, RECEIVED.format(band, collective)] = int(traffic.received[row])
            count[rank, OUTWARD.format(band, collective)] = int(traffic.outside[row])
        count[rank, PADDING_HELD] = report.padding[row]
        count[rank, PADDING_SENT] = sum(int(traffic.padding[row]) for traffic in report.traffic.values())
    return count


def _instants(report: Report, job: theory.Job) -> int:
    """How many of the instants that can be the highest the log has, by the bytes that are held then, one after another.

    What is held for longer than it should be may leave the peak as it is.
    """
    held = iter([sum(report.resident.values()), *(event.held for event in report.events)])
    return sum(any(here == instant for here in held) for instant in _totals(job))


@lru_cache(maxsize=32)
def _totals(job: theory.Job) -> list[int]:
    return [sum(instant.values()) for instant in theory.moments(job)]


def _logged(events: Sequence[Event]) -> Counter[str]:
    """What the entries of a step's log come to."""
    total: Counter[str] = Counter()
    for event in events:
        if event.kind is EventKind.SEND:
            total[LOGGED_SENT.format(event.name)] += event.nbytes
            total[MESSAGES.format(event.name)] += event.amount
        elif event.kind is EventKind.COPY:
            total[LOGGED_COPIED.format(event.name)] += event.nbytes
        elif event.kind is EventKind.COMPUTE:
            total[FLOPS.format(event.name)] += event.amount
    total[LOGGED_END] = events[-1].held
    total[LOGGED_PEAK] = max(event.held for event in events)
    return total


def _loggable(job: theory.Job) -> dict[str, int]:
    """What they must come to."""
    return {
        **{FLOPS.format(phase): flops for phase, flops in theory.flops(job).items()},
        **{MESSAGES.format(collective): sent for collective, sent in theory.messages(job).items()},
        **{LOGGED_SENT.format(collective): sum(bands.values()) for collective, bands in theory.traffic(job).items()},
        **_copied(job),
        LOGGED_END: sum(theory.resident(job).values()),
        LOGGED_PEAK: sum(theory.peak(job).values()),
    }


def _copied(job: theory.Job) -> Counter[str]:
    total: Counter[str] = Counter()
    for (place, _), nbytes in theory.copies(job).items():
        total[LOGGED_COPIED.format(place)] += nbytes
    return total


@lru_cache(maxsize=32)  # every step of a run is predicted alike
def _predicted(job: theory.Job, ids: tuple[int, ...]) -> Count:
    count: Count = {}
    resident = theory.resident(job)
    for what, bands in (
        (RESIDENT, resident),
        (PEAK, theory.peak(job)),
        (PEAK_WITHOUT, theory.peak_without_activations(job)),
        (HOST_RESIDENT, theory.host_resident(job)),
        (HOST_PEAK, theory.host_peak(job)),
    ):
        count |= {(-1, what.format(band)): nbytes for band, nbytes in bands.items()}
    count |= {(-1, FLOPS.format(phase)): flops for phase, flops in theory.flops(job).items()}
    count |= {(-1, MESSAGES.format(collective)): sent for collective, sent in theory.messages(job).items()}
    count |= {(-1, LOGGED.format(what)): total for what, total in _loggable(job).items()}
    count |= {(-1, COPIED.format(band, place)): nbytes for (place, band), nbytes in theory.copies(job).items()}
    count[-1, INSTANTS] = len(_totals(job))
    padding, padding_sent, traffic = theory.padding(job), theory.padding_sent(job), theory.traffic(job)
    outside, everything = theory.outside(job), Counter[str](resident)
    everything.update(theory.host_resident(job))
    for collective, outward in outside.items():
        for band, ranks in outward.items():
            count[-1, NODE_OUTWARD.format(band, collective)] = sum(ranks[: job.group])
    for rank in ids:
        count |= {(rank, RECOUNTED.format(band)): nbytes for band, nbytes in everything.items()}
        for collective, bands in traffic.items():
            for band, nbytes in bands.items():
                count[rank, SENT.format(band, collective)] = nbytes
                count[rank, RECEIVED.format(band, collective)] = nbytes
                count[rank, OUTWARD.format(band, collective)] = outside[collective][band][rank]
        count[rank, PADDING_HELD], count[rank, PADDING_SENT] = padding[rank], padding_sent[rank]
    return count
