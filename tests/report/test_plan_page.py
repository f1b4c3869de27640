"""The planner's page says what its grid's cells say, in a real browser, offline, by keyboard, to everyone."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from urllib.parse import parse_qs

import pytest
from msgspec.structs import replace
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from helpers import by_night, some_by_night
from pages import HOSTILE, Tab, in_browser
from zerosim.planner import conventions, grid, question
from zerosim.planner import plan as plans
from zerosim.planner.model_source import Perceptron, Prepared, Workload
from zerosim.records.loops import unfolded
from zerosim.records.plan_grid import Grid, GridCell
from zerosim.records.question import Network, Question
from zerosim.report import plan_page
from zerosim.stages import Stage

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SOURCE = Perceptron([67, 131, 127, 61])
MEMORY, RESERVE = 280_000, 4_000


class StatesAlone(Perceptron):
    """A model of which no more is known than its parameters."""

    def prepare(self, workload: Workload, rows: int) -> Prepared:
        return dataclasses.replace(super().prepare(workload, rows), states_alone=True)


@functools.cache
def made(memory: int | None = MEMORY, source: Perceptron = SOURCE, node: int | None = None) -> Grid:
    """A card that some choices fit on, some only without the reserve, and some do not."""
    rules = conventions.convention("fsdp2")
    asked = Question(
        model="mlp", asked=[3], gpus=[3], rows=list(rules.rows()), others=rules.others, convention="fsdp2",
        memory=memory, reserve=RESERVE if memory else 0, network=Network(node=node),
    )  # fmt: skip
    plan = plans.make(source, question.check(asked), lambda doing: None)
    return grid.make(source, plan, grid.axes(source, plan, lambda doing: None), lambda doing: None)


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


def states() -> Grid:
    return made(10 * MEMORY, StatesAlone(SOURCE.widths))


def grown() -> Grid:
    """What was asked ends before its last free, so that more is at rest in the end than there was before."""
    whole = made()
    each = cell(whole, "ZeRO-3", 3, 1, "none")
    *moves, last = unfolded(whole.logs[each.moves])
    band, nbytes = whole.bands[whole.moves[last].band], each.sizes[whole.moves[last].size]
    assert whole.moves[last].sign < 0
    resident = each.cell.resident | {band: each.cell.resident.get(band, 0) + nbytes}
    longer = replace(each, moves=len(whole.logs), cell=replace(each.cell, resident=resident))
    cells = [longer if other is each else other for other in whole.cells]
    return replace(whole, cells=cells, logs=[*whole.logs, moves])


CASES: dict[str, Callable[[], Grid]] = {
    "whole": made,
    "no card": lambda: made(None),
    "nodes of two": lambda: made(node=2),
    "hostile": hostile,
    "states": states,
    "grown": grown,
}


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


class Desk(Tab):
    """A tab with the planner's page, and what a reader does there."""

    def look(self, which: str = "whole", fragment: str = "") -> Desk:
        """Load a page afresh, by daylight."""
        path = self.folder / f"plan {which}.html"
        if not path.exists():
            path.write_text(plan_page.page(CASES[which]()), encoding="utf-8")
        self.prefer()
        self.screen(1280)
        self.driver.get("about:blank")  # a fragment alone would load nothing
        self.driver.get(path.as_uri() + fragment)
        self.wait("document.documentElement.dataset.ready")
        self.settle()
        return self

    def keys(self, selector: str, *keys: str) -> None:
        """Keys for that control."""
        self.focus(selector)
        self.press(*keys)

    def answer(self) -> dict[str, str]:
        """What the answer says of itself."""
        return dict(self.js("return {...document.getElementById('answer').dataset}"))

    def table(self, name: str) -> list[list[str]]:
        """The texts of a table's body, row by row."""
        rows = "[...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        return self.js(f"return {rows}.map((row) => [...row.cells].map((each) => each.textContent))", name)  # type: ignore[no-any-return]


@pytest.fixture
def desk(tab: Tab) -> Desk:
    return Desk(tab.driver, tab.folder)


def said_of(each: GridCell) -> dict[str, str]:
    """What the answer must say of a cell."""
    inner = each.cell
    verdict = "fits" if inner.fits else "tight" if inner.tight else "none"
    return {
        "verdict": verdict, "peak": str(inner.peak.total), "rest": str(inner.at_rest), "sent": str(inner.sent)
    }  # fmt: skip


