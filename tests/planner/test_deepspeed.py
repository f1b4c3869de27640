"""DeepSpeed's rules: what is whole and for how long, what the update copies, and where a job's settings come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerosim.bands import Band
from zerosim.options import Options
from zerosim.planner import deepspeed, job_config, models, recipes
from zerosim.planner.fsdp2 import Library
from zerosim.planner.model_source import ModelSource, Prepared, Workload
from zerosim.planner.runner import Runner
from zerosim.planner.step_run import StepRun
from zerosim.records.question import Question, ZeroConfig
from zerosim.schemes import Scheme, ZeRO2, ZeRO3
from zerosim.stages import HPZ, HSDP, Infinity, Offload2, ZeRO3Kept
from zerosim.worlds.dry import DryRing
from zerosim.worlds.shapes import GroupShapes, ModelShapes, ShapeModel, Tensor, UnitShapes

N = 4
BLOCK, SMALL = (4 * 53, 4 * 11), 4 * 5  # a matrix and a vector; 4 divides both
BLOCKS = 3
TABLE = (4 * 7, 4 * 3)  # a tied embedding
MATRIX, TIED = BLOCK[0] * BLOCK[1], TABLE[0] * TABLE[1]
P = BLOCKS * (MATRIX + SMALL) + TIED
HIDDEN = Tensor((1, 1), "bfloat16")


class Stack(ModelSource):
    """Blocks between a tied embedding and head; activations are two bytes each, so that states are what counts."""

    kind, name, sequence, width = "test", "stack", None, None

    def __init__(self, *, tied: bool = True, width: int | None = None) -> None:
        groups = [GroupShapes("embedding", (TABLE,)), *(GroupShapes(f"b{i}", (BLOCK, (SMALL,))) for i in range(BLOCKS))]
        groups += [] if tied else [GroupShapes("head", (TABLE,))]
        chain = [0, *range(1, BLOCKS + 1), 0 if tied else BLOCKS + 1]
        units = [
            UnitShapes(name=f"u{i}", groups=(group,), outputs=(HIDDEN,), grads=(HIDDEN,), feeds=(i - 1,) if i else ())
            for i, group in enumerate(chain)
        ]
        self.shapes = ModelShapes(
            groups=tuple(groups), units=tuple(units), loss=UnitShapes(name="loss", feeds=(len(units) - 1,)),
            inputs=(Tensor((1, 1), "int64"),), target=Tensor((1, 1), "int64"),
        )  # fmt: skip
        self.width = width

    def notes_for(self, sequence: int | None) -> list[str]:
        return []

    def prepare(self, workload: Workload, rows: int) -> Prepared:
        model = ShapeModel(self.shapes, temporaries=True, frees=workload.frees)
        return Prepared(model, model.batch(rows // workload.rows))


NONE: dict[str, Any] = {
    "param_persistence_threshold": 0,
    "max_reuse_distance": 0,
    "prefetch_bucket_size": 0,
    "reduce_bucket_size": 1,
}


def run(row: Any = ZeRO3, source: ModelSource | None = None, **zero: Any) -> StepRun:
    """A step of the stack, with settings over those that hold least."""
    question = Question(
        model="stack", asked=[N], gpus=[N], rows=[row], convention="deepspeed", zero=ZeroConfig(**NONE | zero)
    )
    return Runner(source or Stack(), question).run(row, N)


def most(found: StepRun, band: str, dtype: int) -> int:
    """The most elements of a band at a time, from the log."""
    held = highest = 0
    for event in found.report.events:
        if event.name == band and event.kind in ("hold", "free"):
            held += event.nbytes if event.kind == "hold" else -event.nbytes
            highest = max(highest, held)
    return highest // dtype


def test_the_update_copies_and_casts_a_sub_group() -> None:
    """2 bytes in one tensor and 4 in fp32 for each element of a sub-group, which ends with a whole parameter."""
    whole = run(sub_group_size=10**9)
    assert most(whole, "main grads", 4) == P // N
    assert whole.peak.phase == "optimizer"
    assert whole.peak.total - sum(whole.resident.values()) == (2 + 4) * (P // N)
    share = MATRIX // N
    assert most(run(sub_group_size=share), "main grads", 4) == share + TIED // N  # the embedding comes first
    assert most(run(sub_group_size=share + 1), "main grads", 4) == share + TIED // N
    assert most(run(sub_group_size=TIED // N), "main grads", 4) == share + SMALL // N  # where one has just as many, too
    assert most(run(sub_group_size=2 * share), "main grads", 4) == 2 * share + TIED // N + SMALL // N


def test_below_stage_3_a_rank_s_share_is_copied_at_once() -> None:
    """``step`` of ``stage_1_and_2.py`` knows no sub-groups."""
    found = run(ZeRO2, Stack(tied=False), sub_group_size=1)
    block = -(-(MATRIX + SMALL) // (2 * N)) * 2 * N  # padded
    assert most(found, "main grads", 4) == (2 * TIED + BLOCKS * block) // N


def test_small_parameters_stay_whole() -> None:
    """Those of up to the threshold, on every rank, at rest too; and they are not gathered for use."""
    whole = Stack(tied=False)
    without, found = (run(source=whole, param_persistence_threshold=each) for each in (SMALL - 1, SMALL))
    assert found.resident["gathered params"] == 2 * BLOCKS * SMALL
    assert "gathered params" not in without.resident
    sent = [sum(each.sent for each in some.traffic if each.collective == "all-gather") for some in (without, found)]
    # before: each in forward and in backward; now each once at the start, which is no step's, and once after the update
    assert sent[0] - sent[1] == 2 * (2 - 1) * BLOCKS * SMALL * (N - 1) // N


def test_a_tied_embedding_is_whole_until_the_first_update() -> None:
    """``zero.Init`` leaves it so; ``_partition_all_parameters`` ends it."""
    question = Question(
        model="stack", asked=[N], gpus=[N], rows=[ZeRO3], convention="deepspeed", zero=ZeroConfig(**NONE)
    )
    started = Runner(Stack(), question).start(ZeRO3, N)
    assert started.ledger.held["gathered params"] == 2 * TIED
    assert "gathered params" not in run().resident


@pytest.mark.parametrize(
    ("distance", "kept"),
    [(0, 0), (1, 0), (2 * TIED, 0), (2 * TIED + 1, 1), (2 * (TIED + MATRIX + SMALL) + 1, 2)],
)
def test_what_is_used_again_soon_is_kept(distance: int, kept: int) -> None:
    """From forward to backward, if fewer elements than that are passed in between: twice those of each that follows."""
    found = run(source=Stack(tied=False), max_reuse_distance=distance)
    one, head = MATRIX + SMALL, TIED if distance else 0  # nothing follows the head
    assert most(found, "gathered params", 2) == max(kept * one + head, one)
    again = (BLOCKS - kept) * one + TIED + (TIED - head)
    sent = sum(each.sent for each in found.traffic if each.collective == "all-gather")
    assert sent == 2 * (P + TIED + again) * (N - 1) // N


def test_parameters_are_fetched_ahead_up_to_the_live_ones() -> None:
    """Whole parameters until ``max_live_parameters`` are there; a prefetch bucket of nothing fetches none."""
    one = MATRIX + SMALL
    assert most(run(source=Stack(tied=False), prefetch_bucket_size=0), "gathered params", 2) == one
    ahead = {
        each: run(source=Stack(tied=False), prefetch_bucket_size=1, max_live_parameters=each) for each in (1, 10**9)
    }
    assert most(ahead[1], "gathered params", 2) == one
    assert most(ahead[10**9], "gathered params", 2) == P + TIED
    assert sum(each.sent for each in ahead[1].traffic) == sum(each.sent for each in ahead[10**9].traffic)


def test_gradients_come_one_by_one_into_a_bucket() -> None:
    """Of a block the largest is there by itself; what is reduced is copied once more, as far as the bucket goes."""
    source = Stack(tied=False)
    assert most(run(source=source), "unreduced grads", 2) == MATRIX
    assert most(run(source=source, reduce_bucket_size=MATRIX + 8), "ring blocks", 2) >= MATRIX + 8
    bucket = run(source=source, reduce_bucket_size=101)
    assert bucket.resident["gradient bucket"] == 2 * 101
    assert "gradient bucket" not in run(source=source, reduce_bucket_size=101, contiguous_gradients=False).resident
    two = run(ZeRO2, source, reduce_bucket_size=101, overlap_comm=True)
    assert two.resident["gradient bucket"] == 2 * 2 * 101


def test_auto_is_what_the_trainer_makes_of_it() -> None:
    """h², 0.9 h² and 10 h; without a width it is refused."""
    auto: dict[str, Any] = dict.fromkeys(job_config.AUTO, "auto")
    question = Question(model="x", asked=[N], gpus=[N], rows=[ZeRO3], convention="deepspeed", zero=ZeroConfig(**auto))
    h = 7168  # bigscience's: its log has 5.138022e+07, 4.624220e+07 and 7.168000e+04
    found = deepspeed.settings(question, Stack(width=h))
    assert (found.reduce_bucket_size, found.prefetch_bucket_size) == (51_380_224, 46_242_201)
    assert found.param_persistence_threshold == 71_680
    with pytest.raises(ValueError, match=r"'auto' of reduce_bucket_size.*hidden_size, and stack says none"):
        deepspeed.settings(question, Stack())


def test_a_configuration_says_its_width() -> None:
    """By whichever name."""
    config = Path(__file__).parent / "configs"
    widths = {name: models.read(str(config / f"{name}.json")).width for name in ("gpt2", "llama-2-7b", "t5-small")}
    assert widths == {"gpt2": 768, "llama-2-7b": 4096, "t5-small": 512}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"sub_group_size": 1e9, "stage3_prefetch_bucket_size": "auto"}, {"prefetch_bucket_size": "auto"}),
        ({"stage3_param_persistence_threshold": 0}, {"param_persistence_threshold": 0}),
        ({"stage3_max_live_parameters": 5e8}, {"max_live_parameters": 500_000_000}),
        ({"stage3_max_reuse_distance": "5e8"}, {"max_reuse_distance": 500_000_000}),
        ({"stage3_max_live_parameters": "auto", "stage": 3, "overlap_comm": True}, {"overlap_comm": True}),
    ],
)
def test_settings_are_read_from_zero_optimization(given: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Numbers also as 5e8; "auto" where a trainer makes something of it, and the default elsewhere."""
    assert job_config.zero_settings(given) == ZeroConfig(**read)


