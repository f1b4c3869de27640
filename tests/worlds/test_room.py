"""What a run is said to take, before it is made, is what it takes."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from zerosim.buckets import distinct
from zerosim.worlds.local import footprint

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDTHS, ROWS = (256, 512, 256), 4


def taken(row: zs.Stage, ranks: int, **options: Any) -> tuple[int, int]:
    """What was said, and the most that Python and NumPy had allocated in two steps, the batch included."""
    model, rng = zs.MLP(WIDTHS), np.random.default_rng(0)
    row(model, ranks, **options).step(zs.batches(ranks, rows=ROWS, widths=(WIDTHS[0], WIDTHS[-1]))[0])
    tracemalloc.start(1)
    try:
        x, y = (rng.standard_normal((ranks, ROWS, WIDTHS[end]), dtype=np.float32) for end in (0, -1))
        run = row(model, ranks, **options)
        for _ in range(2):
            run.step(list(zip(x, y, strict=True)))
        took = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return footprint(row, [group.size for group in distinct(run.layers)], ranks, run.options), took


@pytest.mark.parametrize("row", zs.ROWS, ids=lambda row: row.name)
def test_the_refusal_s_figure_is_what_a_run_takes(row: zs.Stage) -> None:
    """Within 20 %, under every row: what is kept, for how long, and what the pool of freed arrays keeps."""
    said, took = taken(row, 32, node=8)
    assert 0.8 < said / took < 1.2, (said, took)


@pytest.mark.parametrize(
    "options",
    [{"gather": "model"}, {"bucket": "model"}, {"precision": "fp32"}, {"optimizer": zs.SGD(lr=0.1)}, {"accumulate": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_are_in_the_refusal_s_figure(options: dict[str, Any]) -> None:
    """Within 20 %, for what changes how much is there at once."""
    for row in (zs.ZeRO3, zs.HSDP):
        said, took = taken(row, 32, node=8, **options)
        assert 0.8 < said / took < 1.2, (row.name, said, took)
