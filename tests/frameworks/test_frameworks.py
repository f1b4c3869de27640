import io
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from helpers import by_night
from zerosim import theory
from zerosim.bands import WIRES, Array
from zerosim.frameworks import averages, likeness
from zerosim.frameworks import run as frameworks
from zerosim.frameworks.comparison import FrameworkComparison
from zerosim.frameworks.observation import SETTLED, Observation
from zerosim.frameworks.profiler_log import MARK, RING, Log
from zerosim.frameworks.variants import VARIANTS, Variant
from zerosim.records.frameworks import (
    BEFORE,
    BYTES,
    DECISIONS,
    ELSEWHERE,
    GRADIENTS,
    GRADS,
    MASTER,
    NORMS,
    PARAMS,
    STATE,
    Family,
    Framework,
    Frameworks,
)
from zerosim.records.real_ranks import Settings
from zerosim.report import frameworks_console
from zerosim.stages import HPZ, HSDP, ROWS, HSDPKept, Over, Stage, ZeRO1Group
from zerosim.worlds import gloo
from zerosim.worlds.gloo import HEADER, Call, Op

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WIDE, PRIME = [64, 128, 128, 64], [7, 11, 13, 5]
P = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 64 + 64
COUNTERS = 6 * 4  # bytes: Adam keeps a step count in fp32 for each of six tensors
BROKEN = Variant("DDP with an option that it does not have", Family.DDP, options={"no_such_option": 1})


class Ran(NamedTuple):
    found: Frameworks
    seen: dict[str, list[Observation]]

    def row(self, name: str) -> Framework:
        return next(row for row in self.found.rows if row.name.startswith(name))

    def compared_with(self, row: Variant, seen: list[Observation]) -> FrameworkComparison:
        return FrameworkComparison(row, self.found.settings, self.found.steps, seen)


def _run(ranks: int, widths: list[int], names: Sequence[str], *more: Variant) -> Ran:
    pytest.importorskip("torch")
    seen: dict[str, list[Observation]] = {}
    observed = frameworks._observed

    def remembered(variant: Variant, *rest: Any) -> list[Observation]:
        seen[variant.name] = observed(variant, *rest)
        return seen[variant.name]

    settings = Settings(
        ranks=ranks, steps=8, batch=3, seed=7, model_seed=0, widths=widths, collectives=[], precisions=[],
        wire="fp32", backend="gloo", fault=None, rows=[],
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frameworks, "_observed", remembered)
        rows = [row for row in VARIANTS if row.name in names]
        return Ran(frameworks.run(settings, timeout=60, variants=[*rows, *more]), seen)


FOUR = (
    "DDP",
    "DDP, fp16_compress_hook",
    "DDP + ZeroRedundancyOptimizer",
    "FSDP2, reshard_after_forward=False",
    "FSDP2, reshard_after_forward=True, bf16",
)
FIVE = ("DDP, gradient_as_bucket_view", "FSDP2, reshard_after_forward=True")
MESH, MESH_KEPT = (f"FSDP2, 2-D mesh of groups of 2, reshard_after_forward={reshard}" for reshard in (True, False))
SECOND_COPY, IN_GROUP = "FSDP2, reshard_after_forward=2", "DDP + ZeroRedundancyOptimizer, process_group of 2"
GROUPED = (IN_GROUP, SECOND_COPY, MESH_KEPT, MESH)


@pytest.fixture(scope="module")
def four() -> Ran:
    return _run(4, WIDE, FOUR)


@pytest.fixture(scope="module")
def five() -> Ran:
    return _run(5, PRIME, FIVE, BROKEN)


@pytest.fixture(scope="module")
def mesh() -> Ran:
    return _run(4, WIDE, (MESH,))


@pytest.fixture(scope="module")
def grouped() -> Ran:
    return _run(4, WIDE, GROUPED)


@pytest.fixture(scope="module")
def six() -> Ran:
    return _run(6, PRIME, GROUPED)


@pytest.fixture(params=["four", *by_night("mesh", "five", "six")])
def ran(request: pytest.FixtureRequest) -> Ran:
    found: Ran = request.getfixturevalue(request.param)
    return found


def _rows(ran: Ran) -> Iterator[tuple[Variant, list[Observation]]]:
    return ((row, ran.seen[row.name]) for row in VARIANTS if row.name in ran.seen)


# -- real ranks


