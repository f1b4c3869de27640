"""Rows compared from Python: an MLP, a module, a row of one's own; what holds, what fails, what can be kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import zerosim as zs
from zerosim.bands import Band
from zerosim.cli import main as cli
from zerosim.lab.record import load
from zerosim.records import consistency
from zerosim.records.results import Check, Settings

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

SMALL = zs.MLP((5, 7, 3))
THREE = (np.ones(1),) * 3
MINE = zs.Stage("mine", optimizer=True, grads=True)


def draw(ranks: int, steps: int = 2, rows: int = 2) -> list[Any]:
    return zs.batches(ranks, steps, rows=rows, widths=(5, 3))


def test_rows_that_learn_the_same_hold() -> None:
    """Four rows and one's own agree bit for bit, every count is as predicted, and ZeRO-2's twin is like ZeRO-2."""
    found = zs.compare(SMALL, draw(3), ranks=3, rows=[*zs.SCHEMES, MINE])
    assert found.holds
    assert all(not found.results.nothing_compared(check) for check in Check)
    mine, twin = (found.results.scheme(name) for name in ("mine", "ZeRO-2"))
    assert [step.peak for step in mine.steps] == [step.peak for step in twin.steps]
    assert list(consistency.contradictions(found.results)) == []


def test_a_row_that_learns_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong element under one row, and it does not hold; the failure names the row, the step and both values."""
    step = zs.Scheme.step

    def wrong(self: zs.Scheme, batch: Any, weights: Any = None) -> float:
        loss = step(self, batch, weights)
        if self.name == "ZeRO-2" and len(self.reports) == 2:
            self.buckets[0].states[Band.PARAMS][1, 2] += 1
        return loss

    monkeypatch.setattr(zs.Scheme, "step", wrong)
    found = zs.compare(SMALL, draw(3), ranks=3)
    assert not found.holds
    assert {(each.scheme, each.step) for each in found.failures} == {("ZeRO-2", 2)}
    assert "same training: fails" in repr(found)
    assert "FAILS" in str(found.table())


@pytest.mark.parametrize(
    ("options", "predicted"),
    [
        ({}, True), ({"precision": "fp32"}, True), ({"precision": "bf16", "wire": "bf16"}, True), ({"node": 2}, True),
        ({"bucket": "model"}, False), ({"optimizer": zs.SGD()}, False), ({"accumulate": 2}, True),
        ({"accumulate": 2, "sync": "end"}, True), ({"find_unused": True}, True), ({"clip": 0.5, "clip_eps": 0.0}, True),
        ({"uneven": True, "average": "ranks"}, True),
        ({"clip": 0.5}, True), ({"loss_scale": 2.0**20}, True), ({"uneven": True}, True),
        ({"clip": 0.5, "norm_type": float("inf")}, True),
    ],
    ids=str,
)  # fmt: skip
def test_options_are_taken_and_rows_agree_under_them(options: dict[str, Any], predicted: bool) -> None:
    """Under any options rows agree; counts are held to the closed forms where these know the options."""
    found = zs.compare(SMALL, draw(4), ranks=4, **options)
    assert found.holds
    assert (found.results.nothing_compared(Check.AS_PREDICTED) == "") is predicted
    assert not found.results.nothing_compared(Check.SAME_TRAINING)
    others = {name for name in options if name not in Settings.__struct_fields__}
    assert set(found.results.settings.others) - {"sync"} == others


def test_a_precision_that_no_plain_training_has_is_compared_all_the_same() -> None:
    """fp32 parameters that are cast as they are gathered: rows are held to each other, and to nothing else."""
    found = zs.compare(SMALL, draw(4), ranks=4, rows=[zs.ZeRO3, zs.ZeRO3Kept], precision="fsdp")
    assert found.holds
    assert found.results.nothing_compared(Check.AS_PREDICTED)
    assert not found.results.nothing_compared(Check.SAME_TRAINING)


@pytest.mark.usefixtures("as_users_call_it")
def test_rows_and_folders_that_are_none_are_refused_by_name() -> None:
    """A number in place of a row or of a folder: the error begins with the call and the option."""
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"^compare\(rows\): a row, as in zs.ZeRO3, or the name of one"):
        zs.compare(SMALL, draw(2), ranks=2, rows=[wrong])
    with pytest.raises(TypeError, match=r"^dry\(row\): a row, as in zs.ZeRO3, or the name of one"):
        zs.dry(SMALL, wrong, ranks=2)
    with pytest.raises(TypeError, match=r"^load\(folder\): folder must be of type"):
        zs.load(wrong)


