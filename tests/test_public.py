"""The public face: what ``import zerosim`` offers, what it costs, and that its examples say what happens."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import zerosim as zs
from zerosim import stages

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

CONSTANTS = {"ROWS", "SCHEMES", "__version__"}
ROWS = {name for name, value in vars(stages).items() if isinstance(value, zs.Stage)}


def modules() -> list[str]:
    """Every module of the package that has an example, by name."""
    found = []
    for each in pkgutil.walk_packages(zs.__path__, "zerosim."):
        if each.name != "zerosim.__main__" and importlib.util.find_spec(each.name) is not None:
            source = Path(str(importlib.util.find_spec(each.name).origin))  # type: ignore[union-attr]
            if ">>>" in source.read_text():
                found.append(each.name)
    return ["zerosim", *found]


@pytest.mark.parametrize("name", modules())
def test_examples_say_what_happens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example in a docstring gives what stands below it."""
    if name.startswith(("zerosim.torch_models.", "zerosim.conformance.")):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    module: ModuleType = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_public_name_is_there_and_documented() -> None:
    """Each name of the list can be had, is in ``dir``, and has a docstring, with an example if it can be called."""
    assert set(zs.__all__) <= set(dir(zs))
    for name in set(zs.__all__) - CONSTANTS - ROWS:
        if name == "check":
            pytest.importorskip("torch")
        value = getattr(zs, name)
        assert value.__doc__, name
        assert ">>>" in value.__doc__, name
    with pytest.raises(AttributeError, match="its names are"):
        _ = zs.nothing


def test_a_name_that_takes_torch_says_what_to_install() -> None:
    """Where there is no torch, `zs.check` is refused in words; all other names are there."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import zerosim as zs\n"
        "print(len([getattr(zs, name) for name in zs.__all__ if name != 'check']))\n"
        "zs.check(None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(len(zs.__all__) - 1)], done.stderr
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: check needs torch; pip install 'zerosim[torch]'."


@pytest.mark.parametrize(
    ("wrong", "meant"), [("Zero3", "ZeRO3"), ("zero3", "ZeRO3"), ("HSPD", "HSDP"), ("batch", "batches")]
)
def test_a_name_that_is_nearly_one_is_led_to_it(wrong: str, meant: str) -> None:
    """Whatever its case; what is like no name is told all names, and so is what is like one."""
    with pytest.raises(AttributeError, match=rf"no attribute '{wrong}'; did you mean {meant}\?.* its names are"):
        getattr(zs, wrong)
    with pytest.raises(AttributeError, match="no attribute 'nothing'; its names are DP, "):
        _ = zs.nothing


def test_every_row_is_public() -> None:
    """A row that the package has can be had under the name that it has there."""
    named = set(zs.__all__) - {"check"}  # which takes torch
    assert {name for name in named if isinstance(getattr(zs, name), zs.Stage)} == ROWS


def test_importing_loads_nothing_but_itself() -> None:
    """In a fresh interpreter ``import zerosim`` loads no other module of the package, and the version is there."""
    code = (
        "import sys, zerosim; print(*[name for name in sys.modules if name.startswith('zerosim.')], "
        "zerosim.__version__, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [zs.__version__, "False"]


def test_a_run_tells_of_itself() -> None:
    """What a run, a model, a rank and a report are shown as says what a person wants to know."""
    run = zs.ZeRO2(zs.MLP(), ranks=8)
    assert "not stepped yet" in repr(run)
    loss = run.step(*zs.batches(ranks=8))
    for text in ("ZeRO-2 on 8 ranks", "33,088 parameters", "mixed", f"loss {loss:.6f}", f"{run.ledger.total:,} B"):
        assert text in repr(run)
    assert repr(run.model) == "MLP((64, 128, 128, 64), seed=0: 33,088 parameters in 3 layers)"
    assert f"master {run.ranks[3].held()['master']:,} B" in repr(run.ranks[3])
    report = run.reports[-1]
    assert f"{report.peak.total:,} B at the peak" in repr(report)
    assert f"sends {report.sent()[0]:,} B" in repr(report)


def test_events_are_heard_as_they_happen() -> None:
    """A listener hears exactly the events of the steps that follow, in order, and changes nothing."""
    runs = [zs.ZeRO3(zs.MLP(), ranks=4) for _ in range(2)]
    heard: list[zs.Event] = []
    runs[0].on_event(heard.append)
    for batch in zs.batches(ranks=4, steps=2):
        for run in runs:
            run.step(batch)
    assert heard == [event for report in runs[0].reports for event in report.events]
    assert [event[:5] for event in heard] == [event[:5] for report in runs[1].reports for event in report.events]


def test_tensors_are_taken_as_they_are() -> None:
    """A batch of torch's tensors trains as one of arrays does, bit for bit."""
    torch = pytest.importorskip("torch")
    [batch] = zs.batches(ranks=2)
    runs = [zs.ZeRO2(zs.MLP(), ranks=2) for _ in range(2)]
    losses = [runs[0].step(batch), runs[1].step([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batch])]
    assert losses[0] == losses[1]
    assert np.array_equal(runs[0].full_theta(), runs[1].full_theta())
