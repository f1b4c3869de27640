"""The benchmarks: all sides train the same, one that does not is caught, and the page is what was found."""

import argparse
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from helpers import some_by_night
from zerosim.kernels import choice
from zerosim.model import MLP
from zerosim.schemes import SCHEMES, Stage

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))  # scripts, each of which finds the others there

import bench  # noqa: E402
import chart  # noqa: E402
import floor  # noqa: E402
import rivals  # noqa: E402
import write_tables  # noqa: E402
from cases import PRECISIONS, Case, Job  # noqa: E402
from line import Side, SideFailed  # noqa: E402
from rivals import FLOOR, PLAIN, ROSTER, ZEROSIM, Rival  # noqa: E402

TINY = Case("tiny", (7, 11, 5), 3, 2, check=3, rounds=2)  # no layer divides by 3 ranks
JOBS = [TINY.job(stage.name, precision) for precision in PRECISIONS for stage in SCHEMES]


def package_losses(job: Job, steps: int) -> list[float]:
    """What the package's losses are, in this process."""
    [stage] = [stage for stage in SCHEMES if stage.name == job.scheme]
    run = stage(MLP(job.widths), job.ranks, precision=job.precision)
    return [run.step(list(zip(*job.batch(), strict=True))) for _ in range(steps)]


# By day what the package is measured from, and itself, with the compiled kernels and without.
BY_DAY = [ROSTER[name] for name in (FLOOR, ZEROSIM, PLAIN)]


@pytest.mark.parametrize("rival", some_by_night(ROSTER.values(), BY_DAY.__contains__), ids=lambda rival: rival.name)
def test_every_side_trains_the_same(rival: Rival) -> None:
    """Each side that can be run here has the package's losses under every scheme and precision, to rounding."""
    if not rival.installed:
        pytest.skip(f"{rival.needs} is not installed")
    with Side(rival.name, rival.module, variables=rival.environment) as side:
        for job in JOBS:
            side.train(job)
            seconds, losses = side.step(5)
            assert seconds > 0
            ours = package_losses(job, 5)
            bench.check(job, {ZEROSIM: ours, rival.name: losses})
            assert len(set(losses)) == 5, "it does train"
            if rival.name in (ZEROSIM, PLAIN):
                assert losses == ours


@pytest.mark.parametrize("stage", SCHEMES, ids=lambda stage: stage.name)
def test_the_floor_trains(stage: Stage) -> None:
    """The floor that steps are timed against has the package's losses in fp32, to rounding."""
    job = Job(stage.name, "fp32", (7, 11, 4), 5, 3)
    x, y = job.batch()
    run = floor.Floor(stage.name, job.widths, job.ranks, job.rows)
    theirs = [run.step(x, y) for _ in range(6)]
    # Another order of summation: the losses are of order one, and fp32 rounds at 6e-8.
    assert np.allclose(theirs, package_losses(job, 6), rtol=0, atol=1e-5)
    assert len(set(theirs)) == 6, "it does train"


BROKEN = """
from contextlib import contextmanager
from line import serve
from floor import Floor

@contextmanager
def build(job):
    floor, (x, y) = Floor(job.scheme, job.widths, job.ranks, job.rows), job.batch()
    {fault}
    yield lambda steps: [floor.step(x, y) for _ in range(steps)]

serve(build, "numpy")
"""


