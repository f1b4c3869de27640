"""The grid of ownership draws what a row declares and what its log says, whatever the row is called."""

from __future__ import annotations

import re

import pytest

from helpers import some_by_night
from pages import CASES, Tab, in_browser
from zerosim.bands import Band
from zerosim.records.results import SchemeRecord
from zerosim.stages import Stage

pytestmark = [pytest.mark.usefixtures("shapes_unchecked"), in_browser]

KINDS = {"params": Band.PARAMS, "grads": Band.GRADS, "optimizer": Band.MASTER}
UNITS = ["layer 1", "layer 2", "layer 3"]
PASSING = ("gathered params", "second params", "unreduced grads", "partial grads")
SHOWN = [
    *(("whole", name) for name in ("data parallel", "ZeRO-2", "ZeRO-3")),
    ("own", "mine"),
    *(("nodes", name) for name in ("ZeRO-3", "HSDP", "HFSDP", "hpZ", "ZeRO-Infinity", "half")),
]
# By day all that is drawn: whole and in pieces, over all and in groups, a second copy, and what is on the host.
each_row = pytest.mark.parametrize(
    ("which", "name"), some_by_night(SHOWN, lambda case: case[1] in ("ZeRO-2", "HFSDP", "hpZ", "ZeRO-Infinity"))
)
OWNED = """
return [...document.querySelectorAll("#grid .owned")].map((e) => [
  e.dataset.kind, e.dataset.unit, Number(e.dataset.rank), e.dataset.piece, e.dataset.band,
  e.getBBox().x, e.getBBox().width])
"""


def focused(tab: Tab, which: str, name: str) -> tuple[SchemeRecord, Stage, int, int]:
    """A scheme's grid: its record, its row as it ran, N and the ranks of a node."""
    results = CASES[which]()
    tab.open(which)
    tab.choose("focus", name)
    record, ranks, node = results.scheme(name), results.settings.ranks, results.settings.node
    row = record.row.on(ranks, node, gathers="params" in record.row.offload)
    return record, row, ranks, node or ranks


@each_row
def test_cells_are_filled_where_a_rank_owns_its_piece(tab: Tab, which: str, name: str) -> None:
    """For each state, layer and rank: the piece that the row declares, as wide and in the place that it has there."""
    _, row, ranks, node = focused(tab, which, name)
    drawn = tab.js(OWNED)
    assert {(kind, unit, rank) for kind, unit, rank, *_ in drawn} == {
        (kind, unit, rank) for kind in KINDS for unit in UNITS for rank in range(ranks)
    }
    left = {(kind, unit): min(x for *cell, _, _, _, x, _ in drawn if cell == [kind, unit]) for kind, unit, *_ in drawn}
    for kind, unit, rank, piece, band, x, width in drawn:
        index, of = row.piece(KINDS[kind], rank, ranks, node)
        assert piece == f"{index}/{of}"
        whole = width * of
        assert x - left[kind, unit] == pytest.approx(whole * index / of, abs=0.01)
        assert (band == "host") is row.offloads(KINDS[kind])


def extents(d: str) -> list[float]:
    """The widths of the rectangles that a path is made of."""
    return [float(width) for width in re.findall(r"h([\d.]+)v", d)]


# At every moment: the event, what is hatched; and where a collective is under way, after each hop, the blocks.
WALK = """
const input = (id, value) => {
  const slider = document.getElementById(id);
  slider.value = value;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  return slider;
};
const all = (selector, read) => [...document.querySelectorAll(selector)].map(read);
const [panel] = all(".panel", (each) => each).filter(({ dataset }) => dataset.scheme === arguments[0]);
const shown = [];
for (let moment = 0; moment <= Number(document.getElementById("scrub").max); moment++) {
  input("scrub", moment);
  const passing = all("#grid .passing", (e) => [e.dataset.band, JSON.parse(e.dataset.units), e.getAttribute("d")]);
  const [hop, hops] = [document.getElementById("hop"), []];
  for (let made = 0; !hop.disabled && made <= Number(hop.max); made++) {
    input("hop", made);
    const blocks = all("#grid .block", ({ dataset: { rank, to, chunk } }) => [Number(rank), Number(to), chunk]);
    hops.push([document.getElementById("ring").textContent, blocks]);
  }
  shown.push([Number(panel.dataset.event), passing, hops]);
}
return shown;
"""


