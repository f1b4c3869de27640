"""The player shows every scheme in lockstep, as recorded, and one transport moves them all."""

from __future__ import annotations

import re
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from pages import CASES, NAMES, Tab, in_browser, replayed, run, small_card
from zerosim.bands import MODEL_STATES
from zerosim.records.results import EventRecord, Results, SchemeRecord

pytestmark = [pytest.mark.usefixtures("shapes_unchecked"), in_browser]

# What each panel shows at every place of the slider.
WALK = """
const slider = document.getElementById("scrub"), shown = [];
for (let moment = 0; moment <= Number(slider.max); moment++) {
  slider.value = moment;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  shown.push([...document.querySelectorAll(".panel")].map((panel) => ({
    scheme: panel.dataset.scheme, event: Number(panel.dataset.event), held: Number(panel.dataset.held),
    now: panel.querySelector(".now b").textContent, words: panel.querySelector(".words").textContent,
    verb: panel.querySelector(".verb").textContent,
  })));
}
return shown;
"""


def logs(results: Results) -> list[tuple[int, str, dict[str, int], list[EventRecord]]]:
    """The N, the scheme, what it starts from and the events of every run that can be replayed."""
    n = results.settings.ranks
    found = [(n, each.name, each.steps[-1].resident, each.events) for each in results.schemes]
    return found + [
        (row.ranks, row.scheme, row.resident_by_band, row.events) for row in results.sweep if row.ranks != n
    ]


@pytest.mark.parametrize("which", ["whole", "nodes", "own"])
def test_every_event_is_shown_as_recorded(tab: Tab, which: str) -> None:
    """For each N and scheme each event has its moment, with the recorded total, and in words what it is."""
    runs = logs(CASES[which]())
    tab.open(which)
    verbs = {
        "hold": {"hold", "gather"}, "free": {"release"}, "compute": {"compute"}, "send": {"gather", "reduce", "send"},
        "copy": {"copy"}, "host hold": {"host"}, "host free": {"host"},
    }  # fmt: skip
    for ranks in {ranks for ranks, *_ in runs}:
        tab.choose("ranks", str(ranks))
        moments = tab.js(WALK)
        here = [each for each in runs if each[0] == ranks]
        assert [panel["scheme"] for panel in moments[0]] == [name for _, name, *_ in here]
        for i, (_, _, start, events) in enumerate(here):
            panels = [moment[i] for moment in moments]
            numbers = [panel["event"] for panel in panels]
            assert numbers == sorted(numbers)
            assert set(numbers) == set(range(len(events) + 1))
            totals = [sum(start.values()), *(event.held for event in events)]
            assert [panel["held"] for panel in panels] == [totals[number] for number in numbers]
            for panel in panels:
                assert panel["now"] == f"{panel['held']:,} B"
                if panel["event"]:
                    event = events[panel["event"] - 1]
                    assert panel["verb"] in verbs[event.kind]
                    assert event.unit in panel["words"]
                    assert not event.nbytes or f"{event.nbytes:,} B" in panel["words"]
                    assert event.kind not in ("hold", "free") or event.name in panel["words"]


@pytest.mark.parametrize("which", ["whole", "nodes", "own"])
def test_what_all_compute_they_compute_at_the_same_moment(tab: Tab, which: str) -> None:
    """The first moment of each computation is the same for all schemes, an update on the host being one too."""
    results = CASES[which]()
    tab.open(which)
    moments = tab.js(WALK)

    def computed(record: SchemeRecord, i: int) -> dict[tuple[str, str], int]:
        return {
            (event.name.removesuffix(" on the host"), event.unit): next(
                at for at, panels in enumerate(moments) if panels[i]["event"] == index
            )
            for index, event in enumerate(record.events, start=1)
            if event.kind == "compute"
        }

    first, *others = [computed(record, i) for i, record in enumerate(results.schemes)]
    assert len(first) == 3 * 3
    assert all(other == first for other in others)
    for (name, unit), at in first.items():
        tab.slide("scrub", at)
        assert tab.text("position").startswith(f"{name.replace('optimizer', 'update')} · {unit}, moment {at} of")


def test_strips_are_the_bytes_by_band(tab: Tab) -> None:
    """Over the moments each band's area begins where the one below ends, on one scale or each on its own."""
    record = run().scheme("ZeRO-3")
    frames = replayed(record.steps[-1].resident, record.events)
    most = {"shared": max(each.steps[-1].peak.total for each in run().schemes), "own": record.steps[-1].peak.total}
    tab.open()
    shown = [panels[3]["event"] for panels in tab.js(WALK)]
    for scale, highest in most.items():
        tab.choose("scale", scale)
        paths = tab.js(
            "const strip = document.querySelector('[data-scheme=\"ZeRO-3\"] .strip');"
            "return [strip.dataset.moments, [...strip.querySelectorAll('path[data-band]')]"
            ".map((p) => [p.dataset.band, p.getAttribute('d'), getComputedStyle(p).fill])]"
        )
        assert int(paths[0]) == len(shown)
        level = [0] * len(shown)
        for band, d, _ in paths[1]:
            level = [below + frames[number].get(band, 0) for below, number in zip(level, shown, strict=True)]
            floor = float(re.match(r"M[\d.]+ ([\d.]+)", d)[1])  # type: ignore[index]
            tops = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)H", d)[: len(shown)]]
            drawn = [(floor - top) / (floor - 16) * highest * 1.02 for top in tops]
            assert drawn == pytest.approx(level, abs=highest / 500)
        assert {band for band, *_ in paths[1]} == {band for frame in frames for band, count in frame.items() if count}
        assert len({fill for *_, fill in paths[1]}) == len(paths[1])


