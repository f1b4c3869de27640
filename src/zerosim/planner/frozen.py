"""A frozen base in a dtype of its own: in 16 bits, or the matrices of its blocks packed in 4.

Owns which parameters are packed, what that takes, and what using them takes besides. Must not know
torch, nor who froze what.

* ``nf4``: 4 bits an element, and an fp32 scale for each 64 (QLoRA: Dettmers et al., arXiv 2305.14314; bitsandbytes).
* ``nf4-double``: the scales are quantised in turn: a byte for each, and an fp32 scale for 256 of them.

What is no matrix of a block, such as embeddings, the output and norms, is then kept in bf16. A packed matrix is
gathered as it is, and unpacked while it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import get_args

import msgspec

from zerosim.layers import Role
from zerosim.records.question import FrozenDType
from zerosim.worlds.shapes import GroupShapes, ModelShapes, UnitShapes

KINDS: tuple[str, ...] = get_args(FrozenDType)
PLAIN = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
BLOCK, SECOND = 64, 256  # elements that share a scale, and scales that share one
NOTES = {
    "nf4": "of what is frozen, matrices of the blocks are kept packed: 4 bits, and an fp32 scale for each 64; the rest "
    "in bf16",
    "nf4-double": "of what is frozen, matrices of the blocks are kept packed: 4 bits, a byte of scale for each 64, and "
    "an fp32 one for 256 of these; the rest in bf16",
}


def note(kind: str | None) -> list[str]:
    """What is to be said of it."""
    if kind is None:
        return []
    return [NOTES.get(kind, f"what is frozen is kept in {kind}")]


def packed(elements: int, kind: str) -> int:
    """Bytes of a matrix of so many elements.

    >>> packed(128, "nf4"), packed(128 * 256, "nf4-double")
    (72, 16904)
    """
    scales = -(-elements // BLOCK)
    return -(-elements // 2) + (4 * scales if kind == "nf4" else scales + 4 * -(-scales // SECOND))


def held(shapes: ModelShapes, kind: str, blocks: Collection[str], itemsize: int) -> ModelShapes:
    """The same model with what is frozen in that dtype; ``blocks`` names the units whose matrices are packed.

    A unit unpacks a matrix at a time, to ``itemsize`` bytes an element. ValueError if nothing is frozen.
    """
    if all(group.role is not Role.FROZEN for group in shapes.groups):
        raise ValueError(
            "plan(frozen_dtype): nothing of this model is frozen. Train adapters alone, as with --lora "
            "r=8,targets=all-linear, or leave --frozen-dtype out."
        )
    groups: list[GroupShapes] = []
    places: list[tuple[int, ...]] = []
    for group in shapes.groups:
        first = len(groups)
        groups += _held(group, kind, blocks) if group.role is Role.FROZEN else [group]
        places.append(tuple(range(first, len(groups))))

    def moved(unit: UnitShapes) -> UnitShapes:
        unpacked = itemsize * max((_largest(shapes.groups[each], kind, blocks) for each in unit.groups), default=0)
        return msgspec.structs.replace(
            unit,
            groups=tuple(place for group in unit.groups for place in places[group]),
            forward_temporaries=unit.forward_temporaries + unpacked * bool(unit.outputs),
            backward_temporaries=unit.backward_temporaries + unpacked * bool(unit.outputs),
        )

    return msgspec.structs.replace(shapes, groups=tuple(groups), units=tuple(map(moved, shapes.units)))


def _matrices(group: GroupShapes, kind: str, blocks: Collection[str]) -> list[tuple[int, ...]]:
    """Those of a group that are packed."""
    if group.role is not Role.FROZEN or kind in PLAIN or group.name.removesuffix(" frozen") not in blocks:
        return []
    return [shape for shape in group.shapes if len(shape) > 1]


def _largest(group: GroupShapes, kind: str, blocks: Collection[str]) -> int:
    return max(map(prod, _matrices(group, kind, blocks)), default=0)


def _held(group: GroupShapes, kind: str, blocks: Collection[str]) -> Iterator[GroupShapes]:
    matrices = _matrices(group, kind, blocks)
    if matrices:
        nbytes = sum(packed(prod(shape), kind) for shape in matrices)
        yield GroupShapes(f"{group.name} {kind}", ((nbytes,),), group.role, "uint8", sum(map(prod, matrices)))
    rest = group.shapes if not matrices else tuple(shape for shape in group.shapes if len(shape) < 2)
    if rest:
        yield GroupShapes(group.name, rest, group.role, PLAIN.get(kind, "bfloat16"))
