"""The options of ``zerosim plan``, in the order of its help.

Owns them and how a rate is typed. Knows nothing of how a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zerosim.bands import WIRES
from zerosim.util import sizes

FAMILIES = ("mlp", "gpt", "llama")
PRECISIONS = (
    "mixed",
    "bf16",
    "fp32",
    "bf16-fp32-grads",
    "mixed-main-grads",
    "fsdp",
    "pure-bf16",
    "bf16-moments",
    "bf16-master",
    "autocast",
)
FROZEN = ("fp32", "fp16", "bf16", "nf4", "nf4-double")
NOT_PLANNED = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}


class Rate(click.ParamType[int]):
    """A number of bytes per second with its unit, as in 450GB/s."""

    name = "rate"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            rate = value.strip().removesuffix("/s")
            if rate.endswith("b"):  # networks are sold in bits, and an eighth of what was meant is no bound
                raise ValueError(f"{value!r} may mean bits, of which a byte has eight. Give bytes, as in 50GB/s.")
            return sizes.parse(rate)
        except ValueError as error:
            self.fail(str(error), param, ctx)


Command = TypeVar("Command", bound=Callable[..., Any])

OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("model", metavar="MODEL"),
    click.option(
        "--gpus",
        multiple=True,
        metavar="N",
        help="Ranks: a number, 4,8,16, or 2-64 (powers of two).",
    ),
    click.option("--sweep", is_flag=True, help="Also show the powers of two around a single N."),
    click.option(
        "--memory",
        default=None,
        metavar="SIZE",
        help="Memory of one card, with its unit: 80GB is 80e9 bytes, 80GiB 80 × 2^30.",
    ),
    click.option(
        "--reserve",
        default=None,
        metavar="SIZE",
        help="Of a card, for what no ledger sees: context, libraries, fragmentation; 8GiB, or 5%.  [default: 10%]",
    ),
    click.option(
        "--offload",
        type=click.Choice(["optimizer", "params"]),
        default=None,
        help="Keep the optimizer's state on the host, or all that is sharded.",
    ),
    click.option("--host-memory", default=None, metavar="SIZE", help="Memory of a node's host, for what is offloaded."),
    click.option(
        "--placement",
        type=click.Choice(["nodes", "round-robin"]),
        default="nodes",
        show_default=True,
        help="Ranks go node by node, or one to each node in turn.",
    ),
    click.option("--check", is_flag=True, help="End with 1 unless it fits on every number of GPUs asked for."),
    click.option("--card", default=None, metavar="NAME", help="A common card: its memory and speeds, as in H100."),
    click.option(
        "--scheme",
        "--stage",
        "schemes",
        multiple=True,
        metavar="NAME",
        help="ddp, zero1, zero2 or zero3 (or 0 to 3), hsdp, zero3-kept, hpz; several with commas.  [default: the "
        "convention's]",
    ),
    click.option(
        "--convention",
        default="fsdp2",
        show_default=True,
        metavar="NAME",
        help="Whose rules: fsdp2 (and DDP), deepspeed, megatron, or zero, the paper's and this package's own ring.",
    ),
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        default=None,
        help="Recipe of bands.  [default: the convention's]",
    ),
    click.option(
        "--wire", type=click.Choice(list(WIRES)), default=None, help="What travels as.  [default: the convention's]"
    ),
    click.option(
        "--wire-params",
        type=click.Choice(list(WIRES)),
        default=None,
        help="What parameters travel as, if something else.",
    ),
    click.option(
        "--micro-batch", type=click.IntRange(min=1), default=1, show_default=True, help="Rows per rank at a time."
    ),
    click.option(
        "--seq", type=click.IntRange(min=1), default=None, help="Tokens in a row.  [default: the model's, up to 2048]"
    ),
    click.option(
        "--checkpoint",
        type=click.Choice(["none", "full", "selective"]),
        default="none",
        show_default=True,
        help="Activation checkpointing: full recomputes every unit; selective all but the matrix products.",
    ),
    click.option(
        "--accumulate", type=click.IntRange(min=1), default=1, show_default=True, help="Micro-batches in a step."
    ),
    click.option(
        "--sync",
        type=click.Choice(["each", "end"]),
        default=None,
        help="Reduce gradients after each micro-batch or at the end.  [default: each where they are sharded]",
    ),
    click.option(
        "--bucket",
        default=None,
        metavar="SIZE",
        help="What is gathered and reduced at a time: layer, model, or units up to a SIZE of gradients, as in 500MB.",
    ),
    click.option("--prefetch", type=click.IntRange(min=0), default=None, help="Units that ZeRO-3 gathers ahead."),
    click.option(
        "--optimizer",
        type=click.Choice(["adam", "adamw", "adam8bit", "sgd", "momentum"]),
        default="adam",
        show_default=True,
        help="What is kept; adam8bit: a byte for each moment, and an fp32 scale for each 256.",
    ),
    click.option(
        "--optimizer-in-backward",
        is_flag=True,
        help="Update each unit as soon as its gradients are there, and free them.",
    ),
    click.option("--fused", is_flag=True, help="AdamW(fused=True): the optimizer needs no memory of its own."),
    click.option(
        "--set-to-none/--no-set-to-none", default=True, show_default=True, help="Whether gradients go after each step."
    ),
    click.option(
        "--gradient-as-bucket-view", "bucket_view", is_flag=True, help="DDP's gradients are views of its buckets."
    ),
    click.option(
        "--global-batch",
        type=click.IntRange(min=1),
        default=None,
        help="Rows of a step on all GPUs; how many micro-batches it takes follows.",
    ),
    click.option(
        "--loss",
        type=click.Choice(["fp32", "bf16", "chunked", "fused", "fp32-kept"]),
        default="fp32",
        show_default=True,
        help="Cross entropy: in fp32, in the logits' bf16, in fp32 by 8 chunks, or in one kernel that keeps nothing; "
        "fp32-kept: in fp32, of fp32 logits that the loop keeps until after the backward.",
    ),
    click.option(
        "--kv",
        type=click.Choice(["grouped", "expanded"]),
        default="grouped",
        show_default=True,
        help="Keys and values that heads share: kept once, or expanded to a copy for each head.",
    ),
    click.option(
        "--attention",
        type=click.Choice(["flash", "fused", "unfused"]),
        default="flash",
        show_default=True,
        help="Kernel of Megatron's own layer (--convention megatron), as its --attention-backend has it.",
    ),
    click.option(
        "--lora",
        default=None,
        metavar="r=8,targets=NAME,...",
        help="Train adapters of rank r beside these linear layers (or all-linear); all else is frozen.",
    ),
    click.option(
        "--other-parts",
        type=click.Choice(["frozen", "left-out", "trained"]),
        default="frozen",
        show_default=True,
        help="Of a model of several kinds of input, what text does not reach.",
    ),
    click.option(
        "--frozen-dtype",
        type=click.Choice(FROZEN),
        default=None,
        help="What is frozen is kept in this: 16 bits, or its blocks' matrices in 4.  [default: as what is trained]",
    ),
    click.option(
        "--config",
        "job",
        type=click.Path(dir_okay=False, path_type=Path),
        default=None,
        metavar="FILE",
        help="A job's ds_config.json or accelerate YAML: what it says, unless an option says otherwise.",
    ),
    click.option("--tp", "--tensor-parallel", type=int, default=1, hidden=True),
    click.option("--pp", "--pipeline-parallel", type=int, default=1, hidden=True),
    click.option("--cp", "--context-parallel", type=int, default=1, hidden=True),
    click.option("--ep", "--expert-parallel", type=int, default=1, hidden=True),
    click.option("--nvme", "--nvme-path", default=None, hidden=True),
    click.option(
        "--efficiency",
        type=click.FloatRange(0, 1, min_open=True),
        default=None,
        help="For the time's estimate: the part of the peak that your own runs reach.  "
        "[default: what published runs reach]",
    ),
    click.option("--peak", type=click.FloatRange(0, min_open=True), default=None, help="Peak of a card, in TFLOP/s."),
    click.option(
        "--bandwidth",
        type=Rate(),
        default=None,
        metavar="RATE",
        help="Of a card within its node, one way, as in 450GB/s.",
    ),
    click.option(
        "--node-bandwidth", type=Rate(), default=None, metavar="RATE", help="Of a whole node to the others, one way."
    ),
    click.option(
        "--latency", type=click.FloatRange(0, min_open=True), default=None, help="Of a hop within a node, in µs."
    ),
    click.option(
        "--node-latency", type=click.FloatRange(0, min_open=True), default=None, help="Of a hop between nodes, in µs."
    ),
    click.option(
        "--node",
        "--node-size",
        "node_size",
        type=click.IntRange(min=1),
        default=None,
        help="Cards in a node, which is the group of hsdp and hpz.  [default: the card's]",
    ),
    click.option(
        "--largest-model",
        type=click.Choice(FAMILIES),
        default=None,
        help="Also find the largest model of this family that fits under each scheme on N such cards.",
    ),
    click.option(
        "--json",
        "json_to",
        default=None,
        metavar="FILE",
        help="Write the plan as JSON to FILE; with - print it instead of the tables.",
    ),
    click.option(
        "--out",
        "outputs",
        multiple=True,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Write to FILE, by its ending: .html, a page with sliders; .png or .svg, the peaks by band; .trace.json, "
        "a step for Perfetto; .pickle, a step for pytorch.org/memory_viz; .json, the plan.",
    ),
    click.option("--estimators", is_flag=True, help="Also what well-known formulas say, and the convention's rules."),
    click.option("-v", "--verbose", is_flag=True, help="Also the bands, the collectives, the peak and the time."),
)


def plan_options(command: Command) -> Command:
    """A command with all of them."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
