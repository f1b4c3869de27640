"""Numbers as int8 in blocks that share an fp32 scale, as ZeRO++ sends parameters (qwZ: arXiv 2306.10209).

Owns the arithmetic and the layout of a message; must not know ranks, models or rings. Symmetric: with the largest
magnitude m of a block of up to 256 numbers, its scale is m / 127 and x becomes round(x / scale), ties to even, all
in fp32. A message of n numbers is its ceil(n / 256) scales and then n bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.bands import FP32, Array
from zerosim.util.casts import convert
from zerosim.util.shapes import Float32, Int8, Shaped

BLOCK = 256
_MOST = np.float32(127)


def length(count: Any) -> Any:
    """Bytes of a message of so many numbers, an integer or an array of them.

    >>> length(256), length(257)
    (260, 265)
    """
    return count + FP32.itemsize * -(-count // BLOCK)


def scales(message: Int8[Array, "... M"]) -> Float32[Array, "... k"]:
    """The scales in a message, a view."""
    blocks = -(-message.shape[-1] // (BLOCK + FP32.itemsize))
    return message[..., : FP32.itemsize * blocks].view(FP32)


def pack(values: Shaped[Array, "... n"], message: Int8[Array, "... M"]) -> None:
    """Write ``values`` to a contiguous ``message``. What is not finite makes its block so."""
    if not isinstance(message, np.ndarray):  # a shape without values
        return
    blocks = _blocks(values)
    message = message.reshape(len(blocks), -1)
    with np.errstate(all="ignore"):
        scale = np.abs(blocks).max(axis=2) / _MOST
        np.divide(blocks, np.where(scale > 0, scale, 1)[..., None], out=blocks)
        np.clip(np.rint(blocks, out=blocks), -_MOST, _MOST, out=blocks)
        scales(message)[...] = scale
        numbers = message[:, FP32.itemsize * scale.shape[1] :]
        numbers[...] = blocks.reshape(len(blocks), -1)[:, : numbers.shape[1]]


def unpack(message: Int8[Array, "... M"], out: Shaped[Array, "... n"]) -> None:
    """Write to ``out`` the numbers of a ``message``, rounded to its dtype."""
    if not isinstance(message, np.ndarray):
        return
    scale = scales(message)
    blocks = _blocks(message[..., FP32.itemsize * scale.shape[-1] :])
    with np.errstate(all="ignore"):
        np.multiply(blocks, scale.reshape(*blocks.shape[:2], 1), out=blocks)
    convert(blocks.reshape(len(blocks), -1)[:, : out.shape[-1]].reshape(out.shape), out)


def _blocks(numbers: Shaped[Array, "... n"]) -> Float32[Array, "rows k block"]:
    """Numbers in fp32, in rows of whole blocks: a register, zero beyond them."""
    count = numbers.shape[-1]
    blocks = np.zeros((numbers.size // count, -(-count // BLOCK) * BLOCK), FP32)
    convert(numbers.reshape(len(blocks), count), blocks[:, :count])
    return blocks.reshape(len(blocks), -1, BLOCK)
