"""The plan: what it finds is what a step's ledger says, and what a card of that size does."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from zerosim.bands import MODEL_STATES, Band
from zerosim.counts import EventKind
from zerosim.lab.data import batches
from zerosim.model import MLP
from zerosim.planner import conventions, largest_model, models, plan, question, search
from zerosim.planner.runner import Runner
from zerosim.planner.step_run import StepRun
from zerosim.ranks import OutOfMemory
from zerosim.records import plan as records
from zerosim.records.plan import Plan
from zerosim.records.question import Network, Question
from zerosim.report import plan_chart as chart
from zerosim.report import plan_console as console
from zerosim.report import plan_verdict as verdict
from zerosim.schemes import DP, SCHEMES, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.stages import HPZ, HSDP, ZeRO3Kept
from zerosim.util import sizes
from zerosim.worlds.dry import DryRing, Shapes

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDTHS = [67, 131, 127, 61]
TEXT = ",".join(map(str, WIDTHS))
PARAMS = 67 * 131 + 131 + 131 * 127 + 127 + 127 * 61 + 61


def ask(**options: object) -> Question:
    """A question about the small perceptron on 5 GPUs."""
    given = {"model": TEXT, "asked": [5], "gpus": [2, 5, 8], "rows": list(SCHEMES), "micro_batch": 3, **options}
    return question.check(Question(**given))  # type: ignore[arg-type]


def made(**options: object) -> Plan:
    """The plan that answers it."""
    asked = ask(**options)
    return plan.make(models.read(asked.model), asked, lambda doing: None)


@pytest.fixture(autouse=True)
def _shorter_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on thousands of ranks is a matter of seconds."""
    monkeypatch.setattr(plan, "MOST_RANKS", 32)
    monkeypatch.setattr(plan, "MOST_ROWS", 512)


# -- every number is a ledger's


@pytest.mark.parametrize("row", [*SCHEMES, Stage("mine", optimizer=True, grads=True)], ids=lambda row: row.name)
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_cell_is_what_the_simulator_measures(row: Stage, ranks: int) -> None:
    """Resident and peak by band, traffic, FLOPs: equal to a real step of the simulator, to the byte; of any row."""
    scheme = row(MLP(WIDTHS), ranks, precision="mixed", wire="fp16")
    scheme.step(next(batches("noise", ranks, 1, 3, (WIDTHS[0], WIDTHS[-1]), 7)))
    report = scheme.reports[-1]
    [cell] = made(rows=[row], gpus=[ranks]).cells
    assert cell.name == row.name
    assert cell.resident == report.resident
    assert (cell.peak.total, cell.peak.by_band) == (report.peak.total, report.peak.by_band)
    assert (cell.peak.unit, cell.peak.phase) == (report.peak.unit, report.peak.phase)
    moved = {(each.collective, each.band): (each.sent, each.messages) for each in cell.traffic}
    assert moved == {key: (traffic.sent[0], traffic.messages) for key, traffic in report.traffic.items()}
    assert cell.flops == {phase: count for phase, count in report.flops.items() if count}


