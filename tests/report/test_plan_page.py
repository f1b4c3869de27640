"""The planner's page says what its grid's cells say, in a real browser, offline, by keyboard, to everyone."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from msgspec.structs import replace
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from zerosim.planner import conventions, grid, question
from zerosim.planner import plan as plans
from zerosim.planner.model_source import Perceptron
from zerosim.records.plan_grid import Grid, GridCell
from zerosim.records.question import Question
from zerosim.report import plan_page
from zerosim.stages import Stage

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SOURCE = Perceptron([67, 131, 127, 61])
HOSTILE = "</script><script>window.hostile = 1</script><img src=x onerror='window.hostile = 2'>&lt;<b>$x$ %{y}<!--"
MEMORY, RESERVE = 280_000, 4_000


@functools.cache
def made(memory: int | None = MEMORY) -> Grid:
    """A card that some choices fit on, some only without the reserve, and some do not."""
    rules = conventions.convention("fsdp2")
    asked = Question(
        model="mlp", asked=[3], gpus=[3], rows=list(rules.rows()), others=rules.others, convention="fsdp2", memory=memory,
        reserve=RESERVE if memory else 0,
    )  # fmt: skip
    plan = plans.make(SOURCE, question.check(asked), lambda doing: None)
    return grid.make(SOURCE, plan, grid.axes(SOURCE, plan, lambda doing: None), lambda doing: None)


def hostile() -> Grid:
    """Markup in every text that comes from outside."""
    whole = made()
    plan = whole.plan

    def named(row: Stage) -> Stage:
        return Stage(row.name + HOSTILE, row.optimizer, row.grads, row.params)

    def celled(each: GridCell) -> GridCell:
        peak = replace(each.cell.peak, unit=HOSTILE)
        return replace(each, cell=replace(each.cell, row=named(each.cell.row), peak=peak))

    cells = [replace(cell, row=named(cell.row)) for cell in plan.cells]
    return replace(
        whole,
        axes=replace(whole.axes, rows=[named(row) for row in whole.axes.rows]),
        units=[unit + HOSTILE for unit in whole.units],
        cells=[celled(each) for each in whole.cells],
        left_out=[HOSTILE],
        plan=replace(
            plan, created=HOSTILE, versions={HOSTILE: HOSTILE}, why=[HOSTILE], left_out=[HOSTILE], cells=cells,
            model=replace(plan.model, name=HOSTILE, notes=[HOSTILE]), question=replace(plan.question, card=HOSTILE),
        ),
    )  # fmt: skip


CASES: dict[str, Callable[[], Grid]] = {"whole": made, "no card": lambda: made(None), "hostile": hostile}


def cell(grid_: Grid, row: str, ranks: int, rows: int, checkpoint: str) -> GridCell:
    """The cell of these choices."""
    [found] = [
        each
        for each in grid_.cells
        if (each.cell.name, each.cell.ranks, each.micro_batch, each.checkpoint) == (row, ranks, rows, checkpoint)
    ]
    return found


# -- without a browser


def test_what_is_told_is_every_cell() -> None:
    """The script is told the numbers of each cell's record, and nothing else is called its peak or its verdict."""
    found = made()
    told = plan_page.told(found)
    assert tuple(told["fields"]) == plan_page.FIELDS
    rows = [dict(zip(told["fields"], each, strict=True)) for each in told["cells"]]
    assert len(rows) == len(found.cells)
    for row, each in zip(rows, found.cells, strict=True):
        inner = each.cell
        assert told["axes"]["row"][row["row"]] == inner.name
        assert (told["axes"]["ranks"][row["ranks"]], told["axes"]["rows"][row["rows"]]) == (
            inner.ranks, each.micro_batch,
        )  # fmt: skip
        assert (row["peak"], row["rest"], row["sent"], row["room"]) == (
            inner.peak.total, inner.at_rest, inner.sent, inner.room,
        )  # fmt: skip
        assert row["verdict"] == ("fits" if inner.fits else "tight" if inner.tight else "none")
    assert {row["verdict"] for row in rows} == {"fits", "tight", "none"}


