"""What a user calls: what it refuses, what it reads, what it prints, how it ends, and what is judged from a file."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402

from conformance import trial, variants  # noqa: E402
from zerosim.cli.main import main  # noqa: E402
from zerosim.conformance import check, run_ranks, words  # noqa: E402
from zerosim.conformance import seen as steps  # noqa: E402
from zerosim.conformance.check import Check  # noqa: E402
from zerosim.optimizer import SGD, Adam, AdamW, Schedule  # noqa: E402
from zerosim.records.conformance import EVERY, Cause, Finding, Verdict, load_manifest  # noqa: E402
from zerosim.stages import DP, HSDP, Stage, ZeRO1, ZeRO3  # noqa: E402

dist: Any = torch.distributed
pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def alone(net: Any, optimizer: Any = None, **told: Any) -> Check:
    """A check of one rank."""
    return check(net, scheme=DP, loss=mse_loss, optimizer=optimizer or SGD(lr=0.1), **told)


def linear(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(3, 2)


def batch(rows: int = 5, seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def steps_of(
    watched: Check, net: Any, optimizer: Any, count: int = 3, spoil: Callable[[int], None] = lambda _: None
) -> None:
    for step in range(1, count + 1):
        x, y = batch(seed=step)
        with watched.step(x, y):
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            optimizer.step()
            spoil(step)


# -- one rank


def test_a_right_training_of_one_rank_has_no_findings() -> None:
    """Plain torch, of which every element of gradients, state and parameters is compared in every step."""
    net = linear()
    watched = alone(net, Adam(lr=1e-3))
    steps_of(watched, net, torch.optim.Adam(net.parameters(), lr=1e-3))
    verdict = watched.report(exit=False)
    assert verdict is not None
    assert (verdict.findings, verdict.steps) == ([], 3)
    assert verdict.held[0].endswith("24 of gradients, 48 of optimizer state, 24 of parameters")  # 8 elements, 3 steps


@pytest.mark.parametrize(
    ("optimizer", "mine"),
    [
        (AdamW(lr=1e-2), lambda net: torch.optim.AdamW([
            {"params": [net.weight], "weight_decay": 1e-2}, {"params": [net.bias], "weight_decay": 0.0}], lr=1e-2)),
        (Adam(lr=1e-2, schedule=Schedule(4)), lambda net: Warming(net.parameters(), lr=1e-2, steps=4)),
        (SGD(lr=0.1, momentum=0.5), lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)),
    ],
    ids=["AdamW", "warm-up", "momentum"],
)  # fmt: skip
def test_the_optimizers_of_the_package_are_torchs(optimizer: Any, mine: Callable[[Any], Any]) -> None:
    """AdamW decays what has two dimensions; a schedule changes the rate; momentum is torch's."""
    net = linear()
    watched = alone(net, optimizer)
    steps_of(watched, net, mine(net), 5)
    assert watched.findings == []


def test_who_decays_everything_passes_torchs_optimizer() -> None:
    """AdamW that decays biases too is wrong beside the package's, which says what to pass; with that it is right."""
    net = linear()
    nn.init.ones_(net.bias)
    watched = alone(net, AdamW(lr=1e-2, weight_decay=0.1))
    steps_of(watched, net, torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1), 1)
    (finding,) = watched.findings
    assert "Weight decay is applied to what must not decay" in finding.text
    assert "pass check a torch optimizer that does so, made before sharding" in finding.text
    assert repr(watched) == "Check(data parallel on 1 rank, rank 0: 1 step, 1 finding)"
    told = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)  # another one than trains
    watched = alone(net, told)
    steps_of(watched, net, torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1), 3)
    assert watched.findings == []
    assert repr(watched) == "Check(data parallel on 1 rank, rank 0: 3 steps, 0 findings)"


class Warming(torch.optim.Adam):  # type: ignore[misc, name-defined]
    """Adam whose rate rises with every step, as a scheduler would have it."""

    def __init__(self, params: Any, *, lr: float, steps: int) -> None:
        super().__init__(params, lr=0.0)
        self.rates = [lr * min(1, done / steps) for done in range(20)]

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["lr"] = self.rates.pop(0)
        super().step(closure)


