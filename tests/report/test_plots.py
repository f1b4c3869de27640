"""The figures draw what the records say, all of it, legibly, and nothing else."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from msgspec.structs import replace

from helpers import plain_lab, some_by_night
from zerosim.bands import MODEL_STATES, Band
from zerosim.records import results
from zerosim.records.results import Results, Settings
from zerosim.report import colors as palette
from zerosim.report import plots
from zerosim.report.looks import look, looks
from zerosim.stages import SCHEMES, Stage

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

NAMES = [stage.name for stage in SCHEMES]
TRANSIENT = [band for band in Band if band not in MODEL_STATES]
Array = npt.NDArray[np.float64]
DRAW = {"memory": plots.memory, "loss": plots.loss, "traffic": plots.traffic, "timeline": plots.timeline}
KEYS = list(DRAW)
SETTINGS = Settings(
    ranks=5, steps=3, batch=2, seed=0, model_seed=0, precision="mixed", wire="fp32", gather="layer", data="noise",
    capacity=None, widths=[7, 13, 11, 7],
)  # fmt: skip


MINE = Stage("mine", optimizer=True, grads=True)
TEN = (*SCHEMES, MINE, *(Stage(f"row {6 + place}", place % 4 > 0, place % 4 > 1, place % 4 > 2) for place in range(5)))


@functools.cache
def _small_card(capacity: int) -> Results:
    return plain_lab(replace(SETTINGS, capacity=capacity))


def _card(whole: Results) -> Results:
    """A card that is one byte too small for ZeRO-2: what needs more than that runs out of memory, ZeRO-3 fits."""
    return _small_card(whole.scheme("ZeRO-2").steps[-1].peak.total - 1)


def _unlike(whole: Results) -> Results:
    """From step 2 on, one weight of ZeRO-2 differs from data parallel's in its last bit."""
    differences = [
        replace(each, differing=each.differing | {Band.MASTER: 1}, largest=each.largest | {Band.MASTER: 1e-9})
        if each.scheme == "ZeRO-2" and each.step > 1
        else each
        for each in whole.differences
    ]
    return replace(whole, differences=differences)


@functools.cache
def _ten_rows() -> Results:
    return plain_lab(replace(SETTINGS, ranks=2, steps=1), rows=TEN)


CASES: dict[str, Callable[[Results], Results]] = {
    "whole": lambda whole: whole,
    "some run out": _card,
    "all run out": lambda _: plain_lab(replace(SETTINGS, capacity=64)),
    "one rank": lambda _: plain_lab(replace(SETTINGS, ranks=1)),
    "one step, fp32": lambda _: plain_lab(replace(SETTINGS, steps=1, precision="fp32")),
    "deep, gathered at once": lambda _: plain_lab(
        replace(SETTINGS, ranks=2, steps=1, widths=[7, *[11] * 7, 7], gather="model")
    ),
    "unlike": _unlike,
    "no sweep": lambda whole: replace(whole, sweep=[]),
    "ten rows": lambda _: _ten_rows(),
}


@pytest.fixture(scope="module")
def whole() -> Results:
    return plain_lab(SETTINGS)


@pytest.fixture(scope="module")
def drawn(whole: Results) -> dict[str, Figure]:
    return plots.figures(whole)


BY_DAY = ("some run out", "one rank", "unlike", "ten rows")  # what else there is to say, and most and least to draw


@pytest.fixture(scope="module", params=some_by_night(CASES, BY_DAY.__contains__))
def case(request: pytest.FixtureRequest, whole: Results) -> Results:
    return CASES[request.param](whole)


@pytest.fixture(scope="module")
def case_figures(case: Results) -> dict[str, Figure]:
    return plots.figures(case)


def curve(axes: Axes, label: str) -> list[tuple[float, float]]:
    [line] = [line for line in axes.get_lines() if line.get_label() == label]
    return points(line)


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def texts(figure: Figure) -> list[Text]:
    """Every text that is drawn. Tick labels out of view exist, but are not drawn."""
    ticks: set[Text] = set()
    shown: set[Text] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in itertools.chain(axis.get_major_ticks(), axis.get_minor_ticks()):
            ticks |= {tick.label1, tick.label2}
            if low <= tick.get_loc() <= high and tick.label1.get_visible():
                shown.add(tick.label1)
    found = {text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()}
    return [text for text in (found - ticks) | shown if text.get_text()]


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in texts(figure))


