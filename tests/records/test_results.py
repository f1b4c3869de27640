"""The results file: whole or not at all, and read only if it is sound."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers import plain_lab
from zerosim import stages
from zerosim.options import LossScale
from zerosim.records import results
from zerosim.records.files import ResultsError, write_whole, writing_whole
from zerosim.records.results import Failure, Settings

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


@pytest.fixture(scope="module")
def found() -> results.Results:
    """A small lab run."""
    return plain_lab(
        Settings(
            ranks=3, steps=2, batch=2, seed=1, model_seed=0, precision="mixed", wire="fp32", gather="layer",
            data="noise", capacity=None, widths=[5, 7, 3],
        )
    )  # fmt: skip


def test_what_was_saved_is_what_is_loaded(found: results.Results, tmp_path: Path) -> None:
    """Saving and loading changes nothing, and the file is JSON that says its schema."""
    path = tmp_path / "results.json"
    results.save(found, path)
    assert results.load(path) == found
    assert json.loads(path.read_text())["schema"] == results.SCHEMA


def test_a_log_says_which_ring_each_message_took(tmp_path: Path) -> None:
    """Within nodes nothing leaves, among replicas every rank's bytes do, in the ring of all one rank's."""
    rows = stages.ZeRO3, stages.HSDP
    settings = Settings(
        ranks=6, steps=1, batch=1, seed=1, model_seed=0, precision="mixed", wire="fp32", gather="layer",
        data="noise", capacity=None, widths=[5, 7], node=3,
    )  # fmt: skip
    results.save(plain_lab(settings, rows=rows), tmp_path / "results.json")
    every, groups = results.load(tmp_path / "results.json").schemes
    leaves = [
        [event.outside // event.nbytes for event in each.events if event.kind == "send"] for each in (every, groups)
    ]
    assert leaves == [[1, 1, 1], [0, 0, 0, 3, 3]]  # gather twice and reduce; and over the two replicas an all-reduce
    for record in (every, groups):
        assert sum(event.outside for event in record.events) == record.steps[-1].node_outside()


def test_a_run_that_diverged_can_be_read(found: results.Results, tmp_path: Path) -> None:
    """A difference that is no finite number is read as what it was."""
    worst = msgspec.structs.replace(found.differences[0], largest={"params": float("nan"), "master": float("inf")})
    results.save(msgspec.structs.replace(found, differences=[worst]), tmp_path / "results.json")
    largest = results.load(tmp_path / "results.json").differences[0].largest
    assert str(largest) == "{'params': nan, 'master': inf}"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    found: results.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the last move fails, the file that was there stands and no part of the new one is left."""
    path = tmp_path / "results.json"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results.save(found, path)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("results.json", b"old")]


def test_a_file_is_written_beside_the_one_that_it_replaces(tmp_path: Path) -> None:
    """Its parts lie in the same folder, as a file cannot be moved at once from elsewhere, and none stays there."""
    with writing_whole(tmp_path / "results.json") as file:
        [part] = tmp_path.iterdir()
        assert part.name.startswith(".results.json.")
        file.write(b"new")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("results.json", b"new")]


def test_a_file_can_be_read_by_people(found: results.Results) -> None:
    """A field has a line of its own, and the last line ends."""
    lines = results.encode(found).splitlines(keepends=True)
    assert lines[0] == b"{\n"
    assert lines[1].startswith(b' "schema": ')
    assert lines[-1] == b"}\n"


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_field_that_is_given_twice_is_named(tmp_path: Path, name: str) -> None:
    """A reader that takes the other of the two would read something else, so neither is taken."""
    path = tmp_path / "results.json"
    path.write_text(f'{{"one": 1, "two": 2, "{name}": 3}}')
    with pytest.raises(ResultsError, match=f"'{name}' is given twice"):
        results.load(path)


@pytest.mark.parametrize(("rank", "whose"), [(-1, "every rank"), (0, "rank 0"), (3, "rank 3")])
def test_a_failure_says_where_and_both_values(rank: int, whose: str) -> None:
    """The check, the scheme, N, the step, whose it is, the quantity, what was measured and what was expected."""
    failure = Failure("as predicted", "ZeRO-1", 5, 2, rank, "bytes of grads", "7", "11")
    assert str(failure) == f"as predicted: ZeRO-1, N = 5, step 2, {whose}: bytes of grads: measured 7, expected 11"


