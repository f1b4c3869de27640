"""docs/rows.md: what its tables say is what is measured, and what it shows runs."""

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.text import Text

from helpers import draw
from zerosim import stages
from zerosim.cli import main as cli
from zerosim.counts import Report
from zerosim.model import MLP
from zerosim.report import plots
from zerosim.stages import ROWS, Stage

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

PAGE = Path(__file__).parents[2] / "docs" / "rows.md"
TEXT = PAGE.read_text(encoding="utf-8")
P = 64 * 128 + 128  # of one layer, which 32 ranks divide
S, D = 8, 4
N = S * D


def table(head: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    lines = TEXT[TEXT.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ROWS_TABLE = {cells[0].strip("`"): cells[1:] for cells in table("| row | optimizer")}


def worth(formula: str) -> float:
    """What a formula in N, S, D and f comes to, such as 4 + 12/S or 2f(D)/S."""
    assert re.fullmatch(r"[\df()NSD/+ ]*", formula)
    names = {"N": N, "S": S, "D": D, "f": lambda k: (k - 1) / k}
    return float(eval(re.sub(r"(\d)f", r"\1*f", formula), {"__builtins__": {}}, names))


def row_of(name: str) -> Stage:
    row = getattr(stages, name)
    assert isinstance(row, Stage)
    return row


def report_of(row: Stage) -> Report:
    scheme = row(MLP((64, 128)), N, node=S)
    scheme.step(draw(N, 1, (64, 128)))
    return scheme.reports[-1]


def test_every_row_has_its_line() -> None:
    """Those that ship, under the names that Python has for them, and over whom each is sharded."""
    assert {row_of(name) for name in ROWS_TABLE} == set(ROWS)
    assert len(ROWS_TABLE) == len(ROWS)
    for name, (over, *_) in ROWS_TABLE.items():
        row = row_of(name)
        assert over == f"{row.optimizer}, {row.grads}, {row.params}"


@pytest.mark.parametrize("name", ROWS_TABLE)
def test_a_row_holds_and_sends_what_the_table_says(name: str) -> None:
    """On the card, in the ring of all ranks, within the group and between groups, of a bucket that all divide."""
    report, (_, card, every, within, between, _) = report_of(row_of(name)), ROWS_TABLE[name]
    assert sum(report.resident.values()) == worth(card) * P
    sent = np.sum([moved.sent for moved in report.traffic.values()], axis=0)
    outside = np.sum([moved.outside for moved in report.traffic.values()], axis=0)
    assert sent.tolist() == [(worth(every) + worth(within) + worth(between)) * P * 4] * N
    # Of what a ring of all sends, the rank at a node's edge sends all outward, and the others nothing.
    at_edge = (worth(every) + worth(between)) * P * 4
    assert outside.tolist() == [at_edge if rank % S == 0 else worth(between) * P * 4 for rank in range(N)]


@pytest.mark.parametrize(
    ("name", "band", "formula"),
    [("ZeRO3Kept", "gathered params", "2"), ("HSDPKept", "gathered params", "2"), ("HPZ", "second params", "2/S")],
)
def test_what_stays_from_forward_to_backward(name: str, band: str, formula: str) -> None:
    """2 bytes per parameter, or 2/S as a second copy."""
    highest = report_of(row_of(name)).peak.by_band
    assert f"another {formula} bytes" in TEXT or f"`{name}` {formula}" in TEXT
    assert highest[band] == worth(formula) * P


@pytest.mark.parametrize(
    ("name", "host", "link"), [("Offload1", "12/N", "4/N"), ("Offload2", "14/N", "4/N"), ("Infinity", "16/N", "6/N")]
)
def test_what_the_host_holds_and_what_crosses_its_link(name: str, host: str, link: str) -> None:
    """As the paragraph under the table says."""
    assert "12/N, 14/N and 16/N\nbytes on the host, and copy 4/N, 4/N and 6/N bytes" in TEXT
    report = report_of(row_of(name))
    assert sum(report.host.values()) == worth(host) * P
    assert sum(report.copies.values()) == worth(link) * P


def test_groups_of_one_and_of_all_ranks() -> None:
    """The plain rows that the second table names hold what those with groups do, and send it alike."""
    for name, *plain in table("| row | S = 1"):
        for node, other in zip((1, 4), plain, strict=True):
            reports = []
            for each in (name, other):
                scheme = row_of(each.strip("`"))(MLP((7, 5)), 4, node=node)
                scheme.step(draw(4, 1, (7, 5)))
                reports.append(scheme.reports[-1])
            one, another = reports
            assert (one.resident, one.peak, one.sent_by_collective()) == (
                another.resident, another.peak, another.sent_by_collective(),
            )  # fmt: skip


def test_the_page_runs() -> None:
    """What it computes comes out as it says."""
    with np.errstate(all="warn"):
        assert doctest.testfile(str(PAGE), module_relative=False) == (0, 6)


def test_a_fifth_scheme_in_ten_lines() -> None:
    """The row is named, trains, and holds what every check asks, in the lab and where messages lose an eighth."""
    [code] = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if ">>>" not in block]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith("from")]) <= 10
    names: dict[str, Any] = {}
    exec(code, names)
    mine, found = names["mine"], names["found"]
    assert [record.name for record in found.schemes] == ["data parallel", "HSDP", "mine"]
    assert mine not in ROWS
    master, params, grads = (names["run"].buckets[0].states[band].shape[1] for band in ("master", "params", "grads"))
    assert (params // master, params // grads) == (8, 4)


def test_the_commands_that_it_shows_are_understood() -> None:
    """Every option and value of every command line."""
    lines = re.findall(r"`zerosim (.*?)`", TEXT)
    assert len(lines) == 3
    for command, *options in map(shlex.split, lines):
        cli.main.commands[command].make_context(command, options)


def test_the_command_line_that_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that row, beside others, in every table and figure."""
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(plots, "save_figures", lambda figures, folder: drawn.update(figures))  # writing takes longest
    [line] = re.findall(r"`zerosim (lab .*?)`", TEXT)
    small = ["--ranks", "8", "--steps", "1", "--batch", "1", "-v", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.main, [*shlex.split(line), *small])
    assert done.exit_code == 0, done.output
    assert "✓ same training holds" in done.output
    assert "Between orders" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "results.json", "trace.json"}
    for name in ("memory", "traffic", "loss", "timeline"):
        words = {text.get_text() for text in drawn[name].findobj(Text)}
        assert any(text.startswith("mine") for text in words), (name, words)
