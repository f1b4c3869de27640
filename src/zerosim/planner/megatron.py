"""A configuration planned as Megatron trains it: with its own layer and loss, and the attention that is asked for.

Owns which configurations Megatron's layer is made from, and what is said of the others. The layer itself is
``megatron_model``, which is loaded only where something has to be measured. Must not know schemes, N or cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.planner import shape_cache
from zerosim.planner.config_source import PLAIN, ConfigSource
from zerosim.planner.model_source import ModelSource
from zerosim.records.question import Finetuning
from zerosim.util import arguments
from zerosim.worlds.shapes import ModelShapes

TYPES = ("gpt2", "llama", "mistral", "qwen2")
"""The model types whose blocks are Megatron's: LayerNorm, GELU and learned positions, or RMSNorm, SwiGLU and rotary."""

_KINDS = {
    "flash": "FlashAttention (rows first, so queries, keys, values and the result are copied)",
    "fused": "cuDNN's fused attention",
    "unfused": "attention in single steps, which keep the scores",
}
_OWN = {  # what a configuration of these types may ask for that Megatron's layer has not, and what it must be instead
    "add_cross_attention": False, "attention_bias": False, "mlp_bias": False, "scale_attn_by_inverse_layer_idx": False,
    "activation_function": ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "hidden_act": ("silu", "swish"),
}  # fmt: skip


def source(given: ModelSource, attention: str) -> ModelSource:
    """Where a plan under Megatron's convention takes its model from: the same, with Megatron's layer if it has one."""
    return MegatronSource(given, attention) if isinstance(given, ConfigSource) else given


class MegatronSource(ConfigSource):
    """The model of ``given``, with Megatron's own layer and loss."""

    def __init__(self, given: ConfigSource, attention: str) -> None:
        super().__init__(given._values, given._where, given._label, given._finetuning, given._own_notes)
        self._attention, self._given = attention, given
        self._other = _other(given._values, given._finetuning)

    def notes_for(self, sequence: int | None) -> list[str]:
        """What is to be said about it, for rows of that length."""
        notes = super().notes_for(sequence)
        if self._other:
            return [*notes, f"{self._other}: planned as the Hugging Face module, which keeps more"]
        own = f"Megatron's own layer and loss; {_KINDS[self._attention]}"
        return [own, *(note for note in notes if not note.startswith("attention runs"))]

    def _measure(self, how: tuple[int | None, str, str, str, str], rows: int) -> ModelShapes:
        if self._other:
            return self._given._measure(how, rows)
        if how[1] == "selective":
            raise ValueError(
                "plan(checkpoint): Megatron's selective recomputation runs core attention again, and so do flash and "
                "fused attention always; got 'selective'. Use --attention fused, or --checkpoint full."
            )
        name = shape_cache.key(self._content, rows, *how, "megatron", self._attention)
        shapes = shape_cache.load(name, ModelShapes)
        if shapes is None:
            shapes = self._measured(how, rows)
            shape_cache.save(name, shapes)
        return shapes

    def _measured(self, how: tuple[int | None, str, str, str, str], rows: int) -> ModelShapes:
        arguments.installed("plan(MODEL)", "torch", "transformers", extra="plan", otherwise=PLAIN)
        from zerosim.planner import megatron_kernels, megatron_model
        from zerosim.torch_models.profile import measure

        sequence, checkpoint, compute, loss, kv = how
        made, tokens = megatron_model.made(self._values, self._where, self._attention, grouped=kv == "grouped")
        return measure(
            made, tokens(rows, sequence), megatron_model.TransformerLayer, compute=compute, checkpoint=checkpoint,
            loss=megatron_kernels.loss_of(loss), target=megatron_kernels.target,
        )  # fmt: skip


def _other(values: Mapping[str, Any], finetuning: Finetuning) -> str | None:
    """Why a configuration is not planned with Megatron's layer, if it isn't."""
    kind = values.get("model_type")
    if kind not in TYPES:
        return f"Megatron's layer is made for {', '.join(TYPES)}, and this is {kind}"
    if finetuning.lora or finetuning.frozen_dtype:
        return "Megatron's layer is planned with all of it trained"
    for name, wanted in _OWN.items():
        value = values.get(name, wanted)
        if value != wanted and not (isinstance(wanted, tuple) and value in wanted):
            return f"Megatron's layer has no {name} {value}"
    return None
