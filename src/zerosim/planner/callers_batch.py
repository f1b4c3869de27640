"""The batch as whoever trains holds it: to the end of the step, and in a dtype of its own.

Owns what of it a step holds beside what the schedule does, which has what the forward reads, from its forward to its
backward: of inputs of floating point, which are cast as they come in, what they are cast from; and while the optimizer
works, the batch itself. Tokens are a few bytes each, and are left out. Must not know torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from zerosim.bands import Array, Band
from zerosim.schemes import Scheme
from zerosim.worlds.shapes import ModelShapes, ShapeModel, Tensor


def as_given(shapes: ModelShapes, tensors: Iterable[Any]) -> ModelShapes:
    """The same model that is called with these torch tensors, of which its forward reads some in another dtype."""
    read = {each.dtype for each in shapes.inputs}
    named = [Tensor(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors]
    return msgspec.structs.replace(shapes, given=tuple(each for each in named if each.dtype not in read))


class CallersBatch(Scheme):
    """A training step whose caller has the batch on the card."""

    def _micro_batch(self, *given: Any, **options: Any) -> Any:
        with self._holding(self._given()):
            return super()._micro_batch(*given, **options)

    def _apply(self, *given: Any) -> None:
        with self._holding(self._given() or self._read()):
            super()._apply(*given)

    def _given(self) -> tuple[Tensor, ...]:
        return self.model.shapes.given if isinstance(self.model, ShapeModel) else ()

    def _read(self) -> tuple[Tensor, ...]:
        """What needs no cast."""
        inputs = self.model.shapes.inputs if isinstance(self.model, ShapeModel) else ()
        return tuple(each for each in inputs if np.dtype(each.dtype).kind not in "iub")

    @contextmanager
    def _holding(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        held: list[Array] = [
            self.ranks.hold(Band.ACTIVATIONS, each.shape, "batch", np.dtype(each.dtype)) for each in tensors
        ]
        yield
        for array in held:
            self.ranks.free(array)