def test_gradients_are_the_ring_over_local_ones(ran: Ran) -> None:
    """DDP and FSDP2 give, to the last bit, what the simulator's ring makes of the local gradients."""
    compared = [row for row in ran.found.rows if row.family in (Family.DDP, Family.FSDP) and not row.skipped]
    assert {row.name for row in compared} == {name for name in ran.seen if "ZeroRedundancyOptimizer" not in name}
    for row in compared:
        assert [(step.step, step.differing) for step in row.gradients] == [(1, 0), (2, 0), (3, 0)], row.name
        assert all(step.compared for step in row.gradients)
    assert not ran.found.failures


def _in_order_of_ranks(summands: Array) -> Array:
    return np.asarray([*accumulate(summands, lambda one, other: (one + other).astype(one.dtype))][-1])


def _over_all_at_once(*given: Any, node: int) -> list[Array]:
    return averages.fsdp_average(*given)


ONE_RING = SimpleNamespace(fsdp_average=_over_all_at_once)


@pytest.mark.parametrize(
    ("which", "what", "other"),
    [
        ("four", "averages.ring_sum", _in_order_of_ranks),
        pytest.param("five", "averages.ring_sum", _in_order_of_ranks, marks=pytest.mark.slow),
        pytest.param("mesh", "comparison.averages", ONE_RING, marks=pytest.mark.slow),
    ],
)
def test_another_order_of_summation_is_noticed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, which: str, what: str, other: Any
) -> None:
    """The gradients' check fails where the same numbers are added in the order of the ranks, or in one ring for two."""
    ran: Ran = request.getfixturevalue(which)
    monkeypatch.setattr(f"zerosim.frameworks.{what}", other)
    for row, seen in _rows(ran):
        if seen[0].gradients:
            compared_with = ran.compared_with(row, seen)
            record = compared_with.record()
            assert {failure.check for failure in compared_with.failures} == {GRADIENTS}
            assert min(step.differing for step in record.gradients) > 0.1 * record.gradients[0].compared


def test_every_byte_of_the_kernel_is_explained(ran: Ran) -> None:
    """What the kernel counts in each settled step is the collectives' payload and gloo's framing, on every rank."""
    for row in ran.found.rows:
        for rank in row.ranks:
            if not rank.kernel:
                pytest.skip(str(row.unmeasured))
            assert rank.moved is not None
            assert rank.framing is not None
            for counted in rank.kernel.values():
                assert counted[SETTLED:] == [rank.moved + rank.framing] * (ran.found.steps - SETTLED), row.name


def test_a_collective_that_is_not_known_of_is_noticed(four: Ran) -> None:
    """The bytes' check fails, on every rank, where one collective is left out of the explanation."""
    for row, seen in _rows(four):
        if not any(each.counted[0].tcp_sent for each in seen):
            pytest.skip(str(seen[0].unmeasured))
        compared_with = four.compared_with(row, [each._replace(asked=each.asked[1:]) for each in seen])
        compared_with.record()
        assert {failure.check for failure in compared_with.failures} == {BYTES}
        assert {failure.rank for failure in compared_with.failures} == set(range(4))


@pytest.mark.slow
def test_a_ring_that_is_another_is_noticed(mesh: Ran) -> None:
    """The bytes' check fails, on every rank, where what ran over a group is said to have run over all."""
    [(row, seen)] = _rows(mesh)
    if not any(each.counted[0].tcp_sent for each in seen):
        pytest.skip(str(seen[0].unmeasured))
    over_all = [each._replace(asked=[call._replace(ring=()) for call in each.asked]) for each in seen]
    compared_with = mesh.compared_with(row, over_all)
    compared_with.record()
    assert {failure.check for failure in compared_with.failures} == {BYTES}
    assert {failure.rank for failure in compared_with.failures} == set(range(4))