def test_peaks_are_marked(tab: Tab) -> None:
    """Each strip says its peak; without the model states it is another, and says that it is."""
    tab.open()
    marks = "return [...document.querySelectorAll('.strip svg text.strong')].map((e) => e.textContent)"
    assert tab.js(marks) == [f"peak {each.steps[-1].peak.total:,} B" for each in run().schemes]
    tab.choose("shown", "transient")
    highest = [
        max(
            sum(count for band, count in frame.items() if band not in MODEL_STATES)
            for frame in replayed(each.steps[-1].resident, each.events)
        )
        for each in run().schemes
    ]
    assert tab.js(marks) == [f"most {most:,} B" for most in highest]
    assert "not model states" in tab.driver.find_element(By.CSS_SELECTOR, ".now").text


def test_it_stops_at_each_peak_if_asked(tab: Tab) -> None:
    """Playing pauses at every moment at which a scheme is at its peak, says whose it is, and else runs to the end."""
    tab.open()
    peaks: dict[int, list[str]] = {}
    found: set[str] = set()
    for at, panels in enumerate(tab.js(WALK)):
        for panel, record in zip(panels, run().schemes, strict=True):
            totals = [event.held for event in record.events]
            if panel["event"] == 1 + totals.index(max(totals)) and record.name not in found:
                found.add(record.name)
                peaks.setdefault(at, []).append(record.name)
    assert len(peaks) > 1
    tab.click("first")
    tab.click("peaks")
    tab.choose("speed", "8")
    for at, names in sorted(peaks.items()):
        tab.click("play")
        tab.wait("document.getElementById('play').ariaLabel === 'Play'")
        assert (tab.position(), tab.text("peaked")) == (at, f"Peak of {', '.join(names)}")
        assert f"Peak of {', '.join(names)}" in tab.text("spoken")
    tab.click("play")
    tab.wait("document.getElementById('play').ariaLabel === 'Play'")
    assert tab.position() == tab.last()
    tab.click("first")
    for at in sorted(peaks):  # and a button goes there at once
        tab.click("peak")
        assert tab.position() == at