def side_with(fault: str, folder: Path) -> Side:
    """A floor with something wrong."""
    (folder / "broken.py").write_text(BROKEN.format(fault=fault))
    return Side("broken", "broken", path=[folder, FOLDER])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("y[1] = y[0]", id="a rank's targets", marks=pytest.mark.slow),
        pytest.param("x *= 1.01", id="its inputs", marks=pytest.mark.slow),
        pytest.param("floor.updates = 1", id="a step count", marks=pytest.mark.slow),
        pytest.param("floor.copies[-1] *= 1.01", id="one rank's weights"),
        pytest.param("floor.step = lambda x, y: 0.0", id="no training at all", marks=pytest.mark.slow),
        pytest.param("floor.step = lambda x, y: float('nan')", id="no number"),
    ],
)
def test_a_side_that_trains_otherwise_is_not_timed(fault: str, tmp_path: Path) -> None:
    """A side whose losses are not the package's stops the run, by name, before it is timed."""
    ticks: list[None] = []
    with Side(ZEROSIM, ROSTER[ZEROSIM].module) as ours, side_with(fault, tmp_path) as theirs:
        job = TINY.job("data parallel", "fp32")
        with pytest.raises(RuntimeError, match=r"^broken and zerosim train apart under data parallel in fp32"):
            bench.measure(TINY, job, [ours, theirs], lambda: ticks.append(None))
    assert len(ticks) == 2, "both trained, and no turn was taken"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise ValueError('no such layer')", "no such layer"),
        ("import os; os._exit(3)", "answered ''"),
        ("x = x[:, :, 1:]", "complained"),
    ],
)
def test_a_side_that_fails_says_why(fault: str, reason: str, tmp_path: Path) -> None:
    """A side that ends without an answer is named, with what it complained of."""
    with side_with(fault, tmp_path) as side, pytest.raises(SideFailed, match=rf"(?s)^broken: .*{reason}"):
        bench.measure(TINY, JOBS[0], [side], lambda: None)


def test_a_row_is_the_ratio_of_turns() -> None:
    """A measured row has every side, the floor's ratio to itself is one, and the package's losses are its own."""
    ticks: list[None] = []
    with Side(FLOOR, ROSTER[FLOOR].module) as theirs, Side(ZEROSIM, ROSTER[ZEROSIM].module) as ours:
        row = bench.measure(TINY, JOBS[0], [theirs, ours], lambda: ticks.append(None))
    assert (row.case, row.scheme, row.ranks, row.params) == ("tiny", "data parallel", 3, 7 * 11 + 11 + 11 * 5 + 5)
    assert list(row.sides) == [FLOOR, ZEROSIM]
    assert row.sides[FLOOR].ratio == (1, 1, 1)
    assert row.sides[ZEROSIM].apart == 0 < row.sides[FLOOR].apart < 1e-5
    low, middle, high = row.sides[ZEROSIM].ratio
    assert 0 < low <= middle <= high
    assert len(ticks) == 2 + TINY.rounds


def test_an_absent_rival_is_skipped_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed is left out, and said to be."""
    monkeypatch.setitem(rivals.ROSTER, "absent", Rival("absent", "rivals.absent", "no_such_package", ""))
    said = io.StringIO()
    assert bench.present(["absent", FLOOR], Console(file=said)) == [FLOOR]
    assert said.getvalue().startswith("absent: skipped, no_such_package is not installed")


def test_a_footprint_is_what_the_ranks_hold_and_more() -> None:
    """What the ranks hold is the ledger's, times the ranks; where the kernel says, the process holds at least that."""
    job = Job("ZeRO-2", "mixed", (211, 307, 101), 5, 3)
    found = bench.footprint(job, 2, None)
    run = SCHEMES[2](MLP(job.widths), job.ranks, precision="mixed")
    batch = list(zip(*job.batch(), strict=True))
    losses = [run.step(batch) for _ in range(2)]
    assert losses[0] != losses[1]
    assert found["peak_sum"] == 5 * max(report.peak.total for report in run.reports)
    assert found["resident_sum"] == 5 * run.ledger.total
    assert found["sent_per_rank"] == run.bytes_comm_per_rank() // 2
    assert len(found["seconds"]) == 2
    if sys.platform == "linux":
        assert found["peak_sum"] < found["process"] < found["process_in_all"]


def test_a_diverged_footprint_is_refused() -> None:
    """A model whose numbers overflow is not recorded as if it had trained."""
    with pytest.raises(RuntimeError, match="diverged"):
        bench.footprint(TINY.job("ZeRO-3", "mixed"), 4, None, lr=1e30)


