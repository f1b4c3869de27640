"""Whether the parts of a results file agree with each other, so that no page tells of a run that cannot have been.

Owns the rules: what a lab run, whatever it found, cannot help but record. A check that failed is
no contradiction; a number that is not as predicted, while no failure says so, is one. Takes
records; must not know the simulator, nor work out again what it predicts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from zerosim.bands import Band, Place
from zerosim.counts import EventKind, Phase
from zerosim.records import results as recorded
from zerosim.records.results import Check, EventRecord, Prediction, Results, SchemeRecord, Settings
from zerosim.stages import Over

_BANDS, _KINDS, _PHASES = frozenset(Band), frozenset(EventKind), frozenset(Phase)
_SENT = _BANDS | {"rows", "norm", "used"}  # what ranks tell each other in a few numbers has tags of its own


def contradictions(results: Results) -> Iterator[str]:
    """Everything in the results that cannot be, in words; the first is reason enough to refuse them."""
    settings = results.settings
    sizes = [fan_in * fan_out + fan_out for fan_in, fan_out in pairwise(settings.widths)]
    if (sizes and sum(sizes) != results.n_params) or not (sizes or settings.model):
        yield f"widths {settings.widths} make {sum(sizes):,} parameters, not {results.n_params:,}"
    if settings.seed < 0 or settings.model_seed < 0:
        yield f"a seed is 0 or more, not {min(settings.seed, settings.model_seed)}"
    if not settings.batch and settings.data != recorded.OWN:
        yield "a batch has one row or more"
    if settings.batch % settings.accumulate:
        yield f"{settings.batch} rows cannot be cut into {settings.accumulate} micro-batches"
    if settings.resume_at is not None and settings.resume_at >= settings.steps:
        yield f"a run that is resumed after step {settings.resume_at} has more steps than {settings.steps}"
    names = [record.name for record in results.schemes]
    if not names or len(set(names)) < len(names):
        yield f"a lab runs one or more schemes, each of another name; here are {names}"
        return
    for record in results.schemes:
        yield from (f"{record.name}: {wrong}" for wrong in _scheme(record, settings))
    if len({bool(record.events) for record in results.schemes if record.steps}) > 1:
        yield "some schemes have a log of their last step and some have none"
    yield from _differences(results)
    yield from _sweep(results)
    yield from _ablations(results)
    yield from _verdicts(results)


# -- one scheme


def _scheme(record: SchemeRecord, settings: Settings) -> Iterator[str]:
    shortage, done = record.out_of_memory, len(record.steps)
    expected = settings.steps if shortage is None else max(shortage.step - 1, 0)
    if done != expected or [step.step for step in record.steps] != list(range(1, done + 1)):
        yield f"{expected} completed steps should be numbered from 1; got {[step.step for step in record.steps]}"
    if shortage is not None:
        capacity = {"card": settings.capacity, "host": settings.host_capacity}.get(shortage.place)
        if capacity is None or shortage.step > settings.steps or shortage.rank >= (settings.ranks_in(shortage.step)):
            yield f"it cannot have run out of memory in step {shortage.step}, rank {shortage.rank}, of these settings"
        elif sum(shortage.held.values()) + shortage.asked <= capacity:
            yield f"{shortage.asked:,} B more would have fitted on the {shortage.place} where it ran out of memory"
        yield from _bands("held at its end", [*shortage.held, shortage.band])
    if record.prediction is not None:
        yield from _prediction(record.prediction, settings.ranks_in(shortage.step if shortage else done))
    for step in record.steps:
        if step.prediction is not None:
            yield from _prediction(step.prediction, settings.ranks_in(step.step))
        yield from (f"step {step.step}: {wrong}" for wrong in _step(step, settings))
    losses = {step.loss for step in record.steps}
    if done > 1 == len(losses) and math.isfinite(*losses) and settings.data != recorded.OWN:
        yield f"no {done} steps on other batches each have the same loss"
    if done and shortage is None and record.events:
        last = record.steps[-1]
        yield from _log(record.events, sum(last.resident.values()), last.peak.total)
        for name in dict.fromkeys(moved.collective for moved in last.traffic):
            sent = max(map(sum, zip(*(moved.sent for moved in last.traffic if moved.collective == name), strict=False)))
            if sent != _sent(record.events, name):
                yield f"its log sends {_sent(record.events, name):,} B by {name}, its record {sent:,}"
            left = sum(moved.node_outside for moved in last.traffic if moved.collective == name)
            logged = sum(event.outside for event in record.events if event.name == name)
            if left != logged:
                yield f"by its log {logged:,} B of {name} leave each node, by its record {left:,}"
    else:
        yield from _log(record.events)


def _prediction(predicted: Prediction, ranks: int) -> Iterator[str]:
    for what, bands in (
        ("predicted at rest", predicted.resident),
        ("predicted at the peak", predicted.peak),
        ("predicted at the peak without activations", predicted.peak_without_activations),
        ("predicted at rest on the host", predicted.host),
        ("predicted at the peak on the host", predicted.host_peak),
        *((f"predicted for copies to the {place}", bands) for place, bands in predicted.copies.items()),
    ):
        yield from _bands(what, bands)
    for links in (predicted.traffic, predicted.node_outside):
        for collective, bands in links.items():
            yield from _known(f"band predicted for {collective}", bands, _SENT)
    yield from _per_rank(ranks, padding=predicted.padding, padding_sent=predicted.padding_sent)


def _step(step: recorded.StepRecord, settings: Settings) -> Iterator[str]:
    resident, ranks = sum(step.resident.values()), settings.ranks_in(step.step)
    node = settings.node or ranks
    if (step.norm is None) != (settings.clip is None) or (settings.loss_scale is None and step.scale != 1):
        yield "a norm is that of a run that clips, and a scale that of one that scales its loss"
    if (step.mean_of_means is None) == settings.uneven:
        yield "the mean of the ranks' means is that of a run on uneven batches"
    if (step.skipped and settings.loss_scale is None) or not step.scale > 0:
        yield f"no step is skipped unless the loss is scaled, by more than 0; got {step.scale}"
    for what, bands in (
        ("at rest", step.resident), ("at rest on the host", step.host),
        *((f"copied to the {place}", bands) for place, bands in step.copies.items()),
    ):  # fmt: skip
        yield from _bands(what, bands)
    yield from _known("place", step.copies, tuple(Place))
    for what, peak in (
        ("the peak", step.peak), ("the peak without activations", step.peak_without_activations),
        ("the peak on the host", step.host_peak),
    ):  # fmt: skip
        yield from _bands(f"at {what}", peak.by_band)
        if sum(peak.by_band.values()) != peak.total:
            yield f"the bands at {what} sum to {sum(peak.by_band.values()):,}, not to {peak.total:,}"
        yield from _known("phase", [peak.phase], _PHASES)
    if not max(resident, step.peak_without_activations.total) <= step.peak.total:
        yield f"no instant can be higher than the peak, {step.peak.total:,} B"
    if sum(step.host.values()) > step.host_peak.total:
        yield f"no instant on the host can be higher than its peak, {step.host_peak.total:,} B"
    yield from _per_rank(ranks, padding=step.padding)
    for moved in step.traffic:
        yield from _known(f"band moved by {moved.collective}", [moved.band], _SENT)
        yield from _per_rank(ranks, sent=moved.sent, received=moved.received, padding_sent=moved.padding)
        yield from _per_rank(ranks, bytes_out_of_its_node=moved.outside)
        if any(out > sent for out, sent in zip(moved.outside, moved.sent, strict=False)):
            yield f"{moved.collective} sent more out of a node than it sent"
        nodes = {sum(moved.outside[start : start + node]) for start in range(0, ranks, node)}
        if nodes != {moved.node_outside}:
            yield f"of {moved.collective}, {moved.node_outside:,} B should be what the ranks of each node sent outward"
        if any(pad > sent for pad, sent in zip(moved.padding, moved.sent, strict=False)):
            yield f"{moved.collective} sent more padding than bytes"
    if len({(moved.collective, moved.band) for moved in step.traffic}) != len(step.traffic):
        yield "a collective's bytes of one band are given twice"
    yield from _known("phase", [*step.flops, *step.seconds], _PHASES)
    yield from _times(step.seconds.values())


def _log(events: Sequence[EventRecord], resident: int | None = None, peak: int | None = None) -> Iterator[str]:
    """A log moves the bytes held by its holds and frees alone; a whole step's returns to where it began."""
    yield from _known("kind of event", [event.kind for event in events], _KINDS)
    yield from _known("phase", [event.phase for event in events], _PHASES)
    yield from _bands("in the log", [event.name for event in events if event.kind in (EventKind.HOLD, EventKind.FREE)])
    yield from _times([event.seconds for event in events])
    if any(later.seconds < earlier.seconds for earlier, later in pairwise(events)):
        yield "the clock of its log runs backwards"
    if any(event.nbytes for event in events if event.kind == EventKind.COMPUTE):
        yield "what is computed moves no bytes"
    if any(event.outside and event.kind != EventKind.SEND for event in events):
        yield "nothing leaves a node but what is sent"
    changes = [event.nbytes * {EventKind.HOLD: 1, EventKind.FREE: -1}.get(event.kind, 0) for event in events]  # type: ignore[call-overload]
    before = [events[0].held - changes[0], *(event.held for event in events[:-1])] if events else []
    for number, (event, held, change) in enumerate(zip(events, before, changes, strict=True), start=1):
        if held < 0 or held + change != event.held:
            yield f"after event {number} of its log {event.held:,} B cannot be held"
            return
    if resident is not None and not before[0] == events[-1].held == resident:
        yield f"its last step should begin and end with the {resident:,} B at rest, as its log does not"
    if peak is not None and max(*before, events[-1].held) != peak:
        yield f"its log peaks at {max(*before, events[-1].held):,} B, its record at {peak:,}"


