"""Training on N ranks as a textbook has it: what every scheme must come to, written a second time.

Owns an account of a step that shares nothing with the first: ranks and chunks in plain loops,
states as whole vectors, no ring, ledger, shards or blocks, and constants of its own. It must
not import the rooms that it is held against; only the bands' names and the rows are common.

A fault that all schemes have in common makes them no less alike; against this one it shows.
The order of every sum is the ring's, so that the bits are equal and not only close.

``kept`` is what a message keeps of its value at each hop. With 1 nothing is lost, all ranks and all
rows that sum in one order come to the same, and one account serves them. With less, what a rank has
depends on which messages reached it and how often they were handed on, so that a rank which has read
another's memory instead of its message gives itself away. Parameters that are sent in int8 change their
values as they leave; what is lost of such a message at a hop is lost of its scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from zerosim.bands import Array, Band, DType
from zerosim.checks import perceptron, told
from zerosim.checks.perceptron import Given
from zerosim.stages import Over, Stage

if TYPE_CHECKING:
    from zerosim.records.settings import Settings

FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WIRE: dict[str, DType] = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
# By precision: what forward and backward read, and what gradients are kept in.
RECIPES: dict[str, tuple[DType, DType]] = {
    "mixed": (FP16, FP16), "bf16": (BF16, BF16), "fp32": (FP32, FP32),
    "mixed-main-grads": (FP16, FP16), "bf16-fp32-grads": (BF16, FP32),
}  # fmt: skip
LR, BETA1, BETA2, EPS = 1e-2, 0.9, 0.999, 1e-8  # Adam's
SHARE_A_SCALE = 256  # of the parameters that are sent in int8


class Reference:
    """A perceptron trained under one ``row`` on N ranks, each with rows of its own, as the settings have it.

    ``states`` has, by band, an array for each layer of P parameters, L being P padded to a multiple of N:
    [N, L], a row for each rank that has all of it, [D, L] where the D groups shard it, [1, L] where all
    ranks do or where nothing is lost. It has every band that any precision keeps. The gradients are the
    averaged ones.
    """

    def __init__(self, row: Stage, settings: Settings, ranks: int, kept: float = 1) -> None:
        self.row, self.asked, self.ranks, self.kept = row, settings, ranks, kept
        self.members = settings.node or ranks
        self.groups = ranks // self.members
        (self.working, self.averaged), self.wire = RECIPES[settings.precision], WIRE[settings.wire]
        sent = settings.wire_params or settings.wire
        self.wire_params: DType | str = "int8" if sent == "int8" else WIRE[sent]
        self.scale = None if settings.loss_scale is None else told.ScaleAccount(settings.loss_scale)
        self.norm: float | None = None
        self.skipped = False
        self.steps = self.updates = self.resumed = 0
        self.loss, self.scale_used = float("nan"), 1.0
        self._shapes = list(pairwise(settings.widths))
        rng = np.random.default_rng(settings.model_seed)
        whole = [self._padded(rng.standard_normal(shape) * np.sqrt(2 / shape[0])) for shape in self._shapes]
        self._alike = kept == 1 and sent != "int8"
        main = [np.repeat(layer, self._copies(row.optimizer), axis=0) for layer in whole]
        params = [np.repeat(layer, self._copies(row.params), axis=0) for layer in whole]
        self.states: dict[Band, list[Array]] = {
            Band.PARAMS: [layer.astype(self.working) for layer in params],
            Band.GRADS: [np.zeros_like(layer, self.averaged) for layer in main],
            Band.MAIN_GRADS: [np.zeros_like(layer) for layer in main],
            Band.EXP_AVG: [np.zeros_like(layer) for layer in main],
            Band.EXP_AVG_SQ: [np.zeros_like(layer) for layer in main],
            Band.MASTER: main,
        }

    @property
    def two_axes(self) -> bool:
        """Whether sums are made within the groups first, and then over them."""
        grouped = Over.GROUP in (self.row.optimizer, self.row.grads, self.row.params)
        return grouped and self.groups > 1 < self.members

    def _cut(self, over: Over) -> int:
        """Into how many pieces a state is cut."""
        return {Over.NOBODY: 1, Over.GROUP: self.members, Over.ALL: self.ranks}[over]

    def _copies(self, over: Over) -> int:
        """How many different copies of a state there are."""
        return 1 if self._alike else self.ranks // self._cut(over)

    def expected(self, band: Band, layer: int, pieces: Sequence[int], length: int, *, loaded: bool = False) -> Array:
        """What each rank must have [N, length] of a state of which it has the piece of that number.

        ``loaded`` says that it is to be as it was when the run was resumed.
        """
        state = (self.loaded if loaded else self.states)[band][layer]
        share = self.ranks // len(state)  # how many ranks one copy serves
        return np.stack([state[rank // share][piece * length :][:length] for rank, piece in enumerate(pieces)])

    def _padded(self, weight: Array) -> Array:
        """A layer's parameters [1, L]: the weights row by row, zero biases, zero padding."""
        flat = np.zeros((1, weight.size + weight.shape[1]), FP32)
        flat[0, : weight.size] = weight.reshape(-1)
        return self._cut_anew(flat)

    def _cut_anew(self, flat: Array) -> Array:
        """Elements [n, P] with zeros up to a multiple of the ranks [n, L]."""
        return np.pad(flat, ((0, 0), (0, -flat.shape[1] % self.ranks)))

    def resume(self, step: int, ranks: int) -> None:
        """Go on after so many steps on ``ranks`` ranks, with what the first of those that had it has of each state."""
        if self.resumed == step:
            return
        self.resumed, self.ranks, self.members = step, ranks, self.asked.node or ranks
        self.groups = ranks // self.members
        for band, layers in self.states.items():
            copies = self._copies(self.row.params if band is Band.PARAMS else self.row.optimizer)
            for layer, (fan_in, fan_out) in enumerate(self._shapes):
                whole = self._cut_anew(layers[layer][:1, : fan_in * fan_out + fan_out])
                if band in (Band.GRADS, Band.MAIN_GRADS):  # the next step makes them anew
                    whole = np.zeros_like(whole)
                layers[layer] = np.repeat(whole, copies, axis=0)
        self.loaded = {band: list(layers) for band, layers in self.states.items()}

    def reach(self, step: int, batch: Sequence[Given]) -> None:
        """Take the ``step``-th step, counted from 1, on what each rank is given, unless it is taken.

        That is a pair (x [B, I], y [B, O]) to be cut into micro-batches, or a list of them.
        """
        if self.steps >= step:
            return
        self.steps += 1
        k = self.asked.accumulate
        parts = [*zip(*(perceptron.micro_batches(each, k) for each in batch), strict=True)]  # [micro-batch][rank]
        over_rows = self.asked.uneven and self.asked.average == "rows"
        scale = 1.0 if self.scale is None else self.scale.scale
        with np.errstate(all="ignore"):
            full = [self._forward_params(params) for params in self.states[Band.PARAMS]]
            weights = [[len(x) if over_rows else 1 for x, _ in part] for part in parts]
            heard = told.totals([sum(column) for column in zip(*weights, strict=True)], self.kept)
            losses: list[float] = []
            found: list[list[Array]] = []  # [micro-batch][layer]
            for part, counts in zip(parts, weights, strict=True):
                outputs = perceptron.forward(self._shapes, full, part)
                errors = [output[-1] - y for output, (_, y) in zip(outputs, part, strict=True)]
                losses += [float(np.square(error).mean(dtype=np.float64)) if len(error) else 0.0 for error in errors]
                slopes = []
                for error, count, total in zip(errors, counts, heard, strict=True):
                    share = count * self.ranks * k / total if over_rows else 1
                    slopes.append(error * FP32.type(2 / max(error.size, 1)) * FP32.type(share) * FP32.type(scale))
                params = [self._backward_params(each) for each in full]
                found.append(perceptron.backward(self._shapes, params, outputs, slopes, self.averaged))
            self.loss = float(np.average(losses, weights=np.ravel(weights)) if over_rows else np.mean(losses))
            self._apply([self._average(layer) for layer in zip(*found, strict=True)], scale)

    def _apply(self, averages: list[Array], scale: float) -> None:
        """Update, or, where a gradient is not finite and the loss is scaled, leave everything as it was."""
        self.states[Band.GRADS], self.scale_used = averages, scale
        factors = np.full(self.ranks, FP32.type(1 / scale))  # by rank
        if self.asked.clip is not None:
            norms = self._norms([average.astype(FP32) * factors[0] for average in averages])
            self.norm = float(norms[0])
            clip, eps = self.asked.clip, self.asked.clip_eps
            factors = np.array([factors[0] * told.coefficient(norm, clip, eps) for norm in norms])
        if self.scale is not None:
            self.skipped = not all(np.isfinite(average.astype(FP32)).all() for average in averages)
            self.scale.step(finite=not self.skipped)
            if self.skipped:
                return
        self.updates += 1
        for layer, average in enumerate(averages):
            self._update(layer, average, factors)

    def _norms(self, grads: Sequence[Array]) -> list[Any]:
        """The norm on each rank, of the optimizer's copies of the gradients [N, D or 1, L] of each layer."""
        copies, cut, kind = len(grads[0]), self._cut(self.row.optimizer), self.asked.norm_type
        sums = []
        for layer in grads:
            by_copy = [[told.measure(piece, kind) for piece in copy.reshape(self.ranks, -1)] for copy in layer]
            sums.append([by_copy[rank * copies // self.ranks] for rank in range(self.ranks)])

        def owner(rank: int, piece: int) -> tuple[int, int]:
            if cut == 1 or self._alike:
                return rank, 0
            if cut == self.ranks:
                teller = self._owner(piece)
                return teller, (teller - rank) % self.ranks
            group, member = divmod(rank, self.members)
            shard = piece // self.groups
            return group * self.members + shard, (shard - member) % self.members

        return told.norms(sums, self.ranks, owner, self.kept, kind)

    def _owner(self, piece: int) -> int:
        """The rank that owns a piece of N: over two axes rank d S + s has piece s D + d."""
        if not self.two_axes:
            return piece
        member, group = divmod(piece, self.groups)
        return group * self.members + member

    def _factors(self, factors: Array, copies: int, length: int) -> Array:
        """What each element of the optimizer's copies is multiplied by [copies, length]: its owner's factor."""
        cut = self._cut(self.row.optimizer)
        if cut == 1 or self._alike:
            return np.repeat(factors[:copies, None], length, axis=1)
        table = np.empty((copies, self.ranks), FP32)
        for copy in range(copies):
            for piece in range(self.ranks):
                within = copy * self.members + piece // self.groups
                table[copy, piece] = factors[self._owner(piece) if cut == self.ranks else within]
        return np.repeat(table, length // self.ranks, axis=1)

    # -- what passes between ranks

    def _forward_params(self, params: Array) -> Array:
        """A layer's parameters as each rank computes with them in forward [N or 1, L]."""
        if self._alike or self._cut(self.row.params) == 1:
            return params
        gather = self._within_groups if self.two_axes else self._among_all
        return gather(params, self.wire_params)

    def _backward_params(self, full: Array) -> Array:
        """The same in backward: as in forward, unless they come from the group's second copy."""
        if self._alike or self.row.reshard_after_forward != "group" or 1 in (self.groups, self.members):
            return full
        shards = full.reshape(self.groups, self.members, self.members, -1)  # [group, rank, shard, G]
        own = np.arange(self.members)
        return self._within_groups(shards[:, own, own].reshape(self.groups, -1), self.wire_params)

    def _average(self, found: Sequence[Array]) -> Array:
        """The average of each micro-batch's gradients [N, L], as the optimizer's copies of it [N, D or 1, L].

        Micro-batches are added before the first ring adds ranks, or after it, where they are reduced each.
        """
        wire, k = self.wire, self.asked.accumulate
        grads = [perceptron.added(found)] if self.asked.sync == "end" else found
        if not self.two_axes:
            averages = [self._sums(each[None], self.ranks, k).astype(self.averaged) for each in grads]
            everywhere = self._cut(self.row.optimizer) == 1 and not self._alike
            return perceptron.added([self._among_all(each, wire) for each in averages] if everywhere else averages)
        groups = [each.reshape(self.groups, self.members, -1) for each in grads]
        within = perceptron.added([self._sums(each, self.members, k).astype(wire) for each in groups])  # [D, L]
        shards = within.reshape(self.groups, self.members, -1).swapaxes(0, 1)  # [shard, group, G]
        total = self._sums(shards, self.groups).astype(wire).reshape(1, -1)  # [shard, group's chunk] in a row
        if self.row.optimizer is Over.GROUP and not self._alike:
            total = self._among_groups(total, wire)
        return total.astype(self.averaged)

    def _updated(self, params: Array) -> Array:
        """Updated parameters, given by those who own them to those who hold more."""
        optimizer, whole = self._cut(self.row.optimizer), self._cut(self.row.params) == 1
        if self._alike or self._cut(self.row.params) == optimizer:
            return params
        if not self.two_axes:
            return self._among_all(params, self.wire_params)
        if optimizer == self.ranks:
            params = self._among_groups(params, self.wire_params)
        return self._within_groups(params, self.wire_params) if whole else params

    def _sums(self, tables: Array, size: int, share: int = 1) -> Array:
        """For each ring of ``size`` members [rings, member, L], the average [rings, L] in fp32, chunk by chunk.

        It is divided by ``share`` as well.
        Chunk c is summed from member c-1 down to member c, rounded at every hop.
        """
        chunk = np.arange(size)
        table = tables.astype(self.wire).reshape(len(tables), size, size, -1)  # [ring, member, chunk, C]
        total = table[:, chunk - 1, chunk]
        for hop in range(1, size):
            total = total * self.wire.type(self.kept) + table[:, (chunk - 1 - hop) % size, chunk]
        return (total.astype(FP32) * np.float32(1 / (size * share))).reshape(len(tables), -1)

    def _gather(self, owned: Array, wire: DType | str) -> Array:
        """What each member gets [rings, member, L] of what a ring's have together [rings, member's chunk, C].

        Chunk c reaches member c-t with the t-th hop; with none, its owner has what is sent.
        """
        rings, size, _ = owned.shape
        chunk, messages = np.arange(size), self._messages(owned, wire) if size > 1 else iter([owned])
        table = np.empty_like(owned, shape=(rings, size, *owned.shape[1:]))  # [ring, member, chunk, C]
        for hop in range(size):
            table[:, chunk - hop, chunk] = next(messages).astype(owned.dtype)
        return table.reshape(rings, size, -1)

    def _messages(self, owned: Array, wire: DType | str) -> Iterator[Array]:
        """What ``owned`` is after no hop, after one, after two and so on."""
        if wire == "int8":
            numbers, scales = _quantised(owned)
            while True:
                yield numbers * scales
                scales = scales * FP32.type(self.kept)
        message = owned.astype(wire)
        while True:
            yield message
            message = message * message.dtype.type(self.kept)

    def _among_all(self, whole: Array, wire: DType | str) -> Array:
        """[1, L], a chunk for each rank, to [N, L]."""
        everyone: Array = self._gather(whole.reshape(1, self.ranks, -1), wire)[0]
        return everyone

    def _within_groups(self, shards: Array, wire: DType | str) -> Array:
        """[D, L], a shard for each member of each group, to [N, L]."""
        return self._gather(shards.reshape(self.groups, self.members, -1), wire).reshape(self.ranks, -1)

    def _among_groups(self, whole: Array, wire: DType | str) -> Array:
        """[1, L], in each shard a chunk for each group, to [D, L]."""
        gathered = self._gather(whole.reshape(self.members, self.groups, -1), wire)  # [shard, group, G]
        shards: Array = gathered.swapaxes(0, 1).reshape(self.groups, -1)
        return shards

    # -- Adam

    def _update(self, layer: int, average: Array, factors: Array) -> None:
        states = {band: arrays[layer] for band, arrays in self.states.items()}
        g = main_grads = average.astype(FP32)
        if self.asked.clip is not None or self.scale is not None:
            g = main_grads * self._factors(factors, *main_grads.shape)
        warmup = self.asked.warmup
        lr = LR * (min(1.0, (self.updates - 1) / warmup) if warmup else 1.0)
        fan_in, fan_out = self._shapes[layer]
        weights = np.arange(average.shape[1]) < fan_in * fan_out  # biases and padding do not decay
        decayed = states[Band.MASTER] * np.where(weights, FP32.type(1 - lr * self.asked.weight_decay), FP32.type(1))
        m = states[Band.EXP_AVG] + (1 - BETA1) * (g - states[Band.EXP_AVG])
        v = BETA2 * states[Band.EXP_AVG_SQ] + (1 - BETA2) * g * g
        denominator = np.sqrt(v) / (1 - BETA2**self.updates) ** 0.5 + EPS
        main = decayed + (-lr / (1 - BETA1**self.updates)) * m / denominator
        new = {
            Band.PARAMS: self._updated(main.astype(self.working)), Band.GRADS: average, Band.MAIN_GRADS: main_grads,
            Band.MASTER: main, Band.EXP_AVG: m, Band.EXP_AVG_SQ: v,
        }  # fmt: skip
        for band, array in new.items():
            self.states[band][layer] = array


def _quantised(values: Array) -> tuple[Array, Array]:
    """Numbers from -127 to 127 and the scale of each; up to 256 values in a row share one, their largest over 127."""
    numbers, scales = np.empty_like(values, np.int8), np.empty_like(values, FP32)
    for start in range(0, values.shape[-1], SHARE_A_SCALE):
        some = slice(start, start + SHARE_A_SCALE)
        largest = np.abs(values[..., some].astype(FP32)).max(axis=-1, keepdims=True)
        scales[..., some] = largest / np.float32(127)
        exact = values[..., some].astype(FP32) / np.where(largest == 0, np.float32(1), scales[..., some])
        numbers[..., some] = np.clip(np.rint(exact), -127, 127)
    return numbers, scales
