"""Which operations of a recorded forward make a layer: a unit's call and what follows it, as a rule.

Owns where the forward is cut, what passes from layer to layer, and why layers are joined: what
a later one does to memory of an earlier one, in place, it can only do as one with it. Must not know
how a layer is run, nor groups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerosim.layers import Role
from zerosim.torch_models.program import NOBODY, Kind, Op, Program
from zerosim.torch_models.units import Unit


@dataclass(eq=False)
class LayerPlan:
    """One layer: its operations, each with the tensors that nobody needs after it, and what comes in and goes out.

    ``calls`` are the numbers of its units' calls.
    ``ins`` are tensors of earlier layers, ``inputs`` those of the batch, ``slots`` parameters and buffers that are used
    outside the units' calls; ``outs`` are tensors for later layers or the loss, and ``holds`` the memory that
    they bring into being. ``assigns`` are buffers that it assigns anew, by name, and the tensors they become.
    """

    name: str
    calls: range
    units: list[Unit]
    ops: list[tuple[Op, list[int]]]
    ins: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)
    holds: list[int] = field(default_factory=list)
    assigns: dict[str, int] = field(default_factory=dict)

    @property
    def matched(self) -> bool:
        """Whether the wrap rule chose one of its units."""
        return any(unit.matched for unit in self.units)


@dataclass(frozen=True)
class Layering:
    """The layers of a program, and in words why some of them are more than a unit."""

    program: Program
    layers: list[LayerPlan]
    notes: list[str]

    @property
    def outline(self) -> list[Any]:
        """What does not depend on how many rows there are: which operations there are, and what they are about."""
        slots = [slot.name for slot in (self.program.slot(index) for index in range(len(self.program.tensors)))]
        return [
            (layer.name, layer.ins, layer.outs, layer.slots, [(op.takes, op.results) for op, _ in layer.ops])
            for layer in self.layers
        ] + [slots, self.program.returned_leaves]


def written_inputs(program: Program) -> set[int]:
    """The numbers of the inputs that the forward writes to, and of which it must be given a copy."""
    stores = {program.stores[write.store].input for write in program.writes if write.store is not None}
    return stores - {-1}


def check_writes(program: Program) -> None:
    """Refuse, with ValueError, a forward that writes to a parameter, or to what all ranks would share."""
    for write in program.writes:
        store = None if write.store is None else program.stores[write.store]
        unit = program.ops[write.op].unit
        who = f"{unit.name} overwrites" if unit else "the forward pass overwrites, between its modules,"
        if store is not None and store.slot.role is not Role.BUFFER:
            raise ValueError(
                f"TorchModel(module): {who} the parameter {store.slot.name}, which would be lost: it is computed with "
                f"in a copy, and only the optimizer writes to the original. Change it out of place, as in "
                f"torch.nn.utils.parametrizations."
            )
        if write.made is None and (store is None or store.kind is Kind.CONSTANT):
            raise ValueError(
                f"TorchModel(module): {who} a tensor of shape {list(write.shape)} that is neither made in the forward "
                f"nor a buffer: all ranks and stages would share what it remembers. Register it as a buffer."
            )


def layered(program: Program, joined: Collection[tuple[int, int, str]] = ()) -> Layering:
    """Cut a program into layers, one for each unit's call; ``joined`` are the first and last of calls to join, and why.

    Calls are counted in order. Layers are joined, too, from where memory was made to where
    it is written to, and where a part of a parameter is handed on. ValueError if the module
    returns a parameter.
    """
    place, calls = _calls(program)
    names = _names(calls)
    cuts = _joins(program, place, names)
    notes = []
    owner = list(range(len(calls)))  # of each call, the first call of its layer
    for first, last, why in [*joined, *cuts]:
        if owner[first] != owner[last]:
            notes.append(why)
        start = owner[first]
        for call in range(start, len(calls)):
            if call <= last or owner[call] <= last:
                owner[call] = start
    return Layering(program, _layers(program, [owner[call] for call in place], names), notes)


def _calls(program: Program) -> tuple[list[int], list[Unit]]:
    """For each operation, the number of the unit's call that it belongs to; and the units called."""
    place: list[int] = []
    calls: list[Unit] = []
    for op in program.ops:
        if op.unit is not None:
            calls.append(op.unit)
        place.append(max(0, len(calls) - 1))
    return place, calls


