"""What a run of torch operations does: its FLOPs, its operations, and how much is alive at once.

Owns the dispatch modes. Must not know units, nor what is kept for a backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zerosim.torch_models.trees import operands

_aten: Any = torch.ops.aten
_FUSED_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu

SELECTIVE = (_aten.mm.default, _aten.addmm.default)
"""The matrix products of linear layers, of which selective checkpointing keeps every other one."""
SELECTIVE_ALWAYS = (
    _FUSED_ATTENTION.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""Fused attention, whose results it always keeps."""


def _grouped_flops(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Products of groups: the axis that is cut into them is given whole, so that all of it is multiplied once."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return int(2 * groups * a[-2] * a[-1] * b[-1])


class Fused(TorchFunctionMode):  # type: ignore[misc]
    """On the meta device attention and dropout are composed of small steps: take the fused kernels of other devices.

    Fused attention keeps no scores, and draws what it drops again instead of keeping it; fused
    dropout keeps a byte for each element. A CPU has the former, where nothing is dropped, and not the latter.
    """

    def __init__(self, kernels: str = "gpu") -> None:
        super().__init__()
        self._gpu = kernels == "gpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = None
        if func is torch.nn.functional.scaled_dot_product_attention:
            answer = _fused(*args, **kwargs, drops=self._gpu)
        if func is torch.nn.functional.dropout and self._gpu:
            answer = _dropped(*args, **kwargs)
        if func is torch.rand and args in (((),), ([],)) and "device" not in kwargs:
            answer = torch.ones((), device="cpu")  # a number that a layer is dropped by: it is not
        return func(*args, **kwargs) if answer is None else answer


def _dropped(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not (training and 0 < p < 1 and input.is_meta) or inplace:
        return None
    return torch.native_dropout(input, p, True)[0]


def _fused(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, drops: bool = True,
) -> Any:  # fmt: skip
    plain = query.dim() == key.dim() == value.dim() == 4 and query.size(-1) == value.size(-1)
    if dropout_p and not drops:
        return None
    if not plain or not query.is_meta or (attn_mask is not None and attn_mask.requires_grad):
        return None
    if query.size(1) != key.size(1) and not enable_gqa:
        return None  # an error, in torch's own words
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    return _FUSED_ATTENTION(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


# The rules of torch's own counter, and those of some operations that it lacks.
_RULES = FlopCounterMode(
    display=False,
    custom_mapping={
        _aten._grouped_mm: lambda a, b, *_, **__: _grouped_flops(a, b),
        _FUSED_ATTENTION: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(grad, query, key, value)
        ),
    },
).flop_registry


class Flops(TorchDispatchMode):  # type: ignore[misc]
    """Counts FLOPs by the rules of torch's counter, operation by operation, without its detours."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.read: Callable[[torch.Tensor], object] | None = None
        """Told of each tensor that an operation reads."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to exclude it from being compiled would load the compiler: seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.read is not None:
            for tensor in operands((*args, *kwargs.values())):
                self.read(tensor)
        out = func(*args, **kwargs)
        if (rule := _RULES.get(func._overloadpacket)) is not None:
            self.total += rule(*args, **kwargs, out_val=out)
        return out


@contextmanager
def counting(first: bool) -> Iterator[Callable[[], int]]:
    """Count FLOPs within the block, of the first rank alone: what the others do is the same, or less."""
    if not first:
        yield lambda: 0
        return
    with Flops() as flops:
        yield lambda: flops.total


class Watch(Flops):
    """Also follows the storages that come up within the block, the bytes alive at most, and which operations ran.

    ``there`` are tensors that exist before. ``selective`` says to hold on to what selective
    checkpointing keeps.
    """

    def __init__(self, there: Iterable[torch.Tensor], *, selective: bool = False) -> None:
        super().__init__()
        self.now = self.most = 0
        self.operations: list[Any] = []
        self.chosen: list[torch.Tensor] = []
        self.chosen_flops = 0
        self.selective, self._products = selective, 0
        self._known: dict[int, Any] = {}
        for tensor in there:
            self._follow(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.total
        out = super().__torch_dispatch__(func, types, args, kwargs)
        made = operands((out,))
        given = operands((*args, *(kwargs or {}).values()))
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and not any(storage is each.untyped_storage() for each in given):
                self._follow(tensor, storage.nbytes())
        self.operations.append((func, *((tensor.shape, tensor.dtype) for tensor in made)))
        if self.selective and self._chooses(func):
            self.chosen += made
            self.chosen_flops += self.total - before
        return out

    def _chooses(self, func: Any) -> bool:
        if func in SELECTIVE:
            self._products += 1
            return self._products % 2 == 1
        return func in SELECTIVE_ALWAYS

    def _follow(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.now += nbytes
        self.most = max(self.most, self.now)

        def gone(_: Any) -> None:
            self.now -= nbytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