def test_a_rate_of_this_step_counts() -> None:
    """What ``step(lr=)`` says is what the update is judged by."""
    net = linear()
    watched, optimizer = alone(net), torch.optim.SGD(net.parameters(), lr=0.3)
    for lr, wrong in ((0.3, False), (0.2, True)):
        x, y = batch()
        with watched.step(x, y, lr=lr):
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            optimizer.step()
        assert bool(watched.findings) is wrong
    assert "The optimizer's lr is 0.3; the check was told 0.2." in watched.findings[0].text


def test_only_the_first_wrong_step_is_told() -> None:
    """What follows a wrong step follows from it; the step, the band, the parameter and the elements are named."""
    net = linear()
    watched = alone(net)

    def spoil(step: int) -> None:
        if step >= 2:
            with torch.no_grad():
                net.bias[1] += 0.25

    steps_of(watched, net, torch.optim.SGD(net.parameters(), lr=0.1), 4, spoil)
    (finding,) = watched.findings
    assert (finding.step, finding.band, finding.parameter, finding.start, finding.stop) == (2, "params", "bias", 1, 2)
    assert (finding.wrong, finding.total) == (1, 8)
    assert finding.largest == pytest.approx(0.25)
    assert finding.text.endswith("Gradients were right.")


def test_a_step_that_raises_leaves_no_hooks_behind() -> None:
    """The user's error comes through, and the module, the optimizer and torch are as they were."""
    net = linear()
    watched, backward = alone(net), torch.autograd.backward
    with pytest.raises(ZeroDivisionError), watched.step(*batch()):
        1 / 0  # noqa: B018
    assert torch.autograd.backward is backward
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    steps_of(watched, net, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    assert watched.findings == []


def test_what_is_handed_over_is_compared() -> None:
    """Gradients by name, within the step, and a state that is remembered and read after each."""
    net = linear()
    watched = alone(net, SGD(lr=0.1, momentum=0.9))
    state = {name: torch.zeros_like(param) for name, param in net.named_parameters()}
    watched.band("momentum", state)
    for step in (1, 2):
        x, y = batch(seed=step)
        with watched.step(x, y):
            grads = dict(zip(state, torch.autograd.grad(mse_loss(net(x), y), list(net.parameters())), strict=True))
            watched.band("grads", grads)
            with torch.no_grad():
                for name, param in net.named_parameters():
                    state[name].mul_(0.9).add_(grads[name])
                    param -= 0.1 * state[name]
                state["bias"][0] *= 1 + (step == 2)
    (finding,) = watched.findings
    assert (finding.step, finding.band, finding.parameter) == (2, "momentum", "bias")
    assert watched.verdict().notes == []


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"precision": "fp8"}, "precision is one of"),
        ({"average": "all"}, "average is one of rows, ranks"),
        ({"accumulate": 0}, "integer of 1 or more"),
        ({"optimizer": 3}, "an Adam, AdamW or SGD of this package"),
        ({"optimizer": torch.optim.RMSprop}, "an Adam, AdamW or SGD of this package"),
        ({"scheme": "ZeRO-4"}, "check(scheme): no scheme is called 'ZeRO-4'. There are"),
        ({"scheme": HSDP}, "Say how large they are, as in node=8"),
        ({"loss_scale": "dynamic"}, "loss_scale must be of type"),
    ],
)
def test_what_cannot_be_checked_is_refused(told: dict[str, Any], says: str) -> None:
    """In words, before anything is watched."""
    usual: dict[str, Any] = {"scheme": DP, "loss": mse_loss, "optimizer": SGD()}
    with pytest.raises((ValueError, TypeError), match=re.escape(says)):
        check(linear(), **usual | told)


def test_an_optimizer_that_is_not_known_is_refused() -> None:
    """RMSprop, and Adam with AMSGrad, are not judged by another's rule."""
    net = linear()
    with pytest.raises(TypeError, match="got RMSprop"):
        alone(net, torch.optim.RMSprop(net.parameters()))
    with pytest.raises(ValueError, match="amsgrad=True is not known"):
        alone(net, torch.optim.Adam(net.parameters(), amsgrad=True))