def panels(figure: Figure) -> Iterator[tuple[str, Axes, Axes]]:
    """The timeline's columns: scheme, panel of all bands, panel of the transient ones."""
    for above, below in zip(figure.axes[::2], figure.axes[1::2], strict=True):
        yield above.get_title("left"), above, below


def stacks(axes: Axes) -> dict[str, StepPatch]:
    return {str(patch.get_label()): patch for patch in axes.patches if isinstance(patch, StepPatch)}


def heights(patch: StepPatch) -> Array:
    """A band's own height at each event, without what it stands on."""
    top, _, base = patch.get_data()
    own: Array = top - np.asarray(base)
    return own


# -- the numbers


def test_memory_draws_the_sweep(whole: Results, drawn: dict[str, Figure]) -> None:
    """Each curve of the memory figure is its field of the sweep's rows over P, and each is labelled with its end."""
    [axes] = drawn["memory"].axes
    for name in NAMES:
        rows = [row for row in whole.sweep if row.scheme == name]
        for label, field in (
            ("at rest", "resident"),
            ("at rest, predicted", "resident_predicted"),
            ("peak", "peak_without_activations"),
            ("peak, predicted", "peak_without_activations_predicted"),
        ):
            expected = [(row.ranks, getattr(row, field) / whole.n_params) for row in rows]
            assert curve(axes, f"{name}, {label}") == expected
            if "predicted" not in label:
                assert f"{name}, {label}: {expected[-1][1]:.5g}" in words(drawn["memory"])


@pytest.mark.parametrize(("wire", "itemsize"), [("fp32", 4), ("fp16", 2)])
def test_traffic_draws_the_sweep(wire: str, itemsize: int, whole: Results) -> None:
    """Measured points are bytes over P times the wire's bytes; the two curves and limits say they are predicted."""
    run = whole if wire == SETTINGS.wire else plain_lab(replace(SETTINGS, ranks=3, wire=wire))
    figure = plots.traffic(run)
    [axes] = figure.axes
    for name in NAMES:
        expected = [(row.ranks, row.sent / (run.n_params * itemsize)) for row in run.sweep if row.scheme == name]
        assert curve(axes, name) == expected
    for factor in (2, 3):
        for n, y in curve(axes, f"{factor}(N−1)/N"):
            assert y == pytest.approx(factor * (n - 1) / n)
        assert any(line.get_linestyle() == ":" and set(line.get_ydata()) == {factor} for line in axes.get_lines())  # type: ignore[arg-type]
    [legend] = figure.legends
    assert all(text.get_text().startswith("predicted") for text in legend.get_texts())
    assert f"P × {itemsize} bytes" in axes.get_ylabel()


def test_traffic_of_several_micro_batches_has_room() -> None:
    """Rows that reduce each of four micro-batches send up to 9 P: all of it is in view, and no curve is said of it."""
    found = plain_lab(replace(SETTINGS, steps=1, batch=4, accumulate=4))
    figure = plots.traffic(found)
    [axes] = figure.axes
    unit = 4 * found.n_params
    assert max(row.sent for row in found.sweep) > 6 * unit
    assert axes.get_ylim()[1] > max(row.sent for row in found.sweep) / unit
    assert axes.get_window_extent().width > figure.bbox.width / 2
    assert "predicted, padding" not in words(figure)


def test_loss_draws_every_step(whole: Results, drawn: dict[str, Figure]) -> None:
    """The upper panel is the losses, the lower one the largest differences of the master weights."""
    above, below = drawn["loss"].axes
    for name in NAMES:
        assert curve(above, name) == [(step.step, step.loss) for step in whole.scheme(name).steps]
        mine = [each for each in whole.differences if each.scheme == name]
        assert curve(below, name) == [(each.step, each.largest[Band.MASTER]) for each in mine]
    assert "0 differing bits over all ranks, in every step" in words(drawn["loss"])