@each_row
def test_cells_are_hatched_while_the_log_holds_more(tab: Tab, which: str, name: str) -> None:
    """At every moment exactly the layers of which more is held, by band, and as wide as what is there of them."""
    record, _, ranks, node = focused(tab, which, name)
    held: list[dict[tuple[str, str], int]] = [{}]
    for event in record.events:
        now = dict(held[-1])
        if event.kind in ("hold", "free") and event.name in PASSING:
            change = event.nbytes if event.kind == "hold" else -event.nbytes
            now[event.name, event.unit] = now.get((event.name, event.unit), 0) + change
        held.append({key: nbytes for key, nbytes in now.items() if nbytes})
    cells = tab.js("return [...document.querySelectorAll('#grid .cell')].map((e) => e.getAttribute('d'))")
    cell = max(width for d in cells for width in extents(d))
    parts = {"second params": cell / node, "partial grads": cell / node, "unreduced grads": cell}
    seen = set()
    for at, passing, _ in tab.js(WALK, name):
        assert {(band, unit) for band, units, _ in passing for unit in units} == set(held[at])
        for band, units, d in passing:
            seen.add(band)
            if band in parts:
                assert extents(d) == pytest.approx([parts[band]] * ranks * len(units), abs=0.02)
    assert seen == {event.name for event in record.events if event.kind == "hold"} & set(PASSING)


def rings(ranks: int, node: int, over: str) -> list[list[int]]:
    """The ranks of each ring, in order."""
    if over == "all":
        return [list(range(ranks))]
    if over == "node":
        return [list(range(first, first + node)) for first in range(0, ranks, node)]
    return [list(range(member, ranks, node)) for member in range(node)]


@each_row
def test_blocks_go_round_the_ring(tab: Tab, which: str, name: str) -> None:
    """In each collective, hop by hop: from every rank to the one below in its ring, the piece that is its turn.

    As in ``comm.py``: a reduce-scatter brings piece c to member c, and an all-gather begins with it there.
    """
    record, _, ranks, node = focused(tab, which, name)
    flown = []
    halves: dict[tuple[str, str, str], int] = {}
    for at, _, hops in tab.js(WALK, name):
        sent = next((i for i, each in enumerate(record.events) if i >= at and each.kind == "send"), None)
        if not hops or sent in flown:  # the same, while it waits for others
            continue
        assert sent is not None
        flown.append(sent)
        event = record.events[sent]
        over = "all" if node == ranks or event.outside == event.nbytes else "replicas" if event.outside else "node"
        here = rings(ranks, node, over)
        [size] = {len(ring) for ring in here}
        key = event.name, event.unit, over
        halves[key] = halves.get(key, 0) + 1
        gathers = event.name == "all-gather" or (event.name == "all-reduce" and halves[key] % 2 == 0)
        assert len(hops) == size
        for hop, (words, blocks) in enumerate(hops):
            assert f"hop {hop} of {size - 1}" in words
            expected = [
                [rank, ring[member - 1], f"{(member + hop + (not gathers)) % size}/{size}"]
                for ring in here
                for member, rank in enumerate(ring)
            ]
            assert sorted(blocks) == (sorted(expected) if hop < size - 1 else [])  # then all have arrived
    assert flown == [at for at, event in enumerate(record.events) if event.kind == "send"]


def test_a_gather_fills_the_layer_hop_by_hop(tab: Tab) -> None:
    """After h hops each rank has h + 1 of N pieces of the gathered layer, and after the last all of them."""
    _, _, ranks, _ = focused(tab, "whole", "ZeRO-3")
    tab.slide("scrub", next(at for at, (_, _, hops) in enumerate(tab.js(WALK, "ZeRO-3")) if hops))
    assert "all-gather of layer 1" in tab.text("ring")
    for hop in range(ranks):
        tab.slide("hop", hop)
        [d] = tab.js("return [...document.querySelectorAll('#grid .passing')].map((e) => e.getAttribute('d'))")
        assert len(extents(d)) == ranks * (hop + 1)
    tab.click("next", 3)
    [d] = tab.js("return [...document.querySelectorAll('#grid .passing')].map((e) => e.getAttribute('d'))")
    [whole] = {round(width, 2) for width in extents(d)}
    assert whole == pytest.approx(ranks * min(width for *_, width in tab.js(OWNED)), abs=0.05)


def test_a_block_moves_between_two_ranks(tab: Tab) -> None:
    """With motion, hops are made one after the other, and between two of them blocks are on their way; without, not."""
    between = "[...document.querySelectorAll('#grid .block')].some((block) => block.getAttribute('opacity') % 1)"
    for calm in (True, False):
        focused(tab, "whole", "ZeRO-3")
        at = next(at for at, (_, _, hops) in enumerate(tab.js(WALK, "ZeRO-3")) if hops)
        tab.prefer(calm=calm)
        tab.slide("scrub", at)
        if calm:
            tab.js("return new Promise((done) => setTimeout(done, 400))")
            assert tab.id("hop").get_attribute("value") == "0"
            assert tab.js(f"return {between}") is False
        else:
            tab.wait(between)
            tab.wait("document.getElementById('hop').value === document.getElementById('hop').max")
