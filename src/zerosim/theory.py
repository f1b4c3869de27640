"""What ZeRO predicts, as closed forms in exact integers for any N.

Owns the formulas and their constants, stated from the papers and not read from the code that
they are compared with: it shares only the bands' names and the rows with the rest. Never sees a run.

Notation: N ranks; a bucket of P parameters is padded to L = C N with C = ceil(P/N); a
working copy takes b bytes per parameter, a block on the wire w. Then, per rank,

* resident: a state of k bytes takes k L where it is whole and k C where it is sharded, so 16,
  4 + 12/N, 2 + 14/N and 16/N bytes per parameter when N divides every bucket
  (arXiv 1910.02054, section 5, with K = 12);
* traffic of a step: 2 (N-1) C w per bucket under data parallel, ZeRO-1 and ZeRO-2,
  3 (N-1) C w under ZeRO-3 (section 7; ring costs: Patarasuk and Yuan 2009);
* peak, activations left out: the resident bytes and, over the buckets, the largest of

      2 w C              the ring's two blocks, under data parallel and ZeRO-1
      b L + 2 w C        gradients not yet reduced, ZeRO-2; or a layer being gathered, ZeRO-3
      b L + b L          a gathered layer and its gradients, in ZeRO-3's backward

  where gather="model" makes it the whole model's b L and, while a layer is reduced, the layer's
  b L + 2 w C on top.

With activations the instants within a layer differ too; ``moments`` lists all that can be
the highest, in the order of the schedule, so that the first of equals is the peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.bands import Band
from zerosim.stages import Stage

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


@dataclass(frozen=True)
class Job:
    """One run, as the formulas see it.

    ``row`` is a scheme's: only its flags ``optimizer``, ``grads`` and ``params`` are read. ``buckets``
    lists, for each flat buffer, the (fan-in, fan-out) of its linear layers; ``rows`` are those of the
    batch that one rank has.
    """

    row: Stage
    buckets: tuple[tuple[tuple[int, int], ...], ...]
    ranks: int
    rows: int = 0
    precision: str = "mixed"
    wire: str = "fp32"
    gather: str = "layer"

    def sizes(self) -> list[int]:
        """P of each bucket: weights and biases."""
        return [sum(fan_in * fan_out + fan_out for fan_in, fan_out in bucket) for bucket in self.buckets]

    def chunks(self) -> list[int]:
        """C of each bucket."""
        return [-(-size // self.ranks) for size in self.sizes()]

    @property
    def optimizer_sharded(self) -> bool:
        return self.row.optimizer and self.ranks > 1

    @property
    def grads_sharded(self) -> bool:
        return self.row.grads and self.ranks > 1

    @property
    def params_sharded(self) -> bool:
        return self.row.params and self.ranks > 1

    @property
    def gathers(self) -> int:
        """How often a step all-gathers the parameters: in forward and backward, or after the update, or never."""
        return 2 if self.row.params else 1 if self.row.optimizer else 0

    def held(self, band: Band, chunk: int) -> int:
        """Elements of a state of N chunks that a rank holds."""
        sharded = {Band.PARAMS: self.params_sharded, Band.GRADS: self.grads_sharded}
        return chunk if sharded.get(band, self.optimizer_sharded) else chunk * self.ranks


def resident(job: Job) -> Bytes:
    """Bytes per rank between steps, by band."""
    return {band: each * job.held(band, sum(job.chunks())) for band, each in STATES[job.precision].items()}


def padding(job: Job) -> list[int]:
    """Bytes of padding among the resident, for each rank: a whole state carries all of it, a shard its own."""
    held = []
    for rank in range(job.ranks):
        nbytes = 0
        for size, chunk in zip(job.sizes(), job.chunks(), strict=True):
            everything = chunk * job.ranks - size
            own = min(chunk, max(0, (rank + 1) * chunk - size))
            for band, each in STATES[job.precision].items():
                nbytes += each * (own if job.held(band, chunk) == chunk else everything)
        held.append(nbytes)
    return held


def traffic(job: Job) -> dict[str, Bytes]:
    """Bytes that each rank sends in a step, by collective and band; nothing at N = 1."""
    if job.ranks == 1:
        return {}
    once = (job.ranks - 1) * sum(job.chunks()) * WIRE[job.wire]
    if not job.row.optimizer:
        return {"all-reduce": {Band.GRADS: 2 * once}}
    return {"reduce-scatter": {Band.GRADS: once}, "all-gather": {Band.PARAMS: job.gathers * once}}


def messages(job: Job) -> dict[str, int]:
    """Messages that each rank sends in a step, by collective: N-1 a time, twice for an all-reduce."""
    hops = (job.ranks - 1) * len(job.buckets)
    if job.ranks == 1:
        return {}
    if not job.row.optimizer:
        return {"all-reduce": 2 * hops}
    return {"reduce-scatter": hops, "all-gather": job.gathers * hops}


def padding_sent(job: Job) -> list[int]:
    """Bytes of padding that each rank sends in a step.

    A reduce-scatter takes every chunk but its own past a rank, an all-gather every chunk but
    that of the rank below, to which it sends.
    """
    n, each = job.ranks, WIRE[job.wire]
    sent = [0] * n
    if n == 1:
        return sent
    for size, chunk in zip(job.sizes(), job.chunks(), strict=True):
        pads = [min(chunk, max(0, (rank + 1) * chunk - size)) for rank in range(n)]
        for rank in range(n):
            gathers = max(1, job.gathers)  # an all-reduce gathers gradients
            sent[rank] += each * (sum(pads) - pads[rank] + gathers * (sum(pads) - pads[(rank - 1) % n]))
    return sent


def flops(job: Job) -> dict[str, int]:
    """Floating-point operations per rank and step, by phase.

    Two per weight and row forward, four backward (but two in the first layer, whose input
    needs no gradient); Adam's on everything that the rank updates.
    """
    layers = [layer for bucket in job.buckets for layer in bucket]
    products = [2 * job.rows * fan_in * fan_out for fan_in, fan_out in layers]
    return {
        "forward": sum(products),
        "backward": 2 * sum(products) - products[0],
        "optimizer": ADAM_OPERATIONS * job.held(Band.MASTER, sum(job.chunks())),
    }


def peak_without_activations(job: Job) -> Bytes:
    """The highest instant of what scales with the parameters, by band."""
    return _highest(job, leave_out=Band.ACTIVATIONS)


def peak(job: Job) -> Bytes:
    """The highest instant of a step, activations and the batch included, by band."""
    return _highest(job)


def _highest(job: Job, leave_out: str = "") -> Bytes:
    best: Bytes = {}
    for moment in moments(job):
        here = {band: nbytes for band, nbytes in moment.items() if nbytes and band != leave_out}
        if sum(here.values()) > sum(best.values()):  # strictly: the first of equals stands
            best = here
    return best


def moments(job: Job) -> Iterator[Bytes]:
    """What a rank holds, by band, at each instant of a step that can be the highest, in order."""
    states = resident(job)
    states_of = STATES[job.precision]
    wholes = [states_of[Band.PARAMS] * chunk * job.ranks for chunk in job.chunks()]
    rings = [2 * WIRE[job.wire] * chunk if job.ranks > 1 else 0 for chunk in job.chunks()]
    gathers, at_once = job.params_sharded, job.params_sharded and job.gather == "model"
    unreduced = [states_of[Band.GRADS] * chunk * job.ranks if job.grads_sharded else 0 for chunk in job.chunks()]
    alive = _Activations(job)

    def moment(gathered: int = 0, grads: int = 0, ring: int = 0) -> Bytes:
        extra: Bytes = {
            Band.GATHERED: gathered,
            Band.UNREDUCED: grads,
            Band.BLOCKS: ring,
            Band.ACTIVATIONS: alive.nbytes,
        }
        return states | extra

    def gathering_all() -> Iterator[Bytes]:
        for index, ring in enumerate(rings):
            yield moment(sum(wholes[: index + 1]), 0, ring)

    def gathered(index: int) -> int:
        return sum(wholes) if at_once else wholes[index] if gathers else 0

    yield moment()
    if at_once:
        yield from gathering_all()
    for index, layers in enumerate(job.buckets):
        if gathers and not at_once:
            yield moment(wholes[index], 0, rings[index])
        for _, fan_out in layers:
            alive.hold(fan_out)
            yield moment(gathered(index))
    alive.hold(alive.target)  # the loss's gradient, beside the target that it is the last to read
    yield moment()
    alive.free(alive.target)
    if at_once:
        yield from gathering_all()
    for index in reversed(range(len(job.buckets))):
        if gathers and not at_once:
            yield moment(wholes[index], 0, rings[index])
        yield moment(gathered(index), unreduced[index])
        for position, (fan_in, fan_out) in reversed(list(enumerate(job.buckets[index]))):
            alive.free(fan_out)  # the layer's output
            if index or position:
                alive.hold(fan_in)  # the gradient of its input
                yield moment(gathered(index), unreduced[index])
            alive.free(fan_out)  # the gradient of its output
        yield moment(sum(wholes) if at_once else 0, unreduced[index], rings[index])


class _Activations:
    """Bytes of the batch and the activations alive, as layers come and go; widths in, bytes out."""

    def __init__(self, job: Job) -> None:
        self._row = ACTIVATION * job.rows
        self.target = job.buckets[-1][-1][1]
        self.nbytes = 0
        self.hold(job.buckets[0][0][0] + self.target)

    def hold(self, width: int) -> None:
        self.nbytes += self._row * width

    def free(self, width: int) -> None:
        self.nbytes -= self._row * width
