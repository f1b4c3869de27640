"""One rank watched through a step: what goes into its module, what it asks for, what it holds, and what is left.

Owns the hooks and when each is in place: they are set when a step begins and gone when it ends.
Changes nothing of the user's and sends nothing. Must not know what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from zerosim.bands import Array
from zerosim.conformance.collectives import Watch
from zerosim.conformance.forward_hooks import ForwardHooks
from zerosim.conformance.layout import Layout, Matcher, Memory, Piece, assemble
from zerosim.conformance.optimizers import Optimizers, Runs
from zerosim.conformance.patience import Patience
from zerosim.conformance.search import State
from zerosim.conformance.seen import Seen, copied
from zerosim.conformance.side import Side
from zerosim.conformance.storages import Storages
from zerosim.real_ranks.meter import Counters, Kernel
from zerosim.records.conformance import Asked
from zerosim.torch_models import trees

Tensor = Any
Tree = Any
Handed = Callable[[], list[Piece]]


class Observer:
    """A rank's eyes on ``net``, whose parameters lie as ``layout`` has it."""

    def __init__(self, net: torch.nn.Module, layout: Layout, loss: Callable[[Any, Any], Any], *, memory: bool) -> None:
        self.net, self.layout, self.loss = net, layout, loss
        self._storages = Storages(self._parameters(), counting=memory)
        self._lasting: dict[str, tuple[str, Handed, Sequence[Tensor]]] = {}  # handed over, by what and of whom
        self._handed: dict[str, tuple[str, list[Piece]]] = {}  # within this step
        self._after: list[Piece] | None = None  # what the last step left
        self._layouts: Any = None  # what was asked when this rank's own part was last looked for
        self._owned: list[tuple[int, int]] = []
        self._state = State(layout)
        self._runs: dict[int, tuple[Tensor, Runs]] = {}  # of which parameters an optimizer's tensors are copies
        self._stack = ExitStack()

    def ready(self, side: Side, patience: Patience, own: Sequence[Tensor], copy: torch.nn.Module) -> Observer:
        """Everything is there: the rank, who must be told of what it does, and what of the memory is the check's.

        ``copy`` is the module as it was when the check was made.
        """
        self._created = dict(copy.named_parameters())
        self.kernel = Kernel(side.sockets)
        self._storages.ignore(own)
        self.rank, self.patience = side.rank, patience
        self.seen = Seen(side.rank, 0)
        return self

    def _parameters(self) -> dict[str, Tensor]:
        """The module's parameters by name, as they are now: what has wrapped it may have put others in their place."""
        return {name: each for name, each in self.net.named_parameters() if name in self.layout}

    # -- the step

    def begin(self, step: int, x: Tree, y: Tree, lr: float | None, loss_scale: float | None) -> None:
        """Set the hooks, and take down what is there."""
        self._handed = {}
        self.seen = seen = Seen(self.rank, step, copied(x), copied(y), lr=lr, loss_scale=loss_scale)
        seen.rows = next((len(tensor) for tensor in trees.tensors(seen.x)), 0)
        seen.training = self.net.training
        seen.buffers = {name: array.detach().cpu().clone() for name, array in self.net.named_buffers()}
        net = self._parameters()
        self._memory = Memory(self.layout, net)
        before = self._now(net)
        if self._after is None or _changed(before, self._after):
            seen.before = before
        if step == 1 and self.rank == 0:
            seen.created = self._whole(self._created)
        self._before = before
        self._watch = Watch(self._label, self._ask, self._saw, keep=True)
        self._optimizers = Optimizers(self._memory, self._matcher, self._watch, self._runs)
        self._storages.ignore([*trees.tensors((x, y, seen.x, seen.y)), *seen.buffers.values()])
        self._storages.begin()
        self._stack = stack = ExitStack()
        partial = {name for name, each in net.items() if self._at_rest(name, each) is None or isinstance(each, DTensor)}
        stack.enter_context(ForwardHooks(self.net, self.layout, self.loss, seen, self._watch, partial))
        stack.enter_context(self._optimizers)
        stack.enter_context(self._storages.resizing())
        self._counted = self._count()
        stack.enter_context(self._watch)

    def end(self) -> Seen:
        """Take the hooks away; everything that was seen."""
        self._stack.close()
        counted = self._count().since(self._counted)
        seen, net = self.seen, self._parameters()
        self._memory = Memory(self.layout, net)
        seen.kernel = counted.tcp_sent if counted.tcp_sent is not None else counted.written
        seen.asked = self._watch.asked
        for key, (band, handed, _) in self._lasting.items():
            if band != "params" and key not in self._handed:
                seen.bands[band] = [*seen.bands.get(band, []), *handed()]
        for band, pieces in self._handed.values():
            seen.bands[band] = [*seen.bands.get(band, []), *pieces]
        for bands in (self._optimizers.bands, self._state.bands()):
            for band, pieces in bands.items():
                seen.bands.setdefault(band, pieces)
        seen.params = seen.bands.pop("params", []) + self._now(net)
        self._after = seen.params
        seen.numbers = self._optimizers.numbers
        seen.owned = self._find_owned()
        seen.held = self._storages.held(self._by_band(net))
        return seen

    def _count(self) -> Counters:
        try:
            return self.kernel.read()
        except OSError:  # one of the sockets is gone
            return Counters(None, None, None, None, None)

    def look_for_state(self, grad: Array) -> dict[str, list[Piece]]:
        """Look among this rank's tensors for the state of an optimizer of the user's own, after its first step."""
        return self._state.look(self._storages.users(), grad, self.layout.parameters[0].rule)

    def abandon(self) -> None:
        """The step has raised: take the hooks away."""
        self._stack.close()

    def band(self, name: str, key: str, handed: Handed, tensors: Sequence[Tensor], *, now: bool) -> None:
        """Something handed over: as it is now, or, outside of a step, as it will be at the end of each."""
        if now:
            with self._watch.paused():
                self._handed[key] = name, handed()
        else:
            self._lasting[key] = name, handed, tensors

    # -- what the hooks do

    def _ask(self, asked: Asked) -> None:
        if not asked.kind.value.startswith(("send", "receive")):
            self.patience.board.ask(asked.group, str(asked))
            self.patience.check_order()

    def _saw(self, tensors: Sequence[Tensor]) -> None:
        self.patience.board.beat()
        self._storages.see(tensors)

    def _label(self, tensor: Tensor) -> str:
        for grads, what in ((False, "{}"), (True, "gradient of {}")):
            names = self._memory.names(tensor, grads=grads)
            if names:
                some = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
                return what.format(some)
        return ""

    # -- what is there

    def _at_rest(self, name: str, tensor: Tensor) -> list[Piece] | None:
        if not isinstance(tensor, DTensor) and tensor.untyped_storage().nbytes() == 0 and tensor.numel():
            return None
        return self.layout.whole_or_shard(name, tensor)

    def _whole(self, net: dict[str, Tensor]) -> list[Piece]:
        found = [self._at_rest(name, tensor) for name, tensor in net.items()]
        return [piece for pieces in found if pieces is not None for piece in pieces]

    def _now(self, net: dict[str, Tensor]) -> list[Piece]:
        """The parameters as they are: those that are handed over, and then those that the module has."""
        handed = [piece for band, pieces, _ in self._lasting.values() if band == "params" for piece in pieces()]
        return handed + self._whole(net)

    def _matcher(self, *, after: bool = False) -> Matcher | None:
        """Finds copies of parts of the parameters, as they were when the step began or as they are."""
        pieces = self._whole(self._parameters()) + self.seen.read if after else self._before
        if not pieces:
            return None
        flat, known = np.zeros(self.layout.size, pieces[0].values.dtype), np.zeros(self.layout.size, bool)
        assemble([piece for piece in pieces if piece.values.dtype == flat.dtype], flat, known)
        return Matcher(flat, known)

    def _find_owned(self) -> list[tuple[int, int]]:
        """Which elements this rank gave to others, by the bits that it put into what only copies."""
        given = [array for array in self._watch.given if array.size]
        signature = [(array.size, str(array.dtype)) for array in given]
        if signature != self._layouts and given and (matcher := self._matcher(after=True)) is not None:
            self._layouts = signature
            self._owned = [
                (place, place + length)
                for array in given
                for place, _, length in matcher.find(array)
                if length >= min(4, array.size)
            ]
        return self._owned if given else []

    def _by_band(self, net: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        bands: dict[str, list[Tensor]] = {
            "params": list(net.values()),
            "grads": [],
            "optimizer state": [*self._optimizers.tensors, *self._state.tensors],
        }
        bands["grads"] = [each.grad for each in net.values() if each.grad is not None]
        for name, _, tensors in self._lasting.values():
            kind = name.removeprefix("handed ") if name in ("params", "handed grads") else "optimizer state"
            bands[kind] = [*bands[kind], *tensors]
        return bands


def _changed(now: Sequence[Piece], before: Sequence[Piece]) -> bool:
    """Whether any of what is there now is not as it was."""
    known = {(piece.start, len(piece.values)): piece.values for piece in before}
    return any(
        (key := (piece.start, len(piece.values))) not in known or not _same(piece.values, known[key]) for piece in now
    )


def _same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()
