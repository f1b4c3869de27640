"""Which modules are units, and which parameters share a buffer."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402

from torch_models.networks import ROWS, Containers, Tied, repeated, squared  # noqa: E402
from zerosim.layers import Group, Role  # noqa: E402
from zerosim.torch_models.model import TorchModel  # noqa: E402
from zerosim.torch_models.units import blocks, partition  # noqa: E402


def groups_of(module: nn.Module, x: Any, wrap: Any) -> list[tuple[Group, ...]]:
    """Of each layer the groups."""
    model = TorchModel(module, x, wrap, loss=squared)
    return [layer.groups for layer in model.layers]


def test_the_outermost_match_is_the_unit() -> None:
    """A match within a match is part of it; the rest falls to the highest modules without one, and never to a list."""
    module = Containers()
    units = partition(module, lambda each: isinstance(each, nn.Sequential) and each is not module.before)
    assert [(unit.name, unit.path, unit.matched) for unit in units] == [
        ("Containers", "", False),  # what it holds itself
        ("before", "before", False),
        ("blocks.0", "blocks.0", True),
        ("blocks.1", "blocks.1", True),
    ]
    assert [unit.path for unit in partition(module, nn.Tanh, whole=["blocks.0"]) if not unit.container] == [
        "before", "blocks.0", "blocks.1.0", "blocks.1.1",
    ]  # fmt: skip


def test_what_a_container_holds_goes_to_those_who_use_it() -> None:
    """A parameter between units is gathered with the layer that reads it; an idle buffer is held with the first."""
    module = Containers()
    wrap = [nn.Sequential]
    before, first, second = groups_of(module, torch.zeros(ROWS, 3), wrap)
    assert [(group.name, group.size) for group in before] == [
        ("Containers + before", 3 + 3 * 3 + 3), ("Containers buffers int64", 2),
    ]  # fmt: skip
    assert [[group.name for group in some] for some in (first, second)] == [["blocks.0"], ["blocks.1"]]


def test_tied_parameters_are_one_group() -> None:
    """Layers that share a parameter list the same group, whatever else each has, and it counts once."""
    module = Tied()
    module.head.bias = nn.Parameter(torch.zeros(10))
    embedding, layer, head = groups_of(module, torch.zeros(ROWS, 2, dtype=torch.int64), nn.Linear)
    [shared] = embedding
    assert head[1] is shared
    assert (shared.name, shared.size, head[0].name) == ("embedding + head", 40, "head")
    assert layer[0].size == 16


def test_a_module_called_twice_is_two_layers_of_one_group() -> None:
    """Each call of a module is a layer, and its parameters are one group."""
    model = TorchModel(repeated(), torch.zeros(ROWS, 5), nn.Linear, loss=squared)
    assert [layer.name for layer in model.layers] == ["0", "1", "0 (call 2)", "3"]
    assert model.layers[0].groups == model.layers[2].groups
    assert model.n_params == 5 * 5 + 5 + 5 * 3 + 3


def test_frozen_parameters_and_buffers_are_groups_apart() -> None:
    """Parameters that are not trained, and buffers of each dtype, are groups beside the layer's trainable one."""
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    module[0].weight.requires_grad_(False)
    [groups] = groups_of(module, torch.ones(ROWS, 3), nn.Sequential)
    assert [(group.name, group.size, group.role, group.dtype) for group in groups] == [
        ("Sequential", 5 + 2 * 5, Role.TRAINABLE, None),
        ("Sequential frozen", 15, Role.FROZEN, None),
        ("Sequential buffers float32", 2 * 5, Role.BUFFER, np.dtype(np.float32)),
        ("Sequential buffers int64", 1, Role.BUFFER, np.dtype(np.int64)),
    ]


def test_without_a_rule_the_repeated_blocks_are_the_units() -> None:
    """What stands in a ModuleList makes the units, or else the module's own parts, or the module itself."""
    assert blocks(Containers()) == (nn.Sequential,)
    assert blocks(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.LayerNorm(3))) == (nn.Linear, nn.LayerNorm)
    assert blocks(nn.Linear(3, 3)) == (nn.Linear,)


@pytest.mark.usefixtures("as_users_call_it")
def test_wrap_rules_that_make_no_units_are_refused() -> None:
    """A rule that matches nothing, and what is no rule, is an error that says what would be one."""
    with pytest.raises(ValueError, match=r"matches no module of Tied.*Embedding, Linear"):
        partition(Tied(), nn.Conv1d)
    for wrong in ("Linear", 3, int, [nn.Linear, 3], ()):
        with pytest.raises(TypeError, match="a class of modules"):
            partition(Tied(), wrong)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        partition(3, nn.Linear)
