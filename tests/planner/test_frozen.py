"""A frozen base in a dtype of its own: what it takes at rest, gathered and on the wire, and what may be asked of it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerosim as zs
from zerosim.cli import plan as cli
from zerosim.layers import Role
from zerosim.planner import frozen
from zerosim.schemes import SCHEMES, ZeRO3
from zerosim.worlds.dry import DryRing
from zerosim.worlds.shapes import GroupShapes, ModelShapes, ShapeModel, Tensor, UnitShapes

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

MATRICES, VECTOR, EMBEDDING, ADAPTER = ((11, 13), (7, 64)), (13,), (101, 3), (13, 2)
PACKED = sum(map(prod, MATRICES))
N = 3


def shapes() -> ModelShapes:
    """An embedding and a block, both frozen, with an adapter in the block that is trained."""
    row = Tensor((1, 3), "bfloat16")
    return ModelShapes(
        groups=(
            GroupShapes("embedding frozen", (EMBEDDING,), Role.FROZEN),
            GroupShapes("block", (ADAPTER,)),
            GroupShapes("block frozen", (*MATRICES, VECTOR), Role.FROZEN),
        ),
        units=(
            UnitShapes(name="embedding", groups=(0,), outputs=(row,)),
            UnitShapes(name="block", groups=(1, 2), outputs=(row,), grads=(row,), backward_temporaries=5),
        ),
        loss=UnitShapes(name="loss", feeds=(1,)), inputs=(row,), target=row,
    )  # fmt: skip


def ran(kind: str, row: Any, ranks: int) -> Any:
    model = ShapeModel(frozen.held(shapes(), kind, {"block"}, 2), temporaries=True)
    scheme = row(model, ranks, precision="bf16", wire="bf16", ring=DryRing(ranks))
    scheme.step(model.batch())
    return scheme.reports[-1]


def share(nbytes: int, itemsize: int = 1) -> int:
    """Of each of N ranks, padded to whole elements."""
    return -(-nbytes // itemsize // N) * itemsize


NF4 = sum(-(-prod(each) // 2) + 4 * -(-prod(each) // 64) for each in MATRICES)
DOUBLE = sum(-(-prod(each) // 2) + -(-prod(each) // 64) + 4 for each in MATRICES)  # 256 scales share one
KINDS = {"nf4": [(NF4, 1), (2 * 13, 2)], "nf4-double": [(DOUBLE, 1), (2 * 13, 2)]} | {
    kind: [(itemsize * (PACKED + 13), itemsize)] for kind, itemsize in (("fp32", 4), ("bf16", 2), ("fp16", 2))
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_base_is_kept_gathered_and_sent_in_its_own_dtype(kind: str) -> None:
    """On one rank, and on three under each row: a block's matrices packed, all else in 16 bits or as is said; ZeRO-3
    sends as many bytes as it keeps, twice, N - 1 of N of them; what is trained is as it was."""
    itemsize = {"fp32": 4}.get(kind, 2)
    parts = [*KINDS[kind], (itemsize * prod(EMBEDDING), itemsize)]
    adapter = 2 * prod(ADAPTER)
    assert ran(kind, SCHEMES[0], 1).resident["params"] == sum(nbytes for nbytes, _ in parts) + adapter
    third = sum(share(*part) for part in parts)
    for row in SCHEMES:
        report = ran(kind, row, N)
        pieces = 1 if row.params else N
        assert report.resident["params"] == pieces * (third + share(adapter, 2))
        assert report.resident["master"] == (4 * -(-prod(ADAPTER) // N) * (1 if row.optimizer else N))
    sent = {name: traffic.sent.max() for name, traffic in ran(kind, ZeRO3, N).traffic.items()}
    # The embedding's output has no gradient to give, but its backward gathers it all the same.
    assert sent["all-gather", "params"] == 2 * (N - 1) * (third + share(adapter, 2))


def test_packed_parameters_are_counted_one_by_one_and_unpacked_for_use() -> None:
    """The model's parameters stay as many; a unit's scratch memory grows by its largest matrix in 16 bits."""
    found = frozen.held(shapes(), "nf4", {"block"}, 2)
    assert found.n_params == shapes().n_params == ShapeModel(found).n_params
    assert sum(group.params for group in found.groups if group.role is Role.FROZEN) == PACKED + 13 + prod(EMBEDDING)
    assert [unit.backward_temporaries for unit in found.units] == [0, 5 + 2 * max(map(prod, MATRICES))]


def test_what_is_trained_whole_has_nothing_frozen() -> None:
    """The error says what to train instead."""
    whole = ModelShapes(
        groups=(GroupShapes("block", (ADAPTER,)),), units=(UnitShapes(name="block", groups=(0,)),),
        loss=UnitShapes(name="loss", feeds=(0,)), inputs=(Tensor((1,), "int64"),), target=Tensor((1,), "int64"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"plan\(frozen_dtype\): nothing .* frozen\. Train adapters alone"):
        frozen.held(whole, "nf4", {"block"}, 2)


def test_qlora_of_a_configuration_and_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters beside all linear layers of a Llama, whose blocks' matrices are packed; and a module whose frozen half
    is kept in 16 bits beside fp32."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    layers, width, wide, words = 3, 64, 96, 101
    llama = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": 2, "vocab_size": words,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    options = ["--gpus", "1", "--precision", "bf16", "--seq", "8", "--lora", "r=2", "--frozen-dtype", "nf4"]
    result = CliRunner().invoke(cli.plan, [str(tmp_path), *options, "--scheme", "ddp", "--json", "-"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    sides = [(width, width)] * 4 + [(width, wide)] * 3
    base = layers * sum(a * b for a, b in sides)
    norms, ends, adapters = (2 * layers + 1) * width, 2 * words * width, layers * sum(2 * (a + b) for a, b in sides)
    assert plan["model"]["params"] == base + norms + ends + adapters
    assert plan["model"]["trainable"] == adapters
    packed = base // 2 + 4 * base // 64  # 64 divides each matrix
    assert plan["cells"][0]["resident"]["params"] == packed + 2 * (norms + ends + adapters)
    assert any("kept packed" in note for note in plan["model"]["notes"])
    shown = CliRunner().invoke(cli.plan, [str(tmp_path), *options, "--scheme", "ddp"]).output
    assert "bytes a trained parameter at rest" in shown

    net = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Linear(11, 5))
    net[0].requires_grad_(False)
    found = zs.plan(
        net, gpus=1, precision="fp32", frozen_dtype="bf16", inputs=lambda rows, _: torch.empty(rows, 7)
    ).record  # fmt: skip
    assert found.cells[0].resident["params"] == 2 * (7 * 11 + 11) + 4 * (11 * 5 + 5)


def test_torchtunes_optimizer_in_backward_on_one_card() -> None:
    """Llama-2-7B in pure bf16 needs 6 bytes a parameter at rest, not 8, and at the peak the gradients of one block
    more; with 8-bit Adam no more than its parameters and moments, 27 GB."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    block, params, norms = 202_383_360, 6_738_415_616, 512
    for optimizer, each in (("adamw", 6), ("adam8bit", 4)):
        found = zs.plan(
            str(Path(__file__).parent / "configs" / "llama-2-7b.json"), gpus=1, rows=[zs.DP], precision="pure-bf16",
            seq=16, optimizer=optimizer, optimizer_in_backward=True,  # type: ignore[arg-type]
        ).record.cells[0]  # fmt: skip
        scales = found.resident.pop("optimizer scales", 0)
        assert sum(found.resident.values()) == each * params + norms
        assert scales == (8 * params / 256 if optimizer == "adam8bit" else 0)
        assert found.peak.by_band["grads"] == 2 * block
