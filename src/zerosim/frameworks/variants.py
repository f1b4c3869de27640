"""Which frameworks are run and how they are set up, and what each rank is asked to train.

Owns the list. Must not know torch, nor what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerosim.records.frameworks import Family
from zerosim.stages import Stage, ZeRO1, ZeRO2, ZeRO3


class Variant(NamedTuple):
    """A framework with options of its own; ``wire`` is the dtype in which its gradients travel.

    ``group`` is S where the ranks lie on a mesh (replicate, shard) of groups of S; 0 where there is none.
    """

    name: str
    family: Family
    precision: str = "fp32"
    wire: str = "fp32"
    options: Mapping[str, Any] = {}
    group: int = 0

    @property
    def node(self) -> int | None:
        """S of the groups in which anything is sharded, FSDP2's second copy too; None without groups."""
        reshard = self.options.get("reshard_after_forward", True)
        return self.group or (None if isinstance(reshard, bool) else reshard)

    def unfit(self, ranks: int) -> str:
        """Why so many ranks cannot run it; nothing if they can."""
        if self.node is None or (self.node < ranks and ranks % self.node == 0):
            return ""
        return f"{ranks} ranks cannot be cut into several groups of {self.node}"

    @property
    def states(self) -> str:
        """The precision whose model states it keeps: FSDP2's shards are fp32, whatever it computes in."""
        return "fp32" if self.family is Family.FSDP else self.precision


class Task(NamedTuple):
    """A variant, and on what model and data."""

    variant: Variant
    ranks: int
    steps: int
    batch: int
    seed: int
    model_seed: int
    widths: Sequence[int]


DEEPSPEED: dict[int, Stage] = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}
"""DeepSpeed's own configuration names a stage by its number."""

# DeepSpeed gathers a small model once and keeps it, and its bucket has room for 5e8 gradients. Not so with these.
_NOTHING_KEPT = {
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "reduce_bucket_size": 50_000,
}
VARIANTS = (
    Variant("DDP", Family.DDP),
    Variant("DDP, gradient_as_bucket_view", Family.DDP, options={"gradient_as_bucket_view": True}),
    Variant("DDP, fp16_compress_hook", Family.DDP, wire="fp16"),
    Variant("DDP + ZeroRedundancyOptimizer", Family.ZERO_REDUNDANCY),
    Variant("DDP + ZeroRedundancyOptimizer, process_group of 2", Family.ZERO_REDUNDANCY, group=2),
    Variant("FSDP2, reshard_after_forward=False", Family.FSDP, options={"reshard_after_forward": False}),
    Variant("FSDP2, reshard_after_forward=True", Family.FSDP, options={"reshard_after_forward": True}),
    Variant("FSDP2, reshard_after_forward=True, bf16", Family.FSDP, "bf16", "bf16", {"reshard_after_forward": True}),
    Variant("FSDP2, reshard_after_forward=2", Family.FSDP, options={"reshard_after_forward": 2}),
    *(
        Variant(
            f"FSDP2, 2-D mesh of groups of 2, reshard_after_forward={reshard}",
            Family.FSDP,
            options={"reshard_after_forward": reshard},
            group=2,
        )
        for reshard in (False, True)
    ),
    *(
        Variant(
            f"DeepSpeed stage {stage}{kept}, {precision}",
            Family.DEEPSPEED,
            precision,
            precision,
            {"stage": stage} | more,
        )
        for precision in ("fp32", "bf16")
        for stage, kept, more in ((1, "", {}), (2, "", {}), (3, "", {}), (3, ", nothing kept", _NOTHING_KEPT))
    ),
)