def _names(calls: Sequence[Unit]) -> list[str]:
    before: dict[str, int] = {}
    names = []
    for unit in calls:
        before[unit.name] = again = before.get(unit.name, 0) + 1
        names.append(f"{unit.name} (call {again})" if again > 1 else unit.name)
    return names


def _joins(program: Program, place: Sequence[int], names: Sequence[str]) -> list[tuple[int, int, str]]:
    found = []
    for write in program.writes:
        if write.made is None:
            store = None if write.store is None else program.stores[write.store]
            if store is None or store.kind is not Kind.INPUT:
                continue
        first, last = 0 if write.made is None else place[write.made], place[write.op]
        if first < last:
            why = f"{_span(names[first : last + 1])} are one unit: the last writes in place to what the first returned"
            found.append((first, last, why))
    last_use: dict[int, int] = {}
    for op, call in zip(program.ops, place, strict=True):
        last_use.update(dict.fromkeys(op.takes, call))
    for index, known in enumerate(program.tensors):
        slot = program.slot(index)
        if slot is NOBODY:
            continue
        if index in program.returns:
            raise ValueError(
                f"TorchModel(module): the module returns {slot.name} itself, or a part of it, which the loss would "
                f"have to gather again. Compute with it in the forward pass, or return a copy."
            )
        if known.kind is Kind.MADE and last_use.get(index, -1) > place[known.op]:
            first, last = place[known.op], last_use[index]
            why = f"{_span(names[first : last + 1])} are one unit: they pass on a part of {slot.name}"
            found.append((first, last, why))
    return found


def _span(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} + {names[1]}" if len(names) == 2 else f"{names[0]} to {names[-1]}"


def _layers(program: Program, owner: Sequence[int], names: Sequence[str]) -> list[LayerPlan]:
    """The layers, ``owner`` being for each operation the first call of its layer."""
    last: dict[int, int] = {}  # for each tensor, the last operation that takes it
    for number, op in enumerate(program.ops):
        last.update(dict.fromkeys(op.takes, number))
    layer_of = {index: owner[known.op] for index, known in enumerate(program.tensors) if known.kind is Kind.MADE}
    numbers: dict[int, list[int]] = {}
    for number, start in enumerate(owner):
        numbers.setdefault(start, []).append(number)
    layers = []
    called = 0
    for start, own in numbers.items():
        units = [unit for number in own if (unit := program.ops[number].unit) is not None]
        these = range(called, called + len(units))
        layer = LayerPlan(_span(names[these.start : these.stop]), these, units, [])
        called = these.stop
        places = {
            Kind.INPUT: layer.inputs, Kind.SLOT: layer.slots, Kind.CONSTANT: layer.constants, Kind.MADE: layer.ins,
        }  # fmt: skip
        for index in dict.fromkeys(index for number in own for index in program.ops[number].takes):
            if layer_of.get(index) != start:
                places[program.tensors[index].kind].append(index)
        made = [index for index, at in layer_of.items() if at == start]
        layer.outs = [index for index in made if last.get(index, -1) > own[-1] or index in program.returns]
        stores = dict.fromkeys(program.tensors[index].store for index in layer.outs)
        layer.holds = [
            each
            for each in stores
            if program.stores[each].kind is Kind.MADE and owner[program.stores[each].op] == start
        ]
        for name, value in program.assigned.items():
            if value is not None and layer_of.get(value, owner[0]) == start:
                layer.assigns[name] = value
                if value not in layer_of and value not in places[program.tensors[value].kind]:
                    places[program.tensors[value].kind].append(value)
        stay = {*layer.outs, *layer.assigns.values()}
        for number in own:
            op = program.ops[number]
            gone = dict.fromkeys([*op.takes, *op.gives])
            layer.ops.append((op, [index for index in gone if last.get(index, -1) <= number and index not in stay]))
        layers.append(layer)
    return layers
