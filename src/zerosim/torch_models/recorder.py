"""Recording what a torch module does around its units, operation by operation, while it runs.

Owns the mode that sees which functions are called, above autograd, so that they can be called
again. Says which module does what cannot be repeated. Must not know layers or ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from zerosim.torch_models.calls import Run, answered
from zerosim.torch_models.program import PLAIN, Kind, Known, Op, Program, Ref, Store
from zerosim.torch_models.slots import slots_of
from zerosim.torch_models.trees import map_tensors, tensors
from zerosim.torch_models.units import Unit
from zerosim.torch_models.writes import Writes

_FACTS = """
    shape dtype device layout ndim requires_grad is_leaf is_meta is_cuda is_sparse is_quantized is_nested itemsize
    nbytes grad_fn is_cpu is_mps is_xpu name size dim numel nelement stride storage_offset element_size is_contiguous
    is_floating_point is_complex is_signed is_conj is_neg is_inference is_same_size get_device type __len__ ndimension
    broadcast_shapes result_type promote_types can_cast _is_view is_pinned is_shared is_coalesced dim_order
    _set_grad_enabled is_tensor is_storage is_distributed
"""
"""Functions and properties that say nothing of a tensor's values."""
_REFUSED = """
    register_hook retain_grad backward grad requires_grad_ set_ resize_ resize_as_ share_memory_ is_set_to detach_
    register_post_accumulate_grad_hook swap_tensors _make_subclass as_subclass __deepcopy__
"""
"""Those that change how gradients go, or whose memory a tensor is on."""


