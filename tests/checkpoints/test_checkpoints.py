"""Checkpoints: the same bits under any row and any number of ranks, whole or not at all."""

import errno
import json
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import batches
from zerosim.bands import NOT_SAVED, PRECISIONS, Band
from zerosim.checkpoints import files
from zerosim.checkpoints.consolidate import consolidate
from zerosim.checkpoints.files import CheckpointError
from zerosim.checkpoints.load import load
from zerosim.checkpoints.save import save
from zerosim.cli.main import main
from zerosim.model import MLP
from zerosim.optimizer import AdamW, ParamGroup, Schedule
from zerosim.options import LossScale
from zerosim.records.files import write_whole
from zerosim.schemes import DP, Scheme, ZeRO3
from zerosim.stages import HFSDP, HPZ, HSDP, ROWS, Stage

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDTHS = (5, 7, 3)
STEP: dict[str, Any] = {
    "clip": 0.7, "loss_scale": LossScale(init=2.0**10), "optimizer": AdamW(schedule=Schedule(3, 9, "cosine")),
}  # fmt: skip
RECIPES = [name for name, recipe in PRECISIONS.items() if recipe.everywhere]


def trained(row: Stage, ranks: int, steps: int = 2, **options: Any) -> Scheme:
    scheme = row(MLP(WIDTHS), ranks, **options)
    for batch in batches(ranks, steps, widths=WIDTHS):
        scheme.step(batch)
    return scheme


def states(scheme: Scheme) -> dict[Band, bytes]:
    return {band: scheme.flat(band).tobytes() for band in scheme.states if band not in NOT_SAVED}


def shapes() -> st.SearchStrategy[tuple[int, int]]:
    """Groups, and ranks of a group."""
    return st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]))


@settings(max_examples=25)
@given(st.sampled_from(ROWS), st.sampled_from(ROWS), shapes(), shapes(), st.sampled_from(RECIPES), st.booleans())
def test_any_row_on_any_ranks_loads_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, row: Stage, other: Stage, shape: tuple[int, int],
    another: tuple[int, int], precision: str, whole: bool,
) -> None:  # fmt: skip
    """Whatever row and number of ranks a checkpoint is loaded under, every state is what was saved, to the last bit."""
    folder, bucket = tmp_path_factory.mktemp("saved"), "model" if whole else "layer"
    groups = {member for each in (shape, another) for member in each[1:]}
    if 1 in groups and any(each.offload and "params" in each.offload and each.two_axes for each in (row, other)):
        return
    scheme = trained(row, shape[0] * shape[1], node=shape[1], precision=precision, bucket=bucket)
    save(scheme, folder)
    again = load(folder, other, another[0] * another[1], node=another[1])
    assert states(again) == states(scheme)
    assert (again.steps, again.updates) == (2, 2)
    for each in again.buckets:  # padding is cut anew, and zero
        for band, pieces in each.pieces.items():
            first = [pieces.tolist().index(piece) for piece in sorted(set(pieces.tolist()))]
            assert not each.states[band][first].reshape(-1)[each.size :].any()


@pytest.mark.parametrize(("row", "other"), [(DP, ZeRO3), (ZeRO3, HPZ), (HSDP, HFSDP)], ids=lambda row: row.name)
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, row: Stage, other: Stage) -> None:
    """Three steps, saved, loaded under a row of the same order, and three more are six in a row, bit for bit."""
    data = batches(4, 6, widths=WIDTHS)
    straight, stopped = (row(MLP(WIDTHS), 4, node=2, **STEP) for _ in range(2))
    for batch in data[:3]:
        straight.step(batch)
        stopped.step(batch)
    save(stopped, tmp_path)
    resumed = load(tmp_path, other, node=2)
    for batch in data[3:]:
        assert resumed.step(batch) == straight.step(batch)
        assert resumed.reports[-1].norm == straight.reports[-1].norm
    assert states(resumed) == states(straight)
    assert resumed.scaler is not None
    assert straight.scaler is not None
    assert resumed.scaler.good_steps == straight.scaler.good_steps == 6


def test_what_decides_numbers_is_saved(tmp_path: Path) -> None:
    """Options come back equal, groups, schedule and loss scale among them; a keyword on top counts."""
    groups = (ParamGroup("layer 2", lr=1e-3),)
    scheme = trained(ZeRO3, 3, **STEP | {"optimizer": AdamW(lr=3e-3, groups=groups), "wire": "fp16", "padding": "2N"})
    save(scheme, tmp_path)
    assert load(tmp_path).options == scheme.options
    assert load(tmp_path, clip=9.0).options.clip == 9.0


