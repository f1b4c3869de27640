"""Sound ways to train, each under the check of the row that it follows; nothing may be found wrong with any of them.

A variant is a function that makes the pieces of a training: what is stepped, how, and what the check is told.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from zerosim.conformance import check
from zerosim.optimizer import SGD, Adam
from zerosim.stages import DP, Stage, ZeRO1, ZeRO2, ZeRO3, ZeRO3Kept
from zerosim.torch_models.demo import Block, Decoder

dist: Any = torch.distributed
STEPS, ROWS = 3, 6
WIDTHS = (7, 13, 5)
LR = 1e-3


class Variant(NamedTuple):
    """A row, what the check is told beside it, and how the training is built: a function of the network."""

    name: str
    row: Stage
    build: Callable[[nn.Module], Callable[[Any, Any], None]]
    told: Mapping[str, Any] = MappingProxyType({})
    dtype: torch.dtype = torch.float32
    text: bool = False


def mlp(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = nn.Sequential(
            nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Tanh(), nn.LayerNorm(WIDTHS[1]), nn.Linear(WIDTHS[1], WIDTHS[2])
        )
    return net.to(dtype)


def decoder() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return Decoder(length=8, width=8, heads=2, blocks=2)


def mean_square(out: Any, y: Any) -> Any:
    return mse_loss(out.float(), y)


def next_byte(out: Any, y: Any) -> Any:
    return cross_entropy(out.flatten(0, -2), y.flatten())


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# -- data parallel


def plainly(make: Callable[[list[Any]], Any], reduce: Callable[[Any], None]) -> Any:
    """Local gradients, a reduction of each, and an optimizer of torch's on everything."""

    def build(net: nn.Module) -> Any:
        optimizer = make(list(net.parameters()))

        def step(x: Any, y: Any) -> None:
            optimizer.zero_grad()
            mean_square(net(x), y).backward()
            for param in net.parameters():
                reduce(param)
            optimizer.step()

        return step

    return build


def adam(**options: Any) -> Callable[[list[Any]], Any]:
    return lambda params: torch.optim.Adam(params, lr=LR, **options)


def summed(param: Any) -> None:
    dist.all_reduce(param.grad)
    param.grad /= world()[1]


def scaled_first(param: Any) -> None:
    param.grad *= 1 / world()[1]
    dist.all_reduce(param.grad)


def averaged(param: Any) -> None:
    dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)


def in_bf16(param: Any) -> None:
    half = param.grad.bfloat16()
    dist.all_reduce(half)
    param.grad = half.float() / world()[1]


def by_gather(param: Any) -> None:
    """All ranks' gradients, summed by everybody in the same order."""
    _, size = world()
    everyone = [torch.empty_like(param.grad) for _ in range(size)]
    dist.all_gather(everyone, param.grad)
    param.grad = torch.stack(everyone).mean(0)


def in_hooks(net: nn.Module) -> Any:
    """Asynchronous reductions while backward runs, last parameter first."""
    optimizer, pending = torch.optim.Adam(net.parameters(), lr=LR, foreach=True), []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(
            lambda param: pending.append((param, dist.all_reduce(param.grad, async_op=True)))
        )

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        mean_square(net(x), y).backward()
        while pending:
            param, work = pending.pop()
            work.wait()
            param.grad.div_(world()[1])
        optimizer.step()

    return step


def by_ring(net: nn.Module) -> Any:
    """A ring all-reduce of isend and irecv over one flat buffer."""
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    rank, size = world()

    def shift(block: Any) -> Any:
        coming = torch.empty_like(block)
        pair = [
            dist.P2POp(dist.isend, block, (rank - 1) % size), dist.P2POp(dist.irecv, coming, (rank + 1) % size),
        ]  # fmt: skip
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return coming

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        mean_square(net(x), y).backward()
        params = list(net.parameters())
        flat = torch.cat([param.grad.flatten() for param in params])
        chunk = -(-len(flat) // size)
        parts = list(nn.functional.pad(flat, (0, chunk * size - len(flat))).view(size, chunk))
        block = parts[(rank + 1) % size]
        for hop in range(2, size + 1):
            block = shift(block) + parts[(rank + hop) % size]
        block = block / size
        parts[rank] = block
        for hop in range(1, size):
            block = shift(block)
            parts[(rank + hop) % size] = block
        flat = torch.cat(parts)
        for param in params:
            param.grad = flat[: param.numel()].view_as(param).clone()
            flat = flat[param.numel() :]
        optimizer.step()

    return step


def clipped(net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.1)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        for some, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            (mean_square(net(some), wanted) / 2).backward()
        for param in net.parameters():
            summed(param)
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()

    return step


def wrapped(net: nn.Module) -> Any:
    return stepping(DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=LR))


