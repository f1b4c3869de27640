"""``check``: a user's own training under ZeRO or FSDP, held to the simulator while it runs.

Owns what a user calls, and the way from each rank's step to the verdict: what every rank was
seen to do goes to rank 0 through the side channel, between steps. Must not know how anything is judged.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from zerosim.bands import PRECISIONS, Array
from zerosim.conformance import words
from zerosim.conformance.board import Doing, Mismatch
from zerosim.conformance.expected import expected, owns_parameters, parameters, rule_of
from zerosim.conformance.handed import names_of, pieces_of, tensors_of
from zerosim.conformance.judge import Judge
from zerosim.conformance.layout import Layout, Piece
from zerosim.conformance.local_gradients import LocalGradients, default_forward
from zerosim.conformance.observer import Observer
from zerosim.conformance.patience import OutOfOrder, Patience
from zerosim.conformance.recording import Recorder
from zerosim.conformance.seen import Seen
from zerosim.conformance.side import Side
from zerosim.options import LossScale
from zerosim.records.conformance import VERDICT_SCHEMA, Cause, Finding, Recipe, Verdict
from zerosim.stages import Stage
from zerosim.torch_models import trees
from zerosim.torch_models.units import numpy_dtype
from zerosim.util.arguments import instance_of, integer, one_of
from zerosim.util.rows import Said, one
from zerosim.util.words import counted

dist: Any = torch.distributed
Tensor = Any
BANDS = ("params", "grads", "master", "exp_avg", "exp_avg_sq", "momentum")
_PRECISION = {torch.float32: "fp32", torch.float16: "mixed", torch.bfloat16: "bf16"}


def check(
    net: torch.nn.Module, *, scheme: Said, loss: Callable[[Any, Any], Any], optimizer: Any, units: Any = None,
    precision: str | None = None, accumulate: int = 1, clip: float | None = None,
    loss_scale: float | LossScale | None = None, node: int | None = None,
    average: str = "rows", all_reduce: bool = False, exact: bool = False,
    forward: Callable[[Any, Any], Any] | None = None, memory: bool = True, timeout: float = 60.0,
) -> Check:  # fmt: skip
    """Watch a training of ``net`` on this rank, and hold it to ``scheme``, the row that it follows, or its name.

    Call it on every rank after ``init_process_group`` and before anything wraps or shards ``net``; then
    train as you would, each step in ``with check.step(x, y)``; at the end ``check.report()``.

    * ``loss``: of the module's output and y, as in training; ``forward``: of (module, x), if calling the module on x,
      brought to its dtype, is not what is done.
    * ``optimizer``: ``zerosim.optimizer.Adam``, ``AdamW`` (which decays what has two or more dimensions) or ``SGD``, or
      one of torch's, of whose groups the numbers are taken; or a function of (name, parameter) that returns one.
    * ``units``: the modules that are gathered and reduced as a whole, as a class or a predicate; by default each that
      has parameters of its own.
    * ``precision``: one of ``bands.PRECISIONS``; by default that of the module's dtype.
    * ``accumulate``: micro-batches in a step; ``clip``: the gradients' largest norm; ``loss_scale``: a number, or a
      ``zerosim.options.LossScale``, torch's GradScaler; ``node``: so many ranks are a group.
    * ``average``: uneven ranks are averaged over ``"rows"`` or over ``"ranks"``.
    * ``all_reduce``: gradients are all-reduced on purpose where they could be reduce-scattered.
    * ``exact``: the layout is the simulator's, and gradients are compared in bits.
    * ``timeout``: without progress for so many seconds the rank that the others wait for is named, and all end.

    >>> from torch import nn
    >>> from zerosim.optimizer import SGD
    >>> from zerosim.stages import DP
    >>> net = nn.Linear(2, 1)
    >>> opt = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> found = check(net, scheme=DP, loss=nn.functional.mse_loss, optimizer=SGD(lr=0.1))
    >>> x, y = torch.ones(3, 2), torch.zeros(3, 1)
    >>> with found.step(x, y):
    ...     opt.zero_grad()
    ...     nn.functional.mse_loss(net(x), y).backward()
    ...     opt.step()
    >>> found.findings
    []

    ValueError or TypeError for what cannot be checked.
    """
    instance_of("check", "net", net, torch.nn.Module)
    row = one("check", "scheme", scheme)
    one_of("check", "average", average, ("rows", "ranks"))
    dtypes = {param.dtype for param in net.parameters()}
    if len(dtypes) != 1 or not dtypes <= set(_PRECISION):
        raise ValueError(
            f"check(net): all parameters are of one dtype, float32, float16 or bfloat16; got "
            f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes)) or 'none'}."
        )
    precision = precision or _PRECISION[dtypes.pop()]
    one_of("check", "precision", precision, PRECISIONS)
    if isinstance(loss_scale, int | float):
        loss_scale = LossScale(float(loss_scale), dynamic=False)
    instance_of("check", "loss_scale", loss_scale, LossScale | None)
    row.on(dist.get_world_size() if dist.is_initialized() else 1, node)
    recipe = Recipe(
        precision=precision, accumulate=integer("check", "accumulate", accumulate), clip=clip,
        loss_scale=loss_scale, average=average, all_reduce=all_reduce, exact=exact, node=node,
        schedule=getattr(optimizer, "schedule", None),
    )  # fmt: skip
    return Check(
        net, row, loss, rule_of(optimizer), units or owns_parameters, recipe, forward, memory=memory, timeout=timeout
    )


class Check:
    """One rank's part of a check; ``check`` makes it. ``findings`` has what was found so far, on every rank."""

    def __init__(
        self, net: torch.nn.Module, row: Stage, loss: Callable[[Any, Any], Any], rules: Callable[[str, Any], Any],
        units: Any, recipe: Recipe, forward: Callable[[Any, Any], Any] | None, *, memory: bool, timeout: float,
    ) -> None:  # fmt: skip
        self.findings: list[Finding] = []
        self.layout = Layout(parameters(net, units, rules))
        self.row, self.recipe = row, recipe
        self._net, self._steps, self._inside, self._reported = net, 0, False, False
        observed = Observer(net, self.layout, loss, memory=memory)
        self._side = Side()
        self.rank, self.ranks = self._side.rank, self._side.size
        board = self._side.board()
        self._patience = Patience(board, self._side, timeout, self._ended)
        self._recorder: Recorder | None = None
        self._judge: Judge | None = None
        call = forward or default_forward
        local = LocalGradients(net, self.layout, lambda module, x, y: loss(call(module, x), y), cast=forward is None)
        self._local, rule = local, self.layout.parameters[0].rule
        self._expect = lambda x, y: expected(local.module, units, loss, row, self.ranks, recipe, rule, x, y)
        self._observer = observed.ready(self._side, self._patience, local.tensors(), local.module)
        if self.rank == 0:
            dtype = numpy_dtype(next(net.parameters()).dtype)
            self._judge = Judge(self.layout, row, self.ranks, recipe, dtype, local, self._expect, self._search)

    def __repr__(self) -> str:
        done = f"{counted(self._steps, 'step')}, {counted(len(self.findings), 'finding')}"
        return f"Check({self.row.name} on {counted(self.ranks, 'rank')}, rank {self.rank}: {done})"

    # -- what a user calls

    @contextmanager
    def step(self, x: Any, y: Any, *, lr: float | None = None, loss_scale: float | None = None) -> Iterator[None]:
        """One training step of this rank on its batch (x, y), whatever it consists of; every rank takes part.

        ``lr`` is this step's learning rate where it changes, ``loss_scale`` this step's scale where the user has it.
        OutOfOrder, before this rank asks for it, for a collective that the others do not ask for.
        """
        if not trees.tensors(x):
            raise TypeError(f"check.step(x): a tensor, or a tuple or mapping of them; got {type(x).__name__}.")
        self._steps += 1
        self._patience.begin(self._steps)
        self._observer.begin(self._steps, x, y, lr, loss_scale)
        self._inside = True
        try:
            yield
        except BaseException as error:
            self._inside = False
            self._observer.abandon()
            self._fail(error)
            raise
        self._inside = False
        seen = self._observer.end()
        self._patience.board.now(Doing.COMPARING)
        self._patience.check_order()
        self._compare(seen)
        self._patience.board.now(Doing.OUTSIDE)

    def band(
        self, name: str, tensors: Any, offset: int | Mapping[str, int] = 0, *,
        of: torch.nn.Module | Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Hand over what the check cannot find by itself: ``"params"``, ``"grads"``, ``"master"``, ``"exp_avg"`` ...

        Within a step it is taken as it is now; outside of one it is remembered, and read at the end of every step.

        * a mapping from parameters' names to tensors of their shapes, or, with a mapping ``offset``, to flat shards of
          each that begin there;
        * a list of tensors, one for each parameter, in their order;
        * one flat tensor: a shard of all parameters laid end to end, beginning at element ``offset``. What lies beyond
          their end is padding.

        ``of`` says of which module's parameters, or of which by name; by default of all.
        """
        one_of("check.band", "name", name, BANDS)
        names = names_of(self.layout, self._net, of)
        handed = pieces_of(self.layout, tensors, offset, names)
        band = "handed grads" if name == "grads" else name
        key = f"{band}\n{','.join(names)}" if of is not None else band
        self._observer.band(band, key, handed, tensors_of(tensors), now=self._inside)

    def record(self, folder: str | Path) -> None:
        """Write what every rank does into ``folder`` instead of judging it; ``zerosim check folder`` does that later.

        Call it before the first step, on every rank. Nothing is simulated then, and nothing is sent but a sign that a
        step is over.
        """
        if self._steps:
            raise RuntimeError("check.record: call it before the first step, on every rank.")
        self._recorder = Recorder(Path(folder), self.rank, self.ranks, self.row, self.recipe, self.layout)
        self._judge = None

    def verdict(self) -> Verdict:
        """All that was found so far, the same on every rank, each of which must call it."""
        mine = self._judge.verdict() if self._judge is not None else None
        found: Verdict = self._side.broadcast(mine)
        return found

    def report(self, *, exit: bool = True) -> Verdict | None:
        """Print the verdict on rank 0. With a finding it ends every rank with exit code 1, unless ``exit`` is False."""
        if self._recorder is not None:
            self.close()
            if self.rank == 0:
                print(
                    f"recorded {self._steps} steps in {self._recorder.folder}/: zerosim check {self._recorder.folder}"
                )
            return None
        found = self.verdict()
        self.findings = found.findings
        self.close()
        if self.rank == 0:
            print(words.text(found), flush=True)
        if exit and found.findings:
            raise SystemExit(1)
        return found

    def close(self) -> None:
        """End the watch on this rank; ``report`` does it too."""
        self._patience.stop()

    # -- inside

    def _compare(self, seen: Seen) -> None:
        """Send what was seen to rank 0, which judges it, and hear what it found."""
        if self._recorder is not None:
            with self._patience.working():
                self._recorder.step(seen, self._local, self._expect)
            self._side.broadcast(self._side.gather(None) is not None)
            return
        digests = self._side.broadcast(_digests(seen, self.layout) if self.rank == 0 else None)
        if self.rank:
            _leave_out(seen, digests, self.layout)
        everyone = self._side.gather(seen)
        if self._judge is not None and everyone is not None:
            with self._patience.working():
                new = self._judge.step(everyone)
            self.findings += self._side.broadcast(("found", new))[1]
            return
        while (order := self._side.broadcast(None))[0] == "search":
            self._side.gather(self._observer.look_for_state(order[1]))
        self.findings += order[1]

    def _search(self, grad: Array) -> list[dict[str, list[Piece]]] | None:
        """Have every rank look for its optimizer's state; only rank 0 asks."""
        self._side.broadcast(("search", grad))
        return self._side.gather(self._observer.look_for_state(grad))

    def _fail(self, error: BaseException) -> None:
        """The step has raised. Whoever caused it is named once; a rank that only suffers from it ends quietly."""
        if isinstance(error, OutOfOrder) or not isinstance(error, Exception) or self.ranks == 1:
            return
        if not self._patience.blame(error):
            raise SystemExit(1) from None

    def _ended(self, found: Mismatch) -> None:
        """Why the job ends before its time, printed by the rank that says so."""
        cause = Cause.FAILED if found.failed else Cause.ORDER
        finding = Finding(found.step, found.rank, "collectives", cause, found.text)
        self.findings.append(finding)
        verdict = Verdict(
            schema=VERDICT_SCHEMA, row=self.row.name, ranks=self.ranks, steps=self._steps, findings=[finding], held=[],
            notes=[],
        )  # fmt: skip
        print(words.text(verdict), flush=True)
        sys.stderr.flush()


def _digests(seen: Seen, layout: Layout) -> dict[str, bytes]:
    """Of each parameter that a rank has whole, a number that is the same only where the bits are."""
    found: dict[str, bytes] = {}
    for piece in seen.params:
        if piece.start < layout.size:
            name, within = layout.at(piece.start)
            if within == 0 and len(piece.values) == layout.span(name).stop - piece.start:
                found.setdefault(name, hashlib.blake2b(piece.values.tobytes(), digest_size=16).digest())
    return found


def _leave_out(seen: Seen, digests: Mapping[str, bytes], layout: Layout) -> None:
    """Leave out the whole parameters whose bits are rank 0's."""
    own = _digests(seen, layout)
    seen.alike = [name for name, digest in own.items() if digests.get(name) == digest]
    spans = [layout.span(name) for name in seen.alike]
    seen.params = [piece for piece in seen.params if not any(s.start <= piece.start < s.stop for s in spans)]
