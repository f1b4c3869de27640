"""How known systems do it: which bands each holds, how it pads, and what it sends, as rows of a table.

Owns these rules and by which dtypes data is sent. They are looked up by what a scheme's row shards,
so that a row of one's own follows them too. Must not know the plan that is made with them: a
convention answers with ``Options`` and with what is held beside the model states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from zerosim.bands import PRECISIONS, WIRES, Band, DType
from zerosim.comm import Comm
from zerosim.options import Options, Padding
from zerosim.planner import deepspeed, megatron, recipes
from zerosim.planner.fsdp2 import DDP, FSDP2, Library
from zerosim.planner.model_source import ModelSource
from zerosim.planner.recipes import RECIPES
from zerosim.records.question import Question, ZeroConfig
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO3
from zerosim.stages import HPZ, HSDP, ZeRO3Kept
from zerosim.util.arguments import one_of

DEEPSPEED_BUCKET = 500_000_000  # elements: reduce_bucket_size unless told otherwise

Sharded = tuple[bool, bool, bool]
"""What a row shards: the optimizer's state, gradients, parameters."""


def sharded(row: Stage) -> Sharded:
    """What ``row`` shards, by which rules are looked up."""
    return bool(row.optimizer), bool(row.grads), bool(row.params)


NOTHING, OPTIMIZER, GRADS, PARAMS = map(sharded, SCHEMES)


@dataclass(frozen=True)
class Rules:
    """What a system does for rows that shard alike.

    ``padding``, ``all_reduce`` and ``prefetch`` are options of the run; ``bucket`` is the elements of
    a gradient bucket that is allocated before the first step, if there is one, or as many as are trained.
    ``precision`` and ``scheme`` take the place of the convention's own.
    """

    padding: Padding = "N"
    all_reduce: bool = False
    prefetch: int = 0
    bucket: int | Literal["all trained"] | None = None
    precision: str | None = None
    scheme: type[Scheme] | None = None


