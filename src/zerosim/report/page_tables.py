"""The tables of the page, as trees of elements. Takes records; computes nothing but ratios and units.

What comes from outside becomes the text of an element, which is escaped when the tree is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.etree import ElementTree as Tree

from zerosim.bands import WIRES
from zerosim.counts import Phase
from zerosim.records.results import Prediction, Results
from zerosim.report.offline import Cell, element

_CHECKED = "Bytes are per rank. A measured number that is not the predicted one is marked ≠."
NONE = "–"  # where nothing was predicted

Expected = Mapping[str, int] | None  # nothing where the closed forms know no such model or options
Side = tuple[str, Mapping[str, int], Expected]  # a scheme, what was measured and what was predicted


def table(
    name: str, title: str, head: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell]], note: str = ""
) -> list[Tree.Element]:
    """A table with its title, to be scrolled sideways where it is wider than the screen; nothing if it has no rows.

    ``head`` gives each column's group and name; neighbours of one group share its heading. A column of
    predictions is left out where there are none.
    """
    rows = list(rows)
    kept = [at for at, (_, column) in enumerate(head) if column != "predicted" or any(row[at] != NONE for row in rows)]
    head = [head[at] for at in kept]
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", row[at]) for at in kept[1:])) for row in rows
    ]
    if not body:
        return []
    groups: list[tuple[str, int]] = []
    for group, _ in head:
        groups[-1:] = [(group, groups[-1][1] + 1)] if groups and groups[-1][0] == group else [*groups[-1:], (group, 1)]
    lines = [element("tr", *(element("th", column, scope="col") for _, column in head))]
    if any(group for group, _ in groups):
        grouped = (element("th", group, scope="colgroup", colspan=str(span)) for group, span in groups)
        lines.insert(0, element("tr", *grouped, class_="groups"))
    table = element("table", element("thead", *lines), element("tbody", *body), id=name)
    return [
        element("h3", title),
        element("div", table, class_="scroll", role="region", tabindex="0", aria_label=title),
        *([element("p", note, class_="note")] if note else []),
    ]


def _count(measured: int, predicted: int | None) -> Cell:
    """A measured count, marked where it is not what was predicted."""
    return f"{measured:,}" if predicted in (measured, None) else element("b", f"≠ {measured:,}", class_="off")


def _pairs(counts: Iterable[tuple[int, int | None]]) -> list[Cell]:
    """Two cells for each (measured, predicted)."""
    return [cell for measured, predicted in counts for cell in (_count(measured, predicted), _shown(predicted))]


def _shown(predicted: int | None) -> str:
    return NONE if predicted is None else f"{predicted:,}"


def _ratio(measured: int, predicted: int | None, unit: int) -> Cell:
    text = f"{measured / unit:.4f}"
    return text if predicted in (measured, None) else element("b", f"≠ {text}", class_="off")


def _all(expected: Prediction | None, field: str) -> int | None:
    """What is predicted of all bands."""
    return None if expected is None else sum(getattr(expected, field).values())


def _number(value: float, form: str) -> str:
    """A loss or a difference, which need not be finite."""
    return format(value, form) if math.isfinite(value) else str(value)


# -- the tables


def summary(results: Results) -> list[Tree.Element]:
    """The table that comes first: a row for each scheme."""
    P, unit = results.n_params, results.n_params * WIRES[results.settings.wire].itemsize
    base = results.base()
    whole = sum(base.steps[-1].resident.values()) if base else 0
    told = any(record.prediction for record in results.schemes)
    rows: list[list[Cell]] = []
    for record in results.schemes:
        if shortage := record.out_of_memory:
            fate = f"out of memory: {shortage.asked:,} B of {shortage.band}"
            fate += f" for {shortage.unit}" if shortage.unit else ""
            fate += " on the host" if shortage.place == "host" else ""
            rows.append([record.name, *["–"] * 7, element("span", fate, class_="fate")])
            continue
        step, expected = record.steps[-1], record.prediction
        resident, sent = sum(step.resident.values()), step.sent()
        moved = None if expected is None else sum(sum(bands.values()) for bands in expected.traffic.values())
        rows.append([
            record.name,
            _ratio(resident, _all(expected, "resident"), P),
            f"{resident / whole:.4f}" if whole else "–",
            _ratio(step.peak_without_activations.total, _all(expected, "peak_without_activations"), P),
            _ratio(step.peak.total, _all(expected, "peak"), P),
            _count(sent, moved),
            f"{sent / unit:.4f}",
            _number(step.loss, ".6f"),
            element("span", "fits", class_="fate"),
        ])  # fmt: skip
    held, sends = "bytes per parameter, on each rank", "sent per rank and step"
    head = [
        ("", "scheme"), (held, "at rest"), (held, f"× {base.name}" if base else "×"), (held, "peak"),
        (held, "peak with activations"), (sends, "bytes"), (sends, "in P"), ("", "final loss"), ("", "fate"),
    ]  # fmt: skip
    if not any(record.out_of_memory for record in results.schemes):
        head, rows = head[:-1], [row[:-1] for row in rows]
    note = (
        "P: all parameters once, in the wire’s dtype. A peak is the most held within a step; activations are "
        "left out unless it says otherwise. All of it was measured"
        + ("; what is not as predicted is marked ≠." if told else ".")
    )
    if not base:
        head, rows = [*head[:2], *head[3:]], [[*row[:2], *row[3:]] for row in rows]
    return table("summary", "What each scheme holds and sends", head, rows, note)


def tables(results: Results) -> Iterator[Tree.Element]:
    """All other tables."""
    yield from _alike(results)
    yield from _between_orders(results)
    yield from _stepwise(results)
    completed = results.completed()
    rest: list[Side] = []
    peak: list[Side] = []
    for record, step in completed:
        expected = record.prediction
        rest.append((record.name, step.resident, None if expected is None else expected.resident))
        peak.append((record.name, step.peak.by_band, None if expected is None else expected.peak))
    instants = "; ".join(f"{record.name}: {step.peak.phase}, {step.peak.unit or '–'}" for record, step in completed)
    yield from _bands("rest", "Bytes at rest, by band", rest, _CHECKED)
    yield from _bands("peak", "Bytes at the peak’s instant, by band", peak, f"{_CHECKED} Reached in {instants}.")
    yield from _traffic(results)
    yield from _links(results)
    yield from _flops(results)
    yield from _times(results)
    yield from _sweep(results)
    yield from _ablations(results)


def _alike(results: Results) -> list[Tree.Element]:
    bands = list(dict.fromkeys(band for each in results.differences for band in each.differing))
    rows: list[list[Cell]] = []
    for step in dict.fromkeys(each.step for each in results.differences):
        here = [each for each in results.differences if each.step == step]
        row: list[Cell] = [str(step)]
        for band in bands:
            differing = sum(each.differing.get(band, 0) for each in here)
            largest = _number(max(each.largest.get(band, 0.0) for each in here), ".2g")
            row += [_count(differing, 0), largest if differing == 0 else element("b", largest, class_="off")]
        losses = {_number(record.steps[step - 1].loss, ".6f") for record, _ in results.completed()}
        rows.append([*row, " or ".join(sorted(losses))])
    head = [("", "step"), *((band, what) for band in bands for what in ("bits differ", "largest")), ("", "loss")]
    note = (
        "Elements whose bits differ between the schemes, over all ranks, and the largest difference; each scheme "
        f"against the first{' of its order' * bool(results.between_orders)}, and that, where its ranks hold whole "
        "states, against its own first rank."
    )
    return table("alike", "Same training: do all schemes hold the same?", head, rows, note)


def _between_orders(results: Results) -> list[Tree.Element]:
    """How far rows of other orders are from the first: no failure, but measured."""
    bands = list(dict.fromkeys(band for each in results.between_orders for band in each.differing))
    rows: list[list[Cell]] = []
    for each in results.between_orders:
        rows.append([str(each.step), each.scheme])
        for band in bands:
            rows[-1] += [f"{each.differing.get(band, 0):,}", _number(each.largest.get(band, 0.0), ".2g")]
    head = [("", "step"), ("", "scheme"), *((band, what) for band in bands for what in ("bits differ", "largest"))]
    note = f"Against the first scheme. No failure: {results.parting()}."
    return table("between", "Between orders: how far apart do they come?", head, rows, note)


def _stepwise(results: Results) -> list[Tree.Element]:
    """Step by step the loss, and what was agreed on before the update; nothing where there was nothing to agree on."""
    rows: list[list[Cell]] = []
    for record, step in results.stepwise():
        numbers = [
            NONE if value is None else _number(value, ".6f") for value in (step.loss, step.mean_of_means, step.norm)
        ]
        rows.append([str(step.step), record.name, *numbers, f"{step.scale:g}", "skipped" * step.skipped])
    names = ("step", "scheme", "loss", "mean of the ranks’ means", "norm of all gradients", "loss scale", "")
    note = "A skipped step changes no state. Every scheme’s numbers were held against plain training."
    note += f" {results.naive()}".rstrip()
    return table("steps", "Step by step: loss, norm and scale", [("", name) for name in names], rows, note)


def _bands(name: str, title: str, sides: Sequence[Side], note: str) -> list[Tree.Element]:
    """Bands down, schemes across."""
    counts: dict[str, list[tuple[int, int | None]]] = {
        band: [(got.get(band, 0), None if expected is None else expected.get(band, 0)) for _, got, expected in sides]
        for band in dict.fromkeys(band for _, *both in sides for side in both for band in side or ())
    }
    if counts:
        counts["total"] = [
            (sum(got.values()), None if expected is None else sum(expected.values())) for _, got, expected in sides
        ]
    rows = [[band, *_pairs(counted)] for band, counted in counts.items()]
    head = [("", "band"), *((scheme, what) for scheme, _, _ in sides for what in ("measured", "predicted"))]
    return table(name, title, head, rows, note)


def _traffic(results: Results) -> list[Tree.Element]:
    rows: list[list[Cell]] = []
    for record, step in results.completed():
        for moved in step.traffic:
            sent = max(moved.sent, default=0)
            expected = record.prediction
            predicted = None if expected is None else expected.traffic.get(moved.collective, {}).get(moved.band, 0)
            padding = f"{max(moved.padding, default=0):,}"
            cells = _count(sent, predicted), _shown(predicted), padding, f"{moved.messages:,}"
            rows.append([record.name, moved.collective, moved.band, *cells])
    head = [("", each) for each in ("scheme", "collective", "of", "sent", "predicted", "of which padding", "messages")]
    note = "The busiest rank’s; every rank’s was checked."
    return table("sent", "Bytes that one rank sends per step", head, rows, note)


def _links(results: Results) -> list[Tree.Element]:
    """What leaves a node and what goes over the host link, and what the host holds; nothing without either."""
    rows: list[list[Cell]] = []
    for record, step in results.completed():
        measured = step.node_outside(), step.copied(), sum(step.host.values()), step.host_peak.total
        predicted: list[int | None] = [None] * len(measured)
        if (expected := record.prediction) is not None:
            links = [
                sum(sum(bands.values()) for bands in each.values()) for each in (expected.node_outside, expected.copies)
            ]
            predicted = [*links, sum(expected.host.values()), sum(expected.host_peak.values())]
        rows.append([record.name, *_pairs(zip(measured, predicted, strict=True))])
    if not (results.settings.node or any(record.row.offload for record in results.schemes)):
        rows = []
    kinds = ("sent out of a node, per node", "copied over the host link", "host at rest", "host at the peak")
    head = [("", "scheme"), *((kind, what) for kind in kinds for what in ("measured", "predicted"))]
    return table("links", "Bytes per step by link, and the host’s memory", head, rows, _CHECKED)


def _flops(results: Results) -> list[Tree.Element]:
    phases = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    if any(record.row.offload for record in results.schemes):
        phases.append(Phase.HOST_OPTIMIZER)
    rows = []
    for record, step in results.completed():
        expected = record.prediction
        pairs = [
            (step.flops.get(phase, 0), None if expected is None else expected.flops.get(phase, 0)) for phase in phases
        ]
        rows.append([record.name, *_pairs(pairs)])
    head = [("", "scheme"), *((str(phase), what) for phase in phases for what in ("measured", "predicted"))]
    return table("flops", "FLOPs per rank and step", head, rows)


def _times(results: Results) -> list[Tree.Element]:
    phases = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMUNICATION]
    if any(record.row.offload for record in results.schemes):
        phases.insert(3, Phase.HOST_OPTIMIZER)
    rows: list[list[Cell]] = []
    for record, _ in results.completed():
        times = [sorted(each.seconds.get(phase, 0.0) for each in record.steps) for phase in phases]
        medians = [1e3 * each[len(each) // 2] for each in times]
        rows.append([
            record.name, *(f"{each:.2f}" for each in medians), f"{sum(medians) / results.settings.ranks:.3f}",
        ])  # fmt: skip
    head = [("", each) for each in ("scheme", *phases, "sum per rank")]
    note = "One process takes the turns of all ranks: milliseconds are the sum over the ranks, not parallel time."
    return table("times", "Median milliseconds per step", head, rows, note)


def _sweep(results: Results) -> list[Tree.Element]:
    kinds = {
        "at rest": "resident", "peak": "peak_without_activations", "peak with activations": "peak", "sent": "sent",
    }  # fmt: skip
    rows: list[list[Cell]] = []
    for row in results.sweep:
        cells: list[Cell] = []
        for field in kinds.values():
            measured, predicted = getattr(row, field), getattr(row, f"{field}_predicted")
            cells += [_count(measured, predicted) if row.fits else "out of memory", f"{predicted:,}"]
        rows.append([str(row.ranks), row.scheme, *cells])
    head = [("", "N"), ("", "scheme"), *((kind, what) for kind in kinds for what in ("measured", "predicted"))]
    return table(
        "sweep", "The sweep over N: bytes per rank", head, rows, f"{_CHECKED} The first peak leaves activations out."
    )


def _ablations(results: Results) -> list[Tree.Element]:
    P, found = results.n_params, results.ablations
    rows: list[list[Cell]] = []
    if gather := found.whole_model_gather:
        held = gather.states + gather.gathered
        text = (
            f"{gather.states:,} B at rest + {gather.gathered:,} B gathered = {held:,} B, {held / P:.4f} B per "
            f"parameter; ZeRO-2 rests at {gather.zero2_resident:,} B, {gather.zero2_resident / P:.4f}. "
            f"Peak {gather.peak:,} B instead of {gather.peak_by_layer:,} B."
        )
        rows.append(["ZeRO-3 gathers the whole model at once", text])
    if narrow := found.narrow_wire:
        text = (
            f"{narrow.sent:,} B sent instead of {narrow.sent_fp32:,} B; {narrow.gradient_differing:,} averaged "
            f"gradients differ in the first step, by up to {_number(narrow.gradient_largest_relative, '.2e')} of "
            f"the largest."
        )
        rows.append([f"blocks travel in {narrow.wire}, rounded at every hop", text])
    if rounded := found.int8_params:
        text = (
            f"{rounded.sent:,} B sent instead of {rounded.sent_exact:,} B; after {len(rounded.losses)} steps the loss "
            f"is {_number(rounded.losses[-1], '.6f')} beside {_number(rounded.losses_exact[-1], '.6f')}."
        )
        rows.append(["ZeRO-3 sends parameters as int8 blocks with scales", text])
    for precision, drift in found.whole_model_bucket.items():
        after = (
            f"after step {step}: {drift.differing[step - 1]:,} parameters differ"
            + (f", by up to {_number(drift.largest[step - 1], '.1e')}" if drift.differing[step - 1] else "")
            for step in sorted({1, len(drift.differing)})
        )
        rows.append([f"one scheme’s bucket is the whole model ({precision})", "; ".join(after) + "."])
    return table("ablations", "What changes when a rule is broken on purpose", [("", "rule"), ("", "found")], rows)