class Unrepeatable(Exception):
    """The module at ``path`` does something between its units that cannot be done again by a list of operations."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(what)
        self.path, self.what = path, what


class Refused(ValueError):
    """A module does what cannot be trained here."""


def record(
    module: torch.nn.Module,
    units: Sequence[Unit],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fresh: Collection[int] = (),
) -> Program:
    """The forward of ``module``, whose ``units`` are called as they are, on these arguments; it is run once.

    Inputs whose numbers are in ``fresh`` are copied first. Unrepeatable if the module does
    something that operations, called again, would not do.
    """
    return _Recorder(module, args, kwargs).run(units, args, kwargs, fresh)


class _Recorder(TorchFunctionMode):  # type: ignore[misc]
    """One forward, while it is recorded."""

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._root = module
        self._ops: list[Op] = []
        self._calls = 0
        self._tensors: list[Known] = []
        self._stores: list[Store] = []
        self._index: dict[int, int] = {}  # of each tensor, by its id
        self._alive: list[torch.Tensor] = []  # so that no tensor's id is taken by another before the run is over
        self._memory: dict[int, int] = {}  # the store, by the storage
        self._assigned: dict[str, int | None] = {}
        self._inside = False  # an operation, or a unit
        self._path = ""  # of the innermost container that runs
        self._writes = Writes()
        for tensor in tensors((args, kwargs)):
            self._store(tensor, Kind.INPUT, input=len(self._stores))
            self._add(tensor, Kind.INPUT)
        self._slots = slots_of(module)
        for tensor in (*module.parameters(), *module.buffers()):
            self._store(tensor, Kind.SLOT, slot=self._slots[id(tensor)])
            self._add(tensor, Kind.SLOT)

    def run(
        self, units: Sequence[Unit], args: tuple[Any, ...], kwargs: dict[str, Any], fresh: Collection[int]
    ) -> Program:
        """The program, once the module has run."""
        module = self._root
        modules = [(unit, module.get_submodule(unit.path)) for unit in units]
        inside = {id(each) for _, unit in modules for each in unit.modules()}
        around = [(path, each) for path, each in module.named_modules() if id(each) not in inside]
        buffers = [(each, name, own) for _, each in around for name, own in each._buffers.items()]
        with (
            torch.enable_grad(),
            self._writes,
            answered(modules, self._call),
            answered(around, self._enter),
            self,
        ):
            args, kwargs = map_tensors(
                lambda given: given.clone() if self._index[id(given)] in fresh else given, (args, kwargs)
            )
            output = module(*args, **kwargs)
        leaves, spec = tree_flatten(shown(output))
        returned = [self._ref(leaf) if isinstance(leaf, torch.Tensor) else _kept(leaf) for leaf in leaves]
        for owner, name, own in buffers:
            if self._replaced(owner, name, own):
                self._assigned[self._slots[id(own)].name] = self._ref(owner._buffers[name]).index
        return Program(self._ops, self._tensors, self._stores, self._writes.seen, returned, spec, self._assigned)

    @staticmethod
    def _replaced(owner: torch.nn.Module, name: str, own: torch.Tensor | None) -> bool:
        """Whether a buffer has been assigned anew. ValueError if the new one could not take its place."""
        now = owner._buffers.get(name)
        if now is own or own is None:
            return False
        if now is None or now.shape != own.shape or now.dtype != own.dtype or now.requires_grad:
            raise Refused(
                f"TorchModel(module): the forward pass replaces the buffer {name} with something else than a tensor "
                f"like it, without gradients. Detach it, and keep its shape and dtype."
            )
        return True

    # -- what is called

    def _enter(self, path: str, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self._path = self._path, path
        try:
            return run(*args, **kwargs)
        finally:
            self._path = before

    def _call(self, unit: Unit, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:  # by another unit
            return run(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            raise Unrepeatable(self._path, "calls its modules under autocast")
        self._check_checkpoints(unit.name)
        self._inside = True
        try:
            return self._unit(unit, run, args, kwargs)
        finally:
            self._inside = False

    def _unit(self, unit: Unit, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        module = self._root.get_submodule(unit.path)
        buffers = [(each, name, own) for each in module.modules() for name, own in each._buffers.items()]
        leaves, results = self._operation(None, unit, run, args, kwargs)
        for owner, name, own in buffers:
            if self._replaced(owner, name, own):
                own.copy_(owner._buffers[name])
                owner._buffers[name] = own
                self._assigned[self._slots[id(own)].name] = None
        odd = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, str, type(None)))), None)
        if odd is not None and unit.path:
            raise Unrepeatable(self._path, f"gets from {unit.name} a {type(odd).__name__}, which is no tensor")
        return results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unit = self._ops[-1].unit if self._inside and self._ops else None
        self._check_checkpoints(unit.name if unit else self._path or type(self._root).__name__)
        if self._inside or torch._C._functorch.maybe_current_level() is not None:
            return func(*args, **kwargs)
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__ if name == "__get__" else "assigning " + func.__self__.__name__
        if name in _REFUSED.split() or name.startswith("assigning "):
            raise Unrepeatable(self._path, f"uses {name} between its modules")
        if name in _FACTS.split():
            return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            raise Unrepeatable(self._path, "computes under autocast between its modules")
        leaves, results = self._operation(func, None, func, args, kwargs)
        op = self._ops[-1]
        if not op.gives and not self._writes.wrote(len(self._ops) - 1) and name != "__setitem__":
            raise Unrepeatable(self._path, f"goes by the values of tensors ({name}) between its modules")
        if any(not isinstance(leaf, (torch.Tensor, type(None))) for leaf in leaves):
            raise Unrepeatable(self._path, f"uses what {name} returns besides tensors")
        return results

    @staticmethod
    def _check_checkpoints(name: str) -> None:
        """Refuse what takes saved tensors into its own hands: what it keeps, nobody would count."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Refused(
                f"TorchModel(module): {name} runs under hooks for saved tensors, as in torch.utils.checkpoint, so that "
                f"what it keeps would not be counted. Turn that off, and pass checkpoint='full'."
            )

    def _operation(self, func: Any, unit: Unit | None, run: Run, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        flat, spec = tree_flatten((args, kwargs))
        op = Op(func, unit, [self._operand(leaf, unit) for leaf in flat], spec, torch.is_grad_enabled())
        self._ops.append(op)
        self._writes.now, self._writes.call, self._writes.trace = len(self._ops) - 1, self._calls, []
        answer = run(*args, **kwargs)
        leaves, op.trace = tree_flatten(answer)[0], tuple(self._writes.trace)
        op.results = [self._made(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        self._refresh(op)
        return leaves, answer

    def _operand(self, leaf: Any, unit: Unit | None) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._ref(leaf)
        if isinstance(leaf, slice):
            plain = all(isinstance(each, (int, type(None))) for each in (leaf.start, leaf.stop, leaf.step))
        else:
            plain = isinstance(leaf, (*PLAIN, np.generic, FunctionType, BuiltinFunctionType))
        if not plain:
            whom = f"calls {unit.name}" if unit else "calls a function"
            raise Unrepeatable(self._path, f"{whom} with a {type(leaf).__name__}, which may change from call to call")
        return leaf

    # -- tensors and their memory

    def _ref(self, tensor: torch.Tensor) -> Ref:
        index = self._index.get(id(tensor))
        if index is None:
            if tensor.grad_fn is not None:
                raise Unrepeatable(
                    self._path, "uses a tensor whose history was not seen, as of torch.autograd.Function"
                )
            if tensor.layout is not torch.strided:
                raise Unrepeatable(self._path, f"uses a tensor whose layout is {tensor.layout}")
            if tensor.untyped_storage()._cdata not in self._memory:
                self._store(tensor, Kind.CONSTANT, constant=tensor.detach())
            index = self._add(tensor, Kind.CONSTANT)
        elif self._tensors[index].requires_grad != tensor.requires_grad:
            raise Unrepeatable(self._path, "uses a tensor whose history has changed, as by torch.autograd.Function")
        return Ref(index)

    def _made(self, tensor: torch.Tensor) -> int:
        if (index := self._index.get(id(tensor))) is not None:
            return index
        if tensor.layout is not torch.strided:
            raise Unrepeatable(self._path, f"has tensors whose layout is {tensor.layout} between its modules")
        if tensor.untyped_storage()._cdata not in self._memory:
            self._store(tensor, Kind.MADE, op=len(self._ops) - 1)
        return self._add(tensor, Kind.MADE)

    def _store(self, tensor: torch.Tensor, kind: Kind, **origin: Any) -> None:
        storage = tensor.untyped_storage()
        self._memory[storage._cdata] = len(self._stores)
        if kind is not Kind.MADE:
            self._writes.given[storage._cdata] = len(self._stores)
        self._stores.append(Store(kind, storage.nbytes(), tensor.dtype, **origin))

    def _add(self, tensor: torch.Tensor, kind: Kind) -> int:
        self._alive.append(tensor)
        self._index[id(tensor)] = len(self._tensors)
        store = self._memory[tensor.untyped_storage()._cdata]
        self._tensors.append(
            Known(
                kind, store, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(),
                tensor.requires_grad, len(self._ops) - 1,
            )
        )  # fmt: skip
        return len(self._tensors) - 1

    def _refresh(self, op: Op) -> None:
        """An operation in place may change how its tensor lies, and what of that memory has gradients."""
        if not self._writes.wrote(len(self._ops) - 1):
            return
        for tensor in self._alive:
            known = self._tensors[self._index[id(tensor)]]
            known.requires_grad = tensor.requires_grad
            known.offset, known.size, known.stride = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def shown(output: Any) -> Any:
    """What a module returns, or, of an object in which torch sees no tensors, its logits."""
    logits = getattr(output, "logits", None)
    return logits if not tensors(output) and isinstance(logits, torch.Tensor) else output


def _kept(leaf: Any) -> Any:
    return leaf if isinstance(leaf, PLAIN) else None
