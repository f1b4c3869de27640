"""Any micro-batch from three that were measured; calls that are alike, measured once; shapes that are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from helpers import by_night
from zerosim.cli import plan as cli
from zerosim.planner import models, shape_cache
from zerosim.planner.batch_sizes import BatchSizes, compact
from zerosim.planner.config_source import ConfigSource
from zerosim.worlds.shapes import GroupShapes, ModelShapes, Tensor, UnitShapes

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

CONFIGS = Path(__file__).parent / "configs"


def shapes(rows: int, *, bent: int = 0) -> ModelShapes:
    """A unit that keeps 7 numbers a row and 11 besides, and computes 13 FLOPs a row; from ``bent`` rows on more."""
    more = 5 * max(0, rows - bent) if bent else 0
    unit = UnitShapes(
        name="unit", groups=(0,), saved=(Tensor((7 * rows + 11,), "float32"), Tensor((3,), "bfloat16")),
        outputs=(Tensor((rows, 2), "float32"),), grads=(Tensor((rows, 2), "float32"),), forward_flops=13 * rows + more,
    )  # fmt: skip
    return ModelShapes(
        groups=(GroupShapes("group", ((3, 5),)),), units=(unit,), loss=UnitShapes(name="loss", feeds=(0,)),
        inputs=(Tensor((rows, 3), "float32"),), target=Tensor((rows,), "int64"),
    )  # fmt: skip


def test_a_size_that_is_tried_is_on_the_line_between_those_that_were_measured() -> None:
    """However many are tried, three are measured from one power of 8 to the next; each is what measuring gives."""
    measured: list[int] = []
    sizes = BatchSizes(lambda rows: measured.append(rows) or shapes(rows))  # type: ignore[func-returns-value]
    for rows in (3, 5, 7, 17, 63, 40, 1000, 4000):
        assert sizes.tried(rows) == shapes(rows)
    assert sorted(measured) == [1, 2, 8, 16, 64, 512, 1024, 4096]


def test_where_there_is_no_line_each_size_is_measured() -> None:
    """Numbers that bend within the range, or a size that cannot be measured at all. Of the smallest, which most
    searches end among, each is measured with the first, so that a second question finds them kept."""
    measured: list[int] = []
    low = BatchSizes(lambda rows: measured.append(rows) or shapes(rows, bent=3))  # type: ignore[func-returns-value]
    assert low.tried(5) == shapes(5, bent=3)
    assert sorted(measured) == [*range(1, 8), 8]
    bent = BatchSizes(lambda rows: shapes(rows, bent=100))
    for rows in (37, 90, 99, 101, 300, 1000):
        assert bent.tried(rows) == shapes(rows, bent=100)

    def small(rows: int) -> ModelShapes:
        if rows > 40:
            raise ValueError("too large")
        return shapes(rows)

    assert BatchSizes(small).tried(37) == shapes(37)


def test_compact_shapes_have_the_same_bytes() -> None:
    """What a unit saves in one piece; under autocast a 16-bit copy of its 15 parameters besides."""
    plain, copied = compact(shapes(3)), compact(shapes(3), copies=True)
    assert plain.units[0].saved == (Tensor((4 * (7 * 3 + 11) + 2 * 3,), "uint8"),)
    assert plain.activation_bytes == shapes(3).activation_bytes
    assert copied.activation_bytes == plain.activation_bytes + 2 * 3 * 5


# -- models


SMALL = {"num_hidden_layers": 3, "num_layers": 3, "num_decoder_layers": 3, "hidden_size": 96, "intermediate_size": 64}


@pytest.mark.parametrize("name", ["mlc--smollm2_135m", *by_night("t5-small", "gemma-2-9b")])
def test_calls_that_are_alike_measure_what_each_of_them_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every call taken for one of its own, the shapes are the same, of any checkpointing; and the sizes that are
    tried are those that are measured."""
    pytest.importorskip("transformers")
    from zerosim.planner.config_model import ConfigModel
    from zerosim.records.question import Finetuning
    from zerosim.torch_models.alike import Alike

    values = json.loads((CONFIGS / f"{name}.json").read_text()) | (SMALL if name != "t5-small" else {"num_layers": 3})
    values |= {"num_attention_heads": 6, "num_key_value_heads": 3} if name != "t5-small" else {}
    model = ConfigModel(values, name, Finetuning())

    def measured(rows: int, checkpoint: str = "none") -> ModelShapes:
        return model.measure(rows, 16, checkpoint, "bf16", "fp32", "grouped")

    some = {checkpoint: measured(1, checkpoint) for checkpoint in ("none", "selective")}
    assert BatchSizes(measured).tried(9) == measured(9)
    monkeypatch.setattr(Alike, "key", lambda self, module, args, kwargs: object())
    assert {checkpoint: measured(1, checkpoint) for checkpoint in some} == some


