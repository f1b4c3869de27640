"""The closed forms of what is held between steps, sent, copied and computed.

Owns a job as the formulas see it, their constants, and all of them but the peaks'.

Notation: N = D S ranks in D groups of S; a bucket of P parameters is padded to L = C N with
C = ceil(P/N); a working copy takes b bytes per parameter, a block on the wire w. A state is cut into 1, S
or N pieces. Then, per rank,

* resident: a state of k bytes takes k L over its pieces, so 16, 4 + 12/N, 2 + 14/N and 16/N bytes per
  parameter under data parallel and ZeRO-1 to -3 when N divides every bucket (arXiv 1910.02054, section 5,
  with K = 12), 16/S under HSDP and 4/S + 12/N under HFSDP;
* traffic of a step: a reduce-scatter or all-gather of n chunks of c elements sends (n-1) c w, an all-reduce
  twice that (Patarasuk and Yuan 2009); which run how often, ``flows`` lists. So 2 (N-1) C w per bucket under
  data parallel, ZeRO-1 and -2, 3 (N-1) C w under ZeRO-3 (section 7); between nodes, per node, the same
  under ZeRO-3 and 2 (N-1) C w under hpZ (arXiv 2306.10209);
* what ranks tell each other, their rows, the sums of squares that make the norm or which parameters have a
  gradient, is an all-gather of a few fp32 numbers, ``scalars``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from zerosim.bands import Band
from zerosim.stages import Over, Stage

Bytes = dict[str, int]

# Bytes per parameter of each model state, by precision.
ADAM = {Band.MASTER: 4, Band.EXP_AVG: 4, Band.EXP_AVG_SQ: 4}
STATES: dict[str, dict[Band, int]] = {
    "mixed": {Band.PARAMS: 2, Band.GRADS: 2, **ADAM},
    "bf16": {Band.PARAMS: 2, Band.GRADS: 2, **ADAM},
    "fp32": {Band.PARAMS: 4, Band.GRADS: 4, Band.EXP_AVG: 4, Band.EXP_AVG_SQ: 4},
    "bf16-fp32-grads": {Band.PARAMS: 2, Band.GRADS: 4, **ADAM},
    "mixed-main-grads": {Band.PARAMS: 2, Band.GRADS: 2, Band.MAIN_GRADS: 4, **ADAM},
}
WIRE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
INT8_BLOCK, SCALE = 256, 4  # elements that share a scale, and its bytes
ACTIVATION = FP32 = 4
ADAM_OPERATIONS = 13  # per element: 3 for the first moment, 4 for the second, 6 for the update


class Flow(NamedTuple):
    """One collective of a bucket: what, of what, in which ring ("all", "inner", "outer"), how often in a step."""

    collective: str
    band: Band
    ring: str
    times: int

    def hops(self, job: Job) -> int:
        """Messages that each rank sends for a bucket: n-1 a time, twice that for an all-reduce."""
        return (job.rings[self.ring][0] - 1) * self.times * (2 if self.collective == "all-reduce" else 1)


@dataclass(frozen=True)
class Job:
    """One run, as the formulas see it.

    ``buckets`` lists, for each flat buffer, the (fan-in, fan-out) of its linear layers; ``rows`` are those of
    the batch that one rank has, in ``accumulate`` micro-batches; where these differ, ``parts`` has the most rows
    that any rank has in each, and ``rows`` is their sum. ``clip``, ``loss_scale`` and ``weight_decay`` say whether
    there is any, ``uneven`` that ranks tell each other their rows, ``find_unused`` that they tell which parameters
    have a gradient; ``skipped`` that the step is, for a gradient that is not finite.
    """

    row: Stage
    buckets: tuple[tuple[tuple[int, int], ...], ...]
    ranks: int
    rows: int = 0
    precision: str = "mixed"
    wire: str = "fp32"
    gather: str = "layer"
    node: int | None = None
    accumulate: int = 1
    sync: str | None = None
    wire_params: str | None = None
    clip: bool = False
    loss_scale: bool = False
    uneven: bool = False
    skipped: bool = False
    weight_decay: bool = False
    find_unused: bool = False
    parts: tuple[int, ...] = ()

    def sizes(self) -> list[int]:
        """P of each bucket: weights and biases."""
        return [sum(fan_in * fan_out + fan_out for fan_in, fan_out in bucket) for bucket in self.buckets]

    def chunks(self) -> list[int]:
        """C of each bucket."""
        return [-(-size // self.ranks) for size in self.sizes()]

    def buffers(self) -> list[tuple[int, int]]:
        """Both."""
        return list(zip(self.sizes(), self.chunks(), strict=True))

    @property
    def states(self) -> dict[Band, int]:
        """Bytes per parameter of each model state."""
        return STATES[self.precision]

    @property
    def group(self) -> int:
        """S; without groups all ranks are one."""
        return self.node or self.ranks

    @property
    def rings(self) -> dict[str, tuple[int, int]]:
        """Of each ring, how many members it has, and of how many chunks C the chunk of one is."""
        replicas = self.ranks // self.group
        return {"all": (self.ranks, 1), "inner": (self.group, replicas), "outer": (replicas, 1)}

    @property
    def two_axes(self) -> bool:
        """Whether gradients are reduced over the group and then over the replicas."""
        return 1 < self.group < self.ranks and Over.GROUP in (self.row.optimizer, self.row.grads, self.row.params)

    def cut(self, band: Band) -> int:
        """Into how many pieces a model state is cut."""
        return {Over.NOBODY: 1, Over.GROUP: self.group, Over.ALL: self.ranks}[self.row.over(band)]

    def shards(self, band: Band) -> bool:
        """Whether a state is handled as sharded: also by one rank that gathers from its host, and sends nothing."""
        return self.cut(band) > 1 or (self.ranks == 1 and "params" in self.row.offload)

    @property
    def stays(self) -> Over:
        """Over whom gathered parameters are sharded from forward to backward: all if they are released."""
        if self.row.reshard_after_forward == "group" and self.group != self.ranks:
            return Over.GROUP if self.group > 1 else Over.NOBODY
        return Over.ALL if self.row.reshard_after_forward else Over.NOBODY

    @property
    def each(self) -> bool:
        """Whether every micro-batch is reduced, and not their sum."""
        return self.shards(Band.GRADS) if self.sync is None else self.sync == "each"


class Scalars(NamedTuple):
    """What each member of a ring tells the others: under which tag, in which ring, and how many fp32 numbers."""

    tag: str
    ring: str
    numbers: int

    def nbytes(self) -> int:
        return FP32 * self.numbers


# -- what is held between steps


def resident(job: Job) -> Bytes:
    """Bytes per rank on the card between steps, by band."""
    return {band: nbytes for band, nbytes in _states(job).items() if not job.row.offloads(band)}


def host_resident(job: Job) -> Bytes:
    """Bytes per rank on the host between steps, by band."""
    return {band: nbytes for band, nbytes in _states(job).items() if job.row.offloads(band)}


def _states(job: Job) -> dict[Band, int]:
    whole = sum(job.chunks()) * job.ranks
    return {band: each * whole // job.cut(band) for band, each in job.states.items()}


def padding(job: Job) -> list[int]:
    """Bytes of padding among the resident, for each rank: a whole state carries all of it, a shard its own."""
    held = [0] * job.ranks
    for (size, chunk), (band, each), rank in product(job.buffers(), job.states.items(), range(job.ranks)):
        (group, member), cut = divmod(rank, job.group), job.cut(band)
        last = member * job.ranks // job.group + group if job.two_axes else rank  # the piece of N
        piece = {1: 0, job.group: member, job.ranks: last}[cut]
        held[rank] += each * _beyond(size, piece, chunk * job.ranks // cut)
    return held


def _beyond(size: int, piece: int, length: int) -> int:
    """What of a piece of so many elements lies beyond ``size``."""
    return min(length, max(0, (piece + 1) * length - size))


# -- what is sent and copied in a step


def flows(job: Job) -> list[Flow]:
    """The collectives of each bucket in a step, in rings of more than one."""
    reductions, k = job.accumulate if job.each else 1, job.accumulate
    optimizer, params = job.cut(Band.MASTER), job.cut(Band.PARAMS)
    home = "inner" if job.two_axes else "all"
    found = [Flow("reduce-scatter" if job.two_axes or optimizer > 1 else "all-reduce", Band.GRADS, home, reductions)]
    if job.two_axes:
        found += [Flow("all-reduce" if optimizer == job.group else "reduce-scatter", Band.GRADS, "outer", 1)]
    if params > 1:
        found += [Flow("all-gather", Band.PARAMS, home, 2 * k if job.stays is Over.ALL else k)]
    if params > 1 and job.stays is Over.GROUP:
        found += [Flow("all-gather", Band.PARAMS, "inner", k)]
    if job.two_axes and optimizer == job.ranks and not job.skipped:
        found += [Flow("all-gather", Band.PARAMS, "outer", 1)]
    if params == 1 < optimizer and not job.skipped:
        found += [Flow("all-gather", Band.PARAMS, home, 1)]
    return [flow for flow in found if job.rings[flow.ring][0] > 1]


def scalars(job: Job) -> list[Scalars]:
    """What ranks tell each other in a step: how many rows they have, the sums of squares and a flag, and, unless the
    step is skipped, for each parameter (a weight or a bias) whether they have a gradient of it.

    There are N sums for a bucket, of which each rank tells those of the pieces that its optimizer owns. Where
    every rank has all of them, nobody tells any.
    """
    optimizer, told = job.cut(Band.MASTER), []
    if job.uneven:
        told.append(Scalars("rows", "all", 1))
    if (job.clip or job.loss_scale) and optimizer > 1:
        sums = len(job.buckets) * job.ranks // optimizer if job.clip else 0
        told.append(Scalars("norm", "all" if optimizer == job.ranks else "inner", sums + 1))
    if job.find_unused and not job.skipped:
        told.append(Scalars("used", "all", 2 * sum(map(len, job.buckets))))
    return told


def block(job: Job, band: Band, elements: int) -> int:
    """Bytes of a block in flight."""
    wire = job.wire_params or job.wire if band is Band.PARAMS else job.wire
    return WIRE[wire] * elements + (SCALE * -(-elements // INT8_BLOCK) if wire == "int8" else 0)


def _sent(job: Job, flow: Flow) -> int:
    return flow.hops(job) * sum(block(job, flow.band, chunk * job.rings[flow.ring][1]) for chunk in job.chunks())


def traffic(job: Job) -> dict[str, Bytes]:
    """Bytes that each rank sends in a step, by collective and band; nothing at N = 1."""
    sent: dict[str, Bytes] = {}
    for flow in flows(job):
        bands = sent.setdefault(flow.collective, {})
        bands[flow.band] = bands.get(flow.band, 0) + _sent(job, flow)
    for told in scalars(job) if job.ranks > 1 else ():
        sent.setdefault("all-gather", {})[told.tag] = (job.rings[told.ring][0] - 1) * told.nbytes()
    return sent


def outside(job: Job) -> dict[str, dict[str, list[int]]]:
    """Bytes that each rank sends to another node in a step, by collective and band.

    In the ring of all only one rank of each node sends outward, in the group's nobody, in the replicas' all.
    """
    sent: dict[str, dict[str, list[int]]] = {}
    for flow in flows(job):
        every = sent.setdefault(flow.collective, {}).setdefault(flow.band, [0] * job.ranks)
        for rank in range(job.ranks):
            edge = rank % job.group == 0 and job.group < job.ranks
            every[rank] += _sent(job, flow) * {"all": edge, "inner": False, "outer": True}[flow.ring]
    for told in scalars(job) if job.ranks > 1 else ():
        nbytes = (job.rings[told.ring][0] - 1) * told.nbytes()
        outward = [told.ring == "all" and rank % job.group == 0 and job.group < job.ranks for rank in range(job.ranks)]
        sent.setdefault("all-gather", {})[told.tag] = [nbytes * edge for edge in outward]
    return sent


def messages(job: Job) -> dict[str, int]:
    """Messages that each rank sends in a step, by collective."""
    sent: Counter[str] = Counter()
    for flow in flows(job):
        sent[flow.collective] += flow.hops(job) * len(job.buckets)
    for told in scalars(job) if job.ranks > 1 else ():
        sent["all-gather"] += job.rings[told.ring][0] - 1
    return dict(sent)


def padding_sent(job: Job) -> list[int]:
    """Bytes of padding that each rank sends in a step: what its blocks have more than without the padding.

    A reduce-scatter takes every chunk of its ring but its own past a rank, an all-gather every chunk but
    that of the member below, to which it sends.
    """
    sent = [0] * job.ranks
    for flow, (size, chunk), rank in product(flows(job), job.buffers(), range(job.ranks)):
        (n, several), (group, member) = job.rings[flow.ring], divmod(rank, job.group)
        own, first = {"all": (rank, 0), "inner": (member, 0), "outer": (group, member * n)}[flow.ring]
        length, pads = several * chunk, []
        for index in range(n):
            real = length - _beyond(size, first + index, length)
            pads.append(block(job, flow.band, length) - block(job, flow.band, real))
        scattered, gathered = sum(pads) - pads[own], sum(pads) - pads[own - 1]
        both = {"reduce-scatter": scattered, "all-gather": gathered, "all-reduce": scattered + gathered}
        sent[rank] += flow.times * both[flow.collective]
    return sent


def copies(job: Job) -> dict[tuple[str, str], int]:
    """Bytes that each rank copies over its host link in a step, by the place that they go to and band."""
    if not job.row.offload:
        return {}
    whole, grads, params = sum(job.chunks()) * job.ranks, job.states[Band.GRADS], job.states[Band.PARAMS]
    owned = whole // job.cut(Band.MASTER)
    reduced = job.accumulate if job.each and job.row.offloads(Band.GRADS) and not job.two_axes else 1
    found: dict[tuple[str, str], int] = {}
    if job.row.offloads(Band.GRADS) or not job.skipped:
        found["host", Band.GRADS] = grads * owned * reduced
    if job.row.offloads(Band.PARAMS):
        uses = job.accumulate * (2 if job.stays is Over.ALL else 1)
        return found | {("card", Band.PARAMS): params * whole // job.cut(Band.PARAMS) * uses}
    if job.skipped:
        return found
    if Band.MASTER not in job.states:  # the parameters are what is updated
        found["host", Band.PARAMS] = params * owned
    return found | {("card", Band.PARAMS): params * owned}


def flops(job: Job) -> dict[str, int]:
    """Floating-point operations per rank and step, by phase.

    Two per weight and row forward, four backward (but two in the first layer, whose input
    needs no gradient); Adam's on everything that the rank updates, where that is, scaled and clipped, and one more
    on each weight that decays.
    """
    products = [2 * job.rows * fan_in * fan_out for bucket in job.buckets for fan_in, fan_out in bucket]
    updated = 0 if job.skipped else sum(job.chunks()) * job.ranks // job.cut(Band.MASTER)
    scaled = job.clip or job.loss_scale  # one more operation as the optimizer reads
    return {
        "forward": sum(products),
        "backward": 2 * sum(products) - products[0],
        "optimizer on the host" if job.row.offload else "optimizer": (ADAM_OPERATIONS + scaled) * updated
        + _decayed(job),
    }


def _decayed(job: Job) -> int:
    """Weights that decay, of the pieces that one rank updates: of each bucket the most that any piece has."""
    if job.skipped or not job.weight_decay:
        return 0
    pieces, total = job.cut(Band.MASTER), 0
    for bucket, chunk in zip(job.buckets, job.chunks(), strict=True):
        length, start, weights = chunk * job.ranks // pieces, 0, []
        for fan_in, fan_out in bucket:
            weights.append((start, start + fan_in * fan_out))
            start += fan_in * fan_out + fan_out
        total += max(
            sum(max(0, min(end, (piece + 1) * length) - max(first, piece * length)) for first, end in weights)
            for piece in range(pieces)
        )
    return total
