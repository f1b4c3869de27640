"""The frameworks in training: how DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed are set up and stepped.

Owns the network and the functions that make up each framework's step. Must not know what is
measured, nor what is expected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo  # every framework loads it, for seconds: better once, before ranks are forked
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from zerosim.frameworks.variants import Task
from zerosim.model import MLP
from zerosim.optimizer import Adam
from zerosim.records.frameworks import GRADS, MASTER, PARAMS, Family

Tensor = Any


def network(task: Task) -> Any:
    """The MLP with the simulator's initial weights, as an ``nn.Sequential`` of ``nn.Linear`` and ``nn.ReLU``."""
    model = MLP(task.widths, seed=task.model_seed)
    flat: Tensor = torch.from_numpy(model.initial())
    modules: list[Any] = []
    for fan_in, fan_out in pairwise(model.widths):
        weight, bias, flat = flat.split([fan_in * fan_out, fan_out, len(flat) - fan_in * fan_out - fan_out])
        layer = nn.Linear(fan_in, fan_out)
        with torch.no_grad():
            layer.weight.copy_(weight.view(fan_in, fan_out).t())  # torch keeps W as [O, I]
            layer.bias.copy_(bias)
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error over a rank's rows and columns, as the simulator has it."""
    return nn.functional.mse_loss(out.float(), y)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A framework around the network, as the functions that make up a step and those that look at it.

    ``adam`` is the optimizer that has the state. ``bands`` gives the tensors of the other bands,
    one that is in two belonging to the first; ``whole`` a parameter whole, in fp32, a collective
    where it is sharded; ``groups`` which parameters travel together in the n-th step.
    """

    net: Any
    call: Callable[[Tensor], Tensor]
    drop_grads: Callable[[], None]
    backward: Callable[[Tensor], None]
    update: Callable[[], None]
    adam: Any
    bands: Callable[[], dict[str, list[Tensor]]]
    whole: Callable[[Any], Tensor]
    groups: Callable[[int], list[list[int]]]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Let go of the last step's gradients; the loss."""
        self.drop_grads()
        return loss_of(self.call(x), y)

    def params(self) -> list[Tensor]:
        """Every parameter whole, in fp32, in the order of the module. A collective where they are sharded."""
        return [self.whole(param).detach() for param in self.net.parameters()]


def _of_torch(net: Any, call: Callable[[Tensor], Tensor], optimizer: Any, **more: Any) -> Training:
    """What DDP and FSDP2 have in common: gradients where autograd leaves them, and no master weights."""
    usual = {
        "drop_grads": optimizer.zero_grad,
        "backward": lambda loss: loss.backward(),
        "update": optimizer.step,
        "adam": optimizer,
        "bands": lambda: {
            PARAMS: list(net.parameters()), GRADS: [param.grad for param in net.parameters()], MASTER: [],
        },
        "whole": lambda param: param,
    }  # fmt: skip
    return Training(net=net, call=call, **usual | more)


def _ddp(task: Task) -> Training:
    net = network(task)
    ddp: Any = nn.parallel.DistributedDataParallel(net, **task.variant.options)
    if task.variant.wire == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)

    def groups(step: int) -> list[list[int]]:
        """One bucket of all parameters, until DDP has seen in which order their gradients come."""
        if step == 0:
            return [list(range(len(list(net.parameters()))))]
        buckets = ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        return [[int(index) for index in bucket.split()] for bucket in buckets.split(",")]

    return _of_torch(net, ddp, torch.optim.Adam(net.parameters(), **_adam()), groups=groups)


def _zero_redundancy(task: Task) -> Training:
    net = network(task)
    ddp = nn.parallel.DistributedDataParallel(net, **task.variant.options)
    where = {"process_group": _mesh(task).get_group("shard")} if task.variant.group else {}
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, **where, **_adam())
    return _of_torch(net, ddp, optimizer, adam=optimizer.optim, groups=lambda step: [])


def _mesh(task: Task) -> Any:
    """All ranks in a row, or, where a variant has groups, in a row for each of them."""
    if not task.variant.group:
        return init_device_mesh("cpu", (task.ranks,))
    shape = task.ranks // task.variant.group, task.variant.group
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _fsdp(task: Task) -> Training:
    net = network(task)
    options: dict[str, Any] = {"mesh": _mesh(task), **task.variant.options}
    if task.variant.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    layers = [module for module in net if isinstance(module, nn.Linear)]
    for module in (*layers, net):
        fully_shard(module, **options)
    return _of_torch(
        net, net, torch.optim.Adam(net.parameters(), **_adam()),
        whole=lambda param: param.full_tensor(),
        groups=lambda step: [[2 * index, 2 * index + 1] for index in range(len(layers))],  # a layer's weight and bias
    )  # fmt: skip


def _deepspeed(task: Task) -> Training:
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    import deepspeed
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    deepspeed.accelerator.set_accelerator(CPU_Accelerator())
    net = network(task)
    config = {
        "train_micro_batch_size_per_gpu": task.batch,
        "zero_optimization": dict(task.variant.options),
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its default is a norm of 1
        "bf16": {"enabled": task.variant.precision == "bf16"},
    }
    adam = torch.optim.Adam(net.parameters(), **_adam())
    engine, zero, *_ = deepspeed.initialize(model=net, optimizer=adam, config=config)
    dtype = torch.bfloat16 if task.variant.precision == "bf16" else torch.float32

    masters = (
        zero.fp32_partitioned_groups_flat
        if task.variant.options["stage"] == 3
        else zero.single_partition_of_fp32_groups
    )

    def bands() -> dict[str, list[Tensor]]:
        params = list(net.parameters())
        return {
            PARAMS: params + [getattr(param, "ds_tensor", None) for param in params],
            GRADS: [param.grad for param in params] + tensors(zero.averaged_gradients),
            MASTER: tensors(masters),
        }

    return Training(
        net=net,
        call=lambda x: engine(x.to(dtype)),
        drop_grads=lambda: None,  # the engine does
        backward=engine.backward,
        update=engine.step,
        adam=adam,
        bands=bands,
        whole=deepspeed.utils.safe_get_full_fp32_param,
        groups=lambda step: [],
    )


def _adam() -> dict[str, Any]:
    """The simulator's numbers for torch's Adam, in its for-loop form."""
    adam = Adam()
    return {"lr": adam.lr, "betas": adam.betas, "eps": adam.eps, "foreach": False}


BUILD: dict[Family, Callable[[Task], Training]] = {
    Family.DDP: _ddp,
    Family.ZERO_REDUNDANCY: _zero_redundancy,
    Family.FSDP: _fsdp,
    Family.DEEPSPEED: _deepspeed,
}


def tensors(nested: Any) -> list[Tensor]:
    """Every tensor in mappings and sequences within each other."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    if isinstance(nested, dict):
        return [tensor for value in nested.values() for tensor in tensors(value)]
    return [tensor for value in nested for tensor in tensors(value)] if isinstance(nested, list | tuple) else []