def test_a_run_on_uneven_batches_says_what_a_naive_mean_would_have_been() -> None:
    """Stepped by hand or compared, in the table and in the records; averaged over ranks there is nothing to say."""
    [batch] = draw(2, steps=1, rows=3)
    batch[0] = tuple(array[:1] for array in batch[0])
    run = zs.ZeRO2(SMALL, ranks=2, uneven=True)
    run.step(batch)
    for found in (run.results(), zs.compare(SMALL, [batch], ranks=2, uneven=True)):
        [loss, naive] = (getattr(found.results.schemes[-1].steps[-1], name) for name in ("loss", "mean_of_means"))
        assert loss != naive
        assert f"the loss of step 1 is {loss:.6f}" in " ".join(str(found.table()).split())
        assert f"would have been {naive:.6f}" in " ".join(str(found.table()).split())
        assert list(consistency.contradictions(found.results)) == []
    over_ranks = zs.compare(SMALL, [batch], ranks=2, uneven=True, average="ranks")
    assert "would have been" not in str(over_ranks.table())


def test_rows_with_groups_are_compared_with_their_own_order() -> None:
    """A row that sums over two axes is no failure beside one that sums over one: how far they are apart is said."""
    found = zs.compare(SMALL, draw(4), ranks=4, rows=[zs.DP, zs.ZeRO3, zs.HSDP], node=2)
    assert found.holds
    assert [each.scheme for each in found.results.between_orders] == ["HSDP"] * 2


def test_out_of_memory_is_part_of_the_outcome() -> None:
    """On a card that is too small for some rows these are named, and the others' numbers stand."""
    peaks = {each.name: each.steps[-1].peak.total for each in zs.compare(SMALL, draw(3), ranks=3).results.schemes}
    found = zs.compare(SMALL, draw(3), ranks=3, capacity=peaks["ZeRO-3"])
    short = {record.name for record in found.results.schemes if record.out_of_memory}
    assert short == {name for name, peak in peaks.items() if peak > peaks["ZeRO-3"]}
    assert found.holds
    assert "out of memory: data parallel" in repr(found)


def test_a_module_is_compared_through_torchs_autograd(tmp_path: Path) -> None:
    """A module with tensors for batches: rows agree, its page and its file can be made, and read again."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    batches = [[(torch.randn(2, 5), torch.randn(2, 3)) for _ in range(3)] for _ in range(2)]
    found = zs.compare(net, batches, ranks=3, loss=torch.nn.functional.mse_loss)
    assert found.holds
    assert not found.results.nothing_compared(Check.SAME_TRAINING)
    assert found.results.schemes[-1].prediction is None
    page = found.report(tmp_path / "own.html").read_text(encoding="utf-8")
    assert "TorchModel" in page
    assert "predicted" not in page.partition('id="rest"')[2].partition("</table>")[0]
    assert found.save(tmp_path / "own.json") == tmp_path / "own.json"
    again = CliRunner().invoke(cli.main, ["report", str(tmp_path / "own.json"), "--out", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again" / "report.html").read_text(encoding="utf-8") == page


def test_buffers_and_frozen_parameters_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's statistics are each rank's own, and alike under all rows; a rank's that are not are found and named."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    net[0].requires_grad_(False)
    batches = [[(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(3)] for _ in range(2)]
    found = zs.compare(net, batches, ranks=3, loss=torch.nn.functional.mse_loss)
    assert found.holds
    assert found.results.differences[0].differing["buffers"] == 0
    assert load(found.save(tmp_path / "own.json")) == found.results

    apply = zs.Scheme._apply

    def spoil(scheme: zs.Scheme, report: Any) -> None:
        apply(scheme, report)
        if scheme.name == "ZeRO-2":
            buffers, *_ = [bucket.states[Band.BUFFERS] for bucket in scheme.buckets if Band.BUFFERS in bucket.states]
            buffers[1] += 1

    monkeypatch.setattr(zs.Scheme, "_apply", spoil)
    [first, *_] = zs.compare(net, batches, ranks=3, loss=torch.nn.functional.mse_loss).results.failures
    assert (first.scheme, first.rank, first.step, first.quantity.split()[0]) == ("ZeRO-2", 1, 1, "buffers")


def test_modules_take_several_inputs_and_targets() -> None:
    """A batch's x and y may be tuples and mappings, one batch or a list of them, also of two ranks."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Bilinear(3, 2, 3)

    def loss(found: Any, wanted: Any) -> Any:
        return (found - wanted["one"] - wanted["two"]).square().mean()

    x, y = (torch.ones(2, 3), np.ones((2, 2), np.float32)), {"one": torch.ones(2, 3), "two": torch.zeros(2, 3)}
    whole = zs.compare(net, [[(x, y)] * 2], ranks=2, loss=loss)
    assert whole.holds
    alone = zs.compare(net, [(x, y)] * 2, ranks=2, loss=loss)
    assert [each.steps[0].loss for each in alone.results.schemes] == [
        each.steps[0].loss for each in whole.results.schemes
    ]


