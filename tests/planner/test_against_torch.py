"""Plans by the rules of FSDP2 and DDP, held to what torch's own trackers count of torch's own code.

A plan may be a little above: it holds a unit's gradients from the start of its backward, where torch makes them one
after another, while activations go. That is up to a fifth of a block's gradients, and where shards are small, as on 64
ranks, more than a fiftieth of the whole.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

import zerosim as zs  # noqa: E402
from helpers import by_night  # noqa: E402
from planner.torch_memory import Block, Convolution, Images, Model, cross_entropy, fsdp2_peak, images_peak, plain_peak  # noqa: E402
from zerosim.stages import DP, HPZ, HSDP, HSDPKept, Stage, ZeRO3, ZeRO3Kept  # noqa: E402

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

RANKS, NODE = 8, 4
WIDE, LONG = (256, 4, (2, 32)), (64, 6, (16, 128))  # width, blocks, rows of tokens: parameters, or activations count
CASES = [pytest.param(WIDE, id="wide"), pytest.param(LONG, id="long", marks=pytest.mark.slow)]
FSDP2: list[tuple[Stage, dict[str, Any]]] = [(ZeRO3, {}), (HSDP, {"node": NODE})]
KEPT: list[tuple[Stage, dict[str, Any]]] = [
    (ZeRO3Kept, {"reshard": False}), (HPZ, {"reshard": NODE}),
    (HSDPKept, {"node": NODE, "reshard": False}),
]  # fmt: skip


def planned(model: Model, row: Stage, ranks: int, shape: tuple[int, int], **options: Any) -> int:
    """Bytes at the peak, by a plan."""
    found = zs.plan(
        model, gpus=ranks, rows=[row], convention="fsdp2", micro_batch=shape[0], seq=shape[1], wrap=Block,
        loss=cross_entropy, target=lambda rows, seq: torch.empty((rows, seq), dtype=torch.int64), **options,
    )  # fmt: skip
    [cell] = found.record.cells
    return cell.peak.total


def close(ours: int, theirs: int, early: float = 0) -> None:
    """Not below torch by more than what its loss and its step counters take, nor above by more than a fiftieth, or than
    the gradients that are held ``early``, in bytes."""
    most = max(0.02 * theirs, early)
    assert -1e-3 * theirs <= ours - theirs <= most, f"{ours:,} and torch's {theirs:,}: {ours / theirs:.4f}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("row", "given"),
    [*FSDP2, *(pytest.param(*each, marks=pytest.mark.slow) for each in KEPT)],
    ids=lambda each: each.name if isinstance(each, Stage) else "",
)
def test_fully_shard(row: Stage, given: dict[str, Any], case: tuple[int, int, tuple[int, int]]) -> None:
    """Every kind of resharding, on meshes of one axis and of two."""
    model, shape = Model(*case[:2]), case[2]
    close(planned(model, row, RANKS, shape, node_size=NODE), fsdp2_peak(model, RANKS, shape, **given))


def test_the_last_gather_is_there_with_the_loss() -> None:
    """Where parameters stay after forward, the last gather goes once the loss is there: few tokens, large blocks."""
    model, shape = Model(256, 2), (2, 64)
    close(planned(model, ZeRO3Kept, RANKS, shape), fsdp2_peak(model, RANKS, shape, reshard=False))


def test_three_of_a_unit_in_forward() -> None:
    """A unit's parameters are copied out of their buffer while the one before it is there: the most of a step in which
    the head alone is trained."""
    model, shape = Model(256, 3), (1, 8)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    close(planned(model, ZeRO3, RANKS, shape), fsdp2_peak(model, RANKS, shape))


@pytest.mark.parametrize("ranks", [2, *by_night(1)])
def test_the_last_gradient_of_a_unit_stays_while_it_is_reduced(ranks: int) -> None:
    """Of the root that is the head's, beside all of its gradients in fp32: the most of a step with frozen blocks."""
    model, shape = Model(96, 3), (2, 16)
    model.blocks.requires_grad_(False)
    close(planned(model, ZeRO3, ranks, shape, checkpoint="full"), fsdp2_peak(model, ranks, shape, checkpoint=True))


@pytest.mark.parametrize("tied", [True, *by_night(False)])
@pytest.mark.parametrize("checkpoint", [True, *by_night(False)])
@pytest.mark.parametrize("ranks", [2, *by_night(1, 64)])
def test_ties_checkpoints_and_ranks(ranks: int, checkpoint: bool, tied: bool) -> None:
    """The root's gradients, of tied parameters three at a time; blocks that run again; few ranks and many, on which a
    fifth of a block's gradients in 16 bits is more than a fiftieth."""
    model, shape = Model(*WIDE[:2], tied=tied), WIDE[2]
    ours = planned(model, ZeRO3, ranks, shape, checkpoint="full" if checkpoint else "none")
    gradients = 2 * sum(each.numel() for each in model.blocks[0].parameters())
    close(ours, fsdp2_peak(model, ranks, shape, checkpoint=checkpoint), early=gradients / 5)


def test_the_optimizers_own_memory() -> None:
    """foreach has as much again as a moment; a single kernel has none."""
    model, shape = Model(*WIDE[:2]), (1, 8)
    fused = planned(model, ZeRO3, 1, shape, fused=True)
    close(planned(model, ZeRO3, 1, shape), fsdp2_peak(model, 1, shape))
    assert fused <= fsdp2_peak(model, 1, shape, foreach=False)


@pytest.mark.parametrize("shape", [(32, 3, 32, 32), *by_night((1, 3, 4, 4))])
def test_the_callers_batch_is_there_beside_its_cast(shape: tuple[int, ...]) -> None:
    """Images in fp32, of which the forward reads a copy in 16 bits: to the end of the step, in the optimizer too."""
    found = zs.plan(
        Images(), gpus=2, rows=[ZeRO3], convention="fsdp2", micro_batch=shape[0], seq=None, wrap=Convolution,
        loss=cross_entropy, inputs=lambda rows, _: torch.empty(rows, *shape[1:]),
        target=lambda rows, _: torch.empty(rows, dtype=torch.int64),
    )  # fmt: skip
    [cell] = found.record.cells
    close(cell.peak.total, images_peak(2, shape))
    assert not cell.resident.get("activations"), "and goes with it"


@pytest.mark.parametrize("tied", [True, *by_night(False)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("buckets", ["views", *by_night(None, "copies")])
def test_plain_torch_and_ddp(buckets: str | None, case: tuple[int, int, tuple[int, int]], tied: bool) -> None:
    """One card by itself, and DDP with gradients beside its buckets or in them."""
    model, shape = Model(*case[:2], tied=tied), case[2]
    ranks = 2 if buckets else 1
    ours = planned(model, DP, ranks, shape, precision="fp32", bucket_view=buckets == "views")
    close(ours, plain_peak(model, shape, buckets=buckets))


def test_tied_gradients_beside_views_of_buckets() -> None:
    """What autograd adds of tied parameters is apart from DDP's bucket, which it is copied to when all is there."""
    model, shape = Model(96, 1, tied=True), (1, 8)
    ours = planned(model, DP, 2, shape, precision="fp32", bucket_view=True)
    close(ours, plain_peak(model, shape, buckets="views"))
