"""The page says what the records say, as one file that is safe to open. In a browser: the files beside this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace

from helpers import plain_lab
from pages import CASES, HOSTILE, NAMES, SETTINGS, Tables, commas, hostile, page, read, run, small_card
from zerosim.bands import Band
from zerosim.records import results
from zerosim.records.results import Check, Prediction, SchemeRecord
from zerosim.report import offline
from zerosim.report import page as report
from zerosim.util import sizes

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def predicted(scheme: SchemeRecord) -> Prediction:
    assert scheme.prediction is not None
    return scheme.prediction


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
        tables = Tables(page.__wrapped__("wrong")).tables
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
    some = replace(run(), schemes=[small_card().schemes[0], *run().schemes[1:]])
    for found, whose in ((some, "All schemes that the cards have room for hold"), (run(), "All schemes hold")):
        assert whose in "".join(report._verdict(found, Check.SAME_TRAINING).itertext())


def test_markup_in_texts_stays_text() -> None:
    """A page with hostile texts has the elements of a page without them, and shows the texts as they are."""
    tags = read("hostile").tags
    without = [tag for tag in tags if tag not in ("ol", "li")]  # the failures
    assert without == [tag for tag in read("whole").tags if tag != "li"]
    assert tags.count("script") == 1 + len([*offline.SCRIPTS, *report.SCRIPTS])
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
    assert (tmp_path / "report.html").stat().st_size > 10**5


def test_the_opening_is_the_records() -> None:
    """For somebody new: how much the least holds where the base holds how much, and alike only where that was found."""
    [lead] = re.findall(r'<p class="lead">(.*?)</p>', page("whole"), re.DOTALL)
    rest = {each.name: sum(each.steps[-1].resident.values()) for each in run().schemes}
    assert [rest["ZeRO-3"], rest["data parallel"]] == [min(rest.values()), max(rest.values())]
    assert f"ZeRO-3 holds {sizes.text(rest['ZeRO-3'])} between steps where data parallel holds" in lead
    assert f"holds {sizes.text(rest['data parallel'])}, and after every step both have learned the same" in lead
    [lead] = re.findall(r'<p class="lead">(.*?)</p>', page("hostile"), re.DOTALL)
    assert "bit for bit" not in lead  # it has failed
    [lead] = re.findall(r'<p class="lead">(.*?)</p>', page("small_card"), re.DOTALL)
    assert "between steps" not in lead  # there is nobody to compare with


@pytest.mark.parametrize("steps", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_the_default_lab_is_a_small_file(steps: int) -> None:
    """With every event of every N in it, what the command makes without options stays under 500 kB."""
    settings = replace(SETTINGS, ranks=32, steps=steps, batch=8, seed=7, widths=[64, 128, 128, 64])
    found = plain_lab(settings)
    assert sum(bool(row.events) for row in found.sweep) == len(NAMES) * 6
    assert 100_000 < len(report.page(found).encode()) < 500_000
