"""The page shows what the records say, in a real browser, offline, to everyone."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from zerosim.bands import MODEL_STATES, Band
from zerosim.lab import suite as lab
from zerosim.records import results
from zerosim.records.results import EventRecord, Failure, Prediction, Results, SchemeRecord, Settings
from zerosim.report import colors as palette
from zerosim.report import page as report
from zerosim.report.looks import look
from zerosim.stages import SCHEMES, Stage

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

NAMES = [stage.name for stage in SCHEMES]
SETTINGS = Settings(
    ranks=5, steps=3, batch=2, seed=0, model_seed=0, precision="mixed", wire="fp32", gather="layer", data="noise",
    capacity=None, widths=[7, 13, 11, 7],
)  # fmt: skip
HOSTILE = "</script><script>window.hostile = 1</script><img src=x onerror='window.hostile = 2'>&lt;<b>$x$ %{y}<!--"


@functools.cache
def run(capacity: int | None = None) -> Results:
    return lab.run(replace(SETTINGS, capacity=capacity))


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


# -- without a browser


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


def bare() -> Results:
    """A card that no scheme fits on: no steps, no events, no differences, and here no sweep."""
    return replace(run(64), sweep=[])


MINE = Stage("mine", optimizer=True, grads=True)


def own() -> Results:
    """The four and a row of the caller's own, which does what ZeRO-2 does."""
    return lab.run(replace(SETTINGS, steps=1), rows=(*SCHEMES[:3], MINE, SCHEMES[3]))


CASES: dict[str, Callable[[], Results]] = {
    "whole": run, "small_card": small_card, "hostile": hostile, "bare": bare, "own": own,
}  # fmt: skip


@functools.cache
def page(which: str, charts: bool = True) -> str:
    """A page; without charts a browser is done with it ten times as soon."""
    if charts:
        return report.page(CASES[which]())
    with mock.patch("plotly.offline.get_plotlyjs", return_value="globalThis.Plotly = { react() {} };"):
        return report.page(CASES[which]())


@functools.cache
def read(which: str) -> Tables:
    return Tables(page(which, charts=False))


def predicted(scheme: SchemeRecord) -> Prediction:
    assert scheme.prediction is not None
    return scheme.prediction


def commas(*counts: int) -> list[str]:
    return [f"{count:,}" for count in counts]


def test_tables_of_bands_are_the_records() -> None:
    """At rest and at the peak each band has its bytes, measured and predicted, and they add up."""
    whole, tables = run(), read("whole").tables
    for name, sides in (
        ("rest", [(each.steps[-1].resident, predicted(each).resident) for each in whole.schemes]),
        ("peak", [(each.steps[-1].peak.by_band, predicted(each).peak) for each in whole.schemes]),
    ):
        rows = {band: cells for band, *cells in tables[name][2:]}
        counts = [side for pair in sides for side in pair]
        bands = {band for side in counts for band in side}
        assert rows == {band: commas(*(side.get(band, 0) for side in counts)) for band in bands} | {
            "total": commas(*(sum(side.values()) for side in counts))
        }


def test_tables_of_traffic_flops_and_sweep_are_the_records() -> None:
    """What was sent, computed and swept stands there as measured and as predicted."""
    whole, tables = run(), read("whole").tables
    sent = [
        [
            each.name, moved.collective, moved.band,
            *commas(max(moved.sent), predicted(each).traffic[moved.collective][moved.band], max(moved.padding)),
            f"{moved.messages}",
        ]
        for each in whole.schemes
        for moved in each.steps[-1].traffic
    ]  # fmt: skip
    assert tables["sent"][1:] == sent
    assert tables["flops"][2:] == [
        [each.name, *(cell for phase in ("forward", "backward", "optimizer")
                      for cell in commas(each.steps[-1].flops[phase], predicted(each).flops[phase]))]
        for each in whole.schemes
    ]  # fmt: skip
    fields = ("resident", "peak_without_activations", "peak", "sent")
    assert tables["sweep"][2:] == [
        [str(row.ranks), row.scheme, *(cell for field in fields
                                       for cell in commas(getattr(row, field), getattr(row, f"{field}_predicted")))]
        for row in whole.sweep
    ]  # fmt: skip