def test_replicas_are_saved_once(tmp_path: Path) -> None:
    """Each piece of each state is in one file, and all files together are the states without gradients and replicas."""
    scheme = trained(HSDP, 6, node=2)
    index = save(scheme, tmp_path)
    pieces = [piece[:3] for file in index.files for piece in file.pieces]
    assert len(set(pieces)) == len(pieces)
    padded = sum(bucket.padded for bucket in scheme.buckets)
    tensors = [array for file in index.files for array in files.read_tensors(tmp_path, file).values()]
    assert sum(array.nbytes for array in tensors) == padded * (2 + 4 + 4 + 4)
    assert scheme.ledger.host_peak().total == padded // 2 * (2 + 4 + 4 + 4)  # what one rank of the first group copies
    assert not any(scheme.ledger.host.values())


def test_one_file_is_put_together_a_layer_at_a_time(tmp_path: Path) -> None:
    """The consolidated file has the fp32 parameters, and takes one layer and a piece of it, not the model."""
    scheme = trained(ZeRO3, 4)
    save(scheme, tmp_path)
    ledger = consolidate(tmp_path, tmp_path / "all.safetensors")
    content = files.tensors_of((tmp_path / "all.safetensors").read_bytes())
    order = [f"layer {layer}.{what}" for layer in (1, 2) for what in ("weight", "bias")]
    assert np.concatenate([content[name].reshape(-1) for name in order]).tobytes() == scheme.full_theta().tobytes()
    largest = max(bucket.padded for bucket in scheme.buckets)
    assert ledger.host_peak().total == 4 * (largest + largest // 4) < 4 * scheme.model.n_params


def _flip(folder: Path, index: files.Index) -> None:
    path = folder / index.files[1].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _remove(folder: Path, index: files.Index) -> None:
    (folder / index.files[2].name).unlink()


def _cut(folder: Path, index: files.Index) -> None:
    path = folder / index.files[0].name
    path.write_bytes(path.read_bytes()[:-9])


def _foreign(folder: Path, index: files.Index) -> None:
    (folder / files.INDEX).write_text("{}")


def _older(folder: Path, index: files.Index) -> None:
    values = json.loads((folder / files.INDEX).read_text())
    (folder / files.INDEX).write_text(json.dumps(values | {"schema": "zerosim.checkpoint/0"}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_flip, "the file of rank 1, .* is damaged"),
        (_remove, "the file of rank 2, .* is missing"),
        (_cut, "the file of rank 0, .* is damaged: it has .* B"),
        (_foreign, "its schema is None"),
        (_older, "its schema is 'zerosim.checkpoint/0'"),
    ],
)
def test_what_is_not_sound_is_named(tmp_path: Path, damage: Any, says: str) -> None:
    """A damaged, missing, foreign or older file is refused, with what is wrong."""
    index = save(trained(ZeRO3, 3), tmp_path)
    damage(tmp_path, index)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """The first tensor that differs is named with both shapes; so are states that this run does not have."""
    save(trained(ZeRO3, 2), tmp_path)
    with pytest.raises(CheckpointError, match=r"of layer 2, is \[7, 3\] there and \[7, 4\] here"):
        load(tmp_path, model=MLP((5, 7, 4)))
    with pytest.raises(CheckpointError, match=r"it has .*master.*, and this run needs exp_avg, exp_avg_sq, params"):
        load(tmp_path, precision="fp32")


