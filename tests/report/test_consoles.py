"""What the lab, corroborate and its frameworks print: the answer first, whole numbers, on screens of any width."""

import io
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

import record
from zerosim.records.frameworks import SCHEMA, Framework, Frameworks, RankSeen
from zerosim.records.real_ranks import CHECKS, Corroboration
from zerosim.records.results import Check, Failure, Results
from zerosim.report import frameworks_console, lab_console, real_ranks_console

WIDTHS = [60, 80, 120]
NAMES = ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def lab(name: str = "lab") -> Results:
    found = record.load(name)
    assert isinstance(found, Results)
    return found


def corroboration() -> Corroboration:
    found = record.load("corroborate")
    assert isinstance(found, Corroboration)
    return found


def on_a_terminal(width: int) -> Console:
    """A screen of that width that shows no colours."""
    return Console(file=io.StringIO(), highlight=False, width=width, force_terminal=True, no_color=True)


def lines(console: Console) -> list[str]:
    """What it shows, without what makes it bold or dim."""
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue()).splitlines()]


def place(printed: list[str], start: str) -> int:
    return next(at for at, line in enumerate(printed) if line.startswith(start))


def failure(check: str, scheme: str = "ZeRO-2", step: int = 3) -> Failure:
    return Failure(
        check=check, scheme=scheme, ranks=32, step=step, rank=5,
        quantity="master of layer 2, element 11, against plain training",
        measured="0.30000001192092896", expected="0.10000000149011612",
    )  # fmt: skip


# -- the lab


@pytest.mark.parametrize("width", WIDTHS)
def test_the_lab_answers_first_and_cuts_no_number(width: int) -> None:
    """Both verdicts stand above the table, whose numbers are all there, and the folder below it."""
    console, found = on_a_terminal(width), lab()
    lab_console.show(found, Path("out"), console)
    printed = lines(console)
    assert max(map(len, printed)) <= width
    assert "…" not in "".join(printed)
    first, second = (place(printed, f"✓ {check} holds: ") for check in Check)
    table = place([line.strip() for line in printed], "data parallel")
    assert first < second < table < place(printed, "written to out")
    for record_, step in found.completed():
        [row] = [line for line in printed if line.strip().startswith(record_.name)]
        assert row.split()[-5:] == [
            f"{sum(step.resident.values()) / found.n_params:.4f}",
            f"{step.peak_without_activations.total / found.n_params:.4f}",
            f"{step.sent():,}",
            f"{step.sent() / (4 * found.n_params):.4f}",
            f"{step.loss:.6f}",
        ]
    if width >= 80:
        assert len(printed) < 20


@pytest.mark.parametrize("width", WIDTHS)
def test_all_that_the_lab_knows_is_said_on_request(width: int) -> None:
    """With ``verbose`` every table is printed, and it too fits."""
    console = on_a_terminal(width)
    lab_console.show(lab(), Path("out"), console, verbose=True)
    printed = lines(console)
    assert max(map(len, printed)) <= width
    text = " ".join(" ".join(printed).split())
    for title in (
        "with activations", "Same training: the largest difference", "As predicted: bytes per rank at rest",
        "at the peak", "bytes that one rank sends per step", "FLOPs per rank and step", "The sweep:",
        "What changes when a rule is broken",
    ):  # fmt: skip
        assert title in text
    assert text.index("✓ as predicted holds") < text.index("Same training: the largest difference")


def test_what_fails_in_the_lab_comes_first_in_lines_of_their_own() -> None:
    """The check that fails, and below it where, in one line each, though they are longer than a screen is wide."""
    console = Console(file=io.StringIO())
    some = [failure(Check.AS_PREDICTED, f"row {step}", step) for step in range(1, 8)]
    lab_console.show(replace(lab(), failures=some), Path("out"), console)
    printed = lines(console)
    at = place(printed, "✗ as predicted FAILS: 7 values differ")
    assert at < place(printed, "✓ same training holds: ")
    assert printed[at + 1 : at + 1 + lab_console.SHOWN] == [
        f"  row {step}, N = 32, step {step}, rank 5: master of layer 2, element 11, against plain training: "
        "measured 0.30000001192092896, expected 0.10000000149011612"
        for step in range(1, 1 + lab_console.SHOWN)
    ]
    assert printed[at + 1 + lab_console.SHOWN] == "  and 2 other kinds, in results.json"


