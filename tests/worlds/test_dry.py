"""The dry world: what it counts is what the simulator counts, and its arrays are NumPy's but for the values."""

import ast
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zerosim
from helpers import EVERYWHERE, OWN, options, perceptrons
from zerosim.bands import FP16, FP32
from zerosim.counts import Phase
from zerosim.model import MLP
from zerosim.ranks import OutOfMemory
from zerosim.schemes import DP, SCHEMES, Scheme, Stage, ZeRO1, ZeRO2, ZeRO3
from zerosim.worlds.dry import DryArray, DryRing, Shapes

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

Options = dict[str, Any]
SOURCE = Path(zerosim.__file__).parent
SMALL = MLP((7, 5, 3))


# -- what the dry world counts


Case = tuple[Stage, MLP, int, int, Options]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A row, a model, N, rows per rank and the options of a scheme: any combination that it does not refuse."""
    stage = draw(st.sampled_from([*SCHEMES, *OWN]))
    shared = draw(options([*EVERYWHERE, *["fsdp"] * bool(stage.params)]))
    shared |= {
        "sync": draw(st.sampled_from([None, "each", "end"])),
        "gather": draw(st.sampled_from(["layer", "model"])),
        "prefetch": draw(st.integers(0, 2)),
        "all_reduce": draw(st.booleans()),
    }
    ranks = draw(st.integers(1, 7) | st.integers(1, 7) | st.integers(1, 40))
    return stage, draw(perceptrons), ranks, shared["accumulate"] * draw(st.integers(1, 3)), shared


def dry(stage: Stage, model: MLP, ranks: int, **options: Any) -> Scheme:
    return stage(Shapes(model), ranks, ring=DryRing(ranks), **options)


def zeros(model: MLP, ranks: int, rows: int) -> list[tuple[Any, Any]]:
    return [(np.zeros((rows, model.widths[0]), np.float32), np.zeros((rows, model.widths[-1]), np.float32))] * ranks


def counted(scheme: Scheme) -> dict[str, Any]:
    """All that the ledger knows of rank 0, but for the time."""
    ledger = scheme.ledger
    return {
        "held": ledger.held,
        "peaks": [ledger.peak(), ledger.peak_without_activations()],
        "sent": ledger.sent()[0],
        "steps": [
            {
                "complete": report.complete,
                "resident": report.resident,
                "padding": report.padding[:1],
                "peak": report.peak,
                "peak without activations": report.peak_without_activations,
                "flops": report.flops,
                "traffic": {
                    key: (int(t.sent[0]), int(t.received[0]), t.messages, int(t.padding[0]))
                    for key, t in report.traffic.items()
                },
                "events": [event._replace(seconds=0.0) for event in report.events],
            }
            for report in scheme.reports
        ],
    }


@settings(max_examples=50)
@given(case=cases(), steps=st.sampled_from([1, 1, 2]))
@example(case=(ZeRO3, SMALL, 5, 2, {"wire": "fp16"}), steps=3)
@example(case=(ZeRO3, MLP((5, 3, 2)), 37, 1, {}), steps=1)  # more ranks than the parameters of a layer
@example(case=(DP, MLP((5, 3, 2)), 1, 1, {"bucket": "model"}), steps=2)
def test_the_dry_world_counts_what_the_simulator_counts(case: Case, steps: int) -> None:
    """In any scheme bytes at rest and at every peak, traffic, FLOPs and events are the simulator's, step by step."""
    stage, model, ranks, rows, options = case
    real, shapes = stage(model, ranks, **options), dry(stage, model, ranks, **options)
    for _ in range(steps):
        real.step(zeros(model, ranks, rows))
        shapes.step(Shapes(model).batch(rows))
    assert counted(shapes) == counted(real)
    assert shapes.bytes_per_param() == real.bytes_per_param()
    assert shapes.peak_bytes_per_param() == real.peak_bytes_per_param()
    assert shapes.bytes_comm_per_rank() == real.ledger.sent()[0]
    assert shapes.ranks[0].held() == real.ranks[0].held()


