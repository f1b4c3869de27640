"""The rows: what each scheme shards, over whom, and where it lives. Start here, then read ``schemes.py``.

A scheme is a row of a table. For each kind of state (optimizer, gradients, parameters) it says over
which ranks that is sharded: nobody, the group (a node: S of the N ranks), or all N (ZeRO: Rajbhandari
et al., arXiv 1910.02054; groups: MiCS, arXiv 2205.00119). It says how long a gathered copy of the
parameters stays, and which states are offloaded to the host (arXiv 2101.06840, 2104.07857).

N = D S ranks are D groups of S; rank r = d S + s is member s of group d. Owns the rows, who owns which
piece, and the rules that a row must keep. Must not know the training step that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from zerosim.bands import Band
from zerosim.options import Options, chosen, with_options
from zerosim.util.front_door import public

if TYPE_CHECKING:
    from zerosim.schemes import Scheme

Sharded = Any  # an ``Over``, once the row is made; a caller may pass its value, or True or False
OFFLOADABLE = ("optimizer", "grads", "params")


class Over(StrEnum):
    """Over which ranks a state is sharded. True and False, in its place, are all and nobody."""

    NOBODY = "nobody"
    GROUP = "group"
    ALL = "all"

    def __bool__(self) -> bool:
        return self is not Over.NOBODY

    def on(self, ranks: int, node: int) -> Over:
        """What it comes to on so many ranks in groups of ``node``: one rank has nobody to shard with."""
        if self is Over.GROUP:
            return Over.NOBODY if node == 1 else Over.ALL if node == ranks else self
        return self if ranks > 1 else Over.NOBODY


def kind_of(band: Band) -> str:
    """Which kind of state a model state is: "params", "grads" or "optimizer"."""
    return {Band.PARAMS: "params", Band.GRADS: "grads"}.get(band, "optimizer")


@dataclass(frozen=True)
class Stage:
    """A row of the table. Calling it starts a training run, a ``Scheme``.

    * ``optimizer``, ``grads``, ``params``: over whom each is sharded, ``"all"`` ranks (or True), the
      ``"group"``, or ``"nobody"`` (or False).
    * ``reshard_after_forward``: gathered parameters are released after each use (True), kept from forward to
      backward (False), or kept in between as a second copy that is sharded over the ``"group"``.
    * ``offload``: which of ``"optimizer"``, ``"grads"`` and ``"params"`` are held by the host.

    ValueError for a row that makes no sense.

    >>> mine = Stage("mine", optimizer="all", grads="group")
    >>> mine.piece(Band.GRADS, rank=5, ranks=8, node=4), mine.piece(Band.MASTER, rank=5, ranks=8, node=4)
    ((1, 4), (3, 8))
    """

    name: str
    optimizer: Sharded = Over.NOBODY
    grads: Sharded = Over.NOBODY
    params: Sharded = Over.NOBODY
    reshard_after_forward: bool | Literal["group"] = True
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in OFFLOADABLE:
            over = getattr(self, kind)
            object.__setattr__(self, kind, {True: Over.ALL, False: Over.NOBODY}.get(over, over))
        object.__setattr__(self, "offload", tuple(self.offload))
        for reason in self._contradictions():
            raise ValueError(f"Stage {self.name!r}: {reason}")
        for kind in OFFLOADABLE:
            object.__setattr__(self, kind, Over(getattr(self, kind)))

    def _contradictions(self) -> Iterator[str]:
        """What makes no sense of the row; each may take it that those before it are not the case."""
        levels, reshard = list(Over), self.reshard_after_forward
        states = {kind: getattr(self, kind) for kind in OFFLOADABLE}
        for kind, over in states.items():
            if over not in levels:
                yield f"{kind} is sharded over {', '.join(levels)}; got {over!r}."
        optimizer, grads, params = (levels.index(over) for over in states.values())
        if not optimizer >= grads >= params:
            yield (
                "a rank that lacks the gradients of a parameter cannot update it, and one that lacks the parameter has "
                "no use for its full gradients. Shard the optimizer over at least as many ranks as grads, and these "
                "over at least as many as params."
            )
        if reshard not in (True, False, "group"):
            yield f"reshard_after_forward is True, False or 'group'; got {reshard!r}."
        if reshard is not True and not params:
            yield "whole parameters are never gathered. Leave out reshard_after_forward."
        if reshard == "group" and self.params != Over.ALL:
            yield (
                "a second copy within the group needs parameters that are sharded over all; within the group they are "
                "sharded already. Use params='all', or reshard_after_forward=False."
            )
        if unknown := [kind for kind in self.offload if kind not in OFFLOADABLE]:
            yield f"offload is of {', '.join(OFFLOADABLE)}; got {unknown[0]!r}."
        if self.offload and "optimizer" not in self.offload:
            yield (
                "what the host holds is updated there, so the optimizer must be there too. Add 'optimizer' to offload."
            )
        if "params" in self.offload and not params:
            yield "parameters on the host are gathered for each use, so they must be sharded."

    @with_options
    def __call__(
        self, model: Any, ranks: int, options: Options | None = None, *, ring: Any = None, collectives: Any = None,
        **keywords: Any,
    ) -> Scheme:  # fmt: skip
        """Start training ``model`` on N ``ranks``: a ``Scheme``, whose page explains ``ring`` and ``collectives``.

        Options come as keywords, as one record, or as both, and then the keywords count.
        """
        given = chosen(options, keywords)
        made: Scheme = public("Scheme")(self, model, ranks, given, ring=ring, collectives=collectives)
        return made

    def over(self, band: Band) -> Over:
        """Over whom this model state is sharded."""
        return Over(getattr(self, kind_of(band)))

    def offloads(self, band: Band) -> bool:
        """Whether this model state is held by the host."""
        return kind_of(band) in self.offload

    @cached_property
    def two_axes(self) -> bool:
        """Whether gradients are reduced over the group and then over the replicas, and not over all at once."""
        return Over.GROUP in (self.optimizer, self.grads, self.params)

    def order(self, wire_params: str | None = None) -> tuple[object, ...]:
        """What decides the bits of a training: rows of one order, resolved by ``on``, agree in every one.

        The rings in which gradients are summed; and where parameters are rounded as they are sent, as to int8,
        who gathers them from whom.
        """
        gathers = self.optimizer, self.params, self.reshard_after_forward == "group"
        return (self.two_axes, *gathers) if wire_params == "int8" else (self.two_axes,)

    def on(self, ranks: int, node: int | None, *, gathers: bool = False) -> Stage:
        """The row as so many ranks in groups of ``node`` run it: groups of 1 or of all make it a plain one.

        ``gathers`` says that parameters must be gathered to be read at all, even by one rank for itself.
        ValueError for a row with groups where there are none, or not all of one size.
        """
        if node is None and (self.two_axes or self.reshard_after_forward == "group"):
            raise ValueError(f"{self.name} shards within groups of ranks. Say how large they are, as in node=8.")
        if node is not None and ranks % node:
            fit = [size for size in range(1, ranks + 1) if ranks % size == 0]
            raise ValueError(
                f"Scheme(node): {ranks} ranks cannot be cut into groups of {node}. Use {', '.join(map(str, fit))}."
            )
        node, gathers = node or ranks, gathers or "params" in self.offload
        changes: dict[str, Any] = {}
        for kind in OFFLOADABLE:
            over = Over(getattr(self, kind))
            changes[kind] = over and Over.ALL if gathers and ranks == 1 else over.on(ranks, node)
        if gathers and not changes["params"]:
            raise ValueError(
                f"Scheme(node): {self.name} gathers its parameters, and a group of one has nothing to gather. Use a "
                f"larger node."
            )
        reshard = self.reshard_after_forward
        if reshard == "group" and node in (1, ranks):
            reshard = node == ranks
        return replace(self, **changes, reshard_after_forward=reshard or not changes["params"])

    def piece(self, band: Band, rank: int, ranks: int, node: int | None = None) -> tuple[int, int]:
        """Which of how many equal pieces of this model state ``rank`` owns: (0, 1) where each has all of it."""
        group, member = divmod(rank, node or ranks)
        if self.over(band) is Over.NOBODY:
            return 0, 1
        if self.over(band) is Over.GROUP:
            return member, node or ranks
        return (member * (ranks // (node or ranks)) + group if self.two_axes else rank), ranks


DP = Stage("data parallel")
ZeRO1 = Stage("ZeRO-1", optimizer="all")
ZeRO2 = Stage("ZeRO-2", optimizer="all", grads="all")
ZeRO3 = Stage("ZeRO-3", optimizer="all", grads="all", params="all")
SCHEMES = (DP, ZeRO1, ZeRO2, ZeRO3)

# Rows with groups, with copies that are kept, and with states on the host; docs/rows.md says who calls them what.
HSDP = Stage("HSDP", "group", "group", "group")
HSDPKept = Stage("HSDP, kept", "group", "group", "group", reshard_after_forward=False)
ZeRO1Group = Stage("ZeRO-1 within groups", "group")
ZeRO2Group = Stage("ZeRO-2 within groups", "group", "group")
HFSDP = Stage("HFSDP", "all", "group", "group")
ZeRO3Kept = Stage("ZeRO-3, kept", "all", "all", "all", reshard_after_forward=False)
HPZ = Stage("hpZ", "all", "all", "all", reshard_after_forward="group")
Offload1 = Stage("ZeRO-Offload 1", "all", offload=("optimizer",))
Offload2 = Stage("ZeRO-Offload 2", "all", "all", offload=("optimizer", "grads"))
Infinity = Stage("ZeRO-Infinity", "all", "all", "all", offload=("optimizer", "grads", "params"))
ROWS = (*SCHEMES, HSDP, HSDPKept, ZeRO1Group, ZeRO2Group, HFSDP, ZeRO3Kept, HPZ, Offload1, Offload2, Infinity)