@pytest.mark.parametrize(("count", "says"), [(1, "one value differs"), (2, "2 values differ")])
def test_what_fails_is_counted(count: int, says: str) -> None:
    """One is not many; below it is what it was, and the check that holds comes after."""
    some = [failure(Check.AS_PREDICTED, f"row {step}", step) for step in range(1, 1 + count)]
    lines = list(lab_console.verdicts(replace(lab(), failures=some), 9))
    assert [line.style for line in lines[1:-1]] == ["red"] * count
    first, *others = map(str, lines)
    assert first == f"✗ as predicted FAILS: {says}"
    assert [line.split(",")[0] for line in others[:-1]] == [f"  row {step}" for step in range(1, 1 + count)]
    assert others[-1].startswith("✓ same training holds: ")


def test_who_runs_out_of_memory_is_said_below_the_table() -> None:
    """When, of what, and with how much held; nothing that was not measured is said to hold."""
    console, found = on_a_terminal(120), lab("small_card")
    lab_console.show(found, Path("out"), console)
    printed = lines(console)
    short = found.scheme("ZeRO-3").out_of_memory
    assert short is not None
    assert (
        f"ZeRO-3 runs out of memory in step 1, {short.unit}: {short.band} of {short.asked:,} B, "
        f"with {sum(short.held.values()):,} held"
    ) in printed
    assert sum("before the first step" in line for line in printed) == 3
    assert [place(printed, f"- {check} not measured: ") for check in Check]
    assert not any(line.startswith("✓") for line in printed)


# -- real ranks


@pytest.mark.parametrize("width", WIDTHS)
def test_corroborate_answers_first_and_cuts_no_number(width: int) -> None:
    """The five verdicts stand above one table, with a line for each scheme and way of sending."""
    console, found = on_a_terminal(width), corroboration()
    real_ranks_console.show(found, console)
    printed = lines(console)
    assert max(map(len, printed)) <= width
    assert "…" not in "".join(printed)
    table = place([line.strip() for line in printed], "data parallel")
    assert all(place(printed, f"✓ {check} hold") < table for check in CHECKS)
    runs = [run for run in found.runs if (run.scheme, run.collectives) == ("ZeRO-3", "ring")]
    compared = sum(sum(run.compared.values()) for run in runs)
    [first, *_] = [line.split() for line in printed if line.split()[:2] == ["ZeRO-3", "ring"]]
    assert first[2:6] == [f"{compared:,}", "0", "3.00", "3.00"]
    if width >= 80:
        assert len(printed) < 32


def test_all_that_corroborate_knows_is_said_on_request() -> None:
    """With ``verbose`` the tables stand below the verdicts, and fit."""
    console = on_a_terminal(80)
    real_ranks_console.show(corroboration(), console, verbose=True)
    printed = lines(console)
    assert max(map(len, printed)) <= 80
    for title in ("Elements whose bits differ", "Bytes that the busiest rank sends", "Milliseconds of a step"):
        assert place(printed, title) > place(printed, "✓ memory holds")


def test_what_fails_on_real_ranks_comes_first() -> None:
    """The check that fails and the cause in one line, above what holds; its number is marked in the table."""
    found = corroboration()
    [first, *others] = found.runs
    console = Console(file=io.StringIO())
    runs = [replace(first, differing={"params": 3}), *others]
    broken = replace(found, failures=[failure("bits", first.scheme)], runs=runs)
    real_ranks_console.show(broken, console)
    printed = lines(console)
    at = place(printed, "✗ bits FAIL: ")
    assert printed[at + 1].startswith("  bits: data parallel, N = 32, step 3, rank 5: ")
    assert printed[at + 1].endswith("expected 0.10000000149011612")
    assert at < place(printed, "✓ start holds")
    [row] = [line.split() for line in printed if line.split()[:3] == ["data", "parallel", "ring"]]
    assert row[4] == "3"


