"""The lab with rows of two orders, nodes and hosts: what it records, what it prints, and what it cannot be told."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from helpers import lab_settings, plain_lab
from zerosim import theory
from zerosim.lab import suite
from zerosim.lab.experiment import job_of, model_of
from zerosim.lab.record import load
from zerosim.records import results
from zerosim.records.consistency import contradictions
from zerosim.records.results import Results
from zerosim.report import lab_console, offline, page_tables, plots, trace
from zerosim.schemes import DP, SCHEMES, ZeRO1, ZeRO3
from zerosim.stages import HFSDP, HPZ, HSDP, ROWS, Infinity, Offload1, Offload2

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SOME = (DP, ZeRO3, HSDP, HPZ, Offload2)


@pytest.fixture(scope="module")
def found() -> Results:
    """Some rows on two nodes of three, in fp32, where the orders come apart."""
    return suite.run(lab_settings(ranks=6, node=3, precision="fp32"), rows=SOME)


def printed(found: Results) -> str:
    """What the terminal shows, in lines of whatever length."""
    out = io.StringIO()
    lab_console.show(found, Path("out"), Console(file=out, width=110), verbose=True)
    return " ".join(out.getvalue().split())


# -- every row


@pytest.mark.parametrize(
    "changes",
    [
        {"node": 3},
        pytest.param({"node": 2}, marks=pytest.mark.slow),
        pytest.param({"node": 3, "precision": "bf16", "wire_params": "int8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_rows_hold_every_check(changes: dict[str, Any]) -> None:
    """Bits, bytes and the stricter world, for every N that nodes divide."""
    found = suite.run(lab_settings(ranks=6, **changes), rows=ROWS)
    assert found.failures == []
    assert list(contradictions(found)) == []


def test_each_order_is_compared_within_itself_and_measured_from_the_first(found: Results) -> None:
    """Every row but those with nothing to compare; and per step one distance, of HSDP from data parallel."""
    names = ["data parallel", "ZeRO-3", "hpZ", "ZeRO-Offload 2", "HSDP"]  # HSDP's replicas have copies to compare
    assert [(each.scheme, each.step) for each in found.differences] == [
        (name, step) for step in (1, 2) for name in names
    ]
    assert not any(any(each.differing.values()) for each in found.differences)
    assert [(each.scheme, each.step) for each in found.between_orders] == [("HSDP", 1), ("HSDP", 2)]
    assert all(0 < each.largest["params"] < 1e-6 for each in found.between_orders)
    assert found.failures == []


def test_with_int8_every_way_of_gathering_is_an_order() -> None:
    """Data parallel sends nothing; ZeRO-1 and ZeRO-3 round other parameters, and so train otherwise."""
    found = suite.run(lab_settings(ranks=4, wire_params="int8"), rows=SCHEMES)
    assert found.failures == []
    assert [each.scheme for each in found.between_orders] == ["ZeRO-1", "ZeRO-3"] * 2
    losses = {record.name: record.steps[-1].loss for record in found.schemes}
    assert losses["ZeRO-1"] == losses["ZeRO-2"]
    assert losses["ZeRO-1"] != losses["data parallel"]
    # In the first step ZeRO-1 has gathered nothing yet.
    assert [each.differing["exp_avg"] > 0 for each in found.between_orders] == [False, True, True, True]
    assert found.parting() == (
        "parameters are rounded to int8 where they are sent, and these rows send other pieces of them"
    )


def test_int8_beside_the_exact_run() -> None:
    """The lab shows what is saved and what becomes of the loss, wherever there are master weights."""
    found = plain_lab(lab_settings(ranks=4, widths=[64, 128, 3]), rows=[ZeRO3])
    beside = found.ablations.int8_params
    assert beside is not None
    job = job_of(found.settings, model_of(found.settings), ZeRO3, 4)
    exact, rounded = (theory.traffic(each) for each in (job, dataclasses.replace(job, wire_params="int8")))
    assert beside.sent_exact == sum(sum(bands.values()) for bands in exact.values())
    assert beside.sent == sum(sum(bands.values()) for bands in rounded.values())
    assert beside.losses_exact == [step.loss for step in found.schemes[0].steps]
    assert beside.losses[0] != beside.losses_exact[0]
    assert f"{beside.sent:,} B instead of {beside.sent_exact:,}" in printed(found)
    assert plain_lab(lab_settings(ranks=2, precision="fp32"), rows=[ZeRO3]).ablations.int8_params is None


# -- links and places


def test_links_and_places_are_recorded_and_shown(found: Results) -> None:
    """What left each node and crossed the host link, and what the host held, beside what was predicted."""
    for record in found.schemes:
        job = job_of(found.settings, model_of(found.settings), record.row, 6)
        step = record.steps[-1]
        outside = {
            name: {band: sum(ranks[:3]) for band, ranks in bands.items()} for name, bands in theory.outside(job).items()
        }
        assert step.node_outside() == sum(sum(bands.values()) for bands in outside.values())
        assert step.copied() == sum(theory.copies(job).values())
        assert step.host == {str(band): nbytes for band, nbytes in theory.host_resident(job).items() if nbytes}
        assert step.host_peak.total == sum(theory.host_peak(job).values())
    text = printed(found)
    assert "nodes of 3" in text
    hpz = found.scheme("hpZ").steps[-1]
    assert f"hpZ {hpz.sent():,} {hpz.node_outside():,} 0 0 0" in text
    offloaded = found.scheme("ZeRO-Offload 2").steps[-1]
    assert f"{offloaded.copied():,} {sum(offloaded.host.values()):,} {offloaded.host_peak.total:,}" in text
    assert "all schemes of one order alike" in text
    assert "one adds the gradients of all ranks in a ring" in text
    html = offline.written(*page_tables.tables(found))
    assert 'id="links"' in html
    assert 'id="between"' in html
    headline = plots.loss(found)._suptitle  # type: ignore[attr-defined]
    assert " ".join(headline.get_text().split()) == (
        "Training on 6 ranks: 5 schemes of 2 orders, in each of which all weights are the same bits"
    )


def test_where_there_are_no_links_none_are_shown() -> None:
    """Four schemes without nodes look as they always have."""
    found = plain_lab(lab_settings(ranks=2), rows=SCHEMES)
    text = printed(found)
    assert "by link" not in text
    assert "Between orders" not in text
    assert "all schemes alike, bit for bit" in text
    html = offline.written(*page_tables.tables(found))
    assert 'id="links"' not in html
    assert found.parting() == ""


def test_a_host_without_memory_is_recorded_as_such(tmp_path: Path) -> None:
    """Which place was full, what was there, and what was on the card; the others go on, and the file can be read."""
    asked = lab_settings(ranks=6, node=2)
    need = sum(theory.host_peak(job_of(asked, model_of(asked), Infinity, 6)).values())
    found = suite.run(replace(asked, host_capacity=need - 1), rows=[ZeRO3, Offload1, Infinity])
    assert found.failures == []
    short = found.scheme("ZeRO-Infinity").out_of_memory
    assert short is not None
    assert (short.place, sum(short.held.values()) + short.asked > need - 1) == ("host", True)
    assert [record.name for record, _ in found.completed()] == ["ZeRO-3", "ZeRO-Offload 1"]
    assert "held on the host" in printed(found)
    assert "on the host" in offline.written(*page_tables.summary(found))
    assert any("on the host" in str(entry.get("name")) for entry in trace.trace(found)["traceEvents"])
    plots.timeline(found)
    results.save(found, tmp_path / "results.json")
    assert load(tmp_path / "results.json") == found
    enough = plain_lab(replace(asked, host_capacity=need), rows=[Infinity])
    assert len(enough.completed()) == 1


@pytest.mark.parametrize("rows", [[HSDP], [DP, HFSDP]], ids=["alone", "among others"])
def test_groups_without_nodes_are_refused_before_anything_runs(rows: list[Any]) -> None:
    """The first that needs them says so; with them it runs."""
    with pytest.raises(ValueError, match="within groups of ranks"):
        suite.validate(lab_settings(ranks=4), rows)
    suite.validate(lab_settings(ranks=4, node=2), rows)


# -- what the records cannot say


def edited(found: Results, name: str, change: Callable[[Any], Any]) -> Results:
    """The results with another last step of that scheme."""
    schemes = [
        replace(record, steps=[*record.steps[:-1], change(record.steps[-1])]) if record.name == name else record
        for record in found.schemes
    ]
    return replace(found, schemes=schemes)


def moved(**changes: Any) -> Callable[[Any], Any]:
    return lambda step: replace(step, traffic=[replace(step.traffic[0], **changes), *step.traffic[1:]])


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("hpZ", moved(node_outside=1), "1 B should be what the ranks of each node sent outward"),
        ("hpZ", moved(outside=[10**9] * 6, node_outside=3 * 10**9), "sent more out of a node than it sent"),
        ("hpZ", moved(outside=[0]), "bytes out of its node has 1 entries for 6 ranks"),
        ("ZeRO-Offload 2", lambda step: replace(step, copies={"cloud": {"grads": 1}}), "no place is called 'cloud'"),
        ("ZeRO-Offload 2", lambda step: replace(step, copies={}), "not what is predicted, and no failure says so"),
        ("ZeRO-Offload 2", lambda step: replace(step, host={"grads": 10**9}), "no instant on the host can be higher"),
        ("ZeRO-3", lambda step: replace(step, host={"nothing": 0}), "no band at rest on the host is called 'nothing'"),
        ("HSDP", lambda step: replace(step, loss=step.loss + 1), None),
        ("ZeRO-3", lambda step: replace(step, loss=step.loss + 1), "losses differ in step 2, and no failure says so"),
    ],
)
def test_records_that_contradict_themselves_are_refused(
    found: Results, name: str, change: Callable[[Any], Any], reason: str | None
) -> None:
    """A loss that is another order's alone, is none: nobody else's is to be compared with it."""
    reasons = list(contradictions(edited(found, name, change)))
    assert not reasons if reason is None else any(reason in each for each in reasons), reasons


@pytest.mark.parametrize(
    ("kind", "reason"), [("send", "leave each node, by its record"), ("hold", "nothing leaves a node but what is sent")]
)
def test_a_log_that_sends_other_bytes_out_of_a_node_is_refused(found: Results, kind: str, reason: str) -> None:
    """What the entries of a log say left a node comes to what the step's record says, and only messages leave."""
    first, *others = found.schemes
    at = next(index for index, event in enumerate(first.events) if event.kind == kind)
    events = [replace(event, outside=event.outside + 1) if i == at else event for i, event in enumerate(first.events)]
    reasons = list(contradictions(replace(found, schemes=[replace(first, events=events), *others])))
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_distances_between_orders_belong_to_their_steps(found: Results) -> None:
    """One that is missing, or of a row that is first of no order, is refused."""
    for between in (found.between_orders[:1], [replace(each, scheme="ZeRO-3") for each in found.between_orders]):
        reasons = list(contradictions(replace(found, between_orders=between)))
        assert any("2 distances between orders" in each for each in reasons)


def test_results_survive_a_file(found: Results, tmp_path: Path) -> None:
    """Rows with groups, kept copies and places among them."""
    results.save(found, tmp_path / "results.json")
    again = load(tmp_path / "results.json")
    assert msgspec.json.encode(again) == msgspec.json.encode(found)
    assert [record.row for record in again.schemes] == list(SOME)


def test_the_rows_ran_as_their_settings_say() -> None:
    """``Settings.order`` is the row's, for as many ranks as are asked about."""
    asked = lab_settings(ranks=4, node=2)
    assert asked.order(HSDP) != asked.order(ZeRO3)
    assert asked.order(HSDP, 2) == asked.order(ZeRO3, 2)  # a single group
    assert asked.order(ZeRO1) == asked.order(HPZ)
