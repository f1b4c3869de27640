"""What a caller may choose for a training run: one frozen record that checks itself.

Owns the options, their defaults and the rules between them. The scheme, the lab, the sanitizer,
real ranks and the planner hand the same record on; nobody checks a second time. Must not know
what an option does: that is for the room that reads it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import frexp, inf
from typing import Any, Literal, TypeVar, get_args

from zerosim.bands import PARAM_WIRES, PRECISIONS, WIRES, Band, Precision
from zerosim.kernels.operations import Choice
from zerosim.optimizer import SGD, Adam
from zerosim.util.arguments import instance_of, integer, one_of, positive, real

Gather = Literal["layer", "model"]
Padding = Literal["N", "each", "2N", "rows"]
Sync = Literal["each", "end"]
Average = Literal["rows", "ranks"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class LossScale:
    """A loss scale and how it changes: torch.amp.GradScaler's rules and defaults.

    ``init`` is the first scale. Where it is ``dynamic``, a step whose gradients are not finite is skipped and
    multiplies it by ``backoff``, though not below ``least``; ``interval`` steps without one multiply it by
    ``growth``. So many overflows are tolerated before the first backs off as ``hysteresis`` says (DeepSpeed's;
    1 is torch's). ValueError for what cannot be.

    >>> import zerosim as zs
    >>> run = zs.ZeRO1(zs.MLP(), ranks=2, loss_scale=LossScale(init=1024.0))
    >>> _ = run.step(*zs.batches(ranks=2))
    >>> run.reports[-1].scale
    1024.0
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    least: float = 0.0
    dynamic: bool = True

    def __post_init__(self) -> None:
        init, growth, backoff, least = map(real, (self.init, self.growth, self.backoff, self.least))
        if not (0 < init < inf and growth > 1 > backoff > 0 and least >= 0):
            raise ValueError(f"LossScale: init and growth must be above 0 and 1, backoff between them; got {self}.")
        for name in ("interval", "hysteresis"):
            integer("LossScale", name, getattr(self, name))
        instance_of("LossScale", "dynamic", self.dynamic, bool)

    @property
    def note(self) -> str:
        """What scaling by it costs, if anything: powers of two cost nothing."""
        rounding = [each for each in (self.init, self.growth, self.backoff) if frexp(each)[0] != 0.5]
        return f"LossScale: {rounding[0]} is no power of two, so that scaling rounds gradients." if rounding else ""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a training run, all by keyword.

    * ``precision``: ``"mixed"`` (fp16 working copy, fp32 master and moments), ``"bf16"``, ``"fp32"``, or
      another of ``bands.PRECISIONS``.
    * ``wire``: the dtype that blocks are sent in, ``"fp32"``, ``"fp16"`` or ``"bf16"``; ``wire_params`` that
      of parameters, if it is another, or ``"int8"``: blocks of 256 that share an fp32 scale (ZeRO++'s qwZ).
    * ``gather``: ZeRO-3 gathers ``"layer"`` by layer and releases at once, or the whole ``"model"``;
      ``prefetch``: how many further layers it gathers before one computes.
    * ``bucket``: one flat buffer per ``"layer"``, one for the ``"model"``, or an integer: consecutive layers
      share one while they have at most so many parameters together.
    * ``padding``: buffers are padded to a multiple of ``"N"`` or ``"2N"``, ``"each"`` parameter to one of N, or
      by ``"rows"`` of each parameter.
    * ``accumulate``: a step's batch is cut into so many micro-batches; ``sync`` says whether gradients are
      reduced after ``"each"`` or at the ``"end"``, by default at the end where every rank keeps them whole.
    * ``all_reduce``: gradients are all-reduced where they could be reduce-scattered.
    * ``checkpoint``: a layer keeps only its input and runs forward again in its backward.
    * ``optimizer``: an ``Adam`` or ``SGD``.
    * ``capacity``: bytes of memory of one rank's card, ``host_capacity`` of what the host has for it;
      ``OutOfMemory`` is raised by the hold that would pass it.
    * ``uneven``: ranks and micro-batches may have different numbers of rows, and a step fewer micro-batches.
      ``average`` is over all ``"rows"``, or over ``"ranks"``: each micro-batch of each rank is one of N ``accumulate``.
    * ``find_unused``: a parameter that no rank has a gradient of is left alone, as the ranks tell each other.
    * ``clip``: the largest norm of all gradients together, ``norm_type`` 2 or inf, by torch's rule; ``clip_eps``
      is what is added to the norm before it divides.
    * ``loss_scale``: the loss is scaled by so much, or by a ``LossScale`` that changes.
    * ``kernels``: ``"numba"`` computes with compiled kernels, ``"numpy"`` without, ``"auto"`` as the environment's
      ``ZEROSIM_KERNELS`` says, or else with them where numba is installed. The bits are the same.
    * ``threads``: how many of them the compiled kernels use. The bits are the same.
    * ``keep_reports``: the reports of so many of the last steps are kept, ``keep_events`` of them with their logs.
    * ``node``: so many ranks are a group. Rows with groups shard within it; every row counts what leaves it.

    ValueError or TypeError, in the words of the call, for what is unknown or does not go together.

    >>> Options(precision="bf16").recipe.working
    dtype(bfloat16)
    >>> Options(precision="fp32", wire="fp16")
    Traceback (most recent call last):
    ValueError: Scheme(wire): the wire must carry the working copy exactly, or gathered copies would differ from...
    """

    precision: str = "mixed"
    wire: str = "fp32"
    wire_params: str | None = None
    gather: Gather = "layer"
    prefetch: int = 0
    bucket: str | int = "layer"
    padding: Padding = "N"
    accumulate: int = 1
    sync: Sync | None = None
    all_reduce: bool = False
    checkpoint: bool = False
    optimizer: Adam | SGD = field(default_factory=Adam)
    capacity: int | None = None
    host_capacity: int | None = None
    node: int | None = None
    uneven: bool = False
    average: Average = "rows"
    find_unused: bool = False
    clip: float | None = None
    norm_type: float = 2.0
    clip_eps: float = 1e-6
    loss_scale: float | LossScale | None = None
    kernels: Choice = "auto"
    threads: int = 1
    keep_reports: int = 100
    keep_events: int = 2

    def __post_init__(self) -> None:
        one_of("Scheme", "precision", self.precision, PRECISIONS)
        one_of("Scheme", "wire", self.wire, WIRES)
        one_of("Scheme", "gather", self.gather, get_args(Gather))
        one_of("Scheme", "padding", self.padding, get_args(Padding))
        one_of("Scheme", "kernels", self.kernels, get_args(Choice))
        one_of("Scheme", "average", self.average, get_args(Average))
        if isinstance(self.bucket, str):
            one_of("Scheme", "bucket", self.bucket, get_args(Gather))
        for name in ("all_reduce", "checkpoint", "uneven", "find_unused"):
            instance_of("Scheme", name, getattr(self, name), bool)
        instance_of("Scheme", "optimizer", self.optimizer, Adam | SGD)
        needed = [] if isinstance(self.bucket, str) else [("bucket", 1)]
        needed += [("prefetch", 0), ("accumulate", 1)]
        needed += [("threads", 1), ("keep_reports", 1), ("keep_events", 1)]
        needed += [(name, 1) for name in ("capacity", "host_capacity", "node") if getattr(self, name) is not None]
        for name, least in needed:
            object.__setattr__(self, name, integer("Scheme", name, getattr(self, name), least))
        if self.clip is not None and not 0 < real(self.clip) < inf:
            raise ValueError(f"Scheme(clip): the largest norm is a positive, finite number; got {self.clip!r}.")
        if self.norm_type not in (2, inf):
            raise ValueError(f"Scheme(norm_type): 2 or inf; got {self.norm_type!r}.")
        if not 0 <= real(self.clip_eps) < inf:
            raise ValueError(f"Scheme(clip_eps): what is added to the norm is 0 or more; got {self.clip_eps!r}.")
        for name, other in (("norm_type", "clip"), ("clip_eps", "clip"), ("average", "uneven")):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default and not getattr(self, other):
                raise ValueError(f"Scheme({name}): without {other} it does nothing; got {value!r}. Pass {other} too.")
        if not isinstance(self.loss_scale, LossScale | None):
            scale = positive("Scheme", "loss_scale", self.loss_scale, ", or a LossScale, which changes")
            object.__setattr__(self, "loss_scale", LossScale(scale, dynamic=False))
        if isinstance(self.loss_scale, LossScale) and self.loss_scale.note:
            warnings.warn(self.loss_scale.note, stacklevel=2)
        if self.sync is not None:
            one_of("Scheme", "sync", self.sync, get_args(Sync))
        if self.wire_params is not None:
            one_of("Scheme", "wire_params", self.wire_params, PARAM_WIRES)
        self._check_wires()

    def _check_wires(self) -> None:
        grads = self.recipe.dtypes(WIRES[self.wire])[Band.UNREDUCED]
        wires = [("wire", self.wire, grads), ("wire_params", self.wire_params or self.wire, self.recipe.working)]
        for option, given, carried in wires:
            if given == "int8":
                if self.recipe.master or not self.recipe.everywhere:
                    continue
                raise ValueError(
                    f"Scheme(wire_params): what int8 rounds must be kept exactly, by master weights, and "
                    f"precision={self.precision!r} has none. Use precision='mixed' or 'bf16', or leave wire_params out."
                )
            if given != "fp32" and WIRES[given] != carried:
                option = "wire" if given == self.wire else option
                raise ValueError(
                    f"Scheme({option}): the wire must carry the working copy exactly, or gathered copies would differ "
                    f"from their owners' and the schemes from each other; {given} does not carry "
                    f"precision={self.precision!r} ({carried}). Use {option}='fp32'"
                    f"{', or the dtype of the working copy' * (carried != 'float32')}."
                )

    @property
    def recipe(self) -> Precision:
        """The row of ``bands.PRECISIONS``."""
        return PRECISIONS[self.precision]

    @property
    def in_backward(self) -> bool:
        """Whether a layer is updated as soon as its gradients are there, which are then freed: in a plan alone."""
        return False

    @property
    def states(self) -> tuple[Band, ...]:
        """The model states that exist under this precision and optimizer, in the order of allocation."""
        states = (*self.recipe.states, *self.optimizer.states)
        return tuple(band for band in states if band is not Band.GRADS) if self.in_backward else states


def chosen(options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """The options with those keywords in their place. TypeError, naming what there is, for one that is unknown."""
    if options is not None:
        instance_of("Scheme", "options", options, Options)
    known = Options.__dataclass_fields__
    if unknown := [name for name in keywords if name not in known]:
        raise TypeError(f"Scheme: there is no option {unknown[0]!r}. Use one of {', '.join(known)}.")
    return replace(options or Options(), **keywords)


def with_options(function: F) -> F:
    """Show the options, typed and with their defaults, where ``function`` takes them as ``**keywords``."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=each.type)
        for each in fields(Options)
        for default in [each.default_factory() if callable(each.default_factory) else each.default]
    ]
    function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
    return function