def test_modules_that_differ_are_not_alike() -> None:
    """Another width, another flag, a frozen parameter, another input; only a layer's number and rates make none."""
    torch = pytest.importorskip("torch")
    from zerosim.torch_models.alike import Alike

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, number: int, width: int = 3, rate: float = 0.1, window: int | None = None) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, width)
            self.layer_idx, self.rate, self.window = number, rate, window

    keys, x = Alike(), torch.empty(2, 3)
    first = keys.key(Block(0), (x,), {})
    assert first == keys.key(Block(1), (x,), {}) == keys.key(Block(2, rate=0.2), (x,), {})
    frozen = Block(0)
    frozen.inner.weight.requires_grad_(False)
    for other in (Block(0, width=5), Block(0, window=4), Block(0, rate=0.0), frozen):
        assert keys.key(other, (x,), {}) != first
    assert keys.key(Block(0), (torch.empty(2, 4),), {}) != first
    assert keys.key(Block(0), (x,), {"flag": True}) != first
    assert keys.key(Block(0), (x, x), {}) != keys.key(Block(0), (x, torch.empty(2, 3)), {})


def test_a_second_question_loads_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another N, card and scheme of a model that was measured: in a fresh interpreter neither torch nor transformers is
    imported, and the numbers are the same."""
    pytest.importorskip("transformers")
    monkeypatch.setenv(shape_cache.FOLDER, str(tmp_path))
    config = str(CONFIGS / "mlc--smollm2_135m.json")
    code = (
        "import sys; from click.testing import CliRunner; from zerosim.cli.plan import plan\n"
        f"r = CliRunner().invoke(plan, [{config!r}, '--seq', '512', '--json', '-', *sys.argv[1:]])\n"
        "print(r.exit_code, *{'torch', 'transformers'} & set(sys.modules))"
    )

    first = CliRunner().invoke(
        cli.plan, [config, "--seq", "512", "--gpus", "2", "--memory", "4GB", "--scheme", "zero3", "--json", "-"]
    )
    assert (first.exit_code, any(tmp_path.iterdir())) == (0, True), first.output  # measured, and kept
    other = ["--gpus", "5", "--memory", "3GB", "--scheme", "zero1", "--convention", "deepspeed"]
    done = subprocess.run([sys.executable, "-c", code, *other], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_the_cache_forgives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not whole, another kind of record, a folder that is none: there is nothing kept, and no error."""
    monkeypatch.setenv(shape_cache.FOLDER, str(tmp_path))
    name = shape_cache.key("something")
    assert shape_cache.load(name, ModelShapes) is None
    shape_cache.save(name, shapes(1))
    assert shape_cache.load(name, ModelShapes) == shapes(1)
    (tmp_path / f"{name}.msgpack").write_bytes(msgspec.msgpack.encode(shapes(1))[:-3])
    assert shape_cache.load(name, ModelShapes) is None
    monkeypatch.setenv(shape_cache.FOLDER, str(tmp_path / f"{name}.msgpack"))
    shape_cache.save(name, shapes(1))
    assert shape_cache.load(name, ModelShapes) is None
    monkeypatch.setenv(shape_cache.FOLDER, "")
    assert shape_cache.folder() is None


def test_a_key_is_of_content_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values in another order are the same model; another value, or another version, is not."""
    first = shape_cache.key({"a": 1, "b": 2})
    assert first == shape_cache.key({"b": 2, "a": 1}) != shape_cache.key({"a": 1, "b": 3})
    monkeypatch.setattr(shape_cache, "versions", lambda: "others")
    assert shape_cache.key({"a": 1, "b": 2}) != first


def test_a_source_is_ready_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a configuration measures nothing: what is refused before is refused without torch."""
    monkeypatch.setattr(ConfigSource, "_torch", lambda self: pytest.fail("torch was asked"))
    source: Any = models.read(str(CONFIGS / "gpt2.json"))
    assert source.kind == "config.json"
