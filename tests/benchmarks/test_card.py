"""What is run on a real card: what it needs is said, and each way of training has its plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_what_it_needs() -> None:
    """In one line, with the code of what cannot be run."""
    done = subprocess.run([sys.executable, "benchmarks/card.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a CUDA build of torch and a GPU" in done.stderr


def test_what_is_recorded_stands_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's numbers beside its plan's; without one the page says how to make it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import measured

    path = tmp_path / "measured_card.json"
    assert "No such run is recorded here" in measured._card(path)
    row = {
        "way": "plain", "measured": {"rest": 2**21, "peak": 2**23, "reserved": 2**24, "seconds": 0.25},
        "plan": {"rest": 2**20, "peak": 2**22}, "workspace": 2**20,
    }  # fmt: skip
    path.write_text(json.dumps({"card": "a card", "torch": "2.13", "rows": [row]}))
    last = measured._card(path).splitlines()[-1]
    assert last == "| plain | 2.0 MiB | 1.0 MiB | 8.0 MiB | 4.0 MiB | 0.500 | 16 MiB | 1.0 MiB | 250.0 ms |"
