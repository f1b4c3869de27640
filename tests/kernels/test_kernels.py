"""The compiled kernels have the bits of the formulas, and count every hop that the formulas make."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerosim
from zerosim import stages
from zerosim.bands import BF16, FP16, FP32, PRECISIONS, Array, Band, DType
from zerosim.comm import Comm
from zerosim.kernels import choice
from zerosim.kernels.choice import SWITCH, choose
from zerosim.kernels.operations import NUMPY, Choice, Handed, Kernels
from zerosim.ledger import Ledger
from zerosim.model import MLP
from zerosim.optimizer import Adam, AdamW
from zerosim.options import Options
from zerosim.ranks import Ranks, Workspace
from zerosim.schemes import SCHEMES, Scheme
from zerosim.stages import Stage
from zerosim.util.casts import convert
from zerosim.worlds.dry import DryArray
from zerosim.worlds.local import LocalRing

pytest.importorskip("numba", reason="without numba there are only the formulas")

EVERY_16_BITS = np.arange(1 << 16).astype(np.uint16)
CASTS = [(FP16, FP32), (BF16, FP32), (FP32, FP16), (FP32, BF16), (FP16, BF16), (BF16, FP16), (FP32, FP32)]
CHOICES: tuple[Choice, Choice] = "numpy", "numba"
ROWS = [row for row in vars(stages).values() if isinstance(row, Stage)]


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    return choose("numba", threads=2)  # of which what is small uses one


def bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


def same(found: Array, expected: Array) -> None:
    np.testing.assert_array_equal(bits(found), bits(expected))


def special(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Numbers of every kind: ordinary ones, zeros, subnormals, infinities, NaN and the largest."""
    rng = np.random.default_rng(seed)
    kinds = np.array([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 1e-8, -6e-5, 1e-40, 3e38])
    ordinary = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 5, shape)
    chosen = np.where(rng.random(shape) < 0.2, rng.choice(kinds, shape), ordinary)
    with np.errstate(all="ignore"):
        return np.asarray(chosen, np.float32).astype(dtype)


# -- casts


@pytest.mark.parametrize(("source", "target"), CASTS, ids=str)
def test_every_bit_pattern_is_cast_to_numpys_bits(source: DType, target: DType, compiled: Kernels) -> None:
    """All 65,536 halves and bfloat16 numbers, and two million fp32 ones, NaNs of every kind included."""
    if source == FP32:
        values = np.random.default_rng(0).integers(0, 1 << 32, 2_000_003, dtype=np.uint32).view(FP32)
    else:
        values = EVERY_16_BITS.view(source)
    found = np.empty(values.shape, target)
    compiled.convert(values, found)
    with np.errstate(all="ignore"):
        same(found, values.astype(target))


@pytest.mark.parametrize(("source", "target"), CASTS[:4], ids=str)
@pytest.mark.parametrize("shape", [(1,), (13,), (3, 5), (7, 1), (2, 3, 31), (5, 0), (3, 65_537)], ids=str)
def test_strides_and_lengths(source: DType, target: DType, shape: tuple[int, ...], compiled: Kernels) -> None:
    """Rows that are apart, elements that are apart, and lengths that fill no vector: only the target is written."""
    for apart in ((2, 1), (1, 3), (2, 3)):  # rows, and elements of a row
        wide = special(source, (*shape[:-1], apart[0], shape[-1], apart[1]))
        values = wide[..., 0, :, 0]
        found = special(target, wide.shape, seed=1)
        expected = found.copy()
        compiled.convert(values, found[..., 0, :, 0])
        convert(values, expected[..., 0, :, 0])
        same(found, expected)


def test_what_no_loop_takes_is_left_to_the_formula(compiled: Kernels) -> None:
    """Arrays without values, another byte order, other dtypes, broadcasting, more axes: as ``casts.convert``."""
    compiled.convert(DryArray((3, 5), FP16), DryArray((3, 5), FP32))  # type: ignore[arg-type]
    swapped, found = np.array([1, -2.5], np.dtype(">f2")), np.empty((3, 2), FP32)
    compiled.convert(swapped, found)
    assert found.tolist() == [[1, -2.5]] * 3
    many = special(FP16, (2, 3, 2, 3, 5))
    found = np.empty(many.shape, FP32)
    compiled.convert(many, found)
    same(found, many.astype(FP32))
    adam = compiled.adam
    assert adam is not None
    shapes: list[Any] = [DryArray((3, 5), FP32)] * 4
    assert adam(*shapes, 0.9, 0.999, 1e-8, 0.01, 0.1, 0.0) is None


# -- Adam


