"""The page is safe, and there for everyone: by keyboard, by ear, on any screen, in any light and on paper."""

from __future__ import annotations

import json
import re

import pytest
from selenium.webdriver.common.keys import Keys

from helpers import by_night, some_by_night
from pages import CASES, HOSTILE, Tab, contrast, in_browser, luminance

pytestmark = [pytest.mark.usefixtures("shapes_unchecked"), in_browser]


@pytest.mark.parametrize("which", some_by_night(CASES, ("hostile", "bare", "nodes").__contains__))
def test_it_loads_offline_and_in_silence(tab: Tab, which: str) -> None:
    """No message on the console, no request but for the file itself, and no text has run or become markup."""
    tab.log("performance")
    tab.open(which)
    for name in ("next", "peak", "last", "depth-title"):
        tab.click(name)
    for name, value in (("memory-unit", "bytes"), ("traffic-unit", "bytes"), ("difference-of", "loss")):
        tab.choose(name, value)
    assert tab.log("browser") == []
    messages = [json.loads(each["message"])["message"] for each in tab.log("performance")]
    asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [tab.driver.current_url]
    assert tab.js("return window.hostile ?? null") is None
    assert tab.js("return document.images.length") == 0
    assert (HOSTILE in tab.js("return document.querySelector('main').innerText")) is (which == "hostile")


def test_the_page_may_not_speak_to_anyone(tab: Tab) -> None:
    """Were a script to ask for something, or to bring another, the page's own policy would refuse."""
    tab.open()
    asked = tab.js("return fetch('https://example.org').then(() => 'answered', () => 'refused')")
    added = tab.js(
        "const s = document.createElement('script'); s.text = 'window.added = 1'; document.head.append(s);"
        "return window.added ?? null"
    )
    assert (asked, added) == ("refused", None)
    assert any("Content Security Policy" in each["message"] for each in tab.log("browser"))


def test_everything_has_a_name_and_can_be_reached(tab: Tab) -> None:
    """Every control, chart and picture has a name for a screen reader, and every control is in the tab order."""
    tab.open()
    tab.click("depth-title")
    names = tab.js(
        "return [...document.querySelectorAll('button, select, input, [tabindex], article, svg[role=img]')]"
        ".map((e) => e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.outerHTML.slice(0, 80))"
    )
    assert len(names) > 60
    assert not [name for name in names if name.startswith("<")]
    assert tab.js("return document.querySelectorAll('[tabindex=\"-1\"]').length") == 0
    unnamed = "return [...document.querySelectorAll('svg:not([role=img])')].filter((e) => !e.ariaHidden).length"
    assert tab.js(unnamed) == 0


def test_the_keyboard_alone_is_enough(tab: Tab) -> None:
    """By tab alone one comes from the top to every control in turn, each showing its focus, and to the end."""
    tab.open()
    wanted = set(
        tab.js(
            "return [...document.querySelectorAll('#player button, #player select, #scrub, #peaks, #charts select,"
            " #charts .chart')].map((e) => e.id || e.ariaLabel)"
        )
    )
    seen: list[str] = []
    for _ in range(80):
        tab.press(Keys.TAB)
        here, shown = tab.js(
            "const e = document.activeElement;"
            "const s = getComputedStyle(e.matches('.choice input') ? e.nextSibling : e);"
            "return [e.id || e.ariaLabel || e.value || e.textContent, s.outlineStyle + s.outlineWidth]"
        )
        assert shown == "solid3px", here
        seen.append(here)
        if wanted <= set(seen):
            break
    assert wanted <= set(seen)
    assert len(seen) < 60
    tab.focus("#depth-title")
    tab.press(Keys.ENTER)
    assert tab.js("return document.getElementById('depth').open") is True
    tab.focus(".lanes")
    tab.press(Keys.HOME, Keys.ARROW_RIGHT)
    assert tab.js("return document.querySelector('.lanes .readout').textContent").startswith(("computing", "sending"))


