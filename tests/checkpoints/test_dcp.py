"""Checkpoints of torch.distributed.checkpoint: in both directions, the same bits, through torch's own classes."""

import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from click.testing import CliRunner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from zerosim.bands import Band
from zerosim.checkpoints import dcp
from zerosim.checkpoints.files import CheckpointError
from zerosim.checkpoints.load import load
from zerosim.checkpoints.save import save
from zerosim.cli.main import main
from zerosim.conformance.launch import run_ranks
from zerosim.optimizer import SGD, AdamW, ParamGroup
from zerosim.schemes import DP, Scheme, ZeRO1, ZeRO3
from zerosim.stages import HSDP, Stage
from zerosim.torch_models.model import TorchModel

pytestmark = [
    pytest.mark.usefixtures("shapes_unchecked"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

torch_dcp: Any = torch.distributed.checkpoint
ROWS = 2  # of the batch, of each rank


class Net(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Two layers with a buffer between them: sizes that no number of ranks divides."""

    def __init__(self, width: int = 7, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = torch.nn.Linear(5, width), torch.nn.Linear(width, 3)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(x)))
        return found


def run_of(net: torch.nn.Module, row: Stage = ZeRO3, ranks: int = 3, **options: Any) -> Scheme:
    model = TorchModel(net, torch.zeros(ROWS, 5), loss=torch.nn.functional.mse_loss)
    return row(model, ranks, **options)


def batch(ranks: int, seed: int = 1) -> list[tuple[Any, Any]]:
    torch.manual_seed(seed)
    return [(torch.randn(ROWS, 5), torch.randn(ROWS, 3)) for _ in range(ranks)]


def moments(run: Scheme) -> dict[str, bytes]:
    return {band: run.flat(band).tobytes() for band in (Band.EXP_AVG, Band.EXP_AVG_SQ)}


def in_order(tensors: Mapping[str, Any], run: Scheme) -> Any:
    """Tensors by name, end to end in the order of a run's parameters."""
    named: Any = run.model
    names = [name for bucket in run.buckets if bucket.trainable for name in named.names(bucket.group)]
    return torch.cat([tensors[name].detach().reshape(-1) for name in names]).numpy()


def theta(net: torch.nn.Module, run: Scheme) -> bytes:
    """A module's parameters in the order of a run's."""
    found: bytes = in_order(dict(net.named_parameters()), run).tobytes()
    return found


@pytest.mark.parametrize(("row", "options"), [(DP, {}), (ZeRO3, {"precision": "fp32"}), (HSDP, {"node": 2})])
def test_torch_goes_on_from_a_run(tmp_path: Path, row: Stage, options: dict[str, Any]) -> None:
    """What a run writes, torch's own reader gives to a module, and another run reads: every state the same bits."""
    run = run_of(Net(), row, 4, optimizer=AdamW(lr=3e-3, groups=(ParamGroup("first", lr=1e-3),)), **options)
    for seed in range(2):
        run.step(batch(4, seed))
    dcp.write(run, tmp_path / "out")
    net = Net(seed=9)
    state = {"model": net.state_dict()}
    torch_dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    net.load_state_dict(state["model"])
    assert theta(net, run) == run.full_theta().tobytes()
    assert int(net.norm.num_batches_tracked) == 2
    again = run_of(net, ZeRO1, 3, optimizer=AdamW())
    dcp.read(tmp_path / "out", again)
    assert again.full_theta().tobytes() == run.full_theta().tobytes()
    assert moments(again) == moments(run)
    assert (again.steps, again.updates) == (2, 2)


def test_a_plain_optimizer_goes_on(tmp_path: Path) -> None:
    """A module and its AdamW take up a run to the last bit, groups and all, and go on as it does, but for rounding."""
    run = run_of(Net(), DP, 1, optimizer=AdamW(lr=3e-3, weight_decay=0.1), precision="fp32")
    run.step(batch(1, 1))
    dcp.write(run, tmp_path / "out")
    net = Net(seed=9)
    groups = [{"params": [each for each in net.parameters() if (each.dim() > 1) is large]} for large in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=7.0)
    model, optim = get_state_dict(net, optimizer)
    torch_dcp.load({"model": model, "optim": optim}, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    assert theta(net, run) == run.full_theta().tobytes()
    for band in (Band.EXP_AVG, Band.EXP_AVG_SQ):
        theirs = {name: optimizer.state[each][str(band)] for name, each in net.named_parameters()}
        assert in_order(theirs, run).tobytes() == run.flat(band).tobytes()
    [(x, y)] = batch(1, 2)
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    run.step(batch(1, 2))
    np.testing.assert_allclose(in_order(dict(net.named_parameters()), run), run.full_theta(), rtol=1e-5, atol=1e-5)


def test_what_fsdp2s_ranks_wrote_is_loaded(tmp_path: Path) -> None:
    """A folder of three FSDP2 ranks gives their parameters, moments and step bit for bit, under another row and N."""
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))

    def rank_of(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (3,))
        for each in (*net, net):
            if list(each.parameters()):
                fully_shard(each, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for seed in range(2):
            x, y = batch(3, seed)[rank]
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model, optim = get_state_dict(net, optimizer)
        torch_dcp.save({"app": {"model": model, "optim": optim}}, checkpoint_id=tmp_path / "fsdp")
        whole = {name: each.full_tensor() for name, each in model.items()}
        kept = {
            name: {key: each.full_tensor() for key, each in state.items() if key != "step"}
            for name, state in optim["state"].items()
        }
        if rank == 0:
            torch.save((whole, kept), tmp_path / "theirs")

    ran = run_ranks(rank_of, 3, show=False)
    assert ran.holds, ran.errors
    whole, kept = torch.load(tmp_path / "theirs")
    run = run_of(net, ZeRO1, 4, optimizer=AdamW())
    dcp.read(tmp_path / "fsdp", run)
    assert run.full_theta().tobytes() == in_order(whole, run).tobytes()
    for band in (Band.EXP_AVG, Band.EXP_AVG_SQ):
        theirs = in_order({name: state[str(band)] for name, state in kept.items()}, run)
        assert theirs.any()
        assert run.flat(band).tobytes() == theirs.tobytes()
    assert run.updates == 2
    params = run.full_theta().astype(np.float16)
    assert run.flat(Band.PARAMS).tobytes() == params.tobytes()


def test_parameters_alone_are_loaded(tmp_path: Path) -> None:
    """A folder with a bare state dict gives the parameters; moments and steps begin anew."""
    net = Net(seed=4)
    torch_dcp.save(net.state_dict(), checkpoint_id=tmp_path / "bare", no_dist=True)
    run = run_of(Net(), ZeRO3, 2)
    run.step(batch(2))
    dcp.read(tmp_path / "bare", run)
    assert run.full_theta().tobytes() == theta(net, run)
    assert not run.flat(Band.EXP_AVG).any()
    assert (run.steps, run.updates) == (0, 0)


def test_what_had_no_gradient_has_no_state(tmp_path: Path) -> None:
    """A parameter that torch's optimizer has left alone has neither moments nor steps; another's are its own."""
    net = Net(seed=4)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(3):
        net(batch(1, step)[0][0]).sum().backward()
        net.last.bias.grad = None
        if step:
            net.first.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    model, optim = get_state_dict(net, optimizer)
    torch_dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    run = run_of(Net(), ZeRO3, 2)
    dcp.read(tmp_path / "theirs", run)
    dcp.write(run, tmp_path / "ours")
    again = run_of(Net(), DP, 3)
    dcp.read(tmp_path / "ours", again)
    for each in (run, again):
        named: Any = each.model
        counts = {
            name: count
            for bucket in each.buckets
            for name, count in zip(named.names(bucket.group), bucket.updates, strict=False)
        }
        assert (counts["last.bias"], counts["first.weight"], counts["last.weight"], each.updates) == (0, 1, 3, 3)
    assert moments(again) == moments(run)


def _of_another(folder: Path) -> None:
    torch_dcp.save({"model": Net(width=11).state_dict()}, checkpoint_id=folder, no_dist=True)


def _of_other_names(folder: Path) -> None:
    torch_dcp.save({"model": torch.nn.Linear(5, 7).state_dict()}, checkpoint_id=folder, no_dist=True)


def _damaged(folder: Path) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"no pickle")


def _by_number(folder: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    torch_dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Path.mkdir, "no checkpoint of torch.distributed.checkpoint: there is no .metadata"),
        (_damaged, "its .metadata cannot be read"),
        (_of_another, r"the first tensor that differs, first.weight, is \[11, 5\] there and \[7, 5\] here"),
        (_of_other_names, r"there is no tensor first.weight in it, only model.weight"),
        (_by_number, "no exp_avg of first.weight. Save it by the parameters' names"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, make: Any, says: str) -> None:
    """A folder that is none, of another model, or with state that belongs to nobody is refused, and nothing changes."""
    make(tmp_path / "folder")
    run = run_of(Net())
    before = run.full_theta().tobytes()
    with pytest.raises(CheckpointError, match=says):
        dcp.read(tmp_path / "folder", run)
    assert run.full_theta().tobytes() == before


def test_a_folder_that_is_there_stays(tmp_path: Path) -> None:
    """Nothing is written over; where the disk is full, nothing is left."""
    run = run_of(Net(), optimizer=SGD(momentum=0.9))
    run.step(batch(3))
    (tmp_path / "mine").touch()
    with pytest.raises(CheckpointError, match="something is there already, and stays"):
        dcp.write(run, tmp_path)
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match="too large"):
            dcp.write(run, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
    dcp.write(run, tmp_path / "out")
    again = run_of(Net(seed=5), optimizer=SGD(momentum=0.9))
    dcp.read(tmp_path / "out", again)
    assert again.flat(Band.MOMENTUM).tobytes() == run.flat(Band.MOMENTUM).tobytes()


def test_the_command_converts_there_and_back(tmp_path: Path) -> None:
    """`convert --to dcp` and `--from dcp --like` need no module: the same bits come back, cut for other ranks."""
    run = run_of(Net(), ZeRO3, 3)
    run.step(batch(3))
    save(run, tmp_path / "a")

    def convert(*given: str) -> Any:
        return CliRunner().invoke(main, ["checkpoint", "convert", *given])

    done = convert(str(tmp_path / "a"), str(tmp_path / "b"), "--to", "dcp")
    assert done.exit_code == 0, done.output
    assert "for torch's dcp.load" in done.output
    like = ("--from", "dcp", "--like", str(tmp_path / "a"), "--scheme", "zero-1", "--ranks", "2")
    done = convert(str(tmp_path / "b"), str(tmp_path / "c"), *like)
    assert done.exit_code == 0, done.output
    again = load(tmp_path / "c", model=run.model)
    assert (again.name, again.ring.size, again.updates) == ("ZeRO-1", 2, 1)
    assert again.full_theta().tobytes() == run.full_theta().tobytes()
    assert moments(again) == moments(run)
    for one, other in zip(run.buckets, again.buckets, strict=True):
        if Band.BUFFERS in one.states:
            assert np.array_equal(one.states[Band.BUFFERS][0], other.states[Band.BUFFERS][1])
    assert convert(str(tmp_path / "b"), str(tmp_path / "d"), "--from", "dcp").exit_code == 2
    refused = convert(str(tmp_path / "b"), str(tmp_path / "d"))
    assert refused.exit_code == 2
    assert "there is no checkpoint here" in refused.output