@dataclass(frozen=True)
class Convention:
    """One system's way. ``why`` has a sentence for each rule in which it differs from another.

    ``precision`` is its default; ``rules`` those of each kind of row that it has, by what is sharded; ``shown`` the
    rows that a plan has unless told otherwise, and ``others`` those that are looked at where these do not do;
    ``left_out`` what the system does that is not counted. A step is run by ``scheme`` with its ``collectives``;
    ``set_to_none`` and ``foreach`` are as in ``recipes.PlannedOptions``, ``frees`` as in a ``Workload``. ``layers``:
    what makes of a model the same one with the system's own layers, if it has any, and an attention of that name;
    ``settings`` what resolves a job's own settings, if it has any; ``offloads``
    whether any states may be on the host, or only all together. ValueError for a precision that there is not.

    >>> from zerosim.schemes import ZeRO3
    >>> CONVENTIONS["fsdp2"].options(ZeRO3).prefetch
    1
    """

    name: str
    system: str
    precision: str
    rules: Mapping[Sharded, Rules]
    why: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    shown: tuple[Stage, ...] = SCHEMES
    others: tuple[Stage, ...] = ()
    scheme: type[Scheme] = Scheme
    collectives: type[Comm] | None = None
    set_to_none: bool = False
    foreach: bool = False
    frees: bool = False
    offloads: Literal["any", "all"] = "any"
    layers: Callable[[ModelSource, str], ModelSource] | None = None
    settings: Callable[[Question, ModelSource], ZeroConfig] | None = None

    def __post_init__(self) -> None:
        one_of(f"Convention {self.name!r}", "precision", self.precision, PRECISIONS)
        if not self.rules:
            raise ValueError(f"Convention {self.name!r}: needs rules for at least one kind of row.")

    def rows(self, precision: str | None = None) -> tuple[Stage, ...]:
        """The rows that a plan has, those left out that cannot use ``precision`` (its own by default)."""
        everywhere = RECIPES[precision or self.precision].everywhere
        return tuple(row for row in self.shown if sharded(row) in self.rules and (everywhere or row.params))

    def check(self, question: Question) -> None:
        """Refuse, with ValueError, what the system has no choice of."""
        views = any(rules.bucket == "all trained" for rules in self.rules.values())
        for name, differs, has in (
            ("fused", question.fused, self.foreach),
            ("set_to_none", not question.set_to_none, self.set_to_none),
            ("bucket_view", question.bucket_view, views),
        ):
            if differs and not has:
                raise ValueError(
                    f"plan({name}): {self.system} has no such choice, or it changes nothing that is counted. Leave it "
                    f"out, or use --convention fsdp2."
                )
        if self.offloads == "all" and any(row.offload and "params" not in row.offload for row in question.rows):
            raise ValueError(
                f"plan(offload): {self.system} keeps parameters, gradients and optimizer state on the host "
                f"(CPUOffloadPolicy), and not the optimizer's alone. Use --offload params, or --convention deepspeed."
            )

    def precision_of(self, row: Stage, precision: str | None = None) -> str:
        """The recipe that ``row`` runs with: ``precision``, or the row's own, or else the convention's."""
        return precision or self.of(row).precision or self.precision

    def source(self, given: ModelSource, attention: str) -> ModelSource:
        """What a plan is made of: the model as it is given, or with the system's own layers.

        ValueError for an attention that is chosen where the model's own runs.
        """
        if self.layers is not None:
            return self.layers(given, attention)
        if attention != "flash":
            raise ValueError(
                f"plan(attention): it says which kernel Megatron's own layer has, and under {self.name} the model's "
                f"own runs; got {attention!r}. Use --convention megatron, or leave --attention out."
            )
        return given

    def of(self, row: Stage) -> Rules:
        """The rules for ``row``. ValueError, with the rows that there are, for one that the system has not."""
        found = self.rules.get(sharded(row))
        if found is None:
            known = ", ".join(dict.fromkeys(row.name for row in (*SCHEMES, *self.others) if sharded(row) in self.rules))
            having = [each.name for each in CONVENTIONS.values() if sharded(row) in each.rules]
            raise ValueError(
                f"plan(convention): {self.system} has no {row.name}; it has {known}. Choose one of these"
                f"{f', or --convention {having[0]}' if having else ''}{', which has it' if having else ''}."
            )
        return found

    def options(self, row: Stage, precision: str | None = None) -> Options:
        """The options that ``row`` runs with. ``precision`` replaces the convention's own; what is sent follows it.

        ValueError for a row that the system has not, or an unknown precision.
        """
        rules = self.of(row)
        name = self.precision_of(row, precision)
        one_of("plan", "precision", name, RECIPES)
        recipe = RECIPES[name]
        grads, working = wire_name(recipe.grads or recipe.working), wire_name(recipe.working)
        base = Options(padding=rules.padding, all_reduce=rules.all_reduce, prefetch=rules.prefetch)
        return replace(
            recipes.options(base, name, "adam"), wire=grads, wire_params=None if working == grads else working
        )

    def beside(self, row: Stage, elements: int | None = None, *, trained: int = 0) -> dict[Band, int]:
        """What a rank holds from the start beside the model states: elements by band, in the band's own dtype.

        ``elements`` replaces the system's default size of a bucket; ``trained`` is how many parameters are.
        """
        bucket = self.of(row).bucket
        if bucket == "all trained":
            return {Band.BUCKET: trained}
        size = bucket if elements is None else elements
        return {Band.BUCKET: size} if bucket and size else {}

    def bucket(self, row: Stage, question: Question, source: ModelSource) -> int | None:
        """The elements of a bucket, by the job's settings where the system has some; None for its default."""
        settled = self.settled(question, source)
        return None if settled is None else deepspeed.bucket(row, settled)

    def settled(self, question: Question, source: ModelSource) -> ZeroConfig | None:
        """A job's own settings, if the system has any, as they are for that model."""
        return None if self.settings is None else self.settings(question, source)


def wire_name(dtype: DType) -> str:
    """The name of the wire of this dtype."""
    return next(name for name, wire in WIRES.items() if wire == dtype)


_TRAVEL = "Gradients are sent in the dtype that they are kept in, parameters in the one that is computed with."
_PLAIN = Rules()

CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        row.name: row
        for row in (
            Convention(
                "zero",
                "the ZeRO paper",
                "mixed",
                dict.fromkeys((NOTHING, OPTIMIZER, GRADS, PARAMS), _PLAIN),
                (
                    "Mixed precision with Adam takes 16 bytes per parameter: 2 of parameters, 2 of gradients, and 12 "
                    "(K) of fp32 master weights and moments (arXiv 1910.02054, section 3.1).",
                    "Stages 1 and 2 reduce-scatter gradients and all-gather parameters, so they send what data "
                    "parallel sends; stage 3 gathers twice and sends half as much again (section 7).",
                    _TRAVEL,
                    "A layer is padded to N equal shards.",
                ),
            ),
            Convention(
                "deepspeed",
                "DeepSpeed",
                "mixed",
                {
                    NOTHING: _PLAIN,
                    OPTIMIZER: Rules(padding="2N", all_reduce=True),
                    GRADS: Rules(padding="2N", all_reduce=True, bucket=DEEPSPEED_BUCKET),
                    PARAMS: Rules(padding="each", bucket=DEEPSPEED_BUCKET),
                },
                scheme=deepspeed.DeepSpeed,
                collectives=Library,
                frees=True,
                settings=deepspeed.settings,
                why=(
                    "Mixed precision with Adam takes the paper's 16 bytes per parameter.",
                    "Stages 1 and 2 all-reduce gradients where a reduce-scatter would do, and then gather parameters: "
                    "three halves of what data parallel sends (measured with DeepSpeed 0.19.8 at its defaults).",
                    _TRAVEL,
                    "Stages 1 and 2 pad to a multiple of 2N elements, for NCCL's alignment of 4 bytes; stage 3 pads "
                    "each parameter to N.",
                    "From stage 2 on gradients are collected in a bucket of reduce_bucket_size, 5e8 elements unless "
                    "told otherwise, which is allocated in full however small the model is.",
                    "The optimizer gets its gradients copied into one tensor and cast to fp32: 2 + 4 bytes for each "
                    "element of a sub-group (sub_group_size, 1e9), of a rank's whole share below stage 3.",
                    "Stage 3 keeps parameters of up to stage3_param_persistence_threshold elements (1e5) whole, those "
                    "that are used again within stage3_max_reuse_distance (1e9), and prefetches up to "
                    "stage3_max_live_parameters (1e9). A tied embedding is whole until the first update (zero.Init).",
                ),
                left_out=(
                    "Stage 1 takes the bucket too while it reduces, if contiguous_gradients is on; here it takes none.",
                    "Stages 1 and 2 free gradients after the update; here they are kept, as in the published formulas.",
                    "Stage 3 fetches a module's own parameters at a time and copies them out of one buffer where they "
                    "are several; here a block is fetched whole, and not copied.",
                ),
            ),
            Convention(
                "fsdp2",
                "FSDP2 (fully_shard)",
                "fsdp",
                {
                    NOTHING: Rules(precision="autocast", scheme=DDP, bucket="all trained"),
                    PARAMS: Rules(padding="rows", prefetch=1),
                },
                shown=(ZeRO3,),
                others=(DP, ZeRO3Kept, HSDP, HPZ),
                scheme=FSDP2,
                offloads="all",
                collectives=Library,
                set_to_none=True,
                foreach=True,
                frees=True,
                why=(
                    "The shards are fp32 and are themselves what the optimizer updates: 4 bytes of parameters, 4 of "
                    "gradients and 8 of moments, 16 in all, all of it sharded.",
                    "Parameters are cast to bf16 and then gathered; gradients come out of backward in bf16 and are "
                    "reduced in fp32 (MixedPrecisionPolicy with param_dtype bf16 and reduce_dtype fp32).",
                    "Each parameter is cut along its first axis and padded to a multiple of N rows.",
                    "A unit is gathered into one buffer and copied out of it; in forward that stays until the next "
                    "unit's copy, in backward the next unit is gathered ahead. Gradients are copied to an fp32 buffer, "
                    "which stays until the next unit's. Both are counted as ring blocks.",
                    "What is left of a model beside its blocks is the root: gathered first, kept to the end of the "
                    "backward, and reduced last, all at once.",
                    "Sharded gradients are there from their reduction to zero_grad(set_to_none=True), so 12 bytes a "
                    "parameter are held between steps; AdamW(foreach=True) computes with 4 more in the step.",
                    "ZeRO-3, kept is reshard_after_forward=False, hpZ an integer, HSDP a mesh of two axes; data "
                    "parallel is DistributedDataParallel under autocast, whose buckets are as large as the gradients.",
                ),
            ),
            Convention(
                "megatron",
                "Megatron's distributed optimizer",
                "bf16-fp32-grads",
                {NOTHING: _PLAIN, OPTIMIZER: _PLAIN},
                collectives=Library,
                frees=True,
                layers=megatron.source,
                why=(
                    "Gradients are accumulated and reduced in fp32 and in nothing else: 2 bytes of parameters, 4 of "
                    "gradients, 12 of the optimizer's, 18 in all and 6 + 12/N with the distributed optimizer; fp16 "
                    "gradients with fp32 main gradients make it 20 and 4 + 16/N (precision mixed-main-grads), all fp32 "
                    "16 and 8 + 8/N.",
                    "The distributed optimizer is stage 1: it shards what is the optimizer's, and neither gradients "
                    "nor parameters.",
                    _TRAVEL,
                    "The layer is Megatron's own: fused norms, bias and activation, bias, dropout and add. The loss "
                    "takes 6 bytes per logit: 16 bits, and an fp32 copy that becomes softmax and gradient in place.",
                ),
                left_out=(
                    "Its buffers are padded to multiples of 64 and 128 elements besides N, and its vocabulary to one "
                    "of 128: write the padded size into the configuration.",
                    "Workspaces of cuBLAS and Transformer Engine: its recorded runs hold 68 to 101 MiB more than their "
                    "states at rest.",
                    "Without gradient accumulation fusion a parameter's 16-bit gradient is there until it is added to "
                    "the fp32 one.",
                ),
            ),
        )
    }
)


def convention(name: str) -> Convention:
    """The row of that name; ValueError that lists them for any other."""
    if name not in CONVENTIONS:
        raise ValueError(f"convention({name!r}): choose from {', '.join(CONVENTIONS)}.")
    return CONVENTIONS[name]