def test_the_page_is_small() -> None:
    """Without a charts' library, and with logs as loops, a page of a hundred steps takes little room."""
    found = made()
    assert len(found.cells) == 3 * 4 * 4 * 2
    assert len(plan_page.page(found)) < 120_000


def test_a_plan_with_sequences_says_how_many_tokens_a_step_has() -> None:
    """Micro-batches times rows times tokens times GPUs; nothing where rows have no length."""
    found = made()
    each = cell(found, "ZeRO-3", 3, 4, "none")
    assert plan_page._tokens(found.plan, each) is None
    asked = replace(found.plan, question=replace(found.plan.question, accumulate=5))
    assert plan_page._tokens(asked, replace(each, sequence=7)) == 5 * 3 * 4 * 7


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

    def open(self, which: str = "whole", fragment: str = "") -> Tab:
        """Load a page afresh, on a desk by daylight."""
        path = self.folder / f"{which}.html"
        if not path.exists():
            path.write_text(plan_page.page(CASES[which]()), encoding="utf-8")
        self.prefer()
        self.screen(1280)
        self.driver.get("about:blank")  # a fragment alone would load nothing
        self.driver.get(path.as_uri() + fragment)
        self.wait("document.documentElement.dataset.ready")
        return self

    def prefer(self, *, dark: bool = False, medium: str = "screen") -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features, "media": medium})

    def screen(self, width: int) -> None:
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def id(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def press(self, name: str, *keys: str) -> None:
        """Keys for the control of that id."""
        self.js("document.getElementById(arguments[0]).focus()", name)
        ActionChains(self.driver).send_keys(*keys).perform()

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What the browser has said since it was last asked."""
        return self.driver.get_log(kind)  # type: ignore[no-any-return, no-untyped-call]

    def wait(self, condition: str) -> None:
        WebDriverWait(self.driver, 60, 0.02).until(lambda _: self.js(f"return {condition}"))

    def answer(self) -> dict[str, str]:
        """What the answer says of itself."""
        return dict(self.js("return {...document.getElementById('answer').dataset}"))

    def table(self, name: str) -> list[list[str]]:
        """The texts of a table's body, row by row."""
        rows = "[...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        return self.js(f"return {rows}.map((row) => [...row.cells].map((each) => each.textContent))", name)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield Tab(driver, tmp_path_factory.mktemp("pages"))
    driver.quit()


def said_of(each: GridCell) -> dict[str, str]:
    """What the answer must say of a cell."""
    inner = each.cell
    verdict = "fits" if inner.fits else "tight" if inner.tight else "none"
    return {
        "verdict": verdict, "peak": str(inner.peak.total), "rest": str(inner.at_rest), "sent": str(inner.sent)
    }  # fmt: skip


@in_browser
@pytest.mark.parametrize("which", CASES)
def test_it_loads_offline_and_in_silence(tab: Tab, which: str) -> None:
    """No message on the console, no request but for the file itself, and no text has run or become markup."""
    tab.driver.get("about:blank")
    tab.log("performance")
    tab.log("browser")
    tab.open(which)
    tab.press("micro-batch", Keys.ARROW_RIGHT)
    assert tab.log("browser") == []
    messages = [json.loads(each["message"])["message"] for each in tab.log("performance")]
    urls = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert {url.partition(":")[0] for url in urls} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in urls) == 1
    assert tab.js("return [window.hostile ?? null, document.images.length]") == [None, 0]
    assert tab.id("verdict").text


@in_browser
def test_every_number_is_a_cell_s(tab: Tab) -> None:
    """Bands at rest and at the peak, every scheme's bytes and every peak around are the records', as integers."""
    found = made()
    tab.open()
    each = cell(found, "ZeRO-3", 3, 1, "none")
    assert tab.answer() == said_of(each)
    inner = each.cell
    *bands, sums = tab.table("bands")
    rest, peak = ({band: counts[at] for band, *counts in bands} for at in (0, 1))
    names = [band for band, *_ in bands]
    assert rest == {band: f"{inner.resident.get(band, 0):,} B" for band in names}
    assert peak == {band: f"{inner.peak.by_band.get(band, 0):,} B" for band in names}
    assert {*inner.resident, *inner.peak.by_band} <= set(names)
    assert sums == ["in all", f"{inner.at_rest:,} B", f"{inner.peak.total:,} B", f"{inner.peak.total:,} B"]
    peaks = tab.js("return [...document.querySelectorAll('#every tbody tr')].map((row) => Number(row.dataset.peak))")
    rows = [row[0] for row in tab.table("every")]
    assert peaks == [cell(found, row, 3, 1, "none").cell.peak.total for row in rows]
    assert rows == ["ZeRO-3", "data parallel", "ZeRO-3, kept"]
    around = tab.js("return [...document.querySelectorAll('#map td')].map((each) => Number(each.dataset.peak))")
    axes = found.axes
    assert around == [
        cell(found, "ZeRO-3", ranks, rows, "none").cell.peak.total
        for ranks in axes.ranks
        for rows in axes.micro_batches
    ]