def test_loss_without_master_weights(whole: Results) -> None:
    """Where there are no master weights, the differences are those of the parameters, the fp32 weights themselves."""
    largest = {Band.PARAMS: 3.0, Band.EXP_AVG: 5.0}
    run = replace(whole, differences=[replace(each, largest=largest) for each in whole.differences])
    _, below = plots.loss(run).axes
    assert curve(below, "ZeRO-3") == [(step, 3.0) for step in range(1, SETTINGS.steps + 1)]
    assert "master" not in below.get_ylabel()


def test_stacked_bands_are_what_was_held(case: Results, case_figures: dict[str, Figure]) -> None:
    """At each event the bands' heights sum to the bytes that the record says were held, also where memory ran out."""
    for name, above, _ in panels(case_figures["timeline"]):
        record = case.scheme(name)
        held = sum((heights(patch) for patch in stacks(above).values()), np.zeros(len(record.events) + 1))
        assert held[1:].tolist() == [event.held for event in record.events]
        if record.steps and not record.out_of_memory:
            assert held[0] == sum(record.steps[-1].resident.values())


def test_bands_at_the_peak(whole: Results, drawn: dict[str, Figure]) -> None:
    """At the instant that is marked, each band has the height that the record gives for the peak, in both rows."""
    for name, above, below in panels(drawn["timeline"]):
        peak = whole.scheme(name).steps[-1].peak
        [mark] = [line for line in above.get_lines() if line.get_marker() == "o"]
        [(x, y)] = points(mark)
        assert y == peak.total
        assert f"{peak.total / 1e3:.3g} kB" in [text.get_text() for text in above.texts]
        for axes, bands in ((above, tuple(Band)), (below, TRANSIENT)):
            drawn_there = {band: heights(patch)[int(x)] for band, patch in stacks(axes).items()}
            assert {band: height for band, height in drawn_there.items() if height} == {
                band: nbytes for band, nbytes in peak.by_band.items() if band in bands
            }


def test_phases_are_in_order(drawn: dict[str, Figure]) -> None:
    """Every scheme's panel names forward, backward and optimizer, from left to right."""
    for _, above, _ in panels(drawn["timeline"]):
        named = [text for text in above.texts if "kB" not in text.get_text()]
        named.sort(key=lambda text: text.get_position()[0])
        assert [text.get_text() for text in named] == ["forward", "backward", "optimizer"]


def test_rows_share_a_scale(drawn: dict[str, Figure]) -> None:
    """All schemes have the same y axis, in bytes, and nothing is cut off."""
    for axes in zip(*((above, below) for _, above, below in panels(drawn["timeline"])), strict=True):
        assert len({each.get_ylim() for each in axes}) == 1
        tops = [max(patch.get_data()[0]) for each in axes for patch in stacks(each).values()]
        low, high = axes[0].get_ylim()
        assert low == 0
        assert max(tops) < high


# -- what is said


@pytest.mark.parametrize("key", KEYS)
def test_all_schemes_are_named(key: str, case_figures: dict[str, Figure], case: Results) -> None:
    """Each figure names all schemes, but for those of which it has nothing to draw."""
    names = {record.name for record in case.schemes}
    expected = {row.scheme for row in case.sweep if row.fits} if key in ("memory", "traffic") else names
    assert {name for name in names if re.search(f"^{name}", words(case_figures[key]), re.M)} == expected


def test_alike_is_said_only_of_what_is(whole: Results) -> None:
    """One differing bit, or one differing loss, and the loss figure no longer says that all is the same."""
    assert "bit for bit" in words(plots.loss(whole))
    unlike = words(plots.loss(_unlike(whole)))
    assert "bit for bit" not in unlike
    assert "0 differing bits" not in unlike
    assert f"{SETTINGS.steps - 1} values differ" in unlike
    *others, last = whole.schemes
    last = replace(last, steps=[replace(step, loss=step.loss + 1e-12) for step in last.steps])
    assert "bit for bit" not in words(plots.loss(replace(whole, schemes=[*others, last])))