def test_the_summary_is_the_records() -> None:
    """Bytes per parameter, the ratio to data parallel, what was sent and the loss, for each scheme."""
    whole = run()
    rows = read("whole").tables["summary"][2:]
    rest = [sum(each.steps[-1].resident.values()) for each in whole.schemes]
    for row, record, resident in zip(rows, whole.schemes, rest, strict=True):
        last = record.steps[-1]
        sent = max(sum(column) for column in zip(*(moved.sent for moved in last.traffic), strict=True))
        held = (resident, last.peak_without_activations.total, last.peak.total)
        at_rest, peak, with_activations = (f"{each / whole.n_params:.4f}" for each in held)
        assert row == [
            record.name, at_rest, f"{resident / rest[0]:.4f}", peak, with_activations,
            f"{sent:,}", f"{sent / (4 * whole.n_params):.4f}", f"{last.loss:.6f}",
        ]  # fmt: skip


def test_check_one_and_ablations_are_the_records() -> None:
    """Every step's differences and loss, and each broken rule's numbers."""
    whole, tables = run(), read("whole").tables
    assert tables["alike"][2:] == [
        [str(step), *["0"] * 2 * 4, f"{whole.schemes[0].steps[step - 1].loss:.6f}"] for step in (1, 2, 3)
    ]
    gather, narrow = whole.ablations.whole_model_gather, whole.ablations.narrow_wire
    assert gather is not None
    assert narrow is not None
    texts = [row[1] for row in tables["ablations"][1:]]
    assert f"{gather.states:,} B at rest + {gather.gathered:,} B gathered" in texts[0]
    assert f"{narrow.sent:,} B sent instead of {narrow.sent_fp32:,} B" in texts[1]
    drifts = list(whole.ablations.whole_model_bucket.values())
    for text, drift in zip(texts[-len(drifts) :], drifts, strict=True):
        assert f"after step 1: {drift.differing[0]:,} parameters differ" in text
        assert f"after step 3: {drift.differing[2]:,} parameters differ" in text


@pytest.mark.parametrize("name", ["rest", "peak", "sent", "flops", "summary"])
def test_what_is_not_as_predicted_is_marked(name: str) -> None:
    """A measured number that is off by one carries a mark, and only it does."""
    whole = run()
    first, *others = whole.schemes
    last, expected = first.steps[-1], predicted(first)
    wrong = {
        "rest": replace(expected, resident=expected.resident | {Band.GRADS: expected.resident[Band.GRADS] + 1}),
        "peak": replace(expected, peak=expected.peak | {Band.GRADS: expected.peak[Band.GRADS] + 1}),
        "sent": replace(expected, traffic={"all-reduce": {Band.GRADS: max(last.traffic[0].sent) + 1}}),
        "flops": replace(expected, flops=expected.flops | {"forward": expected.flops["forward"] + 1}),
        "summary": replace(expected, peak_without_activations={Band.GRADS: 1}),
    }[name]
    with mock.patch.dict(CASES, wrong=lambda: replace(whole, schemes=[replace(first, prediction=wrong), *others])):
        tables = Tables(page.__wrapped__("wrong", charts=False)).tables
    marked = [cell for row in tables[name] for cell in row if "≠" in cell]
    assert len(marked) == {"rest": 2, "peak": 2}.get(name, 1)  # the band and the total
    assert not any("≠" in cell for table in read("whole").tables.values() for row in table for cell in row)


def test_verdicts_and_failures() -> None:
    """Each check's verdict is said in words, and what failed is listed."""
    texts = "".join(read("whole").texts)
    assert "✓ same training: holds" in texts
    assert f"{3 * len(NAMES)} comparisons" in texts
    assert "✓ as predicted: holds" in texts
    assert "same training: nothing to compare" in "".join(read("bare").texts)
    [failure] = hostile().failures
    texts = "".join(read("hostile").texts)
    assert "✓ same training: holds" in texts
    assert "✗ as predicted: fails, 1 time" in texts
    assert str(failure) in texts


def test_schemes_out_of_memory_are_named() -> None:
    """Who ran out of memory is said with what it asked for; its numbers are not made up."""
    rows = read("small_card").tables["summary"][2:]
    for row, record in zip(rows, small_card().schemes, strict=True):
        if record.out_of_memory:
            assert set(row[1:-1]) == {"–"}
            short = record.out_of_memory
            assert row[-1] == f"out of memory: {short.asked:,} B of {short.band} for {short.unit}"
    assert [row[-1] == "fits" for row in rows] == [False, False, False, True]


