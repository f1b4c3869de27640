"""A torch module as a model of the simulator: real numerics, through torch's own autograd on the CPU.

Owns ``TorchModel``: what a caller passes, how that becomes layers, and the loss. Must not know
stages or sharding, nor how a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from zerosim.bands import Array
from zerosim.layers import Checkpointed, Group, Layer, Role
from zerosim.ranks import Workspace
from zerosim.torch_models import self_check
from zerosim.torch_models.batch import check_batch, read_example, read_target, vocabularies
from zerosim.torch_models.copies import with_values, without_states
from zerosim.torch_models.execution import Executor
from zerosim.torch_models.groups import Part, grouped
from zerosim.torch_models.layer_costs import layer_shapes
from zerosim.torch_models.layering import Layering
from zerosim.torch_models.losses import Loss, RankLoss, cross_entropy
from zerosim.torch_models.planning import Decisions, failed, planned
from zerosim.torch_models.profile import DTYPES
from zerosim.torch_models.slots import check_dtypes, check_hooks, slots_of
from zerosim.torch_models.torch_unit import TorchUnit, Work
from zerosim.torch_models.trees import map_tensors
from zerosim.torch_models.units import Wrap, blocks
from zerosim.util.arguments import integer, one_of
from zerosim.util.shapes import Float, Shaped
from zerosim.worlds.model_shapes import ModelShapes

__all__ = ["TorchModel", "from_torch", "shapes_of"]


class TorchModel:
    """``module`` cut into layers (``wrap``: see ``units.partition``), for a ``Scheme`` in the simulator.

    * ``inputs``: an example of one rank's x [B, ...], a tensor or an array; several in a tuple, or by keyword
      in a mapping.
    * ``wrap``: the class of the blocks, several, or a predicate on modules; by default what stands in a
      ``ModuleList``, or else the classes of the module's own parts.
    * ``loss``: a function of the output and the target of one rank to a number.
    * ``target``: an example of one rank's target, by which ``shapes`` knows the loss without values; for
      ``cross_entropy`` there is no need of one.
    * ``compute``: the dtype of the arithmetic and of floating-point activations, ``"fp32"``, ``"fp16"`` or
      ``"bf16"``. Where the working copy has another it is cast in a register.
    * ``checkpoint``: ``"full"`` for units that ``wrap`` matched keep their input alone.
    * ``seed``: of what the module draws, dropout say; what that depends on besides is in ``draws.seed_of``.

    A layer is a unit and what the modules around do until the next is called. Where that cannot be
    taken apart a layer is more than a unit, and ``notes`` say why. What is accepted trains as it would in
    torch: on ``inputs`` the output and all gradients are compared with the module's, bit for bit.
    ValueError for what is not, and why: a module that writes to its parameters, or that remembers its
    calls elsewhere than in buffers, which every rank has for itself.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    >>> model = TorchModel(net, torch.zeros(4, 3), loss=torch.nn.functional.mse_loss)
    >>> model.n_params, [layer.name for layer in model.layers]
    (32, ['0', '1', '2'])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Any,
        wrap: Wrap = None,
        *,
        compute: str = "fp32",
        checkpoint: str = "none",
        loss: Loss = cross_entropy,
        target: Any = None,
        seed: int = 0,
    ) -> None:
        one_of("TorchModel", "compute", compute, DTYPES)
        if checkpoint not in ("none", "full"):
            raise ValueError(
                f"TorchModel(checkpoint): 'none' or 'full'; got {checkpoint!r}. Only measure() knows selective "
                f"checkpointing."
            )
        seed = integer("TorchModel", "seed", seed, 0)
        self._compute, self._checkpoint, self._loss = DTYPES[compute], checkpoint, RankLoss(loss)
        _check_module(module, self._compute)
        self._module = with_values(module, self._compute)  # the caller's own may change; as it is now it is trained
        self._values = {name: own.detach().clone() for name, own in module.state_dict(keep_vars=True).items()}
        self._example = read_example(inputs, self._compute)
        self._target = read_target(target)
        self._layerings: dict[int, Layering] = {}
        self._bare = without_states(self._module, self._compute)
        self._work = Work(Executor(self._bare), self._compute, seed, self.layering)
        self._decide(Decisions(blocks(module) if wrap is None else wrap))

    def _decide(self, decisions: Decisions) -> None:
        """Cut the module into layers that compute what it computes, as finely as they do."""
        while True:
            self._cut(decisions)
            whole = with_values(self._module, self._compute)
            layering = self._layerings[self._example.rows]
            try:
                wanted = self_check.as_a_whole(whole, layering, self._example, self._work.seed)
            except (RuntimeError, NotImplementedError) as error:
                raise failed("TorchModel", whole, self._example, error) from error
            try:
                found = self_check.layer_by_layer(
                    self._units, layering, self._example, self._flat_values(), self._compute
                )
                if again := self_check.read_again(found, layering):
                    decisions = self._decisions.with_joined(again)
                    continue
                self_check.compare(wanted, found)
                return
            except (self_check.Mismatch, RuntimeError, ValueError) as error:
                if any(path == "" for path, _ in self._decisions.whole):
                    raise ValueError(
                        f"TorchModel(module): {type(whole).__name__} would not train as it does in torch: "
                        f"{_reason(error)}."
                    ) from error
                name = type(whole).__name__
                decisions = self._decisions.with_whole("", f"{name} is one unit as a whole: cut up, {_reason(error)}")

    def _cut(self, decisions: Decisions) -> None:
        recorded, layering, self._decisions = planned(
            "TorchModel", lambda: with_values(self._module, self._compute), self._example.turned(), decisions
        )
        self.notes: tuple[str, ...] = self._decisions.notes(layering)
        """In words, why some layers are more than a unit."""
        parts = grouped(layering, recorded)
        self._layerings = {self._example.rows: layering}
        self._units = [
            TorchUnit(number, plan, own, self._work)
            for number, (plan, own) in enumerate(zip(layering.layers, parts, strict=True))
        ]
        self.layers: list[Layer] = [
            Checkpointed(unit) if self._checkpoint == "full" and plan.matched else unit
            for unit, plan in zip(self._units, layering.layers, strict=True)
        ]
        self._parts = list({part.group: part for unit in self._units for part in unit.parts}.values())

    def layering(self, rows: int) -> Layering:
        """The layers for so many rows: the same operations, on other shapes."""
        if rows not in self._layerings:
            first = self._layerings[self._example.rows]
            _, other, _ = planned(
                "step(batch)", lambda: with_values(self._module, self._compute), self._example.of(rows), self._decisions
            )
            if other.outline != first.outline:
                raise ValueError(
                    f"step(batch): for {rows} rows the module does something else than for the example's "
                    f"{self._example.rows}: its layers would be others. Make the model with an example of {rows} rows."
                )
            self._layerings[rows] = other
        return self._layerings[rows]

    # -- a model

    @property
    def n_params(self) -> int:
        """The logical number of parameters: tied ones once, frozen ones too, buffers left out."""
        return sum(part.group.size for part in self._parts if part.group.role is not Role.BUFFER)

    def initial(self) -> Float[Array, "P"]:
        """The parameters [n_params] that the module had when this was made, fp32."""
        flats = [flat.float() for group, flat in self._flat_values().items() if group.role is not Role.BUFFER]
        values: Array = torch.cat(flats).numpy()
        return values

    def buffer(self, group: Group) -> Array:
        """The values of a group of buffers [its size] when this was made."""
        values: Array = self._flat_values()[group].view(torch.uint8).numpy().view(group.dtype)
        return values

    def named(self, flat: Float[Array, "P"]) -> dict[str, Array]:
        """Parameters by the module's names for them, of one flat vector like ``full_theta``'s: views.

        >>> model = TorchModel(torch.nn.Linear(3, 2), torch.zeros(4, 3), loss=torch.nn.functional.mse_loss)
        >>> {name: each.shape for name, each in model.named(model.initial()).items()}
        {'weight': (2, 3), 'bias': (2,)}
        """
        found, start = {}, 0
        for part in self._parts:
            for slot in part.slots if part.group.role is not Role.BUFFER else ():
                found[slot.name] = flat[start : start + prod(slot.shape)].reshape(slot.shape)
                start += prod(slot.shape)
        return found

    @property
    def rows(self) -> int:
        """How many rows the example has."""
        return self._example.rows

    def names(self, group: Group) -> list[str]:
        """The module's names for what a group of parameters or buffers consists of, in its order."""
        return [slot.name for part in self._parts if part.group is group for slot in part.slots]

    def check(
        self, batch: Sequence[tuple[Any, Any]], ranks: int
    ) -> tuple[Shaped[Array, "R ..."], Shaped[Array, "R ..."]]:
        """One (x [B, ...], target [B, ...]) per rank, x like the example but for B, which is the same everywhere."""
        program = self._layerings[self._example.rows].program
        return check_batch(batch, ranks, self._example, self._compute, vocabularies(program, self._bare))

    def loss(self, y: Any, target: Shaped[Array, "R ..."], work: Workspace) -> tuple[Float[Array, "R"], Any]:
        """Each rank's loss [R] and the gradients of what the module returns, held. Frees ``target``."""
        return self._loss(y, target, work)

    def shapes(self, rows: int | None = None) -> ModelShapes:
        """The model without values, for the dry world: what a rank holds for micro-batches of so many rows.

        It is what the simulator holds, byte for byte. ValueError if there is no example of the target.
        """
        example = self._example if rows is None else self._example.of(integer("TorchModel.shapes", "rows", rows))
        target = map_tensors(lambda each: each[torch.arange(example.rows) % len(each)], self._target)
        shapes: ModelShapes = layer_shapes(
            self._module, example.on_meta(), self._decisions, compute=self._compute, checkpoint=self._checkpoint,
            loss=self._loss.function, target=target,
        )  # fmt: skip
        return shapes

    def _flat_values(self) -> dict[Group, torch.Tensor]:
        return {part.group: _flat(part, self._values) for part in self._parts}