@pytest.mark.parametrize("wrong", [-1, 0.5, "many", True, [1]])
def test_settings_that_are_no_numbers_are_refused(wrong: Any) -> None:
    """With the key, and what it was."""
    with pytest.raises(ValueError, match=r"zero_optimization.sub_group_size is a number of elements"):
        job_config.zero_settings({"sub_group_size": wrong})


@pytest.mark.parametrize("row", [HSDP, HPZ, ZeRO3Kept, Infinity, Offload2])
def test_rows_that_are_no_stage_3_follow_the_schedule(row: Any) -> None:
    """With groups, with copies that are kept, with states on the host, which copies no gradients here."""
    options = recipes.options(Options(padding="each", node=2), "mixed", "adam", settings=ZeroConfig(**NONE))
    model = ShapeModel(Stack(tied=False).shapes, frees=True)
    ran = [made(row, model, N, options, ring=DryRing(N), collectives=Library) for made in (Scheme, deepspeed.DeepSpeed)]
    for scheme in ran:
        scheme.step(model.batch())
    plain, own = (scheme.reports[-1] for scheme in ran)
    assert own.resident == plain.resident
    assert {key: each.sent.max() for key, each in own.traffic.items()} == {
        key: each.sent.max() for key, each in plain.traffic.items()
    }
    assert any(event.name == "main grads" for event in own.events) == ("optimizer" not in row.offload)