def test_markup_in_texts_stays_text() -> None:
    """A page with hostile texts has the elements of a page without them, and shows the texts as they are."""
    tags = read("hostile").tags
    without = [tag for tag in tags if tag not in ("ol", "li")]  # the failures
    assert without == [tag for tag in read("whole").tags if tag != "li"]
    assert tags.count("script") == 3
    assert "".join(read("hostile").texts).count(HOSTILE) > 20


@pytest.mark.parametrize("text", [HOSTILE, "]]>", "<!--<script>", "\u2028", "& &amp; \\u003c"])
def test_json_in_the_page_is_inert(text: str) -> None:
    """Nothing in the embedded JSON ends a script or begins a comment, and it still says the same."""
    source = report.page(replace(run(), settings=replace(SETTINGS, data=text)))
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.DOTALL)
    assert found is not None
    assert not set("<>&\u2028\u2029") & set(found[1])
    assert json.loads(found[1])["settings"]["data"] == text


def test_the_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the page; where the last move fails nothing is left behind."""
    path = tmp_path / "report.html"
    report.save_page(run(), path)
    assert path.read_text(encoding="utf-8") == page("whole")
    path.unlink()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        report.save_page(run(), path)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import sys
from pathlib import Path
from zerosim.records import results
from zerosim.report import page
page.save_page(results.load(Path(sys.argv[1])), Path(sys.argv[2]))
print(*sorted(name for name in sys.modules if name.startswith("zerosim.") or name in ("matplotlib", "pandas")))
"""


