"""What the ranks train on.

Owns the data sets and how a step's batch is drawn. Must not know schemes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import numpy as np

from zerosim.bands import Array
from zerosim.util import arguments

Pair = tuple[Array, Array]


def batches(data: str, ranks: int, steps: int, rows: int, widths: tuple[int, int], seed: int) -> Iterator[list[Pair]]:
    """For each step a list with one (x [rows, in], y [rows, out]) of float32 per rank, the same for a seed.

    ``data`` is a key of ``DATA``. ValueError if it does not have ``widths``, ModuleNotFoundError if it needs
    a package that is not installed.
    """
    draw = DATA[data](rows, widths, np.random.default_rng(seed))
    for _ in range(steps):
        yield [draw() for _ in range(ranks)]


def _noise(rows: int, widths: tuple[int, int], rng: np.random.Generator) -> Callable[[], Pair]:
    """Standard normal inputs and targets: nothing to learn but the mean, so the loss falls to about 1."""

    def draw() -> Pair:
        x, y = (rng.standard_normal((rows, width)).astype(np.float32) for width in widths)
        return x, y

    return draw


def _digits(rows: int, widths: tuple[int, int], rng: np.random.Generator) -> Callable[[], Pair]:
    """Handwritten digits of 8 x 8 pixels, scaled to 0..1, to be reproduced.

    They ship with scikit-learn (E. Alpaydin and C. Kaynak, Optical Recognition of
    Handwritten Digits, UCI Machine Learning Repository, 1998).
    """
    arguments.installed("data='digits'", "sklearn", extra="digits", otherwise="use data='noise'")
    datasets = importlib.import_module("sklearn.datasets")
    images: Array = (datasets.load_digits().data / 16).astype(np.float32)
    if widths != (images.shape[1],) * 2:
        raise ValueError(
            f"data='digits' needs a model with {images.shape[1]} inputs and outputs, a pixel each; got {widths}. "
            f"Use widths that begin and end with {images.shape[1]}, or data='noise'."
        )

    def draw() -> Pair:
        x = images[rng.integers(len(images), size=rows)]
        return x, x.copy()

    return draw


DATA: dict[str, Callable[[int, tuple[int, int], np.random.Generator], Callable[[], Pair]]] = {
    "noise": _noise,
    "digits": _digits,
}