@pytest.mark.slow
def test_traffic_on_a_mesh(mesh: Ran) -> None:
    """Parameters are gathered twice in the group and reduced there, and each half all-reduced over two replicas."""
    half, ranks = 4 * P // 2, mesh.row(MESH).ranks
    assert [rank.asked for rank in ranks] == [2 * half + half + 2 * half // 2] * 4
    assert [rank.moved for rank in ranks] == [2 * half + 2 * half + 2 * half // 2] * 4
    rings = {call.op: call.ring for call in mesh.seen[MESH][2].asked}
    assert rings == {Op.ALL_GATHER: (2, 3), Op.REDUCE_SCATTER: (2, 3), Op.ALL_REDUCE: (0, 2)}


@pytest.mark.slow
def test_traffic_in_groups(grouped: Ran) -> None:
    """With a second copy the backward pass gathers in the group; owners in a group broadcast there."""
    half, three_quarters = 4 * P // 2, 3 * 4 * P // 4
    for name, asked, moved in (
        (SECOND_COPY, 2 * three_quarters + half, 3 * three_quarters + half),
        (MESH_KEPT, half + half + 2 * half // 2, half + 2 * half + 2 * half // 2),
    ):
        ranks = grouped.row(name).ranks
        assert [(rank.asked, rank.moved) for rank in ranks] == [(asked, moved)] * 4, name
    assert sum(rank.asked for rank in grouped.row(IN_GROUP).ranks) == 4 * 2 * three_quarters + 2 * 4 * P


def test_traffic_in_units_of_the_parameters(four: Ran) -> None:
    """DDP sends 2 P and ZeroRedundancyOptimizer 3; FSDP2 asks for 2 or 3, of which gloo makes 3 or 4."""
    unit = 3 * P  # (N-1)/N of P, fp32, N = 4
    for name, asked, moved in (
        ("DDP", 2 * unit, 2 * unit),
        ("DDP, fp16", 2 * unit // 2, 2 * unit // 2),
        ("FSDP2, reshard_after_forward=False", 2 * unit, 3 * unit),
        ("FSDP2, reshard_after_forward=True, bf16", 3 * unit // 2, 4 * unit // 2),
    ):
        ranks = four.row(name).ranks
        assert [(rank.asked, rank.moved) for rank in ranks] == [(asked, moved)] * 4, name
    assert sum(rank.asked for rank in four.row("DDP + Zero").ranks) == 4 * 3 * unit


def test_held_bytes(four: Ran) -> None:
    """Walked tensors and the allocator's log agree on the bytes that a framework holds, by band."""
    whole = {PARAMS: 4 * P, GRADS: 4 * P, MASTER: 0, STATE: 8 * P + COUNTERS}
    shard = {PARAMS: P, GRADS: P, MASTER: 0, STATE: 2 * P + COUNTERS}
    for name, bands, elsewhere in (
        ("DDP", whole, 4 * P),  # its bucket
        ("FSDP2, reshard_after_forward=False", shard, 0),
        ("FSDP2, reshard_after_forward=True, bf16", shard, 0),
    ):
        for rank in four.row(name).ranks:
            for held in (rank.held, rank.rest):
                assert {band: held[band] for band in bands} == bands, name
                assert 0 <= held[ELSEWHERE] - elsewhere < 512, name  # small tensors of indices and flags
    dealt = four.row("DDP + Zero").ranks
    assert sum(rank.held[STATE] for rank in dealt) == whole[STATE]
    assert [rank.held[PARAMS] + rank.held[GRADS] for rank in dealt] == [8 * P] * 4


@pytest.mark.slow
def test_held_bytes_on_a_mesh(mesh: Ran) -> None:
    """Every rank of a mesh holds a half of everything, whichever of the two groups it is in."""
    for rank in mesh.row(MESH).ranks:
        for held in (rank.held, rank.rest):
            assert (held[PARAMS], held[GRADS], held[STATE]) == (2 * P, 2 * P, 4 * P + COUNTERS)
            assert 0 <= held[ELSEWHERE] < 512


@pytest.mark.slow
def test_held_bytes_in_groups(grouped: Ran) -> None:
    """A second copy is gone as the update begins; the owners of a group hold all of the optimizer's state."""
    for rank in grouped.row(SECOND_COPY).ranks:
        assert (rank.held[PARAMS], rank.held[GRADS], rank.held[STATE]) == (P, P, 2 * P + COUNTERS)
        assert 0 <= rank.held[ELSEWHERE] < 512
    owners = grouped.row(IN_GROUP).ranks
    for group in (owners[:2], owners[2:]):
        assert sum(rank.held[STATE] for rank in group) == 8 * P + COUNTERS
    assert [rank.held[PARAMS] + rank.held[GRADS] for rank in owners] == [8 * P] * 4


@pytest.mark.slow
def test_held_bytes_where_nothing_divides(five: Ran) -> None:
    """FSDP2 on five ranks holds of every parameter a fifth of the rows, rounded up; DDP's gradients are its bucket."""
    tensors = [shape for i, o in pairwise(PRIME) for shape in ((o, i), (o, 1))]
    for rank, seen in enumerate(five.row("FSDP2").ranks):
        padded = sum(-(-rows // 5) * columns for rows, columns in tensors)
        rows_of = [(min(-(-rows // 5), max(0, rows - rank * -(-rows // 5))), columns) for rows, columns in tensors]
        own = sum(rows * columns for rows, columns in rows_of)
        assert seen.held[PARAMS] == 4 * padded
        assert seen.held[STATE] == 2 * 4 * own + COUNTERS
    for seen in five.row("DDP").ranks:
        n = sum(rows * columns for rows, columns in tensors)
        assert (seen.held[PARAMS], seen.held[GRADS], seen.held[STATE]) == (4 * n, 4 * n, 8 * n + COUNTERS)
        assert seen.held[ELSEWHERE] < 512


def test_peak(four: Ran) -> None:
    """A peak is what was there before the step and what came in it; DDP's is where Adam has two temporaries."""
    for rank in four.row("DDP").ranks:
        largest = 4 * 128 * 128
        assert rank.peak_phase == "update"
        assert rank.peak[BEFORE] == sum(rank.rest.values()) - 4 * P  # all but the gradients, which were let go of
        assert rank.peak["backward"] == 4 * P
        assert 2 * largest <= rank.peak["update"] < 2 * largest + 1024
    for row in four.found.rows[3:]:
        assert all(rank.exact and rank.peak == row.ranks[0].peak for rank in row.ranks), row.name
        gathered = 3 * P * WIRES[row.wire].itemsize // 4
        assert sum(row.ranks[0].peak.values()) > sum(row.ranks[0].rest.values()) + gathered


def test_what_a_framework_behaves_like(four: Ran) -> None:
    """The scheme is found from the bands that are sharded, and where it is left from the measured numbers."""
    stages = ["data parallel", "data parallel", "ZeRO-1", "ZeRO-3, kept", "ZeRO-3"]
    assert [row.scheme for row in four.found.rows] == stages
    departs = {row.name: " ".join(row.departs) for row in four.found.rows}
    assert "+4.00 B elsewhere" in departs["DDP"]
    assert "asks for 3.00 P for 2" in departs["DDP + ZeroRedundancyOptimizer"]
    assert "its ranks hold from 12.08 to 15.96 B" in departs["DDP + ZeroRedundancyOptimizer"]
    assert "asks" not in departs["FSDP2, reshard_after_forward=False"]
    assert "gloo moves 3.00 P" in departs["FSDP2, reshard_after_forward=False"]


@pytest.mark.slow
def test_what_a_mesh_behaves_like(mesh: Ran) -> None:
    """FSDP2 on a 2-D mesh is HSDP, in bytes held and asked for."""
    row = mesh.row(MESH)
    assert row.scheme == HSDP.name
    assert [found.partition(" (")[0] for found in row.departs] == ["gloo moves 3.33 P"]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["grouped", "six"])
def test_what_groups_behave_like(request: pytest.FixtureRequest, which: str) -> None:
    """Each of the four is the row that has its groups, also where nothing divides."""
    ran: Ran = request.getfixturevalue(which)
    assert [row.scheme for row in ran.found.rows] == [row.name for row in (ZeRO1Group, HPZ, HSDPKept, HSDP)]
    if which == "grouped":
        assert [len(row.departs) for row in ran.found.rows] == [3, 1, 1, 1]
        assert "asks for 2.67 P for 2 (" in " ".join(ran.row(IN_GROUP).departs)


@pytest.mark.parametrize(("ranks", "node"), [(4, 2), (6, 2), (6, 3), (6, None)])
def test_every_row_is_found_by_its_bytes(ranks: int, node: int | None) -> None:
    """The textbook's bytes of a row, held and sent, lead to that row."""

    def job(row: Stage) -> theory.Job:
        return theory.Job(row, (((7, 11),), ((11, 13),)), ranks, precision="fp32", node=node)

    rows = [row for row in ROWS if not row.offload]
    rows = [row for row in rows if node or not (row.two_axes or row.reshard_after_forward == "group")]
    for row in rows:
        over = likeness.sharded(likeness.by_kind(theory.resident(job(row))), job)
        assert likeness.row_of(over, likeness.traffic(job(row)), job) == row
    assert likeness.row_of({"params": Over.ALL, "grads": Over.NOBODY, "optimizer": Over.ALL}, {}, job) is None


def test_parameters_are_the_simulators(ran: Ran) -> None:
    """In fp32 every framework ends within 1e-5 of the simulator's parameters, and all its ranks alike."""
    compared = [row for row in ran.found.rows if not row.skipped and row.precision == row.wire == "fp32"]
    assert compared
    for row in compared:
        assert row.largest < 1e-5, row.name


def test_norms_and_decisions_are_the_simulators(ran: Ran) -> None:
    """clip_grad_norm_ is within 16 ulp of ours, and of type inf ours; both scalers skip what the simulator does."""
    assert not ran.found.failures
    for row, seen in _rows(ran):
        record = ran.compared_with(row, seen).record()
        if row.family not in (Family.DDP, Family.FSDP):
            assert not record.norms
            continue
        empty = ran.found.settings.widths == PRIME and row.family is Family.FSDP and not row.group  # a shard of no rows
        assert [norm.kind for norm in record.norms] == (["2.0"] if empty else ["2.0", "inf"]) * 3
        assert all(norm.ours > 0 and norm.ulps <= (16 if norm.kind == "2.0" else 0) for norm in record.norms), row.name
        scalers = ["GradScaler", "ShardedGradScaler"] if row.family is Family.FSDP else []
        assert [each.scaler for each in record.decisions] == [scaler for scaler in scalers for _ in range(4)]
        for number, each in enumerate(record.decisions):
            assert each.skipped == [number % 4 == 1] * ran.found.settings.ranks
            assert each.scale == [1024, 512, 512, 1024][number % 4]


def test_another_norm_or_decision_is_noticed(four: Ran) -> None:
    """Where one rank has another norm, or steps where others skip, the checks fail, on that rank."""
    assert any(row.family is Family.FSDP for row, _ in _rows(four))
    for row, seen in _rows(four):
        if row.family is not Family.FSDP:
            continue
        grads = [
            each._replace(norms={kind: 2 * value for kind, value in each.norms.items()}) for each in seen[2].gradients
        ]
        decided = {name: [(False, scale) for _, scale in steps] for name, steps in seen[2].decided.items()}
        compared_with = four.compared_with(
            row, [*seen[:2], seen[2]._replace(gradients=grads, decided=decided), *seen[3:]]
        )
        compared_with.record()
        found = {(failure.check, failure.rank) for failure in compared_with.failures}
        assert found == {(NORMS, 2), (DECISIONS, 2)}


@pytest.mark.slow
def test_deepspeed() -> None:
    """DeepSpeed's bytes are explained, stage 3 with nothing kept is ZeRO-3, and it learns what the others do."""
    pytest.importorskip("deepspeed")
    names = "DeepSpeed stage 2, fp32", "DeepSpeed stage 3, nothing kept, fp32"
    ran = _run(4, WIDE, names)
    assert not ran.found.ended
    assert not ran.found.failures
    assert [row.scheme for row in ran.found.rows] == ["ZeRO-2", "ZeRO-3"]
    for row, asked in zip(ran.found.rows, (3 * 3 * P, 3 * 3 * P), strict=True):
        assert all(0 <= rank.asked - asked < 32 for rank in row.ranks), row.name  # and the norm of the gradients
        assert row.largest < 1e-5


@pytest.mark.slow
def test_a_rank_that_fails_ends_it(five: Ran) -> None:
    """An error in a rank is told with the framework's name, and what was found before is kept."""
    assert "no_such_option" in five.found.ended
    assert BROKEN.name in five.found.ended
    assert [row.skipped for row in five.found.rows] == ["", "", "not reached"]


def test_table(ran: Ran) -> None:
    """The table has a line and a sentence for each framework, and the verdicts say hold only of what was compared."""
    out = io.StringIO()
    frameworks_console.show(ran.found, Console(file=out), verbose=True)
    text = out.getvalue()
    assert text.count("hold: ") == 5
    assert max(map(len, text.splitlines())) <= frameworks_console.WIDTH
    assert "…" not in text
    assert all(" ".join(row.name.split()) in " ".join(text.split()) for row in ran.found.rows)
    assert ("incomplete" in text) == bool(ran.found.ended)


def test_deepspeed_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without deepspeed its rows say what to install, nothing is started, and no check is said to hold."""
    pytest.importorskip("torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else SimpleNamespace())
    monkeypatch.setattr(frameworks, "children", None)
    settings = Settings(
        ranks=4, steps=1, batch=1, seed=7, model_seed=0, widths=PRIME, collectives=[], precisions=[], wire="fp32",
        backend="gloo", fault=None, rows=[],
    )  # fmt: skip
    rows = [row for row in VARIANTS if row.family is Family.DEEPSPEED]
    told: list[str] = []
    found = frameworks.run(settings, told.append, variants=rows)
    assert told == [row.name for row in rows]
    assert len(told) == frameworks.work(rows)
    assert {row.skipped for row in found.rows} == {"deepspeed is not installed; pip install 'zerosim[deepspeed]'"}
    out = io.StringIO()
    frameworks_console.show(found, Console(file=out))
    assert "zerosim[deepspeed]" in out.getvalue()
    assert out.getvalue().count("not measured: ") == 5


def test_ranks_that_cannot_be_cut_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks cannot be cut into groups those frameworks are not started, and it says why."""
    pytest.importorskip("torch")
    monkeypatch.setattr(frameworks, "children", None)
    rows = [row for row in VARIANTS if row.name in GROUPED]
    for ranks in (2, 5):
        settings = Settings(
            ranks=ranks, steps=1, batch=1, seed=7, model_seed=0, widths=PRIME, collectives=[], precisions=[],
            wire="fp32", backend="gloo", fault=None, rows=[],
        )  # fmt: skip
        found = frameworks.run(settings, variants=rows)
        assert [row.skipped for row in found.rows] == [f"{ranks} ranks cannot be cut into several groups of 2"] * 4


# -- gloo's arithmetic, without gloo


def test_an_average_over_two_axes() -> None:
    """Of numbers whose sums are exact it is the mean, whatever the groups; a group of all ranks is none."""
    rng, node = np.random.default_rng(13), 2
    local = [[rng.integers(-64, 64, shape).astype(np.float32) for shape in ((5, 3), (5,))] for _ in range(4)]
    for wire in WIRES["fp32"], WIRES["bf16"]:
        found = averages.fsdp_average(local, [[0, 1]], wire, node)
        for tensor, each in zip(found, zip(*local, strict=True), strict=True):
            np.testing.assert_array_equal(tensor, np.mean(each, axis=0).astype(wire).astype(np.float32))
    for one, other in zip(*(averages.fsdp_average(local, [[0, 1]], WIRES["fp32"], n) for n in (4, None)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("elements", [1, 2 * 3 * 5 * 7, 1009])
def test_the_ring_of_a_buffer_of_any_length(ranks: int, elements: int) -> None:
    """Element i lies in chunk c = i // C and is ((x[c-1] + x[c-2]) + ...) + x[c], rounded at every addition."""
    x = np.random.default_rng(11).standard_normal((ranks, elements)).astype(np.float32)
    length = 2 * -(-elements // (2 * ranks))
    expected = []
    for i in range(elements):
        c = i // length
        order = [x[(c - 1 - t) % ranks, i] for t in range(ranks)]
        expected.append([*accumulate(order)][-1])
    np.testing.assert_array_equal(averages.ring_sum(x), np.array(expected, np.float32))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("elements", [1, 5, 33_088, 10_000_019])
@pytest.mark.parametrize("name", [Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.BROADCAST])
def test_what_is_sent_arrives(ranks: int, elements: int, name: str) -> None:
    """Over all ranks as much is sent as received, and no less than must reach them."""
    asked = Call(name, elements * (ranks if name == Op.ALL_GATHER else 1), 4, root=ranks - 1)
    moved = [gloo.moved(asked, rank, ranks) for rank in range(ranks)]
    assert all(moved)
    sent, received = (sum(getattr(each, way) for each in moved) for way in ("sent", "received"))
    messages = [sum(getattr(each, f"messages_{way}") for each in moved) for way in ("sent", "received")]
    assert sent == received == asked.nbytes * (ranks - 1) * (2 if name in (Op.ALL_REDUCE, Op.REDUCE_SCATTER) else 1)
    assert messages[0] == messages[1] > 0
    framing = [sum(part) for part in zip(*(each.framing() for each in moved if each), strict=True)]
    assert framing[0] == framing[1] == 3 * HEADER * messages[0]


# -- the profiler's log, without a profiler


class _Tree:
    """Events as the profiler has them: steps of ten nanoseconds, in each a phase of two to six."""

    def __init__(self, steps: int) -> None:
        self.steps = [self._event(f"{MARK}step", 10 * k, 10 * k + 9) for k in range(steps)]
        for k, step in enumerate(self.steps):
            phases = [("forward", 1, 4), ("backward", 4, 7), ("update", 7, 9)]
            step.children = [self._event(MARK + name, 10 * k + b, 10 * k + e - 1) for name, b, e in phases]

    def _event(self, name: str, begin: int, end: int, **more: Any) -> SimpleNamespace:
        kind = SimpleNamespace(name="Other")
        return SimpleNamespace(
            **{"name": name, "start_time_ns": begin, "end_time_ns": end, "children": [], "tag": kind} | more
        )

    def move(self, step: int, at: int, address: int, nbytes: int) -> None:
        """``nbytes`` come to ``address``, or go from it."""
        phase = self.steps[step].children[0 if at < 4 else 1 if at < 7 else 2]
        typed = (None, SimpleNamespace(ptr=address, alloc_size=nbytes))
        time = 10 * step + at
        phase.children.append(self._event("[memory]", time, time, tag=SimpleNamespace(name="Allocation"), typed=typed))


def test_a_block_that_was_not_seen_to_go_goes_where_its_like_does() -> None:
    """Of a block that one step frees unseen, held and peak count no more than in a step that was seen to free it."""
    tree = _Tree(5)
    for step in range(5):
        tree.move(step, 2, 100 + step, 1000)
        if step != 3:
            tree.move(step, 3, 100 + step, -1000)
        tree.move(step, 5, 200, 30)
        tree.move(step, 8, 200, -30)
    log = Log(tree.steps, kept=set())
    for step in (2, 3):
        assert log.held(10 * step + 7, {GRADS: {200: 30}}) == {GRADS: 30, ELSEWHERE: 0}
        assert log.peak(10 * step, 10 * step + 9).parts == {"forward": 1000}
        assert log.peak(10 * step, 10 * step + 9).exact
    assert not log.strays(20)


def test_a_block_whose_like_was_never_seen_to_go_makes_a_bound() -> None:
    """Where every step frees a block unseen, it counts to the end of its phase and the peak is not said to be exact."""
    tree = _Tree(4)
    for step in range(4):
        tree.move(step, 2, 100, 1000)  # the same address each time: it must have gone before
        tree.move(step, 5, 200, 30)
        tree.move(step, 6, 200, -30)
    log = Log(tree.steps, kept=set())
    assert log.peak(20, 29).parts == {"forward": 1000}
    assert not log.peak(20, 29).exact
    assert log.held(27, {}) == {ELSEWHERE: 0}


def test_what_stays_is_told_from_what_was_missed() -> None:
    """A block in use at the end stays though others of its origin went; one that no tensor shows is a stray."""
    tree = _Tree(4)
    tree.move(0, 2, 100, 1000)
    tree.move(0, 3, 101, 1000)
    tree.move(0, 5, 101, -1000)
    tree.move(1, 8, 300, 70)
    log = Log(tree.steps, kept={100})
    assert log.held(25, {PARAMS: {100: 1000}}) == {PARAMS: 1000, ELSEWHERE: 70}
    assert log.peak(20, 29).parts == {BEFORE: 1000 + 70}
    assert log.strays(20).total() == 70


def test_a_collective_says_over_which_ranks() -> None:
    """What is asked for within a mark is over the ranks that it names, anything else over all."""
    tree = _Tree(4)
    inputs = [[SimpleNamespace(sizes=[3, 5], dtype=SimpleNamespace(itemsize=4))]]
    mark = tree._event(f"{RING}1 3", 25, 27)
    mark.children = [tree._event("c10d::allreduce_", 26, 26, typed=(None, SimpleNamespace(inputs=inputs)))]
    plain = tree._event("c10d::allreduce_", 28, 28, typed=(None, SimpleNamespace(inputs=inputs)))
    tree.steps[2].children[1].children += [mark, plain]
    log = Log(tree.steps, kept=set())
    assert log.asked(20, 29) == [Call(Op.ALL_REDUCE, 15, 4, ring=(1, 3)), Call(Op.ALL_REDUCE, 15, 4)]
