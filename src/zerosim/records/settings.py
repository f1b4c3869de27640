"""What a lab run was asked for: a record, and what follows from it.

Owns the fields and their words. Must not know what a run finds.
"""

from __future__ import annotations

from typing import Annotated, cast

import msgspec

from zerosim.optimizer import Adam, AdamW, Schedule
from zerosim.options import Average, Gather, LossScale, Options, Sync
from zerosim.records.ablations import Count
from zerosim.records.files import Record
from zerosim.stages import Stage

OWN = "your own"  # data that the lab has not drawn

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Settings(Record):
    """What was asked for.

    ``batch`` is rows per rank; ``seed`` draws the data and ``model_seed`` the initial weights;
    ``capacity`` is the bytes of a card, ``host_capacity`` those of the host for each rank, or None for no
    limit. ``node`` ranks are a group, and ``wire_params`` is what parameters are sent in, if it is not ``wire``.
    ``clip`` is the largest norm, of ``norm_type`` and with ``clip_eps`` added; ``uneven`` says that ranks and
    micro-batches have different numbers of rows, some none, and ``average`` over what these are averaged. Gradients of
    ``accumulate`` micro-batches are reduced under all rows at the times that ``sync`` says, each by default: rows that
    reduce at other times sum in another order. ``weight_decay`` is AdamW's, and with none the optimizer is Adam; the
    learning rate rises over ``warmup`` updates. After ``resume_at`` steps the run is saved, loaded on
    ``resume_ranks`` ranks, or on as many, and goes on.
    ``data`` is ``OWN`` where the caller brought the batches: then the seeds say nothing, and ``batch`` is 0 if it
    was not always the same. ``model`` names a model that ``widths`` do not describe, and ``others`` are the options
    that no field has, in words.
    """

    ranks: Positive
    steps: Count
    batch: Count
    seed: int
    model_seed: int
    precision: str
    wire: str
    gather: str
    data: str
    capacity: Positive | None
    widths: list[Positive]
    node: Positive | None = None
    host_capacity: Positive | None = None
    wire_params: str | None = None
    model: str = ""
    others: dict[str, str] = msgspec.field(default_factory=dict)
    clip: float | None = None
    loss_scale: LossScale | None = None
    norm_type: float = 2.0
    clip_eps: float = 1e-6
    uneven: bool = False
    average: str = "rows"
    accumulate: Positive = 1
    sync: str | None = None
    find_unused: bool = False
    weight_decay: float = 0.0
    warmup: Count = 0
    resume_at: Positive | None = None
    resume_ranks: Positive | None = None

    def options(self) -> Options:
        """The options of the training runs. ValueError for what does not go together."""
        schedule = Schedule(warmup=self.warmup) if self.warmup else None
        decayed = AdamW(weight_decay=self.weight_decay, schedule=schedule)
        return Options(
            clip=self.clip,
            norm_type=self.norm_type,
            clip_eps=self.clip_eps,
            loss_scale=self.loss_scale,
            uneven=self.uneven,
            average=cast("Average", self.average),
            accumulate=self.accumulate,
            sync=self.reduced(),
            find_unused=self.find_unused,
            optimizer=decayed if self.weight_decay else Adam(schedule=schedule),
            precision=self.precision,
            wire=self.wire,
            gather=cast("Gather", self.gather),
            capacity=self.capacity,
            host_capacity=self.host_capacity,
            node=self.node,
            wire_params=self.wire_params,
            keep_reports=self.steps,
        )

    def reduced(self) -> Sync | None:
        """When gradients of several micro-batches are reduced, under every row."""
        return cast("Sync | None", self.sync or ("each" if self.accumulate > 1 else None))

    def order(self, row: Stage, ranks: int | None = None) -> tuple[object, ...]:
        """What decides the bits of a row's training under these settings, before and after it is resumed.

        See ``Stage.order``.
        """
        before = row.on(ranks or self.ranks, self.node).order(self.wire_params)
        after = self.resume_ranks and row.on(self.resume_ranks, self.node).order(self.wire_params)
        return (*before, *(after or ()))

    def said(self) -> str:
        """What of a training step as people run it was asked for, in words; nothing if nothing was."""
        when = {"each": "after each", "end": "at the end"}.get(self.reduced() or "")
        how = ["inf norm"] * (self.norm_type != 2) + [f"eps {self.clip_eps:g}"] * (self.clip_eps != 1e-6)
        found = [f"clipped to {self.clip:g}" + f" ({', '.join(how)})" * bool(how)] if self.clip is not None else []
        if (scale := self.loss_scale) is not None:
            found.append(f"loss scale {'dynamic, from ' * scale.dynamic}{scale.init:g}")
        found += [f"{self.accumulate} micro-batches, reduced {when}"] * (self.accumulate > 1)
        found += [f"uneven batches{', averaged over ranks' * (self.average == 'ranks')}"] * self.uneven
        found += ["told which parameters have gradients"] * self.find_unused
        found += ["rounding as it scales"] * bool(scale and scale.note)
        found += [f"AdamW with weight decay {self.weight_decay:g}"] if self.weight_decay else []
        found += [f"warm-up over {self.warmup} updates"] if self.warmup else []
        if self.resume_at is not None:
            found.append(f"resumed after step {self.resume_at} on {self.resume_ranks or self.ranks} ranks")
        return ", ".join(found)

    def ranks_in(self, step: int) -> int:
        """On how many ranks a step is taken."""
        resumed = self.resume_at is not None and step > self.resume_at
        return (self.resume_ranks if resumed else None) or self.ranks
