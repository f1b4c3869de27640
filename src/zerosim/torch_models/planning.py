"""From a module to its layers: recorded, cut, and taken whole where it cannot be cut.

Owns the decisions that this takes (``Decisions``), which hold for any number of rows, and their
reasons in words. Must not know how layers are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from zerosim.torch_models.batch import Example
from zerosim.torch_models.draws import seeded
from zerosim.torch_models.layering import Layering, check_writes, layered, written_inputs
from zerosim.torch_models.recorder import Refused, Unrepeatable, record
from zerosim.torch_models.trees import map_tensors
from zerosim.torch_models.units import Wrap, partition

TWO_ROWS = "Normalising over the rows takes two of them or more, or eval()."


@dataclass(frozen=True)
class Decisions:
    """Modules that are units as a whole, by path, and calls that are joined, each with the reason."""

    wrap: Wrap
    whole: tuple[tuple[str, str], ...] = ()
    joined: tuple[tuple[int, int, str], ...] = ()

    def with_whole(self, path: str, why: str) -> Decisions:
        """These, and one more module that is a unit as a whole."""
        return replace(self, whole=(*self.whole, (path, why)))

    def notes(self, layering: Layering) -> tuple[str, ...]:
        """Why some layers are more than a unit, in words."""
        return (*(why for _, why in self.whole), *layering.notes)

    def with_joined(self, more: Sequence[tuple[int, int, str]]) -> Decisions:
        """These, and more calls that are joined."""
        return replace(self, joined=(*self.joined, *more))


def planned(
    call: str, copied: Callable[[], torch.nn.Module], example: Example, decisions: Decisions
) -> tuple[torch.nn.Module, Layering, Decisions]:
    """The layers of a module, what more was decided, and the copy that was recorded.

    ValueError in the words of ``call`` if it fails, or does what must not be.
    """
    fresh: set[int] = set()
    while True:
        module = copied()
        found = partition(module, decisions.wrap, [path for path, _ in decisions.whole])
        units = [unit for unit in found if not unit.container]
        args, kwargs = map_tensors(lambda given: given.clone(), (example.args, example.kwargs))
        try:
            with seeded(0):
                program = record(module, units, args, kwargs, fresh)
        except Unrepeatable as reason:
            name = reason.path or type(module).__name__
            if any(path == reason.path for path, _ in decisions.whole):
                raise Refused(f"{call}(module): {name} cannot be run again and again: it {reason.what}.") from reason
            decisions = decisions.with_whole(reason.path, f"{name} is one unit as a whole: it {reason.what}")
            continue
        except Refused:
            raise
        except Exception as error:  # it is the module's own code that runs, and its errors are of any kind
            raise failed(call, module, example, error) from error
        check_writes(program)
        if written_inputs(program) <= fresh:
            return module, layered(program, decisions.joined), decisions
        fresh |= written_inputs(program)


def failed(call: str, module: torch.nn.Module, example: Example, error: Exception) -> ValueError:
    """The error that says that the module itself fails, and on what."""
    shapes = ", ".join(f"{str(each.dtype)[6:]}{list(each.shape)}" for each in example.tensors)
    hint = ""
    if "more than 1 value per channel" in str(error):
        hint = f" {TWO_ROWS}"
    elif example.tensors[0].is_meta:
        hint = (
            " It ran on the meta device, where tensors have shapes and no values: what depends on values, such as "
            ".item() or an if on a tensor, must go, or be left out of training."
        )
    text = f"{type(error).__name__}: {error}".rstrip(".")
    return ValueError(f"{call}(module): {type(module).__name__} failed on inputs {shapes}: {text}.{hint}")
