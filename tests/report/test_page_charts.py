"""The bars and the charts draw the records, without colour, and can be read out by pointer and by keys."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from pages import CASES, MINE, NAMES, Tab, in_browser, read, run
from zerosim.report.looks import looks
from zerosim.stages import SCHEMES

pytestmark = [pytest.mark.usefixtures("shapes_unchecked"), in_browser]

CHARTS = ("memory", "traffic", "loss", "difference")
MARKS = """
return Object.fromEntries([...document.querySelectorAll(`#${arguments[0]} g[data-series]`)].map((group) => [
  group.dataset.series, [...group.querySelectorAll(".mark")].map((e) => [Number(e.dataset.x), Number(e.dataset.y)])]))
"""
LABELS = "return [...document.querySelectorAll(`#${arguments[0]} text.strong`)].map((e) => e.textContent)"


def marks(tab: Tab, chart: str) -> dict[str, list[tuple[float, float]]]:
    return {name: [(x, y) for x, y in points] for name, points in tab.js(MARKS, chart).items()}


def test_the_opening_bars_are_the_records(tab: Tab) -> None:
    """For each scheme what it holds at rest and at the peak, band by band, each as long as its bytes on one scale."""
    tab.open()
    drawn = tab.js(
        "return [...document.querySelectorAll('#bars svg')].map((svg) => [svg.ariaLabel,"
        "[...svg.querySelectorAll('rect')].map((e) => [e.dataset.band,"
        "Number(e.dataset.bytes), e.getBBox().width, e.getBBox().y])])"
    )
    names = tab.js("return [...document.querySelectorAll('#bars dt')].map((e) => e.textContent)")
    assert names == NAMES
    scales = set()
    for record, (label, parts) in zip(run().schemes, drawn, strict=True):
        last = record.steps[-1]
        rest, peak = sum(last.resident.values()), last.peak.total
        assert label == f"{record.name}: at rest {rest:,} B, at the peak {peak:,} B"
        rows = sorted({y for *_, y in parts})
        for y, held in zip(rows, (last.resident, last.peak.by_band), strict=True):
            assert {band: count for band, count, _, at in parts if at == y} == held
        scales |= {round(width / count, 3) for _, count, width, _ in parts if width > 20}
    assert max(scales) - min(scales) < 0.002
    legend = tab.js("return [...document.querySelectorAll('#bars .legend li')].map((e) => e.textContent)")
    assert set(legend) == {band for each in run().schemes for band in each.steps[-1].peak.by_band}


def test_memory_and_traffic_are_the_records(tab: Tab) -> None:
    """Each mark is a record's, in both units, and the predicted ones beside them come and go."""
    whole = run()
    tab.open()
    for unit, size in (("parameter", whole.n_params), ("bytes", 1)):
        tab.choose("memory-unit", unit)
        for field in ("resident", "peak_without_activations", "peak"):
            tab.choose("memory-of", field)
            found = marks(tab, "memory")
            for name in NAMES:
                rows = [row for row in whole.sweep if row.scheme == name]
                for series, key in ((name, field), (f"{name}, predicted", f"{field}_predicted")):
                    assert [x for x, _ in found[series]] == [row.ranks for row in rows]
                    assert [y * size for _, y in found[series]] == pytest.approx([getattr(row, key) for row in rows])
    tab.click("memory-predicted")
    tab.settle()
    assert set(marks(tab, "memory")) == set(NAMES)
    for unit, size in (("P", 4 * whole.n_params), ("bytes", 1)):
        tab.choose("traffic-unit", unit)
        for name in NAMES:
            sent = [(row.ranks, row.sent) for row in whole.sweep if row.scheme == name]
            assert [(x, y * size) for x, y in marks(tab, "traffic")[name]] == [pytest.approx(each) for each in sent]


def test_the_loss_is_drawn_with_rules_broken(tab: Tab) -> None:
    """Every scheme's losses, and against them those of each run in which a rule was broken on purpose."""
    whole = run()
    tab.open()
    found = marks(tab, "loss")
    for record in whole.schemes:
        assert found.pop(record.name) == [(step.step, step.loss) for step in record.steps]
    wire, int8, buckets = whole.ablations.narrow_wire, whole.ablations.int8_params, whole.ablations.whole_model_bucket
    assert wire is not None
    assert int8 is not None
    first = whole.schemes[0].steps[0].loss  # before any update: whatever the rule, nothing has been rounded yet
    assert [losses[0] for losses in (wire.drift.losses, buckets["mixed"].losses)] == [first, first]
    broken = {"fp16 wire": wire.drift.losses, "int8 parameters": int8.losses}
    broken |= {f"one bucket, {precision}": drift.losses for precision, drift in buckets.items()}
    assert found == {f"broken: {name}": list(enumerate(losses, 1)) for name, losses in broken.items()}
    assert all(len(losses) == whole.settings.steps for losses in broken.values())


