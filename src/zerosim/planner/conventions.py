"""How known systems do it: which bands each holds, how it pads, and what it sends, as rows of a table.

Owns the rows and the rule by which dtypes travel. Must not know the plan that is made with them:
a row answers with keyword options of ``Scheme`` and with what is held beside them, and any of it
can be replaced by whoever asked for something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from zerosim.bands import PRECISIONS, WIRES, Band, DType
from zerosim.buckets import PADDINGS

DEEPSPEED_BUCKET = 500_000_000  # elements: reduce_bucket_size unless told otherwise


@dataclass(frozen=True)
class Convention:
    """One system's way. ``why`` has a sentence for each rule in which it differs from another.

    ``stages`` are those that it has; ``precision`` the default; ``padding`` by stage; ``all_reduce``
    the stages that all-reduce gradients though each rank needs only its share; ``prefetch`` by
    stage, how many layers are gathered ahead; ``beside`` the elements held from the start beside the
    states, by stage and band; ``left_out`` what the system does that is not counted.
    """

    name: str
    system: str
    precision: str
    stages: tuple[int, ...]
    why: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    padding: Mapping[int, str] = field(default_factory=dict)
    all_reduce: frozenset[int] = frozenset()
    prefetch: Mapping[int, int] = field(default_factory=dict)
    beside: Mapping[int, Mapping[Band, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or not self.stages:
            raise ValueError(f"Convention {self.name!r}: needs a precision of {', '.join(PRECISIONS)}, and stages.")
        for padding in self.padding.values():
            if padding not in PADDINGS:
                raise ValueError(f"Convention {self.name!r}: pads to {', '.join(PADDINGS)}; got {padding!r}.")

    def options(self, stage: int, precision: str | None = None) -> dict[str, Any]:
        """Options of ``Scheme`` at ``stage``: precision, wire and, where they differ from a default, the rest.

        ``precision`` takes the place of the convention's own, and the wire follows it. ValueError
        for a stage that the system does not have, or an unknown precision.
        """
        self._check(stage)
        name = self.precision if precision is None else precision
        if name not in PRECISIONS:
            raise ValueError(f"Convention.options(precision): one of {', '.join(PRECISIONS)}; got {name!r}.")
        row = PRECISIONS[name]
        grads, working = _wire(row.grads or row.working), _wire(row.working)
        options: dict[str, Any] = {"precision": name, "wire": grads}
        if working != grads:
            options["wire_params"] = working
        if stage in self.padding:
            options["padding"] = self.padding[stage]
        if stage in self.all_reduce:
            options["all_reduce"] = True
        if self.prefetch.get(stage):
            options["prefetch"] = self.prefetch[stage]
        return options

    def extra(self, stage: int, elements: int | None = None) -> dict[Band, int]:
        """What a rank holds from the start beside the states: elements by band, in the band's own dtype.

        ``elements`` takes the place of the system's default size of a bucket.
        """
        self._check(stage)
        return {band: default if elements is None else elements for band, default in self.beside.get(stage, {}).items()}

    def _check(self, stage: int) -> None:
        if stage not in self.stages:
            raise ValueError(
                f"Convention {self.name!r}: {self.system} has no stage {stage}; choose from "
                f"{', '.join(map(str, self.stages))}, or another convention."
            )


def _wire(dtype: DType) -> str:
    """The name that the wire of this dtype has."""
    return next(name for name, wire in WIRES.items() if wire == dtype)


_TRAVEL = "Gradients travel in the dtype that they are kept in, parameters in the one that is computed with."
_BUCKET: Mapping[Band, int] = MappingProxyType({Band.BUCKET: DEEPSPEED_BUCKET})

CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        row.name: row
        for row in (
            Convention(
                "zero",
                "the ZeRO paper",
                "mixed",
                (0, 1, 2, 3),
                (
                    "Mixed precision with Adam takes 16 bytes per parameter: 2 of parameters, 2 of gradients, and 12 "
                    "(K) of fp32 master weights and moments (arXiv 1910.02054, section 3.1).",
                    "Stages 1 and 2 reduce-scatter gradients and all-gather parameters, so they send what data "
                    "parallel sends; stage 3 gathers twice and sends half as much again (section 7).",
                    _TRAVEL,
                    "A layer is padded to N equal shares.",
                ),
            ),
            Convention(
                "deepspeed",
                "DeepSpeed",
                "mixed",
                (0, 1, 2, 3),
                (
                    "Mixed precision with Adam takes the paper's 16 bytes per parameter.",
                    "Stages 1 and 2 all-reduce gradients where a reduce-scatter would do, and then gather parameters: "
                    "three halves of what data parallel sends (measured with DeepSpeed 0.19.8 at its defaults).",
                    _TRAVEL,
                    "Stages 1 and 2 pad to a multiple of 2N elements, for NCCL's alignment of 4 bytes; stage 3 pads "
                    "each parameter to N.",
                    "From stage 2 on gradients are collected in a bucket of reduce_bucket_size, 5e8 elements unless "
                    "told otherwise, which is allocated in full however small the model is.",
                ),
                (
                    "Stage 3 keeps parameters of up to 1e5 elements whole, and gathered ones for reuse within "
                    "stage3_max_live_parameters; here every layer is released after use.",
                    "Stage 1 takes the bucket too while it reduces, if contiguous_gradients is on; here it takes none.",
                    "The optimizer's fp32 copy of the gradients is made in pieces and is a register here.",
                ),
                padding={1: "2N", 2: "2N", 3: "each"},
                all_reduce=frozenset({1, 2}),
                beside={2: _BUCKET, 3: _BUCKET},
            ),
            Convention(
                "fsdp2",
                "FSDP2 (fully_shard)",
                "fsdp",
                (3,),
                (
                    "The shards are fp32 and are themselves what the optimizer updates: 4 bytes of parameters, 4 of "
                    "gradients and 8 of moments, 16 in all, and all of it shared out.",
                    "Parameters are cast to bf16 and then gathered; gradients come out of backward in bf16 and are "
                    "reduced in fp32 (MixedPrecisionPolicy with param_dtype bf16 and reduce_dtype fp32).",
                    "Each parameter is cut along its first axis and padded to a multiple of N rows.",
                    "The next unit is gathered while one computes, so two are there at a time.",
                ),
                (
                    "With reshard_after_forward=False parameters are gathered once and kept until backward; that is "
                    "no stage here.",
                    "The buffers that a gather is copied out of and a reduction is copied into are not counted: at "
                    "its peak FSDP2 holds about four buffers of a unit's size, here there are three and the ring's "
                    "blocks.",
                ),
                padding={3: "rows"},
                prefetch={3: 1},
            ),
            Convention(
                "megatron",
                "Megatron's distributed optimizer",
                "bf16-fp32-grads",
                (0, 1),
                (
                    "Gradients are accumulated and reduced in fp32 and in nothing else: 2 bytes of parameters, 4 of "
                    "gradients, 12 of the optimizer's, 18 in all and 6 + 12/N with the distributed optimizer; fp16 "
                    "gradients with fp32 main gradients make it 20 and 4 + 16/N (precision mixed-main-grads), all fp32 "
                    "16 and 8 + 8/N.",
                    "The distributed optimizer is stage 1: it shards what is the optimizer's, and neither gradients "
                    "nor parameters.",
                    _TRAVEL,
                ),
                ("Its buffers are padded to multiples of 64 and 128 elements besides N.",),
            ),
        )
    }
)


def convention(name: str) -> Convention:
    """The row of that name; ValueError that lists them for any other."""
    if name not in CONVENTIONS:
        raise ValueError(f"convention({name!r}): choose from {', '.join(CONVENTIONS)}.")
    return CONVENTIONS[name]