# -- the comparisons


def _differences(results: Results) -> Iterator[str]:
    """Each scheme that completed a step is compared with the first of its order; that one if it has copies."""
    expected, apart = [], []
    for step in range(1, max(len(record.steps) for record in results.schemes) + 1):
        orders: dict[tuple[object, ...], list[SchemeRecord]] = {}
        for record in results.schemes:
            if len(record.steps) >= step:
                orders.setdefault(results.settings.order(record.row), []).append(record)
        for alive in orders.values():
            whole = _shards_all(alive[0], results.settings.ranks_in(step), results.settings.node)
            expected += [(step, each.name) for each in alive if not (each is alive[0] and whole)]
        apart += [(step, alive[0].name) for alive in list(orders.values())[1:]]
    for what, found, wanted in (
        ("comparisons", results.differences, expected), ("distances between orders", results.between_orders, apart)
    ):  # fmt: skip
        if [(each.step, each.scheme) for each in found] != wanted:
            yield f"{len(wanted)} {what} belong to these steps, each of its own scheme; got others"
    for each in [*results.differences, *results.between_orders]:
        yield from (f"{each.scheme}, compared after step {each.step}: {wrong}" for wrong in _difference(each))
    if len({frozenset(each.differing) for each in results.differences}) > 1:
        yield "the comparisons are not all of the same bands"


