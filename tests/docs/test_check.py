"""docs/check.md: the script that it shows runs under torchrun, and says what the page says that it does."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import by_night

PAGE = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
[SCRIPT] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[SAID] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
FORGOTTEN = "            dist.all_reduce(param.grad)\n"


def ran(script: str, folder: Path) -> tuple[int, str]:
    """The exit code of a script under torchrun, and what it prints."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout


def forked(script: str, folder: Path) -> tuple[int, str]:
    """The same of a script on ranks that are forked from here, which have their group, and torch."""
    from zerosim.conformance import run_ranks

    joins = 'dist.init_process_group("gloo")\n'
    assert script.count(joins) == 1
    found = run_ranks(lambda rank: exec(script.replace(joins, ""), {}), show=False)
    return max(found.codes), found.output


def plain(text: str) -> str:
    """A verdict without its line breaks, and without how far off a value is, whose digits are the machine's."""
    return re.sub(r"up to [\d.e+-]+", "up to", " ".join(text.split()))


@pytest.mark.parametrize("started", [forked, *by_night(ran)], ids=lambda how: how.__name__)
def test_the_script_is_found_wrong_as_the_page_says(
    started: Callable[[str, Path], tuple[int, str]], tmp_path: Path
) -> None:
    """The verdict and the finding, word for word, and an exit code that a shell sees."""
    pytest.importorskip("torch")
    code, output = started(SCRIPT, tmp_path)
    assert code
    assert plain(output).startswith(plain(SAID))


@pytest.mark.slow
def test_the_script_passes_once_it_divides(tmp_path: Path) -> None:
    """What the message says to do mends it."""
    pytest.importorskip("torch")
    assert SCRIPT.count(FORGOTTEN) == 1
    mended = SCRIPT.replace(FORGOTTEN, FORGOTTEN + "            param.grad /= dist.get_world_size()\n")
    code, output = ran(mended, tmp_path)
    assert code == 0
    assert output.startswith("✓ data parallel on 4 ranks: 3 steps as the simulator has them")