@pytest.mark.parametrize("grads", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 41), (2, 3, 70_001)], ids=str)
@pytest.mark.parametrize("optimizer", [Adam(), AdamW(lr=0.3, betas=(0.8, 0.99), eps=1e-6)], ids=["Adam", "AdamW"])
def test_adam_has_numpys_bits_and_operations(
    grads: DType, shape: tuple[int, ...], optimizer: Adam, compiled: Kernels
) -> None:
    """Parameters and moments over five steps, the first without a rate, and the operations that are told."""
    left, right = ([special(FP32, shape, 1), *(np.zeros(shape, FP32) for _ in range(2))] for _ in range(2))
    told: dict[str, list[int]] = {"numba": [], "numpy": []}
    with np.errstate(all="ignore"):
        for step in range(1, 6):
            given = special(grads, shape, step)
            for states, kernels in ((left, compiled), (right, NUMPY)):
                optimizer.update(
                    states[0], given, states[1], states[2], step=step, flops=told[kernels.name].append,
                    lr=0.0 if step == 1 else None, weight_decay=optimizer.weight_decay, kernels=kernels,
                )  # fmt: skip
            for found, expected in zip(left, right, strict=True):
                same(np.isnan(found), np.isnan(expected))
                same(np.where(np.isnan(found), 0, found), np.where(np.isnan(expected), 0, expected))
    assert told["numba"] == told["numpy"] == [(13 + (optimizer.weight_decay > 0)) * shape[-1]] * 5


# -- rings

RINGS: dict[str, Callable[[], LocalRing]] = {
    "1": lambda: LocalRing(1),
    "2": lambda: LocalRing(2),
    "5": lambda: LocalRing(5),
    "3 within each of 2": lambda: LocalRing(3, 6, node=3),
    "2 across 3": lambda: LocalRing(2, 6, step=3, node=3),
    "31": lambda: LocalRing(31),
}


def comm(ring: LocalRing, wire: DType, kernels: Kernels) -> tuple[Comm, Ledger]:
    ledger = Ledger(len(ring.ids))
    ranks = Ranks(ring.ids, {Band.BLOCKS: wire}, ledger, np.empty, kernels=kernels)
    return Comm(ring, wire, Workspace(ranks, Band.BLOCKS, wire), ledger), ledger


@pytest.mark.parametrize(
    ("band", "wire"), [(FP32, FP32), (FP16, FP32), (BF16, FP32), (FP16, FP16), (BF16, BF16)], ids=str
)
@pytest.mark.parametrize("make", RINGS.values(), ids=RINGS)
def test_rings_have_the_bits_and_the_counts_of_single_hops(
    make: Callable[[], LocalRing], band: DType, wire: DType, compiled: Kernels
) -> None:
    """A reduce-scatter, an all-gather and an all-reduce of chunks of 1, 13 and 4,099, the last of them padded."""
    for chunk in (1, 13, 4_099):
        outcomes = []
        for kernels in (compiled, NUMPY):
            ring = make()
            length = ring.size * chunk
            start = np.asarray(ring.members) * 0 + 2 if ring.step > 1 else 0
            data = special(band, (len(ring.ids), length), seed=chunk)
            collectives, ledger = comm(ring, wire, kernels)
            label: Any = {"band": "grads", "unit": "layer", "start": start}
            with np.errstate(all="ignore"), ledger.step() as report:
                out = np.full((len(ring.ids), chunk), np.nan, band)
                collectives.reduce_scatter(data, out, length - 3, scale=1 / ring.size, **label)
                gathered = np.full_like(data, np.nan)
                collectives.all_gather(gathered, length - 3, out, **label)
                reduced = data.copy()
                collectives.all_reduce(reduced, length - 3, scale=0.3, **label)
            counted = [
                (key, each.sent.tolist(), each.received.tolist(), each.padding.tolist(), each.messages)
                for key, each in report.traffic.items()
            ]
            events = [event._replace(seconds=0) for event in report.events]
            outcomes.append((counted, events, [*map(_comparable, (data, out, gathered, reduced))]))
        (counted, events, arrays), (expected, logged, originals) = outcomes
        assert counted == expected
        assert events == logged
        for found, original in zip(arrays, originals, strict=True):
            same(found, original)


def _comparable(array: Array) -> Array:
    """The array with one NaN for all: of two that are added it is not said which one stays."""
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array)


@pytest.mark.parametrize("ranks", [1, 5])
def test_all_ranks_hand_on_as_much(ranks: int, compiled: Kernels) -> None:
    """What is booked of a rank is what each of them was counted: N - 1 blocks, and their bytes."""
    handed, chunks = Handed(1, ranks), np.ones((1, ranks, ranks, 7), FP32)
    blocks = np.zeros((2, 1, ranks, 7), FP32)
    assert compiled.ring_sum is not None
    assert compiled.ring_copies is not None
    padding = np.arange(ranks)[np.newaxis]
    compiled.ring_sum(chunks, (blocks[0], blocks[1]), padding, handed)
    compiled.ring_copies(blocks[0], chunks, 4, padding, handed)
    once = [ranks - 1, (ranks - 1) * 7 * 4, (ranks - 1) * 7 * 4]
    for rank, counts in enumerate(handed.counts[0].tolist()):
        sent_on = sum(range(ranks)) - rank  # every chunk but its own, and then every one but that of the rank below
        assert counts == [2 * each for each in once] + [sent_on + sum(range(ranks)) - (rank - 1) % ranks]