def test_bytes_that_no_kernel_counted_hold_only_where_measured() -> None:
    """Where a meter is missing it is said beside the verdict, and what nothing counted is a question mark."""
    found = corroboration()
    for rank in (rank for run in found.runs for rank in run.ranks):
        rank.sent.kernel.clear()
        rank.received.kernel.clear()
    console = on_a_terminal(80)
    why = "this is no Linux"
    real_ranks_console.show(replace(found, unmeasured={"process": why, "sockets": why}), console)
    printed = lines(console)
    assert place(printed, "✓ bytes hold where measured: ")
    assert [line.split()[-1] for line in printed if " ring " in line] == ["?"] * len(NAMES)


# -- the frameworks


def test_frameworks_in_short() -> None:
    """What each behaves like, holds and sends, in a line; those that were not run together, with the reason."""
    found = corroboration()
    seen = RankSeen(
        held={"params": 8000}, rest={}, peak={"from before the step": 12000}, peak_phase="forward", exact=False,
        asked=6000, moved=9000, framing=0, kernel={},
    )  # fmt: skip
    kept = Framework("FSDP2, kept", "FSDP2", "fp32", "fp32", ranks=[seen], scheme="ZeRO-3, kept")
    absent = [Framework(name, "DeepSpeed", "fp32", "fp32", "not installed") for name in ("DeepSpeed 1", "DeepSpeed 2")]
    shown = Frameworks(
        schema=SCHEMA, versions={}, settings=found.settings, steps=1, n_params=1000, ended="", rows=[kept, *absent],
        failures=[failure("ranks", "FSDP2, kept")],
    )  # fmt: skip
    console = on_a_terminal(80)
    frameworks_console.show(shown, console)
    printed = lines(console)
    at = place(printed, "✗ ranks FAIL: ")
    assert at < place(printed, "- gradients not measured: ")
    assert printed[at + 1].startswith("  FSDP2, kept, N = 32, step 3, rank 5: ")
    # P is 1000 x 4 B x 3/4 = 3000 B.
    [row] = [line.split() for line in printed if "≤" in line]
    assert " ".join(row) == "FSDP2, ZeRO-3, kept 8.00 ≤ 12.00 2.00 3.00"
    assert "Not run (not installed): DeepSpeed 1; DeepSpeed 2." in printed


def test_a_thousand_steps_are_a_screen() -> None:
    """However many steps there were, the tables have as many lines, with those steps that something happened in."""

    def longer(found: Results, steps: int) -> Results:
        schemes = [
            replace(each, steps=[replace(each.steps[0], step=step + 1) for step in range(steps)])
            for each in found.schemes
        ]
        alike = [each for each in found.differences if each.step == 1]
        differences = [
            replace(each, step=step + 1, differing=each.differing | {"params": int(step + 1 == 500)})
            for step in range(steps)
            for each in alike
        ]
        return replace(found, schemes=schemes, differences=differences)

    lengths = {}
    for steps in (100, 1000):
        console = on_a_terminal(80)
        lab_console.show(longer(lab("lab_mixed"), steps), Path("out"), console, verbose=True)
        lengths[steps] = len(lines(console))
    assert lengths[1000] <= lengths[100] + 1
    printed = lines(console)
    shown = [line.split()[0] for line in printed if re.match(r" +\d+ +0 \(", line) or " (4) " in line]
    assert shown == ["1", "2", "3", "4", "500", "997", "998", "999", "1000"]
    assert any("Of 1,000 steps 9 are shown" in line for line in printed)