def test_a_run_stepped_by_hand_has_a_page_and_a_file(tmp_path: Path) -> None:
    """What a run found is a record like the lab's, which contradicts nothing."""
    run = zs.ZeRO3(SMALL, ranks=3)
    for batch in draw(3, steps=3):
        run.step(batch)
    found = run.results()
    [record] = found.results.schemes
    assert [step.loss for step in record.steps] == [report.loss for report in run.reports]
    assert list(consistency.contradictions(found.results)) == []
    found.report(tmp_path / "run.html")
    found.save(tmp_path / "run.json")
    assert load(tmp_path / "run.json") == found.results
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["data"] == "your own"
    assert "there is one scheme" in str(found.table())


def test_before_a_step_there_are_no_results() -> None:
    """What was not trained has nothing to show, and says what to do."""
    with pytest.raises(ValueError, match=r"^results: no step of this run is complete. Call step\(batch\) first"):
        zs.ZeRO3(SMALL, ranks=3).results()


@pytest.mark.parametrize(("name", "call", "kept"), [("x.pdf", "report", ".html"), ("x.html", "save", ".json")])
def test_files_have_the_ending_of_what_is_in_them(name: str, call: str, kept: str, tmp_path: Path) -> None:
    """A page is .html and a results file .json: another ending is refused, in words, and nothing is written."""
    found = zs.compare(SMALL, draw(2, steps=1), ranks=2, rows=zs.DP)
    write = getattr(found, call)
    with pytest.raises(ValueError, match=rf"^Comparison.{call}\(path\): .* ends in {kept}; got '{name}'"):
        write(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    write(str(tmp_path / f"x{kept.upper()}"))


def test_one_batch_is_taken_for_what_it_is() -> None:
    """A single batch, forgotten to be put in a list, is one step; as a list of one it is the same."""
    [batch] = draw(3, steps=1)
    one, other = zs.compare(SMALL, batch, ranks=3), zs.compare(SMALL, [batch], ranks=3)
    assert one.results.settings == other.results.settings
    assert one.results.settings.steps == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": 7}, TypeError, "an MLP or a torch.nn.Module; got int"),
        ({"batches": []}, ValueError, r"zs.batches\(ranks=3\); got list"),
        ({"batches": 5}, ValueError, "got int"),
        ({"batches": draw(2)}, ValueError, "3 in all; got one of 2. Pass ranks=2"),
        ({"batches": [[THREE] * 3]}, ValueError, r"pair \(x, y\); got one of 3. Several inputs go .* \(\(a, b\), y\)"),
        ({"batches": [*draw(3), [THREE] * 3]}, ValueError, "got one of 3. Several inputs"),
        ({"batches": [[THREE] * 2] * 2, "ranks": 2}, ValueError, "got one of 3. Several inputs"),
        ({"batches": [THREE] * 3}, ValueError, "got one of 3. Several inputs"),
        ({"rows": []}, ValueError, "one or more rows"),
        ({"rows": ["zero5"]}, ValueError, r"compare\(rows\): no scheme is called 'zero5'"),
        ({"rows": [zs.DP, zs.DP]}, ValueError, "each of another name"),
        ({"loss": len}, ValueError, r"compare\(loss\): MLP has its own layers and loss"),
        ({"presicion": "bf16"}, TypeError, "no option 'presicion'"),
        ({"ranks": 0}, ValueError, "ranks must be"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_said_in_the_callers_words(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The error names the argument, the rule and the value, before anything is trained."""
    given: dict[str, Any] = {"model": SMALL, "batches": draw(3), "ranks": 3} | changes
    model, batches = given.pop("model"), given.pop("batches")
    with pytest.raises(error, match=message):
        zs.compare(model, batches, **given)


def test_batches_repeat() -> None:
    """The same seed draws the same batches; another seed draws others; data that there is not is refused."""
    one, same, other = (zs.batches(2, 2, seed=seed)[1][1][0] for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    with pytest.raises(ValueError, match="one of noise, digits; got 'mnist'"):
        zs.batches(2, data="mnist")
    for widths in ((3,), 3, (3, 4, 5)):
        with pytest.raises(ValueError, match=r"batches\(widths\): two widths, of x and of y, as in \(64, 64\); got"):
            zs.batches(2, widths=widths)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batches\(widths\): widths must be an integer of 1 or more; got 0"):
        zs.batches(2, widths=(0, 3))
