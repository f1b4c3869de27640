"""What ZeRO predicts, as closed forms in exact integers for any N.

Owns the formulas and their constants, stated from the papers and not read from the code that they are
compared with: it shares only the bands' names and the rows with the rest. Never sees a run.

Notation: N = D S ranks in D groups of S; a bucket of P parameters is padded to L = C N with
C = ceil(P/N), and G = L/S is a group's shard; a working copy takes b bytes per parameter, a block on the
wire w. A state is cut into 1, S or N pieces. Then, per rank,

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

  With activations, kept copies, groups and micro-batches there are more; ``moments`` lists all instants
  that can be the highest, in the order of the schedule, so that the first of equals is the peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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
WIRE = {"fp32": 4, "fp16": 2, "bf16": 2}
ACTIVATION = 4  # fp32
ADAM_OPERATIONS = 13  # per element: 3 for the first moment, 4 for the second, 6 for the update


class Flow(NamedTuple):
    """One collective of a bucket: what, of what, in which ring ("all", "inner", "outer"), how often in a step."""

    collective: str
    band: Band
    ring: str
    times: int


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

    def sizes(self) -> list[int]:
        """P of each bucket: weights and biases."""
        return [sum(fan_in * fan_out + fan_out for fan_in, fan_out in bucket) for bucket in self.buckets]

    def chunks(self) -> list[int]:
        """C of each bucket."""
        return [-(-size // self.ranks) for size in self.sizes()]

    @property
    def group(self) -> int:
        """S; without groups all ranks are one."""
        return self.node or self.ranks

    @property
    def replicas(self) -> int:
        """D."""
        return self.ranks // self.group

    def pieces(self, over: Over) -> int:
        """Into how many pieces a state is cut."""
        return {Over.NOBODY: 1, Over.GROUP: self.group, Over.ALL: self.ranks}[over]

    def cut(self, band: Band) -> int:
        """The same, for a model state."""
        over: dict[Band, Over] = {Band.PARAMS: self.row.params, Band.GRADS: self.row.grads}
        return self.pieces(over.get(band, Over(self.row.optimizer)))

    @property
    def two_axes(self) -> bool:
        return self.replicas > 1 < self.group and Over.GROUP in (self.row.optimizer, self.row.grads, self.row.params)

    @property
    def alone(self) -> bool:
        """One rank that gathers all the same, from its host: it goes through every motion and sends nothing."""
        return self.ranks == 1 and "params" in self.row.offload

    def shards(self, band: Band) -> bool:
        return self.cut(band) > 1 or self.alone

    @property
    def kept(self) -> bool:
        """Whether gathered parameters stay from forward to backward."""
        reshard = self.row.reshard_after_forward
        return reshard is False or (reshard == "group" and self.group == 1 < self.ranks)

    @property
    def second(self) -> bool:
        """Whether they stay as a second copy that the group shards."""
        return self.row.reshard_after_forward == "group" and self.replicas > 1 < self.group

    @property
    def each(self) -> bool:
        """Whether every micro-batch is reduced, and not their sum."""
        return self.shards(Band.GRADS) if self.sync is None else self.sync == "each"

    def hosts(self, band: Band) -> bool:
        """Whether the host holds a model state."""
        return {Band.PARAMS: "params", Band.GRADS: "grads"}.get(band, "optimizer") in self.row.offload

    def length(self, ring: str, chunk: int) -> int:
        """Elements of a block in a ring: C, or, in the group's, G."""
        return chunk * self.replicas if ring == "inner" else chunk

    def hops(self, ring: str) -> int:
        return {"all": self.ranks, "inner": self.group, "outer": self.replicas}[ring] - 1


def flows(job: Job) -> list[Flow]:
    """The collectives of each bucket in a step, in rings of more than one."""
    reductions, k = job.accumulate if job.each else 1, job.accumulate
    optimizer, params = job.cut(Band.MASTER), job.cut(Band.PARAMS)
    home = "inner" if job.two_axes else "all"
    found = []
    if job.two_axes:
        found += [Flow("reduce-scatter", Band.GRADS, "inner", reductions)]
        found += [Flow("all-reduce" if optimizer == job.group else "reduce-scatter", Band.GRADS, "outer", 1)]
    else:
        found += [Flow("reduce-scatter" if optimizer > 1 else "all-reduce", Band.GRADS, "all", reductions)]
    if params > 1:
        found += [Flow("all-gather", Band.PARAMS, home, k if job.kept or job.second else 2 * k)]
        found += [Flow("all-gather", Band.PARAMS, "inner", k)] * job.second
    if job.two_axes and optimizer == job.ranks:
        found += [Flow("all-gather", Band.PARAMS, "outer", 1)]
    if params == 1 < optimizer:
        found += [Flow("all-gather", Band.PARAMS, home, 1)]
    return [flow for flow in found if job.hops(flow.ring)]