def _shards_all(record: SchemeRecord, ranks: int, node: int | None) -> bool:
    """Whether no two ranks hold the same optimizer state, so that a scheme has nothing to compare with itself."""
    return record.row.on(ranks, node).optimizer is Over.ALL


def _difference(each: recorded.Difference) -> Iterator[str]:
    yield from _bands("compared", [*each.differing, *each.largest])
    if each.differing.keys() != each.largest.keys():
        yield "elements and distances are of different bands"
    if any(distance < 0 for distance in each.largest.values()):
        yield "a distance is negative"
    if any(each.largest[band] != 0 for band, count in each.differing.items() if not count and band in each.largest):
        yield "no bits differ, and yet there is a distance"


def _sweep(results: Results) -> Iterator[str]:
    rows, top = results.sweep, results.settings.ranks
    counts = list(dict.fromkeys(row.ranks for row in rows))
    names = [record.name for record in results.schemes]
    if [(row.ranks, row.scheme) for row in rows] != [(ranks, name) for ranks in counts for name in names]:
        yield f"for each N the sweep has a row for each of {', '.join(names)}, in this order"
    if not rows and results.settings.data != recorded.OWN:
        yield "a lab sweeps over N, and nothing of that is here"
    if rows and (counts != sorted(counts) or counts[-1] != top):
        yield f"the sweep goes up to N = {top}; got {counts}"
    if len({bool(row.events) for row in rows if row.fits}) > 1:
        yield "of the sweep's steps some have a log and some have none"
    for row in rows:
        yield from (f"the sweep, {row.scheme}, N = {row.ranks}: {wrong}" for wrong in _row(row))