def test_accumulated_gradients_are_there_whole_if_they_are_reduced_at_the_end() -> None:
    """And one by one where they are reduced each time."""
    question = Question(
        model="stack", asked=[N], gpus=[N], rows=[ZeRO3], convention="deepspeed", zero=ZeroConfig(**NONE), accumulate=2
    )
    source = Stack(tied=False)
    each, end = (Runner(source, msgspec.structs.replace(question, sync=sync)).run(ZeRO3, N) for sync in ("each", "end"))
    assert most(each, "unreduced grads", 2) == MATRIX + MATRIX // N + SMALL // N  # and the average of the second time
    assert most(end, "unreduced grads", 2) == P + MATRIX + SMALL  # all but the head, and the last block once more


def test_what_is_whole_stays_so_where_units_are_updated_in_the_backward() -> None:
    """What is left of the backward reads it, and it is freed once."""
    question = Question(
        model="stack", asked=[N], gpus=[N], rows=[ZeRO3], convention="deepspeed", optimizer_in_backward=True,
        zero=ZeroConfig(**NONE | {"param_persistence_threshold": MATRIX, "max_reuse_distance": 10**9}),
    )  # fmt: skip
    found = Runner(Stack(), question).run(ZeRO3, N)
    assert found.resident[Band.GATHERED] == 2 * P
