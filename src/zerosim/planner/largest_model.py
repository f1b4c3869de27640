"""How large a model of a family fits under each row on N cards, found by running the schedule.

Owns the families, each a model for every integer from 1 on, larger and larger. Must not know
how a plan is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import msgspec

from zerosim.planner import search
from zerosim.planner.config_source import ConfigSource
from zerosim.planner.model_source import ModelSource, Perceptron
from zerosim.planner.runner import Runner
from zerosim.records.plan import LargestModel, LargestModels, Plan
from zerosim.records.question import Question
from zerosim.stages import Stage
from zerosim.util.garbage import collection_paused

MOST = 1024  # the largest member of a family that is tried
WIDTH = 128  # of a head, and by how much a model is wider than the one before
MLP_LAYERS = 16


@dataclass(frozen=True)
class Family:
    """A name, what its members are, and how the k-th is made: what it is called, and its source."""

    name: str
    about: str
    member: Callable[[int], tuple[str, ModelSource]]


def _mlp(k: int) -> tuple[str, ModelSource]:
    width = WIDTH * k
    return f"{MLP_LAYERS} layers of width {width:,}", Perceptron([width] * (MLP_LAYERS + 1))


def _decoder(k: int, **values: Any) -> tuple[str, ModelSource]:
    shape = f"{k} layers of width {WIDTH * k:,}"
    return shape, ConfigSource(values, f"a decoder of {shape}", f"a decoder of {shape}")


def _gpt(k: int) -> tuple[str, ModelSource]:
    return _decoder(
        k, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_layer=k, n_embd=WIDTH * k, n_head=k,
        n_positions=2048, vocab_size=50_257,
    )  # fmt: skip


def _llama(k: int) -> tuple[str, ModelSource]:
    width = WIDTH * k
    return _decoder(
        k, model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=k, hidden_size=width,
        num_attention_heads=k, num_key_value_heads=gcd(k, 8), intermediate_size=7 * width // 2, vocab_size=128_256,
        max_position_embeddings=131_072, tie_word_embeddings=False,
    )  # fmt: skip


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("mlp", f"The k-th perceptron has {MLP_LAYERS} layers of width {WIDTH}k.", _mlp),
        Family(
            "gpt",
            f"The k-th GPT-2 has k layers of width {WIDTH}k with k heads, 2,048 positions and 50,257 tokens; k = 96 is "
            f"the shape of GPT-3.",
            _gpt,
        ),
        Family(
            "llama",
            f"The k-th Llama has k layers of width {WIDTH}k with k heads, of keys and values as many as k and 8 have "
            f"in common, a feed-forward of 3.5 times the width, and 128,256 tokens; k = 32 is Llama-3.1-8B.",
            _llama,
        ),
    )
}


def work(question: Question) -> int:
    """How often ``added`` tells that it has advanced."""
    return len(question.rows) * len(question.asked) if question.largest_model else 0


@collection_paused()
def added(plan: Plan, advance: Callable[[str], None]) -> Plan:
    """The plan with the largest models that its question asks for. ValueError if it asks for none, or for no card."""
    question = plan.question
    family = FAMILIES.get(question.largest_model or "")
    if family is None or question.memory is None:
        raise ValueError(
            f"plan(largest_model): one of {', '.join(FAMILIES)}, and the memory of a card; got "
            f"{question.largest_model!r} and {question.memory!r}."
        )
    trial = _Search(family, question)
    found = []
    for ranks in question.asked:
        first = 1
        for row in question.rows:
            largest = trial.largest(row, ranks, question.memory - question.reserve, max(first, 1))
            first = largest.size
            found.append(largest)
            advance(f"largest {family.name} under {row.name}, N = {ranks:,}")
    return msgspec.structs.replace(
        plan, largest_models=LargestModels(family=family.name, about=family.about, found=found)
    )


class _Search:
    """Tries members of a family; what is prepared for one is kept for the other rows and numbers of GPUs."""

    def __init__(self, family: Family, question: Question) -> None:
        self._family, self._question = family, question
        self._runners: dict[int, tuple[str, Runner]] = {}

    def largest(self, row: Stage, ranks: int, memory: int, first: int) -> LargestModel:
        """The largest member that fits under ``row`` on ``ranks`` cards."""
        size = search.largest(lambda k: self._runner(k)[1].fits(row, ranks, memory), MOST, first=first)
        if not size:
            return LargestModel(row=row, ranks=ranks, size=0, shape="", params=0, peak=None, at_least=False)
        shape, runner = self._runner(size)
        return LargestModel(
            row=row, ranks=ranks, size=size, shape=shape, params=runner.prepare(row).model.n_params,
            peak=runner.run(row, ranks).peak, at_least=size == MOST,
        )  # fmt: skip

    def _runner(self, k: int) -> tuple[str, Runner]:
        if k not in self._runners:
            shape, source = self._family.member(k)
            self._runners[k] = shape, Runner(source, self._question)
        return self._runners[k]
