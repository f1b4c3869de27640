"""docs/checkpoints.md: what it shows is run, and its commands do what they say."""

import re
import shlex
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerosim.cli.main import main

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[COMMANDS] = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


def test_what_it_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first example, and then each command on what it has left, ends well."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    exec(EXAMPLES[0], {})
    for command in COMMANDS.splitlines():
        done = CliRunner().invoke(main, shlex.split(command.removeprefix("zerosim ")))
        assert done.exit_code == 0, done.output


def test_what_it_shows_of_torch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's parameters come from the run, and the run's from the folder."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        exec(EXAMPLES[1], space)
    net, run = space["net"], space["run"]
    assert isinstance(net, torch.nn.Module)
    theirs = torch.cat([each.detach().reshape(-1) for each in net.parameters()]).numpy()
    assert theirs.tobytes() == run.full_theta().tobytes()  # type: ignore[attr-defined]