@in_browser
def test_every_moment_is_the_log_s(tab: Tab) -> None:
    """At each moment of the slider as much is held as the log says, by band as well, and the peak is where it is."""
    found = made()
    each = cell(found, "data parallel", 3, 1, "none")
    log = list(found.log(each))
    tab.open(fragment="#scheme=data+parallel&gpus=3&micro-batch=1&checkpoint=none")
    tops = [change.held for change in log]
    assert f"{each.cell.peak.total:,} B held at moment {tops.index(each.cell.peak.total) + 1} " in tab.id("now").text
    held = tab.js(
        """const slider = document.getElementById("moment");
        return Array.from({ length: Number(slider.max) + 1 }, (_, at) => {
          slider.value = at;
          slider.dispatchEvent(new Event("input"));
          const sum = document.querySelector("#bands .sum td:last-child").textContent;
          return [document.getElementById("now").textContent, sum];
        })"""
    )
    assert [sum_ for _, sum_ in held[1:]] == [f"{nbytes:,} B" for nbytes in tops]
    for (text, _), change in zip(held[1:], log, strict=True):
        what = f"{'holds' if change.change > 0 else 'frees'} {abs(change.change):,} B of {change.band}"
        assert text.startswith(f"{change.held:,} B held")
        assert what in text
    assert sum(", the peak" in text for text, _ in held) == 1


@in_browser
def test_keys_move_the_sliders_and_the_verdict_with_them(tab: Tab) -> None:
    """The arrows change micro-batch, GPUs, checkpointing and scheme, and verdict and numbers are those of that cell."""
    found = made()
    tab.open()
    verdicts = []
    for rows in (2, 4, 8):
        tab.press("micro-batch", Keys.ARROW_RIGHT)
        assert tab.answer() == said_of(cell(found, "ZeRO-3", 3, rows, "none"))
        verdicts.append(tab.id("verdict").text[0])
    tab.press("gpus", Keys.END)
    assert tab.answer() == said_of(cell(found, "ZeRO-3", 8, 8, "none"))
    tab.press("gpus", Keys.HOME)
    assert tab.answer() == said_of(cell(found, "ZeRO-3", 2, 8, "none"))
    tab.js("document.querySelector('[name=checkpoint]:checked').focus()")
    ActionChains(tab.driver).send_keys(Keys.ARROW_RIGHT).perform()
    assert tab.answer() == said_of(cell(found, "ZeRO-3", 2, 8, "full"))
    tab.js("document.querySelector('[name=scheme]:checked').focus()")
    ActionChains(tab.driver).send_keys(Keys.ARROW_RIGHT).perform()
    assert tab.answer() == said_of(cell(found, "data parallel", 2, 8, "full"))
    signs = {"fits": "✓", "tight": "~", "none": "✗"}
    assert verdicts == [signs[said_of(cell(found, "ZeRO-3", 3, rows, "none"))["verdict"]] for rows in (2, 4, 8)]
    tab.press("asked", Keys.ENTER)
    assert tab.answer() == said_of(cell(found, "ZeRO-3", 3, 1, "none"))


