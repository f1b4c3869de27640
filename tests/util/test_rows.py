"""Rows by name: what callers say for a row, from Python and in a terminal."""

from typing import Any

import pytest

import zerosim as zs
from zerosim.stages import DP, Stage, ZeRO1, ZeRO3
from zerosim.util import rows

pytestmark = pytest.mark.usefixtures("as_users_call_it")


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("ZeRO-1", ZeRO1), ("zero-1", ZeRO1), ("zero_1", ZeRO1), ("ZERO1", ZeRO1), ("dp", DP), ("data parallel", DP),
        ("Data-Parallel", DP), ("zero 3", ZeRO3), ("mine=optimizer,grads", Stage("mine", optimizer=True, grads=True)),
        ("bare =", Stage("bare")), ("ZeRO-1 = optimizer, grads", Stage("ZeRO-1", optimizer=True, grads=True)),
    ],
)  # fmt: skip
def test_schemes_are_known_by_name(text: str, row: Stage) -> None:
    """Case, hyphens and spaces do not matter, and a row of one's own says what it shards."""
    assert rows.named(text) == row
    assert rows.one("zs.dry", "row", text) == row


def test_a_row_alone_needs_no_list() -> None:
    """Rows, names and both in one list are taken alike, and so is one of either."""
    assert rows.several("compare", "rows", [ZeRO1, "zero-3"]) == [ZeRO1, ZeRO3]
    assert rows.several("compare", "rows", "zero-3") == rows.several("compare", "rows", ZeRO3) == [ZeRO3]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("zero-4", ValueError, r"^dry\(row\): no scheme is called 'zero-4'. There are data parallel, ZeRO-1"),
        ("mine=grads", ValueError, r"^dry\(row\): Stage 'mine': a rank that lacks"),
        (3, TypeError, r"^dry\(row\): a row, as in zs.ZeRO3, or the name of one, as in 'zero-3', is needed; got 3"),
        (None, TypeError, r"is needed; got None"),
    ],
)
def test_what_is_no_row_is_refused(value: Any, error: type[Exception], message: str) -> None:
    """In the words of the call."""
    with pytest.raises(error, match=message):
        rows.one("dry", "row", value)


def test_every_call_that_takes_a_row_takes_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """compare, dry, load and plan: what they do is what they do with the row itself."""
    monkeypatch.chdir(tmp_path)
    model, batches = zs.MLP((5, 7, 3)), zs.batches(2, widths=(5, 3))
    alone = zs.compare(model, batches, ranks=2, rows="zero3").results
    assert [record.row for record in alone.schemes] == [ZeRO3]
    assert [each.name for each in zs.compare(model, batches, ranks=2, rows=ZeRO3).results.schemes] == ["ZeRO-3"]
    assert zs.dry(model, "zero3", ranks=4).peak == zs.dry(model, ZeRO3, ranks=4).peak
    zs.ZeRO1(model, ranks=2).save("saved")
    assert zs.load("saved", "zero3").stage == ZeRO3
    for call in (
        lambda: zs.compare(model, batches, ranks=2, rows=["zero4"]),
        lambda: zs.dry(model, "zero4", ranks=4),
        lambda: zs.load("saved", "zero4"),
        lambda: zs.plan([5, 7, 3], gpus=2, memory="1MB", rows="zero4"),
    ):
        with pytest.raises(ValueError, match=r"^(compare|dry|load|plan)\(rows?\): no scheme is called 'zero4'"):
            call()
    assert {cell.name for cell in zs.plan([5, 7, 3], gpus=2, memory="1MB", rows="zero3").record.cells} == {"ZeRO-3"}
