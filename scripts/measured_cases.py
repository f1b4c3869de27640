"""Which plan each measured number of ``recorded/measured_memory.csv`` is held to, and what remains between the two.

Owns the plans (as keywords of ``zerosim.plan``), the bands, and the causes. A cause is what is known of the run apart
from the number. Must not know how a plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerosim.stages import DP, Stage, ZeRO1, ZeRO3, ZeRO3Kept

PEAK, REST = 0.05, 0.02  # how far an eager run's allocated or active peak may be off, and what is held at rest
GROWTH, FLASH = 0.03, 0.04  # Megatron's peak over what it holds at rest; with one attention kernel
WORKSPACE = (68, 101)  # MiB that Megatron's runs hold at rest beside their states
COMPILED = (0.95, 1.45)  # a plan, which is of an eager run, over the peak of a compiled one
RESERVED = (0.65, 0.85)  # what a plan has allocated, over what the allocator has taken from the card

CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt-512": {  # Megatron's test model
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "n_embd": 512, "n_head": 8, "n_layer": 12, "n_positions": 1024, "vocab_size": 50304,
    },
    "gpt2-7168": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "n_embd": 7168, "n_head": 32, "n_layer": 40, "n_positions": 1024, "vocab_size": 50257,
    },
    "gpt2-8192": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "n_embd": 8192, "n_head": 32, "n_layer": 64, "n_positions": 1024, "vocab_size": 50257,
    },
    "stablecode-alpha-3b": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 2560,
        "intermediate_size": 10240, "max_position_embeddings": 16384, "num_attention_heads": 32,
        "num_hidden_layers": 32, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
        "vocab_size": 49152,
    },
}  # fmt: skip
"""Configurations of models that have none of their own on a hub."""

MODULES: Mapping[str, tuple[str, tuple[int, ...], str]] = {
    "encoder-4096": ("Encoder", (50257, 4096, 32, 32, 512), "EncoderBlock"),
    "litgpt-llama-2-7b": ("LitLlama", (32000, 4096, 32, 32, 11008), "LitBlock"),
    "litgpt-llama-2-13b-2": ("LitLlama", (32000, 5120, 2, 40, 13824), "LitBlock"),
    "litgpt-llama-2-13b-10": ("LitLlama", (32000, 5120, 10, 40, 13824), "LitBlock"),
}
"""Classes of ``measured_models``, what they are made with, and the class of their blocks."""


@dataclass(frozen=True)
class Case:
    """One plan: a model (a hub's name, or a key of the above), and keywords of ``zerosim.plan``."""

    model: str
    gpus: int
    row: Stage = ZeRO3
    options: Mapping[str, Any] = field(default_factory=dict)


def _megatron(row: Stage, attention: str, checkpoint: str = "none") -> Case:
    return Case(
        "gpt-512", 8, row,
        {"micro_batch": 4, "seq": 1024, "convention": "megatron", "attention": attention, "checkpoint": checkpoint},
    )  # fmt: skip


_BF16 = {"convention": "fsdp2", "precision": "pure-bf16"}
_ENCODER = {
    "seq": 512, "checkpoint": "full", "convention": "deepspeed",
    "zero": {"reduce_bucket_size": 5e7, "stage3_param_persistence_threshold": 0},
}  # fmt: skip
_AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
_BIG = {"micro_batch": 4, "seq": 1024, "checkpoint": "full", "convention": "deepspeed", "zero": _AUTO}
_TUNE = {"micro_batch": 2, "seq": 4096, "kv": "expanded", **_BF16}
_CODE = {"loss": "bf16", **_BF16}

CASES: Mapping[str, Case] = {
    "mg-unfused": _megatron(ZeRO1, "unfused"),
    "mg-flash": _megatron(ZeRO1, "flash"),
    "mg-fused": _megatron(ZeRO1, "fused"),
    "mg-full": _megatron(DP, "flash", "full"),
    "mg-full-unfused": _megatron(DP, "unfused", "full"),
    "titan": Case(
        "meta-llama/Llama-2-7b-hf", 8, ZeRO3,
        {"micro_batch": 8, "seq": 2048, "checkpoint": "full", "convention": "fsdp2", "loss": "fp32-kept"},
    ),
    "ds-bf16": Case("encoder-4096", 4, ZeRO3, {**_ENCODER, "precision": "bf16"}),
    "ds-low": Case("encoder-4096", 4, ZeRO3, {**_ENCODER, "precision": "bf16-master"}),
    "bs-n16": Case("gpt2-7168", 16, ZeRO3, _BIG),
    "bs-n32": Case("gpt2-8192", 32, ZeRO3, _BIG),
    "lit-7b": Case("litgpt-llama-2-7b", 8, ZeRO3Kept, {"seq": 4096, **_BF16}),
    "lit-2-single": Case("litgpt-llama-2-13b-2", 1, ZeRO3, {"micro_batch": 2, "seq": 4096, **_BF16}),
    "lit-2-zero3": Case("litgpt-llama-2-13b-2", 8, ZeRO3, {"micro_batch": 2, "seq": 4096, **_BF16}),
    "lit-10-single": Case("litgpt-llama-2-13b-10", 1, ZeRO3, {"micro_batch": 2, "seq": 4096, **_BF16}),
    "lit-10-zero3": Case("litgpt-llama-2-13b-10", 8, ZeRO3, {"micro_batch": 2, "seq": 4096, **_BF16}),
    "code-2048": Case("stablecode-alpha-3b", 1, ZeRO3, {"seq": 2048, **_CODE}),
    "code-8192": Case("stablecode-alpha-3b", 1, ZeRO3, {"seq": 8192, **_CODE}),
    "code-16384": Case("stablecode-alpha-3b", 1, ZeRO3, {"seq": 16384, **_CODE}),
    "tune": Case("meta-llama/Llama-3.2-3B", 1, ZeRO3, _TUNE),
    "tune-chunked": Case("meta-llama/Llama-3.2-3B", 1, ZeRO3, {**_TUNE, "loss": "chunked"}),
    "tune-checkpoint": Case("meta-llama/Llama-3.2-3B", 1, ZeRO3, {**_TUNE, "loss": "chunked", "checkpoint": "full"}),
}  # fmt: skip
"""On one GPU nothing is gathered, and what is left of FSDP2's rules is an eager step of torch."""


@dataclass(frozen=True)
class Held:
    """One measured number beside a plan's.

    ``quantity`` is what of the plan: ``peak``, ``rest``, ``partition`` (elements of the parameters' shard) or ``init``
    (parameters, and what is whole of them, before the first step). ``kind`` is what may be said of it: ``eager``,
    ``workspace`` (at rest, and the rest of it known as memory of libraries), ``compiled``, ``reserved`` or ``none``.
    """

    case: str | None
    quantity: str
    kind: str
    cause: str


_LIBRARIES = (
    "workspaces: Transformer Engine's, of 4 MiB and on Hopper 32 (get_cublas_workspace_size_bytes), and 64 to 73 MiB "
    "that were not traced"
)
_SAME = "the workspaces of the next table, and 4.1 MiB, of which one hidden state would be 4"
_INDUCTOR = "inductor keeps less for the backward"
_FUSED = f"{_INDUCTOR}; the plan's peak is the update, with foreach's temporaries, where theirs is fused"
_MASKS = "causal masks of 1 MiB each (transformers of 2021), less small parameters, which are gathered later"
_FSDP1 = f"{_INDUCTOR}; FSDP1's parameters are views of what is gathered, without FSDP2's buffer, 0.66 GB of the root"
_FRAGMENTS = "reserved by the allocator, which keeps what was freed; the plan says what is allocated"

HELD: Mapping[str, Held] = {
    **{f"mg-unfused-{card}-{part}": Held("mg-unfused", part, kind, cause)
       for card in ("a100", "h100")
       for part, kind, cause in (("rest", "workspace", _LIBRARIES), ("peak", "eager", _SAME))},
    "mg-default-a100-rest": Held("mg-flash", "rest", "workspace", _LIBRARIES),
    "mg-default-a100-peak": Held("mg-flash", "peak", "eager", f"{_SAME}; here the default is FlashAttention"),
    "mg-default-h100-rest": Held("mg-fused", "rest", "workspace", _LIBRARIES),
    "mg-default-h100-peak": Held("mg-fused", "peak", "eager", f"{_SAME}; here the default is cuDNN's attention"),
    **{f"mg-full-{card}-{part}": Held("mg-full", part, kind, cause)
       for card in ("a100", "h100")
       for part, kind, cause in (("rest", "workspace", _LIBRARIES), ("peak", "eager", _SAME))},
    "mg-full-unfused-a100-rest": Held("mg-full-unfused", "rest", "workspace", _LIBRARIES),
    "mg-full-unfused-a100-peak": Held("mg-full-unfused", "peak", "eager", _SAME),
    "titan-fsdp2-active": Held(
        "titan", "peak", "eager",
        "0.14 GiB that were not traced, workspaces among them. The loop has a name for its fp32 logits until after the "
        "backward (`pred`, deleted since torchtitan#391), hence `fp32-kept`",
    ),
    "titan-fsdp1-active": Held(
        "titan", "peak", "eager",
        "FSDP1, planned by FSDP2's rules: that FSDP2 needs less is what the pull request shows",
    ),
    "titan-fsdp1-reserved": Held("titan", "peak", "reserved", _FRAGMENTS),
    "titan-fsdp2-reserved": Held("titan", "peak", "reserved", _FRAGMENTS),
    "titan-compile-reserved": Held("titan", "peak", "reserved", f"{_FRAGMENTS}; and compiled"),
    "ds-bf16-rest": Held("ds-bf16", "rest", "eager", "workspaces and the batch"),
    "ds-bf16-peak": Held("ds-bf16", "peak", "eager", "what is missing at rest; the peak is the update's sub-group"),
    "ds-low-rest": Held("ds-low", "rest", "eager", "workspaces and the batch"),
    "ds-low-peak": Held(
        "ds-low", "peak", "eager",
        "0.11 GiB are missing at rest; autocast runs norms and loss in fp32; a weight and its bias are copied out of "
        "one buffer, at most 0.13 GiB",
    ),
    "bs-n16-partition": Held("bs-n16", "partition", "exact", "nothing"),
    "bs-n32-partition": Held("bs-n32", "partition", "exact", "nothing"),
    "bs-n16-init": Held("bs-n16", "init", "eager", f"40 {_MASKS}"),
    "bs-n32-init": Held("bs-n32", "init", "eager", f"64 {_MASKS}"),
    "lit-fsdp2-eager": Held("lit-7b", "peak", "eager", "nothing"),
    "lit-fsdp2-compile": Held("lit-7b", "peak", "compiled", _INDUCTOR),
    "lit-fsdp1-compile": Held("lit-7b", "peak", "compiled", f"{_INDUCTOR}; FSDP1"),
    **{f"lit-{layers}-single": Held(f"lit-{layers}-single", "peak", "compiled", _INDUCTOR) for layers in (2, 10)},
    **{f"lit-{layers}-zero3": Held(f"lit-{layers}-zero3", "peak", "compiled", _FSDP1) for layers in (2, 10)},
    "code-2048": Held("code-2048", "peak", "compiled", _FUSED),
    "code-8192": Held("code-8192", "peak", "compiled", _INDUCTOR),
    "code-16384": Held("code-16384", "peak", "compiled", _INDUCTOR),
    "tune-baseline": Held(None, "peak", "none", "its rows have the lengths of a data set, which are not published"),
    "tune-packed": Held("tune", "peak", "eager", "0.34 GiB that were not traced, workspaces among them"),
    "tune-compile": Held("tune", "peak", "compiled", _INDUCTOR),
    "tune-chunked": Held("tune-chunked", "peak", "compiled", _INDUCTOR),
    "tune-checkpoint": Held("tune-checkpoint", "peak", "compiled", _FUSED),
}  # fmt: skip
