"""A perceptron's losses and gradients on each rank's rows, written a second time for ``reference``.

Owns plain loops over ranks and layers. It must not import the rooms that it is held against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerosim.bands import Array, DType

FP32 = np.dtype(np.float32)

Pair = tuple[Array, Array]
Given = Pair | list[Pair]  # what a rank trains on in a step: rows to be cut into micro-batches, or each of these
Shape = tuple[int, int]  # a layer's fan-in and fan-out


def micro_batches(given: Given, count: int) -> list[Pair]:
    """A rank's micro-batches: those that it is given, or its rows in ``count`` equal parts."""
    if isinstance(given, list):
        return given
    x, y = given
    rows = max(1, len(x) // count)
    return [(x[at : at + rows], y[at : at + rows]) for at in range(0, max(1, len(x)), rows)]


def added(arrays: Sequence[Array]) -> Array:
    """Their sum in order, rounded to their dtype each time."""
    total = arrays[0]
    for each in arrays[1:]:
        total = total + each
    return total


def forward(shapes: Sequence[Shape], full: Sequence[Array], batch: Sequence[Pair]) -> list[list[Array]]:
    """For each rank its input and every layer's output; ``full`` are each layer's parameters [N or 1, L]."""
    outputs = [[x] for x, _ in batch]
    for layer, params in enumerate(full):
        for rank, output in enumerate(outputs):
            weight, bias = _split(shapes[layer], params[rank % len(params)].astype(FP32))
            y = output[-1] @ weight + bias
            output.append(np.maximum(y, 0) if layer < len(shapes) - 1 else y)
    return outputs


def backward(
    shapes: Sequence[Shape], full: Sequence[Array], outputs: list[list[Array]], slopes: list[Array], dtype: DType
) -> list[Array]:
    """For each layer the gradients [N, L] of each rank's loss, in their dtype; ``slopes`` are its output's."""
    found: list[Array] = []
    for layer in reversed(range(len(shapes))):
        params = full[layer]
        grads = np.zeros((len(outputs), params.shape[1]), dtype)
        for rank in range(len(outputs)):
            weight, _ = _split(shapes[layer], params[rank % len(params)].astype(FP32))
            x, y = outputs[rank][layer : layer + 2]
            slope = slopes[rank] if layer == len(shapes) - 1 else slopes[rank] * (y > 0)
            flat = np.concatenate([(x.T @ slope).reshape(-1), slope.sum(axis=0)])
            grads[rank, : flat.size] = flat.astype(dtype)
            slopes[rank] = slope @ weight.T
        found.insert(0, grads)
    return found


def _split(shape: Shape, flat: Array) -> tuple[Array, Array]:
    """W [I, O] and b [O]."""
    fan_in, fan_out = shape
    return flat[: fan_in * fan_out].reshape(fan_in, fan_out), flat[fan_in * fan_out :][:fan_out]
