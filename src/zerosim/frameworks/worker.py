"""One rank of a real framework in training, watched.

Owns what is read of it: tensors, the profiler's log, the kernel's counters. Must not know what is
expected. What is held is walked: the storages of the real tensors, each once, DTensors by their
local part. What else is allocated, and when, ``log`` reads from the profiler, which
starts before the model is built. The batch is NumPy's memory and no allocation of torch's.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.autograd.profiler as autograd
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from zerosim.bands import BF16, Array
from zerosim.frameworks import rings
from zerosim.frameworks.agreements import OVERFLOW_RANK, OVERFLOW_STEP, SCALE, SCALED_STEPS
from zerosim.frameworks.observation import SETTLED, Observation, StepGradients
from zerosim.frameworks.profiler_log import MARK, STEP, UPDATE, Log, Storages
from zerosim.frameworks.training import BUILD, Tensor, Training, loss_of, network, tensors
from zerosim.frameworks.variants import Task
from zerosim.lab.data import batches
from zerosim.real_ranks import meter
from zerosim.real_ranks.connection import Arrived, Connection, Result
from zerosim.real_ranks.processes import Heartbeat
from zerosim.real_ranks.simulation import one_thread
from zerosim.real_ranks.worker import tell
from zerosim.records.frameworks import COMPARE_GRADIENTS, STATE, Family
from zerosim.worlds import torch_ring

GRADIENT_STEPS = 3  # the first, in which DDP's buckets are in another order, and two more


def observe(
    connection: Connection, heartbeat: Heartbeat, task: Task, rank: int, path: str, timeout: float, interface: str
) -> None:
    """Do the task as one of its ranks, which meet at the file ``path``, and tell what was seen.

    Tells of every point at which the ranks wait for each other: before and after each step, when
    all have read their counters, and at the end.
    """

    def fence() -> None:
        heartbeat.leave()
        connection.send(Arrived())
        connection.receive()

    warnings.simplefilter("ignore")  # what frameworks warn of is theirs, and would be counted as it is printed
    try:
        store = torch_ring.file_store(path, task.ranks)
        with torch_ring.process_group("gloo", store, rank, task.ranks, timeout, rank, interface), one_thread():
            seen = _observe(task, rank, fence)
            # A second training, for it takes a second model, which must not be there while memory is measured.
            if task.variant.family in COMPARE_GRADIENTS:
                seen = seen._replace(gradients=_gradients(task, rank))
            if task.variant.family is Family.FSDP:
                seen = seen._replace(decided=_decided(task, rank))
            fence()
            connection.send(Result(data=pickle.dumps(seen)))
            with contextlib.suppress(EOFError):  # until all have answered
                connection.receive()
    except Exception as error:
        tell(connection, error, heartbeat)
        raise


def _observe(task: Task, rank: int, fence: Callable[[], None]) -> Observation:
    """Train, and read the log and the kernel's counters."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler would write to standard error, and the kernel count it
    counted: list[meter.Counters] = []
    walked: list[tuple[dict[str, Storages], dict[str, Storages]]] = []
    # Not torch.profiler's: that loads a compiler, for seconds.
    with rings.marked(), autograd.profile(profile_memory=True, record_shapes=True) as profiler:
        training = BUILD[task.variant.family](task)
        kernel = meter.Kernel()
        for x, y in _rows(task, rank, task.steps):
            before = kernel.read()
            fence()
            with _marked(STEP):
                with _marked("forward"):
                    loss = training.forward(x, y)
                with _marked("backward"):
                    training.backward(loss)
                    del loss
                held = _walk(training)
                with _marked(UPDATE):
                    training.update()
            fence()
            counted.append(kernel.read().since(before))
            _let_go()
            walked.append((held, _walk(training)))
        fence()  # or who is ahead would send something else before all have read what this step came to
        kernel.close()
        kept = {address for storages in walked[-1][1].values() for address in storages}
    log = Log(profiler.kineto_results.experimental_event_tree(), kept)
    begin, end = log.marks[STEP][SETTLED]
    held, rest = walked[SETTLED]
    return Observation(
        held=log.held(log.marks[UPDATE][SETTLED][0], held),
        rest=log.held(end, rest),
        peak=log.peak(begin, end),
        strays=log.strays(begin),
        counted=counted,
        unmeasured=kernel.unmeasured,
        asked=log.asked(begin, end),
        params=[_array(tensor) for tensor in training.params()],
        gradients=[],
        decided={},
    )