# -- whole runs


def outcome(scheme: Scheme, batches: list[Any]) -> dict[str, Any]:
    """Everything that a run comes to but the time it takes."""
    losses = [scheme.step(batch) for batch in batches]
    report = scheme.reports[-1]
    return {
        "losses": losses,
        "states": [scheme.flat(band).tobytes() for band in scheme.states],
        "held": report.resident,
        "peaks": (report.peak, report.peak_without_activations),
        "traffic": {
            key: (
                each.sent.tolist(),
                each.received.tolist(),
                each.padding.tolist(),
                each.outside.tolist(),
                each.messages,
            )
            for key, each in report.traffic.items()
        },
        "flops": report.flops,
        "events": [event._replace(seconds=0) for event in report.events],
    }


TRAINED = [
    pytest.param(row, name, id=f"{row.name}, {name}")
    for row in ROWS
    for name, precision in PRECISIONS.items()
    if precision.everywhere or row.params  # what is kept otherwise is not what forward reads
]


@pytest.mark.parametrize(("row", "precision"), TRAINED)
def test_whole_runs_are_the_same(row: Stage, precision: str, shapes_unchecked: None) -> None:
    """Two steps of every row: losses, states, peaks, traffic, operations and every entry of the log."""
    rng = np.random.default_rng(3)
    ranks, widths = 6, (11, 17, 5)
    batches = [
        [tuple(rng.standard_normal((3, width)).astype(np.float32) for width in (11, 5)) for _ in range(ranks)]
        for _ in range(2)
    ]
    options = Options(precision=precision, node=3, optimizer=Adam(lr=0.1))
    formulas, compiled = (outcome(row(MLP(widths), ranks, options, kernels=name), batches) for name in CHOICES)
    assert compiled == formulas


def test_threads_change_no_bit_where_they_are_used() -> None:
    """Arrays that are large enough for more than one thread: 2 threads come to what 1 does."""
    rng = np.random.default_rng(3)
    batches = [[tuple(rng.standard_normal((2, 97)).astype(np.float32) for _ in range(2)) for _ in range(5)]]
    runs = [
        outcome(stages.ZeRO2(MLP((97, 353, 97)), 5, kernels="numba", threads=threads), batches) for threads in (1, 2)
    ]
    assert runs[0] == runs[1]


# -- the choice


def test_auto_waits_for_arrays_that_are_worth_it() -> None:
    """With numba installed a small run is done by the formulas, without numba being loaded."""
    code = (
        "import sys, numpy as np; from zerosim.schemes import ZeRO3; from zerosim.model import MLP;"
        "x = np.ones((1, 4), np.float32); s = ZeRO3(MLP((4, 4)), 2); s.step([(x, x)] * 2);"
        "print(s.ranks.kernels.name, 'numba' in sys.modules)"
    )
    path = str(Path(zerosim.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != SWITCH} | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["numba", "False"]


@pytest.mark.parametrize(("said", "name"), [("numpy", "numpy"), ("numba", "numba"), ("auto", "numba"), ("", "numba")])
def test_the_environment_decides_where_the_option_does_not(
    said: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``auto`` is what ZEROSIM_KERNELS says; an option that names one goes before it."""
    monkeypatch.setenv(SWITCH, said)
    assert choose().name == name
    assert choose("numpy") is NUMPY
    assert choose("numba").name == "numba"


def test_without_numba_there_are_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numba is not installed nothing is asked of it, and who asks for it is told what to install."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(choice, "installed", lambda: False)
    assert choose() is NUMPY
    with pytest.raises(ValueError, match=r"Scheme\(kernels\) asks for numba, .*pip install 'zerosim\[fast\]'"):
        choose("numba")


def test_what_is_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that there is not, by the option or by the environment, is refused by its name."""
    with pytest.raises(ValueError, match=r"Scheme\(kernels\): kernels is one of auto, numba, numpy; got 'cuda'"):
        Options(kernels="cuda")  # type: ignore[arg-type]
    monkeypatch.setenv(SWITCH, "fast")
    with pytest.raises(ValueError, match=r"ZEROSIM_KERNELS is one of auto, numba, numpy; got 'fast'"):
        SCHEMES[0](MLP((3, 2)), 2)


def test_kernels_are_kept_where_they_can_be(tmp_path: Path) -> None:
    """What is compiled goes to NUMBA_CACHE_DIR if that is set, and a second process compiles nothing."""
    code = (
        "import numpy as np; from zerosim.kernels.choice import choose;"
        "choose('numba').convert(np.ones((2, 3), np.float16), np.ones((2, 3), np.float32))"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(zerosim.__file__).parents[1])}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        kept = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.nbc"))
        assert len(kept) == 1
    assert kept == sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.nbc"))


def test_product_of_dtypes_is_covered() -> None:
    """The casts above are all that there are between the dtypes of bands, but for those within one."""
    between = {(a, b) for a, b in product([FP32, FP16, BF16], repeat=2) if a != b}
    assert between == set(CASTS) - {(FP32, FP32)}