def _row(row: recorded.SweepRow) -> Iterator[str]:
    yield from _bands("at rest", row.resident_by_band)
    if sum(row.resident_by_band.values()) != row.resident:
        yield f"the bands at rest sum to {sum(row.resident_by_band.values()):,}, not to {row.resident:,}"
    if not max(row.resident, row.peak_without_activations) <= row.peak:
        yield f"no instant can be higher than the peak, {row.peak:,} B"
    if not row.fits and (row.peak or row.sent or row.events):
        yield "what ran out of memory has nothing measured"
    if row.events:
        yield from _log(row.events, row.resident, row.peak)
        if row.sent != _sent(row.events):
            yield f"its log sends {_sent(row.events):,} B, its record {row.sent:,}"


def _ablations(results: Results) -> Iterator[str]:
    found = results.ablations
    drifts = [*found.whole_model_bucket.values(), *([found.narrow_wire.drift] if found.narrow_wire else [])]
    if found.int8_params and not len(found.int8_params.losses) == len(found.int8_params.losses_exact) == (
        results.settings.steps
    ):
        yield f"losses in int8, and beside it, are those of {results.settings.steps} steps"
    for drift in drifts:
        if not len(drift.differing) == len(drift.largest) == results.settings.steps:
            yield f"a drift is given after each of the {results.settings.steps} steps"
        if len(drift.losses) not in (0, results.settings.steps):
            yield f"losses with a rule broken are those of {results.settings.steps} steps"
        if any(distance < 0 for distance in drift.largest):
            yield "a drift is negative"


# -- what was found against what the verdicts say


