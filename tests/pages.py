"""Pages to look at, and the browser that looks: cases of results, their pages, and what a reader does there."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from helpers import plain_lab
from zerosim.records.results import EventRecord, Failure, Results, Settings
from zerosim.report import page as report
from zerosim.stages import HFSDP, HPZ, HSDP, SCHEMES, Infinity, Stage, ZeRO3

NAMES = [stage.name for stage in SCHEMES]
SETTINGS = Settings(
    ranks=5, steps=3, batch=2, seed=0, model_seed=0, precision="mixed", wire="fp32", gather="layer", data="noise",
    capacity=None, widths=[7, 13, 11, 7],
)  # fmt: skip
HOSTILE = "</script><script>window.hostile = 1</script><img src=x onerror='window.hostile = 2'>&lt;<b>$x$ %{y}<!--"
MINE = Stage("mine", optimizer=True, grads=True)


# -- results


@functools.cache
def run(capacity: int | None = None) -> Results:
    return plain_lab(replace(SETTINGS, capacity=capacity))


def small_card() -> Results:
    """A card that is one byte too small for ZeRO-2: what needs more than that runs out of memory, ZeRO-3 fits."""
    return run(run().scheme("ZeRO-2").steps[-1].peak.total - 1)


def hostile() -> Results:
    """Markup in every text of a run that has failed."""

    def marked(events: list[EventRecord]) -> list[EventRecord]:
        return [replace(each, unit=HOSTILE, name=each.name + HOSTILE * (each.kind == "send")) for each in events]

    def banded(counts: dict[str, Any]) -> dict[str, Any]:
        return {band + HOSTILE: count for band, count in counts.items()}

    whole = run()
    failure = Failure(
        check="as predicted", scheme=HOSTILE, ranks=5, step=1, rank=0, quantity=HOSTILE, measured=HOSTILE, expected="1"
    )
    return replace(
        whole,
        created=HOSTILE,
        versions={HOSTILE: HOSTILE},
        settings=replace(whole.settings, data=HOSTILE),
        failures=[failure],
        schemes=[replace(each, row=Stage(each.name + HOSTILE), events=marked(each.events)) for each in whole.schemes],
        sweep=[replace(row, scheme=row.scheme + HOSTILE, events=marked(row.events)) for row in whole.sweep],
        differences=[
            replace(each, scheme=each.scheme + HOSTILE, differing=banded(each.differing), largest=banded(each.largest))
            for each in whole.differences
        ],
    )


def bare() -> Results:
    """A card that no scheme fits on: no steps, no events, no differences, and here no sweep."""
    return replace(run(64), sweep=[])


@functools.cache
def own() -> Results:
    """The four and a row of the caller's own, which does what ZeRO-2 does."""
    return plain_lab(replace(SETTINGS, steps=1), rows=(*SCHEMES[:3], MINE, SCHEMES[3]))


@functools.cache
def nodes() -> Results:
    """Rows with groups, a second copy and states on the host, and one that nobody has named, on 2 nodes of 2."""
    rows = ZeRO3, HSDP, HFSDP, HPZ, Infinity, Stage("half", optimizer="all", grads="group")
    return plain_lab(replace(SETTINGS, ranks=4, node=2, steps=1), rows=rows)


CASES: dict[str, Callable[[], Results]] = {
    "whole": run, "small_card": small_card, "hostile": hostile, "bare": bare, "own": own, "nodes": nodes,
}  # fmt: skip


# -- pages


@functools.cache
def page(which: str) -> str:
    return report.page(CASES[which]())


class Tables(HTMLParser):
    """The tables of a page by id, each a list of rows of texts; and the texts of all else, scripts left out."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: list[str] = []
        self.tags: list[str] = []
        self._rows: list[list[str]] | None = None
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._silent = tag in ("script", "style")
        if tag == "table":
            self._rows = self.tables.setdefault(dict(attrs).get("id") or "", [])
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows is not None:
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        if tag == "table":
            self._rows = None

    def handle_data(self, data: str) -> None:
        if self._silent:
            return
        self.texts.append(data)
        if self._rows and self._rows[-1]:
            self._rows[-1][-1] += data


@functools.cache
def read(which: str) -> Tables:
    return Tables(page(which))


def commas(*counts: int) -> list[str]:
    return [f"{count:,}" for count in counts]


def replayed(start: dict[str, int], events: list[EventRecord]) -> list[dict[str, int]]:
    """Bytes by band before the first event and after each."""
    frames = [dict(start)]
    for event in events:
        sign = {"hold": 1, "free": -1}.get(event.kind, 0)
        frames.append(frames[-1] | ({event.name: frames[-1].get(event.name, 0) + sign * event.nbytes} if sign else {}))
    return frames


# -- in a browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
in_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs a headless browser: Debian's packages chromium and chromium-driver",
)


class Tab:
    """The page in a browser, with what a reader does there."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, which: str = "whole", *, calm: bool = True) -> Tab:
        """Load a page afresh, on a desk by daylight."""
        path = self.folder / f"{which}.html"
        if not path.exists():
            path.write_text(page(which), encoding="utf-8")
        self.prefer(calm=calm)
        self.screen(1280)
        self.driver.get(path.as_uri())
        self.wait("document.documentElement.dataset.ready")
        self.settle()
        return self

    def settle(self) -> None:
        """Until what follows the width of the screen has been drawn."""
        self.js("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def prefer(self, *, dark: bool = False, calm: bool = True, printed: bool = False) -> None:
        features = {
            "color-scheme": "dark" if dark else "light",
            "reduced-motion": "reduce" if calm else "no-preference",
        }
        media = [{"name": f"prefers-{name}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": media, "media": "print" if printed else ""}
        )

    def screen(self, width: int, height: int = 800, scale: int = 1) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def id(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def click(self, name: str, times: int = 1) -> None:
        self.js("for (let i = 0; i < arguments[1]; i++) document.getElementById(arguments[0]).click()", name, times)

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def focus(self, selector: str) -> None:
        self.js("document.querySelector(arguments[0]).focus()", selector)

    def choose(self, name: str, value: str) -> None:
        """A radio button of that group, or an entry of the list of that id."""
        self.js(
            """const list = document.getElementById(arguments[0]);
            if (list?.matches("select")) {
              list.value = arguments[1];
              list.dispatchEvent(new Event("change", { bubbles: true }));
            } else [...document.getElementsByName(arguments[0])].find((e) => e.value === arguments[1]).click();""",
            name, value,
        )  # fmt: skip
        self.settle()

    def slide(self, name: str, to: int) -> None:
        """A slider of that id."""
        self.js(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('input', { bubbles: true }))",
            name, to,
        )  # fmt: skip

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What the browser has said since it was last asked."""
        return self.driver.get_log(kind)  # type: ignore[no-any-return, no-untyped-call]

    def position(self) -> int:
        return int(self.id("scrub").get_attribute("value"))

    def last(self) -> int:
        return int(self.id("scrub").get_attribute("max"))

    def held(self) -> list[int]:
        """What each panel says is held."""
        return [
            int(each) for each in self.js("return [...document.querySelectorAll('.panel')].map(p => p.dataset.held)")
        ]

    def text(self, name: str) -> str:
        return str(self.id(name).get_attribute("textContent"))

    def wait(self, condition: str) -> None:
        WebDriverWait(self.driver, 60, 0.02).until(lambda _: self.js(f"return {condition}"))


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance of rgb(r, g, b)."""
    channels = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)
