"""The closed forms of the peaks: what a rank holds when it holds most.

Owns the order in which a step holds and frees, as far as the peak can depend on it. The peak,
activations left out, is the resident bytes and, over the buckets, the largest of

    2 w C              the ring's two blocks, under data parallel and ZeRO-1
    b L + 2 w C        gradients not yet reduced, ZeRO-2; or a layer being gathered, ZeRO-3
    b L + b L          a gathered layer and its gradients, in ZeRO-3's backward

With activations, kept copies, groups and micro-batches there are more: ``moments`` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from zerosim.bands import Band
from zerosim.stages import Over
from zerosim.theory.forms import ACTIVATION, WIRE, Bytes, Job, Scalars, block, host_resident, resident, scalars


def peak(job: Job) -> Bytes:
    """The peak of a step on the card, activations and the batch included, by band."""
    return _highest(moments(job))


def peak_without_activations(job: Job) -> Bytes:
    """The peak on the card of what scales with the parameters, by band."""
    return _highest(moments(job), leave_out=Band.ACTIVATIONS)


def host_peak(job: Job) -> Bytes:
    """The host's peak, by band: what the optimizer reads and updates is copied there, bucket by bucket."""
    instants = [host_resident(job)]
    for chunk in job.chunks() if job.row.offload and not job.skipped else ():
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
    told = {each.tag: each for each in scalars(job)}
    if "rows" in told:
        step.tell(told["rows"])
    for micro_batch, step.rows in enumerate(job.parts or [job.rows // job.accumulate] * job.accumulate):
        step.forward()
        step.backward(first=micro_batch == 0, last=micro_batch == job.accumulate - 1)
    if "norm" in told:
        step.tell(told["norm"])
    if "used" in told:
        step.hold(Band.SCALARS, told["used"].nbytes())
        step.tell(told["used"])
        step.hold(Band.SCALARS, -told["used"].nbytes())
    if not job.skipped:
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
        self.rows = 0  # of the micro-batch

    def hold(self, band: Band, nbytes: int) -> None:
        self.held[band] += nbytes
        if nbytes > 0:
            self.instants.append(dict(self.held))

    def activations(self, *widths: int) -> None:
        for width in widths:
            self.hold(Band.ACTIVATIONS, ACTIVATION * self.rows * width)

    def collective(self, ring: str, index: int, band: Band) -> None:
        """While it runs, a rank has a block going and one coming."""
        nbytes = 2 * block(self.job, band, self.job.chunks()[index] * self.job.rings[ring][1])
        self.hold(Band.BLOCKS, nbytes)
        self.hold(Band.BLOCKS, -nbytes)

    def tell(self, told: Scalars) -> None:
        """What all members have told, while it is read, and the two blocks that it came in."""
        everyone = self.job.rings[told.ring][0] * told.nbytes()
        self.hold(Band.SCALARS, everyone)
        self.hold(Band.BLOCKS, 2 * told.nbytes())
        self.hold(Band.BLOCKS, -2 * told.nbytes())
        self.hold(Band.SCALARS, -everyone)

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