def test_what_is_said_on_top_of_a_checkpoint_counts(tmp_path: Path) -> None:
    """A loss scale of another rule begins as that says, one of the same goes on; and 0 ranks are none."""
    run = ZeRO3(MLP(WIDTHS), 2, loss_scale=LossScale(init=2.0**10, interval=1))
    run.step(*batches(2, 1, widths=WIDTHS))
    save(run, tmp_path)
    scales = {
        rule: load(tmp_path, loss_scale=rule).scaler.scale  # type: ignore[union-attr]
        for rule in (LossScale(init=2.0**10, interval=1), LossScale(init=8.0), 4.0)
    }
    assert list(scales.values()) == [2.0**11, 8.0, 4.0]
    with pytest.raises(ValueError, match=r"^load\(ranks\): ranks must be an integer of 1 or more; got 0"):
        load(tmp_path, ranks=0)


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the third file cannot be written, nothing of the new checkpoint is left, and the old one loads."""
    scheme = trained(ZeRO3, 4)
    save(scheme, tmp_path)
    before = states(scheme)
    [batch] = batches(4, 1, widths=WIDTHS)
    scheme.step(batch)
    write, calls = write_whole, []

    def full(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(files, "write_whole", full)
    with pytest.raises(OSError, match=f"save: No space left on device. What was there before is whole: '{tmp_path}'"):
        save(scheme, tmp_path)
    monkeypatch.undo()
    assert not any(scheme.ledger.host.values())  # nor is anything held for it
    assert states(load(tmp_path)) == before
    assert len(list(tmp_path.iterdir())) == 4 + 1
    save(scheme, tmp_path)
    assert states(load(tmp_path)) == states(scheme)
    assert len(list(tmp_path.iterdir())) == 4 + 1


def test_a_limit_of_the_systems_own_leaves_what_was_there(tmp_path: Path) -> None:
    """Where the system itself lets no file grow so large, the error is its own, and what was there before loads."""
    scheme = trained(ZeRO3, 2)
    save(scheme, tmp_path / "run")
    consolidate(tmp_path / "run", tmp_path / "one")
    before, one = states(scheme), (tmp_path / "one").read_bytes()
    [batch] = batches(2, 1, widths=WIDTHS)
    scheme.step(batch)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        with pytest.raises(OSError, match=r"save: File too large\. What was there before is whole"):
            save(scheme, tmp_path / "run")
        with pytest.raises(OSError, match=r"save: File too large\. Nothing of it is left"):
            save(scheme, tmp_path / "new")
        assert list((tmp_path / "new").iterdir()) == []
        (tmp_path / "new").rmdir()
        with pytest.raises(OSError, match="too large"):
            consolidate(tmp_path / "run", tmp_path / "one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert states(load(tmp_path / "run")) == before
    assert len(list((tmp_path / "run").iterdir())) == 2 + 1
    assert (tmp_path / "one").read_bytes() == one
    assert len(list(tmp_path.iterdir())) == 2


def test_an_older_checkpoint_is_read_while_another_is_written(tmp_path: Path) -> None:
    """Until the new index is there the old one counts, whatever has been written beside it."""
    scheme = trained(ZeRO3, 3)
    save(scheme, tmp_path)
    (tmp_path / files.WRITING).touch()
    (tmp_path / "step-00000009-rank-00000-00000000.safetensors").write_bytes(b"not whole yet")
    assert states(load(tmp_path)) == states(scheme)


def test_a_folder_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """Who saves where another is saving is refused, and so is who loads before there is anything."""
    (tmp_path / files.WRITING).touch()
    with pytest.raises(CheckpointError, match="another checkpoint is being written"):
        save(trained(DP, 2), tmp_path)
    with pytest.raises(CheckpointError, match="one is being written"):
        load(tmp_path)


def test_the_command_tells_cuts_and_puts_together(tmp_path: Path) -> None:
    """`zerosim checkpoint`: info says what it is, convert changes the cut and no bit, consolidate makes one file."""
    scheme = trained(HSDP, 4, node=2)
    save(scheme, tmp_path / "a")
    run = CliRunner()
    told = run.invoke(main, ["checkpoint", "info", str(tmp_path / "a")])
    assert told.exit_code == 0, told.output
    assert "after step 2, undamaged" in told.output
    assert "HSDP on 4 ranks in groups of 2" in told.output
    assert all(len(line) <= 80 for line in told.output.splitlines())
    done = run.invoke(
        main, ["checkpoint", "convert", str(tmp_path / "a"), str(tmp_path / "b"), "--ranks", "3", "--scheme", "zero-3"]
    )
    assert done.exit_code == 0, done.output
    again = load(tmp_path / "b")
    assert (again.name, again.ring.size, states(again)) == ("ZeRO-3", 3, states(scheme))
    one = run.invoke(main, ["checkpoint", "consolidate", str(tmp_path / "b"), str(tmp_path / "c.safetensors")])
    assert one.exit_code == 0, one.output
    refused = run.invoke(main, ["checkpoint", "info", str(tmp_path)])
    assert refused.exit_code == 2
    assert "there is no checkpoint here" in refused.output


def test_the_command_writes_over_nothing(tmp_path: Path) -> None:
    """`convert` into another checkpoint, or into its own, is refused, and both stay; a run saves over its own."""
    first, other = trained(ZeRO3, 2), trained(DP, 3)
    for name, scheme in (("a", first), ("b", other)):
        save(scheme, tmp_path / name)
    save(other, tmp_path / "b")
    for out in ("a", "b"):
        before = {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        command = ["checkpoint", "convert", str(tmp_path / "a"), str(tmp_path / out), "--ranks", "4"]
        refused = CliRunner().invoke(main, command)
        assert refused.exit_code == 2
        assert f"{tmp_path / out}: something is there already, and stays. Name a folder" in refused.output
        assert {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()} == before


@pytest.mark.parametrize("made", ["a file", "below a file"])
def test_a_folder_that_cannot_be_made_is_named_in_words(made: str, tmp_path: Path) -> None:
    """Where a file is in the way, the error names the folder that was asked for and says why it cannot be made."""
    (tmp_path / "taken").write_text("mine")
    folder = tmp_path / "taken" / ("" if made == "a file" else "run")
    with pytest.raises(OSError, match=r"save: this folder cannot be made \(.*\): '.*taken") as caught:
        DP(MLP((3, 2)), 2).save(folder)
    assert caught.value.filename == str(folder)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_folder_is_a_path() -> None:
    """What is no path is refused before anything is written."""
    with pytest.raises(TypeError, match=r"save\(folder\): folder must be of type .*; got 5"):
        DP(MLP((3, 2)), 2).save(5)  # type: ignore[arg-type]