def failure(start: Callable[[], Scheme], batch: list[tuple[Any, Any]]) -> tuple[OutOfMemory, dict[str, Any] | None]:
    """How a scheme runs out of memory, and what was counted up to there if it came as far as a step."""
    try:
        scheme = start()
    except OutOfMemory as error:
        return error, None
    with pytest.raises(OutOfMemory) as caught:
        scheme.step(batch)
    return caught.value, counted(scheme)


@settings(max_examples=25)
@given(case=cases(), fraction=st.floats(0, 1, exclude_max=True))
@example(case=(ZeRO3, SMALL, 5, 2, {}), fraction=0.999)
@example(case=(ZeRO2, SMALL, 5, 2, {}), fraction=0.0)
def test_the_dry_world_runs_out_of_memory_where_the_simulator_does(case: Case, fraction: float) -> None:
    """Whatever the capacity below the peak, the same hold fails in both worlds, with the same ledger up to there."""
    stage, model, ranks, rows, options = case
    free = dry(stage, model, ranks, **options)
    batch = Shapes(model).batch(rows)
    free.step(batch)
    capacity = max(1, int(fraction * free.ledger.peak().total))
    real, real_counts = failure(lambda: stage(model, ranks, capacity=capacity, **options), zeros(model, ranks, rows))
    shapes, dry_counts = failure(lambda: dry(stage, model, ranks, capacity=capacity, **options), batch)
    for name in ("rank", "band", "unit", "asked", "held", "capacity"):
        assert getattr(shapes, name) == getattr(real, name)
    assert dry_counts == real_counts


def test_the_loss_is_not_known() -> None:
    """A step's loss is NaN in the dry world: it has no values to compute one from."""
    scheme = dry(ZeRO2, SMALL, 5)
    assert math.isnan(scheme.step(Shapes(SMALL).batch(2)))
    assert math.isnan(scheme.reports[0].loss)


def test_full_parameters_have_their_shape() -> None:
    """What can be put together from rank 0 has the shape and dtype that it would have; a shard alone is refused."""
    theta = dry(ZeRO2, SMALL, 5, precision="fp32").full_theta()
    assert theta.shape == (7 * 5 + 5 + 5 * 3 + 3,)
    assert theta.dtype == np.float32
    with pytest.raises(ValueError, match="only \\[0\\] live in this process"):
        dry(ZeRO3, SMALL, 5).full_theta()


# -- sizes that nothing else reaches

