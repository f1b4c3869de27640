"""Plans from Python: the answer is the command's, and errors speak of keywords."""

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerosim as zs
from zerosim.api.plan_arguments import in_python
from zerosim.cli import main as cli
from zerosim.records import plan as records

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDTHS = [64, 256, 64]


@pytest.fixture(scope="module")
def found() -> zs.Planned:
    return zs.plan(WIDTHS, gpus=4, memory="300kB")


def test_the_answer_is_the_commands(found: zs.Planned, tmp_path: Path) -> None:
    """What Python and the command say of the same question is the same, save for when it was said."""
    arguments = ["plan", "64,256,64", "--gpus", "4", "--memory", "300kB", "--json", str(tmp_path / "plan.json")]
    assert CliRunner().invoke(cli.main, arguments).exit_code == 0
    command, python = json.loads((tmp_path / "plan.json").read_text()), json.loads(json.dumps(found.to_dict()))
    for each in (command, python):
        del each["created"], each["question"]["model"]
    assert python == command


def test_the_verdict(found: zs.Planned) -> None:
    """The best row is the first whose peak the card holds; with a card one byte too small for all none is."""
    cells = found.record.at(4)
    assert found.best is next(cell for cell in cells if cell.peak.total <= 300_000)
    assert found.fits
    assert "fits with" in " ".join(repr(found).split())
    assert max(map(len, repr(zs.plan(WIDTHS, gpus=[4, 8, 16], memory=300_000)).splitlines())) <= 80
    least = min(cell.peak.total for cell in cells)
    none = zs.plan(WIDTHS, gpus=4, memory=least - 1)
    assert (none.fits, none.best) == (False, None)
    assert "does not fit" in " ".join(repr(none).split())
    assert zs.plan(WIDTHS, gpus=4).fits is None


def test_it_shows_itself(found: zs.Planned) -> None:
    """As text, in a notebook and as a chart, every row is named, and what is said to do is said in Python."""
    for text in (str(found.table()), found._repr_html_()):
        assert all(row.name in text for row in (zs.DP, zs.ZeRO3, zs.ZeRO3Kept))
    assert found._repr_html_().startswith("<p>Planned(MLP")
    assert "--" not in str(zs.plan(WIDTHS, gpus=4).table())
    [axes] = found.chart().axes
    assert axes.patches


@pytest.mark.parametrize(
    ("gpus", "asked"), [(4, [4]), ("2-8", [2, 4, 8]), ([2, 6], [2, 6]), ("3,5", [3, 5]), ((8, 2), [2, 8])], ids=str
)
def test_gpus_are_given_in_many_ways(gpus: Any, asked: list[int]) -> None:
    """A number, several, or a range."""
    assert zs.plan(WIDTHS, gpus=gpus).record.question.asked == asked


def test_models_are_given_in_many_ways() -> None:
    """Widths, an MLP and their text are the same plan; a module of the same shape has as many parameters."""
    plans = [zs.plan(model, gpus=2).record for model in (WIDTHS, tuple(WIDTHS), zs.MLP(WIDTHS), "64,256,64")]
    assert len({each.model.name for each in plans}) == 1
    assert all(each.cells == plans[0].cells for each in plans)
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    planned = zs.plan(
        net, gpus=2, inputs=lambda rows, _: torch.empty(rows, 64), target=lambda rows, _: torch.empty(rows, 64),
        loss=torch.nn.functional.mse_loss,
    )  # fmt: skip
    assert planned.record.model.params == plans[0].model.params