def _let_go() -> None:
    """Wait a second at most until no other thread runs: gloo's have then let go of whatever they were given."""
    until = time.monotonic() + 1
    while _others_running() and time.monotonic() < until:
        time.sleep(0.001)


def _others_running() -> bool:
    """Whether a thread of this process but this one is running or could be. False where there is no /proc."""
    with contextlib.suppress(OSError):
        for thread in set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}:
            state = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "R":
                return True
    return False


def _gradients(task: Task, rank: int) -> list[StepGradients]:
    """Train again, and keep the gradients beside those that a copy of the network has from the rank's rows alone."""
    training = BUILD[task.variant.family](task)
    twin = network(task)
    found: list[StepGradients] = []
    for x, y in _rows(task, rank, GRADIENT_STEPS):
        for copy, param in zip(twin.parameters(), training.params(), strict=True):
            copy.data = param.clone()
        if task.variant.family is Family.FSDP and task.variant.precision == "bf16":
            twin.to(torch.bfloat16)
            x = x.to(torch.bfloat16)
        twin.zero_grad()
        loss_of(twin(x), y).backward()
        training.backward(training.forward(x, y))
        averaged = [_array(_local(param.grad)) for param in training.net.parameters()]
        norms = {str(kind): _norm(training.net, kind) for kind in (2.0, math.inf)}
        found.append(StepGradients([_array(param.grad) for param in twin.parameters()], averaged, [], norms))
        training.update()
    return [each._replace(groups=training.groups(step)) for step, each in enumerate(found)]


def _norm(net: Any, kind: float) -> float:
    """What clip_grad_norm_ says that the norm of all gradients is; it clips nothing."""
    found: Tensor = torch.nn.utils.clip_grad_norm_(net.parameters(), math.inf, norm_type=kind)
    return float(found.full_tensor() if isinstance(found, DTensor) else found)


def _decided(task: Task, rank: int) -> dict[str, list[tuple[bool, float]]]:
    """What torch's two scalers make of a step in which one element of one rank's shard overflows."""
    found: dict[str, list[tuple[bool, float]]] = {}
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        training = BUILD[task.variant.family](task)
        scaler: Any = kind("cpu", init_scale=SCALE.init, growth_interval=SCALE.interval)
        steps = found[kind.__name__] = []
        for step, (x, y) in enumerate(_rows(task, rank, SCALED_STEPS)):
            training.backward(scaler.scale(training.forward(x, y)))
            if step == OVERFLOW_STEP and rank == OVERFLOW_RANK:
                _local(next(training.net.parameters()).grad).view(-1)[0] = math.inf
            before = [_local(param).clone() for param in training.net.parameters()]
            scaler.step(training.adam)
            scaler.update()
            pairs = zip(before, training.net.parameters(), strict=True)
            steps.append((all(torch.equal(one, _local(param)) for one, param in pairs), float(scaler.get_scale())))
    return found


def _rows(task: Task, rank: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the batches, on NumPy's memory."""
    for batch in batches("noise", task.ranks, steps, task.batch, (task.widths[0], task.widths[-1]), task.seed):
        x, y = batch[rank]
        yield torch.from_numpy(x), torch.from_numpy(y)


def _walk(training: Training) -> dict[str, Storages]:
    """Address and bytes of every storage of each band, each storage once."""
    taken: set[int] = set()
    found: dict[str, Storages] = {}
    for band, held in (training.bands() | {STATE: tensors(training.adam.state)}).items():
        storages = [_local(tensor).untyped_storage() for tensor in held if tensor is not None]
        found[band] = {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() and s.data_ptr() not in taken}
        taken |= found[band].keys()
    return found


def _local(tensor: Tensor) -> Tensor:
    """A DTensor's own part, any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _array(tensor: Tensor) -> Array:
    """A copy for NumPy, bfloat16 as ml_dtypes has it."""
    flat = tensor.detach().cpu().contiguous()
    if flat.dtype == torch.bfloat16:
        bits: Array = flat.view(torch.int16).numpy().view(BF16)
        return bits.copy()
    return np.array(flat.numpy())


@contextmanager
def _marked(name: str) -> Iterator[None]:
    """Leave a mark in the profiler's log, from here to the block's end."""
    with autograd.record_function(MARK + name):
        yield