HUGE = """
import json
from zerosim.real_ranks.meter import highest_memory
from zerosim.worlds.dry import DryRing, Shapes
from zerosim.model import MLP
from zerosim.schemes import ZeRO3

model, ranks = Shapes(MLP((56_569,) * 127)), 1024
scheme = ZeRO3(model, ranks, ring=DryRing(ranks))
scheme.step(model.batch(1))
[report] = scheme.reports
print(json.dumps({
    "parameters": model.n_params,
    "resident": sum(report.resident.values()),
    "sent": scheme.ledger.sent()[0],
    "messages": sum(traffic.messages for traffic in report.traffic.values()),
    "events": len(report.events),
    "memory": highest_memory(),
}))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no getrusage")
def test_four_hundred_billion_parameters_on_1024_ranks() -> None:
    """A ZeRO-3 step of 403e9 parameters on 1,024 ranks counts every byte and stays under 500 MB of this machine."""
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
    got = json.loads(done.stdout)
    layer = 56_569 * 56_569 + 56_569
    chunk = -(-layer // 1024)
    assert got["parameters"] == 126 * layer > 400e9
    assert got["resident"] == 126 * chunk * (2 + 2 + 4 + 4 + 4)
    assert got["messages"] == 126 * 3 * 1023  # gathered twice, reduced once
    assert got["sent"] == 126 * 3 * 1023 * chunk * 4
    assert got["events"] < 126 * 30  # by layer, not by hop
    assert got["memory"] < 500e6


@pytest.mark.parametrize("stage", [DP, ZeRO1, ZeRO2, ZeRO3])
def test_the_time_of_a_step_does_not_grow_with_the_model(stage: Any) -> None:
    """Layers a million times as large take the same operations: as many events, as many calls of NumPy."""
    calls = []
    for width in (2**4, 2**14):
        model = Shapes(MLP((width, width, width)))
        scheme = stage(model, 4, ring=DryRing(4))
        counter = _Counter()
        sys.setprofile(counter)
        try:
            scheme.step(model.batch(2))
        finally:
            sys.setprofile(None)
        calls.append((counter.ufuncs, len(scheme.reports[0].events)))
    assert calls[0] == calls[1] > (10, 10)


class _Counter:
    """Counts the calls of ``DryArray.__array_ufunc__``."""

    def __init__(self) -> None:
        self.ufuncs = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.ufuncs += event == "call" and frame.f_code.co_name == "__array_ufunc__"


def test_bytes_may_pass_what_64_bits_hold() -> None:
    """Sizes and bytes are Python integers, in arrays and in the ledger: a model of 2**60 parameters adds up."""
    array = DryArray((2**40, 2**40), np.float32)
    assert (array.size, array.nbytes, array[:, :3].nbytes) == (2**80, 4 * 2**80, 2**40 * 3 * 4)
    assert type(DryArray((np.int64(2**40), np.int64(2**40)), np.float32).nbytes) is int
    scheme = dry(DP, MLP((2**30, 2**30)), 2, precision="fp32")
    scheme.step(Shapes(MLP((2**30, 2**30))).batch(8))
    assert scheme.ledger.total == 4 * 4 * (2**60 + 2**30) > 2**63
    assert scheme.reports[0].flops[Phase.FORWARD] == 2 * 8 * 2**60 > 2**63


# -- the world


def test_nothing_of_the_core_knows_the_dry_world() -> None:
    """No file of the core imports the dry world or names it: it is handed in, as a ring and a model."""
    rooms = sorted(SOURCE.glob("*.py"))
    assert {"schemes.py", "comm.py", "ranks.py", "model.py"} <= {room.name for room in rooms}
    for room in rooms:
        names = {
            name
            for node in ast.walk(ast.parse(room.read_text()))
            for name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "module", "") or "")
        }
        assert not [name for name in names if name.lower() in ("dry", "dryring", "dryarray", "worlds.dry")], room.name


@pytest.mark.parametrize("size", [0, -3, True])
def test_a_ring_needs_ranks(size: Any) -> None:
    """A ring of no ranks, or of something that is no number of ranks, is refused."""
    with pytest.raises((TypeError, ValueError), match=r"DryRing\(size\)"):
        DryRing(size)


def test_a_block_arrives_as_a_view_that_cannot_be_written() -> None:
    """What a hop hands over has the block's shape, is another array, and is read-only, as in the simulator."""
    ring = DryRing(7)
    block, spare = ring.empty((1, 13), np.dtype(np.float16)), ring.empty((1, 13), np.dtype(np.float16))
    arrived = ring.shift(block, spare)
    assert arrived is not block
    assert arrived is not spare
    assert arrived.shape == (1, 13)
    assert arrived.dtype == np.float16
    with pytest.raises(ValueError, match="read-only"):
        arrived[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        np.add(block, arrived, out=arrived)
    block[...] = arrived


def test_chunks_are_the_ranks_shares() -> None:
    """Each chunk of a buffer is 1/N of it; a buffer that does not divide is refused, as in the simulator."""
    ring = DryRing(7)
    [(rows, chunk)] = ring.chunks(ring.empty((1, 7 * 13), np.dtype(np.float32)), 5)
    assert (rows, chunk.shape) == (slice(None), (1, 13))
    with pytest.raises(ValueError, match="reshape"):
        ring.chunks(ring.empty((1, 7 * 13 + 1), np.dtype(np.float32)), 0)


# -- models without values


def test_shapes_allocate_nothing() -> None:
    """The initial parameters of a trillion-parameter model are a shape; layers and sizes are the model's own."""
    model = MLP((10**6, 10**6))
    shapes = Shapes(model)
    assert shapes.initial().shape == (10**12 + 10**6,)
    assert shapes.initial().dtype == np.float32
    assert (shapes.layers, shapes.n_params) == (model.layers, model.n_params)


@pytest.mark.parametrize(("n", "node"), [(8, 4), (6, 2), (4, 4), (12, 4), (12, 3), (15, 5)])
def test_scattered_replicas_leave_their_node_unless_it_has_both(n: int, node: int) -> None:
    """Where rank r is on node r mod D, all of a node's ranks send to replicas elsewhere, or none does."""
    nodes = n // node
    _, inner, outer = DryRing(n, scattered=True).split(node)
    crosses = [rank % nodes != (rank - node) % n % nodes for rank in range(n)]
    assert (outer.size, inner.size) == (nodes, node)
    assert crosses == [outer.leaving > 0] * n
    assert outer.leaving in (0, node)


@pytest.mark.parametrize("wire", [FP16, FP32], ids=str)
def test_summands_have_the_dtype_of_the_wire(wire: Any) -> None:
    """Each of a ring's hops meets a chunk for each rank here, in the dtype in which sums are made."""
    met = list(DryRing(4).summands(cast("Any", DryArray((1, 12), FP16)), wire))
    assert [[(chunk.shape, chunk.dtype) for _, chunk in pieces] for pieces in met] == [[((1, 3), wire)]] * 4


def test_shapes_are_those_of_a_perceptron(as_users_call_it: None) -> None:
    """Anything else is refused, with the call and the option."""
    with pytest.raises(TypeError, match=r"^Shapes\(model\): model must be of type MLP; got 3\.$"):
        Shapes(cast("Any", 3))


@pytest.mark.parametrize("rows", [0, -1, True])
def test_a_batch_has_rows(rows: Any) -> None:
    """A batch of no rows, or of no number of rows, is refused."""
    with pytest.raises((TypeError, ValueError), match=r"Shapes.batch\(rows\)"):
        Shapes(MLP()).batch(rows)


@pytest.mark.parametrize(
    ("x", "y", "error"),
    [
        (DryArray((2, 6), np.float32), DryArray((2, 3), np.float32), ValueError),
        (DryArray((2, 7), np.float32), DryArray((2, 4), np.float32), ValueError),
        (DryArray((2, 7), np.float32), DryArray((5, 3), np.float32), ValueError),
        (DryArray((0, 7), np.float32), DryArray((0, 3), np.float32), ValueError),
        (DryArray((7,), np.float32), DryArray((3,), np.float32), ValueError),
        (DryArray((2, 7), np.float64), DryArray((2, 3), np.float32), TypeError),
        (DryArray((2, 7), np.float32), DryArray((2, 3), np.float16), TypeError),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(x: DryArray, y: DryArray, error: type[Exception]) -> None:
    """Widths, rows and dtype are checked as the simulator checks them, before anything changes."""
    scheme = dry(ZeRO3, SMALL, 5)
    real = ZeRO3(SMALL, 1)
    with pytest.raises(error, match=r"step\(batch\)"):
        scheme.step([(x, y)])
    with pytest.raises(error, match=r"step\(batch\)"):
        real.step([(np.zeros(x.shape, x.dtype), np.zeros(y.shape, y.dtype))])
    assert scheme.reports == []


def test_a_batch_is_one_pair() -> None:
    """One rank lives in the dry world, so one pair is what a step takes; the arrays may have values."""
    scheme, pair = dry(ZeRO3, SMALL, 5), Shapes(SMALL).batch(2)
    with pytest.raises(ValueError, match=r"one .* pair per rank, 1 in all"):
        scheme.step(pair * 5)
    with pytest.raises(ValueError, match=r"one .* pair per rank, 1 in all"):
        scheme.step([])
    scheme.step(zeros(SMALL, 1, 2))
    assert len(scheme.reports) == 1


# -- an array in all but its values

DTYPES = [np.dtype(kind) for kind in (np.float16, np.float32, np.float64, np.int32, np.bool, ml_dtypes.bfloat16)]
kinds = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
MISTAKES = (ValueError, TypeError, IndexError)


def same(got: Any, wanted: Any) -> None:
    """The two agree in all that they both have."""
    wanted = np.asarray(wanted)
    assert type(got) is DryArray
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert (got.ndim, got.size, got.nbytes) == (wanted.ndim, wanted.size, wanted.nbytes)


def agree(dry: Callable[[], Any], real: Callable[[], Any]) -> tuple[DryArray, Any] | None:
    """Both succeed with the same result, which is returned, or both fail: of several mistakes, at either."""
    try:
        with np.errstate(all="ignore"):
            wanted = real()
    except MISTAKES:
        with pytest.raises(MISTAKES):
            dry()
        return None
    got = dry()
    same(got, wanted)
    return got, wanted


indices = st.one_of(
    st.integers(-4, 4), st.none(), st.just(...), st.slices(4), st.slices(4), st.just(slice(None)), st.just(slice(0))
)
keys = indices | st.lists(indices, max_size=4).map(tuple)
VIEWS: dict[str, st.SearchStrategy[Callable[[Any], Any]]] = {
    "index": keys.map(lambda key: lambda a: a[key]),
    "swap": st.tuples(st.integers(-3, 2), st.integers(-3, 2)).map(lambda axes: lambda a: a.swapaxes(*axes)),
    "np.swap": st.tuples(st.integers(-3, 2), st.integers(-3, 2)).map(lambda axes: lambda a: np.swapaxes(a, *axes)),
    "reshape": st.lists(st.integers(-1, 8), max_size=4).map(lambda s: lambda a: np.reshape(a, tuple(s), copy=False)),
    "step": st.sampled_from([-2, -1, 2, 3]).map(lambda step: lambda a: a[..., ::step]),
    "halve": st.just(lambda a: a.reshape(2, -1)),
    "flatten": st.just(lambda a: np.reshape(a, -1, copy=False)),
    "bytes": st.sampled_from([np.uint8, np.int16, np.float32, None]).map(
        lambda kind: lambda a: a.view() if kind is None else a.view(kind)
    ),
}


@settings(max_examples=200)
@given(shape=st.lists(st.integers(0, 6), max_size=4).map(tuple), kind=kinds, data=st.data())
def test_views_are_numpys(shape: tuple[int, ...], kind: np.dtype[Any], data: st.DataObject) -> None:
    """Any chain of views has NumPy's shape, strides and contiguity, or fails where NumPy does."""
    got, wanted = DryArray(shape, kind), np.zeros(shape, kind)
    for _ in range(data.draw(st.integers(1, 4))):
        view = data.draw(st.sampled_from(sorted(VIEWS)).flatmap(lambda name: VIEWS[name]))
        both = agree(lambda: view(got), lambda: view(wanted))  # noqa: B023
        if both is None:
            break
        got, wanted = both
        assert got.flags.c_contiguous == wanted.flags.c_contiguous
        if wanted.size:
            for side, step, expected in zip(got.shape, got.strides, wanted.strides, strict=True):
                assert side == 1 or step == expected


UFUNCS = [
    np.add,
    np.subtract,
    np.multiply,
    np.divide,
    np.maximum,
    np.greater,
    np.square,
    np.sqrt,
    np.isfinite,
    np.matmul,
]
numbers = st.sampled_from([1, 0.5, True, np.float32(2), np.float64(3), np.int32(4)])


@settings(max_examples=250)
@given(
    ufunc=st.sampled_from(UFUNCS), shapes=st.tuples(shapes, shapes), types=st.tuples(kinds, kinds),
    number=st.none() | numbers, first=st.booleans(), out=st.none() | st.tuples(shapes | st.none(), kinds),
)  # fmt: skip
@example(np.add, ((2, 3), (3,)), (DTYPES[1], DTYPES[2]), None, True, None)  # wider than either wanted
@example(np.add, ((3,), (3,)), (DTYPES[1], DTYPES[1]), None, True, ((2, 3), DTYPES[1]))
@example(np.add, ((1, 3), (3,)), (DTYPES[1], DTYPES[1]), None, True, ((3,), DTYPES[1]))
@example(np.matmul, ((4, 2, 3), (3, 2)), (DTYPES[1], DTYPES[1]), None, True, ((4, 2, 2), DTYPES[0]))
@example(np.matmul, ((2, 3), (3, 1)), (DTYPES[1], DTYPES[1]), None, True, ((2, 4), DTYPES[1]))
@example(np.matmul, ((3,), (4, 3, 2)), (DTYPES[1], DTYPES[1]), None, True, None)
def test_operations_are_numpys(ufunc: Any, shapes: Any, types: Any, number: Any, first: bool, out: Any) -> None:
    """Every operation broadcasts, promotes, casts to its output or fails as NumPy's does."""
    real: list[Any] = [np.ones(shape, kind) for shape, kind in zip(shapes, types, strict=True)][: ufunc.nin]
    dry: list[Any] = [DryArray(a.shape, a.dtype) for a in real]
    if number is not None and ufunc.nin == 2 and ufunc is not np.matmul:
        real[first] = dry[first] = number
    real_out: Options = {}
    dry_out: Options = {}
    if out is not None:
        shape = out[0] if out[0] is not None else np.broadcast_shapes(*(np.shape(a) for a in real[:1]))
        real_out, dry_out = {"out": np.empty(shape, out[1])}, {"out": DryArray(shape, out[1])}
    both = agree(lambda: ufunc(*dry, **dry_out), lambda: ufunc(*real, **real_out))
    if both is not None and dry_out:
        assert both[0] is dry_out["out"]


@settings(max_examples=150)
@given(
    name=st.sampled_from(["add.reduce", "maximum.reduce", "sum", "mean", "np.sum", "np.mean"]),
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple), kind=kinds,
    axis=st.none() | st.integers(-3, 2) | st.lists(st.integers(-3, 2), max_size=2).map(tuple),
    options=st.fixed_dictionaries(
        {}, optional={"keepdims": st.booleans(), "dtype": st.sampled_from([np.float32, np.float64])}
    ),
    out=st.none() | st.tuples(shapes, kinds),
)  # fmt: skip
@example("add.reduce", (2, 3), DTYPES[0], 0, {}, ((3,), DTYPES[1]))
@example("add.reduce", (2, 3), DTYPES[1], 0, {}, ((1, 3), DTYPES[1]))
def test_reductions_are_numpys(name: str, shape: Any, kind: Any, axis: Any, options: Any, out: Any) -> None:
    """Sums, maxima and means over any axes have NumPy's shape and dtype, or fail where NumPy does."""

    def reduce(a: Any, out: Options) -> Any:
        if name.endswith("reduce"):
            return getattr(np, name.split(".")[0]).reduce(a, axis=axis, **options, **out)
        if name.startswith("np."):
            return getattr(np, name[3:])(a, axis=axis, **options)
        return getattr(a, name)(axis=axis, **options)

    real_out: Options = {}
    dry_out: Options = {}
    if out is not None and name.endswith("reduce"):
        real_out, dry_out = {"out": np.empty(*out)}, {"out": DryArray(*out)}
    both = agree(lambda: reduce(DryArray(shape, kind), dry_out), lambda: reduce(np.ones(shape, kind), real_out))
    if both is not None and dry_out:
        assert both[0] is dry_out["out"]


@settings(max_examples=150)
@given(
    target=shapes, into=kinds, key=keys, shape=shapes, kind=kinds, number=st.none() | numbers,
    casting=st.sampled_from(["unsafe", "same_kind", "safe", "no", "equiv"]),
)  # fmt: skip
@example((2, 3), DTYPES[0], ..., (1, 1, 3), DTYPES[2], None, "unsafe")
@example((2, 3), DTYPES[0], ..., (4, 3), DTYPES[0], None, "unsafe")
@example((), DTYPES[0], ..., (1,), DTYPES[0], None, "unsafe")
def test_assignments_and_copies_are_numpys(
    target: Any, into: Any, key: Any, shape: Any, kind: Any, number: Any, casting: Any
) -> None:
    """Assigning to any part of an array, and np.copyto, accept the shapes and casts that NumPy accepts."""
    real, dry = np.zeros(target, into), DryArray(target, into)
    real_value, dry_value = (number, number) if number is not None else (np.ones(shape, kind), DryArray(shape, kind))

    def assign(array: Any, value: Any) -> Any:
        array[key] = value
        return array

    def copy(array: Any, value: Any) -> Any:
        np.copyto(array, value, casting=casting)
        return array

    for do in (assign, copy):
        agree(lambda: do(dry, dry_value), lambda: do(real, real_value))  # noqa: B023


@given(arrays=st.lists(st.tuples(shapes, kinds), min_size=1, max_size=3), axis=st.integers(-3, 2))
@example([((2, 3), DTYPES[0]), ((4, 3), DTYPES[1])], 0)
@example([((2, 3), DTYPES[0]), ((2, 3), DTYPES[1])], 2)
def test_joined_arrays_are_numpys(arrays: Any, axis: int) -> None:
    """np.concatenate and np.stack join what NumPy joins, in the dtype that it chooses."""
    for join in (np.concatenate, np.stack):
        agree(
            lambda: join([DryArray(*each) for each in arrays], axis=axis),  # noqa: B023
            lambda: join([np.ones(*each) for each in arrays], axis=axis),  # noqa: B023
        )


@given(shape=shapes, kind=kinds, other=kinds, more=shapes | st.integers(0, 5))
def test_new_arrays_are_numpys(shape: Any, kind: Any, other: Any, more: Any) -> None:
    """empty_like, zeros_like, astype, copy, iteration and len give what NumPy gives."""
    real: Any = np.zeros(shape, kind)
    dry: Any = DryArray(shape, kind)
    for like in (np.empty_like, np.zeros_like):
        same(like(dry), like(real))
        same(like(dry, other), like(real, other))
        same(like(dry, shape=more), like(real, shape=more))
    same(dry.astype(other), np.zeros(shape, other))
    same(dry.copy(), real.copy())
    if shape:
        assert len(dry) == len(real)
        for row, wanted in zip(dry, real, strict=True):
            same(row, wanted)


def test_operators_work_between_worlds_only_into_the_dry_one() -> None:
    """A dry array takes part in arithmetic with numbers and arrays; its result cannot enter an array with values."""
    dry: Any = DryArray((2, 3), np.float32)
    real = np.ones((2, 3), np.float32)
    same(dry + 1.5, real + 1.5)
    same(real * dry, real * real)
    same(dry > 0, real > 0)
    same(dry @ dry.swapaxes(0, 1), real @ real.swapaxes(0, 1))
    with pytest.raises(TypeError, match="values"):
        np.add(real, dry, out=real)
    with pytest.raises(TypeError, match="values"):
        np.copyto(real, dry)
    with pytest.raises(TypeError, match="values"):
        real[...] = dry
    with pytest.raises(TypeError, match="values"):
        np.asarray(dry)


def test_nothing_is_decided_by_values_that_are_not_there() -> None:
    """Truth and integers are refused; as a float an unknown number is NaN; masks and unknown functions are refused."""
    dry = DryArray((2, 3), np.float32)
    with pytest.raises(TypeError, match="decided"):
        bool(dry.sum() > 0)
    with pytest.raises(TypeError):
        int(dry.sum())  # type: ignore[call-overload]
    assert math.isnan(float(dry.mean()))
    unknown = DryArray((2, 1), np.float32).tolist()
    assert [[math.isnan(each) for each in row] for row in unknown] == [[True], [True]]
    with pytest.raises(TypeError, match="one element"):
        float(dry)
    with pytest.raises(IndexError, match="Without values"):
        dry[dry > 0]
    for refused in (np.argsort, np.linalg.norm, np.modf, np.add.accumulate, lambda a: np.add(a, a, where=a > 0)):
        with pytest.raises(TypeError):
            refused(dry)
    with pytest.raises(TypeError):
        len(DryArray((), np.float32))
    with pytest.raises(ValueError, match="negative"):
        DryArray((2, -3), np.float32)


def test_views_of_what_cannot_be_written_cannot_be_written() -> None:
    """Read-only passes on to every view, not to copies, as with NumPy."""
    dry: Any = DryArray((2, 3), np.float32)
    dry.flags.writeable = False
    for view in (dry[:1], dry.view(), dry.view(np.int32), dry.reshape(3, 2), dry.swapaxes(0, 1)):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        with pytest.raises(ValueError, match="read-only"):
            np.copyto(view, 0)
    for new in (dry.copy(), dry.astype(np.float16), dry + 1, np.empty_like(dry), dry.reshape(3, 2, copy=True)):
        assert new.flags.writeable