TEXTS = """
const ground = (e) => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor; if (!c.startsWith("rgba(0, 0, 0, 0")) return c; } };
const seen = [".lead", ".note", "a", ".cards b", "thead th", "td", ".now", ".words", "legend", ".choice span", "button",
  "#play", "select", "#position", "#ring", "summary", "footer p", ".readout", "figcaption small"];
const drawn = ["#grid text", ".strip text", "#loss text", "#bars text"];
return [
  ...seen.map((s) => [s, document.querySelector(s)]).map(([s, e]) => [s, getComputedStyle(e).color, ground(e)]),
  ...drawn.map((s) => [s, document.querySelector(s)])
    .map(([s, e]) => [s, getComputedStyle(e).fill, ground(e.closest("div"))]),
];
"""
GRAPHICS = """
const ground = getComputedStyle(document.body).backgroundColor, found = [];
for (const e of document.querySelectorAll("[data-band]")) {
  const { fill, stroke } = getComputedStyle(e);
  found.push([e.dataset.band, fill.startsWith("rgb") ? fill : stroke, ground]); // hatched, or an outline
}
for (const s of [".curve", ".mark", ".axis", ".head", ".quiet", ".work", ".message", ".window"])
  for (const e of document.querySelectorAll(s)) found.push([s, getComputedStyle(e).stroke, ground]);
for (const e of document.querySelectorAll(".block")) found.push([".block", getComputedStyle(e).fill, ground]);
for (const e of document.querySelectorAll("button, select, .choice span"))
  found.push([e.className, getComputedStyle(e).borderTopColor, ground]);
return found;
"""


@pytest.mark.parametrize("which", ["whole", "nodes"])
def test_contrast_by_day_and_by_night(tab: Tab, which: str) -> None:
    """Texts have 4.5 to 1 and what is drawn has 3 to 1 with its ground (WCAG 1.4.3 and 1.4.11)."""
    tab.open(which)
    tab.click("depth-title")
    while tab.js("return document.querySelectorAll('#grid .block, #grid .passing').length") < 2:
        tab.click("next")
    for dark in (False, True):
        tab.prefer(dark=dark)
        assert (luminance(tab.js("return getComputedStyle(document.body).backgroundColor")) < 0.1) is dark
        for selector, ink, under in tab.js(TEXTS):
            assert contrast(ink, under) >= 4.5, (selector, dark)
        graphics = tab.js(GRAPHICS)
        assert {"params", "gathered params", "activations", ".block", ".curve", ".mark", ".window"} <= {
            what for what, *_ in graphics
        }
        for what, paint, under in {tuple(each) for each in graphics}:
            assert contrast(paint, under) >= 3, (what, paint, dark)


@pytest.mark.parametrize("which", ["hostile", *by_night("whole", "small_card", "nodes")])
def test_nothing_is_wider_than_the_screen(tab: Tab, which: str) -> None:
    """From a phone to a wall, and at 200 %: only tables scroll sideways, in frames of their own; strips stay tall."""
    tab.open(which)
    tab.click("depth-title")
    screens = (360, 800, 1), (390, 844, 1), (640, 400, 2), (800, 800, 1), (1280, 800, 1), (2000, 1200, 1)
    for width, height, scale in screens:
        tab.screen(width, height, scale)
        tab.settle()
        tab.click("last")
        assert tab.js("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
        sizes = tab.js(
            "return [...document.querySelectorAll('.strip')].map((e) => [e.offsetHeight, e.offsetWidth,"
            "e.firstChild.viewBox.baseVal.width])"
        )
        assert sizes
        for tall, wide, drawn in sizes:
            assert tall >= 120
            assert abs(wide - drawn) <= 1  # drawn for this width, so that its texts have their size
    tab.screen(390, 844)
    heights = tab.js("return [...document.querySelectorAll('.buttons button')].map((each) => each.offsetHeight)")
    assert min(heights) >= 44


def test_motion_is_left_out_on_request(tab: Tab) -> None:
    """Scrolling glides, but not for a reader who prefers less motion; nothing else is animated by style."""
    for calm in (False, True):
        tab.open(calm=calm)
        smooth = tab.js("return getComputedStyle(document.documentElement).scrollBehavior")
        assert (smooth == "smooth") is not calm
    moving = tab.js("return document.getAnimations().length")
    assert moving == 0


def test_paper_has_the_figures(tab: Tab) -> None:
    """In print bars, grid, strips, charts and tables are there, in daylight, without what one cannot press."""
    tab.open()
    tab.prefer(dark=True, printed=True)
    shown = """return arguments[0].map((s) => [...document.querySelectorAll(s)].filter((e) => e.checkVisibility()
        && e.getBoundingClientRect().width > 100).length)"""
    assert tab.js(shown, ["#bars svg", "#grid svg", ".strip svg", ".charts svg.drawn", "table"]) == [4, 1, 4, 4, 9]
    controls = "return [...document.querySelectorAll('button, select, input, .transport')]"
    assert tab.js(f"{controls}.filter((e) => e.checkVisibility()).length") == 0
    assert luminance(tab.js("return getComputedStyle(document.body).backgroundColor")) == pytest.approx(1)
    data = tab.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert re.match("JVBERi0", data)  # %PDF-
    tab.prefer()