@pytest.mark.parametrize("asked", [{}, {"clip": 1.0}, {"loss_scale": LossScale()}, {"uneven": True}], ids=str)
def test_steps_have_more_to_tell_where_more_was_asked_for(found: results.Results, asked: dict[str, Any]) -> None:
    """With clipping, a loss scale or uneven batches: the steps of the first scheme of each order; here is one order."""
    changed = msgspec.structs.replace(found, settings=msgspec.structs.replace(found.settings, **asked))
    first = found.schemes[0]
    assert changed.stepwise() == ([(first, step) for step in first.steps] if asked else [])


def test_a_check_that_has_compared_nothing_says_why(found: results.Results) -> None:
    """One scheme, none that ended a step, no prediction; where something was compared there is nothing to say."""

    def why(check: str, **changes: Any) -> str:
        return msgspec.structs.replace(found, **changes).nothing_compared(check)

    same, predicted = "same training", "as predicted"
    none = [msgspec.structs.replace(each, steps=[]) for each in found.schemes]
    unpredicted = [msgspec.structs.replace(each, prediction=None) for each in found.schemes]
    assert [why(check) for check in (same, predicted)] == ["", ""]
    assert why(same, differences=[]) == "no two schemes completed a step"
    assert why(same, differences=[], schemes=found.schemes[:1]) == "there is one scheme"
    assert why(predicted, schemes=unpredicted) == (
        "nothing was predicted: the lab and zs.compare do, for an MLP under the lab's options"
    )
    module = msgspec.structs.replace(found.settings, model="TorchModel", widths=[])
    assert why(predicted, schemes=unpredicted, settings=module) == (
        "nothing was predicted: there are closed forms for zs.MLP alone"
    )
    assert why(predicted, schemes=none) == ""
    assert why(predicted, schemes=none, sweep=[]) == "no step was completed; that none would be is as predicted"


def _truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _edited(edit: Any) -> Any:
    def damage(content: bytes) -> bytes:
        record = json.loads(content)
        edit(record)
        return json.dumps(record).encode()

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncated, "not a whole record"),
        (lambda _: b"", "not a whole record"),
        (lambda _: b"[1, 2]", "its schema is None"),
        (lambda _: b"[" * 100_000, "not a whole record"),
        (lambda _: b"\xff\xfe\x00", "not a whole record"),
        (lambda _: b"{}", "its schema is None"),
        (_edited(lambda record: record.update(schema="zerosim.lab/1")), "its schema is 'zerosim.lab/1'"),
        (_edited(lambda record: record.pop("sweep")), "sweep"),
        (_edited(lambda record: record["settings"].update(ranks="three")), r"\$\.settings\.ranks"),
        (_edited(lambda record: record["settings"].update(unknown=1)), "unknown"),
        (_edited(lambda record: record["sweep"][0].update(peak=1.5)), r"\$\.sweep"),
    ],
    ids=["truncated", "empty", "a list", "too deep", "not text", "no schema", "older", "a field missing",
         "a word for a number", "a field too many", "half a byte"],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_refused_with_the_reason(
    found: results.Results, tmp_path: Path, damage: Any, reason: str
) -> None:
    """What is not a whole, sound record of this schema is not read, and the error says why and names the file."""
    path = tmp_path / "results.json"
    path.write_bytes(damage(results.encode(found)))
    with pytest.raises(ResultsError, match=reason) as error:
        results.load(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there gets an error that names it."""
    with pytest.raises(ResultsError, match=r"nothing\.json"):
        results.load(tmp_path / "nothing.json")


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    """Writing to what is there and no file is refused, and leaves it as it was and nothing beside it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no file"):
        write_whole(pipe, b"content")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_folder_that_is_not_there_is_said_of_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """Not of the temporary one beside it, whose name says nothing to anybody."""
    path = tmp_path / "none" / "own.json"
    with pytest.raises(FileNotFoundError, match=rf"its folder cannot be written to .*: '{re.escape(str(path))}'$"):
        write_whole(path, b"")
