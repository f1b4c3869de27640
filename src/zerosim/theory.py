"""What ZeRO predicts, as closed forms in exact integers for any N.

Owns the formulas and their constants, stated from the papers and not read from the code that they are
compared with: it shares only the bands' names and the rows with the rest. Never sees a run.

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
* peak, activations left out: the resident bytes and, over the buckets, the largest of

      2 w C              the ring's two blocks, under data parallel and ZeRO-1
      b L + 2 w C        gradients not yet reduced, ZeRO-2; or a layer being gathered, ZeRO-3
      b L + b L          a gathered layer and its gradients, in ZeRO-3's backward

  With activations, kept copies, groups and micro-batches there are more: ``moments`` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
ACTIVATION = 4  # fp32
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
    the batch that one rank has, in ``accumulate`` micro-batches.
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
    if job.two_axes and optimizer == job.ranks:
        found += [Flow("all-gather", Band.PARAMS, "outer", 1)]
    if params == 1 < optimizer:
        found += [Flow("all-gather", Band.PARAMS, home, 1)]
    return [flow for flow in found if job.rings[flow.ring][0] > 1]


def _block(job: Job, band: Band, elements: int) -> int:
    """Bytes of a block in flight."""
    wire = job.wire_params or job.wire if band is Band.PARAMS else job.wire
    return WIRE[wire] * elements + (SCALE * -(-elements // INT8_BLOCK) if wire == "int8" else 0)


def _sent(job: Job, flow: Flow) -> int:
    return flow.hops(job) * sum(_block(job, flow.band, chunk * job.rings[flow.ring][1]) for chunk in job.chunks())


def traffic(job: Job) -> dict[str, Bytes]:
    """Bytes that each rank sends in a step, by collective and band; nothing at N = 1."""
    sent: dict[str, Bytes] = {}
    for flow in flows(job):
        bands = sent.setdefault(flow.collective, {})
        bands[flow.band] = bands.get(flow.band, 0) + _sent(job, flow)
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
    return sent


def messages(job: Job) -> dict[str, int]:
    """Messages that each rank sends in a step, by collective."""
    sent: Counter[str] = Counter()
    for flow in flows(job):
        sent[flow.collective] += flow.hops(job) * len(job.buckets)
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
            pads.append(_block(job, flow.band, length) - _block(job, flow.band, real))
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
    found: dict[tuple[str, str], int] = {("host", Band.GRADS): grads * owned * reduced}
    if job.row.offloads(Band.PARAMS):
        uses = job.accumulate * (2 if job.stays is Over.ALL else 1)
        return found | {("card", Band.PARAMS): params * whole // job.cut(Band.PARAMS) * uses}
    if Band.MASTER not in job.states:  # the parameters are what is updated
        found["host", Band.PARAMS] = params * owned
    return found | {("card", Band.PARAMS): params * owned}


def flops(job: Job) -> dict[str, int]:
    """Floating-point operations per rank and step, by phase.

    Two per weight and row forward, four backward (but two in the first layer, whose input
    needs no gradient); Adam's on everything that the rank updates, where that is.
    """
    products = [2 * job.rows * fan_in * fan_out for bucket in job.buckets for fan_in, fan_out in bucket]
    updated = sum(job.chunks()) * job.ranks // job.cut(Band.MASTER)
    return {
        "forward": sum(products),
        "backward": 2 * sum(products) - products[0],
        "optimizer on the host" if job.row.offload else "optimizer": ADAM_OPERATIONS * updated,
    }


# -- the highest instants


def peak(job: Job) -> Bytes:
    """The highest instant of a step on the card, activations and the batch included, by band."""
    return _highest(moments(job))


def peak_without_activations(job: Job) -> Bytes:
    """The highest instant on the card of what scales with the parameters, by band."""
    return _highest(moments(job), leave_out=Band.ACTIVATIONS)


def host_peak(job: Job) -> Bytes:
    """The host's highest instant, by band: what the optimizer reads and updates is copied there, bucket by bucket."""
    instants = [host_resident(job)]
    for chunk in job.chunks() if job.row.offload else ():
        instants.append(here := Counter(host_resident(job)))
        for band in (Band.GRADS,) if Band.MASTER in job.states else (Band.GRADS, Band.PARAMS):
            if not job.row.offloads(band):
                here[band] += job.states[band] * chunk * job.ranks // job.cut(Band.MASTER)
    return _highest(instants)


def _highest(instants: Iterable[Bytes], leave_out: str = "") -> Bytes:
    best: Bytes = {}
    for instant in instants:
        here = {band: nbytes for band, nbytes in instant.items() if nbytes and band != leave_out}
        if sum(here.values()) > sum(best.values()):  # strictly: the first of equals stands
            best = here
    return best


def moments(job: Job) -> list[Bytes]:
    """What a rank holds on its card, by band, at each instant of a step that can be the highest, in order."""
    step = _Step(job)
    for micro_batch in range(job.accumulate):
        step.forward()
        step.backward(first=micro_batch == 0, last=micro_batch == job.accumulate - 1)
    step.update()
    return step.instants


