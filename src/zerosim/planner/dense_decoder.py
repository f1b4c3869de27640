"""Whether a torch module is a dense decoder of text: the one kind of model that published times are of.

Owns the signs by which it is told: the task that transformers' class is for, attention in every block, and no
experts. What shows none of them is taken for something else. Must not know configurations nor times.
"""

from __future__ import annotations

from typing import Any

_TASKS = ("ForCausalLM", "LMHeadModel")  # how transformers' classes for it end


def dense_decoder(module: Any, wrap: Any) -> bool:
    """Whether ``module``, whose blocks are instances of the classes ``wrap``, is one."""
    kinds = wrap if isinstance(wrap, tuple) else (wrap,)
    if not type(module).__name__.endswith(_TASKS) or not all(isinstance(kind, type) for kind in kinds):
        return False
    if any(
        "expert" in type(each).__name__.lower() or path.endswith("experts") for path, each in module.named_modules()
    ):
        return False
    blocks = [each for each in module.modules() if isinstance(each, kinds)]
    return bool(blocks) and all(_attends(each) for each in blocks)


def _attends(block: Any) -> bool:
    """Whether it has attention over all tokens: what is called linear attention is a recurrence."""
    names = [type(each).__name__.lower() for each in block.modules()]
    return any("attention" in name and "linear" not in name for name in names)