def test_modules_of_mixed_dtypes_and_empty_batches_are_refused() -> None:
    """One dtype for all parameters; x is a tensor, or several."""
    net = nn.Sequential(linear(), linear().half())
    with pytest.raises(ValueError, match="all parameters are of one dtype"):
        alone(net)
    watched = alone(linear())
    with pytest.raises(TypeError, match="a tensor, or a tuple or mapping"), watched.step(3, 4):
        pass


# -- what is printed


def verdict(*findings: Finding, held: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Verdict:
    return Verdict("", "ZeRO-1", 4, 5, list(findings), list(held), list(notes))


FOUND = Finding(3, 2, "params", Cause.AVERAGE, "rank 2 does something " + "with many words " * 12 + "at length.")


def test_the_first_line_is_the_answer() -> None:
    """Right, wrong and where, or nothing compared."""
    assert words.answer(verdict(held=("trained",))) == "✓ ZeRO-1 on 4 ranks: 5 steps as the simulator has them"
    assert words.answer(verdict(FOUND)) == "✗ ZeRO-1 on 4 ranks: wrong in step 3, rank 2 (average)"
    every = msgspec.structs.replace(FOUND, rank=EVERY)
    assert words.answer(verdict(every)) == "✗ ZeRO-1 on 4 ranks: wrong in step 3 (average)"
    assert words.answer(verdict()) == "• ZeRO-1 on 4 ranks: nothing was compared"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    """Findings, what holds and notes are wrapped between words."""
    text = words.text(verdict(FOUND, held=("a " * 80,), notes=("b " * 80,)), width)
    assert max(map(len, text.splitlines())) <= width
    assert "✗ step 3, rank 2: does something with" in text


# -- several ranks


def several(function: Callable[[int], Any], ranks: int = 4) -> list[Any]:
    """What ``function`` returns on rank 0, one JSON value a line."""

    def run(rank: int) -> None:
        for value in function(rank) or ():
            if rank == 0:
                print(json.dumps(value))

    ran = run_ranks(run, ranks, timeout=300, show=False)
    assert ran.holds, "\n".join(ran.errors)
    return [json.loads(line) for line in ran.output.splitlines()]


def test_every_rank_ends_with_the_labs_exit_code() -> None:
    """0 where nothing is wrong, 1 on all where something is; rank 0 alone prints, the answer first."""
    ran = run_ranks(lambda rank: trial.train(rank, 1, {}).report(), 3, show=False)
    assert ran.codes == [0, 0, 0], ran.errors
    assert ran.output.startswith("✓ ZeRO-1 on 3 ranks: 3 steps as the simulator has them\n")
    bug = {"old": "total.float() / self.size /", "new": "total.float() /"}
    ran = run_ranks(lambda rank: trial.train(rank, 1, bug).report(), 3, show=False)
    assert ran.codes == [1, 1, 1]
    assert ran.output.startswith("✗ ZeRO-1 on 3 ranks: wrong in step 1 (average)\n")


def test_the_users_group_is_left_alone_and_what_is_asked_is_counted() -> None:
    """Nothing of the check's goes over the user's group or shows in the log; collectives count as the textbook has it.

    Of N = 3 ranks: 2(N-1)/N of an all-reduce's buffer, (N-1)/N of the others', a message itself.
    """

    def run(rank: int) -> Iterator[Any]:
        net = linear()
        watched = check(net, scheme=DP, loss=mse_loss, optimizer=SGD(lr=0.1))
        before = dist.distributed_c10d._world.group_count
        x, y = batch(seed=rank)
        with watched.step(x, y):
            mse_loss(net(x), y).backward()
            for param in net.parameters():
                dist.all_reduce(param.grad)
                param.grad /= 3
                param.data -= 0.1 * param.grad
                param.grad = None
            t, many = torch.zeros(30), [torch.zeros(30) for _ in range(3)]
            dist.all_gather(many, t)
            dist.all_gather_single(torch.zeros(90), t)
            dist.reduce_scatter_single(torch.zeros(10), t)
            dist.reduce_scatter(t, many)
            dist.broadcast(t, 1)
            dist.reduce(t, 2, op=dist.ReduceOp.MAX)
            dist.all_to_all_single(torch.zeros(30), t)
            dist.gather(t, many if rank == 0 else None, 0)
            dist.scatter(t, many if rank == 0 else None, 0)
            dist.barrier()
            if rank < 2:
                getattr(dist, ("send", "recv")[rank])(t, 1 - rank)
        yield [str(each) for each in watched._observer.seen.asked]
        yield [
            [float(sent(each)) for each in watched._observer.seen.asked],
            dist.distributed_c10d._world.group_count - before,
        ]
        yield [finding.cause for finding in watched.findings]

    from zerosim.conformance.collectives import sent

    asked, (counts, groups), causes = several(run, 3)
    assert asked[0] == "all-reduce of 6 float32 (gradient of weight)"
    assert asked[-1] == "send of 30 float32"
    assert "broadcast of 30 float32 from rank 1" in asked
    assert "reduce max of 30 float32 to rank 2" in asked
    weight, bias, gathers, scatters, whole = 2 * 6 * 2 / 3, 2 * 2 * 2 / 3, 90 * 2 / 3, [20, 60], 20
    assert counts == pytest.approx(
        [weight, bias, gathers, gathers, *scatters, whole, whole, whole, gathers, gathers, 0, 30]
    )
    assert groups == 0
    assert causes == ["volume"]


def test_storages_are_walked_and_the_batch_is_not() -> None:
    """Plain torch under data parallel holds 16 bytes per parameter, Adam's counters, and nothing else."""

    def run(rank: int) -> Iterator[Any]:
        net = linear()
        watched = check(net, scheme=DP, loss=mse_loss, optimizer=Adam(lr=1e-3))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for step in range(2):
            x, y = batch(seed=rank + 10 * step)
            with watched.step(x, y):
                optimizer.zero_grad()
                mse_loss(net(x), y).backward()
                for param in net.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= 2
                optimizer.step()
            mine = torch.zeros(step * 1000)
        held = watched._observer.seen.held
        assert held is not None
        yield [held.rest, held.largest]
        yield held.peak >= sum(held.rest.values())
        del mine

    (rest, largest), peak = several(run, 2)
    counters = 2 * 4
    assert rest == {"params": 8 * 4, "grads": 8 * 4, "optimizer state": 2 * 8 * 4 + counters, "elsewhere": 0}
    assert largest == []
    assert peak


def test_a_second_shard_is_said_and_no_failure() -> None:
    """Memory beyond the scheme's is told with its size; nothing is found wrong."""

    def run(rank: int) -> Iterator[Any]:
        watched = variants.train(next(v for v in variants.VARIANTS if v.name == "one flat buffer"), memory=True)
        verdict = watched.verdict()
        watched.close()
        yield [len(verdict.findings), [line for line in verdict.held if line.startswith("held:")]]

    ((findings, (line,)),) = several(run)
    assert findings == 0
    assert "ZeRO-1 holds 2,040, 8 + 8/N B of each parameter" in line
    assert re.search(r"optimizer state 404, elsewhere \d+", line)  # 2 * 4 * 50 and a counter


def in_the_simulators_order(net: Any, right: bool) -> Callable[[Any, Any], None]:
    """Data parallel whose sums are made as the simulator's ring makes them, unit by unit; or in the order of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    units = [[each.weight, each.bias] for each in net if hasattr(each, "weight")]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        for params in units:
            flat = torch.cat([param.grad.flatten() for param in params])
            chunk = -(-len(flat) // size)
            everyone = [torch.zeros(chunk * size) for _ in range(size)]
            dist.all_gather(everyone, nn.functional.pad(flat, (0, chunk * size - len(flat))))
            rows = torch.stack(everyone).view(size, size, chunk)  # [rank, chunk]
            total = torch.empty(size, chunk)
            for c in range(size):
                order = [(c - hop) % size for hop in range(1, size + 1)] if right else range(size)
                first, *rest = order
                total[c] = rows[first, c]
                for r in rest:
                    total[c] += rows[r, c]
            average = (total * torch.tensor(1 / size)).flatten()
            for param in params:
                param.grad = average[: param.numel()].view_as(param).clone()
                average = average[param.numel() :]
        optimizer.step()

    del rank
    return step


@pytest.mark.parametrize("right", [True, False])
def test_a_layout_that_is_declared_the_simulators_is_held_to_it_in_bits(right: bool) -> None:
    """Sums in the ring's order pass; in the order of ranks they are within the bounds, and yet not the same bits."""

    def run(rank: int) -> Iterator[Any]:
        for exact in (True, False):
            net = variants.mlp(torch.float32)
            watched = check(
                net, scheme=DP, loss=mse_loss, optimizer=Adam(lr=1e-3), units=(nn.Linear, nn.LayerNorm), exact=exact
            )
            step = in_the_simulators_order(net, right)
            for number in range(2):
                generator = torch.Generator().manual_seed(10 * number + rank)
                x, y = (torch.randn(6, width, generator=generator) for width in (7, 5))
                with watched.step(x, y):
                    step(x, y)
            yield [[f.band, f.cause] for f in watched.findings if f.cause != Cause.VOLUME]
            watched.close()

    exactly, roughly = several(run)
    assert roughly == []
    assert exactly == ([] if right else [["gradient", "unexplained"]])


# -- from a file


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of ZeRO-1 by hand, one right and one that does not average, written down and not judged."""
    folder = tmp_path_factory.mktemp("runs")

    def run(rank: int) -> None:
        for name, bug in (("right", {}), ("wrong", {"old": "total.float() / self.size /", "new": "total.float() /"})):
            watched = trial.train(rank, 0, {**bug, "with": {"hand": ["grads"]}, "record": folder / name})
            watched.report()

    ran = run_ranks(run, 3, timeout=300, show=False)
    assert ran.holds, "\n".join(ran.errors)
    assert f"recorded 3 steps in {folder}/right/: zerosim check {folder}/right" in ran.output
    return folder


@pytest.mark.parametrize(
    ("name", "code", "first"),
    [
        ("right", 0, "✓ data parallel on 3 ranks: 3 steps as the simulator has them"),
        ("wrong", 1, "✗ data parallel on 3 ranks: wrong in step 1 (average)"),
    ],
)
def test_a_recorded_run_is_judged_as_it_would_have_been(recorded: Path, name: str, code: int, first: str) -> None:
    """From the folder alone, the model and its loss too; the exit code and the first line are the answer."""
    done = CliRunner().invoke(main, ["check", str(recorded / name)])
    assert done.exit_code == code, done.output
    assert done.output.splitlines()[0] == first
    assert max(map(len, done.output.splitlines())) <= 80


def test_a_verdict_is_printed_as_json(recorded: Path) -> None:
    """With the findings, field by field."""
    done = CliRunner().invoke(main, ["check", str(recorded / "wrong"), "--json"])
    found = json.loads(done.output)
    assert (found["row"], found["ranks"], found["steps"]) == ("data parallel", 3, 3)
    assert (found["findings"][0]["cause"], found["findings"][0]["band"]) == ("average", "gradient")


def test_the_model_may_come_from_a_file(recorded: Path, tmp_path: Path) -> None:
    """A function that returns (module, loss) takes the place of the recorded graph; another module is refused."""
    (tmp_path / "train.py").write_text(
        "from conformance import trial, variants\nimport torch\n"
        "def make():\n    return trial.network(), trial.loss\n"
        "def other():\n    return variants.mlp(torch.float32), trial.loss\n"
    )
    runner = CliRunner()
    done = runner.invoke(main, ["check", str(recorded / "right"), "--model", f"{tmp_path}/train.py:make"])
    assert done.exit_code == 0, done.output
    done = runner.invoke(main, ["check", str(recorded / "right"), "--model", f"{tmp_path}/train.py:other"])
    assert done.exit_code == 2
    assert "Build the module that was trained" in done.output


def test_a_folder_that_is_no_whole_run_is_refused(recorded: Path, tmp_path: Path) -> None:
    """Without a manifest, without a rank's part, with a damaged step: one line each, exit code 2."""
    runner = CliRunner()
    assert "manifest.json: cannot be read" in runner.invoke(main, ["check", str(tmp_path)]).output
    (tmp_path / "manifest.json").write_bytes((recorded / "right" / "manifest.json").read_bytes())
    done = runner.invoke(main, ["check", str(tmp_path)])
    assert done.exit_code == 2
    assert "rank 0 of 3 has recorded no step" in done.output
    for rank in range(3):
        path = steps.path_of(tmp_path, rank, 1)
        path.parent.mkdir()
        path.write_bytes(steps.path_of(recorded / "right", rank, 1).read_bytes()[:200])
    (tmp_path / "model.pt2").write_bytes((recorded / "right" / "model.pt2").read_bytes())
    done = runner.invoke(main, ["check", str(tmp_path)])
    assert done.exit_code == 2
    assert "not a whole record of a step" in done.output


def test_a_step_is_read_as_it_was_written(recorded: Path, tmp_path: Path) -> None:
    """Pieces, batches, collectives and everything else, bit for bit."""
    seen = steps.read(recorded / "right", 1, 2)
    steps.write(seen, tmp_path)
    again = steps.read(tmp_path, 1, 2)
    assert again.asked == seen.asked
    assert [(p.start, p.values.tobytes()) for p in again.params] == [(p.start, p.values.tobytes()) for p in seen.params]
    assert again.bands.keys() == seen.bands.keys() == {"handed grads"}
    np.testing.assert_array_equal(again.x.numpy(), trial.batches(1)[1][0].numpy())
    assert (again.rows, again.forwarded, again.kernel) == (trial.ROWS, trial.ROWS, seen.kernel)


def test_a_run_is_not_written_over_another(recorded: Path) -> None:
    """A folder that has one already is refused; so is recording after the first step."""
    watched = alone(linear())
    with pytest.raises(FileExistsError, match="has a run already"):
        watched.record(recorded / "right")
    assert load_manifest(recorded / "right").row == DP
    net = linear()
    watched = alone(net)
    steps_of(watched, net, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    with pytest.raises(RuntimeError, match="before the first step"):
        watched.record(recorded / "other")


# -- rows of one's own, and groups


def test_a_row_of_ones_own_and_one_with_groups() -> None:
    """A user's Stage is held to like a built-in one; FSDP2 on a two-dimensional mesh is HSDP with its node."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def run(rank: int) -> Iterator[Any]:
        for row, mesh, node in ((Stage("mine", "all", "all", "all"), (4,), None), (HSDP, (2, 2), 2)):
            net = variants.mlp(torch.float32)
            watched = check(net, scheme=row, loss=mse_loss, optimizer=Adam(lr=1e-3), node=node)
            names = ("replicate", "shard")[-len(mesh) :]
            for module in [each for each in net if list(each.parameters())]:
                fully_shard(module, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            for number in range(2):
                generator = torch.Generator().manual_seed(10 * number + rank)
                x, y = (torch.randn(6, width, generator=generator) for width in (7, 5))
                with watched.step(x, y):
                    optimizer.zero_grad()
                    mse_loss(net(x), y).backward()
                    optimizer.step()
            verdict = watched.verdict()
            watched.close()
            yield [[f.text for f in verdict.findings], verdict.held]

    for findings, held in several(run):
        assert findings == []
        assert "of gradients" in held[0]


def test_the_example_of_the_docstring_is_right() -> None:
    """What ``help(check)`` shows runs as it is printed."""
    import doctest

    from zerosim.conformance import check as function

    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner()
    for example in finder.find(function, "check", globs={"check": function, "torch": torch}):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0
    assert ZeRO1.name == "ZeRO-1"
    assert ZeRO3.name == "ZeRO-3"