@in_browser
@pytest.mark.parametrize("which", some_by_night(CASES, ("hostile", "states").__contains__))
def test_it_loads_offline_and_in_silence(desk: Desk, which: str) -> None:
    """No message on the console, no request but for the file itself, and no text has run or become markup."""
    desk.driver.get("about:blank")
    desk.log("performance")
    desk.log("browser")
    desk.look(which)
    desk.keys("#micro-batch", Keys.ARROW_RIGHT)
    assert desk.log("browser") == []
    messages = [json.loads(each["message"])["message"] for each in desk.log("performance")]
    urls = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert {url.partition(":")[0] for url in urls} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in urls) == 1
    assert desk.js("return [window.hostile ?? null, document.images.length]") == [None, 0]
    assert desk.id("verdict").text


@in_browser
def test_every_number_is_a_cell_s(desk: Desk) -> None:
    """Bands at rest and at the peak, every scheme's bytes and every peak around are the records', as integers."""
    found = made()
    desk.look()
    each = cell(found, "ZeRO-3", 3, 1, "none")
    assert desk.answer() == said_of(each)
    inner = each.cell
    *bands, sums = desk.table("bands")
    rest, peak = ({band: counts[at] for band, *counts in bands} for at in (0, 1))
    names = [band for band, *_ in bands]
    assert rest == {band: f"{inner.resident.get(band, 0):,} B" for band in names}
    assert peak == {band: f"{inner.peak.by_band.get(band, 0):,} B" for band in names}
    assert {*inner.resident, *inner.peak.by_band} <= set(names)
    assert sums == ["in all", f"{inner.at_rest:,} B", f"{inner.peak.total:,} B", f"{inner.peak.total:,} B"]
    peaks = desk.js("return [...document.querySelectorAll('#every tbody tr')].map((row) => Number(row.dataset.peak))")
    rows = [row[0] for row in desk.table("every")]
    assert peaks == [cell(found, row, 3, 1, "none").cell.peak.total for row in rows]
    assert rows == ["ZeRO-3", "data parallel", "ZeRO-3, kept"]
    around = desk.js("return [...document.querySelectorAll('#map td')].map((each) => Number(each.dataset.peak))")
    axes = found.axes
    assert around == [
        cell(found, "ZeRO-3", ranks, rows, "none").cell.peak.total
        for ranks in axes.ranks
        for rows in axes.micro_batches
    ]