@pytest.mark.parametrize(
    ("key", "field"), [("memory", "resident"), ("memory", "peak_without_activations"), ("traffic", "sent")]
)
def test_as_predicted_is_counted(key: str, field: str, whole: Results) -> None:
    """One byte off in one run, and that run no longer counts as predicted."""
    first, *others = whole.sweep
    wrong = replace(first, **{f"{field}_predicted": getattr(first, field) + 1})
    n = len(whole.sweep)
    assert f"{n} of {n} runs are as predicted" in words(DRAW[key](whole))
    assert f"{n - 1} of {n} runs are as predicted" in words(DRAW[key](replace(whole, sweep=[wrong, *others])))


def test_equal_traffic_is_said_only_of_what_is_equal(whole: Results) -> None:
    """Schemes are said to send as much as one another only if they send the same number of bytes."""
    assert "under data parallel, ZeRO-1 and ZeRO-2, " in words(plots.traffic(whole))
    rows = [replace(row, sent=row.sent + 1) if row.scheme == "ZeRO-2" else row for row in whole.sweep]
    assert "under data parallel and ZeRO-1, " in words(plots.traffic(replace(whole, sweep=rows)))


def test_schemes_out_of_memory(whole: Results) -> None:
    """Who ran out of memory is said, with what it asked for; a run that did leaves no point, and no zero."""
    run = _card(whole)
    short = [record.name for record in run.schemes if record.out_of_memory]
    assert short == NAMES[:3]
    found = plots.figures(run)
    assert "not enough for data parallel, ZeRO-1 and ZeRO-2" in words(found["timeline"])
    shortage = run.scheme("ZeRO-2").out_of_memory
    assert shortage is not None
    assert f"+{shortage.asked} B {shortage.band}" in words(found["timeline"])
    for key in ("memory", "traffic"):
        [axes] = found[key].axes
        for name in NAMES:
            label = f"{name}, at rest" if key == "memory" else name
            fitting = [row.ranks for row in run.sweep if row.scheme == name and row.fits]
            lines = [line for line in axes.get_lines() if line.get_label() == label]
            assert [x for line in lines for x in line.get_xdata()] == fitting  # type: ignore[union-attr]


# -- the look


def test_colours_agree(drawn: dict[str, Figure]) -> None:
    """A scheme and a band have their one colour wherever they are drawn."""
    assert list(palette.BANDS) == list(Band)
    for place, name in enumerate(NAMES):
        colour = look(place).color.lower()
        lines = [
            line
            for key in KEYS[:3]
            for axes in drawn[key].axes
            for line in axes.get_lines()
            if str(line.get_label()) in (name, f"{name}, at rest", f"{name}, peak")
        ]
        assert len(lines) == 2 + 2 + 1
        assert {to_hex(line.get_color()) for line in lines} == {colour}
    for place, (name, above, below) in enumerate(panels(drawn["timeline"])):
        [title] = [text for text in above.findobj(Text) if isinstance(text, Text) and text.get_text() == name]
        assert to_hex(title.get_color()) == look(place).color.lower()
        for band, patch in [*stacks(above).items(), *stacks(below).items()]:
            assert to_hex(patch.get_facecolor()) == palette.BANDS[band].lower()
    [legend] = drawn["timeline"].legends
    keys = {
        text.get_text(): to_hex(patch.get_facecolor())
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)
    }
    elsewhere = {
        Band.MAIN_GRADS, Band.MOMENTUM, Band.BUFFERS, Band.BUCKET, Band.PARTIAL, Band.SECONDARY, Band.SCALARS,
        Band.CHECKPOINT, Band.SCALES,
    }  # fmt: skip
    assert keys == {band: colour.lower() for band, colour in palette.BANDS.items() if band not in elsewhere}