def resident(job: Job) -> Bytes:
    """Bytes per rank on the card between steps, by band."""
    return {band: nbytes for band, nbytes in _states(job).items() if not job.hosts(band)}


def host_resident(job: Job) -> Bytes:
    """Bytes per rank on the host between steps, by band."""
    return {band: nbytes for band, nbytes in _states(job).items() if job.hosts(band)}


def _states(job: Job) -> dict[Band, int]:
    whole = sum(job.chunks()) * job.ranks
    return {band: each * whole // job.cut(band) for band, each in STATES[job.precision].items()}


def padding(job: Job) -> list[int]:
    """Bytes of padding among the resident, for each rank: a whole state carries all of it, a shard its own."""
    held = [0] * job.ranks
    for size, chunk in zip(job.sizes(), job.chunks(), strict=True):
        for rank in range(job.ranks):
            group, member = divmod(rank, job.group)
            for band, each in STATES[job.precision].items():
                cut = job.cut(band)
                piece = 0 if cut == 1 else member if cut == job.group else rank
                if job.two_axes and cut == job.ranks:
                    piece = member * job.replicas + group
                held[rank] += each * _beyond(size, piece, chunk * job.ranks // cut)
    return held


def _beyond(size: int, piece: int, length: int) -> int:
    """What of a piece of so many elements lies beyond ``size``."""
    return min(length, max(0, (piece + 1) * length - size))


def traffic(job: Job) -> dict[str, Bytes]:
    """Bytes that each rank sends in a step, by collective and band; nothing at N = 1."""
    sent: dict[str, Bytes] = {}
    for flow in flows(job):
        bands = sent.setdefault(flow.collective, {})
        bands[flow.band] = bands.get(flow.band, 0) + _sent(job, flow)
    return sent


def _sent(job: Job, flow: Flow) -> int:
    once = job.hops(flow.ring) * sum(job.length(flow.ring, chunk) for chunk in job.chunks()) * WIRE[job.wire]
    return once * flow.times * (2 if flow.collective == "all-reduce" else 1)


def outside(job: Job) -> dict[str, dict[str, list[int]]]:
    """Bytes that each rank sends to another node in a step, by collective and band.

    In the ring of all only one rank of each node sends outward, in the group's nobody, in the replicas' all.
    """
    sent: dict[str, dict[str, list[int]]] = {}
    for flow in flows(job):
        every = sent.setdefault(flow.collective, {}).setdefault(flow.band, [0] * job.ranks)
        for rank in range(job.ranks):
            edge = rank % job.group == 0 and job.replicas > 1
            every[rank] += _sent(job, flow) * {"all": edge, "inner": False, "outer": True}[flow.ring]
    return sent


def messages(job: Job) -> dict[str, int]:
    """Messages that each rank sends in a step, by collective: n-1 a time, twice for an all-reduce."""
    sent: Counter[str] = Counter()
    for flow in flows(job):
        sent[flow.collective] += (
            job.hops(flow.ring) * len(job.buckets) * flow.times * (2 if flow.collective == "all-reduce" else 1)
        )
    return dict(sent)


def padding_sent(job: Job) -> list[int]:
    """Bytes of padding that each rank sends in a step.

    A reduce-scatter takes every chunk of its ring but its own past a rank, an all-gather every chunk but
    that of the member below, to which it sends.
    """
    sent = [0] * job.ranks
    for size, chunk in zip(job.sizes(), job.chunks(), strict=True):
        for flow in flows(job):
            length, n = job.length(flow.ring, chunk), job.hops(flow.ring) + 1
            for rank in range(job.ranks):
                group, member = divmod(rank, job.group)
                own, first = {"all": (rank, 0), "inner": (member, 0), "outer": (group, member * n)}[flow.ring]
                pads = [_beyond(size, first + index, length) for index in range(n)]
                scattered, gathered = sum(pads) - pads[own], sum(pads) - pads[own - 1]
                each = {"reduce-scatter": scattered, "all-gather": gathered, "all-reduce": scattered + gathered}
                sent[rank] += WIRE[job.wire] * flow.times * each[flow.collective]
    return sent


def copies(job: Job) -> dict[tuple[str, str], int]:
    """Bytes that each rank copies over its host link in a step, by the place that they go to and band."""
    if not job.row.offload:
        return {}
    whole, states = sum(job.chunks()) * job.ranks, STATES[job.precision]
    owned = whole // job.cut(Band.MASTER)
    reduced = job.accumulate if job.each and job.hosts(Band.GRADS) and not job.two_axes else 1
    found = {("host", Band.GRADS): states[Band.GRADS] * owned * reduced}
    if job.hosts(Band.PARAMS):
        uses = job.accumulate * (1 if job.kept or job.second else 2)
        found["card", Band.PARAMS] = states[Band.PARAMS] * whole // job.cut(Band.PARAMS) * uses
    else:
        found["card", Band.PARAMS] = states[Band.PARAMS] * owned
        if Band.MASTER not in states:  # the parameters are what is updated
            found["host", Band.PARAMS] = states[Band.PARAMS] * owned
    return {(place, str(band)): nbytes for (place, band), nbytes in found.items()}


def flops(job: Job) -> dict[str, int]:
    """Floating-point operations per rank and step, by phase.

    Two per weight and row forward, four backward (but two in the first layer, whose input
    needs no gradient); Adam's on everything that the rank updates, where that is.
    """
    layers = [layer for bucket in job.buckets for layer in bucket]
    products = [2 * job.rows * fan_in * fan_out for fan_in, fan_out in layers]
    return {
        "forward": sum(products),
        "backward": 2 * sum(products) - products[0],
        "optimizer on the host" if job.row.offload else "optimizer": ADAM_OPERATIONS
        * (sum(job.chunks()) * job.ranks // job.cut(Band.MASTER)),
    }


def host_peak(job: Job) -> Bytes:
    """The host's highest instant, by band: what the optimizer reads and updates is copied there, bucket by bucket."""
    states, best = STATES[job.precision], host_resident(job)
    if job.row.offload:
        for chunk in job.chunks():
            here, owned = Counter(host_resident(job)), chunk * job.ranks // job.cut(Band.MASTER)
            if not job.hosts(Band.GRADS):
                here[Band.GRADS] += states[Band.GRADS] * owned
            if not job.hosts(Band.PARAMS) and Band.MASTER not in states:
                here[Band.PARAMS] += states[Band.PARAMS] * owned
            best = max(best, dict(here), key=lambda bands: sum(bands.values()))
    return {band: nbytes for band, nbytes in best.items() if nbytes}


def peak_without_activations(job: Job) -> Bytes:
    """The highest instant on the card of what scales with the parameters, by band."""
    return _highest(job, leave_out=Band.ACTIVATIONS)


def peak(job: Job) -> Bytes:
    """The highest instant of a step on the card, activations and the batch included, by band."""
    return _highest(job)


def _highest(job: Job, leave_out: str = "") -> Bytes:
    best: Bytes = {}
    for moment in moments(job):
        here = {band: nbytes for band, nbytes in moment.items() if nbytes and band != leave_out}
        if sum(here.values()) > sum(best.values()):  # strictly: the first of equals stands
            best = here
    return best


def moments(job: Job) -> Iterator[Bytes]:
    """What a rank holds on its card, by band, at each instant of a step that can be the highest, in order."""
    step = _Step(job)
    yield step.now()
    for micro_batch in range(job.accumulate):
        yield from step.forward()
        yield from step.backward(first=micro_batch == 0, last=micro_batch == job.accumulate - 1)
    yield from step.update()


class _Step:
    """A step's holds and frees on one rank's card, in bytes."""

    def __init__(self, job: Job) -> None:
        self.job, self.held = job, Counter[str](resident(job))
        self.b, self.g, self.w = STATES[job.precision][Band.PARAMS], STATES[job.precision][Band.GRADS], WIRE[job.wire]
        self.whole = [chunk * job.ranks for chunk in job.chunks()]
        self.row = ACTIVATION * (job.rows // job.accumulate)
        self.full: set[int] = set()  # buckets that are gathered
        self.second: set[int] = set()  # of which a second copy is kept

    def now(self) -> Bytes:
        return dict(self.held)

    def alive(self, width: int) -> None:
        """Activations of so many columns are held, or, where it is negative, freed."""
        self.held[Band.ACTIVATIONS] += self.row * width

    def ring(self, ring: str, index: int) -> Bytes:
        """While a collective runs: its two blocks on top."""
        return self.now() | {Band.BLOCKS: 2 * self.w * self.job.length(ring, self.job.chunks()[index])}

    def gather(self, *buckets: int) -> Iterator[Bytes]:
        if not self.job.shards(Band.PARAMS):
            return
        for index in buckets:
            if index in self.full:
                continue
            self.full.add(index)
            self.held[Band.GATHERED] += self.b * self.whole[index]
            up = 0
            if self.job.hosts(Band.PARAMS) and index not in self.second:
                up = self.b * self.whole[index] // self.job.cut(Band.PARAMS)
            self.held[Band.GATHERED] += up
            yield self.ring("inner" if self.job.two_axes or index in self.second else "all", index)
            self.held[Band.GATHERED] -= up

    def release(self, *buckets: int, backward: bool) -> Iterator[Bytes]:
        for index in buckets:
            if index not in self.full or (self.job.kept and not backward):
                continue
            shard = self.b * self.whole[index] // self.job.group
            if self.job.second and not backward:
                self.second.add(index)
                self.held[Band.SECONDARY] += shard
                yield self.now()
            self.full.remove(index)
            self.held[Band.GATHERED] -= self.b * self.whole[index]
            if index in self.second and backward:
                self.second.remove(index)
                self.held[Band.SECONDARY] -= shard

    def forward(self) -> Iterator[Bytes]:
        job, every = self.job, range(len(self.whole))
        self.alive(job.buckets[0][0][0] + job.buckets[-1][-1][1])
        yield self.now()
        if job.gather == "model":
            yield from self.gather(*every)
        for index, layers in enumerate(job.buckets):
            yield from self.gather(index)
            for _, fan_out in layers:
                self.alive(fan_out)
                yield self.now()
            if job.gather == "layer":
                yield from self.release(index, backward=False)
        yield from self.release(*every, backward=False)
        self.alive(job.buckets[-1][-1][1])  # the loss's gradient, beside the target that it is the last to read
        yield self.now()
        self.alive(-job.buckets[-1][-1][1])

    def backward(self, *, first: bool, last: bool) -> Iterator[Bytes]:
        job, every = self.job, range(len(self.whole))
        if job.gather == "model":
            yield from self.gather(*every)
        for index in reversed(every):
            yield from self.gather(index)
            unreduced, again = self.g * self.whole[index], not job.each and not first
            sharded = job.shards(Band.GRADS) or job.hosts(Band.GRADS)
            needed = again or sharded or (job.each and not first and not job.two_axes)
            self.held[Band.UNREDUCED] += unreduced * needed
            yield self.now()
            for position, (fan_in, fan_out) in reversed(list(enumerate(job.buckets[index]))):
                self.alive(-fan_out)  # the layer's output
                if index or position:
                    self.alive(fan_in)  # the gradient of its input
                    yield self.now()
                self.alive(-fan_out)  # the gradient of its output
            if job.gather == "layer":
                yield from self.release(index, backward=True)
            self.held[Band.UNREDUCED] -= unreduced * again
            if job.each or last:
                yield from self.reduce(index, first=first or not job.each, last=last)
                self.held[Band.UNREDUCED] -= unreduced * (sharded or (needed and not again))
        yield from self.release(*every, backward=True)
        self.alive(-job.buckets[0][0][0])

    def reduce(self, index: int, *, first: bool, last: bool) -> Iterator[Bytes]:
        job = self.job
        if not job.two_axes:
            average = self.g * self.whole[index] // job.ranks if job.shards(Band.MASTER) and not first else 0
            self.held[Band.UNREDUCED] += average
            if job.ranks > 1 or job.alone:
                yield self.ring("all", index)
            self.held[Band.UNREDUCED] -= average
            return
        partial = self.w * self.whole[index] // job.group
        self.held[Band.PARTIAL] += partial
        yield self.ring("inner", index)
        self.held[Band.PARTIAL] -= 0 if first else partial
        if last:
            unreduced = self.g * self.whole[index] if job.shards(Band.GRADS) or job.hosts(Band.GRADS) else 0
            self.held[Band.UNREDUCED] -= unreduced
            yield self.ring("outer", index)
            self.held[Band.UNREDUCED] += unreduced
            self.held[Band.PARTIAL] -= partial

    def update(self) -> Iterator[Bytes]:
        job, optimizer, params = self.job, self.job.cut(Band.MASTER), self.job.cut(Band.PARAMS)
        if params == optimizer:
            return
        staged = job.two_axes and params == 1 and optimizer == job.ranks
        for size in self.whole if staged else ():  # whole parameters that are updated in pieces of pieces
            self.held[Band.GATHERED] += self.b * size // job.group
            yield self.now()
        for index, size in enumerate(self.whole):
            if job.two_axes and optimizer == job.ranks:
                yield self.ring("outer", index)
            if params == 1:
                yield self.ring("inner" if job.two_axes else "all", index)
            self.held[Band.GATHERED] -= self.b * size // job.group if staged else 0