def from_torch(
    module: torch.nn.Module, batch: Any, loss: Callable[[Any, Any], Any] = cross_entropy, **options: Any
) -> TorchModel:
    """A module as a model, from one (x, target) of a rank, or from a batch with one for each rank.

    ``options`` are those of ``TorchModel``.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    >>> batch = [(torch.randn(4, 3), torch.randn(4, 2)) for rank in range(2)]
    >>> from zerosim.schemes import ZeRO3
    >>> scheme = ZeRO3(from_torch(net, batch, torch.nn.MSELoss()), 2)
    >>> scheme.step(batch) > scheme.step(batch) > 0
    True
    """
    pair = batch[0] if isinstance(batch, list) and batch and isinstance(batch[0], (tuple, list)) else batch
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(
            f"from_torch(batch): a pair (x, target) is needed, or a list of them, one per rank; got "
            f"{type(batch).__name__}."
        )
    return TorchModel(module, pair[0], loss=loss, target=pair[1], **options)


def shapes_of(
    module: torch.nn.Module,
    inputs: Any,
    wrap: Wrap = None,
    *,
    compute: str = "fp32",
    checkpoint: str = "none",
    loss: Loss = cross_entropy,
    target: Any = None,
) -> ModelShapes:
    """What the simulator would hold of a module, byte for byte, without training it: ``TorchModel(...).shapes()``.

    Nothing is allocated, so that the module and the tensors may have no values; the arguments are
    ``TorchModel``'s. What only values show, such as that layers must be joined, is not seen.

    >>> with torch.device("meta"):
    ...     net = torch.nn.Sequential(torch.nn.Linear(10**6, 10**6), torch.nn.ReLU(), torch.nn.Linear(10**6, 1))
    ...     shapes = shapes_of(net, torch.empty(8, 10**6), loss=torch.nn.MSELoss(), target=torch.empty(8, 1))
    >>> shapes.n_params
    1000002000001
    """
    one_of("TorchModel", "compute", compute, DTYPES)
    kind = DTYPES[compute]
    check_dtypes(slots_of(module).values(), kind)
    shapes: ModelShapes = layer_shapes(
        module, read_example(inputs, kind, "meta"), Decisions(blocks(module) if wrap is None else wrap), compute=kind,
        checkpoint=checkpoint, loss=loss, target=read_target(target, "meta"),
    )  # fmt: skip
    return shapes


def _check_module(module: torch.nn.Module, compute: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"TorchModel(module): a torch.nn.Module is needed; got {module!r}.")
    slots = slots_of(module)
    check_dtypes(slots.values(), compute)
    check_hooks(module)
    for name, own in (*module.named_parameters(), *module.named_buffers()):
        if own.device.type != "cpu":
            raise ValueError(
                f"TorchModel(module): computes on the CPU, with values; {name} is on {own.device}. Use "
                f"module.to('cpu'), or measure() for a module without values."
            )


def _flat(part: Part, values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([values[slot.name].reshape(-1) for slot in part.slots])


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, self_check.Mismatch) else f"{type(error).__name__}: {error}"
    return text.removeprefix("ValueError: TorchModel: ").removeprefix("RuntimeError: TorchModel: ").rstrip(".")