# -- the page


def test_the_page_is_what_was_recorded() -> None:
    """benchmarks/README.md is what the records beside it render to, and its chart is there."""
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == write_tables.page(write_tables.recorded())
    assert (FOLDER / write_tables.CHART).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_records_are_of_what_was_timed(precision: str) -> None:
    """A record is of the precision in its name and has every scheme, beside the floor, in every case."""
    record = json.loads(write_tables.NAMES[precision].read_text())
    assert record["precision"] == precision
    names = [stage.name for stage in SCHEMES]
    cases = list(dict.fromkeys(row["case"] for row in record["steps"]))
    assert cases[0] == "mission"
    assert [(row["case"], row["scheme"]) for row in record["steps"]] == [
        (case, name) for case in cases for name in names
    ]
    assert all(list(row["sides"])[:2] == [FLOOR, ZEROSIM] for row in record["steps"])


def some_row(scheme: str, **ms: float) -> dict[str, Any]:
    """A row as recorded, with the floor at one millisecond."""
    times = {FLOOR: 1.0} | {name.replace("_", " "): value for name, value in ms.items()}
    sides = {name: {"ms": value, "ratio": [value] * 3, "apart": 0.0} for name, value in times.items()}
    return {"case": "mission", "scheme": scheme, "ranks": 32, "params": 1, "target": 3, "sides": sides}


def some_record(*rows: dict[str, Any]) -> dict[str, Any]:
    """A record as kept."""
    machine = {"cpu": "a processor", "busy_before": 0.0}
    return {"machine": machine, "versions": {"numpy": "2"}, "date": "2026-01-02", "seconds": 3, "steps": list(rows)}


def test_a_missed_target_is_named() -> None:
    """The page says which targets are met, and under which schemes they are not."""
    met = some_record(
        some_row("ZeRO-1", zerosim=2, gloo_processes=400), some_row("ZeRO-2", zerosim=3, gloo_processes=9)
    )
    text = "\n".join(write_tables.tables({"fp32": met}))
    assert "- Within 3 times the floor, the target: under every scheme." in text
    assert "- Ahead of gloo processes, the target: under every scheme, by 3.00 to 200 times." in text
    assert "| ZeRO-1 | 1.00 (1.00) | 2.00 (2.00) | 400 (400) |" in text
    missed = some_record(
        some_row("ZeRO-1", zerosim=4, gloo_processes=3), some_row("ZeRO-2", zerosim=2, gloo_processes=9)
    )
    text = "\n".join(write_tables.tables({"fp32": missed}))
    assert "- Within 3 times the floor, the target: not under ZeRO-1 (4.00)." in text
    assert "- Ahead of gloo processes, the target: not under ZeRO-1, by" in text


def test_memory_may_be_half_as_much_again_or_a_little_more() -> None:
    """A process is held to 1.5 times what its ranks hold, a small one to 4 MB beyond it."""
    rows = [
        {"case": "small", "scheme": "ZeRO-1", "peak_sum": 1_000_000, "process": 5_000_000},
        {"case": "small", "scheme": "ZeRO-2", "peak_sum": 1_000_000, "process": 5_000_001},
        {"case": "large", "scheme": "ZeRO-1", "peak_sum": 100_000_000, "process": 150_000_000},
        {"case": "large", "scheme": "ZeRO-2", "peak_sum": 100_000_000, "process": 150_000_001},
    ]
    record = some_record() | {"rows": rows}
    text = "\n".join(write_tables.tables({"memory": record}))
    assert "the ranks hold, or 4 MB above it, the target: not under ZeRO-2 of small, ZeRO-2 of large." in text