class _Step:
    """A step's holds on one rank's card, in bytes; to hold a negative number is to free."""

    def __init__(self, job: Job) -> None:
        self.job, self.held = job, Counter[str](resident(job))
        self.instants: list[Bytes] = [dict(self.held)]
        self.whole = [chunk * job.ranks for chunk in job.chunks()]
        self.full = [job.states[Band.PARAMS] * size if job.shards(Band.PARAMS) else 0 for size in self.whole]
        self.unreduced = [job.states[Band.GRADS] * size for size in self.whole]
        self.ends = job.buckets[0][0][0], job.buckets[-1][-1][1]  # the model's fan-in and fan-out
        self.gathered: set[int] = set()
        self.second: set[int] = set()  # buckets of which a second copy is kept

    def hold(self, band: Band, nbytes: int) -> None:
        self.held[band] += nbytes
        if nbytes > 0:
            self.instants.append(dict(self.held))

    def activations(self, *widths: int) -> None:
        for width in widths:
            self.hold(Band.ACTIVATIONS, ACTIVATION * (self.job.rows // self.job.accumulate) * width)

    def collective(self, ring: str, index: int, band: Band) -> None:
        """While it runs, a rank has a block going and one coming."""
        nbytes = 2 * _block(self.job, band, self.job.chunks()[index] * self.job.rings[ring][1])
        self.hold(Band.BLOCKS, nbytes)
        self.hold(Band.BLOCKS, -nbytes)

    def gather(self, *buckets: int) -> None:
        for index in buckets:
            if index in self.gathered or not self.full[index]:
                continue
            self.gathered.add(index)
            self.hold(Band.GATHERED, self.full[index])
            from_host = self.job.row.offloads(Band.PARAMS) and index not in self.second
            shard = from_host * self.full[index] // self.job.cut(Band.PARAMS)
            self.hold(Band.GATHERED, shard)
            home = "inner" if self.job.two_axes or index in self.second else "all"
            self.collective(home, index, Band.PARAMS)
            self.hold(Band.GATHERED, -shard)

    def release(self, *buckets: int, backward: bool) -> None:
        for index in self.gathered.intersection(buckets) if backward or self.job.stays else ():
            shard = self.full[index] // self.job.group
            if self.job.stays is Over.GROUP and not backward:
                self.second.add(index)
                self.hold(Band.SECONDARY, shard)
            self.gathered.remove(index)
            self.hold(Band.GATHERED, -self.full[index])
            if backward and index in self.second:
                self.second.remove(index)
                self.hold(Band.SECONDARY, -shard)

    def forward(self) -> None:
        self.activations(*self.ends)
        every, at_once = range(len(self.whole)), self.job.gather == "model"
        for index in every:
            self.gather(*every if at_once else [index])
            self.activations(*(fan_out for _, fan_out in self.job.buckets[index]))
            self.release(*() if at_once else [index], backward=False)
        self.release(*every, backward=False)
        self.activations(self.ends[1], -self.ends[1])  # the loss's gradient, beside the target: its last reader

    def backward(self, *, first: bool, last: bool) -> None:
        job, every, at_once = self.job, range(len(self.whole)), self.job.gather == "model"
        apart = job.shards(Band.GRADS) or job.row.offloads(Band.GRADS)  # not written where gradients are kept
        again = not job.each and not first  # added to what has been written, and freed
        twice = job.each and not first and not job.two_axes  # reduced apart, and added to the average so far
        for index in reversed(every):
            self.gather(*every if at_once else [index])
            unreduced = self.unreduced[index]
            self.hold(Band.UNREDUCED, unreduced * (apart or again or twice))
            for position, (fan_in, fan_out) in reversed(list(enumerate(job.buckets[index]))):
                # Freed: the layer's output and, once its input's is there, the gradient of its output.
                self.activations(-fan_out, fan_in if index or position else 0, -fan_out)
            self.release(*() if at_once else [index], backward=True)
            self.hold(Band.UNREDUCED, -unreduced * again)
            if job.each or last:
                self.reduce(index, unreduced * apart, first=first or not job.each, last=last)
                self.hold(Band.UNREDUCED, -unreduced * (apart or twice))
        self.release(*every, backward=True)
        self.activations(-self.ends[0])

    def reduce(self, index: int, unreduced: int, *, first: bool, last: bool) -> None:
        """Of a bucket, of which so many bytes are apart; ``first`` says that nothing has been reduced before."""
        job = self.job
        if not job.two_axes:
            average = self.unreduced[index] // job.ranks * (job.shards(Band.MASTER) and not first)
            self.hold(Band.UNREDUCED, average)
            if job.ranks > 1 or job.shards(Band.PARAMS):
                self.collective("all", index, Band.GRADS)
            self.hold(Band.UNREDUCED, -average)
            return
        partial = WIRE[job.wire] * self.whole[index] // job.group
        self.hold(Band.PARTIAL, partial)
        self.collective("inner", index, Band.GRADS)
        self.hold(Band.PARTIAL, 0 if first else -partial)  # added to those before it
        if last:
            self.held[Band.UNREDUCED] -= unreduced
            self.collective("outer", index, Band.GRADS)
            self.held[Band.UNREDUCED] += unreduced
            self.hold(Band.PARTIAL, -partial)

    def update(self) -> None:
        job, params = self.job, self.job.states[Band.PARAMS]
        if job.cut(Band.PARAMS) == job.cut(Band.MASTER):
            return
        replicas_differ, whole = job.two_axes and job.cut(Band.MASTER) == job.ranks, job.cut(Band.PARAMS) == 1
        staged = [params * size // job.group * (replicas_differ and whole) for size in self.whole]
        for shard in staged:  # updated in pieces of pieces, which the replicas put together
            self.hold(Band.GATHERED, shard)
        for index, shard in enumerate(staged):
            if replicas_differ:
                self.collective("outer", index, Band.PARAMS)
            if whole:
                self.collective("inner" if job.two_axes else "all", index, Band.PARAMS)
            self.hold(Band.GATHERED, -shard)
