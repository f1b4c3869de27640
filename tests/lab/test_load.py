"""What a lab is said to take is what it takes."""

import subprocess
import sys

import pytest

from helpers import lab_settings
from zerosim.lab import suite
from zerosim.lab.experiment import model_of
from zerosim.schemes import SCHEMES

MEASURED = """
import re, sys
import psutil
sys.path.insert(0, "tests")
from helpers import lab_settings
from zerosim.lab import suite
before = psutil.Process().memory_info().rss
ranks, precision = int(sys.argv[1]), sys.argv[2]
suite.sweep_ranks = lambda ranks, node=None: [ranks]
suite.run(lab_settings(ranks=ranks, batch=8, widths=[64, 128, 128, 64], precision=precision))
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024 - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says how much a process has had at most")
@pytest.mark.parametrize(("ranks", "precision"), [(32, "mixed"), (96, "mixed"), (128, "fp32")])
def test_the_refusal_s_figure_is_what_a_run_takes(ranks: int, precision: str) -> None:
    """Within 20 %, in a fresh process."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(ranks), precision]
    took = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    settings = lab_settings(ranks=ranks, batch=8, widths=[64, 128, 128, 64], precision=precision)
    said = suite._footprint(settings, SCHEMES, model_of(settings), ranks)
    assert 0.8 < said / took < 1.2, (said, took)