def test_rows_are_chosen() -> None:
    """The rows that are asked for are those that are planned, in their order."""
    rows = [zs.ZeRO3, zs.DP]
    assert [cell.row for cell in zs.plan(WIDTHS, gpus=2, rows=rows).record.cells] == rows


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (WIDTHS, {"card": "H900"}, ValueError, r"plan\(card\): one of .*H100.*; got 'H900'.*memory=\"80GB\""),
        (WIDTHS, {"memory": "80"}, ValueError, r"plan\(memory\): '80' has no unit"),
        (WIDTHS, {"memory": 0}, ValueError, r"plan\(memory\): memory must be an integer of 1 or more"),
        (WIDTHS, {"gpus": 8.5}, TypeError, r"plan\(gpus\).*got 8.5"),
        (WIDTHS, {"gpus": 0}, ValueError, r"plan\(gpus\).*got '0'"),
        (WIDTHS, {"seq": 7}, ValueError, r"Leave seq= out and use micro_batch="),
        (WIDTHS, {"precision": "fp8"}, ValueError, r"plan\(precision\): precision is one of .*; got 'fp8'"),
        (WIDTHS, {"bandwidth": "9Gb/s"}, ValueError, r"plan\(bandwidth\): .*bits"),
        (WIDTHS, {"loss": len}, ValueError, r"plan\(loss\): this is for a torch.nn.Module; got list"),
        (WIDTHS, {"lora": 8}, ValueError, r"plan\(lora\): .*; a list says itself what is trained"),
        (5, {}, TypeError, r"plan\(model\): .*; got int"),
        ([64], {}, ValueError, r"plan\(model\): layer sizes are two or more"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_speak_of_keywords(model: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The error names the keyword, the rule and the value, and advises what can be written in Python."""
    with pytest.raises(error, match=message) as raised:
        zs.plan(model, **{"gpus": 2} | options)
    assert "--" not in str(raised.value)


def test_a_global_batch_is_as_many_micro_batches() -> None:
    """Rows of a step on all ranks come to the same as the micro-batches that they make up."""
    one = zs.plan(WIDTHS, gpus=2, micro_batch=3, global_batch=12).record
    other = zs.plan(WIDTHS, gpus=2, micro_batch=3, accumulate=2).record
    assert [(cell.peak, cell.traffic) for cell in one.cells] == [(cell.peak, cell.traffic) for cell in other.cells]


def test_advice_can_be_followed() -> None:
    """Another card is said by its memory, as the error advises."""
    with pytest.raises(ValueError, match=r'as in memory="80GB"'):
        zs.plan(WIDTHS, gpus=2, card="H900")
    assert zs.plan(WIDTHS, gpus=2, memory="80GB").fits


def test_options_of_the_command_become_keywords() -> None:
    """With a value, without one, with a number, and what is no option stays."""
    said = "--memory 80GB or --card H100; --checkpoint full, --micro-batch 4 -- and --scheme."
    assert in_python(said) == 'memory="80GB" or card="H100"; checkpoint="full", micro_batch=4 -- and rows=.'


def test_it_is_saved_in_the_form_of_its_name(found: zs.Planned, tmp_path: Path) -> None:
    """A page, a chart, a trace, a snapshot and the plan; what is no such ending is refused before anything is made."""
    done: list[str] = []
    for name, begin in (
        ("page.html", b"<!doctype html>"), ("peaks.svg", b"<?xml"), ("step.trace.json", b"{"), ("step.pickle", b"\x80"),
    ):  # fmt: skip
        found.save(tmp_path / name, advance=done.append)
        assert (tmp_path / name).read_bytes().startswith(begin)
    assert any(each.endswith(", full") for each in done)
    found.save(str(tmp_path / "plan.json"))
    assert (tmp_path / "plan.json").read_bytes() == records.encode(found.record)
    with pytest.raises(ValueError, match=r"Planned\.save\(path\): the file's name ends in .*; got 'plan\.txt'"):
        found.save(tmp_path / "plan.txt")


def test_the_step_that_is_saved_is_chosen(found: zs.Planned, tmp_path: Path) -> None:
    """By default the best row's; a row and a number of GPUs name another; what was not planned is refused."""
    peaks = {}
    for name, row in (("best", None), ("dp", zs.DP)):
        found.save(tmp_path / f"{name}.pickle", row=row)
        [entries] = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())["device_traces"]
        signs = {"alloc": 1, "free_completed": -1}
        held = itertools.accumulate(signs.get(each["action"], 0) * each["size"] for each in entries)
        peaks[name] = max(held)
    assert found.best is not None
    [dp] = [cell for cell in found.record.beside(4) if cell.row == zs.DP]
    assert peaks == {"best": found.best.peak.total, "dp": dp.peak.total}
    with pytest.raises(ValueError, match=r"planned were ZeRO-3, .*on 4 GPUs; got ZeRO-1 on 4"):
        found.save(tmp_path / "other.pickle", row=zs.ZeRO1)
    with pytest.raises(ValueError, match="got no row on 5"):
        found.save(tmp_path / "other.pickle", gpus=5)
