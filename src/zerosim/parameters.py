"""A layer's full parameters while it computes, and where they come from if they are sharded.

Owns what is gathered, how far ahead, and when it is released. Must not know what a layer
computes, nor gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from zerosim.bands import Array, Band
from zerosim.buckets import Bucket
from zerosim.layers import Flat, Group, Layer, Role
from zerosim.ranks import Ranks


class Parameters:
    """The parameters of a model's groups: there already or, if ``sharded``, gathered by ``gather(bucket, full)``.

    ``ahead`` is how many further layers are gathered before one computes; ``at_once`` gathers
    the whole model instead, as a toy would.
    """

    def __init__(
        self,
        buckets: Mapping[Group, Bucket],
        ranks: Ranks,
        gather: Callable[[Bucket, Array], None],
        *,
        sharded: bool,
        ahead: int,
        at_once: bool,
    ) -> None:
        self._buckets, self._ranks, self._gather = buckets, ranks, gather
        self._sharded, self._ahead, self._at_once = sharded, ahead, at_once
        self._full: dict[Group, Array] = {}

    @contextmanager
    def for_pass(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Around a forward or a backward pass: where everything is gathered at once, it is here, and released after."""
        if self._at_once:
            self._fetch(layers)
        yield
        self._release(list(self._full))

    @contextmanager
    def of(self, layers: Sequence[Layer], index: int) -> Iterator[Flat]:
        """The full parameters of ``layers[index]`` for as long as the block lasts; ``layers`` are in order of use."""
        coming = layers[index + 1 : index + 1 + self._ahead]
        self._fetch([layers[index], *coming])
        flats = [self._flat(group) for group in layers[index].groups]
        yield flats[0] if len(flats) == 1 else flats
        if not self._at_once:
            soon = {group for layer in coming for group in layer.groups}
            self._release([group for group in layers[index].groups if group not in soon])

    def forget(self) -> None:
        """After an error: what was gathered has been given back by others."""
        self._full = {}

    def _flat(self, group: Group) -> Array:
        if group.role is Role.BUFFER:
            return self._buckets[group].states[Band.BUFFERS]
        return self._full[group] if self._sharded else self._buckets[group].states[Band.PARAMS]

    def _fetch(self, layers: Sequence[Layer]) -> None:
        if not self._sharded:
            return
        for group in (group for layer in layers for group in layer.groups):
            if group.role is not Role.BUFFER and group not in self._full:
                bucket = self._buckets[group]
                self._full[group] = full = self._ranks.hold(Band.GATHERED, (bucket.padded,), bucket.name)
                self._gather(bucket, full)

    def _release(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if group in self._full:
                self._ranks.free(self._full.pop(group))