@in_browser
def test_every_moment_is_the_log_s(desk: Desk) -> None:
    """At each moment of the slider as much is held as the log says, by band as well, and the peak is where it is."""
    found = made()
    each = cell(found, "data parallel", 3, 1, "none")
    log = list(found.log(each))
    desk.look(fragment="#scheme=data+parallel&gpus=3&micro-batch=1&checkpoint=none")
    tops = [change.held for change in log]
    assert f"{each.cell.peak.total:,} B held at moment {tops.index(each.cell.peak.total) + 1} " in desk.id("now").text
    held = desk.js(
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
def test_a_step_begins_with_what_it_ends_with_less_what_it_changed(desk: Desk) -> None:
    """Before its first move a step holds what is at rest in the end less what its moves add up to, band by band."""
    before = cell(made(), "ZeRO-3", 3, 1, "none").cell
    desk.look("grown")
    desk.keys("#moment", Keys.HOME)
    assert desk.id("now").text.startswith(f"{before.at_rest:,} B held at moment 0 ")
    *bands, _ = desk.table("bands")
    assert {band: now for band, *_, now in bands if now != "0 B"} == {
        band: f"{nbytes:,} B" for band, nbytes in before.resident.items()
    }
    after = cell(grown(), "ZeRO-3", 3, 1, "none").cell
    assert desk.answer()["rest"] == str(after.at_rest) != str(before.at_rest)


@in_browser
def test_keys_move_the_sliders_and_the_verdict_with_them(desk: Desk) -> None:
    """The arrows change micro-batch, GPUs, checkpointing and scheme, and verdict and numbers are those of that cell."""
    found = made()
    desk.look()
    verdicts = []
    for rows in (2, 4, 8):
        desk.keys("#micro-batch", Keys.ARROW_RIGHT)
        assert desk.answer() == said_of(cell(found, "ZeRO-3", 3, rows, "none"))
        verdicts.append(desk.id("verdict").text[0])
    desk.keys("#gpus", Keys.END)
    assert desk.answer() == said_of(cell(found, "ZeRO-3", 8, 8, "none"))
    desk.keys("#gpus", Keys.HOME)
    assert desk.answer() == said_of(cell(found, "ZeRO-3", 2, 8, "none"))
    desk.keys("[name=checkpoint]:checked", Keys.ARROW_RIGHT)
    assert desk.answer() == said_of(cell(found, "ZeRO-3", 2, 8, "full"))
    desk.keys("[name=scheme]:checked", Keys.ARROW_RIGHT)
    assert desk.answer() == said_of(cell(found, "data parallel", 2, 8, "full"))
    signs = {"fits": "✓", "tight": "~", "none": "✗"}
    assert verdicts == [signs[said_of(cell(found, "ZeRO-3", 3, rows, "none"))["verdict"]] for rows in (2, 4, 8)]
    desk.keys("#asked", Keys.ENTER)
    assert desk.answer() == said_of(cell(found, "ZeRO-3", 3, 1, "none"))


@in_browser
def test_three_verdicts_are_said(desk: Desk) -> None:
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
        desk.look(fragment=f"#{fragment}")
        text = desk.id("verdict").text
        assert text.startswith(words[verdict])
        spoken = desk.js("const each = document.getElementById('spoken'); return [each.ariaLive, each.textContent]")
        assert spoken[0] == "polite"
        assert text in spoken[1]
        assert f"{each.cell.name}, " in spoken[1]


@in_browser
def test_a_copied_address_opens_the_same_view(desk: Desk) -> None:
    """What was chosen stands in the fragment, and opening it, or following it, gives the same answer."""
    desk.look()
    desk.keys("#micro-batch", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    desk.keys("#gpus", Keys.ARROW_RIGHT)
    fragment, answer = desk.js("return location.hash"), desk.answer()
    assert parse_qs(fragment[1:]) == {
        "scheme": ["ZeRO-3"], "gpus": ["4"], "micro-batch": ["4"], "checkpoint": ["none"],
    }  # fmt: skip
    assert desk.id("here").get_attribute("href").endswith(fragment)
    choice = desk.id("choice").text
    desk.look()
    assert desk.answer() != answer
    desk.look(fragment=fragment)
    assert (desk.answer(), desk.id("choice").text) == (answer, choice)
    assert [desk.id(name).get_attribute("aria-valuetext") for name in ("gpus", "micro-batch")] == ["4 GPUs", "4 rows"]
    desk.js("location.hash = '#gpus=8&micro-batch=no&other=1'")
    desk.wait("document.getElementById('gpus').value === '3'")
    assert desk.answer() == said_of(cell(made(), "ZeRO-3", 8, 1, "none"))  # what is unknown is as it was asked


@in_browser
@pytest.mark.parametrize(("scheme", "changes"), [("ZeRO-3", 1), ("data+parallel", 2)])
def test_advice_leads_to_what_fits(desk: Desk, scheme: str, changes: int) -> None:
    """Where it does not fit, what would is named and a press away, with as few other choices as there can be."""
    found = made()
    fragment = f"#scheme={scheme}&gpus=3&micro-batch=8&checkpoint=none"
    desk.look(fragment=fragment)
    assert desk.answer()["verdict"] == "none"
    assert desk.id("advice-title").text == "What would help"
    before = parse_qs(desk.js("return location.hash.slice(1)"))
    buttons = desk.driver.find_elements(By.CSS_SELECTOR, "#steps button")
    names = [each.text for each in buttons]
    assert names
    for name in names:
        desk.look(fragment=fragment)
        [go] = [each for each in desk.driver.find_elements(By.CSS_SELECTOR, "#steps button") if each.text == name]
        line = go.find_element(By.XPATH, "..").text
        go.send_keys(Keys.ENTER)
        assert desk.answer()["verdict"] == "fits"
        after = parse_qs(desk.js("return location.hash.slice(1)"))
        changed = [axis for axis in before if before[axis] != after[axis]]
        assert len(changed) == changes
        assert desk.js("return document.activeElement.isConnected && document.activeElement !== document.body")
        chosen = cell(
            found, after["scheme"][0], int(after["gpus"][0]), int(after["micro-batch"][0]), after["checkpoint"][0]
        )
        assert f"{float(f'{chosen.cell.peak.total / 1000:.3g}'):g} kB" in line
    assert desk.id("advice-title").text == "What else fits"


@in_browser
def test_what_was_not_run_is_said(desk: Desk) -> None:
    """Where a scheme makes no sense among so few GPUs there is no number, and the page says so and goes on."""
    assert "HSDP" not in [row.name for row in made().axes.rows]  # in nodes of eight there is none on 3 or on 8
    desk.look("nodes of two", fragment="#scheme=HSDP&gpus=3&micro-batch=1&checkpoint=none")
    assert desk.id("verdict").text.startswith("– not run: on so many GPUs it is another of these schemes")
    said = "HSDP on 3 GPUs: in nodes of 2 it is another of these schemes, or cannot be"
    assert said in desk.js("return document.body.textContent")
    assert desk.answer() == {"verdict": "not run", "peak": "", "rest": "", "sent": ""}
    assert not desk.id("step").is_displayed()
    desk.keys("#asked", Keys.ENTER)
    assert desk.id("step").is_displayed()
    desk.look("no card")
    assert re.fullmatch(r"[\d.]+ kB at the peak", desk.id("verdict").text)
    assert "--card" in desk.id("steps").text
    desk.look("states")
    assert re.fullmatch(r"– not known: [\d.]+ kB of model states alone", desk.id("verdict").text)
    assert "not known" in desk.id("steps").text
    assert "a step takes" not in desk.id("facts").text


@in_browser
def test_around_the_peak_fewer_moments_are_shown(desk: Desk) -> None:
    """A stretch of forty moments on both sides of the peak, and the slider goes no further."""
    desk.look()
    whole = int(desk.js("return document.querySelector('.strip').dataset.moments"))
    top = int(desk.id("moment").get_attribute("value"))
    desk.js("document.querySelector('[name=shown][value=peak]').click()")
    shown = int(desk.js("return document.querySelector('.strip').dataset.moments"))
    low, high = (int(desk.id("moment").get_attribute(end)) for end in ("min", "max"))
    assert (low, high) == (max(0, top - 40), min(whole - 1, top + 40))
    assert shown == high - low + 1
    assert int(desk.id("moment").get_attribute("value")) == top


@in_browser
def test_controls_have_names_and_are_reached_by_tab(desk: Desk) -> None:
    """Every control has a name, and the tab key goes through the choices in the order in which they are seen."""
    desk.look()
    unnamed = """return [...document.querySelectorAll("input, button, a, [tabindex]")]
        .filter((e) => !(e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.textContent.trim())).map((e) => e.id)"""
    assert desk.js(unnamed) == []
    desk.focus("#gpus")
    order = []
    for _ in range(5):
        desk.press(Keys.TAB)
        order.append(desk.js("return document.activeElement.id || document.activeElement.name"))
    assert order == ["micro-batch", "checkpoint", "scheme", "asked", "here"]


@in_browser
@pytest.mark.parametrize("which", ["whole", *by_night("hostile")])
@pytest.mark.parametrize("width", [390, *by_night(768, 1280), 2000])
def test_it_fits_every_screen(desk: Desk, which: str, width: int) -> None:
    """Nothing but tables scrolls sideways, however long names are, and the answer stays in sight."""
    desk.look(which)
    desk.screen(width)
    desk.settle()
    desk.wait(
        f"innerWidth === {width} && document.querySelector('#strip svg')?.getBoundingClientRect().right <= {width}"
    )
    assert desk.js("return document.documentElement.scrollWidth") <= width
    if which == "whole":
        desk.js("document.getElementById('map').scrollIntoView({ block: 'end' })")
        top, bottom = desk.js(
            "const box = document.getElementById('verdict').getBoundingClientRect(); return [box.top, box.bottom]"
        )
        assert 0 <= top < bottom <= 800


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out(desk: Desk, dark: bool) -> None:
    """By day and by night every text has a contrast of 4.5 or more with its ground (WCAG 1.4.3)."""
    desk.look()
    desk.prefer(dark=dark)
    faint = desk.js(
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
def test_on_paper_there_is_nothing_to_press(desk: Desk) -> None:
    """Printed, the choice, the verdict, the drawing and the tables stay, and the controls go."""
    desk.look()
    desk.prefer(printed=True)
    shown = {name: desk.id(name).is_displayed() for name in ("choice", "verdict", "strip", "bands", "every", "map")}
    assert all(shown.values()), shown
    assert not desk.id("controls").is_displayed()
    assert not desk.id("moment").is_displayed()
    for name in ("map", "steps"):  # what stands on a button is said on paper as well
        assert desk.driver.find_element(By.CSS_SELECTOR, f"#{name} button").is_displayed()