def test_differences_have_a_place_for_zero(tab: Tab) -> None:
    """No difference is at the place of zero, which the axis names; a broken rule is as far off as was measured."""
    whole = run()
    tab.open()
    for quantity in ("params", "master", "loss"):
        tab.choose("difference-of", quantity)
        found = marks(tab, "difference")
        [zero] = {y for name in NAMES for _, y in found[name]}
        ticks = tab.js("return [...document.querySelectorAll('#difference svg text')].map((e) => e.textContent)")
        assert ticks.count("0") == 1
        assert quantity == "loss" or all(y > zero for _, y in found["broken: fp16 wire"])
    tab.choose("difference-of", "master")
    drift = whole.ablations.narrow_wire
    assert drift is not None
    assert [10**y for _, y in marks(tab, "difference")["broken: fp16 wire"]] == pytest.approx(drift.drift.largest)


def test_charts_answer_the_pointer_and_the_keys(tab: Tab) -> None:
    """Either shows the numbers of a step, schemes that agree being named together; escape puts them away."""
    losses = run().schemes[0].steps
    tab.open()
    chart = tab.driver.find_element(By.CSS_SELECTOR, "#loss .chart")
    readout = "return document.querySelector('#loss .readout').textContent"
    assert tab.js(readout) == ""
    tab.focus("#loss .chart")
    tab.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    said = tab.js(readout)
    assert said.startswith("step 2\n")
    assert f"{', '.join(NAMES)}" in said.splitlines()[1]
    assert f"loss {losses[1].loss}" in said
    tab.press(Keys.END)
    assert tab.js(readout).startswith(f"step {len(losses)}\n")
    tab.press(Keys.ESCAPE)
    assert tab.js(readout) == ""
    tab.js("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", chart)
    mark = tab.driver.find_element(By.CSS_SELECTOR, "#loss g[data-series='ZeRO-3'] .mark[data-x='1']")
    ActionChains(tab.driver).move_to_element(mark).perform()
    assert f"loss {losses[0].loss}" in tab.js(readout)


@pytest.mark.parametrize("which", ["whole", "own", "nodes"])
def test_schemes_are_told_apart_without_colour(tab: Tab, which: str) -> None:
    """Each has a dash and a mark of its own and its name at its line; nothing of it is in a colour."""
    tab.open(which)
    names = [record.name for record in CASES[which]().schemes]
    assert len({look.symbol for look in looks(names).values()}) == len(names)
    assert len({look.dash for look in looks(names).values()}) == len(names)
    for chart in ("traffic", "loss"):
        assert set(names) <= set(tab.js(LABELS, chart))
        dashes = tab.js(
            "return arguments[1].map((name) => document.querySelector("
            "`#${arguments[0]} g[data-series='${name}'] .curve`).getAttribute('stroke-dasharray') ?? '')",
            chart, names,
        )  # fmt: skip
        assert dashes == [look.dash for look in looks(names).values()]
    painted = tab.js(
        "const ink = getComputedStyle(document.body).color; return [...document.querySelectorAll('#charts svg *')]"
        ".flatMap((e) => { const s = getComputedStyle(e); return [s.fill, s.stroke]; })"
    )
    for colour in {each for each in painted if each.startswith("rgb(")}:
        channels = [int(each) for each in colour[4:-1].split(",")]
        assert max(channels) - min(channels) < 24, colour  # a grey, as good as


def test_a_row_of_ones_own_is_shown_like_any_other(tab: Tab) -> None:
    """A fifth row, the caller's own, has a table row, a bar, a panel, a grid and a line like its twin's."""
    tab.open("own")
    names = [*NAMES[:3], MINE.name, NAMES[3]]
    assert [row[0] for row in read("own").tables["summary"][2:]] == names
    assert tab.js("return [...document.querySelectorAll('.panel')].map((e) => e.dataset.scheme)") == names
    assert tab.js("return [...document.getElementsByName('focus')].map((e) => e.value)") == names
    assert tab.js("return [...document.querySelectorAll('#bars dt')].map((e) => e.textContent)") == names
    twin = SCHEMES[2].name
    for chart in CHARTS:
        found = marks(tab, chart)
        assert found[MINE.name] == found[twin]
        sizes = tab.js(
            "return arguments[1].map((name) => document.querySelector("
            "`#${arguments[0]} g[data-series='${name}'] .mark`).getBBox().width)", chart, [names[0], names[4]],
        )  # fmt: skip
        assert sizes[0] > sizes[1]  # of marks in one place each is seen


def test_a_narrow_chart_names_its_lines_below(tab: Tab) -> None:
    """Where there is no room beside a line its name is below, with a piece of it."""
    tab.open()
    tab.screen(390)
    tab.settle()
    for chart in CHARTS:
        key = tab.js(f"return [...document.querySelectorAll('#{chart} .legend li')].map((e) => e.textContent)")
        assert set(NAMES) <= set(key)
        assert tab.js(f"return document.querySelectorAll('#{chart} .legend svg path').length") >= len(NAMES)