def test_buttons(tab: Tab) -> None:
    """Play runs to the end, pause holds, the others move by one or to an end; a strip goes to where it is hit."""
    tab.open()
    end = tab.last()
    assert tab.position() == 0
    tab.click("next", 2)
    tab.click("back")
    assert tab.position() == 1
    tab.click("last")
    tab.click("next")
    assert tab.position() == end
    tab.click("first")
    tab.click("back")
    assert tab.position() == 0
    tab.choose("speed", "4")
    tab.click("play")
    assert tab.id("play").get_attribute("aria-label") == "Pause"
    tab.wait("document.getElementById('scrub').value >= 3")
    tab.click("play")
    paused, held = tab.position(), tab.held()
    assert paused >= 3
    assert tab.id("play").get_attribute("aria-label") == "Play"
    tab.js("return new Promise((done) => setTimeout(done, 300))")
    assert (tab.position(), tab.held()) == (paused, held)
    tab.slide("scrub", end - 3)
    tab.choose("speed", "8")
    tab.click("play")
    tab.wait(f"document.getElementById('scrub').value == {end}")
    tab.wait("document.getElementById('play').ariaLabel === 'Play'")
    strip = tab.driver.find_element(By.CSS_SELECTOR, ".strip")
    tab.js("arguments[0].scrollIntoView({ block: 'center' })", strip)
    width = strip.size["width"]
    middle = round((52 + width - 4) / 2 - width / 2)
    ActionChains(tab.driver).move_to_element_with_offset(strip, middle, 0).click().perform()
    assert abs(tab.position() - (end + 1) // 2) <= 1


def test_keys(tab: Tab) -> None:
    """Within the player space plays and pauses, arrows, Home, End and p move, and it shows what has the focus."""
    tab.open()
    end = tab.last()
    tab.focus("#back")
    tab.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert tab.position() == 2
    tab.press(Keys.END)
    assert tab.position() == end
    tab.press(Keys.HOME)
    assert tab.position() == 0
    tab.press("p")
    assert tab.text("peaked").startswith("Peak of ")
    tab.press(Keys.HOME)
    tab.press(Keys.TAB, Keys.SPACE)  # the play button has the focus: it is pressed, once
    assert tab.id("play").get_attribute("aria-label") == "Pause"
    tab.press(Keys.SPACE)
    assert tab.id("play").get_attribute("aria-label") == "Play"
    tab.focus("#scrub")
    tab.press(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert tab.position() == 2
    tab.press(Keys.SPACE)
    assert tab.id("play").get_attribute("aria-label") == "Pause"
    tab.press(Keys.SPACE)
    outline = tab.js("const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.outlineWidth")
    assert outline == "solid3px"
    at = tab.position()
    tab.focus("input[name=focus]:checked")
    tab.press(Keys.ARROW_LEFT)  # a choice among schemes, not a moment
    assert tab.js("return document.querySelector('input[name=focus]:checked').value") == "ZeRO-2"
    assert tab.position() == at
    assert "ZeRO-2" in tab.text("depth-title")


def test_the_transport_stays_in_sight(tab: Tab) -> None:
    """From the first strip to the last event the transport is on the screen, also on a phone and at 200 %."""
    for width, height, scale in ((390, 844, 1), (640, 400, 2), (1280, 800, 1)):
        tab.open()
        tab.screen(width, height, scale)
        tab.settle()
        tab.js("document.getElementById('depth').open = true")
        for part in ("#scale", "#grid", ".panel", ".panel:last-of-type", "#lanes", "#now"):
            tab.js("document.querySelector(arguments[0]).scrollIntoView({ behavior: 'instant' })", part)
            top, bottom = tab.js(
                "const r = document.querySelector('.transport').getBoundingClientRect(); return [r.top, r.bottom]"
            )
            assert 0 <= top < bottom <= height + 1, (width, part)
            assert bottom - top < height / 3, (width, height)


def test_a_step_that_is_taken_is_spoken(tab: Tab) -> None:
    """A reader hears where it is, what all hold and what the scheme in focus does; not while it plays."""
    record = run().scheme("ZeRO-3")
    tab.open()
    tab.click("next")
    spoken = tab.text("spoken")
    assert f"{record.events[0].nbytes:,} B" in spoken
    assert all(f"{name}: {held:,} B held" in spoken for name, held in zip(NAMES, tab.held(), strict=True))
    assert tab.id("scrub").get_attribute("aria-valuetext") == tab.text("position")
    tab.choose("speed", "8")
    tab.click("play")
    tab.wait("document.getElementById('scrub').value >= 4")
    assert tab.text("spoken") == spoken
    tab.click("play")
    assert tab.text("spoken") != spoken


def test_a_run_out_of_memory_shows_how_far_it_came(tab: Tab) -> None:
    """A run that ended for want of memory ends with what it asked for and held, and the card is drawn."""
    results = small_card()
    tab.open("small_card")
    *_, last = tab.js(WALK)
    for panel, record in zip(last, results.schemes, strict=True):
        if (short := record.out_of_memory) is not None:
            assert panel["held"] == sum(short.held.values())
            assert panel["words"].startswith(f"out of memory {short.asked:,} B of {short.band}")
    assert [record.out_of_memory is None for record in results.schemes] == [False, False, False, True]
    texts = tab.js("return [...document.querySelectorAll('.strip svg text')].map((e) => e.textContent)")
    assert texts.count(f"card {results.settings.capacity:,} B") == len(results.schemes)
    bars = tab.js("return [...document.querySelectorAll('#bars svg')].map((e) => e.ariaLabel)")
    assert sum("out of memory: " in bar and "more did not fit beside" in bar for bar in bars) == 3


def test_one_scheme_in_depth_is_the_log(tab: Tab) -> None:
    """On demand: every event with its bytes, what is held by band, and the player goes to the event that is pressed."""
    record = run().scheme("ZeRO-3")
    frames = replayed(record.steps[-1].resident, record.events)
    tab.open()
    assert tab.js("return document.querySelectorAll('#events tbody tr').length") == 0  # until it is asked for
    tab.click("depth-title")
    tab.wait("document.querySelector('#events tbody tr')")
    rows: list[list[str]] = tab.js(
        "return [...document.querySelectorAll('#events tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    signs: dict[str, str] = {"hold": "+", "free": "−"}
    for row, event in zip(rows[1:], record.events, strict=True):
        moved = f"{signs.get(event.kind, '')}{event.nbytes:,} B" if event.nbytes else ""
        assert (row[1:4], row[5:]) == ([event.kind, event.name, event.unit], [moved, f"{event.held:,} B"])
    at = 1 + max(range(len(record.events)), key=lambda index: record.events[index].held)
    tab.js("document.querySelectorAll('#events button')[arguments[0]].click()", at)
    assert tab.js("return document.querySelector('#events [aria-current]').rowIndex") == at + 1
    assert tab.text("peaked") == "Peak of ZeRO-3"
    cells: list[list[Any]] = tab.js(
        "return [...document.querySelectorAll('#now tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    for band, now, rest, peak in cells[:-1]:
        counts = [frame.get(band, 0) for frame in (frames[at], frames[0], record.steps[-1].peak.by_band)]
        assert [now, rest, peak] == [f"{count:,} B" for count in counts]
    assert cells[-1][1] == f"{record.steps[-1].peak.total:,} B"