@pytest.mark.parametrize("convention", ["zero", "deepspeed", "fsdp2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_search_that_sends_nothing_holds_the_same_bytes_at_every_instant(convention: str, micro_batches: int) -> None:
    """Under every convention and row: each hold and free of a step, in order, with what is held after it."""
    rules, given = conventions.convention(convention), {"convention": convention, "accumulate": micro_batches}
    for row in [*rules.rows(), *([HSDP, HPZ, ZeRO3Kept] if convention == "fsdp2" else [])]:
        runner = Runner(models.read(TEXT), ask(**given, rows=[row], network=Network(node=3)))
        for ranks in (2, 6):
            if row.two_axes and ranks % 3:
                continue
            unsent = runner._run(row, ranks, None)
            sent = runner.run(row, ranks)
            assert isinstance(unsent, StepRun)
            assert sent.traffic
            assert not unsent.traffic
            assert _held(sent) == _held(unsent)
            assert (sent.resident, sent.peak, sent.flops) == (unsent.resident, unsent.peak, unsent.flops)


def _held(run: StepRun) -> list[tuple[object, ...]]:
    return [
        (event.kind, event.name, event.unit, event.nbytes, event.held)
        for event in run.report.events
        if event.kind in (EventKind.HOLD, EventKind.FREE, EventKind.HOST_HOLD, EventKind.HOST_FREE)
    ]


def test_the_convention_s_precision_and_wire_reach_the_schedule() -> None:
    """Mixed precision holds 16 bytes per parameter under data parallel and sends 2 of them around the ring."""
    found = made(rows=[DP], gpus=[5])
    [cell] = found.cells
    assert found.precision == "mixed"
    assert cell.at_rest == 16 * sum(-(-size // 5) * 5 for size in (67 * 131 + 131, 131 * 127 + 127, 127 * 61 + 61))
    assert cell.sent == 2 * 4 * 2 * sum(-(-size // 5) for size in (67 * 131 + 131, 131 * 127 + 127, 127 * 61 + 61))


@pytest.mark.parametrize(
    ("options", "bands"),
    [
        ({"optimizer": "momentum"}, {Band.MOMENTUM}),
        ({"optimizer": "adam"}, {Band.EXP_AVG, Band.EXP_AVG_SQ}),
        ({"optimizer": "sgd"}, set()),
        ({"precision": "fp32"}, {Band.EXP_AVG, Band.EXP_AVG_SQ}),
        ({"precision": "mixed-main-grads"}, {Band.EXP_AVG, Band.EXP_AVG_SQ, Band.MAIN_GRADS}),
    ],
)
def test_optimizer_and_precision_decide_the_bands(options: dict[str, str], bands: set[Band]) -> None:
    """A rank holds the states of the optimizer and of the recipe that were asked for, and no other."""
    [cell] = made(rows=[ZeRO1], gpus=[5], **options).cells
    always = {Band.PARAMS, Band.GRADS, *([] if options.get("precision") == "fp32" else [Band.MASTER])}
    assert set(cell.resident) == {str(band) for band in always | bands}


def test_accumulation_gathers_again_for_every_micro_batch() -> None:
    """Under ZeRO-3 each further micro-batch sends what the first did; under data parallel none sends anything."""
    once, thrice = made(rows=[DP, ZeRO3], gpus=[5]), made(rows=[DP, ZeRO3], gpus=[5], accumulate=3)
    assert [cell.sent for cell in thrice.cells] == [once.cells[0].sent, 3 * once.cells[1].sent]


def test_a_checkpointed_model_keeps_less_and_computes_more() -> None:
    """Full checkpointing adds a forward to the backward's FLOPs."""
    plain, less = (made(rows=[ZeRO3], gpus=[5], checkpoint=each).cells[0] for each in ("none", "full"))
    assert less.flops["backward"] == plain.flops["backward"] + plain.flops["forward"]


def test_prefetch_holds_more_gathered_layers_at_the_peak() -> None:
    """With one layer gathered ahead two of them are there at the peak."""
    without, with_one = (made(rows=[ZeRO3], gpus=[5], prefetch=ahead).cells[0] for ahead in (0, 1))
    assert with_one.peak.by_band[Band.GATHERED] > without.peak.by_band[Band.GATHERED]


def test_units_in_a_row_are_counted_together() -> None:
    """Layers of one size stand as one entry with their number; all of them together are the model."""
    model = made(model="7,7,7,7,5", rows=[DP], gpus=[2], asked=[2]).model
    assert [(unit.params, unit.count) for unit in model.units] == [(7 * 7 + 7, 3), (7 * 5 + 5, 1)]
    assert sum(unit.params * unit.count for unit in model.units) == model.params == model.trainable


# -- a card


def test_a_step_fits_exactly_from_its_peak_on() -> None:
    """With a card of the peak's size there is no room left and it fits; with a byte less a hold fails, and is named."""
    peak = made(rows=[ZeRO2], gpus=[5]).cells[0].peak.total
    [cell] = made(rows=[ZeRO2], gpus=[5], memory=peak).cells
    assert (cell.room, cell.fits, cell.shortage) == (0, True, None)
    [cell] = made(rows=[ZeRO2], gpus=[5], memory=peak - 1).cells
    assert (cell.room, cell.fits) == (-1, False)
    assert cell.shortage is not None
    assert sum(cell.shortage.held.values()) + cell.shortage.asked == peak


def test_the_smallest_number_fits_and_the_one_below_it_does_not() -> None:
    """The schedule itself confirms each smallest N: it runs on so many ranks, and not on one fewer."""
    memory = 9 * PARAMS
    found = made(memory=memory, gpus=[5])
    assert found.smallest[0].ranks is None
    for each in found.smallest[1:]:
        assert each.ranks is not None
        for ranks, fits in ((each.ranks, True), (each.ranks - 1, False)):
            scheme_runs = _runs(each.row, ranks, memory)
            assert scheme_runs is fits, (each.row.name, ranks)
        assert each.states_alone is not None
        assert each.states_alone <= each.ranks


def _runs(row: Stage, ranks: int, capacity: int, rows: int = 3) -> bool:
    model = Shapes(MLP(WIDTHS))
    try:
        row(model, ranks, ring=DryRing(ranks), wire="fp16", capacity=capacity).step(model.batch(rows))
    except OutOfMemory:
        return False
    return True


def test_the_largest_micro_batch_fits_and_one_row_more_does_not() -> None:
    """The schedule itself confirms each largest micro-batch; where one row is too many it is 0."""
    memory = 9 * PARAMS
    found = made(memory=memory, gpus=[5])
    assert [each.micro_batch > 0 for each in found.largest] == [False, True, True, True]
    for each in found.largest:
        assert each.micro_batch == 0 or _runs(each.row, 5, memory, each.micro_batch)
        assert not _runs(each.row, 5, memory, each.micro_batch + 1)


def test_the_lowest_stage_that_fits() -> None:
    """It is the first in the table whose peak a card holds; None where none is."""
    found = made(memory=9 * PARAMS, gpus=[5])
    assert [cell.fits for cell in found.at(5)] == [False, True, True, True]
    assert found.first_fit(5) is found.at(5)[1]
    assert found.first_fit(7) is None


def test_where_no_number_of_gpus_helps_the_unit_and_the_card_are_named() -> None:
    """One layer of many is larger than the card: the layer, and the smallest card that would do, which does."""
    widths = "11,11,509,503,11,11"
    found = made(model=widths, memory=200_000, gpus=[5], rows=[DP, ZeRO3])
    assert found.no_fit is not None
    assert all(each.ranks is None for each in found.smallest)
    assert found.no_fit.peak.unit == "layer 3"
    assert found.no_fit.peak.by_unit["layer 3"] > 200_000
    again = made(model=widths, memory=found.no_fit.peak.total, gpus=[5], rows=[DP, ZeRO3])
    assert again.no_fit is None
    assert [each.ranks is not None for each in again.smallest] == [False, True]
    text = " ".join(verdict.answers(found))
    assert f"{found.no_fit.peak.total:,} bytes" in text
    assert "layer 3 alone" in text
    assert "which takes the least of those tried" in text


def test_what_would_help_was_tried() -> None:
    """Each option that is named takes what is said when it is followed; what takes no less is not named, and where data
    parallel alone was asked for a scheme that shards is."""
    found = made(gpus=[5], memory=1000, rows=[DP], micro_batch=64)
    assert found.no_fit is not None
    named = {each.option: each for each in found.no_fit.remedies}
    assert set(named) == {"--scheme zero3", "--micro-batch 32"}, "checkpointing takes no less of a perceptron"
    for option, asked in {
        "--scheme zero3": {"rows": [ZeRO3], "gpus": [5], "micro_batch": 64},
        "--micro-batch 32": {"rows": [DP], "gpus": [1], "micro_batch": 32},
    }.items():
        [cell] = made(**{"asked": asked["gpus"], **asked}).cells
        assert (named[option].peak, named[option].ranks) == (cell.peak.total, cell.ranks)
        assert f"{option} takes {sizes.text(cell.peak.total)}" in " ".join(verdict.answers(found))
    enough = made(gpus=[5], memory=named["--scheme zero3"].peak, rows=[DP], micro_batch=64)
    assert enough.no_fit is not None
    assert enough.no_fit.remedies[0].option == "--scheme zero3"
    assert enough.no_fit.remedies[0].fits
    least = made(gpus=[5], memory=1000, rows=[ZeRO3], micro_batch=1)
    assert least.no_fit is not None
    assert not any(each.option.startswith(("--micro", "--scheme")) for each in least.no_fit.remedies)


def test_a_higher_stage_that_takes_more_is_pointed_out_with_its_cause() -> None:
    """DeepSpeed's bucket, held in full, costs ZeRO-2 more than it saves: the plan says so and names the band."""
    found = made(convention="deepspeed", gpus=[5])
    [rest, *_] = [odd for odd in found.surprises if odd.higher == "ZeRO-2 on 5"]
    bucket = 2 * 500_000_000
    grads = found.at(5)[1].resident["grads"] - found.at(5)[2].resident["grads"]
    assert (rest.lower, rest.quantity, rest.band, rest.band_more) == (
        "ZeRO-1 on 5",
        "at rest",
        "gradient bucket",
        bucket,
    )
    assert rest.more == bucket - grads
    assert any("the cause is gradient bucket" in line for line in verdict.reasons(found))


def test_where_no_band_is_the_whole_cause_none_is_called_so() -> None:
    """Padding makes every state of data parallel grow; the one that grows most is named as that and no more."""
    found = made(model="8,16,8", asked=[64], gpus=[8, 64], rows=[DP])
    [odd] = found.surprises
    assert odd.band_more < odd.more
    assert any("what grew most is master" in line for line in verdict.reasons(found))


@pytest.mark.parametrize("convention", ["zero", "deepspeed", "fsdp2", "megatron"])
def test_what_cards_hold_together_is_no_less_than_one_alone(convention: str) -> None:
    """Under every convention and row, at rest: so that many cards are known to be too few without being tried."""
    rules = conventions.convention(convention)
    runner = Runner(models.read("11,13,17,13,11"), ask(convention=convention, network=Network(node=3)))
    for row in [*rules.rows(), *([HSDP, HPZ, ZeRO3Kept] if convention == "fsdp2" else [])]:
        for ranks in (1, 2, 3, 6, 12):
            if row.two_axes and ranks % 3:
                continue
            rest = runner.start(row, ranks, sends=False).ledger.total
            assert runner.holds_states(row, ranks, rest)
            assert not runner.holds_states(row, ranks, rest - 1)
            assert not runner._too_few(row, ranks, rest)
        assert runner._too_few(row, 4, (runner._alone[row] - 1) // 4)


@pytest.mark.parametrize("convention", ["zero", "deepspeed"])
def test_the_least_peak_is_that_of_all_runs_to_their_ends(convention: str) -> None:
    """Runs that are cut short at the least so far, and those not made, need more: row, N and peak are those of all."""
    found = made(convention=convention, memory=1000)
    assert found.no_fit is not None
    runner, rows = Runner(models.read(TEXT), found.question), found.question.rows
    peaks = {
        (runner._run(row, ranks, None).peak.total, -place, ranks): row  # type: ignore[union-attr]
        for place, row in enumerate(rows)
        for ranks in ([*range(1, 17), plan.MOST_RANKS] if row.optimizer else [1])
    }
    least = min(peaks)
    assert (found.no_fit.peak.total, found.no_fit.ranks, found.no_fit.row) == (least[0], least[2], peaks[least])


def test_the_smallest_card_is_that_of_the_stage_that_needs_least() -> None:
    """DeepSpeed's bucket of 5e8 elements makes stages 2 and 3 of a small model larger than stage 1: no card of 1 GB is
    needed. On a card of the size that is named it fits, on one a byte smaller on none."""
    found = made(convention="deepspeed", memory=1000)
    assert found.no_fit is not None
    least = found.no_fit.peak.total
    assert found.no_fit.row == ZeRO1
    assert least < min(cell.peak.total for cell in found.cells)
    again = made(convention="deepspeed", memory=least)
    assert [each.ranks for each in again.smallest] == [None, found.no_fit.ranks, None, None]
    assert made(convention="deepspeed", memory=least - 1).no_fit is not None


def test_the_smallest_number_is_none_above_one_that_the_table_shows_to_fit() -> None:
    """With rows padded to N, 24 GPUs share 24 rows out evenly; 16 and 32 take more, and doubling N passes 24 by."""
    found = made(model="600,24,600", convention="fsdp2", rows=[ZeRO3], asked=[24], gpus=[16, 24, 32], micro_batch=1)
    less, even, more = (cell.peak.total for cell in found.cells)
    assert even < min(less, more)
    found = made(
        model="600,24,600", convention="fsdp2", rows=[ZeRO3], asked=[24], gpus=[24], micro_batch=1, memory=even
    )
    assert [each.ranks for each in found.smallest] == [24]
    assert found.no_fit is None


def test_a_bucket_s_size_is_the_convention_s_where_it_has_one() -> None:
    """Under DeepSpeed --bucket is the buffer that is held; under the paper's rules it joins layers."""
    deepspeed = made(convention="deepspeed", bucket=1009, rows=[ZeRO2], gpus=[5]).cells[0]
    assert deepspeed.resident[Band.BUCKET] == 2 * 1009
    joined = made(bucket=PARAMS, rows=[ZeRO2], gpus=[5]).cells[0]
    assert Band.BUCKET not in joined.resident
    assert joined.peak.by_band[Band.UNREDUCED] >= 2 * PARAMS


def test_what_comes_and_goes_is_named_by_unit() -> None:
    """The units at the peak hold what the bands that do not last hold then."""
    for cell in made(gpus=[5]).cells:
        lasting = sum(cell.peak.by_band.get(band, 0) for band in MODEL_STATES)
        assert sum(cell.peak.by_unit.values()) == cell.peak.total - lasting


# -- searching


def test_the_smallest_is_found_with_few_questions() -> None:
    """For every threshold the search finds it, and does not ask about each number."""
    for threshold in (1, 2, 15, 16, 17, 31, 97, 1000):
        asked: list[int] = []
        found = search.smallest(lambda n, t=threshold, seen=asked: seen.append(n) or n >= t, 1000)  # type: ignore[misc]
        assert found == threshold
        assert len(asked) <= 40
    assert search.smallest(lambda n: False, 1000) is None
    assert search.smallest(lambda n: n == 3, 5) == 3


@pytest.mark.parametrize("first", [1, 7, 64])
def test_the_largest_is_found_from_anywhere(first: int) -> None:
    """For every threshold the search finds it, wherever it begins, and 0 if nothing holds."""
    for threshold in (0, 1, 2, 6, 7, 8, 63, 64, 65, 99, 100):
        assert search.largest(lambda n, t=threshold: n <= t, 100, first=first) == threshold  # type: ignore[misc]


# -- the largest model of a family


def test_each_rung_is_the_largest_of_the_family_that_a_card_holds() -> None:
    """The schedule runs the k-th perceptron within the card and not the one after it; a higher stage climbs as far."""
    memory, ranks = 12 * 10**6, 3
    asked = ask(memory=memory, largest_model="mlp", asked=[ranks], gpus=[ranks], rows=[DP, ZeRO3])
    found = largest_model.added(plan.make(models.read(asked.model), asked, lambda doing: None), lambda doing: None)
    assert found.largest_models is not None
    rungs = found.largest_models.found
    for rung in rungs:
        for size, fits in ((rung.size, True), (rung.size + 1, False)):
            _, source = largest_model.FAMILIES["mlp"].member(size)
            assert Runner(source, asked).fits(rung.row, ranks, memory) is fits
        assert rung.params == 16 * ((128 * rung.size) ** 2 + 128 * rung.size)
    assert all(low.size <= high.size for low, high in pairwise(rungs))
    assert rungs[0].size < rungs[-1].size


# -- the record, and how it is shown


def test_a_plan_is_written_and_read_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """What is written reads back equal, says its schema, and a damaged file is refused."""
    found = made(memory=9 * PARAMS, gpus=[5], rows=[DP, ZeRO2])
    records.save(found, tmp_path / "plan.json")
    again = records.load(tmp_path / "plan.json")
    assert msgspec.to_builtins(again) == msgspec.to_builtins(found)
    assert again.schema == "zerosim.plan/4"
    (tmp_path / "plan.json").write_bytes(records.encode(found)[:-20])
    with pytest.raises(ValueError, match=r"not a whole record of zerosim\.plan/4"):
        records.load(tmp_path / "plan.json")


def test_the_record_s_fields_are_what_is_documented() -> None:
    """The layout of zerosim.plan/4: who changes it gives it another number."""
    fields = {
        kind.__name__: kind.__struct_fields__
        for kind in (
            records.Plan,
            records.Cell,
            records.Peak,
            records.Traffic,
            records.SmallestRanks,
            records.LargestBatch,
        )
    }
    assert fields == {
        "Plan": (
            "schema", "created", "versions", "question", "precision", "kept", "model", "cluster", "cells", "others",
            "smallest", "largest", "no_fit", "surprises", "estimates", "largest_models", "why", "left_out",
        ),
        "Cell": (
            "row", "ranks", "resident", "peak", "traffic", "flops", "room", "reserve", "shortage", "time", "saved",
            "host",
        ),
        "Peak": ("total", "by_band", "unit", "phase", "by_unit"),
        "Traffic": ("collective", "band", "sent", "messages", "between"),
        "SmallestRanks": ("row", "ranks", "states_alone", "limit"),
        "LargestBatch": ("row", "ranks", "micro_batch", "at_least"),
    }  # fmt: skip


@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_chart_is_a_file_of_the_form_that_was_asked_for(form: str) -> None:
    """Each form begins as such files do."""
    found = made(rows=[ZeRO1, ZeRO2], convention="deepspeed")
    assert chart.drawn(found, form).startswith({"png": b"\x89PNG", "svg": b"<?xml"}[form])


def test_every_bar_is_a_peak_and_every_part_a_band() -> None:
    """The heights of the chart's rectangles are the bands of the records, in the unit of the scale."""
    found = made()
    figure = chart.peaks(found)
    bars: list[Any] = [patch for axes in figure.axes for patch in axes.patches]
    drawn = sorted(round(bar.get_height() * 10**3) for bar in bars)  # from kB
    assert drawn == sorted(nbytes for cell in found.cells for nbytes in cell.peak.by_band.values())


def test_the_tables_say_gb_or_gib() -> None:
    """Every size in the terminal has its unit; a card in GiB is answered in GiB."""
    for binary, unit, other in ((False, " kB", "KiB "), (True, " KiB", " kB ")):
        found = made(binary=binary, gpus=[5])
        output = _shown(found)
        rows = [line for line in output.splitlines() if line.strip().startswith(("ZeRO", "data parallel"))]
        assert rows
        assert all(unit in line for line in rows[:3])
        assert not any(other in line for line in rows[:3])


def _shown(found: Plan) -> str:
    import io

    from rich.console import Console

    out = io.StringIO()
    console.show(found, Console(file=out, width=200), estimates=True)
    return out.getvalue()


def test_estimators_stand_beside_with_their_reasons() -> None:
    """Each formula has a number, our ledger's beside it, and a reason where the two differ."""
    found = made(convention="deepspeed", gpus=[5])
    assert {each.ours for each in found.estimates} == {
        sum(nbytes for band, nbytes in cell.resident.items()) for cell in found.cells
    }
    assert all(each.why for each in found.estimates if each.nbytes != each.ours)
    output = _shown(found)
    words = " ".join(output.split())
    for each in found.estimates:
        assert each.name.split(",")[0] in words
        assert each.nbytes == each.ours or each.why in words


@pytest.mark.parametrize(
    ("nbytes", "text", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1.00 kB", "1,000 B"),
        (80 * 10**9, "80.0 GB", "74.5 GiB"),
        (999_999_999, "1.00 GB", "954 MiB"),
        (-5 * 10**9, "-5.00 GB", "-4.66 GiB"),
        (10**18, "1,000 PB", "888 PiB"),
    ],
)
def test_sizes_are_written_in_both_kinds_of_units(nbytes: int, text: str, binary: str) -> None:
    """Powers of ten and of two, in the largest unit that is reached, three digits."""
    assert sizes.text(nbytes) == text
    assert sizes.text(nbytes, binary=True) == binary