def test_a_row_of_ones_own_is_drawn_like_any_other() -> None:
    """A fifth row, the caller's own, has a name, curve, panel, colour and mark of its own in every figure."""
    found = _ten_rows()
    drawn = plots.figures(found)
    mine = look(TEN.index(MINE))
    for key, label in (("memory", "mine, at rest"), ("traffic", "mine")):
        [axes] = drawn[key].axes
        twin, line = (
            next(line for line in axes.get_lines() if line.get_label() == each)
            for each in (label.replace("mine", "ZeRO-2"), label)
        )
        assert (line.get_color(), line.get_marker()) == (mine.color, mine.marker)
        assert points(line) == points(twin)
        assert line.get_markersize() < twin.get_markersize()  # so that both are seen
    assert [name for name, _, _ in panels(drawn["timeline"])] == [row.name for row in TEN]
    assert "10 schemes, one curve" in words(drawn["loss"])


def test_a_look_follows_from_the_place_alone() -> None:
    """Other names in the same places look the same, and no two of a dozen schemes share colour and mark."""
    assert list(looks("abcd").values()) == list(looks(NAMES).values())
    assert len({(each.color, each.marker) for each in map(look, range(88))}) == 88
    for one, other in itertools.combinations(map(look, range(11)), 2):
        assert one.marker != other.marker
        assert one.symbol != other.symbol
        assert one.color != other.color or one.line != other.line


def linear(colour: str) -> Array:
    """Linear sRGB of a hex string."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The WCAG 2 contrast ratio."""
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


# Machado, Oliveira and Fernandes 2009, full severity, on linear sRGB.
EYES = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(rgb: Array) -> Array:
    """Ottosson 2020: a space in which distances are about what is seen; black to white is 1."""
    cones = np.array(
        [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.6806995, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
    )
    mix = np.array(
        [
            [0.21045426, 0.79361779, -0.00407205],
            [1.9779985, -2.42859221, 0.45059371],
            [0.02590404, 0.78277177, -0.80867577],
        ]
    )
    seen: Array = mix @ np.cbrt(cones @ np.clip(rgb, 0, 1))
    return seen


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize(
    ("colours", "least"),
    [
        (dict(enumerate(palette.PLACES[:4])), 0.12),
        (dict(enumerate(palette.PLACES)), 0.08),
        ({band: palette.BANDS[band] for band in MODEL_STATES if band is not Band.MOMENTUM}, 0.10),
    ],
    ids=["four schemes", "eight schemes", "model states"],
)
def test_colours_are_told_apart(eyes: str, colours: dict[Any, str], least: float) -> None:
    """No two schemes, and no two model states, look alike, whatever the eyes."""
    for one, other in itertools.combinations(colours, 2):
        seen = [oklab(np.array(EYES[eyes]) @ linear(colours[each])) for each in (one, other)]
        assert np.linalg.norm(seen[0] - seen[1]) > least, (one, other)


@pytest.mark.parametrize("eyes", EYES)
def test_transient_bands_stand_apart(eyes: str) -> None:
    """A band that comes and goes looks like no other band, whatever the eyes."""
    for band in TRANSIENT:
        for other in set(Band) - {band}:
            seen = [oklab(np.array(EYES[eyes]) @ linear(palette.BANDS[each])) for each in (band, other)]
            rare = {band, other} & {Band.MAIN_GRADS, Band.BUFFERS, Band.BUCKET, Band.PARTIAL, Band.SECONDARY}
            rarest = {band, other} & {Band.SCALARS, Band.CHECKPOINT, Band.SCALES}
            assert np.linalg.norm(seen[0] - seen[1]) > (0.07 if rarest else 0.08 if rare else 0.12), (band, other)


@pytest.mark.parametrize("ground", ["#FFFFFF", "#121212"])
def test_colours_are_legible(ground: str) -> None:
    """On white and on near-black, lines have a contrast of at least 3 (WCAG 1.4.11) and areas of 2."""
    assert min(contrast(colour, ground) for colour in palette.PLACES) >= 3
    assert min(contrast(colour, ground) for colour in palette.BANDS.values()) >= 2


@pytest.mark.parametrize("key", KEYS)
def test_texts_do_not_overlap(key: str, case_figures: dict[str, Figure]) -> None:
    """No two texts of a figure touch, none leaves it, and none is smaller than 8 points."""
    figure = case_figures[key]
    figure.draw_without_rendering()
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts(figure)]
    assert len(boxes) > 8
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
    for (one, box), (other, its) in itertools.combinations(boxes, 2):
        shared = Bbox.intersection(box, its)
        assert shared is None or shared.width * shared.height == 0, (one, other)
    assert min(float(text.get_fontsize()) for text in texts(figure)) >= 8


