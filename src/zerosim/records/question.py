"""What a plan is asked: the schema of a question, the first part of a plan's record.

Owns the schema. Knows of the simulator only what a row is.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from zerosim.records.files import Record
from zerosim.stages import Stage

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
FrozenDType = Literal["fp32", "fp16", "bf16", "nf4", "nf4-double"]


class Network(Record):
    """What bounds the time, where it is not the card's own: FLOP/s, bytes/s and seconds a hop within a node and
    between nodes, cards in a node. None: the preset's. ``efficiency`` is the part of the peak that the reader's own
    runs reach, in place of the estimate's shares."""

    efficiency: float | None = None
    peak: float | None = None
    within: float | None = None
    between: float | None = None
    hop_within: float | None = None
    hop_between: float | None = None
    node: Positive | None = None


class Finetuning(Record):
    """What of a model is trained.

    ``other_parts``: what becomes of parts that text does not reach, as towers for images are. ``lora`` is
    the rank of adapters beside the linear layers named in ``targets``, by the last parts of their names;
    all else is frozen then. ``frozen_dtype`` is what frozen parameters are kept in, if not in what others are.
    """

    other_parts: Literal["frozen", "left out", "trained"] = "frozen"
    lora: Positive | None = None
    targets: tuple[str, ...] = ()
    frozen_dtype: FrozenDType | None = None


class ZeroConfig(Record):
    """DeepSpeed's ``zero_optimization``, as far as memory goes by it, in elements; its own defaults (0.19.8).

    "auto" is what a trainer makes of it for a model. ``overlap_comm`` is None where the stage decides.
    """

    sub_group_size: Positive = 1_000_000_000
    param_persistence_threshold: Natural | Literal["auto"] = 100_000
    max_live_parameters: Natural = 1_000_000_000
    max_reuse_distance: Natural = 1_000_000_000
    prefetch_bucket_size: Natural | Literal["auto"] = 50_000_000
    reduce_bucket_size: Positive | Literal["auto"] = 500_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool | None = None


class Question(Record):
    """What was asked.

    ``rows`` are the schemes, in the order in which they are shown; ``asked`` the numbers of GPUs that
    were named, ``gpus`` those that are tabulated. ``memory`` is the bytes of a card, ``card`` the
    preset that it comes from; of it ``reserve`` bytes are for what no ledger sees. ``others`` are rows that are looked
    at beside these. ``precision``, ``wire``, ``wire_params``, ``padding``, ``all_reduce`` and
    ``prefetch`` are None where the convention decides. ``bucket`` in parameters. ``binary``: whether
    sizes are shown in GiB. ``global_batch`` is the rows of a step on all ranks, from which ``accumulate``
    follows. ``optimizer_in_backward``: each unit's update is made as soon as its gradients are there, which are
    then freed. ``fused``: the optimizer is one kernel, which needs no memory of its own; ``set_to_none``: gradients go
    after each step; ``bucket_view``: DDP's gradients are views of its buckets.

    ``host_memory`` is the bytes of a node's host, ``placement`` how ranks are laid out over nodes. ``loss``: the cross
    entropy in fp32 or in bf16, in fp32 by eight chunks of tokens, or in one kernel that keeps nothing; or in fp32 of
    logits that the loop keeps in fp32 until after the backward. ``kv``: whether keys and values are kept once for the
    heads that share them, or for each. ``zero`` are DeepSpeed's settings, under its convention. ``attention`` is the
    kernel that Megatron's own layer has, by the names of its ``--attention-backend``.
    """

    model: str
    asked: list[Positive]
    gpus: list[Positive]
    rows: list[Stage]
    convention: str = "zero"
    others: tuple[Stage, ...] = ()
    memory: Positive | None = None
    reserve: Natural = 0
    host_memory: Positive | None = None
    placement: Literal["nodes", "round robin"] = "nodes"
    card: str | None = None
    binary: bool = False
    precision: str | None = None
    wire: str | None = None
    wire_params: str | None = None
    padding: str | None = None
    all_reduce: bool | None = None
    micro_batch: Positive = 1
    sequence: Positive | None = None
    checkpoint: Literal["none", "full", "selective"] = "none"
    accumulate: Positive = 1
    sync: Literal["each", "end"] | None = None
    bucket: Literal["layer", "model"] | Positive | None = None
    prefetch: Natural | None = None
    global_batch: Positive | None = None
    optimizer: Literal["adam", "adamw", "adam8bit", "sgd", "momentum"] = "adam"
    optimizer_in_backward: bool = False
    fused: bool = False
    set_to_none: bool = True
    bucket_view: bool = False
    loss: Literal["fp32", "bf16", "chunked", "fused", "fp32-kept"] = "fp32"
    kv: Literal["grouped", "expanded"] = "grouped"
    attention: Literal["flash", "fused", "unfused"] = "flash"
    zero: ZeroConfig = ZeroConfig()
    finetuning: Finetuning = Finetuning()
    network: Network = Network()
    largest_model: str | None = None
    notes: tuple[str, ...] = ()

    def micro_batches(self, ranks: int, micro_batch: int | None = None) -> int:
        """How many micro-batches a step on so many ranks has: of a global batch, as many as it takes, one at least."""
        if self.global_batch is None:
            return self.accumulate
        return max(1, self.global_batch // (ranks * (micro_batch or self.micro_batch)))
