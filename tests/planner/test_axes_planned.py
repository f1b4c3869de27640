"""Rows with groups, with copies that are kept and with states on the host, as plans."""

from __future__ import annotations

from typing import Any

import pytest

import zerosim as zs
from zerosim.planner import question
from zerosim.planner.cards import CARDS
from zerosim.records.plan import Cell
from zerosim.report import plan_time
from zerosim.stages import DP, HPZ, HSDP, ROWS, Stage, ZeRO1, ZeRO2, ZeRO3, ZeRO3Kept
from zerosim.util import sizes

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

MLP = [256, 1024, 256]
PARAMS = 256 * 1024 + 1024 + 1024 * 256 + 256
RANKS, NODE = 16, 4
NODES = RANKS // NODE


def cells(**options: object) -> list[Cell]:
    """The cells of a plan by the rules of the paper, whose padding is plain, unless told otherwise."""
    given = {"gpus": RANKS, "node_size": NODE, "convention": "zero", "precision": "bf16"} | options
    return zs.plan(MLP, **given).record.cells  # type: ignore[arg-type]


def between(cell: Cell) -> dict[tuple[str, str], int]:
    """Bytes that leave a node, by collective and band."""
    return {(each.collective, each.band): each.between for each in cell.traffic if each.between}


def test_every_row_has_a_name_that_can_be_typed() -> None:
    """As the field calls them, however they are punctuated; each stands for one row."""
    assert question.rows(question.NAMED) == list(ROWS)
    typed = question.rows(["hsdp-kept, ZeRO3_kept", "hpz,mics", "ddp"])
    assert typed == [row for row in ROWS if row in (DP, HSDP, ZeRO3Kept, HPZ) or row.name == "HSDP, kept"]


def test_what_leaves_a_node_is_one_rank_s_ring_or_every_rank_s_replica_ring() -> None:
    """In a ring of all, one rank of each node sends outward; of HSDP only the all-reduce of the shards leaves, of all
    ranks; each as many bytes as the schedule sends."""
    row, hsdp, hpz = cells(rows=[ZeRO3, HSDP, HPZ])
    whole = {(each.collective, each.band): each.sent for each in row.traffic}
    assert between(row) == whole
    sent = {(each.collective, each.band): each.sent for each in hsdp.traffic}
    assert between(hsdp) == {("all-reduce", "grads"): NODE * sent["all-reduce", "grads"]}
    gathered = between(hpz)["all-gather", "params"]
    assert gathered == whole["all-gather", "params"] // 2  # forward's alone; backward's stays in the node


def test_ranks_in_turn_put_the_groups_across_nodes() -> None:
    """Neighbours are then on different nodes: all that a group sends leaves, and its replicas are on one node."""
    [hsdp] = cells(rows=[HSDP], placement="round robin")
    sent = {(each.collective, each.band): each.sent for each in hsdp.traffic}
    inner = {key: NODE * nbytes for key, nbytes in sent.items() if key[0] != "all-reduce"}
    assert between(hsdp) == inner
    [whole] = cells(rows=[ZeRO3], placement="round robin")
    assert whole.between == NODE * whole.sent


def test_each_collective_s_time_is_of_the_ring_that_it_goes_round() -> None:
    """With a slow network HSDP waits for its all-reduce alone; in turn on the nodes, for all that its groups send."""
    slow = {"node_bandwidth": "1MB/s", "latency": 1e-6, "node_latency": 1e-6}
    whole, hsdp = cells(rows=[ZeRO3, HSDP], **slow)
    [turned] = cells(rows=[HSDP], placement="round robin", **slow)
    for cell in (whole, hsdp):
        assert cell.time is not None
        assert cell.time.bandwidth == pytest.approx(cell.between / 1e6, rel=1e-3)
    assert turned.time is not None
    assert turned.time.bandwidth == pytest.approx(turned.between / 1e6, rel=1e-3)
    assert turned.between > whole.between > hsdp.between


def test_what_goes_over_the_host_s_link_takes_its_time() -> None:
    """A step is no shorter than its copies; on a card that computes and sends at once it is bound by them."""
    [cell] = cells(rows=[ZeRO2], offload="optimizer", gpus=2)
    assert cell.host is not None
    assert cell.time is not None
    link = cell.host.copied / CARDS["H100"].host
    assert cell.time.overlapped >= link
    [fast] = cells(rows=[ZeRO2], offload="optimizer", gpus=2, peak=1e9, bandwidth="1PB/s", latency=1e-9)
    assert fast.time is not None
    assert (fast.time.overlapped, fast.time.binding) == (link, "bandwidth to the host")


def test_the_optimizer_s_pass_on_the_host_is_in_no_time_and_that_is_said() -> None:
    """A card has neither its FLOPs nor its bytes to do; of how fast a host is nothing is known."""
    [here], [there] = cells(rows=[ZeRO2], gpus=2), cells(rows=[ZeRO2], offload="optimizer", gpus=2)
    assert here.time is not None
    assert there.time is not None
    passed = here.flops["optimizer"] / CARDS["H100"].peak["fp16"]
    assert here.time.compute - there.time.compute == pytest.approx(passed, rel=1e-3)
    assert here.time.estimate is not None
    assert there.time.estimate is not None
    assert here.time.estimate.computing - there.time.estimate.computing > passed
    shown = zs.plan(MLP, rows=[ZeRO2], offload="optimizer", gpus=2, memory="100MB", convention="zero")
    assert "without the optimizer's pass on the host" in "".join(plan_time.sentence(shown.record, 2))


