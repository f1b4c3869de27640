"""Plans from Python: the planner's question as typed keywords.

Owns ``plan``. Where the planner speaks of what is typed on a command line, ``--memory 80GB``, this says
``memory="80GB"``. Computes nothing; what is answered is ``planned.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from zerosim.api.plan_arguments import (
    Gpus,
    card_named,
    in_callers_words,
    name_of,
    nbytes_of,
    rate_of,
    source_of,
    typed_gpus,
)  # fmt: skip
from zerosim.api.planned import Planned
from zerosim.planner import conventions, job_config, question
from zerosim.planner import plan as planner
from zerosim.planner.recipes import RECIPES
from zerosim.records.question import Finetuning, FrozenDType, Network, Question
from zerosim.util import arguments
from zerosim.util.rows import Said, several


def plan(
    model: Any,
    *,
    gpus: Gpus,
    card: str | None = None,
    memory: int | str | None = None,
    reserve: int | str | None = None,
    offload: Literal["optimizer", "params"] | None = None,
    host_memory: int | str | None = None,
    placement: Literal["nodes", "round robin"] = "nodes",
    seq: int | None = None,
    micro_batch: int = 1,
    checkpoint: Literal["none", "full", "selective"] = "none",
    accumulate: int = 1,
    rows: Iterable[Said] | Said | None = None,
    convention: Literal["fsdp2", "deepspeed", "megatron", "zero"] = "fsdp2",
    precision: str | None = None,
    wire: str | None = None,
    wire_params: str | None = None,
    sync: Literal["each", "end"] | None = None,
    bucket: str | int | None = None,
    prefetch: int | None = None,
    global_batch: int | None = None,
    optimizer: Literal["adam", "adamw", "adam8bit", "sgd", "momentum"] = "adam",
    optimizer_in_backward: bool = False,
    fused: bool = False,
    set_to_none: bool = True,
    bucket_view: bool = False,
    kv: Literal["grouped", "expanded"] = "grouped",
    attention: Literal["flash", "fused", "unfused"] = "flash",
    zero: Mapping[str, Any] | None = None,
    lora: int | None = None,
    targets: Sequence[str] = ("all-linear",),
    other_parts: Literal["frozen", "left out", "trained"] = "frozen",
    frozen_dtype: FrozenDType | None = None,
    sweep: bool = False,
    efficiency: float | None = None,
    peak: float | None = None,
    bandwidth: float | str | None = None,
    node_bandwidth: float | str | None = None,
    latency: float | None = None,
    node_latency: float | None = None,
    node_size: int | None = None,
    inputs: Callable[[int, int | None], Any] | None = None,
    wrap: Any = None,
    loss: Callable[[Any, Any], Any] | Literal["fp32", "bf16", "chunked", "fused", "fp32-kept"] = "fp32",
    target: Callable[[int, int | None], Any] | None = None,
    advance: Callable[[str], None] | None = None,
) -> Planned:
    """What training ``model`` takes on so many GPUs: memory by band and peak, traffic, and the time of a step.

    * ``model``: a Hugging Face ``config.json``, its folder or its contents as a dict (needs the extra ``plan``);
      a ``torch.nn.Module``, on any device; an ``MLP`` or the widths of one; or ``"package.module:factory"``.
    * ``gpus``: a number, several, or a range as in ``"2-64"``; ``sweep`` adds the powers of two around a number.
    * ``card``: a preset, as in ``"H100"``; ``memory``: bytes of a card, or with a unit, as in ``"80GB"``;
      ``reserve``: of these, for what no ledger sees (context, libraries' workspaces, fragmentation), a size or a part
      as in ``"5%"``, by default a tenth.
    * ``offload``: the optimizer's state, or all that is sharded, is kept on the host, whose node has ``host_memory``;
      ``placement``: ranks go node by node, or one to each node in turn (``"round robin"``).
    * ``seq``: tokens in a row; ``micro_batch``: rows per rank at a time, ``accumulate`` of them a step, or as many
      as make up a ``global_batch`` of rows on all ranks.
    * ``checkpoint``: activation checkpointing; ``rows``: the schemes, or their names, by default the ``convention``'s.
    * ``precision``, ``wire``, ``wire_params``, ``sync``, ``bucket``, ``prefetch``: by default the convention's.
    * ``peak`` (TFLOP/s), ``bandwidth`` and ``node_bandwidth`` (bytes/s, or ``"450GB/s"``), ``latency`` and
      ``node_latency`` (µs a hop), ``node_size``: for the time, by default the card's. ``efficiency``: the part of the
      peak that your own runs reach, for the time's estimate; by default what published runs reach.
    * ``loss``: the cross entropy in fp32, in the logits' bf16, in fp32 by chunks, or in one kernel that keeps nothing,
      or in fp32 of fp32 logits that the loop keeps until after the backward (``"fp32-kept"``);
      ``kv``: keys and values that heads share are kept once, or a copy for each head;
      ``attention``: the kernel of Megatron's own layer, under its convention; ``zero``: DeepSpeed's
      ``zero_optimization``, under its, as in ``{"sub_group_size": 1e9}``.
    * ``lora``: train adapters of that rank beside the linear layers named in ``targets``, and freeze all else;
      ``other_parts``: what becomes of what text does not reach, in a model of several kinds of input;
      ``frozen_dtype``: what is frozen is kept in 16 bits, or its matrices in 4 (``"nf4"``, ``"nf4-double"``).
    * ``optimizer_in_backward``: each unit is updated as soon as its gradients are there, which are then freed.
    * ``fused``: AdamW in one kernel, which needs no memory of its own; ``set_to_none``: gradients go after each step;
      ``bucket_view``: DDP's gradients are views of its buckets. Of the convention ``fsdp2``.
    * For a module: ``inputs(rows, seq)`` gives what it is called with (by default token numbers [rows, seq]),
      ``target(rows, seq)`` an example of the target, ``wrap`` its blocks; ``loss`` may be a function of output and
      target.
    * ``advance`` is called with what it is at.

    ValueError, with what would work, for what cannot be planned; ModuleNotFoundError without the extra that it needs.

    >>> import zerosim as zs
    >>> found = zs.plan([512, 2048, 512], gpus=8, memory="20MB")
    >>> found
    Planned(MLP 512-2048-512, 2,099,712 parameters, on 8 × 20.0 MB: fits with ZeRO-3: 12.1 MB at the peak, ...)
    >>> found.fits, found.best.name
    (True, 'ZeRO-3')
    """
    with in_callers_words():
        named = None if rows is None else several("plan", "rows", rows)
        rules = conventions.convention(convention)
        asked = question.gpus(typed_gpus(gpus))
        preset = card_named(card)
        nbytes, binary = nbytes_of(memory, preset.memory if preset is not None else None)
        if precision is not None:
            arguments.one_of("plan", "precision", precision, RECIPES)
        question_ = question.check(
            Question(
                model=name_of(model),
                asked=asked,
                gpus=question.around(asked[0]) if sweep and len(asked) == 1 else asked,
                rows=question.offloaded(rules.rows(precision) if named is None else named, offload),
                host_memory=nbytes_of(host_memory, None, "host_memory")[0],
                placement=placement,
                convention=convention,
                memory=nbytes,
                reserve=question.reserve(reserve, nbytes),
                others=() if rows is not None or offload else rules.others,
                card=None if preset is None else preset.name,
                binary=binary,
                precision=precision,
                wire=wire,
                wire_params=wire_params,
                micro_batch=micro_batch,
                sequence=seq,
                checkpoint=checkpoint,
                accumulate=accumulate,
                sync=sync,
                bucket=question.bucket(bucket, precision or rules.precision) if isinstance(bucket, str) else bucket,
                prefetch=prefetch,
                global_batch=global_batch,
                optimizer=optimizer,
                optimizer_in_backward=optimizer_in_backward,
                fused=fused,
                set_to_none=set_to_none,
                bucket_view=bucket_view,
                loss="fp32" if callable(loss) else loss,
                kv=kv,
                attention=attention,
                zero=job_config.zero_settings(zero or {}),
                finetuning=Finetuning(
                    other_parts=other_parts,
                    lora=lora,
                    targets=tuple(targets) if lora else (),
                    frozen_dtype=frozen_dtype,
                ),
                network=Network(
                    efficiency=efficiency,
                    peak=None if peak is None else peak * 1e12,
                    within=rate_of("bandwidth", bandwidth),
                    between=rate_of("node_bandwidth", node_bandwidth),
                    hop_within=None if latency is None else latency * 1e-6,
                    hop_between=None if node_latency is None else node_latency * 1e-6,
                    node=node_size,
                ),
            )
        )
        own = {"inputs": inputs, "wrap": wrap, "loss": loss if callable(loss) else None, "target": target}
        source = source_of(model, question_.finetuning, **own)
        return Planned(planner.make(source, question_, advance or (lambda doing: None)), source)