def test_no_simulator(tmp_path: Path) -> None:
    """From a file of records to the page nothing of the simulator is loaded, and no figure is drawn."""
    results.save(run(), tmp_path / "results.json")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "results.json"), str(tmp_path / "report.html")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = {name.removeprefix("zerosim.") for name in done.stdout.split()}
    assert "report.page" in loaded
    assert not loaded & {"matplotlib", "pandas", "schemes", "ranks", "comm", "model", "theory", "lab", "worlds"}
    assert (tmp_path / "report.html").stat().st_size > 10**6


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

    def open(self, which: str = "whole", *, charts: bool = False, calm: bool = True) -> Tab:
        """Load a page afresh, on a desk by daylight."""
        path = self.folder / f"{which}-{charts}.html"
        if not path.exists():
            path.write_text(page(which, charts), encoding="utf-8")
        self.prefer(calm=calm)
        self.screen(1280)
        self.driver.get(path.as_uri())
        WebDriverWait(self.driver, 60).until(lambda _: self.js("return document.documentElement.dataset.ready"))
        return self

    def prefer(self, *, dark: bool = False, calm: bool = True) -> None:
        features = {
            "color-scheme": "dark" if dark else "light",
            "reduced-motion": "reduce" if calm else "no-preference",
        }
        media = [{"name": f"prefers-{name}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

    def screen(self, width: int) -> None:
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def scrub(self, slot: int) -> None:
        self.js(
            "const s = document.getElementById('scrub'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            slot,
        )

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def id(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def choose(self, name: str, value: str) -> None:
        """A radio button of that group, or an entry of the list of that id."""
        self.js(
            """const list = document.getElementById(arguments[0]);
            if (list?.matches("select")) { list.value = arguments[1]; list.dispatchEvent(new Event("change")); }
            else [...document.getElementsByName(arguments[0])].find((e) => e.value === arguments[1]).click();""",
            name, value,
        )  # fmt: skip

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What the browser has said since it was last asked."""
        return self.driver.get_log(kind)  # type: ignore[no-any-return, no-untyped-call]

    def position(self) -> int:
        return int(self.id("scrub").get_attribute("value"))

    def held(self) -> list[int]:
        """What each panel says is held."""
        return [
            int(each) for each in self.js("return [...document.querySelectorAll('.panel')].map(p => p.dataset.held)")
        ]

    def wait(self, condition: str) -> None:
        WebDriverWait(self.driver, 60, 0.02).until(lambda _: self.js(f"return {condition}"))


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    driver.get("about:blank")
    yield Tab(driver, tmp_path_factory.mktemp("pages"))
    driver.quit()


@in_browser
@pytest.mark.parametrize("which", CASES)
def test_it_loads_offline_and_in_silence(tab: Tab, which: str) -> None:
    """No message on the console, no request but for the file itself, and no text has run or become markup."""
    tab.log("performance")
    tab.open(which, charts=True)
    tab.choose("scheme", "")
    tab.id("next").click()
    for name, values in (("memory-unit", "bytes"), ("traffic-unit", "bytes"), ("difference-of", "loss")):
        tab.choose(name, values)
    assert tab.log("browser") == []
    messages = [json.loads(each["message"])["message"] for each in tab.log("performance")]
    asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [tab.driver.current_url]
    assert tab.js("return window.hostile ?? null") is None
    assert tab.js("return document.images.length") == 0
    assert (HOSTILE in tab.js("return document.querySelector('main').innerText")) is (which == "hostile")
    legend = tab.js("return [...document.querySelectorAll('#loss .legendtext')].map((each) => each.textContent)")
    assert legend == [record.name for record in CASES[which]().schemes if record.steps]


@in_browser
def test_the_page_may_not_speak_to_anyone(tab: Tab) -> None:
    """Were a script to ask for something, the page's own policy would refuse; no button of a chart sends it away."""
    tab.open(charts=True)
    asked = tab.js("return fetch('https://example.org').then(() => 'answered', () => 'refused')")
    added = tab.js(
        "const s = document.createElement('script'); s.text = 'window.added = 1'; document.head.append(s);"
        "return window.added ?? null"
    )
    assert (asked, added) == ("refused", None)
    assert any("Content Security Policy" in each["message"] for each in tab.log("browser"))
    titles = tab.js("return [...document.querySelectorAll('#memory .modebar-btn')].map((b) => b.dataset.title)")
    assert titles == ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]


# What each panel shows at every place of the slider.
WALK = """
const slider = document.getElementById("scrub"), shown = [];
for (let slot = 0; slot <= Number(slider.max); slot++) {
  slider.value = slot;
  slider.dispatchEvent(new Event("input"));
  const rows = [...document.querySelectorAll("#bands tbody tr")];
  shown.push([...document.querySelectorAll(".panel")].map((panel, i) => {
    const text = (selector) => panel.querySelector(selector).textContent;
    return {
      event: Number(panel.dataset.event), held: Number(panel.dataset.held), gpus: panel.querySelectorAll(".gpu").length,
      now: text(".now b"), where: text(".where"), words: text(".words"),
      edges: [...Array(9).keys()].map((k) => parseFloat(panel.style.getPropertyValue(`--edge${k}`))),
      cells: Object.fromEntries(rows.map(({ cells }) => [cells[0].textContent, cells[i + 1].lastChild.textContent])),
    };
  }));
}
return shown;
"""


def replayed(start: dict[str, int], events: list[EventRecord]) -> list[dict[str, int]]:
    """Bytes by band before the first event and after each."""
    frames = [dict(start)]
    for event in events:
        sign = {"hold": 1, "free": -1}.get(event.kind, 0)
        frames.append(frames[-1] | ({event.name: frames[-1].get(event.name, 0) + sign * event.nbytes} if sign else {}))
    return frames


def number(text: str) -> int:
    assert text.endswith(" B")
    return int(text.removesuffix(" B").replace(",", ""))


@in_browser
def test_the_player_shows_every_event_as_recorded(tab: Tab) -> None:
    """For each N and scheme, at each event: the recorded total, the replayed bands, and in words what it is."""
    whole = run()
    tab.open()
    runs = [(whole.settings.ranks, each.name, each.steps[-1].resident, each.events) for each in whole.schemes]
    runs += [(row.ranks, row.scheme, row.resident_by_band, row.events) for row in whole.sweep if row.ranks != 5]
    assert {ranks for ranks, *_ in runs} == {1, 2, 4, 5}
    verbs = {"hold": {"hold", "gather"}, "free": {"release"}, "compute": {"compute"}, "send": {"gather", "reduce"}}
    for ranks, name, start, events in runs:
        tab.choose("ranks", str(ranks))
        tab.choose("scheme", name)
        shown = [panel for [panel] in tab.js(WALK)]
        totals = [sum(start.values()), *(event.held for event in events)]
        assert [panel["event"] for panel in shown] == list(range(len(events) + 1))
        assert [panel["held"] for panel in shown] == totals
        for panel, frame, held in zip(shown, replayed(start, events), totals, strict=True):
            cells = {band: number(text) for band, text in panel["cells"].items()}
            assert cells.pop("total") == number(panel["now"]) == held
            assert {band: count for band, count in cells.items() if count} == {
                band: count for band, count in frame.items() if count
            }
            assert panel["gpus"] == ranks
        for panel, event in zip(shown[1:], events, strict=True):
            assert panel["words"].split()[0] in verbs[event.kind]
            assert event.unit in panel["words"]
            assert event.unit in panel["where"]
            if event.nbytes:
                assert f"{event.nbytes:,} B" in panel["words"]
            if event.kind in ("hold", "free"):
                assert event.name in panel["words"]
        assert {panel["where"].split()[0] for panel in shown[1:]} >= {"forward", "backward", "optimizer"}


@in_browser
def test_bars_are_as_tall_as_what_is_held(tab: Tab) -> None:
    """A rank's bar is the share of the scale that its bytes are, band by band in the project's colours."""
    whole = run()
    record = whole.scheme("ZeRO-3")
    peak = record.steps[-1].peak.total
    tab.open()
    frames = replayed(record.steps[-1].resident, record.events)
    order = [band for band in palette.BANDS if any(band in frame for frame in frames)]
    for [panel], frame in zip(tab.js(WALK), frames, strict=True):
        level, edges = 0, []
        for band in order:
            level += frame.get(band, 0)
            edges.append(100 * level / peak)
        assert panel["edges"][: len(order)] == pytest.approx(edges, abs=1e-3)
    gradient = tab.js("return getComputedStyle(document.querySelector('.gpu')).backgroundImage")
    colours = re.findall(r"rgb\((\d+), (\d+), (\d+)\)", gradient)
    assert list(dict.fromkeys(colours)) == [
        tuple(str(int(palette.BANDS[band][i : i + 2], 16)) for i in (1, 3, 5)) for band in order
    ]


@in_browser
def test_scales(tab: Tab) -> None:
    """Fitted, the peak is the top; on one scale for all it is lower; without the model states it is another peak."""
    whole = run()
    most = max(row.peak for row in whole.sweep)
    record = whole.scheme("ZeRO-3")
    peak = record.steps[-1].peak
    tab.open()
    mark = "return parseFloat(document.querySelector('.mark').style.bottom)"
    assert tab.js(mark) == 100
    assert tab.js("return document.querySelector('.mark').textContent") == f"peak {peak.total:,} B"
    tab.choose("scale", "shared")
    assert tab.js(mark) == pytest.approx(100 * peak.total / most, abs=1e-3)
    tab.choose("shown", "transient")
    frames = replayed(record.steps[-1].resident, record.events)
    transient = max(sum(count for band, count in frame.items() if band not in MODEL_STATES) for frame in frames)
    assert tab.js("return document.querySelector('.mark').textContent") == f"most {transient:,} B"


@in_browser
def test_lockstep(tab: Tab) -> None:
    """Side by side, all schemes go through all their events in order, and compute the same at the same moment."""
    whole = run()
    tab.open()
    tab.choose("scheme", "")
    moments = tab.js(WALK)
    assert {len(panels) for panels in moments} == {len(NAMES)}
    for i, record in enumerate(whole.schemes):
        numbers = [panels[i]["event"] for panels in moments]
        assert sorted(set(numbers)) == list(range(len(record.events) + 1))
        assert numbers == sorted(numbers)
        totals = [sum(record.steps[-1].resident.values()), *(event.held for event in record.events)]
        assert [panels[i]["held"] for panels in moments] == [totals[number] for number in numbers]
        assert [number(panels[i]["cells"]["total"]) for panels in moments] == [totals[number] for number in numbers]

    def computed(record: SchemeRecord, i: int) -> dict[tuple[str, str], int]:
        """The first moment at which each computation shows."""
        return {
            (event.name, event.unit): next(at for at, panels in enumerate(moments) if panels[i]["event"] == index)
            for index, event in enumerate(record.events, start=1)
            if event.kind == "compute"
        }

    first, *others = [computed(record, i) for i, record in enumerate(whole.schemes)]
    assert len(first) == 3 * 3
    assert all(other == first for other in others)


@in_browser
def test_buttons(tab: Tab) -> None:
    """Play runs to the end and stops; pause holds; the others move by one or to an end; scrubbing goes anywhere."""
    record = run().scheme("ZeRO-3")
    end = len(record.events)
    tab.open()
    assert tab.position() == 0
    tab.id("next").click()
    tab.id("next").click()
    tab.id("back").click()
    assert (tab.position(), tab.held()) == (1, [record.events[0].held])
    tab.id("last").click()
    assert tab.position() == end
    tab.id("next").click()
    assert tab.position() == end
    tab.id("first").click()
    tab.id("back").click()
    assert tab.position() == 0
    tab.choose("speed", "4")
    tab.id("play").click()
    assert tab.id("play").get_attribute("aria-label") == "Pause"
    tab.wait("document.getElementById('scrub').value >= 3")
    tab.id("play").click()
    paused = tab.position()
    assert paused >= 3
    assert tab.id("play").get_attribute("aria-label") == "Play"
    tab.js("return new Promise((done) => setTimeout(done, 300))")
    assert (tab.position(), tab.held()) == (paused, [record.events[paused - 1].held])
    tab.js(
        "const s = document.getElementById('scrub'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
        end - 3,
    )
    tab.choose("speed", "8")
    tab.id("play").click()
    tab.wait(f"document.getElementById('scrub').value == {end}")
    tab.wait("document.getElementById('play').ariaLabel === 'Play'")
    strip = tab.driver.find_element(By.CSS_SELECTOR, ".strip")
    ActionChains(tab.driver).move_to_element_with_offset(strip, 0, 0).click().perform()
    assert tab.position() == (end + 1) // 2


@in_browser
def test_the_moment_is_kept_when_the_scheme_changes(tab: Tab) -> None:
    """Another scheme shows the same computation, if it was at one."""
    whole = run()
    tab.open()
    event = next(
        e for e in whole.scheme("ZeRO-3").events if (e.kind, e.name, e.unit) == ("compute", "backward", "layer 2")
    )
    at = whole.scheme("ZeRO-3").events.index(event) + 1
    tab.js(
        "const s = document.getElementById('scrub'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", at
    )
    for name in ("ZeRO-1", "", "data parallel"):
        tab.choose("scheme", name)
        assert set(tab.js("return [...document.querySelectorAll('.words')].map((e) => e.textContent)")) == {
            "compute Each rank computes the backward of layer 2 on its own rows."
        }


@in_browser
def test_keys(tab: Tab) -> None:
    """Within the player space plays and pauses, arrows, Home and End move, and it shows what has the focus."""
    end = len(run().scheme("ZeRO-3").events)
    tab.open()
    tab.js("document.getElementById('back').focus()")
    tab.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert tab.position() == 2
    tab.press(Keys.END)
    assert tab.position() == end
    tab.press(Keys.HOME)
    assert tab.position() == 0
    tab.press(Keys.TAB, Keys.SPACE)  # the play button has the focus: it is pressed, once
    assert tab.id("play").get_attribute("aria-label") == "Pause"
    tab.press(Keys.SPACE)
    assert tab.id("play").get_attribute("aria-label") == "Play"
    tab.js("document.getElementById('scrub').focus()")
    tab.press(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert tab.position() == 2
    tab.press(Keys.SPACE)
    assert tab.id("play").get_attribute("aria-label") == "Pause"
    tab.press(Keys.SPACE)
    assert (
        tab.js("const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.outlineWidth")
        == "solid3px"
    )
    tab.js("document.querySelector('#schemes input:checked').focus()")
    tab.press(Keys.ARROW_LEFT)  # a choice among schemes, not an event
    assert tab.js("return document.querySelector('.panel').dataset.scheme") == "ZeRO-2"


@in_browser
def test_everything_has_a_name_and_can_be_reached(tab: Tab) -> None:
    """Every control has a name for a screen reader and is in the tab order; a step that is taken is spoken."""
    tab.open()
    names = tab.js(
        """return [...document.querySelectorAll("button, select, input, [tabindex], article")]
        .filter((e) => !e.closest(".chart")).map((e) => e.ariaLabel || e.labels?.[0]?.textContent.trim() || "")"""
    )
    assert len(names) > 30
    assert all(names)
    assert tab.js("return document.querySelectorAll('[tabindex=\"-1\"]:not(.chart *)').length") == 0
    record = run().scheme("ZeRO-3")
    tab.id("next").click()
    spoken = tab.id("spoken").get_attribute("textContent")
    assert f"{record.events[0].nbytes:,} B" in spoken
    assert f"{record.events[0].held:,} B held" in spoken
    assert "event 1 of" in tab.id("scrub").get_attribute("aria-valuetext")


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance of rgb(r, g, b)."""
    channels = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


CONTRASTS = """
const ground = (e) => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor; if (!c.startsWith("rgba(0, 0, 0, 0")) return c; } };
return ["body", ".lead", ".note", "a", ".holds b", "thead th", "td", ".now", ".words", "legend", "label span", "button",
  "#play", "select", ".caption", ".tick span", ".phases span", ".keys", "footer p"]
  .map((s) => [s, getComputedStyle(document.querySelector(s)).color, ground(document.querySelector(s))]);
"""


@in_browser
def test_light_and_dark(tab: Tab) -> None:
    """The page and its charts follow the reader's preference; texts have a contrast of 4.5 or more (WCAG 1.4.3)."""
    tab.open(charts=True)
    inks = "['memory', 'traffic', 'loss', 'difference'].map((id) => document.getElementById(id).layout.font.color)"
    before = tab.js(f"return {inks}")
    for dark in (False, True):
        tab.prefer(dark=dark)
        ground = tab.js("return getComputedStyle(document.body).backgroundColor")
        assert (luminance(ground) < 0.1) is dark
        for selector, ink, under in tab.js(CONTRASTS):
            bright, dim = sorted((luminance(ink), luminance(under)), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, selector
    tab.wait(f"{inks}.every((ink) => !{before}.includes(ink))")


@in_browser
@pytest.mark.parametrize("which", ["whole", "small_card", "hostile"])
def test_nothing_is_wider_than_the_screen(tab: Tab, which: str) -> None:
    """On a phone and on a tablet only tables scroll sideways, in frames of their own; buttons are easy to hit."""
    tab.open(which, charts=True)
    one = tab.js("return document.querySelector('#schemes input').value")
    for width in (360, 800):
        tab.screen(width)
        for scheme in ("", one):
            tab.choose("scheme", scheme)
            tab.id("last").click()
            assert tab.js("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
    heights = tab.js("return [...document.querySelectorAll('.buttons button')].map((each) => each.offsetHeight)")
    assert min(heights) >= 44


@in_browser
def test_motion_is_left_out_on_request(tab: Tab) -> None:
    """Bars glide and the wire flows, but not for a reader who prefers less motion; the player plays for both."""
    at = next(i for i, event in enumerate(run().scheme("ZeRO-3").events, start=1) if event.name == "ring blocks")
    for calm in (False, True):
        tab.open(calm=calm)
        tab.js(
            "const s = document.getElementById('scrub'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            at,
        )
        glide, flow = tab.js(
            "return [getComputedStyle(document.querySelector('.panel')).transitionProperty,"
            "getComputedStyle(document.querySelector('.wire')).animationName]"
        )
        assert ("--edge0" in glide) is not calm
        assert (flow == "flow") is not calm


@in_browser
def test_a_run_out_of_memory_shows_how_far_it_came(tab: Tab) -> None:
    """A run that ended for want of memory ends in the player with what it asked for, what it held and the card."""
    results = small_card()
    tab.open("small_card")
    for record in results.schemes[:3]:
        assert record.out_of_memory is not None
        tab.choose("scheme", record.name)
        *_, [last] = tab.js(WALK)
        assert last["held"] == sum(record.out_of_memory.held.values())
        assert last["words"].startswith(
            f"out of memory {record.out_of_memory.asked:,} B of {record.out_of_memory.band}"
        )
        cells = {band: number(text) for band, text in last["cells"].items()}
        assert {band: cells[band] for band in record.out_of_memory.held} == record.out_of_memory.held
    assert tab.js("return document.querySelector('.mark.card').textContent") == f"card {results.settings.capacity:,} B"
    tab.choose("ranks", "1")
    tab.choose("scheme", "ZeRO-3")
    assert "ZeRO-3 ran out of memory on 1" in tab.id("panels").text or tab.held()


@in_browser
def test_charts_draw_the_records(tab: Tab) -> None:
    """Each point is a record's, in both units; the toggles show and hide; no difference is at the place of zero."""
    whole = run()
    tab.open(charts=True)
    points = "return document.getElementById(arguments[0]).data.map((t) => [t.name, Array.from(t.x), Array.from(t.y)])"

    def traces(chart: str) -> dict[str, list[tuple[float, float]]]:
        return {name: list(zip(x, y, strict=True)) for name, x, y in tab.js(points, chart)}

    for unit, size in (("parameter", whole.n_params), ("bytes", 1)):
        tab.choose("memory-unit", unit)
        found = traces("memory")
        for name in NAMES:
            rows = [row for row in whole.sweep if row.scheme == name]
            for what, field in (("at rest", "resident"), ("peak", "peak_without_activations")):
                for suffix, key in (("", field), (", predicted", f"{field}_predicted")):
                    drawn = found[f"{name}, {what}{suffix}"]
                    assert [x for x, _ in drawn] == [row.ranks for row in rows]
                    assert [y * size for _, y in drawn] == pytest.approx([getattr(row, key) for row in rows])
            assert f"{name}, peak with activations" not in found
    tab.js("document.querySelector('#memory-of [value=peak]').click()")
    assert [y for _, y in traces("memory")["ZeRO-1, peak with activations"]] == [
        row.peak for row in whole.sweep if row.scheme == "ZeRO-1"
    ]
    tab.js("document.querySelector('#memory-of [value=predicted]').click()")
    assert not any("predicted" in name for name in traces("memory"))
    for unit, size in (("P", 4 * whole.n_params), ("bytes", 1)):
        tab.choose("traffic-unit", unit)
        for name in NAMES:
            sent = [(row.ranks, row.sent) for row in whole.sweep if row.scheme == name]
            assert [(x, y * size) for x, y in traces("traffic")[name]] == [pytest.approx(each) for each in sent]
    assert {name: [y for _, y in drawn] for name, drawn in traces("loss").items()} == {
        record.name: [step.loss for step in record.steps] for record in whole.schemes
    }
    for quantity in ("params", "master", "loss"):
        tab.choose("difference-of", quantity)
        found = traces("difference")
        [zero] = {y for name in NAMES for _, y in found[name]}
        assert tab.js("return document.getElementById('difference').layout.yaxis.ticktext[0]") == "0"
        assert zero == tab.js("return document.getElementById('difference').layout.yaxis.tickvals[0]")
    tab.choose("difference-of", "master")
    drift = whole.ablations.narrow_wire
    assert drift is not None
    assert [10**y for _, y in traces("difference")["broken: fp16 wire"]] == pytest.approx(drift.drift.largest)


@in_browser
def test_charts_answer_the_pointer(tab: Tab) -> None:
    """Pointing at a point shows its number and all schemes that it stands for, and dragging zooms in."""
    tab.open(charts=True)
    plot = tab.driver.find_element(By.CSS_SELECTOR, "#loss .nsewdrag")
    tab.js("arguments[0].scrollIntoView({ block: 'center' })", plot)
    across, down = tab.js(
        "const { xaxis, yaxis } = document.getElementById('loss')._fullLayout;"
        "return [xaxis.l2p(2) - xaxis._length / 2, yaxis.l2p(arguments[0]) - yaxis._length / 2].map(Math.round)",
        run().schemes[0].steps[1].loss,
    )
    ActionChains(tab.driver).move_to_element_with_offset(plot, across, down).perform()
    tab.wait("document.querySelector('#loss .hovertext')")
    shown = tab.js("return document.querySelector('#loss .hoverlayer').textContent")
    assert f"{', '.join(NAMES)}, step 2" in shown
    assert f"loss {run().schemes[0].steps[1].loss}" in shown
    first, last = tab.js("return document.getElementById('loss').layout.xaxis.range")
    pointer = ActionChains(tab.driver)
    pointer.move_to_element_with_offset(plot, -60, -30).click_and_hold().move_by_offset(90, 60).release().perform()
    tab.wait(f"document.getElementById('loss').layout.xaxis.range[0] > {first}")
    assert tab.js("return document.getElementById('loss').layout.xaxis.range[1]") < last


@in_browser
def test_a_row_of_ones_own_is_shown_like_any_other(tab: Tab) -> None:
    """A fifth row, the caller's own, has a table row, a panel, and in every chart a colour and mark of its own."""
    tab.open("own", charts=True)
    names = [*NAMES[:3], "mine", NAMES[3]]
    assert [row[0] for row in read("own").tables["summary"][2:]] == names
    tab.choose("scheme", "")
    assert tab.js(
        "return [...document.querySelectorAll('.panel')]"
        ".map((e) => [e.dataset.scheme, e.style.getPropertyValue('--scheme')])"
    ) == [[name, look(place).color] for place, name in enumerate(names)]
    for chart in ("traffic", "loss"):
        marks = tab.js(
            "return document.getElementById(arguments[0]).data.filter((t) => arguments[1].includes(t.name))"
            ".map((t) => [t.name, t.marker.color, t.marker.symbol.replace('-open', ''), t.marker.size])", chart, names,
        )  # fmt: skip
        assert [mark[:3] for mark in marks] == [
            [name, look(place).color, look(place).symbol] for place, name in enumerate(names)
        ]
        sizes = [size for *_, size in marks]
        assert sizes == sorted(set(sizes), reverse=True)  # of marks in one place each is seen