@pytest.mark.parametrize("key", KEYS)
def test_legends_cover_no_data(key: str, case_figures: dict[str, Figure]) -> None:
    """Each figure has one legend, outside its panels."""
    figure = case_figures[key]
    figure.draw_without_rendering()
    [legend] = [each for each in figure.findobj(Legend) if isinstance(each, Legend)]
    for axes in figure.axes:
        assert Bbox.intersection(legend.get_window_extent(), axes.bbox) is None


def test_curves_in_one_place_all_show(drawn: dict[str, Figure]) -> None:
    """Of curves and points that coincide each is smaller than the one that it lies on."""
    above, below = drawn["loss"].axes
    for axes in (above, below):
        widths = [line.get_linewidth() for line in axes.get_lines()]
        assert widths == sorted(widths, reverse=True)
        assert len(set(widths)) == len(NAMES)
    [axes] = drawn["traffic"].axes
    same = [line for name in NAMES[:3] for line in axes.get_lines() if line.get_label() == name]
    sizes = [line.get_markersize() for line in same]
    assert sizes == sorted(sizes, reverse=True)
    assert len({line.get_marker() for line in same}) == len(set(sizes)) == 3


# -- the room


def test_files_are_whole(drawn: dict[str, Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure is a PNG of its name; where the last move fails nothing is left behind."""
    paths = plots.save_figures(drawn, tmp_path)
    assert paths == [tmp_path / f"{key}.png" for key in KEYS]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")
        path.unlink()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        plots.save_figures(drawn, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_settings_of_the_process_are_left_alone(whole: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are the same under another style, and change no setting of matplotlib: not in two threads either.

    Settings that two threads change in turn are restored only if neither begins before the other has ended.
    """
    real = style.context
    within: list[None] = []
    most: list[int] = []

    @contextmanager
    def counted(*args: Any, **options: Any) -> Iterator[None]:
        within.append(None)
        most.append(len(within))
        time.sleep(0.01)  # the other thread's chance to come in
        with real(*args, **options):
            yield
        within.pop()

    monkeypatch.setattr(style, "context", counted)
    with mpl.rc_context({"font.size": 5, "axes.facecolor": "black", "lines.linewidth": 9}):
        before = dict(mpl.rcParams)
        found: list[Figure] = []
        threads = [threading.Thread(target=lambda: found.extend(plots.figures(whole).values())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert dict(mpl.rcParams) == before
    assert max(most) == 1
    assert len(found) == len(threads) * len(KEYS)
    for figure in found:
        assert min(float(text.get_fontsize()) for text in texts(figure)) >= 8
        assert {to_hex(axes.get_facecolor()) for axes in figure.axes} == {"#ffffff"}


PROGRAM = """
import sys
from pathlib import Path
from zerosim.records import results
from zerosim.report import plots
plots.save_figures(plots.figures(results.load(Path(sys.argv[1]))), Path(sys.argv[2]))
print(*sorted(name for name in sys.modules if name == "matplotlib.pyplot" or name.startswith("zerosim.")))
"""


def test_no_pyplot_and_no_simulator(whole: Results, tmp_path: Path) -> None:
    """From a file of records to files of figures, neither pyplot nor the simulator is loaded, nor a display needed."""
    results.save(whole, tmp_path / "results.json")
    environment = {key: value for key, value in os.environ.items() if key not in ("MPLBACKEND", "DISPLAY")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "results.json", tmp_path],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    loaded = {name.removeprefix("zerosim.") for name in done.stdout.split()}
    assert "report.plots" in loaded
    assert not loaded & {"matplotlib.pyplot", "schemes", "ranks", "comm", "model", "theory", "lab", "worlds"}
    assert {path.stem for path in tmp_path.glob("*.png")} == set(KEYS)
