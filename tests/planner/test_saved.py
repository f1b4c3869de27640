"""What a plan says of checkpoints is what one has on disk, and what putting it together takes, as integers."""

from pathlib import Path

import pytest

from zerosim.checkpoints import files
from zerosim.checkpoints.consolidate import consolidate
from zerosim.checkpoints.save import save
from zerosim.model import MLP
from zerosim.planner import models, question, step_run
from zerosim.planner.runner import Runner
from zerosim.records.question import Question
from zerosim.report import plan_verdict as verdict
from zerosim.schemes import DP, SCHEMES, Scheme, ZeRO1, ZeRO3
from zerosim.stages import HFSDP, HSDP, Stage
from zerosim.worlds.dry import DryRing

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDTHS = [13, 17, 11]
PARAMS = 13 * 17 + 17 + 17 * 11 + 11


def written(scheme: Scheme, folder: Path) -> tuple[int, int]:
    """Bytes of the tensors that a run writes, in all and in the largest file."""
    index = save(scheme, folder)
    sizes = [sum(part.nbytes for part in files.read_tensors(folder, file).values()) for file in index.files]
    return sum(sizes), max(sizes)


@pytest.mark.parametrize("precision", ["mixed", "fp32", "bf16"])
@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.name)
def test_a_plan_says_what_is_written(row: Stage, precision: str, tmp_path: Path) -> None:
    """All files, the largest, one whole file, and the peak of its making: to the byte, headers left out."""
    given = Question(model=",".join(map(str, WIDTHS)), asked=[5], gpus=[5], rows=[row], precision=precision)
    asked = question.check(given)
    planned = Runner(models.read(asked.model), asked).run(row, 5).saved
    assert (planned.total, planned.rank) == written(row(MLP(WIDTHS), 5, precision=precision), tmp_path / "a")
    ledger = consolidate(tmp_path / "a", tmp_path / "whole")
    assert planned.by_layer == ledger.host_peak().total
    tensors = files.tensors_of((tmp_path / "whole").read_bytes())
    assert planned.whole == sum(each.nbytes for each in tensors.values()) == 4 * PARAMS


@pytest.mark.parametrize("row", [HSDP, HFSDP], ids=lambda row: row.name)
def test_replicas_are_counted_once(row: Stage, tmp_path: Path) -> None:
    """Over two axes only the ranks of the first group write what all groups have."""
    dry = Scheme(row, MLP(WIDTHS), 6, ring=DryRing(6), options=row(MLP(WIDTHS), 6, node=2).options)
    planned = step_run.saved(dry)
    assert (planned.total, planned.rank) == written(row(MLP(WIDTHS), 6, node=2), tmp_path)


def test_the_plan_says_it_in_words() -> None:
    """Rows that write the same stand together; what consolidating takes is said both ways."""
    from zerosim.planner import plan

    asked = question.check(Question(model="1000,2000", asked=[4], gpus=[4], rows=[DP, ZeRO1, ZeRO3]))
    found = plan.make(models.read(asked.model), asked, lambda doing: None)
    [line] = [line for line in verdict.saved(found, 4) if line.startswith("a checkpoint on 4")]
    params = 1000 * 2000 + 2000
    whole = f"{14 * params / 1e6:.1f} MB"
    assert f"data parallel {whole}, of which {whole} in the first rank's file" in line
    assert f"ZeRO-3 {whole}, of which {14 * params / 4e6:.2f} MB in the first" in line
    assert f"a layer at a time takes {(4 * params + 2**20) / 1e6:.2f} MB at most" in line
