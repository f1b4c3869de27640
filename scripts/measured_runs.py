"""Published runs, and the operations of a step of each: what the ledger counts for the same model, batch and ranks.

Owns ``recorded/step_times.csv``, one run in a line with whoever published it, the models' configurations and the
machines where they differ from the presets. What was measured is the tokens that each GPU trained on in a second,
and nothing in the file follows from it. Must not know speeds.

Two things are not planned as they ran, as the planner has no row for them:

* InternEvo's ZeRO-1 all-reduces gradients over all ranks in either case. Each rank owns whole tensors, and once it has
  updated them it broadcasts them, in one message, to all ranks or to those of its node
  (``hybrid_zero_optim.broadcast_params``; ``overlap_sync_param=False``).
* fp8 is computed in as bf16 is, at twice the speed.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from zerosim.counts import Phase
from zerosim.planner import question
from zerosim.planner.cards import CARDS, Card
from zerosim.planner.cluster import products
from zerosim.planner.config_source import ConfigSource
from zerosim.planner.runner import Runner
from zerosim.planner.step_time import Computed, Operation, Ring, Sent, operations
from zerosim.records.question import Finetuning, Question
from zerosim.schemes import Scheme, Stage, ZeRO1, ZeRO3
from zerosim.stages import HSDP, ZeRO3Kept
from zerosim.worlds.dry import DryRing

RUNS = Path(__file__).resolve().parent.parent / "recorded" / "step_times.csv"
NODE = 8  # cards, on all of these machines

ALL, WITHIN = "ZeRO-1 over all, by broadcasts", "ZeRO-1 within a node, by broadcasts"
ROWS: Mapping[str, Stage] = {"ZeRO-3": ZeRO3, "ZeRO-3, kept": ZeRO3Kept, "HSDP": HSDP, ALL: ZeRO1, WITHIN: ZeRO1}


def _mpt(layers: int, width: int, heads: int) -> dict[str, Any]:
    """MosaicML's GPT: GPT-2's shape, with a position for each token of a row, and 50,368 tokens, tied."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": layers, "n_embd": width, "n_head": heads,
        "vocab_size": 50_368, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip


def _llama(layers: int, width: int, heads: int, kv_heads: int, inner: int, tokens: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
        "vocab_size": tokens, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }  # fmt: skip


MODELS: Mapping[str, dict[str, Any]] = {
    "MPT-125m": _mpt(12, 768, 12),
    "MPT-350m": _mpt(24, 1024, 16),
    "MPT-760m": _mpt(24, 1536, 12),
    "MPT-1b": _mpt(24, 2048, 16),
    "MPT-3b": _mpt(32, 2560, 20),
    "MPT-7b": _mpt(32, 4096, 32),
    "MPT-13b": _mpt(40, 5120, 40),
    "MPT-30b": _mpt(48, 7168, 56),
    "MPT-70b": _mpt(80, 8192, 64),
    "Llama-2-7B": _llama(32, 4096, 32, 32, 11_008, 32_000),
    "Llama-2-13B": _llama(40, 5120, 40, 40, 13_824, 32_000),
    "Llama-2-34B": _llama(48, 8192, 64, 8, 22_016, 32_000),
    "Llama-2-70B": _llama(80, 8192, 64, 8, 28_672, 32_000),
    "Llama-3.1-8B": _llama(32, 4096, 32, 8, 14_336, 128_256),
    "InternLM-7B": _llama(32, 4096, 32, 32, 11_008, 103_168),
    "TinyLlama-1.1B": _llama(22, 2048, 32, 4, 5632, 32_000),
}
INTERNLM_TENSORS = 32 * 7 + 3  # QKV, the output, three of the feed-forward and two norms a layer; embedding, norm, head