def _verdicts(results: Results) -> Iterator[str]:
    """Whatever is not alike, or not as predicted, has a failure that says so."""
    said = {(each.check, each.scheme, each.ranks) for each in results.failures}
    settings, names = results.settings, [record.name for record in results.schemes]
    for check, scheme, n in said:
        if check not in tuple(Check) or scheme not in names or n < 1:
            yield f"no check, scheme and N are called {check!r}, {scheme!r} and {n}"
    for each in results.differences:
        n = settings.ranks_in(each.step)  # it may be the one that it is compared with that is at fault
        if any(each.differing.values()) and not {(Check.SAME_TRAINING, name, n) for name in names} & said:
            yield f"bits of {each.scheme} differ after step {each.step}, and no failure says so"
    for step in range(max(len(record.steps) for record in results.schemes)):
        losses = {
            (results.settings.order(record.row), str(record.steps[step].loss))
            for record in results.schemes
            if step < len(record.steps)
        }
        orders = {order for order, _ in losses}
        if len(losses) > len(orders) and not any(check == Check.SAME_TRAINING for check, _, _ in said):
            yield f"losses differ in step {step + 1}, and no failure says so"
    for record in results.schemes:
        if (last := record.prediction) is None:
            continue
        begun = [last, *(step.prediction for step in record.steps if step.prediction is not None)]
        fits = all(_fits(results.settings, sum(each.peak.values()), sum(each.host_peak.values())) for each in begun)
        as_predicted = fits == (record.out_of_memory is None) and all(
            _as_predicted(step.prediction or last, step) for step in record.steps
        )
        blamed = any(
            (Check.AS_PREDICTED, record.name, ranks) in said for ranks in (settings.ranks, settings.resume_ranks)
        )
        if not as_predicted and not blamed:
            yield f"{record.name}: what was measured is not what is predicted, and no failure says so"
    for row in results.sweep:
        measured = (row.resident, row.peak, row.peak_without_activations, row.sent, row.host_peak)
        expected = (
            row.resident_predicted, row.peak_predicted, row.peak_without_activations_predicted, row.sent_predicted,
            row.host_peak_predicted,
        )  # fmt: skip
        fits = _fits(results.settings, row.peak_predicted, row.host_peak_predicted)
        as_predicted = row.fits == row.fits_predicted == fits and (not row.fits or measured == expected)
        if not as_predicted and (Check.AS_PREDICTED, row.scheme, row.ranks) not in said:
            yield f"the sweep, {row.scheme}, N = {row.ranks}: not as predicted, and no failure says so"


def _fits(settings: Settings, card: int, host: int) -> bool:
    """Whether peaks of so many bytes fit on the card and the host."""
    needs = (settings.capacity, card), (settings.host_capacity, host)
    return all(capacity is None or peak <= capacity for capacity, peak in needs)


def _as_predicted(expected: Prediction, step: recorded.StepRecord) -> bool:
    everything = {(moved.collective, moved.band): {*moved.sent, *moved.received} for moved in step.traffic}
    sent = {what: nbytes for what, nbytes in everything.items() if nbytes != {0}}  # one rank tells nobody
    wanted = {(name, band): {nbytes} for name, bands in expected.traffic.items() for band, nbytes in bands.items()}
    columns = zip(*(moved.padding for moved in step.traffic), strict=False)
    return (
        step.resident == expected.resident
        and step.peak.by_band == expected.peak
        and step.peak_without_activations.by_band == expected.peak_without_activations
        and step.flops == expected.flops
        and (step.host, step.host_peak.by_band, step.copies) == (expected.host, expected.host_peak, expected.copies)
        and all(
            moved.node_outside == expected.node_outside.get(moved.collective, {}).get(moved.band, 0)
            for moved in step.traffic
        )
        and step.padding == expected.padding
        and sent == wanted
        and (not sent or [sum(column) for column in columns] == expected.padding_sent)
    )


# -- small rules


def _sent(events: Sequence[EventRecord], collective: str = "") -> int:
    sends = (event for event in events if event.kind == EventKind.SEND)
    return sum(event.nbytes for event in sends if not collective or event.name == collective)


def _bands(what: str, names: Iterable[str]) -> Iterator[str]:
    yield from _known(f"band {what}", names, _BANDS)


def _known(what: str, names: Iterable[str], known: Collection[str]) -> Iterator[str]:
    if unknown := [name for name in names if name not in known]:
        yield f"no {what} is called {unknown[0]!r}"


def _per_rank(ranks: int, **lists: Sequence[int]) -> Iterator[str]:
    for what, values in lists.items():
        if len(values) != ranks:
            yield f"{what.replace('_', ' ')} has {len(values)} entries for {ranks} ranks"


def _times(seconds: Iterable[float]) -> Iterator[str]:
    if not all(math.isfinite(each) and each >= 0 for each in seconds):
        yield "a time is negative or no number"