def test_the_optimizer_s_state_on_the_host() -> None:
    """ZeRO-Offload: a card has 2 bytes a parameter at rest, the host 14/N, and 4/N go over the link a step."""
    [cell] = cells(rows=[ZeRO2], offload="optimizer")
    own = sum(-(-size // RANKS) for size in (256 * 1024 + 1024, 1024 * 256 + 256))
    assert (cell.name, cell.resident) == ("ZeRO-2, optimizer on the host", {"params": 2 * own * RANKS})
    assert cell.host is not None
    assert (sum(cell.host.resident.values()), cell.host.copied) == (14 * own, 4 * own)


@pytest.mark.parametrize(
    ("row", "offload", "card", "host"),
    [
        (ZeRO2, "optimizer", 2 * PARAMS, 6 * PARAMS * RANKS),
        (ZeRO3, "optimizer", 4 * 1024 * 257 + 2 * PARAMS // RANKS, 24 * PARAMS // NODES),
        (ZeRO3, "params", 4 * 1024 * 257, 27 * PARAMS // NODES),
    ],
)
def test_deepspeed_s_estimators_stand_beside_as_they_are_coded(row: Stage, offload: Any, card: int, host: int) -> None:
    """On a card, and on the host of a node; the other estimators know nothing of it."""
    plan = zs.plan(
        MLP, gpus=RANKS, node_size=NODE, rows=[row], convention="deepspeed", precision="bf16", offload=offload
    ).record
    assert [(each.quantity, each.nbytes) for each in plan.estimates] == [("at rest", card), ("on the host", host)]
    [cell] = plan.cells
    assert cell.host is not None
    assert plan.estimates[1].ours == NODE * sum(cell.host.resident.values())


def test_a_node_s_memory_is_for_all_its_ranks() -> None:
    """What is offloaded must fit on the host as well; the same question with a byte less does not."""
    [cell] = cells(rows=[ZeRO3], offload="params", memory="100MB")
    assert cell.host is not None
    assert cell.fits
    assert cell.host.room is None
    needed = NODE * cell.host.peak
    enough, short = (
        cells(rows=[ZeRO3], offload="params", memory="100MB", host_memory=needed - missing)[0] for missing in (0, NODE)
    )
    assert (enough.host and enough.host.room, enough.fits) == (0, True)
    assert (short.host and short.host.room, short.fits, short.tight) == (-NODE, False, False)
    assert short.shortage is not None


def test_what_the_host_holds_and_what_leaves_a_node_are_on_the_screen() -> None:
    """In a sentence, in the verdict where the host is short, and with -v in the table of what is sent."""
    given = {"gpus": RANKS, "node_size": NODE, "rows": [ZeRO3], "offload": "params", "memory": "100MB"}
    found = zs.plan(MLP, **given, host_memory="1MB")  # type: ignore[arg-type]
    [cell] = found.record.cells
    assert cell.host is not None
    text = " ".join(str(found.table()).split())
    assert f"holds {sizes.text(sum(cell.host.resident.values()))} at rest and {sizes.text(cell.host.peak)} at" in text
    assert f"and copies {sizes.text(cell.host.copied)} in a step" in text
    assert f"and a node's host is short of {sizes.text(NODE * cell.host.peak - 10**6)}" in text
    assert f"leaves each node {sizes.text(cell.between)}" in text
    enough = " ".join(str(zs.plan(MLP, **given, host_memory="1GB").table()).split())  # type: ignore[arg-type]
    assert "✓ fits" in enough
    assert "is short of" not in enough


def test_what_cannot_be_offloaded_is_refused() -> None:
    """FSDP2 has no half of it, and whole parameters are not gathered from the host."""
    with pytest.raises(ValueError, match=r"Use offload=\"params\", or convention=\"deepspeed\""):
        zs.plan(MLP, gpus=4, offload="optimizer")
    with pytest.raises(ValueError, match=r"ZeRO-1 keeps them whole\. Use offload=\"optimizer\""):
        cells(rows=[ZeRO1], offload="params")


def test_groups_must_divide_the_ranks() -> None:
    """The error says which sizes do."""
    with pytest.raises(ValueError, match=r"cut into groups of 4\. Use 1, 2, 3, 6"):
        cells(rows=[HSDP], gpus=6)
    [alone] = cells(rows=[HSDP], gpus=2)  # fewer than a node has: one group
    assert alone.between == 0


def test_other_rows_are_looked_at_where_they_are_their_own() -> None:
    """Beside ZeRO-3, by fsdp2's rules: DDP and what is kept; groups where there are several nodes."""
    names = {
        ranks: [cell.name for cell in zs.plan(MLP, gpus=ranks, node_size=4).record.others] for ranks in (1, 4, 8, 10)
    }
    assert names == {
        1: [], 4: ["data parallel", "ZeRO-3, kept"], 8: ["data parallel", "ZeRO-3, kept", "HSDP", "hpZ"],
        10: ["data parallel", "ZeRO-3, kept"],
    }  # fmt: skip
    assert zs.plan(MLP, gpus=8, rows=[ZeRO3]).record.others == []


def test_other_rows_that_cannot_be_run_as_asked_are_left_out() -> None:
    """A bf16 wire carries FSDP2's working copy, and not that of DDP, which computes under autocast in fp32."""
    assert [cell.name for cell in zs.plan(MLP, gpus=4, wire="bf16").record.others] == ["ZeRO-3, kept"]