def test_targets_are_those_of_the_row() -> None:
    """Each row has the target of its case, precision and scheme; one that is timed on the side has none."""
    assert [Job(stage.name, "mixed", (7, 5), 3, 2).target("mission") for stage in SCHEMES] == [0.7, 1.6, 1.6, 1.9]
    assert Job("ZeRO-3", "fp32", (7, 5), 3, 2).target("N=256") == 3
    assert Job("ZeRO-3", "fp32", (7, 5), 3, 2).target("tiny") is None


def test_what_has_become_slower_shows() -> None:
    """Beside what is recorded: a ratio that is larger by more than a tenth, with quartiles that are apart."""
    kept = some_record(
        some_row("ZeRO-1", zerosim=2.0), some_row("ZeRO-2", zerosim=2.0), some_row("ZeRO-3", zerosim=2.0)
    )
    now = some_record(some_row("ZeRO-1", zerosim=2.1), some_row("ZeRO-2", zerosim=2.5), some_row("ZeRO-3", zerosim=2.5))
    now["steps"][2]["sides"][ZEROSIM]["ratio"] = [1.9, 2.5, 2.6]
    lines, slower = write_tables.beside(now, kept)
    assert slower
    assert lines[2:] == [
        "| mission | ZeRO-1 | zerosim | 2.00 | 2.10 |  |",
        "| mission | ZeRO-2 | zerosim | 2.00 | 2.50 | **slower** |",
        "| mission | ZeRO-3 | zerosim | 2.00 | 2.50 |  |",
    ]
    assert write_tables.beside(kept, kept)[1] is False


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_a_side_is_timed_by_either_clock(clock: str) -> None:
    """A side that waits takes time on the wall, and none of its own."""
    with Side(FLOOR, ROSTER[FLOOR].module, clock=clock) as side:
        side.train(TINY.job("ZeRO-1", "fp32"))
        assert side.step(3)[0] > 0
        assert side.libraries == {"numpy": np.__version__}


def test_a_busy_machine_shows() -> None:
    """Times that were taken beside other work say so."""
    record = some_record(some_row("ZeRO-1", zerosim=2))
    assert "not idle" not in "\n".join(write_tables.tables({"fp32": record}))
    record["machine"]["busy_before"] = 0.6
    assert "not idle, but 60% busy" in "\n".join(write_tables.tables({"fp32": record}))


def test_the_bars_are_what_was_recorded() -> None:
    """The chart has a bar for every side and scheme, as high as its time, on a log axis."""
    record = some_record(some_row("ZeRO-1", zerosim=2, JAX_vmapped=7), some_row("ZeRO-3", zerosim=3, JAX_vmapped=5))
    [axes] = chart.figure({"fp32": record}).axes
    heights = [[bar.get_height() for bar in container] for container in axes.containers]
    assert heights == [[1, 2, 7], [1, 3, 5]]
    assert axes.get_yscale() == "log"


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("most", "code"), [(1e9, 0), (0, 1)])
def test_groups_beside_none(most: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with groups is timed beside one without; 1 if it takes too long."""
    monkeypatch.setattr(bench, "CASES", {"tiny": Case("tiny", (7, 11, 5), 16, 2, rounds=1)})
    monkeypatch.setattr(bench, "TURN", 1e-4)
    monkeypatch.setattr(bench, "GROUPED", most)
    monkeypatch.setattr(choice, "installed", lambda: False)  # compiling takes longest
    options, printed = argparse.Namespace(cases=["tiny"], parts=["mixed", "memory"]), io.StringIO()
    assert bench.groups(options, Console(file=printed, width=200)) == code
    [line] = printed.getvalue().splitlines()
    assert re.fullmatch(r"tiny, mixed, numpy: ZeRO-3 .* ms, HSDP .* ms, .* times \(quartiles .* and .*\)", line)


@pytest.mark.parametrize("argument", ["--parts=fp64", "--cases=N=3", "--rivals=pencil", "--schemes=ZeRO-4"])
def test_unknown_choices_are_refused(
    argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line takes what it knows."""
    monkeypatch.setattr(sys, "argv", ["bench.py", argument])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "invalid choice" in capsys.readouterr().err