def stepping(ddp: Any, optimizer: Any) -> Any:
    """A step of text, as everybody writes it."""

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        next_byte(ddp(x), y).backward()
        optimizer.step()

    return step


def scaled(net: nn.Module) -> Any:
    """torch's GradScaler under DDP, of a module whose weights are fp32 and whose arithmetic is bfloat16's."""
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = ddp(x)
        mean_square(out, y).backward()
        optimizer.step()

    return step


def autocast(net: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x)


# -- ZeRO-1 and -2


class Flat:
    """All parameters in one buffer, cut evenly, and an optimizer of torch's on this rank's part."""

    def __init__(self, net: nn.Module, make: Callable[[list[Any]], Any], *, view: bool = False) -> None:
        rank, size = world()
        self.params = list(net.parameters())
        total = sum(param.numel() for param in self.params)
        chunk = -(-total // size)
        self.flat = torch.zeros(chunk * size)
        start = 0
        for param in self.params:
            self.flat[start : start + param.numel()] = param.detach().flatten()
            param.data = self.flat[start : start + param.numel()].view_as(param)
            start += param.numel()
        own = self.flat[rank * chunk : (rank + 1) * chunk]
        self.shard = nn.Parameter(own if view else own.clone())
        self.optimizer = make([self.shard])

    def grads(self) -> Any:
        flat = torch.cat([param.grad.flatten() for param in self.params])
        return nn.functional.pad(flat, (0, len(self.flat) - len(flat)))

    def update(self, average: Any) -> None:
        self.shard.grad = average
        self.optimizer.step()
        dist.all_gather_single(self.flat, self.shard.detach())
        for param in self.params:
            param.grad = None


def flat(make: Callable[[list[Any]], Any], dtype: torch.dtype = torch.float32, *, view: bool = False) -> Any:
    def build(net: nn.Module) -> Any:
        whole = Flat(net, make, view=view)

        def step(x: Any, y: Any) -> None:
            mean_square(net(x), y).backward()
            grads = whole.grads().to(dtype)
            average = torch.empty(len(whole.shard), dtype=dtype)
            dist.reduce_scatter_single(average, grads)
            whole.update(average.float() / world()[1])

        return step

    return build


def by_all_to_all(net: nn.Module) -> Any:
    """A reduce-scatter of one all-to-all and a sum."""
    whole = Flat(net, adam(fused=True))

    def step(x: Any, y: Any) -> None:
        mean_square(net(x), y).backward()
        grads = whole.grads()
        theirs = torch.empty_like(grads)
        dist.all_to_all_single(theirs, grads)
        whole.update(theirs.view(world()[1], -1).mean(0))

    return step


def whole_tensors(net: nn.Module) -> Any:
    """Parameters are dealt out whole: reduced to their owner, updated there, broadcast from there."""
    rank, size = world()
    params = list(net.parameters())
    mine = [param for index, param in enumerate(params) if index % size == rank]
    optimizer = torch.optim.Adam(mine, lr=LR)

    def step(x: Any, y: Any) -> None:
        mean_square(net(x), y).backward()
        for index, param in enumerate(params):
            dist.reduce(param.grad, index % size)
            param.grad = param.grad / size if index % size == rank else None
        optimizer.step()
        for index, param in enumerate(params):
            dist.broadcast(param.data, index % size)
            param.grad = None

    return step


def per_parameter(net: nn.Module) -> Any:
    """Each parameter is padded and cut by itself; Adam by hand, on slices of the parameters' own memory."""
    rank, size = world()
    state: dict[Any, Any] = {}
    count = [0]

    def step(x: Any, y: Any) -> None:
        mean_square(net(x), y).backward()
        count[0] += 1
        for param in net.parameters():
            chunk = -(-param.numel() // size)
            grad = nn.functional.pad(param.grad.flatten(), (0, chunk * size - param.numel()))
            average = torch.empty(chunk)
            dist.reduce_scatter(average, list(grad.chunk(size)))
            average /= size
            theta = nn.functional.pad(param.detach().flatten(), (0, chunk * size - param.numel()))
            mine = theta[rank * chunk : (rank + 1) * chunk].clone()
            m, v = state.setdefault(param, (torch.zeros(chunk), torch.zeros(chunk)))
            m.mul_(0.9).add_(0.1 * average)
            v.mul_(0.999).add_(0.001 * average**2)
            up = (m / (1 - 0.9 ** count[0])) / ((v / (1 - 0.999 ** count[0])).sqrt() + 1e-8)
            mine -= LR * up
            parts = [torch.empty(chunk) for _ in range(size)]
            dist.all_gather(parts, mine)
            param.data = torch.cat(parts)[: param.numel()].view_as(param)
            param.grad = None

    return step


def redundancy(net: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ddp = DistributedDataParallel(net)
    return stepping(ddp, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=LR))


def momentum(net: nn.Module) -> Any:
    whole = Flat(net, lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.01))

    def step(x: Any, y: Any) -> None:
        mean_square(net(x), y).backward()
        average = torch.empty(len(whole.shard))
        dist.reduce_scatter_single(average, whole.grads(), op=dist.ReduceOp.AVG)
        whole.update(average)

    return step


def masters(net: nn.Module) -> Any:
    """bfloat16 parameters, fp32 master weights and moments on the owner: what DeepSpeed calls stage 2."""
    rank, size = world()
    params = list(net.parameters())
    shapes = [param.shape for param in params]
    sizes = [param.numel() for param in params]
    chunk = -(-sum(sizes) // size)
    flat = nn.functional.pad(torch.cat([param.detach().flatten() for param in params]), (0, chunk * size - sum(sizes)))
    master = nn.Parameter(flat[rank * chunk : (rank + 1) * chunk].float())
    optimizer = torch.optim.AdamW([master], lr=LR, weight_decay=0.01)

    def step(x: Any, y: Any) -> None:
        mean_square(net(x.bfloat16()), y).backward()
        grads = torch.cat([param.grad.flatten() for param in params])
        average = torch.empty(chunk, dtype=torch.bfloat16)
        dist.reduce_scatter_single(average, nn.functional.pad(grads, (0, chunk * size - len(grads))))
        master.grad = average.float() / size
        optimizer.step()
        whole = torch.empty(chunk * size, dtype=torch.bfloat16)
        dist.all_gather_single(whole, master.detach().bfloat16())
        for param, shape, part in zip(params, shapes, whole[: sum(sizes)].split(sizes), strict=True):
            param.data.copy_(part.view(shape))
            param.grad = None

    return step


# -- ZeRO-3


def fsdp(reshard: bool = True, **policy: Any) -> Any:
    def build(net: nn.Module) -> Any:
        mesh = init_device_mesh("cpu", (world()[1],))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
        if policy:
            options["mp_policy"] = MixedPrecisionPolicy(**policy)
        for module in [each for each in net.children() if list(each.parameters())]:
            fully_shard(module, **options)
        fully_shard(net, **options)
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.1)

        def step(x: Any, y: Any) -> None:
            mean_square(net(x), y).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


# -- DeepSpeed, where it is installed


def deepspeed(stage: int) -> Any:
    """Its engine, with an optimizer of torch's. It clips to a norm of 1 unless told not to."""

    def build(net: nn.Module) -> Any:
        warnings.simplefilter("ignore")  # of what it imports and calls, for the rest of this process
        import deepspeed  # type: ignore[import-not-found, unused-ignore]
        from deepspeed.accelerator import cpu_accelerator  # type: ignore[import-not-found, unused-ignore]

        rank, size = map(str, world())
        os.environ.update(LOCAL_RANK=rank, RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
        deepspeed.accelerator.set_accelerator(cpu_accelerator.CPU_Accelerator())
        adam = torch.optim.Adam(net.parameters(), lr=LR)
        config = {
            "train_micro_batch_size_per_gpu": ROWS, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000},
        }  # fmt: skip
        engine = deepspeed.initialize(model=net, optimizer=adam, config=config)[0]

        def step(x: Any, y: Any) -> None:
            engine.backward(mean_square(engine(x), y))
            engine.step()

        return step

    return build


DECAYED = {"rule": lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.1)}
VARIANTS = (
    Variant("sum, then divide", DP, plainly(adam(), summed)),
    Variant("multiply, then sum", DP, plainly(adam(foreach=False), scaled_first)),
    Variant("AVG", DP, plainly(adam(fused=True), averaged)),
    Variant("bfloat16 on the wire", DP, plainly(adam(), in_bf16)),
    Variant("reductions in hooks", DP, in_hooks),
    Variant("a ring by hand", DP, by_ring),
    Variant("micro-batches, clipped, AdamW", DP, clipped, DECAYED | {"accumulate": 2, "clip": 0.3}),
    Variant("DDP of a transformer", DP, wrapped, {"units": Block}, text=True),
    Variant("autocast", DP, scaled, {"optimizer": SGD(lr=LR, momentum=0.9), "forward": autocast}),
    Variant("one flat buffer", ZeRO1, flat(adam())),
    Variant("one flat buffer, ZeRO-2", ZeRO2, flat(adam(foreach=True))),
    Variant("one flat buffer, bfloat16 gradients", ZeRO1, flat(adam(), torch.bfloat16)),
    Variant("one flat buffer, gathered in place", ZeRO1, flat(adam(), view=True)),
    Variant("all-to-all", ZeRO1, by_all_to_all),
    Variant("whole tensors, reduce and broadcast", ZeRO1, whole_tensors),
    Variant("each parameter by itself", ZeRO1, per_parameter),
    Variant(
        "SGD with momentum and decay",
        ZeRO1,
        momentum,
        {"rule": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.01)},
    ),
    Variant(
        "bfloat16 with fp32 masters",
        ZeRO2,
        masters,
        {"rule": lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.01)},
        torch.bfloat16,
    ),
    Variant("ZeroRedundancyOptimizer", ZeRO1, redundancy, {"all_reduce": True, "units": Block}, text=True),
    Variant("FSDP2", ZeRO3, fsdp(), DECAYED | {"clip": 0.5}),
    Variant("FSDP2 that keeps what it has gathered", ZeRO3Kept, fsdp(False), DECAYED | {"clip": 0.5}),
)
DEEPSPEED = tuple(
    Variant(f"DeepSpeed, stage {stage}", row, deepspeed(stage), {"all_reduce": True})
    for stage, row in ((1, ZeRO1), (2, ZeRO2), (3, ZeRO3))
)

DAILY = (
    "reductions in hooks", "a ring by hand", "DDP of a transformer", "one flat buffer, gathered in place",
    "whole tensors, reduce and broadcast", "bfloat16 with fp32 masters", "FSDP2",
)  # fmt: skip


def train(variant: Variant, *, memory: bool = False, steps: int = STEPS) -> Any:
    """The variant on this rank; the check that has watched it."""
    rank, _ = world()
    net = decoder() if variant.text else mlp(variant.dtype)
    told = dict(variant.told)
    if (make := told.pop("rule", None)) is not None:
        told["optimizer"] = make(net.parameters())
    told = {"optimizer": Adam(lr=LR)} | told
    loss = next_byte if variant.text else mean_square
    checked = check(net, scheme=variant.row, loss=loss, memory=memory, timeout=60, **told)
    step = variant.build(net)
    generator = torch.Generator().manual_seed(40 + rank)
    for _ in range(steps):
        if variant.text:
            data = torch.randint(0, 256, (ROWS, 9), generator=generator)
            x, y = data[:, :-1], data[:, 1:]
        else:
            x, y = (torch.randn(ROWS, width, generator=generator) for width in (WIDTHS[0], WIDTHS[-1]))
        with checked.step(x, y):
            step(x, y)
    return checked