@dataclass(frozen=True)
class Run:
    """One run, as its publisher has it: what was trained on what, and the tokens a second and GPU."""

    source: str
    table: str
    model: str
    gpus: int
    card: str
    between: float | None  # GB/s of a node, where it was published
    scheme: str
    precision: Literal["bf16", "fp8"]
    reduced_in: Literal["bf16", "fp32"]
    micro_batch: int
    sequence: int
    accumulate: int
    checkpoint: Literal["none", "full", "selective"]
    compiled: bool
    tokens_per_second: float
    note: str

    @property
    def publisher(self) -> str:
        """The repository that the run is published in."""
        return self.source.split("@")[0]

    @property
    def seconds(self) -> float:
        """Of a step, measured."""
        return self.micro_batch * self.sequence * self.accumulate / self.tokens_per_second

    @property
    def machine(self) -> Card:
        """The card, with what is known of this machine to differ."""
        card = CARDS["H100"] if self.card == "H100-HBM2e" else CARDS[self.card]
        if self.card == "H100-HBM2e":
            card = replace(card, memory_bandwidth=2_400 * 10**9)
        if self.between is not None:
            card = replace(card, between=round(self.between * 1e9))
        if self.precision == "fp8":
            card = replace(card, peak={"bf16": 2 * card.flops("bf16")})
        return card

    @cached_property
    def work(self) -> list[Operation]:
        """The operations of a step."""
        row, runner = ROWS[self.scheme], _runner(self)
        prepared = runner.prepare(row)
        options = replace(runner.options(row, self.gpus), **prepared.options)
        if row == HSDP:
            options = replace(options, node=NODE)
        scheme = Scheme(row, prepared.model, self.gpus, options, ring=DryRing(self.gpus))
        scheme.step(prepared.batch)
        groups = {layer.name: [group.name for group in layer.groups] for layer in scheme.layers}
        by_unit = products(scheme.layers, self.micro_batch * self.sequence)
        found = operations(scheme.reports[-1], groups, by_unit)
        if row == HSDP:
            return [_ring(each, self.gpus) if isinstance(each, Sent) else each for each in found]
        if row == ZeRO1:
            return internevo(found, scheme.model.n_params, self.gpus, within=self.scheme == WITHIN)
        return found


@cache
def runs() -> tuple[Run, ...]:
    """All published runs, in the order of the file."""
    with RUNS.open(newline="") as file:
        return tuple(
            Run(
                source=line["source"],
                table=line["table"],
                model=line["model"],
                gpus=int(line["gpus"]),
                card=line["card"],
                between=float(line["between_gb_s"]) if line["between_gb_s"] else None,
                scheme=line["scheme"],
                precision="fp8" if line["precision"] == "fp8" else "bf16",
                reduced_in="fp32" if line["reduced_in"] == "fp32" else "bf16",
                micro_batch=int(line["micro_batch"]),
                sequence=int(line["sequence"]),
                accumulate=int(line["accumulate"]),
                checkpoint=line["checkpoint"],  # type: ignore[arg-type]
                compiled=line["compiled"] == "yes",
                tokens_per_second=float(line["tokens_per_second"]),
                note=line["note"],
            )
            for line in csv.DictReader(file)
        )


def internevo(work: Sequence[Operation], params: int, ranks: int, *, within: bool) -> list[Operation]:
    """InternEvo's traffic in place of ZeRO-1's own: gradients all-reduced over all, updated tensors broadcast.

    A broadcast goes round a ring of k ranks in k-1 hops, and each rank but the last hands on all of its bytes.
    """
    group = min(NODE, ranks) if within else ranks
    owners = min(group, INTERNLM_TENSORS)
    first = next(
        place for place, each in enumerate(work) if isinstance(each, Computed) and each.phase is Phase.OPTIMIZER
    )
    reduced = [
        replace(each, nbytes=2 * each.nbytes, messages=2 * each.messages) if isinstance(each, Sent) else each
        for each in work[:first]
    ]
    updated = [each for each in work[first:] if isinstance(each, Computed)]
    broadcast = Sent("parameters", 2 * params // owners, group - 1, ring=Ring.WITHIN if within else Ring.ALL)
    return [*reduced, *updated, *[broadcast] * (owners if ranks > 1 else 0)]


def _ring(sent: Sent, ranks: int) -> Sent:
    """Which ring a collective of a row with groups goes round, as one goes round k ranks in k-1 hops."""
    rings = {NODE - 1: Ring.WITHIN, ranks // NODE - 1: Ring.ACROSS, ranks - 1: Ring.ALL}
    return replace(sent, ring=rings[sent.messages])


@cache
def _runner_of(
    model: str, micro_batch: int, sequence: int, accumulate: int, checkpoint: Any, row: Stage, wire: str | None
) -> Runner:
    config = MODELS[model]
    if config["model_type"] == "gpt2":
        config = {**config, "n_positions": sequence}
    convention, precision = ("zero", "bf16") if row == ZeRO1 else ("fsdp2", None)
    asked = Question(
        model=model, asked=[NODE], gpus=[NODE], rows=[row], micro_batch=micro_batch, sequence=sequence,
        accumulate=accumulate, checkpoint=checkpoint, wire=wire,
        convention=convention, precision=precision,
    )  # fmt: skip
    return Runner(ConfigSource(config, model, model, Finetuning()), question.check(asked))


def _runner(run: Run) -> Runner:
    wire = None if run.reduced_in == "fp32" else run.reduced_in
    return _runner_of(run.model, run.micro_batch, run.sequence, run.accumulate, run.checkpoint, ROWS[run.scheme], wire)