@in_browser
def test_three_verdicts_are_said(tab: Tab) -> None:
    """What fits, what fits only without the reserve and what does not are said in words, to a screen reader too."""
    found = made()
    seen: dict[str, GridCell] = {}
    for each in found.cells:
        seen.setdefault(said_of(each)["verdict"], each)
    assert set(seen) == {"fits", "tight", "none"}
    words = {"fits": "✓ fits: ", "tight": "~ tight: ", "none": "✗ does not fit: "}
    for verdict, each in seen.items():
        row = each.cell.name.replace(" ", "+").replace(",", "%2C")
        fragment = f"scheme={row}&gpus={each.cell.ranks}&micro-batch={each.micro_batch}&checkpoint={each.checkpoint}"
        tab.open(fragment=f"#{fragment}")
        text = tab.id("verdict").text
        assert text.startswith(words[verdict])
        spoken = tab.js("const each = document.getElementById('spoken'); return [each.ariaLive, each.textContent]")
        assert spoken[0] == "polite"
        assert text in spoken[1]
        assert f"{each.cell.name}, " in spoken[1]


@in_browser
def test_a_copied_address_opens_the_same_view(tab: Tab) -> None:
    """What was chosen stands in the fragment, and opening it, or following it, gives the same answer."""
    tab.open()
    tab.press("micro-batch", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    tab.press("gpus", Keys.ARROW_RIGHT)
    fragment, answer = tab.js("return location.hash"), tab.answer()
    assert parse_qs(fragment[1:]) == {
        "scheme": ["ZeRO-3"], "gpus": ["4"], "micro-batch": ["4"], "checkpoint": ["none"],
    }  # fmt: skip
    assert tab.id("here").get_attribute("href").endswith(fragment)
    choice = tab.id("choice").text
    tab.open()
    assert tab.answer() != answer
    tab.open(fragment=fragment)
    assert (tab.answer(), tab.id("choice").text) == (answer, choice)
    assert [tab.id(name).get_attribute("aria-valuetext") for name in ("gpus", "micro-batch")] == ["4 GPUs", "4 rows"]
    tab.js("location.hash = '#gpus=8&micro-batch=no&other=1'")
    tab.wait("document.getElementById('gpus').value === '3'")
    assert tab.answer() == said_of(cell(made(), "ZeRO-3", 8, 1, "none"))  # what is unknown is as it was asked


@in_browser
@pytest.mark.parametrize(("scheme", "changes"), [("ZeRO-3", 1), ("data+parallel", 2)])
def test_advice_leads_to_what_fits(tab: Tab, scheme: str, changes: int) -> None:
    """Where it does not fit, what would is named and a press away, with as few other choices as there can be."""
    found = made()
    fragment = f"#scheme={scheme}&gpus=3&micro-batch=8&checkpoint=none"
    tab.open(fragment=fragment)
    assert tab.answer()["verdict"] == "none"
    assert tab.id("advice-title").text == "What would help"
    before = parse_qs(tab.js("return location.hash.slice(1)"))
    buttons = tab.driver.find_elements(By.CSS_SELECTOR, "#steps button")
    names = [each.text for each in buttons]
    assert names
    for name in names:
        tab.open(fragment=fragment)
        [go] = [each for each in tab.driver.find_elements(By.CSS_SELECTOR, "#steps button") if each.text == name]
        line = go.find_element(By.XPATH, "..").text
        go.send_keys(Keys.ENTER)
        assert tab.answer()["verdict"] == "fits"
        after = parse_qs(tab.js("return location.hash.slice(1)"))
        changed = [axis for axis in before if before[axis] != after[axis]]
        assert len(changed) == changes
        assert tab.js("return document.activeElement.isConnected && document.activeElement !== document.body")
        chosen = cell(
            found, after["scheme"][0], int(after["gpus"][0]), int(after["micro-batch"][0]), after["checkpoint"][0]
        )
        assert f"{float(f'{chosen.cell.peak.total / 1000:.3g}'):g} kB" in line
    assert tab.id("advice-title").text == "What else fits"


@in_browser
def test_what_was_not_run_is_said(tab: Tab) -> None:
    """Where a scheme makes no sense among so few GPUs there is no number, and the page says so and goes on."""
    tab.open(fragment="#scheme=HSDP&gpus=3&micro-batch=1&checkpoint=none")
    assert tab.id("verdict").text.startswith("– not run")
    assert tab.answer() == {"verdict": "not run", "peak": "", "rest": "", "sent": ""}
    assert not tab.id("step").is_displayed()
    tab.press("asked", Keys.ENTER)
    assert tab.id("step").is_displayed()
    tab.open("no card")
    assert re.fullmatch(r"[\d.]+ kB at the peak", tab.id("verdict").text)
    assert "--card" in tab.id("steps").text


@in_browser
def test_around_the_peak_fewer_moments_are_shown(tab: Tab) -> None:
    """A stretch of forty moments on both sides of the peak, and the slider goes no further."""
    tab.open()
    whole = int(tab.js("return document.querySelector('.strip').dataset.moments"))
    top = int(tab.id("moment").get_attribute("value"))
    tab.js("document.querySelector('[name=shown][value=peak]').click()")
    shown = int(tab.js("return document.querySelector('.strip').dataset.moments"))
    low, high = (int(tab.id("moment").get_attribute(end)) for end in ("min", "max"))
    assert (low, high) == (max(0, top - 40), min(whole - 1, top + 40))
    assert shown == high - low + 1
    assert int(tab.id("moment").get_attribute("value")) == top


@in_browser
def test_controls_have_names_and_are_reached_by_tab(tab: Tab) -> None:
    """Every control has a name, and the tab key goes through the choices in the order in which they are seen."""
    tab.open()
    unnamed = """return [...document.querySelectorAll("input, button, a, [tabindex]")]
        .filter((e) => !(e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.textContent.trim())).map((e) => e.id)"""
    assert tab.js(unnamed) == []
    tab.js("document.getElementById('gpus').focus()")
    order = []
    for _ in range(5):
        ActionChains(tab.driver).send_keys(Keys.TAB).perform()
        order.append(tab.js("return document.activeElement.id || document.activeElement.name"))
    assert order == ["micro-batch", "checkpoint", "scheme", "asked", "here"]


@in_browser
@pytest.mark.parametrize("width", [390, 768, 1280, 2000])
def test_it_fits_every_screen(tab: Tab, width: int) -> None:
    """Nothing but tables scrolls sideways; the drawing is as wide as its place, and the answer stays in sight."""
    tab.open()
    tab.screen(width)
    tab.wait(
        f"innerWidth === {width} && document.querySelector('#strip svg')?.getBoundingClientRect().right <= {width}"
    )
    assert tab.js("return document.documentElement.scrollWidth") <= width
    tab.js("document.getElementById('scheme').scrollIntoView({ block: 'end' })")
    top, bottom = tab.js(
        "const { top, bottom } = document.getElementById('verdict').getBoundingClientRect(); return [top, bottom]"
    )
    assert 0 <= top < bottom <= 800


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out(tab: Tab, dark: bool) -> None:
    """By day and by night every text has a contrast of 4.5 or more with its ground (WCAG 1.4.3)."""
    tab.open()
    tab.prefer(dark=dark)
    faint = tab.js(
        """const channels = (color) => color.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
          .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const ground = (e) => {
          for (; e; e = e.parentElement) {
            const color = channels(getComputedStyle(e).backgroundColor);
            if (color.length < 4 || color[3] > 0) return color;
          }
          return [255, 255, 255];
        };
        const found = [];
        const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        for (const e of document.querySelectorAll("main *, header *, footer *")) {
          if (!e.offsetParent || e.closest("svg") || !own(e)) continue;
          const [a, b] = [light(channels(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
          if ((a + 0.05) / (b + 0.05) < 4.5) found.push(e.textContent.slice(0, 40));
        }
        return [document.body && light(ground(document.body)) > 0.5, found];"""
    )
    assert faint == [not dark, []]


@in_browser
def test_on_paper_there_is_nothing_to_press(tab: Tab) -> None:
    """Printed, the choice, the verdict, the drawing and the tables stay, and the controls go."""
    tab.open()
    tab.prefer(medium="print")
    shown = {name: tab.id(name).is_displayed() for name in ("choice", "verdict", "strip", "bands", "every", "map")}
    assert all(shown.values()), shown
    assert not tab.id("controls").is_displayed()
    assert not tab.id("moment").is_displayed()
    for name in ("map", "steps"):  # what stands on a button is said on paper as well
        assert tab.driver.find_element(By.CSS_SELECTOR, f"#{name} button").is_displayed()
